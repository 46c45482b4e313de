//! Divides a disk into pieces to copy.

use super::end::{Content, End};
use crate::report::Outcome;
use std::ops::Range;

/// Length of a piece of data in bytes. Pieces begin at multiples of it.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Longest single range of zeroes in bytes, a multiple of [`PIECE_BYTES`].
const ZEROES_BYTES_MAX: u64 = 1 << 30;

/// Walks a disk in pieces.
#[derive(Debug)]
pub(super) struct Plan {
    /// Ranges of data in order, in whole pieces; the rest of the disk is zero.
    data: std::vec::IntoIter<Range<u64>>,
    current: Option<Range<u64>>,
    at: u64,
    size: u64,
}

impl Plan {
    /// Plans the copy of `source`.
    pub(super) fn of(source: &End) -> Outcome<Self> {
        Ok(Self::new(data(source)?, source.size()))
    }

    fn new(data: Vec<Range<u64>>, size: u64) -> Self {
        let mut data = data.into_iter();
        Self { current: data.next(), data, at: 0, size }
    }

    /// Returns the next range, and whether it may hold data.
    pub(super) fn next(&mut self) -> Option<(Range<u64>, bool)> {
        let start = self.at;
        if start >= self.size {
            return None;
        }
        while self.current.as_ref().is_some_and(|range| range.end <= start) {
            self.current = self.data.next();
        }
        let (end, holds_data) = match &self.current {
            Some(range) if range.start <= start => (range.end.min(start + PIECE_BYTES), true),
            Some(range) => (range.start.min(start + ZEROES_BYTES_MAX), false),
            None => (self.size.min(start + ZEROES_BYTES_MAX), false),
        };
        self.at = end;
        Some((start..end, holds_data))
    }
}

/// Returns the ranges of a disk that hold data, in order and in whole pieces: all of it, if it does not report extents.
/// The rest is zero.
pub(super) fn data(disk: &End) -> Outcome<Vec<Range<u64>>> {
    let size = disk.size();
    let mut data: Vec<Range<u64>> = Vec::new();
    let told = disk.extents(|range, content| {
        if content == Content::Data {
            let start = range.start / PIECE_BYTES * PIECE_BYTES;
            let end = range.end.next_multiple_of(PIECE_BYTES).min(size);
            match data.last_mut() {
                Some(last) if last.end >= start => last.end = last.end.max(end),
                _ => data.push(start..end),
            }
        }
    })?;
    if !told {
        data.push(0..size);
    }
    Ok(data)
}

/// Returns true if all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    // Compares the bytes with themselves, shifted by one, with the fast `memcmp`.
    bytes.first().is_none_or(|first| *first == 0 && bytes[1..] == bytes[..bytes.len() - 1])
}

/// Divides bytes into runs of zeroes and runs of data, in units of `unit` bytes.
pub(super) fn runs(bytes: &[u8], unit: usize) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    let mut at = 0;
    for part in bytes.chunks(unit) {
        let (zero, end) = (is_zero(part), at + part.len());
        match runs.last_mut() {
            Some((run, same)) if *same == zero => run.end = end,
            _ => runs.push((at..end, zero)),
        }
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, Plan, ZEROES_BYTES_MAX, is_zero, runs};

    #[test]
    fn a_plan_covers_the_disk_once() {
        let size = 3 * ZEROES_BYTES_MAX + 17;
        let data = vec![
            2 * PIECE_BYTES..5 * PIECE_BYTES,
            ZEROES_BYTES_MAX..ZEROES_BYTES_MAX + PIECE_BYTES,
            size / PIECE_BYTES * PIECE_BYTES..size,
        ];
        let mut plan = Plan::new(data.clone(), size);
        let mut at = 0;
        while let Some((range, holds_data)) = plan.next() {
            assert_eq!(range.start, at);
            assert!(range.start.is_multiple_of(PIECE_BYTES) && !range.is_empty());
            let inside = data.iter().any(|d| d.start <= range.start && range.end <= d.end);
            assert_eq!(inside, holds_data, "{range:?}");
            at = range.end;
        }
        assert_eq!(at, size);
    }

    #[test]
    fn zeroes_are_found_in_units() {
        let mut bytes = vec![0; 10];
        assert!(is_zero(&bytes) && is_zero(&[]) && is_zero(&[0]) && !is_zero(&[1]));
        bytes[5] = 1;
        assert!(!is_zero(&bytes) && !is_zero(&bytes[5..]) && is_zero(&bytes[6..]));
        assert_eq!(runs(&bytes, 4), [(0..4, true), (4..8, false), (8..10, true)]);
        assert_eq!(runs(&bytes[6..], 3), [(0..4, true)]);
    }
}
