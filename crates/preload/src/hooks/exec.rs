//! Execution of new programs. They find the library and the run in their environment, and may themselves be
//! remote.

use super::environment::{
    Environment, Strings, command_of_run, environ, list, with_environment, with_name,
};
use super::folders::{candidates, may_be_there, search_path};
use super::reach::{self, Way};
use crate::awaited::Pipe;
use crate::descriptors;
use crate::guard::{finish, inside, system_call};
use crate::lasting::Lasting;
use crate::place::{self, At, Led};
use crate::table::real;
use crate::{mirror, start};
use libc::{FILE, c_char, c_int, pid_t};
use std::ffi::CStr;
use towline_instance::program::{FIRST_BYTES, LINKER};

/// Bytes at the start of a script in which Linux looks for its interpreter (`BINPRM_BUF_SIZE`).
const LINE_BYTES: usize = 256;
/// Maximum nesting of interpreters that are scripts themselves.
const DEPTH_MAX: u32 = 5;

/// Returns a path with its zero byte; `None` for an invalid address.
unsafe fn local_path<'a>(path: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the program passes valid arguments.
    place::is_address(path).then(|| unsafe { CStr::from_ptr(path) }.to_bytes_with_nul())
}

/// Executes a remote program from its local copy, or the interpreter of a remote script, which gets the
/// script's `name`. Returns an error number, and only on failure.
unsafe fn execute_remote(
    at: &At,
    name: *const c_char,
    arguments: Strings,
    environment: Strings,
    depth: u32,
) -> i32 {
    let mut first = [0u8; FIRST_BYTES];
    let read = inside(|| {
        at.with(|base, path| base.access(path, libc::X_OK as u32))?;
        let file = at.with(|base, path| base.open(path, libc::O_RDONLY as u32, 0))?;
        if file.attr().mode & libc::S_IFMT != libc::S_IFREG {
            return Err(libc::EACCES);
        }
        let count = file.read_at(&mut first, 0).map_err(crate::remote::number)?;
        // The path may have led through links.
        let path = if first.starts_with(b"#!") { None } else { file.path().ok() };
        Ok((count, path.map(|path| At { mount: at.mount, directory: None, path })))
    });
    let (first, found) = match read {
        Ok((count, found)) => (&first[..count], found),
        Err(libc::EISDIR) => return libc::EACCES,
        Err(error) => return error,
    };
    // SAFETY: the program passes valid arguments.
    unsafe {
        let way = match reach::check_first(CStr::from_ptr(name).to_bytes(), first, arguments) {
            Ok(way) => way,
            Err(error) => return error,
        };
        if let Some(line) = first.strip_prefix(b"#!") {
            return script(line, name, arguments, environment, depth);
        }
        let copy = match inside(|| mirror::copy(found.as_ref().unwrap_or(at))) {
            Ok(copy) => copy,
            Err(error) => return error,
        };
        let execute = |environment| {
            if way == Way::Hosted {
                host(&copy, arguments, environment);
                return crate::guard::errno();
            }
            with_environment(environment, Some(&copy), |own| {
                let call = [copy.as_ptr() as usize, arguments as usize, own as usize, 0, 0, 0];
                -system_call(libc::SYS_execve, call) as i32
            })
        };
        with_name(environment, name, depth, execute)
    }
}

/// Returns true for what separates words in the first line of a script: nothing else, not even the end of a
/// line of DOS.
fn is_blank(letter: &u8) -> bool {
    matches!(letter, b' ' | b'\t')
}

/// Returns a text without blanks at its beginning and end.
fn trimmed(text: &[u8]) -> &[u8] {
    let is_other = |letter: &u8| !is_blank(letter);
    let begin = text.iter().position(is_other).unwrap_or(text.len());
    let end = text.iter().rposition(is_other).map_or(begin, |last| last + 1);
    &text[begin..end]
}

/// Executes the interpreter named in the first line of a script, with the script as its argument. `line`
/// starts after the `#!`.
unsafe fn script(
    line: &[u8],
    name: *const c_char,
    arguments: Strings,
    environment: Strings,
    depth: u32,
) -> i32 {
    // A short file may end without a newline.
    let line = &line[..line.len().min(LINE_BYTES - 2)];
    let end = line.iter().position(|b| matches!(b, b'\n' | 0));
    let end = end.or((line.len() < LINE_BYTES - 2).then_some(line.len()));
    let Some(end) = end else { return libc::ENOEXEC };
    let line = trimmed(&line[..end]);
    let cut = line.iter().position(is_blank).unwrap_or(line.len());
    let interpreter = [&line[..cut], b"\0"].concat();
    let option = [trimmed(&line[cut..]), b"\0"].concat();
    if cut == 0 {
        return libc::ENOEXEC;
    }
    if depth == DEPTH_MAX {
        return libc::ELOOP;
    }
    // SAFETY: the program passes valid arguments.
    let mut rest = unsafe { list(arguments) };
    let mut all: Vec<*const c_char> = vec![interpreter.as_ptr().cast()];
    if option.len() > 1 {
        all.push(option.as_ptr().cast());
    }
    all.push(name);
    all.extend(rest.drain(..).skip(1));
    all.push(std::ptr::null());
    // SAFETY: all strings end with zero bytes, and the list ends with null.
    unsafe {
        with_name(environment, name, depth, |environment| {
            execute(interpreter.as_ptr().cast(), all.as_ptr(), environment, depth + 1)
        });
    }
    crate::guard::errno()
}

