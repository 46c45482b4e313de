//! What a client has open and locked, to reopen and lock it again after a restart of the server.

use crate::{Lock, PlaceOf};
use std::collections::{BTreeMap, HashSet};
use std::io;
use towline_wire::Request;
use towline_wire::limits::PATH_BYTES_MAX;
use towline_wire::ranges::Range;
use towline_wire::request::{lock, rename_flag};

#[derive(Clone)]
struct Open {
    export: Vec<u8>,
    path: Vec<u8>,
    flags: u32,
    inode: u64,
    /// User and group that opened it. It stays open when the client acts as others, who might not be
    /// allowed to open it.
    identity: (u32, u32),
    locks: Vec<(Owner, Range)>,
    /// The rename under way at whose new name the file was found after a restart: its path is that name already.
    found_by: Option<RequestNumber>,
}

/// The number of a request; no other request of the client has it.
pub(crate) type RequestNumber = u64;

/// The owner of a lock: its family and, for process locks, the process.
type Owner = (u8, u64);

fn owner_of(lock: &Lock) -> Owner {
    (lock.family, if lock.family == lock::PROCESS { lock.owner } else { 0 })
}

/// A rename, by all names that lead to the old and the new one, beginning with that of the export.
pub(crate) struct Renamed {
    from: Vec<Vec<u8>>,
    to: Vec<Vec<u8>>,
    /// The two files change their names.
    is_exchange: bool,
}

/// Returns the names in a path.
fn names(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".")
}

/// Returns a path without `NAME/..`, which leads to the same file unless NAME was a link; `None` if it has none.
fn without_returns(path: &[u8]) -> Option<Vec<u8>> {
    let mut left: Vec<&[u8]> = Vec::new();
    for name in names(path) {
        match left.last() {
            Some(last) if name == b".." && *last != b".." => drop(left.pop()),
            _ => left.push(name),
        }
    }
    (left.len() < names(path).count()).then(|| left.join(&b'/'))
}

impl Renamed {
    /// Returns export and path of a file after the rename; `None` if it leads nowhere else, or out of the
    /// directory that the file has as its root.
    fn moved(&self, export: &[u8], path: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
        let leads_there = |top: &[Vec<u8>]| {
            let mut all = names(export).chain(names(path));
            top.iter().all(|name| all.next() == Some(name))
        };
        let (from, to) = match (&self.from, &self.to) {
            (from, to) if leads_there(from) => (from, to),
            (from, to) if self.is_exchange && leads_there(to) => (to, from),
            _ => return None,
        };
        let root: Vec<&[u8]> = names(export).collect();
        let below = names(export).chain(names(path)).skip(from.len());
        let moved: Vec<&[u8]> = to.iter().map(|name| &name[..]).chain(below).collect();
        if from.len() > root.len() {
            return Some((export.to_vec(), moved.strip_prefix(&root[..])?.join(&b'/')));
        }
        let root = to.len() + root.len() - from.len();
        Some((moved[..root].join(&b'/'), path.to_vec()))
    }
}

/// Open files by handle.
#[derive(Clone, Default)]
pub(crate) struct OpenFiles {
    open: BTreeMap<u64, Open>,
    /// Files that were open and could not be reopened: using them fails with `ESTALE`.
    pub(crate) stale: HashSet<u64>,
}

impl OpenFiles {
    /// Remembers an open file: at the path `base.1` below the open directory `base.0` or, without
    /// `base`, the root of `export`.
    pub(crate) fn remember(
        &mut self,
        handle: u64,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
        inode: u64,
        identity: (u32, u32),
    ) {
        let (export, path) = match base {
            None => (export.to_vec(), Vec::new()),
            Some((base, below)) => {
                let Some(base) = self.open.get(&base) else { return };
                let mut path = base.path.clone();
                if !path.is_empty() && !below.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(below);
                (base.export.clone(), path)
            }
        };
        let open = Open { export, path, flags, inode, identity, locks: Vec::new(), found_by: None };
        self.open.insert(handle, open);
    }

