//! Finds the ranges of a file that have space allocated. `SEEK_DATA` cannot tell this: it reports
//! space that was allocated but never written as a hole.
#![allow(unsafe_code)]

use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// `FS_IOC_FIEMAP` of `linux/fs.h`.
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
/// Extents requested at once.
const EXTENTS: usize = 64;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// `struct fiemap` with room for its extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// Returns the first allocated parts of a range, in order and cut to the range; none if it has
/// none.
///
/// # Errors
/// `EOPNOTSUPP` and `ENOTTY` if the file system does not support this; errors of the device.
pub(super) fn allocated(file: impl AsFd, range: &Range<u64>) -> Result<Vec<Range<u64>>, Errno> {
    let mut map = Fiemap {
        start: range.start,
        length: range.end - range.start,
        flags: 0,
        mapped_extents: 0,
        extent_count: EXTENTS as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); EXTENTS],
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the structure has the layout of the kernel's interface, lives through the call, and
    // has room for as many extents as `extent_count` says.
    let result = unsafe { libc::ioctl(fd, FS_IOC_FIEMAP as _, &raw mut map) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    let found = map.extents.iter().take(map.mapped_extents as usize);
    let cut = found.map(|extent| {
        let end = extent.logical.saturating_add(extent.length);
        extent.logical.clamp(range.start, range.end)..end.clamp(range.start, range.end)
    });
    Ok(cut.filter(|part| !part.is_empty()).collect())
}
