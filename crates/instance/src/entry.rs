//! An open file description, shared by all processes that have descriptors of it.

use crate::lock::{Holder, Lock, Locked};
use crate::position::Position;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Longest path that an entry remembers.
const PATH_BYTES: usize = 4096;

/// Values of [`Entry::taken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Taken {
    /// The entry is unused.
    Free = 0,
    /// The entry is an open file.
    Open = 1,
    /// Closed on the server; descriptors of it may still be open.
    Closed = 2,
    /// Its last descriptor is closed. The process that had it closes the file on the server with its next
    /// request, unless the keeper is faster.
    Leaving = 3,
}

/// Number of low bits of [`Entry::taken`]'s word that hold the use; the rest hold the tag of a leaving
/// entry.
const USE_BITS: u32 = 2;

/// A write to the file was waited for.
const WAITED: u32 = 1;
/// A program was told that a [write behind](crate::behind) has failed.
const TOLD: u32 = 2;
/// A write behind has failed with the error number in the low bits.
const FAILED: u32 = 1 << 16;

/// An open file description.
#[repr(C, align(64))]
pub struct Entry {
    taken: AtomicU32,
    /// `O_*` flags as opened, with later changes.
    pub flags: AtomicU32,
    /// Number of the mount.
    pub mount: AtomicU32,
    /// Nonzero once another process may hold descriptors of it.
    pub shared: AtomicU32,
    /// Handle in the protocol.
    pub handle: AtomicU64,
    position: Position,
    /// `st_mode` at open.
    pub mode: AtomicU32,
    /// Nonzero if its file system says only at a close what it could not store.
    pub settles: AtomicU32,
    /// What became of writes to it: [`WAITED`], [`TOLD`], or [`FAILED`] with an error number; zero before the
    /// first.
    writes: AtomicU32,
    lock: Lock,
    /// `Attr::identity` of the file.
    pub inode: AtomicU64,
    /// Nonzero while requested changes are unanswered. If the requesting process is killed, the server must
    /// still find the file open.
    pub unanswered: AtomicU32,
    /// Nonzero while its process may keep a descriptor of it that the program does not know of.
    pub anchored: AtomicU32,
    length: AtomicU32,
    path: [AtomicU8; PATH_BYTES],
}

impl Entry {
    /// Returns the current use of the entry.
    #[must_use]
    pub fn taken(&self) -> Taken {
        use_of(self.taken.load(Ordering::Acquire))
    }

    /// Changes the use from `from` to `to`; returns false if it was not `from`.
    #[must_use]
    pub fn change(&self, from: Taken, to: Taken) -> bool {
        self.swap(from as u32, to as u32)
    }

    /// Leaves an open file to [`Entry::close_left`] with the same `tag` (of which 30 bits count), or to the
    /// keeper. Returns false if it is not open.
    #[must_use]
    pub fn leave(&self, tag: u32) -> bool {
        self.swap(Taken::Open as u32, leaving(tag))
    }

    /// Returns the tag under which the entry was left; `None` if it is not left.
    #[must_use]
    pub fn leaving(&self) -> Option<u32> {
        let now = self.taken.load(Ordering::Acquire);
        (use_of(now) == Taken::Leaving).then_some(now >> USE_BITS)
    }

    /// Marks the entry closed if it was left under this tag; if true, the caller must close the file on the
    /// server.
    #[must_use]
    pub fn close_left(&self, tag: u32) -> bool {
        self.swap(leaving(tag), Taken::Closed as u32)
    }

    /// Marks the entry closed for the keeper once its last descriptor is closed; if true, the keeper must
    /// close the file on the server.
    #[must_use]
    pub fn close_abandoned(&self) -> bool {
        let now = self.taken.load(Ordering::Acquire);
        matches!(use_of(now), Taken::Open | Taken::Leaving) && self.swap(now, Taken::Closed as u32)
    }

    /// Marks the entry unused.
    pub(crate) fn free(&self) {
        self.taken.store(Taken::Free as u32, Ordering::Release);
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.taken.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Forgets what became of writes to the entry's previous file.
    pub fn forget_writes(&self) {
        self.writes.store(0, Ordering::Relaxed);
    }

    /// Notes that a write was waited for.
    pub fn has_waited(&self) {
        if self.writes.load(Ordering::Relaxed) == 0 {
            let _ = self.change_writes(|writes| (writes == 0).then_some(WAITED));
        }
    }

    /// Returns true if writes may be sent behind: one was waited for, and none has failed.
    #[must_use]
    pub fn may_write_behind(&self) -> bool {
        self.writes.load(Ordering::Acquire) == WAITED
    }

    /// Returns true if anything was written.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.writes.load(Ordering::Acquire) != 0
    }

