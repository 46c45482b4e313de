//! What has been locked since the server started, or was then. A client may come back with locks of which this server
//! knows nothing, as they were held before a restart: it must learn if others have had them since.

use super::{FileKey, Owner, Range, exclude};
use std::collections::HashMap;
use towline_wire::request::lock;

/// Most files of which it is known what has been locked in them.
const FILES_MAX: usize = 16 * 1024;

/// Most ranges that are known of a file, and of all files together but for one of each. If there are more, all of the
/// file counts as locked.
const RANGES_MAX: usize = 1024;
const ALL_RANGES_MAX: usize = 64 * 1024;

struct Had {
    range: Range,
    /// `None`: several owners.
    by: Option<Owner>,
}

/// Ranges that have been locked, and by whom.
#[derive(Default)]
pub(super) struct HadLocks {
    files: HashMap<FileKey, Vec<Had>>,
    /// The number of ranges in all files.
    count: usize,
    /// Something may have been locked in any other file.
    is_full: bool,
    /// All that was locked at the start is noted: what somebody asks for that is not, others may have had before.
    is_complete: bool,
}

impl HadLocks {
    /// Creates the record of a server that begins with all locks that were held (`is_complete`), or knows nothing of
    /// before.
    pub(super) fn since(is_complete: bool) -> Self {
        Self { is_complete, ..Self::default() }
    }

    /// Notes that this owner has this lock from now on.
    pub(super) fn note_held(&mut self, file: FileKey, owner: Owner, range: &Range) {
        if self.files.len() == FILES_MAX && !self.files.contains_key(&file) {
            self.is_full = true;
            return;
        }
        let had = self.files.entry(file).or_default();
        if let Some(known) = had.iter_mut().find(|known| known.covers(range)) {
            known.by = known.by.filter(|by| *by == owner);
        } else if had.len() < RANGES_MAX && self.count < ALL_RANGES_MAX {
            self.count += 1;
            had.push(Had { range: *range, by: Some(owner) });
        } else {
            let is_one = had.iter().all(|had| had.by == Some(owner));
            let range = Range { kind: lock::EXCLUSIVE, start: 0, last: u64::MAX };
            self.count = self.count + 1 - had.len();
            *had = vec![Had { range, by: is_one.then_some(owner) }];
        }
    }

    /// Returns true if others may have had a lock that excludes this one of `owner`.
    pub(super) fn others_may_have_had(&self, file: FileKey, owner: Owner, range: &Range) -> bool {
        let Some(had) = self.files.get(&file) else { return self.is_full || self.is_complete };
        let is_theirs = |had: &Had| had.by != Some(owner) && exclude(&had.range, range);
        let is_its = |had: &Had| had.by == Some(owner) && had.covers(range);
        had.iter().any(is_theirs) || self.is_complete && !had.iter().any(is_its)
    }
}

impl Had {
    /// Returns true if who had this lock had the other one, too.
    fn covers(&self, other: &Range) -> bool {
        (self.range.start..=self.range.last).contains(&other.start)
            && other.last <= self.range.last
            && [lock::EXCLUSIVE, other.kind].contains(&self.range.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileKey = (1, 2, false);

    fn owner(id: u64) -> Owner {
        Owner { session: id, id, process: false }
    }

    fn range(kind: u8, start: u64, length: u64) -> Range {
        Range::new(kind, start, length).unwrap()
    }

    #[test]
    fn what_others_have_had_is_known_by_range_and_kind() {
        let (shared, exclusive) = (lock::SHARED, lock::EXCLUSIVE);
        let mut had = HadLocks::default();
        had.note_held(FILE, owner(1), &range(exclusive, 0, 10));
        had.note_held(FILE, owner(2), &range(shared, 10, 10));
        for (asks, kind, start, refused) in [
            (1, exclusive, 5, false),
            (2, shared, 5, true),
            (1, shared, 10, false),
            (1, exclusive, 10, true),
            (2, exclusive, 10, false),
            (3, exclusive, 20, false),
        ] {
            let found = had.others_may_have_had(FILE, owner(asks), &range(kind, start, 1));
            assert_eq!(found, refused, "owner {asks}, kind {kind}, at {start}");
        }
        assert!(!had.others_may_have_had((1, 3, false), owner(3), &range(exclusive, 0, 0)));
        // The same by another one.
        had.note_held(FILE, owner(2), &range(exclusive, 3, 2));
        assert!(had.others_may_have_had(FILE, owner(1), &range(shared, 3, 1)));
    }

    #[test]
    fn what_is_not_known_may_have_been_had() {
        let mut had = HadLocks::default();
        let all = range(lock::SHARED, 0, 0);
        let note = |had: &mut HadLocks, by| {
            for start in 0..=RANGES_MAX as u64 {
                had.note_held(FILE, owner(by), &range(lock::SHARED, 2 * start, 1));
            }
        };
        note(&mut had, 1);
        assert!(!had.others_may_have_had(FILE, owner(1), &all), "there are no others");
        assert!(had.others_may_have_had(FILE, owner(2), &all));
        had.note_held(FILE, owner(2), &all);
        note(&mut had, 1);
        assert!(had.others_may_have_had(FILE, owner(1), &all));
        let file = |number| (9, number, false);
        for number in 1..FILES_MAX as u64 {
            assert!(!had.others_may_have_had(file(number), owner(1), &all));
            (0..5).for_each(|start| had.note_held(file(number), owner(1), &range(1, 2 * start, 1)));
        }
        assert!(had.count <= ALL_RANGES_MAX + FILES_MAX);
        assert_eq!(had.count, had.files.values().map(Vec::len).sum());
        let last = FILES_MAX as u64 - 1;
        assert!(had.others_may_have_had(file(last), owner(2), &range(1, 90, 1)), "one too many");
        assert!(!had.others_may_have_had(file(1), owner(2), &range(1, 90, 1)));
        had.note_held(file(last + 1), owner(1), &all);
        assert!(had.others_may_have_had(file(last + 2), owner(2), &all));
    }
}
