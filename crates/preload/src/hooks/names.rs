//! Hooks that make, remove and rename names, and that make and read links.

use super::pairs::{self, Kind, Name};
use super::{by_path, copy_out, fifos, files::named_descriptor, leads_nowhere, led_in, only};
use crate::changed::Change;
use crate::descriptors::{DELETED, Open};
use crate::guard::{Failed, finish, inside, ours};
use crate::moved::{Moving, Removing};
use crate::place::{self, At, Led};
use crate::table::real;
use crate::{known, start, working};
use libc::{c_char, c_int, c_uint, dev_t, mode_t, size_t, ssize_t};
use std::ffi::CStr;
use std::sync::atomic::Ordering;
use towline_client::{Error, File};
use towline_wire::Attr;

/// Returns a path of the program; `EFAULT` for an invalid address.
unsafe fn text<'a>(path: *const c_char) -> Result<&'a [u8], i32> {
    if !place::is_address(path) {
        return Err(libc::EFAULT);
    }
    // SAFETY: the address is valid, so the program passes a C string.
    Ok(unsafe { CStr::from_ptr(path) }.to_bytes())
}

/// Returns true if the last name of a path is `.`.
fn ends_with_dot(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').rfind(|name| !name.is_empty()) == Some(b".")
}

/// Makes a name, and tells what is known of names.
fn create(at: &At, make: impl FnOnce(&File, &[u8]) -> Result<Attr, Error>) -> Result<Attr, i32> {
    let change = Change::begin(at.mount);
    let made = at.with(make).map_err(|error| change.failed(error))?;
    change.created(at, &made);
    Ok(made)
}

pub(crate) unsafe fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mkdirat(libc::AT_FDCWD, path, mode) }
}

pub(crate) unsafe fn mkdirat(at: c_int, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::mkdirat(at, path, mode) };
    let remote = |at: &At| {
        create(at, |base, path| base.make_directory(path, start::with_umask(mode))).map(|_| 0)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, false, local, remote) }
}

pub(crate) unsafe fn mknod(path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mknodat(libc::AT_FDCWD, path, mode, device) }
}

pub(crate) unsafe fn mknodat(at: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mknodat_by(at, path, mode, device, |at, path| real::mknodat(at, path, mode, device)) }
}

/// `mknodat`, with the function for local names as `local` (see `status.rs`).
unsafe fn mknodat_by(
    at: c_int,
    path: *const c_char,
    mode: mode_t,
    device: dev_t,
    local: impl Fn(c_int, *const c_char) -> c_int,
) -> c_int {
    let kind = if mode & libc::S_IFMT == 0 { libc::S_IFREG } else { mode & libc::S_IFMT };
    let remote = |at: &At| {
        let mode = kind | start::with_umask(mode);
        let made = create(at, |base, path| base.make_node(path, mode, device))?;
        if kind == libc::S_IFIFO {
            fifos::made(at.mount, made.identity());
        }
        Ok(0)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, false, local, remote) }
}

pub(crate) unsafe fn xmknod(
    version: c_int,
    path: *const c_char,
    mode: mode_t,
    device: *const dev_t,
) -> c_int {
    // SAFETY: the program passes valid arguments; a path other than the program's is absolute.
    unsafe {
        let local = |_, path| real::__xmknod(version, path, mode, device);
        let device = device.as_ref().copied().unwrap_or(0);
        mknodat_by(libc::AT_FDCWD, path, mode, device, local)
    }
}

pub(crate) unsafe fn xmknodat(
    version: c_int,
    at: c_int,
    path: *const c_char,
    mode: mode_t,
    device: *const dev_t,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let local = |at, path| real::__xmknodat(version, at, path, mode, device);
        mknodat_by(at, path, mode, device.as_ref().copied().unwrap_or(0), local)
    }
}

pub(crate) unsafe fn mkfifo(path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mknodat(libc::AT_FDCWD, path, libc::S_IFIFO | mode & 0o7777, 0) }
}

pub(crate) unsafe fn mkfifoat(at: c_int, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mknodat(at, path, libc::S_IFIFO | mode & 0o7777, 0) }
}

pub(crate) unsafe fn unlink(path: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { unlinkat(libc::AT_FDCWD, path, 0) }
}

pub(crate) unsafe fn rmdir(path: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { unlinkat(libc::AT_FDCWD, path, libc::AT_REMOVEDIR) }
}

