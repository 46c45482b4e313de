//! A map of the changed parts of a disk: one bit for each 64 KiB of the first 4 TiB, and for larger parts
//! beyond.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes for each bit in the first 4 TiB.
pub const GRAIN: u64 = 64 * 1024;
/// Words of the first table, which covers 8 GiB of a disk.
const FIRST_WORDS: u64 = 2048;
/// Bytes of a disk that the first table covers; each table covers twice as many as the one before.
const FIRST_BYTES: u64 = FIRST_WORDS * 64 * GRAIN;
/// Number of tables: enough for every 64-bit offset.
const TABLES: usize = 32;
/// Number of tables with a bit for each [`GRAIN`]; the last of them takes 4 MiB. Later tables are as long,
/// but their bits stand for more bytes. So the largest possible disk takes 100 MiB, and scanning all of it
/// takes milliseconds.
const LONGEST: usize = 9;

/// A bitmap of the changes since it was created, which grows with its disk. Any thread may set bits.
#[derive(Debug, Default)]
pub struct Changes {
    /// Each is allocated at the first change in it and never moves, so bits are set without a lock.
    tables: [OnceLock<Box<[AtomicU64]>>; TABLES],
}

/// The position of the bit for a byte of the disk.
#[derive(Clone, Copy)]
struct Place {
    table: usize,
    /// Length of that table in words.
    words: u64,
    /// First byte of the disk that the table covers.
    start: u64,
    /// Bytes for each bit.
    grain: u64,
    /// Index of the bit in the table.
    bit: u64,
}

impl Place {
    fn of(offset: u64) -> Self {
        let doublings = (offset / FIRST_BYTES + 1).ilog2() as usize;
        let words = FIRST_WORDS << doublings.min(LONGEST - 1);
        let start = ((1u64 << doublings) - 1) * FIRST_BYTES;
        let grain = GRAIN << doublings.saturating_sub(LONGEST - 1);
        Self { table: doublings, words, start, grain, bit: (offset - start) / grain }
    }

    /// Returns the first byte of the disk that belongs to the bit `bits` further on.
    fn after(self, bits: u64) -> u64 {
        self.start.saturating_add((self.bit + bits).saturating_mul(self.grain))
    }

    /// Returns the number of bits from this one to the end of its word.
    fn left_in_word(self) -> u64 {
        64 - self.bit % 64
    }
}

impl Changes {
    /// Returns the bits of a word from `place` on, the first one lowest. `None`: nothing in the table has
    /// changed.
    fn bits(&self, place: Place) -> Option<u64> {
        let word = self.tables[place.table].get()?.get((place.bit / 64) as usize)?;
        Some(word.load(Ordering::Relaxed) >> (place.bit % 64))
    }

    /// Notes that a range is about to be changed.
    pub fn note(&self, offset: u64, length: u64) {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let place = Place::of(at);
            let table = self.tables[place.table]
                .get_or_init(|| (0..place.words).map(|_| AtomicU64::new(0)).collect());
            let last = (end - 1 - place.start) / place.grain;
            let count = (last - place.bit + 1).min(place.left_in_word());
            let bits = u64::MAX >> (64 - count) << (place.bit % 64);
            let word = &table[(place.bit / 64) as usize];
            // Most bits are already set, and a load does not take the cache line from other cores.
            if word.load(Ordering::Relaxed) & bits != bits {
                word.fetch_or(bits, Ordering::Relaxed);
            }
            at = place.after(count);
        }
    }

    /// Returns how many bytes from `offset`, at most `length`, have the same state, and whether they changed.
    #[must_use]
    pub fn run(&self, offset: u64, length: u64) -> (u64, bool) {
        let end = offset + length;
        let place = Place::of(offset);
        let first = self.bits(place).is_some_and(|bits| bits & 1 != 0);
        let mut at = place.after(1);
        while at < end {
            let place = Place::of(at);
            let Some(bits) = self.bits(place) else {
                if first {
                    break;
                }
                at = place.after(place.words * 64 - place.bit);
                continue;
            };
            let alike = if first { bits.trailing_ones() } else { bits.trailing_zeros() };
            let alike = u64::from(alike).min(place.left_in_word());
            at = place.after(alike);
            if alike < place.left_in_word() {
                break;
            }
        }
        (at.min(end) - offset, first)
    }
}

