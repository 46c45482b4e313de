//! The memory that stands for a file mapped shared, as all processes of a run have it: a file in the
//! run's folder [`crate::MAPPINGS`]. Its first part tells, with a byte for each page, which pages were
//! read. Their originals follow, as the remote file holds them, once somebody may store to pages; then
//! the pages. What differs from its original is to be written back, by whoever comes to it first. Who reads
//! pages in, changes them by other calls than stores, or writes them back has the file's [`Turn`]. Who
//! maps it holds a shared lock of it (`flock`); the first who does begins with an empty one.
#![allow(unsafe_code)]

use crate::userfault::PAGE;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Pages at most: files of up to 256 GiB.
pub const PAGES_MAX: u64 = (64 << 20) - 1;
/// Where the byte is that tells that originals are kept.
pub const KEEPS_AT: u64 = PAGES_MAX;
/// Where the originals begin.
pub const ORIGINALS_AT: u64 = PAGES_MAX + 1;
/// Where the pages begin.
pub const PAGES_AT: u64 = ORIGINALS_AT + (PAGES_MAX + 1) * PAGE as u64;

/// Name of the file for an inode of a mount.
#[must_use]
pub fn name(mount: u32, inode: u64) -> String {
    format!("{mount}-{inode}")
}

/// The runs of pages that differ, in bytes. Both are equally long; the last page may be cut.
pub fn changed<'a>(now: &'a [u8], was: &'a [u8]) -> impl Iterator<Item = Range<usize>> + 'a {
    let length = now.len().min(was.len());
    let differs = move |page: usize| {
        let bytes = page * PAGE..length.min((page + 1) * PAGE);
        now[bytes.clone()] != was[bytes]
    };
    let pages = length.div_ceil(PAGE);
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = (next..pages).find(|page| differs(*page))?;
        next = (first..pages).find(|page| !differs(*page)).unwrap_or(pages);
        Some(first * PAGE..length.min(next * PAGE))
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_changed_pages_are_found() {
        let was = vec![0; 5 * PAGE + 10];
        let mut now = was.clone();
        assert_eq!(changed(&now, &was).next(), None);
        for at in [PAGE, 3 * PAGE - 1, 5 * PAGE + 9] {
            now[at] = 1;
        }
        let runs: Vec<_> = changed(&now, &was).collect();
        assert_eq!(runs, [PAGE..3 * PAGE, 5 * PAGE..5 * PAGE + 10]);
        assert_eq!(changed(&now[PAGE..2 * PAGE], &was[..PAGE]).next(), Some(0..PAGE));
        assert_eq!(changed(&[], &[]).next(), None);
    }
}
