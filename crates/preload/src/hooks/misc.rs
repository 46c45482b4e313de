//! Hooks that fit nowhere else: `ioctl`, standard descriptors that libc replaces, descriptors in messages,
//! signal handlers.

use super::sockets;
use crate::between;
use crate::descriptors;
use crate::guard::{self, Disposition, finish, inside};
use crate::handlers;
use crate::place;
use crate::table::real;
use crate::trap;
use crate::working;
use libc::{c_char, c_int, c_uint, c_ulong, c_void, mmsghdr, msghdr, pid_t, ssize_t, timespec};
use std::sync::atomic::Ordering;

pub(crate) unsafe fn ioctl(fd: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    const FICLONE: c_ulong = 0x4004_9409;
    const FICLONERANGE: c_ulong = 0x4020_940d;
    let open = descriptors::find(fd);
    if open.is_some_and(crate::remote::is_path) {
        return finish(Err(libc::EBADF));
    }
    let at = argument as *mut c_int;
    match (request, open) {
        (libc::FIOCLEX | libc::FIONCLEX, _) => {}
        (FICLONE, _) if open.is_some() || descriptors::find(argument as c_int).is_some() => {
            return finish(Err(libc::EOPNOTSUPP));
        }
        (FICLONERANGE, Some(_)) => return finish(Err(libc::EOPNOTSUPP)),
        (libc::FIONREAD | libc::FIONBIO, Some(_)) if !place::is_address(at.cast()) => {
            return finish(Err(libc::EFAULT));
        }
        (libc::FIONREAD, Some(open)) => {
            return guard::ours(|| {
                let offset = crate::remote::offset(open);
                let rest = (crate::remote::stat(open)?.size as i64 - offset).max(0);
                // SAFETY: the argument of `FIONREAD` is the address of an int.
                unsafe { *at = rest.min(i64::from(i32::MAX)) as c_int };
                Ok(0)
            });
        }
        (libc::FIONBIO, Some(open)) => {
            let (flags, nonblocking) = (&open.entry.flags, libc::O_NONBLOCK as u32);
            // SAFETY: the argument of `FIONBIO` is the address of an int.
            match unsafe { *at } {
                0 => flags.fetch_and(!nonblocking, Ordering::Relaxed),
                _ => flags.fetch_or(nonblocking, Ordering::Relaxed),
            };
            return 0;
        }
        (_, Some(_)) => return finish(Err(libc::ENOTTY)),
        _ => {}
    }
    // SAFETY: the program passes valid arguments.
    unsafe { real::ioctl(fd, request, argument) }
}

/// libc writes the lines internally, so for a remote file it writes them to a file in memory first. As in
/// libc's own function, nothing is allocated: crash handlers call it.
pub(crate) unsafe fn backtrace_symbols_fd(frames: *const *mut c_void, count: c_int, fd: c_int) {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::backtrace_symbols_fd(frames, count, fd) };
    };
    let name = c"backtrace".as_ptr() as usize;
    let create = [name, libc::MFD_CLOEXEC as usize, 0, 0, 0, 0];
    // SAFETY: the name ends with a zero byte; the new file is closed again, and nothing else uses it.
    unsafe {
        let Ok(lines) = guard::checked(libc::SYS_memfd_create, create) else { return };
        real::backtrace_symbols_fd(frames, count, lines as c_int);
        let mut text = [0u8; 512];
        let mut at = 0;
        while let Ok(read @ 1..) = guard::checked(
            libc::SYS_pread64,
            [lines, text.as_mut_ptr() as usize, text.len(), at, 0, 0],
        ) {
            at += read;
            if inside(|| crate::remote::write(open, &text[..read])).is_err() {
                break;
            }
        }
        let _ = guard::checked(libc::SYS_close, [lines, 0, 0, 0, 0, 0]);
    }
}

/// libc changes the directory and replaces the standard descriptors internally.
pub(crate) unsafe fn daemon(stays: c_int, keeps: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    let result = guard::undisturbed(|| unsafe { real::daemon(stays, keeps) });
    if crate::start::state().is_some() {
        let _ = inside(|| {
            if stays == 0 {
                working::inherit();
            }
            Ok(())
        });
    }
    if keeps == 0 && result == 0 {
        forget_standard();
    }
    result
}

/// Called after libc has replaced the standard descriptors internally.
fn forget_standard() {
    let _ = inside(|| {
        (0..=2).for_each(descriptors::forget);
        Ok(())
    });
}

