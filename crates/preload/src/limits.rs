//! The limit of the length of files (`RLIMIT_FSIZE`): the kernel keeps it for local files, we for remote ones.

use crate::guard::{checked, system_call};

/// The limit of this process in bytes. The kernel is asked each time, as other processes may set it, too.
pub(crate) fn file_bytes() -> Option<u64> {
    let mut limit = libc::rlimit64 { rlim_cur: libc::RLIM64_INFINITY, rlim_max: 0 };
    let to = &raw mut limit as usize;
    let arguments = [0, libc::RLIMIT_FSIZE as usize, 0, to, 0, 0];
    // SAFETY: the structure outlives the call.
    let asked = unsafe { checked(libc::SYS_prlimit64, arguments) };
    (asked.is_ok() && limit.rlim_cur != libc::RLIM64_INFINITY).then_some(limit.rlim_cur)
}

/// How many of `count` bytes may be written there under a limit.
///
/// # Errors
/// `EFBIG`, and the signal, where none may.
pub(crate) fn room(limit: u64, at: u64, count: usize) -> Result<usize, i32> {
    match limit.checked_sub(at) {
        None | Some(0) => Err(exceeded()),
        Some(left) => Ok(count.min(usize::try_from(left).unwrap_or(usize::MAX))),
    }
}

/// Checks a length that a file is about to get. `now` tells the one that it has, which is no growth then.
///
/// # Errors
/// `EFBIG`, and the signal, where the file would grow beyond the limit; what `now` says.
pub(crate) fn check(length: u64, now: impl FnOnce() -> Result<u64, i32>) -> Result<(), i32> {
    if file_bytes().is_some_and(|limit| length > limit) && now()? < length {
        return Err(exceeded());
    }
    Ok(())
}

/// Tells this thread by the signal, as the kernel does.
fn exceeded() -> i32 {
    // SAFETY: plain system calls.
    unsafe {
        let thread = system_call(libc::SYS_gettid, [0; 6]) as usize;
        let process = system_call(libc::SYS_getpid, [0; 6]) as usize;
        system_call(libc::SYS_tgkill, [process, thread, libc::SIGXFSZ as usize, 0, 0, 0]);
    }
    libc::EFBIG
}
