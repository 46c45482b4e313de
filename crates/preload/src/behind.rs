//! Writes to files of far servers, which the keeper sends: a program that writes a file piece by piece does not
//! wait for the answer to each.
//!
//! This happens once a process of the run has found out that the server is far, with the second write to a file.
//! Before a process asks a server for anything else, it waits until what the run has written is there
//! ([`settle`]). So the processes of a run see each other's writes, and the server gets changes in the order in
//! which they were made. What others see late is told in `docs/design/run.md`.
//!
//! A write behind that fails is reported by the next `write`, `fsync` or `close` of the file; from then on its
//! writes are waited for. They are also waited for if there may not be room for what is under way.

use crate::descriptors::Open;
use crate::{ahead, process, remote, report, start};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use towline_client::File;
use towline_instance::behind::{Place, Queue};
use towline_instance::{MOUNTS_MAX, State};

/// Number of writes of this process to servers that are not far, after which it takes their time no more.
const LOOKS: u32 = 64;

/// Set once this process has become another user since it connected: the keeper cannot write as that one.
static IS_OTHER: AtomicBool = AtomicBool::new(false);
/// Queues that this process has mapped, by mount.
static QUEUES: [AtomicPtr<Queue>; MOUNTS_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOUNTS_MAX];
/// Number of writes whose time was taken.
static LOOKED: AtomicU32 = AtomicU32::new(0);

/// Waits until everything is done that the run has written behind to the server of a mount.
///
/// # Errors
/// `EIO` if the keeper has ended, and the data is lost.
#[inline]
pub(crate) fn settle(mount: usize) -> Result<(), i32> {
    let Some(state) = start::state() else { return Ok(()) };
    let mounts = 0..start::mounts().len();
    match mounts.clone().all(|one| state.behind(one).is_idle()) {
        true => Ok(()),
        false => wait(state, mounts.filter(|one| is_same_server(*one, mount))),
    }
}

/// [`settle`] for all servers: this process ends.
pub(crate) fn settle_all() {
    if let Some(state) = start::state() {
        // `close` and `fsync` report the failure, and the keeper does.
        let _ = wait(state, 0..start::mounts().len());
    }
}

#[cold]
fn wait(state: &State, mounts: impl Iterator<Item = usize>) -> Result<(), i32> {
    let waited = |mount| state.behind(mount).wait().map_err(|_| libc::EIO);
    mounts.map(waited).fold(Ok(()), Result::and)
}

fn is_same_server(one: usize, other: usize) -> bool {
    let transport = |mount: usize| start::mounts().get(mount)?.url().map(|url| &url.transport);
    one == other || transport(one) == transport(other)
}

/// Reports, once, that a write behind to a file has failed.
pub(crate) fn check(open: Open) -> Result<(), i32> {
    open.entry.take_failure().map_or(Ok(()), Err)
}

/// [`settle`] and [`check`] for a file that is about to be closed.
pub(crate) fn closing(open: Open) -> Result<(), i32> {
    if open.entry.is_written() {
        settle(mount(open))?;
    }
    check(open)
}

/// Called when the process has become another user.
pub(crate) fn identity_changed() {
    IS_OTHER.store(true, Ordering::Relaxed);
}

fn mount(open: Open) -> usize {
    open.entry.mount.load(Ordering::Relaxed) as usize
}

/// Returns the queue of a mount, which has one.
fn queue(mount: usize) -> Option<&'static Queue> {
    let place = QUEUES.get(mount)?;
    // SAFETY: null or a leaked box.
    if let Some(queue) = unsafe { place.load(Ordering::Acquire).as_ref() } {
        return Some(queue);
    }
    let queue = Box::into_raw(Box::new(Queue::open(start::directory(), mount).ok()?));
    // Another thread may have been faster; its queue is as good.
    place.store(queue, Ordering::Release);
    // SAFETY: just leaked.
    unsafe { queue.as_ref() }
}

/// Returns true for a file whose writes only have to be there when it is closed.
fn is_plain(open: Open) -> bool {
    const WAITED: i32 = libc::O_APPEND | libc::O_DIRECT | libc::O_DSYNC | libc::O_SYNC;
    open.entry.flags.load(Ordering::Relaxed) as i32 & WAITED == 0
        && open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFREG
}

/// Writes behind, if that is possible. Returns the number of bytes; `None` if the write has to be waited for.
pub(crate) fn write(open: Open, data: &[u8], at: u64) -> Option<usize> {
    let (state, mount) = (start::state()?, mount(open));
    let behind = state.behind(mount);
    let is_meant = behind.is_ready()
        && open.entry.may_write_behind()
        && is_plain(open)
        && !IS_OTHER.load(Ordering::Relaxed)
        && remote::user(mount) == Some(behind.user())
        && at.checked_add(data.len() as u64).is_some_and(|end| i64::try_from(end).is_ok())
        && !crate::hooks::maps::has_shared(open);
    let queue = if is_meant { queue(mount)? } else { return None };
    let is_room = behind.take_room(data.len());
    is_room.then(|| add(state, queue, open, data, at)).filter(|count| *count > 0)
}

fn add(state: &State, queue: &Queue, open: Open, data: &[u8], at: u64) -> usize {
    let Open { entry, handle, number, .. } = open;
    let (behind, inode) = (state.behind(mount(open)), entry.inode.load(Ordering::Relaxed));
    let mut place = Place { entry: number, handle, inode, offset: at };
    let changes = state.changes();
    changes.fetch_add(1, Ordering::AcqRel);
    let mut done = 0;
    while done < data.len() && entry.may_write_behind() {
        let Ok(count) = queue.add(behind, process::id(), &place, &data[done..]) else { break };
        done += count;
        place.offset += count as u64;
    }
    // Also after the change, as for all others (`Options::changes`).
    changes.fetch_add(1, Ordering::AcqRel);
    done
}

/// A write that is waited for.
pub(crate) struct Waited(Option<Began>);

struct Began {
    state: &'static State,
    coarse: Duration,
}

impl Waited {
    /// Begins such a write. Takes the time as long as nobody knows how far the server is.
    pub(crate) fn begin(open: Open) -> Self {
        let unknown = |state: &&State| state.behind(mount(open)).is_unused();
        let looks = LOOKED.load(Ordering::Relaxed) < LOOKS;
        let state = if looks { start::state().filter(unknown) } else { None };
        Self(state.map(|state| Began { state, coarse: coarse_time() }))
    }

    /// Notes that it is done, and finds out how far the server is if it took long.
    pub(crate) fn end(self, open: Open) {
        open.entry.has_waited();
        let Some(Began { state, coarse }) = self.0 else { return };
        LOOKED.fetch_add(1, Ordering::Relaxed);
        // The coarse clock may just have moved.
        let time = coarse_time().saturating_sub(coarse);
        if time < ahead::FAR || !is_plain(open) {
            return;
        }
        let asked = Instant::now();
        if remote::with(open, File::stat).is_err() {
            return;
        }
        let trip = asked.elapsed();
        // Otherwise the network is slow, or the disk, and waiting less would only delay others.
        let is_far = trip > ahead::FAR && 4 * trip > time;
        if is_far && state.behind(mount(open)).ask() {
            let _ = report::wake_keeper();
        }
    }
}

/// Returns the time by a clock that costs little and moves a few times in a hundredth of a second.
fn coarse_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
