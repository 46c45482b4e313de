//! What the hooks do, by subject.

pub(crate) mod attributes;
pub(crate) mod directories;
pub(crate) mod exec;
pub(crate) mod files;
pub(crate) mod io;
pub(crate) mod locks;
pub(crate) mod maps;
pub(crate) mod misc;
pub(crate) mod names;
pub(crate) mod numbers;
pub(crate) mod reach;
pub(crate) mod status;
pub(crate) mod streams;
pub(crate) mod trees;
pub(crate) mod xattr;

use crate::guard::{self, Failed, finish};
use crate::place::{self, At, Led};
use libc::{c_char, c_int};
use std::ffi::CStr;

/// Runs the remote or the local form of a call with one path. A remote path that leads out of its
/// export is followed; so is a local one that is not found, as a symbolic link in it may lead into an
/// export.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn by_path<T: Failed + PartialEq>(
    at: c_int,
    path: *const c_char,
    follow: bool,
    local: impl Fn(c_int, *const c_char) -> T,
    remote: impl Fn(&At) -> Result<T, i32>,
) -> T {
    // SAFETY: as the caller says.
    let Some(found) = (unsafe { place::find(at, path) }) else {
        let errno = guard::errno();
        let result = local(at, path);
        // SAFETY: as the caller says.
        if result == T::FAILED
            && guard::errno() == libc::ENOENT
            // SAFETY: as the program says.
            && let Some(found) = unsafe { led_in(at, path, follow) }
        {
            guard::set_errno(errno);
            return finish(guard::inside(|| remote(&found)));
        }
        return result;
    };
    enum Done<T> {
        Here(T),
        Outside(Vec<u8>),
    }
    let result = guard::inside(|| match remote(&found) {
        Err(libc::EXDEV) => match place::follow(&found.absolute(), follow)? {
            Led::Remote(at) => remote(&at).map(Done::Here),
            Led::Local(path) => Ok(Done::Outside(path)),
        },
        other => other.map(Done::Here),
    });
    match result {
        Ok(Done::Here(done)) => done,
        Ok(Done::Outside(path)) => local(libc::AT_FDCWD, path.as_ptr().cast()),
        Err(error) => finish(Err(error)),
    }
}

/// Where a local path leads that was not found, if that is remote: by a symbolic link.
///
/// # Safety
/// `path` is null or ends with a zero byte.
unsafe fn led_in(at: c_int, path: *const c_char, follow: bool) -> Option<At> {
    if crate::start::mounts().is_empty() || path.is_null() || guard::is_inside() {
        return None;
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    if text.is_empty() || (at != libc::AT_FDCWD && text[0] != b'/') {
        return None;
    }
    let errno = guard::errno();
    let found = guard::inside(|| {
        let mut full = text.to_vec();
        if text[0] != b'/' {
            full = crate::working::local().ok_or(libc::ENOENT)?;
            full.push(b'/');
            full.extend_from_slice(text);
        }
        match place::follow(&full, follow)? {
            Led::Remote(at) => Ok(at),
            Led::Local(_) => Err(libc::ENOENT),
        }
    });
    guard::set_errno(errno);
    found.ok()
}

/// Copies a text to where C wants it, cut if need be, as `readlink` does; the bytes copied.
///
/// # Safety
/// `to` has room for `room` bytes.
pub(crate) unsafe fn copy_out(text: &[u8], to: *mut u8, room: usize) -> usize {
    let count = text.len().min(room);
    // SAFETY: as the caller says.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, count) };
    count
}
