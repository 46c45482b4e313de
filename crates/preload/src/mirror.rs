//! Local copies of remote programs and libraries.
//!
//! The kernel and the loader open files themselves, so those files must be local. A copy lies in the run's
//! directory under its mount and path: so `$ORIGIN` leads from a copy to the copies beside it, and the path
//! of a copy leads back to the remote path. A copy is made anew if size or modification time differ.

use crate::elf::{self, Folders, Needs};
use crate::guard::checked;
use crate::place::{self, At};
use crate::{common, process, start};
use std::sync::atomic::{AtomicU32, Ordering};
use towline_instance::PROGRAMS;

/// Maximum number of libraries copied for one program.
const LIBRARIES_MAX: usize = 512;
const PIECE_BYTES: usize = 1 << 20;

fn folder() -> Vec<u8> {
    [start::directory(), b"/", PROGRAMS.as_bytes(), b"/"].concat()
}

/// Returns the path of the copy of a remote file.
fn place_of(mount: usize, below: &[u8]) -> Vec<u8> {
    let below = place::normal(below);
    [&folder(), format!("{mount}").as_bytes(), &below].concat()
}

/// Returns the folder of the copies of a remote folder's files.
pub(crate) fn folder_of(at: &At) -> Vec<u8> {
    place_of(at.mount, &at.below())
}

/// Returns the remote path of a local copy.
pub(crate) fn original(copy: &[u8]) -> Option<Vec<u8>> {
    let rest = copy.strip_prefix(folder().as_slice())?;
    let cut = rest.iter().position(|b| *b == b'/').unwrap_or(rest.len());
    let mount = std::str::from_utf8(&rest[..cut]).ok()?.parse().ok()?;
    Some(place::absolute(mount, rest.get(cut + 1..).unwrap_or_default()))
}

/// Returns true for the path of a copy.
pub(crate) fn is_copy(path: &[u8]) -> bool {
    path.starts_with(&folder())
}

fn with_end(path: &[u8]) -> Vec<u8> {
    [path, b"\0"].concat()
}

fn call(number: i64, arguments: [usize; 6]) -> Result<usize, i32> {
    // SAFETY: all callers pass addresses of memory that outlives the call, and texts that end with a zero
    // byte.
    unsafe { checked(number, arguments) }
}

const AT: usize = libc::AT_FDCWD as usize;

/// Creates the folders above a path.
fn make_folders(path: &[u8]) -> Result<(), i32> {
    common::make_folders_above(path, folder().len())
}

/// Returns the path of the local copy of a remote file, and makes the copy if it is missing. Ends with a
/// zero byte.
///
/// # Errors
/// Those of reading the file and writing the copy; `EACCES` if it is not a regular file.
pub(crate) fn copy(at: &At) -> Result<Vec<u8>, i32> {
    let file = at.with(|base, path| base.open(path, libc::O_RDONLY as u32, 0))?;
    let attr = *file.attr();
    if attr.mode & libc::S_IFMT != libc::S_IFREG {
        return Err(libc::EACCES);
    }
    let path = place_of(at.mount, &at.below());
    let name = with_end(&path);
    // SAFETY: all zero is a valid `stat`.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    let stat = [AT, name.as_ptr() as usize, &raw mut found as usize, 0, 0, 0];
    let same = call(libc::SYS_newfstatat, stat).is_ok()
        && found.st_size == attr.size as i64
        && found.st_mtime == attr.modified.seconds
        && found.st_mtime_nsec == i64::from(attr.modified.nanoseconds);
    if same {
        return Ok(name);
    }
    make_folders(&path)?;
    // Written beside it and then renamed: others may be executing the previous copy.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = (process::identity(), COUNT.fetch_add(1, Ordering::Relaxed));
    let new = [&path[..], format!(".{}.{}\0", number.0, number.1).as_bytes()].concat();
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
    let fd = call(libc::SYS_openat, [AT, new.as_ptr() as usize, flags as usize, 0o755, 0, 0])?;
    let copied = (|| {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut offset = 0;
        loop {
            let count = file.read_at(&mut buffer, offset).map_err(crate::remote::number)?;
            if count == 0 {
                break;
            }
            let mut done = 0;
            while done < count {
                let rest = &buffer[done..count];
                done += call(libc::SYS_write, [fd, rest.as_ptr() as usize, rest.len(), 0, 0, 0])?;
            }
            offset += count as u64;
        }
        call(libc::SYS_fchmod, [fd, 0o755, 0, 0, 0, 0])?;
        let time = libc::timespec {
            tv_sec: attr.modified.seconds,
            tv_nsec: i64::from(attr.modified.nanoseconds),
        };
        let times = [time, time];
        call(libc::SYS_utimensat, [fd, 0, times.as_ptr() as usize, 0, 0, 0])
    })();
    // The kernel does not execute a file that is open for writing.
    let _ = call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
    let (from, to) = (new.as_ptr() as usize, name.as_ptr() as usize);
    let placed = copied.and_then(|_| call(libc::SYS_renameat2, [AT, from, AT, to, 0, 0]));
    placed.inspect_err(|_| {
        // No room, for one: the space is needed, and nobody else knows this name.
        let _ = call(libc::SYS_unlinkat, [AT, from, 0, 0, 0, 0]);
    })?;
    Ok(name)
}

