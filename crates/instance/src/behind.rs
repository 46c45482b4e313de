//! Writes behind: data that programs have written to files of far servers, and that the keeper sends.
//!
//! A process copies what it writes to the end of a [`Queue`], a file in the run's directory, and goes on. A thread
//! of the keeper sends several of these writes together, none of which overlap ([`Queue::add`]). So what a program has
//! written reaches the server even if the program is killed. Before a process of the run asks that server for
//! anything, it waits until all that was in the queue is done ([`Behind::wait`]).
//!
//! There is a queue for a server once a process has asked for it ([`Behind::ask`]); it has the number of the first
//! mount of this server. Its records have numbers, too, which wrap around. What tells whether there are any is in the
//! shared state, so that processes that do not write need not map the queue.
#![allow(unsafe_code)]

use crate::lock::{Holder, Lock, has_ended};
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use std::cell::UnsafeCell;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of all data in a queue.
const DATA_BYTES: usize = 8 << 20;
/// Maximum number of records in a queue.
const RECORDS: usize = 1024;
/// Maximum number of bytes of a record.
pub const RECORD_BYTES_MAX: usize = 256 << 10;
/// The offset of records that are written at the end of their file: no file has it.
const AT_END: u64 = u64::MAX;
/// How often who waits looks whether the keeper is still there.
const LOOK: Duration = Duration::from_millis(500);

/// What the shared state tells of the queue of a server.
#[repr(C)]
pub(crate) struct Counts {
    /// A value of [`Stage`].
    stage: AtomicU32,
    /// Changes whenever the keeper's thread has something to do.
    bell: AtomicU32,
    /// Number of records ever added, and of those done: all before it are.
    added: AtomicU32,
    done: AtomicU32,
    /// How many more bytes may be written to the mount of this number until the keeper has asked again how much room
    /// there is.
    room: AtomicI64,
    /// The keeper's process, and its user, as whom it writes.
    keeper: AtomicU32,
    user: AtomicU32,
    /// How long a short request takes, in microseconds.
    trip: AtomicU32,
    /// Nonzero while the keeper's thread sleeps, or is about to.
    sleeps: AtomicU32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Stage {
    Unused = 0,
    Wanted = 1,
    /// The keeper is about to begin.
    Begun = 2,
    Ready = 3,
    /// Writes are waited for.
    Refused = 4,
    /// The keeper has ended.
    Abandoned = 5,
}

/// The mapped file of a queue.
#[repr(C)]
struct Area {
    /// Held while a record is added.
    lock: Lock,
    /// How many bytes may be in the queue.
    limit: AtomicU64,
    /// Where the records of the queue are, as far as that is known. Changed under the lock.
    covered: Covered,
    records: [Record; RECORDS],
    data: Data,
}

#[repr(C, align(4096))]
struct Data([UnsafeCell<u8>; DATA_BYTES]);

/// A file and a range of it to which all records of the queue belong. While a file is written in order, no record has to
/// be looked at.
#[repr(C)]
struct Covered {
    /// Zero if they belong to several files.
    inode: AtomicU64,
    /// The handle of those that are appended.
    handle: AtomicU64,
    /// [`AT_END`] if all are appended.
    begin: AtomicU64,
    end: AtomicU64,
}

/// A record of the queue.
#[repr(C)]
struct Record {
    mount: AtomicU32,
    entry: AtomicU32,
    handle: AtomicU64,
    inode: AtomicU64,
    offset: AtomicU64,
    /// Where its data begins: a number that grows with each byte, or with the end of the memory.
    from: AtomicU64,
    length: AtomicU64,
}

/// Where data is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the mount.
    pub mount: usize,
    /// Table entry of the open file, which stays open until the write is done.
    pub entry: usize,
    /// Handle of the file.
    pub handle: u64,
    /// `Attr::identity` of the file.
    pub inode: u64,
    /// Offset in the file, in bytes; `None` for its end, wherever that is by then.
    pub offset: Option<u64>,
}

/// The keeper has ended; what was in the queue is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abandoned;

