//! After a restart, makes new locks wait until the clients that held locks before have them again.

use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline_session::locks::Waiter;
use towline_wire::request::lock;

/// The sessions to wait for, and the requests that wait.
pub(crate) struct Grace {
    active: AtomicBool,
    began: Instant,
    limit: Duration,
    waits: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    /// Sessions that held locks and have not yet said that they have them again.
    sessions: HashSet<u64>,
    /// Requests for locks that wait for these sessions.
    held_up: Vec<Waiter>,
}

impl Grace {
    /// Waits for these sessions, at most for `limit`.
    pub(crate) fn new(sessions: Vec<u64>, limit: Duration) -> Self {
        let active = AtomicBool::new(!sessions.is_empty());
        let sessions = sessions.into_iter().collect();
        let waits = Mutex::new(Waits { sessions, held_up: Vec::new() });
        Self { active, began: Instant::now(), limit, waits }
    }

    /// Returns the time since the server started.
    pub(crate) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns true while new locks wait.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Returns true if a request for a lock has to wait. Releasing a lock never has to.
    pub(crate) fn holds_up(&self, waiter: &Waiter) -> bool {
        if !self.is_active() || waiter.range.kind == lock::UNLOCK {
            return false;
        }
        let mut waits = self.waits.lock();
        // Check again under the lock: the wait may have ended meanwhile, and then nobody would retry this
        // request.
        let active = self.is_active();
        if active {
            waits.held_up.push(*waiter);
        }
        active
    }

    /// Notes that a session has its locks again, or has ended. If it was the last one, returns the requests
    /// that waited.
    pub(crate) fn returned(&self, session: u64) -> Vec<Waiter> {
        if !self.is_active() {
            return Vec::new();
        }
        let mut waits = self.waits.lock();
        waits.sessions.remove(&session);
        if waits.sessions.is_empty() { self.end(&mut waits) } else { Vec::new() }
    }

    /// Returns the waiting requests if the time is over.
    pub(crate) fn tick(&self) -> Vec<Waiter> {
        if !self.is_active() || self.age() < self.limit {
            return Vec::new();
        }
        let mut waits = self.waits.lock();
        log::warn!("{} sessions with locks did not return in time", waits.sessions.len());
        self.end(&mut waits)
    }

    fn end(&self, waits: &mut Waits) -> Vec<Waiter> {
        self.active.store(false, Ordering::Release);
        std::mem::take(&mut waits.held_up)
    }

    /// Forgets the waiting requests of this session.
    pub(crate) fn withdraw(&self, session: u64) {
        if self.is_active() {
            self.waits.lock().held_up.retain(|waiter| waiter.session != session);
        }
    }

    /// Gives up a waiting request. Returns true if it waited.
    pub(crate) fn cancel(&self, session: u64, slot: u16, sequence: u32) -> bool {
        let mut waits = self.waits.lock();
        let before = waits.held_up.len();
        waits
            .held_up
            .retain(|w| !(w.session == session && w.slot == slot && w.sequence == sequence));
        waits.held_up.len() != before
    }
}
