//! Directories that are known to stand at a path: they spare the walk there, and a call on a name
//! in them takes one system call where `openat2(2)`, the call itself and `close(2)` are three.
//!
//! A directory is watched by `inotify(7)`, as is every one above it up to the root of its export,
//! for being moved or given other rights. The kernel queues such an event before the
//! change returns to whoever made it. So a path is as good as walked when the queue was found
//! empty after the request that names it arrived. The first of the requests that arrived together which
//! names a path looks, and the others rely on it: [`requests_arrived`] says that a look is due. Whatever comes out of the queue
//! forgets everything. To look is to look at memory, where the kernel says so ([`Bell`]), else it is a system call.
//!
//! Nobody is told that a directory was removed while it is held open. But then it is empty for ever:
//! whoever does not find a name in a known directory looks whether that still has a name itself, or walks.
//!
//! Not told either are changes by other machines (so only local file systems count) and mounts inside the
//! export (so everything is forgotten after [`FORGET`]; a path across a mount is never known).

use super::attributes::identity_of;
use super::bell::Bell;
use super::resolve::{PARENT, Tree, proc_path};
use foldhash::fast::RandomState;
use parking_lot::{Mutex, RwLock};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, ResolveFlags};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Uses of a path before its directory is worth watching.
const USES_MIN: u8 = 3;
/// Uses of a path before its directory is looked for again, at most, where it was in vain: a walk is four system calls or more.
const USES_MAX: u8 = 192;
/// Directories known at once, each a descriptor.
const KNOWN_MAX: usize = 512;
/// Paths whose uses are counted at once.
const COUNTED_MAX: usize = 2048;
/// How long a directory is known at most.
const FORGET: Duration = Duration::from_secs(2);

/// File systems that only this machine changes, by the numbers of `statfs(2)`: ext, xfs, btrfs,
/// f2fs, tmpfs.
const LOCAL: [i64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];

const EVENTS: WatchFlags =
    WatchFlags::MOVE_SELF.union(WatchFlags::ATTRIB).union(WatchFlags::ONLYDIR);

/// One queue for all exports of the process, so that one look is enough.
struct Watching {
    queue: Mutex<Queue>,
    /// Changes when everything is to be forgotten; written under the lock.
    generation: AtomicU64,
    /// Something is watched.
    busy: AtomicBool,
}

/// Whether a thread may rely on what is known.
#[derive(Clone, Copy)]
enum Look {
    /// It never called [`requests_arrived`].
    Never,
    /// Requests have arrived, at this time, since it looked.
    Due(Instant),
    /// It has looked since requests arrived.
    Done,
}

thread_local! {
    static LOOK: Cell<Look> = const { Cell::new(Look::Never) };
    static BELL: RefCell<Bell> = const { RefCell::new(Bell::new()) };
}

#[derive(Default)]
struct Queue {
    inotify: Option<OwnedFd>,
    since: Option<Instant>,
}

static WATCHING: LazyLock<Watching> = LazyLock::new(|| Watching {
    queue: Mutex::default(),
    generation: AtomicU64::new(0),
    busy: AtomicBool::new(false),
});

/// Has to be called after requests arrived and before they are executed, by the thread that will, also when one goes on
/// that had waited for another. `now` is the time of the call. A thread that never calls it knows no directories. Costs
/// nothing unless one of the requests names a path.
pub fn requests_arrived(now: Instant) {
    LOOK.set(Look::Due(now));
}

/// The thread that calls it makes no ring to tell it of changes: where none are wanted, or none are to be had.
pub fn make_no_ring() {
    BELL.with_borrow_mut(Bell::remove);
}

/// Looks at the queue if that is due; false when this thread may not rely on what is known.
fn has_looked() -> bool {
    match LOOK.get() {
        Look::Never => false,
        Look::Due(now) => {
            LOOK.set(Look::Done);
            look(now);
            true
        }
        Look::Done => true,
    }
}

/// Forgets everything if there is news, or it is time to. `now` is when the requests arrived.
fn look(now: Instant) {
    let watching = &*WATCHING;
    if !watching.busy.load(Ordering::Acquire) {
        return;
    }
    let generation = watching.generation.load(Ordering::Acquire);
    if BELL.with_borrow_mut(|bell| bell.is_silent(generation, now)) {
        return;
    }
    let mut queue = watching.queue.lock();
    let (Some(inotify), Some(since)) = (&queue.inotify, queue.since) else { return };
    // The lock keeps it the queue of this generation.
    let generation = watching.generation.load(Ordering::Acquire);
    // Before it is read: what comes since rings.
    BELL.with_borrow_mut(|bell| bell.attach(inotify, generation, since + FORGET));
    let quiet =
        matches!(rustix::io::read(inotify, &mut [0; 256][..]), Err(rustix::io::Errno::AGAIN));
    if !quiet || now.saturating_duration_since(since) >= FORGET {
        watching.generation.fetch_add(1, Ordering::Release);
        watching.busy.store(false, Ordering::Release);
        // All watches end with their queue.
        *queue = Queue::default();
    }
}

