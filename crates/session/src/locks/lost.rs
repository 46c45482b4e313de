//! Locks whose owners were away for too long, but may come back and lock again: they must learn that others have had
//! the locks in between.

use super::{FileKey, Owner, Range, exclude};
use std::collections::{HashMap, VecDeque};

/// Most locks that are remembered. When there are more, the oldest are forgotten.
const LOST_MAX: usize = 1024;

/// Most names of ended sessions that are remembered.
const ENDED_MAX: usize = 16 * 1024;

#[derive(Clone, Copy)]
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
    /// The sessions with which clients are back, by the names under which they have lost others.
    back: HashMap<u64, u64>,
    /// The first sessions of clients that have another one now, by that.
    first: HashMap<u64, u64>,
    /// The first sessions of clients that have lost all of theirs, by the names under which these may come back.
    ended: VecDeque<(u64, u64)>,
}

impl LostLocks {
    /// Remembers a lock that ends although its owner may come back.
    pub(super) fn remember(&mut self, file: FileKey, owner: Owner, range: Range) {
        self.push(Lost { file, owner, range, is_taken: false });
    }

    fn push(&mut self, lost: Lost) {
        if self.lost.len() == LOST_MAX {
            self.lost.pop_front();
        }
        self.lost.push_back(lost);
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

    /// Remembers what a session has lost under names, or for the sessions that have come back under them.
    pub(super) fn leave(&mut self, session: u64, names: &[u64]) {
        self.back.retain(|_, back| *back != session);
        let to = names.iter().map(|name| *self.back.get(name).unwrap_or(name)).collect::<Vec<_>>();
        self.pass_on(session, &to);
        let first = self.first.remove(&session).unwrap_or(session);
        for name in names {
            match self.back.get(name) {
                Some(back) => _ = self.first.insert(*back, first),
                None => self.ended.push_back((*name, first)),
            }
        }
        self.ended.drain(..self.ended.len().saturating_sub(ENDED_MAX));
    }

    /// Gives a session what is remembered under a name, and what will be.
    pub(super) fn come_back(&mut self, name: u64, session: u64) {
        self.back.insert(name, session);
        self.pass_on(name, &[session]);
        if let Some((_, first)) = self.ended.iter().rfind(|(ended, _)| *ended == name) {
            self.first.insert(session, *first);
        }
    }

    /// Returns this owner as it was called in the first session of its client.
    pub(super) fn at_first(&self, owner: Owner) -> Owner {
        Owner { session: *self.first.get(&owner.session).unwrap_or(&owner.session), ..owner }
    }

    fn pass_on(&mut self, from: u64, to: &[u64]) {
        let is_from = |lost: &Lost| lost.owner.session == from;
        if !self.lost.iter().any(is_from) {
            return;
        }
        let (passed_on, others) = std::mem::take(&mut self.lost).into_iter().partition(is_from);
        self.lost = others;
        for lost in Vec::from(passed_on) {
            for &session in to {
                self.push(Lost { owner: Owner { session, ..lost.owner }, ..lost });
            }
        }
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
