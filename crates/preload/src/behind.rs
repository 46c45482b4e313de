//! Writes to files of servers that are not next to us, which the keeper sends: a program that writes a file piece by
//! piece does not wait for the answer to each.
//!
//! This happens once a process of the run has found out how long an answer takes, from the second write to a file on.
//! If the server is not far, it must follow [`IN_ORDER`] others directly: a program that asks for something after a few
//! writes would wait for the keeper. Before a process asks a server for anything else, it waits until what the run
//! has written is there ([`settle`]). So the processes of a run see each other's writes, and the server gets changes
//! in the order in which they were made. What others see late is told in `docs/design/run.md`.
//!
//! Where something is appended is known when it is written. Whoever needs the position of a file open for appending
//! waits for that ([`settle_position`]).
//!
//! A write behind that fails is reported by the next `write`, `fsync` or `close` of the file; from then on its
//! writes are waited for. Writes are also waited for if there may not be room for what is under way, or if they
//! overlap with it.

use crate::changed::Change;
use crate::descriptors::Open;
use crate::hooks::{maps, shared};
use crate::{ahead, known, process, remote, report, start, written};
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use towline_client::File;
use towline_instance::behind::{Behind, Place, Queue, RECORD_BYTES_MAX};
use towline_instance::{MOUNTS_MAX, State};

/// Bytes that are moved in a microsecond. Waiting for an answer is little beside a write that takes longer than that to
/// be moved, and so is what the keeper saves beside copying it.
const BYTES_PER_MICROSECOND: u128 = 1 << 10;

/// Number of writes to a file without another request in between, after which more are expected.
const IN_ORDER: u32 = 3;

/// Number of writes of this process to servers that answer at once, after which it takes their time no more.
const LOOKS: u32 = 64;

/// How long a short request takes at least if writes are sent behind: more than to wake the keeper's threads.
const WORTH: Duration = Duration::from_micros(100);

/// Number of writes in succession that have to take that long: on a busy machine, any of them may.
const SLOW_IN_ORDER: u32 = 2;

/// Set once this process has become another user since it connected: the keeper cannot write as that one.
static IS_OTHER: AtomicBool = AtomicBool::new(false);
/// Number of writes in succession that took long because answers seem to do.
static SLOW: AtomicU32 = AtomicU32::new(0);
/// Queues that this process has mapped, by server.
static QUEUES: [AtomicPtr<Queue>; MOUNTS_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOUNTS_MAX];
static OPENING: Mutex<()> = Mutex::new(());
/// Number of writes whose time was taken.
static LOOKED: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The handle of the file to which this thread has written, and how often without another request in between.
    static WRITTEN: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// Called before each request of this thread.
#[inline]
pub(crate) fn asks() {
    WRITTEN.set((0, 0));
}

/// Waits until everything is done that the run has written behind to the server of a mount.
///
/// # Errors
/// `EIO` if the keeper has ended, and the data is lost.
#[inline]
pub(crate) fn settle(mount: usize) -> Result<(), i32> {
    let Some(state) = start::state() else { return Ok(()) };
    let server = start::server(mount);
    if state.behind(server).is_idle() { Ok(()) } else { wait(state, server) }
}

/// [`settle`] for all servers: this process ends.
pub(crate) fn settle_all() {
    for mount in 0..start::mounts().len() {
        // `close` and `fsync` report the failure, and the keeper does.
        let _ = settle(mount);
    }
}

#[cold]
fn wait(state: &State, server: usize) -> Result<(), i32> {
    let is_served = || Queue::is_served(start::directory(), server);
    state.behind(server).wait(is_served).map_err(|_| {
        // What the run knows of files may be what is lost.
        state.changes().fetch_add(2, Ordering::AcqRel);
        libc::EIO
    })
}

