//! Attributes read ahead: if a program asks for one name of a directory after another, the next request
//! fetches the attributes of all names in one round trip, as long as that pays.
//!
//! Everything is forgotten as soon as another process of the run changes anything on a server, or any takes a lock
//! (`State::changes`), so processes of one run see each other's changes at once. What stays known although this
//! process changes something is in `changed.rs`, and of contents in `written.rs`.
//! Changes by others are seen by path after at most [`VALID`], and at once on opening a file, as opening always
//! asks the server (of directories, see `walk.rs`). Each
//! part of a long directory has its own age; a part that is too old when one of its names is wanted is
//! requested again from that name on (`known/order.rs`). A thread that finds the lock taken asks the
//! server, so that nothing blocks here, not even after a fork.

mod changed;
mod listed;
mod names;
mod order;

use crate::hash::hash;
use crate::place::{self, At};
use crate::{start, walk};
pub(crate) use changed::{Changed, Paths, Touched, changed, peek};
use listed::Listed;
pub(crate) use listed::Named;
pub(crate) use names::{access, has_no_xattrs, is_far, read_link, stat, took};
use order::Order;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use towline_client::DirEntry;
use towline_wire::Attr;
use towline_wire::limits::NAME_BYTES_MAX;

/// How long attributes read ahead may be used.
const VALID: Duration = Duration::from_secs(1);
/// Maximum number of directories remembered: those with attributes and those whose names were asked for.
const DIRECTORIES_MAX: usize = 64;
/// Maximum number of names remembered in all; some 50 MB, as the table doubles after old names were
/// removed. `find` and `rm` list 100,000 names of a directory before they look at the first
/// (`FTS_MAX_READDIR_ENTRIES`).
const NAMES_MAX: usize = 112 * 1024;
/// Per this many names of a long directory that are listed at once, the program must look at one name
/// (listed or not) before more are listed at once. Otherwise asking for names one by one is quicker, as for
/// programs that look at names in their own order.
const USED: usize = 2;
/// A shorter listing is fetched as a whole with the first name asked for, as it fits into one reply.
const SHORT: usize = 256;
/// Bounds of the score.
const EARNED: std::ops::RangeInclusive<i32> = -5..=3;

/// Score of reading ahead: each listing costs one, the second use of a listing earns two.
static SCORE: AtomicI32 = AtomicI32::new(0);
static KNOWN: Mutex<Known> = Mutex::new(Known::new());
/// Set once the program has asked for extended attributes.
static XATTRS: AtomicBool = AtomicBool::new(false);

/// Key of a directory: an open directory and the path from there, which may be empty.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key<'a> {
    mount: usize,
    base: u64,
    path: &'a [u8],
}

impl Key<'_> {
    /// Returns a hash of the key, which is never zero.
    fn hash(&self) -> u32 {
        hash(self.base ^ (self.mount as u64) << 56, self.path) | 1
    }
}

/// An owned [`Key`].
struct Name {
    mount: usize,
    base: u64,
    path: Vec<u8>,
}

impl Name {
    fn key(&self) -> Key<'_> {
        Key { mount: self.mount, base: self.base, path: &self.path }
    }
}

impl From<Key<'_>> for Name {
    fn from(Key { mount, base, path }: Key<'_>) -> Self {
        Self { mount, base, path: path.to_vec() }
    }
}

/// When the server was asked for something, and the number of changes before.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) when: Instant,
    pub(crate) changes: u64,
}

impl Asked {
    pub(crate) fn now() -> Self {
        Self { when: Instant::now(), changes: changes() }
    }

    /// Returns true if the answer may still be used.
    fn is_valid(self, now: Self) -> bool {
        self.is_within(VALID, now)
    }

    /// Returns true if the run has changed nothing since, and it was less than `age` ago.
    pub(crate) fn is_younger(self, age: Duration) -> bool {
        self.is_within(age, Self::now())
    }

    fn is_within(self, age: Duration, now: Self) -> bool {
        self.changes == now.changes && now.when.saturating_duration_since(self.when) < age
    }
}

/// A path that led to an open directory.
struct Path {
    name: Name,
    /// Inode of that directory, and when the path was found to lead there.
    inode: u64,
    when: Option<Asked>,
}

impl Path {
    /// Returns true if the path may lead elsewhere by now.
    fn is_old(&self, now: Asked) -> bool {
        // An empty path is the open directory itself.
        !self.name.path.is_empty() && !self.when.is_some_and(|when| when.is_valid(now))
    }
}

struct Directory {
    name: Name,
    /// A path to the same directory, if the name is an open directory.
    also: Option<Path>,
    listed: Listed,
    /// Number of names asked for while nothing was listed, and the hash of the last one.
    asked: u32,
    last: u32,
    /// It was looked for since it was last about to be replaced.
    is_used: bool,
}