/// What all processes of the run know of the queue of a server.
#[derive(Clone, Copy)]
pub struct Behind<'a>(&'a Counts);

impl<'a> Behind<'a> {
    pub(crate) fn new(counts: &'a Counts) -> Self {
        Self(counts)
    }

    fn is_at(&self, stage: Stage) -> bool {
        self.0.stage.load(Ordering::Acquire) == stage as u32
    }

    fn change(&self, from: Stage, to: Stage) -> bool {
        let (from, to) = (from as u32, to as u32);
        self.0.stage.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns true until somebody asks for a queue.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.is_at(Stage::Unused)
    }

    /// Asks the keeper for a queue, for a server that answers a short request in this time. The caller must wake the
    /// keeper if this returns true.
    #[must_use]
    pub fn ask(&self, trip: Duration) -> bool {
        let micros = u32::try_from(trip.as_micros()).unwrap_or(u32::MAX);
        self.0.trip.store(micros, Ordering::Relaxed);
        self.is_unused() && self.change(Stage::Unused, Stage::Wanted)
    }

    /// For the keeper: notes how long an answer has taken.
    pub fn notice_trip(&self, took: Duration) {
        let micros = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        self.0.trip.fetch_min(micros, Ordering::Relaxed);
    }

    /// Returns how long a short request takes, as far as is known.
    #[must_use]
    pub fn trip(&self) -> Duration {
        Duration::from_micros(self.0.trip.load(Ordering::Relaxed).into())
    }

    /// For the keeper: returns true, once, if it is to make a queue.
    #[must_use]
    pub fn take_wish(&self) -> bool {
        self.is_at(Stage::Wanted) && self.change(Stage::Wanted, Stage::Begun)
    }

    /// Returns true once there is a queue.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.is_at(Stage::Ready)
    }

    /// Says that there is a queue, served by this process of this user.
    pub fn begin(&self, keeper: u32, user: u32) {
        self.0.keeper.store(keeper, Ordering::Relaxed);
        self.0.user.store(user, Ordering::Relaxed);
        self.change(Stage::Begun, Stage::Ready);
    }

    /// Says that there will be none, or that nothing more is to be added.
    pub fn refuse(&self) {
        let _ =
            self.change(Stage::Begun, Stage::Refused) || self.change(Stage::Ready, Stage::Refused);
    }

    /// Returns the user as whom is written.
    #[must_use]
    pub fn user(&self) -> u32 {
        self.0.user.load(Ordering::Relaxed)
    }

    /// Sets how many more bytes may be written.
    pub fn set_room(&self, bytes: i64) {
        self.0.room.store(bytes, Ordering::Relaxed);
    }

    /// Returns how many more bytes may be written.
    #[must_use]
    pub fn room(&self) -> i64 {
        self.0.room.load(Ordering::Relaxed)
    }

    /// Takes this many bytes off the room. Returns false if there are fewer: the caller must nudge the keeper to look
    /// again.
    #[must_use]
    pub fn take_room(&self, bytes: usize) -> bool {
        let bytes = bytes as i64;
        let taken = |room: i64| (room >= bytes).then(|| room - bytes);
        self.0.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }

    /// Returns true if everything in the queue is done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.done.load(Ordering::Acquire) == self.0.added.load(Ordering::Acquire)
    }

    /// Returns the number of records added so far, which is the number of the next one.
    #[must_use]
    pub fn added(&self) -> u32 {
        self.0.added.load(Ordering::Acquire)
    }

    /// Returns the number of the first record that is not done.
    #[must_use]
    pub fn done(&self) -> u32 {
        self.0.done.load(Ordering::Acquire)
    }

    /// Returns true once all records before this number are done.
    #[must_use]
    pub fn is_done(&self, before: u32) -> bool {
        is_at_least(self.0.done.load(Ordering::Acquire), before)
    }

    /// Waits until all records are done that have been added so far. Asks now and then whether the queue is still
    /// served ([`Queue::is_served`]).
    ///
    /// # Errors
    /// If the keeper has ended before.
    pub fn wait(&self, is_served: impl Fn() -> bool) -> Result<(), Abandoned> {
        let before = self.added();
        loop {
            let done = self.0.done.load(Ordering::Acquire);
            if is_at_least(done, before) {
                return Ok(());
            }
            if self.is_at(Stage::Abandoned) {
                return Err(Abandoned);
            }
            sleep_while(&self.0.done, done, Some(LOOK));
            if self.0.done.load(Ordering::Acquire) == done && !is_served() {
                self.0.stage.store(Stage::Abandoned as u32, Ordering::Release);
            }
        }
    }

    /// For the keeper: notes that all records before this number are done.
    pub fn finish(&self, before: u32) {
        self.0.done.store(before, Ordering::Release);
        wake(&self.0.done);
    }

    /// For the keeper: a number for [`Self::wait_for_news`], to be had before looking whether there are any.
    #[must_use]
    pub fn news(&self) -> u32 {
        self.0.bell.load(Ordering::Acquire)
    }

    /// For the keeper: waits until something has been added since [`Self::news`] was called, or
    /// [`Self::nudge`] was.
    pub fn wait_for_news(&self, seen: u32) {
        // Either we see that the bell has changed, or who changes it sees this.
        self.0.sleeps.store(1, Ordering::SeqCst);
        sleep_while(&self.0.bell, seen, None);
        self.0.sleeps.store(0, Ordering::Relaxed);
    }

    /// Wakes the keeper's thread.
    pub fn nudge(&self) {
        self.0.bell.fetch_add(1, Ordering::SeqCst);
        if self.0.sleeps.load(Ordering::SeqCst) != 0 {
            wake(&self.0.bell);
        }
    }
}

