//! Private decoders of this crate, for the fuzzers.

use crate::record::{RECORD_BYTES, RESULTS_AT, Record};

/// A record of a request as stored in the state file.
pub type Image = [u8; RECORD_BYTES];

/// Gives the bytes the checksum of a valid record, which a fuzzer would hardly find.
pub fn seal(image: &mut Image) {
    let length = RESULTS_AT + usize::from(u16::from_le_bytes([image[24], image[25]]));
    if let Some(covered) = image.get(4..length) {
        let crc = crc32c::crc32c(covered);
        image[..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Parses a record, and checks that an accepted one is the same after writing and parsing it again.
///
/// # Panics
/// When it is not the same.
pub fn record(image: &Image) {
    if let Some(record) = Record::parse(image)
        && !record.lost
    {
        let (again, _) = record.image(&record.results);
        assert_eq!(Record::parse(&again), Some(record));
    }
}
