//! Whether the kernel can trap system calls of this process.
#![allow(unsafe_code)]

/// True when it can: Syscall User Dispatch, on x86-64 since Linux 5.11. It is tried out in this
/// thread, for no time and with all addresses exempt.
#[must_use]
pub fn has_trap() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    const OFF: usize = 0;
    const ON: usize = 1;
    if !cfg!(target_arch = "x86_64") {
        return false;
    }
    // SAFETY: no call is trapped, as the range that is exempt is everything.
    unsafe {
        let tried = libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, ON, 0usize, usize::MAX, 0usize);
        libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, OFF, 0usize, 0usize, 0usize);
        tried == 0
    }
}
