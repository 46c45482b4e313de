//! Hooks for locks on files and on ranges of them.
//!
//! If a lock has to be waited for, it is requested in a session of its own, over a socket. So signals can
//! end the wait, other threads can go on meanwhile, and the server sees cycles of processes that wait for
//! each other.

use super::{maps, sleeps};
use crate::descriptors::{self, Open};
use crate::guard::{self, finish, inside, ours};
use crate::table::real;
use crate::waits::{self, RESTART, Wait};
use crate::{process, remote, report, start};
use libc::{c_int, off64_t};
use std::future::Future;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use towline_client::Lock;
use towline_instance::{CLOSING_WAIT, Entry, State};
use towline_wire::request::lock;

/// How often a wait is started again after the connection to the server was lost.
const TRIES: u32 = 5;

/// Interval between checks whether the keeper is done.
const LOOK: Duration = Duration::from_micros(100);

/// Returns true if a process of the run may have left a lock on this file that the keeper has not released
/// yet: a process that has, or had, the file open by another entry, or has had a descriptor of this one.
fn may_be_left(open: Open, state: &State) -> bool {
    let inode = |entry: &Entry| entry.inode.load(Ordering::Relaxed);
    let is_other = |entry: &&Entry| !std::ptr::eq(*entry, open.entry);
    open.entry.shared.load(Ordering::Relaxed) != 0
        || state
            .used()
            .filter_map(|number| state.entry(number))
            .filter(is_other)
            .any(|entry| inode(entry) == inode(open.entry))
        // It may have been open a moment ago. This check comes last: the keeper announces its watch before
        // it takes entries back.
        || state.is_watched()
}

/// Waits until the keeper has closed all files that processes have given up by now, and with them their
/// locks. Processes give up files that way when they end.
fn settle_closed(open: Open) {
    let Some(state) = start::state().filter(|state| state.is_kept()) else { return };
    if !may_be_left(open, state) {
        return;
    }
    let (asked, until) = (state.ask_to_close(), Instant::now() + CLOSING_WAIT);
    if inside(report::wake_keeper).is_err() {
        return;
    }
    while !state.has_closed(asked) && Instant::now() < until {
        towline_net::pause(LOOK);
    }
}

/// Returns true if what this unlocks is locked shared: nothing was to be stored under it.
fn is_shared(open: Open, wanted: &Lock) -> bool {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let client = inside(|| remote::client(mount));
    client.is_ok_and(|client| client.has_only_shared(open.handle, wanted))
}

fn take(open: Open, wanted: &Lock, wait: bool) -> c_int {
    let mut tries = 0;
    let mut has_settled = wait;
    let mut has_waited = false;
    // Whoever gets the lock next has to see what was stored to mappings under this one.
    let written = match wanted.kind {
        lock::SHARED | lock::UNLOCK if maps::is_any_here() && !is_shared(open, wanted) => {
            maps::write_back_file(open)
        }
        _ => Ok(()),
    };
    loop {
        let recalls = waits::recalls();
        // In libc, `flock` ends no thread, and nor do system calls without libc.
        if wait && wanted.family != lock::FLOCK && !waits::is_trapped() {
            guard::may_be_cancelled();
        }
        // Also after a wait, the lock is taken in the process's own session, which then remembers it.
        let call = || remote::with(open, |file| file.try_lock(wanted));
        let taken = match wanted.kind {
            lock::UNLOCK => inside(|| call().map(drop)),
            kind => inside(|| maps::locking(open, has_waited, call)).map(|has_changed| {
                sleeps::expect_retry(has_changed && kind == lock::SHARED);
            }),
        };
        match taken {
            Ok(()) => return finish(written.map(|()| 0)),
            Err(libc::EAGAIN) if wait => {}
            Err(libc::EAGAIN) if !std::mem::replace(&mut has_settled, true) => {
                settle_closed(open);
                continue;
            }
            Err(error) => return finish(Err(error)),
        }
        has_waited = true;
        match waits::interruptible(recalls, |wait| wait_for(open, wanted, wait)) {
            Ok(()) => {}
            Err(RESTART) if !waits::is_trapped() => {}
            Err(RESTART) => return finish(Err(RESTART)),
            Err(error @ (libc::EINTR | libc::EDEADLK | libc::ENOLCK)) => return finish(Err(error)),
            Err(error) if tries == TRIES => return finish(Err(error)),
            Err(_) => tries += 1,
        }
    }
}

/// Waits until the server grants the lock.
fn wait_for(open: Open, wanted: &Lock, wait: &mut Wait) -> Result<(), i32> {
    let (client, operation) = inside(|| {
        let client = remote::waiter(open.entry.mount.load(Ordering::Relaxed) as usize)?;
        let handle = open.handle;
        let operation = client.with_handle(handle, 0, |file| file.start_lock(wanted));
        Ok((client, operation.map_err(remote::number)?))
    })?;
    let mut operation = Some(operation);
    let mut fd = None;
    let mut context = Context::from_waker(Waker::noop());
    let waited = wait.until(|| {
        inside(|| {
            let Some(under_way) = operation.as_mut() else { return Err(libc::EIO) };
            match Pin::new(under_way).poll(&mut context) {
                Poll::Pending => {
                    // A new connection after a lost one has another descriptor.
                    let now = client.fd().map_err(|_| libc::ENOLCK)?;
                    Ok(Err(fd.insert(now).as_raw_fd()))
                }
                Poll::Ready(result) => {
                    operation = None;
                    result.map(Ok).map_err(remote::number)
                }
            }
        })
    });
    inside(|| {
        let result = match (waited, operation.take()) {
            (Err(libc::EINTR), Some(operation)) => {
                operation.cancel();
                operation.wait().map_err(remote::number)
            }
            (waited, _) => waited,
        };
        drop(fd);
        client.close();
        result
    })
}

