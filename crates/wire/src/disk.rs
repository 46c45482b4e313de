//! What requests for disks say: flags, kinds of extents, and checksums of data.
//!
//! A request for a disk stands alone in its compound. Disks are named by numbers that the client
//! chooses when it opens them, so that it can open them again after a restart of the server.
//! Data travels as for files (inline, or under grants; replies behind data messages), with two
//! additions: the fragments of a read come in any order, and those that are holes come without
//! payload ([`crate::header::data_flag::HOLE`]).

use crate::codec::{Field, ProtocolError, Reader};

/// Disks that a session may have open.
pub const DISKS_MAX: usize = 64;
/// Longest name of a disk, bytes.
pub const DISK_NAME_BYTES_MAX: usize = 256;
/// Bytes that one checksum covers; the last one of a message covers what is left.
pub const CHECKED_BYTES: usize = 4096;
/// Most extents of one answer.
pub const EXTENTS_MAX: u32 = 4096;
/// Bytes of one extent as it travels.
pub const EXTENT_BYTES: usize = 12;

const _: () = assert!(EXTENTS_MAX as usize * EXTENT_BYTES < crate::limits::BODY_BYTES_MAX);
const _: () =
    assert!(crate::limits::TRANSFER_BYTES_MAX / CHECKED_BYTES * 4 < crate::limits::BODY_BYTES_MAX);

/// Flags of requests for disks.
pub mod disk_flag {
    /// A change: it is on stable storage before the reply (FUA).
    pub const DURABLE: u32 = 1;
    /// Data carries checksums.
    pub const CHECKSUMS: u32 = 2;
    /// Zeroes: space has to stay or become allocated.
    pub const ALLOCATE: u32 = 4;
    /// Zeroes: fail with `EOPNOTSUPP` rather than write them one by one.
    pub const FAST: u32 = 8;
}

/// What a disk is like, in [`crate::Reply::Disk`].
pub mod disk_kind {
    /// Changes are refused.
    pub const READ_ONLY: u32 = 1;
    /// Seeks cost time.
    pub const ROTATIONAL: u32 = 2;
}

/// Which extents [`crate::Request::DiskStatus`] asks for.
pub mod extent_kind {
    /// What is allocated: bits of [`super::extent_flag`].
    pub const ALLOCATION: u32 = 0;
    /// What was written since the server began to serve the disk: 1, else 0.
    pub const WRITTEN: u32 = 1;
}

/// Flags of extents of [`extent_kind::ALLOCATION`].
pub mod extent_flag {
    /// No space is allocated.
    pub const HOLE: u32 = 1;
    /// Reads as zeroes.
    pub const ZERO: u32 = 2;
}

/// The checksums of the data of one message, or of one write: crc32c of each [`CHECKED_BYTES`],
/// counted from the first byte of the data.
#[must_use]
pub fn checksums(data: &[u8]) -> Vec<u8> {
    data.chunks(CHECKED_BYTES).flat_map(|block| crc32c::crc32c(block).to_le_bytes()).collect()
}

/// Where data and its checksums first differ: the offset of that block in the data. `Some(0)` also
/// when there are too few or too many checksums.
#[must_use]
pub fn first_difference(data: &[u8], sums: &[u8]) -> Option<usize> {
    if sums.len() != checksum_bytes(data.len()) {
        return Some(0);
    }
    let mut blocks = data.chunks(CHECKED_BYTES).zip(sums.chunks_exact(4));
    let differs = |(block, sum): (&[u8], &[u8])| crc32c::crc32c(block).to_le_bytes() != *sum;
    blocks.position(differs).map(|block| block * CHECKED_BYTES)
}

/// Bytes of the checksums of so many bytes of data.
#[must_use]
pub fn checksum_bytes(length: usize) -> usize {
    length.div_ceil(CHECKED_BYTES) * 4
}

/// Checks data that comes in parts, in order, against the checksums of the whole.
#[derive(Clone, Debug)]
pub struct Checking {
    sums: Vec<u8>,
    /// Bytes looked at so far, and the checksum of those of a block that is not complete.
    done: usize,
    open: u32,
    length: usize,
}

