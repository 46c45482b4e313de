//! Walks: directories that are opened and listed before the program opens them.
//!
//! A program that walks a tree opens one directory after another and waits for each. Once it has opened some
//! sub-directories of what it has listed, in the order of the listing or of the names, and if the server is far
//! ([`FAR`]), the next ones are requested before: ever more of them, as long as the program has to wait for them.
//!
//! Such an opening is used only for a moment and until any process of the run changes something or takes a lock,
//! like data read ahead. Its age is reckoned as in `ahead.rs`: what the program waits for is as old as any answer,
//! and of everything else it is taken that it was on its way for as long as the fastest opening that was waited
//! for ([`Walk::trips`]). So it is at most [`VALID`] older than what an opening would return.
//!
//! Until the program takes a directory, it is open in this process's session only: whatever happens to the
//! process, nothing stays open. What is not taken in time is closed.

mod tree;

use crate::ahead::{FAR, VALID};
use crate::known::{self, changes, lock, plain};
use crate::place::At;
use crate::{closing, remote};
use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use towline_client::{Batch, DirEntry, Error, File, Operation};
use towline_instance::MOUNTS_MAX;
use towline_wire::Attr;
use tree::{Listed, Name, Step, Tree};

/// Maximum number of directories that the program is expected to open before one that is requested now.
const DEPTH_MAX: usize = 32;
/// The same at first.
const DEPTH: usize = 4;
/// Longest trip that counts: one that takes longer may have been held up.
pub(crate) const TRIP_MAX: Duration = Duration::from_secs(1);
/// Number of directories opened in order before others are requested before.
const IN_ORDER: i32 = 2;
/// Start value of that count after too many were requested in vain.
const IN_VAIN: i32 = -32;
/// How many of those requested before may be of no use, beyond as many as were of use.
const LOST_MAX: u32 = 8;
/// Number of directories that come with attributes after the program has asked for any.
const WANTED: u32 = 64;

static WALK: Mutex<Walk> = Mutex::new(Walk::new());
/// A bit for each mount whose openings are known to take long.
static FAR_MOUNTS: AtomicU32 = AtomicU32::new(0);
/// Something was requested before, and may not have been taken.
static IS_AHEAD: AtomicBool = AtomicBool::new(false);
/// Number of directories that are still to come with attributes.
static ATTRIBUTES: AtomicU32 = AtomicU32::new(0);

/// The walk of this process.
struct Walk {
    tree: Tree,
    /// The directory that was opened last, as long as it may be opened again without asking.
    last: Option<(Name, u32, Found)>,
    /// Directories requested before, in the order in which the program is to open them.
    ahead: Vec<Ahead>,
    /// With these flags the program opens them.
    flags: u32,
    /// Number of directories that were opened in order.
    in_order: i32,
    /// Of so many directories that the program opens next, all that are known are requested.
    depth: usize,
    /// How many of those requested before were of use lately, and how many were not.
    used: u32,
    lost: u32,
    /// For each mount, the shortest time that an opening took for which the program waited, with no other one
    /// under way.
    trips: [Duration; MOUNTS_MAX],
}

/// A directory that was requested before the program opens it.
struct Ahead {
    name: Name,
    flags: u32,
    data: Data,
    /// Its sub-directories, once they are known.
    listed: Option<Listed>,
    asked: Instant,
    /// When it is too old.
    until: Instant,
    /// Number of changes before it was requested, apart from those that do not concern it.
    changes: u64,
    /// Directories that this process has removed since, or from which it has removed names.
    changed: Vec<u64>,
}

/// A name that this process has removed.
pub(crate) struct Removed {
    pub(crate) mount: usize,
    /// Identity of the directory that it was in.
    pub(crate) parent: u64,
    /// Identity of a removed directory.
    pub(crate) gone: Option<u64>,
    /// Number of changes before it and after it.
    pub(crate) before: u64,
    pub(crate) after: u64,
}

enum Data {
    Asked(Operation<(File, Option<Batch>)>),
    Here(File, Option<Batch>),
    /// It cannot be opened; the program is told when it tries.
    Failed,
}

