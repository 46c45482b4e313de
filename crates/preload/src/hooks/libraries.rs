//! `dlopen` and `dlmopen` of libraries that are remote, and the names by which these know themselves.

use crate::guard::inside;
use crate::table::real;
use crate::{mirror, place};
use libc::{Dl_info, c_char, c_int, c_void, dl_phdr_info, size_t};
use std::ffi::CStr;
use std::sync::Mutex;

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

/// Whom an address belongs to: a remote library by its own name. Some look for their files beside it.
pub(crate) unsafe fn dladdr(address: *const c_void, info: *mut Dl_info) -> c_int {
    // SAFETY: as the program says; libc has filled in what it tells of.
    unsafe { with_own_name(real::dladdr(address, info), info) }
}

/// The same with more of what the loader knows.
pub(crate) unsafe fn dladdr1(
    address: *const c_void,
    info: *mut Dl_info,
    more: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    // SAFETY: as the program says; libc has filled in what it tells of.
    unsafe { with_own_name(real::dladdr1(address, info, more, flags), info) }
}

/// # Safety
/// `info` is filled in when something was found.
unsafe fn with_own_name(found: c_int, info: *mut Dl_info) -> c_int {
    if found != 0 {
        // SAFETY: as the caller says.
        unsafe { (*info).dli_fname = own_name((*info).dli_fname) };
    }
    found
}

type Visit = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;

/// All libraries, remote ones by their own names.
pub(crate) unsafe fn dl_iterate_phdr(visit: *const c_void, data: *mut c_void) -> c_int {
    unsafe extern "C" fn renamed(
        info: *mut dl_phdr_info,
        size: size_t,
        chosen: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader's own variable for this call, and what is below.
        unsafe {
            let (visit, data) = *chosen.cast::<(Visit, *mut c_void)>();
            (*info).dlpi_name = own_name((*info).dlpi_name);
            visit(info, size, data)
        }
    }
    if crate::start::mounts().is_empty() || visit.is_null() {
        // SAFETY: as the program says.
        return unsafe { real::dl_iterate_phdr(visit, data) };
    }
    // SAFETY: what the program gives is such a function.
    let visit: Visit = unsafe { std::mem::transmute(visit) };
    let mut chosen = (visit, data);
    // SAFETY: the pair outlives the call.
    unsafe { real::dl_iterate_phdr(renamed as *const c_void, (&raw mut chosen).cast()) }
}

/// The name of a remote library by the loader's name of its copy; that name for any other.
///
/// # Safety
/// `name` is null or a string.
unsafe fn own_name(name: *const c_char) -> *const c_char {
    /// Programs may keep the names as long as they like: one for each library.
    static NAMES: Mutex<Vec<(usize, Vec<u8>)>> = Mutex::new(Vec::new());
    if name.is_null() || crate::start::mounts().is_empty() {
        return name;
    }
    // SAFETY: as the caller says.
    let copy = unsafe { CStr::from_ptr(name) }.to_bytes();
    // No memory is taken for all the others, of which some ask for each exception.
    if !copy.starts_with(crate::start::directory()) {
        return name;
    }
    let own = inside(|| {
        let original = mirror::original(copy).ok_or(libc::ENOENT)?;
        let mut names = NAMES.lock().map_err(|_| libc::EIO)?;
        if let Some((at, _)) = names.iter().find(|(_, known)| *known == original) {
            return Ok(*at);
        }
        let text = [&original[..], b"\0"].concat().leak().as_ptr() as usize;
        names.push((text, original));
        Ok(text)
    });
    own.map_or(name, |own| own as *const c_char)
}

/// The loader's search path.
fn search() -> Vec<u8> {
    // SAFETY: a constant name; the value is copied at once.
    unsafe {
        let value = libc::getenv(c"LD_LIBRARY_PATH".as_ptr());
        if value.is_null() { Vec::new() } else { CStr::from_ptr(value).to_bytes().to_vec() }
    }
}
