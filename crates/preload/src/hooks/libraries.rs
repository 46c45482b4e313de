//! `dlopen` and `dlmopen` of remote libraries, and the names under which these are reported.

use crate::guard::{checked, inside};
use crate::table::real;
use crate::{mirror, place};
use libc::{Dl_info, c_char, c_int, c_void, dl_phdr_info, size_t};
use std::ffi::CStr;
use std::sync::Mutex;

/// The path to open, and libc's function that opens it.
#[repr(C)]
pub(crate) struct Chosen {
    path: *const c_char,
    function: *const c_void,
}

/// Chooses the path that libc's `dlopen` gets: that of a local copy for a remote library. `caller` is an address in the
/// code that calls `dlopen`.
pub(crate) unsafe extern "C" fn choose(path: *const c_char, caller: *const c_void) -> Chosen {
    // SAFETY: the program passes valid arguments.
    let chosen = unsafe { local_copy(path, caller, || is_loaded(path)) };
    Chosen { path: chosen.unwrap_or(path), function: crate::table::real_dlopen() }
}

/// [`choose`] for `dlmopen`.
pub(crate) unsafe extern "C" fn choose_apart(path: *const c_char, caller: *const c_void) -> Chosen {
    // SAFETY: the program passes valid arguments.
    let chosen = unsafe { local_copy(path, caller, || false) };
    Chosen { path: chosen.unwrap_or(path), function: crate::table::real_dlmopen() }
}

/// Returns the path of the local copy that is to be opened in the place of this library. `is_loaded`: the loader has one of
/// this name, and does not look for it.
///
/// # Safety
/// `path` is null or a string; `caller` is an address in code.
unsafe fn local_copy(
    path: *const c_char,
    caller: *const c_void,
    is_loaded: impl FnOnce() -> bool,
) -> Option<*const c_char> {
    if crate::start::mounts().is_empty() || !place::is_address(path) || crate::guard::is_inside() {
        return None;
    }
    // SAFETY: the program passes valid arguments.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let search = search();
    if !name.contains(&b'/') {
        // The loader looks in the folders of copies, so a copy must be there.
        // Not inside, as it waits for the loader's lock, whose owner may wait for us.
        let callers = callers(caller);
        let copied = inside(|| {
            let copied = mirror::copy_named(name, &search, &callers).ok_or(libc::ENOENT)?;
            mirror::gather(&copied.path, &search);
            Ok(copied)
        });
        let copied = copied.ok().filter(|copied| !copied.is_found)?;
        return (!is_loaded()).then(|| copied.path.leak().as_ptr().cast());
    }
    // SAFETY: the program passes valid arguments.
    let at = unsafe { place::find(libc::AT_FDCWD, path) }?;
    // The loader may keep the name for as long as the library.
    inside(|| {
        let copy = mirror::copy(&at)?;
        mirror::gather(&copy, &search);
        Ok(copy.leak().as_ptr().cast::<c_char>())
    })
    .ok()
}

