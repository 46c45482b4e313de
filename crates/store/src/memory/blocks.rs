//! A map from block number to whatever a file keeps per block.

use std::collections::BTreeMap;
use std::ops::Range;

/// A map by block number. The entry of the first block, the only one that most files have, is
/// stored in the file itself, so reading it costs no further memory access.
pub(super) struct Blocks<T> {
    first: Option<T>,
    others: BTreeMap<u64, T>,
}

impl<T> Default for Blocks<T> {
    fn default() -> Self {
        Self { first: None, others: BTreeMap::new() }
    }
}

/// Returns the range without the first block.
fn others(range: &Range<u64>) -> Range<u64> {
    range.start.max(1)..range.end.max(1)
}

impl<T> Blocks<T> {
    /// Returns the entry of a block.
    pub(super) fn get(&self, block: u64) -> Option<&T> {
        if block == 0 { self.first.as_ref() } else { self.others.get(&block) }
    }

    /// Returns the entries of a range of blocks, in order.
    pub(super) fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &T)> {
        let others = self.others.range(others(&range)).map(|(block, found)| (*block, found));
        self.first.iter().filter(move |_| range.contains(&0)).map(|found| (0, found)).chain(others)
    }

    /// Like [`Blocks::range`], with mutable entries.
    pub(super) fn range_mut(&mut self, range: Range<u64>) -> impl Iterator<Item = (u64, &mut T)> {
        let others = self.others.range_mut(others(&range)).map(|(block, found)| (*block, found));
        let first = self.first.iter_mut().filter(move |_| range.contains(&0));
        first.map(|found| (0, found)).chain(others)
    }

    /// Removes the entry of a block.
    pub(super) fn remove(&mut self, block: u64) {
        match block {
            0 => self.first = None,
            _ => drop(self.others.remove(&block)),
        }
    }

    /// Removes and returns all entries from a block on.
    pub(super) fn split_off(&mut self, block: u64) -> Self {
        let first = if block == 0 { self.first.take() } else { None };
        Self { first, others: self.others.split_off(&block) }
    }
}

impl<T: Default> Blocks<T> {
    /// Returns the entry of a block, and creates it if there is none.
    pub(super) fn at(&mut self, block: u64) -> &mut T {
        match block {
            0 => self.first.get_or_insert_default(),
            _ => self.others.entry(block).or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares it with a map that treats all blocks alike.
        #[test]
        fn the_first_block_is_one_like_all(
            steps in prop::collection::vec((0..5, 0..4u64, 0..5u64), 0..40),
        ) {
            let (mut ours, mut plain) = (Blocks::<u64>::default(), BTreeMap::<u64, u64>::new());
            for (number, (what, block, end)) in steps.into_iter().enumerate() {
                let range = block..end.max(block);
                match what {
                    0 | 1 => {
                        *ours.at(block) += number as u64;
                        *plain.entry(block).or_default() += number as u64;
                    }
                    2 => {
                        ours.remove(block);
                        plain.remove(&block);
                    }
                    3 => {
                        ours.range_mut(range.clone()).for_each(|(block, found)| *found += block + 1);
                        plain.range_mut(range.clone()).for_each(|(block, found)| *found += block + 1);
                    }
                    _ => {
                        let (cut, expected) = (ours.split_off(block), plain.split_off(&block));
                        prop_assert!(cut.range(0..9).eq(expected.iter().map(|(at, found)| (*at, found))));
                    }
                }
                prop_assert_eq!(ours.get(block), plain.get(&block));
                prop_assert!(ours.range(range.clone()).eq(plain.range(range).map(|(at, found)| (*at, found))));
                prop_assert!(ours.range(0..9).eq(plain.iter().map(|(at, found)| (*at, found))));
            }
        }
    }
}