pub(crate) unsafe fn login_tty(fd: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    let result = unsafe { real::login_tty(fd) };
    if result == 0 {
        forget_standard();
    }
    result
}

pub(crate) unsafe fn forkpty(
    main: *mut c_int,
    name: *mut c_char,
    settings: *const c_void,
    size: *const c_void,
) -> pid_t {
    // SAFETY: the program passes valid arguments.
    let child = guard::undisturbed(|| unsafe { real::forkpty(main, name, settings, size) });
    if child == 0 {
        forget_standard();
    }
    child
}

/// Calls `each` with the descriptors in the control part of a message.
unsafe fn each_descriptor(message: *const msghdr, mut each: impl FnMut(c_int)) {
    // SAFETY: the program passes a message; the macros stay within its control part.
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

/// Most messages that one call takes, as in Linux (`UIO_MAXIOV`).
const MESSAGES_MAX: usize = 1024;

fn looks_at_messages() -> bool {
    crate::start::state().is_some() && !guard::is_inside()
}

/// Marks the remote files whose descriptors a message is about to take to another process.
unsafe fn sending(message: *const msghdr) {
    // SAFETY: the program passes valid arguments.
    unsafe {
        each_descriptor(message, |fd| {
            if let Some(open) = descriptors::find(fd) {
                open.entry.shared.store(1, std::sync::atomic::Ordering::Relaxed);
            }
        });
    }
}

/// Returns the room that a message has for the sender's name.
unsafe fn room_of(message: *const msghdr) -> libc::socklen_t {
    // SAFETY: the program passes null or a message.
    unsafe { message.as_ref() }.map_or(0, |message| message.msg_namelen)
}

/// Adopts the descriptors that came in a message, and corrects the sender's name, which had `room`.
unsafe fn received(message: *mut msghdr, room: libc::socklen_t) {
    // SAFETY: the program passes valid arguments.
    unsafe {
        (*message).msg_namelen = sockets::told((*message).msg_name, room, (*message).msg_namelen);
        each_descriptor(message, |fd| {
            let _ = inside(|| {
                descriptors::forget(fd);
                descriptors::adopt(fd);
                Ok(())
            });
        });
    }
}

pub(crate) unsafe fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if looks_at_messages() {
            sending(message);
        }
        let Some(own) = message.as_ref().filter(|own| !own.msg_name.is_null()) else {
            return real::sendmsg(fd, message, flags);
        };
        sockets::to(own.msg_name, own.msg_namelen, |address, length| {
            let mut named = *own;
            (named.msg_name, named.msg_namelen) = (address.cast_mut(), length);
            real::sendmsg(fd, &raw const named, flags)
        })
    }
}

pub(crate) unsafe fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let room = room_of(message);
        let result = real::recvmsg(fd, message, flags);
        if result >= 0 && looks_at_messages() {
            received(message, room);
        }
        result
    }
}

/// Sends messages one after another, as each may go to a remote name. Returns how many were sent; -1 if the
/// first one was not.
unsafe fn one_by_one(
    fd: c_int,
    messages: impl Iterator<Item = *mut mmsghdr>,
    flags: c_int,
) -> c_int {
    let mut sent = 0;
    for message in messages {
        // SAFETY: the program passes valid arguments.
        match unsafe { sendmsg(fd, &raw const (*message).msg_hdr, flags) } {
            // SAFETY: as above.
            length @ 0.. => unsafe { (*message).msg_len = length as c_uint },
            _ if sent > 0 => return sent,
            _ => return -1,
        }
        sent += 1;
    }
    sent
}

pub(crate) unsafe fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if looks_at_messages() && !messages.is_null() {
            let all = (0..(count as usize).min(MESSAGES_MAX)).map(|index| messages.add(index));
            let is_named = |message: *mut mmsghdr| {
                let head = &(*message).msg_hdr;
                sockets::path_of(head.msg_name, head.msg_namelen).is_some()
            };
            if all.clone().any(is_named) {
                return one_by_one(fd, all, flags);
            }
            all.for_each(|message| sending(&raw const (*message).msg_hdr));
        }
        real::sendmmsg(fd, messages, count, flags)
    }
}

