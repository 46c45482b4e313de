//! Arms new threads and children of an armed process before they run the program's code.

use crate::guard::{mask, undisturbed};
use crate::start;
use crate::table::real;
use libc::{c_int, c_void, pid_t, pthread_attr_t, pthread_t};

/// Start function of a POSIX thread.
pub(crate) type Start = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
/// Start function of a C11 thread, or of a child of `clone`.
pub(crate) type StartC11 = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;

struct Begin<F> {
    start: F,
    argument: *mut c_void,
    /// Signals that the thread shall have blocked.
    blocked: u64,
}

/// Signals blocked until a new thread is armed, as a handler of the program might run before. libc's own
/// signals are not blocked: a thread that changes the user of all threads waits until each has handled one,
/// while it holds a lock that creating a thread needs.
const WAITING: u64 = !(1 << 31 | 1 << 32);

/// Arms the thread and returns what to run in it.
///
/// # Safety
/// `begin` is a leaked box that nobody else frees.
unsafe fn begun<F>(begin: *mut c_void) -> Begin<F> {
    // SAFETY: as the caller says.
    let begin = unsafe { Box::from_raw(begin.cast::<Begin<F>>()) };
    super::arm();
    // Keep a mask that the thread was created with.
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

/// Creates a thread with `make`; frees the argument if that fails.
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

/// Replaces `fork`, which calls us by `pthread_atfork`.
pub(crate) unsafe fn fork() -> pid_t {
    // SAFETY: as the program says.
    undisturbed(|| unsafe { real::fork() })
}

/// Replaces `_Fork`, which runs no `pthread_atfork` handlers, although ours must run.
pub(crate) unsafe fn fork_alone() -> pid_t {
    // SAFETY: as the program says.
    unsafe { forked(|| real::_Fork()) }
}

/// Replaces `clone`. A child with its own memory is one of a fork, and gets its own descriptors, too, as it
/// closes our connections; any other is like a thread made without libc.
pub(crate) unsafe fn clone(
    function: Option<StartC11>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_id: *mut pid_t,
    storage: *mut c_void,
    child_id: *mut pid_t,
) -> c_int {
    let make = |function, flags, argument| {
        // SAFETY: as the program says.
        unsafe { real::clone(function, stack, flags, argument, parent_id, storage, child_id) }
    };
    let Some(start) = function.filter(|_| start::state().is_some()) else {
        return make(function, flags, argument);
    };
    if flags & libc::CLONE_VM != 0 {
        crate::vfork::has_own_threads();
        crate::descriptors::share();
        return make(function, flags, argument);
    }
    // The child finds it in its copy of this stack.
    let mut begin = Begin { start, argument, blocked: 0 };
    let flags = flags & !libc::CLONE_FILES;
    forked(|| make(Some(run_child), flags, (&raw mut begin).cast()))
}

unsafe extern "C-unwind" fn run_child(begin: *mut c_void) -> c_int {
    start::in_child();
    // SAFETY: made by `clone` above, in the memory that this process has a copy of.
    let status = unsafe {
        let Begin { start, argument, .. } = &*begin.cast::<Begin<StartC11>>();
        start(*argument)
    };
    // libc ends the process, without what `exit` would do.
    start::finish();
    status
}

/// Flags of `clone` that a child is made without if it is to return through our frames. It has its own memory,
/// without which it cannot share handlers, and its own descriptors, as it closes our connections. Whoever made
/// it waits in another way ([`exec::and_wait`](crate::hooks::exec::and_wait)).
#[cfg(target_arch = "x86_64")]
pub(crate) const NOT_OF_FORKS: c_int = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_SIGHAND
    | libc::CLONE_SETTLS
    | libc::CLONE_FILES;

/// Runs `fork`, which forks other than by libc's `fork`, and does what is due before and after it.
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
