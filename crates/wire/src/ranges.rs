//! Locked ranges of a file, as servers grant them and clients remember them.

use crate::Errno;
use crate::request::lock;

/// A range of bytes and the kind of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)] // a range has no other fields
pub struct Range {
    /// [`lock::SHARED`], [`lock::EXCLUSIVE`] or [`lock::UNLOCK`].
    pub kind: u8,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive.
    pub last: u64,
}

impl Range {
    /// Makes a range from the fields of a request; length zero means to the end of the file.
    ///
    /// # Errors
    /// `EINVAL` for an unknown kind, `EOVERFLOW` for a range beyond the largest offset.
    pub fn new(kind: u8, start: u64, length: u64) -> Result<Self, Errno> {
        if kind > lock::UNLOCK {
            return Err(Errno::EINVAL);
        }
        let last = if length == 0 {
            u64::MAX
        } else {
            start.checked_add(length - 1).ok_or(Errno::EOVERFLOW)?
        };
        Ok(Self { kind, start, last })
    }

    /// Returns the length as in a request: zero if the range reaches to the end.
    #[must_use]
    pub fn length(&self) -> u64 {
        if self.last == u64::MAX { 0 } else { self.last - self.start + 1 }
    }

    /// Returns true if the ranges have a byte in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start <= other.last && other.start <= self.last
    }

    /// Returns true if the ranges overlap or are adjacent.
    fn touches(&self, other: &Self) -> bool {
        self.start <= other.last.saturating_add(1) && other.start <= self.last.saturating_add(1)
    }

    /// Replaces the locks of `owner` within this range and splits those that reach beyond it. Merges
    /// overlapping and adjacent locks of the same kind, as the kernel does.
    pub fn apply<Owner: Copy + PartialEq>(mut self, owner: Owner, held: &mut Vec<(Owner, Self)>) {
        let mut kept = Vec::with_capacity(held.len() + 2);
        for (holder, held) in held.drain(..) {
            if holder == owner && held.kind == self.kind && held.touches(&self) {
                self.start = self.start.min(held.start);
                self.last = self.last.max(held.last);
                continue;
            }
            if holder != owner || !held.overlaps(&self) {
                kept.push((holder, held));
                continue;
            }
            if held.start < self.start {
                kept.push((holder, Self { last: self.start - 1, ..held }));
            }
            if held.last > self.last {
                kept.push((holder, Self { start: self.last + 1, ..held }));
            }
        }
        if self.kind != lock::UNLOCK {
            kept.push((owner, self));
        }
        *held = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_split_and_ranges_side_by_side_are_one() {
        let mut held = Vec::new();
        let mut lock = |owner, kind, start, length| {
            Range::new(kind, start, length).unwrap().apply(owner, &mut held);
            let of = held.iter().filter(|(other, _)| *other == owner);
            let mut of: Vec<_> = of.map(|(_, r)| (r.kind, r.start, r.length())).collect();
            of.sort_unstable_by_key(|(_, start, _)| *start);
            of
        };
        let (shared, exclusive) = (lock::SHARED, lock::EXCLUSIVE);
        assert_eq!(lock(2, shared, 5, 5), [(shared, 5, 5)]);
        assert_eq!(lock(1, shared, 0, 10), [(shared, 0, 10)]);
        assert_eq!(lock(1, shared, 20, 10), [(shared, 0, 10), (shared, 20, 10)]);
        assert_eq!(lock(1, shared, 10, 10), [(shared, 0, 30)]);
        assert_eq!(lock(1, shared, 5, 5), [(shared, 0, 30)]);
        let split = [(shared, 0, 8), (exclusive, 8, 2), (shared, 10, 20)];
        assert_eq!(lock(1, exclusive, 8, 2), split);
        assert_eq!(lock(1, exclusive, 10, 0), [(shared, 0, 8), (exclusive, 8, 0)]);
        assert_eq!(lock(1, shared, 8, 0), [(shared, 0, 0)]);
        let ends = [(shared, 0, 4), (shared, 6, 0)];
        assert_eq!(lock(1, lock::UNLOCK, 4, 2), ends);
        assert_eq!(lock(1, lock::UNLOCK, 0, 0), []);
        assert_eq!(lock(2, lock::UNLOCK, 9, 1), [(shared, 5, 4)], "another owner's");
    }

    #[test]
    fn ranges_end_with_the_largest_offset() {
        assert_eq!(Range::new(lock::SHARED, 1, u64::MAX).unwrap().last, u64::MAX);
        assert_eq!(Range::new(lock::SHARED, 2, u64::MAX), Err(Errno::EOVERFLOW));
        assert_eq!(Range::new(lock::UNLOCK + 1, 0, 1), Err(Errno::EINVAL));
    }
}
