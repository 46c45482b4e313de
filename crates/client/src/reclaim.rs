//! What a client has open and locked, to reopen and lock it again after a restart of the server.

use crate::{Lock, PlaceOf};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::time::{Duration, Instant};
use towline_net::{Counters, Incoming, Input, Link, Sink, Target};
use towline_wire::limits::PATH_BYTES_MAX;
use towline_wire::ranges::Range;
use towline_wire::reply::parse_results;
use towline_wire::request::{encode_compound, lock, rename_flag};
use towline_wire::{Header, Kind, ProtocolError, Reply, Request};

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

/// A lane that nobody else uses yet; it carries one request at a time.
pub(crate) struct FirstUse<'a> {
    pub(crate) link: &'a Link,
    pub(crate) slot: u16,
    pub(crate) sequence: u32,
    /// How long each answer may take.
    pub(crate) limit: Duration,
}

/// Takes the answer to one request.
struct Answer {
    slot: u16,
    sequence: u32,
    results: Option<Vec<u8>>,
}

impl Sink for Answer {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        // The session may still be answering requests of the connection before this one, if their file
        // system hung.
        let is_awaited = (header.slot, header.sequence) == (self.slot, self.sequence);
        if header.kind == Kind::Reply && is_awaited {
            parse_results(body)?;
            self.results = Some(body.to_vec());
        }
        Ok(())
    }

    fn place(&mut self, _: &Header, _: &[u8], _: usize, _: usize) -> Option<Target<'_>> {
        None
    }

    fn expects_bulk(&self) -> bool {
        false
    }
}