    /// Remembers a file that another client opened.
    pub(crate) fn remember_path(
        &mut self,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
        identity: (u32, u32),
    ) {
        let (export, path) = (export.to_vec(), path.to_vec());
        let open = Open { export, path, flags, inode, identity, locks: Vec::new(), found_by: None };
        self.open.entry(handle).or_insert(open);
    }

    /// Returns what a request renames.
    pub(crate) fn renamed_by(&self, request: &Request<'_>) -> Option<Renamed> {
        let Request::Rename { base, flags, path, new_base, new_path } = *request else {
            return None;
        };
        let all = |base, path| {
            let Open { export, path: above, .. } = self.open.get(&base)?;
            Some(
                [&export[..], above, path]
                    .into_iter()
                    .flat_map(names)
                    .map(<[u8]>::to_vec)
                    .collect(),
            )
        };
        let (from, to) = (all(base, path)?, all(new_base, new_path)?);
        Some(Renamed { from, to, is_exchange: flags & rename_flag::EXCHANGE != 0 })
    }

    /// Remembers what the request with this number has renamed.
    pub(crate) fn remember_renamed(&mut self, number: RequestNumber, request: &Request<'_>) {
        let Some(renamed) = self.renamed_by(request) else { return };
        for open in self.open.values_mut() {
            if open.found_by == Some(number) {
                continue; // names that were exchanged would be exchanged back
            }
            if let Some(place) = renamed.moved(&open.export, &open.path) {
                (open.export, open.path) = place;
            }
        }
    }

    /// Returns the handles whose locks a request for this one is about: process locks belong to the file,
    /// however it was opened.
    fn locked_with(&self, handle: u64, family: u8) -> Vec<u64> {
        let Some(this) = self.open.get(&handle) else { return Vec::new() };
        let is_meant = |(other, open): &(&u64, &Open)| {
            let is_same_file = open.inode == this.inode && open.export == this.export;
            **other == handle || family == lock::PROCESS && is_same_file
        };
        self.open.iter().filter(is_meant).map(|(handle, _)| *handle).collect()
    }

    /// Remembers that this was locked or unlocked.
    pub(crate) fn remember_lock(&mut self, handle: u64, new: &Lock) {
        let (start, length) = match new.family {
            lock::FLOCK => (0, 0), // `flock` has no range
            _ => (new.start, new.length),
        };
        let Ok(range) = Range::new(new.kind, start, length) else { return };
        for other in self.locked_with(handle, new.family) {
            let Some(open) = self.open.get_mut(&other) else { continue };
            // This change overrides what was locked through other handles.
            let kind = if other == handle { range.kind } else { lock::UNLOCK };
            Range { kind, ..range }.apply(owner_of(new), &mut open.locks);
        }
    }

    /// Remembers no more than what is locked in any case while this request is under way. The server may have
    /// executed it and ended, and others may have what was given up.
    pub(crate) fn give_up(&mut self, handle: u64, new: &Lock) {
        // A `flock` lock is converted by giving it up and locking again.
        if new.kind == lock::UNLOCK || new.family == lock::FLOCK {
            return self.remember_lock(handle, &Lock { kind: lock::UNLOCK, ..*new });
        }
        let Ok(range) = Range::new(new.kind, new.start, new.length) else { return };
        if new.kind != lock::SHARED {
            return;
        }
        let owner = owner_of(new);
        for other in self.locked_with(handle, new.family) {
            let Some(open) = self.open.get_mut(&other) else { continue };
            for (holder, held) in open.locks.clone() {
                if holder == owner && held.overlaps(&range) {
                    let (start, last) = (held.start.max(range.start), held.last.min(range.last));
                    Range { kind: lock::SHARED, start, last }.apply(owner, &mut open.locks);
                }
            }
        }
    }

    /// Forgets the locks of a process that has ended.
    pub(crate) fn end_process(&mut self, owner: u64) {
        for open in self.open.values_mut() {
            open.locks.retain(|(holder, _)| *holder != (lock::PROCESS, owner));
        }
    }

