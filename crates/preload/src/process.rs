//! Who this process is, without a system call.

use crate::guard::{checked, system_call};
use crate::start;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use towline_instance::{Holder, State, pid_namespace};

/// A page with what is known of this process. The kernel clears it in the child of every fork, even one that
/// bypasses libc. A `vfork` sets it explicitly.
static PAGE: AtomicPtr<Known> = AtomicPtr::new(null_mut());

/// What is known of a process; zero: nothing yet.
struct Known {
    id: AtomicU32,
    /// Its PID namespace, or [`HOME`].
    namespace: AtomicU32,
}

/// The keeper's PID namespace. No namespace has such a number in `/proc`.
const HOME: u32 = 1;

const PAGE_BYTES: usize = 4096;
const MADV_WIPEONFORK: usize = 18;

/// Returns the page, and makes it at the first call. Returns `None` if the kernel cannot clear it (Linux
/// before 4.14): then each call asks the kernel.
fn page() -> Option<&'static Known> {
    // SAFETY: null, or the page, which is never unmapped once it is there.
    let known = |page: *mut Known| unsafe { page.as_ref() };
    if let Some(page) = known(PAGE.load(Ordering::Acquire)) {
        return Some(page);
    }
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping, which is taken back unless it becomes the page.
    unsafe {
        let new =
            checked(libc::SYS_mmap, [0, PAGE_BYTES, protection, flags, usize::MAX, 0]).ok()?;
        let place = new as *mut Known;
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
    match place.map(|place| place.id.load(Ordering::Relaxed)) {
        Some(known) if known != 0 => known,
        _ => {
            // SAFETY: a plain system call. libc's wrapper may return a number that a raw clone made stale.
            let id = unsafe { system_call(libc::SYS_getpid, [0; 6]) as u32 };
            if let Some(place) = place {
                place.id.store(id, Ordering::Relaxed);
            }
            id
        }
    }
}

/// Returns the number of this process's PID namespace if it is another one than the keeper's, else zero. Without `/proc`,
/// nobody knows of another one.
pub(crate) fn namespace() -> u32 {
    let place = page();
    let known = match place.map(|place| place.namespace.load(Ordering::Relaxed)) {
        Some(known) if known != 0 => known,
        _ => {
            // Before the run has begun, nobody asks a server.
            let home = start::state().map_or(0, State::namespace);
            if home == 0 {
                return 0;
            }
            let other = pid_namespace().filter(|own| *own != home);
            let known = other.map_or(HOME, |own| own as u32);
            if let Some(place) = place {
                place.namespace.store(known, Ordering::Relaxed);
            }
            known
        }
    };
    if known == HOME { 0 } else { known }
}

/// Returns what no two processes of the run have in common, as an owner of locks: the number, and the PID namespace in
/// which it is this process's.
pub(crate) fn identity() -> u64 {
    u64::from(namespace()) << 32 | u64::from(id())
}

/// Returns this process as a holder of locks that the processes of a run share.
pub(crate) fn holder() -> Holder {
    Holder::new(id(), namespace() != 0)
}

/// Returns the number of the process with this [`identity`]; zero if this one does not know it by a number.
pub(crate) fn number_of(identity: u64) -> u32 {
    if identity >> 32 == u64::from(namespace()) { identity as u32 } else { 0 }
}

/// Returns the number if it is known.
pub(crate) fn known() -> Option<u32> {
    // SAFETY: null, or the page, which is never unmapped once it is there.
    let page = unsafe { PAGE.load(Ordering::Acquire).as_ref() }?;
    Some(page.id.load(Ordering::Relaxed)).filter(|id| *id != 0)
}

/// Notes that another process uses this memory from now on: process `id`, or one whose number is not known
/// yet.
pub(crate) fn changed(id: Option<u32>) {
    // SAFETY: as above.
    if let Some(page) = unsafe { PAGE.load(Ordering::Acquire).as_ref() } {
        page.id.store(id.unwrap_or(0), Ordering::Relaxed);
        page.namespace.store(0, Ordering::Relaxed);
    }
}
