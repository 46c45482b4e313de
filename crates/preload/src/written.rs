//! What this process has lately written to its files, or read from them, so that reading it back asks nothing:
//! assemblers, linkers, archivers and others that use stdio on a file that they write read a block after each seek.
//! Such a read, and one beyond the end, is answered here although what was written may still be on its way
//! (`behind.rs`).
//!
//! This concerns regular files that this process has opened for reading and writing, on servers that are not next to it,
//! unless the run maps them shared. As what is read ahead (`ahead.rs`), it is used only for [`VALID`], and until the run
//! changes something else: the counter of changes has moved by exactly the two of a write of this process
//! (`changed.rs` has what stays known of names). So what a write behind has failed to write is forgotten, too, as the keeper
//! counts that as a change.

mod content;

use crate::ahead::VALID;
use crate::behind;
use crate::descriptors::Open;
use crate::hooks::maps::{self, Which};
use crate::known::{changes, lock_surely};
use content::{Content, PART_BYTES_MAX};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;
use towline_wire::{Attr, Timestamp};

/// Maximum number of files: 1 MiB in all.
const FILES_MAX: usize = 8;

static FILES: Mutex<Vec<Written>> = Mutex::new(Vec::new());
/// Set once there was a file, so that programs that have none, perhaps with many threads that read, take no lock.
static HAD_FILES: AtomicBool = AtomicBool::new(false);

struct Written {
    which: Which,
    /// Number of changes when this was known.
    changes: u64,
    content: Content,
}

/// Called in a process that uses its parent's memory: starts empty and leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut files) = lock_surely(&FILES) {
        std::mem::forget(std::mem::take(&mut *files));
    }
}

/// Notes that a file was opened, which has asked the server: only what came with that is known of it.
pub(crate) fn opened(open: Open, attr: &Attr, arrived: Instant, changes: u64) {
    let which = maps::which(open);
    let is_new = is_read_back(open) && is_stored(attr) && behind::may_be_far(open);
    if !is_new && !HAD_FILES.load(Ordering::Relaxed) {
        return;
    }
    let Some(mut files) = lock_surely(&FILES) else { return };
    let content = Content::of_size(attr.size, arrived + VALID);
    let new = Written { which, changes, content };
    if let Some(known) = files.iter_mut().find(|file| file.which == which) {
        *known = new;
    } else if is_new {
        if files.len() == FILES_MAX {
            files.remove(0);
        }
        files.push(new);
        HAD_FILES.store(true, Ordering::Relaxed);
    }
}

fn is_read_back(open: Open) -> bool {
    let access = open.entry.flags.load(Ordering::Relaxed) as i32 & libc::O_ACCMODE;
    access == libc::O_RDWR && behind::is_plain(open)
}

/// Returns false for a file that may contain something else than what was written, or have a size that means nothing.
/// Where that is so (`/proc`), nobody knows when files were created.
fn is_stored(attr: &Attr) -> bool {
    attr.created != Timestamp::default()
}

/// Forgets a file that is closed.
pub(crate) fn closed(open: Open) {
    if is_read_back(open)
        && let Some(mut files) = lock_surely(&FILES)
    {
        let which = maps::which(open);
        files.retain(|file| file.which != which);
    }
}

/// Notes that this process has written `data` at an offset; `before` is the number of changes before.
pub(crate) fn wrote(open: Open, data: &[u8], at: u64, before: u64) {
    let Some(mut files) = files() else { return };
    let (which, after) = (maps::which(open), before + 2);
    if changes() != after {
        return;
    }
    if !behind::may_be_far(open) {
        return files.retain(|file| file.which.0 != which.0);
    }
    // Files of other mounts are left out: each may be this one by another name.
    for file in files.iter_mut().filter(|file| file.which.0 == which.0) {
        if file.which == which {
            file.begin(before);
            let now = Instant::now();
            file.content.wrote(at, data, now, now + VALID);
        }
        if file.changes == before {
            file.changes = after;
        }
    }
}

/// Notes what the server has answered to a read of so many bytes, which was asked after `before` changes.
pub(crate) fn was_read(open: Open, wanted: usize, at: u64, data: &[u8], before: u64) {
    if wanted > PART_BYTES_MAX {
        return;
    }
    let Some(mut files) = files() else { return };
    let which = maps::which(open);
    if let Some(file) = files.iter_mut().find(|file| file.which == which)
        && changes() == before
    {
        file.begin(before);
        file.content.was_read(at, wanted, data, Instant::now() + VALID);
    }
}

/// Reads what is known at an offset. Returns `None` if the server has to be asked.
pub(crate) fn read(open: Open, target: &mut [u8], at: u64) -> Option<usize> {
    // The program's memory may have to be read in first, for which nobody must wait here.
    let data = with(open, |content| content.read(target.len(), at, Instant::now()))?;
    target[..data.len()].copy_from_slice(&data);
    Some(data.len())
}

/// Returns the size of a file, if it is known.
pub(crate) fn size(open: Open) -> Option<u64> {
    with(open, |content| content.size(Instant::now()))
}

/// Returns the files, if there are any.
fn files() -> Option<MutexGuard<'static, Vec<Written>>> {
    if !HAD_FILES.load(Ordering::Relaxed) {
        return None;
    }
    lock_surely(&FILES).filter(|files| !files.is_empty())
}

fn with<T>(open: Open, work: impl FnOnce(&Content) -> Option<T>) -> Option<T> {
    let files = files()?;
    let which = maps::which(open);
    let file = files.iter().find(|file| file.which == which)?;
    let is_valid = file.changes == changes() && behind::is_plain(open) && !maps::has_shared(open);
    if is_valid { work(&file.content) } else { None }
}

impl Written {
    /// Forgets what is known, unless it is after so many changes.
    fn begin(&mut self, changes: u64) {
        if self.changes != changes {
            (self.changes, self.content) = (changes, Content::default());
        }
    }
}
