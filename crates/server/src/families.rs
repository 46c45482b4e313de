//! Families of sessions: the processes of one program run, which share their open files.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use towline_session::files::{Files, SharedFiles};

/// Set in the number that owns a family's locks: sessions have small numbers.
const FAMILY_BIT: u64 = 1 << 63;

/// The open files of each family that has a session.
#[derive(Default)]
pub(crate) struct Families(Mutex<HashMap<u64, SharedFiles>>);

impl Families {
    /// The files of this family; `session` is its new member.
    pub(crate) fn join(&self, family: u64, session: u64, epoch: u32) -> SharedFiles {
        let mut families = self.0.lock();
        let new = || Arc::new(Mutex::new(Files::new(session | FAMILY_BIT, epoch)));
        families.entry(family).or_insert_with(new).clone()
    }

    /// A session ends. Yields the owner of its open files' locks if nobody shares them any more.
    pub(crate) fn leave(&self, files: SharedFiles) -> Option<u64> {
        let mut families = self.0.lock();
        let owner = files.lock().owner;
        if owner & FAMILY_BIT == 0 {
            return Some(owner);
        }
        drop(files);
        let before = families.len();
        // Only the table itself is left to hold them. New members join under this lock.
        families.retain(|_, files| Arc::strong_count(files) > 1);
        (families.len() < before).then_some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_go_with_the_last_member() {
        let families = Families::default();
        let (first, second) = (families.join(7, 1, 1), families.join(7, 2, 1));
        assert!(Arc::ptr_eq(&first, &second));
        let other = families.join(8, 3, 1);
        assert!(!Arc::ptr_eq(&first, &other));
        assert_eq!(families.leave(first), None);
        assert_eq!(families.leave(second), Some(1 | FAMILY_BIT));
        assert_eq!(families.join(7, 4, 1).lock().owner, 4 | FAMILY_BIT);
        let own = Arc::new(Mutex::new(Files::new(5, 1)));
        assert_eq!(families.leave(own), Some(5));
    }
}
