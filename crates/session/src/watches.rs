//! Watches of open files, and their events until the client has seen them.
//!
//! All watches of a session or family report to one [`EventQueue`], which numbers the events. Events
//! sent to the client are kept until the client says that it has seen them, so an answer that is lost
//! with its connection loses nothing. Numbers start at a different point for each table of open files
//! and each run of a server. So a number from another queue is recognized, and its client is told that
//! it has lost events.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use towline_store::{Watch, Witness};
use towline_wire::event::{ALL, DELETE_SELF, Event, IGNORED, ISDIR};
use towline_wire::limits::EVENTS_BYTES_MAX;

/// Most events that a queue keeps: the kernel's default for `inotify(7)`.
const EVENTS_MAX: usize = 16384;
/// Most bytes of events that a queue keeps.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// Called, from any thread, as soon as there is something for a waiting request. It must not wait.
pub type Wake = Box<dyn FnOnce() + Send>;

/// The watches of an open file, which end with it. Each reports something that the others do not.
#[derive(Clone, Default)]
pub struct Watches(Vec<(u32, Arc<dyn Watch>)>);

impl Watches {
    /// Returns the bits of `mask` that no watch reports yet.
    pub(crate) fn missing(&self, mask: u32) -> u32 {
        self.0.iter().fold(mask, |missing, (told, _)| missing & !told)
    }

    /// Keeps a watch that reports the bits of `tells`, unless others already report all of them.
    pub(crate) fn keep(&mut self, tells: u32, watch: Box<dyn Watch>) {
        if self.missing(tells) != 0 {
            self.0.push((tells, watch.into()));
        }
    }
}

/// Queues the events of one watched file.
pub(crate) struct Teller {
    queue: Arc<EventQueue>,
    handle: u64,
    /// The bits that it reports.
    pub(crate) tells: u32,
}

impl Teller {
    /// Creates a teller for the `missing` bits of an open file. The first one of a file also reports its end.
    pub(crate) fn new(
        queue: Arc<EventQueue>,
        handle: u64,
        missing: u32,
        watches: &Watches,
    ) -> Self {
        let end = if watches.0.is_empty() { DELETE_SELF | IGNORED } else { 0 };
        Self { queue, handle, tells: missing | end }
    }
}

impl Witness for Teller {
    fn saw(&self, mask: u32, cookie: u32, name: &[u8]) {
        let told = mask & self.tells & (ALL | IGNORED);
        if told != 0 {
            let event = Event { handle: self.handle, mask: told | mask & ISDIR, cookie, name };
            let mut bytes = Vec::with_capacity(event.encoded_bytes());
            event.encode(&mut bytes);
            self.queue.push(Some(bytes.into()));
        }
    }

    fn lost(&self) {
        self.queue.push(None);
    }
}

/// Events of the watched files of a session or family.
pub struct EventQueue(Mutex<Queue>);

struct Queue {
    /// Number of the first event that is kept.
    first: u64,
    /// Encoded events; `None` stands for lost events.
    kept: VecDeque<Option<Box<[u8]>>>,
    /// Total size of the kept events in bytes.
    bytes: usize,
    /// Number after the last event told, whether or not it was seen.
    told: u64,
    /// Turn of the last request for events; earlier requests are over.
    turn: u64,
    /// Wakes that request, if it waits.
    wake: Option<Wake>,
}

/// Events for one answer.
pub(crate) struct Told {
    /// Number after the last of these events.
    pub(crate) next: u64,
    /// Other events are lost.
    pub(crate) lost: bool,
    /// The encoded events.
    pub(crate) bytes: Vec<u8>,
}

