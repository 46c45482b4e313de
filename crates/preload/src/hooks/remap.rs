//! Mappings of remote files that grow, shrink or move.

use super::maps::{MAPS, Map, page_bytes, read_from, removed, replacing, which, with_maps};
use super::shared::Shared;
use super::touched::{self, whole_pages};
use crate::descriptors::{self, Open};
use crate::guard::{checked, inside};
use crate::remote;
use libc::{c_int, c_void, size_t};
use std::sync::Arc;

pub(crate) unsafe fn mremap(
    at: *mut c_void,
    old: size_t,
    new: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let (from, end) = (at as usize, (at as usize).saturating_add(old.max(1)));
    let arguments = [from, old, new, flags as usize, to as usize, 0];
    let remap = || {
        // SAFETY: the program passes valid arguments.
        unsafe { checked(libc::SYS_mremap, arguments) }
    };
    let grows = new.div_ceil(page_bytes()) > old.div_ceil(page_bytes());
    if flags & libc::MREMAP_FIXED != 0 {
        let _ = replacing(to as usize, new);
    }
    let ours = with_maps(None, |maps| {
        for map in maps.iter().filter(|map| map.is_in(from, end)) {
            map.write_back_all()?;
        }
        let Some(first) = maps.iter().find(|map| map.is_in(from, end)) else { return Ok(None) };
        if first.is_touched {
            return touched::resize(maps, (from, old), new, remap).map(|now| Some(Ok(now)));
        }
        // Without an old length, `mremap` makes a second mapping of the memory.
        if old == 0 {
            return Err(libc::EINVAL);
        }
        if grows {
            return first.growth(from, old, new).map(|growth| Some(Err(growth)));
        }
        touched::cut(maps, from, end);
        let now = remap()?;
        maps.retain_mut(|map| {
            if !map.is_in(from, end) {
                return true;
            }
            let (before, length) = (map.at - from, whole_pages(new));
            map.at = now + before;
            map.length = map.length.min(length.saturating_sub(before));
            if map.length == 0 {
                removed();
            }
            map.length > 0
        });
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

/// The part of a file that a growing mapping will show in addition.
struct Growth {
    open: Open,
    /// Its offset in the file and its length, in bytes.
    offset: i64,
    added: usize,
    shared: Option<Arc<Shared>>,
}

impl Growth {
    /// Reads the part: into the memory of a shared mapping, else into the returned bytes. The caller must
    /// not hold the lock of the mappings, as reading writes back what they changed.
    fn read(&self) -> Result<Vec<u8>, i32> {
        if let Some(shared) = &self.shared {
            return shared
                .read_in(self.open, (self.offset, self.added), false)
                .map(|()| Vec::new());
        }
        let mut bytes = vec![0; self.added];
        read_from(self.open, &mut bytes, self.offset)?;
        Ok(bytes)
    }
}

impl Map {
    /// Returns what it takes to make the mapping longer. It must be the whole mapping, and the file still
    /// open.
    fn growth(&self, from: usize, old: usize, new: usize) -> Result<Growth, i32> {
        if from != self.at || whole_pages(old) != self.length {
            return Err(libc::EFAULT);
        }
        let mut opened = descriptors::all(0, u32::MAX).map(|(_, open)| open);
        let open =
            opened.find(|open| self.is_of(which(*open)) && remote::check_readable(*open).is_ok());
        Ok(Growth {
            open: open.ok_or(libc::ENOMEM)?,
            offset: self.offset + self.length as i64,
            added: whole_pages(new) - self.length,
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
            // SAFETY: the pages were just added, and the program does not know of them yet.
            unsafe {
                checked(libc::SYS_mprotect, [place, bytes.len(), all, 0, 0, 0])?;
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), place as *mut u8, bytes.len());
                let as_ever = self.protection as usize;
                checked(libc::SYS_mprotect, [place, bytes.len(), as_ever, 0, 0, 0])?;
            }
        }
        (self.at, self.length) = (now, whole_pages(new));
        Ok(now)
    }
}
