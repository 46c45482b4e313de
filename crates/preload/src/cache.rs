//! Contents of files that this run or an earlier one has read (`towline run --cache`); `towline_instance::cache` has
//! the files in which they are kept.
//!
//! Opening a file always asks its server, which tells the file's number of changes with the attributes. With this
//! number the contents are looked up. While the file is open the number is asked for once more ([`confirm`]) if it
//! arrived longer than [`VALID`] ago, or if any process of the run has changed something: the same age that data read
//! ahead may have (`ahead.rs`). So a read is at most [`VALID`] older than without a cache.
//!
//! Only what is opened for reading alone is looked up and kept. The first bytes of a file come with opening it
//! (`opened.rs`); files that are not longer are not kept.

mod gathered;

use crate::ahead;
use crate::descriptors::{Open, Own};
use crate::known::{self, Asked, lock};
use crate::opened::FIRST_BYTES;
use crate::{own, remote, start};
use gathered::{Gathered, LONG_BYTES, Piece};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use towline_client::{File, Url};
use towline_instance::cache::{Cached, VALID, Version};
use towline_wire::Attr;

/// Maximum number of open files that are looked up.
const FILES_MAX: usize = 64;
/// Maximum number of their cached files that are open: the program may need the descriptors.
const HELD_MAX: usize = 8;

static FILES: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// An open file whose contents may be in the cache.
struct Known {
    mount: usize,
    handle: u64,
    version: Version,
    /// When the server was asked for the version.
    asked: Asked,
    place: Place,
    gathered: Gathered,
}

enum Place {
    /// Not open.
    Unknown,
    Here(Arc<Cached>),
    /// It cannot be opened or written.
    Nowhere,
}

/// Called in a process that uses its parent's memory or has the parent's descriptors no more: starts empty and leaves
/// the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut files) = lock(&FILES) {
        std::mem::forget(std::mem::take(&mut *files));
    }
}

/// Called when a file has been opened.
pub(crate) fn opened(mount: usize, handle: u64, flags: i32, attr: &Attr, asked: Asked) {
    const WRITES: i32 = libc::O_ACCMODE | libc::O_PATH | libc::O_TRUNC;
    if directory().is_none() {
        return;
    }
    forget(mount, handle);
    if flags & WRITES != 0 || attr.size <= FIRST_BYTES as u64 {
        return;
    }
    let url = start::mounts().get(mount).and_then(|target| target.url());
    let version = |url: &Url| Version::of(url.of_export().to_string().as_bytes(), attr);
    let Some(version) = url.and_then(version) else { return };
    if let Some(mut files) = lock(&FILES) {
        if files.len() == FILES_MAX {
            files.remove(0);
        }
        let (place, gathered) = (Place::Unknown, Gathered::default());
        files.push(Known { mount, handle, version, asked, place, gathered });
    }
}

/// Called when a file is closed.
pub(crate) fn closed(mount: usize, handle: u64) {
    if directory().is_some() {
        keep_gathered(mount, handle);
        forget(mount, handle);
    }
}

fn forget(mount: usize, handle: u64) {
    let _ = with(mount, handle, |files, place| drop(files.remove(place)));
}

fn directory() -> Option<&'static [u8]> {
    start::config().map(|config| &config.cache[..]).filter(|directory| !directory.is_empty())
}

fn with<T>(mount: usize, handle: u64, work: impl FnOnce(&mut Vec<Known>, usize) -> T) -> Option<T> {
    let mut files = lock(&FILES)?;
    let place = files.iter().position(|file| file.handle == handle && file.mount == mount)?;
    Some(work(&mut files, place))
}

/// Returns the cached file of an open one, and when its version was asked for.
fn find(mount: usize, handle: u64) -> Option<(Arc<Cached>, Asked)> {
    let directory = directory()?;
    let find = |files: &mut Vec<Known>, place: usize| {
        let file = &files[place];
        match &file.place {
            Place::Unknown => Some((None, file.version, file.asked)),
            Place::Here(cached) => Some((Some(Arc::clone(cached)), file.version, file.asked)),
            Place::Nowhere => None,
        }
    };
    let (cached, version, asked) = with(mount, handle, find)??;
    if let Some(cached) = cached {
        return Some((cached, asked));
    }
    let hide = |fd| own::hide_if_ample(fd, Own::Connection).map_err(io::Error::from_raw_os_error);
    let cached = Cached::open(directory, version, hide).ok().map(Arc::new);
    let _ = with(mount, handle, |files, place| {
        files[place].place = cached.clone().map_or(Place::Nowhere, Place::Here);
        let is_held = |file: &Known| matches!(file.place, Place::Here(_));
        let mut held = (0..files.len()).filter(|other| is_held(&files[*other]));
        if held.clone().count() > HELD_MAX
            && let Some(other) = held.find(|other| *other != place)
        {
            files[other].place = Place::Unknown;
        }
    });
    cached.map(|cached| (cached, asked))
}

