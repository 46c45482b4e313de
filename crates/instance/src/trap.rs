//! Whether the kernel can trap system calls of this process.
#![allow(unsafe_code)]

/// True where FS and GS can be changed by programs (Linux 5.9), as guests need it beside the trap.
#[must_use]
pub fn has_thread_registers() -> bool {
    const HWCAP2_FSGSBASE: libc::c_ulong = 2;
    // SAFETY: a plain function.
    cfg!(target_arch = "x86_64")
        && unsafe { libc::getauxval(libc::AT_HWCAP2) } & HWCAP2_FSGSBASE != 0
}

/// True where guests can be hosted, which is found out as by [`has_trap`].
#[must_use]
pub fn can_host() -> bool {
    has_thread_registers() && has_trap()
}

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
