//! New programs: they find the library and the run in their environment, and may themselves be
//! remote.

use super::reach;
use crate::descriptors;
use crate::guard::{checked, finish, inside, system_call};
use crate::place;
use crate::start;
use crate::table::real;
use libc::{FILE, c_char, c_int, c_void, pid_t};
use std::ffi::CStr;
use towline_instance::VARIABLE;
use towline_instance::program::FIRST_BYTES;

type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

/// The strings of a list that ends with null.
unsafe fn list(strings: Strings) -> Vec<*const c_char> {
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
struct Environment {
    strings: Vec<*const c_char>,
    _own: [Vec<u8>; 2],
}

impl Environment {
    /// `None` when the given one has it already, or there is no run.
    unsafe fn of(given: Strings) -> Option<Self> {
        let library = &start::config()?.library;
        let run = [VARIABLE.as_bytes(), b"=", start::directory(), b"\0"].concat();
        // SAFETY: as the program says.
        let mut strings = unsafe { list(given) };
        let starts = |string: &*const c_char, name: &[u8]| {
            // SAFETY: a string of the environment.
            unsafe { CStr::from_ptr(*string) }.to_bytes_with_nul().starts_with(name)
        };
        let preload = strings.iter().position(|string| starts(string, b"LD_PRELOAD="));
        let others = preload.map_or(&b""[..], |at| {
            // SAFETY: a string of the environment.
            &unsafe { CStr::from_ptr(strings[at]) }.to_bytes()[11..]
        });
        let has_library = others.split(|b| matches!(b, b':' | b' ')).any(|one| one == *library);
        let has_run = strings.iter().any(|string| starts(string, &run));
        if has_library && has_run {
            return None;
        }
        let mut line = [b"LD_PRELOAD=", library.as_slice()].concat();
        if !has_library && !others.is_empty() {
            line.push(b':');
            line.extend_from_slice(others);
        }
        line.push(0);
        if !has_library {
            strings.retain(|string| !starts(string, b"LD_PRELOAD="));
            strings.push(line.as_ptr().cast());
        }
        let name = [VARIABLE.as_bytes(), b"="].concat();
        strings.retain(|string| !starts(string, &name));
        strings.push(run.as_ptr().cast());
        strings.push(std::ptr::null());
        Some(Self { strings, _own: [line, run] })
    }

    fn as_ptr(&self) -> Strings {
        self.strings.as_ptr()
    }
}

/// Runs `work` with the environment that a new program gets.
unsafe fn with_environment<T>(given: Strings, work: impl FnOnce(Strings) -> T) -> T {
    // SAFETY: as the program says.
    match inside(|| Ok(unsafe { Environment::of(given) })) {
        Ok(Some(own)) => work(own.as_ptr()),
        _ => work(given),
    }
}

/// A local copy of a remote program, as a descriptor.
fn fetch(fd: c_int) -> Result<c_int, i32> {
    let open = descriptors::find(fd).ok_or(libc::EBADF)?;
    let name = c"towline-program".as_ptr() as usize;
    // SAFETY: a constant name.
    let copy = unsafe { checked(libc::SYS_memfd_create, [name, 1, 0, 0, 0, 0]) }?;
    let mut buffer = vec![0u8; 1 << 20];
    let mut at = 0i64;
    loop {
        let count = crate::remote::read_at(open, &mut buffer, at)?;
        if count == 0 {
            return Ok(copy as c_int);
        }
        let mut done = 0;
        while done < count {
            let arguments = [copy, buffer[done..].as_ptr() as usize, count - done, 0, 0, 0];
            // SAFETY: the buffer holds these bytes.
            done += unsafe { checked(libc::SYS_write, arguments) }?;
        }
        at += count as i64;
    }
}

/// Executes a remote program, or the interpreter of a remote script.
unsafe fn execute_remote(path: *const c_char, arguments: Strings, environment: Strings) -> i32 {
    // SAFETY: as the program says.
    unsafe {
        if super::status::access(path, libc::X_OK) != 0 {
            return crate::guard::errno();
        }
        let fd = super::files::open(path, libc::O_RDONLY | libc::O_CLOEXEC, 0);
        if fd < 0 {
            return crate::guard::errno();
        }
        let mut first = [0u8; FIRST_BYTES];
        let count = super::io::pread(fd, first.as_mut_ptr().cast(), FIRST_BYTES, 0);
        let first = &first[..count.max(0) as usize];
        let name = CStr::from_ptr(path).to_bytes();
        let reached = reach::check_first(name, first, arguments);
        let error = if let Err(error) = reached {
            error
        } else if let Some(line) = first.strip_prefix(b"#!") {
            script(line, path, arguments, environment)
        } else {
            match inside(|| fetch(fd)) {
                Ok(copy) => with_environment(environment, |environment| {
                    let path = c"".as_ptr() as usize;
                    let call = [
                        copy as usize,
                        path,
                        arguments as usize,
                        environment as usize,
                        libc::AT_EMPTY_PATH as usize,
                        0,
                    ];
                    let result = system_call(libc::SYS_execveat, call);
                    system_call(libc::SYS_close, [copy as usize, 0, 0, 0, 0, 0]);
                    -result as i32
                }),
                Err(error) => error,
            }
        };
        super::files::close(fd);
        error
    }
}

/// Executes the interpreter that the first line of a script names, with the script as argument.
unsafe fn script(
    line: &[u8],
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> i32 {
    let Some(end) = line.iter().position(|b| *b == b'\n') else { return libc::ENOEXEC };
    let line = line[..end].trim_ascii();
    let cut = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
    let interpreter = [&line[..cut], b"\0"].concat();
    let option = [line[cut..].trim_ascii(), b"\0"].concat();
    if cut == 0 {
        return libc::ENOEXEC;
    }
    // SAFETY: as the program says.
    let mut rest = unsafe { list(arguments) };
    let mut all: Vec<*const c_char> = vec![interpreter.as_ptr().cast()];
    if option.len() > 1 {
        all.push(option.as_ptr().cast());
    }
    all.push(path);
    all.extend(rest.drain(..).skip(1));
    all.push(std::ptr::null());
    // SAFETY: strings that end with zero bytes, in a list that ends with null.
    unsafe { execve(interpreter.as_ptr().cast(), all.as_ptr(), environment) };
    crate::guard::errno()
}

pub(crate) unsafe fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        super::maps::write_back_all();
        if place::find(libc::AT_FDCWD, path).is_some() {
            let error = execute_remote(path, arguments, environment);
            return finish(Err(error));
        }
        if let Err(error) = reach::check(path, arguments) {
            return finish(Err(error));
        }
        let result = with_environment(environment, |own| real::execve(path, arguments, own));
        if crate::guard::errno() == libc::ENOENT
            && super::led_in(libc::AT_FDCWD, path, true).is_some()
        {
            let error = execute_remote(path, arguments, environment);
            return finish(Err(error));
        }
        result
    }
}

