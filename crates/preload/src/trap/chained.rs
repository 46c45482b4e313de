//! What the program wants to happen on `SIGSYS`: the kernel has our handler while calls are trapped,
//! which passes on what it did not cause.

#[cfg(target_arch = "x86_64")]
use crate::guard::{Disposition, checked, system_call};
use libc::{c_int, sigaction};
#[cfg(target_arch = "x86_64")]
use libc::{c_void, siginfo_t};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A signal's disposition, as the kernel has it.
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
/// Of those who change it; the handler of signals reads without.
static CHANGING: Mutex<()> = Mutex::new(());

/// Notes the program's disposition and gives the one before.
pub(crate) fn exchange(new: Option<KernelAction>) -> KernelAction {
    let _changing = CHANGING.lock();
    let old = KernelAction {
        handler: HANDLER.load(Ordering::Acquire),
        flags: FLAGS.load(Ordering::Relaxed),
        restorer: 0,
        mask: MASK.load(Ordering::Relaxed),
    };
    if let Some(new) = new {
        FLAGS.store(new.flags, Ordering::Relaxed);
        MASK.store(new.mask, Ordering::Relaxed);
        HANDLER.store(new.handler, Ordering::Release);
    }
    old
}

/// `sigaction` of `SIGSYS` in an armed process; `None`: for libc.
///
/// # Safety
/// Each is null or a structure.
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
        let before = exchange(asked);
        if let Some(old) = old.as_mut() {
            *old = std::mem::zeroed();
            old.sa_sigaction = before.handler;
            old.sa_flags = before.flags as c_int;
            (&raw mut old.sa_mask).cast::<u64>().write(before.mask);
        }
    }
    Some(0)
}

/// `signal` of `SIGSYS` in an armed process; `None`: for libc.
pub(crate) fn signal_of_program(signal: c_int, handler: usize) -> Option<usize> {
    if signal != libc::SIGSYS || !super::is_armed() {
        return None;
    }
    let flags = libc::SA_RESTART as u64;
    Some(exchange(Some(KernelAction { handler, flags, restorer: 0, mask: 0 })).handler)
}

/// [`pass_on`] to a guest, whose handler cannot be called with our FS: only what has none is done.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn pass_on_to_guest(signal: c_int) {
    if exchange(None).handler == libc::SIG_DFL {
        // SAFETY: there is no handler that would want the rest.
        unsafe { pass_on(signal, std::ptr::null_mut(), std::ptr::null_mut()) };
    }
}

/// Does what the program wants on a `SIGSYS` that is not of our making.
///
/// # Safety
/// To be called by the handler of signals, with what it got.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let KernelAction { handler, flags, .. } = exchange(None);
    match handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            let ends = KernelAction::default();
            let set = [signal as usize, &raw const ends as usize, 0, super::masks::SET_BYTES, 0, 0];
            // SAFETY: the default, which ends the process, for a signal that is sent at once.
            unsafe {
                let _ = checked(libc::SYS_rt_sigaction, set);
                let own = system_call(libc::SYS_getpid, [0; 6]) as usize;
                let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
                system_call(libc::SYS_tgkill, [own, thread, signal as usize, 0, 0, 0]);
            }
        }
        handler if flags & libc::SA_SIGINFO as u64 != 0 => {
            // SAFETY: the program gave a function of this kind.
            unsafe {
                let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
        }
        handler => {
            // SAFETY: the program gave a function of this kind.
            unsafe {
                let handler: unsafe extern "C" fn(c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}

/// `rt_sigaction` of the program itself.
///
/// # Safety
/// As for that system call.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn kernel_sigaction(arguments: crate::hooks::numbers::Arguments) -> isize {
    let [signal, new, old, bytes, ..] = arguments;
    let result = if bytes != super::masks::SET_BYTES {
        Err(libc::EINVAL)
    } else {
        // SAFETY: null or a disposition, as the caller says.
        let asked = unsafe { (new as *const KernelAction).as_ref() }.copied();
        let asked = asked.map(|a| KernelAction { mask: super::masks::without(a.mask), ..a });
        if signal as c_int == libc::SIGSYS {
            let before = exchange(asked);
            // SAFETY: null or room for one, as the caller says.
            if let Some(old) = unsafe { (old as *mut KernelAction).as_mut() } {
                *old = before;
            }
            Ok(0)
        } else {
            let at = asked.as_ref().map_or(0, |asked| &raw const *asked as usize);
            // SAFETY: as the caller says, with a copy of what was asked.
            let done = unsafe { checked(libc::SYS_rt_sigaction, [signal, at, old, bytes, 0, 0]) };
            // SAFETY: null or a disposition, which the kernel has written.
            if let (Ok(_), Some(old)) = (&done, unsafe { (old as *mut KernelAction).as_mut() }) {
                let known = crate::handlers::known(signal as c_int);
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
                crate::guard::handled(signal as c_int, now);
            }
            done
        }
    };
    result.map_or_else(|error| -(error as isize), |done| done as isize)
}
