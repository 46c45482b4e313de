//! Functions of libc that read directories internally: `scandir` is done again on top of the hooks, and
//! `glob` gets the hooks to read directories with.

use super::directories::{closedir, fdopendir, opendir, readdir};
use super::{files, leads_to_us};
use crate::guard::{errno, finish, set_errno};
use crate::start;
use crate::table::real;
use libc::{c_char, c_int, c_void, dirent64};

/// Decides whether `scandir` keeps an entry.
pub(crate) type Filter = unsafe extern "C" fn(*const dirent64) -> c_int;
/// Orders the entries of `scandir`.
pub(crate) type Compare = unsafe extern "C" fn(*mut *const dirent64, *mut *const dirent64) -> c_int;

pub(crate) unsafe fn scandir(
    path: *const c_char,
    to: *mut *mut *mut dirent64,
    filter: Option<Filter>,
    compare: Option<Compare>,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if !leads_to_us(libc::AT_FDCWD, path, true) {
            return real::scandir(path, to, filter, compare);
        }
        scandirat(libc::AT_FDCWD, path, to, filter, compare)
    }
}

pub(crate) unsafe fn scandirat(
    at: c_int,
    path: *const c_char,
    to: *mut *mut *mut dirent64,
    filter: Option<Filter>,
    compare: Option<Compare>,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if !leads_to_us(at, path, true) {
            return real::scandirat(at, path, to, filter, compare);
        }
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = files::openat(at, path, flags, 0);
        if fd < 0 {
            return -1;
        }
        let stream = fdopendir(fd);
        if stream.is_null() {
            files::close(fd);
            return -1;
        }
        let before = errno();
        set_errno(0);
        // The program frees the list and its entries, so they come from its allocator.
        let (mut list, mut count, mut room) =
            (std::ptr::null_mut::<*mut dirent64>(), 0usize, 0usize);
        let failed = loop {
            let entry = readdir(stream);
            if entry.is_null() {
                break errno();
            }
            if let Some(keep) = filter {
                let is_kept = keep(entry) != 0;
                // The program's function may have changed it.
                set_errno(0);
                if !is_kept {
                    continue;
                }
            }
            if count == room {
                room = (room * 2).max(16);
                let more = libc::realloc(list.cast(), room * size_of::<*mut dirent64>());
                if more.is_null() {
                    break libc::ENOMEM;
                }
                list = more.cast();
            }
            let bytes = usize::from((*entry).d_reclen);
            let copy = libc::malloc(bytes);
            if copy.is_null() {
                break libc::ENOMEM;
            }
            std::ptr::copy_nonoverlapping(entry.cast::<u8>(), copy.cast::<u8>(), bytes);
            *list.add(count) = copy.cast();
            count += 1;
        };
        closedir(stream);
        if failed != 0 {
            for index in 0..count {
                libc::free((*list.add(index)).cast());
            }
            libc::free(list.cast());
            return finish(Err(failed));
        }
        set_errno(before);
        if let Some(compare) = compare
            && count > 1
        {
            type Plain = unsafe extern "C" fn(*const c_void, *const c_void) -> c_int;
            // SAFETY: both types take the addresses of two elements of the list.
            let compare = std::mem::transmute::<Compare, Plain>(compare);
            libc::qsort(list.cast(), count, size_of::<*mut dirent64>(), Some(compare));
        }
        *to = list;
        count as c_int
    }
}

unsafe extern "C" fn close_stream(stream: *mut c_void) {
    // SAFETY: `glob` passes a stream that it got from `open_stream`.
    unsafe { closedir(stream.cast()) };
}

unsafe extern "C" fn next_entry(stream: *mut c_void) -> *mut c_void {
    // SAFETY: `glob` passes a stream that it got from `open_stream`.
    unsafe { readdir(stream.cast()).cast() }
}

unsafe extern "C" fn open_stream(path: *const c_char) -> *mut c_void {
    // SAFETY: `glob` passes a path.
    unsafe { opendir(path).cast() }
}

/// The layout of `glob64_t`, with the functions that `GLOB_ALTDIRFUNC` makes it call.
#[repr(C)]
struct Functions {
    count: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    close: *const c_void,
    next: *const c_void,
    open: *const c_void,
    lstat: *const c_void,
    stat: *const c_void,
}

const GLOB_ALTDIRFUNC: c_int = 1 << 9;

pub(crate) unsafe fn glob(
    pattern: *const c_char,
    flags: c_int,
    error: *mut c_void,
    to: *mut libc::glob64_t,
) -> c_int {
    const _: () = assert!(size_of::<Functions>() == size_of::<libc::glob64_t>());
    // SAFETY: the program passes valid arguments.
    unsafe {
        // Whether a pattern matches remote names shows only while it is expanded.
        if flags & GLOB_ALTDIRFUNC != 0 || start::mounts().is_empty() {
            return real::glob(pattern, flags, error, to);
        }
        let functions = to.cast::<Functions>();
        (*functions).close = close_stream as *const c_void;
        (*functions).next = next_entry as *const c_void;
        (*functions).open = open_stream as *const c_void;
        (*functions).lstat = glob_lstat as *const c_void;
        (*functions).stat = glob_stat as *const c_void;
        let result = real::glob(pattern, flags | GLOB_ALTDIRFUNC, error, to);
        (*functions).flags &= !GLOB_ALTDIRFUNC;
        result
    }
}

unsafe extern "C" fn glob_lstat(path: *const c_char, to: *mut libc::stat64) -> c_int {
    // SAFETY: `glob` passes a path and a place for the result.
    unsafe { super::status::lstat(path, to) }
}

unsafe extern "C" fn glob_stat(path: *const c_char, to: *mut libc::stat64) -> c_int {
    // SAFETY: `glob` passes a path and a place for the result.
    unsafe { super::status::stat(path, to) }
}