pub(crate) unsafe fn flock(fd: c_int, operation: c_int) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::flock(fd, operation) };
    };
    let kind = match operation & !libc::LOCK_NB {
        libc::LOCK_SH => lock::SHARED,
        libc::LOCK_EX => lock::EXCLUSIVE,
        libc::LOCK_UN => lock::UNLOCK,
        _ => return finish(Err(libc::EINVAL)),
    };
    let wanted = Lock { family: lock::FLOCK, kind, owner: 0, start: 0, length: 0 };
    take(open, &wanted, operation & libc::LOCK_NB == 0)
}

/// Returns the first byte and the length that a `struct flock` means.
fn range(open: Open, whence: c_int, start: i64, length: i64) -> Result<(u64, u64), i32> {
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => remote::offset(open),
        libc::SEEK_END => remote::stat(open)?.size as i64,
        _ => return Err(libc::EINVAL),
    };
    let start = base.checked_add(start).ok_or(libc::EOVERFLOW)?;
    let (start, length) = match length.checked_neg() {
        Some(before) if before > 0 => (start.checked_add(length).ok_or(libc::EINVAL)?, before),
        _ => (start, length),
    };
    // A range up to the largest offset has no end.
    let length = match length {
        1.. if start >= 0 && start.checked_add(length - 1).ok_or(libc::EOVERFLOW)? == i64::MAX => 0,
        length => length,
    };
    match (u64::try_from(start), u64::try_from(length)) {
        (Ok(start), Ok(length)) => Ok((start, length)),
        _ => Err(libc::EINVAL),
    }
}

/// The lock commands of `fcntl`.
///
/// # Safety
/// `argument` is null or a `struct flock`.
pub(crate) unsafe fn fcntl(open: Open, command: c_int, argument: *mut libc::flock) -> c_int {
    // SAFETY: guaranteed by the caller.
    let Some(asked) = (unsafe { argument.as_mut() }) else { return finish(Err(libc::EFAULT)) };
    let is_process = matches!(command, libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK);
    if !is_process && asked.l_pid != 0 {
        return finish(Err(libc::EINVAL));
    }
    let kind = match c_int::from(asked.l_type) {
        libc::F_RDLCK => lock::SHARED,
        libc::F_WRLCK => lock::EXCLUSIVE,
        libc::F_UNLCK => lock::UNLOCK,
        _ => return finish(Err(libc::EINVAL)),
    };
    let asks = matches!(command, libc::F_GETLK | libc::F_OFD_GETLK);
    if asks && kind == lock::UNLOCK {
        return finish(Err(libc::EINVAL));
    }
    let whence = c_int::from(asked.l_whence);
    let (start, length) = match inside(|| range(open, whence, asked.l_start, asked.l_len)) {
        Ok(range) => range,
        Err(error) => return finish(Err(error)),
    };
    let family = if is_process { lock::PROCESS } else { lock::OPEN_FILE };
    let wanted = Lock { family, kind, owner: process::identity(), start, length };
    if asks {
        let test = || inside(|| remote::with(open, |file| file.test_lock(&wanted)));
        let tested = match test() {
            // The lock may be that of a process that has ended.
            Ok(Some(_)) => {
                settle_closed(open);
                test()
            }
            tested => tested,
        };
        return ours(|| {
            match tested? {
                None => asked.l_type = libc::F_UNLCK as _,
                Some(other) => {
                    let shared = other.kind == lock::SHARED;
                    asked.l_type = if shared { libc::F_RDLCK } else { libc::F_WRLCK } as _;
                    asked.l_whence = libc::SEEK_SET as _;
                    (asked.l_start, asked.l_len) = (other.start as i64, other.length as i64);
                    asked.l_pid = match other.owner {
                        0 => -1,
                        // Zero if the process is in another PID namespace.
                        owner => process::number_of(owner) as i32,
                    };
                }
            }
            Ok(0)
        });
    }
    if is_process && kind != lock::UNLOCK {
        remote::has_process_locks();
    }
    take(open, &wanted, matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW))
}

pub(crate) unsafe fn lockf(fd: c_int, command: c_int, length: off64_t) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::lockf(fd, command, length) };
    };
    // SAFETY: all zero is a valid `struct flock`.
    let mut asked: libc::flock = unsafe { std::mem::zeroed() };
    (asked.l_whence, asked.l_len) = (libc::SEEK_CUR as _, length);
    let (kind, command) = match command {
        libc::F_ULOCK => (libc::F_UNLCK, libc::F_SETLK),
        libc::F_LOCK => (libc::F_WRLCK, libc::F_SETLKW),
        libc::F_TLOCK => (libc::F_WRLCK, libc::F_SETLK),
        // As in libc: shared locks do not count.
        libc::F_TEST => (libc::F_RDLCK, libc::F_GETLK),
        _ => return finish(Err(libc::EINVAL)),
    };
    asked.l_type = kind as _;
    // SAFETY: the structure is a local one.
    let result = unsafe { fcntl(open, command, &raw mut asked) };
    if result == 0 && command == libc::F_GETLK && c_int::from(asked.l_type) != libc::F_UNLCK {
        return finish(Err(libc::EACCES));
    }
    result
}
