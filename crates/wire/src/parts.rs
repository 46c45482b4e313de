//! Parts of a file that one [`crate::Request::WriteParts`] writes: the list in its body, which says where the
//! bytes of its payload belong.
//!
//! | bytes | field |
//! |---|---|
//! | 8 | offset in the file |
//! | 4 | length; the payload holds the parts' bytes one after another |

use crate::codec::{Field, ProtocolError, Reader};
use crate::items::{Item, Items};
use crate::limits::{INLINE_BYTES_MAX, PARTS_MAX};

/// A range of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(clippy::exhaustive_structs)] // a range has no other fields
pub struct Part {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
}

impl Part {
    /// Bytes of one part in the list.
    const ENCODED_BYTES: usize = 12;

    /// Appends the encoding to a list.
    pub fn encode(&self, list: &mut Vec<u8>) {
        self.offset.encode(list);
        self.length.encode(list);
    }
}

impl<'a> Item<'a> for Part {
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        let part = Self { offset: u64::decode(reader)?, length: u32::decode(reader)? };
        match part.offset.checked_add(part.length.into()) {
            Some(end) if i64::try_from(end).is_ok() => Ok(part),
            _ => Err(reader.error("part of a file beyond the largest offset")),
        }
    }
}

/// Returns true if parts of these lengths fit into one request.
pub fn fit_together(lengths: impl ExactSizeIterator<Item = usize>) -> bool {
    lengths.len() <= PARTS_MAX && lengths.sum::<usize>() <= INLINE_BYTES_MAX
}

/// Checks a list and returns the number of bytes that its parts have together, at most [`INLINE_BYTES_MAX`].
///
/// # Errors
/// More than [`PARTS_MAX`] parts or too many bytes; a truncated part, or one beyond the largest offset.
pub fn bytes_of(list: &[u8]) -> Result<u32, ProtocolError> {
    let reader = Reader::new(list);
    if list.len() > PARTS_MAX * Part::ENCODED_BYTES {
        return Err(reader.error("too many parts in a write"));
    }
    let mut bytes = 0u64;
    for part in Items::<Part>::new(list) {
        bytes += u64::from(part?.length);
    }
    match u32::try_from(bytes) {
        Ok(bytes) if bytes as usize <= INLINE_BYTES_MAX => Ok(bytes),
        _ => Err(reader.error("parts of a write longer than its payload may be")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(parts: &[(u64, u32)]) -> Vec<u8> {
        let mut list = Vec::new();
        for &(offset, length) in parts {
            Part { offset, length }.encode(&mut list);
        }
        list
    }

    #[test]
    fn a_list_keeps_its_order_and_its_limits() {
        let parts = [(7, 3), (0, 0), (i64::MAX as u64 - 5, 5)];
        let encoded = list(&parts);
        assert_eq!(bytes_of(&encoded), Ok(8));
        let read: Vec<_> =
            Items::<Part>::new(&encoded).map(|part| part.map(|p| (p.offset, p.length))).collect();
        assert_eq!(read, parts.map(Ok));
        assert_eq!(bytes_of(&[]), Ok(0));
        for wrong in [
            encoded[..35].to_vec(),
            list(&[(i64::MAX as u64 - 5, 6)]),
            list(&[(u64::MAX, 1)]),
            list(&[(0, INLINE_BYTES_MAX as u32), (0, 1)]),
            list(&[(0, u32::MAX), (0, u32::MAX)]),
            list(&[(0, 0); PARTS_MAX + 1]),
        ] {
            assert!(bytes_of(&wrong).is_err(), "{} bytes", wrong.len());
        }
        assert_eq!(bytes_of(&list(&[(0, 16); PARTS_MAX])), Ok(16 * PARTS_MAX as u32));
        assert_eq!(bytes_of(&list(&[(0, INLINE_BYTES_MAX as u32)])), Ok(INLINE_BYTES_MAX as u32));
    }
}