pub(crate) unsafe fn unlinkat(at: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::unlinkat(at, path, flags) };
    let directory = flags & libc::AT_REMOVEDIR != 0;
    let remote = |at: &At| {
        only(libc::AT_REMOVEDIR, flags)?;
        if at.directory.is_none() && at.path == b"." {
            // A prefix itself is like a mount point.
            // SAFETY: the program passes valid arguments.
            let is_dot = unsafe { text(path) }.is_ok_and(ends_with_dot);
            let of_directory = if is_dot { libc::EINVAL } else { libc::EBUSY };
            return Err(if directory { of_directory } else { libc::EISDIR });
        }
        let removing = Removing::new(at, directory);
        let change = Change::begin(at.mount);
        at.with(|base, path| base.unlink(path, directory)).map_err(|e| change.failed(e))?;
        change.removed(at, directory);
        removing.done();
        Ok(0)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, false, local, remote) }
}

pub(crate) unsafe fn remove(path: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let errno = crate::guard::errno();
        if place::find(libc::AT_FDCWD, path).is_none() {
            let result = real::remove(path);
            if result == 0
                || crate::guard::errno() != libc::ENOENT
                || led_in(libc::AT_FDCWD, path, false).is_none()
            {
                return result;
            }
            crate::guard::set_errno(errno);
        }
        if unlink(path) == 0 {
            return 0;
        }
        if !matches!(crate::guard::errno(), libc::EISDIR | libc::EPERM) {
            return -1;
        }
        crate::guard::set_errno(errno);
        rmdir(path)
    }
}

pub(crate) unsafe fn rename(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { renameat2(libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) }
}

pub(crate) unsafe fn renameat(
    from_at: c_int,
    from: *const c_char,
    to_at: c_int,
    to: *const c_char,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { renameat2(from_at, from, to_at, to, 0) }
}

pub(crate) unsafe fn renameat2(
    from_at: c_int,
    from: *const c_char,
    to_at: c_int,
    to: *const c_char,
    flags: c_uint,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let local = |(from_at, from): Name, (to_at, to): Name| match flags {
            0 => real::renameat(from_at, from, to_at, to),
            _ => real::renameat2(from_at, from, to_at, to, flags),
        };
        let remote = |from: &At, to: &At| {
            let moving = Moving::new(from, to);
            let change = Change::begin(from.mount);
            let renamed = from.with(|base, path| {
                let renamed = to.with(|new_base, new| Ok(base.rename(path, new_base, new, flags)));
                renamed.unwrap_or_else(|error| Err(towline_wire::Errno(error as _).into()))
            });
            renamed.map_err(|error| change.failed(error))?;
            change.renamed(from, to, flags);
            moving.done(flags & libc::RENAME_EXCHANGE != 0);
            Ok(0)
        };
        pairs::run((from_at, from), (to_at, to), Kind::Rename, local, remote)
    }
}

pub(crate) unsafe fn link(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { linkat(libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) }
}

pub(crate) unsafe fn linkat(
    from_at: c_int,
    from: *const c_char,
    to_at: c_int,
    to: *const c_char,
    flags: c_int,
) -> c_int {
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    // SAFETY: the program passes valid arguments.
    unsafe {
        // An open file, perhaps without a name: `/proc/self/fd/N`, or a descriptor alone.
        let open = match named_descriptor(from).filter(|_| follow) {
            None if flags & libc::AT_EMPTY_PATH != 0 && !from.is_null() && *from == 0 => {
                crate::descriptors::find(from_at)
            }
            other => other,
        };
        if let Some(open) = open {
            // For a local path, the kernel must report a link across file systems, so it gets a file of
            // `/proc`.
            let elsewhere = c"/proc/self/status".as_ptr();
            let local = |at, path| real::linkat(libc::AT_FDCWD, elsewhere, at, path, 0);
            let remote = |to: &At| {
                only(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH, flags)?;
                let change = Change::begin(to.mount);
                let linked = crate::remote::with(open, |file| {
                    let linked = to.with(|base, path| Ok(file.link(b"", false, base, path)));
                    linked.unwrap_or_else(|error| Err(towline_wire::Errno(error as _).into()))
                });
                change.linked(to, &linked.map_err(|error| change.failed(error))?);
                Ok(0)
            };
            return by_path(to_at, to, false, local, remote);
        }
        let local = |(from_at, from): Name, (to_at, to): Name| {
            real::linkat(from_at, from, to_at, to, flags)
        };
        let remote = |from: &At, to: &At| {
            only(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH, flags)?;
            let change = Change::begin(to.mount);
            let linked = from.with(|base, path| {
                let linked = to.with(|new_base, new| Ok(base.link(path, follow, new_base, new)));
                linked.unwrap_or_else(|error| Err(towline_wire::Errno(error as _).into()))
            });
            change.linked(to, &linked.map_err(|error| change.failed(error))?);
            Ok(0)
        };
        pairs::run((from_at, from), (to_at, to), Kind::Link { follow }, local, remote)
    }
}

