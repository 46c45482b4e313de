//! What fits nowhere else: ioctl, descriptors in messages, signals, raw system calls.

use crate::descriptors;
use crate::guard::{self, finish, inside};
use crate::table::real;
use libc::{c_int, c_long, c_ulong, c_void, msghdr, ssize_t};

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

fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN && handler != libc::SIG_ERR
}

pub(crate) unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: null or a structure, as the program says.
    if let Some(new) = unsafe { new.as_ref() }
        && is_handler(new.sa_sigaction)
    {
        guard::handled(signal, true);
    }
    // SAFETY: as the program says.
    let result = unsafe { real::sigaction(signal, new, old) };
    // SAFETY: null or a structure, as the program says.
    if result == 0
        // SAFETY: as the program says.
        && let Some(new) = unsafe { new.as_ref() }
    {
        guard::handled(signal, is_handler(new.sa_sigaction));
    }
    result
}

pub(crate) unsafe fn signal(signal: c_int, handler: usize) -> usize {
    if is_handler(handler) {
        guard::handled(signal, true);
    }
    // SAFETY: as the program says.
    let before = unsafe { real::signal(signal, handler) };
    if before != libc::SIG_ERR {
        guard::handled(signal, is_handler(handler));
    }
    before
}

/// `syscall(2)`: the calls that programs make this way for want of a function in older libcs.
#[allow(clippy::too_many_arguments)] // as many as a system call can have
pub(crate) unsafe fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    use super::{directories, exec, files, io, names, status};
    // SAFETY: as the program says.
    unsafe {
        if crate::start::state().is_some() && !guard::is_inside() {
            let result = match number {
                // Rings would read and write past us: programs fall back to ordinary calls.
                libc::SYS_io_uring_setup => finish(Err(libc::ENOSYS)),
                libc::SYS_openat => {
                    c_long::from(files::openat(a as c_int, b as _, c as c_int, d as u32))
                }
                libc::SYS_close => c_long::from(files::close(a as c_int)),
                libc::SYS_close_range => {
                    c_long::from(files::close_range(a as u32, b as u32, c as c_int))
                }
                libc::SYS_read => io::read(a as c_int, b as *mut c_void, c) as c_long,
                libc::SYS_write => io::write(a as c_int, b as *const c_void, c) as c_long,
                libc::SYS_pread64 => io::pread(a as c_int, b as *mut c_void, c, d as i64) as c_long,
                libc::SYS_pwrite64 => {
                    io::pwrite(a as c_int, b as *const c_void, c, d as i64) as c_long
                }
                libc::SYS_getdents64 => {
                    directories::getdents64(a as c_int, b as *mut c_void, c) as c_long
                }
                libc::SYS_statx => {
                    c_long::from(status::statx(a as c_int, b as _, c as c_int, d as u32, e as _))
                }
                libc::SYS_renameat2 => {
                    c_long::from(names::renameat2(a as c_int, b as _, c as c_int, d as _, e as u32))
                }
                libc::SYS_copy_file_range => {
                    io::copy_file_range(a as c_int, b as _, c as c_int, d as _, e, f as u32)
                        as c_long
                }
                libc::SYS_execve => c_long::from(exec::execve(a as _, b as _, c as _)),
                _ => real::syscall(number, a, b, c, d, e, f),
            };
            return result;
        }
        real::syscall(number, a, b, c, d, e, f)
    }
}
