//! Locks between the processes of a run. A lock whose holder was killed or stopped is taken over, and who has waited for
//! long gets it before those that come again and again.
#![allow(unsafe_code)]

use rustix::fs::{Mode, OFlags};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bits of a lock's word: the number of the process that holds it (at most 22 bits on Linux), whether that is in another
/// PID namespace than the keeper's, and a number that tells the times at which a process took the lock from one another.
/// The highest bit is zero.
const PROCESS: u64 = (1 << 22) - 1;
const ELSEWHERE: u64 = 1 << 22;
const TAG: u64 = 1 << 23;
const TAGS: u64 = u64::MAX >> 1 & !(TAG - 1);

/// The word of a lock that its last holder has passed on to those that have waited for long: that of no process.
const PASSED_ON: u64 = TAG;

/// After so many looks a process has waited for long: for some 15 ms. To pass the lock on costs time in which nobody has it.
const PATIENCE: u32 = 192;

/// How long a lock is held at most by a process of which we cannot tell whether it lives: longer than it waits for a server
/// that is away (`RECONNECT_SECONDS`).
const UNSEEN: Duration = Duration::from_secs(90);

/// After this time, a process of the holder's number is another one: the holder was killed. No call takes so long.
const USED_AGAIN: Duration = Duration::from_secs(15 * 60);

/// A process of the run as a holder of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(u64);

impl Holder {
    /// The process of this number; `is_elsewhere`: which means something else in the keeper's PID namespace.
    #[must_use]
    pub fn new(process: u32, is_elsewhere: bool) -> Self {
        Self(u64::from(process) & PROCESS | if is_elsewhere { ELSEWHERE } else { 0 })
    }

    /// Returns the word of a lock that this process takes now.
    fn word(self) -> u64 {
        static TAKEN: AtomicU64 = AtomicU64::new(0);
        self.0 | TAKEN.fetch_add(TAG, Ordering::Relaxed) & TAGS
    }

    /// Returns the number of the process that has taken a lock, if this process knows it by that.
    fn known(self, word: u64) -> Option<u32> {
        ((self.0 | word) & ELSEWHERE == 0).then_some((word & PROCESS) as u32)
    }

    fn has_ended(self, word: u64) -> bool {
        self.known(word).is_some_and(has_ended)
    }
}

/// A lock in shared memory.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Lock {
    /// Zero, who holds it, or [`PASSED_ON`].
    word: AtomicU64,
    /// Nonzero if somebody has waited for long. Otherwise a process that writes all the time would keep others from ever
    /// writing: they look from time to time, and on one processor only while it waits for the server, with the lock.
    awaited: AtomicU32,
}

impl Lock {
    /// Takes the lock unless a live process has it.
    pub(crate) fn try_lock(&self, me: Holder) -> Option<Locked<'_>> {
        let word = me.word();
        let Err(held) = self.take_over(0, word) else { return Some(Locked(self, word)) };
        let is_free = held == PASSED_ON || me.has_ended(held);
        (is_free && self.take_over(held, word).is_ok()).then(|| Locked(self, word))
    }

    fn take_over(&self, from: u64, to: u64) -> Result<u64, u64> {
        self.word.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed)
    }

    /// Returns true while a process holds the lock.
    pub(crate) fn is_locked(&self) -> bool {
        !matches!(self.word.load(Ordering::Acquire), 0 | PASSED_ON)
    }

    /// Takes the lock, also from a holder that has died or is stopped.
    pub(crate) fn lock(&self, me: Holder) -> Locked<'_> {
        let mut since = None;
        loop {
            if let Some(taken) = self.lock_soon(me) {
                return taken;
            }
            let (word, held) = (me.word(), self.word.load(Ordering::Relaxed));
            let (_, since) = match since {
                Some((seen, since)) if seen == held => (seen, since),
                _ => *since.insert((held, Instant::now())),
            };
            let is_left = match me.known(held) {
                Some(process) => is_stopped(process) || since.elapsed() > USED_AGAIN,
                None => since.elapsed() > UNSEEN,
            };
            if is_left && held != 0 && self.take_over(held, word).is_ok() {
                return Locked(self, word);
            }
        }
    }

    /// [`Self::lock`] that gives up after some 50 ms: the holder may have been stopped.
    pub(crate) fn lock_soon(&self, me: Holder) -> Option<Locked<'_>> {
        let word = me.word();
        for tries in 1..=512_u32 {
            let Err(held) = self.take_over(0, word) else { return Some(Locked(self, word)) };
            if tries > PATIENCE {
                if held == PASSED_ON && self.take_over(held, word).is_ok() {
                    return Some(Locked(self, word));
                }
                self.awaited.store(1, Ordering::Relaxed);
            }
            if tries.is_multiple_of(64) && me.has_ended(held) && self.take_over(held, word).is_ok()
            {
                return Some(Locked(self, word));
            }
            if tries > 32 {
                let pause = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
                // SAFETY: the structure outlives the call; nothing is written back.
                unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, 0usize) };
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Returns the lock if `me` has it, for a program that was just executed: a thread of the previous one took it. Not in
    /// another PID namespace than the keeper's, of which there may be several.
    pub(crate) fn left(&self, me: Holder) -> Option<Locked<'_>> {
        let held = self.word.load(Ordering::Acquire);
        (me.known(held).map(u64::from) == Some(me.0)).then(|| Locked(self, held))
    }
}

