//! The names in one directory, in an order that stays while names come and go.

use super::inode::Inode;
use foldhash::fast::RandomState;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use towline_mem::expect;

/// Cookie of `.`.
pub(super) const COOKIE_SELF: u64 = 1;
/// Cookie of `..`, and the last that no name has.
pub(super) const COOKIE_PARENT: u64 = 2;

/// What a name costs in both tables, which are filled to two thirds or so: its place in each has 48 or 56 bytes.
const NAME_BYTES: u64 = 144;
/// Longer names have memory of their own, in both.
const SHORT_NAME_BYTES: usize = 23;

/// A name. Nearly all are kept where they are looked for, not in memory of their own, which is in no cache most of the time.
pub(super) type Name = SmallVec<[u8; SHORT_NAME_BYTES]>;

/// One name.
pub(super) struct Entry {
    /// The name.
    pub(super) name: Name,
    /// What it names.
    pub(super) inode: Arc<Inode>,
}

/// Names by hash and by cookie. A new name gets a higher cookie than all before, and keeps it:
/// a listing that goes on behind a cookie neither repeats a name nor misses one that was there.
#[derive(Default)]
pub(super) struct Names {
    by_name: HashMap<Name, (u64, Arc<Inode>), RandomState>,
    by_cookie: BTreeMap<u64, Entry>,
    cookie_last: u64,
    dead: bool,
}

/// What the name costs.
pub(super) fn name_cost(name: &[u8]) -> u64 {
    let own = if name.len() > SHORT_NAME_BYTES { 2 * name.len() } else { 0 };
    NAME_BYTES + own as u64
}

impl Names {
    /// What `name` names.
    pub(super) fn find(&self, name: &[u8]) -> Option<&Arc<Inode>> {
        let (_, inode) = self.by_name.get(name)?;
        // Attributes and data will be looked at one after the other, each behind a lock.
        expect(&**inode);
        Some(inode)
    }

    /// True without names.
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// True once the directory is removed; it gets no more names.
    pub(super) fn is_dead(&self) -> bool {
        self.dead
    }

    /// Notes that the directory is removed.
    pub(super) fn bury(&mut self) {
        self.dead = true;
    }

    /// Adds a name that is not there, or lets one that is name something else, in its place of
    /// the order; returns what it named.
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

    /// Removes a name; returns what it named.
    pub(super) fn remove(&mut self, name: &[u8]) -> Option<Arc<Inode>> {
        let (cookie, inode) = self.by_name.remove(name)?;
        self.by_cookie.remove(&cookie);
        Some(inode)
    }

    /// The names behind `cookie`, in order.
    pub(super) fn after(&self, cookie: u64) -> impl Iterator<Item = (u64, &Entry)> {
        let range = (Bound::Excluded(cookie.max(COOKIE_PARENT)), Bound::Unbounded);
        self.by_cookie.range(range).map(|(cookie, entry)| (*cookie, entry))
    }

    /// All entries.
    pub(super) fn into_entries(self) -> impl Iterator<Item = Entry> {
        drop(self.by_name);
        self.by_cookie.into_values()
    }
}
