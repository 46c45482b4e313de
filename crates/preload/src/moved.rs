//! Directories that were renamed or removed: those who work in them, and those who have them open, know
//! them by their new names.
//!
//! A working directory's stand-in (`working.rs`) is renamed with it, so that the kernel moves all
//! processes that are in it. Renames by others than the run's processes are not seen.

use crate::guard::checked;
use crate::place::{self, At};
use crate::{descriptors, start, working};
use std::sync::atomic::Ordering;

fn call(number: i64, arguments: [usize; 6]) -> bool {
    // SAFETY: all callers pass paths that end with a zero byte.
    unsafe { checked(number, arguments) }.is_ok()
}

fn rename(from: &[u8], to: &[u8], flags: u32) -> bool {
    let here = libc::AT_FDCWD as usize;
    let (from, to) = (from.as_ptr() as usize, to.as_ptr() as usize);
    call(libc::SYS_renameat2, [here, from, here, to, flags as usize, 0])
}

fn is_here(path: &[u8]) -> bool {
    let ask = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
    call(libc::SYS_faccessat, ask)
}

/// Makes the directories above a stand-in.
fn make_parents(path: &[u8]) {
    let first = working::folder().len();
    for (at, _) in path.iter().enumerate().filter(|(at, byte)| *at > first && **byte == b'/') {
        let mut parent = path[..at].to_vec();
        parent.push(0);
        call(
            libc::SYS_mkdirat,
            [libc::AT_FDCWD as usize, parent.as_ptr() as usize, 0o700, 0, 0, 0],
        );
    }
}

/// Takes a stand-in out of its place: its directory is there no more.
fn set_aside(mount: usize, path: &[u8]) -> bool {
    let gone = working::stand_in_of_removed();
    make_parents(&gone);
    let is_done = rename(&working::stand_in(mount, path), &gone, 0);
    if is_done {
        let above = path.iter().rposition(|b| *b == b'/').unwrap_or(0);
        working::note_above(&gone, mount, &path[..above]);
    }
    is_done
}

fn path_of(at: &At) -> Vec<u8> {
    let path = place::normal(&at.below());
    path.strip_prefix(b"/").unwrap_or(&path).to_vec()
}

/// Something was renamed, or exchanged with what had the other name.
pub(crate) fn renamed(from: &At, to: &At, exchange: bool) {
    let (old, new) = (path_of(from), path_of(to));
    if (from.mount, &old) == (to.mount, &new) {
        // It stays where it is.
        return;
    }
    if !exchange {
        descriptors::removed((to.mount, &new));
    }
    descriptors::renamed((from.mount, &old), (to.mount, &new), exchange);
    let (source, target) = (working::stand_in(from.mount, &old), working::stand_in(to.mount, &new));
    let (has_source, has_target) = (is_here(&source), is_here(&target));
    if !has_source && !has_target {
        return;
    }
    if exchange && has_source && has_target {
        rename(&source, &target, libc::RENAME_EXCHANGE);
    } else if exchange && has_target {
        make_parents(&source);
        rename(&target, &source, 0);
    } else {
        if has_target && !exchange {
            set_aside(to.mount, &new);
        }
        make_parents(&target);
        rename(&source, &target, 0);
    }
    moved();
}

/// A name was removed, perhaps that of a directory.
pub(crate) fn removed(at: &At, directory: bool) {
    let path = path_of(at);
    descriptors::removed((at.mount, &path));
    if directory && set_aside(at.mount, &path) {
        moved();
    }
}

fn moved() {
    if let Some(state) = start::state() {
        state.moves().fetch_add(1, Ordering::Release);
    }
}
