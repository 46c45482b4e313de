//! The handler of `SIGSYS`, for x86-64.

use super::chained::{self, KernelAction};
use super::{masks, stack, threads};
use crate::guard::{checked, errno, set_errno, system_call};
use crate::hooks::exec;
use crate::hooks::numbers::{self, Arguments, Whose};
use crate::table::real;
use crate::{descriptors, report, waits};
use libc::{c_int, c_long, c_void, siginfo_t, ucontext_t};
use std::sync::atomic::{AtomicUsize, Ordering};
use towline_instance::notes::Note;

/// `si_code` of a trapped system call.
pub(crate) const SYS_USER_DISPATCH: c_int = 2;
/// Offset of the architecture of the call in `siginfo_t`.
const ARCHITECTURE_AT: usize = 28;
const ARCHITECTURE: u32 = 0xc000_003e;

/// libc's return from a signal handler; it lies in the code that is not trapped.
static WAY_BACK: AtomicUsize = AtomicUsize::new(0);

/// Installs our handler for `SIGSYS`; returns false on failure.
pub(super) fn install() -> bool {
    // SAFETY: all zero is valid for all of these; the structures outlive the calls.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = on_signal as *const () as usize;
        // Use the program's signal stack if it has one: its current stack may be very short.
        new.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK | libc::SA_RESTART;
        let mut old: libc::sigaction = std::mem::zeroed();
        if real::sigaction(libc::SIGSYS, &raw const new, &raw mut old) != 0 {
            return false;
        }
        chained::exchange(KernelAction {
            handler: old.sa_sigaction,
            flags: old.sa_flags as u64,
            restorer: 0,
            mask: (&raw const old.sa_mask).cast::<u64>().read(),
        });
        let mut ours = KernelAction::default();
        let get = [libc::SIGSYS as usize, 0, &raw mut ours as usize, masks::SET_BYTES, 0, 0];
        if checked(libc::SYS_rt_sigaction, get).is_err() || ours.restorer == 0 {
            return false;
        }
        WAY_BACK.store(ours.restorer, Ordering::Relaxed);
        // Resolve the symbol: the linker must not be called from within a trapped call.
        real::syscall(libc::SYS_getpid, 0, 0, 0, 0, 0, 0);
        true
    }
}

unsafe extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let errno = errno();
    // SAFETY: the kernel passes both; the offset lies within the structure.
    unsafe {
        if (*info).si_code != SYS_USER_DISPATCH {
            return chained::pass_on(signal, info, context);
        }
        let context = &mut *context.cast::<ucontext_t>();
        if is_narrow(info) {
            context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
        } else {
            answer(context);
        }
    }
    set_errno(errno);
}

/// Returns true for a 32-bit call, made by `int 0x80`.
///
/// # Safety
/// `info` is what the kernel passed to a handler.
pub(crate) unsafe fn is_narrow(info: *const siginfo_t) -> bool {
    // SAFETY: the offset lies within the structure.
    unsafe { info.cast::<u8>().add(ARCHITECTURE_AT).cast::<u32>().read() != ARCHITECTURE }
}

/// Returns the number and arguments of the call in the registers.
pub(crate) fn call_of(context: &ucontext_t) -> (c_long, Arguments) {
    let registers = &context.uc_mcontext.gregs;
    let word = |register: c_int| registers[register as usize] as usize;
    let arguments = [
        word(libc::REG_RDI),
        word(libc::REG_RSI),
        word(libc::REG_RDX),
        word(libc::REG_R10),
        word(libc::REG_R8),
        word(libc::REG_R9),
    ];
    (word(libc::REG_RAX) as c_long, arguments)
}

/// Answers the call in the registers.
unsafe fn answer(context: &mut ucontext_t) {
    let (number, arguments) = call_of(context);
    let registers = &mut context.uc_mcontext.gregs;
    // SAFETY: the arguments are those of the program.
    let result = unsafe {
        match number {
            libc::SYS_rt_sigreturn => {
                // The program returns from a handler itself: do the same from untrapped code.
                registers[libc::REG_RIP as usize] = WAY_BACK.load(Ordering::Relaxed) as i64;
                return;
            }
            libc::SYS_rt_sigaction => chained::kernel_sigaction(arguments),
            libc::SYS_rt_sigprocmask => change_mask(context, arguments),
            libc::SYS_rt_sigsuspend
            | libc::SYS_ppoll
            | libc::SYS_pselect6
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2 => masks::wait(number, arguments, system_call),
            libc::SYS_sigaltstack => change_stack(context, arguments),
            libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
                new_task(context, number, arguments)
            }
            _ => any_other(number, arguments),
        }
    };
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result as i64;
}

/// Answers a call that does not change how the program continues.
unsafe fn any_other(number: c_long, arguments: Arguments) -> isize {
    report::counted_trap(number, || {
        // SAFETY: as the program says.
        unsafe { answer_any(number, arguments) }
    })
}

