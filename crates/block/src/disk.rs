//! A disk as it is exported.

use crate::rate::Meters;
use crate::{Changes, ClientKey, Delivery, Meter, RateLimit, Shape};
use parking_lot::{Condvar, Mutex};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_store::{BlockStore, Continuity, Geometry};

const EROFS: i32 = 30;

/// An exported disk: its back end, and what all connections have to know of each other.
#[derive(Debug)]
pub struct Disk {
    /// Name of the export.
    pub name: String,
    /// For humans.
    pub description: String,
    /// Where the bytes are.
    pub store: Arc<dyn BlockStore>,
    /// Refuse changes, whatever the back end could.
    pub read_only: bool,
    /// How its reads are delivered.
    pub delivery: Delivery,
    /// What clients are told in place of what the back end says.
    pub shape: Shape,
    /// What changed since the server began to serve it.
    pub changes: Arc<Changes>,
    /// Names its bytes: another number stands for other bytes, also after a restart.
    pub identity: u64,
    state: Arc<State>,
    meters: Arc<Meters>,
    failures: Option<Arc<dyn Failures>>,
}

/// Keeps beyond the end of the server which disks had a flush that failed: what was lost then is lost
/// for those who come back after a restart, too, though the new server's flushes succeed.
pub trait Failures: std::fmt::Debug + Send + Sync {
    /// The epoch under which a disk of this identity goes on since a flush of it failed, if one has.
    fn epoch(&self, identity: u64) -> Option<u64>;
    /// A flush of it failed; it will go on under this epoch.
    fn note(&self, identity: u64, epoch: u64);
}

/// What all have to agree on who use the same bytes, also by exports with other options.
#[derive(Debug, Default)]
struct State {
    epoch: AtomicU64,
    failed: AtomicBool,
    /// The epoch under which it goes on after it had failed. Locked to fail and to forgive.
    next_epoch: Mutex<u64>,
    flushes: Mutex<Flushes>,
    flushed: Condvar,
    resizing: Mutex<()>,
}

/// Flushes of the back end, which run one at a time. They are numbered from 1.
#[derive(Debug, Default)]
struct Flushes {
    running: bool,
    begun: u64,
    done: u64,
    /// The last one that failed.
    failed: u64,
}

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EDQUOT: i32 = 122;

impl Disk {
    /// Exports a back end.
    #[must_use]
    pub fn new(name: &str, description: &str, store: Arc<dyn BlockStore>, read_only: bool) -> Self {
        let read_only = read_only || store.geometry().read_only;
        let Continuity { identity, epoch } = store
            .continuity()
            .unwrap_or_else(|| Continuity { identity: random(), epoch: random() });
        Self {
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

    /// The same, with its failures kept there, and with those that are. To be called first.
    #[must_use]
    pub fn remembered(self, failures: Arc<dyn Failures>) -> Self {
        if let Some(epoch) = failures.epoch(self.identity) {
            self.state.epoch.store(epoch, Ordering::Release);
        }
        Self { failures: Some(failures), ..self }
    }

    /// The same, in place of another export that may still be in use: its limits hold for the clients of both, and if their
    /// bytes are the same, so is what is known of them.
    #[must_use]
    pub fn in_place_of(self, other: &Self) -> Self {
        let this = Self { meters: other.meters.clone(), ..self };
        if !Arc::ptr_eq(&this.store, &other.store) && this.identity != other.identity {
            return this;
        }
        let (changes, state) = (other.changes.clone(), other.state.clone());
        Self { changes, state, identity: other.identity, ..this }
    }

    /// The same, with its reads delivered in this way.
    #[must_use]
    pub fn delivered(self, delivery: Delivery) -> Self {
        Self { delivery, ..self }
    }

    /// The same, with these blocks and this depth.
    ///
    /// # Errors
    /// As [`Shape::check`].
    pub fn shaped(self, shape: Shape) -> io::Result<Self> {
        shape.check(self.store.geometry())?;
        Ok(Self { shape, ..self })
    }

    /// From now on each client may ask this much of it, and of what it is in place of.
    pub fn set_limit(&self, limit: RateLimit) {
        self.meters.set(limit);
    }

    /// True when clients are limited at present.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.meters.are_limited()
    }

    /// What measures this client; keep it while the client is connected.
    #[must_use]
    pub fn meter(&self, client: ClientKey) -> Arc<Meter> {
        self.meters.of(client)
    }

    /// What it is like, as clients see it.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shape.of(self.store.geometry())
    }

    /// A flush failed: the kernel has dropped what it could not write, so that nobody knows what
    /// is on the disk. All changes are refused until an operator has looked.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.state.failed.load(Ordering::Acquire)
    }

    /// Remembers that a durable write failed. Where there was no space nothing was written that
    /// could be lost; should something have been, the next flush tells.
    pub fn note_durable_write(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result
            && !matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT))
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
        // The engine has no logger of its own; standard error is where servers complain. `eprintln`
        // panics where it cannot write, which a full disk may be the reason of.
        let text = format!(
            "towline: disk \"{}\": a flush failed ({error}): what was written before may be lost; \
             serving it read-only until the server is told to read its configuration again (HUP) \
             or restarted\n",
            self.name
        );
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// Makes it so many bytes long; zero: as long as what is behind it has become.
    ///
    /// # Errors
    /// As [`BlockStore::resize`]; `EROFS` when changes are refused; `EINVAL` for a part of a block.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        if size > 0 && (self.read_only || self.has_failed()) {
            return Err(io::Error::from_raw_os_error(EROFS));
        }
        if !size.is_multiple_of(self.shape.block.max(1).into()) {
            return Err(io::Error::from_raw_os_error(EINVAL));
        }
        let _one_at_a_time = self.state.resizing.lock();
        let before = self.store.look()?;
        if size == 0 {
            return Ok(());
        }
        if size < before {
            // Should it grow again, these bytes have become zeroes.
            self.changes.note(size, before - size);
        }
        self.store.resize(size)
    }

    /// An operator has looked: changes are allowed again.
    pub fn forgive(&self) {
        let next_epoch = self.state.next_epoch.lock();
        if self.has_failed() {
            // What was not flushed before may be lost, and those who wrote it have to learn that.
            self.state.epoch.store(*next_epoch, Ordering::Release);
            self.state.failed.store(false, Ordering::Release);
        }
    }

    /// Changes when what was written and not flushed may have been lost.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.state.epoch.load(Ordering::Acquire)
    }

    /// Makes all that was written before durable.
    ///
    /// Those that come while a flush runs wait for the next one, all for the same: the one that
    /// runs may have begun before their writes. Two never run at once, since the kernel tells of
    /// a failure only one of them.
    ///
    /// # Errors
    /// What the device says; `EIO` for ever after, until [`Disk::forgive`].
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
            // A panic must not leave the others waiting for its end, and nobody knows what was flushed.
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
        // Somebody else's flush covered it.
        match flushes.failed >= mine {
            true => Err(io::Error::from_raw_os_error(EIO)),
            false => Ok(()),
        }
    }
}

/// A number that nobody had before.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
