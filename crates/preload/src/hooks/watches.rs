//! Watching for changes. The kernel tells nothing of remote files: they cannot be watched, nor named by handles.

use super::by_path;
use crate::place::At;
use crate::table::real;
use libc::{c_char, c_int, c_uint, c_void};

/// The name of something remote, also relative to a remote working directory, whose stand-in the kernel would
/// take. A link may lead out to what is local.
fn refused(at: &At, follow: bool, error: c_int) -> Result<c_int, i32> {
    at.with(|base, path| base.stat_path(path, follow))?;
    Err(error)
}

pub(crate) unsafe fn inotify_add_watch(fd: c_int, path: *const c_char, mask: u32) -> c_int {
    let follow = mask & libc::IN_DONT_FOLLOW == 0;
    // SAFETY: as the program says.
    let local = |_, path| unsafe { real::inotify_add_watch(fd, path, mask) };
    let remote = |at: &At| refused(at, follow, libc::ENOENT);
    // SAFETY: as the program says.
    unsafe { by_path(libc::AT_FDCWD, path, follow, local, remote) }
}

pub(crate) unsafe fn fanotify_mark(
    fd: c_int,
    flags: c_uint,
    mask: u64,
    at: c_int,
    path: *const c_char,
) -> c_int {
    let follow = flags & libc::FAN_MARK_DONT_FOLLOW == 0;
    // SAFETY: as the program says.
    let local = |at, path| unsafe { real::fanotify_mark(fd, flags, mask, at, path) };
    let remote = |at: &At| refused(at, follow, libc::ENOENT);
    // SAFETY: as the program says.
    unsafe { by_path(at, path, follow, local, remote) }
}

pub(crate) unsafe fn name_to_handle_at(
    at: c_int,
    path: *const c_char,
    handle: *mut c_void,
    mount: *mut c_int,
    flags: c_int,
) -> c_int {
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    // SAFETY: as the program says.
    let local = |at, path| unsafe { real::name_to_handle_at(at, path, handle, mount, flags) };
    let remote = |at: &At| refused(at, follow, libc::EOPNOTSUPP);
    // SAFETY: as the program says.
    unsafe { by_path(at, path, follow, local, remote) }
}