/// Returns what a local program or library needs, of which only the parts that say so are read: some have gigabytes. The
/// path ends with a zero byte.
fn needs(path: &[u8]) -> Option<Needs> {
    with_reader(path, elf::needs)
}

fn with_reader<T>(path: &[u8], work: impl FnOnce(elf::Read<'_>) -> Option<T>) -> Option<T> {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    let fd = call(libc::SYS_openat, [AT, path.as_ptr() as usize, flags, 0, 0, 0]).ok()?;
    let told = work(&|at, length| {
        let mut bytes = vec![0; length];
        let read = [fd, bytes.as_mut_ptr() as usize, length, at, 0, 0];
        bytes.truncate(call(libc::SYS_pread64, read).ok()?);
        Some(bytes)
    });
    let _ = call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
    told
}

/// Returns the folders in which the loader looks for libraries of a file. The path ends with a zero byte.
fn own_folders(file: &[u8], folders: &Folders) -> Vec<Vec<u8>> {
    let end = file.iter().rposition(|b| *b == b'/').unwrap_or(0);
    let of = |folder: &Vec<u8>| {
        replace(&replace(folder, b"${ORIGIN}", &file[..end]), b"$ORIGIN", &file[..end])
    };
    folders.paths.iter().map(of).collect()
}

fn split(search: &[u8]) -> Vec<Vec<u8>> {
    search.split(|b| matches!(b, b':' | b';')).map(<[u8]>::to_vec).collect()
}

/// The copy of a library.
pub(crate) struct Copied {
    pub(crate) path: Vec<u8>,
    /// The loader looks where it is.
    pub(crate) is_found: bool,
}

/// Copies a library that a program asks for by its name, if the first folder that has it is remote: of those that the files
/// that may ask name themselves, and of `search`. The first file is the one that asks. The paths of the files end with
/// zero bytes.
pub(crate) fn copy_named(library: &[u8], search: &[u8], files: &[Vec<u8>]) -> Option<Copied> {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for (number, file) in files.iter().enumerate() {
        let folders = with_reader(file, elf::folders).unwrap_or_default();
        let own = own_folders(file, &folders);
        if folders.are_first {
            first.extend(own);
        } else if number == 0 {
            last.extend(own);
        }
    }
    let given = split(search);
    let is_given = |at: usize| (first.len()..first.len() + given.len()).contains(&at);
    let mut all = first.iter().chain(&given).chain(&last).enumerate();
    let (at, folder, found) =
        all.find_map(|(at, folder)| Some((at, folder, look_in(folder, library)?)))?;
    let Found::Copy(path) = found else { return None };
    Some(Copied { path, is_found: is_given(at) || original(folder).is_some() })
}

/// Where a library is.
enum Found {
    /// On this machine.
    Here,
    /// On a server. This is the path of its copy.
    Copy(Vec<u8>),
}

/// Looks for a library in a folder, and copies a remote one.
fn look_in(folder: &[u8], library: &[u8]) -> Option<Found> {
    if let Some(mut at) = remote_folder(folder) {
        at.path = [&at.path[..], b"/", library].concat();
        return copy(&at).ok().map(Found::Copy);
    }
    let path = [folder, b"/", library, b"\0"].concat();
    let access = [AT, path.as_ptr() as usize, libc::F_OK as usize, 0, 0, 0];
    (!folder.is_empty() && call(libc::SYS_faccessat, access).is_ok()).then_some(Found::Here)
}

/// Returns true if a local program names remote folders for its libraries. Its path ends with a zero byte.
pub(crate) fn names_remote(program: &[u8]) -> bool {
    let own = with_reader(program, elf::folders).unwrap_or_default();
    own_folders(program, &own).iter().any(|folder| remote_folder(folder).is_some())
}

/// Returns a search path of the loader with remote folders replaced by those of their copies; `None` if
/// there are none.
pub(crate) fn search_path(given: &[u8]) -> Option<Vec<u8>> {
    let mut found = false;
    let folders: Vec<Vec<u8>> = given
        .split(|b| matches!(b, b':' | b';'))
        .map(|folder| match remote_folder(folder) {
            Some(at) => {
                found = true;
                let folder = place_of(at.mount, &at.below());
                // The loader never looks again in a folder that was missing when the program started.
                let _ = make_folders(&[&folder[..], b"/"].concat());
                folder
            }
            None => folder.to_vec(),
        })
        .collect();
    found.then(|| folders.join(&b':'))
}

/// Returns a remote folder given by its own path or that of its copies.
fn remote_folder(folder: &[u8]) -> Option<At> {
    let name = with_end(&original(folder).unwrap_or_else(|| folder.to_vec()));
    if name.len() == 1 {
        return None;
    }
    // SAFETY: it ends with a zero byte.
    unsafe { place::find_inside(name.as_ptr().cast()) }
}

/// Copies the remote libraries that a local file needs, from the remote folders in `search` and in the
/// files themselves. Returns the folders of copies that the loader cannot know of.
///
/// `file` ends with a zero byte.
pub(crate) fn gather(file: &[u8], search: &[u8]) -> Vec<Vec<u8>> {
    let given = split(search);
    // Folders of files that come before: the loader looks there, too, if they are to be looked at first.
    let mut before: Vec<Vec<u8>> = Vec::new();
    let mut unknown: Vec<Vec<u8>> = Vec::new();
    let mut next = vec![file.to_vec()];
    let mut seen: Vec<Vec<u8>> = Vec::new();
    while let Some(file) = next.pop() {
        let Some(needs) = needs(&file) else { continue };
        let own = own_folders(&file, &needs.folders);
        for at in own.iter().filter_map(|folder| remote_folder(folder)) {
            // The loader never looks again in a folder that was missing at first.
            let _ = make_folders(&[&place_of(at.mount, &at.below())[..], b"/"].concat());
        }
        let folders = match needs.folders.are_first {
            true => [&own[..], &before, &given].concat(),
            false => [&given[..], &own, &before].concat(),
        };
        before.extend(own);
        for library in needs.libraries {
            if seen.contains(&library) || seen.len() >= LIBRARIES_MAX || library.contains(&b'/') {
                continue;
            }
            let found =
                folders.iter().find_map(|folder| Some((folder, look_in(folder, &library)?)));
            seen.push(library);
            let Some((folder, Found::Copy(copied))) = found else { continue };
            if original(folder).is_none()
                && !given.contains(folder)
                && let Some(at) = remote_folder(folder)
            {
                let copies = place_of(at.mount, &at.below());
                unknown.extend((!unknown.contains(&copies)).then_some(copies));
            }
            next.push(copied);
        }
    }
    unknown
}

fn replace(text: &[u8], what: &[u8], with: &[u8]) -> Vec<u8> {
    match text.windows(what.len()).position(|part| part == what) {
        Some(at) => [&text[..at], with, &text[at + what.len()..]].concat(),
        None => text.to_vec(),
    }
}
