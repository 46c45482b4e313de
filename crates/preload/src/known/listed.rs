//! What was told of the names of one directory, in one listing or in parts of different age.

use super::order::Order;
use super::{Asked, NAMES_MAX};
use std::collections::HashMap;
use std::time::Instant;
use towline_client::DirEntry;
use towline_wire::Attr;

/// So many names of a long directory are asked for one by one before some 800 others are asked for together, which takes about as long.
const MISSES: usize = 64;

/// What was told of the names of a directory.
pub(super) struct Listed {
    /// When the youngest of it was asked for.
    pub(super) last: Asked,
    /// All were told then.
    pub(super) complete: bool,
    /// With when each was asked for, if after the same changes as the youngest.
    pub(super) names: HashMap<Vec<u8>, (Option<Attr>, Instant)>,
    pub(super) order: Order,
    /// Uses since the last question, and looks at names in all.
    pub(super) used: u32,
    pub(super) looks: usize,
    /// So many looks have to come before names in the midst of the directory are asked for with others.
    pub(super) debt: usize,
    /// Names that were looked for, and are not among those that were told, since a part of the directory was.
    misses: usize,
    /// What the directory itself was told to be meanwhile, when, and whether a link at its path was followed.
    pub(super) own: Option<(bool, Attr, Instant)>,
}

impl Listed {
    pub(super) fn new(last: Asked) -> Self {
        let (names, order) = (HashMap::new(), Order::default());
        let (used, looks, debt, misses) = (0, 0, 0, 0);
        Self { last, complete: false, names, order, used, looks, debt, misses, own: None }
    }

    /// Adds entries that stand behind `cookie`; `end`: there are no more.
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

    /// A name is not among those that were told. The cookie of a part that was not told yet, if that had better be asked for now.
    pub(super) fn missed(&mut self) -> Option<u64> {
        self.misses += 1;
        self.order.rest().filter(|_| self.misses >= MISSES)
    }

    /// True when some of it may be used.
    pub(super) fn is_valid(&self, now: Asked) -> bool {
        !self.names.is_empty() && self.last.is_valid(now)
    }

    /// What is known of a name; `Some(None)`: it is not there, or cannot be looked at.
    pub(super) fn find(&self, name: &[u8], now: Asked) -> Option<Option<Attr>> {
        let valid = |when| Asked { when, ..self.last }.is_valid(now);
        match self.names.get(name) {
            Some((attr, when)) => valid(*when).then_some(*attr),
            None => (self.complete && valid(self.last.when)).then_some(None),
        }
    }

    /// What the directory itself was told to be, if that may be used.
    pub(super) fn own(&self, follow: bool, now: Asked) -> Option<Attr> {
        let (followed, attr, when) = self.own?;
        (followed == follow && Asked { when, ..self.last }.is_valid(now)).then_some(attr)
    }

    /// Forgets the oldest eighth of the names, if there is no room for more, and all of the same age.
    pub(super) fn forget_oldest(&mut self, more: usize) {
        if self.names.len() + more > NAMES_MAX {
            let mut ages = self.names.values().map(|(_, when)| *when).collect::<Vec<_>>();
            let eighth = ages.len() / 8;
            let (_, oldest, _) = ages.select_nth_unstable(eighth);
            self.names.retain(|_, (_, when)| when > oldest);
        }
    }
}
