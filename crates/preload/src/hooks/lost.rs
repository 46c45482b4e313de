//! Mappings of files that were lost in a restart of their server. As soon as this process learns of it, it takes
//! away the memory of its shared mappings, in all processes of the run: a touch raises `SIGBUS`, and does not
//! show what the file may have had long ago. For processes that ask the server nothing, the keeper does so
//! (`cli/run/lost.rs`).

use super::maps::{MAPS, Map, is_any_here};
use super::shared::Shared;
use crate::{descriptors, place, remote, report};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_instance::notes::Note;

/// A file may have been lost since [`look`] was last called.
static IS_SUSPECTED: AtomicBool = AtomicBool::new(false);

/// Notes that a server has refused an open file as lost.
pub(crate) fn suspect() {
    IS_SUSPECTED.store(true, Ordering::Relaxed);
}

/// Takes the memory of lost files away, if there may be some. The caller holds no lock.
#[inline]
pub(crate) fn look() {
    if IS_SUSPECTED.load(Ordering::Relaxed) && IS_SUSPECTED.swap(false, Ordering::Relaxed) {
        take_away(|_| true);
    }
}

/// Takes the memory of those of these mappings away whose file is lost. The caller holds no lock.
#[cold]
pub(super) fn take_away(is_meant: impl Fn(&Map) -> bool) {
    if !is_any_here() {
        return;
    }
    let Ok(maps) = MAPS.lock() else { return };
    let lost = maps.iter().filter(|map| is_meant(map) && is_lost(map));
    let lost: Vec<(Arc<Shared>, Vec<u8>)> =
        lost.filter_map(|map| Some((map.shared.clone()?, path(map)))).collect();
    drop(maps);
    for (shared, path) in lost {
        if let Ok(Some(is_unwritten)) = shared.lose() {
            report::notice(&Note::Lost { path, is_unwritten });
        }
    }
}

/// Returns true if this process knows that the file is lost, and has no other handle of it.
fn is_lost(map: &Map) -> bool {
    let own = map.handle.as_ref().map(|handle| handle.is_lost());
    let program = remote::is_lost(map.mount, map.lent);
    let has_program = || opened(map).is_some();
    own != Some(false) && program || own == Some(true) && !has_program()
}

/// Returns the open file that the program has mapped, if this process still has a descriptor of it.
fn opened(map: &Map) -> Option<descriptors::Open> {
    descriptors::all(0, u32::MAX).map(|(_, open)| open).find(|open| open.handle == map.lent)
}

/// Returns the path of a mapped file; empty if it is not open any more.
fn path(map: &Map) -> Vec<u8> {
    opened(map).map_or_else(Vec::new, |open| place::absolute(map.mount, &open.entry.path()))
}