/// The queue of a server.
pub struct Queue {
    area: &'static Area,
    /// The keeper's lock of the file, which shows that it is served.
    _served: Option<OwnedFd>,
}

// SAFETY: all fields are atomics, but for the data, which is used through pointers only.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Queue {
    /// Makes the queue of this number in the run's directory, to be served by this process. All its memory is there
    /// from then on: nobody meets a full file system by storing to it.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn create(directory: &[u8], number: usize) -> io::Result<Self> {
        let path = path(directory, number);
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
        let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
        let length = size_of::<Area>() as u64;
        let made = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length)
            .and_then(|()| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive))
            .map_err(io::Error::from)
            .and_then(|()| map(&file));
        let area = made.inspect_err(|_| {
            let _ = rustix::fs::unlink(&path);
        })?;
        Ok(Self { area, _served: Some(file) })
    }

    /// Maps the queue of this number.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn open(directory: &[u8], number: usize) -> io::Result<Self> {
        let file = rustix::fs::open(
            path(directory, number),
            OFlags::RDWR | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        if rustix::fs::fstat(&file)?.st_size != size_of::<Area>() as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { area: map(&file)?, _served: None })
    }

    /// Returns false if the keeper that has made the queue of this number has ended.
    #[must_use]
    pub fn is_served(directory: &[u8], number: usize) -> bool {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        // Who may not open it, or cannot now, cannot tell.
        let Ok(file) = rustix::fs::open(path(directory, number), flags, Mode::empty()) else {
            return true;
        };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Frees the lock for a program that was just executed: a thread of the previous one may have had it. No other thread
    /// may be using the queue yet.
    pub fn leave_to_new_program(&self, me: Holder) {
        drop(self.area.lock.left(me));
    }

    /// Sets how many bytes may be in the queue; at least [`RECORD_BYTES_MAX`] are.
    pub fn limit(&self, bytes: usize) {
        let bytes = bytes.clamp(RECORD_BYTES_MAX, DATA_BYTES);
        self.area.limit.store(bytes as u64, Ordering::Relaxed);
    }

    /// Adds the beginning of `data`, for process `me`, which must be in the keeper's PID namespace. Waits if the queue is
    /// full. Returns the number of bytes added, which is at most [`RECORD_BYTES_MAX`]; `None` if the caller has to wait for
    /// this write, since
    ///
    /// * the place overlaps with one in the queue: writes of the same place would wait for each other there, and
    ///   everybody for them all. What is appended may follow what was by the same descriptor;
    /// * the keeper has ended or wants no more;
    /// * a process that was stopped keeps others from adding.
    #[must_use]
    pub fn add(&self, behind: Behind<'_>, me: Holder, place: &Place, data: &[u8]) -> Option<usize> {
        let data = &data[..data.len().min(RECORD_BYTES_MAX)];
        loop {
            if !behind.is_ready() || has_ended(behind.0.keeper.load(Ordering::Relaxed)) {
                return None;
            }
            let lock = self.area.lock.lock_soon(me)?;
            let (added, done) = (behind.added(), behind.0.done.load(Ordering::Acquire));
            if self.overlaps(done, added, place, data.len()) {
                return None;
            }
            if let Some(from) = self.find_room(added, done, data.len()) {
                self.store(from, data);
                self.area.record(added).set(place, from, data.len());
                self.area.covered.add(place, data.len(), added == done);
                behind.0.added.store(added.wrapping_add(1), Ordering::Release);
                drop(lock);
                behind.nudge();
                return Some(data.len());
            }
            drop(lock);
            sleep_while(&behind.0.done, done, Some(LOOK));
        }
    }

    /// Returns true if one of these records overlaps with a write, or may: nobody knows where the end of a file is.
    fn overlaps(&self, done: u32, added: u32, place: &Place, length: usize) -> bool {
        if self.area.covered.is_beside(place, length) {
            return false;
        }
        let count = (added.wrapping_sub(done) as usize).min(RECORDS) as u32;
        (0..count).any(|at| {
            let (other, _, other_length) = self.area.record(done.wrapping_add(at)).get();
            let is_meant = match (place.offset, other.offset) {
                (Some(one), Some(other)) => {
                    one < other.saturating_add(other_length as u64)
                        && other < one.saturating_add(length as u64)
                }
                // What one descriptor appends keeps its order.
                (None, None) => other.handle != place.handle,
                _ => true,
            };
            is_meant && other.inode == place.inode
        })
    }

    /// Returns where data of this length can begin.
    fn find_room(&self, added: u32, done: u32, length: usize) -> Option<u64> {
        let count = added.wrapping_sub(done) as usize;
        if count == 0 {
            return Some(0);
        }
        if count >= RECORDS {
            return None;
        }
        let (_, begin, _) = self.area.record(done).get();
        let (_, last, last_length) = self.area.record(added.wrapping_sub(1)).get();
        let end = last.checked_add(last_length as u64)?;
        let left = DATA_BYTES - end as usize % DATA_BYTES;
        let from = if left < length { end.checked_add(left as u64)? } else { end };
        let limit = self.area.limit.load(Ordering::Relaxed).min(DATA_BYTES as u64);
        let used = from.checked_sub(begin)?.checked_add(length as u64)?;
        (used <= limit).then_some(from)
    }

    /// Copies data to the place that [`Self::find_room`] has found.
    fn store(&self, from: u64, data: &[u8]) {
        let at = from as usize % DATA_BYTES;
        assert!(at + data.len() <= DATA_BYTES, "`find_room` skips the end of the memory");
        // SAFETY: in range. Nobody else writes there, as this process has the lock, and the keeper reads only
        // what was added and is not done. Another process that breaks these rules can change the data only.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.area.data.at(at), data.len()) };
    }

    /// For the keeper: returns where a record that is not done yet is written, where its data begins, and its
    /// length; `None` if it was not added yet.
    #[must_use]
    pub fn get(&self, behind: Behind<'_>, number: u32) -> Option<(Place, u64, usize)> {
        (number != behind.added()).then(|| self.area.record(number).get())
    }

    /// For the keeper: appends the data of a record to `data`.
    pub fn load(&self, from: u64, length: usize, data: &mut Vec<u8>) {
        let at = from as usize % DATA_BYTES;
        let length = length.min(DATA_BYTES - at);
        data.reserve(length);
        // SAFETY: both are in range, and what is copied is initialized, as memory of a file. Processes of the run
        // do not change what is in the queue; one that does so nevertheless changes the data only.
        unsafe {
            let end = data.as_mut_ptr().add(data.len());
            std::ptr::copy_nonoverlapping(self.area.data.at(at).cast_const(), end, length);
            data.set_len(data.len() + length);
        }
    }
}

