//! The working directory, and directory streams.

use super::{copy_out, watches};
use crate::descriptors::{self, Open};
use crate::guard::{finish, inside, ours};
use crate::known::Asked;
use crate::place::{self, At};
use crate::table::real;
use crate::{known, opened, remote, walk, working};
use libc::{DIR, c_char, c_int, c_long, c_void, dirent64, size_t, ssize_t};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use towline_client::{DirEntry, File};

/// Goes to a remote directory. The path noted for it has no links, as `..` is later resolved in its text.
fn go(at: &At) -> Result<c_int, i32> {
    match at.with(File::path_to_enter)?.map_err(remote::number) {
        Ok(path) => {
            working::go(at.mount, &path)?;
            if let Some(open) = at.directory.filter(|_| at.path == b".") {
                open.entry.set_path(&path);
            }
        }
        // The directory was removed, or is no longer below the prefix.
        Err(libc::ENOENT | libc::EXDEV) => {
            // For a removed directory, the server only knows where `..` itself leads.
            let up =
                if at.path == b"." { b"..".to_vec() } else { [&at.path, &b"/.."[..]].concat() };
            let above = at.with(|base, _| base.path_to_enter(&up)).ok().and_then(Result::ok);
            working::go_to_removed(above.as_deref().map(|above| (at.mount, above)))?;
        }
        Err(error) => return Err(error),
    }
    Ok(0)
}

pub(crate) unsafe fn chdir(path: *const c_char) -> c_int {
    let local = |_, path| {
        // SAFETY: the program passes valid arguments.
        let result = unsafe { real::chdir(path) };
        if result == 0 {
            let _ = inside(|| {
                working::is_local();
                Ok(())
            });
        }
        result
    };
    // SAFETY: the program passes valid arguments.
    unsafe { super::by_path(libc::AT_FDCWD, path, true, local, go) }
}

pub(crate) unsafe fn fchdir(fd: c_int) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        let result = unsafe { real::fchdir(fd) };
        if result == 0 {
            let _ = inside(|| {
                working::is_local();
                Ok(())
            });
        }
        return result;
    };
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    ours(|| go(&At { mount, directory: Some(open), path: b".".to_vec() }))
}

/// Returns the remote working directory as the program names it.
fn here() -> Option<Vec<u8>> {
    working::remote().map(|(mount, below)| place::absolute(mount, &below))
}

pub(crate) unsafe fn getcwd(to: *mut c_char, room: size_t) -> *mut c_char {
    if working::remote().is_some_and(|(mount, _)| mount == working::NO_MOUNT) {
        return finish(Err(libc::ENOENT));
    }
    let Ok(Some(path)) = inside(|| Ok(here())) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::getcwd(to, room) };
    };
    let needed = path.len() + 1;
    if !to.is_null() && room == 0 {
        return finish(Err(libc::EINVAL));
    }
    if room != 0 && room < needed {
        return finish(Err(libc::ERANGE));
    }
    // SAFETY: `malloc` may be called with any size; the program frees the memory.
    let to = if to.is_null() { unsafe { libc::malloc(room.max(needed)) }.cast() } else { to };
    if to.is_null() {
        return finish(Err(libc::ENOMEM));
    }
    // SAFETY: there is room for the path and a zero byte.
    unsafe {
        copy_out(&path, to.cast(), path.len());
        *to.add(path.len()) = 0;
    }
    to
}

pub(crate) unsafe fn getcwd_chk(to: *mut c_char, count: size_t, room: size_t) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe { getcwd(to, count.min(room)) }
}

pub(crate) unsafe fn get_current_dir_name() -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe {
        match working::remote() {
            None => real::get_current_dir_name(),
            Some(_) => getcwd(std::ptr::null_mut(), 0),
        }
    }
}

pub(crate) unsafe fn getwd(to: *mut c_char) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe { getcwd(to, libc::PATH_MAX as usize) }
}

/// Some entries of a directory.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) entries: Vec<DirEntry>,
    /// Whether they are the last.
    pub(super) end: bool,
    /// Number of changes before the server was asked.
    pub(super) changes: u64,
}

/// Returns entries from a cookie on. The first ones may have come with opening; others are requested, with
/// attributes if the program seems to want them.
fn list(open: Open, cookie: u64) -> Result<Batch, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let handle = open.handle;
    if cookie == 0
        && let Some((entries, end, changes)) = opened::listing(mount, handle)
    {
        return Ok(Batch { entries, end, changes });
    }
    let (asked, attributes) = (Asked::now(), known::rest_has_attributes(mount, handle));
    let (entries, end) = remote::with(open, |file| file.list(cookie, attributes))?;
    known::listed((mount, handle), cookie, asked, &entries, end);
    walk::listed(mount, handle, &entries);
    Ok(Batch { entries, end, changes: asked.changes })
}

