//! An exported disk.

use crate::rate::Meters;
use crate::writers::{Phase, Writers};
use crate::{Changes, ClientKey, Delivery, Meter, RateLimit, Shape};
use parking_lot::{Condvar, Mutex};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_store::{BlockStore, Continuity, Geometry, Now, ZeroHow};

const EROFS: i32 = 30;

/// An exported disk: its back end and the state that all connections share.
#[derive(Debug)]
pub struct Disk {
    /// Name of the export.
    pub name: String,
    /// Text for humans.
    pub description: String,
    /// The back end.
    pub store: Arc<dyn BlockStore>,
    /// Changes are refused, even if the back end allows them.
    pub read_only: bool,
    /// How its reads are delivered.
    pub delivery: Delivery,
    /// Blocks and queue depth that override those of the back end.
    pub shape: Shape,
    /// Changes since the server started to serve the disk, through any export of the same bytes.
    pub changes: Arc<Changes>,
    /// Identifies the contents: a different number means a different disk, also after a restart.
    pub identity: u64,
    /// Writes beyond the end would make the back end longer.
    writes_extend: bool,
    state: Arc<State>,
    meters: Arc<Meters>,
    failures: Option<Arc<dyn Failures>>,
}

/// Remembers, beyond the end of the server, which disks had a failed flush. Data lost in that flush stays
/// lost for clients that return after a restart, even though the new server's flushes succeed.
pub trait Failures: std::fmt::Debug + Send + Sync {
    /// Returns the epoch that a disk has since its flush failed, if one did.
    fn epoch(&self, identity: u64) -> Option<u64>;
    /// Records that a flush of this disk failed, and the epoch that follows.
    fn note(&self, identity: u64, epoch: u64);
}

/// State shared by all exports of the same bytes, whatever their options.
#[derive(Debug, Default)]
struct State {
    epoch: AtomicU64,
    /// The largest size that a client was told.
    told: AtomicU64,
    failed: AtomicBool,
    /// The epoch after a failure is forgiven. Locked to fail and to forgive.
    next_epoch: Mutex<u64>,
    flushes: Mutex<Flushes>,
    flushed: Condvar,
    resizing: Mutex<()>,
    writers: Writers,
}

/// Flushes of the back end, which run one at a time. They are numbered from 1.
#[derive(Debug, Default)]
struct Flushes {
    running: bool,
    /// How many have begun.
    begun: u64,
    done: u64,
    /// Number of the last one that failed.
    failed: u64,
}

const EIO: i32 = 5;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

impl Disk {
    /// Creates an export of a back end.
    #[must_use]
    pub fn new(name: &str, description: &str, store: Arc<dyn BlockStore>, read_only: bool) -> Self {
        let read_only = read_only || store.geometry().read_only;
        let Continuity { identity, epoch } = store
            .continuity()
            .unwrap_or_else(|| Continuity { identity: random(), epoch: random() });
        Self {
            writes_extend: store.writes_extend(),
            name: name.to_owned(),
            description: description.to_owned(),
            store,
            read_only,
            delivery: Delivery::default(),
            shape: Shape::default(),
            changes: Arc::default(),
            identity,
            state: Arc::new(State { epoch: AtomicU64::new(epoch), ..State::default() }),
            meters: Arc::default(),
            failures: None,
        }
    }

    /// Keeps the disk's failures in `failures` and applies those already recorded. Call this first.
    #[must_use]
    pub fn remembered(self, failures: Arc<dyn Failures>) -> Self {
        if let Some(epoch) = failures.epoch(self.identity) {
            self.state.epoch.store(epoch, Ordering::Release);
        }
        Self { failures: Some(failures), ..self }
    }

    /// Makes this export replace another one that may still be in use. Limits apply to the clients of both;
    /// if both have the same bytes, they also share changes and failures.
    #[must_use]
    pub fn in_place_of(self, other: &Self) -> Self {
        let this = Self { meters: other.meters.clone(), ..self };
        if !Arc::ptr_eq(&this.store, &other.store) && this.identity != other.identity {
            return this;
        }
        let (changes, state) = (other.changes.clone(), other.state.clone());
        Self { changes, state, identity: other.identity, ..this }
    }

    /// Makes this export and another one of the same bytes tell the changes that clients make through either.
    #[must_use]
    pub fn beside(self, other: &Self) -> Self {
        match self.identity == other.identity {
            true => Self { changes: other.changes.clone(), ..self },
            false => self,
        }
    }

