//! Mappings of remote files.
//!
//! Where possible, large mappings are read page by page when they are touched (`touched.rs`); otherwise the
//! file is read when it is mapped. All processes of the run share one piece of memory for the shared
//! mappings of a file (`shared.rs`). The pages of writable shared mappings are compared with what was read;
//! changes are written back at `msync`, `munmap`, `fsync`, `close`, `exec`, the end of the program, and
//! before this process reads that part of the file. Changes that processes of the run make with other calls
//! reach the shared memory at once.

mod changes;

pub(crate) use changes::{changing, has_shared, resizing, writing, written_since, zeroing};

use super::handle::Handle;
use super::lost;
use super::shared::{self, Shared};
use super::touched::{self, Wish, whole_pages};
use crate::descriptors::{self, Open};
use crate::guard::{checked, inside, system_call};
use crate::{demand, remote};
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) use towline_mem::page_bytes;

/// A remote file: its mount, and [`towline_wire::Attr::identity`].
pub(crate) type Which = (usize, u64);

/// Returns which file an open file is.
pub(crate) fn which(open: Open) -> Which {
    let entry = open.entry;
    (entry.mount.load(Ordering::Relaxed) as usize, entry.inode.load(Ordering::Relaxed))
}

/// A mapping of a remote file.
pub(super) struct Map {
    pub(super) at: usize,
    pub(super) length: usize,
    pub(super) mount: usize,
    pub(super) inode: u64,
    pub(super) offset: i64,
    /// The protection set last.
    pub(super) protection: c_int,
    /// Pages are read when they are touched.
    pub(super) is_touched: bool,
    /// For a shared mapping that may become writable: the handle by which changes are written.
    pub(super) handle: Option<Arc<Handle>>,
    /// The program's own handle of the file; the pager keeps it open while it fills the mapping.
    pub(super) lent: u64,
    /// In the child of a fork: the process that has the same mapping and writes back its changes.
    pub(super) parent: Option<c_int>,
    /// The program may have stored to it.
    pub(super) is_written: bool,
    /// For a shared mapping: its memory, which all mappings of the file hold while they exist.
    pub(super) shared: Option<Arc<Shared>>,
}

pub(super) static MAPS: Mutex<Vec<Map>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The process that forks, for its child: the parent may end before the child can ask for its number.
static FORKING: AtomicI32 = AtomicI32::new(0);

/// Counts a new mapping.
pub(super) fn added() {
    COUNT.fetch_add(1, Ordering::Release);
}

/// Takes a removed mapping off the count.
pub(super) fn removed() {
    COUNT.fetch_sub(1, Ordering::Release);
}

/// `mmap` as a system call: finding libc's function takes `dlsym`, which may map memory itself.
pub(crate) unsafe fn plain(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    let arguments =
        [at as usize, length, protection as usize, flags as usize, fd as usize, offset as usize];
    // SAFETY: the program passes valid arguments.
    match unsafe { checked(libc::SYS_mmap, arguments) } {
        Ok(at) => at as *mut c_void,
        Err(error) => {
            crate::guard::set_errno(error);
            libc::MAP_FAILED
        }
    }
}

pub(crate) unsafe fn mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    let open = if flags & libc::MAP_ANONYMOUS == 0 { descriptors::find(fd) } else { None };
    let Some(open) = open else {
        // SAFETY: the program passes valid arguments.
        let mapped = unsafe { plain(at, length, protection, flags, fd, offset) };
        // Not if it fails, as then the mappings there stay.
        if flags & libc::MAP_FIXED != 0 && mapped != libc::MAP_FAILED {
            let _ = replacing(mapped as usize, length);
        }
        return mapped;
    };
    // SAFETY: the program passes valid arguments.
    let mapped = inside(|| unsafe { map(at, length, protection, flags, (open, fd), offset) });
    mapped.unwrap_or_else(|error| {
        crate::guard::set_errno(error);
        libc::MAP_FAILED
    })
}

pub(crate) fn unmap(at: *mut c_void, length: size_t) {
    // SAFETY: the library has just mapped it, and nothing else uses it.
    let _ = unsafe { checked(libc::SYS_munmap, [at as usize, length, 0, 0, 0, 0]) };
}

