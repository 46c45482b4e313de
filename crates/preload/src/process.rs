//! Which process this is, without a system call.

use crate::guard::{checked, system_call};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// A page that the kernel clears in the child of every fork, also of one that libc does not know
/// of. The child of a `vfork` sees its parent's number: it uses the parent's memory, and with it the
/// parent's connections.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
const PAGE_BYTES: usize = 4096;
const MADV_WIPEONFORK: usize = 18;

/// Prepares [`id`].
pub(crate) fn start() {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping.
    let page =
        unsafe { checked(libc::SYS_mmap, [0, PAGE_BYTES, protection, flags, usize::MAX, 0]) };
    let Ok(page) = page else { return };
    // SAFETY: our own page.
    let wiped = unsafe { checked(libc::SYS_madvise, [page, PAGE_BYTES, MADV_WIPEONFORK, 0, 0, 0]) };
    // Linux before 4.14 cannot; then we ask each time.
    if wiped.is_ok() {
        PAGE.store(page as *mut AtomicU32, Ordering::Release);
    }
}

/// The number of this process.
pub(crate) fn id() -> u32 {
    // SAFETY: null, or the page, which is never unmapped.
    let place = unsafe { PAGE.load(Ordering::Acquire).as_ref() };
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