pub(crate) unsafe fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the program says.
    unsafe { execve(path, arguments, environ) }
}

pub(crate) unsafe fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the program says.
    unsafe { execvpe(file, arguments, environ) }
}

/// True when a search for a program can come upon remote folders.
unsafe fn searches_remote(path: &[u8]) -> bool {
    path.split(|b| *b == b':').any(|folder| {
        let name = [if folder.is_empty() { b"." } else { folder }, b"/x\0"].concat();
        // SAFETY: it ends with a zero byte.
        unsafe { place::find(libc::AT_FDCWD, name.as_ptr().cast()) }.is_some()
    })
}

/// The folders of `PATH`.
unsafe fn search_path() -> Vec<u8> {
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

pub(crate) unsafe fn execvpe(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if start::state().is_none() || file.is_null() {
            return real::execvpe(file, arguments, environment);
        }
        let name = CStr::from_ptr(file).to_bytes();
        if name.contains(&b'/') {
            let result = execve(file, arguments, environment);
            if crate::guard::errno() == libc::ENOEXEC {
                return by_shell(file, arguments, environment);
            }
            return result;
        }
        super::maps::write_back_all();
        let path = search_path();
        if !searches_remote(&path) {
            if let Err(error) = reach::check_found(file, arguments, &path) {
                return finish(Err(error));
            }
            return with_environment(environment, |own| real::execvpe(file, arguments, own));
        }
        let mut error = libc::ENOENT;
        for folder in path.split(|b| *b == b':') {
            let folder = if folder.is_empty() { b"." } else { folder };
            let full = [folder, b"/", name, b"\0"].concat();
            execve(full.as_ptr().cast(), arguments, environment);
            match crate::guard::errno() {
                libc::ENOENT | libc::ENOTDIR | libc::ESTALE => {}
                libc::ENOEXEC => return by_shell(full.as_ptr().cast(), arguments, environment),
                libc::EACCES => error = libc::EACCES,
                other => return finish(Err(other)),
            }
        }
        finish(Err(error))
    }
}

/// A file that no interpreter claims is a script for the shell, for the functions that search.
unsafe fn by_shell(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        let mut all = vec![c"/bin/sh".as_ptr(), path];
        all.extend(list(arguments).drain(..).skip(1));
        all.push(std::ptr::null());
        execve(c"/bin/sh".as_ptr(), all.as_ptr(), environment)
    }
}