unsafe fn map(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    (open, fd): (Open, c_int),
    offset: off64_t,
) -> Result<*mut c_void, i32> {
    if remote::is_path(open) {
        return Err(libc::EBADF);
    }
    let is_fixed = flags & libc::MAP_FIXED != 0;
    let is_page = |number: usize| number.is_multiple_of(page_bytes());
    let is_aligned = is_page(offset as usize) && (!is_fixed || is_page(at as usize));
    if length == 0 || offset < 0 || !is_aligned {
        return Err(libc::EINVAL);
    }
    let access = open.entry.flags.load(Ordering::Relaxed) as c_int & libc::O_ACCMODE;
    let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let writes = is_shared && protection & libc::PROT_WRITE != 0;
    if access == libc::O_WRONLY || (writes && access != libc::O_RDWR) {
        return Err(libc::EACCES);
    }
    if open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT != libc::S_IFREG {
        return Err(libc::ENODEV);
    }
    if is_fixed {
        let _ = replacing(at as usize, length);
    }
    let length = whole_pages(length);
    // A file that is read at once gets its pages that way. The kernel would also allocate the pages beyond
    // the end of the file, and programs often map far more than the file has.
    let populates = flags & libc::MAP_POPULATE != 0;
    let flags = flags & !libc::MAP_POPULATE;
    let shared = is_shared.then(|| shared_of(open)).transpose()?;
    let handle = (is_shared && access == libc::O_RDWR)
        .then(|| Handle::of(open).map(Arc::new))
        .transpose()?;
    let wish = Wish {
        at,
        length,
        protection,
        flags,
        file: (open, fd),
        offset,
        shared: shared.as_ref().map(|(shared, _)| &**shared),
    };
    let is_wanted = touched::is_wanted(length, flags)
        && !(populates && remote::stat(open)?.size >= offset as u64 + length as u64);
    if is_wanted {
        let _ = write_back_file(open);
    }
    let touched = if is_wanted { prepare_and_map(&wish, &shared) } else { Err(libc::ENOTSUP) };
    let is_touched = touched.is_ok();
    let mapped = match (touched, &shared) {
        (Ok(mapped), _) => mapped,
        (_, Some((shared, is_new))) => {
            shared.read_in(open, (offset, length), *is_new)?;
            let mapped = shared.place(at, length, protection, flags, offset);
            if mapped == libc::MAP_FAILED {
                return Err(crate::guard::errno());
            }
            mapped
        }
        (_, None) => map_private(&wish)?,
    };
    let mut map = Map {
        at: mapped as usize,
        length,
        mount: open.entry.mount.load(Ordering::Relaxed) as usize,
        inode: open.entry.inode.load(Ordering::Relaxed),
        offset,
        protection,
        is_touched,
        handle,
        lent: open.handle,
        parent: None,
        is_written: false,
        shared: shared.map(|(shared, _)| shared),
    };
    // The program has not stored to the mapping yet: it does not know its address.
    if writes && let Err(error) = map.begin_writing() {
        map.end();
        unmap(mapped, length);
        return Err(error);
    }
    MAPS.lock().map_err(|_| libc::EIO)?.push(map);
    added();
    Ok(mapped)
}

/// Maps private memory and reads the file into it.
fn map_private(wish: &Wish<'_>) -> Result<*mut c_void, i32> {
    let Wish { at, length, protection, flags, file: (open, _), offset, .. } = *wish;
    let (flags, all) = (flags | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the program passes valid arguments.
    let mapped = unsafe { plain(at, length, protection | all, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(crate::guard::errno());
    }
    // SAFETY: just mapped, readable and writable.
    let bytes = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), length) };
    let read = read_from(open, bytes, offset).and_then(|_| {
        let arguments = [mapped as usize, length, protection as usize, 0, 0, 0];
        // SAFETY: just mapped.
        unsafe { checked(libc::SYS_mprotect, arguments) }
    });
    if let Err(error) = read {
        unmap(mapped, length);
        return Err(error);
    }
    Ok(mapped)
}

/// Reads from `offset` on until `to` is full or the file ends.
pub(super) fn read_from(open: Open, to: &mut [u8], offset: i64) -> Result<usize, i32> {
    let read = |part: &mut [u8], at| remote::read_at(open, part, offset + at as i64);
    towline_instance::memory::read_up_to_end(to, read)
}

/// Returns the memory of a file's shared mappings, and whether this process has no mapping of it yet.
fn shared_of(open: Open) -> Result<(Arc<Shared>, bool), i32> {
    lost::take_away(|map| map.is_of(which(open)));
    let known = with_maps(None, |maps| {
        let of_file = maps.iter().filter(|map| map.is_of(which(open)));
        Ok(of_file.filter_map(|map| map.shared.clone()).find(|shared| !shared.is_lost()))
    })?;
    match known {
        Some(shared) => Ok((shared, false)),
        None => Ok((Arc::new(Shared::of(open)?), true)),
    }
}

