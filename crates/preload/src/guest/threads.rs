//! Creates processes and threads for a guest.

use super::frame::{self, Frames};
use super::switch::Thread;
use crate::descriptors;
use crate::guard::{mask, system_call};
use crate::hooks::exec;
use crate::hooks::numbers::Arguments;
use crate::table::real;
use crate::trap::chained::KernelAction;
use crate::trap::masks::SET_BYTES;
use crate::trap::{stack, threads};
use libc::{c_int, c_long, c_void, ucontext_t};
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Size of our own stack for a thread; the guest brings another one.
const STACK_BYTES: usize = 256 * 1024;

/// Answers a call that creates a process or thread.
pub(super) unsafe fn new_task(
    context: &mut ucontext_t,
    number: c_long,
    arguments: Arguments,
) -> isize {
    let [flags, stack, parent_tid, child_tid, fs, _] = match number {
        libc::SYS_clone => arguments,
        libc::SYS_vfork => [(libc::CLONE_VFORK | libc::SIGCHLD) as usize, 0, 0, 0, 0, 0],
        _ => [libc::SIGCHLD as usize, 0, 0, 0, 0, 0],
    };
    let has = |flag: c_int| flags & flag as usize != 0;
    if has(libc::CLONE_THREAD) {
        let asked = Asked { flags, stack, parent_tid, child_tid, fs };
        // SAFETY: as the guest says.
        return unsafe { new_thread(context, asked) };
    }
    // The child returns through our frames; so does that of a `vfork`, for which its parent waits.
    let plain = flags & !(threads::NOT_OF_FORKS as usize);
    let at = context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    let frames = if has(libc::CLONE_VFORK) { Frames::share(at, context.uc_stack) } else { None };
    let make = || {
        // SAFETY: as the guest says.
        threads::forked(|| unsafe {
            system_call(libc::SYS_clone, [plain, 0, parent_tid, child_tid, 0, 0])
        })
    };
    // The wait comes after `forked`: other threads would block on what is held around a fork while the
    // kernel waits.
    let result = if has(libc::CLONE_VFORK) { exec::and_wait(make) } else { make() };
    if result != 0 {
        if let Some(frames) = frames {
            frames.take_back();
        }
    } else {
        frame::in_child(frames);
        if stack != 0 {
            context.uc_mcontext.gregs[libc::REG_RSP as usize] = stack as i64;
        }
        if has(libc::CLONE_SETTLS) {
            // SAFETY: the only thread of the child.
            unsafe { Thread::current() }.its = fs;
        }
    }
    result
}

/// The arguments of `clone` for a thread.
#[derive(Clone, Copy)]
struct Asked {
    flags: usize,
    stack: usize,
    parent_tid: usize,
    child_tid: usize,
    fs: usize,
}

impl Asked {
    /// Returns the address to write to if the flag is set, otherwise null.
    fn place(&self, flag: c_int, at: usize) -> *mut c_int {
        if self.flags & flag as usize != 0 { at as *mut c_int } else { null_mut() }
    }
}

/// Initial state of a new thread.
struct Begin {
    asked: Asked,
    context: ucontext_t,
    /// FS of the thread if it gets none of its own.
    fs: usize,
    /// The thread's number; zero until it is known, negative if the thread cannot start.
    known: Arc<AtomicI32>,
}

/// Creates a thread of the guest. It is also a thread of our libc, as our code requires.
unsafe fn new_thread(context: &ucontext_t, asked: Asked) -> isize {
    descriptors::share();
    let mut begins = *context;
    let registers = &mut begins.uc_mcontext;
    registers.gregs[libc::REG_RAX as usize] = 0;
    registers.gregs[libc::REG_RSP as usize] = asked.stack as i64;
    // Those of a new thread.
    registers.fpregs = null_mut();
    // SAFETY: the thread is one of a guest.
    let fs = unsafe { Thread::current() }.its;
    let known = Arc::new(AtomicI32::new(0));
    let begin = Box::new(Begin { asked, context: begins, fs, known: Arc::clone(&known) });
    // The new thread's signals wait until it runs the guest.
    mask(libc::SIG_SETMASK, u64::MAX);
    let made = stack::on_own(|| create(begin));
    if made != Some(0) {
        return -(libc::EAGAIN as isize);
    }
    loop {
        match known.load(Ordering::Acquire) {
            0 => {
                let wait = [known.as_ptr() as usize, libc::FUTEX_WAIT as usize, 0, 0, 0, 0];
                // SAFETY: the word outlives the call.
                unsafe { system_call(libc::SYS_futex, wait) };
            }
            number => return number as isize,
        }
    }
}

