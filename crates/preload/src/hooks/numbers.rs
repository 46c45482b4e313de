//! Answers system calls by number, made through `syscall(2)` or trapped (`trap/mod.rs`), with the same
//! functions as the calls of libc.

use super::{
    OpenHow, attributes, by_path, copies, directories, exec, files, identity, io, locks, maps,
    memory, misc, names, remap, sockets, status, watches, xattr,
};
use crate::guard::{self, errno, finish, set_errno};
use crate::table::real;
use crate::trap::threads;
use crate::{descriptors, place, start, working};
use libc::{AT_FDCWD, c_char, c_int, c_long};

/// No user: for calls that do not change the effective user.
const NOBODY: usize = u32::MAX as usize;

/// Arguments of a system call, at most six.
pub(crate) type Arguments = [usize; 6];

/// The part of a call that decides whether the library answers it.
enum Subject {
    /// A descriptor.
    Fd(usize),
    /// Either of two descriptors.
    Fds(usize, usize),
    /// A path, relative to a descriptor.
    Path(usize, usize),
    /// Either of two paths.
    Paths([usize; 4]),
    /// No part: the function that answers decides.
    Always,
    /// The call cannot name anything remote.
    Never,
}

/// Who answers a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The library, by [`carry_out`].
    Ours,
    /// The kernel; if it fails with `ENOENT`, [`carry_out`], as a symbolic link may lead into an export.
    Looked,
    /// The kernel alone.
    Kernels,
}

const HERE: usize = AT_FDCWD as usize;

/// Numbers of system calls.
mod number {
    pub(super) use libc::*;
    /// `libc` defines this number for some architectures only.
    #[allow(non_upper_case_globals)] // as those of `libc`
    pub(super) const SYS_fchmodat2: c_long = 452;
    /// As above.
    #[cfg(target_arch = "aarch64")]
    #[allow(non_upper_case_globals)] // as those of `libc`
    pub(super) const SYS_renameat: c_long = 38;
}

