//! The folders in which programs are searched for.

use crate::guard::system_call;
use crate::place;
use std::ffi::CStr;

/// Returns true if a search for a program can come upon remote folders.
pub(super) unsafe fn searches_remote(path: &[u8]) -> bool {
    candidates(b"x", path).any(|name| {
        // SAFETY: the path ends with a zero byte.
        unsafe { place::find(libc::AT_FDCWD, name.as_ptr().cast()) }.is_some()
    })
}

/// Returns the paths at which a search in these folders looks for a program. They end with a zero byte.
pub(super) fn candidates(name: &[u8], folders: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    folders.split(|b| *b == b':').map(move |folder| {
        // An empty name stands for the working directory.
        let slash: &[u8] = if folder.is_empty() { b"" } else { b"/" };
        [folder, slash, name, b"\0"].concat()
    })
}

/// Returns the folders of `PATH`.
pub(super) unsafe fn search_path() -> Vec<u8> {
    // SAFETY: a constant name; the value is copied at once.
    unsafe {
        let path = libc::getenv(c"PATH".as_ptr());
        if path.is_null() {
            b"/bin:/usr/bin".to_vec()
        } else {
            CStr::from_ptr(path).to_bytes().to_vec()
        }
    }
}

/// Returns false if there is certainly nothing at this path, which ends with a zero byte.
pub(super) fn may_be_there(path: &[u8]) -> bool {
    let at = path.as_ptr().cast();
    let call = [libc::AT_FDCWD as usize, at as usize, libc::F_OK as usize, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    unsafe {
        place::find(libc::AT_FDCWD, at).is_some()
            || system_call(libc::SYS_faccessat, call) != -(libc::ENOENT as isize)
            || super::led_in(libc::AT_FDCWD, at, true).is_some()
    }
}
