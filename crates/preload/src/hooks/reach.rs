//! Detects programs that the library cannot reach, before they are executed, if they may have to do with
//! something remote.

use super::folders::candidates;
use crate::guard::{checked, inside, system_call};
use crate::{descriptors, report, start, trap, working};
use libc::c_char;
use std::ffi::CStr;
use towline_instance::notes::Note;
use towline_instance::program::{FIRST_BYTES, Form, Obstacle};

/// Maximum nesting of interpreters, as in Linux.
const INTERPRETERS_MAX: u32 = 5;

type Strings = *const *const c_char;

/// How to execute a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By the kernel.
    Plain,
    /// By a process of the library, as its guest.
    Hosted,
    /// By its interpreter, which is hosted. Holds the start of the script after `#!`.
    Script(Vec<u8>),
}

/// Signs that a program may have to do with something remote.
#[derive(Clone, Copy)]
struct Near {
    /// One of its arguments names a prefix.
    is_named: bool,
    /// That, or a variable of its environment names one, or it inherits a remote working directory or
    /// standard stream.
    is_near: bool,
}

impl Near {
    /// # Safety
    /// The lists end with null, or are null.
    unsafe fn of(arguments: Strings, environment: Strings) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let has_any = !arguments.is_null() && !(*arguments).is_null();
            let none = std::ptr::null();
            let is_named = has_any && trap::is_mentioned([arguments.add(1), none]);
            let is_near = is_named
                || working::is_remote()
                || (0..3).any(|stream| descriptors::find(stream).is_some())
                || trap::is_mentioned([environment, none]);
            Self { is_named, is_near }
        }
    }
}

/// Checks a local program before it is executed. Fails with `EACCES` if it can be neither reached nor
/// hosted although one of its arguments names a prefix: it would take something else for the remote file,
/// or create the file on this machine. Other programs that cannot be reached are executed, but reported.
///
/// # Safety
/// The path is null or a string; the lists end with null, or are null.
pub(crate) unsafe fn check(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> Result<Way, i32> {
    if start::state().is_none() || path.is_null() {
        return Ok(Way::Plain);
    }
    // SAFETY: guaranteed by the caller.
    let near = unsafe { Near::of(arguments, environment) };
    if !near.is_near && !report::is_on() {
        return Ok(Way::Plain);
    }
    inside(|| {
        // SAFETY: guaranteed by the caller.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        let Some((first, rights)) = look(path) else { return Ok(Way::Plain) };
        let Some((obstacle, program)) = obstacle(path, &first, rights, 0) else {
            return Ok(Way::Plain);
        };
        if !near.is_near || !can_host(obstacle) {
            return tell(obstacle, program, near.is_named).map(|()| Way::Plain);
        }
        match first.strip_prefix(b"#!") {
            Some(line) => Ok(Way::Script(line.to_vec())),
            None => Ok(Way::Hosted),
        }
    })
}

#[cfg(target_arch = "x86_64")]
fn can_host(obstacle: Obstacle) -> bool {
    obstacle.can_be_hosted() && crate::guest::is_possible()
}

#[cfg(not(target_arch = "x86_64"))]
fn can_host(_: Obstacle) -> bool {
    false
}

/// [`check`] for a remote program, by its first bytes.
///
/// # Safety
/// `arguments` is a list that ends with null, or null.
pub(crate) unsafe fn check_first(
    path: &[u8],
    first: &[u8],
    arguments: Strings,
) -> Result<Way, i32> {
    // SAFETY: guaranteed by the caller.
    let near = unsafe { Near::of(arguments, std::ptr::null()) };
    inside(|| {
        let Form::Binary(binary) = Form::of(first) else { return Ok(Way::Plain) };
        match Obstacle::of(&binary, name(path)) {
            None => Ok(Way::Plain),
            Some(obstacle) if can_host(obstacle) => Ok(Way::Hosted),
            Some(obstacle) => tell(obstacle, path.to_vec(), near.is_named).map(|()| Way::Plain),
        }
    })
}

/// [`check`] for a program that is searched for in the folders of `PATH`.
///
/// # Safety
/// As for [`check`].
pub(crate) unsafe fn check_found(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
    folders: &[u8],
) -> Result<Way, i32> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if !Near::of(arguments, environment).is_near && !report::is_on() {
            return Ok(Way::Plain);
        }
        match found(file, folders) {
            Some(full) => check(full.as_ptr().cast(), arguments, environment),
            None => Ok(Way::Plain),
        }
    }
}

