//! The program's signal handlers. They wait while a thread runs our own code, since they may call us and
//! would find our locks taken.
//!
//! The kernel gets a single handler of ours for all of them. It calls the program's handler at once, or,
//! within our code, *puts the signal back*: it blocks the signal and sends it to the thread again with all
//! its data. On leaving our code, the thread unblocks it, so that it arrives anew. So our code costs no
//! system calls unless a signal arrives just then. A mask holds up signals that cannot be put back
//! (`guard::Quiet`): those whose handler the kernel resets when it calls it or that may interrupt
//! themselves (`SA_RESETHAND`, `SA_NODEFER`), and those that a program sets without libc.

use crate::guard::{self, system_call};
use crate::table::real;
use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence};

const SIGNALS: usize = 65;
/// The program's function for each signal for which the kernel has, or had, our handler.
static FUNCTIONS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];
/// One bit per signal, set if the program's function takes three arguments.
static WITH_INFO: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Signals that were put back and are blocked.
    static PUT_BACK: AtomicU64 = const { AtomicU64::new(0) };
}

type Function = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

/// Returns the address of our handler.
fn ours() -> usize {
    arrive as Function as usize
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Returns true for a handler whose signal can be put back.
pub(crate) fn can_be_put_back(signal: c_int, handler: usize, flags: c_int) -> bool {
    guard::can_wait(signal)
        && crate::hooks::misc::is_handler(handler)
        && flags & (libc::SA_RESETHAND | libc::SA_NODEFER) == 0
}

/// A handler of the program, and whether it takes three arguments.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    function: usize,
    has_info: bool,
}

/// Returns the program's handler of a signal for which the kernel has ours.
pub(crate) fn known(signal: c_int) -> Known {
    let function = FUNCTIONS.get(signal as usize).map_or(0, |one| one.load(Ordering::Acquire));
    let has_info = (1..SIGNALS as c_int).contains(&signal)
        && WITH_INFO.load(Ordering::Relaxed) & bit(signal) != 0;
    Known { function, has_info }
}

fn note(signal: c_int, known: Known) {
    let place = &FUNCTIONS[signal as usize];
    place.store(known.function, Ordering::Release);
    match known.has_info {
        true => WITH_INFO.fetch_or(bit(signal), Ordering::Relaxed),
        false => WITH_INFO.fetch_and(!bit(signal), Ordering::Relaxed),
    };
}

impl Known {
    /// Translates a handler and flags read from the kernel to what the program set.
    pub(crate) fn told(self, handler: usize, flags: c_int) -> (usize, c_int) {
        if handler != ours() {
            return (handler, flags);
        }
        (self.function, if self.has_info { flags } else { flags & !libc::SA_SIGINFO })
    }
}

/// Installs our handler in the kernel for that of the program, with the program's flags and mask.
///
/// # Safety
/// As for libc's `sigaction`, with a handler whose signal can be put back.
pub(crate) unsafe fn install(signal: c_int, new: &sigaction, old: *mut sigaction) -> c_int {
    let before = known(signal);
    let has_info = new.sa_flags & libc::SA_SIGINFO != 0;
    note(signal, Known { function: new.sa_sigaction, has_info });
    let mut asked = *new;
    asked.sa_sigaction = ours();
    asked.sa_flags |= libc::SA_SIGINFO;
    // SAFETY: a copy of the program's structure; the rest as the caller says.
    let result = unsafe { real::sigaction(signal, &raw const asked, old) };
    if result != 0 {
        note(signal, before);
    }
    result
}

/// The handler that the kernel calls.
unsafe extern "C-unwind" fn arrive(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments.
    if guard::is_quiet() && unsafe { put_back(signal, info, context) } {
        return;
    }
    let Known { function, has_info } = known(signal);
    if !crate::hooks::misc::is_handler(function) {
        return;
    }
    // SAFETY: the program gave a function of this kind.
    unsafe {
        if has_info {
            std::mem::transmute::<usize, Function>(function)(signal, info, context);
        } else {
            type Plain = unsafe extern "C-unwind" fn(c_int);
            std::mem::transmute::<usize, Plain>(function)(signal);
        }
    }
}

/// Blocks a signal that has arrived and sends it again; returns false if the kernel refuses it.
///
/// # Safety
/// Only for a handler, with its arguments.
pub(crate) unsafe fn put_back(signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: plain calls; the structure is the kernel's. The signal is blocked while its handler runs.
    let sent = unsafe {
        let process = system_call(libc::SYS_getpid, [0; 6]) as usize;
        let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
        let arguments = [process, thread, signal as usize, info as usize, 0, 0];
        system_call(libc::SYS_rt_tgsigqueueinfo, arguments) == 0
            || system_call(libc::SYS_tgkill, [process, thread, signal as usize, 0, 0, 0]) == 0
    };
    if sent {
        // SAFETY: the mask that the thread returns to; the kernel's sets have 8 bytes, and libc's begin
        // with them.
        unsafe {
            let mask = &raw mut (*context.cast::<ucontext_t>()).uc_sigmask;
            *mask.cast::<u64>() |= bit(signal);
        }
        let _ = PUT_BACK.try_with(|set| set.fetch_or(bit(signal), Ordering::Relaxed));
    }
    sent
}

/// Returns the signals put back since the last call; the caller unblocks them.
pub(crate) fn take_put_back() -> u64 {
    compiler_fence(Ordering::SeqCst);
    PUT_BACK
        .try_with(|set| match set.load(Ordering::Relaxed) {
            0 => 0,
            _ => set.swap(0, Ordering::Relaxed),
        })
        .unwrap_or(0)
}
