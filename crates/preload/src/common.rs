//! Creates files and folders in the run's directory that all users of the run may use, whatever the
//! creator's umask. The directory itself admits only users that a process of the run became
//! (`hooks/identity.rs`).

use crate::guard::checked;

fn call(number: i64, path: &[u8], mode: u32) -> Result<(), i32> {
    debug_assert_eq!(path.last(), Some(&0));
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, mode as usize, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    unsafe { checked(number, arguments) }.map(drop)
}

/// Gives all users of the run access to what this process created. The path ends with a zero byte.
pub(crate) fn open_to_all(path: &[u8]) -> Result<(), i32> {
    call(libc::SYS_fchmodat, path, 0o777)
}

/// Creates a folder unless it exists. The path ends with a zero byte.
pub(crate) fn make_folder(path: &[u8]) -> Result<(), i32> {
    match call(libc::SYS_mkdirat, path, 0o777) {
        Ok(()) => open_to_all(path),
        Err(libc::EEXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Creates the folders above a path whose first `known` bytes exist.
pub(crate) fn make_folders_above(path: &[u8], known: usize) -> Result<(), i32> {
    (known..path.len())
        .filter(|at| path[*at] == b'/')
        .try_for_each(|at| make_folder(&[&path[..at], b"\0"].concat()))
}
