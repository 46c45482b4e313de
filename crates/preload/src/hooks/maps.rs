//! Mappings of remote files. The bytes are read when the file is mapped. A shared writable mapping is
//! compared with what was read and its changed pages are written at `msync`, `munmap`, `fsync`,
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

unsafe fn map(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    open: Open,
    offset: off64_t,
) -> Result<*mut c_void, i32> {
    let access = open.entry.flags.load(Ordering::Relaxed) as c_int & libc::O_ACCMODE;
    let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let writes = is_shared && protection & libc::PROT_WRITE != 0;
    if access == libc::O_WRONLY || (writes && access != libc::O_RDWR) {
        return Err(libc::EACCES);
    }
    if length == 0 || offset < 0 || !(offset as usize).is_multiple_of(PAGE) {
        return Err(libc::EINVAL);
    }
    if open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT != libc::S_IFREG {
        return Err(libc::ENODEV);
    }
    // Shared memory without a file, so that children of a fork share it as they would the file.
    let kind = if is_shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    let flags = flags & !libc::MAP_TYPE | kind | libc::MAP_ANONYMOUS;
    let open_protection = protection | libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: as the program says.
    let mapped = unsafe { plain(at, length, open_protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(crate::guard::errno());
    }
    // SAFETY: just mapped, readable and writable.
    let bytes = unsafe { std::slice::from_raw_parts_mut(mapped.cast::<u8>(), length) };
    let count = match remote::read_at(open, bytes, offset) {
        Ok(count) => count,
        Err(error) => {
            // SAFETY: just mapped.
            let _ = unsafe { checked(libc::SYS_munmap, [mapped as usize, length, 0, 0, 0, 0]) };
            return Err(error);
        }
    };
    if writes {
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        let path = open.entry.path();
        let root = crate::start::mounts().get(mount).ok_or(libc::EIO)?.mount.handle;
        let again = remote::with_handle(mount, root, |root| {
            root.open(&path, libc::O_RDWR as u32, 0).map(towline_client::File::into_handle)
        })?;
        let inode = open.entry.inode.load(Ordering::Relaxed);
        let known = bytes[..count].to_vec();
        let at = mapped as usize;
        let map = Map { at, length, mount, handle: again, inode, offset, known };
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
    /// Writes the pages that changed.
    fn write_back(&mut self) -> Result<(), i32> {
        // SAFETY: mapped until it is taken off the list; the program may write meanwhile, as it may
        // with any mapping, so pages are copied before they are compared.
        let now = self.at as *const u8;
        let mut page = [0u8; PAGE];
        for start in (0..self.known.len()).step_by(PAGE) {
            let length = PAGE.min(self.known.len() - start);
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
