//! Signal masks: `SIGSYS` stays out of them while calls of the process are trapped.

use crate::guard::system_call;
use crate::table::real;
use libc::{c_int, sigset_t};

const BIT: u64 = 1 << (libc::SIGSYS - 1);
/// Bytes of the kernel's signal sets.
pub(crate) const SET_BYTES: usize = 8;

/// Takes `SIGSYS` out of this thread's mask.
pub(crate) fn let_in() {
    let set = BIT;
    let arguments = [libc::SIG_UNBLOCK as usize, &raw const set as usize, 0, SET_BYTES, 0, 0];
    // SAFETY: the set outlives the call.
    unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) };
}

/// A kernel's set without `SIGSYS`, if calls are trapped.
pub(crate) fn without(set: u64) -> u64 {
    if super::is_armed() { set & !BIT } else { set }
}

/// Runs `work` with a set of the program, without `SIGSYS`.
///
/// # Safety
/// `set` is null or a set.
pub(crate) unsafe fn cleaned<T>(
    set: *const sigset_t,
    work: impl FnOnce(*const sigset_t) -> T,
) -> T {
    // SAFETY: null or a set, as the caller says.
    match unsafe { set.as_ref() } {
        Some(given) if super::is_armed() => {
            let mut copy = *given;
            // SAFETY: the copy is a set.
            unsafe { libc::sigdelset(&raw mut copy, libc::SIGSYS) };
            work(&raw const copy)
        }
        _ => work(set),
    }
}

pub(crate) unsafe fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::sigprocmask(how, set, old)) }
}

pub(crate) unsafe fn pthread_sigmask(
    how: c_int,
    set: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::pthread_sigmask(how, set, old)) }
}

pub(crate) unsafe fn sigsuspend(set: *const sigset_t) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::sigsuspend(set)) }
}