/// Creates the thread; returns an error number or zero.
fn create(begin: Box<Begin>) -> c_int {
    let begin = Box::into_raw(begin);
    // SAFETY: all zero is valid for attributes that are then initialized; the thread takes the box.
    unsafe {
        let mut attributes: libc::pthread_attr_t = zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES);
        let mut thread = 0;
        let failed = keeping_handler(|| {
            real::pthread_create(&raw mut thread, &raw const attributes, run, begin.cast())
        });
        libc::pthread_attr_destroy(&raw mut attributes);
        if failed != 0 {
            drop(Box::from_raw(begin));
        }
        failed
    }
}

/// The signal by which a C library changes the user of all threads. Ours sets a handler for it when it
/// creates its first thread, but knows no thread of the guest's library or of Go, which use the signal for
/// the same purpose.
const SIGSETXID: usize = 33;

/// Creates a thread, and restores the guest's handler of [`SIGSETXID`] if our libc replaced it.
fn keeping_handler(make: impl FnOnce() -> c_int) -> c_int {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    if IS_TAKEN.swap(true, Ordering::Relaxed) {
        return make();
    }
    let mut action = KernelAction::default();
    let at = &raw mut action as usize;
    let call = |new, old| [SIGSETXID, new, old, SET_BYTES, 0, 0];
    // SAFETY: the disposition outlives both calls.
    unsafe {
        system_call(libc::SYS_rt_sigaction, call(0, at));
        let result = make();
        system_call(libc::SYS_rt_sigaction, call(at, 0));
        // Our libc unblocked it, too.
        mask(libc::SIG_SETMASK, u64::MAX);
        result
    }
}

unsafe extern "C-unwind" fn run(begin: *mut c_void) -> *mut c_void {
    // Our libc unblocks its own signals.
    mask(libc::SIG_SETMASK, u64::MAX);
    // SAFETY: a leaked box that nobody else frees.
    let Begin { asked, mut context, fs, known } = *unsafe { Box::from_raw(begin.cast::<Begin>()) };
    let its = if asked.flags & libc::CLONE_SETTLS as usize != 0 { asked.fs } else { fs };
    let tell = |number: isize| {
        known.store(number as i32, Ordering::Release);
        // SAFETY: the waiting thread owns the word, too.
        unsafe {
            let wake = [known.as_ptr() as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0];
            system_call(libc::SYS_futex, wake);
        }
    };
    // SAFETY: `thread` does not move until it has left the guest; the addresses are the guest's.
    unsafe {
        let mut thread = match Thread::new(its, false) {
            Ok(thread) => thread,
            Err(error) => {
                tell(-(error as isize));
                return null_mut();
            }
        };
        thread.clears = asked.place(libc::CLONE_CHILD_CLEARTID, asked.child_tid);
        if let Err(error) = thread.traps() {
            thread.clears = null_mut();
            thread.end();
            tell(-(error as isize));
            return null_mut();
        }
        context.uc_stack = thread.spare_stack();
        let number = system_call(libc::SYS_gettid, [0; 6]);
        for place in [
            asked.place(libc::CLONE_CHILD_SETTID, asked.child_tid),
            asked.place(libc::CLONE_PARENT_SETTID, asked.parent_tid),
        ] {
            if !place.is_null() {
                place.write_volatile(number as c_int);
            }
        }
        tell(number);
        thread.enter(&context);
        thread.end();
    }
    null_mut()
}