/// A stream of a remote directory.
struct Stream {
    fd: c_int,
    batch: Batch,
    next: usize,
    /// Where the listing continues after the batch.
    cookie: u64,
    /// Cookie of the entry returned last.
    told: u64,
    entry: dirent64,
}

/// Addresses of remote streams. Few programs have more than a handful.
static STREAMS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns true if the program has streams of remote directories.
pub(super) fn has_streams() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Returns the remote stream at this address; `None` for one of libc's.
fn stream<'a>(at: *mut DIR) -> Option<&'a mut Stream> {
    if !has_streams() {
        return None;
    }
    let known = inside(|| Ok(STREAMS.lock().map_err(|_| libc::EIO)?.contains(&(at as usize))));
    // SAFETY: the stream is the library's own, and the program uses it from one thread at a time.
    known.unwrap_or(false).then(|| unsafe { &mut *at.cast::<Stream>() })
}

fn new_stream(fd: c_int) -> Result<*mut DIR, i32> {
    let stream = Stream {
        fd,
        batch: Batch::default(),
        next: 0,
        cookie: 0,
        told: 0,
        // SAFETY: all zero is a valid entry.
        entry: unsafe { std::mem::zeroed() },
    };
    let at = Box::into_raw(Box::new(stream)).cast::<DIR>();
    STREAMS.lock().map_err(|_| libc::EIO)?.push(at as usize);
    COUNT.fetch_add(1, Ordering::Release);
    Ok(at)
}

pub(crate) unsafe fn opendir(path: *const c_char) -> *mut DIR {
    // SAFETY: the program passes valid arguments.
    let local = |_, path| unsafe { real::opendir(path) };
    let remote = |at: &At| {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        new_stream(super::files::open_remote(at, flags, 0)?)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { super::by_path(libc::AT_FDCWD, path, true, local, remote) }
}

pub(crate) unsafe fn fdopendir(fd: c_int) -> *mut DIR {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fdopendir(fd) };
    };
    ours(|| {
        if open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT != libc::S_IFDIR {
            return Err(libc::ENOTDIR);
        }
        // SAFETY: the program has given the descriptor away.
        unsafe {
            crate::guard::checked(
                libc::SYS_fcntl,
                [fd as usize, libc::F_SETFD as usize, 1, 0, 0, 0],
            )
        }?;
        new_stream(fd)
    })
}

impl Stream {
    /// Returns the next entry; `None` at the end.
    fn next(&mut self) -> Result<Option<&mut dirent64>, i32> {
        if self.next == self.batch.entries.len() {
            if self.batch.end {
                return Ok(None);
            }
            let open = descriptors::find(self.fd).ok_or(libc::EBADF)?;
            let mut batch = list(open, self.cookie)?;
            batch.end |= batch.entries.is_empty();
            watches::listed(open, self.cookie, &batch);
            (self.batch, self.next) = (batch, 0);
            let Some(last) = self.batch.entries.last() else { return Ok(None) };
            self.cookie = last.cookie;
        }
        let from = &self.batch.entries[self.next];
        self.next += 1;
        self.told = from.cookie;
        let name = &from.name[..from.name.len().min(255)];
        let to = &mut self.entry;
        (to.d_ino, to.d_off, to.d_type) = (from.inode, from.cookie as i64, from.file_type);
        to.d_reclen = (19 + name.len() + 1).next_multiple_of(8) as u16;
        for (to, from) in to.d_name.iter_mut().zip(name.iter().chain(&[0])) {
            *to = *from as c_char;
        }
        Ok(Some(to))
    }

    fn seek(&mut self, cookie: u64) {
        self.batch = Batch::default();
        (self.next, self.cookie, self.told) = (0, cookie, cookie);
    }
}

pub(crate) unsafe fn readdir(at: *mut DIR) -> *mut dirent64 {
    let Some(stream) = stream(at) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::readdir(at) };
    };
    match inside(|| Ok(stream.next()?.map(|entry| &raw mut *entry))) {
        Ok(entry) => entry.unwrap_or(std::ptr::null_mut()),
        Err(error) => finish(Err(error)),
    }
}

