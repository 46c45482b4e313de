//! Bodies of requests: sequences of operations.

use super::Request;
use crate::codec::{Field, ProtocolError, Reader};
use crate::limits::PATH_BYTES_MAX;
use crate::list::{List, Listed};
use smallvec::SmallVec;

/// Iterates over the operations of a request's body. Errors are an unknown tag, a truncated field, a
/// path longer than [`PATH_BYTES_MAX`] or with a zero byte, or too many operations.
pub type Operations<'a> = List<'a, Request<'a>>;

impl<'a> Listed<'a> for Request<'a> {
    const TOO_MANY: &'static str = "too many operations in one request";

    #[inline(always)]
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        let request = Self::decode(reader)?;
        for path in request.paths() {
            if path.len() > PATH_BYTES_MAX {
                return Err(reader.error("path longer than the limit"));
            }
            if has_zero(path) {
                return Err(reader.error("zero byte in a path"));
            }
        }
        Ok(request)
    }

    fn last(&self) -> Option<&'static str> {
        None
    }
}

/// Returns true if one of the bytes is zero.
fn has_zero(bytes: &[u8]) -> bool {
    const ONES: u64 = u64::MAX / 255;
    let (words, rest) = bytes.as_chunks::<8>();
    // Subtracting one from each byte sets a highest bit that was clear only if that byte is zero, or if a
    // lower byte is zero and borrows from it.
    let is_in = |word: &[u8; 8]| {
        let word = u64::from_le_bytes(*word);
        word.wrapping_sub(ONES) & !word & ONES << 7 != 0
    };
    words.iter().any(is_in) || rest.contains(&0)
}

/// Decodes all operations of a request's body.
///
/// # Errors
/// As [`Operations`]; or a body without operations.
pub fn parse_compound(body: &[u8]) -> Result<SmallVec<[Request<'_>; 4]>, ProtocolError> {
    let requests = Operations::of(body).collect::<Result<SmallVec<_>, _>>()?;
    if requests.is_empty() {
        return Err(Reader::new(body).error("request without operations"));
    }
    Ok(requests)
}

/// Returns true if all operations of a legal body may be sent again to a server that remembers nothing, see
/// [`Request::repeatable`].
#[must_use]
pub fn is_repeatable(body: &[u8]) -> bool {
    Operations::of(body).all(|request| request.is_ok_and(|request| request.repeatable()))
}

/// Decodes the body of a disk request, which holds only one operation.
///
/// # Errors
/// An unknown tag or a truncated field; or an operation that is not about disks, or more bytes after it.
pub fn parse_disk_request(body: &[u8]) -> Result<Request<'_>, ProtocolError> {
    let mut reader = Reader::new(body);
    let request = Request::decode(&mut reader)?;
    if !reader.is_empty() || !Request::is_disk_tag(request.tag()) {
        return Err(reader.error("more than one operation on a disk in a request"));
    }
    Ok(request)
}

/// Encodes operations as a request's body.
#[must_use]
pub fn encode_compound(requests: &[Request<'_>]) -> Vec<u8> {
    let mut body = Vec::with_capacity(64 * requests.len());
    append_compound(requests, &mut body);
    body
}

/// Appends operations, encoded as a request's body.
pub fn append_compound(requests: &[Request<'_>], body: &mut Vec<u8>) {
    for request in requests {
        request.encode(body);
    }
}

impl Request<'_> {
    /// Returns the paths and names of an operation on files; empty for none.
    fn paths(&self) -> [&[u8]; 2] {
        match self {
            Self::Open { path, .. } | Self::Stat { path, .. } | Self::SetAttr { path, .. } => {
                [path, b""]
            }
            Self::MakeDir { path, .. } | Self::MakeNode { path, .. } => [path, b""],
            Self::Symlink { path, target, .. } => [path, target],
            Self::ReadLink { path, .. } | Self::ReadPath { path, .. } => [path, b""],
            Self::Unlink { path, .. } => [path, b""],
            Self::Link { path, new_path, .. } | Self::Rename { path, new_path, .. } => {
                [path, new_path]
            }
            Self::GetXattr { path, name, .. } | Self::SetXattr { path, name, .. } => [path, name],
            Self::ListXattr { path, .. } | Self::Access { path, .. } => [path, b""],
            Self::RemoveXattr { path, name, .. } => [path, name],
            Self::Reclaim { export, path, .. } => [export, path],
            Self::Attach { name } => [name, b""],
            _ => [b"", b""],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::has_zero;

    #[test]
    fn a_zero_is_found_wherever_it_stands() {
        for length in 0..40 {
            for other in [1, 0x7f, 0x80, 0x81, 0xff] {
                let mut bytes = vec![other; length];
                assert!(!has_zero(&bytes), "{length} times {other}");
                for at in 0..length {
                    bytes[at] = 0;
                    assert!(has_zero(&bytes), "at {at} of {length} times {other}");
                    bytes[at] = other;
                }
            }
        }
    }
}
