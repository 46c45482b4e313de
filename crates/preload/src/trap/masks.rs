//! Signal masks: keeps `SIGSYS` out of them while system calls of the process are trapped.

use crate::between;
#[cfg(target_arch = "x86_64")]
use crate::guard::mask;
use crate::table::real;
use libc::{c_int, sigset_t};

/// `SIGSYS` as a set.
pub(super) const BIT: u64 = 1 << (libc::SIGSYS - 1);
/// Signals that a mask of all others may lack: `SIGSYS`, the two that cannot be blocked, and the two that
/// libc reserves for itself.
pub(crate) const BITS_FREE: u64 =
    BIT | 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 1 << 31 | 1 << 32;
/// Size of the kernel's signal sets in bytes.
pub(crate) const SET_BYTES: usize = 8;

/// `prctl` option that enables the trap.
#[cfg(target_arch = "x86_64")]
pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Removes `SIGSYS` from this thread's mask.
#[cfg(target_arch = "x86_64")]
pub(crate) fn let_in() {
    mask(libc::SIG_UNBLOCK, BIT);
}

/// Returns a kernel set without `SIGSYS`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn without_trap(set: u64) -> u64 {
    set & !BIT
}

/// Returns a kernel set with `SIGSYS`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn with_trap(set: u64) -> u64 {
    set | BIT
}

/// Signals that the libc of a guest uses itself (glibc two, musl three). It may set a handler only when it needs one,
/// for instance to cancel a thread that is already in our code.
#[cfg(target_arch = "x86_64")]
const OF_GUESTS_LIBC: u64 = 1 << 31 | 1 << 32 | 1 << 33;

/// Returns the signals that stay blocked in a guest while our code runs, with or without a handler: `SIGSYS` and those
/// of its libc. Elsewhere, there are none.
pub(crate) fn held_up() -> u64 {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return BIT | OF_GUESTS_LIBC;
    }
    0
}

/// Returns the mask to which our own code returns: without `SIGSYS` if calls are trapped. In a guest the
/// mask stays as it is: `SIGSYS` is blocked while our code runs, whose calls are not trapped.
pub(crate) fn without(set: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return set;
    }
    if super::is_armed() { set & !BIT } else { set }
}

/// Runs `work` with a signal set of the program, without `SIGSYS` if calls are trapped.
///
/// # Safety
/// `set` is null or points to a set.
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
    unsafe {
        between::may_block(how, set);
        cleaned(set, |set| real::sigprocmask(how, set, old))
    }
}

pub(crate) unsafe fn pthread_sigmask(
    how: c_int,
    set: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        between::may_block(how, set);
        cleaned(set, |set| real::pthread_sigmask(how, set, old))
    }
}

pub(crate) unsafe fn sigsuspend(set: *const sigset_t) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::sigsuspend(set)) }
}

pub(crate) unsafe fn ppoll(
    list: *mut libc::pollfd,
    count: libc::nfds_t,
    time: *const libc::timespec,
    set: *const sigset_t,
) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::ppoll(list, count, time, set)) }
}

pub(crate) unsafe fn pselect(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    odd: *mut libc::fd_set,
    time: *const libc::timespec,
    set: *const sigset_t,
) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::pselect(count, read, write, odd, time, set)) }
}

pub(crate) unsafe fn epoll_pwait(
    fd: c_int,
    events: *mut libc::epoll_event,
    count: c_int,
    wait_ms: c_int,
    set: *const sigset_t,
) -> c_int {
    // SAFETY: as the program says.
    unsafe { cleaned(set, |set| real::epoll_pwait(fd, events, count, wait_ms, set)) }
}

/// The structure by which `pselect6` takes its mask.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Clone, Copy)]
struct Nested {
    set: *const u64,
    bytes: usize,
}

/// Returns which argument of a waiting system call is its mask, or points to it.
#[cfg(target_arch = "x86_64")]
fn place_of_mask(number: libc::c_long) -> usize {
    match number {
        libc::SYS_rt_sigsuspend => 0,
        libc::SYS_ppoll => 3,
        libc::SYS_pselect6 => 5,
        _ => 4,
    }
}

/// Returns true if a waiting system call has a mask.
///
/// # Safety
/// As for [`wait`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn has_mask(
    number: libc::c_long,
    arguments: crate::hooks::numbers::Arguments,
) -> bool {
    let at = arguments[place_of_mask(number)];
    // SAFETY: null or the structure of this call.
    at != 0 && (number != libc::SYS_pselect6 || unsafe { !(*(at as *const Nested)).set.is_null() })
}

/// Makes a system call that waits with a mask of its own, without `SIGSYS` in the mask. `make` makes the
/// call.
///
/// # Safety
/// The arguments are those of a call that waits with a mask.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn wait(
    number: libc::c_long,
    mut arguments: crate::hooks::numbers::Arguments,
    make: unsafe fn(libc::c_long, crate::hooks::numbers::Arguments) -> isize,
) -> isize {
    let at = place_of_mask(number);
    // SAFETY: null or a set, as the caller says; the copies outlive the call.
    unsafe {
        let mut nested = Nested { set: arguments[at] as *const u64, bytes: SET_BYTES };
        if number == libc::SYS_pselect6 {
            match (arguments[at] as *const Nested).as_ref() {
                Some(given) => nested = *given,
                None => nested.set = std::ptr::null(),
            }
        }
        let copy = nested.set.as_ref().map(|set| without_trap(*set));
        if let Some(copy) = &copy {
            nested.set = copy;
            arguments[at] = if number == libc::SYS_pselect6 {
                &raw const nested as usize
            } else {
                nested.set as usize
            };
        }
        make(number, arguments)
    }
}