/// Guard of a lock.
pub struct Locked<'a>(&'a Lock, u64);

impl Locked<'_> {
    /// Returns the word that the lock has while it is held, which no other guard has.
    pub(crate) fn word(&self) -> u64 {
        self.1
    }

    /// Returns true unless another process has taken the lock over, since this one was stopped.
    pub(crate) fn is_held(&self) -> bool {
        self.0.word.load(Ordering::SeqCst) == self.1
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let Lock { word, awaited } = self.0;
        let mut next = 0;
        if awaited.load(Ordering::Relaxed) != 0 {
            // Who goes on waiting says so again.
            awaited.store(0, Ordering::Relaxed);
            next = PASSED_ON;
        }
        // It may have been taken over.
        let _ = word.compare_exchange(self.1, next, Ordering::Release, Ordering::Relaxed);
    }
}

/// Returns true if the process is gone or a zombie: its parent may wait for us before it reaps it. `EPERM`
/// means that the process exists and belongs to another user.
pub(crate) fn has_ended(process: u32) -> bool {
    // SAFETY: signal 0 is not delivered; it only tests for existence.
    let told = unsafe { libc::syscall(libc::SYS_kill, process as usize, 0usize) };
    if told != 0 {
        return io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    }
    // SAFETY: plain system calls; the structures outlive them, and only this function knows the descriptor.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, process as usize, 0usize);
        if fd < 0 {
            return false;
        }
        let mut asked = libc::pollfd { fd: fd as i32, events: libc::POLLIN, revents: 0 };
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let (all, limit) = (&raw mut asked, &raw const now);
        let ended = libc::syscall(libc::SYS_ppoll, all, 1usize, limit, 0usize, 8usize);
        libc::syscall(libc::SYS_close, fd as usize);
        ended == 1
    }
}

/// Returns true if the first thread of a process is stopped (`proc_pid_stat(5)`), or another one if that has ended: all are
/// by a signal, but a debugger may have stopped it alone.
fn is_stopped(process: u32) -> bool {
    let is_stopped = |state| matches!(state, Some(b'T' | b't'));
    match state_of(&format!("/proc/{process}/stat")) {
        Some(b'Z') => threads(process)
            .iter()
            .any(|thread| is_stopped(state_of(&format!("/proc/{process}/task/{thread}/stat")))),
        state => is_stopped(state),
    }
}

/// Returns the state in a `stat` file of a process or thread.
fn state_of(path: &str) -> Option<u8> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let mut text = [0; 128];
    let length = rustix::io::read(&file, &mut text).unwrap_or(0);
    // The name, in parentheses, may contain any byte.
    text[..length].rsplit(|byte| *byte == b')').next().and_then(|rest| rest.get(1)).copied()
}

/// Returns the numbers of the threads of a process, as text.
fn threads(process: u32) -> Vec<String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(format!("/proc/{process}/task"), flags, Mode::empty());
    let entries = folder.and_then(rustix::fs::Dir::new);
    let names = entries.into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests;
