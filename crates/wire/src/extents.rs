//! Location of lent data: the list at the end of the body of a reply with
//! [`crate::header::reply_flag::LENT`].
//!
//! | bytes | field |
//! |---|---|
//! | 4 | number of the memory, counted from zero in the order handed over on this lane |
//! | 12 each | extents, in the order of the data: offset in the memory, length |

use crate::codec::{Field, ProtocolError, Reader};
use crate::limits::LENT_EXTENTS_MAX;
use smallvec::SmallVec;

/// Encoded offset of a hole, which reads as zeroes.
const HOLE: u64 = u64::MAX;

/// A run of lent bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First byte in the memory; `None` for a hole, which reads as zeroes.
    pub offset: Option<u64>,
    /// Length in bytes; not zero.
    pub length: u32,
}

/// Extents of lent data.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extents {
    /// Number of the memory; meaningless if all extents are holes.
    pub memory: u32,
    /// Runs of bytes, in the order of the data.
    pub extents: SmallVec<[Extent; 2]>,
}

impl Extents {
    /// Appends a run, or extends the last run if the new one continues it.
    pub fn push(&mut self, offset: Option<u64>, length: u32) {
        if let Some(last) = self.extents.last_mut() {
            let next = last.offset.and_then(|start| start.checked_add(last.length.into()));
            let follows = match offset {
                None => last.offset.is_none(),
                Some(_) => next == offset,
            };
            if follows && let Some(sum) = last.length.checked_add(length) {
                last.length = sum;
                return;
            }
        }
        self.extents.push(Extent { offset, length });
    }

    /// Returns the total length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.length)).sum()
    }

    /// Appends the encoding to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.memory.encode(out);
        for extent in &self.extents {
            extent.offset.unwrap_or(HOLE).encode(out);
            extent.length.encode(out);
        }
    }

    /// Decodes a list that fills `bytes`.
    ///
    /// # Errors
    /// A truncated field, an extent of length zero or beyond the largest offset, or too many extents.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes);
        let mut list = Self { memory: u32::decode(&mut reader)?, extents: SmallVec::new() };
        while !reader.is_empty() {
            if list.extents.len() == LENT_EXTENTS_MAX {
                return Err(reader.error("too many extents in one reply"));
            }
            let (offset, length) = (u64::decode(&mut reader)?, u32::decode(&mut reader)?);
            let offset = (offset != HOLE).then_some(offset);
            let possible = offset.is_none_or(|start| start.checked_add(length.into()).is_some());
            if length == 0 || !possible {
                return Err(reader.error("impossible extent"));
            }
            list.extents.push(Extent { offset, length });
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use smallvec::smallvec;

    #[test]
    fn neighbours_become_one() {
        let mut list = Extents::default();
        for (offset, length) in [
            (Some(4096), 10),
            (Some(4106), 5),
            (None, 1),
            (None, 2),
            (Some(4111), 1),
            (Some(4111), 1),
            (Some(4112), u32::MAX),
        ] {
            list.push(offset, length);
        }
        let found: Vec<_> = list.extents.iter().map(|e| (e.offset, e.length)).collect();
        let expected =
            [(Some(4096), 15), (None, 3), (Some(4111), 1), (Some(4111), 1), (Some(4112), u32::MAX)];
        assert_eq!(found, expected);
        assert_eq!(list.bytes(), 20 + u64::from(u32::MAX));
    }

    #[test]
    fn impossible_lists_are_refused() {
        let mut list =
            Extents { memory: 0, extents: smallvec![Extent { offset: Some(1), length: 0 }] };
        let encoded = |list: &Extents| {
            let mut bytes = Vec::new();
            list.encode(&mut bytes);
            bytes
        };
        assert!(Extents::parse(&encoded(&list)).is_err(), "no bytes");
        list.extents[0] = Extent { offset: Some(u64::MAX - 1), length: 5 };
        assert!(Extents::parse(&encoded(&list)).is_err(), "beyond the end");
        list.extents = smallvec![Extent { offset: None, length: 1 }; LENT_EXTENTS_MAX + 1];
        assert!(Extents::parse(&encoded(&list)).is_err(), "too many");
        list.extents.pop();
        assert_eq!(Extents::parse(&encoded(&list)).unwrap(), list);
        assert!(Extents::parse(&[0; 3]).is_err() && Extents::parse(&[0; 9]).is_err(), "cut");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_what_parses_is_encoded_the_same(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            if let Ok(list) = Extents::parse(&bytes) {
                let mut again = Vec::new();
                list.encode(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