/// Maps a file whose pages are read when they are touched.
fn prepare_and_map(
    wish: &Wish<'_>,
    shared: &Option<(Arc<Shared>, bool)>,
) -> Result<*mut c_void, i32> {
    if let Some((shared, is_new)) = shared {
        shared.begin(wish.file.0, (wish.offset, wish.length), *is_new)?;
    }
    touched::map(wish)
}

/// Writes back and forgets the mappings at these addresses, which are about to show something else.
pub(super) fn replacing(at: usize, length: usize) -> Result<(), i32> {
    with_maps((), |maps| forget(maps, at, at.saturating_add(length)))
}

/// Writes back the changes of mappings at these addresses, and takes the mappings off the list.
pub(super) fn forget(maps: &mut Vec<Map>, from: usize, to: usize) -> Result<(), i32> {
    touched::cut(maps, from, to);
    let mut written = Ok(());
    for map in maps.iter().filter(|map| map.is_in(from, to)) {
        written = written.and(map.write_back_all());
    }
    maps.retain(|map| {
        let gone = map.is_in(from, to);
        if gone {
            map.end();
            removed();
        }
        !gone
    });
    written
}

impl Map {
    /// Returns true if a part of the mapping lies at these addresses.
    pub(super) fn is_in(&self, from: usize, to: usize) -> bool {
        self.at < to && from < self.at + self.length
    }

    /// Keeps track of changes from here on, so that they are written back.
    pub(super) fn begin_writing(&mut self) -> Result<(), i32> {
        if !self.is_written {
            self.handle.as_ref().ok_or(libc::EACCES)?;
            self.shared.as_ref().ok_or(libc::EIO)?.keep_originals()?;
            self.is_written = true;
        }
        Ok(())
    }

    /// Stops the filling of its pages.
    fn end(&self) {
        if self.is_touched {
            // Before it is unmapped, as the next mapping at these addresses must come after this.
            demand::end(self.at, self.length);
        }
    }

    /// Writes back the changed pages at these addresses, up to the end of the file.
    pub(super) fn write_back(&self, from: usize, to: usize) -> Result<(), i32> {
        let (from, to) =
            (from.max(self.at) / page_bytes() * page_bytes(), to.min(self.at + self.length));
        if !self.is_written || from >= to {
            return Ok(());
        }
        let handle = self.handle.as_ref().ok_or(libc::EIO)?;
        let shared = self.shared.as_ref().ok_or(libc::EIO)?;
        shared.write_back(handle, (self.offset + (from - self.at) as i64, to - from))
    }

    /// Writes back the whole mapping with [`Map::write_back`].
    pub(super) fn write_back_all(&self) -> Result<(), i32> {
        self.write_back(self.at, self.at + self.length)
    }

    pub(super) fn is_of(&self, file: Which) -> bool {
        (self.mount, self.inode) == file
    }
}

/// Runs `work` with the mappings of this process; returns `empty` if there are none.
pub(super) fn with_maps<T>(
    empty: T,
    work: impl FnOnce(&mut Vec<Map>) -> Result<T, i32>,
) -> Result<T, i32> {
    if !is_any_here() {
        return Ok(empty);
    }
    inside(|| work(&mut *MAPS.lock().map_err(|_| libc::EIO)?))
}

/// Writes back the changes of all mappings of a file.
///
/// # Errors
/// As [`write_back_part`].
pub(crate) fn write_back_file(open: Open) -> Result<(), i32> {
    write_back_part(open, 0, usize::MAX >> 1)
}

/// Writes back the changes of mappings to `length` bytes of a file from `offset` on.
///
/// # Errors
/// The first one of the server. Changes that could not be written stay in the mappings.
pub(crate) fn write_back_part(open: Open, offset: u64, length: usize) -> Result<(), i32> {
    with_maps((), |maps| {
        let mut written = Ok(());
        let (start, end) = (offset as i64, (offset as i64).saturating_add(length as i64));
        for map in maps.iter().filter(|map| map.is_of(which(open))) {
            let place = |offset: i64| {
                map.at + offset.saturating_sub(map.offset).clamp(0, map.length as i64) as usize
            };
            written = written.and(map.write_back(place(start), place(end)));
        }
        written
    })
}

/// Returns true if this process has a mapping, or any process of the run has a shared one.
pub(crate) fn is_any() -> bool {
    is_any_here() || shared::is_any()
}