/// Each line lists system calls, their [`Subject`], and the function that answers them.
macro_rules! calls {
    (($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident)
     $($(#[$only:meta])? $first:ident $(| $more:ident)* => $subject:expr, $call:expr;)*) => {
        #[allow(unused_variables)] // not every line uses every argument
        fn subject(number: c_long, [$a, $b, $c, $d, $e, $f]: Arguments) -> Subject {
            match number {
                $($(#[$only])? number::$first $(| number::$more)* => $subject,)*
                _ => Subject::Never,
            }
        }

        /// Answers a call as libc's functions do: returns -1 and sets `errno` on failure.
        ///
        /// # Safety
        /// The arguments are valid for this system call.
        #[allow(unused_variables)] // not every line uses every argument
        pub(crate) unsafe fn carry_out(
            number: c_long,
            [$a, $b, $c, $d, $e, $f]: Arguments,
        ) -> c_long {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match number {
                    $($(#[$only])? number::$first $(| number::$more)* => $call as c_long,)*
                    _ => finish(Err::<c_long, _>(libc::ENOSYS)),
                }
            }
        }
    };
}

calls! {
    (a b c d e f)
    // These would bypass the library. Programs fall back to ordinary calls.
    SYS_io_uring_setup | SYS_io_uring_enter | SYS_io_uring_register | SYS_io_setup
        => Subject::Always, finish(Err::<c_long, _>(libc::ENOSYS));

    // Opening and closing
    #[cfg(target_arch = "x86_64")]
    SYS_open => Subject::Path(HERE, a), files::openat(AT_FDCWD, a as _, b as _, c as _);
    #[cfg(target_arch = "x86_64")]
    SYS_creat => Subject::Path(HERE, a), files::creat(a as _, b as _);
    SYS_openat => Subject::Path(a, b), files::openat(a as _, b as _, c as _, d as _);
    SYS_openat2 => Subject::Path(a, b), openat2(a as _, b as _, c as _, d);
    SYS_close => Subject::Always, files::close(a as _);
    SYS_close_range => Subject::Always, files::close_range(a as _, b as _, c as _);
    SYS_dup => Subject::Fd(a), files::dup(a as _);
    #[cfg(target_arch = "x86_64")]
    SYS_dup2 => Subject::Always, files::dup2(a as _, b as _);
    SYS_dup3 => Subject::Always, files::dup3(a as _, b as _, c as _);
    SYS_fcntl => Subject::Fd(a), files::fcntl(a as _, b as _, c as _);
    SYS_ioctl => Subject::Fd(a), misc::ioctl(a as _, b as _, c as _);
    SYS_sendmsg => Subject::Always, misc::sendmsg(a as _, b as _, c as _);
    SYS_recvmsg => Subject::Always, misc::recvmsg(a as _, b as _, c as _);
    SYS_sendmmsg => Subject::Always, misc::sendmmsg(a as _, b as _, c as _, d as _);
    SYS_recvmmsg => Subject::Always, misc::recvmmsg(a as _, b as _, c as _, d as _, e as _);

    // Data
    SYS_read => Subject::Fd(a), io::read(a as _, b as _, c);
    SYS_write => Subject::Fd(a), io::write(a as _, b as _, c);
    SYS_pread64 => Subject::Fd(a), io::pread(a as _, b as _, c, d as _);
    SYS_pwrite64 => Subject::Fd(a), io::pwrite(a as _, b as _, c, d as _);
    SYS_readv => Subject::Fd(a), io::readv(a as _, b as _, c as _);
    SYS_writev => Subject::Fd(a), io::writev(a as _, b as _, c as _);
    SYS_preadv => Subject::Fd(a), io::preadv(a as _, b as _, c as _, d as _);
    SYS_pwritev => Subject::Fd(a), io::pwritev(a as _, b as _, c as _, d as _);
    SYS_preadv2 => Subject::Fd(a), io::preadv2(a as _, b as _, c as _, d as _, f as _);
    SYS_pwritev2 => Subject::Fd(a), io::pwritev2(a as _, b as _, c as _, d as _, f as _);
    SYS_lseek => Subject::Fd(a), io::lseek(a as _, b as _, c as _);
    SYS_ftruncate => Subject::Fd(a), io::ftruncate(a as _, b as _);
    SYS_truncate => Subject::Path(HERE, a), attributes::truncate(a as _, b as _);
    SYS_fsync => Subject::Fd(a), io::fsync(a as _);
    SYS_fdatasync => Subject::Fd(a), io::fdatasync(a as _);
    SYS_syncfs => Subject::Fd(a), io::syncfs(a as _);
    SYS_sync_file_range => Subject::Fd(a), io::sync_file_range(a as _, b as _, c as _, d as _);
    SYS_fallocate => Subject::Fd(a), io::fallocate(a as _, b as _, c as _, d as _);
    SYS_fadvise64
        => Subject::Fd(a), returned(io::posix_fadvise(a as _, b as _, c as _, d as _));
    SYS_readahead => Subject::Fd(a), io::readahead(a as _, b as _, c);
    SYS_sendfile => Subject::Fds(a, b), copies::sendfile(a as _, b as _, c as _, d);
    SYS_copy_file_range
        => Subject::Fds(a, c), copies::copy_file_range(a as _, b as _, c as _, d as _, e, f as _);
    SYS_splice => Subject::Fds(a, c), copies::splice(a as _, b as _, c as _, d as _, e, f as _);
    SYS_flock => Subject::Fd(a), locks::flock(a as _, b as _);
    SYS_mmap => mapped(d, e), maps::mmap(a as _, b, c as _, d as _, e as _, f as _);
    SYS_mremap => Subject::Always, remap::mremap(a as _, b, c, d as _, e as _);
    SYS_mprotect => of_mappings(), memory::mprotect(a as _, b, c as _);
    SYS_pkey_mprotect => of_mappings(), memory::pkey_mprotect(a as _, b, c as _, d as _);
    SYS_remap_file_pages => of_mappings(), memory::remap_file_pages(a as _, b, c as _, d, e as _);
    SYS_madvise => of_mappings(), memory::madvise(a as _, b, c as _);
    SYS_munmap => Subject::Always, memory::munmap(a as _, b);
    SYS_msync => Subject::Always, memory::msync(a as _, b, c as _);

    // Attributes
    #[cfg(target_arch = "x86_64")]
    SYS_stat => Subject::Path(HERE, a), status::stat(a as _, b as _);
    #[cfg(target_arch = "x86_64")]
    SYS_lstat => Subject::Path(HERE, a), status::lstat(a as _, b as _);
    SYS_fstat => Subject::Fd(a), status::fstat(a as _, b as _);
    SYS_newfstatat => Subject::Path(a, b), status::fstatat(a as _, b as _, c as _, d as _);
    SYS_statx => Subject::Path(a, b), status::statx(a as _, b as _, c as _, d as _, e as _);
    #[cfg(target_arch = "x86_64")]
    SYS_access => Subject::Path(HERE, a), status::access(a as _, b as _);
    SYS_faccessat => Subject::Path(a, b), status::faccessat(a as _, b as _, c as _, 0);
    SYS_faccessat2 => Subject::Path(a, b), status::faccessat(a as _, b as _, c as _, d as _);
    SYS_statfs => Subject::Path(HERE, a), status::statfs(a as _, b as _);
    SYS_fstatfs => Subject::Fd(a), status::fstatfs(a as _, b as _);
    #[cfg(target_arch = "x86_64")]
    SYS_chmod => Subject::Path(HERE, a), attributes::chmod(a as _, b as _);
    SYS_fchmod => Subject::Fd(a), attributes::fchmod(a as _, b as _);
    SYS_fchmodat => Subject::Path(a, b), attributes::fchmodat(a as _, b as _, c as _, 0);
    SYS_fchmodat2 => Subject::Path(a, b), attributes::fchmodat(a as _, b as _, c as _, d as _);
    #[cfg(target_arch = "x86_64")]
    SYS_chown => Subject::Path(HERE, a), attributes::chown(a as _, b as _, c as _);
    #[cfg(target_arch = "x86_64")]
    SYS_lchown => Subject::Path(HERE, a), attributes::lchown(a as _, b as _, c as _);
    SYS_fchown => Subject::Fd(a), attributes::fchown(a as _, b as _, c as _);
    SYS_fchownat
        => Subject::Path(a, b), attributes::fchownat(a as _, b as _, c as _, d as _, e as _);
    #[cfg(target_arch = "x86_64")]
    SYS_utime => Subject::Path(HERE, a), attributes::utime(a as _, b as _);
    #[cfg(target_arch = "x86_64")]
    SYS_utimes => Subject::Path(HERE, a), attributes::utimes(a as _, b as _);
    #[cfg(target_arch = "x86_64")]
    SYS_futimesat => Subject::Path(a, b), attributes::futimesat(a as _, b as _, c as _);
    SYS_utimensat => Subject::Path(a, b), attributes::utimensat(a as _, b as _, c as _, d as _);
    SYS_umask => Subject::Always, attributes::umask(a as _);
    SYS_getxattr => Subject::Path(HERE, a), xattr::getxattr(a as _, b as _, c as _, d);
    SYS_lgetxattr => Subject::Path(HERE, a), xattr::lgetxattr(a as _, b as _, c as _, d);
    SYS_fgetxattr => Subject::Fd(a), xattr::fgetxattr(a as _, b as _, c as _, d);
    SYS_setxattr => Subject::Path(HERE, a), xattr::setxattr(a as _, b as _, c as _, d, e as _);
    SYS_lsetxattr => Subject::Path(HERE, a), xattr::lsetxattr(a as _, b as _, c as _, d, e as _);
    SYS_fsetxattr => Subject::Fd(a), xattr::fsetxattr(a as _, b as _, c as _, d, e as _);
    SYS_listxattr => Subject::Path(HERE, a), xattr::listxattr(a as _, b as _, c);
    SYS_llistxattr => Subject::Path(HERE, a), xattr::llistxattr(a as _, b as _, c);
    SYS_flistxattr => Subject::Fd(a), xattr::flistxattr(a as _, b as _, c);
    SYS_removexattr => Subject::Path(HERE, a), xattr::removexattr(a as _, b as _);
    SYS_lremovexattr => Subject::Path(HERE, a), xattr::lremovexattr(a as _, b as _);
    SYS_fremovexattr => Subject::Fd(a), xattr::fremovexattr(a as _, b as _);

    // Names
    #[cfg(target_arch = "x86_64")]
    SYS_mkdir => Subject::Path(HERE, a), names::mkdir(a as _, b as _);
    SYS_mkdirat => Subject::Path(a, b), names::mkdirat(a as _, b as _, c as _);
    #[cfg(target_arch = "x86_64")]
    SYS_mknod => Subject::Path(HERE, a), names::mknod(a as _, b as _, c as _);
    SYS_mknodat => Subject::Path(a, b), names::mknodat(a as _, b as _, c as _, d as _);
    #[cfg(target_arch = "x86_64")]
    SYS_unlink => Subject::Path(HERE, a), names::unlink(a as _);
    #[cfg(target_arch = "x86_64")]
    SYS_rmdir => Subject::Path(HERE, a), names::rmdir(a as _);
    SYS_unlinkat => Subject::Path(a, b), names::unlinkat(a as _, b as _, c as _);
    #[cfg(target_arch = "x86_64")]
    SYS_rename => Subject::Paths([HERE, a, HERE, b]), names::rename(a as _, b as _);
    SYS_renameat
        => Subject::Paths([a, b, c, d]), names::renameat(a as _, b as _, c as _, d as _);
    SYS_renameat2
        => Subject::Paths([a, b, c, d]), names::renameat2(a as _, b as _, c as _, d as _, e as _);
    #[cfg(target_arch = "x86_64")]
    SYS_link => Subject::Paths([HERE, a, HERE, b]), names::link(a as _, b as _);
    SYS_linkat
        => Subject::Paths([a, b, c, d]), names::linkat(a as _, b as _, c as _, d as _, e as _);
    #[cfg(target_arch = "x86_64")]
    SYS_symlink => Subject::Path(HERE, b), names::symlink(a as _, b as _);
    SYS_symlinkat => Subject::Path(b, c), names::symlinkat(a as _, b as _, c as _);
    #[cfg(target_arch = "x86_64")]
    SYS_readlink => Subject::Path(HERE, a), names::readlink(a as _, b as _, c);
    SYS_readlinkat => Subject::Path(a, b), names::readlinkat(a as _, b as _, c as _, d);

    SYS_inotify_add_watch
        => Subject::Path(HERE, b), watches::inotify_add_watch(a as _, b as _, c as _);
    SYS_fanotify_mark => Subject::Path(d, e),
        watches::fanotify_mark(a as _, b as _, c as _, d as _, e as _);
    SYS_name_to_handle_at => Subject::Path(a, b),
        watches::name_to_handle_at(a as _, b as _, c as _, d as _, e as _);

    // Directories
    SYS_chdir => Subject::Always, directories::chdir(a as _);
    SYS_fchdir => Subject::Always, directories::fchdir(a as _);
    SYS_getcwd => working_directory(), getcwd(a as _, b);
    SYS_getdents64 => Subject::Fd(a), directories::getdents64(a as _, b as _, c);

    // Sockets
    SYS_bind => addressed(b, c), sockets::bind(a as _, b as _, c as _);
    SYS_connect => addressed(b, c), sockets::connect(a as _, b as _, c as _);
    SYS_getsockname => Subject::Always, sockets::getsockname(a as _, b as _, c as _);
    SYS_getpeername => Subject::Always, sockets::getpeername(a as _, b as _, c as _);
    SYS_sendto => addressed(e, f), sockets::sendto(a as _, b as _, c, d as _, e as _, f as _);

    // Users and groups: the calls change those of this thread; the server uses them for the whole process
    SYS_setuid => Subject::Always, identity::by_call(libc::SYS_setuid, a, [a, 0, 0]);
    SYS_setreuid => Subject::Always, identity::by_call(libc::SYS_setreuid, b, [a, b, 0]);
    SYS_setresuid => Subject::Always, identity::by_call(libc::SYS_setresuid, b, [a, b, c]);
    SYS_setfsuid => Subject::Always, identity::by_call(libc::SYS_setfsuid, a, [a, 0, 0]);
    SYS_setgid => Subject::Always, identity::by_call(libc::SYS_setgid, NOBODY, [a, 0, 0]);
    SYS_setregid => Subject::Always, identity::by_call(libc::SYS_setregid, NOBODY, [a, b, 0]);
    SYS_setresgid => Subject::Always, identity::by_call(libc::SYS_setresgid, NOBODY, [a, b, c]);
    SYS_setfsgid => Subject::Always, identity::by_call(libc::SYS_setfsgid, NOBODY, [a, 0, 0]);

    // New programs
    SYS_exit_group => Subject::Always, end(a as c_int);
    SYS_execve => Subject::Always, exec::execve(a as _, b as _, c as _);
    SYS_execveat => Subject::Always, exec::execveat(a as _, b as _, c as _, d as _, e as _);
}

/// Decides about a mapping by the descriptor of its file, and whether it may take the place of others.
fn mapped(flags: usize, fd: usize) -> Subject {
    let has = |flag: c_int| flags as c_int & flag != 0;
    if has(libc::MAP_FIXED) && maps::is_any_here() {
        Subject::Always
    } else if has(libc::MAP_ANONYMOUS) {
        Subject::Never
    } else {
        Subject::Fd(fd)
    }
}

/// Decides about a socket call by the name in its address.
fn addressed(address: usize, length: usize) -> Subject {
    // SAFETY: the program passes valid arguments.
    if unsafe { sockets::is_remote(address, length) } { Subject::Always } else { Subject::Never }
}

/// Decides about a call on memory: it matters only if this process maps remote files.
fn of_mappings() -> Subject {
    if maps::is_any_here() { Subject::Always } else { Subject::Never }
}

fn working_directory() -> Subject {
    if working::is_remote() { Subject::Always } else { Subject::Never }
}

fn is_remote(fd: usize) -> bool {
    descriptors::find(fd as c_int).is_some()
}

/// # Safety
/// `path` is the address of a path, or null.
unsafe fn is_remote_path(at: usize, path: usize) -> bool {
    let name = path as *const c_char;
    let is_itself = || is_remote(at) || at as c_int == libc::AT_FDCWD && working::is_remote();
    if path == 0 {
        return is_itself();
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        (place::is_address(name) && *name == 0 && is_itself())
            || place::through_descriptor(name, true).is_some()
            || names::is_working_directory(name)
            || place::find(at as c_int, name).is_some()
    }
}

/// Decides who answers a call.
///
/// # Safety
/// The arguments are valid for this system call.
pub(crate) unsafe fn whose(number: c_long, arguments: Arguments) -> Whose {
    if start::state().is_none() || guard::is_inside() {
        return Whose::Kernels;
    }
    let (ours, path) = match subject(number, arguments) {
        Subject::Fd(fd) => (is_remote(fd) || descriptors::own_at(fd as c_int).is_some(), false),
        Subject::Fds(one, other) => (is_remote(one) || is_remote(other), false),
        // SAFETY: guaranteed by the caller.
        Subject::Path(at, path) => (unsafe { is_remote_path(at, path) }, true),
        Subject::Paths([at, path, other_at, other]) => {
            // SAFETY: guaranteed by the caller.
            (unsafe { is_remote_path(at, path) || is_remote_path(other_at, other) }, true)
        }
        Subject::Always => (true, false),
        Subject::Never => (false, false),
    };
    match (ours, path) {
        (true, _) => Whose::Ours,
        (false, true) => Whose::Looked,
        (false, false) => Whose::Kernels,
    }
}

/// Returns true for a call that returns a descriptor, whose number may have been that of a remote file.
pub(crate) fn gives_descriptor(number: c_long) -> bool {
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open | libc::SYS_creat => true,
        libc::SYS_openat | libc::SYS_openat2 | libc::SYS_dup => true,
        _ => false,
    }
}

/// Updates the table after the kernel answered a call: a descriptor that it returned is not a remote file.
pub(crate) fn done_by_kernel(number: c_long, result: isize) {
    if gives_descriptor(number) && result >= 0 {
        descriptors::forget(result as c_int);
    }
}

/// `syscall(2)`.
pub(crate) unsafe fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    crate::between::end();
    let arguments = [a, b, c, d, e, f];
    // SAFETY: the program passes valid arguments.
    unsafe {
        let whose = whose(number, arguments);
        if whose == Whose::Ours {
            return carry_out(number, arguments);
        }
        let before = errno();
        let result = if is_fork(number, a, b) {
            // The child closes our connections, so it has its own descriptors.
            let apart = a & !(libc::CLONE_FILES as usize);
            let a = if number == libc::SYS_clone { apart } else { a };
            threads::forked(|| real::syscall(number, a, b, c, d, e, f))
        } else {
            real::syscall(number, a, b, c, d, e, f)
        };
        if whose == Whose::Looked && result == -1 && errno() == libc::ENOENT {
            set_errno(before);
            return carry_out(number, arguments);
        }
        if !guard::is_inside() {
            done_by_kernel(number, result as isize);
        }
        result
    }
}

/// Returns true for a call that creates a child with its own memory.
///
/// # Safety
/// The arguments are valid for this system call.
unsafe fn is_fork(number: c_long, first: usize, second: usize) -> bool {
    let is_apart = |flags: usize| flags & libc::CLONE_VM as usize == 0;
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => true,
        libc::SYS_clone => is_apart(first),
        // A structure of the second argument's length, which begins with the flags.
        libc::SYS_clone3 if first != 0 && second >= size_of::<u64>() => {
            // SAFETY: guaranteed by the caller.
            is_apart(unsafe { (first as *const usize).read() })
        }
        _ => false,
    }
}

unsafe fn openat2(at: c_int, path: *const c_char, how: *const OpenHow, length: usize) -> c_int {
    // The kernel looks at these before it looks for the directory, and this is none.
    let nothing = [usize::MAX, c"none".as_ptr() as usize, how as usize, length, 0, 0];
    // SAFETY: the program passes valid arguments; nothing is opened.
    match unsafe { guard::checked(libc::SYS_openat2, nothing) } {
        Err(refused @ (libc::EINVAL | libc::E2BIG | libc::EFAULT)) => return finish(Err(refused)),
        _ if length < size_of::<OpenHow>() => return finish(Err(libc::EINVAL)),
        _ => {}
    }
    // SAFETY: the program passes null or a structure of `length` bytes, which is at least its size here.
    let Some(how) = (unsafe { how.as_ref() }) else { return finish(Err(libc::EFAULT)) };
    if how.resolve == 0 {
        // SAFETY: the program passes valid arguments.
        return unsafe { files::openat(at, path, how.flags as c_int, how.mode as u32) };
    }
    // The kernel has found nothing.
    let local = |_, _| finish(Err(libc::ENOENT));
    // The library cannot enforce `resolve`. With `ENOSYS`, programs fall back to `openat`.
    let remote = |_: &place::At| Err(libc::ENOSYS);
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, how.flags as c_int & libc::O_NOFOLLOW == 0, local, remote) }
}

/// Converts the result of a function that returns the error number.
fn returned(error: c_int) -> c_int {
    finish(if error == 0 { Ok(0) } else { Err(error) })
}

unsafe fn getcwd(to: *mut c_char, room: usize) -> c_long {
    if room == 0 {
        return finish(Err(libc::ERANGE));
    }
    // SAFETY: the program passes valid arguments; a path that was written ends with a zero byte.
    unsafe {
        if to.is_null() {
            return finish(Err(libc::EFAULT));
        }
        let path = directories::getcwd(to, room);
        if path.is_null() { -1 } else { std::ffi::CStr::from_ptr(path).count_bytes() as c_long + 1 }
    }
}

/// Does not return.
unsafe fn end(status: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { exec::end(status) };
    0
}
