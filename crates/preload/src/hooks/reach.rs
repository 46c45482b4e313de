//! Programs that the library cannot reach: looked for before they are executed, where they would have
//! to do with something remote.

use crate::guard::{checked, inside, system_call};
use crate::{report, start, trap, working};
use libc::c_char;
use std::ffi::CStr;
use towline_instance::notes::Note;
use towline_instance::program::{FIRST_BYTES, Form, Obstacle};

/// Most interpreters of interpreters, as in Linux.
const INTERPRETERS_MAX: u32 = 5;

type Strings = *const *const c_char;

/// Looks at a local program before it is executed: `EACCES` when it cannot be reached although one of
/// its arguments names a prefix. It would take something else for the remote file, or make it anew on
/// this machine. Others are started, but told of.
///
/// # Safety
/// The path is null or a string, the arguments are a list that ends with null, or null.
pub(crate) unsafe fn check(path: *const c_char, arguments: Strings) -> Result<(), i32> {
    if start::state().is_none() || path.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller says.
    let is_named = unsafe { is_named(arguments) };
    if !is_named && !working::is_remote() && !report::is_on() {
        return Ok(());
    }
    inside(|| {
        // SAFETY: as the caller says.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        obstacle(path, 0).map_or(Ok(()), |(obstacle, program)| tell(obstacle, program, is_named))
    })
}

/// [`check`] for a remote program, by its first bytes.
///
/// # Safety
/// The arguments are a list that ends with null, or null.
pub(crate) unsafe fn check_first(path: &[u8], first: &[u8], arguments: Strings) -> Result<(), i32> {
    // SAFETY: as the caller says.
    let is_named = unsafe { is_named(arguments) };
    inside(|| match Form::of(first) {
        Form::Binary(binary) => Obstacle::of(&binary, name(path))
            .map_or(Ok(()), |obstacle| tell(obstacle, path.to_vec(), is_named)),
        _ => Ok(()),
    })
}

/// [`check`] for a program that is looked for in the folders of `PATH`.
///
/// # Safety
/// As for [`check`].
pub(crate) unsafe fn check_found(
    file: *const c_char,
    arguments: Strings,
    folders: &[u8],
) -> Result<(), i32> {
    // SAFETY: as the caller says.
    unsafe {
        if !is_named(arguments) && !working::is_remote() && !report::is_on() {
            return Ok(());
        }
        let name = CStr::from_ptr(file).to_bytes();
        for folder in folders.split(|b| *b == b':') {
            let folder = if folder.is_empty() { b"." } else { folder };
            let full = [folder, b"/", name, b"\0"].concat();
            let call =
                [libc::AT_FDCWD as usize, full.as_ptr() as usize, libc::X_OK as usize, 0, 0, 0];
            if system_call(libc::SYS_faccessat, call) == 0 {
                return check(full.as_ptr().cast(), arguments);
            }
        }
    }
    Ok(())
}

/// True when an argument beyond the program's own name names a prefix.
unsafe fn is_named(arguments: Strings) -> bool {
    // SAFETY: as the caller says.
    unsafe {
        let has_any = !arguments.is_null() && !(*arguments).is_null();
        has_any && trap::is_mentioned([arguments.add(1), std::ptr::null()])
    }
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

/// What is in the way of a program, and of which: a script's interpreter stands for it.
fn obstacle(path: &[u8], depth: u32) -> Option<(Obstacle, Vec<u8>)> {
    let mut text = path.to_vec();
    text.push(0);
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let open = [libc::AT_FDCWD as usize, text.as_ptr() as usize, flags as usize, 0, 0, 0];
    let mut first = [0u8; FIRST_BYTES];
    // SAFETY: all zero is a valid `stat`.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let mut capabilities = false;
    // SAFETY: the path ends with a zero byte, the places are as long as said, and the descriptor is
    // closed by who opened it.
    let count = unsafe {
        let fd = checked(libc::SYS_openat, open).ok()?;
        let _ = checked(libc::SYS_fstat, [fd, &raw mut status as usize, 0, 0, 0, 0]);
        let read = [fd, first.as_mut_ptr() as usize, FIRST_BYTES, 0, 0, 0];
        let count = checked(libc::SYS_pread64, read);
        if user().0 != 0 {
            let name = c"security.capability".as_ptr() as usize;
            capabilities = checked(libc::SYS_fgetxattr, [fd, name, 0, 0, 0, 0]).is_ok();
        }
        system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        count.ok()?
    };
    let rights = (status.st_mode, status.st_uid, status.st_gid);
    match Form::of(&first[..count]) {
        // Scripts take no rights from their files.
        Form::Script(interpreter, _) if depth < INTERPRETERS_MAX => {
            obstacle(&interpreter, depth + 1)
        }
        Form::Binary(binary) => {
            let found = Obstacle::of(&binary, name(path))
                .or_else(|| Obstacle::of_rights(rights, capabilities, user()))?;
            Some((found, path.to_vec()))
        }
        _ => None,
    }
}

/// User and group of this process.
fn user() -> (u32, u32) {
    let id = |number| {
        // SAFETY: a plain system call.
        unsafe { system_call(number, [0; 6]) as u32 }
    };
    (id(libc::SYS_geteuid), id(libc::SYS_getegid))
}
