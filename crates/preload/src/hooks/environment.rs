//! Environments of new programs, by which they find the library and the run.

use crate::guard::inside;
use crate::{mirror, start, waits};
use libc::c_char;
use std::ffi::CStr;
use towline_instance::VARIABLE;

pub(super) type Strings = *const *const c_char;

unsafe extern "C" {
    pub(super) static environ: Strings;
}

/// The strings of a list that ends with null.
pub(super) unsafe fn list(strings: Strings) -> Vec<*const c_char> {
    let mut all = Vec::new();
    if !strings.is_null() {
        // SAFETY: a list that ends with null, as the program says.
        unsafe {
            let mut at = strings;
            while !(*at).is_null() {
                all.push(*at);
                at = at.add(1);
            }
        }
    }
    all
}

/// An environment with what a program needs to belong to the run; keeps its own strings alive.
pub(crate) struct Environment {
    strings: Vec<*const c_char>,
    own: Vec<Vec<u8>>,
}

/// The value of a variable, if this string sets it.
unsafe fn value_of<'a>(string: *const c_char, name: &[u8]) -> Option<&'a [u8]> {
    // SAFETY: a string of an environment.
    let string = unsafe { CStr::from_ptr(string) }.to_bytes();
    string.strip_prefix(name)?.strip_prefix(b"=")
}

impl Environment {
    /// The environment for a `program` of this local path, which may be a copy and ends with a zero
    /// byte; `None` when the given one is good as it is.
    pub(crate) unsafe fn of(given: Strings, program: Option<&[u8]>) -> Option<Self> {
        let library = &start::config()?.library;
        // SAFETY: as the program says.
        let mut new = Self { strings: unsafe { list(given) }, own: Vec::new() };
        let find = |new: &Self, name: &[u8]| {
            // SAFETY: strings of the environment.
            new.strings.iter().find_map(|string| unsafe { value_of(*string, name) })
        };
        let others = find(&new, b"LD_PRELOAD").unwrap_or_default();
        if !others.split(|b| matches!(b, b':' | b' ')).any(|one| one == *library) {
            let colon: &[u8] = if others.is_empty() { b"" } else { b":" };
            new.set(b"LD_PRELOAD", &[library, colon, others].concat());
        }
        if find(&new, VARIABLE.as_bytes()) != Some(start::directory()) {
            new.set(VARIABLE.as_bytes(), start::directory());
        }
        let search = find(&new, b"LD_LIBRARY_PATH").unwrap_or_default();
        let copies = mirror::search_path(search);
        if let Some(program) = program
            && (copies.is_some() || mirror::is_copy(program))
        {
            let unknown = mirror::gather(program, search);
            if copies.is_some() || !unknown.is_empty() {
                let mut folders = vec![copies.unwrap_or_else(|| search.to_vec())];
                folders.extend(unknown);
                folders.retain(|folder| !folder.is_empty());
                new.set(b"LD_LIBRARY_PATH", &folders.join(&b':'));
            }
        }
        new.tell_blocked();
        if new.own.is_empty() {
            return None;
        }
        new.strings.push(std::ptr::null());
        Some(new)
    }

    /// The environment for what hosts a program: it has the library anyway, and the guest, whose linker
    /// would not understand it, is not to be told of it.
    pub(super) unsafe fn of_host(given: Strings) -> Option<Self> {
        let library = &start::config()?.library;
        // SAFETY: as the program says.
        let mut new = Self { strings: unsafe { list(given) }, own: Vec::new() };
        // SAFETY: strings of the environment.
        let of = |string: &*const c_char| unsafe { value_of(*string, b"LD_PRELOAD") };
        let others = new.strings.iter().find_map(of).unwrap_or_default();
        let others = others.split(|b| matches!(b, b':' | b' '));
        let others: Vec<&[u8]> =
            others.filter(|one| !one.is_empty() && *one != library.as_slice()).collect();
        new.set(VARIABLE.as_bytes(), start::directory());
        new.tell_blocked();
        if others.is_empty() {
            // SAFETY: strings of the environment.
            new.strings.retain(|string| unsafe { value_of(*string, b"LD_PRELOAD") }.is_none());
        } else {
            new.set(b"LD_PRELOAD", &others.join(&b':'));
        }
        new.strings.push(std::ptr::null());
        Some(new)
    }

    /// Signals wait while a trapped call is answered; the new program is told which of them it is to let in.
    fn tell_blocked(&mut self) {
        if let Some(blocked) = waits::blocked_outside() {
            let text = format!("{blocked:x}");
            self.set(start::BLOCKED.to_bytes(), &start::told(text.as_bytes()));
        }
    }

    fn set(&mut self, name: &[u8], value: &[u8]) {
        // SAFETY: strings of the environment.
        self.strings.retain(|string| unsafe { value_of(*string, name) }.is_none());
        let line = [name, b"=", value, b"\0"].concat();
        self.strings.push(line.as_ptr().cast());
        self.own.push(line);
    }

    pub(crate) fn as_ptr(&self) -> Strings {
        self.strings.as_ptr()
    }
}

/// Runs `work` with an environment that tells the new program to be called as what was executed by this path, where the
/// kernel is to execute something else for it: a copy, or what runs a script. `depth`: of scripts that run scripts, of
/// which the first one says it.
pub(super) unsafe fn with_name<T>(
    given: Strings,
    path: *const c_char,
    depth: u32,
    work: impl FnOnce(Strings) -> T,
) -> T {
    if depth > 0 {
        return work(given);
    }
    // SAFETY: as the program says.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    // SAFETY: as the program says.
    let mut new = Environment { strings: unsafe { list(given) }, own: Vec::new() };
    // By a descriptor it has no name.
    if !path.starts_with(b"/dev/fd/") {
        new.set(start::CALLED.to_bytes(), &start::told(name));
    }
    new.strings.push(std::ptr::null());
    work(new.as_ptr())
}

/// Runs `work` with the environment that a new program gets.
pub(crate) unsafe fn with_environment<T>(
    given: Strings,
    program: Option<&[u8]>,
    work: impl FnOnce(Strings) -> T,
) -> T {
    // SAFETY: as the program says.
    match inside(|| Ok(unsafe { Environment::of(given, program) })) {
        Ok(Some(own)) => work(own.as_ptr()),
        _ => work(given),
    }
}
