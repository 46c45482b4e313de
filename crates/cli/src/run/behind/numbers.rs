//! Numbers of records that are dealt with nearly in their order.

use std::collections::HashSet;

/// All numbers before [`Self::next`], and some behind it. They wrap around.
pub(super) struct Numbers {
    next: u32,
    ahead: HashSet<u32>,
}

impl Numbers {
    pub(super) fn before(next: u32) -> Self {
        Self { next, ahead: HashSet::new() }
    }

    /// Returns the first number that is missing.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Returns true if a number that is not before [`Self::next`] is there.
    pub(super) fn has(&self, number: u32) -> bool {
        self.ahead.contains(&number)
    }

    pub(super) fn add(&mut self, number: u32) {
        self.ahead.insert(number);
        while self.ahead.remove(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_early_counts_in_its_turn() {
        let mut numbers = Numbers::before(u32::MAX - 1);
        for (number, next) in
            [(u32::MAX, u32::MAX - 1), (1, u32::MAX - 1), (u32::MAX - 1, 0), (0, 2), (2, 3)]
        {
            assert!(!numbers.has(number));
            numbers.add(number);
            assert_eq!(numbers.next(), next);
        }
        assert!(!numbers.has(3) && numbers.ahead.is_empty());
    }
}
