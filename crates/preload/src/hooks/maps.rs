//! Mappings of remote files. Large ones are read page by page when they are touched, where that is
//! possible (`touched.rs`); else the bytes are read when the file is mapped. Shared mappings of a file are
//! one piece of memory for all processes of the run (`shared.rs`). A writable one is compared with what
//! was read, and its changed pages are written at `msync`, `munmap`, `fsync`, `close`, `exec`, the end of
//! the program, and before this process reads the file. What processes of the run change by other calls
//! reaches the shared memory at once.

use super::shared::{self, Shared};
use super::touched::{self, Wish, whole_pages};
use crate::descriptors::{self, Open};
use crate::guard::{checked, finish, inside};
use crate::{demand, remote};
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const PAGE: usize = 4096;

/// A mapping of a remote file.
pub(super) struct Map {
    pub(super) at: usize,
    pub(super) length: usize,
    pub(super) mount: usize,
    pub(super) inode: u64,
    pub(super) offset: i64,
    /// As it was last set.
    pub(super) protection: c_int,
    /// A part of it may not be readable.
    pub(super) is_guarded: bool,
    /// It is read when it is touched.
    pub(super) is_touched: bool,
    /// Of a shared one that may become writable: see [`Written::handle`].
    pub(super) handle: Option<Arc<Handle>>,
    /// Of a writable one.
    pub(super) written: Option<Written>,
    /// Of a shared one: held as long as it is mapped, one for all mappings of a file.
    pub(super) shared: Option<Arc<Shared>>,
}

/// An open file of our own: the program may close its descriptor at once.
pub(super) struct Handle {
    mount: usize,
    number: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Ok(client) = remote::client(self.mount) {
            client.close_handle(self.number);
        }
    }
}

/// What it takes to write a mapping back.
pub(super) struct Written {
    pub(super) handle: Arc<Handle>,
    /// What the file held when last read or written.
    pub(super) known: Vec<u8>,
}

pub(super) static MAPS: Mutex<Vec<Map>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// One more.
pub(super) fn added() {
    COUNT.fetch_add(1, Ordering::Release);
}

/// One less.
pub(super) fn removed() {
    COUNT.fetch_sub(1, Ordering::Release);
}

/// libc's own, without `dlsym`, which may map memory itself.
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
    // SAFETY: as the program says.
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
    if flags & libc::MAP_FIXED != 0 {
        let _ = replacing(at as usize, length);
    }
    let Some(open) = open else {
        // SAFETY: as the program says.
        return unsafe { plain(at, length, protection, flags, fd, offset) };
    };
    // SAFETY: as the program says.
    let mapped = inside(|| unsafe { map(at, length, protection, flags, (open, fd), offset) });
    mapped.unwrap_or_else(|error| {
        crate::guard::set_errno(error);
        libc::MAP_FAILED
    })
}

pub(crate) fn unmap(at: *mut c_void, length: size_t) {
    // SAFETY: just mapped by us, and nobody knows of it.
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
    if length == 0 || offset < 0 || !(offset as usize).is_multiple_of(PAGE) {
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
    let open_protection = protection | libc::PROT_READ | libc::PROT_WRITE;
    let shared = is_shared.then(|| shared_of(open)).transpose()?;
    let is_wanted = touched::is_wanted(length, flags) && !writes;
    let wish = Wish {
        at,
        length: whole_pages(length),
        protection,
        flags,
        file: (open, fd),
        offset,
        shared: shared.as_ref().map(|(shared, _)| &**shared),
    };
    if is_wanted {
        write_back_file(open);
    }
    let touched = if is_wanted { prepare_and_map(&wish, &shared) } else { Err(libc::ENOTSUP) };
    let is_touched = touched.is_ok();
    let (mapped, shared) = match (touched, shared) {
        (Ok(mapped), shared) => (mapped, shared.map(|(shared, _)| shared)),
        (_, Some((shared, is_new))) => {
            (shared.map(at, length, flags, (open, offset), is_new)?, Some(shared))
        }
        (_, None) => {
            let flags = flags | libc::MAP_ANONYMOUS;
            // SAFETY: as the program says.
            let mapped = unsafe { plain(at, length, open_protection, flags, -1, 0) };
            if mapped == libc::MAP_FAILED {
                return Err(crate::guard::errno());
            }
            // SAFETY: just mapped, readable and writable.
            let bytes = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), length) };
            if let Err(error) = remote::read_at(open, bytes, offset) {
                unmap(mapped, length);
                return Err(error);
            }
            (mapped, None)
        }
    };
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let inode = open.entry.inode.load(Ordering::Relaxed);
    // By the open file itself, which may have no name any more.
    let handle = (is_shared && access == libc::O_RDWR)
        .then(|| {
            remote::with(open, |file| {
                file.open(b"", libc::O_RDWR as u32, 0).map(towline_client::File::into_handle)
            })
        })
        .transpose()?
        .map(|number| Arc::new(Handle { mount, number }));
    let mut map = Map {
        at: mapped as usize,
        length: if is_touched { whole_pages(length) } else { length },
        mount,
        inode,
        offset,
        protection,
        is_guarded: false,
        is_touched,
        handle,
        written: None,
        shared,
    };
    if writes {
        map.begin_writing()?;
    }
    MAPS.lock().map_err(|_| libc::EIO)?.push(map);
    added();
    if !writes && !is_touched && protection != open_protection {
        let arguments = [mapped as usize, length, protection as usize, 0, 0, 0];
        // SAFETY: just mapped.
        unsafe { checked(libc::SYS_mprotect, arguments) }?;
    }
    Ok(mapped)
}