#[cfg(test)]
mod tests {
    use super::{Changes, FIRST_BYTES, GRAIN, LONGEST, Place, TABLES};

    #[test]
    fn tables_and_bits_follow_each_other_without_gap() {
        let (mut at, mut tables) = (0u64, 0);
        while at < 1 << 63 {
            let place = Place::of(at);
            assert_eq!((place.table, place.bit, place.start), (tables, 0, at));
            assert_eq!(place.grain == GRAIN, tables < LONGEST);
            let end = place.after(place.words * 64);
            let last = Place::of(end - 1);
            assert_eq!((last.table, last.bit), (tables, place.words * 64 - 1));
            (at, tables) = (end, tables + 1);
        }
        assert!(Place::of(u64::MAX).table < TABLES, "the last byte that can be named has a place");
    }

    #[test]
    fn a_disk_may_grow() {
        let changes = Changes::default();
        let far = FIRST_BYTES * 5;
        assert_eq!(changes.run(far, GRAIN), (GRAIN, false));
        changes.note(far + GRAIN, 1);
        assert_eq!(changes.run(far, 4 * GRAIN), (GRAIN, false));
        assert_eq!(changes.run(far + GRAIN, 4 * GRAIN), (GRAIN, true));
        assert_eq!(changes.run(0, 2 * GRAIN), (2 * GRAIN, false));
    }

    #[test]
    fn the_largest_disk_needs_neither_much_memory_nor_time() {
        let changes = Changes::default();
        let size = i64::MAX as u64;
        changes.note(size - 5, 5);
        let (unchanged, is_changed) = changes.run(0, size);
        let grain = Place::of(size - 1).grain;
        assert!(!is_changed && unchanged < size - 4 && unchanged >= size - grain);
        assert_eq!(changes.run(unchanged, size - unchanged), (size - unchanged, true));
        changes.note(0, size);
        assert_eq!(changes.run(0, size), (size, true));
        assert_eq!(changes.run(GRAIN - 1, 2), (2, true));
    }

    /// Compares with a list of bits, for ranges of all lengths around the places where table or grain
    /// changes.
    #[test]
    fn what_was_noted_is_told_and_nothing_else() {
        let border = Place::of(FIRST_BYTES << LONGEST).start;
        for base in [0, FIRST_BYTES - 300 * GRAIN, border - 300 * GRAIN] {
            let changes = Changes::default();
            let grains = 600u64;
            let mut expected = vec![false; grains as usize];
            let mut seed = 1u64;
            for _ in 0..40 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let offset = seed >> 33 & (512 * GRAIN - 1);
                let length = 1 + (seed >> 20) % (20 * GRAIN);
                changes.note(base + offset, length);
                let from = Place::of(base + offset);
                let until = Place::of(base + offset + length - 1);
                let bytes = from.after(0)..until.after(1);
                for (grain, bit) in expected.iter_mut().enumerate() {
                    *bit |= bytes.contains(&(base + grain as u64 * GRAIN));
                }
                let mut at = 0;
                while at < grains * GRAIN {
                    let (run, changed) = changes.run(base + at, grains * GRAIN - at);
                    let told = at / GRAIN..(at + run) / GRAIN;
                    assert!(run > 0 && run.is_multiple_of(GRAIN));
                    assert!(told.clone().all(|grain| expected[grain as usize] == changed));
                    assert!(at == 0 || expected[told.start as usize - 1] != changed, "joined");
                    at += run;
                }
            }
        }
    }
}