impl FirstUse<'_> {
    /// Sends a request for this user and group and waits for its reply. Returns whether it succeeded.
    pub(crate) fn exchange(
        &mut self,
        identity: (u32, u32),
        requests: &[Request<'_>],
    ) -> io::Result<bool> {
        let results = self.ask(identity, requests)?;
        let replies = parse_results(&results).unwrap_or_default();
        Ok(!matches!(replies.last(), None | Some(Reply::Failed { .. })))
    }

    /// Sends a request for this user and group and waits for its results.
    pub(crate) fn ask(
        &mut self,
        identity: (u32, u32),
        requests: &[Request<'_>],
    ) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let body = encode_compound(requests);
        let mut header = Header::new(Kind::Request, self.slot, self.sequence);
        header.body_bytes = body.len() as u32;
        (header.word_a, header.word_b) = identity;
        let mut message = header.to_bytes().to_vec();
        message.extend_from_slice(&body);
        let counters = Counters::default();
        let mut done = 0;
        while done < message.len() {
            match self.link.send(&[&message[done..]], &counters) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.link.wait_writable(None)?;
                }
                Err(error) => return Err(error),
            }
        }
        let mut answer = Answer { slot: self.slot, sequence: self.sequence, results: None };
        let (mut input, mut scratch) = (Input::default(), vec![0; 96 * 1024]);
        let asked = Instant::now();
        loop {
            if let Some(results) = answer.results.take() {
                return Ok(results);
            }
            match input.receive(self.link, &mut scratch, None, &mut answer, &counters)? {
                Incoming::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                Incoming::Progress => {}
                Incoming::Drained if answer.results.is_some() => {}
                Incoming::Drained => {
                    let left = self.limit.saturating_sub(asked.elapsed());
                    if left.is_zero() {
                        let what = format!("no answer within {:?}", self.limit);
                        return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                    }
                    self.link.wait_readable(left)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use towline_net::LinkKind;
    use towline_wire::codec::Field;

    /// Returns the locks that are asked for again: handle, owner, kind, start, length.
    fn asked(files: &mut OpenFiles) -> Vec<(u64, u64, u8, u64, u64)> {
        let mut locks = Vec::new();
        let each = |_, requests: &[Request<'_>]| {
            if let [Request::Lock { handle, owner, kind, start, length, .. }] = *requests {
                locks.push((handle, owner, kind, start, length));
            }
            Ok(true)
        };
        files.reclaim(|_| None, &[], each).unwrap();
        locks
    }

    /// A server whose file system hung may answer a request of the connection before this one.
    #[test]
    fn answers_to_other_requests_are_not_taken_for_the_awaited_one() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let answer = |sequence, reply: &Reply<'_>| {
            let mut body = Vec::new();
            reply.encode(&mut body);
            let mut header = Header::new(Kind::Reply, 7, sequence);
            header.body_bytes = body.len() as u32;
            (&far).write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
        };
        let link = Link::Socket(near.into(), LinkKind::Unix);
        let limit = Duration::from_secs(60);
        let mut lane = FirstUse { link: &link, slot: 7, sequence: 0, limit };
        answer(5, &Reply::Failed { errno: 5 });
        answer(1, &Reply::Done {});
        answer(5, &Reply::Failed { errno: 5 });
        assert!(lane.exchange((0, 0), &[Request::Reclaimed {}]).unwrap());
        answer(1, &Reply::Done {});
        answer(2, &Reply::Failed { errno: 5 });
        answer(1, &Reply::Done {});
        assert!(!lane.exchange((0, 0), &[Request::Reclaimed {}]).unwrap());
    }

    /// The server may have executed a request and ended, and others may have what it gave up.
    #[test]
    fn what_is_being_given_up_is_not_locked_again() {
        let mut files = OpenFiles::default();
        for handle in [1, 2] {
            files.remember_path(handle, b"dir", b"f", 2, 7, (0, 0));
        }
        let lock = |family, kind, owner, start, length| Lock { family, kind, owner, start, length };
        let (process, shared, exclusive) = (lock::PROCESS, lock::SHARED, lock::EXCLUSIVE);
        files.remember_lock(1, &lock(process, exclusive, 5, 0, 10));
        files.give_up(2, &lock(process, shared, 5, 6, 10));
        assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 6), (1, 5, shared, 6, 4)]);
        files.give_up(2, &lock(process, exclusive, 5, 2, 10));
        assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 6), (1, 5, shared, 6, 4)]);
        files.give_up(2, &lock(process, lock::UNLOCK, 5, 2, 0));
        assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)]);
        files.give_up(1, &lock(process, lock::UNLOCK, 6, 0, 0));
        assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)], "another process");
        files.remember_lock(1, &lock(lock::FLOCK, shared, 0, 0, 0));
        files.give_up(1, &lock(lock::FLOCK, exclusive, 0, 0, 0));
        assert_eq!(asked(&mut files), [(1, 5, exclusive, 0, 2)], "it is converted");
    }

    #[test]
    fn only_what_is_locked_is_locked_again() {
        let mut files = OpenFiles::default();
        // Two handles of one file, and a handle of another file.
        for (handle, inode) in [(1, 7), (2, 7), (3, 8)] {
            files.remember_path(handle, b"dir", b"f", 2, inode, (0, 0));
        }
        let lock = |family, kind, owner, start, length| Lock { family, kind, owner, start, length };
        let (process, exclusive) = (lock::PROCESS, lock::EXCLUSIVE);
        files.remember_lock(1, &lock(process, exclusive, 5, 0, 10));
        files.remember_lock(1, &lock(process, exclusive, 5, 20, 10));
        files.remember_lock(1, &lock(process, lock::UNLOCK, 5, 5, 20));
        files.remember_lock(3, &lock(process, exclusive, 5, 0, 10));
        let left = [(1, 5, exclusive, 0, 5), (1, 5, exclusive, 25, 5), (3, 5, exclusive, 0, 10)];
        assert_eq!(asked(&mut files), left);
        // Unlock the whole file through its other handle.
        files.remember_lock(2, &lock(process, lock::UNLOCK, 5, 0, 0));
        assert_eq!(asked(&mut files), left[2..]);
        assert!(!files.has_locked(1) && files.has_locked(3));
        // Open-file locks belong to the handle, whatever the owner number.
        files.remember_lock(1, &lock(lock::OPEN_FILE, exclusive, 5, 0, 0));
        files.remember_lock(2, &lock(lock::OPEN_FILE, lock::UNLOCK, 5, 0, 0));
        assert!(files.has_locked(1));
        assert!(!files.has_only_shared(1, &lock(lock::OPEN_FILE, lock::UNLOCK, 7, 3, 1)));
        files.remember_lock(1, &lock(lock::OPEN_FILE, lock::UNLOCK, 6, 0, 0));
        assert!(!files.has_locked(1));
        // Through the other handle of the file, and for other processes and files.
        files.remember_lock(1, &lock(process, lock::SHARED, 5, 0, 10));
        let is_shared = |handle, owner, start| {
            files.has_only_shared(handle, &lock(process, lock::UNLOCK, owner, start, 10))
        };
        assert!(is_shared(1, 5, 0) && is_shared(2, 5, 9));
        assert!(!is_shared(1, 5, 10) && !is_shared(1, 6, 0) && !is_shared(3, 5, 0));
    }

    /// Returns the handles with the paths by which they are reopened, where only those in `there` are found.
    fn reopened(
        files: &mut OpenFiles,
        maybe: &[(RequestNumber, Renamed)],
        there: &[&str],
    ) -> Vec<(u64, String)> {
        let mut found = Vec::new();
        let each = |_, requests: &[Request<'_>]| {
            let [Request::Reclaim { handle, export, path, .. }] = *requests else {
                return Ok(true);
            };
            let whole = [export, path].map(String::from_utf8_lossy).join(":");
            let is_there = there.contains(&&whole[..]);
            found.extend(is_there.then_some((handle, whole)));
            Ok(is_there)
        };
        files.reclaim(|_| None, maybe, each).unwrap();
        found
    }

    #[test]
    fn files_are_reopened_though_a_directory_on_the_way_is_gone() {
        let mut files = OpenFiles::default();
        for (handle, path) in [(1, "a/.."), (2, "a/./b/../../c/f"), (3, "../f"), (4, "d/../f")] {
            files.remember_path(handle, b"dir", path.as_bytes(), 2, handle, (0, 0));
        }
        let there = ["dir:", "dir:c/f", "dir:d/../f", "dir:f"];
        let wanted = [(1, there[0]), (2, there[1]), (4, there[2])];
        let found = reopened(&mut files, &[], &there);
        assert_eq!(found, wanted.map(|(handle, place)| (handle, place.to_owned())));
        assert!(files.is_lost(3));
        // From then on, by the way that leads there.
        let wanted = [(1, there[0]), (2, there[1])].map(|(handle, at)| (handle, at.to_owned()));
        assert_eq!(reopened(&mut files, &[], &there[..2]), wanted);
    }

    #[test]
    fn files_are_reopened_by_their_new_names() {
        let mut files = OpenFiles::default();
        let open = |files: &mut OpenFiles, handle, export: &str, path: &str| {
            files.remember_path(handle, export.as_bytes(), path.as_bytes(), 2, handle, (0, 0));
        };
        open(&mut files, 1, "dir", "");
        open(&mut files, 2, "dir", "./a//f");
        open(&mut files, 3, "dir", "a");
        open(&mut files, 4, "dir", "af");
        open(&mut files, 5, "dir/a/b", "c/f");
        open(&mut files, 6, "other", "a/f");
        let rename = |base, path: &'static str, new_base, new_path: &'static str, flags| {
            let (path, new_path) = (path.as_bytes(), new_path.as_bytes());
            Request::Rename { base, flags, path, new_base, new_path }
        };
        // Below an open directory, which is then renamed itself.
        files.remember_renamed(0, &rename(3, "f", 1, "a/g", 0));
        files.remember_renamed(0, &rename(1, "a/", 1, "d/e", 0));
        // Out of the directory that is the file's root, and of one that is not open.
        files.remember_renamed(0, &rename(1, "d/e/b/c/f", 1, "f", 0));
        files.remember_renamed(0, &rename(9, "af", 1, "bf", 0));
        files.remember_renamed(0, &rename(1, "af", 3, "g", rename_flag::EXCHANGE));
        let there = ["dir:", "dir:af", "dir:d/e", "dir:d/e/g", "dir/d/e/b:c/f", "other:a/f"];
        let found = reopened(&mut files, &[], &there);
        let wanted = [
            (1, there[0]),
            (2, there[1]),
            (3, there[2]),
            (4, there[3]),
            (5, there[4]),
            (6, there[5]),
        ];
        assert_eq!(found, wanted.map(|(handle, place)| (handle, place.to_owned())));
        // It is not known whether this took place; later it turns out that it did not.
        let maybe = rename(1, "af", 1, "maybe", 0);
        let maybes = [(1, files.renamed_by(&maybe).unwrap())];
        let found = reopened(&mut files.clone(), &maybes, &["dir:af"]);
        assert_eq!(found, [(2, "dir:af".to_owned())]);
        // It did.
        let found = reopened(&mut files, &maybes, &["dir:maybe", "dir:d/e/g"]);
        assert_eq!(found, [(2, "dir:maybe".to_owned()), (4, "dir:d/e/g".to_owned())]);
        files.remember_renamed(1, &maybe);
        assert_eq!(reopened(&mut files, &[], &["dir:maybe"]), [(2, "dir:maybe".to_owned())]);
    }

    #[test]
    fn names_that_were_found_to_be_exchanged_are_not_exchanged_back() {
        let mut files = OpenFiles::default();
        for (handle, path) in [(1, ""), (2, "a/f"), (3, "b"), (4, "c")] {
            files.remember_path(handle, b"dir", path.as_bytes(), 2, handle, (0, 0));
        }
        let exchange = |new_path| {
            let flags = rename_flag::EXCHANGE;
            Request::Rename { base: 1, flags, path: b"a", new_base: 1, new_path }
        };
        let found = |files: &mut OpenFiles, maybe: &[_], there: &[&str]| {
            let found = reopened(files, maybe, there);
            found.into_iter().map(|(handle, _)| handle).collect::<Vec<_>>()
        };
        // It is answered only after a restart, and the server has kept one of the files whatever its name.
        let maybes = [(7, files.renamed_by(&exchange(b"b")).unwrap())];
        let there = ["dir:", "dir:b/f", "dir:b", "dir:c"];
        assert_eq!(found(&mut files, &maybes, &there), [1, 2, 3, 4]);
        files.remember_renamed(7, &exchange(b"b"));
        let there = ["dir:", "dir:b/f", "dir:a", "dir:c"];
        assert_eq!(found(&mut files.clone(), &[], &there), [1, 2, 3, 4]);
        // Later ones count.
        files.remember_renamed(8, &exchange(b"c"));
        files.remember_renamed(
            9,
            &Request::Rename { base: 1, flags: 0, path: b"b", new_base: 1, new_path: b"d" },
        );
        assert_eq!(found(&mut files, &[], &["dir:", "dir:d/f", "dir:c", "dir:a"]), [1, 2, 3, 4]);
    }
}
