//! System calls that `rustix` does not have.
#![allow(unsafe_code)]

use rustix::io::Errno;
use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use towline_wire::request::lock;

type Result<T> = std::result::Result<T, Errno>;

fn checked(result: libc::c_int) -> Result<()> {
    if result == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// `truncate(2)`.
pub(crate) fn truncate(path: &OsStr, size: u64) -> Result<()> {
    let path = CString::new(path.as_bytes()).map_err(|_| Errno::INVAL)?;
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

/// `fcntl(2)` F_SETLK or F_OFD_SETLK; families and kinds are those of the protocol.
pub(crate) fn lock(file: impl AsFd, family: u8, kind: u8, start: u64, length: u64) -> Result<()> {
    let range = range(kind, start, length);
    let fd = file.as_fd().as_raw_fd();
    let command = if family == lock::PROCESS { libc::F_SETLK } else { libc::F_OFD_SETLK };
    // SAFETY: the structure is the one that these commands read, and lives through the call.
    checked(unsafe { libc::fcntl(fd, command, &raw const range) })
}

/// `fcntl(2)` F_GETLK or F_OFD_GETLK: whether a lock is in the way.
pub(crate) fn test_lock(
    file: impl AsFd,
    family: u8,
    kind: u8,
    start: u64,
    length: u64,
) -> Result<bool> {
    let mut range = range(kind, start, length);
    let fd = file.as_fd().as_raw_fd();
    let command = if family == lock::PROCESS { libc::F_GETLK } else { libc::F_OFD_GETLK };
    // SAFETY: the structure is the one that these commands read and write, borrowed here.
    checked(unsafe { libc::fcntl(fd, command, &raw mut range) })?;
    Ok(range.l_type != libc::F_UNLCK as i16)
}