/// Reports, once, that writes behind to a file have failed.
pub(crate) fn check(open: Open) -> Result<(), i32> {
    if !open.entry.has_failed() {
        return Ok(());
    }
    // What is still in the queue belongs to the same failure.
    let settled = settle(mount(open));
    open.entry.take_failure().map_or(settled, Err)
}

/// [`settle`] and [`check`] for a file that is about to be closed.
pub(crate) fn closing(open: Open) -> Result<(), i32> {
    if open.entry.is_written() {
        settle(mount(open))?;
    }
    check(open)
}

/// Waits until the position of a file is known to which something may have been appended behind.
pub(crate) fn settle_position(open: Open) {
    if is_append(open) && open.entry.is_written() {
        // What fails is reported by `close` and `fsync`.
        let _ = settle(mount(open));
    }
}

fn is_append(open: Open) -> bool {
    open.entry.flags.load(Ordering::Relaxed) as i32 & libc::O_APPEND != 0
}

/// Called when the process has become another user.
pub(crate) fn identity_changed() {
    IS_OTHER.store(true, Ordering::Relaxed);
}

fn mount(open: Open) -> usize {
    open.entry.mount.load(Ordering::Relaxed) as usize
}

/// Returns the queue of a server, which has one.
fn queue(server: usize) -> Option<&'static Queue> {
    let place = QUEUES.get(server)?;
    // SAFETY: null or a leaked box.
    if let Some(queue) = unsafe { place.load(Ordering::Acquire).as_ref() } {
        return Some(queue);
    }
    let _opening = known::lock(&OPENING)?;
    if place.load(Ordering::Acquire).is_null() {
        let queue = Queue::open(start::directory(), server).ok()?;
        queue.leave_to_new_program(process::holder());
        place.store(Box::into_raw(Box::new(queue)), Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// Returns false once it is known that the server answers so soon that all its writes are waited for.
pub(crate) fn may_be_far(open: Open) -> bool {
    let is_ready = |state: &State| state.behind(start::server(mount(open))).is_ready();
    LOOKED.load(Ordering::Relaxed) < LOOKS || start::state().is_some_and(is_ready)
}

/// Returns true for a file whose writes only have to be there when it is closed.
pub(crate) fn is_plain(open: Open) -> bool {
    const WAITED: i32 = libc::O_DIRECT | libc::O_DSYNC | libc::O_SYNC;
    open.entry.flags.load(Ordering::Relaxed) as i32 & WAITED == 0
        && open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFREG
}

/// Writes behind, if that is possible; appends if no offset is given, and the keeper moves the file's position.
/// Returns the number of bytes; `None` if the write has to be waited for, as what is left must be if these are fewer.
pub(crate) fn write(open: Open, data: &[u8], at: Option<u64>) -> Option<usize> {
    let (state, mount) = (start::state()?, mount(open));
    let server = start::server(mount);
    let behind = state.behind(server);
    let mapped = shared::made();
    let is_meant = behind.is_ready()
        && is_short(behind, data, at)
        && ends_in_range(data, at)
        && open.entry.may_write_behind()
        && (has_written(open.handle) || behind.trip() > ahead::FAR)
        // These are on their way in another session.
        && open.entry.unanswered.load(Ordering::Acquire) == 0
        && is_plain(open)
        && !IS_OTHER.load(Ordering::Relaxed)
        && process::namespace() == 0
        && remote::user(mount) == Some(behind.user())
        && !maps::has_shared(open);
    let queue = if is_meant { queue(server)? } else { return None };
    if !state.behind(mount).take_room(data.len()) {
        behind.nudge();
        return None;
    }
    let count = add(state, queue, open, data, at);
    if shared::made() != mapped {
        // Whoever has mapped the file has waited only for what was in the queue then.
        let _ = settle(mount);
        let at = at.map(|at| at as i64);
        maps::written_since(open, mapped, &data[..count], at);
    }
    Some(count).filter(|count| *count > 0)
}

/// Returns true for a write that is not too long to be sent behind.
fn is_short(behind: Behind<'_>, data: &[u8], at: Option<u64>) -> bool {
    // What is appended stays in one piece.
    let most = if at.is_some() { usize::MAX } else { RECORD_BYTES_MAX };
    let moved = behind.trip().as_micros() * BYTES_PER_MICROSECOND;
    data.len() <= most && data.len() as u128 <= moved
}

/// Returns false for a write that ends behind the largest offset, which the server refuses.
fn ends_in_range(data: &[u8], at: Option<u64>) -> bool {
    let end = at.unwrap_or(0).checked_add(data.len() as u64);
    end.is_some_and(|end| i64::try_from(end).is_ok())
}

/// Returns true if this thread has done nothing else than write to a file lately.
fn has_written(handle: u64) -> bool {
    let (written, count) = WRITTEN.get();
    written == handle && count >= IN_ORDER
}

fn add(state: &State, queue: &Queue, open: Open, data: &[u8], at: Option<u64>) -> usize {
    let Open { entry, handle, number, .. } = open;
    let (mount, inode) = (mount(open), entry.inode.load(Ordering::Relaxed));
    let behind = state.behind(start::server(mount));
    let mut place = Place { mount, entry: number, handle, inode, offset: at };
    let changes = state.changes();
    let change = Change::begin(mount);
    let before = changes.fetch_add(1, Ordering::AcqRel);
    let mut done = 0;
    while done < data.len() && entry.may_write_behind() {
        let Some(count) = queue.add(behind, process::holder(), &place, &data[done..]) else {
            break;
        };
        done += count;
        place.offset = at.map(|at| at + done as u64);
    }
    // Also after the change, as for all others (`Options::changes`).
    changes.fetch_add(1, Ordering::AcqRel);
    if let Some(at) = at {
        written::wrote(open, &data[..done], at, before);
    }
    change.written(inode);
    done
}

/// A write that is waited for.
pub(crate) struct Waited {
    /// How many went before it.
    before: u32,
    began: Option<Began>,
}

struct Began {
    state: &'static State,
    at: Instant,
}

impl Waited {
    /// Begins such a write. Takes the time as long as nobody knows how long answers take.
    pub(crate) fn begin(open: Open) -> Self {
        let server = || start::server(mount(open));
        let unknown = |state: &&State| state.behind(server()).is_unused();
        let looks = LOOKED.load(Ordering::Relaxed) < LOOKS;
        let state = if looks { start::state().filter(unknown) } else { None };
        let (written, count) = WRITTEN.get();
        let before = if written == open.handle { count } else { 0 };
        Self { before, began: state.map(|state| Began { state, at: Instant::now() }) }
    }

    /// Notes that it is done, and finds out how long answers take if it took long.
    pub(crate) fn end(self, open: Open) {
        open.entry.has_waited();
        if let Some(Began { state, at }) = self.began {
            LOOKED.fetch_add(1, Ordering::Relaxed);
            look(state, open, at.elapsed());
        }
        WRITTEN.set((open.handle, self.before.saturating_add(1)));
    }
}

/// Asks for a queue if writes take long because answers do. Otherwise the network is slow, or the disk, and waiting
/// less would only delay others.
fn look(state: &State, open: Open, time: Duration) {
    let trip = if time > WORTH && is_plain(open) { trip(open) } else { None };
    let Some(trip) = trip.filter(|trip| *trip > WORTH && 4 * *trip > time) else {
        return SLOW.store(0, Ordering::Relaxed);
    };
    let is_sure = SLOW.fetch_add(1, Ordering::Relaxed) + 1 >= SLOW_IN_ORDER;
    if is_sure && state.behind(start::server(mount(open))).ask(trip) {
        let _ = report::wake_keeper();
    }
}

/// Returns how long a short request takes.
fn trip(open: Open) -> Option<Duration> {
    let asked = Instant::now();
    remote::with(open, File::stat).ok().map(|_| asked.elapsed())
}
