//! The file of the shared state, and its lock, by which is known whether a run has any process: its keeper and all
//! processes that map the file hold it shared.
#![allow(unsafe_code)]

use super::State;
use crate::STATE;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The file before it is mapped, locked so that nobody takes the run for one that was killed.
pub struct Prepared(OwnedFd);

impl Prepared {
    /// Opens the file in `directory`.
    ///
    /// # Errors
    /// Those of the system calls; `WouldBlock` if the run is over.
    pub fn open(directory: &[u8]) -> io::Result<Self> {
        Self::locked(open(directory, libc::O_RDWR)?, libc::LOCK_SH)
    }

    /// Opens the file of a run that has no process any more. Until it is dropped, no process can become one.
    ///
    /// # Errors
    /// Those of the system calls; `WouldBlock` if there is a process.
    pub fn abandoned(directory: &[u8]) -> io::Result<Self> {
        Self::locked(open(directory, libc::O_RDWR)?, libc::LOCK_EX)
    }

    pub(super) fn locked(fd: OwnedFd, how: i32) -> io::Result<Self> {
        lock(&fd, how).map(|()| Self(fd))
    }

    /// Maps the file.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn map(&self) -> io::Result<State> {
        State::map(&self.0)
    }

    /// Returns true while a process that [opened](State::open) the file lives. Once it returns false, no
    /// process can open the file any more.
    #[must_use]
    pub fn is_used(&self) -> bool {
        let is_used = lock(&self.0, libc::LOCK_EX).is_err();
        if is_used {
            // The attempt gave up the shared lock. Nobody takes the other one as long as the file is used.
            let _ = lock(&self.0, libc::LOCK_SH);
        }
        is_used
    }
}

/// Locks the file without waiting.
pub(super) fn lock(fd: &OwnedFd, how: i32) -> io::Result<()> {
    let number = fd.as_raw_fd() as usize;
    // SAFETY: a plain system call on an open descriptor; the raw one, since a library that hooks `flock` calls
    // this.
    match unsafe { libc::syscall(libc::SYS_flock, number, (how | libc::LOCK_NB) as usize) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens the file of the state in `directory`.
pub(super) fn open(directory: &[u8], flags: i32) -> io::Result<OwnedFd> {
    let mut path = directory.to_vec();
    path.push(b'/');
    path.extend_from_slice(STATE.as_bytes());
    path.push(0);
    // SAFETY: the path ends with a zero byte. The raw call: a library that hooks `open` calls this.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat,
            libc::AT_FDCWD as usize,
            path.as_ptr(),
            (flags | libc::O_CLOEXEC) as usize,
            0o600usize,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
