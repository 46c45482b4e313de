//! The record of one request, as bytes that outlive the server.
//!
//! A record contains the number and the results of the operations done, and what the next operation was
//! about to do. It is little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | CRC-32C of all that follows, up to the end of the results |
//! | 4 | 4 | generation: of a slot's two records the newer one counts |
//! | 8 | 8 | secret of the session |
//! | 16 | 4 | sequence number of the request |
//! | 20 | 4 | CRC-32C of the request's body |
//! | 24 | 2 | bytes of results |
//! | 26 | 1 | operations done |
//! | 27 | 1 | flags |
//! | 28 | 4 | zero |
//! | 32 | 88 | what the next operation was about to do, see [`Intent`] |
//! | 120 | up to 512 | results of the operations done, as in the reply |

use towline_wire::Reply;
use towline_wire::limits::REPLAY_BYTES_MAX;

/// Size of the space for one record, in bytes.
pub(crate) const RECORD_BYTES: usize = 640;
/// Offset of a record's generation.
pub(crate) const GENERATION_AT: usize = 4;
const INTENT_AT: usize = 32;
const INTENT_BYTES: usize = 88;
/// Offset of a record's results.
pub(crate) const RESULTS_AT: usize = INTENT_AT + INTENT_BYTES;
const _: () = assert!(RESULTS_AT + REPLAY_BYTES_MAX <= RECORD_BYTES);

mod flag {
    pub(super) const COMPLETE: u8 = 1;
    pub(super) const INTENT: u8 = 2;
    pub(super) const LOST: u8 = 4;
}

/// The kind of an operation that must not be done twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Create a name for a new directory, node or symbolic link.
    Create = 1,
    /// Create another name for a file.
    Link = 2,
    /// Remove a name.
    Unlink = 3,
    /// Move a name.
    Rename = 4,
    /// Exchange two names.
    Exchange = 5,
    /// Create an extended attribute that must not exist yet.
    MakeXattr = 6,
    /// Remove an extended attribute.
    RemoveXattr = 7,
    /// Append bytes to a file.
    Append = 8,
    /// Create a file and open it.
    Open = 9,
}

/// What an operation changes: a name in a directory, or (with [`Place::CONTENTS`]) a file itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Device and inode number of the directory or file.
    pub(crate) inode: (u64, u64),
    /// Hash of the name.
    pub(crate) name: u64,
}

impl Place {
    /// Stands for the bytes of a file, instead of a name.
    const CONTENTS: u64 = 0;

    /// A name in a directory.
    pub(crate) fn named(inode: (u64, u64), parts: &[&[u8]]) -> Self {
        // FNV-1a, because it is the same in every build; the standard library's hashes do not promise that.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for part in parts {
            for byte in part.iter().chain(&[0]) {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        Self { inode, name: hash.max(1) }
    }

    /// The bytes of a file.
    pub(crate) fn contents(inode: (u64, u64)) -> Self {
        Self { inode, name: Self::CONTENTS }
    }
}

/// What an operation is about to do, and what was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Intent {
    /// The kind of operation.
    pub(crate) kind: Kind,
    /// For an append: its range of the file is reserved, and others may have appended after it.
    pub(crate) reserved: bool,
    /// The places that are changed; the second one only for renames and exchanges.
    pub(crate) places: [Place; 2],
    /// Inode numbers of what was in these places, zero for nothing. For a link, the second one is the
    /// inode number of the file to link; for operations that create, the second one is the file type.
    pub(crate) before: [u64; 2],
    /// For an append: the file's length before.
    pub(crate) offset: u64,
    /// For an append: the number of bytes to append.
    pub(crate) length: u64,
}

impl Intent {
    /// Returns the places that it changes.
    pub(crate) fn places(&self) -> &[Place] {
        let both = matches!(self.kind, Kind::Rename | Kind::Exchange);
        &self.places[..if both { 2 } else { 1 }]
    }

