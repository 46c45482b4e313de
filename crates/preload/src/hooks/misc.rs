//! What fits nowhere else: ioctl, descriptors in messages, signals.

use crate::descriptors;
use crate::guard::{self, finish, inside};
use crate::table::real;
use crate::trap;
use libc::{c_int, c_ulong, msghdr, ssize_t};

pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    const FICLONE: c_ulong = 0x4004_9409;
    const FICLONERANGE: c_ulong = 0x4020_940d;
    let is_remote = |fd| descriptors::find(fd).is_some();
    match request {
        libc::FIOCLEX | libc::FIONCLEX => {}
        FICLONE if is_remote(fd) || is_remote(argument as c_int) => {
            return finish(Err(libc::EOPNOTSUPP));
        }
        FICLONERANGE if is_remote(fd) => return finish(Err(libc::EOPNOTSUPP)),
        libc::FIONREAD if is_remote(fd) => {
            let Some(open) = descriptors::find(fd) else { return finish(Err(libc::EBADF)) };
            return guard::ours(|| {
                let offset = open.entry.offset.load(std::sync::atomic::Ordering::Relaxed);
                let rest = (crate::remote::stat(open)?.size as i64 - offset).max(0);
                // SAFETY: FIONREAD has a place for an int as argument.
                unsafe { *(argument as *mut c_int) = rest.min(i64::from(i32::MAX)) as c_int };
                Ok(0)
            });
        }
        _ if is_remote(fd) => return finish(Err(libc::ENOTTY)),
        _ => {}
    }
    // SAFETY: as the program says.
    unsafe { real::ioctl(fd, request, argument) }
}

/// Calls `each` with the descriptors in the control part of a message.
unsafe fn each_descriptor(message: *const msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: a message as the program says; the macros walk within its control part.
    unsafe {
        if message.is_null() || (*message).msg_control.is_null() {
            return;
        }
        let mut part = libc::CMSG_FIRSTHDR(message);
        while !part.is_null() {
            if (*part).cmsg_level == libc::SOL_SOCKET && (*part).cmsg_type == libc::SCM_RIGHTS {
                let head = libc::CMSG_LEN(0) as usize;
                let count = ((*part).cmsg_len as usize).saturating_sub(head) / size_of::<c_int>();
                let data = libc::CMSG_DATA(part).cast::<c_int>();
                for index in 0..count {
                    each(data.add(index).read_unaligned());
                }
            }
            part = libc::CMSG_NXTHDR(message, part);
        }
    }
}

pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if crate::start::state().is_some() && !guard::is_inside() {
        // SAFETY: as the program says.
        unsafe {
            each_descriptor(message, |fd| {
                if let Some(open) = descriptors::find(fd) {
                    open.entry.shared.store(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    }
    // SAFETY: as the program says.
    unsafe { real::sendmsg(fd, message, flags) }
}

pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: as the program says.
    let result = unsafe { real::recvmsg(fd, message, flags) };
    if result >= 0 && crate::start::state().is_some() && !guard::is_inside() {
        // SAFETY: as the program says.
        unsafe {
            each_descriptor(message, |fd| {
                let _ = inside(|| {
                    descriptors::forget(fd);
                    descriptors::adopt(fd);
                    Ok(())
                });
            });
        }
    }
    result
}

/// True when a disposition is a function of the program.
pub(crate) fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN && handler != libc::SIG_ERR
}

fn interrupts(action: &libc::sigaction) -> bool {
    action.sa_flags & libc::SA_RESTART == 0
}

pub(crate) unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: as the program says.
    if let Some(done) = unsafe { trap::sigaction_of_program(signal, new, old) } {
        return done;
    }
    // SAFETY: null or a structure, as the program says.
    if let Some(new) = unsafe { new.as_ref() }
        && is_handler(new.sa_sigaction)
    {
        guard::handled(signal, true, interrupts(new));
    }
    // SAFETY: null or a structure, as the program says.
    let result = match unsafe { new.as_ref() } {
        Some(asked) if trap::is_armed() => {
            let mut asked = *asked;
            // SAFETY: the copy holds a set.
            unsafe { libc::sigdelset(&raw mut asked.sa_mask, libc::SIGSYS) };
            // SAFETY: as the program says.
            unsafe { real::sigaction(signal, &raw const asked, old) }
        }
        // SAFETY: as the program says.
        _ => unsafe { real::sigaction(signal, new, old) },
    };
    // SAFETY: null or a structure, as the program says.
    if result == 0
        // SAFETY: as the program says.
        && let Some(new) = unsafe { new.as_ref() }
    {
        guard::handled(signal, is_handler(new.sa_sigaction), interrupts(new));
    }
    result
}

pub(crate) unsafe fn signal(signal: c_int, handler: usize) -> usize {
    if let Some(before) = trap::signal_of_program(signal, handler) {
        return before;
    }
    if is_handler(handler) {
        guard::handled(signal, true, false);
    }
    // SAFETY: as the program says.
    let before = unsafe { real::signal(signal, handler) };
    if before != libc::SIG_ERR {
        guard::handled(signal, is_handler(handler), false);
    }
    before
}