pub(crate) unsafe fn symlink(target: *const c_char, path: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { symlinkat(target, libc::AT_FDCWD, path) }
}

pub(crate) unsafe fn symlinkat(target: *const c_char, at: c_int, path: *const c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::symlinkat(target, at, path) };
    let remote = |at: &At| {
        // SAFETY: the program passes valid arguments.
        let target = unsafe { text(target) }?;
        if target.is_empty() {
            return Err(libc::ENOENT);
        }
        create(at, |base, path| base.symlink(path, target)).map(|_| 0)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, false, local, remote) }
}

pub(crate) unsafe fn readlink(path: *const c_char, to: *mut c_char, room: size_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe { readlinkat(libc::AT_FDCWD, path, to, room) }
}

/// Returns what `/proc` shows for a descriptor.
fn name_of(open: Open) -> Result<Vec<u8>, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    // Asks the server, as the file may have been opened, or renamed, through a link.
    if let Ok(path) = crate::remote::with(open, towline_client::File::path) {
        return Ok(place::absolute(mount, &path));
    }
    let mut path = place::absolute(mount, &open.entry.path());
    // Something outside the run may have removed the file.
    if !path.ends_with(DELETED) && crate::remote::stat(open)?.links == 0 {
        path.extend_from_slice(DELETED);
    }
    Ok(path)
}

/// Copies the target of a link to the program.
fn give_link(target: &[u8], to: *mut c_char, room: size_t) -> Result<ssize_t, i32> {
    if room == 0 {
        return Err(libc::EINVAL);
    }
    if !place::is_address(to) {
        return Err(libc::EFAULT);
    }
    // SAFETY: the program provides `room` bytes.
    Ok(unsafe { copy_out(target, to.cast(), room) } as isize)
}

pub(crate) unsafe fn readlinkat(
    at: c_int,
    path: *const c_char,
    to: *mut c_char,
    room: size_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::state().is_some()
            && let Some(open) = named_descriptor(path)
            // A link with a text, to a name in `/proc`.
            && !CStr::from_ptr(path).to_bytes().starts_with(b"/dev/std")
        {
            return ours(|| give_link(&name_of(open)?, to, room));
        }
        if !path.is_null()
            && *path == 0
            && let Some(open) = crate::descriptors::find(at)
        {
            return ours(|| {
                give_link(&crate::remote::with(open, |file| file.read_link(b""))?, to, room)
            });
        }
        let local = |at, path| match program_of(at, path).or_else(|| working_directory_of(at, path))
        {
            Some(name) if room > 0 => copy_out(&name, to.cast(), room) as ssize_t,
            _ => real::readlinkat(at, path, to, room),
        };
        let remote = |at: &At| {
            if room == 0 {
                return Err(libc::EINVAL);
            }
            give_link(&known::read_link(at)?, to, room)
        };
        by_path(at, path, false, local, remote)
    }
}

/// Returns the path of the remote program of a process, which runs from a local copy, by its name in
/// `/proc`.
unsafe fn program_of(at: c_int, path: *const c_char) -> Option<Vec<u8>> {
    if start::mounts().is_empty() || !place::is_address(path) {
        return None;
    }
    // SAFETY: the program passes valid arguments; the target has the length passed to the call.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if crate::guest::is_own_name(path) {
            return Some(crate::guest::name());
        }
        let name = CStr::from_ptr(path).to_bytes();
        if !name.starts_with(b"/proc/") || !name.ends_with(b"/exe") {
            return None;
        }
        let mut copy = [0u8; libc::PATH_MAX as usize];
        let length = real::readlinkat(at, path, copy.as_mut_ptr().cast(), copy.len());
        let copy = copy.get(..usize::try_from(length).ok()?)?;
        inside(|| crate::mirror::original(copy).ok_or(libc::ENOENT)).ok()
    }
}

