//! New threads and children of an armed process are armed before they run the program's code.

use crate::guard::mask;
use crate::start;
use crate::table::real;
use libc::{c_int, c_void, pid_t, pthread_attr_t, pthread_t};

/// What a thread of POSIX runs.
pub(crate) type Start = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
/// What a thread of C11 runs.
pub(crate) type StartC11 = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;

struct Begin<F> {
    start: F,
    argument: *mut c_void,
    /// Signals that the thread is to have blocked.
    blocked: u64,
}

/// All signals wait until a new thread is armed: a handler of the program would run before. But not those that libc keeps
/// for itself: who changes the user of all threads waits until each has taken one, with a lock that making a thread needs.
const WAITING: u64 = !(1 << 31 | 1 << 32);

/// Arms the thread and tells what to run in it.
///
/// # Safety
/// `begin` is a leaked box that nobody else takes.
unsafe fn begun<F>(begin: *mut c_void) -> Begin<F> {
    // SAFETY: as the caller says.
    let begin = unsafe { Box::from_raw(begin.cast::<Begin<F>>()) };
    super::arm();
    // Unless it was made with a mask of its own.
    let given = mask(libc::SIG_BLOCK, 0);
    if given | super::masks::BITS_FREE == u64::MAX {
        mask(libc::SIG_SETMASK, super::masks::without(begin.blocked));
    }
    *begin
}

/// No drop is pending while the program's function runs: `pthread_exit` unwinds through here.
unsafe extern "C-unwind" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: made by `pthread_create` below for this thread.
    unsafe {
        let Begin { start, argument, .. } = begun::<Start>(begin);
        start(argument)
    }
}

unsafe extern "C-unwind" fn run_c11(begin: *mut c_void) -> c_int {
    // SAFETY: made by `thrd_create` below for this thread.
    unsafe {
        let Begin { start, argument, .. } = begun::<StartC11>(begin);
        start(argument)
    }
}

/// Makes a thread with `make`; what did not become one is freed.
fn with_begin<F>(
    start: F,
    argument: *mut c_void,
    make: impl FnOnce(*mut c_void) -> c_int,
) -> c_int {
    let blocked = mask(libc::SIG_BLOCK, super::masks::without(WAITING));
    let begin = Box::into_raw(Box::new(Begin { start, argument, blocked }));
    let result = make(begin.cast());
    mask(libc::SIG_SETMASK, super::masks::without(blocked));
    if result != 0 {
        // SAFETY: no thread has it.
        drop(unsafe { Box::from_raw(begin) });
    }
    result
}

pub(crate) unsafe fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if !super::is_armed() {
            return real::pthread_create(thread, attributes, start, argument);
        }
        with_begin(start, argument, |begin| real::pthread_create(thread, attributes, run, begin))
    }
}

pub(crate) unsafe fn thrd_create(
    thread: *mut pthread_t,
    start: StartC11,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if !super::is_armed() {
            return real::thrd_create(thread, start, argument);
        }
        with_begin(start, argument, |begin| real::thrd_create(thread, run_c11, begin))
    }
}

/// `_Fork`: without the handlers of `pthread_atfork`, of which ours must run.
pub(crate) unsafe fn fork_alone() -> pid_t {
    // SAFETY: as the program says.
    unsafe { forked(|| real::_Fork()) }
}

/// Runs what forks outside of libc's `fork`, with what has to be done around it.
pub(crate) fn forked<T: Default + PartialEq>(fork: impl FnOnce() -> T) -> T {
    if start::state().is_none() {
        return fork();
    }
    start::before_fork();
    let result = fork();
    if result == T::default() {
        start::in_child();
    } else {
        start::after_fork();
    }
    result
}
