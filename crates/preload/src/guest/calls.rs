//! Answers the system calls of a guest.

use super::switch::{self, Thread};
use super::{deliver, frame, heap, threads};
use crate::guard::{errno, handled_signals, mask, set_quiet, system_call};
use crate::hooks::numbers::{self, Arguments, Whose};
use crate::trap::chained;
use crate::trap::handler::{self, SYS_USER_DISPATCH};
use crate::trap::{masks, stack};
use crate::{report, waits};
use libc::{c_int, c_long, c_void, siginfo_t, ucontext_t};
use std::sync::atomic::{AtomicU32, Ordering};

/// Length of a system call instruction in bytes.
const CALL_BYTES: i64 = 2;

/// Body of the handler of `SIGSYS`, with our FS and all signals blocked. `in_guest`: the guest's code was
/// interrupted, not ours.
pub(super) unsafe extern "C" fn answer(
    _: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
    in_guest: bool,
) {
    // SAFETY: the kernel passes both.
    unsafe {
        let context = &mut *context.cast::<ucontext_t>();
        if (*info).si_code != SYS_USER_DISPATCH {
            return deliver::deliver(info, context, in_guest);
        }
        if handler::is_narrow(info) {
            context.uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
            return;
        }
        let (number, arguments) = handler::call_of(context);
        if let Some(result) = call(context, number, arguments) {
            context.uc_mcontext.gregs[libc::REG_RAX as usize] = result as i64;
        }
    }
}

/// Answers a call; with `None`, execution continues with the registers in `context`.
unsafe fn call(context: &mut ucontext_t, number: c_long, arguments: Arguments) -> Option<isize> {
    let [first, second, ..] = arguments;
    // SAFETY: the arguments are those of the guest.
    let result = unsafe {
        match number {
            libc::SYS_rt_sigreturn => {
                switch::bare(context);
                return None;
            }
            libc::SYS_exit => {
                frame::tell();
                return end(context);
            }
            libc::SYS_arch_prctl => return registers(context, arguments),
            libc::SYS_prctl if first == masks::PR_SET_SYSCALL_USER_DISPATCH => {
                -(libc::EINVAL as isize)
            }
            libc::SYS_brk => heap::set_end(first) as isize,
            libc::SYS_munmap
                if (first..first.saturating_add(second)).contains(&stack_of(context)) =>
            {
                // A detached thread of musl unmaps its own stack before it ends.
                Thread::current().unmaps = first..first + second;
                0
            }
            libc::SYS_set_tid_address if !Thread::current().is_first => {
                Thread::current().clears = first as *mut c_int;
                system_call(libc::SYS_gettid, [0; 6])
            }
            libc::SYS_rt_sigaction => chained::kernel_sigaction(arguments),
            libc::SYS_rt_sigprocmask => handler::change_mask(context, arguments),
            libc::SYS_rt_sigsuspend
            | libc::SYS_ppoll
            | libc::SYS_pselect6
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2 => {
                if !masks::has_mask(number, arguments) {
                    switch::pass(context);
                    return None;
                }
                masks::wait(number, arguments, |number, arguments| switch::wait(number, &arguments))
            }
            libc::SYS_sigaltstack => change_stack(context, arguments),
            // Programs then fall back to `clone`.
            libc::SYS_clone3 => -(libc::ENOSYS as isize),
            libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone => {
                threads::new_task(context, number, arguments)
            }
            libc::SYS_exit_group | libc::SYS_execve | libc::SYS_execveat => {
                frame::tell();
                return report::counted_trap(number, || any_other(context, number, arguments));
            }
            _ => return report::counted_trap(number, || any_other(context, number, arguments)),
        }
    };
    Some(result)
}

fn stack_of(context: &ucontext_t) -> usize {
    context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
}

/// Ends a thread.
unsafe fn end(context: &mut ucontext_t) -> Option<isize> {
    // SAFETY: nothing here needs to be dropped.
    unsafe {
        if Thread::current().is_first {
            switch::bare(context);
            return None;
        }
        mask(libc::SIG_SETMASK, u64::MAX);
        Thread::leave()
    }
}

/// Answers `arch_prctl`: FS belongs to the guest, GS to us.
unsafe fn registers(context: &mut ucontext_t, [what, value, ..]: Arguments) -> Option<isize> {
    const SET_GS: usize = 0x1001;
    const SET_FS: usize = 0x1002;
    const GET_FS: usize = 0x1003;
    const GET_GS: usize = 0x1004;
    // SAFETY: room for a word, as the guest says.
    unsafe {
        match what {
            SET_FS => Thread::current().its = value,
            GET_FS => (value as *mut usize).write_unaligned(Thread::current().its),
            SET_GS | GET_GS => return Some(-(libc::EPERM as isize)),
            _ => {
                switch::pass(context);
                return None;
            }
        }
    }
    Some(0)
}