/// The memory of a file's shared mappings, and whether this process has none of them yet.
fn shared_of(open: Open) -> Result<(Arc<Shared>, bool), i32> {
    let known = with_maps(None, |maps| {
        Ok(maps.iter().filter(|map| map.is_of(open)).find_map(|map| map.shared.clone()))
    })?;
    match known {
        Some(shared) => Ok((shared, false)),
        None => Ok((Arc::new(Shared::of(open)?), true)),
    }
}

/// Maps what is read when it is touched.
fn prepare_and_map(
    wish: &Wish<'_>,
    shared: &Option<(Arc<Shared>, bool)>,
) -> Result<*mut c_void, i32> {
    if let Some((shared, is_new)) = shared {
        shared.begin(wish.offset, wish.length, *is_new)?;
    }
    touched::map(wish)
}

/// These addresses are about to show something else: what they show of files is written back and
/// forgotten.
fn replacing(at: usize, length: usize) -> Result<(), i32> {
    with_maps((), |maps| forget(maps, at, at.saturating_add(length)))
}

/// Writes back what mappings in these addresses changed, and takes them off the list.
fn forget(maps: &mut Vec<Map>, from: usize, to: usize) -> Result<(), i32> {
    touched::cut(maps, from, to);
    for map in maps.iter_mut().filter(|map| map.at < to && from < map.at + map.length) {
        map.write_back()?;
    }
    // Of one that is unmapped in part, the rest is written back at its beginning only.
    maps.retain_mut(|map| {
        let gone = map.at >= from && map.at < to;
        if gone {
            map.end();
            removed();
        } else if map.at < from && from < map.at + map.length {
            map.length = from - map.at;
            if let Some(written) = &mut map.written {
                written.known.truncate(map.length);
            }
        }
        !gone
    });
    Ok(())
}

impl Map {
    /// From now on what changes is written back.
    fn begin_writing(&mut self) -> Result<(), i32> {
        if self.written.is_some() {
            return Ok(());
        }
        let handle = self.handle.clone().ok_or(libc::EACCES)?;
        if self.is_touched {
            let size =
                remote::with_handle(self.mount, handle.number, towline_client::File::stat)?.size;
            touched::read_all(self, size)?;
            self.is_guarded = true;
        }
        let mut known = vec![0; self.length];
        self.shared.as_ref().ok_or(libc::EIO)?.read(self.offset, &mut known)?;
        self.written = Some(Written { handle, known });
        Ok(())
    }

    /// Ends its filling.
    fn end(&self) {
        if self.is_touched {
            // Before it is unmapped: what is mapped there next comes after it.
            demand::end(self.at, self.length);
        }
    }

