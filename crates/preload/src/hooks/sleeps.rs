//! Hooks for calls that sleep.
//!
//! Some programs look at a mapped file without a lock, take a shared lock, and look again. If others have stored
//! meanwhile, they give up the lock, sleep a while, and try again (SQLite in WAL mode, when it begins to read). A
//! lock brings what others have stored, so after a longer sleep the two looks would always differ while other
//! runs store to the file. So after such a sleep the file is read again first.

use super::maps;
use crate::table::real;
use libc::{c_int, c_uint, clockid_t, timespec};
use std::sync::atomic::{AtomicBool, Ordering};

/// The last lock, a shared one, has brought what others had stored.
static IS_RETRY_EXPECTED: AtomicBool = AtomicBool::new(false);

/// Notes whether a shared lock has just changed a mapping.
pub(super) fn expect_retry(is_expected: bool) {
    IS_RETRY_EXPECTED.store(is_expected, Ordering::Relaxed);
}

/// Sleeps by `call`.
fn sleeping<T>(call: impl FnOnce() -> T) -> T {
    let slept = call();
    // Another try takes the lock again.
    if IS_RETRY_EXPECTED.load(Ordering::Relaxed) && IS_RETRY_EXPECTED.swap(false, Ordering::Relaxed)
    {
        let errno = crate::guard::errno();
        maps::renew_locked();
        crate::guard::set_errno(errno);
    }
    slept
}

pub(crate) unsafe fn sleep(seconds: c_uint) -> c_uint {
    // SAFETY: any number of seconds is valid.
    sleeping(|| unsafe { real::sleep(seconds) })
}

pub(crate) unsafe fn usleep(microseconds: c_uint) -> c_int {
    // SAFETY: any number of microseconds is valid.
    sleeping(|| unsafe { real::usleep(microseconds) })
}

pub(crate) unsafe fn nanosleep(time: *const timespec, rest: *mut timespec) -> c_int {
    // SAFETY: the program passes valid arguments.
    sleeping(|| unsafe { real::nanosleep(time, rest) })
}

pub(crate) unsafe fn clock_nanosleep(
    clock: clockid_t,
    flags: c_int,
    time: *const timespec,
    rest: *mut timespec,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    sleeping(|| unsafe { real::clock_nanosleep(clock, flags, time, rest) })
}
