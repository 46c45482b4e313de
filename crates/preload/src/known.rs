//! Attributes read ahead: a program that asks for one name of a directory after another gets those
//! of all with the next question, in one round trip, as long as that pays.
//!
//! All is forgotten as soon as any process of the run changes anything on a server or takes a
//! lock (`State::changes`), so processes of one run see each other's work at once. What others
//! change is seen by path after at most [`VALID`], by opening a file at once: opening always asks.
//! Whoever finds the lock taken asks the server, so that nobody waits here, not even after a fork.

use crate::place::At;
use crate::start;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use towline_client::DirEntry;
use towline_wire::Attr;
use towline_wire::attr::attr_flag;

/// How long attributes read ahead may be used.
const VALID: Duration = Duration::from_secs(1);
/// Directories remembered, those with attributes and those of which names were asked.
const DIRECTORIES_MAX: usize = 64;
/// Names remembered in all.
const NAMES_MAX: usize = 16 * 1024;
/// Bounds of what reading ahead has earned.
const EARNED: std::ops::RangeInclusive<i32> = -5..=3;

/// What reading ahead has earned: each listing costs one, the second use of one pays two.
static SCORE: AtomicI32 = AtomicI32::new(0);
static KNOWN: Mutex<Known> = Mutex::new(Known::new());

/// Names a directory: an open one and the path from there, which may be empty.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key<'a> {
    mount: usize,
    base: u64,
    path: &'a [u8],
}

impl Key<'_> {
    /// Tells it from most others; never zero.
    fn hash(&self) -> u32 {
        hash(self.base ^ (self.mount as u64) << 56, self.path) | 1
    }
}

/// Tells a text from most others.
fn hash(seed: u64, text: &[u8]) -> u32 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(SPREAD);
    let (words, rest) = text.as_chunks();
    let hash = words.iter().fold(seed, |hash, word| mix(hash, u64::from_ne_bytes(*word)));
    let rest = rest.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    (mix(hash, rest) >> 32) as u32
}

/// A key that is kept.
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

struct Directory {
    name: Name,
    /// Another name of the same one.
    also: Option<Name>,
    listed: Option<Listed>,
    /// Names asked for while nothing was listed, and the hash of the last of them.
    asked: u32,
    last: u32,
}

impl Directory {
    fn is(&self, key: Key<'_>) -> bool {
        self.name.key() == key || self.also.as_ref().is_some_and(|name| name.key() == key)
    }
}

/// What is remembered. Nearly each look of a program at a path comes here twice, mostly in vain.
struct Known {
    /// Of the names of each directory, side by side; zero: there is none.
    hashes: Vec<[u32; 2]>,
    directories: Vec<Directory>,
    /// Where the next one comes: the oldest is there, or nothing yet.
    next: usize,
}

impl Known {
    const fn new() -> Self {
        Self { hashes: Vec::new(), directories: Vec::new(), next: 0 }
    }

    fn find(&self, key: Key<'_>) -> Option<usize> {
        let hash = key.hash();
        // All are looked at, so that the compiler takes many at once.
        let all = self.hashes.as_flattened();
        if !all.iter().fold(false, |found, other| found | (*other == hash)) {
            return None;
        }
        let is_there =
            |(of, directory): (&[u32; 2], &Directory)| of.contains(&hash) && directory.is(key);
        self.hashes.iter().zip(&self.directories).position(is_there)
    }

    /// Remembers a directory anew, at its place, if it has one; gives that.
    fn add(&mut self, known: Option<usize>, key: Key<'_>) -> usize {
        let place = known.unwrap_or(self.next);
        if known.is_none() {
            self.next = (place + 1) % DIRECTORIES_MAX;
        }
        if place == self.directories.len() {
            let name = Name { mount: 0, base: 0, path: Vec::new() };
            self.directories.push(Directory { name, also: None, listed: None, asked: 0, last: 0 });
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

    /// Gives a directory a second name.
    fn add_name(&mut self, place: usize, key: Key<'_>) {
        self.hashes[place][1] = key.hash();
        self.directories[place].also = Some(key.into());
    }

    fn forget(&mut self, place: usize) {
        self.hashes[place] = [0; 2];
        let directory = &mut self.directories[place];
        (directory.also, directory.listed) = (None, None);
        (directory.asked, directory.last) = (0, 0);
    }

    /// Forgets the oldest until there are few enough names, but not this one.
    fn shrink(&mut self, but: usize) {
        let count = |directory: &Directory| directory.listed.as_ref().map_or(0, |l| l.names.len());
        let mut names = self.directories.iter().map(count).sum::<usize>();
        let places = self.directories.len();
        for place in (self.next..self.next + places).map(|place| place % places) {
            if names > NAMES_MAX && place != but {
                names -= count(&self.directories[place]);
                self.forget(place);
            }
        }
    }
}

struct Listed {
    when: Instant,
    changes: u64,
    /// No name is missing.
    complete: bool,
    names: HashMap<Vec<u8>, Option<Attr>>,
    /// Where the listing goes on.
    next: u64,
    used: u32,
    /// What the directory itself was told to be meanwhile, and whether a link at its path was followed.
    own: Option<(bool, Attr)>,
}

impl Listed {
    fn is_valid(&self) -> bool {
        self.changes == changes() && self.when.elapsed() < VALID
    }
}

/// The number of changes up to now.
pub(crate) fn changes() -> u64 {
    start::state().map_or(0, |state| state.changes().load(Ordering::Acquire))
}

/// A lock that nobody waits for long: the holder may be a thread that a fork left behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..64 {
        if let Ok(guard) = mutex.try_lock() {
            return Some(guard);
        }
        std::hint::spin_loop();
    }
    None
}

