//! Pipes with remote names. The node is remote; the pipe is the kernel's, in the run's directory, under the
//! node's number, as for sockets (`sockets.rs`). So only programs of the same run meet.

use super::by_path;
use crate::guard::{self, checked, finish};
use crate::place::At;
use crate::table::real;
use crate::waits::Path;
use crate::{common, descriptors, start, waits};
use libc::{c_char, c_int};
use std::cell::Cell;
use towline_instance::SOCKETS;

/// Returns the path of the kernel's pipe for a node.
fn stand_in(mount: usize, inode: u64) -> Result<Path, i32> {
    let name = format!("/{SOCKETS}/pipe-{mount}-{inode}\0");
    let path = [start::directory(), name.as_bytes()].concat();
    let mut fixed = [0; size_of::<Path>()];
    fixed.get_mut(..path.len()).ok_or(libc::ENAMETOOLONG)?.copy_from_slice(&path);
    Ok(fixed)
}

/// Removes the pipe of an earlier node that had the number of this new one.
pub(super) fn made(mount: usize, inode: u64) {
    let Ok(path) = stand_in(mount, inode) else { return };
    let unlink = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    let _ = unsafe { checked(libc::SYS_unlinkat, unlink) };
}

/// Returns the kernel's pipe for a remote one, and makes it if needed; `None` for anything but a pipe.
fn behind(at: &At, flags: c_int) -> Result<Option<Path>, i32> {
    let wanted = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => libc::R_OK,
        libc::O_WRONLY => libc::W_OK,
        _ => libc::R_OK | libc::W_OK,
    };
    let follow = flags & libc::O_NOFOLLOW == 0;
    let attr = at.with(|base, path| base.stat_path(path, follow))?;
    if attr.mode & libc::S_IFMT != libc::S_IFIFO {
        return Ok(None);
    }
    at.with(|base, path| base.access(path, wanted as u32))?;
    let path = stand_in(at.mount, attr.identity())?;
    let mode = (libc::S_IFIFO | 0o666) as usize;
    let make = [libc::AT_FDCWD as usize, path.as_ptr() as usize, mode, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    match unsafe { checked(libc::SYS_mknodat, make) } {
        Ok(_) => common::open_to_all(&path).map(|()| Some(path)),
        Err(libc::EEXIST) => Ok(Some(path)),
        Err(error) => Err(error),
    }
}

/// Opens a remote pipe after the usual way to open it has failed with `ENXIO`. The call waits for the other
/// side as for any pipe.
///
/// # Safety
/// `path` ends with a zero byte.
pub(super) unsafe fn open(at: c_int, path: *const c_char, flags: c_int) -> c_int {
    let found = Cell::new(None);
    let errno = guard::errno();
    let follow = flags & libc::O_NOFOLLOW == 0;
    // SAFETY: the caller guarantees the path; the structure is a local one.
    let asked = unsafe {
        by_path(
            at,
            path,
            follow,
            |at, path| {
                let mut status: libc::stat64 = std::mem::zeroed();
                real::fstatat(at, path, &raw mut status, 0)
            },
            |at| behind(at, flags).map(|path| found.set(path)).map(|()| 0),
        )
    };
    let Some(pipe) = found.take() else {
        return if asked == 0 { finish(Err(errno)) } else { asked };
    };
    // Outside the library's own code, as it may wait for long.
    let flags = flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW);
    if waits::is_trapped() {
        return finish(Err(waits::open_later(pipe, flags)));
    }
    // SAFETY: the path ends with a zero byte.
    let fd = unsafe { real::openat(libc::AT_FDCWD, pipe.as_ptr().cast(), flags, 0) };
    descriptors::forget(fd);
    fd
}
