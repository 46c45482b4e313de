//! `dlopen` and `dlmopen` of libraries that are remote.

use crate::guard::inside;
use crate::{mirror, place};
use libc::{c_char, c_void};
use std::ffi::CStr;

/// What is to be opened, and libc's function that does it.
#[repr(C)]
pub(crate) struct Chosen {
    path: *const c_char,
    function: *const c_void,
}

/// The path that libc's `dlopen` is to get: that of a local copy for a remote library.
pub(crate) unsafe extern "C" fn choose(path: *const c_char) -> Chosen {
    // SAFETY: as the program says.
    let chosen = unsafe { local_copy(path) };
    Chosen { path: chosen.unwrap_or(path), function: crate::table::real_dlopen() }
}

/// The same for `dlmopen`.
pub(crate) unsafe extern "C" fn choose_apart(path: *const c_char) -> Chosen {
    // SAFETY: as the program says.
    let chosen = unsafe { local_copy(path) };
    Chosen { path: chosen.unwrap_or(path), function: crate::table::real_dlmopen() }
}

unsafe fn local_copy(path: *const c_char) -> Option<*const c_char> {
    if crate::start::mounts().is_empty() || !place::is_address(path) || crate::guard::is_inside() {
        return None;
    }
    // SAFETY: as the program says.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let search = search();
    if !name.contains(&b'/') {
        // The loader looks in the folders of copies; let there be one.
        inside(|| {
            for folder in search.split(|b| *b == b':').filter_map(mirror::original) {
                let full = [&folder[..], b"/", name, b"\0"].concat();
                // SAFETY: it ends with a zero byte.
                let at = unsafe { place::find_inside(full.as_ptr().cast()) };
                if let Some(copy) = at.and_then(|at| mirror::copy(&at).ok()) {
                    mirror::gather(&copy, &search);
                    break;
                }
            }
            Ok(())
        })
        .ok()?;
        return None;
    }
    // SAFETY: as the program says.
    let at = unsafe { place::find(libc::AT_FDCWD, path) }?;
    // The loader may keep the name for as long as the library.
    inside(|| {
        let copy = mirror::copy(&at)?;
        mirror::gather(&copy, &search);
        Ok(copy.leak().as_ptr().cast::<c_char>())
    })
    .ok()
}

/// The loader's search path.
fn search() -> Vec<u8> {
    // SAFETY: a constant name; the value is copied at once.
    unsafe {
        let value = libc::getenv(c"LD_LIBRARY_PATH".as_ptr());
        if value.is_null() { Vec::new() } else { CStr::from_ptr(value).to_bytes().to_vec() }
    }
}