impl Directory {
    fn is(&self, key: Key<'_>) -> bool {
        self.name.key() == key || self.also.as_ref().is_some_and(|path| path.name.key() == key)
    }

    /// Returns the path with this key that led here.
    fn path(&self, key: Key<'_>) -> Option<&Path> {
        self.also.as_ref().filter(|path| path.name.key() == key)
    }
}

/// Everything remembered. Nearly every path lookup of a program comes here twice, mostly without a hit.
struct Known {
    /// Hashes of each directory's two keys, kept together; zero for none.
    hashes: Vec<[u32; 2]>,
    directories: Vec<Directory>,
    /// Place of the next directory: it holds nothing yet, or one that is replaced unless it is in use: a walk
    /// comes back to the directory that it is in after each of those below.
    next: usize,
}

impl Known {
    const fn new() -> Self {
        Self { hashes: Vec::new(), directories: Vec::new(), next: 0 }
    }

    /// Returns the place of a directory, unless the path may lead elsewhere by now.
    fn current(&self, key: Key<'_>, now: Asked) -> Option<usize> {
        self.find(key).filter(|place| self.is_current(*place, key, now))
    }

    /// Returns false if this is the path of the directory at `place`, and may lead elsewhere by now.
    fn is_current(&self, place: usize, key: Key<'_>, now: Asked) -> bool {
        !self.directories[place].path(key).is_some_and(|path| path.is_old(now))
    }

    fn find(&self, key: Key<'_>) -> Option<usize> {
        let hash = key.hash();
        // No early exit, so that the compiler vectorizes the loop.
        let all = self.hashes.as_flattened();
        if !all.iter().fold(false, |found, other| found | (*other == hash)) {
            return None;
        }
        let is_there =
            |(of, directory): (&[u32; 2], &Directory)| of.contains(&hash) && directory.is(key);
        self.hashes.iter().zip(&self.directories).position(is_there)
    }

    /// Starts to remember a directory, at its known place if it has one; returns the place.
    fn add(&mut self, known: Option<usize>, key: Key<'_>) -> usize {
        let place = known.unwrap_or_else(|| self.replaced());
        if place == self.directories.len() {
            let name = Name { mount: 0, base: 0, path: Vec::new() };
            let listed = Listed::new(Asked::now());
            let (asked, last, is_used) = (0, 0, false);
            self.directories.push(Directory { name, also: None, listed, asked, last, is_used });
            self.hashes.push([0; 2]);
        } else {
            self.forget(place);
        }
        self.hashes[place][0] = key.hash();
        let name = &mut self.directories[place].name;
        (name.mount, name.base) = (key.mount, key.base);
        name.path.clear();
        name.path.extend_from_slice(key.path);
        place
    }

    /// Returns the place for another directory.
    fn replaced(&mut self) -> usize {
        loop {
            let place = self.next;
            self.next = (place + 1) % DIRECTORIES_MAX;
            let found = self.directories.get_mut(place);
            if !found.is_some_and(|found| std::mem::take(&mut found.is_used)) {
                return place;
            }
        }
    }

    /// Adds the path that leads to an open directory.
    fn add_path(&mut self, place: usize, key: Key<'_>, inode: u64, when: Option<Asked>) {
        self.hashes[place][1] = key.hash();
        self.directories[place].also = Some(Path { name: key.into(), inode, when });
    }

    fn forget_path(&mut self, place: usize) {
        self.hashes[place][1] = 0;
        self.directories[place].also = None;
    }

    /// Returns the place of a directory, for answers about single names.
    fn place_of(&mut self, key: Key<'_>, asked: Asked) -> Option<usize> {
        // What was answered before a change is of no use, and must not take the place of what came after.
        if asked.changes != changes() || goes_up(key.path) {
            return None;
        }
        let place = self.find(key).unwrap_or_else(|| self.add(None, key));
        self.is_current(place, key, asked).then_some(place)
    }

    /// Keeps what is known of a name.
    fn keep(&mut self, key: Key<'_>, name: &[u8], asked: Asked, named: Named) {
        if let Some(place) = self.place_of(key, asked) {
            self.make_room(place, 1);
            self.directories[place].listed.add_name(asked, name, named);
        }
    }

    /// Keeps a directory's own attributes, and whether a link at its path was followed.
    fn keep_own(&mut self, key: Key<'_>, asked: Asked, (followed, attr): (bool, Attr)) {
        if let Some(place) = self.place_of(key, asked) {
            let listed = &mut self.directories[place].listed;
            listed.renew(asked);
            listed.own = Some((followed, Named::Is(attr), asked.when));
        }
    }

