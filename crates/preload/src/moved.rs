//! Renamed and removed directories: processes that work in them or have them open learn their new names.
//!
//! The stand-in of a working directory (`working.rs`) is renamed with it, so that the kernel moves all
//! processes in it. Until that is done, they look for names where the directory was: see `working::Before`. Renames
//! from outside the run are not seen.

use crate::guard::checked;
use crate::place::{self, At};
use crate::{common, descriptors, remote, start, working};
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

/// Creates the directories above a stand-in. If that fails, the calls that need them fail.
fn make_parents(path: &[u8]) {
    let _ = common::make_folders_above(path, working::folder().len());
}

/// Moves the stand-in of a removed directory out of its place.
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

/// Returns the last name of a path.
fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// Returns true if a process may work in or below a directory of this name.
fn may_be_worked_in(path: &[u8]) -> bool {
    start::state().is_some_and(|state| state.may_have_name(last(path)))
}

/// Returns the path without symbolic links, which stand-ins are named by. Only the server can resolve them.
fn without_links(at: &At) -> Result<Vec<u8>, i32> {
    let end = at.path.iter().rposition(|b| *b != b'/').map_or(0, |last| last + 1);
    let path = &at.path[..end];
    let (above, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b"."[..], path),
    };
    let above = at.with(|base, _| base.path_to_enter(above))?.map_err(remote::number)?;
    Ok(if above == b"." { name.to_vec() } else { [&above, &b"/"[..], name].concat() })
}

fn path_of(at: &At) -> Vec<u8> {
    let path = place::normal(&at.below());
    path.strip_prefix(b"/").unwrap_or(&path).to_vec()
}

/// A pending rename or exchange. The paths are resolved beforehand, since they may lead through the renamed
/// name.
pub(crate) struct Moving {
    from: (usize, Vec<u8>),
    to: (usize, Vec<u8>),
    is_worked_in: bool,
}

impl Moving {
    /// Prepares the rename of `from` to `to`.
    pub(crate) fn new(from: &At, to: &At) -> Self {
        let (old, new) = (path_of(from), path_of(to));
        let is_worked_in = may_be_worked_in(&old) || may_be_worked_in(&new);
        if is_worked_in && let Some(state) = start::state() {
            state.moving().fetch_add(1, Ordering::SeqCst);
        }
        let (old, new) = match is_worked_in.then(|| (without_links(from), without_links(to))) {
            Some((Ok(old), Ok(new))) => (old, new),
            _ => (old, new),
        };
        Self { from: (from.mount, old), to: (to.mount, new), is_worked_in }
    }

    /// Records the completed rename or exchange.
    pub(crate) fn done(&self, exchange: bool) {
        let (from, to) = (self.from.0, self.to.0);
        let (old, new) = (&self.from.1[..], &self.to.1[..]);
        if (from, old) == (to, new) {
            // Nothing moves.
            return;
        }
        if !exchange {
            descriptors::removed((to, new));
        }
        descriptors::renamed((from, old), (to, new), exchange);
        if !self.is_worked_in {
            return;
        }
        let (source, target) = (working::stand_in(from, old), working::stand_in(to, new));
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
                set_aside(to, new);
            }
            make_parents(&target);
            rename(&source, &target, 0);
        }
        if let Some(state) = start::state() {
            [old, new].into_iter().for_each(|path| state.note_name(last(path)));
        }
        moved();
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        if self.is_worked_in
            && let Some(state) = start::state()
        {
            state.moving().fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// A pending removal of a name, which may be a directory.
pub(crate) struct Removing {
    mount: usize,
    path: Vec<u8>,
    is_worked_in: bool,
}

impl Removing {
    /// Prepares the removal of `at`.
    pub(crate) fn new(at: &At, directory: bool) -> Self {
        let path = path_of(at);
        let is_worked_in = directory && may_be_worked_in(&path);
        let real = is_worked_in.then(|| without_links(at).ok()).flatten();
        Self { mount: at.mount, path: real.unwrap_or(path), is_worked_in }
    }

    /// Records the completed removal.
    pub(crate) fn done(&self) {
        descriptors::removed((self.mount, &self.path));
        if self.is_worked_in && set_aside(self.mount, &self.path) {
            moved();
        }
    }
}

fn moved() {
    if let Some(state) = start::state() {
        state.moves().fetch_add(1, Ordering::SeqCst);
    }
}
