//! Local copies of remote programs and libraries.
//!
//! The kernel and the loader open files themselves, so those files must be local. A copy lies in the run's
//! directory under its mount and path: so `$ORIGIN` leads from a copy to the copies beside it, and the path
//! of a copy leads back to the remote path. A copy is made anew if size or modification time differ.

use crate::elf::{self, Needs};
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

/// Returns the folders in which the loader looks for libraries of a file, as the file names them. The path ends with a
/// zero byte.
fn own_folders(file: &[u8], folders: &[Vec<u8>]) -> Vec<Folder> {
    let end = file.iter().rposition(|b| *b == b'/').unwrap_or(0);
    let of = |folder: &Vec<u8>| {
        let is_fixed = !folder.windows(7).any(|part| part == b"$ORIGIN")
            && !folder.windows(9).any(|part| part == b"${ORIGIN}");
        let path = replace(&replace(folder, b"${ORIGIN}", &file[..end]), b"$ORIGIN", &file[..end]);
        Folder { path, is_fixed }
    };
    folders.iter().map(of).collect()
}

/// A folder in which the loader looks.
struct Folder {
    path: Vec<u8>,
    /// It does not depend on where the file is, so the copies of what it contains are elsewhere.
    is_fixed: bool,
}

/// Copies a library that a program asks for by its name, from the remote folders in `search` and those that the files that
/// may ask name themselves. Returns the copies, and whether the loader finds each. The paths of the files end with zero
/// bytes.
pub(crate) fn copy_named(library: &[u8], search: &[u8], files: &[Vec<u8>]) -> Vec<(Vec<u8>, bool)> {
    let given = search.split(|b| *b == b':').map(|path| (path.to_vec(), true));
    let mut folders: Vec<(Vec<u8>, bool)> = given.collect();
    for file in files {
        let own = with_reader(file, elf::folders).unwrap_or_default();
        let own = own_folders(file, &own);
        folders.extend(own.into_iter().map(|folder| (folder.path, !folder.is_fixed)));
    }
    let copied =
        |(folder, is_found): (Vec<u8>, bool)| Some((copy_from(&folder, library)?, is_found));
    folders.into_iter().filter_map(copied).collect()
}

fn copy_from(folder: &[u8], library: &[u8]) -> Option<Vec<u8>> {
    let mut at = remote_folder(folder)?;
    at.path = [&at.path[..], b"/", library].concat();
    copy(&at).ok()
}

/// Returns true if a local program names remote folders for its libraries. Its path ends with a zero byte.
pub(crate) fn names_remote(program: &[u8]) -> bool {
    let own = with_reader(program, elf::folders).unwrap_or_default();
    own_folders(program, &own).iter().any(|folder| remote_folder(&folder.path).is_some())
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
    let split = |path: &[u8]| -> Vec<Vec<u8>> {
        path.split(|b| matches!(b, b':' | b';')).map(<[u8]>::to_vec).collect()
    };
    let mut folders = split(search);
    let mut unknown: Vec<Vec<u8>> = Vec::new();
    let mut next = vec![file.to_vec()];
    let mut seen: Vec<Vec<u8>> = Vec::new();
    while let Some(file) = next.pop() {
        let Some(needs) = needs(&file) else { continue };
        for folder in own_folders(&file, &needs.folders) {
            if let Some(at) = remote_folder(&folder.path) {
                let copies = place_of(at.mount, &at.below());
                // The loader never looks again in a folder that was missing at first.
                let _ = make_folders(&[&copies[..], b"/"].concat());
                unknown.extend(folder.is_fixed.then_some(copies));
            }
            folders.push(folder.path);
        }
        for library in needs.libraries {
            if seen.contains(&library) || seen.len() >= LIBRARIES_MAX || library.contains(&b'/') {
                continue;
            }
            let copied = folders.iter().find_map(|folder| copy_from(folder, &library));
            seen.push(library);
            next.extend(copied);
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
