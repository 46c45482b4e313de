//! The working directory. While it is remote the kernel's is an empty directory that stands for it,
//! whose name leads a program that this process executes to the path.

use crate::guard::{checked, system_call};
use crate::{place, start};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_instance::WORKING;

static IS_REMOTE: AtomicBool = AtomicBool::new(false);
/// The local working directory is above a prefix, so that a relative path can lead there.
static IS_ABOVE: AtomicBool = AtomicBool::new(false);
static REMOTE: Mutex<Option<(usize, Vec<u8>)>> = Mutex::new(None);

/// True when the working directory is remote.
pub(crate) fn is_remote() -> bool {
    IS_REMOTE.load(Ordering::Relaxed)
}

/// Mount and path of the working directory, if it is remote.
pub(crate) fn remote() -> Option<(usize, Vec<u8>)> {
    if !IS_REMOTE.load(Ordering::Relaxed) {
        return None;
    }
    REMOTE.lock().ok()?.clone()
}

/// True when relative paths can lead below a prefix without `..`.
pub(crate) fn is_above() -> bool {
    IS_ABOVE.load(Ordering::Relaxed)
}

/// The kernel's working directory.
pub(crate) fn local() -> Option<Vec<u8>> {
    let mut buffer = vec![0u8; 4096];
    let arguments = [buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0, 0];
    // SAFETY: the buffer is as long as said.
    let length = unsafe { checked(libc::SYS_getcwd, arguments) }.ok()?;
    buffer.truncate(length.saturating_sub(1));
    Some(buffer)
}

/// The program went to a local directory.
pub(crate) fn is_local() {
    is_at(local().as_deref());
}

/// The working directory is local, and this one where that can be told.
fn is_at(here: Option<&[u8]>) {
    IS_REMOTE.store(false, Ordering::Relaxed);
    let above = here.is_some_and(|here| {
        start::mounts().iter().any(|target| {
            let rest = target.mount.prefix.strip_prefix(here);
            here == b"/" || rest.is_some_and(|rest| rest.starts_with(b"/"))
        })
    });
    IS_ABOVE.store(above, Ordering::Relaxed);
}

/// Goes to a remote directory that was found to be one.
pub(crate) fn go(mount: usize, below: &[u8]) -> Result<(), i32> {
    let clean = place::normal(below);
    let below = clean.strip_prefix(b"/").unwrap_or(&clean);
    let mut stand_in = folder();
    stand_in.extend_from_slice(format!("{mount}").as_bytes());
    make_directory(&stand_in)?;
    // One directory for each name: then every name fits.
    for part in below.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
        stand_in.push(b'/');
        stand_in.extend_from_slice(part);
        make_directory(&stand_in)?;
    }
    stand_in.push(0);
    // SAFETY: the path ends with a zero byte.
    unsafe { checked(libc::SYS_chdir, [stand_in.as_ptr() as usize, 0, 0, 0, 0, 0]) }?;
    *REMOTE.lock().map_err(|_| libc::EIO)? = Some((mount, below.to_vec()));
    IS_REMOTE.store(true, Ordering::Relaxed);
    crate::trap::arm();
    Ok(())
}

/// Finds out where a new program starts.
pub(crate) fn inherit() {
    let here = local();
    is_at(here.as_deref());
    let Some(here) = here else { return };
    let Some(rest) = here.strip_prefix(folder().as_slice()) else { return };
    let cut = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
    let number = std::str::from_utf8(&rest[..cut]).ok().and_then(|n| n.parse::<usize>().ok());
    let below = rest.get(cut + 1..).unwrap_or_default();
    if let (Some(mount), Ok(mut remote)) = (number, REMOTE.lock()) {
        *remote = Some((mount, below.to_vec()));
        IS_REMOTE.store(true, Ordering::Relaxed);
        IS_ABOVE.store(false, Ordering::Relaxed);
    }
}

fn folder() -> Vec<u8> {
    let mut path = start::directory().to_vec();
    path.push(b'/');
    path.extend_from_slice(WORKING.as_bytes());
    path.push(b'/');
    path
}

fn make_directory(path: &[u8]) -> Result<(), i32> {
    let mut path = path.to_vec();
    path.push(0);
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0o700, 0, 0, 0];
    // SAFETY: the path ends with a zero byte.
    match unsafe { system_call(libc::SYS_mkdirat, arguments) } {
        0 => Ok(()),
        result if -result == libc::EEXIST as isize => Ok(()),
        result => Err(-result as i32),
    }
}
