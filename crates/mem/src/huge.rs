//! Reserves addresses for mappings that can contain huge pages.
#![allow(unsafe_code)]

use crate::page_bytes;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;

/// Size of a huge page on most machines. Shared memory of at least this length is mapped at a multiple
/// of it, because otherwise it could contain no huge page.
pub const HUGE_BYTES: usize = 2 * 1024 * 1024;

/// A range of addresses reserved for a mapping. Dropping it releases the addresses that no mapping took.
pub(crate) struct Room {
    start: *mut c_void,
    bytes: usize,
}

impl Room {
    /// Reserves addresses for a mapping of `length` bytes. Returns `None` if no huge page fits into it
    /// or if no addresses are available.
    pub(crate) fn of(length: usize) -> Option<Self> {
        let whole = length.checked_next_multiple_of(page_bytes())?;
        let bytes = whole.checked_add(HUGE_BYTES).filter(|_| length >= HUGE_BYTES)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)
        };
        Some(Self { start: start.ok()?, bytes })
    }

    /// Returns the address at which the mapping has to start.
    pub(crate) fn inside(&self) -> *mut c_void {
        self.start.map_addr(|at| at.next_multiple_of(HUGE_BYTES))
    }

    /// Releases the addresses before and after a mapping of `length` bytes, which has taken its place.
    pub(crate) fn leave(mut self, length: usize) {
        let (end, taken) = (self.start.wrapping_byte_add(self.bytes), self.inside());
        let behind = taken.wrapping_byte_add(length.next_multiple_of(page_bytes()));
        let behind = Self { start: behind, bytes: end.addr() - behind.addr() };
        self.bytes = taken.addr() - self.start.addr();
        drop((self, behind));
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: `of` reserved this range, and no mapping has taken it since.
            let result = unsafe { rustix::mm::munmap(self.start, self.bytes) };
            debug_assert!(result.is_ok(), "unmapping our own room failed");
        }
    }
}