/// Returns true if a library of this name is loaded, so that the loader does not look for one.
fn is_loaded(name: *const c_char) -> bool {
    type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    // SAFETY: libc's function of this type, with a string; the library stays loaded as if this had not been called.
    unsafe {
        let open: Open = std::mem::transmute(crate::table::real_dlopen());
        let library = open(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        !library.is_null() && libc::dlclose(library) == 0
    }
}

/// Returns the files whose own search paths apply to a library that the code at this address asks for: its own, and the
/// program. The paths end with zero bytes.
fn callers(caller: *const c_void) -> Vec<Vec<u8>> {
    let mut program = vec![0; libc::PATH_MAX as usize];
    let link = c"/proc/self/exe".as_ptr() as usize;
    let at = program.as_mut_ptr() as usize;
    let call = [libc::AT_FDCWD as usize, link, at, program.len() - 1, 0, 0];
    // SAFETY: the buffer is longer than said. Not the hook: it tells the remote name.
    let length = unsafe { checked(libc::SYS_readlinkat, call) }.unwrap_or(0);
    program.truncate(length + 1);
    let library = library_of(caller).filter(|path| path.starts_with(b"/"));
    library.into_iter().chain([program]).collect()
}

/// Returns the path of the library in which an address is, with a zero byte at the end; `None` for the program itself.
fn library_of(address: *const c_void) -> Option<Vec<u8>> {
    /// The beginning of `struct link_map` (`link.h`).
    #[repr(C)]
    struct LinkMap {
        _address: usize,
        name: *const c_char,
    }
    const RTLD_DL_LINKMAP: c_int = 2;
    // SAFETY: all zero is a valid value. libc stores the address of its own structure if it finds one, whose name is a
    // string: an empty one for the program.
    unsafe {
        let mut info: Dl_info = std::mem::zeroed();
        let mut map: *mut LinkMap = std::ptr::null_mut();
        let found = real::dladdr1(address, &raw mut info, (&raw mut map).cast(), RTLD_DL_LINKMAP);
        let name = map.as_ref().filter(|_| found != 0)?.name;
        (!name.is_null() && *name != 0).then(|| CStr::from_ptr(name).to_bytes_with_nul().to_vec())
    }
}

/// Finds the library of an address, and reports a remote one by its own name: some libraries look for their
/// files beside it.
pub(crate) unsafe fn dladdr(address: *const c_void, info: *mut Dl_info) -> c_int {
    // SAFETY: the program passes valid arguments; libc has filled in `info` if it found something.
    unsafe { with_own_name(real::dladdr(address, info), info) }
}

/// [`dladdr`] with more of what the loader knows.
pub(crate) unsafe fn dladdr1(
    address: *const c_void,
    info: *mut Dl_info,
    more: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments; libc has filled in `info` if it found something.
    unsafe { with_own_name(real::dladdr1(address, info, more, flags), info) }
}

/// # Safety
/// `info` is filled in if something was `found`.
unsafe fn with_own_name(found: c_int, info: *mut Dl_info) -> c_int {
    if found != 0 {
        // SAFETY: guaranteed by the caller.
        unsafe { (*info).dli_fname = own_name((*info).dli_fname) };
    }
    found
}

type Visit = unsafe extern "C" fn(*mut dl_phdr_info, size_t, *mut c_void) -> c_int;

/// Visits all libraries, remote ones under their own names.
pub(crate) unsafe fn dl_iterate_phdr(visit: *const c_void, data: *mut c_void) -> c_int {
    unsafe extern "C" fn renamed(
        info: *mut dl_phdr_info,
        size: size_t,
        chosen: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes its own variable for this call, and the pair from below.
        unsafe {
            let (visit, data) = *chosen.cast::<(Visit, *mut c_void)>();
            (*info).dlpi_name = own_name((*info).dlpi_name);
            visit(info, size, data)
        }
    }
    if crate::start::mounts().is_empty() || visit.is_null() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::dl_iterate_phdr(visit, data) };
    }
    // SAFETY: the program passes a function of this type.
    let visit: Visit = unsafe { std::mem::transmute(visit) };
    let mut chosen = (visit, data);
    // SAFETY: the pair outlives the call.
    unsafe { real::dl_iterate_phdr(renamed as *const c_void, (&raw mut chosen).cast()) }
}

/// Returns the name of a remote library, from the loader's name of its copy; returns any other name as it
/// is.
///
/// # Safety
/// `name` is null or a string.
unsafe fn own_name(name: *const c_char) -> *const c_char {
    /// One for each library, never freed: programs may keep the names as long as they like.
    static NAMES: Mutex<Vec<(usize, Vec<u8>)>> = Mutex::new(Vec::new());
    if name.is_null() || crate::start::mounts().is_empty() {
        return name;
    }
    // SAFETY: guaranteed by the caller.
    let copy = unsafe { CStr::from_ptr(name) }.to_bytes();
    // Other names take no memory: some programs ask for them at each exception.
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

/// Returns the loader's search path.
fn search() -> Vec<u8> {
    // SAFETY: a constant name; the value is copied at once.
    unsafe {
        let value = libc::getenv(c"LD_LIBRARY_PATH".as_ptr());
        if value.is_null() { Vec::new() } else { CStr::from_ptr(value).to_bytes().to_vec() }
    }
}