fn path(directory: &[u8], number: usize) -> PathBuf {
    Path::new(OsStr::from_bytes(directory)).join(format!("behind-{number}"))
}

/// Maps the file of a queue, which has the right length.
fn map(file: &OwnedFd) -> io::Result<&'static Area> {
    let (protection, at) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    // SAFETY: a new mapping, which is never unmapped.
    let area = unsafe {
        let length = size_of::<Area>();
        rustix::mm::mmap(at, length, protection, MapFlags::SHARED, file, 0)?.cast::<Area>()
    };
    // SAFETY: of this length and aligned to a page; zeroes are a valid value. All that changes is atomic or in cells.
    Ok(unsafe { &*area })
}

impl Area {
    fn record(&self, number: u32) -> &Record {
        &self.records[number as usize % RECORDS]
    }
}

impl Covered {
    fn get(&self) -> (u64, u64, u64) {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        (load(&self.inode), load(&self.begin), load(&self.end))
    }

    fn is_of(&self, handle: u64) -> bool {
        self.handle.load(Ordering::Relaxed) == handle
    }

    /// Adds a record; if `is_first`, all others are done.
    fn add(&self, place: &Place, length: usize, is_first: bool) {
        let begin = place.offset.unwrap_or(AT_END);
        let end = begin.saturating_add(length as u64);
        let new = match self.get() {
            _ if is_first => (place.inode, begin, end),
            // Both are appended, or neither is.
            (inode, from, to) if inode == place.inode && (from == AT_END) == (begin == AT_END) => {
                (inode, from.min(begin), to.max(end))
            }
            _ => (0, 0, 0),
        };
        self.inode.store(new.0, Ordering::Relaxed);
        self.handle.store(place.handle, Ordering::Relaxed);
        self.begin.store(new.1, Ordering::Relaxed);
        self.end.store(new.2, Ordering::Relaxed);
    }