/// Asks whether the file still has this version; forgets it otherwise.
fn confirm(open: Open, mount: usize, version: Version) -> bool {
    let changes = known::changes();
    if !remote::with(open, File::stat).is_ok_and(|attr| version.is_still(&attr)) {
        forget(mount, open.handle);
        return false;
    }
    let asked = Asked { when: Instant::now(), changes };
    let _ = with(mount, open.handle, |files, place| files[place].asked = asked);
    true
}

/// Reads an open file at an offset.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: u64) -> Result<usize, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let found = if ahead::is_followed(open) { find(mount, open.handle) } else { None };
    let Some((cached, asked)) = found else { return ahead::read_at(open, target, offset) };
    // The end of a file is not remembered, as in `ahead.rs`.
    if offset >= cached.size() {
        return ahead::read_at(open, target, offset);
    }
    let done = cached.read_at(target, offset);
    if done > 0 && !asked.is_younger(VALID) && !confirm(open, mount, cached.version()) {
        return ahead::read_at(open, target, offset);
    }
    complete(open, &cached, (target, done), offset, ahead::read_at)
}

/// Reads an open file into the memory of its shared mappings, which note what version their pages have: what is kept
/// counts only if the server has told its version after `since`, and nothing counts that was read ahead.
pub(crate) fn read_to_share(
    open: Open,
    target: &mut [u8],
    offset: u64,
    since: Instant,
) -> Result<usize, i32> {
    let read = |open, part: &mut [u8], at| remote::with(open, |file| file.read_at(part, at));
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let found = if ahead::is_followed(open) { find(mount, open.handle) } else { None };
    let Some((cached, asked)) = found else { return read(open, target, offset) };
    if offset >= cached.size() {
        return read(open, target, offset);
    }
    let done = cached.read_at(target, offset);
    if done > 0 && asked.when < since && !confirm(open, mount, cached.version()) {
        return read(open, target, offset);
    }
    complete(open, &cached, (target, done), offset, read)
}

/// Reads the rest of `target`, of which so many bytes were kept, and keeps it.
fn complete(
    open: Open,
    cached: &Cached,
    (target, done): (&mut [u8], usize),
    offset: u64,
    read: impl FnOnce(Open, &mut [u8], u64) -> Result<usize, i32>,
) -> Result<usize, i32> {
    if let Some(state) = start::state() {
        state.from_cache().fetch_add(done as u64, Ordering::Relaxed);
    }
    let at = offset + done as u64;
    if done == target.len() || at == cached.size() {
        return Ok(done);
    }
    match read(open, &mut target[done..], at) {
        Ok(count) => {
            let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
            keep(open, mount, cached, &target[done..done + count], at);
            Ok(done + count)
        }
        Err(_) if done > 0 => Ok(done),
        Err(error) => Err(error),
    }
}

/// Keeps what was read; what is short only together with what follows.
fn keep(open: Open, mount: usize, cached: &Cached, data: &[u8], mut at: u64) {
    // In parts, as it is copied: a program may read very many bytes at once.
    let parts = (data.len() / LONG_BYTES).max(1);
    for part in data.chunks(data.len().div_ceil(parts).max(1)) {
        let ends = at + part.len() as u64 >= cached.size();
        let add = |files: &mut Vec<Known>, place: usize| files[place].gathered.add(at, part, ends);
        for Piece { from, bytes } in with(mount, open.handle, add).into_iter().flatten().flatten() {
            store(mount, open.handle, cached, &bytes, from);
        }
        at += part.len() as u64;
    }
}

/// Keeps what has been gathered of a file.
fn keep_gathered(mount: usize, handle: u64) {
    let piece = with(mount, handle, |files, place| files[place].gathered.take()).flatten();
    if let Some(Piece { from, bytes }) = piece
        && let Some((cached, _)) = find(mount, handle)
    {
        store(mount, handle, &cached, &bytes, from);
    }
}

/// Puts bytes into the cache. If that fails, for example as the disk is full, this file is not kept any more.
fn store(mount: usize, handle: u64, cached: &Cached, data: &[u8], at: u64) {
    match cached.store(data, at) {
        Ok(count) => {
            if let Some(state) = start::state() {
                state.to_cache().fetch_add(count, Ordering::Relaxed);
            }
        }
        Err(_) => {
            let _ = with(mount, handle, |files, place| files[place].place = Place::Nowhere);
        }
    }
}
