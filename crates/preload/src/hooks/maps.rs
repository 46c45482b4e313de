//! Mappings of remote files. The bytes are read when the file is mapped. Shared mappings of a file are
//! one piece of memory for all processes of the run (a file in the run's directory). A writable one
//! is compared with what was read, and its changed pages are written at `msync`, `munmap`, `fsync`,
//! `close`, `exec` and the end of the program.

use crate::descriptors::{self, Open};
use crate::guard::{checked, finish, inside};
use crate::remote;
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;

/// A shared writable mapping.
struct Map {
    at: usize,
    length: usize,
    mount: usize,
    /// Handle of an open file of our own: the program may close its descriptor at once.
    handle: u64,
    inode: u64,
    offset: i64,
    /// What the file held when last read or written.
    known: Vec<u8>,
    shared: Shared,
}

static MAPS: Mutex<Vec<Map>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// libc's own, without `dlsym`, which may map memory itself.
unsafe fn plain(
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
    let Some(open) = open else {
        // SAFETY: as the program says.
        return unsafe { plain(at, length, protection, flags, fd, offset) };
    };
    // SAFETY: as the program says.
    let mapped = inside(|| unsafe { map(at, length, protection, flags, open, offset) });
    mapped.unwrap_or_else(|error| {
        crate::guard::set_errno(error);
        libc::MAP_FAILED
    })
}

fn unmap(at: *mut c_void, length: size_t) {
    // SAFETY: just mapped by us, and nobody knows of it.
    let _ = unsafe { checked(libc::SYS_munmap, [at as usize, length, 0, 0, 0, 0]) };
}

/// The memory that stands for a file in all processes of the run: a file whose first part tells,
/// with a byte for each page, what was read. It stays locked while somebody maps it; the first who
/// does reads anew.
struct Shared(c_int);

/// Where the pages begin: files of up to 256 GiB.
const PAGES_AT: i64 = 64 << 20;

impl Shared {
    fn of(open: Open) -> Result<Self, i32> {
        let (mount, inode) = (&open.entry.mount, &open.entry.inode);
        let mut path = crate::start::directory().to_vec();
        let name = format!(
            "/{}/{}-{}\0",
            towline_instance::MAPPINGS,
            mount.load(Ordering::Relaxed),
            inode.load(Ordering::Relaxed)
        );
        path.extend_from_slice(name.as_bytes());
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC;
        let arguments =
            [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, 0o600, 0, 0];
        let first = descriptors::own_first() as usize;
        // SAFETY: the path ends with a zero byte; the first descriptor is closed again.
        unsafe {
            let fd = checked(libc::SYS_openat, arguments)?;
            let moved = [fd, libc::F_DUPFD_CLOEXEC as usize, first, 0, 0, 0];
            let own = checked(libc::SYS_fcntl, moved);
            checked(libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
            own.map(|fd| Self(fd as c_int))
        }
    }

    fn call(&self, number: i64, a: usize, b: usize, c: usize) -> Result<usize, i32> {
        // SAFETY: calls on a descriptor of ours, without addresses.
        unsafe { checked(number, [self.0 as usize, a, b, c, 0, 0]) }
    }

    /// Waits until no other process reads it in or writes it back.
    fn turn(&self) -> Result<Turn<'_>, i32> {
        set_turn(self.0, libc::F_WRLCK)?;
        Ok(Turn(self))
    }

    fn map(
        &self,
        at: *mut c_void,
        length: size_t,
        flags: c_int,
        open: Open,
        offset: off64_t,
    ) -> Result<*mut c_void, i32> {
        let _turn = self.turn()?;
        let pages = length.div_ceil(PAGE);
        let first = offset as usize / PAGE;
        if first + pages > PAGES_AT as usize {
            return Err(libc::EFBIG);
        }
        if self.call(libc::SYS_flock, (libc::LOCK_EX | libc::LOCK_NB) as usize, 0, 0).is_ok() {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            self.call(libc::SYS_fallocate, mode as usize, 0, PAGES_AT as usize)?;
        }
        self.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        let end = PAGES_AT + offset + (pages * PAGE) as i64;
        // SAFETY: all zero is a valid `stat`, and the call fills it.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        self.call(libc::SYS_fstat, &raw mut status as usize, 0, 0)?;
        if status.st_size < end {
            self.call(libc::SYS_ftruncate, end as usize, 0, 0)?;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: as the program says.
        let mapped = unsafe { plain(at, length, protection, flags, self.0, PAGES_AT + offset) };
        if mapped == libc::MAP_FAILED {
            return Err(crate::guard::errno());
        }
        let bytes = mapped.cast::<u8>();
        let mut known = vec![0u8; pages];
        let (list, at) = (known.as_mut_ptr() as usize, first);
        if let Err(error) = self.call(libc::SYS_pread64, list, pages, at) {
            unmap(mapped, length);
            return Err(error);
        }
        // Runs of pages that nobody has read yet.
        let mut page = 0;
        while page < pages {
            let run = known[page..].iter().take_while(|known| **known == 0).count();
            if run == 0 {
                page += 1;
                continue;
            }
            let from = page * PAGE;
            // Whole pages: what is behind the end of the file reads as zeros.
            let count = run * PAGE;
            // SAFETY: within the mapping, which ends with a page.
            let target = unsafe { std::slice::from_raw_parts_mut(bytes.add(from), count) };
            let read = remote::read_at(open, target, offset + from as i64);
            match read {
                Ok(read) => target[read..].fill(0),
                Err(error) => {
                    unmap(mapped, length);
                    return Err(error);
                }
            }
            known[page..page + run].fill(1);
            page += run;
        }
        self.call(libc::SYS_pwrite64, known.as_ptr() as usize, pages, first)?;
        Ok(mapped)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.call(libc::SYS_close, 0, 0, 0);
    }
}

/// Held while a shared mapping is read in or written back.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _ = set_turn(self.0.0, libc::F_UNLCK);
    }
}

