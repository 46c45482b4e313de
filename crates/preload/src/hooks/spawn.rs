//! `posix_spawn`. libc's own makes internal system calls in a child that shares the parent's memory. So if
//! a remote path is involved (the program, or a file or directory that the child opens or goes to), the
//! hooked functions do the same in a child of `fork`.

use super::environment::{Strings, with_environment};
use super::reach::{self, Way};
use super::{directories, files, leads_to_us};
use super::{exec, folders};
use crate::awaited::Pipe;
use crate::descriptors::{self, Own};
use crate::guard::{errno, set_errno, system_call};
use crate::table::real;
use crate::{own, place, start};
use libc::{c_char, c_int, c_short, c_void, mode_t, pid_t};
use std::ffi::CStr;

/// What a child does before it executes the program, in glibc's layout.
#[repr(C)]
struct Actions {
    allocated: c_int,
    used: c_int,
    list: *const Action,
}

#[repr(C)]
struct Action {
    kind: c_int,
    about: About,
}

#[repr(C)]
#[derive(Clone, Copy)]
union About {
    fd: c_int,
    dup: [c_int; 2],
    open: Open,
    path: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Open {
    fd: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
}

const CLOSE: c_int = 0;
const DUP: c_int = 1;
const OPEN: c_int = 2;
const CHDIR: c_int = 3;
const FCHDIR: c_int = 4;
const CLOSE_FROM: c_int = 5;
const TERMINAL_GROUP: c_int = 6;

/// Returns the actions of a child; none for null.
unsafe fn actions<'a>(actions: *const c_void) -> &'a [Action] {
    // SAFETY: the program passes null or what libc's functions made.
    unsafe {
        match actions.cast::<Actions>().as_ref() {
            Some(actions) if actions.used > 0 && !actions.list.is_null() => {
                std::slice::from_raw_parts(actions.list, actions.used as usize)
            }
            _ => &[],
        }
    }
}

/// Returns true if the child works with remote paths before the program runs, or the program is remote.
unsafe fn is_remote(program: *const c_char, list: &[Action]) -> bool {
    let mut moved = false;
    // SAFETY: the program passes strings; the kind of an action says which part of the union it has.
    unsafe {
        for action in list {
            let found = match action.kind {
                OPEN => opens_there(action.about.open.path, moved),
                CHDIR => opens_there(action.about.path, moved),
                FCHDIR => descriptors::find(action.about.fd).is_some(),
                _ => false,
            };
            if found {
                return true;
            }
            moved |= matches!(action.kind, CHDIR | FCHDIR);
        }
        leads_there(program, moved)
    }
}

/// [`leads_there`], also through links, for paths that the child itself opens or goes to.
unsafe fn opens_there(path: *const c_char, moved: bool) -> bool {
    // SAFETY: the program passes valid arguments.
    unsafe { leads_there(path, moved) || leads_to_us(libc::AT_FDCWD, path, true) }
}

/// Returns true for a remote path, or for a relative one if the child changes its directory first
/// (`moved`).
unsafe fn leads_there(path: *const c_char, moved: bool) -> bool {
    // SAFETY: the program passes valid arguments.
    unsafe {
        place::find(libc::AT_FDCWD, path).is_some()
            || (moved && place::is_address(path) && *path.cast::<u8>() != b'/')
    }
}

type Spawn =
    unsafe fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int;

/// How the child executes the program.
type Execute = unsafe fn(*const c_char, Strings, Strings) -> c_int;

pub(crate) unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    file_actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::state().is_none() {
            return real::posix_spawn(pid, path, file_actions, attributes, arguments, environment);
        }
        let list = actions(file_actions);
        if is_remote(path, list) {
            return by_fork(pid, path, list, attributes, (arguments, environment), exec::execve);
        }
        if place::is_address(path) {
            match reach::check(path, arguments, environment) {
                Ok(Way::Plain) => {}
                Ok(_) => {
                    let call = (arguments, environment);
                    return by_fork(pid, path, list, attributes, call, exec::execve);
                }
                Err(error) => return error,
            }
        }
        let local = real::posix_spawn as Spawn;
        let result = plain(local, pid, path, file_actions, attributes, arguments, environment);
        let is_led_in =
            || super::led_in(libc::AT_FDCWD, path, true).is_some() || reach::script(path).is_some();
        if result == libc::ENOENT && is_led_in() {
            return by_fork(pid, path, list, attributes, (arguments, environment), exec::execve);
        }
        result
    }
}

