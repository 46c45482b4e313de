//! Events of watched files, as encoded in the payload of a reply to `Events`.
//!
//! Each event: handle of the watched file `u64`, mask `u32` (bits as in `inotify(7)`), cookie `u32`,
//! name as a byte string.

use crate::codec::{Field, ProtocolError, Reader};
use crate::items::{Item, Items, is_name};

/// The file was read.
pub const ACCESS: u32 = 1;
/// The file was written or truncated.
pub const MODIFY: u32 = 2;
/// The attributes or the number of links changed.
pub const ATTRIB: u32 = 4;
/// A file that was open for writing was closed.
pub const CLOSE_WRITE: u32 = 8;
/// A file that was not open for writing was closed.
pub const CLOSE_NOWRITE: u32 = 16;
/// The file was opened.
pub const OPEN: u32 = 32;
/// An entry was renamed: reported for its old name.
pub const MOVED_FROM: u32 = 64;
/// An entry was renamed: reported for its new name.
pub const MOVED_TO: u32 = 128;
/// An entry was created.
pub const CREATE: u32 = 256;
/// An entry was removed.
pub const DELETE: u32 = 512;
/// The watched file itself is gone.
pub const DELETE_SELF: u32 = 1024;
/// The watched file itself was moved.
pub const MOVE_SELF: u32 = 2048;
/// All events that a client can ask for.
pub const ALL: u32 = 4095;
/// The watch has ended because its file is gone.
pub const IGNORED: u32 = 0x8000;
/// The event is about a directory.
pub const ISDIR: u32 = 0x4000_0000;
/// All bits of which an event has at least one.
const TOLD: u32 = ALL | IGNORED;

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event<'a> {
    /// Handle of the watched file.
    pub handle: u64,
    /// What happened: at least one bit of [`ALL`] or [`IGNORED`], possibly with [`ISDIR`].
    pub mask: u32,
    /// Equal for both halves of a move; else zero.
    pub cookie: u32,
    /// Name in the watched directory; empty for the watched file itself.
    pub name: &'a [u8],
}

impl Event<'_> {
    /// Returns the size of the encoding in bytes.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        8 + 4 + 4 + 4 + self.name.len()
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.handle.encode(out);
        self.mask.encode(out);
        self.cookie.encode(out);
        self.name.encode(out);
    }
}

/// Iterates over the events of a payload.
pub type Events<'a> = Items<'a, Event<'a>>;

impl<'a> Item<'a> for Event<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        let handle = Field::decode(reader)?;
        let mask = Field::decode(reader)?;
        let cookie = Field::decode(reader)?;
        let name = <&[u8]>::decode(reader)?;
        if mask & TOLD == 0 || mask & !(TOLD | ISDIR) != 0 {
            return Err(reader.error("illegal bits in an event"));
        }
        if !is_name(name) {
            return Err(reader.error("illegal name in an event"));
        }
        Ok(Self { handle, mask, cookie, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::NAME_BYTES_MAX;

    const MADE: Event<'_> = Event { handle: 7, mask: CREATE | ISDIR, cookie: 0, name: b"made" };

    fn encoded(events: &[Event<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        events.iter().for_each(|event| event.encode(&mut bytes));
        bytes
    }

    #[test]
    fn the_encoding_is_as_documented() {
        let expected = b"\x07\0\0\0\0\0\0\0\0\x01\0\x40\0\0\0\0\x04\0\0\0made";
        assert_eq!(encoded(&[MADE]), expected);
        assert_eq!(MADE.encoded_bytes(), expected.len());
    }

    #[test]
    fn what_is_no_event_is_refused_and_ends_the_list() {
        let long = vec![b'n'; NAME_BYTES_MAX + 1];
        for wrong in [
            Event { mask: 0, ..MADE },
            Event { mask: ISDIR, ..MADE },
            Event { mask: CREATE | 0x4000, ..MADE },
            Event { name: b"a/b", ..MADE },
            Event { name: b"a\0", ..MADE },
            Event { name: &long, ..MADE },
        ] {
            let bytes = encoded(&[MADE, wrong, MADE]);
            let mut events = Events::new(&bytes);
            assert_eq!(events.next(), Some(Ok(MADE)));
            assert!(matches!(events.next(), Some(Err(_))), "{wrong:?}");
            assert_eq!(events.next(), None);
        }
        let whole = encoded(&[MADE]);
        for cut in 1..whole.len() {
            assert!(matches!(Events::new(&whole[..cut]).next(), Some(Err(_))), "cut at {cut}");
        }
    }
}