/// Executes a remote program, or the program outside its export that a remote link leads to.
unsafe fn execute_found(
    at: &At,
    name: *const c_char,
    arguments: Strings,
    environment: Strings,
    depth: u32,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let error = execute_remote(at, name, arguments, environment, depth);
        if error != libc::EXDEV {
            return finish(Err(error));
        }
        match inside(|| place::follow(&at.absolute()?, true)) {
            Ok(Led::Remote(at)) => {
                finish(Err(execute_remote(&at, name, arguments, environment, depth)))
            }
            Ok(Led::Local(path)) => execute_behind(&path, name, arguments, environment, depth),
            Err(error) => finish(Err(error)),
        }
    }
}

/// Executes the local program at `path`, which ends with a zero byte and to which links lead from `name`. A
/// script gets `name` as its own path.
unsafe fn execute_behind(
    path: &[u8],
    name: *const c_char,
    arguments: Strings,
    environment: Strings,
    depth: u32,
) -> c_int {
    let local = path.as_ptr().cast();
    // SAFETY: the program passes valid arguments; the path ends with a zero byte.
    unsafe {
        match reach::check(local, arguments, environment) {
            Ok(Way::Hosted) => return host(path, arguments, environment),
            Err(error) => return finish(Err(error)),
            Ok(_) => {}
        }
        if let Some(line) = reach::script(local) {
            return finish(Err(script(&line, name, arguments, environment, depth)));
        }
        with_environment(environment, Some(path), |own| real::execve(local, arguments, own))
    }
}

/// `execve` for the interpreter at this depth of nested scripts; 0 for the program itself.
unsafe fn execute(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    depth: u32,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let found = place::find(libc::AT_FDCWD, path)
            .or_else(|| place::through_descriptor(path, true).filter(|at| !at.path.is_empty()));
        if let Some(at) = found {
            return execute_found(&at, path, arguments, environment, depth);
        }
        if let Some(local) = local_path(path) {
            match reach::check(path, arguments, environment) {
                Ok(Way::Plain) => {}
                Ok(Way::Hosted) => return host(local, arguments, environment),
                Ok(Way::Script(line)) => {
                    return finish(Err(script(&line, path, arguments, environment, depth)));
                }
                Err(error) => return finish(Err(error)),
            }
        }
        let result = with_environment(environment, local_path(path), |own| {
            real::execve(path, arguments, own)
        });
        if crate::guard::errno() != libc::ENOENT {
            return result;
        }
        if let Some(line) = reach::script(path) {
            return finish(Err(script(&line, path, arguments, environment, depth)));
        }
        match super::led_in(libc::AT_FDCWD, path, true) {
            None => result,
            Some(Ok(Led::Remote(at))) => {
                finish(Err(execute_remote(&at, path, arguments, environment, depth)))
            }
            Some(Ok(Led::Local(led))) => execute_behind(&led, path, arguments, environment, depth),
            Some(Err(error)) => finish(Err(error)),
        }
    }
}

/// Executes a local program named by the descriptor `fd`, or relative to it. `path`, which ends with a zero
/// byte, also leads to it; `plain` executes it where the kernel can.
unsafe fn execute_local(
    fd: c_int,
    path: &[u8],
    arguments: Strings,
    environment: Strings,
    plain: impl FnOnce() -> c_int,
) -> c_int {
    let name = path.as_ptr().cast();
    // SAFETY: the program passes valid arguments.
    unsafe {
        // The interpreter of a script could not open a close-on-exec descriptor; the kernel reports that
        // itself.
        let is_gone = path.starts_with(b"/dev/fd/") && closes(fd);
        let line = match reach::check(name, arguments, environment) {
            Ok(Way::Hosted) => return host(path, arguments, environment),
            Err(error) => return finish(Err(error)),
            Ok(Way::Script(line)) if !is_gone => line,
            _ => {
                let result = plain();
                if crate::guard::errno() != libc::ENOENT || is_gone {
                    return result;
                }
                match reach::script(name) {
                    Some(line) => line,
                    None => return result,
                }
            }
        };
        finish(Err(script(&line, name, arguments, environment, 0)))
    }
}