/// Returns the first file that may be executed in these folders, as a path that ends with a zero byte.
///
/// # Safety
/// `name` is a string.
pub(crate) unsafe fn found(name: *const c_char, folders: &[u8]) -> Option<Vec<u8>> {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    candidates(name, folders).find(|full| {
        let call = [libc::AT_FDCWD as usize, full.as_ptr() as usize, libc::X_OK as usize, 0, 0, 0];
        // SAFETY: the path ends with a zero byte.
        unsafe { system_call(libc::SYS_faccessat, call) == 0 }
    })
}

/// Returns what follows `#!` at the start of a local script. For scripts that the kernel did not execute
/// because their interpreter is not on this machine: it may be remote.
///
/// # Safety
/// `path` is null or a string.
pub(crate) unsafe fn script(path: *const c_char) -> Option<Vec<u8>> {
    if start::mounts().is_empty() || path.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let first = inside(|| Ok(look(path))).ok().flatten()?.0;
    first.strip_prefix(b"#!").map(<[u8]>::to_vec)
}

fn tell(obstacle: Obstacle, program: Vec<u8>, is_named: bool) -> Result<(), i32> {
    let obstacle = obstacle.code().to_owned();
    if is_named {
        report::notice(&Note::Refused { obstacle, program });
        return Err(libc::EACCES);
    }
    let note = Note::Unreached { obstacle, program };
    if working::is_remote() {
        report::notice(&note);
    } else {
        report::record(&note);
    }
    Ok(())
}

fn name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// Returns what is in the way of a program, and of which one, from the results of [`look`]. For a script,
/// its interpreter counts.
fn obstacle(
    path: &[u8],
    first: &[u8],
    rights: Option<Obstacle>,
    depth: u32,
) -> Option<(Obstacle, Vec<u8>)> {
    match Form::of(first) {
        // A script gets no privileges from its file.
        Form::Script(interpreter, _) if depth < INTERPRETERS_MAX => {
            let (first, rights) = look(&interpreter)?;
            obstacle(&interpreter, &first, rights, depth + 1)
        }
        Form::Binary(binary) => {
            // A program that gains privileges is never hosted, whatever else it is.
            let found = rights.or_else(|| Obstacle::of(&binary, name(path)))?;
            Some((found, path.to_vec()))
        }
        _ => None,
    }
}

/// Returns the first bytes of a program, and the obstacle that its privileges pose; `None` for a program
/// that cannot be read or executed.
fn look(path: &[u8]) -> Option<(Vec<u8>, Option<Obstacle>)> {
    let mut text = path.to_vec();
    text.push(0);
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let open = [libc::AT_FDCWD as usize, text.as_ptr() as usize, flags as usize, 0, 0, 0];
    let executes = [libc::AT_FDCWD as usize, text.as_ptr() as usize, libc::X_OK as usize, 0, 0, 0];
    let mut first = vec![0u8; FIRST_BYTES];
    // SAFETY: all zero is a valid `stat`.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let mut capabilities = false;
    let user = user();
    // SAFETY: the path ends with a zero byte, the buffers have the lengths passed to the calls, and the
    // descriptor is closed here.
    let count = unsafe {
        checked(libc::SYS_faccessat, executes).ok()?;
        let fd = checked(libc::SYS_openat, open).ok()?;
        let _ = checked(libc::SYS_fstat, [fd, &raw mut status as usize, 0, 0, 0, 0]);
        let read = [fd, first.as_mut_ptr() as usize, FIRST_BYTES, 0, 0, 0];
        let count = checked(libc::SYS_pread64, read);
        if user.0 != 0 {
            let name = c"security.capability".as_ptr() as usize;
            capabilities = checked(libc::SYS_fgetxattr, [fd, name, 0, 0, 0, 0]).is_ok();
        }
        system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        count.ok()?
    };
    first.truncate(count);
    let rights = (status.st_mode, status.st_uid, status.st_gid);
    let gained = Obstacle::of_rights(rights, capabilities, user);
    let two_users = (user != real_user()).then_some(Obstacle::TwoUsers);
    Some((first, gained.or(two_users)))
}

fn id(number: libc::c_long) -> u32 {
    // SAFETY: only calls without arguments.
    unsafe { system_call(number, [0; 6]) as u32 }
}

/// Returns the effective user and group of this process.
fn user() -> (u32, u32) {
    (id(libc::SYS_geteuid), id(libc::SYS_getegid))
}

/// Returns its real user and group.
fn real_user() -> (u32, u32) {
    (id(libc::SYS_getuid), id(libc::SYS_getgid))
}
