//! The names in one directory, in an order that is stable while names come and go.

use super::inode::Inode;
use foldhash::fast::RandomState;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use towline_mem::expect;

/// Cookie of `.`.
pub(super) const COOKIE_SELF: u64 = 1;
/// Cookie of `..`; those of names are higher.
pub(super) const COOKIE_PARENT: u64 = 2;

/// Charge for a name in both tables, which are about two thirds full: an entry in them takes 48 or
/// 56 bytes.
const NAME_BYTES: u64 = 144;
/// Longer names are stored separately, in both tables.
const SHORT_NAME_BYTES: usize = 23;

/// A name. Nearly all are stored inline in the tables, not in memory of their own, which would
/// usually not be in the CPU cache.
pub(super) type Name = SmallVec<[u8; SHORT_NAME_BYTES]>;

/// A directory entry.
pub(super) struct Entry {
    /// The name.
    pub(super) name: Name,
    /// The inode that it names.
    pub(super) inode: Arc<Inode>,
}

/// Names by hash and by cookie. A new name gets a higher cookie than all before, and keeps it: a
/// listing that continues after a cookie neither repeats a name nor misses one that was there
/// throughout.
#[derive(Default)]
pub(super) struct Names {
    by_name: HashMap<Name, (u64, Arc<Inode>), RandomState>,
    by_cookie: BTreeMap<u64, Entry>,
    cookie_last: u64,
    dead: bool,
}

/// Returns the charge for a name.
pub(super) fn name_cost(name: &[u8]) -> u64 {
    let own = if name.len() > SHORT_NAME_BYTES { 2 * name.len() } else { 0 };
    NAME_BYTES + own as u64
}

impl Names {
    /// Returns the inode that `name` names.
    pub(super) fn find(&self, name: &[u8]) -> Option<&Arc<Inode>> {
        let (_, inode) = self.by_name.get(name)?;
        // The caller will look at attributes and data one after the other, each behind a lock.
        expect(&**inode);
        Some(inode)
    }

    /// Returns true if there are no names.
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns true if the directory has been removed. It then gets no more names.
    pub(super) fn is_dead(&self) -> bool {
        self.dead
    }

    /// Records that the directory has been removed.
    pub(super) fn bury(&mut self) {
        self.dead = true;
    }

    /// Adds a name, or makes an existing one name another inode and keeps its place in the order.
    /// Returns the inode that it named before.
    pub(super) fn insert(&mut self, name: &[u8], inode: Arc<Inode>) -> Option<Arc<Inode>> {
        if let Some((cookie, old)) = self.by_name.get_mut(name) {
            if let Some(entry) = self.by_cookie.get_mut(cookie) {
                entry.inode = inode.clone();
            }
            return Some(std::mem::replace(old, inode));
        }
        let cookie = self.cookie_last.max(COOKIE_PARENT) + 1;
        self.cookie_last = cookie;
        let name = Name::from_slice(name);
        self.by_cookie.insert(cookie, Entry { name: name.clone(), inode: inode.clone() });
        self.by_name.insert(name, (cookie, inode));
        None
    }

    /// Removes a name. Returns the inode that it named.
    pub(super) fn remove(&mut self, name: &[u8]) -> Option<Arc<Inode>> {
        let (cookie, inode) = self.by_name.remove(name)?;
        self.by_cookie.remove(&cookie);
        Some(inode)
    }

    /// Returns the names after `cookie`, in order.
    pub(super) fn after(&self, cookie: u64) -> impl Iterator<Item = (u64, &Entry)> {
        let range = (Bound::Excluded(cookie.max(COOKIE_PARENT)), Bound::Unbounded);
        self.by_cookie.range(range).map(|(cookie, entry)| (*cookie, entry))
    }

    /// Returns all entries.
    pub(super) fn into_entries(self) -> impl Iterator<Item = Entry> {
        drop(self.by_name);
        self.by_cookie.into_values()
    }
}
