//! Mappings whose pages are read when they are touched (`demand.rs`). Private ones are memory of this
//! process, shared ones the memory of all processes of the run (`shared.rs`).

use super::maps::{MAPS, Map, page_bytes, plain, unmap};
use super::shared::Shared;
use crate::demand;
use crate::descriptors::Open;
use crate::guard::checked;
use libc::{c_int, c_void};
use std::sync::Arc;

/// Shorter mappings are read when they are made: a touch costs two wake-ups and a round trip. Touching all
/// pages of a mapping of this length takes twice as long as reading it when it is made.
const LENGTH_MIN: usize = 256 << 10;

/// Returns true if the pages of a mapping may be read when they are touched.
pub(super) fn is_wanted(length: usize, flags: c_int) -> bool {
    length >= LENGTH_MIN && flags & libc::MAP_LOCKED == 0 && demand::may_be()
}

pub(super) fn whole_pages(bytes: usize) -> usize {
    bytes.div_ceil(page_bytes()) * page_bytes()
}

/// The parameters of a new mapping.
pub(super) struct Wish<'a> {
    pub(super) at: *mut c_void,
    /// In whole pages.
    pub(super) length: usize,
    pub(super) protection: c_int,
    pub(super) flags: c_int,
    pub(super) file: (Open, c_int),
    pub(super) offset: i64,
    pub(super) shared: Option<&'a Shared>,
}

/// Maps a file whose pages are read when they are touched.
///
/// # Errors
/// If that is not possible; nothing is mapped then.
pub(super) fn map(wish: &Wish<'_>) -> Result<*mut c_void, i32> {
    let Wish { at, length, protection, flags, file, offset, shared } = *wish;
    // Nothing can touch the mapping before it is registered. Pages that are not written to take no memory.
    let flags = flags | libc::MAP_NORESERVE;
    let mapped = match shared {
        // SAFETY: the program passes valid arguments.
        None => unsafe { plain(at, length, libc::PROT_NONE, flags | libc::MAP_ANONYMOUS, -1, 0) },
        Some(shared) => shared.place(at, length, libc::PROT_NONE, flags, offset),
    };
    if mapped == libc::MAP_FAILED {
        return Err(crate::guard::errno());
    }
    let begun = demand::begin((mapped as usize, length), file, offset, shared.is_some());
    match begun.and_then(|()| protect(mapped as usize, length, protection)) {
        Ok(()) => Ok(mapped),
        Err(error) => {
            unmap(mapped, length);
            Err(error)
        }
    }
}

fn protect(at: usize, length: usize, protection: c_int) -> Result<(), i32> {
    // SAFETY: the library has made this mapping for the program.
    unsafe { checked(libc::SYS_mprotect, [at, length, protection as usize, 0, 0, 0]) }.map(drop)
}

/// Splits the mapping that spans this address.
fn split(maps: &mut Vec<Map>, at: usize) {
    let goes_on = |map: &Map| map.at < at && at < map.at + map.length;
    if let Some(map) = maps.iter_mut().find(|map| goes_on(map)) {
        let length = at - map.at;
        let rest = Map {
            at,
            length: map.length - length,
            offset: map.offset + length as i64,
            shared: map.shared.clone(),
            handle: map.handle.clone(),
            ..*map
        };
        map.length = length;
        maps.push(rest);
        super::maps::added();
    }
}

/// Cuts mappings so that each lies inside these addresses, or outside.
pub(super) fn cut(maps: &mut Vec<Map>, from: usize, to: usize) {
    split(maps, from);
    split(maps, whole_pages(to));
}

/// Resizes or moves a mapping with `remap`, for `mremap`.
pub(super) fn resize(
    maps: &mut Vec<Map>,
    (from, old): (usize, usize),
    new: usize,
    remap: impl FnOnce() -> Result<usize, i32>,
) -> Result<usize, i32> {
    let (old, new) = (whole_pages(old), whole_pages(new));
    // Without an old length, `mremap` makes a second mapping of the memory, which would have to be
    // registered, too.
    if old == 0 || new == 0 {
        return Err(libc::EINVAL);
    }
    cut(maps, from, from + old);
    let map = maps.iter_mut().find(|map| map.at == from && map.length == old);
    let map = map.ok_or(libc::EFAULT)?;
    if let Some(shared) = &map.shared {
        shared.reach(map.offset, new)?;
    }
    let now = demand::resize((from, old), new, remap)?;
    (map.at, map.length) = (now, new);
    Ok(now)
}

