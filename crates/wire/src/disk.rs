//! Fields of disk requests: flags, kinds of extents, and checksums of data.
//!
//! A disk request is the only operation of its compound. The client chooses the number of a disk, so
//! that it can open the disk again under the same number after a restart of the server.
//! Data travels as for files (inline or under grants; replies follow data messages), with two
//! differences: the fragments of a read arrive in any order, and holes arrive without payload
//! ([`crate::header::data_flag::HOLE`]).

use crate::codec::{Field, ProtocolError, Reader};

/// Most disks that a session may have open.
pub const DISKS_MAX: usize = 64;
/// Longest name of a disk, in bytes.
pub const DISK_NAME_BYTES_MAX: usize = 256;
/// Bytes that one checksum covers; the last checksum of a message covers the rest.
pub const CHECKED_BYTES: usize = 4096;
/// Most extents in one answer.
pub const EXTENTS_MAX: u32 = 4096;
/// Size of one encoded extent in bytes.
pub const EXTENT_BYTES: usize = 12;

const _: () = assert!(EXTENTS_MAX as usize * EXTENT_BYTES < crate::limits::BODY_BYTES_MAX);
const _: () =
    assert!(crate::limits::TRANSFER_BYTES_MAX / CHECKED_BYTES * 4 < crate::limits::BODY_BYTES_MAX);

/// Flags of disk requests.
pub mod disk_flag {
    /// For a change: it is on stable storage before the reply (FUA).
    pub const DURABLE: u32 = 1;
    /// Data carries checksums.
    pub const CHECKSUMS: u32 = 2;
    /// For zeroing: the space has to be allocated afterwards.
    pub const ALLOCATE: u32 = 4;
    /// For zeroing: fail with `EOPNOTSUPP` rather than write the zeroes out.
    pub const FAST: u32 = 8;
}

/// Properties of a disk, in [`crate::Reply::Disk`].
pub mod disk_kind {
    /// The server refuses changes.
    pub const READ_ONLY: u32 = 1;
    /// Seeks cost time.
    pub const ROTATIONAL: u32 = 2;
    /// The server refuses changes since a flush failed, until an operator acts.
    pub const FAILED: u32 = 4;
}

/// Which extents [`crate::Request::DiskStatus`] asks for.
pub mod extent_kind {
    /// Allocated space and zeroes: bits of [`super::extent_flag`].
    pub const ALLOCATION: u32 = 0;
    /// 1 for bytes that were written since the server began to serve the disk, else 0.
    pub const WRITTEN: u32 = 1;
}

/// Flags of extents of [`extent_kind::ALLOCATION`].
pub mod extent_flag {
    /// No space is allocated.
    pub const HOLE: u32 = 1;
    /// Reads as zeroes.
    pub const ZERO: u32 = 2;
}

/// Returns the checksums of the data of one message, or of one write: the crc32c of each
/// [`CHECKED_BYTES`], counted from the first byte of the data.
#[must_use]
pub fn checksums(data: &[u8]) -> Vec<u8> {
    data.chunks(CHECKED_BYTES).flat_map(|block| crc32c::crc32c(block).to_le_bytes()).collect()
}

/// Returns the offset in the data of the first block that does not match its checksum. Returns
/// `Some(0)` also if there are too few or too many checksums.
#[must_use]
pub fn first_difference(data: &[u8], sums: &[u8]) -> Option<usize> {
    if sums.len() != checksum_bytes(data.len()) {
        return Some(0);
    }
    let mut blocks = data.chunks(CHECKED_BYTES).zip(sums.chunks_exact(4));
    let differs = |(block, sum): (&[u8], &[u8])| crc32c::crc32c(block).to_le_bytes() != *sum;
    blocks.position(differs).map(|block| block * CHECKED_BYTES)
}

/// Returns the size in bytes of the checksums of `length` bytes of data.
#[must_use]
pub fn checksum_bytes(length: usize) -> usize {
    length.div_ceil(CHECKED_BYTES) * 4
}

/// Checks data that arrives in parts, in order, against the checksums of the whole.
#[derive(Clone, Debug)]
pub struct Checking {
    sums: Vec<u8>,
    /// Bytes checked so far.
    done: usize,
    /// Checksum of the part of an incomplete block that has arrived.
    open: u32,
    length: usize,
}

impl Checking {
    /// Makes a check of `length` bytes.
    ///
    /// # Errors
    /// Too few or too many checksums.
    pub fn new(length: usize, sums: &[u8]) -> Result<Self, ProtocolError> {
        if sums.len() != checksum_bytes(length) {
            let what = "checksums do not match the length of the data";
            return Err(ProtocolError { what, at: 0 });
        }
        Ok(Self { sums: sums.to_vec(), done: 0, open: 0, length })
    }

    /// Checks the next part. Returns false if it does not match the checksums or is longer than the data.
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

/// A run of bytes of a disk with the same flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskExtent {
    /// Length in bytes; not zero.
    pub length: u64,
    /// Meaning depends on the requested kind.
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

/// Decodes extents that fill `bytes`.
///
/// # Errors
/// A truncated field, an extent of length zero, or a total length beyond `u64`.
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
