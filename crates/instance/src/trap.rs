//! Tests whether the kernel can trap system calls of this process.
#![allow(unsafe_code)]

/// Returns true if programs can set FS and GS themselves (Linux 5.9), which guests need besides the trap.
#[must_use]
pub fn has_thread_registers() -> bool {
    const HWCAP2_FSGSBASE: libc::c_ulong = 2;
    // SAFETY: a plain function.
    cfg!(target_arch = "x86_64")
        && unsafe { libc::getauxval(libc::AT_HWCAP2) } & HWCAP2_FSGSBASE != 0
}

/// Returns true if this machine can host guests. Tries the trap out as [`has_trap`] does.
#[must_use]
pub fn can_host() -> bool {
    has_thread_registers() && has_trap()
}

/// Returns true if the kernel can trap: it has Syscall User Dispatch (x86-64, Linux 5.11). Enables it
/// briefly for this thread, with all addresses exempt.
#[must_use]
pub fn has_trap() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: libc::c_int = 59;
    const OFF: usize = 0;
    const ON: usize = 1;
    if !cfg!(target_arch = "x86_64") {
        return false;
    }
    // SAFETY: no call is trapped, as the exempt range covers all addresses.
    unsafe {
        let tried = libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, ON, 0usize, usize::MAX, 0usize);
        libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, OFF, 0usize, 0usize, 0usize);
        tried == 0
    }
}
