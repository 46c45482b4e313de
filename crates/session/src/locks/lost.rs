//! Locks whose owners were away for too long, but may come back and lock again: they must learn that others have had
//! the locks in between.

use super::{FileKey, Owner, Range, exclude};
use std::collections::VecDeque;

/// Most locks that are remembered. When there are more, the oldest are forgotten.
const LOST_MAX: usize = 1024;

struct Lost {
    file: FileKey,
    owner: Owner,
    range: Range,
    /// Another owner has had a lock that excludes this one.
    is_taken: bool,
}

/// Locks that ended although their owners may come back.
#[derive(Default)]
pub(super) struct LostLocks {
    lost: VecDeque<Lost>,
}

impl LostLocks {
    /// Remembers a lock that ends although its owner may come back.
    pub(super) fn remember(&mut self, file: FileKey, owner: Owner, range: Range) {
        if self.lost.len() == LOST_MAX {
            self.lost.pop_front();
        }
        self.lost.push_back(Lost { file, owner, range, is_taken: false });
    }

    /// Notes that this owner has this lock from now on.
    pub(super) fn note_held(&mut self, file: FileKey, owner: Owner, range: &Range) {
        self.lost.retain(|lost| !(lost.is_of(file, owner) && lost.range.overlaps(range)));
        for lost in self.lost.iter_mut().filter(|lost| lost.file == file && lost.owner != owner) {
            lost.is_taken |= exclude(&lost.range, range);
        }
    }

    /// Returns whether others could lock what this owner has lost within the range; `None` if it has lost nothing
    /// there, as far as is known.
    pub(super) fn was_taken(&self, file: FileKey, owner: Owner, range: &Range) -> Option<bool> {
        let is_meant = |lost: &&Lost| lost.is_of(file, owner) && lost.range.overlaps(range);
        self.lost
            .iter()
            .filter(is_meant)
            .map(|lost| lost.is_taken)
            .reduce(|one, other| one || other)
    }

    /// Forgets an owner that does not come back.
    pub(super) fn forget(&mut self, owner: Owner) {
        self.lost.retain(|lost| lost.owner != owner);
    }
}

impl Lost {
    fn is_of(&self, file: FileKey, owner: Owner) -> bool {
        (self.file, self.owner) == (file, owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_wire::request::lock;

    #[test]
    fn the_oldest_are_forgotten() {
        let mut all = LostLocks::default();
        let owner = |id| Owner { session: 1, id, process: true };
        let (file, range) = ((1, 2, false), Range::new(lock::SHARED, 0, 0).unwrap());
        (0..LOST_MAX as u64 + 1).for_each(|id| all.remember(file, owner(id), range));
        all.note_held(file, owner(u64::MAX), &Range { kind: lock::EXCLUSIVE, ..range });
        let was_taken = |id| all.was_taken(file, owner(id), &range);
        assert_eq!([0, 1, LOST_MAX as u64].map(was_taken), [None, Some(true), Some(true)]);
    }
}