unsafe fn answer_any(number: c_long, arguments: Arguments) -> isize {
    // SAFETY: as the program says.
    unsafe {
        let whose = numbers::whose(number, arguments);
        if whose == Whose::Ours {
            return ours(number, arguments);
        }
        let result = system_call(number, arguments);
        if whose == Whose::Looked && result == -(libc::ENOENT as isize) {
            return ours(number, arguments);
        }
        numbers::done_by_kernel(number, result);
        result
    }
}

/// Answers a call of ours on our own stack. Signal handlers wait meanwhile: they could be given the signal
/// stack that we left.
unsafe fn ours(number: c_long, arguments: Arguments) -> isize {
    let result = waits::trapped(|| {
        // SAFETY: as the program says.
        let done = stack::on_own(|| match unsafe { numbers::carry_out(number, arguments) } {
            -1 => -(errno() as isize),
            result => result as isize,
        });
        done.unwrap_or(-(libc::ENOMEM as isize))
    });
    if result == -(waits::OPEN as isize) {
        // SAFETY: the path outlives the call.
        return waits::open_now(|number, arguments| unsafe { system_call(number, arguments) });
    }
    result
}

/// Answers `rt_sigprocmask`: changes the mask that the program returns to.
pub(crate) unsafe fn change_mask(
    context: &mut ucontext_t,
    [how, set, old, bytes, ..]: Arguments,
) -> isize {
    if bytes != masks::SET_BYTES {
        return -(libc::EINVAL as isize);
    }
    let current = (&raw mut context.uc_sigmask).cast::<u64>();
    // SAFETY: the kernel's sets have these bytes and libc's begin with them; the others are null or valid
    // by the program's guarantee.
    unsafe {
        let before = *current;
        if let Some(set) = (set as *const u64).as_ref() {
            *current = masks::without_trap(match how as c_int {
                libc::SIG_BLOCK => before | *set,
                libc::SIG_UNBLOCK => before & !*set,
                libc::SIG_SETMASK => *set,
                _ => return -(libc::EINVAL as isize),
            });
        }
        if let Some(old) = (old as *mut u64).as_mut() {
            *old = before;
        }
    }
    0
}

/// Flag of a signal stack that handlers may leave; the only one besides the stack's state.
const SS_AUTODISARM: c_int = 1 << 31;

/// Answers `sigaltstack`: changes the setting that the program returns to.
pub(crate) unsafe fn change_stack(context: &mut ucontext_t, [new, old, ..]: Arguments) -> isize {
    let current = &mut context.uc_stack;
    let at = context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    // A new program may inherit its parent's flags without the stack.
    let is_none = current.ss_flags & libc::SS_DISABLE != 0 || current.ss_size == 0;
    let from = current.ss_sp as usize;
    let is_on = !is_none && (from..from + current.ss_size).contains(&at);
    // SAFETY: each is null or a structure, as the program says.
    unsafe {
        let before = *current;
        if let Some(new) = (new as *const libc::stack_t).as_ref() {
            if is_on {
                return -(libc::EPERM as isize);
            }
            if ![0, libc::SS_ONSTACK, libc::SS_DISABLE].contains(&(new.ss_flags & !SS_AUTODISARM)) {
                return -(libc::EINVAL as isize);
            }
            if new.ss_flags & libc::SS_DISABLE == 0 && new.ss_size < libc::MINSIGSTKSZ {
                return -(libc::ENOMEM as isize);
            }
            *current = *new;
        }
        if let Some(old) = (old as *mut libc::stack_t).as_mut() {
            *old = before;
            old.ss_flags = if is_none {
                libc::SS_DISABLE
            } else if is_on {
                libc::SS_ONSTACK
            } else {
                0
            };
        }
    }
    0
}

/// The part of `struct clone_args` that we use.
#[repr(C)]
#[derive(Clone, Copy)]
struct CloneArguments {
    flags: u64,
    pid_fd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_bytes: u64,
}

/// Answers a call that creates a process or thread.
unsafe fn new_task(context: &mut ucontext_t, number: c_long, arguments: Arguments) -> isize {
    const SHARED: u64 = libc::CLONE_VM as u64;
    const WAITS: u64 = libc::CLONE_VFORK as u64;
    // SAFETY: as the program says.
    unsafe {
        let (flags, new_stack) = match number {
            libc::SYS_fork => (0, 0),
            libc::SYS_vfork => (SHARED | WAITS, 0),
            libc::SYS_clone => (arguments[0] as u64, arguments[1]),
            _ => {
                let how = arguments[0] as *const CloneArguments;
                if how.is_null() || arguments[1] < size_of::<CloneArguments>() {
                    return system_call(number, arguments);
                }
                let top = match (*how).stack {
                    0 => 0,
                    stack => stack.wrapping_add((*how).stack_bytes) as usize,
                };
                ((*how).flags, top)
            }
        };
        if flags & SHARED != 0 && new_stack != 0 {
            crate::vfork::has_own_threads();
            descriptors::share();
            stack::on_own(|| report::record_with(|| Note::Thread { program: report::program() }));
            return on_new_stack(context, number, arguments);
        }
        let child = if flags & (SHARED | WAITS) != 0 {
            // The wait comes after the fork: other threads would block on what is held around it while the
            // kernel waits.
            exec::and_wait(|| new_process(number, arguments))
        } else {
            new_process(number, arguments)
        };
        if child == 0 && new_stack != 0 {
            context.uc_mcontext.gregs[libc::REG_RSP as usize] = new_stack as i64;
        }
        child
    }
}