/// An open directory.
#[derive(Clone)]
pub(crate) struct Found {
    pub(crate) handle: u64,
    pub(crate) attr: Attr,
    /// What came with opening it.
    pub(crate) listing: Option<Batch>,
    /// When it was requested, and the number of changes before.
    pub(crate) when: Instant,
    pub(crate) changes: u64,
    /// When the answer has arrived.
    pub(crate) arrived: Instant,
    /// How the program has come to it.
    pub(crate) how: How,
}

/// How a program has come to an open directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// By asking the server.
    Asked,
    /// It was requested before.
    Ahead,
    /// The program has just opened and closed it.
    Again,
}

impl Ahead {
    fn is_valid(&self) -> bool {
        self.changes == changes() && Instant::now() <= self.until
    }

    /// Takes the answer if it has arrived. Returns false if it is still under way.
    fn look(&mut self) -> bool {
        if let Data::Asked(operation) = &mut self.data {
            match Pin::new(operation).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(answer) => self.arrive(answer),
                Poll::Pending => return false,
            }
        }
        true
    }

    fn wait(&mut self) {
        match std::mem::replace(&mut self.data, Data::Failed) {
            Data::Asked(operation) => self.arrive(operation.wait()),
            data => self.data = data,
        }
    }

    fn arrive(&mut self, answer: Result<(File, Option<Batch>), Error>) {
        self.data = Data::Failed;
        if let Ok((file, mut listing)) = answer {
            if let (Some((entries, _)), false) = (&mut listing, self.changed.is_empty()) {
                strip(entries, &self.changed);
            }
            let entries = listing.as_ref().map_or(&[][..], |(entries, _)| entries);
            self.listed = Some(Listed::new(self.name.clone(), file.handle(), file.attr(), entries));
            self.data = Data::Here(file, listing);
        }
    }
}

impl Walk {
    const fn new() -> Self {
        Self {
            tree: Tree::new(),
            last: None,
            ahead: Vec::new(),
            flags: 0,
            in_order: 0,
            depth: DEPTH,
            used: 0,
            lost: 0,
            trips: [TRIP_MAX; MOUNTS_MAX],
        }
    }

    fn trip(&self, mount: usize) -> Duration {
        self.trips.get(mount).copied().unwrap_or(TRIP_MAX)
    }

    /// Returns true if an opening is known to take no long time.
    fn is_near(&self, mount: usize) -> bool {
        self.trip(mount) < FAR
    }

    /// Notes how long an opening took.
    fn took(&mut self, mount: usize, time: Duration) {
        let Some(trip) = self.trips.get_mut(mount) else { return };
        *trip = time.min(*trip);
        let is_far = (FAR..TRIP_MAX).contains(trip);
        if is_far != self::is_far(mount) {
            FAR_MOUNTS.fetch_xor(bit(mount), Ordering::Relaxed);
        }
    }

    /// Notes that the program opens a directory.
    fn goes_to(&mut self, name: &Name, flags: u32) {
        match self.tree.goes_to(name) {
            Step::Next => self.in_order += 1,
            Step::Again => {}
            Step::Elsewhere => self.in_order = self.in_order.min(0),
        }
        self.flags = flags;
    }

    /// Puts back what was requested before, other than what can no longer be used, which is returned.
    fn put_back(&mut self, mut ahead: Vec<Ahead>) -> Vec<Ahead> {
        let lost: Vec<Ahead> = ahead.extract_if(.., |one| !one.is_valid()).collect();
        // Another thread may have added others.
        ahead.append(&mut self.ahead);
        self.ahead = ahead;
        if !lost.is_empty() {
            // Perhaps because there were so many.
            self.depth = (self.depth / 2).max(1);
            self.lost += lost.len() as u32;
            if self.lost > self.used + LOST_MAX {
                (self.used, self.lost, self.depth, self.in_order) = (0, 0, DEPTH, IN_VAIN);
            }
        }
        lost
    }

    /// Takes what was requested before under this name.
    fn take(&mut self, name: &Name, flags: u32) -> Option<Ahead> {
        let is_it = |one: &Ahead| one.name == *name && one.flags == flags;
        let place = self.ahead.iter().position(is_it)?;
        Some(self.ahead.remove(place))
    }

    /// Adapts to a directory that was used.
    fn judge(&mut self, one: &Ahead, is_awaited: bool) {
        self.used += 1;
        if self.used == 8 * LOST_MAX {
            (self.used, self.lost) = (self.used / 2, self.lost / 2);
        }
        // The more there are, the older they are when they are used.
        let age = one.asked.elapsed().saturating_sub(self.trip(one.name.mount));
        if is_awaited && age <= VALID / 4 {
            self.depth = (2 * self.depth).min(DEPTH_MAX);
        }
    }