/// Answers `sigaltstack`: while the guest has no signal stack, the kernel has one of ours.
unsafe fn change_stack(context: &mut ucontext_t, arguments: Arguments) -> isize {
    // SAFETY: the thread is one of a guest; the arguments are its own.
    unsafe {
        let spare = Thread::current().spare_stack();
        let current = &mut context.uc_stack;
        if current.ss_sp == spare.ss_sp {
            current.ss_flags = libc::SS_DISABLE;
        }
        let result = handler::change_stack(context, arguments);
        let current = &mut context.uc_stack;
        if current.ss_flags & libc::SS_DISABLE != 0 || current.ss_size == 0 {
            *current = spare;
        }
        if result == 0 && arguments[0] != 0 {
            // Change it here, and from another stack: the kernel does not change a signal stack that is in
            // use, even on return from a handler, and the spare one may be.
            stack::change_signal_stack(current);
        }
        result
    }
}

/// Answers a call that does not change how the guest continues.
unsafe fn any_other(
    context: &mut ucontext_t,
    number: c_long,
    mut arguments: Arguments,
) -> Option<isize> {
    // SAFETY: as the guest says.
    unsafe {
        if let Some(interrupted) = readiness(context, number, arguments) {
            return interrupted;
        }
        let own = super::own_name(number, &mut arguments);
        if super::asks_own_name(number, arguments) {
            return ours(context, number, arguments);
        }
        let whose = numbers::whose(number, arguments);
        let answered_here = match whose {
            Whose::Ours => return ours(context, number, arguments),
            // It may wait, and handlers of the guest then run.
            Whose::Looked => !waits_for_others(number, arguments),
            Whose::Kernels => numbers::gives_descriptor(number),
        };
        if !answered_here && !own {
            switch::pass(context);
            return None;
        }
        let Some(result) = deliver::filtered(|| system_call(number, arguments)) else {
            switch::pass(context);
            return None;
        };
        if whose == Whose::Looked && result == -(libc::ENOENT as isize) {
            return ours(context, number, arguments);
        }
        numbers::done_by_kernel(number, result);
        Some(result)
    }
}

/// Waits until a message can be sent or received, with handlers of the guest enabled: they wait while we
/// answer the call itself. A returned value ends the call or restarts it.
unsafe fn readiness(
    context: &mut ucontext_t,
    number: c_long,
    arguments: Arguments,
) -> Option<Option<isize>> {
    let (receives, flags) = match number {
        libc::SYS_recvmsg => (true, arguments[2]),
        libc::SYS_recvmmsg => (true, arguments[3]),
        libc::SYS_sendmsg => (false, arguments[2]),
        libc::SYS_sendmmsg => (false, arguments[3]),
        _ => return None,
    };
    // Errors and urgent data are received at once or not at all.
    let (events, limit, at_once) = if receives {
        (libc::POLLIN, libc::SO_RCVTIMEO, libc::MSG_ERRQUEUE | libc::MSG_OOB)
    } else {
        (libc::POLLOUT, libc::SO_SNDTIMEO, 0)
    };
    let fd = arguments[0];
    // SAFETY: plain calls; the list, the set and the time outlive the last.
    unsafe {
        let status = system_call(libc::SYS_fcntl, [fd, libc::F_GETFL as usize, 0, 0, 0, 0]);
        let is_free = (flags as c_int & (libc::MSG_DONTWAIT | at_once))
            | (status as c_int & libc::O_NONBLOCK);
        if status < 0 || is_free != 0 {
            return None;
        }
        // What is no socket has no time limit either, and the call fails.
        let limit = time_limit(fd, limit)?;
        let is_limited = limit.tv_sec != 0 || limit.tv_nsec != 0;
        let time = if is_limited { &raw const limit as usize } else { 0 };
        let mut list = [libc::pollfd { fd: fd as c_int, events, revents: 0 }];
        let set = (&raw const context.uc_sigmask).cast::<u64>().read();
        let (list, set) = (list.as_mut_ptr() as usize, &raw const set as usize);
        let done = switch::wait(libc::SYS_ppoll, &[list, 1, time, set, masks::SET_BYTES, 0]);
        if done == 0 {
            return Some(Some(-(libc::EAGAIN as isize)));
        }
        (done == -(libc::EINTR as isize)).then(|| {
            // The kernel does not restart a call that has a time limit.
            if is_limited || handled_signals().interrupting != 0 {
                return Some(done);
            }
            begin_anew(context)
        })
    }
}