    pub(crate) fn has_locked(&self, handle: u64) -> bool {
        self.open.get(&handle).is_some_and(|open| !open.locks.is_empty())
    }

    /// True if the owner has locked something within a range, all of it shared.
    pub(crate) fn has_only_shared(&self, handle: u64, wanted: &Lock) -> bool {
        let Ok(range) = Range::new(lock::SHARED, wanted.start, wanted.length) else { return false };
        let handles = self.locked_with(handle, wanted.family);
        let opened = handles.iter().filter_map(|handle| self.open.get(handle));
        let mut locks = opened
            .flat_map(|open| &open.locks)
            .filter(|(holder, held)| *holder == owner_of(wanted) && held.overlaps(&range))
            .peekable();
        locks.peek().is_some() && locks.all(|(_, held)| held.kind == lock::SHARED)
    }

    pub(crate) fn forget(&mut self, handle: u64) {
        self.open.remove(&handle);
        self.stale.remove(&handle);
    }

    /// Notes that these files could not be reopened, unless they are closed by now.
    pub(crate) fn lose(&mut self, stale: &HashSet<u64>) {
        for handle in stale {
            if self.open.remove(handle).is_some() {
                self.stale.insert(*handle);
            }
        }
    }

    pub(crate) fn knows(&self, handle: u64) -> bool {
        self.open.contains_key(&handle)
    }

    /// True for a file that was open and could not be reopened.
    pub(crate) fn is_lost(&self, handle: u64) -> bool {
        self.stale.contains(&handle)
    }

    /// True if a request names a lost file and is not just its close.
    pub(crate) fn is_stale(&self, requests: &[Request<'_>]) -> bool {
        !self.stale.is_empty()
            && !matches!(requests, [Request::Close { .. }])
            && requests.iter().any(|r| r.handles().iter().any(|h| self.is_lost(*h)))
    }

    /// Calls `each` with the request that reopens each file and with those that take its locks
    /// again, and with the user and group that opened the file; `each` returns whether the request
    /// succeeded. Files that cannot be reopened with all their locks are stale from then on. `place_of`:
    /// see [`crate::Options::place_of`]. A file that one of `maybe` would have renamed is looked for at its
    /// new name, too.
    ///
    /// # Errors
    /// The connection was lost: ask for everything again on the next one.
    pub(crate) fn reclaim(
        &mut self,
        place_of: PlaceOf,
        maybe: &[(RequestNumber, Renamed)],
        mut each: impl FnMut((u32, u32), &[Request<'_>]) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut stale = HashSet::new();
        for (&handle, open) in &mut self.open {
            if let Some(place) = place_of(handle) {
                (open.export, open.path) = place;
            }
            let Open { flags, inode, identity, .. } = *open;
            let mut opens = |export: &[u8], path: &[u8]| {
                // Files opened one below the other can have longer paths, which no server would take. It may have
                // kept the file.
                let path = if path.len() <= PATH_BYTES_MAX { path } else { b"" };
                let request = Request::Reclaim { handle, flags, inode, export, path };
                each(identity, &[request])
            };
            let mut again = opens(&open.export, &open.path)?;
            // Who goes up from a directory often removes it then. The server compares the file's identity.
            if !again
                && let Some(path) = without_returns(&open.path)
                && opens(&open.export, &path)?
            {
                (again, open.path) = (true, path);
            }
            let moved = |(number, renamed): &(RequestNumber, Renamed)| {
                Some((*number, renamed.moved(&open.export, &open.path)?))
            };
            let others: Vec<_> = maybe.iter().filter_map(moved).collect();
            for (number, (export, path)) in others {
                if !again && opens(&export, &path)? {
                    again = true;
                    (open.export, open.path) = (export, path);
                    open.found_by = Some(number);
                }
            }
            for &((family, owner), range) in &open.locks {
                let (kind, start, length) = (range.kind, range.start, range.length());
                let wait = lock::AGAIN;
                let request = Request::Lock { handle, owner, family, kind, wait, start, length };
                again = again && each(open.identity, &[request])?;
            }
            if !again {
                stale.insert(handle);
            }
        }
        self.lose(&stale);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