pub(crate) unsafe fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    time: *mut timespec,
) -> c_int {
    // SAFETY: the program passes valid arguments; the call has filled in as many messages as it returned.
    unsafe {
        if !looks_at_messages() || messages.is_null() {
            return real::recvmmsg(fd, messages, count, flags, time);
        }
        let places = 0..(count as usize).min(MESSAGES_MAX);
        let heads = places.map(|index| &raw mut (*messages.add(index)).msg_hdr);
        let rooms: Vec<_> = heads.clone().map(|message| room_of(message)).collect();
        let result = real::recvmmsg(fd, messages, count, flags, time);
        for (message, room) in heads.zip(rooms).take(result.max(0) as usize) {
            received(message, room);
        }
        result
    }
}

/// Returns true if a disposition is a function of the program.
pub(crate) fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN && handler != libc::SIG_ERR
}

fn disposition(signal: c_int, action: &libc::sigaction) -> Disposition {
    Disposition {
        has_handler: is_handler(action.sa_sigaction),
        interrupts: action.sa_flags & libc::SA_RESTART == 0,
        is_put_back: handlers::can_be_put_back(signal, action.sa_sigaction, action.sa_flags),
    }
}

pub(crate) unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    if let Some(done) = unsafe { trap::sigaction_of_program(signal, new, old) } {
        return done;
    }
    between::may_be_handled(signal);
    if crate::start::state().is_none() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::sigaction(signal, new, old) };
    }
    let before = handlers::known(signal);
    // SAFETY: the program passes null or a structure.
    let asked = unsafe { new.as_ref() }.map(|new| {
        let mut asked = *new;
        if trap::is_armed() {
            // SAFETY: the copy holds a valid set.
            unsafe { libc::sigdelset(&raw mut asked.sa_mask, libc::SIGSYS) };
        }
        (asked, disposition(signal, new))
    });
    // SAFETY: the program passes valid arguments.
    let result = unsafe {
        match &asked {
            Some((asked, now)) => {
                if now.has_handler {
                    // A mask holds the signal up until everything is in place.
                    guard::handled(signal, Disposition { is_put_back: false, ..*now });
                }
                if now.is_put_back {
                    handlers::install(signal, asked, old)
                } else {
                    real::sigaction(signal, &raw const *asked, old)
                }
            }
            None => real::sigaction(signal, new, old),
        }
    };
    if result == 0 {
        if let Some((_, now)) = asked {
            guard::handled(signal, now);
        }
        // SAFETY: the program passes null or a structure, which libc has filled in.
        if let Some(old) = unsafe { old.as_mut() } {
            (old.sa_sigaction, old.sa_flags) = before.told(old.sa_sigaction, old.sa_flags);
        }
    }
    result
}

/// Calls one of the old functions that set a handler, and then does what `sigaction` does for it.
unsafe fn set_by(signal: c_int, set: impl FnOnce() -> usize) -> usize {
    if crate::start::state().is_none() {
        return set();
    }
    between::may_be_handled(signal);
    let before = handlers::known(signal);
    // A mask holds the signal up until everything is in place.
    guard::handled(signal, Disposition { has_handler: true, interrupts: true, is_put_back: false });
    let result = set();
    // SAFETY: all zero is a valid structure; libc fills it in, and gets it back with the library's handler.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        if real::sigaction(signal, std::ptr::null(), &raw mut now) == 0 {
            // A handler that has not changed is the library's already.
            (now.sa_sigaction, now.sa_flags) = before.told(now.sa_sigaction, now.sa_flags);
            let disposition = disposition(signal, &now);
            if disposition.is_put_back {
                handlers::install(signal, &now, std::ptr::null_mut());
            }
            guard::handled(signal, disposition);
        }
    }
    before.told(result, 0).0
}

pub(crate) unsafe fn signal(signal: c_int, handler: usize) -> usize {
    if let Some(before) = trap::signal_of_program(signal, handler) {
        return before;
    }
    // SAFETY: the program passes valid arguments.
    unsafe { set_by(signal, || real::signal(signal, handler)) }
}

pub(crate) unsafe fn sysv_signal(signal: c_int, handler: usize) -> usize {
    if let Some(before) = trap::signal_of_program(signal, handler) {
        return before;
    }
    // SAFETY: the program passes valid arguments.
    unsafe { set_by(signal, || real::sysv_signal(signal, handler)) }
}

pub(crate) unsafe fn sigset(signal: c_int, handler: usize) -> usize {
    if let Some(before) = trap::signal_of_program(signal, handler) {
        return before;
    }
    // SAFETY: the program passes valid arguments.
    unsafe { set_by(signal, || real::sigset(signal, handler)) }
}

pub(crate) unsafe fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let result = real::siginterrupt(signal, interrupts);
        // libc has set the handler anew with changed flags.
        set_by(signal, || 0);
        result
    }
}
