//! Takes turns between clients of low priority and all others. Both get a share, so none waits forever.

use std::collections::VecDeque;

/// How many others come before one of low priority while both wait.
const SHARE: u32 = 8;

/// Keeps count of the shares.
#[derive(Default)]
pub(crate) struct Turn {
    /// Others that came while some of low priority waited.
    passed: u32,
}

impl Turn {
    /// Notes that one of the others comes while some of low priority wait.
    pub(crate) fn other(&mut self) {
        self.passed = self.passed.saturating_add(1);
    }

    /// Notes that one of low priority comes.
    pub(crate) fn low(&mut self) {
        self.passed = self.passed.saturating_sub(SHARE);
    }

    /// Returns true if one of low priority comes before waiting others.
    pub(crate) fn is_low_due(&self) -> bool {
        self.passed >= SHARE
    }
}

/// Waiting items, in order of arrival within each priority.
pub(crate) struct Queue<T> {
    others: VecDeque<T>,
    low: VecDeque<T>,
    turn: Turn,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { others: VecDeque::new(), low: VecDeque::new(), turn: Turn::default() }
    }
}

impl<T> Queue<T> {
    pub(crate) fn len(&self) -> usize {
        self.others.len() + self.low.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn push(&mut self, low: bool, item: T) {
        if low { self.low.push_back(item) } else { self.others.push_back(item) }
    }

    /// Removes the next item, if there is one; true: it is of low priority.
    pub(crate) fn pop(&mut self) -> Option<(bool, T)> {
        if self.low.is_empty() {
            return self.others.pop_front().map(|item| (false, item));
        }
        if self.others.is_empty() || self.turn.is_low_due() {
            self.turn.low();
            return self.low.pop_front().map(|item| (true, item));
        }
        self.turn.other();
        self.others.pop_front().map(|item| (false, item))
    }

    /// Puts back the item that was next, as the first of its priority.
    pub(crate) fn put_back(&mut self, low: bool, item: T) {
        if low { self.low.push_front(item) } else { self.others.push_front(item) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Queue, SHARE};

    /// Returns the next items: `.` for others, `l` for low priority.
    fn next(queue: &mut Queue<u32>, count: usize) -> String {
        (0..count).map(|_| if queue.pop().unwrap().0 { 'l' } else { '.' }).collect()
    }

    #[test]
    fn both_get_on() {
        let mut queue = Queue::default();
        for number in 0..100 {
            queue.push(true, number);
            queue.push(false, number);
        }
        let round = ".".repeat(SHARE as usize) + "l";
        assert_eq!(next(&mut queue, 18), round.repeat(2));
        // None of the others are left: no turn is wasted.
        assert_eq!(next(&mut queue, 182).matches('l').count(), 98);
        assert!(queue.is_empty());
    }

    #[test]
    fn each_priority_keeps_its_order() {
        let mut queue = Queue::default();
        for number in 0..50 {
            queue.push(number % 3 == 0, number);
        }
        let mut last = [None; 2];
        while let Some((low, number)) = queue.pop() {
            assert!(last[usize::from(low)].replace(number) < Some(number));
        }
        assert_eq!(last, [Some(49), Some(48)]);
    }

    #[test]
    fn who_was_alone_owes_nothing() {
        let mut queue = Queue::default();
        (0..1000).for_each(|number| queue.push(true, number));
        next(&mut queue, 500);
        (0..20).for_each(|number| queue.push(false, number));
        assert_eq!(next(&mut queue, 9), ".".repeat(8) + "l");
        // Nor do others lose turns for the time in which none of low priority waited.
        let mut queue = Queue::default();
        (0..1000).for_each(|number| queue.push(false, number));
        next(&mut queue, 500);
        (0..20).for_each(|number| queue.push(true, number));
        assert_eq!(next(&mut queue, 9), ".".repeat(8) + "l");
    }

    #[test]
    fn what_cannot_come_yet_stays_first() {
        let mut queue = Queue::default();
        queue.push(false, 1);
        queue.push(false, 2);
        let (low, item) = queue.pop().unwrap();
        queue.put_back(low, item);
        assert_eq!(queue.pop(), Some((false, 1)));
    }
}