    /// Returns what to request next.
    fn wanted(&self, mount: usize) -> Vec<Name> {
        if self.in_order < IN_ORDER || !is_far(mount) {
            return Vec::new();
        }
        let known = |name: &Name| {
            let found = self.ahead.iter().find(|one| one.name == *name)?;
            Some(found.listed.as_ref())
        };
        self.tree.upcoming(self.depth, known)
    }
}

/// Called in a process that uses its parent's memory, or has the parent's connections no more: starts empty and
/// leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut walk) = lock(&WALK) {
        std::mem::forget(std::mem::replace(&mut *walk, Walk::new()));
    }
}

/// Closes what was requested before and can no longer be used, if there is something: the program may have ended its
/// walk.
pub(crate) fn tidy() {
    if !IS_AHEAD.load(Ordering::Relaxed) {
        return;
    }
    let lost = lock(&WALK).map(|mut walk| {
        let ahead = std::mem::take(&mut walk.ahead);
        let lost = walk.put_back(ahead);
        IS_AHEAD.store(!walk.ahead.is_empty(), Ordering::Relaxed);
        lost
    });
    // Closed with nothing locked.
    drop(lost);
}

/// Closes what was requested before: its session ends, or the process becomes another user.
pub(crate) fn end() {
    let walk = lock(&WALK).map(|mut walk| std::mem::replace(&mut *walk, Walk::new()));
    drop(walk);
}

fn name_of(at: &At) -> Option<Name> {
    Some(Name { mount: at.mount, base: at.base().ok()?, path: plain(&at.path).to_vec() })
}

/// Returns the directory at a path if it was opened before. The program opens it with these flags.
pub(crate) fn open(at: &At, flags: u32) -> Option<Found> {
    let (name, mut ahead, last) = {
        let mut walk = lock(&WALK).filter(|walk| !walk.is_near(at.mount))?;
        (name_of(at)?, std::mem::take(&mut walk.ahead), walk.last.take())
    };
    // Some programs look into a directory before they open it: `rm`, to see whether it is empty.
    let again = last.filter(|(of, with, found)| {
        let is_valid = found.changes == changes() && found.arrived.elapsed() <= VALID;
        *of == name && *with == flags && is_valid && closing::take_back(at.mount, found.handle)
    });
    if let Some((_, _, found)) = again {
        let lost = lock(&WALK).map(|mut walk| walk.put_back(ahead));
        drop(lost);
        return Some(Found { how: How::Again, ..found });
    }
    // The walk is not locked meanwhile: a lost connection is replaced here.
    let are_here: Vec<bool> = ahead.iter_mut().map(Ahead::look).collect();
    let is_here = ahead.iter().zip(are_here).any(|(one, is_here)| is_here && one.name == name);
    let (found, lost) = {
        let mut walk = lock(&WALK)?;
        walk.goes_to(&name, flags);
        let lost = walk.put_back(ahead);
        (walk.take(&name, flags), lost)
    };
    // Closed with nothing locked.
    drop(lost);
    let mut found = found?;
    if !is_here {
        request(at.mount);
        found.wait();
    }
    let trip = {
        let mut walk = lock(&WALK)?;
        if !is_here {
            // It was on its way for no longer than this: the server may have become nearer.
            walk.took(at.mount, found.asked.elapsed());
        }
        walk.judge(&found, !is_here);
        walk.trip(at.mount)
    };
    let is_valid = found.is_valid();
    let Data::Here(file, listing) = found.data else { return None };
    let is_changed = found.changed.contains(&file.attr().identity());
    if !is_valid || is_changed || file.keep().is_err() {
        return None;
    }
    let (when, changes, now) = (found.asked, found.changes, Instant::now());
    let arrived = if is_here { now.min(when + trip) } else { now };
    let attr = *file.attr();
    let handle = file.into_handle();
    Some(Found { handle, attr, listing, when, changes, arrived, how: How::Ahead })
}