    /// Writes the pages that changed, as far as the file reaches.
    fn write_back(&mut self) -> Result<(), i32> {
        let Some(Written { handle, known }) = &mut self.written else { return Ok(()) };
        let is_guarded = self.is_guarded;
        // SAFETY: mapped until it is taken off the list; the program may write meanwhile, as it may
        // with any mapping: then it is the next time that this is seen.
        let now = || unsafe { std::slice::from_raw_parts(self.at as *const u8, known.len()) };
        if !is_guarded && now() == known.as_slice() {
            return Ok(());
        }
        let size = remote::with_handle(self.mount, handle.number, towline_client::File::stat)?.size;
        let end = (size as i64).saturating_sub(self.offset).clamp(0, known.len() as i64);
        // So that an older page of one process does not overtake a newer one of another.
        let shared = self.shared.as_ref().ok_or(libc::EIO)?;
        let _turn = shared.turn()?;
        // SAFETY: mapped until it is taken off the list; the program may write meanwhile, as it may
        // with any mapping, so pages are copied before they are compared.
        let now = self.at as *const u8;
        let mut page = [0u8; PAGE];
        for start in (0..end as usize).step_by(PAGE) {
            let length = PAGE.min(end as usize - start);
            if is_guarded {
                shared.read(self.offset + start as i64, &mut page[..length])?;
            } else {
                // SAFETY: within the mapping, which is at least as long as what was read into it.
                unsafe { std::ptr::copy_nonoverlapping(now.add(start), page.as_mut_ptr(), length) };
            }
            let known = &mut known[start..start + length];
            if known != &page[..length] {
                let at = (self.offset + start as i64) as u64;
                let data = &page[..length];
                remote::with_handle(self.mount, handle.number, |file| file.write_at(data, at))?;
                known.copy_from_slice(data);
            }
        }
        Ok(())
    }

    /// The part of what is known that these bytes of the file are, and where it begins in them.
    fn overlap(&mut self, offset: i64, length: usize) -> Option<(&mut [u8], usize)> {
        let known = &mut self.written.as_mut()?.known;
        let start = offset.max(self.offset);
        let end = offset.saturating_add(length as i64).min(self.offset + known.len() as i64);
        if start >= end {
            return None;
        }
        let part = &mut known[(start - self.offset) as usize..(end - self.offset) as usize];
        Some((part, (start - offset) as usize))
    }

    fn is_of(&self, open: Open) -> bool {
        self.inode == open.entry.inode.load(Ordering::Relaxed)
            && self.mount == open.entry.mount.load(Ordering::Relaxed) as usize
    }
}

/// Runs `work` with the mappings, if there are any.
fn with_maps<T>(empty: T, work: impl FnOnce(&mut Vec<Map>) -> Result<T, i32>) -> Result<T, i32> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(empty);
    }
    inside(|| work(&mut *MAPS.lock().map_err(|_| libc::EIO)?))
}

pub(crate) unsafe fn munmap(at: *mut c_void, length: size_t) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    let written = with_maps((), |maps| forget(maps, from, to));
    // SAFETY: as the program says.
    match unsafe { checked(libc::SYS_munmap, [from, length, 0, 0, 0, 0]) } {
        Ok(_) => finish(written.map(|()| 0)),
        Err(error) => finish(Err(error)),
    }
}

/// What a shared mapping may become is decided by how its file was opened; what is written then is
/// written back from there on.
pub(crate) unsafe fn mprotect(at: *mut c_void, length: size_t, protection: c_int) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    let allowed = with_maps((), |maps| {
        // So that each has one protection, for a child to take over.
        touched::cut(maps, from, to);
        for map in maps.iter_mut().filter(|map| map.at < to && from < map.at + map.length) {
            if map.shared.is_some() && protection & libc::PROT_WRITE != 0 {
                map.begin_writing()?;
            }
            map.is_guarded |= protection & libc::PROT_READ == 0;
            map.protection = protection;
        }
        Ok(())
    });
    let arguments = [from, length, protection as usize, 0, 0, 0];
    // SAFETY: as the program says.
    let done = allowed.and_then(|()| unsafe { checked(libc::SYS_mprotect, arguments) });
    finish(done.map(|_| 0))
}

/// Of a private mapping the kernel would forget what was read, as it takes it for memory of no file.
pub(crate) unsafe fn madvise(at: *mut c_void, length: size_t, advice: c_int) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    let forgets = matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE);
    let is_private = |map: &Map| {
        map.at < to && from < map.at + map.length && map.shared.is_none() && !map.is_touched
    };
    let keeps = forgets && with_maps(false, |maps| Ok(maps.iter().any(is_private))) == Ok(true);
    if keeps {
        return 0;
    }
    // SAFETY: as the program says.
    let done = unsafe { checked(libc::SYS_madvise, [from, length, advice as usize, 0, 0, 0]) };
    finish(done.map(|_| 0))
}