    fn words(&self) -> [u64; 11] {
        let [a, b] = self.places;
        [
            u64::from(self.kind as u8) | u64::from(self.reserved) << 8,
            a.inode.0,
            a.inode.1,
            a.name,
            b.inode.0,
            b.inode.1,
            b.name,
            self.before[0],
            self.before[1],
            self.offset,
            self.length,
        ]
    }

    fn of_words(words: &[u64; 11]) -> Option<Self> {
        let kind = match words[0] & 0xff {
            1 => Kind::Create,
            2 => Kind::Link,
            3 => Kind::Unlink,
            4 => Kind::Rename,
            5 => Kind::Exchange,
            6 => Kind::MakeXattr,
            7 => Kind::RemoveXattr,
            8 => Kind::Append,
            9 => Kind::Open,
            _ => return None,
        };
        let place = |i: usize| Place { inode: (words[i], words[i + 1]), name: words[i + 2] };
        Some(Self {
            kind,
            reserved: words[0] >> 8 & 1 != 0,
            places: [place(1), place(4)],
            before: [words[7], words[8]],
            offset: words[9],
            length: words[10],
        })
    }
}

/// The recorded progress of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Of a slot's two records, the one with the higher generation is current.
    pub(crate) generation: u32,
    /// Secret of the session that it belongs to; session numbers can be reused.
    pub(crate) secret: u64,
    /// Sequence number of the request in its slot.
    pub(crate) sequence: u32,
    /// CRC-32C of the request's body.
    pub(crate) body_crc: u32,
    /// Number of operations done.
    pub(crate) index: u8,
    /// All operations are done, and `results` is the reply.
    pub(crate) complete: bool,
    /// The results were too long to keep.
    pub(crate) lost: bool,
    /// What the next operation was about to do.
    pub(crate) intent: Option<Intent>,
    /// Results of the operations done.
    pub(crate) results: Vec<u8>,
}

impl Record {
    /// Returns the number of results, including that of a failed operation.
    pub(crate) fn results(&self) -> usize {
        towline_wire::reply::parse_results(&self.results).map_or(0, |results| results.len())
    }
}

/// A record as bytes, and how many of them are used.
pub(crate) type Image = ([u8; RECORD_BYTES], usize);

