//! What stays known of a far server although this process removes a name there.
//!
//! Every change of the run makes what is known of any file invalid (`known.rs`). A program that removes a tree
//! would then have to ask for all attributes again after each name. But a name that is removed from an open
//! directory changes only the directory's names, the attributes of the directory, and those of other links of the
//! removed file. What was known of other directories stays valid, if no other change of the run came in between:
//! then the counter of changes has moved by exactly the two of this one.

use crate::known::{self, changes};
use crate::place::At;
use crate::walk;
use std::sync::atomic::Ordering;
use towline_client::DirEntry;
use towline_wire::Attr;

/// A name that this process has removed.
pub(crate) struct Removed<'a> {
    pub(crate) mount: usize,
    /// Handle and identity of the directory that it was in.
    pub(crate) base: u64,
    pub(crate) parent: u64,
    pub(crate) name: &'a [u8],
    /// Identity of a removed directory.
    pub(crate) gone: Option<u64>,
    /// Number of changes before it and after it.
    pub(crate) before: u64,
    pub(crate) after: u64,
}

impl Removed<'_> {
    /// Returns true if these attributes may have changed.
    pub(crate) fn concerns(&self, attr: &Attr) -> bool {
        attr.identity() == self.parent || is_linked(attr)
    }
}

/// Returns true if a file has several names, of which one may be the removed one.
fn is_linked(attr: &Attr) -> bool {
    !attr.is_directory() && attr.links > 1
}

/// Forgets the attributes of files with several names, and of these directories.
pub(crate) fn strip(entries: &mut [DirEntry], directories: &[u64]) {
    for entry in entries {
        let concerns = |attr: &Attr| is_linked(attr) || directories.contains(&attr.identity());
        entry.attr.take_if(|attr| concerns(attr));
    }
}

/// Called after a name was removed; `before` is the number of changes before.
pub(crate) fn removed(at: &At, before: u64, is_directory: bool) {
    let after = changes();
    let Some(open) = at.directory.filter(|_| after == before + 2) else { return };
    let is_name = !at.path.contains(&b'/') && !matches!(&at.path[..], b"" | b"." | b"..");
    if !is_name || !walk::is_far(at.mount) {
        return;
    }
    let parent = open.entry.inode.load(Ordering::Relaxed);
    let (mount, base, name) = (at.mount, open.handle, &at.path[..]);
    let gone = match is_directory {
        true => {
            let identity = walk::identity(mount, base, name);
            let Some(gone) = identity.or_else(|| known::identity((mount, base, name), before))
            else {
                return; // anything may be below it, or be it
            };
            Some(gone)
        }
        false => None,
    };
    let removed = Removed { mount, base, parent, name, gone, before, after };
    known::removed(&removed);
    walk::removed(&removed);
}
