//! The working directory. While it is remote, the kernel's is an empty local stand-in, whose name tells a
//! program that this process executes the remote path.

use crate::guard::{self, checked, inside, system_call};
use crate::{common, descriptors, place, process, start};
use std::ffi::c_char;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_instance::WORKING;

static IS_REMOTE: AtomicBool = AtomicBool::new(false);
/// The local working directory lies above a prefix, so that a relative path can lead there.
static IS_ABOVE: AtomicBool = AtomicBool::new(false);
static REMOTE: Mutex<Remote> = Mutex::new(Remote { at: None, moves: 0 });

/// The remote working directory: its mount and path, and the move counter from before they were determined.
struct Remote {
    at: Option<(usize, Vec<u8>)>,
    moves: u64,
}

/// Folder of the stand-ins of removed directories.
const GONE: &[u8] = b"gone";
/// Suffix of the link that tells where a removed directory was.
const ABOVE: &[u8] = b".above";
/// Mount number of a removed working directory. Any request there fails with `ENOENT`.
pub(crate) const NO_MOUNT: usize = usize::MAX;

/// Returns true if the working directory is remote.
pub(crate) fn is_remote() -> bool {
    IS_REMOTE.load(Ordering::Relaxed)
}

/// Called in a process that uses its parent's memory: takes a copy and leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Ok(mut remote) = REMOTE.lock() {
        let copy = remote.at.clone();
        std::mem::forget(std::mem::replace(&mut remote.at, copy));
    }
}

/// Returns mount and path of the working directory if it is remote.
pub(crate) fn remote() -> Option<(usize, Vec<u8>)> {
    if !IS_REMOTE.load(Ordering::Relaxed) {
        return None;
    }
    // No fork comes between, whose child would find the lock taken.
    let found = inside(|| {
        let mut remote = REMOTE.lock().map_err(|_| libc::EIO)?;
        let moves = start::state().ok_or(libc::EIO)?.moves().load(Ordering::Acquire);
        if remote.moves != moves {
            remote.moves = moves;
            if let Some(found) = local().and_then(|here| behind(&here)) {
                remote.at = Some(found);
            }
        }
        Ok(remote.at.clone())
    });
    found.ok().flatten()
}

/// Number of pauses for which a rename under way is waited for: 2 s.
const MOVE_PAUSES: u32 = 40_000;
/// Within this time the working directory has to be seen missing for that. While the server renames it, a request may
/// find it where another, just before, did not. A far server is asked once.
const LOOK: Duration = Duration::from_millis(10);

/// The counter of moves before a path was looked for; `None` if it does not begin in a remote working directory.
#[derive(Clone, Copy)]
pub(crate) struct Before(Option<u64>);

impl Before {
    /// Notes it for a path relative to a descriptor (or `AT_FDCWD`).
    ///
    /// # Safety
    /// `path` is null or ends with a zero byte.
    pub(crate) unsafe fn path(directory: i32, path: *const c_char) -> Self {
        let is_meant = is_remote() && directory == libc::AT_FDCWD && place::is_address(path);
        // SAFETY: as the caller says.
        let is_relative = is_meant && unsafe { *path } != b'/' as c_char;
        let state = start::state().filter(|_| is_relative);
        Self(state.map(|state| state.moves().load(Ordering::SeqCst)))
    }

    /// Returns true if a name that was not found has to be looked for once more: the working directory was being renamed.
    /// Between the rename on the server and that of the stand-in, the path leads to where the directory was.
    pub(crate) fn has_moved(self) -> bool {
        let (Some(before), Some(state)) = (self.0, start::state()) else { return false };
        let has_moved = || state.moves().load(Ordering::SeqCst) != before;
        let is_moving = || state.moving().load(Ordering::SeqCst) > 0;
        let (began, mut missing) = (Instant::now(), false);
        for _ in 0..MOVE_PAUSES {
            if has_moved() || !is_moving() {
                break;
            }
            missing = missing || is_missing();
            if !missing && began.elapsed() >= LOOK {
                break;
            }
            guard::pause();
        }
        has_moved()
    }
}

/// Returns true if the working directory is not where it was.
fn is_missing() -> bool {
    let Some((mount, path)) = remote().filter(|(mount, _)| *mount != NO_MOUNT) else {
        return false;
    };
    let path = if path.is_empty() { b".".to_vec() } else { path };
    let at = place::At { mount, directory: None, path };
    let found = inside(|| at.with(|base, path| base.stat_path(path, true)));
    matches!(found, Err(libc::ENOENT | libc::ENOTDIR))
}

/// Returns true if relative paths can lead below a prefix without `..`.
pub(crate) fn is_above() -> bool {
    IS_ABOVE.load(Ordering::Relaxed)
}

/// Returns the kernel's working directory.
pub(crate) fn local() -> Option<Vec<u8>> {
    let read = |buffer: &mut [u8]| {
        let arguments = [buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0, 0];
        // SAFETY: the buffer is as long as said.
        let length = unsafe { checked(libc::SYS_getcwd, arguments) }?;
        Ok(buffer[..length.saturating_sub(1)].to_vec())
    };
    // Most paths are short, and each new program asks.
    let found = read(&mut [0; 256]);
    if found == Err(libc::ERANGE) { read(&mut [0; 4096]) } else { found }.ok()
}

/// Notes that the program changed to a local directory.
pub(crate) fn is_local() {
    is_at(local().as_deref());
}

/// Notes that the working directory is local, and its path if known.
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