    /// Returns true if a write surely does not overlap with any record.
    fn is_beside(&self, place: &Place, length: usize) -> bool {
        let (inode, from, to) = self.get();
        let is_outside = match place.offset {
            Some(begin) => {
                from != AT_END && (begin >= to || begin.saturating_add(length as u64) <= from)
            }
            None => from == AT_END && self.is_of(place.handle),
        };
        inode != 0 && inode == place.inode && is_outside
    }
}

impl Data {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0[offset].get()
    }
}

impl Record {
    fn set(&self, place: &Place, from: u64, length: usize) {
        self.mount.store(place.mount as u32, Ordering::Relaxed);
        self.entry.store(place.entry as u32, Ordering::Relaxed);
        self.handle.store(place.handle, Ordering::Relaxed);
        self.inode.store(place.inode, Ordering::Relaxed);
        self.offset.store(place.offset.unwrap_or(AT_END), Ordering::Relaxed);
        self.from.store(from, Ordering::Relaxed);
        self.length.store(length as u64, Ordering::Relaxed);
    }

    fn get(&self) -> (Place, u64, usize) {
        let place = Place {
            mount: self.mount.load(Ordering::Relaxed) as usize,
            entry: self.entry.load(Ordering::Relaxed) as usize,
            handle: self.handle.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
            offset: Some(self.offset.load(Ordering::Relaxed)).filter(|offset| *offset != AT_END),
        };
        let length = self.length.load(Ordering::Relaxed).min(RECORD_BYTES_MAX as u64);
        (place, self.from.load(Ordering::Relaxed), length as usize)
    }
}

/// Returns true if `number` is not before `least`.
fn is_at_least(number: u32, least: u32) -> bool {
    number.wrapping_sub(least) <= u32::MAX / 2
}

/// Sleeps while a word has this value, but no longer than this.
fn sleep_while(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.and_then(|limit| futex::Timespec::try_from(limit).ok());
    let _ = futex::wait(word, futex::Flags::empty(), value, limit.as_ref());
}

fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests;
