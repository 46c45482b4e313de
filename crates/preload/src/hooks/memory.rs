//! Hooks for calls that name memory, which may be that of a mapping: unmapping, protection, advice,
//! synchronization.

use super::handle::Handle;
use super::maps::{Map, forget, page_bytes, with_maps};
use super::touched;
use crate::guard::{checked, finish, inside};
use libc::{c_int, c_void, size_t};
use std::sync::Arc;

pub(crate) unsafe fn munmap(at: *mut c_void, length: size_t) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    // The kernel unmaps nothing then.
    let is_refused = length == 0 || !from.is_multiple_of(page_bytes());
    let written = if is_refused { Ok(()) } else { with_maps((), |maps| forget(maps, from, to)) };
    // SAFETY: the program passes valid arguments.
    match unsafe { checked(libc::SYS_munmap, [from, length, 0, 0, 0, 0]) } {
        Ok(_) => finish(written.map(|()| 0)),
        Err(error) => finish(Err(error)),
    }
}

/// Prepares for a new protection. How the file was opened decides whether a shared mapping may become
/// writable; its changes are written back from then on.
fn will_protect(at: *mut c_void, length: size_t, protection: c_int) -> Result<(), i32> {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    with_maps((), |maps| {
        // Each mapping needs a single protection, for a child to take over.
        touched::cut(maps, from, to);
        for map in maps.iter_mut().filter(|map| map.is_in(from, to)) {
            if map.shared.is_some() && protection & libc::PROT_WRITE != 0 {
                map.begin_writing()?;
            }
            map.protection = protection;
        }
        Ok(())
    })
}

pub(crate) unsafe fn mprotect(at: *mut c_void, length: size_t, protection: c_int) -> c_int {
    let arguments = [at as usize, length, protection as usize, 0, 0, 0];
    let allowed = will_protect(at, length, protection);
    // SAFETY: the program passes valid arguments.
    let done = allowed.and_then(|()| unsafe { checked(libc::SYS_mprotect, arguments) });
    finish(done.map(|_| 0))
}

pub(crate) unsafe fn pkey_mprotect(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    key: c_int,
) -> c_int {
    if key == -1 {
        // SAFETY: the program passes valid arguments.
        return unsafe { mprotect(at, length, protection) };
    }
    let arguments = [at as usize, length, protection as usize, key as usize, 0, 0];
    let allowed = will_protect(at, length, protection);
    // SAFETY: the program passes valid arguments.
    let done = allowed.and_then(|()| unsafe { checked(libc::SYS_pkey_mprotect, arguments) });
    finish(done.map(|_| 0))
}

/// Refuses to reorder pages of remote mappings: the kernel would take `page` as a place in the library's
/// memory. Programs can use `mmap` instead, as the kernel itself does since Linux 4.0.
pub(crate) unsafe fn remap_file_pages(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    page: size_t,
    flags: c_int,
) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length.max(1)));
    match with_maps(false, |maps| Ok(maps.iter().any(|map| map.is_in(from, to)))) {
        Ok(false) => {}
        ours => return finish(ours.and(Err(libc::EINVAL))),
    }
    let arguments = [from, length, protection as usize, page, flags as usize, 0];
    // SAFETY: the program passes valid arguments.
    finish(unsafe { checked(libc::SYS_remap_file_pages, arguments) }.map(|_| 0))
}

/// Ignores `MADV_DONTNEED`, `MADV_DONTNEED_LOCKED` and `MADV_FREE` for private mappings whose file was read at
/// once: the kernel takes them for anonymous memory and would lose the data. Refuses `MADV_REMOVE`, which would
/// punch a hole in the library's memory instead of the file.
pub(crate) unsafe fn madvise(at: *mut c_void, length: size_t, advice: c_int) -> c_int {
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    if advice == libc::MADV_REMOVE {
        let is_ours = |maps: &mut Vec<Map>| Ok(maps.iter().any(|map| map.is_in(from, to)));
        match with_maps(false, is_ours) {
            Ok(false) => {}
            ours => return finish(ours.and(Err(libc::EOPNOTSUPP))),
        }
    }
    let forgets =
        matches!(advice, libc::MADV_DONTNEED | libc::MADV_DONTNEED_LOCKED | libc::MADV_FREE);
    let is_private = |map: &Map| map.is_in(from, to) && map.shared.is_none() && !map.is_touched;
    let keeps = forgets && with_maps(false, |maps| Ok(maps.iter().any(is_private))) == Ok(true);
    if keeps {
        return 0;
    }
    // SAFETY: the program passes valid arguments.
    let done = unsafe { checked(libc::SYS_madvise, [from, length, advice as usize, 0, 0, 0]) };
    finish(done.map(|_| 0))
}

pub(crate) unsafe fn msync(at: *mut c_void, length: size_t, flags: c_int) -> c_int {
    const BOTH: c_int = libc::MS_SYNC | libc::MS_ASYNC;
    let (from, to) = (at as usize, (at as usize).saturating_add(length));
    // SAFETY: the program passes valid arguments.
    let ask = |flags: c_int| unsafe {
        checked(libc::SYS_msync, [from, length, flags as usize, 0, 0, 0]).map(drop)
    };
    let is_refused = flags & !(BOTH | libc::MS_INVALIDATE) != 0
        || flags & BOTH == BOTH
        || !from.is_multiple_of(page_bytes());
    if is_refused {
        return finish(ask(flags).map(|()| 0));
    }
    let ours = with_maps(None, |maps| {
        let mut found = None;
        for map in maps.iter().filter(|map| map.is_in(from, to)) {
            map.write_back(from, to)?;
            let files: &mut Vec<Arc<Handle>> = found.get_or_insert_default();
            if let Some(file) = &map.handle
                && !files.iter().any(|known| Arc::ptr_eq(known, file))
            {
                files.push(file.clone());
            }
        }
        Ok(found)
    });
    let done = ours.and_then(|ours| match ours {
        None => ask(flags),
        Some(files) => inside(|| {
            let waits = flags & libc::MS_SYNC != 0;
            files.into_iter().filter(|_| waits).try_for_each(|file| file.sync())
        })
        // Whether all of it is mapped. The memory behind the mappings need not be safe.
        .and_then(|()| ask(flags & !libc::MS_SYNC | libc::MS_ASYNC)),
    });
    finish(done.map(|()| 0))
}
