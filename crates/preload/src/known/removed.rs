//! What stays known of directories although this process has removed a name: see `crate::removed`.

use super::{KNOWN, Key, lock};
use crate::descriptors::{self, Open};
use crate::removed::Removed;
use std::sync::atomic::Ordering;

/// Maximum number of names of a directory that are looked through for each removed name.
const NAMES_MAX: usize = 1024;

/// Adapts what is known of all directories.
pub(crate) fn removed(removed: &Removed<'_>) {
    let Some(mut known) = lock(&KNOWN) else { return };
    let base = Key { mount: removed.mount, base: removed.base, path: b"" };
    let opened: Vec<Open> = descriptors::all(0, u32::MAX)
        .map(|(_, open)| open)
        .filter(|open| open.entry.mount.load(Ordering::Relaxed) as usize == removed.mount)
        .collect();
    for directory in known.directories.iter_mut().filter(|one| one.name.mount == removed.mount) {
        let listed = &mut directory.listed;
        if listed.last.changes != removed.before || listed.names.is_empty() {
            continue;
        }
        let name = &directory.name;
        let is_open = |open: &Open| open.handle == name.base && name.path.is_empty();
        let inode = match &directory.also {
            Some(path) => Some(path.inode),
            None => opened.iter().find(|open| is_open(open)).map(identity_of),
        };
        if directory.name.key() == base || inode == Some(removed.parent) {
            listed.names.remove(removed.name);
        } else if inode.is_none() || inode == removed.gone || listed.names.len() > NAMES_MAX {
            continue; // it may be the same as the one above
        }
        for (attr, _) in listed.names.values_mut() {
            attr.take_if(|attr| removed.concerns(attr));
        }
        listed.own = None;
        listed.last.changes = removed.after;
    }
}

fn identity_of(open: &Open) -> u64 {
    open.entry.inode.load(Ordering::Relaxed)
}

/// Returns the identity of a directory that is known by its name in an open one, after so many changes.
pub(crate) fn identity((mount, base, name): (usize, u64, &[u8]), changes: u64) -> Option<u64> {
    let known = lock(&KNOWN)?;
    let listed = &known.directories[known.find(Key { mount, base, path: b"" })?].listed;
    let (attr, _) = listed.names.get(name).filter(|_| listed.last.changes == changes)?;
    attr.map(|attr| attr.identity())
}
