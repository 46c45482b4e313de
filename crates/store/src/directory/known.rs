//! Known directories: directories kept open and known to be at a certain path. They save resolving
//! that path, and an operation on a name in one takes one system call instead of three
//! (`openat2(2)`, the call itself, `close(2)`).
//!
//! `inotify(7)` watches a known directory and every directory above it, up to the root of its export,
//! for moves, and those above for changes of permissions. The kernel queues such an event before the
//! system call that makes the change returns. So a path is still valid if the queue holds none after
//! the request that names the path has arrived. Of the requests that arrive together, the first one
//! that names a path checks the queue, and the others rely on that; [`requests_arrived`] says that
//! a check is due, and [`changed`] that it is due again, after a change that one of them made. Any
//! event of a watched directory itself invalidates all known directories. The check reads memory
//! where the kernel supports that ([`Bell`]), and otherwise takes a system call.
//!
//! inotify does not report the removal of a directory that is held open. But a removed directory
//! stays empty. So if a name is not found in a known directory, the store checks whether the
//! directory itself still has a name, or resolves the path.
//!
//! inotify does not report changes made by other machines either, so only local file systems count.
//! Nor does it report mounts inside the export, so everything is forgotten after [`FORGET`]; a path
//! across a mount is never known.

use super::attributes::identity_of;
use super::bell::Bell;
use super::resolve::{PARENT, Tree, proc_path};
use foldhash::fast::RandomState;
use parking_lot::{Mutex, RwLock};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::fs::{Mode, ResolveFlags};
use rustix::io::Errno as Code;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Uses of a path before its directory is worth watching.
const USES_MIN: u8 = 3;
/// Maximum number of uses of a path between failed attempts to make its directory known; an attempt
/// takes four system calls or more.
const USES_MAX: u8 = 192;
/// Maximum number of known directories; each holds a descriptor.
const KNOWN_MAX: usize = 512;
/// Maximum number of directories above a known one: all of them are watched for each.
const DEPTH_MAX: usize = 64;
/// Maximum number of paths whose uses are counted.
const COUNTED_MAX: usize = 2048;
/// How long a directory is known at most.
const FORGET: Duration = Duration::from_secs(2);

/// Maximum number of queued events to look at.
const EVENTS_MAX: usize = 256;
/// Buffer for the events that one system call takes from the queue: at least one with the longest
/// name.
const BATCH_BYTES: usize = 4096;

/// File systems that only this machine changes, by their numbers in `statfs(2)`: ext, xfs, btrfs,
/// f2fs, tmpfs.
const LOCAL: [i64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];

/// What invalidates a known directory. The kernel checks permissions of the directory itself with
/// each use.
const MOVES: WatchFlags =
    WatchFlags::MOVE_SELF.union(WatchFlags::ONLYDIR).union(WatchFlags::MASK_ADD);
/// The same for the directories above. It makes the kernel look at the watch whenever a file in
/// them, local or not, is opened, read, written or closed, and it reports changes of those files'
/// attributes, too. So known directories, which hold the files that are used, do without, unless
/// they are above others.
const MOVES_AND_RIGHTS: WatchFlags = MOVES.union(WatchFlags::ATTRIB);

/// One queue for all exports of the process, so that one check is enough.
struct Watching {
    queue: Mutex<Queue>,
    /// Changes when everything is forgotten; written under the lock of `queue`.
    generation: AtomicU64,
    /// Whether anything is watched.
    busy: AtomicBool,
}

