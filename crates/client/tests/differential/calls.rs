//! System calls that `rustix` does not have.
#![allow(unsafe_code)]

use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd};

type Result<T> = std::result::Result<T, Errno>;

fn checked(result: libc::c_int) -> Result<()> {
    if result == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// `truncate(2)`.
pub(crate) fn truncate(path: &str, size: u64) -> Result<()> {
    let path = CString::new(path).map_err(|_| Errno::INVAL)?;
    // SAFETY: the path is a string that lives through the call.
    checked(unsafe { libc::truncate(path.as_ptr(), size as i64) })
}

fn range(kind: u8, start: u64, length: u64) -> libc::flock {
    let kinds = [libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK];
    libc::flock {
        l_type: kinds[usize::from(kind)] as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start as i64,
        l_len: length as i64,
        l_pid: 0,
    }
}

/// `fcntl(2)` F_OFD_SETLK; kinds are those of the protocol.
pub(crate) fn lock(file: impl AsFd, kind: u8, start: u64, length: u64) -> Result<()> {
    let range = range(kind, start, length);
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the structure is the one that this command reads, and lives through the call.
    checked(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const range) })
}

/// `fcntl(2)` F_OFD_GETLK: whether a lock is in the way.
pub(crate) fn test_lock(file: impl AsFd, kind: u8, start: u64, length: u64) -> Result<bool> {
    let mut range = range(kind, start, length);
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the structure is the one that this command reads and writes, borrowed here.
    checked(unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut range) })?;
    Ok(range.l_type != libc::F_UNLCK as i16)
}