/// This process uses memory of its parent: it begins anew and leaves what is there as it is.
pub(crate) fn leave_to_parent() {
    if let Some(mut known) = lock(&KNOWN) {
        std::mem::forget(std::mem::replace(&mut *known, Known::new()));
    }
}

fn earn(by: i32) {
    let score = SCORE.load(Ordering::Relaxed) + by;
    SCORE.store(score.clamp(*EARNED.start(), *EARNED.end()), Ordering::Relaxed);
}

/// True when listings had better come with attributes.
pub(crate) fn listings_have_attributes() -> bool {
    SCORE.load(Ordering::Relaxed) > 0
}

/// The directory and the name of a path; `None` where the end of the path is no name.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let (directory, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(0) => return None,
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b""[..], path),
    };
    if name.is_empty() || name == b"." || name == b".." { None } else { Some((directory, name)) }
}

/// Without `.` at its begin and end: so do programs write the same directory in two ways.
fn plain(mut path: &[u8]) -> &[u8] {
    while let Some(rest) = path.strip_prefix(b"./") {
        path = rest;
    }
    while let Some(rest) = path.strip_suffix(b"/.").or(path.strip_suffix(b"/")) {
        path = rest;
    }
    if path == b"." { b"" } else { path }
}

enum Answer {
    /// What is known; `None`: there is no such name.
    Known(Option<Attr>),
    /// The server has to be asked.
    Ask,
    /// The whole directory had better be asked for.
    List,
}

fn look(known: &mut Known, key: Key<'_>, name: &[u8]) -> Answer {
    let Some(place) = known.find(key) else {
        let place = known.add(None, key);
        let directory = &mut known.directories[place];
        (directory.asked, directory.last) = (1, hash(0, name));
        return if SCORE.load(Ordering::Relaxed) > 0 { Answer::List } else { Answer::Ask };
    };
    let directory = &mut known.directories[place];
    if directory.listed.as_ref().is_some_and(|listed| !listed.is_valid()) {
        directory.listed = None;
    }
    if let Some(listed) = &mut directory.listed {
        let found = match listed.names.get(name) {
            Some(Some(attr)) => Some(*attr),
            None if listed.complete => None,
            _ => return Answer::Ask,
        };
        listed.used += 1;
        if listed.used == 2 {
            earn(2);
        }
        return Answer::Known(found);
    }
    // The same name again and again is somebody who waits for a change.
    let last = hash(0, name);
    if directory.last == last {
        return Answer::Ask;
    }
    directory.last = last;
    directory.asked += 1;
    let score = SCORE.load(Ordering::Relaxed);
    let needed = if score > 0 { 1 } else { 2 << -score };
    if directory.asked < needed {
        return Answer::Ask;
    }
    directory.asked = 0;
    Answer::List
}

/// Notes a listing with attributes that was asked for when `before` was the number of changes.
fn note(known: &mut Known, key: Key<'_>, before: u64, entries: &[DirEntry], complete: bool) {
    earn(-1);
    let names = entries.iter().map(|entry| (entry.name.clone(), entry.attr)).collect();
    let next = entries.last().map_or(0, |entry| entry.cookie);
    let listed =
        Listed { when: Instant::now(), changes: before, complete, names, next, used: 0, own: None };
    let place = known.add(known.find(key), key);
    known.directories[place].listed = Some(listed);
    known.shrink(place);
}

fn key_of<'a>(at: &At, directory: &'a [u8]) -> Option<Key<'a>> {
    Some(key_from(at, at.base().ok()?, directory))
}

fn key_from<'a>(at: &At, base: u64, directory: &'a [u8]) -> Key<'a> {
    Key { mount: at.mount, base, path: plain(directory) }
}