/// Creates a process with its own memory, even if it is to share its parent's: it returns through our
/// frames, on our stack. It has its own descriptors, too, as it closes our connections. Everything else is
/// as the program asked: the termination signal, namespaces, a pidfd.
unsafe fn new_process(number: c_long, mut arguments: Arguments) -> isize {
    let mut how = [0u8; CLONE_BYTES_MAX];
    let number = match number {
        libc::SYS_clone3 => {
            // SAFETY: as long as the program says.
            let Some(asked) = (unsafe { copied(&mut how, arguments) }) else {
                return -(libc::E2BIG as isize);
            };
            let flags = asked.flags & !(threads::NOT_OF_FORKS as u64);
            put_back(&mut how, CloneArguments { flags, stack: 0, stack_bytes: 0, ..asked });
            arguments[0] = how.as_ptr() as usize;
            number
        }
        libc::SYS_clone => {
            arguments[0] &= !(threads::NOT_OF_FORKS as usize);
            arguments[1] = 0;
            number
        }
        _ => {
            arguments = [libc::SIGCHLD as usize, 0, 0, 0, 0, 0];
            libc::SYS_clone
        }
    };
    // SAFETY: as the program says.
    threads::forked(|| unsafe { system_call(number, arguments) })
}

/// Maximum size that we accept for the structure of `clone3`.
const CLONE_BYTES_MAX: usize = 256;

/// Copies the structure of `clone3`; returns `None` if it is too long.
unsafe fn copied(
    how: &mut [u8; CLONE_BYTES_MAX],
    [from, bytes, ..]: Arguments,
) -> Option<CloneArguments> {
    // SAFETY: as long as the program says, and at least as long as our structure, which the caller has
    // checked.
    unsafe {
        let copy = how.get_mut(..bytes)?;
        copy.copy_from_slice(std::slice::from_raw_parts(from as *const u8, bytes));
        Some(how.as_ptr().cast::<CloneArguments>().read_unaligned())
    }
}

/// Overwrites the beginning of the copy with changed arguments.
fn put_back(how: &mut [u8; CLONE_BYTES_MAX], asked: CloneArguments) {
    // SAFETY: the structure is shorter than the copy.
    unsafe { how.as_mut_ptr().cast::<CloneArguments>().write_unaligned(asked) }
}

/// Registers that a new task starts with, in the order in which it pops them.
const TAKEN: [c_int; 13] = [
    libc::REG_RBX,
    libc::REG_RBP,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
    libc::REG_RDI,
    libc::REG_RSI,
    libc::REG_RDX,
    libc::REG_R10,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_RIP,
];

/// Creates a task with its own stack. It continues after the program's call with the program's registers,
/// which it pops from its stack. It is not armed.
unsafe fn on_new_stack(context: &ucontext_t, number: c_long, mut arguments: Arguments) -> isize {
    const BYTES: usize = size_of::<[i64; TAKEN.len()]>();
    let registers = TAKEN.map(|register| context.uc_mcontext.gregs[register as usize]);
    let mut how = [0u8; CLONE_BYTES_MAX];
    // SAFETY: the new stack has room below its top, which the new task may overwrite anyway; the structure
    // of `clone3` is as long as the program says.
    unsafe {
        if number == libc::SYS_clone {
            arguments[1] -= BYTES;
            (arguments[1] as *mut [i64; TAKEN.len()]).write_unaligned(registers);
        } else {
            let Some(mut asked) = copied(&mut how, arguments) else {
                return -(libc::E2BIG as isize);
            };
            asked.stack_bytes = asked.stack_bytes.saturating_sub(BYTES as u64);
            put_back(&mut how, asked);
            let top = (asked.stack + asked.stack_bytes) as *mut [i64; TAKEN.len()];
            top.write_unaligned(registers);
            arguments[0] = how.as_ptr() as usize;
        }
        crate::guard::unguarded(|| clone(number, arguments))
    }
}

/// Makes the system call; the new task never returns from here.
unsafe fn clone(number: c_long, [a, b, c, d, e, f]: Arguments) -> isize {
    let result;
    // SAFETY: the parent continues as after any system call; the child pops its registers from the stack
    // that the caller prepared, and leaves.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "pop rbx",
            "pop rbp",
            "pop r12",
            "pop r13",
            "pop r14",
            "pop r15",
            "pop rdi",
            "pop rsi",
            "pop rdx",
            "pop r10",
            "pop r8",
            "pop r9",
            "pop rcx",
            "jmp rcx",
            "2:",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}