pub(crate) unsafe fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    file_actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::state().is_none() || !place::is_address(file) {
            return real::posix_spawnp(pid, file, file_actions, attributes, arguments, environment);
        }
        let list = actions(file_actions);
        let has_folder = CStr::from_ptr(file).to_bytes().contains(&b'/');
        let remote = is_remote(if has_folder { file } else { c"/".as_ptr() }, list)
            || (!has_folder && folders::searches_remote(&folders::search_path()));
        if remote {
            return by_fork(pid, file, list, attributes, (arguments, environment), exec::search);
        }
        let reached = if has_folder {
            reach::check(file, arguments, environment)
        } else {
            reach::check_found(file, arguments, environment, &folders::search_path())
        };
        match reached {
            Ok(Way::Plain) => {}
            Ok(_) => {
                let call = (arguments, environment);
                return by_fork(pid, file, list, attributes, call, exec::search);
            }
            Err(error) => return error,
        }
        let found = if has_folder { None } else { reach::found(file, &folders::search_path()) };
        let (local, name) = match &found {
            Some(found) => (real::posix_spawn as Spawn, found.as_ptr().cast()),
            None => (real::posix_spawnp as Spawn, file),
        };
        let result = plain(local, pid, name, file_actions, attributes, arguments, environment);
        if result == libc::ENOENT && reach::script(name).is_some() {
            return by_fork(pid, file, list, attributes, (arguments, environment), exec::search);
        }
        if result != 0 && found.is_some() {
            let local = real::posix_spawnp as Spawn;
            return plain(local, pid, file, file_actions, attributes, arguments, environment);
        }
        result
    }
}

/// Spawns with libc's own function, and with the environment that makes the child part of the run.
unsafe fn plain(
    spawn: Spawn,
    pid: *mut pid_t,
    path: *const c_char,
    file_actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    descriptors::share();
    // SAFETY: the program passes valid arguments.
    unsafe {
        let program = place::is_address(path).then(|| CStr::from_ptr(path).to_bytes_with_nul());
        with_environment(environment, program, |own| {
            spawn(pid, path, file_actions, attributes, arguments, own)
        })
    }
}

/// Spawns with `fork`; the child reports a failure through a pipe.
unsafe fn by_fork(
    pid: *mut pid_t,
    path: *const c_char,
    list: &[Action],
    attributes: *const c_void,
    (arguments, environment): (Strings, Strings),
    execute: Execute,
) -> c_int {
    // SAFETY: the program passes valid arguments; what the calls write to outlives them.
    unsafe {
        let pipe = match Pipe::open() {
            Ok(pipe) => pipe,
            Err(error) => return error,
        };
        let before = errno();
        let child = pipe.fork(|| libc::fork());
        if child == 0 {
            let mut tell = pipe.of_child();
            let mut error = prepare(list, attributes, &mut tell).err().unwrap_or(0);
            if error == 0 {
                execute(path, arguments, environment);
                error = errno();
            }
            let write = [tell as usize, &raw const error as usize, 4, 0, 0, 0];
            system_call(libc::SYS_write, write);
            system_call(libc::SYS_exit_group, [127, 0, 0, 0, 0, 0]);
        }
        let failed = if child < 0 { errno() } else { 0 };
        set_errno(before);
        let error = pipe.wait(child > 0).unwrap_or(failed);
        if child > 0 && error != 0 {
            system_call(libc::SYS_wait4, [child as usize, 0, 0, 0, 0, 0]);
        }
        if error == 0 && !pid.is_null() {
            *pid = child;
        }
        error
    }
}