/// Whether a thread may rely on known directories.
#[derive(Clone, Copy)]
enum Look {
    /// The thread never called [`requests_arrived`].
    Never,
    /// Requests have arrived, at this time, since the last check.
    Due(Instant),
    /// The thread has checked since requests arrived.
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

/// Says that requests have arrived at the time `now`, and that the calling thread is about to
/// execute them. Also to be called before a request continues that had waited for another. A thread
/// that never calls this uses no known directories. Costs nothing unless one of the requests names
/// a path.
pub fn requests_arrived(now: Instant) {
    LOOK.set(Look::Due(now));
}

/// Says that the calling thread has made a change that may move directories or take rights away.
/// What it executes next, perhaps of the same request, has to see that.
pub(super) fn changed() {
    if !matches!(LOOK.get(), Look::Never) {
        LOOK.set(Look::Due(Instant::now()));
    }
}

/// Keeps the calling thread from making a ring to check for changes, if none is wanted or
/// available.
pub fn make_no_ring() {
    BELL.with_borrow_mut(Bell::remove);
}

/// Checks the queue if that is due. Returns false if this thread may not rely on known directories.
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

/// Forgets everything after an event, or when it is time to. `now` is when the requests arrived.
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
    // Under the lock, the queue stays the one of this generation.
    let generation = watching.generation.load(Ordering::Acquire);
    // Before the queue is read, so that the bell reports whatever comes later.
    BELL.with_borrow_mut(|bell| bell.attach(inotify, generation, since + FORGET));
    if tells_changes(inotify) || now.saturating_duration_since(since) >= FORGET {
        watching.generation.fetch_add(1, Ordering::Release);
        watching.busy.store(false, Ordering::Release);
        // Closing the queue ends all its watches.
        *queue = Queue::default();
    }
}

/// Reads the queue. Returns true if a watched directory moved or its permissions changed, or if too
/// much is queued to look at. Events with a name are of files in one.
fn tells_changes(inotify: &OwnedFd) -> bool {
    let mut batch = [MaybeUninit::uninit(); BATCH_BYTES];
    let mut reader = Reader::new(inotify, &mut batch);
    for _ in 0..EVENTS_MAX {
        match reader.next() {
            Ok(event) if event.file_name().is_some() => {}
            Err(Code::INTR) => {}
            Err(Code::AGAIN) => return false,
            _ => return true,
        }
    }
    true
}

/// Watches a directory for `events`, unless everything was forgotten since `generation`.
fn watch(directory: &OwnedFd, events: WatchFlags, generation: u64) -> bool {
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
    inotify::add_watch(inotify, proc_path(directory), events).is_ok()
}

/// The known directories of one export.
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

/// Uses of a path since the last attempt to make its directory known, and how many the next attempt
/// needs.
#[derive(Debug)]
struct Uses {
    since: u8,
    needed: u8,
}

impl Uses {
    /// Counts a use. Returns true if the next attempt is due.
    fn count(&mut self) -> bool {
        self.since += 1;
        let is_due = self.since >= self.needed;
        if is_due {
            self.since = 0;
        }
        is_due
    }

    /// Records the outcome of an attempt: one that failed would most likely fail the next time,
    /// too.
    fn found(&mut self, found: bool) {
        self.needed = if found { USES_MIN } else { self.needed.saturating_mul(2).min(USES_MAX) };
    }
}

impl Known {
    /// Returns the directory at `path` from the root of the tree, if it is known to be there now.
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

    /// Counts a use of `path`, and makes its directory known if it is used often.
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

/// Opens and watches a directory and watches all directories above it. Returns `None` if that is
/// not possible, or if the directory moved meanwhile.
fn walk(tree: &Tree, path: &[u8], generation: u64) -> Option<OwnedFd> {
    let plain = |name: &[u8]| !name.is_empty() && name != b"." && name != b"..";
    let names = || path.split(|byte| *byte == b'/');
    if !names().all(plain) || names().count() > DEPTH_MAX {
        return None;
    }
    let kind = rustix::fs::fstatfs(&tree.root).ok()?.f_type;
    if !LOCAL.contains(&kind) {
        return None;
    }
    let mut directory: Option<OwnedFd> = None;
    for name in names() {
        let above = directory.as_ref().unwrap_or(&tree.root);
        if !watch(above, MOVES_AND_RIGHTS, generation) {
            return None;
        }
        directory = Some(open(above, name)?);
    }
    let directory = directory?;
    if !watch(&directory, MOVES, generation) {
        return None;
    }
    // A directory that moved before it was watched is elsewhere by now.
    let now = open(&tree.root, path)?;
    let identity = |fd| super::attributes::stat_file(fd).ok().map(|stat| identity_of(&stat));
    (identity(&directory)? == identity(&now)?).then_some(directory)
}

fn open(above: &OwnedFd, path: &[u8]) -> Option<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(above, path, PARENT, Mode::empty(), resolve).ok()
}
