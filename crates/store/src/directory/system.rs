//! The few system calls that have no safe wrapper.
#![allow(unsafe_code)]

use rustix::fs::Mode;
use rustix::io::Errno;
use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use towline_wire::request::{UMASK_SHIFT, masked};

/// Number of `cachestat(2)`, which is the same on all architectures, as for all newer system calls.
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
/// `EAGAIN` if the first byte is not in memory, `EOPNOTSUPP` if the file system does not support
/// this.
pub(crate) fn read_resident(
    file: impl AsFd,
    target: &mut Vec<u8>,
    offset: u64,
) -> Result<usize, Errno> {
    let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
    let spare = target.spare_capacity_mut();
    let part = libc::iovec { iov_base: spare.as_mut_ptr().cast(), iov_len: spare.len() };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the only element of the vector is the spare capacity of `target`, which is borrowed
    // here.
    let count = unsafe { libc::preadv2(fd, &raw const part, 1, offset, libc::RWF_NOWAIT) };
    let count = usize::try_from(count).map_err(|_| last_error())?;
    // SAFETY: the kernel has written `count` bytes of the spare capacity, at most all of it.
    unsafe { target.set_len(target.len() + count) };
    Ok(count)
}

/// Returns true if an open file is a regular file or a directory, unless the kernel or a container does not say
/// so in this way (`FIOQSIZE`). It takes less than half of the time of `statx(2)`.
pub(super) fn is_file_or_directory(file: impl AsFd) -> bool {
    let mut occupied = 0_i64;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: this asks how many bytes the file occupies, which the kernel writes to `occupied`; it never asks a
    // driver.
    unsafe { libc::ioctl(fd, libc::FIOQSIZE, &raw mut occupied) == 0 }
}

/// Returns the number of pages of a range that are in the page cache.
///
/// # Errors
/// `ENOSYS` before Linux 6.5, `EPERM` for files that this process may not write.
pub(crate) fn cached_pages(file: impl AsFd, offset: u64, length: u64) -> Result<u64, Errno> {
    let range = CacheRange { offset, length };
    let mut state = CacheState::default();
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: both structures have the layout of the kernel's interface and live through the call.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut state, 0) };
    if result == 0 { Ok(state.cached) } else { Err(last_error()) }
}

/// `truncate(2)`: sets the length of the file at `path`, which need not be open for writing.
///
/// # Errors
/// Those of the system call.
pub(super) fn truncate(path: &str, length: u64) -> Result<(), Errno> {
    let length = i64::try_from(length).map_err(|_| Errno::INVAL)?;
    let path = std::ffi::CString::new(path).map_err(|_| Errno::INVAL)?;
    // SAFETY: the path ends with a zero byte and lives through the call.
    let result = unsafe { libc::truncate(path.as_ptr(), length) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// `close(2)`, unlike dropping the descriptor, with its error.
///
/// # Errors
/// Those of the system call. The descriptor is closed all the same.
pub(super) fn close(fd: OwnedFd) -> Result<(), Errno> {
    // SAFETY: the descriptor was this function's own, and nobody uses it afterwards.
    let result = unsafe { libc::close(fd.into_raw_fd()) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// The `umask(2)` of the calling thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Umask {
    /// That of the process, whatever its value.
    Unknown,
    /// Its own, with this value.
    Own(u32),
    /// Zero for the whole process: threads cannot have their own here (some containers).
    Shared,
}

thread_local! {
    static UMASK: Cell<Umask> = const { Cell::new(Umask::Unknown) };
}

/// Returns the permission bits to create a file with for a `mode` of the protocol
/// ([`UMASK_SHIFT`]), and sets the umask of this thread: only the kernel knows whether the
/// directory has a default access control list, in which case it ignores the umask.
pub(super) fn mode_for_new(mode: u32) -> Mode {
    let asked = mode >> UMASK_SHIFT & 0o777;
    let mut umask = UMASK.get();
    if umask == Umask::Unknown {
        // SAFETY: this separates only working directory, root and umask, and nothing relies on
        // sharing them.
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
