//! Closing local files, and hearing of it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;

/// Closes a file. One on NFS, or behind a quota of FUSE, may tell only now that what was written
/// could not be kept: `close(2)`.
///
/// # Errors
/// What the kernel says of what was written. The descriptor is gone all the same.
pub(super) fn close(file: File) -> io::Result<()> {
    let fd = file.into_raw_fd();
    // SAFETY: it was owned by `file`, which let go of it.
    if unsafe { libc::close(fd) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        error => Err(error),
    }
}
