//! What is made in the run's directory: all users of the run may use it, whatever the umask of who made it.
//! The directory itself lets in only those whom a process became (`hooks/identity.rs`).

use crate::guard::checked;

fn call(number: i64, path: &[u8], mode: u32) -> Result<(), i32> {
    debug_assert_eq!(path.last(), Some(&0));
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, mode as usize, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    unsafe { checked(number, arguments) }.map(drop)
}

/// Opens what this process made to all users of the run. The path ends with a zero byte.
pub(crate) fn open_to_all(path: &[u8]) -> Result<(), i32> {
    call(libc::SYS_fchmodat, path, 0o777)
}

/// Makes a folder, unless it is there. The path ends with a zero byte.
pub(crate) fn make_folder(path: &[u8]) -> Result<(), i32> {
    match call(libc::SYS_mkdirat, path, 0o777) {
        Ok(()) => open_to_all(path),
        Err(libc::EEXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the folders above a path of which the first `known` bytes are there.
pub(crate) fn make_folders_above(path: &[u8], known: usize) -> Result<(), i32> {
    (known..path.len())
        .filter(|at| path[*at] == b'/')
        .try_for_each(|at| make_folder(&[&path[..at], b"\0"].concat()))
}
