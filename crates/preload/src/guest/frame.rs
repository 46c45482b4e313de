//! Passes what the child of a `vfork` changes in its caller's frames to the parent.
//!
//! A guest's child has its own memory, as it returns through our frames (`threads.rs`). But the child of
//! glibc's `posix_spawn` stores there why its program could not be executed. So the child's changes above
//! the stack pointer of the waiting parent are repeated in the parent once the child has executed a program
//! or ended. Other changes stay with the child.

use crate::guard::{checked, system_call};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Maximum number of bytes above the stack pointer.
const BYTES_MAX: usize = 4096;

/// Memory shared by both processes.
struct Shared {
    at: usize,
    length: usize,
    before: [u8; BYTES_MAX],
    after: [u8; BYTES_MAX],
    /// Whether the child's bytes are complete.
    is_told: AtomicBool,
}

/// Where this process stores its changes for its waiting parent.
static PARENT: AtomicPtr<Shared> = AtomicPtr::new(null_mut());

/// The frames of a thread that waits for its child.
pub(super) struct Frames(*mut Shared);

impl Frames {
    /// Shares the frames above this stack pointer, except for the signal stack, where our own frames are.
    /// Returns `None` if they cannot be shared: the child then keeps its changes.
    pub(super) fn share(at: usize, signals: libc::stack_t) -> Option<Self> {
        let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize;
        // SAFETY: new memory.
        let made = unsafe {
            checked(libc::SYS_mmap, [0, size_of::<Shared>(), access, flags, usize::MAX, 0])
        };
        let this = Self(made.ok()? as *mut Shared);
        let above = (signals.ss_sp as usize).checked_sub(at);
        let length = above.map_or(BYTES_MAX, |above| above.min(BYTES_MAX));
        // SAFETY: all zero is a valid value, and nobody else has it yet.
        let shared = unsafe { &mut *this.0 };
        shared.at = at;
        shared.length = read(at, &mut shared.before[..length]);
        (shared.length > 0).then_some(this)
    }

    /// Repeats the child's changes in the parent, once the child makes no more.
    pub(super) fn take_back(&self) {
        // SAFETY: the child has executed a program or ended; the addresses were readable before and belong
        // to frames that wait for us.
        unsafe {
            let shared = &*self.0;
            if !shared.is_told.load(Ordering::Acquire) {
                return;
            }
            let pairs = shared.before.iter().zip(&shared.after).take(shared.length);
            for (place, (_, now)) in pairs.enumerate().filter(|(_, (before, now))| before != now) {
                ((shared.at + place) as *mut u8).write_volatile(*now);
            }
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: made by `share`.
        unsafe {
            system_call(libc::SYS_munmap, [self.0 as usize, size_of::<Shared>(), 0, 0, 0, 0]);
        }
    }
}

/// Notes in a child whether its parent waits for it with shared frames.
pub(super) fn in_child(frames: Option<Frames>) {
    let shared = frames.map_or(null_mut(), |frames| std::mem::ManuallyDrop::new(frames).0);
    PARENT.store(shared, Ordering::Relaxed);
}

/// Publishes the changes, as this process is about to execute a program or to end.
pub(super) fn tell() {
    let shared = PARENT.load(Ordering::Relaxed);
    if shared.is_null() {
        return;
    }
    // SAFETY: from `in_child` on only this process writes to it, until it has ended or executed a program.
    unsafe {
        (*shared).is_told.store(false, Ordering::Relaxed);
        let length = (*shared).length;
        let told = read((*shared).at, &mut (&mut (*shared).after)[..length]) == length;
        (*shared).is_told.store(told, Ordering::Release);
    }
}

/// Reads memory of this process that may be unmapped; returns the number of bytes read.
fn read(at: usize, target: &mut [u8]) -> usize {
    let part = |at: usize| libc::iovec { iov_base: at as *mut _, iov_len: target.len() };
    let (to, from) = (part(target.as_ptr() as usize), part(at));
    let places = [&raw const to as usize, &raw const from as usize];
    // SAFETY: the target is as long as said; the kernel skips memory that cannot be read.
    unsafe {
        let own = system_call(libc::SYS_getpid, [0; 6]) as usize;
        let call = [own, places[0], 1, places[1], 1, 0];
        checked(libc::SYS_process_vm_readv, call).unwrap_or(0)
    }
}
