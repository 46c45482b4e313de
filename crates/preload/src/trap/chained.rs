//! The program's own disposition of `SIGSYS`. While calls are trapped the kernel has our handler, which
//! passes foreign signals on.

use crate::guard::{self, Disposition, checked, system_call};
use crate::handlers;
use libc::{c_int, c_void, sigaction, siginfo_t};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A signal's disposition in the kernel's format.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct KernelAction {
    pub(crate) handler: usize,
    pub(crate) flags: u64,
    pub(crate) restorer: usize,
    pub(crate) mask: u64,
}

static HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static FLAGS: AtomicU64 = AtomicU64::new(0);
static MASK: AtomicU64 = AtomicU64::new(0);
static RESTORER: AtomicUsize = AtomicUsize::new(0);
/// Serializes changes; the signal handler reads without it.
static CHANGING: Mutex<()> = Mutex::new(());

/// Returns the program's disposition.
pub(crate) fn now() -> KernelAction {
    KernelAction {
        handler: HANDLER.load(Ordering::Acquire),
        flags: FLAGS.load(Ordering::Relaxed),
        restorer: RESTORER.load(Ordering::Relaxed),
        mask: MASK.load(Ordering::Relaxed),
    }
}

/// Sets the program's disposition and returns the previous one.
pub(crate) fn exchange(new: KernelAction) -> KernelAction {
    // The program's handler may need the lock.
    let blocked = guard::mask(libc::SIG_BLOCK, super::masks::with_trap(0));
    let changing = CHANGING.lock();
    let before = now();
    FLAGS.store(new.flags, Ordering::Relaxed);
    MASK.store(new.mask, Ordering::Relaxed);
    RESTORER.store(new.restorer, Ordering::Relaxed);
    HANDLER.store(new.handler, Ordering::Release);
    let has_handler = crate::hooks::misc::is_handler(new.handler);
    let restarts = !has_handler || new.flags & libc::SA_RESTART as u64 != 0;
    guard::handled_trap(has_handler, !restarts);
    let mut ours = KernelAction::default();
    let set = |new, old| [libc::SIGSYS as usize, new, old, super::masks::SET_BYTES, 0, 0];
    // SAFETY: our own disposition; only `SA_RESTART` changes.
    unsafe {
        let _ = checked(libc::SYS_rt_sigaction, set(0, &raw mut ours as usize));
        ours.flags &= !(libc::SA_RESTART as u64);
        ours.flags |= if restarts { libc::SA_RESTART as u64 } else { 0 };
        let _ = checked(libc::SYS_rt_sigaction, set(&raw const ours as usize, 0));
    }
    drop(changing);
    guard::mask(libc::SIG_SETMASK, blocked);
    before
}

