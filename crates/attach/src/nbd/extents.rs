//! Asks a server which parts of a disk are allocated, before any other request of a connection.

use super::bytes::{be16, be32, be64};
use super::source::Extent;
use crate::Error;
use std::fmt::Display;
use std::io::{Read, Write};
use towline_nbd::constants::{
    REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command,
};

/// Longest range of a single request, a multiple of every block size.
const RANGE_BYTES_MAX: u64 = 1 << 31;
/// Longest chunk that is accepted.
const CHUNK_BYTES_MAX: usize = 64 << 20;
/// Maximum number of extents. With more, the disk is read as if the server did not tell.
const EXTENTS_MAX: usize = 1 << 22;
/// Maximum number of chunks in one reply.
const CHUNKS_MAX: usize = 1000;

const HOLE: u32 = 1;
const ZERO: u32 = 2;

/// Returns the extents of a disk of `size` bytes in order, each of another kind than its neighbours; `None` if
/// the server does not tell.
///
/// # Errors
/// If the connection is lost or the answer is invalid; `what` names the server.
pub(super) fn ask<S: Read + Write>(
    stream: &mut S,
    context: u32,
    size: u64,
    what: &dyn Display,
) -> Result<Option<Vec<Extent>>, Error> {
    let mut asking = Asking { stream, context, found: Vec::new(), what };
    let mut at = 0;
    while at < size {
        let length = RANGE_BYTES_MAX.min(size - at);
        match asking.range(at, length)? {
            0 => return Ok(None),
            told => at += told,
        }
        if asking.found.len() > EXTENTS_MAX {
            return Ok(None);
        }
    }
    Ok(Some(asking.found))
}

struct Asking<'a, S> {
    stream: &'a mut S,
    context: u32,
    found: Vec<Extent>,
    what: &'a dyn Display,
}

impl<S: Read + Write> Asking<'_, S> {
    fn read(&mut self, length: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).map_err(Error::system(self.what))?;
        Ok(bytes)
    }

    /// Asks for one range. Returns how many bytes of it the answer covers, 0 if the server refuses.
    fn range(&mut self, offset: u64, length: u64) -> Result<u64, Error> {
        // Only one request is under way, so its offset serves as the cookie.
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command::BLOCK_STATUS.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend((length as u32).to_be_bytes());
        self.stream.write_all(&request).map_err(Error::system(self.what))?;
        let (mut told, mut refused) = (0, false);
        for _ in 0..CHUNKS_MAX {
            let mut head = self.read(16)?;
            match be32(&head) {
                SIMPLE_REPLY_MAGIC if be64(&head[8..]) == offset && be32(&head[4..]) != 0 => {
                    return Ok(0);
                }
                STRUCTURED_REPLY_MAGIC => {}
                _ => return Err(Error::Protocol("expected a reply header")),
            }
            head.extend(self.read(4)?);
            let (flags, kind) = (be16(&head[4..]), be16(&head[6..]));
            let length_told = be32(&head[16..]) as usize;
            if be64(&head[8..]) != offset || length_told > CHUNK_BYTES_MAX {
                return Err(Error::Protocol("malformed reply chunk"));
            }
            let body = self.read(length_told)?;
            match (kind, body.len()) {
                (chunk::NONE, 0) => {}
                (chunk::BLOCK_STATUS, 12..) if body.len() % 8 == 4 => {
                    if be32(&body) == self.context && told == 0 {
                        told = self.take(&body[4..], length);
                    }
                }
                (kind, _) if kind & 1 << 15 != 0 => refused = true,
                _ => return Err(Error::Protocol("malformed reply chunk")),
            }
            if flags & chunk::FLAG_DONE != 0 {
                return Ok(if refused { 0 } else { told });
            }
        }
        Err(Error::Protocol("too many replies to one request"))
    }

    /// Appends the extents of a range. The last one may reach beyond the range.
    fn take(&mut self, list: &[u8], length: u64) -> u64 {
        let mut told = 0;
        for extent in list.chunks_exact(8) {
            let flags = be32(&extent[4..]);
            let part = u64::from(be32(extent)).min(length - told);
            if part == 0 {
                break;
            }
            told += part;
            let next = Extent { length: part, hole: flags & HOLE != 0, zero: flags & ZERO != 0 };
            match self.found.last_mut() {
                Some(last) if (last.hole, last.zero) == (next.hole, next.zero) => {
                    last.length += part;
                }
                _ => self.found.push(next),
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// A server that sends a fixed text, whatever it is asked.
    struct Says(Cursor<Vec<u8>>);

    impl Read for Says {
        fn read(&mut self, target: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(target)
        }
    }

    impl Write for Says {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn chunk(flags: u16, kind: u16, cookie: u64, body: &[u32]) -> Vec<u8> {
        let mut out = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        out.extend((body.len() as u32 * 4).to_be_bytes());
        out.extend(body.iter().flat_map(|word| word.to_be_bytes()));
        out
    }

    fn told(said: Vec<u8>, size: u64) -> Result<Option<Vec<Extent>>, Error> {
        ask(&mut Says(Cursor::new(said)), 7, size, &"test")
    }

    #[test]
    fn extents_are_joined_and_cut() {
        let status = chunk::BLOCK_STATUS;
        // The first answer is short, the second reaches beyond the end; a chunk of another context is between.
        let said = [
            chunk(0, status, 0, &[7, 100, 0, 50, 0]),
            chunk(1, status, 0, &[8, 150, 3]),
            chunk(1, status, 150, &[7, 50, 0, 5000, 3]),
        ];
        let expected = [(200, false), (100, true)].map(|(length, zeroes)| Extent {
            length,
            hole: zeroes,
            zero: zeroes,
        });
        assert_eq!(told(said.concat(), 300).unwrap().unwrap(), expected);
    }

    #[test]
    fn who_does_not_tell_is_believed_and_nonsense_is_not() {
        let status = chunk::BLOCK_STATUS;
        assert_eq!(told(chunk(1, chunk::ERROR, 0, &[22, 0]), 300).unwrap(), None);
        assert_eq!(told(chunk(1, chunk::NONE, 0, &[]), 300).unwrap(), None);
        assert_eq!(told(chunk(1, status, 0, &[7, 0, 0]), 300).unwrap(), None);
        let simple = |error: u32| {
            let words = [SIMPLE_REPLY_MAGIC, error, 0, 0];
            words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>()
        };
        assert_eq!(told(simple(95), 300).unwrap(), None);
        for said in [
            simple(0),
            chunk(1, status, 5, &[7, 300, 0]),
            chunk(1, status, 0, &[7, 300]),
            chunk(1, chunk::OFFSET_DATA, 0, &[0, 0, 1]),
            chunk(0, status, 0, &[7, 300, 0]),
            vec![0; 40],
        ] {
            assert!(told(said.clone(), 300).is_err(), "{said:?}");
        }
    }
}