/// Returns true for a close-on-exec descriptor.
fn closes(fd: c_int) -> bool {
    let call = [fd as usize, libc::F_GETFD as usize, 0, 0, 0, 0];
    // SAFETY: the call takes no addresses.
    let flags = unsafe { system_call(libc::SYS_fcntl, call) };
    flags > 0 && flags & libc::FD_CLOEXEC as isize != 0
}

/// Executes a process that hosts a local program as its guest. The program's path ends with a zero byte.
unsafe fn host(program: &[u8], arguments: Strings, environment: Strings) -> c_int {
    let library = start::config().map_or(&[][..], |config| &config.library);
    let library = [library, b"\0"].concat();
    let program = match inside(|| Ok(Lasting::new(program))) {
        Ok(program) => program,
        Err(error) => return finish(Err(error)),
    };
    // SAFETY: the program passes valid arguments; all strings end with zero bytes, and the list ends with
    // null.
    unsafe {
        let mut own = list(arguments);
        if own.is_empty() {
            own.push(program.path.as_ptr().cast());
        }
        let path = program.path.as_ptr().cast();
        let mut all = vec![own[0], library.as_ptr().cast(), path];
        all.extend(own);
        all.push(std::ptr::null());
        match inside(|| Environment::of_host(environment).ok_or(libc::EINVAL)) {
            Ok(own) => real::execve(LINKER.as_ptr(), all.as_ptr(), own.as_ptr()),
            Err(error) => finish(Err(error)),
        }
    }
}

/// Prepares this process for becoming another program.
fn before() {
    crate::between::end();
    super::maps::write_back_all();
    let _ = inside(|| {
        crate::remote::leave_locks();
        Ok(())
    });
}

pub(crate) unsafe fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    before();
    // SAFETY: the program passes valid arguments.
    unsafe { execute(path, arguments, environment, 0) }
}

pub(crate) unsafe extern "C" fn execl(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { execve(path, arguments, environ) }
}

pub(crate) unsafe extern "C" fn execlp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { execvpe(file, arguments, environ) }
}

/// The environment follows the null that ends the arguments.
pub(crate) unsafe extern "C" fn execle(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes a list that ends with null, and one more pointer after that.
    unsafe {
        let mut at = arguments;
        while !(*at).is_null() {
            at = at.add(1);
        }
        execve(path, arguments, (*at.add(1)).cast())
    }
}

fn is_link(at: &At) -> bool {
    inside(|| at.with(|base, path| base.stat_path(path, false))).is_ok_and(|attr| attr.is_symlink())
}

pub(crate) unsafe fn execveat(
    at: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::state().is_none() || !place::is_address(path) {
            return real::execveat(at, path, arguments, environment, flags);
        }
        let found = place::find(at, path);
        if flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW) != 0 {
            // Newer flags may ask for something else than to execute it.
            if found.is_some() || super::itself(at, path, flags).is_some() {
                return finish(Err(libc::EINVAL));
            }
            return real::execveat(at, path, arguments, environment, flags);
        }
        if *path == 0 && flags & libc::AT_EMPTY_PATH != 0 {
            return fexecve(at, arguments, environment);
        }
        if at == libc::AT_FDCWD && flags == 0 {
            return execve(path, arguments, environment);
        }
        before();
        match found {
            None => {
                let plain = || {
                    with_environment(environment, None, |own| {
                        real::execveat(at, path, arguments, own, flags)
                    })
                };
                let mut byte = 0u8;
                let link = [at as usize, path as usize, &raw mut byte as usize, 1, 0, 0];
                if flags & libc::AT_SYMLINK_NOFOLLOW != 0
                    && system_call(libc::SYS_readlinkat, link) >= 0
                {
                    return plain();
                }
                let below = CStr::from_ptr(path).to_bytes_with_nul();
                let full = match below.first() {
                    _ if at == libc::AT_FDCWD => below.to_vec(),
                    Some(b'/') => below.to_vec(),
                    _ => [format!("/dev/fd/{at}/").as_bytes(), below].concat(),
                };
                execute_local(at, &full, arguments, environment, plain)
            }
            Some(found) if flags & libc::AT_SYMLINK_NOFOLLOW != 0 && is_link(&found) => {
                finish(Err(libc::ELOOP))
            }
            Some(found) if at == libc::AT_FDCWD => {
                execute_found(&found, path, arguments, environment, 0)
            }
            Some(found) => match inside(|| Ok([&found.absolute()?[..], b"\0"].concat())) {
                Ok(name) => execute_found(&found, name.as_ptr().cast(), arguments, environment, 0),
                Err(error) => finish(Err(error)),
            },
        }
    }
}