    /// Notes that there is an empty directory, which was just made.
    fn keep_empty(&mut self, key: Key<'_>, asked: Asked, attr: Attr) {
        // An open directory that had the name before is another one.
        if let Some(place) =
            self.find(key).filter(|place| self.directories[*place].path(key).is_some())
        {
            self.forget_path(place);
        }
        if let Some(place) = self.place_of(key, asked) {
            let listed = &mut self.directories[place].listed;
            listed.is_empty(asked);
            listed.own = Some((false, Named::Is(attr), asked.when));
        }
    }

    fn forget(&mut self, place: usize) {
        self.hashes[place] = [0; 2];
        let directory = &mut self.directories[place];
        (directory.also, directory.listed) = (None, Listed::new(Asked::now()));
        (directory.asked, directory.last, directory.is_used) = (0, 0, false);
    }

    /// Makes room for `more` names: forgets the oldest directories, then the oldest names of this one.
    fn make_room(&mut self, this: usize, more: usize) {
        let count = |all: &[Directory]| {
            let each = all.iter().map(|d| [d.listed.names.len(), d.listed.order.len()]);
            each.fold([0; 2], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
        };
        let places = self.directories.len();
        let mut older = (self.next..self.next + places).map(|place| place % places);
        loop {
            let [names, order] = count(&self.directories);
            if names + more <= NAMES_MAX && order <= Order::MAX {
                return;
            }
            match older.find(|place| *place != this) {
                Some(place) => self.forget(place),
                None => return self.directories[this].listed.forget_oldest(more),
            }
        }
    }
}

/// Returns the number of changes so far.
pub(crate) fn changes() -> u64 {
    start::state().map_or(0, |state| state.changes().load(Ordering::Acquire))
}

/// Takes a lock without waiting for long: the holder may be a thread that a fork left behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..64 {
        if let Ok(guard) = mutex.try_lock() {
            return Some(guard);
        }
        std::hint::spin_loop();
    }
    None
}

/// Number of attempts of [`lock_surely`].
const TRIES: u32 = 10_000;

/// Takes a lock that is held only briefly, never while waiting for a server; waits for another thread that has it.
pub(crate) fn lock_surely<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    (0..TRIES).find_map(|_| {
        lock(mutex).or_else(|| {
            std::thread::yield_now();
            None
        })
    })
}

/// Forgets everything: the process has become another user, who may see less.
pub(crate) fn forget() {
    if let Some(mut known) = lock(&KNOWN) {
        *known = Known::new();
    }
}

/// Called in a process that uses its parent's memory: starts empty and leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut known) = lock(&KNOWN) {
        std::mem::forget(std::mem::replace(&mut *known, Known::new()));
    }
}

fn earn(by: i32) {
    let score = SCORE.load(Ordering::Relaxed) + by;
    SCORE.store(score.clamp(*EARNED.start(), *EARNED.end()), Ordering::Relaxed);
}

/// Returns true if listings should include attributes.
pub(crate) fn listings_have_attributes() -> bool {
    SCORE.load(Ordering::Relaxed) > 0
}

/// Returns true if the rest of an open directory's listing should include attributes. This also holds if
/// the program has looked at earlier names, as `find` does after each 100,000.
pub(crate) fn rest_has_attributes(mount: usize, handle: u64) -> bool {
    listings_have_attributes()
        || lock(&KNOWN).is_some_and(|known| {
            known.find(Key { mount, base: handle, path: b"" }).is_some_and(|place| {
                let Listed { looks, order, .. } = &known.directories[place].listed;
                *looks > 0 && looks * USED >= order.len()
            })
        })
}

/// Splits a path into directory and name; `None` if it does not end in a name that a listing could have.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let (directory, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(0) => return None,
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b""[..], path),
    };
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len()) && name != b"." && name != b"..";
    is_name.then_some((directory, name))
}

/// Returns true if a path has `..` in it: what it leads to depends on names that are not in it.
fn goes_up(path: &[u8]) -> bool {
    path.split(|b| *b == b'/').any(|name| name == b"..")
}

/// Removes `.` at the beginning and end, as programs write the same directory in both ways.
pub(crate) fn plain(mut path: &[u8]) -> &[u8] {
    while let Some(rest) = path.strip_prefix(b"./") {
        path = rest;
    }
    while let Some(rest) = path.strip_suffix(b"/.").or(path.strip_suffix(b"/")) {
        path = rest;
    }
    if path == b"." { b"" } else { path }
}

/// Adds the entries behind `cookie`, with attributes, to a directory.
fn note(
    known: &mut Known,
    place: usize,
    asked: Asked,
    cookie: u64,
    (entries, end): (&[DirEntry], bool),
) {
    earn(-1);
    let listed = &mut known.directories[place].listed;
    listed.used = 0;
    add(known, place, asked, cookie, (entries, end));
}