fn list(at: &At, key: Key<'_>, name: &[u8]) -> Option<Answer> {
    let before = changes();
    let path = if key.path.is_empty() { &b"."[..] } else { key.path };
    let (entries, complete) = at.with(|base, _| base.list_path(path, true)).ok()?;
    let mut known = lock(&KNOWN)?;
    note(&mut known, key, before, &entries, complete);
    Some(look(&mut known, key, name))
}

/// What is listed of a directory, as far as it can still be right.
fn listed_of<'a>(known: &'a mut Known, key: Key<'_>) -> Option<&'a mut Listed> {
    let place = known.find(key)?;
    known.directories[place].listed.as_mut().filter(|listed| listed.is_valid())
}

/// Attributes of a path, asked for or known.
pub(crate) fn stat(at: &At, follow: bool) -> Result<Attr, i32> {
    let usable = |attr: &Attr| !(follow && attr.is_symlink());
    // A slash at the end follows a link that the name alone would not.
    let is_plain = plain(&at.path).len() == at.path.len();
    let base = at.base().ok();
    let itself = base.filter(|_| is_plain).map(|base| key_from(at, base, &at.path));
    let named = split(&at.path).and_then(|(above, name)| Some((key_from(at, base?, above), name)));
    let answer = lock(&KNOWN).and_then(|mut known| {
        // As old as what is told of the names in it: programs look whether those can still be right.
        let own = itself.and_then(|key| listed_of(&mut known, key)?.own);
        match (own, named) {
            (Some((followed, attr)), _) if followed == follow => Some(Answer::Known(Some(attr))),
            (_, named) => named.map(|(key, name)| look(&mut known, key, name)),
        }
    });
    let answer = match (answer, named) {
        (Some(Answer::List), Some((key, name))) => list(at, key, name),
        (other, _) => other,
    };
    match answer {
        Some(Answer::Known(Some(attr))) if usable(&attr) => return Ok(attr),
        Some(Answer::Known(None)) => return Err(libc::ENOENT),
        _ => {}
    }
    let before = changes();
    let attr = at.with(|base, path| base.stat_path(path, follow))?;
    if attr.is_directory()
        && let (Some(key), Some(mut known)) = (itself, lock(&KNOWN))
        && let Some(listed) = listed_of(&mut known, key).filter(|l| l.changes == before)
    {
        listed.own = Some((follow, attr));
    }
    Ok(attr)
}

/// True when a path is known to have no extended attributes.
pub(crate) fn has_no_xattrs(at: &At, follow: bool) -> bool {
    let Some((directory, name)) = split(&at.path) else { return false };
    let (Some(key), Some(mut known)) = (key_of(at, directory), lock(&KNOWN)) else { return false };
    let listed = listed_of(&mut known, key);
    let attr = listed.and_then(|listed| listed.names.get(name)).and_then(Option::as_ref);
    attr.is_some_and(|attr| {
        attr.flags & attr_flag::NO_XATTRS != 0 && !(follow && attr.is_symlink())
    })
}

/// Notes a listing of an open directory from `cookie` on, if it has attributes; `end`: it is the
/// last of them.
pub(crate) fn listed(
    (mount, handle): (usize, u64),
    cookie: u64,
    before: u64,
    entries: &[DirEntry],
    end: bool,
) {
    if entries.iter().all(|entry| entry.attr.is_none()) {
        return;
    }
    let Some(mut known) = lock(&KNOWN) else { return };
    let key = Key { mount, base: handle, path: b"" };
    if cookie == 0 {
        return note(&mut known, key, before, entries, end);
    }
    if let Some(listed) = listed_of(&mut known, key).filter(|listed| listed.next == cookie) {
        listed.names.extend(entries.iter().map(|entry| (entry.name.clone(), entry.attr)));
        listed.next = entries.last().map_or(cookie, |entry| entry.cookie);
        listed.complete = end;
    }
}

/// Notes a listing that came with opening a directory, by the path that `at` names it by, too.
pub(crate) fn listed_at(at: &At, handle: u64, before: u64, entries: &[DirEntry], end: bool) {
    if let Some(mut known) = lock(&KNOWN) {
        // A handle may have meant another directory before.
        for place in 0..known.directories.len() {
            let name = &known.directories[place].name;
            if name.base == handle && name.mount == at.mount {
                known.forget(place);
            }
        }
    }
    listed((at.mount, handle), 0, before, entries, end);
    if let (Some(mut known), Some(path)) = (lock(&KNOWN), key_of(at, &at.path)) {
        let itself = Key { mount: at.mount, base: handle, path: b"" };
        if let Some(place) = known.find(itself) {
            if let Some(other) = known.find(path).filter(|other| *other != place) {
                known.forget(other);
            }
            known.add_name(place, path);
        }
    }
}