/// Notes that the program has opened a directory with these flags, and requests what is next.
pub(crate) fn opened(at: &At, flags: u32, found: &Found) {
    let Some(mut walk) = lock(&WALK) else { return };
    if found.how == How::Asked && walk.ahead.is_empty() {
        walk.took(at.mount, found.arrived.saturating_duration_since(found.when));
    }
    // A directory that is opened again is noted already.
    if walk.is_near(at.mount) || found.how == How::Again {
        return;
    }
    let Some(name) = name_of(at) else { return };
    let entries = found.listing.as_ref().map_or(&[][..], |(entries, _)| entries);
    walk.tree.add(Listed::new(name.clone(), found.handle, &found.attr, entries));
    walk.last = Some((name, flags, found.clone()));
    drop(walk);
    request(at.mount);
}

/// Requests the directories that the program is to open next.
fn request(mount: usize) {
    let Some((wanted, flags)) = lock(&WALK).map(|walk| (walk.wanted(mount), walk.flags)) else {
        return;
    };
    for name in wanted {
        let (asked, changes) = (Instant::now(), changes());
        let attributes = listings_have_attributes(name.mount);
        let start = |base: &File| base.start_open_listing(&name.path, flags, attributes);
        let Ok(operation) = remote::with_handle(name.mount, name.base, start) else { return };
        // Without the lock, the operation is dropped, and the directory closed.
        let Some(mut walk) = lock(&WALK) else { return };
        let until = asked + walk.trip(mount) + VALID;
        let data = Data::Asked(operation);
        let (listed, changed) = (None, Vec::new());
        IS_AHEAD.store(true, Ordering::Relaxed);
        walk.ahead.push(Ahead { name, flags, data, listed, asked, until, changes, changed });
    }
}

/// Returns true if openings of a mount are known to take long.
pub(crate) fn is_far(mount: usize) -> bool {
    FAR_MOUNTS.load(Ordering::Relaxed) & bit(mount) != 0
}

/// Returns the bit of a mount in [`FAR_MOUNTS`].
fn bit(mount: usize) -> u32 {
    if mount < MOUNTS_MAX { 1 << mount } else { 0 }
}

/// Notes that the program asks for attributes of a name. If the server is far, it is to get them with the listing
/// of each directory from then on: they cost less than another round trip for one name.
pub(crate) fn wants_attributes(mount: usize) {
    if is_far(mount) {
        ATTRIBUTES.store(WANTED, Ordering::Relaxed);
    }
}

/// Returns true if the listing of a directory that is opened should include attributes.
pub(crate) fn listings_have_attributes(mount: usize) -> bool {
    let take_one = |left: u32| left.checked_sub(1);
    let relaxed = Ordering::Relaxed;
    let is_wanted = is_far(mount) && ATTRIBUTES.fetch_update(relaxed, relaxed, take_one).is_ok();
    is_wanted || known::listings_have_attributes()
}

/// Returns the identity of a directory that the walk is in or has left last.
pub(crate) fn identity(mount: usize, base: u64, name: &[u8]) -> Option<u64> {
    lock(&WALK)?.tree.identity(&Name { mount, base, path: name.to_vec() })
}

/// Adapts to the removal of a name.
pub(crate) fn removed(removed: &Removed) {
    let Some(mut walk) = lock(&WALK) else { return };
    for one in &mut walk.ahead {
        if one.changes != removed.before || one.name.mount != removed.mount {
            continue;
        }
        one.changes = removed.after;
        for changed in [Some(removed.parent), removed.gone].into_iter().flatten() {
            if !one.changed.contains(&changed) {
                one.changed.push(changed);
            }
        }
        if let Data::Here(_, Some((entries, _))) = &mut one.data {
            strip(entries, &one.changed);
        }
    }
}

/// Forgets the attributes of files with several names, and of these directories.
fn strip(entries: &mut [DirEntry], directories: &[u64]) {
    for entry in entries {
        let is_linked = |attr: &Attr| !attr.is_directory() && attr.links > 1;
        let concerns = |attr: &Attr| is_linked(attr) || directories.contains(&attr.identity());
        entry.attr.take_if(|attr| concerns(attr));
    }
}

/// Notes further entries of an open directory.
pub(crate) fn listed(mount: usize, handle: u64, entries: &[DirEntry]) {
    if let Some(mut walk) = lock(&WALK) {
        walk.tree.extend(mount, handle, entries);
    }
}
