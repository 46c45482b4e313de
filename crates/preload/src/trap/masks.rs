//! Signal masks: `SIGSYS` stays out of them while calls of the process are trapped.

use crate::between;
#[cfg(target_arch = "x86_64")]
use crate::guard::mask;
use crate::table::real;
use libc::{c_int, sigset_t};

const BIT: u64 = 1 << (libc::SIGSYS - 1);
/// Signals that a mask of all others may lack: this one, those that cannot be blocked, and the two that
/// libc keeps for itself.
pub(crate) const BITS_FREE: u64 =
    BIT | 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 1 << 31 | 1 << 32;
/// Bytes of the kernel's signal sets.
pub(crate) const SET_BYTES: usize = 8;

/// Option of `prctl` by which calls are trapped.
#[cfg(target_arch = "x86_64")]
pub(crate) const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Takes `SIGSYS` out of this thread's mask.
#[cfg(target_arch = "x86_64")]
pub(crate) fn let_in() {
    mask(libc::SIG_UNBLOCK, BIT);
}

/// A kernel's set without `SIGSYS`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn without_trap(set: u64) -> u64 {
    set & !BIT
}

/// A kernel's set with `SIGSYS`.
#[cfg(target_arch = "x86_64")]
pub(crate) fn with_trap(set: u64) -> u64 {
    set | BIT
}

/// A set of `SIGSYS` where nobody lets it in as long as our code runs, and none elsewhere.
pub(crate) fn held_up() -> u64 {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return BIT;
    }
    0
}

/// A set that our own code goes back to: without `SIGSYS`, if calls are trapped. In a guest it is blocked as long as our
/// code runs, which is not trapped.
pub(crate) fn without(set: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return set;
    }
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

/// What `pselect6` is told of its mask.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Clone, Copy)]
struct Nested {
    set: *const u64,
    bytes: usize,
}

/// Which argument of a system call that waits is its mask, or leads to it.
#[cfg(target_arch = "x86_64")]
fn place_of_mask(number: libc::c_long) -> usize {
    match number {
        libc::SYS_rt_sigsuspend => 0,
        libc::SYS_ppoll => 3,
        libc::SYS_pselect6 => 5,
        _ => 4,
    }
}

/// True when such a call has a mask.
///
/// # Safety
/// As for [`wait`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn has_mask(
    number: libc::c_long,
    arguments: crate::hooks::numbers::Arguments,
) -> bool {
    let at = arguments[place_of_mask(number)];
    // SAFETY: null or what the call says.
    at != 0 && (number != libc::SYS_pselect6 || unsafe { !(*(at as *const Nested)).set.is_null() })
}

/// Makes a system call that waits with a mask of its own, by `make`.
///
/// # Safety
/// The arguments are those of such a call.
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