/// Returns true for the name in `/proc` of the working directory of any process.
pub(super) unsafe fn is_working_directory(path: *const c_char) -> bool {
    if start::mounts().is_empty() || !place::is_address(path) {
        return false;
    }
    // SAFETY: the program passes valid arguments.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    name.starts_with(b"/proc/") && name.ends_with(b"/cwd")
}

/// Returns the remote working directory of a process of the run, by its name in `/proc`.
unsafe fn working_directory_of(at: c_int, path: *const c_char) -> Option<Vec<u8>> {
    // SAFETY: the program passes valid arguments; the target has the length passed to the call.
    unsafe {
        if !is_working_directory(path) {
            return None;
        }
        let mut here = [0u8; libc::PATH_MAX as usize];
        let length = real::readlinkat(at, path, here.as_mut_ptr().cast(), here.len());
        let here = here.get(..usize::try_from(length).ok()?)?;
        inside(|| working::named(here).ok_or(libc::ENOENT)).ok()
    }
}

pub(crate) unsafe fn readlink_chk(
    path: *const c_char,
    to: *mut c_char,
    count: size_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe { readlink(path, to, count.min(room)) }
}

pub(crate) unsafe fn readlinkat_chk(
    at: c_int,
    path: *const c_char,
    to: *mut c_char,
    count: size_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe { readlinkat(at, path, to, count.min(room)) }
}

/// Copies a string to `to`, or, if that is null, to memory that the program may free.
unsafe fn give(text: &[u8], to: *mut c_char) -> Result<*mut c_char, i32> {
    if text.len() >= libc::PATH_MAX as usize {
        return Err(libc::ENAMETOOLONG);
    }
    let target = if to.is_null() {
        // SAFETY: `malloc` may be called with any size; the program frees the memory.
        unsafe { libc::malloc(text.len() + 1) }.cast::<c_char>()
    } else {
        to
    };
    if target.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: there is room for the text and a zero byte, as `realpath` demands of its caller.
    unsafe {
        copy_out(text, target.cast(), text.len());
        *target.add(text.len()) = 0;
    }
    Ok(target)
}

pub(crate) unsafe fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let named = place::through_descriptor(path, true);
        if named.is_none() && place::find(libc::AT_FDCWD, path).is_none() {
            let errno = crate::guard::errno();
            let found = real::realpath(path, to);
            if !found.is_null()
                || crate::guard::errno() != libc::ENOENT
                || start::mounts().is_empty()
                || path.is_null()
                || leads_nowhere(libc::AT_FDCWD, path)
            {
                return found;
            }
            crate::guard::set_errno(errno);
        }
        let resolved = inside(|| {
            if named.is_none()
                && let Some(at) = place::find_inside(path)
                && let Some(resolved) = place::resolved(&at)
            {
                return resolved.map(Ok);
            }
            let mut full = match &named {
                // Resolved from the name of the open file, not from the file itself.
                Some(At { directory: Some(open), path, .. }) => {
                    let name = name_of(*open)?;
                    if path.is_empty() { name } else { [&name[..], b"/", path].concat() }
                }
                Some(at) => at.absolute()?,
                None => text(path)?.to_vec(),
            };
            if full.is_empty() {
                return Err(libc::ENOENT);
            }
            if full[0] != b'/' {
                let mut here = match working::remote() {
                    Some((mount, below)) => place::absolute(mount, &below),
                    None => working::local().ok_or(libc::ENOENT)?,
                };
                here.push(b'/');
                here.append(&mut full);
                full = here;
            }
            match place::follow(&full, true)? {
                Led::Local(path) => Ok(Err(path)),
                Led::Remote(at) => {
                    at.with(|base, path| base.stat_path(path, true))?;
                    Ok(Ok(place::normal(&at.absolute()?)))
                }
            }
        });
        match resolved {
            Ok(Ok(path)) => finish(give(&path, to)),
            Ok(Err(path)) => real::realpath(path.as_ptr().cast(), to),
            Err(error) => {
                crate::guard::set_errno(error);
                <*mut c_char>::FAILED
            }
        }
    }
}

pub(crate) unsafe fn realpath_chk(path: *const c_char, to: *mut c_char, _: size_t) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe { realpath(path, to) }
}

pub(crate) unsafe fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe { realpath(path, std::ptr::null_mut()) }
}
