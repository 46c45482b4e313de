//! Which parts of a disk were written: a bit for each 64 KiB.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes for each bit.
pub const GRAIN: u64 = 64 * 1024;

/// A bitmap of changes since it was made. Any thread may set bits.
#[derive(Debug)]
pub struct Changes {
    bits: Box<[AtomicU64]>,
}

impl Changes {
    /// No changes on a disk of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let words = size.div_ceil(GRAIN).div_ceil(64) as usize;
        Self { bits: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A range is about to be changed.
    pub fn note(&self, offset: u64, length: u64) {
        for grain in offset / GRAIN..(offset + length).div_ceil(GRAIN) {
            let (word, bit) = (&self.bits[(grain / 64) as usize], 1 << (grain % 64));
            // Most are set already: reading does not take the cache line from other cores.
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Bytes from `offset`, at most `length`, that are alike, and whether they changed.
    #[must_use]
    pub fn run(&self, offset: u64, length: u64) -> (u64, bool) {
        let changed = |grain: u64| {
            self.bits[(grain / 64) as usize].load(Ordering::Relaxed) & (1 << (grain % 64)) != 0
        };
        let (first, end) = (changed(offset / GRAIN), offset + length);
        let mut at = (offset / GRAIN + 1) * GRAIN;
        while at < end && changed(at / GRAIN) == first {
            at += GRAIN;
        }
        (at.min(end) - offset, first)
    }
}
