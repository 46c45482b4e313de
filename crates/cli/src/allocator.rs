//! The global allocator: that of the system, except that long buffers begin at multiples of 64.
//!
//! The kernel copies data that it receives or reads with `rep movsb`. On some processors (measured: AMD EPYC)
//! this takes three times as long if the target lies 1 to 31 bytes behind the source, modulo 4096. Pages of
//! files begin at multiples of 4096, and the C library places long buffers 16 bytes behind a multiple. So
//! nearly every read of a file into a buffer from `malloc` is slow: loopback receives 1.3 GB/s from
//! `sendfile`, and 4 to 5 GB/s with any other address.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

/// Shorter allocations are left to the system.
const LONG_BYTES: usize = 16 * 1024;
/// Alignment of long allocations.
const ALIGNMENT: usize = 64;
/// Room in front of a long allocation for the address that the system returned.
const NOTE_BYTES: usize = size_of::<*mut u8>();

/// The global allocator; see the module's documentation.
pub(crate) struct Allocator;

/// The layout to request from the system for a long allocation; `None` for all others.
fn outer(layout: Layout) -> Option<Layout> {
    let is_long = layout.size() >= LONG_BYTES && layout.align() <= ALIGNMENT;
    let size = layout.size().checked_add(NOTE_BYTES + ALIGNMENT).filter(|_| is_long)?;
    Layout::from_size_align(size, align_of::<*mut u8>()).ok()
}

/// Returns the address to hand out within an allocation of the system, and stores `base` in front of it.
///
/// # Safety
/// `base` is null or points to an allocation with a layout from [`outer`].
unsafe fn inside(base: *mut u8) -> *mut u8 {
    if base.is_null() {
        return base;
    }
    let skipped = (base.addr() + NOTE_BYTES).next_multiple_of(ALIGNMENT) - base.addr();
    // SAFETY: `skipped` is at most NOTE_BYTES + ALIGNMENT - 1, and `outer` requests NOTE_BYTES + ALIGNMENT
    // extra bytes. So `place` and the bytes handed out lie within the allocation. `skipped` is at least
    // NOTE_BYTES, so the note lies between `base` and `place`; its address is a multiple of its own size, as
    // `place` is a multiple of ALIGNMENT.
    unsafe {
        let place = base.add(skipped);
        place.sub(NOTE_BYTES).cast::<*mut u8>().write(base);
        place
    }
}

// SAFETY: short allocations are the system's own. A long allocation lies within one of the system's, at a
// multiple of ALIGNMENT, with the requested number of bytes behind it; the note in front of it holds the
// address to return to the system. The layout alone decides which of the two it is, and the caller passes the
// same layout to allocate and free.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match outer(layout) {
            // SAFETY: the caller promised a valid layout, and `inside` gets an allocation with the layout
            // from `outer`.
            Some(outer) => unsafe { inside(System.alloc(outer)) },
            // SAFETY: as the caller promised.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match outer(layout) {
            // SAFETY: as above; the note lies in front of the bytes that must be zero.
            Some(outer) => unsafe { inside(System.alloc_zeroed(outer)) },
            // SAFETY: as the caller promised.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match outer(layout) {
            // SAFETY: the memory was allocated with the same layout, so the note is there.
            Some(outer) => unsafe {
                System.dealloc(memory.sub(NOTE_BYTES).cast::<*mut u8>().read(), outer);
            },
            // SAFETY: as the caller promised.
            None => unsafe { System.dealloc(memory, layout) },
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promised that the size and alignment make a valid layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if outer(layout).is_none() && outer(wanted).is_none() {
            // SAFETY: both the old and the new allocation are the system's own.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: the new memory does not overlap the old, and both have at least the number of bytes copied.
        unsafe {
            let new = self.alloc(wanted);
            if !new.is_null() {
                std::ptr::copy_nonoverlapping(memory, new, layout.size().min(size));
                self.dealloc(memory, layout);
            }
            new
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGNMENT, LONG_BYTES};

    #[test]
    fn long_buffers_begin_at_multiples_of_64() {
        for size in [LONG_BYTES, LONG_BYTES + 1, 128 << 10, 1 << 20, 40 << 20] {
            let room = Vec::<u8>::with_capacity(size);
            assert_eq!(room.as_ptr().addr() % ALIGNMENT, 0, "{size}");
            let zeroes = vec![0_u8; size];
            assert_eq!(zeroes.as_ptr().addr() % ALIGNMENT, 0, "{size}");
            assert!(zeroes.iter().all(|byte| *byte == 0), "{size}");
        }
    }

    #[test]
    fn bytes_stay_while_a_buffer_grows_and_shrinks() {
        let mut bytes = Vec::new();
        for number in 0..3 * LONG_BYTES {
            bytes.push((number % 251) as u8);
            if number.is_multiple_of(1000) {
                bytes.shrink_to_fit();
            }
        }
        while bytes.len() > 10 {
            bytes.truncate(bytes.len() * 2 / 3);
            bytes.shrink_to_fit();
            let right = bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8);
            assert!(right, "{}", bytes.len());
        }
    }
}
