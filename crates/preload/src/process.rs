//! Which process this is, without a system call.

use crate::guard::{checked, system_call};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// A page that the kernel clears in the child of every fork, also of one that libc does not know
/// of. The child of a `vfork` sees its parent's number: it uses the parent's memory, and with it the
/// parent's connections.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());
const PAGE_BYTES: usize = 4096;
const MADV_WIPEONFORK: usize = 18;

/// The page; made when it is first needed. `None` where the kernel cannot clear it (Linux before
/// 4.14): then we ask each time.
fn page() -> Option<&'static AtomicU32> {
    // SAFETY: null, or the page, which is never unmapped once it is there.
    let known = |page: *mut AtomicU32| unsafe { page.as_ref() };
    if let Some(page) = known(PAGE.load(Ordering::Acquire)) {
        return Some(page);
    }
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping, which is taken back unless it becomes the page.
    unsafe {
        let new =
            checked(libc::SYS_mmap, [0, PAGE_BYTES, protection, flags, usize::MAX, 0]).ok()?;
        let place = new as *mut AtomicU32;
        let found = match checked(libc::SYS_madvise, [new, PAGE_BYTES, MADV_WIPEONFORK, 0, 0, 0]) {
            Ok(_) => PAGE.compare_exchange(null_mut(), place, Ordering::AcqRel, Ordering::Acquire),
            Err(_) => Err(null_mut()),
        };
        match found {
            Ok(_) => known(place),
            Err(other) => {
                system_call(libc::SYS_munmap, [new, PAGE_BYTES, 0, 0, 0, 0]);
                known(other)
            }
        }
    }
}

/// The number of this process.
pub(crate) fn id() -> u32 {
    let place = page();
    match place.map(|place| place.load(Ordering::Relaxed)) {
        Some(known) if known != 0 => known,
        _ => {
            // SAFETY: a plain system call; libc's may answer from memory that a raw clone made
            // stale.
            let id = unsafe { system_call(libc::SYS_getpid, [0; 6]) as u32 };
            if let Some(place) = place {
                place.store(id, Ordering::Relaxed);
            }
            id
        }
    }
}
