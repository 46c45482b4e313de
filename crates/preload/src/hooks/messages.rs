//! Message catalogues. libc opens them internally, so it gets local copies of remote ones.

use crate::guard::inside;
use crate::languages::names;
use crate::place::{self, At};
use crate::table::real;
use crate::{mirror, start};
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;

/// The variables that name languages, highest precedence first.
const LANGUAGES: [&CStr; 4] = [c"LANGUAGE", c"LC_ALL", c"LC_MESSAGES", c"LANG"];

pub(crate) unsafe fn catopen(name: *const c_char, flags: c_int) -> *mut c_void {
    // SAFETY: the program passes valid arguments.
    unsafe {
        // A name without a slash is searched for in the folders of `NLSPATH`.
        let is_path = place::is_address(name) && CStr::from_ptr(name).to_bytes().contains(&b'/');
        let at = if is_path { place::find(libc::AT_FDCWD, name) } else { None };
        let copy = at.and_then(|at| inside(|| mirror::copy(&at)).ok());
        real::catopen(copy.as_ref().map_or(name, |copy| copy.as_ptr().cast()), flags)
    }
}

/// Copies the catalogues for the languages in the environment, and binds the domain to the copies.
pub(crate) unsafe fn bindtextdomain(domain: *const c_char, folder: *const c_char) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let remote = if domain.is_null() { None } else { place::find(libc::AT_FDCWD, folder) };
        let Some(at) = remote.filter(|_| !start::mounts().is_empty()) else {
            return real::bindtextdomain(domain, folder);
        };
        let copies = inside(|| {
            let domain = CStr::from_ptr(domain).to_bytes();
            for language in languages() {
                let path = [&at.path, &language, &b"LC_MESSAGES"[..], domain].join(&b'/');
                let path = [&path[..], b".mo"].concat();
                // Most do not exist: each language has several possible folders.
                let _ = mirror::copy(&At { path, ..at.clone() });
            }
            Ok([&mirror::folder_of(&at)[..], b"\0"].concat())
        });
        match copies {
            Ok(copies) => real::bindtextdomain(domain, copies.as_ptr().cast()),
            Err(_) => real::bindtextdomain(domain, folder),
        }
    }
}

/// Returns the folders in which libc looks for messages in the languages of the environment.
fn languages() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    for variable in LANGUAGES {
        // SAFETY: a constant name; the value is copied at once.
        let value = unsafe {
            let value = libc::getenv(variable.as_ptr());
            if value.is_null() { continue } else { CStr::from_ptr(value).to_bytes().to_vec() }
        };
        for name in value.split(|b| *b == b':') {
            for name in names(name) {
                if !all.contains(&name) {
                    all.push(name);
                }
            }
        }
    }
    all
}
