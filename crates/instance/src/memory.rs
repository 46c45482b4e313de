//! The memory that stands for a file mapped shared, as all processes of a run have it: a file in the
//! run's folder [`crate::MAPPINGS`]. Its first part tells, with a byte for each page, which pages were
//! read; the pages follow. Who reads pages in, changes them by other calls than stores, or writes them
//! back has the file's [`Turn`]. Who maps it holds a shared lock of it (`flock`); the first who does
//! begins with an empty one.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where the pages begin: files of up to 256 GiB.
pub const PAGES_AT: u64 = 64 << 20;

/// Name of the file for an inode of a mount.
#[must_use]
pub fn name(mount: u32, inode: u64) -> String {
    format!("{mount}-{inode}")
}

/// Held while pages are read in or written back. One for each opening of the file; the kernel takes it
/// back when a process dies.
pub struct Turn<'a>(BorrowedFd<'a>);

impl<'a> Turn<'a> {
    /// Waits until nobody else has it.
    ///
    /// # Errors
    /// What `fcntl(2)` says.
    pub fn take(fd: BorrowedFd<'a>) -> io::Result<Self> {
        loop {
            match set(fd, libc::F_WRLCK) {
                // A signal that waits until we are done.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map(|()| Self(fd)),
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Fails for no descriptor that it was taken with.
        let _ = set(self.0, libc::F_UNLCK);
    }
}

fn set(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: all zero is a valid `struct flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (kind as _, 1);
    let (fd, lock) = (fd.as_raw_fd() as usize, &raw const lock);
    // SAFETY: the structure outlives the call. The raw call: a library that hooks `fcntl` calls this.
    match unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_OFD_SETLKW as usize, lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