    /// Sets how reads are delivered.
    #[must_use]
    pub fn delivered(self, delivery: Delivery) -> Self {
        Self { delivery, ..self }
    }

    /// Sets blocks and queue depth.
    ///
    /// # Errors
    /// As [`Shape::check`].
    pub fn shaped(self, shape: Shape) -> io::Result<Self> {
        shape.check(self.store.geometry())?;
        Ok(Self { shape, ..self })
    }

    /// Limits each client from now on, also for the exports that this one replaces.
    pub fn set_limit(&self, limit: RateLimit) {
        self.meters.set(limit);
    }

    /// Returns true if clients are limited at present.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.meters.are_limited()
    }

    /// Returns the meter of this client; keep it while the client is connected.
    #[must_use]
    pub fn meter(&self, client: ClientKey) -> Arc<Meter> {
        self.meters.of(client)
    }

    /// Returns the geometry that clients see.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shape.of(self.store.geometry())
    }

    /// [`Self::geometry`] for a client, which takes the size for that of the disk from now on.
    #[must_use]
    pub fn told_geometry(&self) -> Geometry {
        let geometry = self.geometry();
        self.state.told.fetch_max(geometry.size, Ordering::Relaxed);
        geometry
    }

    /// Returns true if a client may take `end` for inside the disk, although it is not, as the disk has shrunk.
    #[must_use]
    pub fn was_inside(&self, end: u64) -> bool {
        end <= self.state.told.load(Ordering::Relaxed)
    }

    /// Returns true if a flush or durable write has failed. The kernel has then dropped what it could not
    /// write, so the contents are uncertain. All changes are refused until an operator acts.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.state.failed.load(Ordering::Acquire)
    }

    /// Writes if that needs no waiting, as [`BlockStore::write_now`]. Does not make the disk longer, and marks
    /// it as failed as [`Disk::note_durable_write`] does.
    pub fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        let end = offset + data.len() as u64;
        let phase = match self.begin_write(end) {
            Ok(phase) => phase,
            Err(error) => return Now::Done(Err(error)),
        };
        let now = self.store.write_now(offset, data, durable);
        self.end_write(phase);
        match now {
            Now::Done(result) if durable => Now::Done(self.note_durable_write(end, result)),
            now => now,
        }
    }

    /// Makes a range read as zeros, without making the disk longer.
    ///
    /// # Errors
    /// As [`BlockStore::zero`]; `EIO` beyond the end.
    pub fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        let phase = self.begin_write(offset + length)?;
        // Whoever makes the disk shorter waits for it, even if it panics.
        let result = catch_unwind(AssertUnwindSafe(|| self.store.zero(offset, length, how)));
        self.end_write(phase);
        result.unwrap_or_else(|_| Err(io::Error::from_raw_os_error(EIO)))
    }

    /// Begins a write of the back end up to byte `end`; [`Disk::end_write`] must follow.
    ///
    /// # Errors
    /// `EIO`: the disk ends before, or is about to.
    pub(crate) fn begin_write(&self, end: u64) -> io::Result<Option<Phase>> {
        let phase = self.writes_extend.then(|| self.state.writers.begin());
        // Read in this order, since the limit goes when the size has changed.
        let limit = self.state.writers.limit();
        if end > limit.min(self.store.geometry().size) {
            self.end_write(phase);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        Ok(phase)
    }

    pub(crate) fn end_write(&self, phase: Option<Phase>) {
        if let Some(phase) = phase {
            self.state.writers.end(phase);
        }
    }

    /// Marks the disk as failed if a durable write up to byte `end` failed. This applies neither to a lack of space, nor to
    /// a limit for the length of files (`ulimit -f`), nor to a write beyond the end of a disk that has shrunk: then
    /// nothing was written that could be lost, and if something was, the next flush reports it.
    pub fn note_durable_write(&self, end: u64, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result
            && !matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT | EFBIG))
            && end <= self.store.geometry().size
        {
            self.fail(error);
        }
        result
    }

    fn fail(&self, error: &io::Error) {
        let mut next_epoch = self.state.next_epoch.lock();
        if self.has_failed() {
            return;
        }
        *next_epoch = random();
        if let Some(failures) = &self.failures {
            failures.note(self.identity, *next_epoch);
        }
        self.state.failed.store(true, Ordering::Release);
        self.log_failure(error);
    }

    fn log_failure(&self, error: &io::Error) {
        // The engine has no logger; servers complain on standard error. `eprintln` panics if it cannot write,
        // and a full disk, which may cause the failure, can be the reason for that too.
        let text = format!(
            "towline: disk \"{}\": a flush failed ({error}): what was written before may be lost; \
             serving it read-only until the server is told to read its configuration again (HUP) \
             or restarted\n",
            self.name
        );
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// Changes the size to `size` bytes; zero takes over the size that the back end has now. A disk becomes
    /// shorter when the writes under way are done: one beyond the new end would make a file long again, and
    /// the bytes would not be zeroes when the disk grows.
    ///
    /// # Errors
    /// As [`BlockStore::resize`]; `EROFS` if changes are refused; `EINVAL` if the size is not a multiple of
    /// the block; `EBUSY` while somebody else resizes the disk.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        if size > 0 && (self.read_only || self.has_failed()) {
            return Err(io::Error::from_raw_os_error(EROFS));
        }
        if !size.is_multiple_of(self.shape.block.max(1).into()) {
            return Err(io::Error::from_raw_os_error(EINVAL));
        }
        if size == 0 {
            return self.store.look().map(|_| ());
        }
        // Each that waits occupies a thread.
        let Some(_one_at_a_time) = self.state.resizing.try_lock() else {
            return Err(io::Error::from_raw_os_error(EBUSY));
        };
        let before = self.store.look()?;
        if size >= before {
            return self.store.resize(size);
        }
        // If the disk grows again, these bytes are zeroes.
        self.changes.note(size, before - size);
        self.state.writers.shorten(size, || self.store.resize(size))
    }

    /// Allows changes again, after an operator has acted.
    pub fn forgive(&self) {
        let next_epoch = self.state.next_epoch.lock();
        if self.has_failed() {
            // Unflushed changes may be lost, and the clients that made them must learn of it.
            self.state.epoch.store(*next_epoch, Ordering::Release);
            self.state.failed.store(false, Ordering::Release);
        }
    }

    /// Returns the epoch, which changes when answered but unflushed changes may have been lost.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.state.epoch.load(Ordering::Acquire)
    }

    /// Makes everything written before the call durable.
    ///
    /// Callers that arrive while a flush runs share the next one, because the running one may have begun
    /// before their writes. Two flushes never run at once, since the kernel reports a failure to only one of
    /// them.
    ///
    /// # Errors
    /// The device's error; then `EIO` until [`Disk::forgive`].
    pub fn flush(&self) -> io::Result<()> {
        let mut flushes = self.state.flushes.lock();
        let mine = flushes.begun + 1;
        while flushes.done < mine {
            if flushes.running {
                self.state.flushed.wait(&mut flushes);
                continue;
            }
            if self.has_failed() {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            flushes.running = true;
            flushes.begun += 1;
            let number = flushes.begun;
            drop(flushes);
            // After a panic the others must not wait forever, and it is unknown what was flushed.
            let result = catch_unwind(AssertUnwindSafe(|| self.store.flush()))
                .unwrap_or_else(|_| Err(io::Error::from_raw_os_error(EIO)))
                .inspect_err(|error| self.fail(error));
            flushes = self.state.flushes.lock();
            flushes.running = false;
            flushes.done = number;
            if result.is_err() {
                flushes.failed = number;
            }
            self.state.flushed.notify_all();
            if number >= mine {
                return result;
            }
        }
        // A flush by another thread covered this call.
        match flushes.failed >= mine {
            true => Err(io::Error::from_raw_os_error(EIO)),
            false => Ok(()),
        }
    }

    /// Returns the epoch that follows when the disk's failure is forgiven; if it has not failed, its epoch.
    #[must_use]
    pub fn next_epoch(&self) -> u64 {
        if !self.has_failed() {
            return self.epoch();
        }
        let next_epoch = self.state.next_epoch.lock();
        // It may have been forgiven before it was locked.
        if self.has_failed() { *next_epoch } else { self.epoch() }
    }

    /// Like [`Disk::flush`], for a front whose protocol has no epochs: fails also if changes made under
    /// `epoch` may be lost, because the disk has failed since and was forgiven.
    ///
    /// # Errors
    /// As [`Disk::flush`].
    pub fn flush_since(&self, epoch: u64) -> io::Result<()> {
        self.flush()?;
        // Afterwards: it may have been forgiven while the flush waited.
        if self.epoch() == epoch { Ok(()) } else { Err(io::Error::from_raw_os_error(EIO)) }
    }
}

/// Returns a number that is practically unique.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
