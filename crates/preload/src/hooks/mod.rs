//! What the hooks do, by subject.

pub(crate) mod aio;
pub(crate) mod attributes;
pub(crate) mod copies;
pub(crate) mod directories;
mod environment;
pub(crate) mod exec;
mod fifos;
pub(crate) mod files;
mod folders;
pub(crate) mod fts;
pub(crate) mod identity;
pub(crate) mod io;
pub(crate) mod libraries;
pub(crate) mod locks;
pub(crate) mod maps;
pub(crate) mod messages;
pub(crate) mod misc;
pub(crate) mod names;
pub(crate) mod numbers;
pub(crate) mod pairs;
pub(crate) mod reach;
pub(crate) mod remap;
pub(crate) mod shared;
pub(crate) mod sockets;
pub(crate) mod spawn;
pub(crate) mod status;
pub(crate) mod streams;
pub(crate) mod touched;
pub(crate) mod trees;
pub(crate) mod walks;
pub(crate) mod watches;
pub(crate) mod words;
pub(crate) mod xattr;

use crate::descriptors::{self, Open};
use crate::guard::{self, Failed, finish};
use crate::place::{self, At, Last, Led};
use crate::working;
use libc::{c_char, c_int};
use std::ffi::CStr;

/// True when the program has mappings of remote files or streams of remote directories.
pub(crate) fn has_remote_memory() -> bool {
    maps::is_any_here() || directories::has_streams() || fts::has_streams()
}

/// Runs the remote or the local form of a call with one path. A remote path that leads out of its
/// export is followed; so is a local one that is not found, as a symbolic link in it may lead into an
/// export.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn by_path<T: Failed + PartialEq>(
    at: c_int,
    path: *const c_char,
    last: impl Into<Last>,
    local: impl Fn(c_int, *const c_char) -> T,
    remote: impl Fn(&At) -> Result<T, i32>,
) -> T {
    let last = last.into();
    let follow = last != Last::Stays;
    // From the search on, so that signals are held up once.
    // SAFETY: as the caller says.
    let quiet = unsafe { place::may_be(at, path) }.then(guard::Quiet::begin);
    // SAFETY: as the caller says.
    let found = quiet.is_some().then(|| unsafe { place::find(at, path) }).flatten();
    // SAFETY: as the caller says.
    let found = found.or_else(|| unsafe { place::through_descriptor(path, follow) });
    let Some(found) = found else {
        drop(quiet);
        let errno = guard::errno();
        let result = local(at, path);
        if result == T::FAILED && guard::errno() == libc::ENOENT {
            // SAFETY: as the caller says.
            let last = if follow { last } else { unsafe { ends_with_slash(path) }.into() };
            // SAFETY: as the caller says.
            if let Some(found) = unsafe { led_in(at, path, last) } {
                guard::set_errno(errno);
                return match found {
                    Ok(Led::Remote(found)) => finish(guard::inside(|| remote(&found))),
                    Ok(Led::Local(path)) => local(libc::AT_FDCWD, path.as_ptr().cast()),
                    Err(error) => finish(Err(error)),
                };
            }
        }
        return result;
    };
    enum Done<T> {
        Here(T),
        Outside(Vec<u8>),
    }
    let result = guard::inside(|| match remote(&found) {
        Err(libc::EXDEV) => {
            let full = found.absolute()?;
            match place::follow(&full, last)? {
                Led::Local(path) => Ok(Done::Outside(path)),
                Led::Remote(at) => match remote(&at) {
                    // A link that a slash behind it makes to be followed.
                    Err(libc::EXDEV) if !follow => match place::follow(&full, true)? {
                        Led::Local(path) => Ok(Done::Outside(path)),
                        Led::Remote(at) => remote(&at).map(Done::Here),
                    },
                    other => other.map(Done::Here),
                },
            }
        }
        other => other.map(Done::Here),
    });
    drop(quiet);
    match result {
        Ok(Done::Here(done)) => done,
        Ok(Done::Outside(path)) => local(libc::AT_FDCWD, path.as_ptr().cast()),
        Err(error) => finish(Err(error)),
    }
}

