//! Placeholders that a process keeps for its next files.
//!
//! Opening and closing a placeholder costs the kernel a path walk and the keeper a message: more than
//! everything else that `open` and `close` of a small remote file cost with a local server. So a process that
//! opens and closes files keeps an *anchor* for each of a few entries: an additional descriptor of the same
//! placeholder, among our own (`own.rs`). A file that is opened takes over such an entry and gets a
//! duplicate of the anchor; closing the file closes only the duplicate. The last descriptor of the
//! placeholder stays open, the keeper is told nothing, and the entry remains this process's.
//!
//! Once another process may have got a descriptor, only the kernel knows which close is the last: the
//! anchor is then dropped when this process has closed its last descriptor of the file ([`closed`]). `exec`
//! closes anchors, and so do the children of forks (with all our own descriptors).
//!
//! A file that is closed this way without telling the server (see `closing.rs`) is found by the keeper,
//! which regularly checks the entries. It does so only for a while after something happened, and anchors
//! are kept only then ([`towline_instance::State::is_watched`]).

use crate::descriptors::{Open, Own};
use crate::guard::checked;
use crate::{own, start};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use towline_instance::{State, Taken};

/// Maximum number of anchors of a process.
const ANCHORS_MAX: usize = 4;
/// The word for no anchor.
const NONE: u64 = 0;

/// The anchors. They have no lock, as a fork may leave one taken: each word holds an [`Anchor`], and only
/// the thread that marks it busy, or that has the busy file's last descriptor, changes it next.
static ANCHORS: [AtomicU64; ANCHORS_MAX] = [const { AtomicU64::new(NONE) }; ANCHORS_MAX];

#[derive(Clone, Copy)]
struct Anchor {
    number: usize,
    fd: i32,
    /// A file is open, and the anchor is an additional descriptor of it.
    busy: bool,
}

impl Anchor {
    fn word(self) -> u64 {
        // Our own descriptors are never zero, so neither is this.
        (self.fd as u64) << 32 | (self.number as u64) << 1 | u64::from(self.busy)
    }

    fn of(word: u64) -> Option<Self> {
        let number = (word as u32 >> 1) as usize;
        (word != NONE).then_some(Self { number, fd: (word >> 32) as i32, busy: word & 1 != 0 })
    }
}

/// Returns the anchor of an entry, and its place.
fn find(number: usize) -> Option<(&'static AtomicU64, Anchor)> {
    let at = |place: &'static AtomicU64| {
        let anchor = Anchor::of(place.load(Ordering::Acquire))?;
        (anchor.number == number).then_some((place, anchor))
    };
    ANCHORS.iter().find_map(at)
}

/// Duplicates a descriptor to the lowest free number.
fn duplicate(fd: i32, cloexec: bool) -> Result<i32, i32> {
    let command = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    let arguments = [fd as usize, command as usize, 0, 0, 0, 0];
    // SAFETY: a plain system call.
    unsafe { checked(libc::SYS_fcntl, arguments) }.map(|fd| fd as i32)
}

/// Returns true if the keeper checks the entries; it then sees the caller's previous changes to an entry.
fn is_watched() -> bool {
    fence(Ordering::SeqCst);
    start::state().is_some_and(|state: &State| state.is_kept() && state.is_watched())
}

/// Returns a descriptor and an entry for a file that is about to be opened; `None` if the entry must be a new
/// one.
///
/// # Errors
/// `EMFILE`.
pub(crate) fn take(cloexec: bool) -> Result<Option<(usize, i32)>, i32> {
    for place in &ANCHORS {
        let word = place.load(Ordering::Acquire);
        let Some(anchor) = Anchor::of(word).filter(|anchor| !anchor.busy) else { continue };
        // It must be closed on the server, and no other thread may still be in a call on its last file.
        let entry = start::state().and_then(|state| state.entry(anchor.number));
        if !entry.is_some_and(|entry| entry.taken() == Taken::Closed && !entry.is_locked()) {
            continue;
        }
        let busy = Anchor { busy: true, ..anchor }.word();
        if place.compare_exchange(word, busy, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let fd = duplicate(anchor.fd, cloexec);
            return fd
                .inspect_err(|_| place.store(word, Ordering::Release))
                .map(|fd| Some((anchor.number, fd)));
        }
    }
    Ok(None)
}

/// Called when the program is about to close its last descriptor of a remote file: makes an anchor if that
/// pays.
pub(crate) fn closing(open: Open, fd: i32) {
    if open.entry.shared.load(Ordering::Relaxed) != 0
        || !is_watched()
        || find(open.number).is_some()
    {
        return;
    }
    let Some(place) = ANCHORS.iter().find(|place| place.load(Ordering::Relaxed) == NONE) else {
        return;
    };
    let Ok(fd) = own::duplicate_if_room(fd, Own::Connection) else { return };
    let anchor = Anchor { number: open.number, fd, busy: true };
    open.entry.anchored.store(1, Ordering::Release);
    let put = place.compare_exchange(NONE, anchor.word(), Ordering::AcqRel, Ordering::Relaxed);
    if put.is_err() {
        open.entry.anchored.store(0, Ordering::Release);
        own::close(fd);
    }
}

/// Called when this process has closed its last descriptor of a file, or is about to.
pub(crate) fn closed(open: Open) {
    let Some((place, anchor)) = find(open.number) else { return };
    // If the file was shared, or the keeper does not check the entries, the kernel must report the close.
    if open.is_there() && open.entry.shared.load(Ordering::Relaxed) == 0 && is_watched() {
        place.store(Anchor { busy: false, ..anchor }.word(), Ordering::Release);
    } else {
        place.store(NONE, Ordering::Release);
        if open.is_there() {
            open.entry.anchored.store(0, Ordering::Release);
        }
        own::close(anchor.fd);
    }
}

/// Forgets the anchors, as our own descriptors are closed: in the child of a fork, or for the program's
/// use.
pub(crate) fn disown() {
    for place in &ANCHORS {
        place.store(NONE, Ordering::Release);
    }
}
