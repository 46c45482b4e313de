//! After a restart: new locks wait until the clients that had locks before have them again.

use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline_session::locks::Waiter;
use towline_wire::request::lock;

/// Who is waited for, and which requests wait.
pub(crate) struct Grace {
    active: AtomicBool,
    began: Instant,
    limit: Duration,
    waits: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    /// Sessions that had locks and did not say yet that they have them again.
    sessions: HashSet<u64>,
    /// Requests for locks that wait for them.
    held_up: Vec<Waiter>,
}

impl Grace {
    /// Waits for these sessions, at most so long.
    pub(crate) fn new(sessions: Vec<u64>, limit: Duration) -> Self {
        let active = AtomicBool::new(!sessions.is_empty());
        let sessions = sessions.into_iter().collect();
        let waits = Mutex::new(Waits { sessions, held_up: Vec::new() });
        Self { active, began: Instant::now(), limit, waits }
    }

    /// Time since the server started.
    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// True while new locks wait.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// True when a request for a lock has to wait. Releasing one never has to.
    pub(crate) fn holds_up(&self, waiter: &Waiter) -> bool {
        if !self.is_active() || waiter.range.kind == lock::UNLOCK {
            return false;
        }
        let mut waits = self.waits.lock();
        // Again under the lock: it may have ended meanwhile, and nobody would ask again.
        let active = self.is_active();
        if active {
            waits.held_up.push(*waiter);
        }
        active
    }

    /// This session has its locks again, or has ended. Returns the requests that waited, when it
    /// was the last one.
    pub(crate) fn returned(&self, session: u64) -> Vec<Waiter> {
        if !self.is_active() {
            return Vec::new();
        }
        let mut waits = self.waits.lock();
        waits.sessions.remove(&session);
        if waits.sessions.is_empty() { self.end(&mut waits) } else { Vec::new() }
    }

    /// Returns the requests that waited, when the time is over.
    pub(crate) fn tick(&self) -> Vec<Waiter> {
        if !self.is_active() || self.age() < self.limit {
            return Vec::new();
        }
        let mut waits = self.waits.lock();
        log::warn!("{} sessions with locks did not come back in time", waits.sessions.len());
        self.end(&mut waits)
    }

    fn end(&self, waits: &mut Waits) -> Vec<Waiter> {
        self.active.store(false, Ordering::Release);
        std::mem::take(&mut waits.held_up)
    }

    /// The requests of this session wait no longer.
    pub(crate) fn withdraw(&self, session: u64) {
        if self.is_active() {
            self.waits.lock().held_up.retain(|waiter| waiter.session != session);
        }
    }

    /// Gives up a request that waits. True: it waited.
    pub(crate) fn cancel(&self, session: u64, slot: u16, sequence: u32) -> bool {
        let mut waits = self.waits.lock();
        let before = waits.held_up.len();
        waits
            .held_up
            .retain(|w| !(w.session == session && w.slot == slot && w.sequence == sequence));
        waits.held_up.len() != before
    }
}
