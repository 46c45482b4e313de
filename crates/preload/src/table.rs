//! All libc functions that are replaced: names, arguments and handlers.
//!
//! Each line of the table makes one exported function per name, which calls the handler, and
//! `real::FIRST_NAME`, which calls libc's own function. Variadic functions are declared with all arguments
//! that they may have: both calling conventions pass them alike.

use crate::between;
use crate::hooks::{
    aio, attributes, copies, directories, exec, files, fts, identity, io, libraries, locks, maps,
    memory, messages, misc, names, numbers, remap, sleeps, sockets, spawn, status, streams, trees,
    walks, watches, words, xattr,
};
use crate::trap::{masks, threads};
use crate::waits;
use libc::{
    DIR, Dl_info, FILE, c_char, c_int, c_long, c_uint, c_ulong, c_void, clockid_t, dev_t, dirent64,
    gid_t, id_t, idtype_t, iovec, mode_t, off64_t, pid_t, rusage, siginfo_t, size_t, ssize_t,
    stat64, statfs64, statvfs64, timespec, timeval, uid_t, utimbuf,
};

macro_rules! exported {
    ($first:ident $name:ident ($($argument:ident: $kind:ty),*) $result:ty, $handler:path) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)] // `_Fork`
        unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            if const { super::is_cancellation_point(super::Function::$first) } {
                crate::guard::may_be_cancelled();
            }
            crate::report::counted(super::Function::$first as usize, || {
                // SAFETY: the program calls it as it would call libc's.
                unsafe { $handler($($argument),*) }
            })
        }
    };
}

macro_rules! real_function {
    ($name:ident ($($argument:ident: $kind:ty),*) $result:ty) => {
        #[allow(non_snake_case)] // `_Fork`
        pub(crate) unsafe fn $name($($argument: $kind),*) -> $result {
            let name = concat!(stringify!($name), "\0");
            let found = super::look_up(&super::found::$name, name);
            // SAFETY: libc's function of this name has this signature.
            let function: unsafe extern "C" fn($($kind),*) -> $result =
                // SAFETY: as the program says.
                unsafe { std::mem::transmute(found) };
            // SAFETY: the caller's arguments are those of the program.
            unsafe { function($($argument),*) }
        }
    };
}

macro_rules! hooks {
    ($([$first:ident $($alias:ident)*] $arguments:tt -> $result:ty => $handler:path;)*) => {
        /// The functions, by their first names.
        #[allow(non_camel_case_types)] // names of C
        #[derive(Clone, Copy)]
        enum Function {
            $($first,)*
        }

        /// Their names, in the same order.
        pub(crate) const FUNCTIONS: &[&str] = &[$(stringify!($first)),*];

        mod exports {
            use super::*;
            $(
                exported!($first $first $arguments $result, $handler);
                $(exported!($first $alias $arguments $result, $handler);)*
            )*
        }

        /// Addresses of the libc functions that were called: side by side, so that few pages are touched.
        #[allow(non_upper_case_globals, dead_code)] // names of C, as below
        mod found {
            use super::c_void;
            use std::sync::atomic::AtomicPtr;
            $(
                pub(super) static $first: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            )*
        }

        /// The functions of libc behind the hooks.
        #[allow(dead_code)] // most handlers need theirs
        pub(crate) mod real {
            use super::*;
            $(real_function!($first $arguments $result);)*

            /// Returns an address in libc's code.
            pub(crate) fn address_of_sigaction() -> usize {
                static AT: std::sync::atomic::AtomicPtr<c_void> =
                    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
                super::look_up(&AT, "sigaction\0") as usize
            }
        }
    };
}

/// Returns true for a function in which libc ends a thread that was cancelled. The waits of `fcntl` and `lockf` are
/// not here, but in `hooks/locks.rs`. System calls that a program makes itself end no thread, although the same
/// handlers answer them.
const fn is_cancellation_point(function: Function) -> bool {
    use Function::*;
    matches!(
        function,
        open | __open_2
            | openat
            | __openat_2
            | creat
            | close
            | read
            | __read_chk
            | write
            | pread
            | __pread_chk
            | pwrite
            | readv
            | writev
            | preadv
            | pwritev
            | preadv2
            | pwritev2
            | fsync
            | fdatasync
            | sync_file_range
            | fallocate
            | copy_file_range
            | splice
            | msync
    )
}

