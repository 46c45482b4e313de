//! Stacks on which trapped calls are answered: the program's may be short (Go's have 2 KiB, and signal
//! handlers use what `sigaltstack` was given).

use super::masks;
use crate::guard::{checked, mask, system_call};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

const STACK_BYTES: usize = 256 * 1024;
const PAGE: usize = 4096;
/// All signals but `SIGSYS`: the kernel kills a thread that has it blocked when a call is trapped.
const SIGNALS: u64 = !masks::BIT;
/// Stacks kept for the next calls; further ones are mapped and unmapped on demand.
static KEPT: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

/// Runs `work` on a stack of our own; returns `None` if there is no memory for one. Only for answers to
/// trapped calls. Disables the alternate signal stack meanwhile, which is perhaps the one that is left: a handler
/// running there would overwrite its contents. No signal arrives between the two.
pub(crate) fn on_own<T>(work: impl FnOnce() -> T) -> Option<T> {
    let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
    let mut before = none;
    let held_up = mask(libc::SIG_BLOCK, SIGNALS);
    let done = switched(|| {
        let call = [&raw const none as usize, &raw mut before as usize, 0, 0, 0, 0];
        // SAFETY: the structures outlive the call; this is another stack than the one that is left.
        unsafe { system_call(libc::SYS_sigaltstack, call) };
        mask(libc::SIG_SETMASK, held_up);
        work()
    });
    if done.is_none() {
        mask(libc::SIG_SETMASK, held_up);
    }
    if before.ss_flags & libc::SS_DISABLE == 0 {
        // Not left to the return from our handler: a handler of the program may jump out of the call.
        // SAFETY: the structure outlives the call and holds the previous setting.
        unsafe { system_call(libc::SYS_sigaltstack, [&raw const before as usize, 0, 0, 0, 0, 0]) };
    }
    done
}

/// Changes the alternate signal stack while it is in use, which the kernel refuses from this stack itself.
pub(crate) fn change_signal_stack(new: &libc::stack_t) {
    let held_up = mask(libc::SIG_BLOCK, SIGNALS);
    // SAFETY: the structure outlives the call.
    switched(|| unsafe {
        system_call(libc::SYS_sigaltstack, [std::ptr::from_ref(new) as usize, 0, 0, 0, 0, 0])
    });
    mask(libc::SIG_SETMASK, held_up);
}

/// Runs `work` on another stack. No signal may arrive while the one that is left is the alternate signal stack.
fn switched<T>(work: impl FnOnce() -> T) -> Option<T> {
    struct Job<W, T> {
        work: Option<W>,
        done: Option<T>,
    }
    unsafe extern "C" fn run<W: FnOnce() -> T, T>(job: *mut Job<W, T>) {
        // SAFETY: a job that lives until `switched` returns.
        let job = unsafe { &mut *job };
        if let Some(work) = job.work.take() {
            job.done = Some(work());
        }
    }
    fn entry<W: FnOnce() -> T, T>(_: &Job<W, T>) -> usize {
        run::<W, T> as *const () as usize
    }
    let stack = take()?;
    let mut job = Job { work: Some(work), done: None };
    let top = stack + STACK_BYTES;
    // SAFETY: the stack is ours alone and long enough. The code that runs there returns (`extern "C"` lets
    // no panic through), and the old stack is restored from a register that calls preserve.
    unsafe {
        std::arch::asm!(
            "xchg rsp, r12",
            "call {entry}",
            "mov rsp, r12",
            entry = in(reg) entry(&job),
            inout("r12") top => _,
            in("rdi") &raw mut job,
            clobber_abi("C"),
        );
    }
    give_back(stack);
    job.done
}

fn take() -> Option<usize> {
    let kept = KEPT.iter().map(|place| place.swap(0, Ordering::Acquire)).find(|stack| *stack != 0);
    kept.or_else(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let (access, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        let arguments = [0, STACK_BYTES, access as usize, flags as usize, usize::MAX, 0];
        // SAFETY: new memory, whose lowest page becomes the guard page.
        unsafe {
            let stack = checked(libc::SYS_mmap, arguments).ok()?;
            system_call(libc::SYS_mprotect, [stack, PAGE, none as usize, 0, 0, 0]);
            Some(stack)
        }
    })
}

fn give_back(stack: usize) {
    let is_kept = KEPT.iter().any(|place| {
        place.compare_exchange(0, stack, Ordering::Release, Ordering::Relaxed).is_ok()
    });
    if !is_kept {
        // SAFETY: made by `take`, and nothing runs on it any more.
        unsafe { system_call(libc::SYS_munmap, [stack, STACK_BYTES, 0, 0, 0, 0]) };
    }
}