/// Returns true if this process has a mapping.
pub(crate) fn is_any_here() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Takes a lock on a file by `call`, see [`Shared::locking`].
pub(super) fn locking(
    open: Open,
    is_old: bool,
    call: impl FnOnce() -> Result<bool, i32>,
) -> Result<bool, i32> {
    let found = with_maps(None, |maps| {
        let of_file = maps.iter().filter(|map| map.is_of(which(open)));
        let shared = of_file.filter_map(|map| Some((map.shared.clone()?, map.handle.clone())));
        let there = shared.filter(|(shared, _)| !shared.is_lost());
        Ok(there.max_by_key(|(_, handle)| handle.is_some()))
    })?;
    if let Some((shared, handle)) = found {
        return shared.locking(open, handle.as_deref(), is_old, call);
    }
    // Another process of the run may have mapped it, and this one may map it once it has the lock.
    match shared::is_any().then(|| Shared::existing(which(open))) {
        Some(Ok(shared)) => shared.locking(open, None, is_old, call),
        _ => call().map(|_| false),
    }
}

/// Reads all mapped files again that programs lock.
pub(super) fn renew_locked() {
    let found = || {
        let mut found: Vec<(Arc<Shared>, Option<Arc<Handle>>, u64)> = Vec::new();
        for map in MAPS.lock().ok()?.iter() {
            let Some(shared) = &map.shared else { continue };
            match found.iter_mut().find(|(known, ..)| known.is(shared)) {
                Some((_, handle, _)) => *handle = handle.take().or_else(|| map.handle.clone()),
                None => found.push((shared.clone(), map.handle.clone(), map.lent)),
            }
        }
        Some(found)
    };
    // Also what is dropped.
    let _ = inside(|| {
        for (shared, handle, lent) in found().unwrap_or_default() {
            // On failure, a mapping keeps what it had.
            let _ = shared.renew_locked(handle.as_deref(), lent);
        }
        Ok(())
    });
}

/// Writes back the mappings of a file before one of its descriptors is closed.
pub(crate) fn closing(fd: c_int) {
    if is_any_here()
        && let Some(open) = descriptors::find(fd)
    {
        let _ = write_back_file(open);
    }
}

/// Moves memory away from a descriptor number that the program wants.
pub(crate) fn move_from(fd: c_int) -> Result<(), i32> {
    let maps = MAPS.lock().map_err(|_| libc::EIO)?;
    maps.iter().filter_map(|map| map.shared.as_ref()).try_for_each(|shared| shared.move_from(fd))
}

/// Writes back all mappings that can be; those inherited from a parent only if the parent has ended.
pub(crate) fn write_back_all() {
    let _ = with_maps((), |maps| {
        // SAFETY: the call has no arguments.
        let parent = unsafe { system_call(libc::SYS_getppid, [0; 6]) } as c_int;
        for map in maps.iter().filter(|map| map.parent != Some(parent)) {
            let _ = map.write_back_all();
        }
        Ok(())
    });
}

/// Notes which process forks.
pub(super) fn before_fork() {
    FORKING.store(crate::process::id() as c_int, Ordering::Relaxed);
}

/// Writes back all mappings at the end of this process, and closes the files by which that was done: they
/// belong to the run, and would stay open until it ends. Stores that come later still find a handle, as in
/// a child.
pub(crate) fn end_all() {
    write_back_all();
    let _ = with_maps((), |maps| {
        for map in maps {
            map.handle = map.handle.take().map(|own| Arc::new(own.lent()));
        }
        Ok(())
    });
}

/// Forgets, in the child of a fork, the mappings for which there is nothing to do: shared ones that were read
/// at their creation and cannot be written.
pub(crate) fn disown() {
    COUNT.store(0, Ordering::Release);
    if let Ok(mut maps) = MAPS.try_lock() {
        let parent = FORKING.load(Ordering::Relaxed);
        let all = std::mem::take(&mut *maps).into_iter();
        let is_kept = |map: &Map| map.is_touched || map.handle.is_some() || map.shared.is_none();
        let (mut kept, others): (Vec<Map>, Vec<Map>) = all.partition(is_kept);
        std::mem::forget(others);
        for map in &mut kept {
            if let Some(own) = map.handle.take() {
                map.handle = Some(Arc::new(own.lent()));
                std::mem::forget(own);
            }
            map.parent = Some(parent);
        }
        COUNT.store(kept.len(), Ordering::Release);
        *maps = kept;
    }
}