impl Record {
    /// Encodes the record, with `results` instead of its own results.
    pub(crate) fn image(&self, results: &[u8]) -> Image {
        let lost = self.lost || results.len() > REPLAY_BYTES_MAX;
        let results = if lost { &[] } else { results };
        let mut bytes = [0; RECORD_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(GENERATION_AT, &self.generation.to_le_bytes());
        put(8, &self.secret.to_le_bytes());
        put(16, &self.sequence.to_le_bytes());
        put(20, &self.body_crc.to_le_bytes());
        put(24, &(results.len() as u16).to_le_bytes());
        let mut flags = if self.complete { flag::COMPLETE } else { 0 };
        if let Some(intent) = &self.intent {
            flags |= flag::INTENT;
            for (i, word) in intent.words().iter().enumerate() {
                put(INTENT_AT + 8 * i, &word.to_le_bytes());
            }
        }
        if lost {
            flags |= flag::LOST;
        }
        put(26, &[self.index, flags]);
        put(RESULTS_AT, results);
        let length = RESULTS_AT + results.len();
        let crc = crc32c::crc32c(&bytes[4..length]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        (bytes, length)
    }

    /// Parses a record. Returns `None` for invalid bytes: torn, never written, or damaged.
    pub(crate) fn parse(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let length = RESULTS_AT + usize::from(u16::from_le_bytes([bytes[24], bytes[25]]));
        if length > RESULTS_AT + REPLAY_BYTES_MAX || crc32c::crc32c(&bytes[4..length]) != word(0) {
            return None;
        }
        let (index, flags) = (bytes[26], bytes[27]);
        let intent = match flags & flag::INTENT {
            0 => None,
            _ => Some(Intent::of_words(&std::array::from_fn(|i| long(INTENT_AT + 8 * i)))?),
        };
        let results = &bytes[RESULTS_AT..length];
        let lost = flags & flag::LOST != 0;
        let replies = towline_wire::reply::parse_results(results).ok()?;
        // A failure has a result too, but its operation does not count as done.
        let failed = matches!(replies.last(), Some(Reply::Failed { .. }));
        if !lost && replies.len() != usize::from(index) + usize::from(failed) {
            return None;
        }
        Some(Self {
            generation: word(GENERATION_AT),
            secret: long(8),
            sequence: word(16),
            body_crc: word(20),
            index,
            complete: flags & flag::COMPLETE != 0,
            lost,
            intent,
            results: results.to_vec(),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use towline_wire::codec::Field;

    pub(crate) fn record(generation: u32, intent: Option<Intent>) -> Record {
        let mut results = Vec::new();
        Reply::Done {}.encode(&mut results);
        Reply::Wrote { length: 3, offset: 9 }.encode(&mut results);
        Record {
            generation,
            secret: 77,
            sequence: 5,
            body_crc: 0x1234,
            index: 2,
            complete: false,
            lost: false,
            intent,
            results,
        }
    }

    pub(crate) fn intent() -> Intent {
        Intent {
            kind: Kind::Rename,
            reserved: false,
            places: [Place::named((1, 2), &[b"a"]), Place::named((3, 4), &[b"b"])],
            before: [10, 0],
            offset: 0,
            length: 0,
        }
    }

    #[test]
    fn what_was_written_is_read() {
        for intent in [None, Some(intent())] {
            let record = record(8, intent);
            let (bytes, length) = record.image(&record.results);
            assert!(length < RECORD_BYTES);
            assert_eq!(Record::parse(&bytes), Some(record));
        }
    }

    #[test]
    fn results_too_long_to_be_kept_are_marked_so() {
        let record = record(8, None);
        let (bytes, _) = record.image(&[1; REPLAY_BYTES_MAX + 1]);
        let read = Record::parse(&bytes).unwrap();
        assert!(read.lost && read.results.is_empty());
    }

    #[test]
    fn a_torn_record_is_none() {
        let (old, _) = record(8, None).image(&record(8, None).results);
        let new = record(9, Some(intent()));
        let (new, length) = new.image(&new.results);
        for cut in 1..length {
            let mut torn = old;
            torn[..cut].copy_from_slice(&new[..cut]);
            if torn != old && torn != new {
                assert_eq!(Record::parse(&torn), None, "cut at {cut}");
            }
        }
        assert_eq!(Record::parse(&[0; RECORD_BYTES]), None);
    }

    #[test]
    fn names_and_contents_are_different_places() {
        let name = Place::named((1, 2), &[b"x"]);
        assert_ne!(name, Place::contents((1, 2)));
        assert_ne!(name, Place::named((1, 2), &[b"x", b""]));
        assert_ne!(name, Place::named((1, 3), &[b"x"]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn damage_is_noticed(at in 0..RESULTS_AT, bit in 0..8u8) {
            let record = record(8, Some(intent()));
            let (mut bytes, _) = record.image(&record.results);
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Record::parse(&bytes), None);
        }

        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), RECORD_BYTES), good: bool) {
            let mut bytes: [u8; RECORD_BYTES] = bytes.try_into().unwrap();
            if good {
                // With a correct checksum, so that the checks after it are reached.
                let length = RESULTS_AT + usize::from(u16::from_le_bytes([bytes[24], bytes[25]]));
                if length <= RECORD_BYTES {
                    let crc = crc32c::crc32c(&bytes[4..length]);
                    bytes[..4].copy_from_slice(&crc.to_le_bytes());
                }
            }
            let _ = Record::parse(&bytes);
        }
    }
}