/// Changes to a remote path that is known to be a directory.
pub(crate) fn go(mount: usize, below: &[u8]) -> Result<(), i32> {
    let clean = place::normal(below);
    let below = clean.strip_prefix(b"/").unwrap_or(&clean);
    let stand_in = stand_in(mount, below);
    enter(&stand_in, (mount, below.to_vec()))
}

/// Changes to a removed directory, which a process had open and which was in `above`.
pub(crate) fn go_to_removed(above: Option<(usize, &[u8])>) -> Result<(), i32> {
    let stand_in = stand_in_of_removed();
    let name = stand_in[folder().len() + GONE.len() + 1..stand_in.len() - 1].to_vec();
    enter(&stand_in, (NO_MOUNT, name))?;
    if let Some((mount, path)) = above {
        note_above(&stand_in, mount, path);
    }
    Ok(())
}

/// Stores, beside the stand-in of a removed directory, where `..` in it leads.
pub(crate) fn note_above(stand_in: &[u8], mount: usize, path: &[u8]) {
    let link = [&stand_in[..stand_in.len() - 1], ABOVE, b"\0"].concat();
    let target = [format!("{mount}/").as_bytes(), path, b"\0"].concat();
    let here = libc::AT_FDCWD as usize;
    let arguments = [target.as_ptr() as usize, here, link.as_ptr() as usize, 0, 0, 0];
    // SAFETY: both end with zero bytes.
    unsafe { system_call(libc::SYS_symlinkat, arguments) };
}

/// Returns where `..` leads from the removed directory with this stand-in.
pub(crate) fn above_removed(name: &[u8]) -> Option<(usize, Vec<u8>)> {
    let link = [&folder()[..], GONE, b"/", name, ABOVE, b"\0"].concat();
    let target = crate::descriptors::link_of(&link)?;
    let cut = target.iter().position(|b| *b == b'/')?;
    let mount = std::str::from_utf8(&target[..cut]).ok()?.parse().ok()?;
    Some((mount, target[cut + 1..].to_vec()))
}

/// Changes to a stand-in, and creates it if it is missing.
fn enter(stand_in: &[u8], remote: (usize, Vec<u8>)) -> Result<(), i32> {
    // One directory per name, so that names of any length fit.
    common::make_folders_above(stand_in, folder().len())?;
    common::make_folder(stand_in)?;
    let state = start::state().ok_or(libc::EIO)?;
    remote.1.split(|b| *b == b'/').for_each(|name| state.note_name(name));
    let mut known = REMOTE.lock().map_err(|_| libc::EIO)?;
    let moves = state.moves().load(Ordering::Acquire);
    // SAFETY: the path ends with a zero byte.
    unsafe { checked(libc::SYS_chdir, [stand_in.as_ptr() as usize, 0, 0, 0, 0, 0]) }?;
    *known = Remote { at: Some(remote), moves };
    drop(known);
    IS_REMOTE.store(true, Ordering::Relaxed);
    crate::trap::arm();
    Ok(())
}

/// Determines the working directory of a new program, or after libc has changed it internally.
pub(crate) fn inherit() {
    let moves = start::state().map_or(0, |state| state.moves().load(Ordering::Acquire));
    let here = local();
    is_at(here.as_deref());
    let Some(here) = here else { return };
    if let (Some(found), Ok(mut remote)) = (behind(&here), REMOTE.lock()) {
        *remote = Remote { at: Some(found), moves };
        IS_REMOTE.store(true, Ordering::Relaxed);
        IS_ABOVE.store(false, Ordering::Relaxed);
    }
}

/// Returns the mount and path of a stand-in.
fn behind(here: &[u8]) -> Option<(usize, Vec<u8>)> {
    let rest = here.strip_prefix(folder().as_slice())?;
    let cut = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
    if &rest[..cut] == GONE {
        return Some((NO_MOUNT, rest.get(cut + 1..).unwrap_or_default().to_vec()));
    }
    let mount = std::str::from_utf8(&rest[..cut]).ok()?.parse::<usize>().ok()?;
    Some((mount, rest.get(cut + 1..).unwrap_or_default().to_vec()))
}

/// Returns the path to show to a program instead of a stand-in's own.
pub(crate) fn named(here: &[u8]) -> Option<Vec<u8>> {
    let (mount, below) = behind(here)?;
    if mount != NO_MOUNT {
        return Some(place::absolute(mount, &below));
    }
    // All that is known of a removed directory's name is where it was.
    let (mount, above) = above_removed(&below)?;
    Some([&place::absolute(mount, &above)[..], b"/", descriptors::DELETED].concat())
}

/// Returns the stand-in of a remote directory, with a zero byte at the end.
pub(crate) fn stand_in(mount: usize, below: &[u8]) -> Vec<u8> {
    let mut path = folder();
    path.extend_from_slice(format!("{mount}").as_bytes());
    if !below.is_empty() {
        path.push(b'/');
        path.extend_from_slice(below);
    }
    path.push(0);
    path
}

/// Returns a new stand-in for a removed directory, with a zero byte at the end.
pub(crate) fn stand_in_of_removed() -> Vec<u8> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut path = folder();
    path.extend_from_slice(GONE);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    path.extend_from_slice(format!("/{}-{number}\0", process::identity()).as_bytes());
    path
}

/// Returns the folder of the stand-ins, with a slash at the end.
pub(crate) fn folder() -> Vec<u8> {
    let mut path = start::directory().to_vec();
    path.push(b'/');
    path.extend_from_slice(WORKING.as_bytes());
    path.push(b'/');
    path
}
