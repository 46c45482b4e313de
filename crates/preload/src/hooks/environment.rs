//! Environments for new programs, through which they find the library and the run.

use crate::guard::inside;
use crate::{mirror, start, waits};
use libc::c_char;
use std::ffi::CStr;
use towline_instance::VARIABLE;

pub(super) type Strings = *const *const c_char;

unsafe extern "C" {
    pub(super) static environ: Strings;
}

/// Returns the strings of a list that ends with null.
pub(super) unsafe fn list(strings: Strings) -> Vec<*const c_char> {
    let mut all = Vec::new();
    if !strings.is_null() {
        // SAFETY: the program passes a list that ends with null.
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

/// An environment with what a program needs to belong to the run; it owns the strings that were added.
pub(crate) struct Environment {
    strings: Vec<*const c_char>,
    own: Vec<Vec<u8>>,
}

/// Returns the value of a variable if this string sets it.
unsafe fn value_of<'a>(string: *const c_char, name: &[u8]) -> Option<&'a [u8]> {
    // SAFETY: a string of an environment.
    let string = unsafe { CStr::from_ptr(string) }.to_bytes();
    string.strip_prefix(name)?.strip_prefix(b"=")
}

impl Environment {
    /// Returns the environment for a program at this local path, which may be a copy and ends with a zero
    /// byte; `None` if the given environment will do.
    pub(crate) unsafe fn of(given: Strings, program: Option<&[u8]>) -> Option<Self> {
        let library = &start::config()?.library;
        // SAFETY: the program passes valid arguments.
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
            && (copies.is_some() || mirror::is_copy(program) || mirror::names_remote(program))
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

    /// Returns the environment for a process that hosts a guest. The host has the library anyway. The guest
    /// must not see it in `LD_PRELOAD`: its loader could not use it.
    pub(super) unsafe fn of_host(given: Strings) -> Option<Self> {
        let library = &start::config()?.library;
        // SAFETY: the program passes valid arguments.
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

    /// Passes on which signals the program itself has blocked: while a trapped call is answered, more are
    /// blocked.
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

/// Returns a command for the shell that runs `command` in a shell of the run; `None` if the environment will
/// do, which libc passes on itself.
///
/// # Safety
/// `command` is a string.
pub(super) unsafe fn command_of_run(command: *const c_char) -> Option<Vec<u8>> {
    let quoted = |text: &[u8]| {
        let parts: Vec<&[u8]> = text.split(|letter| *letter == b'\'').collect();
        [b"'", &parts.join(&br"'\''"[..])[..], b"'"].concat()
    };
    let made = inside(|| {
        // SAFETY: the environment of this process; the command is a string, as the caller says.
        let (new, command) = unsafe {
            let new = Environment::of(environ, None).ok_or(libc::ENOENT)?;
            (new, CStr::from_ptr(command).to_bytes())
        };
        let mut words = Vec::new();
        for line in &new.own {
            let line = line.strip_suffix(b"\0").unwrap_or(line);
            let cut = line.iter().position(|letter| *letter == b'=').ok_or(libc::EINVAL)?;
            words.push([&line[..=cut], &quoted(&line[cut + 1..])].concat());
        }
        words.extend([b"exec /bin/sh -c --".to_vec(), quoted(command)]);
        Ok([&words.join(&b' ')[..], b"\0"].concat())
    });
    made.ok()
}

/// Runs `work` with an environment that gives the new program the name by which it was executed, for when
/// the kernel executes something else in its place: a copy, or the interpreter of a script. At a `depth`
/// above 0, where scripts run scripts, the first one has set the name already.
pub(super) unsafe fn with_name<T>(
    given: Strings,
    path: *const c_char,
    depth: u32,
    work: impl FnOnce(Strings) -> T,
) -> T {
    if depth > 0 {
        return work(given);
    }
    // SAFETY: the program passes valid arguments.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    // SAFETY: the program passes valid arguments.
    let mut new = Environment { strings: unsafe { list(given) }, own: Vec::new() };
    // A program executed by its descriptor has no name.
    if !path.starts_with(b"/dev/fd/") {
        new.set(start::CALLED.to_bytes(), &start::told(name));
    }
    new.strings.push(std::ptr::null());
    work(new.as_ptr())
}

/// Runs `work` with the environment for a new program.
pub(crate) unsafe fn with_environment<T>(
    given: Strings,
    program: Option<&[u8]>,
    work: impl FnOnce(Strings) -> T,
) -> T {
    // SAFETY: the program passes valid arguments.
    match inside(|| Ok(unsafe { Environment::of(given, program) })) {
        Ok(Some(own)) => work(own.as_ptr()),
        _ => work(given),
    }
}
