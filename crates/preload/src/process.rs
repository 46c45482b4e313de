//! Returns the number of this process without a system call.

use crate::guard::{checked, system_call};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// A page with the number of this process. The kernel clears it in the child of every fork, even one that
/// bypasses libc. A `vfork` sets it explicitly.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());
const PAGE_BYTES: usize = 4096;
const MADV_WIPEONFORK: usize = 18;

/// Returns the page, and makes it at the first call. Returns `None` if the kernel cannot clear it (Linux
/// before 4.14): then each call asks the kernel.
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

/// Returns the number of this process.
pub(crate) fn id() -> u32 {
    let place = page();
    match place.map(|place| place.load(Ordering::Relaxed)) {
        Some(known) if known != 0 => known,
        _ => {
            // SAFETY: a plain system call. libc's wrapper may return a number that a raw clone made stale.
            let id = unsafe { system_call(libc::SYS_getpid, [0; 6]) as u32 };
            if let Some(place) = place {
                place.store(id, Ordering::Relaxed);
            }
            id
        }
    }
}

/// Returns the number if it is known.
pub(crate) fn known() -> Option<u32> {
    // SAFETY: null, or the page, which is never unmapped once it is there.
    let page = unsafe { PAGE.load(Ordering::Acquire).as_ref() }?;
    Some(page.load(Ordering::Relaxed)).filter(|id| *id != 0)
}

/// Notes that another process uses this memory from now on: process `id`, or one whose number is not known
/// yet.
pub(crate) fn changed(id: Option<u32>) {
    // SAFETY: as above.
    if let Some(page) = unsafe { PAGE.load(Ordering::Acquire).as_ref() } {
        page.store(id.unwrap_or(0), Ordering::Relaxed);
    }
}