/// Carries out the attributes and actions, in the child. Moves the pipe `tell` if an action wants its number.
unsafe fn prepare(
    list: &[Action],
    attributes: *const c_void,
    tell: &mut c_int,
) -> Result<(), c_int> {
    let good = |result: c_int| if result < 0 { Err(errno()) } else { Ok(()) };
    // SAFETY: libc made the attributes and actions; the kind of an action says which part of the union it
    // has.
    unsafe {
        if !attributes.is_null() {
            become_as(attributes.cast(), good)?;
        }
        for action in list {
            let about = action.about;
            let wanted = match action.kind {
                DUP => Some(about.dup[1]),
                OPEN => Some(about.open.fd),
                _ => None,
            };
            if wanted == Some(*tell) {
                *tell = own::duplicate(*tell, Own::Memory)?;
            }
            match action.kind {
                // As in libc, it is no error if the descriptor is not open.
                CLOSE => drop(files::close(about.fd)),
                DUP if about.dup[0] == about.dup[1] => {
                    good(files::fcntl(about.dup[0], libc::F_SETFD, 0))?;
                }
                DUP => good(files::dup2(about.dup[0], about.dup[1]))?,
                OPEN => {
                    let Open { fd, path, flags, mode } = about.open;
                    let opened = files::open(path, flags, mode);
                    good(opened)?;
                    if opened != fd {
                        good(files::dup2(opened, fd))?;
                        files::close(opened);
                    }
                }
                CHDIR => good(directories::chdir(about.path))?,
                FCHDIR => good(directories::fchdir(about.fd))?,
                CLOSE_FROM => files::closefrom(about.fd),
                TERMINAL_GROUP => good(libc::tcsetpgrp(about.fd, libc::getpgrp()))?,
                _ => return Err(libc::EINVAL),
            }
        }
    }
    Ok(())
}

/// Carries out the attributes.
unsafe fn become_as(
    attributes: *const libc::posix_spawnattr_t,
    good: impl Fn(c_int) -> Result<(), c_int>,
) -> Result<(), c_int> {
    const SET_SESSION: c_int = 0x80;
    // SAFETY: attributes that libc made; the structures outlive the calls.
    unsafe {
        let mut flags: c_short = 0;
        libc::posix_spawnattr_getflags(attributes, &raw mut flags);
        let flags = c_int::from(flags);
        let mut set: libc::sigset_t = std::mem::zeroed();
        if flags & libc::POSIX_SPAWN_SETSIGDEF != 0 {
            libc::posix_spawnattr_getsigdefault(attributes, &raw mut set);
            for signal in 1..=64 {
                if libc::sigismember(&raw const set, signal) == 1 {
                    libc::signal(signal, libc::SIG_DFL);
                }
            }
        }
        if flags & libc::POSIX_SPAWN_SETSCHEDULER != 0 {
            let (mut policy, mut parameters) = (0, std::mem::zeroed());
            libc::posix_spawnattr_getschedpolicy(attributes, &raw mut policy);
            libc::posix_spawnattr_getschedparam(attributes, &raw mut parameters);
            good(libc::sched_setscheduler(0, policy, &raw const parameters))?;
        } else if flags & libc::POSIX_SPAWN_SETSCHEDPARAM != 0 {
            let mut parameters = std::mem::zeroed();
            libc::posix_spawnattr_getschedparam(attributes, &raw mut parameters);
            good(libc::sched_setparam(0, &raw const parameters))?;
        }
        if flags & SET_SESSION != 0 {
            good(libc::setsid())?;
        }
        if flags & libc::POSIX_SPAWN_SETPGROUP != 0 {
            let mut group = 0;
            libc::posix_spawnattr_getpgroup(attributes, &raw mut group);
            good(libc::setpgid(0, group))?;
        }
        if flags & libc::POSIX_SPAWN_RESETIDS != 0 {
            good(libc::setegid(libc::getgid()))?;
            good(libc::seteuid(libc::getuid()))?;
        }
        if flags & libc::POSIX_SPAWN_SETSIGMASK != 0 {
            libc::posix_spawnattr_getsigmask(attributes, &raw mut set);
            good(libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()))?;
        }
    }
    Ok(())
}