/// Watches a directory, unless everything was to be forgotten since `generation`.
fn watch(directory: &OwnedFd, generation: u64) -> bool {
    let watching = &*WATCHING;
    let mut queue = watching.queue.lock();
    if watching.generation.load(Ordering::Acquire) != generation {
        return false;
    }
    if queue.inotify.is_none() {
        queue.inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        queue.since = Some(Instant::now());
        watching.busy.store(true, Ordering::Release);
    }
    let Some(inotify) = &queue.inotify else { return false };
    inotify::add_watch(inotify, proc_path(directory), EVENTS).is_ok()
}

/// What one export knows.
#[derive(Debug, Default)]
pub(super) struct Known {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    generation: u64,
    directories: HashMap<Vec<u8>, Arc<OwnedFd>, RandomState>,
    uses: HashMap<Vec<u8>, Uses, RandomState>,
}

/// Uses of a path since its directory was looked for, and how many there have to be.
#[derive(Debug)]
struct Uses {
    since: u8,
    needed: u8,
}

impl Uses {
    /// Counts one; true when the directory is to be looked for.
    fn count(&mut self) -> bool {
        self.since += 1;
        let is_due = self.since >= self.needed;
        if is_due {
            self.since = 0;
        }
        is_due
    }

    /// Takes what came of looking: where it was in vain it would most likely be so the next time.
    fn found(&mut self, found: bool) {
        self.needed = if found { USES_MIN } else { self.needed.saturating_mul(2).min(USES_MAX) };
    }
}

impl Known {
    /// The directory at `path` from the root of the tree, if it is known to be there now.
    pub(super) fn find(&self, tree: &Tree, path: &[u8]) -> Option<Arc<OwnedFd>> {
        if !has_looked() {
            return None;
        }
        let watching = &*WATCHING;
        let generation = watching.generation.load(Ordering::Acquire);
        let inner = self.inner.read();
        if inner.generation == generation
            && let Some(directory) = inner.directories.get(path)
        {
            return Some(directory.clone());
        }
        drop(inner);
        self.count(tree, path, generation)
    }

    /// Gets to know a directory that is used often.
    fn count(&self, tree: &Tree, path: &[u8], generation: u64) -> Option<Arc<OwnedFd>> {
        let mut inner = self.inner.write();
        if inner.generation != generation {
            inner.generation = generation;
            inner.directories.clear();
        }
        if inner.uses.len() >= COUNTED_MAX {
            inner.uses.clear();
        }
        let Inner { directories, uses, .. } = &mut *inner;
        let Some(uses) = uses.get_mut(path) else {
            uses.insert(path.to_vec(), Uses { since: 1, needed: USES_MIN });
            return None;
        };
        if !uses.count() || directories.len() >= KNOWN_MAX {
            return None;
        }
        let directory = walk(tree, path, generation);
        uses.found(directory.is_some());
        let directory = Arc::new(directory?);
        directories.insert(path.to_vec(), directory.clone());
        Some(directory)
    }
}

/// Opens and watches a directory and all above it; `None` where that is not possible, or where it
/// moved meanwhile.
fn walk(tree: &Tree, path: &[u8], generation: u64) -> Option<OwnedFd> {
    let plain = |name: &[u8]| !name.is_empty() && name != b"." && name != b"..";
    if !path.split(|byte| *byte == b'/').all(plain) {
        return None;
    }
    let kind = rustix::fs::fstatfs(&tree.root).ok()?.f_type;
    if !LOCAL.contains(&kind) || !watch(&tree.root, generation) {
        return None;
    }
    let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(end, _)| end);
    for end in ends {
        if !watch(&open(tree, &path[..end])?, generation) {
            return None;
        }
    }
    let directory = open(tree, path)?;
    if !watch(&directory, generation) {
        return None;
    }
    // What moved before it was watched stands elsewhere now.
    let now = open(tree, path)?;
    let identity = |fd| super::attributes::stat_file(fd).ok().map(|stat| identity_of(&stat));
    (identity(&directory)? == identity(&now)?).then_some(directory)
}

fn open(tree: &Tree, path: &[u8]) -> Option<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(&tree.root, path, PARENT, Mode::empty(), resolve).ok()
}