fn add(
    known: &mut Known,
    place: usize,
    asked: Asked,
    cookie: u64,
    (entries, end): (&[DirEntry], bool),
) {
    known.make_room(place, entries.len());
    known.directories[place].listed.add(asked, cookie, entries, end);
}

fn key_of<'a>(at: &At, directory: &'a [u8]) -> Option<Key<'a>> {
    Some(key_from(at, at.base().ok()?, directory))
}

fn key_from<'a>(at: &At, base: u64, directory: &'a [u8]) -> Key<'a> {
    Key { mount: at.mount, base, path: plain(directory) }
}

/// Returns the path of a key in the form that requests take.
fn path_of<'a>(key: Key<'a>) -> &'a [u8] {
    if key.path.is_empty() { b"." } else { key.path }
}

/// Returns the directory of this key. Drops its path if that was found to lead elsewhere.
fn leads_to(known: &mut Known, key: Key<'_>, inode: Option<u64>, asked: Asked) -> Option<usize> {
    let place = known.find(key)?;
    if let Some(path) = &mut known.directories[place].also
        && path.name.key() == key
    {
        if inode != Some(path.inode) {
            known.forget_path(place);
            return None;
        }
        path.when = Some(asked);
    }
    Some(place)
}

/// Returns the listing of a directory.
fn listed_of<'a>(known: &'a mut Known, key: Key<'_>, now: Asked) -> Option<&'a mut Listed> {
    let place = known.current(key, now)?;
    Some(&mut known.directories[place].listed)
}

/// Returns true if listings should say which files have no extended attributes. That costs a local file
/// system as much as all other attributes, but programs that ask for them do so for file after file.
pub(crate) fn wants_xattrs() -> bool {
    XATTRS.load(Ordering::Relaxed)
}

/// Adds a listing of an open directory from `cookie` on; `end` says that it is the last one.
pub(crate) fn listed(
    (mount, handle): (usize, u64),
    cookie: u64,
    asked: Asked,
    entries: &[DirEntry],
    end: bool,
) {
    let Some(mut known) = lock(&KNOWN) else { return };
    let key = Key { mount, base: handle, path: b"" };
    let Some(place) = known.find(key) else { return };
    // With a far server, the attributes cost nothing beside the round trip.
    let has_attributes = || entries.iter().any(|entry| entry.attr.is_some());
    if cookie == 0 && !walk::is_far(mount) && has_attributes() {
        return note(&mut known, place, asked, 0, (entries, end));
    }
    add(&mut known, place, asked, cookie, (entries, end));
}

/// Keeps the attributes that came with opening a directory of a far server.
pub(crate) fn opened(at: &At, asked: Asked, attr: &Attr) {
    if is_far(at.mount)
        && let (Some(key), Some(mut known)) = (key_of(at, &at.path), lock(&KNOWN))
    {
        known.keep_own(key, asked, (true, *attr));
    }
}

/// Adds a directory that was opened by the path in `at`, with the listing that came with it.
pub(crate) fn listed_at(
    at: &At,
    (handle, inode): (u64, u64),
    asked: Asked,
    entries: &[DirEntry],
    end: bool,
) {
    let Some(mut known) = lock(&KNOWN) else { return };
    // The handle may have meant another directory before.
    for place in 0..known.directories.len() {
        let name = &known.directories[place].name;
        if name.base == handle && name.mount == at.mount {
            known.forget(place);
        }
        let also = known.directories[place].also.as_ref().map(|path| &path.name);
        if also.is_some_and(|name| name.base == handle && name.mount == at.mount) {
            known.forget_path(place);
        }
    }
    let (from_prefix, below);
    let (path, when) = if at.directory.is_some() && plain(&at.path).is_empty() {
        // The same open directory again: programs also name its contents by its path.
        below = place::tidy(&at.below());
        from_prefix = At { mount: at.mount, directory: None, path: Vec::new() };
        (key_of(&from_prefix, &below), None)
    } else {
        (key_of(at, &at.path), Some(asked))
    };
    let Some(path) = path else { return };
    let has_attributes = entries.iter().any(|entry| entry.attr.is_some());
    let known_by_path = known.find(path);
    let is_listed = |place: usize| known.directories[place].listed.is_valid(Asked::now());
    if !has_attributes && (end && entries.len() < SHORT || known_by_path.is_some_and(is_listed)) {
        return;
    }
    let itself = Key { mount: at.mount, base: handle, path: b"" };
    let before = known_by_path.map(|place| &known.directories[place]);
    let (asked_for, last) = before.map_or((0, 0), |directory| (directory.asked, directory.last));
    let place = known.add(known_by_path, itself);
    let directory = &mut known.directories[place];
    (directory.asked, directory.last) = (asked_for, last);
    known.add_path(place, path, inode, when);
    drop(known);
    listed((at.mount, handle), 0, asked, entries, end);
}