/// True for a path with a slash at its end, which makes a link there be followed.
///
/// # Safety
/// `path` is null or ends with a zero byte.
unsafe fn ends_with_slash(path: *const c_char) -> bool {
    // SAFETY: as the caller says.
    place::is_address(path) && unsafe { CStr::from_ptr(path) }.to_bytes().ends_with(b"/")
}

/// Where a local path leads that was not found, if symbolic links lead there through something
/// remote. An error is of the remote part of the way.
///
/// # Safety
/// `path` is null or ends with a zero byte.
unsafe fn led_in(
    at: c_int,
    path: *const c_char,
    last: impl Into<Last>,
) -> Option<Result<Led, i32>> {
    if crate::start::mounts().is_empty() || !place::is_address(path) || guard::is_inside() {
        return None;
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    if text.is_empty() {
        return None;
    }
    let here = if text[0] == b'/' { libc::AT_FDCWD } else { at };
    let errno = guard::errno();
    // SAFETY: as the caller says.
    let found = guard::inside(|| unsafe {
        if leads_nowhere(here, path) {
            return Err(libc::ENOENT);
        }
        let mut full = text.to_vec();
        if text[0] != b'/' {
            full = match here {
                libc::AT_FDCWD => crate::working::local(),
                _ => crate::descriptors::directory_of(here),
            }
            .ok_or(libc::ENOENT)?;
            full.push(b'/');
            full.extend_from_slice(text);
        }
        match place::follow(&full, last) {
            Err(libc::ENOENT) => Err(libc::ENOENT),
            // Not far from where it came: the kernel has said what there is to say.
            Ok(Led::Local(path)) if path.strip_suffix(b"\0") == Some(&full) => Err(libc::ENOENT),
            led => Ok(led),
        }
    });
    guard::set_errno(errno);
    found.ok()
}

/// True for a path that is remote, or leads there by links.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn leads_to_us(at: c_int, path: *const c_char, last: impl Into<Last>) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        place::find(at, path).is_some()
            || matches!(led_in(at, path, last), Some(Ok(Led::Remote(_)) | Err(_)))
    }
}

/// The remote file that a call names by its descriptor alone (`AT_EMPTY_PATH`), which need not be open for anything.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn itself(at: c_int, path: *const c_char, flags: c_int) -> Option<Open> {
    // SAFETY: not null, and then a string.
    let is_meant = flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || unsafe { *path } == 0);
    if is_meant { descriptors::find(at) } else { None }
}

/// The name of what a call names: where the working directory is meant by no name (`AT_EMPTY_PATH`), and is a remote one, that has one.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn or_working(at: c_int, path: *const c_char, flags: c_int) -> *const c_char {
    // SAFETY: not null, and then a string.
    let is_meant = at == libc::AT_FDCWD
        && flags & libc::AT_EMPTY_PATH != 0
        && (path.is_null() || unsafe { *path } == 0)
        && working::is_remote();
    if is_meant { c".".as_ptr() } else { path }
}

/// `EINVAL` where there are flags that a call does not know.
pub(crate) fn only(known: c_int, flags: c_int) -> Result<(), i32> {
    if flags & !known == 0 { Ok(()) } else { Err(libc::EINVAL) }
}

/// What `openat2(2)` is told.
#[repr(C)]
pub(crate) struct OpenHow {
    pub(crate) flags: u64,
    pub(crate) mode: u64,
    pub(crate) resolve: u64,
}

/// True when no link of this local path is to blame that it was not found: the kernel comes upon what is missing before it
/// comes upon a link. So most searches end, by one system call; where that is forbidden, the path is followed.
///
/// # Safety
/// `path` ends with a zero byte; `at` is what it is relative to.
unsafe fn leads_nowhere(at: c_int, path: *const c_char) -> bool {
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let how = OpenHow { flags: flags as u64, mode: 0, resolve: libc::RESOLVE_NO_SYMLINKS };
    let (to, length) = (&raw const how as usize, size_of::<OpenHow>());
    let arguments = [at as usize, path as usize, to, length, 0, 0];
    // SAFETY: as the caller says; the structure outlives the call.
    match unsafe { guard::checked(libc::SYS_openat2, arguments) } {
        Err(error) => error == libc::ENOENT,
        Ok(fd) => {
            // SAFETY: nobody else knows of it.
            unsafe { guard::system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]) };
            false
        }
    }
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
