//! `brk` of a guest. The kernel's is that of our libc, which would be cut off.

use crate::guard::checked;
use std::sync::Mutex;

/// Most bytes; a libc goes on with mappings then.
const BYTES_MAX: usize = 256 << 20;
const PAGE: usize = 4096;

struct Heap {
    start: usize,
    end: usize,
}

static HEAP: Mutex<Option<Heap>> = Mutex::new(None);

fn map(at: usize, bytes: usize, access: i32, flags: i32) -> Result<usize, i32> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let call = [at, bytes, access as usize, flags as usize, usize::MAX, 0];
    // SAFETY: new memory, or within what was reserved here.
    unsafe { checked(libc::SYS_mmap, call) }
}

/// `brk(2)`, as the kernel has it: gives the end, which is the old one when that fails.
pub(super) fn set_end(asked: usize) -> usize {
    let Ok(mut heap) = HEAP.lock() else { return 0 };
    let heap = match &mut *heap {
        Some(heap) => heap,
        none => {
            let Ok(start) = map(0, BYTES_MAX, libc::PROT_NONE, 0) else { return 0 };
            none.insert(Heap { start, end: start })
        }
    };
    if !(heap.start..=heap.start + BYTES_MAX).contains(&asked) {
        return heap.end;
    }
    let up = |address: usize| address.next_multiple_of(PAGE);
    let (now, new) = (up(heap.end), up(asked));
    let done = if new > now {
        map(now, new - now, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED)
    } else if new < now {
        map(new, now - new, libc::PROT_NONE, libc::MAP_FIXED)
    } else {
        Ok(0)
    };
    if done.is_ok() {
        heap.end = asked;
    }
    heap.end
}
