//! The library's own allocator: the program may be inside its allocator when it calls us, and may replace
//! it. Blocks are powers of two from fresh mappings; large blocks are mappings of their own.
//!
//! Signal handlers wait while the lock is held, wherever it is taken: a handler may call us, or jump out of
//! what it interrupted and leave the lock taken.

use crate::guard::Quiet;
use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Smallest block size, as a power of two.
const SMALLEST: u32 = 4;
/// Largest block size that comes from a chunk, as a power of two.
const LARGEST: u32 = 17;
const CLASSES: usize = (LARGEST - SMALLEST + 1) as usize;
const CHUNK_BYTES: usize = 1 << 20;

/// The allocator.
pub(crate) struct Arena {
    lock: AtomicU32,
    /// Free blocks of each size; a free block begins with the address of the next one.
    free: [AtomicPtr<u8>; CLASSES],
    next: AtomicUsize,
    end: AtomicUsize,
}

impl Arena {
    pub(crate) const fn new() -> Self {
        Self {
            lock: AtomicU32::new(0),
            free: [const { AtomicPtr::new(null_mut()) }; CLASSES],
            next: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
        }
    }

    /// Taken around `fork`, so that the child does not inherit it from a thread that it lacks.
    pub(crate) fn lock(&self) {
        while self.lock.swap(1, Ordering::Acquire) != 0 {
            // SAFETY: gives up the processor, nothing else.
            unsafe { libc::syscall(libc::SYS_sched_yield) };
        }
    }

    pub(crate) fn unlock(&self) {
        self.lock.store(0, Ordering::Release);
    }

    /// Hides all freed blocks: another process uses this memory for a while, and must not change the
    /// owner's blocks.
    pub(crate) fn set_aside(&self) {
        for list in &self.free {
            list.store(null_mut(), Ordering::Relaxed);
        }
    }

    /// Returns the unused rest of the current chunk.
    pub(crate) fn unused(&self) -> Range<usize> {
        self.next.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed)
    }

    /// Takes back what the other process allocated: the owner continues with the arena as it was before.
    /// `left` is the other process's [`Self::unused`] at its end.
    ///
    /// # Safety
    /// Blocks allocated since [`Self::set_aside`] are no longer in use.
    pub(crate) unsafe fn take_back(&self, left: Range<usize>) {
        let before = self.unused();
        if before.end == left.end && (before.start..=before.end).contains(&left.start) {
            let used = left.start - before.start;
            // SAFETY: within the chunk; the caller says that nobody uses it. Zero, as new blocks must be.
            unsafe { (before.start as *mut u8).write_bytes(0, used) };
        } else {
            // It allocated chunks of its own, so how much of this one it used is unknown.
            self.next.store(0, Ordering::Relaxed);
            self.end.store(0, Ordering::Relaxed);
        }
    }

    /// Returns a block, and whether it was never used: then it is zero and not yet backed by pages.
    fn small(&self, class: u32) -> (*mut u8, bool) {
        let bytes = 1usize << class;
        let list = &self.free[(class - SMALLEST) as usize];
        let _quiet = Quiet::begin();
        self.lock();
        let first = list.load(Ordering::Relaxed);
        let is_new = first.is_null();
        let block = if !is_new {
            // SAFETY: a free block holds the next one's address; the list is ours while locked.
            list.store(unsafe { first.cast::<*mut u8>().read() }, Ordering::Relaxed);
            first
        } else {
            let mut at = self.next.load(Ordering::Relaxed).next_multiple_of(bytes);
            if at == 0 || at + bytes > self.end.load(Ordering::Relaxed) {
                at = map(CHUNK_BYTES) as usize;
                if at != 0 {
                    self.end.store(at + CHUNK_BYTES, Ordering::Relaxed);
                }
            }
            if at != 0 {
                self.next.store(at + bytes, Ordering::Relaxed);
            }
            at as *mut u8
        };
        self.unlock();
        (block, is_new)
    }
}

fn class_of(layout: Layout) -> u32 {
    layout.size().max(layout.align()).next_power_of_two().trailing_zeros().max(SMALLEST)
}

fn map(bytes: usize) -> *mut u8 {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping; a raw call, as `mmap` is hooked.
    let at = unsafe {
        crate::guard::system_call(
            libc::SYS_mmap,
            [0, bytes, protection as usize, flags as usize, usize::MAX, 0],
        )
    };
    if at < 0 { null_mut() } else { at as *mut u8 }
}

// SAFETY: blocks are at least as large and as aligned as requested (chunks are aligned to pages and blocks
// within them to their size; no layout here asks for more than a page), and are handed out once until they
// are freed.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let class = class_of(layout);
        if class > LARGEST {
            map(layout.size().next_multiple_of(4096))
        } else {
            self.small(class).0
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let class = class_of(layout);
        if class > LARGEST {
            return map(layout.size().next_multiple_of(4096));
        }
        let (block, is_new) = self.small(class);
        // Most programs are short-lived: memory that they do not touch costs them nothing.
        if !is_new && !block.is_null() {
            // SAFETY: the block holds at least this many bytes.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let class = class_of(layout);
        if class > LARGEST {
            let bytes = layout.size().next_multiple_of(4096);
            // SAFETY: it was mapped by `map` with this length.
            unsafe {
                crate::guard::system_call(libc::SYS_munmap, [block as usize, bytes, 0, 0, 0, 0])
            };
            return;
        }
        let list = &self.free[(class - SMALLEST) as usize];
        let _quiet = Quiet::begin();
        self.lock();
        // SAFETY: the block is ours again and holds at least an address.
        unsafe { block.cast::<*mut u8>().write(list.load(Ordering::Relaxed)) };
        list.store(block, Ordering::Relaxed);
        self.unlock();
    }
}