/// Returns how long a socket may wait, which is zero if there is no limit; `None` for what is no socket.
/// `option` is `SO_RCVTIMEO` or `SO_SNDTIMEO`.
fn time_limit(fd: usize, option: c_int) -> Option<libc::timespec> {
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut bytes = size_of_val(&time) as libc::socklen_t;
    let places = [&raw mut time as usize, &raw mut bytes as usize];
    let call = [fd, libc::SOL_SOCKET as usize, option as usize, places[0], places[1], 0];
    // SAFETY: both outlive the call.
    let done = unsafe { system_call(libc::SYS_getsockopt, call) };
    (done == 0).then_some(libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec * 1000 })
}

/// Restarts the call, whose registers are unchanged.
fn begin_anew(context: &mut ucontext_t) -> Option<isize> {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] -= CALL_BYTES;
    None
}

/// Returns true for a call that opens a named pipe or a terminal, which may wait.
unsafe fn waits_for_others(number: c_long, arguments: Arguments) -> bool {
    let (at, path) = match number {
        libc::SYS_open => (libc::AT_FDCWD as usize, arguments[0]),
        libc::SYS_openat | libc::SYS_openat2 => (arguments[0], arguments[1]),
        _ => return false,
    };
    // SAFETY: all zero is a valid `stat`; the path is as the guest says.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        let call = [at, path, &raw mut status as usize, 0, 0, 0];
        system_call(libc::SYS_newfstatat, call) == 0
            && matches!(status.st_mode & libc::S_IFMT, libc::S_IFIFO | libc::S_IFCHR)
    }
}

/// Numbers of threads that answer a call with the mask of an even or an odd generation.
static ANSWERING: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
/// The generation of masks with which threads begin now.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// How often [`outdate_masks`] looks, a millisecond each: a thread may wait for a dead server.
const LOOKS_MAX: u32 = 5000;

/// Begins to answer with a mask that has all signals with handlers; returns its generation.
fn begin_masked(blocked: u64) -> usize {
    loop {
        let generation = GENERATION.load(Ordering::SeqCst);
        let parity = generation as usize % 2;
        ANSWERING[parity].fetch_add(1, Ordering::SeqCst);
        if GENERATION.load(Ordering::SeqCst) == generation {
            mask(libc::SIG_SETMASK, blocked | handled_signals().all | masks::held_up());
            return parity;
        }
        ANSWERING[parity].fetch_sub(1, Ordering::SeqCst);
    }
}

/// Forgets the other threads, in the child of a fork.
pub(crate) fn forget() {
    ANSWERING.iter().for_each(|count| count.store(0, Ordering::Relaxed));
}

/// Called when one more signal has to be blocked while a call is answered: waits until no other thread answers one
/// with the mask from before.
pub(crate) fn outdate_masks() {
    let old = GENERATION.fetch_add(1, Ordering::SeqCst) as usize % 2;
    for _ in 0..LOOKS_MAX {
        if ANSWERING[old].load(Ordering::SeqCst) == 0 {
            break;
        }
        waits::recall();
        towline_net::pause(towline_net::MOMENT);
    }
}

/// Answers a call of ours on our own stack. Signals with handlers wait meanwhile; others take effect.
unsafe fn ours(context: &mut ucontext_t, number: c_long, arguments: Arguments) -> Option<isize> {
    // SAFETY: the kernel's sets have 8 bytes, and libc's begin with them.
    let blocked = unsafe { (&raw const context.uc_sigmask).cast::<u64>().read() };
    let generation = begin_masked(blocked);
    let quiet = set_quiet(true);
    let answered = || {
        // SAFETY: as the guest says.
        let done = stack::on_own(|| match unsafe { numbers::carry_out(number, arguments) } {
            -1 => -(errno() as isize),
            result => result as isize,
        });
        done.unwrap_or(-(libc::ENOMEM as isize))
    };
    // SAFETY: the thread is one of a guest.
    let result = unsafe { deliver::filtered(|| waits::answering(blocked, answered)) };
    set_quiet(quiet);
    mask(libc::SIG_SETMASK, u64::MAX);
    ANSWERING[generation].fetch_sub(1, Ordering::SeqCst);
    let Some(result) = result else {
        // SAFETY: the context of a trapped call.
        unsafe { switch::pass(context) };
        return None;
    };
    if result == -(waits::OPEN as isize) {
        return Some(waits::open_now(|number, arguments| {
            // SAFETY: the path outlives the call.
            unsafe { switch::unmasked(number, &arguments, blocked) }
        }));
    }
    if result == -(waits::RESTART as isize) {
        // After the handlers have run.
        return begin_anew(context);
    }
    Some(result)
}