pub(crate) unsafe fn readdir_r(
    at: *mut DIR,
    to: *mut dirent64,
    result: *mut *mut dirent64,
) -> c_int {
    let Some(stream) = stream(at) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::readdir_r(at, to, result) };
    };
    let done = inside(|| {
        let entry = stream.next()?;
        // SAFETY: the program provides both places.
        unsafe {
            *result = match entry {
                Some(entry) => {
                    *to = *entry;
                    to
                }
                None => std::ptr::null_mut(),
            };
        }
        Ok(())
    });
    // This function returns the error number.
    done.err().unwrap_or(0)
}

pub(crate) unsafe fn closedir(at: *mut DIR) -> c_int {
    if stream(at).is_none() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::closedir(at) };
    }
    let fd = inside(|| {
        STREAMS.lock().map_err(|_| libc::EIO)?.retain(|known| *known != at as usize);
        COUNT.fetch_sub(1, Ordering::Release);
        // SAFETY: `new_stream` made it, and nothing can find it any more.
        Ok(unsafe { Box::from_raw(at.cast::<Stream>()) }.fd)
    });
    match fd {
        // SAFETY: the descriptor belongs to the stream.
        Ok(fd) => unsafe { super::files::close(fd) },
        Err(error) => finish(Err(error)),
    }
}

pub(crate) unsafe fn rewinddir(at: *mut DIR) {
    match stream(at) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::rewinddir(at) },
        Some(stream) => stream.seek(0),
    }
}

pub(crate) unsafe fn telldir(at: *mut DIR) -> c_long {
    match stream(at) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::telldir(at) },
        Some(stream) => stream.told as c_long,
    }
}

pub(crate) unsafe fn seekdir(at: *mut DIR, to: c_long) {
    match stream(at) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::seekdir(at, to) },
        Some(stream) => stream.seek(to as u64),
    }
}

pub(crate) unsafe fn dirfd(at: *mut DIR) -> c_int {
    match stream(at) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::dirfd(at) },
        Some(stream) => stream.fd,
    }
}

/// Writes entries as `getdents64(2)` does; keeps the cookie of the last one as the file's offset.
fn records(open: Open, to: &mut [u8]) -> Result<usize, i32> {
    loop {
        let lock = remote::lock_offset(open)?;
        let cookie = open.entry.offset();
        let (count, next) = records_from(open, cookie, to)?;
        // Otherwise this process was stopped, and others have gone on.
        if open.entry.set_offset(&lock, cookie, next) {
            return Ok(count);
        }
    }
}

/// Writes entries behind a cookie; returns the number of bytes, and the cookie of the last one.
fn records_from(open: Open, from: i64, to: &mut [u8]) -> Result<(usize, i64), i32> {
    let mut batch = list(open, from as u64)?;
    let (mut at, mut count) = (0, 0);
    for entry in &batch.entries {
        let bytes = (19 + entry.name.len() + 1).next_multiple_of(8);
        let Some(record) = to.get_mut(at..at + bytes) else {
            if at == 0 {
                return Err(libc::EINVAL);
            }
            batch.end = false;
            break;
        };
        record.fill(0);
        record[..8].copy_from_slice(&entry.inode.to_ne_bytes());
        record[8..16].copy_from_slice(&entry.cookie.to_ne_bytes());
        record[16..18].copy_from_slice(&(bytes as u16).to_ne_bytes());
        record[18] = entry.file_type;
        record[19..19 + entry.name.len()].copy_from_slice(&entry.name);
        at += bytes;
        count += 1;
    }
    batch.entries.truncate(count);
    batch.end |= count == 0;
    watches::listed(open, from as u64, &batch);
    Ok((at, batch.entries.last().map_or(from, |last| last.cookie as i64)))
}

pub(crate) unsafe fn getdents64(fd: c_int, to: *mut c_void, room: size_t) -> ssize_t {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::getdents64(fd, to, room) };
    };
    // SAFETY: the program passes valid arguments.
    ours(|| Ok(records(open, unsafe { super::io::target(to, room) }?)? as isize))
}

/// The old form of [`getdents64`], which also returns where in the directory it began.
pub(crate) unsafe fn getdirentries(
    fd: c_int,
    to: *mut c_char,
    room: size_t,
    base: *mut libc::off64_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if descriptors::find(fd).is_none() {
            return real::getdirentries(fd, to, room, base);
        }
        let at = super::io::lseek(fd, 0, libc::SEEK_CUR);
        if let (0.., Some(base)) = (at, base.as_mut()) {
            *base = at;
        }
        getdents64(fd, to.cast(), room)
    }
}