impl Checking {
    /// For `length` bytes.
    ///
    /// # Errors
    /// There are too few or too many checksums.
    pub fn new(length: usize, sums: &[u8]) -> Result<Self, ProtocolError> {
        if sums.len() != checksum_bytes(length) {
            let what = "checksums do not match the length of the data";
            return Err(ProtocolError { what, at: 0 });
        }
        Ok(Self { sums: sums.to_vec(), done: 0, open: 0, length })
    }

    /// Looks at the next part; false: it differs from what was sent.
    pub fn matches(&mut self, mut part: &[u8]) -> bool {
        while !part.is_empty() && self.done < self.length {
            let block = self.done / CHECKED_BYTES;
            let end = ((block + 1) * CHECKED_BYTES).min(self.length);
            let (now, later) = part.split_at(part.len().min(end - self.done));
            self.open = crc32c::crc32c_append(self.open, now);
            self.done += now.len();
            if self.done == end {
                if self.open.to_le_bytes() != self.sums[block * 4..block * 4 + 4] {
                    return false;
                }
                self.open = 0;
            }
            part = later;
        }
        part.is_empty()
    }
}

/// A run of bytes of a disk that are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskExtent {
    /// Bytes; not zero.
    pub length: u64,
    /// Meaning depends on the kind that was asked for.
    pub flags: u32,
}

/// Encodes extents as the value of a [`crate::Reply::Bytes`].
#[must_use]
pub fn encode_extents(extents: &[DiskExtent]) -> Vec<u8> {
    let mut out = Vec::with_capacity(extents.len() * EXTENT_BYTES);
    for extent in extents {
        extent.length.encode(&mut out);
        extent.flags.encode(&mut out);
    }
    out
}

/// Reads extents that fill `bytes`.
///
/// # Errors
/// A cut field, an extent without bytes, or more bytes than offsets can name.
pub fn parse_extents(bytes: &[u8]) -> Result<Vec<DiskExtent>, ProtocolError> {
    let mut reader = Reader::new(bytes);
    let (mut extents, mut total) = (Vec::new(), 0u64);
    while !reader.is_empty() {
        let extent =
            DiskExtent { length: Field::decode(&mut reader)?, flags: Field::decode(&mut reader)? };
        let sum = total.checked_add(extent.length).filter(|_| extent.length > 0);
        total = sum.ok_or_else(|| reader.error("impossible extent"))?;
        extents.push(extent);
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // RFC 3720, B.4: 32 bytes of zeroes.
        assert_eq!(checksums(&[0; 32]), 0x8a91_36aa_u32.to_le_bytes());
        assert_eq!(checksums(&[0; CHECKED_BYTES + 1]).len(), 8);
        assert_eq!(checksums(&[]), []);
    }

    proptest! {
        #[test]
        fn one_wrong_bit_is_found_whatever_the_parts(
            data in proptest::collection::vec(any::<u8>(), 1..20_000),
            cuts in proptest::collection::vec(1usize..6000, 1..8),
            at in any::<proptest::sample::Index>(),
        ) {
            let sums = checksums(&data);
            let in_parts = |data: &[u8]| {
                let mut checking = Checking::new(data.len(), &sums).unwrap();
                let (mut rest, mut cuts) = (data, cuts.iter().cycle());
                while !rest.is_empty() {
                    let (part, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                    if !checking.matches(part) {
                        return false;
                    }
                    rest = later;
                }
                true
            };
            prop_assert_eq!(first_difference(&data, &sums), None);
            prop_assert!(in_parts(&data));
            let mut wrong = data.clone();
            let at = at.index(wrong.len());
            wrong[at] ^= 4;
            prop_assert_eq!(first_difference(&wrong, &sums), Some(at / CHECKED_BYTES * CHECKED_BYTES));
            prop_assert!(!in_parts(&wrong));
            prop_assert!(Checking::new(data.len() + CHECKED_BYTES, &sums).is_err());
        }

        #[test]
        fn extents_are_read_as_they_were_encoded_and_nothing_panics(
            bytes in proptest::collection::vec(any::<u8>(), 0..100)
        ) {
            if let Ok(list) = parse_extents(&bytes) {
                prop_assert_eq!(encode_extents(&list), bytes);
            }
        }
    }
}