impl EventQueue {
    /// Creates the queue for the table of open files that was created for this session, on a server with boot
    /// epoch `epoch`.
    pub(crate) fn new(session: u64, epoch: u32) -> Self {
        // Far from the numbers of any other queue, with room above, because numbers only grow.
        let mixed = (session ^ u64::from(epoch) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (mixed >> 2) | 1;
        Self(Mutex::new(Queue {
            first,
            kept: VecDeque::new(),
            bytes: 0,
            told: first,
            turn: 0,
            wake: None,
        }))
    }

    /// Returns the number of the first event that was not seen.
    pub(crate) fn first(&self) -> u64 {
        self.0.lock().first
    }

    /// Queues an event, or with `None` notes that some were lost.
    fn push(&self, event: Option<Box<[u8]>>) {
        let mut queue = self.0.lock();
        queue.push(event);
        let wake = queue.wake.take();
        drop(queue);
        if let Some(wake) = wake {
            wake();
        }
    }

    /// Begins a request for events and returns its turn. If the request before it still waits, that gets
    /// an empty answer.
    pub(crate) fn ask(&self) -> u64 {
        let mut queue = self.0.lock();
        queue.turn += 1;
        let (turn, before) = (queue.turn, queue.wake.take());
        drop(queue);
        if let Some(before) = before {
            before();
        }
        turn
    }

    /// Forgets the events below `seen`, and returns those since; `None` when the request with this turn
    /// has to wait.
    pub(crate) fn tell(&self, turn: u64, seen: u64) -> Option<Told> {
        let mut queue = self.0.lock();
        if turn != queue.turn {
            let next = if seen == 0 { queue.first } else { seen };
            return Some(Told { next, lost: false, bytes: Vec::new() });
        }
        let knows = seen == 0 || queue.forget(seen);
        (seen == 0 || !knows || !queue.kept.is_empty()).then(|| queue.tell(!knows))
    }

    /// Makes the request with this turn wait until there is an event. Returns false if it has to run
    /// again at once.
    pub fn wait(&self, turn: u64, wake: Wake) -> bool {
        let mut queue = self.0.lock();
        let waits = queue.turn == turn && queue.kept.is_empty();
        if waits {
            queue.wake = Some(wake);
        }
        waits
    }
}

impl Queue {
    fn push(&mut self, event: Option<Box<[u8]>>) {
        // Like the kernel, queue an event equal to the one before only once, unless that one was told
        // already.
        let is_untold = self.told < self.first + self.kept.len() as u64;
        if is_untold && self.kept.back() == Some(&event) {
            return;
        }
        let length = event.as_ref().map_or(0, |bytes| bytes.len());
        let is_full = self.kept.len() >= EVENTS_MAX || self.bytes + length > KEPT_BYTES_MAX;
        if is_full && event.is_some() {
            return self.push(None);
        }
        if event.is_none() && self.kept.back() == Some(&None) {
            // The client was told that it has lost events, and has not answered since. Replace
            // everything by a new loss, because the client has to look for itself anyway.
            self.first += self.kept.len() as u64;
            self.kept.clear();
            self.bytes = 0;
        }
        self.bytes += length;
        self.kept.push_back(event);
    }

    /// Forgets all events below `seen`. Returns false if `seen` is outside the range kept here.
    fn forget(&mut self, seen: u64) -> bool {
        let count = seen.checked_sub(self.first).and_then(|count| usize::try_from(count).ok());
        let Some(count) = count.filter(|count| *count <= self.kept.len()) else { return false };
        for event in self.kept.drain(..count).flatten() {
            self.bytes -= event.len();
        }
        self.first = seen;
        if self.kept.is_empty() {
            self.kept.shrink_to(64);
        }
        true
    }

    fn tell(&mut self, mut lost: bool) -> Told {
        let (mut next, mut bytes) = (self.first, Vec::new());
        for event in &self.kept {
            let event = event.as_deref();
            if bytes.len() + event.map_or(0, <[u8]>::len) > EVENTS_BYTES_MAX {
                break;
            }
            lost |= event.is_none();
            bytes.extend_from_slice(event.unwrap_or_default());
            next += 1;
        }
        self.told = self.told.max(next);
        Told { next, lost, bytes }
    }
}

#[cfg(test)]
mod tests;
