//! A witness that records events.

use crate::Witness;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;
use towline_wire::event;

/// More time than any event takes.
const PATIENCE: Duration = Duration::from_secs(60);

const BITS: [(u32, &str); 14] = [
    (event::ACCESS, "ACCESS"),
    (event::MODIFY, "MODIFY"),
    (event::ATTRIB, "ATTRIB"),
    (event::CLOSE_WRITE, "CLOSE_WRITE"),
    (event::CLOSE_NOWRITE, "CLOSE_NOWRITE"),
    (event::OPEN, "OPEN"),
    (event::MOVED_FROM, "MOVED_FROM"),
    (event::MOVED_TO, "MOVED_TO"),
    (event::CREATE, "CREATE"),
    (event::DELETE, "DELETE"),
    (event::DELETE_SELF, "DELETE_SELF"),
    (event::MOVE_SELF, "MOVE_SELF"),
    (event::IGNORED, "IGNORED"),
    (event::ISDIR, "ISDIR"),
];

/// One event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Seen {
    pub(super) mask: u32,
    pub(super) cookie: u32,
    pub(super) name: Vec<u8>,
}

/// The events that a witness got.
#[derive(Default)]
pub(super) struct Record {
    told: Mutex<Told>,
    more: Condvar,
}

#[derive(Default)]
struct Told {
    seen: Vec<Seen>,
    losses: u32,
}

impl Record {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.told.lock().seen.clone()
    }

    /// Removes and returns the recorded events.
    pub(super) fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.told.lock().seen)
    }

    /// Returns how often events were lost.
    pub(super) fn losses(&self) -> u32 {
        self.told.lock().losses
    }

    /// Waits for a condition on the recorded events.
    pub(super) fn wait_for(&self, condition: impl Fn(&[Seen]) -> bool) {
        let mut told = self.told.lock();
        while !condition(&told.seen) {
            let late = self.more.wait_for(&mut told, PATIENCE).timed_out();
            assert!(!late, "was only told {:?}", told.seen);
        }
    }

    /// Returns the events in words, and equal neighbours only once, as the kernel may merge them.
    pub(super) fn words(&self) -> Vec<String> {
        let mut words: Vec<String> = self.seen().iter().map(Seen::words).collect();
        words.dedup();
        words
    }
}

impl Seen {
    /// Returns the event in words, for example `CREATE|ISDIR name`.
    pub(super) fn words(&self) -> String {
        let has = |(bit, _): &&(u32, &str)| self.mask & bit != 0;
        let bits: Vec<&str> = BITS.iter().filter(has).map(|(_, name)| *name).collect();
        let name = String::from_utf8_lossy(&self.name);
        format!("{} {name}", bits.join("|")).trim_end().to_owned()
    }
}

impl Witness for Record {
    fn saw(&self, mask: u32, cookie: u32, name: &[u8]) {
        self.told.lock().seen.push(Seen { mask, cookie, name: name.to_vec() });
        self.more.notify_all();
    }

    fn lost(&self) {
        self.told.lock().losses += 1;
        self.more.notify_all();
    }
}
