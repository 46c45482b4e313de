//! Extended attributes.

use super::by_path;
use super::io::source;
use crate::descriptors::{self, Open};
use crate::guard::ours;
use crate::known;
use crate::place::{self, At};
use crate::remote;
use crate::table::real;
use libc::{c_char, c_int, c_void, size_t, ssize_t};
use std::ffi::CStr;
use towline_client::{Error, File};

/// Returns the name of an attribute; `EFAULT` for null.
unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a [u8], i32> {
    // SAFETY: the program passes null or a C string.
    if name.is_null() { Err(libc::EFAULT) } else { Ok(unsafe { CStr::from_ptr(name) }.to_bytes()) }
}

/// Copies a value out and returns its length; without room, only returns the length.
unsafe fn give(value: &[u8], to: *mut c_void, room: size_t) -> Result<ssize_t, i32> {
    if room > 0 {
        if value.len() > room {
            return Err(libc::ERANGE);
        }
        if !place::is_address(to.cast()) {
            return Err(libc::EFAULT);
        }
        // SAFETY: the program provides `room` bytes.
        unsafe { super::copy_out(value, to.cast(), room) };
    }
    Ok(value.len() as isize)
}

fn names(file: &File, path: &[u8], follow: bool) -> Result<Vec<u8>, Error> {
    let mut all = Vec::new();
    for name in file.list_xattrs(path, follow)? {
        all.extend_from_slice(&name);
        all.push(0);
    }
    Ok(all)
}

/// Returns true for attributes that every file system knows, and that the list of a file's attributes
/// contains if the file has them.
fn is_listed(name: &[u8]) -> bool {
    [&b"security."[..], b"system.posix_acl_", b"user."].iter().any(|part| name.starts_with(part))
}

macro_rules! two_forms {
    ($follow:ident, $no_follow:ident, ($($argument:ident: $kind:ty),*) -> $result:ty, $remote:expr) => {
        pub(crate) unsafe fn $follow(path: *const c_char, $($argument: $kind),*) -> $result {
            // SAFETY: the program passes valid arguments.
            let local = |_, path| unsafe { real::$follow(path, $($argument),*) };
            let remote = |at: &At| ($remote)(at, true);
            // SAFETY: the program passes valid arguments.
            unsafe { by_path(libc::AT_FDCWD, path, true, local, remote) }
        }

        pub(crate) unsafe fn $no_follow(path: *const c_char, $($argument: $kind),*) -> $result {
            // SAFETY: the program passes valid arguments.
            let local = |_, path| unsafe { real::$no_follow(path, $($argument),*) };
            let remote = |at: &At| ($remote)(at, false);
            // SAFETY: the program passes valid arguments.
            unsafe { by_path(libc::AT_FDCWD, path, false, local, remote) }
        }
    };
}

two_forms!(getxattr, lgetxattr, (name: *const c_char, to: *mut c_void, room: size_t) -> ssize_t,
|at: &At, follow| {
    // SAFETY: the program passes valid arguments.
    let name = unsafe { name_of(name) }?;
    if is_listed(name) && known::has_no_xattrs(at, follow) {
        return Err(libc::ENODATA);
    }
    let value = at.with(|base, path| base.xattr(path, follow, name))?;
    // SAFETY: the program passes valid arguments.
    unsafe { give(&value, to, room) }
});

two_forms!(setxattr, lsetxattr,
(name: *const c_char, value: *const c_void, length: size_t, flags: c_int) -> c_int,
|at: &At, follow| {
    // SAFETY: the program passes valid arguments.
    let (name, value) = unsafe { (name_of(name)?, source(value, length)?) };
    at.with(|base, path| base.set_xattr(path, follow, name, value, flags as u32)).map(|()| 0)
});

two_forms!(listxattr, llistxattr, (to: *mut c_char, room: size_t) -> ssize_t,
|at: &At, follow| {
    if known::has_no_xattrs(at, follow) {
        return Ok(0);
    }
    let all = at.with(|base, path| names(base, path, follow))?;
    // SAFETY: the program passes valid arguments.
    unsafe { give(&all, to.cast(), room) }
});

two_forms!(removexattr, lremovexattr, (name: *const c_char) -> c_int,
|at: &At, follow| {
    // SAFETY: the program passes valid arguments.
    let name = unsafe { name_of(name) }?;
    at.with(|base, path| base.remove_xattr(path, follow, name)).map(|()| 0)
});

/// Fails for a descriptor that only names a file (`O_PATH`).
fn check_open(open: Open) -> Result<(), i32> {
    if remote::is_path(open) { Err(libc::EBADF) } else { Ok(()) }
}

pub(crate) unsafe fn fgetxattr(
    fd: c_int,
    name: *const c_char,
    to: *mut c_void,
    room: size_t,
) -> ssize_t {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fgetxattr(fd, name, to, room) };
    };
    ours(|| {
        // SAFETY: the program passes valid arguments.
        let name = unsafe { name_of(name) }?;
        check_open(open)?;
        let value = remote::with(open, |file| file.xattr(b"", true, name))?;
        // SAFETY: the program passes valid arguments.
        unsafe { give(&value, to, room) }
    })
}

pub(crate) unsafe fn fsetxattr(
    fd: c_int,
    name: *const c_char,
    value: *const c_void,
    length: size_t,
    flags: c_int,
) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fsetxattr(fd, name, value, length, flags) };
    };
    ours(|| {
        // SAFETY: the program passes valid arguments.
        let (name, value) = unsafe { (name_of(name)?, source(value, length)?) };
        check_open(open)?;
        remote::with(open, |file| file.set_xattr(b"", true, name, value, flags as u32)).map(|()| 0)
    })
}

pub(crate) unsafe fn flistxattr(fd: c_int, to: *mut c_char, room: size_t) -> ssize_t {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::flistxattr(fd, to, room) };
    };
    ours(|| {
        check_open(open)?;
        let all = remote::with(open, |file| names(file, b"", true))?;
        // SAFETY: the program passes valid arguments.
        unsafe { give(&all, to.cast(), room) }
    })
}

pub(crate) unsafe fn fremovexattr(fd: c_int, name: *const c_char) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fremovexattr(fd, name) };
    };
    ours(|| {
        // SAFETY: the program passes valid arguments.
        let name = unsafe { name_of(name) }?;
        check_open(open)?;
        remote::with(open, |file| file.remove_xattr(b"", true, name)).map(|()| 0)
    })
}
