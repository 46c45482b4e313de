//! Which parts of a disk were written: a bit for each 64 KiB.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes for each bit.
pub const GRAIN: u64 = 64 * 1024;
/// Words of the first table: 8 GiB of a disk.
const FIRST_WORDS: u64 = 2048;
/// Tables: the first, and others that together with all before double what is covered, up to the
/// largest disk there can be.
const TABLES: usize = 32;

/// A bitmap of changes since it was made, which grows with its disk. Any thread may set bits.
#[derive(Debug, Default)]
pub struct Changes {
    /// Made when first written to. None ever moves, so that a bit is set without a lock.
    tables: [OnceLock<Box<[AtomicU64]>>; TABLES],
}

/// Table and place in it of a word.
fn place(word: u64) -> (usize, usize) {
    let doublings = (word / FIRST_WORDS + 1).ilog2();
    let before = ((1u64 << doublings) - 1) * FIRST_WORDS;
    (doublings as usize, (word - before) as usize)
}

impl Changes {
    fn word(&self, grain: u64) -> Option<&AtomicU64> {
        let (table, at) = place(grain / 64);
        self.tables.get(table)?.get()?.get(at)
    }

    /// A range is about to be changed.
    pub fn note(&self, offset: u64, length: u64) {
        for grain in offset / GRAIN..(offset + length).div_ceil(GRAIN) {
            let (table, at) = place(grain / 64);
            let words = FIRST_WORDS << table;
            let table =
                self.tables[table].get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
            let (word, bit) = (&table[at], 1 << (grain % 64));
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
            self.word(grain)
                .is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (grain % 64)) != 0)
        };
        let (first, end) = (changed(offset / GRAIN), offset + length);
        let mut at = (offset / GRAIN + 1) * GRAIN;
        while at < end && changed(at / GRAIN) == first {
            at += GRAIN;
        }
        (at.min(end) - offset, first)
    }
}

#[cfg(test)]
mod tests {
    use super::{Changes, FIRST_WORDS, GRAIN, TABLES, place};

    #[test]
    fn every_word_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for word in 0..20 * FIRST_WORDS {
            assert_eq!(place(word), expected, "word {word}");
            expected.1 += 1;
            if expected.1 as u64 == FIRST_WORDS << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        let last = u64::MAX / GRAIN / 64;
        assert!(place(last).0 < TABLES, "the last byte that can be named");
    }

    #[test]
    fn a_disk_may_grow() {
        let changes = Changes::default();
        let far = FIRST_WORDS * 64 * GRAIN * 5;
        assert_eq!(changes.run(far, GRAIN), (GRAIN, false));
        changes.note(far + GRAIN, 1);
        assert_eq!(changes.run(far, 4 * GRAIN), (GRAIN, false));
        assert_eq!(changes.run(far + GRAIN, 4 * GRAIN), (GRAIN, true));
        assert_eq!(changes.run(0, 2 * GRAIN), (2 * GRAIN, false));
    }
}
