//! Delivers to a guest a `SIGSYS` that is not from our trap: one sent by a process, or by a filter of the
//! guest (`seccomp`).
//!
//! As the kernel has our handler, the frame for the guest's handler is built here, where and how the kernel
//! would: when that handler returns, it asks the kernel to continue with the state in the frame. The signal
//! is blocked while our own code runs, so it waits until the guest continues.

use super::switch::Thread;
use crate::guard::{mask, system_call};
use crate::hooks::misc::is_handler;
use crate::trap::chained::{self, KernelAction};
use crate::trap::masks;
use libc::{siginfo_t, ucontext_t};

/// Size of the kernel's `struct ucontext`; libc's begins with it.
const CONTEXT_BYTES: usize = 304;
const INFO_BYTES: usize = size_of::<siginfo_t>();
/// Offset of the length in the extended processor state, after a mark.
const LENGTH_AT: usize = 464;
const LENGTH_MARK: u32 = 0x4650_5853;
/// Length of the state without the mark.
const SHORT_BYTES: usize = 512;
/// Size of the area below the stack pointer that the ABI reserves for functions.
const RED_ZONE: usize = 128;
/// Flags that the kernel clears for a handler: trap, direction, resume.
const FLAGS: i64 = 0x1_0500;

/// Handles a `SIGSYS`.
///
/// # Safety
/// Only for our handler, with its arguments.
pub(super) unsafe fn deliver(info: *mut siginfo_t, context: &mut ucontext_t, in_guest: bool) {
    let action = chained::now();
    // SAFETY: as the caller says; the thread is one of a guest.
    unsafe {
        let code = (*info).si_code;
        if !is_handler(action.handler) {
            chained::without_handler(action.handler, code);
        } else if in_guest {
            call(&action, info, context);
        } else if code == chained::SYS_SECCOMP {
            Thread::current().is_refused = true;
            context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
        } else {
            let process = system_call(libc::SYS_getpid, [0; 6]) as usize;
            let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
            let again = [process, thread, libc::SIGSYS as usize, info as usize, 0, 0];
            let blocked = masks::with_trap(mask_of(context));
            (&raw mut context.uc_sigmask).cast::<u64>().write(blocked);
            system_call(libc::SYS_rt_tgsigqueueinfo, again);
        }
    }
}

/// Runs `work`, which does what the guest asked for. Returns `None` if it failed after a filter of the
/// guest's own trapped one of its calls: then the guest's own call must be made, so that the guest's
/// handler sees that one.
///
/// # Safety
/// The thread is one of a guest, with `SIGSYS` blocked.
pub(super) unsafe fn filtered(work: impl FnOnce() -> isize) -> Option<isize> {
    if !is_handler(chained::now().handler) {
        return Some(work());
    }
    // SAFETY: as the caller says; both references are short-lived.
    unsafe { Thread::current() }.is_refused = false;
    masks::let_in();
    let result = work();
    mask(libc::SIG_BLOCK, masks::with_trap(0));
    // SAFETY: as above.
    (result >= 0 || !unsafe { Thread::current() }.is_refused).then_some(result)
}

fn mask_of(context: &ucontext_t) -> u64 {
    // SAFETY: the kernel's sets have 8 bytes, and libc's begin with them.
    unsafe { (&raw const context.uc_sigmask).cast::<u64>().read() }
}

/// Returns the length of the extended processor state.
unsafe fn length_of(state: usize) -> usize {
    // SAFETY: as the kernel made it.
    match unsafe { ((state + LENGTH_AT) as *const [u32; 2]).read_unaligned() } {
        [LENGTH_MARK, length] => length as usize,
        _ => SHORT_BYTES,
    }
}

/// Continues the guest in its handler; returns only if there is no room for the frame.
unsafe fn call(action: &KernelAction, info: *const siginfo_t, context: &ucontext_t) {
    let stack = context.uc_stack;
    let (low, high) = (stack.ss_sp as usize, stack.ss_sp as usize + stack.ss_size);
    let is_in = |at: usize| (low + 1..=high).contains(&at);
    let sp = context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    // SAFETY: the thread is one of a guest, and nothing abandoned here needs to be dropped; the kernel's
    // structures are as long as they say. The frame is where the kernel's would be.
    unsafe {
        let thread = Thread::current();
        let has_own = stack.ss_sp != thread.spare_stack().ss_sp;
        let changes = action.flags & libc::SA_ONSTACK as u64 != 0 && has_own && !is_in(sp);
        let top = if changes { high } else { sp - RED_ZONE };
        let state = context.uc_mcontext.fpregs as usize;
        let new_state = (top - length_of(state)) & !63;
        let new_info = new_state - INFO_BYTES;
        // At the entry of a function the stack is aligned except for the return address.
        let new_context = (new_info - CONTEXT_BYTES) & !15;
        let frame = new_context - size_of::<usize>();
        if is_in(top) && frame < low || action.restorer == 0 {
            return chained::without_handler(libc::SIG_DFL, (*info).si_code);
        }
        chained::is_called(action);
        let mut interrupted = *context;
        interrupted.uc_mcontext.fpregs = new_state as *mut _;
        let mut bytes = thread.begins.take().map_or_else(Vec::new, |begins| begins.1);
        bytes.clear();
        bytes.extend_from_slice(&action.restorer.to_ne_bytes());
        let parts = [
            (new_context, &raw const interrupted as usize, CONTEXT_BYTES),
            (new_info, info as usize, INFO_BYTES),
            (new_state, state, length_of(state)),
        ];
        for (at, from, length) in parts {
            bytes.resize(at - frame, 0);
            bytes.extend_from_slice(std::slice::from_raw_parts(from as *const u8, length));
        }
        let mut begins = *context;
        // As the kernel sets them for a handler.
        begins.uc_mcontext.fpregs = std::ptr::null_mut();
        let registers = &mut begins.uc_mcontext.gregs;
        for (place, value) in [
            (libc::REG_RDI, libc::SIGSYS as usize),
            (libc::REG_RSI, new_info),
            (libc::REG_RDX, new_context),
            (libc::REG_RAX, 0),
            (libc::REG_RSP, frame),
            (libc::REG_RIP, action.handler),
        ] {
            registers[place as usize] = value as i64;
        }
        registers[libc::REG_EFL as usize] &= !FLAGS;
        let blocked = masks::without_trap(mask_of(context) | action.mask);
        (&raw mut begins.uc_sigmask).cast::<u64>().write(blocked);
        let begins = thread.begins.insert(Box::new((begins, bytes)));
        Thread::handle(frame, begins)
    }
}