pub(crate) unsafe fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if let Some(open) = descriptors::find(fd) {
            let mount = open.entry.mount.load(std::sync::atomic::Ordering::Relaxed) as usize;
            let mut path = place::absolute(mount, &open.entry.path());
            path.push(0);
            return finish(Err(execute_remote(path.as_ptr().cast(), arguments, environment)));
        }
        with_environment(environment, |own| real::fexecve(fd, arguments, own))
    }
}

pub(crate) unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    descriptors::share();
    // SAFETY: as the program says.
    unsafe {
        if place::find(libc::AT_FDCWD, path).is_none() {
            if let Err(error) = reach::check(path, arguments) {
                return error;
            }
            return with_environment(environment, |own| {
                real::posix_spawn(pid, path, actions, attributes, arguments, own)
            });
        }
        spawn_remote(pid, path, actions, attributes, arguments, environment)
    }
}

/// Spawns a remote program: from a local copy of it, or as argument of its interpreter.
unsafe fn spawn_remote(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if super::status::access(path, libc::X_OK) != 0 {
            return crate::guard::errno();
        }
        let fd = super::files::open(path, libc::O_RDONLY | libc::O_CLOEXEC, 0);
        if fd < 0 {
            return crate::guard::errno();
        }
        let copied = inside(|| fetch(fd));
        super::files::close(fd);
        let copy = match copied {
            Ok(copy) => copy,
            Err(error) => return error,
        };
        let name = format!("/proc/self/fd/{copy}\0");
        let result = with_environment(environment, |own| {
            real::posix_spawn(pid, name.as_ptr().cast(), actions, attributes, arguments, own)
        });
        system_call(libc::SYS_close, [copy as usize, 0, 0, 0, 0, 0]);
        result
    }
}

pub(crate) unsafe fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: as the program says.
    unsafe {
        if start::state().is_some() && !file.is_null() {
            let name = CStr::from_ptr(file).to_bytes();
            if name.contains(&b'/') {
                return posix_spawn(pid, file, actions, attributes, arguments, environment);
            }
            let path = search_path();
            if searches_remote(&path) {
                for folder in path.split(|b| *b == b':') {
                    let folder = if folder.is_empty() { b"." } else { folder };
                    let full = [folder, b"/", name, b"\0"].concat();
                    if super::status::access(full.as_ptr().cast(), libc::X_OK) == 0 {
                        let full = full.as_ptr().cast();
                        return posix_spawn(pid, full, actions, attributes, arguments, environment);
                    }
                }
                return libc::ENOENT;
            }
            if let Err(error) = reach::check_found(file, arguments, &path) {
                return error;
            }
        }
        descriptors::share();
        with_environment(environment, |own| {
            real::posix_spawnp(pid, file, actions, attributes, arguments, own)
        })
    }
}

pub(crate) unsafe fn system(command: *const c_char) -> c_int {
    descriptors::share();
    // SAFETY: as the program says.
    unsafe { real::system(command) }
}

pub(crate) unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    descriptors::share();
    // SAFETY: as the program says.
    unsafe { real::popen(command, mode) }
}

/// `fork`, after which the parent waits until the child has executed a program or ended: the stack
/// that a true `vfork` shares would be ruined by our return.
pub(crate) unsafe fn vfork() -> pid_t {
    // SAFETY: plain calls; the child returns as from `fork`.
    unsafe {
        if start::state().is_none() {
            return libc::fork();
        }
        let mut ends = [0i32; 2];
        let flags = libc::O_CLOEXEC as usize;
        let has_pipe =
            system_call(libc::SYS_pipe2, [ends.as_mut_ptr() as usize, flags, 0, 0, 0, 0]) == 0;
        let child = libc::fork();
        if !has_pipe {
            return child;
        }
        let close = |fd: i32| system_call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
        close(ends[usize::from(child != 0)]);
        if child == 0 {
            // Out of the way of what the child opens.
            let first = descriptors::own_first() as usize;
            let dup = [ends[1] as usize, libc::F_DUPFD_CLOEXEC as usize, first, 0, 0, 0];
            if system_call(libc::SYS_fcntl, dup) >= 0 {
                close(ends[1]);
            }
        } else {
            let mut byte = 0u8;
            let read = [ends[0] as usize, &raw mut byte as usize, 1, 0, 0, 0];
            while child > 0 && system_call(libc::SYS_read, read) == -(libc::EINTR as isize) {}
            close(ends[0]);
        }
        child
    }
}
