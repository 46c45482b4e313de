//! The few system calls that have no safe wrapper.
#![allow(unsafe_code)]

use rustix::fs::Mode;
use rustix::io::Errno;
use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd};
use towline_wire::request::{UMASK_SHIFT, masked};

/// Number of `cachestat(2)`: it came after system calls got one number on all machines.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`.
#[repr(C)]
struct CacheRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct CacheState {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Reads bytes that need no waiting into the spare capacity of `target`, at most all of it.
///
/// # Errors
/// `EAGAIN` when the first byte is not in memory, `EOPNOTSUPP` when the file system cannot tell.
pub(crate) fn read_resident(
    file: impl AsFd,
    target: &mut Vec<u8>,
    offset: u64,
) -> Result<usize, Errno> {
    let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
    let spare = target.spare_capacity_mut();
    let part = libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: spare.len() };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the one element of the vector is the spare capacity of `target`, borrowed here.
    let count = unsafe { libc::preadv2(fd, &raw const part, 1, offset, libc::RWF_NOWAIT) };
    let count = usize::try_from(count).map_err(|_| last_error())?;
    // SAFETY: the kernel has written `count` bytes, at most all, of the spare capacity.
    unsafe { target.set_len(target.len() + count) };
    Ok(count)
}

/// Number of pages of a range that are in the page cache.
///
/// # Errors
/// `ENOSYS` before Linux 6.5, `EPERM` for files that this process may not write.
pub(crate) fn cached_pages(file: impl AsFd, offset: u64, length: u64) -> Result<u64, Errno> {
    let range = CacheRange { offset, length };
    let mut state = CacheState::default();
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: both structures are those of the kernel's interface and live through the call.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut state, 0) };
    if result == 0 { Ok(state.cached) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// What the calling thread's `umask(2)` is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Umask {
    /// That of the process, whatever it is.
    Unknown,
    /// Its own, and this.
    Own(u32),
    /// None, as for the whole process: threads cannot have their own here (some containers).
    Shared,
}

thread_local! {
    static UMASK: Cell<Umask> = const { Cell::new(Umask::Unknown) };
}

/// The permission bits to create a file with that was asked for so ([`UMASK_SHIFT`]). The umask becomes that of this thread:
/// only the kernel knows whether the directory hands down an access control list, and then ignores it.
pub(super) fn mode_for_new(mode: u32) -> Mode {
    let asked = mode >> UMASK_SHIFT & 0o777;
    let mut umask = UMASK.get();
    if umask == Umask::Unknown {
        // SAFETY: only working directory, root and umask are separated; nothing relies on sharing them.
        let separated = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) };
        umask = if separated.is_ok() { Umask::Own(0) } else { Umask::Shared };
        rustix::process::umask(Mode::empty());
    }
    if let Umask::Own(now) = &mut umask
        && *now != asked
    {
        rustix::process::umask(Mode::from_raw_mode(asked));
        *now = asked;
    }
    UMASK.set(umask);
    let mode = if umask == Umask::Shared { masked(mode) } else { mode };
    Mode::from_raw_mode(mode & 0o7777)
}
