//! Placeholders that this process keeps for its next files.
//!
//! To open and close a placeholder is a walk of its path for the kernel, and a message to the keeper:
//! more than all else that `open` and `close` of a small remote file cost on this machine. So a process
//! that opens and closes keeps an *anchor* for each of a few entries: one more descriptor of the same
//! placeholder, among our own (`own.rs`). A file that is opened takes such an entry and
//! gets a duplicate of the anchor, and closing it closes a duplicate: the last descriptor of the
//! placeholder stays, the keeper is told nothing, and the entry is still this process's.
//!
//! An anchor goes with the first descriptor that another process may have got, since then only the
//! kernel knows who closes last: it is let go of when this process has closed its last descriptor of the
//! file ([`closed`]). `exec` closes anchors, as do the children of forks (with all that is our own).
//!
//! A file that is closed this way and not told of to the server (see `closing.rs`) the keeper finds by
//! looking at the entries every few moments. It does so only for a while after something happened; an
//! anchor is kept only then ([`towline_instance::State::is_watched`]).

use crate::descriptors::{Open, Own};
use crate::guard::checked;
use crate::{own, start};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use towline_instance::{State, Taken};

/// Anchors of a process.
const ANCHORS_MAX: usize = 4;
/// No anchor.
const NONE: u64 = 0;

/// The anchors. Without a lock, as a fork may leave one behind: each word holds an [`Anchor`], and only
/// who changes it to busy, or has the busy file's last descriptor, changes it next.
static ANCHORS: [AtomicU64; ANCHORS_MAX] = [const { AtomicU64::new(NONE) }; ANCHORS_MAX];

#[derive(Clone, Copy)]
struct Anchor {
    number: usize,
    fd: i32,
    /// A file is open, and the anchor one more descriptor of it.
    busy: bool,
}

impl Anchor {
    fn word(self) -> u64 {
        // Own descriptors are never zero, so neither is this.
        (self.fd as u64) << 32 | (self.number as u64) << 1 | u64::from(self.busy)
    }

    fn of(word: u64) -> Option<Self> {
        let number = (word as u32 >> 1) as usize;
        (word != NONE).then_some(Self { number, fd: (word >> 32) as i32, busy: word & 1 != 0 })
    }
}

/// The anchor of an entry, and where it is.
fn find(number: usize) -> Option<(&'static AtomicU64, Anchor)> {
    let at = |place: &'static AtomicU64| {
        let anchor = Anchor::of(place.load(Ordering::Acquire))?;
        (anchor.number == number).then_some((place, anchor))
    };
    ANCHORS.iter().find_map(at)
}

/// The least free descriptor, as a duplicate.
fn duplicate(fd: i32, cloexec: bool) -> Result<i32, i32> {
    let command = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    let arguments = [fd as usize, command as usize, 0, 0, 0, 0];
    // SAFETY: a plain system call.
    unsafe { checked(libc::SYS_fcntl, arguments) }.map(|fd| fd as i32)
}

/// True when the keeper looks at the entries. What the caller has changed in one, it sees then.
fn is_watched() -> bool {
    fence(Ordering::SeqCst);
    start::state().is_some_and(|state: &State| state.is_kept() && state.is_watched())
}

/// A descriptor for a file that was just opened, and its entry; `None`: the entry has to be a new one.
///
/// # Errors
/// `EMFILE`.
pub(crate) fn take(cloexec: bool) -> Result<Option<(usize, i32)>, i32> {
    for place in &ANCHORS {
        let word = place.load(Ordering::Acquire);
        let Some(anchor) = Anchor::of(word).filter(|anchor| !anchor.busy) else { continue };
        // Closed on the server, and no other thread is still in a call on the file that it was.
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

/// The program is about to close this descriptor of a remote file, its last one: perhaps an anchor is
/// worth having.
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

/// This process has closed its last descriptor of a file, or is about to.
pub(crate) fn closed(open: Open) {
    let Some((place, anchor)) = find(open.number) else { return };
    // Of what was shared the kernel has to tell the keeper, and so where it does not look.
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

/// Our own descriptors are closed: in the child of a fork, or since the program wants their numbers.
pub(crate) fn disown() {
    for place in &ANCHORS {
        place.store(NONE, Ordering::Release);
    }
}
