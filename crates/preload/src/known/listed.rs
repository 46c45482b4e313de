//! What is known of the names of one directory, from one listing or from parts of different age.

use super::order::Order;
use super::{Asked, NAMES_MAX};
use std::collections::HashMap;
use std::time::Instant;
use towline_client::DirEntry;
use towline_wire::Attr;

/// Number of names of a long directory that are asked for one by one before some 800 others are listed
/// together, which takes about as long.
const MISSES: usize = 64;

/// What is known of a name.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    /// Its attributes; if it is a link, those of the link.
    Is(Attr),
    /// There is a file of this type and identity; its attributes may have changed.
    There(u32, u64),
    Missing,
    /// It may be missing, or be anything.
    Unknown,
}

impl Named {
    /// Returns what is still known if the attributes may have changed.
    pub(super) fn changed(self) -> Self {
        match self {
            Self::Is(attr) => Self::There(attr.file_type(), attr.identity()),
            other => other,
        }
    }

    /// Returns the type of the file; `None` if it is not known.
    pub(crate) fn file_type(self) -> Option<u32> {
        match self {
            Self::Is(attr) => Some(attr.file_type()),
            Self::There(file_type, _) => Some(file_type),
            Self::Missing | Self::Unknown => None,
        }
    }

    /// Returns the identity of the file; `None` if it is not known.
    pub(crate) fn identity(self) -> Option<u64> {
        match self {
            Self::Is(attr) => Some(attr.identity()),
            Self::There(_, identity) => Some(identity),
            Self::Missing | Self::Unknown => None,
        }
    }
}

/// Returns true for names that a server may take for the same: they differ in case at most, or have letters of which
/// that is not known here.
fn is_like(one: &[u8], other: &[u8]) -> bool {
    one.eq_ignore_ascii_case(other) || !one.is_ascii() && !other.is_ascii()
}

/// What is known of the names of a directory.
pub(super) struct Listed {
    /// When the latest part was requested.
    pub(super) last: Asked,
    /// Whether that was the whole directory.
    pub(super) complete: bool,
    /// A part of it was listed, with attributes.
    is_listed: bool,
    /// This process has changed names since.
    is_changed: bool,
    /// What is known of each name, and since when, if requested after the same changes as the latest part.
    pub(super) names: HashMap<Vec<u8>, (Named, Instant)>,
    pub(super) order: Order,
    /// Number of uses since the last request, and of looks at names in all.
    pub(super) used: u32,
    pub(super) looks: usize,
    /// Number of looks still due before names in the middle of the directory are requested together.
    pub(super) debt: usize,
    /// Number of lookups of unlisted names since a part was listed last.
    misses: usize,
    /// What is known of the directory itself, when that was requested, and whether a link at its path was
    /// followed.
    pub(super) own: Option<(bool, Named, Instant)>,
}

impl Listed {
    pub(super) fn new(last: Asked) -> Self {
        let (names, order) = (HashMap::new(), Order::default());
        let (used, looks, debt, misses) = (0, 0, 0, 0);
        let (complete, is_listed, is_changed, own) = (false, false, false, None);
        Self { last, complete, is_listed, is_changed, names, order, used, looks, debt, misses, own }
    }

    /// Adds entries that follow `cookie`; `end` says that no others follow.
    pub(super) fn add(&mut self, asked: Asked, cookie: u64, entries: &[DirEntry], end: bool) {
        let is_all = cookie == 0 && end;
        self.order.add(cookie, entries.iter().map(|entry| (&entry.name[..], entry.cookie)), end);
        self.misses = 0;
        if entries.iter().all(|entry| entry.attr.is_none()) {
            return;
        }
        self.renew(asked);
        if is_all {
            self.names.clear();
            self.is_changed = false;
        }
        (self.last, self.complete, self.is_listed) = (asked, is_all, true);
        let of = |entry: &DirEntry| {
            let named = entry.attr.map_or(Named::Unknown, Named::Is);
            (entry.name.clone(), (named, asked.when))
        };
        self.names.extend(entries.iter().map(of));
    }

    /// Forgets what was requested after other changes.
    pub(super) fn renew(&mut self, asked: Asked) {
        if self.last.changes != asked.changes {
            self.names.clear();
            (self.last, self.complete, self.is_listed, self.own) = (asked, false, false, None);
        }
    }

    /// Adds what is known of a single name.
    pub(super) fn add_name(&mut self, asked: Asked, name: &[u8], named: Named) {
        self.renew(asked);
        self.names.insert(name.to_vec(), (named, asked.when));
    }

    /// Notes what is known of a name after a change of this process. Names that differ in case only may be the same
    /// for the server.
    pub(super) fn change(&mut self, name: &[u8], named: Named, when: Instant) {
        for (other, (named, _)) in &mut self.names {
            if is_like(other, name) {
                *named = Named::Unknown;
            }
        }
        self.names.insert(name.to_vec(), (named, when));
        self.is_changed = true;
    }

    /// Returns true if what is known of the directory depends on this name.
    pub(super) fn has_like(&self, name: &[u8]) -> bool {
        self.complete || self.names.keys().any(|other| is_like(other, name))
    }

    /// Notes that the directory is empty.
    pub(super) fn is_empty(&mut self, asked: Asked) {
        self.names.clear();
        (self.last, self.complete, self.is_listed, self.is_changed) = (asked, true, false, false);
    }

    /// Returns true if the directory was there when what is known of it was requested, rather than its names not
    /// being found because it was missing.
    pub(super) fn is_there(&self) -> bool {
        let is_there = |(named, _): &(Named, Instant)| named.file_type().is_some();
        self.complete || self.own.is_some() || self.names.values().any(is_there)
    }

    /// Counts a lookup of an unlisted name. Returns the cookie of an unlisted part if that should be
    /// requested now.
    pub(super) fn missed(&mut self) -> Option<u64> {
        self.misses += 1;
        self.order.rest().filter(|_| self.misses >= MISSES)
    }

    /// Returns true if a part of it may be used.
    pub(super) fn is_valid(&self, now: Asked) -> bool {
        self.is_listed && self.last.is_valid(now)
    }

    /// Returns what is known of a name.
    pub(super) fn find(&self, name: &[u8], now: Asked) -> Option<Named> {
        let valid = |when| Asked { when, ..self.last }.is_valid(now);
        match self.names.get(name) {
            Some((named, when)) => valid(*when).then_some(*named),
            None if !self.complete || !valid(self.last.when) => None,
            None if self.is_changed && self.names.keys().any(|other| is_like(other, name)) => None,
            None => Some(Named::Missing),
        }
    }

    /// Returns what is known of the directory itself, if that may be used.
    pub(super) fn own(&self, follow: bool, now: Asked) -> Option<Named> {
        let (followed, named, when) = self.own?;
        let is_it = follow || !followed;
        (is_it && Asked { when, ..self.last }.is_valid(now)).then_some(named)
    }

    /// If there is no room for more, forgets the oldest eighth of the names and all of the same age.
    pub(super) fn forget_oldest(&mut self, more: usize) {
        if self.names.len() + more > NAMES_MAX {
            let mut ages = self.names.values().map(|(_, when)| *when).collect::<Vec<_>>();
            let eighth = ages.len() / 8;
            let (_, oldest, _) = ages.select_nth_unstable(eighth);
            self.names.retain(|_, (_, when)| when > oldest);
        }
    }
}
