//! What programs know of the names in a watched directory.
//!
//! They know names from events, and from listing the directory themselves. If events are lost, a program may
//! have found a name of which nothing was ever told and that is gone by now, or may have missed one that was
//! removed and made again. So processes tell what they find in watched directories. A name is *doubted* if
//! that differs from what was told of it, until the event arrives that explains it. If events are lost before,
//! watchers are told again what has become of the name.

use super::shadows::{COMES, Entry, GOES};
use std::collections::{HashMap, HashSet};
use towline_client::Happening;
use towline_instance::watches::Listed;
use towline_wire::event;

/// Most listings of a directory that are remembered before they end.
const PARTS_MAX: usize = 16;

/// The names in a watched directory, and whether they name directories.
#[derive(Default)]
pub(super) struct Names {
    /// Those that exist according to all that was told.
    told: HashMap<Vec<u8>, bool>,
    /// Those of which a program has found the opposite since.
    doubted: HashMap<Vec<u8>, bool>,
    parts: Vec<Part>,
    /// Number of changes after the server was last asked for all names.
    asked: u64,
}

/// A listing by a program that has not ended.
struct Part {
    handle: u64,
    names: HashSet<Vec<u8>>,
    /// Number of changes before it began.
    changes: u64,
}

/// What to tell watchers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Differences {
    /// Names that are gone, or name something else.
    pub(super) gone: Vec<Entry>,
    /// Names that have come since.
    pub(super) new: Vec<Entry>,
    /// The others.
    pub(super) same: Vec<Entry>,
}

impl Names {
    /// Notes an event that is told.
    pub(super) fn happened(&mut self, happening: &Happening) {
        let Happening { mask, ref name, .. } = *happening;
        if mask & COMES != 0 {
            self.told.insert(name.clone(), mask & event::ISDIR != 0);
        } else if mask & GOES != 0 {
            self.told.remove(name);
        } else {
            return;
        }
        self.doubted.remove(name);
    }

    /// Notes what a program finds. Returns true if it was found before the server was last asked for all
    /// names, and there are doubts: perhaps no event will explain them.
    pub(super) fn found(&mut self, listed: Listed) -> bool {
        let Listed { handle, changes, begins, ends, names, .. } = listed;
        let at = self.parts.iter().position(|part| part.handle == handle);
        let before = at.map(|at| self.parts.remove(at)).filter(|_| !begins);
        let new = || begins.then(|| Part { handle, names: HashSet::new(), changes });
        let part = before.or_else(new);
        let since = part.as_ref().map_or(changes, |part| part.changes);
        let mut doubts = Vec::new();
        if let Some(mut part) = part {
            part.names.extend(names.iter().map(|(name, _)| name.clone()));
            if ends {
                let missed = self.told.iter().filter(|(name, _)| !part.names.contains(*name));
                doubts.extend(missed.map(|(name, kind)| (name.clone(), *kind)));
            } else {
                self.parts.truncate(PARTS_MAX - 1);
                self.parts.insert(0, part);
            }
        }
        doubts.extend(names.into_iter().filter(|(name, _)| !self.told.contains_key(name)));
        let is_any = !doubts.is_empty();
        self.doubted.extend(doubts);
        is_any && since < self.asked
    }

    /// Notes all names that there are. `changes` is the number of changes after the server was asked for them.
    pub(super) fn replace(&mut self, listing: Vec<Entry>, changes: u64) -> Differences {
        self.asked = changes;
        self.compare(listing)
    }

    /// Notes which of the doubted names there are.
    pub(super) fn settle(&mut self, listing: Vec<Entry>) -> Differences {
        let mut now = self.told.clone();
        now.retain(|name, _| !self.doubted.contains_key(name));
        now.extend(listing.into_iter().filter(|(name, _)| self.doubted.contains_key(name)));
        self.compare(now.into_iter().collect())
    }

    fn compare(&mut self, listing: Vec<Entry>) -> Differences {
        let (before, mut known) =
            (std::mem::take(&mut self.told), std::mem::take(&mut self.doubted));
        let mut differences = Differences::default();
        for (name, kind) in listing {
            let entry = (name.clone(), kind);
            match before.get(&name) {
                Some(was) if *was == kind && !known.contains_key(&name) => {
                    differences.same.push(entry);
                }
                Some(was) => {
                    differences.gone.push((name.clone(), *was));
                    differences.new.push(entry);
                }
                None => differences.new.push(entry),
            }
            self.told.insert(name, kind);
        }
        known.extend(before);
        known.retain(|name, _| !self.told.contains_key(name));
        differences.gone.extend(known);
        differences
    }
}
