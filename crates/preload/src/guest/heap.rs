//! `brk` for a guest. The kernel's heap belongs to our libc, which would lose its memory.

use crate::guard::{checked, inside};
use std::sync::Mutex;

/// Heap sizes to reserve, the first that addresses suffice for; beyond it a libc continues with mappings.
const BYTES_MAX: [usize; 2] = [16 << 30, 256 << 20];
const PAGE: usize = 4096;

struct Heap {
    start: usize,
    end: usize,
    /// Address up to which it may grow.
    limit: usize,
}

static HEAP: Mutex<Option<Heap>> = Mutex::new(None);

/// Reserves addresses without memory.
fn reserve(at: usize, bytes: usize, flags: i32) -> Result<usize, i32> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let call = [at, bytes, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0];
    // SAFETY: new addresses, or those reserved here.
    unsafe { checked(libc::SYS_mmap, call) }
}

/// `brk(2)` as the kernel has it: returns the end, which is the previous one on failure.
pub(super) fn set_end(asked: usize) -> usize {
    // No fork comes in between: in the child, the lock would stay taken.
    inside(|| Ok(move_end(&mut *HEAP.lock().map_err(|_| libc::EIO)?, asked))).unwrap_or(0)
}

fn move_end(heap: &mut Option<Heap>, asked: usize) -> usize {
    let heap = match heap {
        Some(heap) => heap,
        none => {
            let mut most = BYTES_MAX.iter();
            let Some((start, bytes)) =
                most.find_map(|bytes| Some((reserve(0, *bytes, 0).ok()?, bytes)))
            else {
                return 0;
            };
            none.insert(Heap { start, end: start, limit: start + bytes })
        }
    };
    if !(heap.start..=heap.limit).contains(&asked) {
        return heap.end;
    }
    let up = |address: usize| address.next_multiple_of(PAGE);
    let (now, new) = (up(heap.end), up(asked));
    let done = if new > now {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Unlike a new mapping there, this respects the data limit (`RLIMIT_DATA`).
        // SAFETY: addresses reserved here and not in use.
        unsafe { checked(libc::SYS_mprotect, [now, new - now, access as usize, 0, 0, 0]) }
    } else if new < now {
        reserve(new, now - new, libc::MAP_FIXED)
    } else {
        Ok(0)
    };
    if done.is_ok() {
        heap.end = asked;
    }
    heap.end
}
