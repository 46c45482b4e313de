//! Locks of files and ranges.
//!
//! A lock that has to be waited for is asked for again and again, so that a signal can end the
//! waiting and other threads can use the session meanwhile.

use crate::descriptors::{self, Open};
use crate::guard::{finish, inside, ours};
use crate::remote;
use crate::table::real;
use libc::{c_int, off64_t};
use std::sync::atomic::Ordering;
use towline_client::Lock;
use towline_wire::request::lock;

/// First and longest pause between two tries, in nanoseconds.
const PAUSES_NS: (i64, i64) = (200_000, 20_000_000);

fn take(open: Open, wanted: &Lock, wait: bool) -> c_int {
    let mut pause = PAUSES_NS.0;
    loop {
        // The server knows who would wait for whom only when it may let us wait; a cycle of
        // processes that poll is not found.
        match inside(|| remote::with(open, |file| file.lock(wanted, false))) {
            Ok(()) => return 0,
            Err(libc::EAGAIN) if wait => {}
            Err(error) => return finish(Err(error)),
        }
        let time = libc::timespec { tv_sec: 0, tv_nsec: pause };
        let arguments = [&raw const time as usize, 0, 0, 0, 0, 0];
        // SAFETY: the structure outlives the call.
        if let Err(error) = unsafe { crate::guard::checked(libc::SYS_nanosleep, arguments) } {
            return finish(Err(error));
        }
        pause = (pause * 2).min(PAUSES_NS.1);
    }
}

pub(crate) unsafe fn flock(fd: c_int, operation: c_int) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: as the program says.
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

/// The first byte and the length that a `struct flock` means.
fn range(open: Open, whence: c_int, start: i64, length: i64) -> Result<(u64, u64), i32> {
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => open.entry.offset.load(Ordering::Relaxed),
        libc::SEEK_END => remote::stat(open)?.size as i64,
        _ => return Err(libc::EINVAL),
    };
    let start = base.checked_add(start).ok_or(libc::EOVERFLOW)?;
    let (start, length) = if length < 0 { (start + length, -length) } else { (start, length) };
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
    // SAFETY: as the caller says.
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
    let whence = c_int::from(asked.l_whence);
    let (start, length) = match inside(|| range(open, whence, asked.l_start, asked.l_len)) {
        Ok(range) => range,
        Err(error) => return finish(Err(error)),
    };
    let family = if is_process { lock::PROCESS } else { lock::OPEN_FILE };
    let wanted = Lock { family, kind, owner: remote::lock_owner(), start, length };
    if matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
        return ours(|| {
            match remote::with(open, |file| file.test_lock(&wanted))? {
                None => asked.l_type = libc::F_UNLCK as _,
                Some(other) => {
                    let shared = other.kind == lock::SHARED;
                    asked.l_type = if shared { libc::F_RDLCK } else { libc::F_WRLCK } as _;
                    asked.l_whence = libc::SEEK_SET as _;
                    (asked.l_start, asked.l_len) = (other.start as i64, other.length as i64);
                    asked.l_pid = if other.owner == 0 { -1 } else { other.owner as i32 };
                }
            }
            Ok(0)
        });
    }
    if is_process {
        remote::has_process_locks();
    }
    take(open, &wanted, matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW))
}

pub(crate) unsafe fn lockf(fd: c_int, command: c_int, length: off64_t) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: as the program says.
        return unsafe { real::lockf(fd, command, length) };
    };
    // SAFETY: all zero is a valid `struct flock`.
    let mut asked: libc::flock = unsafe { std::mem::zeroed() };
    (asked.l_whence, asked.l_len) = (libc::SEEK_CUR as _, length);
    let (kind, command) = match command {
        libc::F_ULOCK => (libc::F_UNLCK, libc::F_SETLK),
        libc::F_LOCK => (libc::F_WRLCK, libc::F_SETLKW),
        libc::F_TLOCK => (libc::F_WRLCK, libc::F_SETLK),
        libc::F_TEST => (libc::F_WRLCK, libc::F_GETLK),
        _ => return finish(Err(libc::EINVAL)),
    };
    asked.l_type = kind as _;
    // SAFETY: the structure is ours.
    let result = unsafe { fcntl(open, command, &raw mut asked) };
    if result == 0 && command == libc::F_GETLK && c_int::from(asked.l_type) != libc::F_UNLCK {
        return finish(Err(libc::EACCES));
    }
    result
}
