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

/// What is known of the names of a directory.
pub(super) struct Listed {
    /// When the latest part was requested.
    pub(super) last: Asked,
    /// Whether that was the whole directory.
    pub(super) complete: bool,
    /// Attributes and request time of each name, if requested after the same changes as the latest part.
    pub(super) names: HashMap<Vec<u8>, (Option<Attr>, Instant)>,
    pub(super) order: Order,
    /// Number of uses since the last request, and of looks at names in all.
    pub(super) used: u32,
    pub(super) looks: usize,
    /// Number of looks still due before names in the middle of the directory are requested together.
    pub(super) debt: usize,
    /// Number of lookups of unlisted names since a part was listed last.
    misses: usize,
    /// The directory's own attributes, when they were requested, and whether a link at its path was
    /// followed.
    pub(super) own: Option<(bool, Attr, Instant)>,
}

impl Listed {
    pub(super) fn new(last: Asked) -> Self {
        let (names, order) = (HashMap::new(), Order::default());
        let (used, looks, debt, misses) = (0, 0, 0, 0);
        Self { last, complete: false, names, order, used, looks, debt, misses, own: None }
    }

    /// Adds entries that follow `cookie`; `end` says that no others follow.
    pub(super) fn add(&mut self, asked: Asked, cookie: u64, entries: &[DirEntry], end: bool) {
        let is_all = cookie == 0 && end;
        self.order.add(cookie, entries.iter().map(|entry| (&entry.name[..], entry.cookie)), end);
        self.misses = 0;
        if entries.iter().all(|entry| entry.attr.is_none()) {
            return;
        }
        if is_all || self.last.changes != asked.changes {
            self.names.clear();
            self.own = self.own.filter(|_| self.last.changes == asked.changes);
        }
        (self.last, self.complete) = (asked, is_all);
        let of = |entry: &DirEntry| (entry.name.clone(), (entry.attr, asked.when));
        self.names.extend(entries.iter().map(of));
    }

    /// Counts a lookup of an unlisted name. Returns the cookie of an unlisted part if that should be
    /// requested now.
    pub(super) fn missed(&mut self) -> Option<u64> {
        self.misses += 1;
        self.order.rest().filter(|_| self.misses >= MISSES)
    }

    /// Returns true if a part of it may be used.
    pub(super) fn is_valid(&self, now: Asked) -> bool {
        !self.names.is_empty() && self.last.is_valid(now)
    }

    /// Returns what is known of a name; `Some(None)`: it does not exist, or its attributes cannot be read.
    pub(super) fn find(&self, name: &[u8], now: Asked) -> Option<Option<Attr>> {
        let valid = |when| Asked { when, ..self.last }.is_valid(now);
        match self.names.get(name) {
            Some((attr, when)) => valid(*when).then_some(*attr),
            None => (self.complete && valid(self.last.when)).then_some(None),
        }
    }

    /// Returns the directory's own attributes if they may be used.
    pub(super) fn own(&self, follow: bool, now: Asked) -> Option<Attr> {
        let (followed, attr, when) = self.own?;
        (followed == follow && Asked { when, ..self.last }.is_valid(now)).then_some(attr)
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
