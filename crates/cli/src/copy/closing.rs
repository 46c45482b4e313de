//! Closes local files and reports the errors of `close(2)`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;

/// Closes a file. NFS and FUSE file systems with quotas may report only now that data could not be
/// stored, see `close(2)`.
///
/// # Errors
/// What the kernel reports about the data written. The descriptor is closed all the same.
pub(super) fn close(file: File) -> io::Result<()> {
    let fd = file.into_raw_fd();
    // SAFETY: `into_raw_fd` has given up ownership, so nothing else closes this descriptor.
    if unsafe { libc::close(fd) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        error => Err(error),
    }
}