    /// Notes that a write behind has failed. Returns false if a program still has to be told of another one.
    pub fn fail_write(&self, errno: i32) -> bool {
        let failed = FAILED | errno as u32 & (FAILED - 1);
        self.change_writes(|writes| (writes < FAILED).then_some(failed)).is_ok()
    }

    /// Returns true if a write behind has failed, and no program was told.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.writes.load(Ordering::Acquire) >= FAILED
    }

    /// Returns, once, the error number of a write behind that has failed.
    #[must_use]
    pub fn take_failure(&self) -> Option<i32> {
        let taken = self.change_writes(|writes| (writes >= FAILED).then_some(TOLD));
        taken.ok().map(|writes| (writes - FAILED) as i32)
    }

    fn change_writes(&self, how: impl FnMut(u32) -> Option<u32>) -> Result<u32, u32> {
        self.writes.fetch_update(Ordering::AcqRel, Ordering::Acquire, how)
    }

    /// Stores the path from the root of the export, cut at 4096 bytes.
    pub fn set_path(&self, path: &[u8]) {
        let path = &path[..path.len().min(PATH_BYTES)];
        for (to, from) in self.path.iter().zip(path) {
            to.store(*from, Ordering::Relaxed);
        }
        self.length.store(path.len() as u32, Ordering::Release);
    }

    /// Returns the path from the prefix.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        let length = (self.length.load(Ordering::Acquire) as usize).min(PATH_BYTES);
        self.path[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Returns true if the entry's path is `path` or lies below it.
    #[must_use]
    pub fn is_below(&self, path: &[u8]) -> bool {
        let length = self.length.load(Ordering::Acquire) as usize;
        let at = |place: usize| self.path[place].load(Ordering::Relaxed);
        (length == path.len()
            || (length > path.len() && length <= PATH_BYTES && at(path.len()) == b'/'))
            && path.iter().enumerate().all(|(place, byte)| at(place) == *byte)
    }

    /// Returns true if the entry's path is `path`.
    #[must_use]
    pub fn is(&self, path: &[u8]) -> bool {
        self.length.load(Ordering::Acquire) as usize == path.len() && self.is_below(path)
    }

    /// Takes the lock of the offset unless a live process has it.
    #[must_use]
    pub fn try_lock(&self, me: Holder) -> Option<Locked<'_>> {
        self.lock.try_lock(me)
    }

    /// Returns true while a process holds the lock of the offset.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.lock.is_locked()
    }

    /// Takes the lock of the offset for process `me`, also from a holder that has died or is stopped. What that was
    /// writing keeps its place.
    pub fn lock(&self, me: Holder) -> Locked<'_> {
        let locked = self.lock.lock(me);
        self.position.claim(&locked);
        locked
    }

    /// Frees the lock for a program that was just executed: a thread of the previous one may have had it.
    pub fn leave_to_new_program(&self, me: Holder) {
        if let Some(left) = self.lock.left(me) {
            self.position.claim(&left);
        }
    }

    /// Returns the file offset. It stays only under the lock.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.position.offset()
    }

    /// Sets the offset for a new file, or behind what was appended. Whoever has the lock goes on from here.
    pub fn put_offset(&self, offset: i64) {
        self.position.set(offset);
    }

    /// Announces that so many bytes, less than 2^31, are about to be written at the offset `from`. Returns false if that is
    /// not the offset any more, or the lock was taken over, as this process was stopped.
    #[must_use]
    pub fn begin(&self, locked: &Locked<'_>, from: i64, bytes: usize) -> bool {
        self.position.begin(locked, from, bytes as u64)
    }

    /// Moves the offset behind what was [begun](Self::begin), unless another process has taken the lock over and done so.
    pub fn end(&self, locked: &Locked<'_>, from: i64, bytes: usize, to: i64) {
        self.position.end(locked, from, bytes as u64, to);
    }

    /// Moves the offset. Returns false if `from` is not the offset any more, or the lock was taken over, as this process was
    /// stopped.
    #[must_use]
    pub fn set_offset(&self, locked: &Locked<'_>, from: i64, to: i64) -> bool {
        self.position.move_on(locked, from, to)
    }
}

fn use_of(word: u32) -> Taken {
    match word & ((1 << USE_BITS) - 1) {
        1 => Taken::Open,
        2 => Taken::Closed,
        3 => Taken::Leaving,
        _ => Taken::Free,
    }
}

fn leaving(tag: u32) -> u32 {
    Taken::Leaving as u32 | tag << USE_BITS
}
