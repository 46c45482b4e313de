//! Reads a copy back and compares checksums.

use super::end::End;
use super::noted::Piece;
use super::pieces::{PIECE_BYTES, data, is_zero};
use crate::report::{Failure, Outcome};
use crate::workers::together;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Compares a disk with the checksums of what was written to it, with this many threads. Local files
/// and devices are read from the device instead of the page cache, if possible. What is to be zero is not read where
/// the extents say that it is.
pub(super) fn run(target: &End, pieces: &[Piece], jobs: usize) -> Outcome<()> {
    let past_cache = target.past_cache();
    let target = past_cache.as_ref().unwrap_or(target);
    let filled = data(target)?;
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || {
        let mut buffer = Vec::with_capacity(PIECE_BYTES as usize);
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(wrong) = compare(target, piece, &filled, &mut buffer) {
                // Keep the first failure.
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(wrong);
                next.store(pieces.len(), Ordering::Relaxed);
            }
        }
    };
    together(jobs, work);
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn compare(
    target: &End,
    piece: &Piece,
    filled: &[Range<u64>],
    buffer: &mut Vec<u8>,
) -> Outcome<()> {
    let range = piece.offset..piece.offset + piece.length;
    if piece.sum.is_some() {
        return compare_range(target, range, piece.sum, buffer);
    }
    let first = filled.partition_point(|part| part.end <= range.start);
    for part in filled[first..].iter().take_while(|part| part.start < range.end) {
        let part = part.start.max(range.start)..part.end.min(range.end);
        compare_range(target, part, None, buffer)?;
    }
    Ok(())
}

fn compare_range(
    target: &End,
    Range { start: mut at, end }: Range<u64>,
    sum: Option<u32>,
    buffer: &mut Vec<u8>,
) -> Outcome<()> {
    while at < end {
        let length = PIECE_BYTES.min(end - at);
        buffer.resize(length.next_multiple_of(target.block()) as usize, 0);
        target.read(buffer, at)?;
        buffer.truncate(length as usize);
        let same = match sum {
            Some(sum) => crc32c::crc32c(buffer) == sum,
            None => is_zero(buffer),
        };
        if !same {
            let what = format!("the copy differs from the source in the {length} bytes at {at}");
            return Err(Failure::new(what).about(target.name()));
        }
        at += length;
    }
    Ok(())
}
