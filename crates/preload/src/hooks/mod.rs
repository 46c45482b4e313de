//! The hooks: functions that take the place of libc's, by subject.

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
mod handle;
pub(crate) mod identity;
pub(crate) mod io;
pub(crate) mod libraries;
pub(crate) mod locks;
pub(crate) mod lost;
pub(crate) mod maps;
pub(crate) mod memory;
pub(crate) mod messages;
pub(crate) mod misc;
pub(crate) mod names;
pub(crate) mod numbers;
pub(crate) mod pairs;
pub(crate) mod reach;
pub(crate) mod remap;
pub(crate) mod shared;
pub(crate) mod sleeps;
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
use crate::working::{self, Before};
use libc::{c_char, c_int};
use std::ffi::CStr;

/// Returns true if the program has mappings of remote files or streams of remote directories.
pub(crate) fn has_remote_memory() -> bool {
    maps::is_any_here() || directories::has_streams() || fts::has_streams()
}

/// How often a name is looked for again because the working directory is being renamed.
const AGAIN_MAX: u32 = 100;

/// Runs the local or remote form of a call with one path. A remote path that leads out of its export is
/// followed. So is a local path that is not found, as a symbolic link in it may lead into an export.
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
    // SAFETY: guaranteed by the caller.
    unsafe { settled([(at, path)], || by_path_once(at, path, last, &local, &remote)) }
}

/// Runs a call again that did not find a name because the working directory was being renamed.
///
/// # Safety
/// The paths are null or end with a zero byte.
unsafe fn settled<T: Failed + PartialEq, const N: usize>(
    names: [(c_int, *const c_char); N],
    call: impl Fn() -> T,
) -> T {
    let errno = guard::errno();
    for _ in 0..AGAIN_MAX {
        // SAFETY: guaranteed by the caller.
        let before = names.map(|(at, path)| unsafe { Before::path(at, path) });
        let result = call();
        if result != T::FAILED
            || guard::errno() != libc::ENOENT
            || !before.into_iter().any(Before::has_moved)
        {
            return result;
        }
        guard::set_errno(errno);
    }
    call()
}

/// # Safety
/// As for [`by_path`].
unsafe fn by_path_once<T: Failed + PartialEq>(
    at: c_int,
    path: *const c_char,
    last: Last,
    local: &impl Fn(c_int, *const c_char) -> T,
    remote: &impl Fn(&At) -> Result<T, i32>,
) -> T {
    let follow = last != Last::Stays;
    // Begins before the search, so that signals are held up only once.
    // SAFETY: guaranteed by the caller.
    let quiet = unsafe { place::may_be(at, path) }.then(guard::Quiet::begin);
    // SAFETY: guaranteed by the caller.
    let found = quiet.is_some().then(|| unsafe { place::find(at, path) }).flatten();
    // SAFETY: guaranteed by the caller.
    let found = found.or_else(|| unsafe { place::through_descriptor(path, follow) });
    let Some(found) = found else {
        drop(quiet);
        let errno = guard::errno();
        let result = local(at, path);
        if result == T::FAILED && guard::errno() == libc::ENOENT {
            // SAFETY: guaranteed by the caller.
            let last = if follow { last } else { unsafe { ends_with_slash(path) }.into() };
            // SAFETY: guaranteed by the caller.
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
                    // A slash after the link makes it be followed.
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

/// Returns true for a path with a slash at its end, which makes a link there be followed.
///
/// # Safety
/// `path` is null or ends with a zero byte.
unsafe fn ends_with_slash(path: *const c_char) -> bool {
    // SAFETY: guaranteed by the caller.
    place::is_address(path) && unsafe { CStr::from_ptr(path) }.to_bytes().ends_with(b"/")
}

/// Returns where a local path that was not found leads, if symbolic links lead from it through something
/// remote. Errors come from the remote part of the way.
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
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    if text.is_empty() {
        return None;
    }
    let here = if text[0] == b'/' { libc::AT_FDCWD } else { at };
    let errno = guard::errno();
    // SAFETY: guaranteed by the caller.
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
            // The path leads nowhere else, so the kernel's answer stands.
            Ok(Led::Local(path)) if path.strip_suffix(b"\0") == Some(&full) => Err(libc::ENOENT),
            led => Ok(led),
        }
    });
    guard::set_errno(errno);
    found.ok()
}

/// Returns true for a path that is remote, or leads to something remote through links.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn leads_to_us(at: c_int, path: *const c_char, last: impl Into<Last>) -> bool {
    // SAFETY: guaranteed by the caller.
    unsafe {
        place::find(at, path).is_some()
            || matches!(led_in(at, path, last), Some(Ok(Led::Remote(_)) | Err(_)))
    }
}

/// Returns the remote file that a call names by its descriptor alone (`AT_EMPTY_PATH`). It need not be open
/// for reading or writing.
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn itself(at: c_int, path: *const c_char, flags: c_int) -> Option<Open> {
    // SAFETY: the path is not null here, so it is a string.
    let is_meant = flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || unsafe { *path } == 0);
    if is_meant { descriptors::find(at) } else { None }
}

/// Returns the path of a call; `.` if the call names a remote working directory without a path
/// (`AT_EMPTY_PATH`).
///
/// # Safety
/// `path` is null or ends with a zero byte.
pub(crate) unsafe fn or_working(at: c_int, path: *const c_char, flags: c_int) -> *const c_char {
    // SAFETY: the path is not null here, so it is a string.
    let is_meant = at == libc::AT_FDCWD
        && flags & libc::AT_EMPTY_PATH != 0
        && (path.is_null() || unsafe { *path } == 0)
        && working::is_remote();
    if is_meant { c".".as_ptr() } else { path }
}

/// Fails with `EINVAL` if there are flags that a call does not know.
pub(crate) fn only(known: c_int, flags: c_int) -> Result<(), i32> {
    if flags & !known == 0 { Ok(()) } else { Err(libc::EINVAL) }
}

/// The argument of `openat2(2)`.
#[repr(C)]
pub(crate) struct OpenHow {
    pub(crate) flags: u64,
    pub(crate) mode: u64,
    pub(crate) resolve: u64,
}

/// Returns true if a local path was not found for another reason than a link: the kernel comes to the
/// missing name before any link. Most searches end here, after one system call. Where `openat2` is
/// forbidden, the path is followed.
///
/// # Safety
/// `path` ends with a zero byte; `at` is the directory that it is relative to.
unsafe fn leads_nowhere(at: c_int, path: *const c_char) -> bool {
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let how = OpenHow { flags: flags as u64, mode: 0, resolve: libc::RESOLVE_NO_SYMLINKS };
    let (to, length) = (&raw const how as usize, size_of::<OpenHow>());
    let arguments = [at as usize, path as usize, to, length, 0, 0];
    // SAFETY: guaranteed by the caller; the structure outlives the call.
    match unsafe { guard::checked(libc::SYS_openat2, arguments) } {
        Err(error) => error == libc::ENOENT,
        Ok(fd) => {
            // SAFETY: nothing else knows the descriptor.
            unsafe { guard::system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]) };
            false
        }
    }
}

/// Copies a text to C, cut to `room` bytes as by `readlink`, and returns the number of bytes copied.
///
/// # Safety
/// `to` has room for `room` bytes.
pub(crate) unsafe fn copy_out(text: &[u8], to: *mut u8, room: usize) -> usize {
    let count = text.len().min(room);
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, count) };
    count
}
