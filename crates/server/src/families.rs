//! Families of sessions: the processes of one `towline run`, which share their open files.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use towline_session::files::{Files, SharedFiles};

/// Set in the number that owns a family's locks, to tell it from sessions, whose numbers are small.
const FAMILY_BIT: u64 = 1 << 63;

/// The open files of each family that has a session.
#[derive(Default)]
pub(crate) struct Families(Mutex<HashMap<u64, Family>>);

/// The open files of a family, and its number of sessions.
struct Family {
    files: SharedFiles,
    members: usize,
}

impl Families {
    /// Adds `session` to a family and returns the family's files.
    pub(crate) fn join(&self, family: u64, session: u64, epoch: u32) -> SharedFiles {
        let mut families = self.0.lock();
        let new = || Family {
            files: Arc::new(Mutex::new(Files::new(session | FAMILY_BIT, epoch))),
            members: 0,
        };
        let family = families.entry(family).or_insert_with(new);
        family.members += 1;
        family.files.clone()
    }

    /// Removes a session. Returns its open files if no other session shares them any more.
    pub(crate) fn leave(&self, files: SharedFiles) -> Option<SharedFiles> {
        if files.lock().owner & FAMILY_BIT == 0 {
            return Some(files);
        }
        let mut families = self.0.lock();
        let is_left = |family: &mut Family| {
            family.members -= usize::from(Arc::ptr_eq(&family.files, &files));
            family.members == 0
        };
        let left = families.extract_if(|_, family| is_left(family)).count() > 0;
        left.then_some(files)
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
        let leave = |files| families.leave(files).map(|files| files.lock().owner);
        assert_eq!(leave(first), None);
        assert_eq!(leave(second), Some(1 | FAMILY_BIT));
        assert_eq!(families.join(7, 4, 1).lock().owner, 4 | FAMILY_BIT);
        let own = Arc::new(Mutex::new(Files::new(5, 1)));
        assert_eq!(leave(own), Some(5));
    }
}