pub(crate) unsafe fn mremap(
    at: *mut c_void,
    old: size_t,
    new: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let (from, end) = (at as usize, (at as usize).saturating_add(old.max(1)));
    let is_in = |map: &Map| map.at < end && from < map.at + map.length;
    let arguments = [from, old, new, flags as usize, to as usize, 0];
    let remap = || {
        // SAFETY: as the program says.
        unsafe { checked(libc::SYS_mremap, arguments) }
    };
    let grows = new.div_ceil(PAGE) > old.div_ceil(PAGE);
    let ours = with_maps(None, |maps| {
        for map in maps.iter_mut().filter(|map| is_in(map)) {
            map.write_back()?;
        }
        let Some(first) = maps.iter().find(|map| is_in(map)) else { return Ok(None) };
        if first.is_touched {
            return touched::resize(maps, (from, old), new, remap).map(|now| Some(Ok(now)));
        }
        if grows {
            return first.growth(from, old, new).map(|growth| Some(Err(growth)));
        }
        let now = remap()?;
        for map in maps.iter_mut().filter(|map| is_in(map)) {
            map.at = map.at - from + now;
            map.length = map.length.min(new);
            if let Some(written) = &mut map.written {
                written.known.truncate(new);
            }
        }
        Ok(Some(Ok(now)))
    });
    let ours = ours.and_then(|ours| match ours {
        None => remap(),
        Some(Ok(now)) => Ok(now),
        Some(Err(growth)) => inside(|| {
            let bytes = growth.read()?;
            let mut maps = MAPS.lock().map_err(|_| libc::EIO)?;
            // Another thread may have unmapped it meanwhile.
            let map = maps.iter_mut().find(|map| map.at == from).ok_or(libc::EFAULT)?;
            map.grow(&growth, &bytes, new, remap)
        }),
    });
    match ours {
        Ok(now) => now as *mut c_void,
        Err(error) => {
            crate::guard::set_errno(error);
            libc::MAP_FAILED
        }
    }
}

/// What a mapping is to show more of its file.
struct Growth {
    open: Open,
    /// Where that is in the file, and how long it is, in bytes.
    offset: i64,
    added: usize,
    shared: Option<Arc<Shared>>,
}

impl Growth {
    /// Reads it: into the memory of a shared mapping, else into what is given. To be done without
    /// the lock of the mappings, as reading writes back what they changed.
    fn read(&self) -> Result<Vec<u8>, i32> {
        let at = (self.open, self.offset);
        if let Some(shared) = &self.shared {
            let extra =
                shared.map(std::ptr::null_mut(), self.added, libc::MAP_SHARED, at, false)?;
            unmap(extra, self.added);
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; self.added];
        remote::read_at(self.open, &mut bytes, self.offset)?;
        Ok(bytes)
    }
}

impl Map {
    /// What making it longer takes. It has to be the whole mapping, and the file still open.
    fn growth(&self, from: usize, old: usize, new: usize) -> Result<Growth, i32> {
        let pages = |bytes: usize| bytes.div_ceil(PAGE) * PAGE;
        if from != self.at || pages(old) != pages(self.length) {
            return Err(libc::EFAULT);
        }
        let mut opened = descriptors::all(0, u32::MAX).map(|(_, open)| open);
        let open = opened.find(|open| self.is_of(*open) && remote::check_readable(*open).is_ok());
        Ok(Growth {
            open: open.ok_or(libc::ENOMEM)?,
            offset: self.offset + pages(old) as i64,
            added: pages(new) - pages(old),
            shared: self.shared.clone(),
        })
    }

    fn grow(
        &mut self,
        growth: &Growth,
        bytes: &[u8],
        new: usize,
        remap: impl FnOnce() -> Result<usize, i32>,
    ) -> Result<usize, i32> {
        let now = remap()?;
        if !bytes.is_empty() {
            let place = now + (growth.offset - self.offset) as usize;
            let all = (libc::PROT_READ | libc::PROT_WRITE) as usize;
            // SAFETY: the pages that were just added, which the program does not know of yet.
            unsafe {
                checked(libc::SYS_mprotect, [place, bytes.len(), all, 0, 0, 0])?;
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), place as *mut u8, bytes.len());
                let as_ever = self.protection as usize;
                checked(libc::SYS_mprotect, [place, bytes.len(), as_ever, 0, 0, 0])?;
            }
        }
        (self.at, self.length) = (now, new);
        if let Some(written) = &mut self.written {
            let known = written.known.len();
            written.known.resize(new, 0);
            let shared = self.shared.as_ref().ok_or(libc::EIO)?;
            shared.read(self.offset + known as i64, &mut written.known[known..])?;
        }
        Ok(now)
    }
}