fn set_turn(fd: c_int, kind: c_int) -> Result<(), i32> {
    // SAFETY: all zero is a valid `struct flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (kind as _, 1);
    let arguments = [fd as usize, libc::F_OFD_SETLKW as usize, &raw const lock as usize, 0, 0, 0];
    // SAFETY: the structure outlives the call.
    unsafe { checked(libc::SYS_fcntl, arguments) }.map(drop)
}

unsafe fn map(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    open: Open,
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
    let (mapped, shared) = if is_shared {
        let shared = Shared::of(open)?;
        (shared.map(at, length, flags, open, offset)?, Some(shared))
    } else {
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
    };
    if writes {
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        // By the open file itself, which may have no name any more.
        let again = remote::with(open, |file| {
            file.open(b"", libc::O_RDWR as u32, 0).map(towline_client::File::into_handle)
        })?;
        let inode = open.entry.inode.load(Ordering::Relaxed);
        // SAFETY: just mapped, readable.
        let known = unsafe { std::slice::from_raw_parts(mapped.cast::<u8>(), length) }.to_vec();
        let at = mapped as usize;
        let shared = shared.ok_or(libc::EIO)?;
        let map = Map { at, length, mount, handle: again, inode, offset, known, shared };
        MAPS.lock().map_err(|_| libc::EIO)?.push(map);
        COUNT.fetch_add(1, Ordering::Release);
    } else if protection != open_protection {
        let arguments = [mapped as usize, length, protection as usize, 0, 0, 0];
        // SAFETY: just mapped.
        unsafe { checked(libc::SYS_mprotect, arguments) }?;
    }
    Ok(mapped)
}

impl Map {
    /// Writes the pages that changed, as far as the file reaches.
    fn write_back(&mut self) -> Result<(), i32> {
        let size = remote::with_handle(self.mount, self.handle, towline_client::File::stat)?.size;
        let end = (size as i64).saturating_sub(self.offset).clamp(0, self.known.len() as i64);
        // So that an older page of one process does not overtake a newer one of another.
        let _turn = self.shared.turn()?;
        // SAFETY: mapped until it is taken off the list; the program may write meanwhile, as it may
        // with any mapping, so pages are copied before they are compared.
        let now = self.at as *const u8;
        let mut page = [0u8; PAGE];
        for start in (0..end as usize).step_by(PAGE) {
            let length = PAGE.min(end as usize - start);
            // SAFETY: within the mapping, which is at least as long as what was read into it.
            unsafe { std::ptr::copy_nonoverlapping(now.add(start), page.as_mut_ptr(), length) };
            let known = &mut self.known[start..start + length];
            if known != &page[..length] {
                let at = (self.offset + start as i64) as u64;
                let data = &page[..length];
                remote::with_handle(self.mount, self.handle, |file| file.write_at(data, at))?;
                known.copy_from_slice(data);
            }
        }
        Ok(())
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
    let written = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.at < to && from < map.at + map.length) {
            map.write_back()?;
        }
        // Of one that is unmapped in part, the rest is written back at its beginning only.
        maps.retain_mut(|map| {
            let gone = map.at >= from && map.at < to;
            if gone {
                if let Ok(client) = remote::client(map.mount) {
                    client.close_handle(map.handle);
                }
                COUNT.fetch_sub(1, Ordering::Release);
            } else if map.at < from && from < map.at + map.length {
                map.length = from - map.at;
                map.known.truncate(map.length);
            }
            !gone
        });
        Ok(())
    });
    // SAFETY: as the program says.
    match unsafe { checked(libc::SYS_munmap, [from, length, 0, 0, 0, 0]) } {
        Ok(_) => finish(written.map(|()| 0)),
        Err(error) => finish(Err(error)),
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
    let inode = open.entry.inode.load(Ordering::Relaxed);
    let _ = with_maps((), |maps| {
        for map in maps.iter_mut().filter(|map| map.inode == inode) {
            map.write_back()?;
        }
        Ok(())
    });
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

/// In the child of a fork: what it changes in mappings it inherited is written back by its parent.
pub(crate) fn disown() {
    if let Ok(mut maps) = MAPS.try_lock() {
        std::mem::forget(std::mem::take(&mut *maps));
    }
    COUNT.store(0, Ordering::Release);
}
