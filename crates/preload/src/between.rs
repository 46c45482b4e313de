//! Hides the process between this one and the keeper (`cli/launch`): a child of ours without a termination
//! signal, which the program must not see. It ends as soon as it gets a processor; on a busy machine that
//! takes longer than the start of a program. So the program does not wait for it at once, but before
//! anything by which it could notice the process: waiting for children, handling `SIGCHLD` (which the
//! kernel sends all the same, as the parent executes a program meanwhile), becoming a subreaper (it would
//! adopt the keeper), and executing a program (which would not know of it). System calls without libc come
//! here only once they are trapped, and arming the trap waits for the process, too.

use crate::guard::{checked, mask, system_call};
use crate::start;
use crate::table::real;
use libc::{c_int, c_ulong, id_t, idtype_t, pid_t, rusage, siginfo_t, sigset_t};
use std::sync::atomic::{AtomicU32, Ordering};
use towline_instance::State;

/// Its number while it may exist, otherwise zero.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// `SIGCHLD` in the kernel's format of signal sets.
static SIGNAL: u64 = 1 << (libc::SIGCHLD - 1);

/// Finds out its number, if there is one.
pub(crate) fn find(state: &State) {
    NUMBER.store(state.take_between().unwrap_or(0), Ordering::Relaxed);
}

/// Called when the program begins. Notes whether the process has ended; waits for its end if the program
/// has `SIGCHLD` blocked, so that the signal would be kept for the program.
pub(crate) fn begin() {
    if NUMBER.load(Ordering::Relaxed) != 0 {
        wait_for_end(if is_blocked() { 0 } else { libc::WNOHANG });
    }
}

/// Waits until the process has ended.
#[inline]
pub(crate) fn end() {
    if NUMBER.load(Ordering::Relaxed) != 0 {
        wait_for_end(0);
    }
}

#[cold]
fn wait_for_end(how: c_int) {
    let number = NUMBER.load(Ordering::Relaxed);
    let mut status = 0;
    let wait =
        [number as usize, &raw mut status as usize, (how | libc::__WCLONE) as usize, 0, 0, 0];
    let ended = loop {
        // SAFETY: the status word outlives the call.
        match unsafe { checked(libc::SYS_wait4, wait) } {
            Err(libc::EINTR) => {}
            Ok(0) => return,
            ended => break ended.is_ok(),
        }
    };
    // Also on ECHILD: another thread has waited for it, or this process is a fork of the parent.
    NUMBER.store(0, Ordering::Relaxed);
    if ended && is_blocked() {
        forget_signal(number);
    }
    if status != 0
        && let Some(state) = start::state()
    {
        state.fail();
    }
}

/// Returns true if this thread has `SIGCHLD` blocked, so that the kernel keeps it pending.
fn is_blocked() -> bool {
    mask(libc::SIG_BLOCK, 0) & SIGNAL != 0
}

/// Removes the process's pending `SIGCHLD`; one from another child is queued again.
fn forget_signal(number: u32) {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: all zero is a valid value; the structures outlive the calls.
    unsafe {
        let mut info: siginfo_t = std::mem::zeroed();
        let [set, told, now] =
            [&raw const SIGNAL as usize, &raw mut info as usize, &raw const now as usize];
        let take = [set, told, now, size_of_val(&SIGNAL), 0, 0];
        if checked(libc::SYS_rt_sigtimedwait, take).is_ok() && info.si_pid() as u32 != number {
            let again = [crate::process::id() as usize, libc::SIGCHLD as usize, told, 0, 0, 0];
            system_call(libc::SYS_rt_sigqueueinfo, again);
        }
    }
}

pub(crate) unsafe fn wait(status: *mut c_int) -> pid_t {
    end();
    // SAFETY: as the program says.
    unsafe { real::wait(status) }
}

pub(crate) unsafe fn waitpid(child: pid_t, status: *mut c_int, options: c_int) -> pid_t {
    end();
    // SAFETY: as the program says.
    unsafe { real::waitpid(child, status, options) }
}

pub(crate) unsafe fn wait3(status: *mut c_int, options: c_int, used: *mut rusage) -> pid_t {
    end();
    // SAFETY: as the program says.
    unsafe { real::wait3(status, options, used) }
}

pub(crate) unsafe fn wait4(
    child: pid_t,
    status: *mut c_int,
    options: c_int,
    used: *mut rusage,
) -> pid_t {
    end();
    // SAFETY: as the program says.
    unsafe { real::wait4(child, status, options, used) }
}

pub(crate) unsafe fn waitid(
    kind: idtype_t,
    child: id_t,
    info: *mut siginfo_t,
    options: c_int,
) -> c_int {
    end();
    // SAFETY: as the program says.
    unsafe { real::waitid(kind, child, info, options) }
}

pub(crate) unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_CHILD_SUBREAPER {
        end();
    }
    // SAFETY: as the program says.
    unsafe { real::prctl(option, a, b, c, d) }
}

/// Waits for the process if `SIGCHLD` may become blocked. `how` is that of `sigprocmask`.
///
/// # Safety
/// `set` is null or points to a set.
pub(crate) unsafe fn may_block(how: c_int, set: *const sigset_t) {
    // SAFETY: as the caller says.
    let blocks = || unsafe { !set.is_null() && libc::sigismember(set, libc::SIGCHLD) == 1 };
    if NUMBER.load(Ordering::Relaxed) != 0 && how != libc::SIG_UNBLOCK && blocks() {
        end();
    }
}

/// Called before the disposition of a signal is set.
pub(crate) fn may_be_handled(signal: c_int) {
    if signal == libc::SIGCHLD {
        end();
    }
}