pub(crate) unsafe fn msync(at: *mut c_void, length: size_t, flags: c_int) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    let ours = with_maps(false, |maps| {
        let mut found = false;
        for map in maps.iter_mut().filter(|map| map.at < to && from < map.at + map.length) {
            map.write_back()?;
            found = true;
        }
        Ok(found)
    });
    match ours {
        // SAFETY: as the program says.
        Ok(false) => {
            // SAFETY: as the program says.
            match unsafe { checked(libc::SYS_msync, [from, length, flags as usize, 0, 0, 0]) } {
                Ok(_) => 0,
                Err(error) => finish(Err(error)),
            }
        }
        other => finish(other.map(|_| 0)),
    }
}

/// Writes what mappings of a file changed.
pub(crate) fn write_back_file(open: Open) {
    let _ = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.is_of(open)) {
            map.write_back()?;
        }
        Ok(())
    });
}

/// True when this process has a mapping, or any of the run a shared one.
pub(crate) fn is_any() -> bool {
    COUNT.load(Ordering::Acquire) > 0 || shared::is_any()
}

/// Bytes were written to a file.
pub(crate) fn wrote(open: Open, offset: i64, data: &[u8]) {
    if !shared::is_any() {
        return;
    }
    let _ = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.is_of(open)) {
            if map.is_touched && map.shared.is_some() {
                // What was touched when the file was shorter.
                touched::forget(map, offset, offset.saturating_add(data.len() as i64));
            }
            if let Some((known, from)) = map.overlap(offset, data.len()) {
                known.copy_from_slice(&data[from..from + known.len()]);
            }
        }
        Ok(())
    });
    // What fails leaves a mapping with what it had.
    let _ = inside(|| Shared::existing(open)?.write(offset, data));
}

/// A file was made shorter or longer than it was before.
pub(crate) fn resized(open: Open, before: u64, now: u64) {
    if !is_any() {
        return;
    }
    let from = before.min(now) as i64;
    let _ = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.is_of(open)) {
            if map.is_touched {
                touched::forget(map, from, i64::MAX);
            }
            if let Some((known, _)) = map.overlap(from, usize::MAX >> 1) {
                known.fill(0);
            }
        }
        Ok(())
    });
    if shared::is_any() {
        let _ = inside(|| Shared::existing(open)?.clear(from));
    }
}

/// Runs a call that changes a file in some other way; mappings of it are read anew.
pub(crate) fn changing<T>(open: Open, call: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    if !shared::is_any() {
        return call();
    }
    write_back_file(open);
    let result = call()?;
    let read = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.is_of(open)) {
            let Some(Written { handle, known }) = &mut map.written else { continue };
            let at = map.offset as u64;
            let read =
                remote::with_handle(map.mount, handle.number, |file| file.read_at(known, at))?;
            known[read..].fill(0);
        }
        Ok(())
    });
    read?;
    let _ = inside(|| Shared::existing(open)?.read_anew(open));
    Ok(result)
}

/// A descriptor is about to be closed.
pub(crate) fn closing(fd: c_int) {
    if COUNT.load(Ordering::Acquire) > 0
        && let Some(open) = descriptors::find(fd)
    {
        write_back_file(open);
    }
}

/// Writes what all mappings changed.
pub(crate) fn write_back_all() {
    let _ = with_maps((), |maps| {
        for map in maps {
            map.write_back()?;
        }
        Ok(())
    });
}

/// In the child of a fork: what it changes in mappings it inherited is written back by its parent. It
/// keeps those that are still to be filled.
pub(crate) fn disown() {
    COUNT.store(0, Ordering::Release);
    if let Ok(mut maps) = MAPS.try_lock() {
        let all = std::mem::take(&mut *maps).into_iter();
        let (mut touched, others): (Vec<Map>, Vec<Map>) = all.partition(|map| map.is_touched);
        std::mem::forget(others);
        for map in &mut touched {
            std::mem::forget((map.handle.take(), map.written.take()));
        }
        COUNT.store(touched.len(), Ordering::Release);
        *maps = touched;
    }
}
