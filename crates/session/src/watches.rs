//! Watches of open files, and what they tell until the client has seen it.
//!
//! All watches of a session, or of a family, tell one [`EventQueue`], which numbers what it is told. What was told to the client stays until
//! the client says that it was seen: an answer that is lost with its connection loses nothing. Numbers begin elsewhere for each table of open
//! files and each start of a server, so that one of another queue is known for that: its client is told that it has lost events.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use towline_store::{Watch, Witness};
use towline_wire::event::{ALL, DELETE_SELF, Event, IGNORED, ISDIR};
use towline_wire::limits::EVENTS_BYTES_MAX;

/// Events that a queue keeps: as many as the kernel does for `inotify(7)`, unless it is told otherwise.
const EVENTS_MAX: usize = 16384;
/// Bytes of them.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// Called when there is something for a request that waits, from any thread and at once: it must not wait.
pub type Wake = Box<dyn FnOnce() + Send>;

/// The watches of an open file, which end with it. Each tells something that the others do not.
#[derive(Clone, Default)]
pub struct Watches(Vec<(u32, Arc<dyn Watch>)>);

impl Watches {
    /// What of this nobody tells yet.
    pub(crate) fn missing(&self, mask: u32) -> u32 {
        self.0.iter().fold(mask, |missing, (told, _)| missing & !told)
    }

    /// Keeps a watch that tells this; not if others tell all of it by now.
    pub(crate) fn keep(&mut self, tells: u32, watch: Box<dyn Watch>) {
        if self.missing(tells) != 0 {
            self.0.push((tells, watch.into()));
        }
    }
}

/// Has a queue told what happens to one watched file.
pub(crate) struct Teller {
    queue: Arc<EventQueue>,
    handle: u64,
    /// Bits that it tells of.
    pub(crate) tells: u32,
}

impl Teller {
    /// Of the `missing` bits of an open file. The first watch of a file tells of its end, too.
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

/// What has happened to the watched files of a session, or of a family.
pub struct EventQueue(Mutex<Queue>);

struct Queue {
    /// Number of the first that is kept.
    first: u64,
    /// Encoded events; `None`: others that are lost.
    kept: VecDeque<Option<Box<[u8]>>>,
    /// Bytes of them.
    bytes: usize,
    /// Number behind the last one told, whether or not it was seen.
    told: u64,
    /// The last request for events; those before it are over.
    turn: u64,
    /// Wakes that, if it waits.
    wake: Option<Wake>,
}

/// Of what has happened as much as one answer takes.
pub(crate) struct Told {
    /// Number behind the last event of these.
    pub(crate) next: u64,
    /// Others are lost.
    pub(crate) lost: bool,
    /// Encoded events.
    pub(crate) bytes: Vec<u8>,
}

impl EventQueue {
    /// The queue of the table of open files with this owner, on a server whose start `epoch` names.
    pub(crate) fn new(owner: u64, epoch: u32) -> Self {
        // Far from those of any other, with room above: numbers are only counted up.
        let mixed = (owner ^ u64::from(epoch) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
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

    /// Number of the first event that was not seen.
    pub(crate) fn first(&self) -> u64 {
        self.0.lock().first
    }

    /// Notes an event, or that some were lost.
    fn push(&self, event: Option<Box<[u8]>>) {
        let mut queue = self.0.lock();
        queue.push(event);
        let wake = queue.wake.take();
        drop(queue);
        if let Some(wake) = wake {
            wake();
        }
    }

    /// A request for events comes: the one before is answered with nothing, if it waits. Yields its turn.
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

    /// Forgets what was `seen`, and tells what has happened since; `None` when the request with this turn has to wait.
    pub(crate) fn tell(&self, turn: u64, seen: u64) -> Option<Told> {
        let mut queue = self.0.lock();
        if turn != queue.turn {
            let next = if seen == 0 { queue.first } else { seen };
            return Some(Told { next, lost: false, bytes: Vec::new() });
        }
        let knows = seen == 0 || queue.forget(seen);
        (seen == 0 || !knows || !queue.kept.is_empty()).then(|| queue.tell(!knows))
    }

    /// Has the request with this turn wait until there is something to tell. False: it is to run again at once.
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
        // As the kernel does: what says the same as the one before is told once, unless that was told already.
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
            // Told once that it has to look for itself, and not heard of since: it is told anew, and all else is no use to it.
            self.first += self.kept.len() as u64;
            self.kept.clear();
            self.bytes = 0;
        }
        self.bytes += length;
        self.kept.push_back(event);
    }

    /// Forgets all below this number. False: it is none of these.
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
