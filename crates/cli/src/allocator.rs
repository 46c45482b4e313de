//! The allocator of the program: that of the system, but long buffers begin at multiples of 64.
//!
//! The kernel copies what is received or read by `rep movsb`. Some processors (measured: AMD EPYC) take three times as
//! long for it when the target lies 1 to 31 bytes behind the source, modulo 4096. Pages of files begin at multiples of
//! 4096, and the C library puts its long buffers 16 bytes behind such a multiple, so that nearly every read of a file
//! into a buffer from `malloc` meets that case: 1.3 GB/s received over loopback from `sendfile`, 4 to 5 GB/s with any
//! other address.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

/// Shorter memory is left to the system.
const LONG_BYTES: usize = 16 * 1024;
/// What the addresses of long memory are multiples of.
const ALIGNMENT: usize = 64;
/// Room for the address that the system gave, in front of the one that is handed out.
const NOTE_BYTES: usize = size_of::<*mut u8>();

/// See the module.
pub(crate) struct Allocator;

/// What the system is asked for, for long memory; `None` for all other.
fn outer(layout: Layout) -> Option<Layout> {
    let is_long = layout.size() >= LONG_BYTES && layout.align() <= ALIGNMENT;
    let size = layout.size().checked_add(NOTE_BYTES + ALIGNMENT).filter(|_| is_long)?;
    Layout::from_size_align(size, align_of::<*mut u8>()).ok()
}

/// The address to be handed out inside what the system gave.
///
/// # Safety
/// `base` is null, or begins memory as [`outer`] asks for.
unsafe fn inside(base: *mut u8) -> *mut u8 {
    if base.is_null() {
        return base;
    }
    let skipped = (base.addr() + NOTE_BYTES).next_multiple_of(ALIGNMENT) - base.addr();
    // SAFETY: at most NOTE_BYTES + ALIGNMENT - 1 are skipped, as many as there are too much; the note lies
    // in front of the result, behind `base`, and at a multiple of its own length.
    unsafe {
        let place = base.add(skipped);
        place.sub(NOTE_BYTES).cast::<*mut u8>().write(base);
        place
    }
}

// SAFETY: short memory is the system's. Long memory lies inside memory of the system, at a multiple of
// ALIGNMENT, with as many bytes behind it as are asked for; the address in front of it finds the system's again. Which
// of both it is depends on the layout alone, and that is the same when memory is taken and given back.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match outer(layout) {
            // SAFETY: as the caller promised; the layout is that of `outer`.
            Some(outer) => unsafe { inside(System.alloc(outer)) },
            // SAFETY: as the caller promised.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match outer(layout) {
            // SAFETY: as above; the note is in front of what has to be zero.
            Some(outer) => unsafe { inside(System.alloc_zeroed(outer)) },
            // SAFETY: as the caller promised.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match outer(layout) {
            // SAFETY: it was taken with the same layout, so the note is there.
            Some(outer) => unsafe {
                System.dealloc(memory.sub(NOTE_BYTES).cast::<*mut u8>().read(), outer);
            },
            // SAFETY: as the caller promised.
            None => unsafe { System.dealloc(memory, layout) },
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promised that size and alignment make a layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if outer(layout).is_none() && outer(wanted).is_none() {
            // SAFETY: both are the system's.
            return unsafe { System.realloc(memory, layout, size) };
        }
        // SAFETY: the new memory is apart from the old one, and both have the bytes that are copied.
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