/// Returns the address of libc's function, or of one that fails with `ENOSYS` if libc has none.
fn look_up(at: &std::sync::atomic::AtomicPtr<c_void>, name: &str) -> *mut c_void {
    use std::sync::atomic::Ordering;
    let known = at.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name ends with a zero byte (`real_function` adds it).
    let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
    if found.is_null() {
        found = missing as *mut c_void;
    }
    at.store(found, Ordering::Relaxed);
    found
}

/// Resolves what nearly every child of a fork calls: once here instead of in each child.
pub(crate) fn look_up_for_children() {
    look_up(&found::execve, "execve\0");
}

/// Returns libc's `dlopen`, which `variadic.rs` jumps to.
pub(crate) fn real_dlopen() -> *const c_void {
    static AT: std::sync::atomic::AtomicPtr<c_void> =
        std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
    look_up(&AT, "dlopen\0")
}

/// Returns libc's `dlmopen`.
pub(crate) fn real_dlmopen() -> *const c_void {
    static AT: std::sync::atomic::AtomicPtr<c_void> =
        std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
    look_up(&AT, "dlmopen\0")
}

extern "C" fn missing() -> isize {
    crate::guard::set_errno(libc::ENOSYS);
    -1
}

hooks! {
    // Opening and closing
    [open open64 __open __open64] (path: *const c_char, flags: c_int, mode: mode_t) -> c_int => files::open;
    [__open_2 __open64_2] (path: *const c_char, flags: c_int) -> c_int => files::open_2;
    [openat openat64] (at: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int => files::openat;
    [__openat_2 __openat64_2] (at: c_int, path: *const c_char, flags: c_int) -> c_int => files::openat_2;
    [creat creat64] (path: *const c_char, mode: mode_t) -> c_int => files::creat;
    [close __close] (fd: c_int) -> c_int => files::close;
    [close_range] (first: c_uint, last: c_uint, flags: c_int) -> c_int => files::close_range;
    [closefrom] (first: c_int) -> () => files::closefrom;
    [mkstemp mkstemp64] (path: *mut c_char) -> c_int => files::mkstemp;
    [mkostemp mkostemp64] (path: *mut c_char, flags: c_int) -> c_int => files::mkostemp;
    [mkstemps mkstemps64] (path: *mut c_char, suffix: c_int) -> c_int => files::mkstemps;
    [mkostemps mkostemps64] (path: *mut c_char, suffix: c_int, flags: c_int) -> c_int => files::mkostemps;
    [mktemp] (path: *mut c_char) -> *mut c_char => files::mktemp;
    [mkdtemp] (path: *mut c_char) -> *mut c_char => files::mkdtemp;

    // Descriptors
    [dup] (fd: c_int) -> c_int => files::dup;
    [dup2 __dup2] (from: c_int, to: c_int) -> c_int => files::dup2;
    [dup3] (from: c_int, to: c_int, flags: c_int) -> c_int => files::dup3;
    [fcntl fcntl64 __fcntl] (fd: c_int, command: c_int, argument: c_ulong) -> c_int => files::fcntl;
    [dladdr] (address: *const c_void, info: *mut Dl_info) -> c_int => libraries::dladdr;
    [dl_iterate_phdr] (visit: *const c_void, data: *mut c_void) -> c_int => libraries::dl_iterate_phdr;
    [dladdr1] (address: *const c_void, info: *mut Dl_info, more: *mut *mut c_void, flags: c_int) -> c_int => libraries::dladdr1;
    [inotify_add_watch] (fd: c_int, path: *const c_char, mask: u32) -> c_int => watches::inotify_add_watch;
    [fanotify_mark] (fd: c_int, flags: c_uint, mask: u64, at: c_int, path: *const c_char) -> c_int => watches::fanotify_mark;
    [name_to_handle_at] (at: c_int, path: *const c_char, handle: *mut c_void, mount: *mut c_int, flags: c_int) -> c_int => watches::name_to_handle_at;
    [ioctl] (fd: c_int, request: c_ulong, argument: c_ulong) -> c_int => misc::ioctl;
    [recvmmsg] (fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int, time: *mut timespec) -> c_int => misc::recvmmsg;
    [sendmmsg] (fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int => misc::sendmmsg;
    [recvmsg] (fd: c_int, message: *mut libc::msghdr, flags: c_int) -> ssize_t => misc::recvmsg;
    [sendmsg] (fd: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t => misc::sendmsg;

    // Data
    [read __read] (fd: c_int, target: *mut c_void, count: size_t) -> ssize_t => io::read;
    [__read_chk] (fd: c_int, target: *mut c_void, count: size_t, room: size_t) -> ssize_t => io::read_chk;
    [write __write] (fd: c_int, data: *const c_void, count: size_t) -> ssize_t => io::write;
    [pread pread64 __pread64] (fd: c_int, target: *mut c_void, count: size_t, at: off64_t) -> ssize_t => io::pread;
    [__pread_chk __pread64_chk] (fd: c_int, target: *mut c_void, count: size_t, at: off64_t, room: size_t) -> ssize_t => io::pread_chk;
    [pwrite pwrite64 __pwrite64] (fd: c_int, data: *const c_void, count: size_t, at: off64_t) -> ssize_t => io::pwrite;
    [readv] (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t => io::readv;
    [writev] (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t => io::writev;
    [preadv preadv64] (fd: c_int, parts: *const iovec, count: c_int, at: off64_t) -> ssize_t => io::preadv;
    [pwritev pwritev64] (fd: c_int, parts: *const iovec, count: c_int, at: off64_t) -> ssize_t => io::pwritev;
    [preadv2 preadv64v2] (fd: c_int, parts: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t => io::preadv2;
    [pwritev2 pwritev64v2] (fd: c_int, parts: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t => io::pwritev2;
    [lseek lseek64 llseek __lseek] (fd: c_int, offset: off64_t, whence: c_int) -> off64_t => io::lseek;
    [ftruncate ftruncate64] (fd: c_int, length: off64_t) -> c_int => io::ftruncate;
    [truncate truncate64] (path: *const c_char, length: off64_t) -> c_int => attributes::truncate;
    [fsync] (fd: c_int) -> c_int => io::fsync;
    [fdatasync] (fd: c_int) -> c_int => io::fdatasync;
    [syncfs] (fd: c_int) -> c_int => io::syncfs;
    [sync_file_range] (fd: c_int, from: off64_t, count: off64_t, flags: c_uint) -> c_int => io::sync_file_range;
    [fallocate fallocate64] (fd: c_int, mode: c_int, from: off64_t, length: off64_t) -> c_int => io::fallocate;
    [posix_fallocate posix_fallocate64] (fd: c_int, from: off64_t, length: off64_t) -> c_int => io::posix_fallocate;
    [posix_fadvise posix_fadvise64] (fd: c_int, from: off64_t, length: off64_t, advice: c_int) -> c_int => io::posix_fadvise;
    [readahead] (fd: c_int, from: off64_t, count: size_t) -> ssize_t => io::readahead;
    [sendfile sendfile64] (to: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t => copies::sendfile;
    [copy_file_range] (from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, count: size_t, flags: c_uint) -> ssize_t => copies::copy_file_range;
    [splice] (from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, count: size_t, flags: c_uint) -> ssize_t => copies::splice;
    [flock] (fd: c_int, operation: c_int) -> c_int => locks::flock;
    [lockf lockf64] (fd: c_int, command: c_int, length: off64_t) -> c_int => locks::lockf;
    [sleep] (seconds: c_uint) -> c_uint => sleeps::sleep;
    [usleep] (microseconds: c_uint) -> c_int => sleeps::usleep;
    [nanosleep __nanosleep] (time: *const timespec, rest: *mut timespec) -> c_int => sleeps::nanosleep;
    [clock_nanosleep] (clock: clockid_t, flags: c_int, time: *const timespec, rest: *mut timespec) -> c_int => sleeps::clock_nanosleep;
    [mmap mmap64] (at: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off64_t) -> *mut c_void => maps::mmap;
    [mremap] (at: *mut c_void, old: size_t, new: size_t, flags: c_int, to: *mut c_void) -> *mut c_void => remap::mremap;
    [mprotect] (at: *mut c_void, length: size_t, protection: c_int) -> c_int => memory::mprotect;
    [pkey_mprotect] (at: *mut c_void, length: size_t, protection: c_int, key: c_int) -> c_int => memory::pkey_mprotect;
    [remap_file_pages] (at: *mut c_void, length: size_t, protection: c_int, page: size_t, flags: c_int) -> c_int => memory::remap_file_pages;
    [munmap] (at: *mut c_void, length: size_t) -> c_int => memory::munmap;
    [madvise] (at: *mut c_void, length: size_t, advice: c_int) -> c_int => memory::madvise;
    [msync] (at: *mut c_void, length: size_t, flags: c_int) -> c_int => memory::msync;

    // Attributes
    [stat stat64] (path: *const c_char, to: *mut stat64) -> c_int => status::stat;
    [lstat lstat64] (path: *const c_char, to: *mut stat64) -> c_int => status::lstat;
    [fstat fstat64] (fd: c_int, to: *mut stat64) -> c_int => status::fstat;
    [fstatat fstatat64] (at: c_int, path: *const c_char, to: *mut stat64, flags: c_int) -> c_int => status::fstatat;
    [__xstat __xstat64] (version: c_int, path: *const c_char, to: *mut stat64) -> c_int => status::xstat;
    [__lxstat __lxstat64] (version: c_int, path: *const c_char, to: *mut stat64) -> c_int => status::lxstat;
    [__fxstat __fxstat64] (version: c_int, fd: c_int, to: *mut stat64) -> c_int => status::fxstat;
    [__fxstatat __fxstatat64] (version: c_int, at: c_int, path: *const c_char, to: *mut stat64, flags: c_int) -> c_int => status::fxstatat;
    [statx] (at: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) -> c_int => status::statx;
    [access] (path: *const c_char, mode: c_int) -> c_int => status::access;
    [euidaccess eaccess] (path: *const c_char, mode: c_int) -> c_int => status::euidaccess;
    [faccessat] (at: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int => status::faccessat;
    [statfs statfs64 __statfs] (path: *const c_char, to: *mut statfs64) -> c_int => status::statfs;
    [fstatfs fstatfs64] (fd: c_int, to: *mut statfs64) -> c_int => status::fstatfs;
    [statvfs statvfs64] (path: *const c_char, to: *mut statvfs64) -> c_int => status::statvfs;
    [fstatvfs fstatvfs64] (fd: c_int, to: *mut statvfs64) -> c_int => status::fstatvfs;
    [pathconf] (path: *const c_char, name: c_int) -> c_long => status::pathconf;
    [fpathconf] (fd: c_int, name: c_int) -> c_long => status::fpathconf;
    [ftok] (path: *const c_char, project: c_int) -> c_int => status::ftok;
    [chmod] (path: *const c_char, mode: mode_t) -> c_int => attributes::chmod;
    [lchmod] (path: *const c_char, mode: mode_t) -> c_int => attributes::lchmod;
    [fchmod] (fd: c_int, mode: mode_t) -> c_int => attributes::fchmod;
    [fchmodat] (at: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int => attributes::fchmodat;
    [chown] (path: *const c_char, uid: uid_t, gid: gid_t) -> c_int => attributes::chown;
    [lchown] (path: *const c_char, uid: uid_t, gid: gid_t) -> c_int => attributes::lchown;
    [fchown] (fd: c_int, uid: uid_t, gid: gid_t) -> c_int => attributes::fchown;
    [fchownat] (at: c_int, path: *const c_char, uid: uid_t, gid: gid_t, flags: c_int) -> c_int => attributes::fchownat;
    [utime] (path: *const c_char, times: *const utimbuf) -> c_int => attributes::utime;
    [utimes] (path: *const c_char, times: *const timeval) -> c_int => attributes::utimes;
    [lutimes] (path: *const c_char, times: *const timeval) -> c_int => attributes::lutimes;
    [futimes] (fd: c_int, times: *const timeval) -> c_int => attributes::futimes;
    [futimesat] (at: c_int, path: *const c_char, times: *const timeval) -> c_int => attributes::futimesat;
    [utimensat] (at: c_int, path: *const c_char, times: *const timespec, flags: c_int) -> c_int => attributes::utimensat;
    [futimens] (fd: c_int, times: *const timespec) -> c_int => attributes::futimens;
    [umask] (mask: mode_t) -> mode_t => attributes::umask;
    [getxattr] (path: *const c_char, name: *const c_char, to: *mut c_void, room: size_t) -> ssize_t => xattr::getxattr;
    [lgetxattr] (path: *const c_char, name: *const c_char, to: *mut c_void, room: size_t) -> ssize_t => xattr::lgetxattr;
    [fgetxattr] (fd: c_int, name: *const c_char, to: *mut c_void, room: size_t) -> ssize_t => xattr::fgetxattr;
    [setxattr] (path: *const c_char, name: *const c_char, value: *const c_void, length: size_t, flags: c_int) -> c_int => xattr::setxattr;
    [lsetxattr] (path: *const c_char, name: *const c_char, value: *const c_void, length: size_t, flags: c_int) -> c_int => xattr::lsetxattr;
    [fsetxattr] (fd: c_int, name: *const c_char, value: *const c_void, length: size_t, flags: c_int) -> c_int => xattr::fsetxattr;
    [listxattr] (path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t => xattr::listxattr;
    [llistxattr] (path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t => xattr::llistxattr;
    [flistxattr] (fd: c_int, to: *mut c_char, room: size_t) -> ssize_t => xattr::flistxattr;
    [removexattr] (path: *const c_char, name: *const c_char) -> c_int => xattr::removexattr;
    [lremovexattr] (path: *const c_char, name: *const c_char) -> c_int => xattr::lremovexattr;
    [fremovexattr] (fd: c_int, name: *const c_char) -> c_int => xattr::fremovexattr;

    // Names
    [mkdir] (path: *const c_char, mode: mode_t) -> c_int => names::mkdir;
    [mkdirat] (at: c_int, path: *const c_char, mode: mode_t) -> c_int => names::mkdirat;
    [mknod] (path: *const c_char, mode: mode_t, device: dev_t) -> c_int => names::mknod;
    [mknodat] (at: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> c_int => names::mknodat;
    [__xmknod] (version: c_int, path: *const c_char, mode: mode_t, device: *const dev_t) -> c_int => names::xmknod;
    [__xmknodat] (version: c_int, at: c_int, path: *const c_char, mode: mode_t, device: *const dev_t) -> c_int => names::xmknodat;
    [mkfifo] (path: *const c_char, mode: mode_t) -> c_int => names::mkfifo;
    [mkfifoat] (at: c_int, path: *const c_char, mode: mode_t) -> c_int => names::mkfifoat;
    [unlink] (path: *const c_char) -> c_int => names::unlink;
    [unlinkat] (at: c_int, path: *const c_char, flags: c_int) -> c_int => names::unlinkat;
    [rmdir] (path: *const c_char) -> c_int => names::rmdir;
    [remove] (path: *const c_char) -> c_int => names::remove;
    [rename] (from: *const c_char, to: *const c_char) -> c_int => names::rename;
    [renameat] (from_at: c_int, from: *const c_char, to_at: c_int, to: *const c_char) -> c_int => names::renameat;
    [renameat2] (from_at: c_int, from: *const c_char, to_at: c_int, to: *const c_char, flags: c_uint) -> c_int => names::renameat2;
    [link] (from: *const c_char, to: *const c_char) -> c_int => names::link;
    [linkat] (from_at: c_int, from: *const c_char, to_at: c_int, to: *const c_char, flags: c_int) -> c_int => names::linkat;
    [symlink] (target: *const c_char, path: *const c_char) -> c_int => names::symlink;
    [symlinkat] (target: *const c_char, at: c_int, path: *const c_char) -> c_int => names::symlinkat;
    [readlink] (path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t => names::readlink;
    [readlinkat] (at: c_int, path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t => names::readlinkat;
    [__readlink_chk] (path: *const c_char, to: *mut c_char, count: size_t, room: size_t) -> ssize_t => names::readlink_chk;
    [__readlinkat_chk] (at: c_int, path: *const c_char, to: *mut c_char, count: size_t, room: size_t) -> ssize_t => names::readlinkat_chk;
    [realpath] (path: *const c_char, to: *mut c_char) -> *mut c_char => names::realpath;
    [__realpath_chk] (path: *const c_char, to: *mut c_char, room: size_t) -> *mut c_char => names::realpath_chk;
    [canonicalize_file_name] (path: *const c_char) -> *mut c_char => names::canonicalize_file_name;

    // Directories
    [chdir] (path: *const c_char) -> c_int => directories::chdir;
    [fchdir] (fd: c_int) -> c_int => directories::fchdir;
    [getcwd] (to: *mut c_char, room: size_t) -> *mut c_char => directories::getcwd;
    [__getcwd_chk] (to: *mut c_char, count: size_t, room: size_t) -> *mut c_char => directories::getcwd_chk;
    [get_current_dir_name] () -> *mut c_char => directories::get_current_dir_name;
    [getwd] (to: *mut c_char) -> *mut c_char => directories::getwd;
    [opendir] (path: *const c_char) -> *mut DIR => directories::opendir;
    [fdopendir] (fd: c_int) -> *mut DIR => directories::fdopendir;
    [readdir readdir64] (stream: *mut DIR) -> *mut dirent64 => directories::readdir;
    [readdir_r readdir64_r] (stream: *mut DIR, to: *mut dirent64, result: *mut *mut dirent64) -> c_int => directories::readdir_r;
    [closedir] (stream: *mut DIR) -> c_int => directories::closedir;
    [rewinddir] (stream: *mut DIR) -> () => directories::rewinddir;
    [telldir] (stream: *mut DIR) -> c_long => directories::telldir;
    [seekdir] (stream: *mut DIR, at: c_long) -> () => directories::seekdir;
    [dirfd] (stream: *mut DIR) -> c_int => directories::dirfd;
    [scandir scandir64] (path: *const c_char, to: *mut *mut *mut dirent64, filter: Option<trees::Filter>, compare: Option<trees::Compare>) -> c_int => trees::scandir;
    [scandirat scandirat64] (at: c_int, path: *const c_char, to: *mut *mut *mut dirent64, filter: Option<trees::Filter>, compare: Option<trees::Compare>) -> c_int => trees::scandirat;
    [glob glob64] (pattern: *const c_char, flags: c_int, error: *mut c_void, to: *mut libc::glob64_t) -> c_int => trees::glob;
    [wordexp] (text: *const c_char, to: *mut words::Words, flags: c_int) -> c_int => words::wordexp;
    [ftw ftw64] (path: *const c_char, visit: *const c_void, room: c_int) -> c_int => walks::ftw;
    [nftw nftw64] (path: *const c_char, visit: *const c_void, room: c_int, flags: c_int) -> c_int => walks::nftw;
    [fts_open fts64_open] (roots: *const *mut c_char, options: c_int, compare: Option<fts::Compare>) -> *mut fts::Stream => fts::open;
    [fts_read fts64_read] (stream: *mut fts::Stream) -> *mut fts::Entry => fts::read;
    [fts_children fts64_children] (stream: *mut fts::Stream, options: c_int) -> *mut fts::Entry => fts::children;
    [fts_set fts64_set] (stream: *mut fts::Stream, entry: *mut fts::Entry, instruction: c_int) -> c_int => fts::set;
    [fts_close fts64_close] (stream: *mut fts::Stream) -> c_int => fts::close;
    [getdirentries getdirentries64] (fd: c_int, to: *mut c_char, room: size_t, base: *mut off64_t) -> ssize_t => directories::getdirentries;
    [getdents64] (fd: c_int, to: *mut c_void, room: size_t) -> ssize_t => directories::getdents64;

    // Streams
    [fopen fopen64] (path: *const c_char, mode: *const c_char) -> *mut FILE => streams::fopen;
    [freopen freopen64] (path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE => streams::freopen;
    [fdopen] (fd: c_int, mode: *const c_char) -> *mut FILE => streams::fdopen;
    [setmntent __setmntent] (path: *const c_char, mode: *const c_char) -> *mut FILE => streams::setmntent;
    [popen] (command: *const c_char, mode: *const c_char) -> *mut FILE => exec::popen;
    [vdprintf] (fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int => streams::vdprintf;
    [__vdprintf_chk] (fd: c_int, checks: c_int, format: *const c_char, arguments: *mut c_void) -> c_int => streams::vdprintf_checked;
    [perror] (text: *const c_char) -> () => streams::perror;

    // Processes
    [system] (command: *const c_char) -> c_int => exec::system;
    [execve] (path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int => exec::execve;
    [execv] (path: *const c_char, arguments: *const *const c_char) -> c_int => exec::execv;
    [execvp] (path: *const c_char, arguments: *const *const c_char) -> c_int => exec::execvp;
    [execvpe] (path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int => exec::execvpe;
    [fexecve] (fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int => exec::fexecve;
    [execveat] (at: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int => exec::execveat;
    [posix_spawn] (pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *const c_char, environment: *const *const c_char) -> c_int => spawn::posix_spawn;
    [posix_spawnp] (pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *const c_char, environment: *const *const c_char) -> c_int => spawn::posix_spawnp;
    [daemon] (stays: c_int, keeps: c_int) -> c_int => misc::daemon;
    [login_tty] (fd: c_int) -> c_int => misc::login_tty;
    [forkpty] (main: *mut c_int, name: *mut c_char, settings: *const c_void, size: *const c_void) -> pid_t => misc::forkpty;
    [wait __wait] (status: *mut c_int) -> pid_t => between::wait;
    [waitpid __waitpid] (child: pid_t, status: *mut c_int, options: c_int) -> pid_t => between::waitpid;
    [wait3] (status: *mut c_int, options: c_int, used: *mut rusage) -> pid_t => between::wait3;
    [wait4] (child: pid_t, status: *mut c_int, options: c_int, used: *mut rusage) -> pid_t => between::wait4;
    [waitid] (kind: idtype_t, child: id_t, info: *mut siginfo_t, options: c_int) -> c_int => between::waitid;
    [prctl] (option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int => between::prctl;
    [_exit _Exit] (status: c_int) -> () => exec::end;
    [setuid] (user: uid_t) -> c_int => identity::setuid;
    [seteuid] (user: uid_t) -> c_int => identity::seteuid;
    [setreuid] (user: uid_t, effective: uid_t) -> c_int => identity::setreuid;
    [setresuid] (user: uid_t, effective: uid_t, saved: uid_t) -> c_int => identity::setresuid;
    [setgid] (group: gid_t) -> c_int => identity::setgid;
    [setegid] (group: gid_t) -> c_int => identity::setegid;
    [setregid] (group: gid_t, effective: gid_t) -> c_int => identity::setregid;
    [setfsuid] (user: uid_t) -> c_int => identity::setfsuid;
    [setfsgid] (group: gid_t) -> c_int => identity::setfsgid;
    [setresgid] (group: gid_t, effective: gid_t, saved: gid_t) -> c_int => identity::setresgid;

    // Sockets
    [bind] (fd: c_int, address: *const c_void, length: libc::socklen_t) -> c_int => sockets::bind;
    [sendto __sendto] (fd: c_int, data: *const c_void, count: size_t, flags: c_int, address: *const c_void, length: libc::socklen_t) -> ssize_t => sockets::sendto;
    [getsockname] (fd: c_int, address: *mut c_void, length: *mut libc::socklen_t) -> c_int => sockets::getsockname;
    [getpeername] (fd: c_int, address: *mut c_void, length: *mut libc::socklen_t) -> c_int => sockets::getpeername;
    [accept] (fd: c_int, address: *mut c_void, length: *mut libc::socklen_t) -> c_int => sockets::accept;
    [accept4] (fd: c_int, address: *mut c_void, length: *mut libc::socklen_t, flags: c_int) -> c_int => sockets::accept4;
    [recvfrom] (fd: c_int, data: *mut c_void, count: size_t, flags: c_int, address: *mut c_void, length: *mut libc::socklen_t) -> ssize_t => sockets::recvfrom;
    [__recvfrom_chk] (fd: c_int, data: *mut c_void, count: size_t, room: size_t, flags: c_int, address: *mut c_void, length: *mut libc::socklen_t) -> ssize_t => sockets::recvfrom_chk;
    [connect __connect] (fd: c_int, address: *const c_void, length: libc::socklen_t) -> c_int => sockets::connect;

    // Messages
    [catopen] (name: *const c_char, flags: c_int) -> *mut c_void => messages::catopen;
    [bindtextdomain] (domain: *const c_char, folder: *const c_char) -> *mut c_char => messages::bindtextdomain;

    // Asynchronous I/O
    [aio_read aio_read64] (block: *mut aio::Block) -> c_int => aio::aio_read;
    [aio_write aio_write64] (block: *mut aio::Block) -> c_int => aio::aio_write;
    [aio_fsync aio_fsync64] (how: c_int, block: *mut aio::Block) -> c_int => aio::aio_fsync;
    [aio_cancel aio_cancel64] (fd: c_int, block: *mut aio::Block) -> c_int => aio::aio_cancel;
    [lio_listio lio_listio64] (mode: c_int, list: *const *mut aio::Block, count: c_int, event: *mut libc::sigevent) -> c_int => aio::lio_listio;

    // The rest
    [backtrace_symbols_fd __backtrace_symbols_fd] (frames: *const *mut c_void, count: c_int, fd: c_int) -> () => misc::backtrace_symbols_fd;
    [sigaction __sigaction] (signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int => misc::sigaction;
    [signal bsd_signal ssignal] (signal: c_int, handler: usize) -> usize => misc::signal;
    [sysv_signal __sysv_signal] (signal: c_int, handler: usize) -> usize => misc::sysv_signal;
    [sigset] (signal: c_int, handler: usize) -> usize => misc::sigset;
    [siginterrupt] (signal: c_int, interrupts: c_int) -> c_int => misc::siginterrupt;
    [sigprocmask] (how: c_int, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int => masks::sigprocmask;
    [pthread_sigmask] (how: c_int, set: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int => masks::pthread_sigmask;
    [sigsuspend] (set: *const libc::sigset_t) -> c_int => masks::sigsuspend;
    [ppoll] (list: *mut libc::pollfd, count: libc::nfds_t, time: *const timespec, set: *const libc::sigset_t) -> c_int => masks::ppoll;
    [pselect] (count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, odd: *mut libc::fd_set, time: *const timespec, set: *const libc::sigset_t) -> c_int => masks::pselect;
    [epoll_pwait] (fd: c_int, events: *mut libc::epoll_event, count: c_int, wait_ms: c_int, set: *const libc::sigset_t) -> c_int => masks::epoll_pwait;
    [fork __fork] () -> pid_t => threads::fork;
    [_Fork] () -> pid_t => threads::fork_alone;
    [clone __clone] (function: Option<threads::StartC11>, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent_id: *mut pid_t, storage: *mut c_void, child_id: *mut pid_t) -> c_int => threads::clone;
    [pthread_create] (thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t, start: threads::Start, argument: *mut c_void) -> c_int => threads::pthread_create;
    [pthread_cancel] (thread: libc::pthread_t) -> c_int => waits::pthread_cancel;
    [thrd_create] (thread: *mut libc::pthread_t, start: threads::StartC11, argument: *mut c_void) -> c_int => threads::thrd_create;
    [syscall] (number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long => numbers::syscall;
}
