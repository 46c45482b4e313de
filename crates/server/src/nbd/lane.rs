//! One connection of an NBD client.

use crate::core::Place;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;
use towline_block::{DEPTH_MAX, Disk, Meter, OwnerKey, RequestKey};
use towline_mem::{Aggregate, PoolBuffer};
use towline_nbd::{Haggle, Receiver};
use towline_net::{Counters, Flushed, Glance, Link, SendQueue, Telling};

/// Unsent bytes above which no further requests are taken.
pub(super) const UNSENT_BYTES_MAX: u64 = 1 << 20;

/// How far a connection has come.
pub(super) enum Phase {
    /// Option haggling.
    Haggling(Box<Haggle>),
    /// Requests to this disk.
    Serving(Box<Receiver>, Arc<Disk>),
    /// Its phase is in use elsewhere, or it is about to end.
    Taken,
}

/// A write whose payload is coming in.
pub(super) struct Filling {
    pub(super) key: RequestKey,
    /// Where the next bytes go, and how many bytes it will hold and holds.
    pub(super) buffer: Option<PoolBuffer>,
    /// They go into the disk's own memory.
    pub(super) in_place: bool,
    pub(super) length: usize,
    pub(super) filled: usize,
}

/// Bytes of requests that are answered before the answers are sent: some microseconds of work for the client.
const EARLY_BYTES: u64 = 32 * 1024;

/// A connection.
pub(super) struct NbdLane {
    pub(super) link: Arc<Link>,
    pub(super) glance: Glance,
    pub(super) place: Place,
    pub(super) owner: OwnerKey,
    pub(super) phase: Phase,
    /// Input that could not be used yet.
    pub(super) held: Vec<u8>,
    /// Replies of this turn, with small data between them.
    pub(super) batch: Vec<u8>,
    /// Bytes of requests that were answered at once since answers were sent early.
    pub(super) answered: u64,
    /// A simple reply is told in part; what else is to be said waits in `later`.
    pub(super) speaking: bool,
    pub(super) later: Vec<u8>,
    pub(super) out: SendQueue,
    /// Bytes that were sent in place and that the network still refers to.
    pub(super) unreleased: u64,
    pub(super) filling: Option<Filling>,
    /// Its last request was a long write into memory.
    pub(super) expects_bulk: bool,
    /// Nothing more is read: the client is done.
    pub(super) closing: bool,
    /// Input was left unread.
    pub(super) paused: bool,
    /// Requests that may be under way at once.
    pub(super) depth: usize,
    /// What measures its client, and that it waits until it may ask for more.
    pub(super) meter: Option<Arc<Meter>>,
    pub(super) is_throttled: bool,
    /// In the list of those that wait for memory.
    pub(super) is_starving: bool,
    /// The client sends nothing more: what was read short ends there, without another event.
    pub(super) hung: bool,
    /// In the list of lanes with something to send.
    pub(super) is_dirty: bool,
    /// In the list of lanes of which something was looked at that is not taken.
    pub(super) is_behind: bool,
    /// When it connected.
    pub(super) since: Instant,
    /// When it connected, or last moved a byte.
    pub(super) moved: Instant,
    /// Dropped with the lane: tells somebody that it is over.
    pub(super) _over: Option<Sender<()>>,
}

impl NbdLane {
    pub(super) fn new(link: Arc<Link>, owner: OwnerKey, over: Option<Sender<()>>) -> Self {
        Self {
            link,
            glance: Glance::default(),
            place: Place::default(),
            owner,
            phase: Phase::Haggling(Box::default()),
            held: Vec::new(),
            batch: Haggle::greeting().to_vec(),
            answered: 0,
            speaking: false,
            later: Vec::new(),
            out: SendQueue::default(),
            unreleased: 0,
            filling: None,
            expects_bulk: false,
            closing: false,
            paused: false,
            depth: DEPTH_MAX as usize,
            meter: None,
            is_throttled: false,
            is_starving: false,
            hung: false,
            is_dirty: false,
            is_behind: false,
            since: Instant::now(),
            moved: Instant::now(),
            _over: over,
        }
    }

    pub(super) fn unsent(&self) -> u64 {
        self.out.bytes() + (self.batch.len() + self.later.len()) as u64
    }

    /// Bytes of answers that hold memory.
    pub(super) fn held(&self) -> u64 {
        self.unsent() + self.unreleased
    }

    /// Where a whole reply goes.
    pub(super) fn replies(&mut self) -> &mut Vec<u8> {
        if self.speaking { &mut self.later } else { &mut self.batch }
    }

    /// A simple reply that comes in pieces begins or ends.
    pub(super) fn set_speaking(&mut self, speaking: bool) {
        self.speaking = speaking;
        if !speaking {
            self.batch.append(&mut self.later);
        }
    }

    pub(super) fn is_drained(&self) -> bool {
        self.out.is_empty() && self.batch.is_empty() && self.later.is_empty()
    }

    /// Puts what was collected behind what is queued, so that something can follow it by
    /// reference.
    fn queue_batch(&mut self) {
        if !self.batch.is_empty() {
            let batch = std::mem::take(&mut self.batch);
            self.out.push_foreign(Aggregate::from_vec(batch), None);
        }
    }

    /// Queues bytes by reference, behind the header that ends the batch.
    pub(super) fn push(&mut self, bytes: Aggregate, telling: Option<Telling>) {
        let batch = std::mem::take(&mut self.batch);
        let mut message = Aggregate::from_vec(batch);
        message.concatenate(bytes);
        self.out.push_foreign(message, telling);
    }

    /// A request that moved so many bytes was answered at once. After some of them the answers are sent: the client
    /// can work on them while the server answers the rest. With all in one piece at the end of each turn, the two
    /// would work by turns.
    pub(super) fn send_early(&mut self, moved: u64, counters: &Counters) {
        self.answered += moved;
        if self.answered >= EARLY_BYTES && self.out.is_empty() && !self.speaking {
            self.answered = 0;
            // What failed fails again at the end of the turn, and is handled there.
            let _ = self.flush(counters);
        }
    }

    /// Takes what was only looked at. What fails fails again at the next receive.
    pub(super) fn take_looked(&mut self, counters: &Counters) {
        let _ = self.glance.take(&self.link, counters);
    }

    /// Sends as much as the link takes.
    pub(super) fn flush(&mut self, counters: &Counters) -> io::Result<Flushed> {
        if self.out.is_empty() && !self.batch.is_empty() {
            // Most turns end here: one call, nothing allocated.
            match self.link.send(&[&self.batch], counters) {
                Ok(count) if count == self.batch.len() => {
                    self.batch.clear();
                    self.moved = Instant::now();
                    return Ok(Flushed::All);
                }
                Ok(count) => drop(self.batch.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.queue_batch();
        let before = self.out.bytes();
        let flushed = self.out.flush(&self.link, counters);
        if self.out.bytes() < before {
            self.moved = Instant::now();
        }
        flushed
    }
}
