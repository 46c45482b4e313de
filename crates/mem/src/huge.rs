//! Addresses at which there can be huge pages.
#![allow(unsafe_code)]

use crate::page_bytes;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;

/// Bytes of a huge page, on most machines. Longer shared memory is mapped at a multiple of that, else there could be none in it.
pub const HUGE_BYTES: usize = 2 * 1024 * 1024;

/// Addresses that are reserved for a mapping, and given back with this unless it took them.
pub(crate) struct Room {
    start: *mut c_void,
    bytes: usize,
}

impl Room {
    /// Addresses for a mapping of so many bytes; `None` where no huge page fits, or there are no addresses.
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

    /// Where the mapping begins.
    pub(crate) fn inside(&self) -> *mut c_void {
        self.start.map_addr(|at| at.next_multiple_of(HUGE_BYTES))
    }

    /// A mapping of so many bytes has its place: what is in front of it and behind it is given back.
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
            // SAFETY: reserved by `of`, and no mapping's since.
            let result = unsafe { rustix::mm::munmap(self.start, self.bytes) };
            debug_assert!(result.is_ok(), "unmapping our own room failed");
        }
    }
}