/// Drops pages after the file has changed, grown or been cut between two offsets: the pager is asked when
/// they are touched next. Of a private mapping, only pages that begin there are dropped.
pub(super) fn forget(map: &Map, from: i64, to: i64) {
    let within =
        |offset: i64| offset.saturating_sub(map.offset).clamp(0, map.length as i64) as usize;
    let start = match map.shared {
        Some(_) => within(from) / page_bytes() * page_bytes(),
        None => whole_pages(within(from)),
    };
    let end = whole_pages(within(to));
    if start < end {
        let advice = [map.at + start, end - start, libc::MADV_DONTNEED as usize, 0, 0, 0];
        // SAFETY: the mapping is the library's, and its pages are read again when they are touched. On
        // failure they stay as they are.
        let _ = unsafe { checked(libc::SYS_madvise, advice) };
    }
}

/// Lets children inherit the private memory of these mappings, before a fork. Where that fails, a touch
/// kills them with `SIGSEGV`; otherwise they would see zeros.
pub(crate) fn before_fork() {
    let Ok(maps) = MAPS.try_lock() else { return };
    super::maps::before_fork();
    let mut maps = maps.iter().filter(|map| map.is_touched).peekable();
    if maps.peek().is_some() && demand::will_fork().is_ok() {
        set_inherited(maps, true);
    }
}

/// Ends what [`before_fork`] has begun, in the parent.
pub(crate) fn after_fork() {
    if let Ok(maps) = MAPS.try_lock() {
        set_inherited(maps.iter().filter(|map| map.is_touched), false);
    }
}

fn set_inherited<'a>(maps: impl Iterator<Item = &'a Map>, are: bool) {
    // Shared mappings are not inherited: a child that touched one before `in_child` would put zeros into
    // the memory of all processes. Not so if that was taken away.
    let is_meant = |map: &&Map| map.shared.as_ref().is_none_or(|shared| shared.is_lost());
    for map in maps.filter(is_meant) {
        let _ = demand::inherit(map.at, map.length, are);
    }
}

/// Takes the mappings over, in the child, which has no connections yet.
pub(crate) fn in_child() {
    demand::disown();
    let Ok(mut maps) = MAPS.try_lock() else { return };
    if maps.is_empty() {
        return;
    }
    let has_touched = maps.iter().any(|map| map.is_touched);
    let met = if has_touched { demand::meet_again() } else { Ok(()) };
    let mut opened: Vec<Arc<Shared>> = Vec::new();
    maps.retain_mut(|map| {
        let is_private = map.shared.is_none();
        let goes_on = match &map.shared {
            None if map.is_touched => met.and_then(|()| demand::go_on(map.at, map.length)),
            None => Ok(()),
            Some(_) if map.is_touched => met.and_then(|()| share(map, &mut opened)),
            // The memory is there already.
            Some(_) => open_again(map, &mut opened).map(drop),
        };
        if goes_on.is_err() {
            super::maps::removed();
            if is_private {
                let _ = protect(map.at, map.length, libc::PROT_NONE);
            }
        }
        goes_on.is_ok()
    });
}

/// Opens the memory of a shared mapping again. Fails with `ESTALE` if it was taken away.
fn open_again(map: &mut Map, opened: &mut Vec<Arc<Shared>>) -> Result<Arc<Shared>, i32> {
    let old = map.shared.take().ok_or(libc::EIO)?;
    let known = opened.iter().find(|shared| shared.is(&old)).cloned();
    let shared = known.map_or_else(|| old.again().map(Arc::new), Ok);
    // The parent's descriptors are closed already: dropping the old value would close others.
    std::mem::forget(old);
    let shared = shared?;
    if !opened.iter().any(|known| Arc::ptr_eq(known, &shared)) {
        opened.push(shared.clone());
    }
    map.shared = Some(shared.clone());
    Ok(shared)
}

/// Maps a shared mapping again.
fn share(map: &mut Map, opened: &mut Vec<Arc<Shared>>) -> Result<(), i32> {
    let shared = open_again(map, opened)?;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    let (at, length) = (map.at as *mut c_void, map.length);
    if shared.place(at, length, libc::PROT_NONE, flags, map.offset) == libc::MAP_FAILED {
        return Err(crate::guard::errno());
    }
    let done = demand::go_on(map.at, length).and_then(|()| protect(map.at, length, map.protection));
    if done.is_err() {
        unmap(at, length);
    }
    done
}