/// Called before the program's handler is: resets one that was set for a single call.
pub(crate) fn is_called(action: &KernelAction) {
    if action.flags & u64::from(libc::SA_RESETHAND as u32) != 0 {
        let (once, none) = (action.handler, libc::SIG_DFL);
        let _ = HANDLER.compare_exchange(once, none, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Answers `sigaction` of `SIGSYS` in an armed process; `None` passes the call to libc.
///
/// # Safety
/// Each pointer is null or points to a structure.
pub(crate) unsafe fn sigaction_of_program(
    signal: c_int,
    new: *const sigaction,
    old: *mut sigaction,
) -> Option<c_int> {
    if signal != libc::SIGSYS || !super::is_armed() {
        return None;
    }
    // SAFETY: as the caller says; libc's sets begin with the kernel's.
    unsafe {
        let asked = new.as_ref().map(|new| KernelAction {
            handler: new.sa_sigaction,
            flags: new.sa_flags as u64,
            restorer: 0,
            mask: (&raw const new.sa_mask).cast::<u64>().read(),
        });
        let before = asked.map_or_else(now, exchange);
        if let Some(old) = old.as_mut() {
            *old = std::mem::zeroed();
            old.sa_sigaction = before.handler;
            old.sa_flags = before.flags as c_int;
            (&raw mut old.sa_mask).cast::<u64>().write(before.mask);
        }
    }
    Some(0)
}

/// Answers `signal` of `SIGSYS` in an armed process; `None` passes the call to libc.
pub(crate) fn signal_of_program(signal: c_int, handler: usize) -> Option<usize> {
    if signal != libc::SIGSYS || !super::is_armed() {
        return None;
    }
    let flags = libc::SA_RESTART as u64;
    Some(exchange(KernelAction { handler, flags, restorer: 0, mask: 0 }).handler)
}

/// `si_code` of a system call trapped by a filter of the program (`seccomp`).
pub(crate) const SYS_SECCOMP: c_int = 1;

/// Handles a `SIGSYS` that is not from our trap for a program without a handler: ignores it or ends the
/// process. A signal from a filter cannot be ignored.
pub(crate) fn without_handler(handler: usize, code: c_int) {
    if handler == libc::SIG_IGN && code != SYS_SECCOMP {
        return;
    }
    let signal = libc::SIGSYS as usize;
    let ends = KernelAction::default();
    let set = [signal, &raw const ends as usize, 0, super::masks::SET_BYTES, 0, 0];
    // SAFETY: sets the default action, which ends the process, and raises the signal.
    unsafe {
        let _ = checked(libc::SYS_rt_sigaction, set);
        let own = system_call(libc::SYS_getpid, [0; 6]) as usize;
        let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
        system_call(libc::SYS_tgkill, [own, thread, signal, 0, 0, 0]);
    }
}

/// Handles a `SIGSYS` that is not from our trap as the program wants.
///
/// # Safety
/// Only for the signal handler, with its arguments.
pub(crate) unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let action = now();
    // SAFETY: the kernel's structure.
    let code = unsafe { (*info).si_code };
    if !crate::hooks::misc::is_handler(action.handler) {
        return without_handler(action.handler, code);
    }
    if code <= 0 && guard::is_quiet() {
        guard::mask(libc::SIG_BLOCK, super::masks::with_trap(0));
        // SAFETY: as the caller says.
        if unsafe { handlers::put_back(signal, info, context) } {
            return;
        }
        super::masks::let_in();
    }
    is_called(&action);
    // Until our own handler returns, which restores the mask.
    guard::mask(libc::SIG_BLOCK, super::masks::without_trap(action.mask));
    // SAFETY: the program gave a function of the kind that its flags say.
    unsafe {
        if action.flags & libc::SA_SIGINFO as u64 != 0 {
            let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                std::mem::transmute(action.handler);
            handler(signal, info, context);
        } else {
            let handler: unsafe extern "C" fn(c_int) = std::mem::transmute(action.handler);
            handler(signal);
        }
    }
}

/// Called before a signal gets a handler. In a guest, its other threads must leave our code if they do not have the
/// signal blocked there, as the handler would find our FS.
fn announce(signal: c_int) {
    let is_known = || guard::handled_signals().all & 1 << (signal - 1) != 0;
    if !crate::guest::is_here() || !guard::can_wait(signal) || is_known() {
        return;
    }
    let handled = Disposition { has_handler: true, interrupts: false, is_put_back: false };
    guard::handled(signal, handled);
    crate::guest::calls::outdate_masks();
}

/// Answers a trapped `rt_sigaction`.
///
/// # Safety
/// As for the system call.
pub(crate) unsafe fn kernel_sigaction(arguments: crate::hooks::numbers::Arguments) -> isize {
    let [signal, new, old, bytes, ..] = arguments;
    let result = if bytes != super::masks::SET_BYTES {
        Err(libc::EINVAL)
    } else {
        // SAFETY: null or a disposition, as the caller says.
        let asked = unsafe { (new as *const KernelAction).as_ref() }.copied();
        let asked = asked.map(|a| KernelAction { mask: super::masks::without_trap(a.mask), ..a });
        if signal as c_int == libc::SIGSYS {
            let before = asked.map_or_else(now, exchange);
            // SAFETY: null or room for one, as the caller says.
            if let Some(old) = unsafe { (old as *mut KernelAction).as_mut() } {
                *old = before;
            }
            Ok(0)
        } else {
            let at = asked.as_ref().map_or(0, |asked| &raw const *asked as usize);
            if asked.is_some_and(|asked| crate::hooks::misc::is_handler(asked.handler)) {
                announce(signal as c_int);
            }
            // SAFETY: as the caller says, with a copy of the new disposition.
            let done = unsafe { checked(libc::SYS_rt_sigaction, [signal, at, old, bytes, 0, 0]) };
            // SAFETY: null or a disposition, which the kernel has written.
            if let (Ok(_), Some(old)) = (&done, unsafe { (old as *mut KernelAction).as_mut() }) {
                let known = handlers::known(signal as c_int);
                let (handler, flags) = known.told(old.handler, old.flags as c_int);
                old.handler = handler;
                old.flags = old.flags & !u64::from(u32::MAX) | u64::from(flags as u32);
            }
            if let (Ok(_), Some(asked)) = (&done, asked) {
                let now = Disposition {
                    has_handler: crate::hooks::misc::is_handler(asked.handler),
                    interrupts: asked.flags & libc::SA_RESTART as u64 == 0,
                    is_put_back: false,
                };
                guard::handled(signal as c_int, now);
            }
            done
        }
    };
    result.map_or_else(|error| -(error as isize), |done| done as isize)
}