pub(crate) unsafe fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { execve(path, arguments, environ) }
}

pub(crate) unsafe fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { execvpe(file, arguments, environ) }
}

pub(crate) unsafe fn execvpe(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::state().is_none() || !place::is_address(file) {
            return real::execvpe(file, arguments, environment);
        }
        find_and_execute(file, arguments, environment, true)
    }
}

/// [`execvpe`] without the fallback to the shell, as `posix_spawnp` searches.
pub(super) unsafe fn search(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { find_and_execute(file, arguments, environment, false) }
}

unsafe fn find_and_execute(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
    has_shell: bool,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let name = CStr::from_ptr(file).to_bytes();
        if name.contains(&b'/') || name.is_empty() {
            let result = execve(file, arguments, environment);
            if has_shell && crate::guard::errno() == libc::ENOEXEC {
                return by_shell(file, arguments, environment);
            }
            return result;
        }
        let (mut error, mut is_denied) = (libc::ENOENT, false);
        for full in candidates(name, &search_path()) {
            error = libc::ENOENT;
            if may_be_there(&full) {
                execve(full.as_ptr().cast(), arguments, environment);
                error = crate::guard::errno();
            }
            match error {
                libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT => {}
                libc::ENOEXEC if has_shell => {
                    return by_shell(full.as_ptr().cast(), arguments, environment);
                }
                libc::EACCES => is_denied = true,
                other => return finish(Err(other)),
            }
        }
        finish(Err(if is_denied { libc::EACCES } else { error }))
    }
}

/// Runs a file of unknown format as a shell script, as the functions that search `PATH` do.
unsafe fn by_shell(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let mut all = vec![c"/bin/sh".as_ptr(), path];
        all.extend(list(arguments).drain(..).skip(1));
        all.push(std::ptr::null());
        execve(c"/bin/sh".as_ptr(), all.as_ptr(), environment)
    }
}

pub(crate) unsafe fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    before();
    // SAFETY: the program passes valid arguments.
    unsafe {
        let Some(open) = descriptors::find(fd) else {
            let plain =
                || with_environment(environment, None, |own| real::fexecve(fd, arguments, own));
            let name = format!("/dev/fd/{fd}\0");
            return execute_local(fd, name.as_bytes(), arguments, environment, plain);
        };
        let mount = open.entry.mount.load(std::sync::atomic::Ordering::Relaxed) as usize;
        let at = At { mount, directory: Some(open), path: Vec::new() };
        // The name that the kernel gives a script executed by its descriptor alone.
        let name = format!("/dev/fd/{fd}\0");
        finish(Err(execute_remote(&at, name.as_ptr().cast(), arguments, environment, 0)))
    }
}

/// Calls one of libc's functions that run a command, so that the shell belongs to the run.
unsafe fn by_libc<T>(command: *const c_char, call: impl FnOnce(*const c_char) -> T) -> T {
    descriptors::share();
    // SAFETY: the program passes null or a string.
    let own = if command.is_null() { None } else { unsafe { command_of_run(command) } };
    call(own.as_ref().map_or(command, |own| own.as_ptr().cast()))
}

pub(crate) unsafe fn system(command: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { by_libc(command, |command| real::system(command)) }
}

/// Ends the process, and does first what `exit` would do for the library. Signal handlers and children of
/// `fork` end this way.
pub(crate) unsafe fn end(status: c_int) {
    super::maps::end_all();
    let _ = inside(|| {
        crate::remote::goodbye();
        Ok(())
    });
    // SAFETY: the call takes no addresses and does not return.
    unsafe { system_call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
}

pub(crate) unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the program passes valid arguments.
    unsafe { by_libc(command, |command| real::popen(command, mode)) }
}

/// Calls `fork` and lets the parent wait until the child has executed a program or ended. Replaces `vfork`
/// where the child cannot use the parent's memory (see `vfork.rs`).
pub(crate) unsafe extern "C" fn fork_and_wait() -> pid_t {
    // SAFETY: `fork` takes no arguments.
    and_wait(|| unsafe { libc::fork() } as isize) as pid_t
}

/// Calls `fork`, which returns a negative number on failure, and lets the parent wait as [`fork_and_wait`]
/// does.
pub(crate) fn and_wait(fork: impl FnOnce() -> isize) -> isize {
    if start::state().is_none() {
        return fork();
    }
    let Ok(pipe) = Pipe::open() else { return fork() };
    let child = pipe.fork(fork);
    match child {
        // It stays open until the child executes a program or ends.
        0 => {
            pipe.of_child();
        }
        child => {
            pipe.wait(child > 0);
        }
    }
    child
}
