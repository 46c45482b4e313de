//! Processes and threads that a guest makes.

use super::frame::{self, Frames};
use super::switch::Thread;
use crate::descriptors;
use crate::guard::{mask, system_call};
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

/// Our own part of a thread's stack: its guest brings another.
const STACK_BYTES: usize = 256 * 1024;

/// A new process or thread.
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
    // With memory of its own, as the child comes back through our frames: also that of a `vfork`, for
    // which its parent waits.
    let plain = flags & !((libc::CLONE_VM | libc::CLONE_SETTLS) as usize);
    let at = context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    let frames = if has(libc::CLONE_VFORK) { Frames::share(at, context.uc_stack) } else { None };
    // SAFETY: as the guest says.
    let result = threads::forked(|| unsafe {
        system_call(libc::SYS_clone, [plain, 0, parent_tid, child_tid, 0, 0])
    });
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

/// What `clone` is told of a thread.
#[derive(Clone, Copy)]
struct Asked {
    flags: usize,
    stack: usize,
    parent_tid: usize,
    child_tid: usize,
    fs: usize,
}

impl Asked {
    /// A place, if there is one to be written to.
    fn place(&self, flag: c_int, at: usize) -> *mut c_int {
        if self.flags & flag as usize != 0 { at as *mut c_int } else { null_mut() }
    }
}

/// What a new thread begins with.
struct Begin {
    asked: Asked,
    context: ucontext_t,
    /// FS where it gets none of its own.
    fs: usize,
    /// Its number, or less than zero when it cannot begin; zero until that is known.
    known: Arc<AtomicI32>,
}

/// A thread of the guest is one of our libc, too, as our code needs it.
unsafe fn new_thread(context: &ucontext_t, asked: Asked) -> isize {
    descriptors::share();
    let mut begins = *context;
    let registers = &mut begins.uc_mcontext;
    registers.gregs[libc::REG_RAX as usize] = 0;
    registers.gregs[libc::REG_RSP as usize] = asked.stack as i64;
    // That of a new thread.
    registers.fpregs = null_mut();
    // SAFETY: the thread is one of a guest.
    let fs = unsafe { Thread::current() }.its;
    let known = Arc::new(AtomicI32::new(0));
    let begin = Box::new(Begin { asked, context: begins, fs, known: Arc::clone(&known) });
    // Those of the new one wait until it is the guest's.
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

/// The error number, or zero.
fn create(begin: Box<Begin>) -> c_int {
    let begin = Box::into_raw(begin);
    // SAFETY: all zero is valid for what is initialized then; the thread takes the box.
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

/// The signal by which a C library changes the user of all threads. Ours takes it when it makes its first thread; but it
/// knows no thread of the guest's library, or of Go, which use it for the same.
const SIGSETXID: usize = 33;

/// Makes a thread, and gives the guest's handler of [`SIGSETXID`] back, if ours took its place.
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
        // It was let in, too.
        mask(libc::SIG_SETMASK, u64::MAX);
        result
    }
}

unsafe extern "C-unwind" fn run(begin: *mut c_void) -> *mut c_void {
    // Our libc lets its own in.
    mask(libc::SIG_SETMASK, u64::MAX);
    // SAFETY: a leaked box that nobody else takes.
    let Begin { asked, mut context, fs, known } = *unsafe { Box::from_raw(begin.cast::<Begin>()) };
    let its = if asked.flags & libc::CLONE_SETTLS as usize != 0 { asked.fs } else { fs };
    let tell = |number: isize| {
        known.store(number as i32, Ordering::Release);
        // SAFETY: who waits has the word, too.
        unsafe {
            let wake = [known.as_ptr() as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0];
            system_call(libc::SYS_futex, wake);
        }
    };
    // SAFETY: the thread stays where it is until it has left the guest; the places are the guest's.
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
