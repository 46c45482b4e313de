//! Enforces the file size limit (`RLIMIT_FSIZE`) for remote files, as the kernel does for local ones.

use crate::guard::{checked, system_call};

/// Returns the limit of this process in bytes. Asks the kernel each time, as other processes may set it,
/// too.
pub(crate) fn file_bytes() -> Option<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: libc::RLIM64_INFINITY, rlim_max: 0 };
    let to = &raw mut limit as usize;
    let arguments = [0, libc::RLIMIT_FSIZE as usize, 0, to, 0, 0];
    // SAFETY: the structure outlives the call.
    let asked = unsafe { checked(libc::SYS_prlimit64, arguments) };
    (asked.is_ok() && limit.rlim_cur != libc::RLIM64_INFINITY).then_some(limit.rlim_cur)
}

/// Returns how many of `count` bytes may be written at offset `at` under a limit.
///
/// # Errors
/// `EFBIG` if none may; also raises the signal.
pub(crate) fn room(limit: u64, at: u64, count: usize) -> Result<usize, i32> {
    match limit.checked_sub(at) {
        None | Some(0) => Err(exceeded()),
        Some(left) => Ok(count.min(usize::try_from(left).unwrap_or(usize::MAX))),
    }
}

/// Checks a new length of a file. `now` returns the current length; a file that does not grow passes.
///
/// # Errors
/// `EFBIG` if the file would grow beyond the limit, which also raises the signal; those of `now`.
pub(crate) fn check(length: u64, now: impl FnOnce() -> Result<u64, i32>) -> Result<(), i32> {
    if file_bytes().is_some_and(|limit| length > limit) && now()? < length {
        return Err(exceeded());
    }
    Ok(())
}

/// Sends `SIGXFSZ` to this thread, as the kernel does.
fn exceeded() -> i32 {
    // SAFETY: plain system calls.
    unsafe {
        let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
        let process = system_call(libc::SYS_getpid, [0; 6]) as usize;
        system_call(libc::SYS_tgkill, [process, thread, libc::SIGXFSZ as usize, 0, 0, 0]);
    }
    libc::EFBIG
}
