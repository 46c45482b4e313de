//! One connection of an NBD client.

use crate::core::Place;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;
use towline_block::{DEPTH_MAX, Disk, Meter, OwnerKey, RequestKey};
use towline_mem::{Aggregate, PoolBuffer};
use towline_nbd::{Form, Haggle, Receiver, ends_with_disconnect};
use towline_net::{Counters, Flushed, Glance, Link, Pipe, SendQueue, Telling};

/// Above this many unsent bytes, no further requests are taken.
pub(super) const UNSENT_BYTES_MAX: u64 = 1 << 20;

/// The phase of a connection.
pub(super) enum Phase {
    /// Option haggling.
    Haggling(Box<Haggle>),
    /// Requests to this disk.
    Serving(Box<Receiver>, Arc<Disk>),
    /// The phase is in use elsewhere, or the connection is about to end.
    Taken,
}

/// A write whose payload is being received.
pub(super) struct Filling {
    pub(super) key: RequestKey,
    /// The buffer for the next bytes.
    pub(super) buffer: Option<PoolBuffer>,
    /// The data goes into the disk's own memory.
    pub(super) in_place: bool,
    /// Bytes that the buffer is to hold, and bytes that it holds.
    pub(super) length: usize,
    pub(super) filled: usize,
}

/// After answers to this many bytes of requests, the answers are sent: some microseconds of work for the
/// client.
const EARLY_BYTES: u64 = 32 * 1024;

/// Maximum number of questions for extents of one connection under way at once. Each may be answered by
/// hundreds of kilobytes, however short the question is.
const STATUSES_MAX: usize = 8;

/// A connection.
pub(crate) struct NbdLane {
    pub(super) link: Arc<Link>,
    pub(super) glance: Glance,
    pub(super) place: Place,
    pub(super) owner: OwnerKey,
    pub(super) phase: Phase,
    /// Input that could not be used yet.
    pub(super) held: Vec<u8>,
    /// Replies of this turn, with small data in between.
    pub(super) batch: Vec<u8>,
    /// Bytes of requests answered at once since answers were last sent early.
    pub(super) answered: u64,
    /// A simple reply has been sent in part; other replies wait in `later`.
    pub(super) speaking: bool,
    pub(super) later: Vec<u8>,
    pub(super) out: SendQueue,
    /// Bytes sent in place that the network still refers to.
    pub(super) unreleased: u64,
    pub(super) filling: Option<Filling>,
    /// The epoch of the disk that the client knows of: changes it made under another one may be lost.
    pub(super) epoch: u64,
    /// Questions for extents under way.
    pub(super) statuses: usize,
    /// The last request was a long write into memory.
    pub(super) expects_bulk: bool,
    /// Nothing more is read: the client is done.
    pub(super) closing: bool,
    /// Input was left unread.
    pub(super) paused: bool,
    /// Maximum number of requests under way at once.
    pub(super) depth: usize,
    /// The client's meter.
    pub(super) meter: Option<Arc<Meter>>,
    /// The client has used up its limit and waits.
    pub(super) is_throttled: bool,
    /// The lane is in the list of those that wait for memory.
    pub(super) is_starving: bool,
    /// The client sends nothing more. After a short read the lane is read again, since no event will report
    /// the end.
    pub(super) hung: bool,
    /// Its last request disconnects it, so the server must carry out those before.
    pub(super) is_leaving: bool,
    /// The lane is in the list of those with something to send.
    pub(super) is_dirty: bool,
    /// The lane is in the list of those with input that was peeked at but not removed.
    pub(super) is_behind: bool,
    /// When it connected.
    pub(super) since: Instant,
    /// When the client connected, or last moved a byte.
    pub(super) moved: Instant,
    /// Dropped with the lane, which tells the receiver that the connection has ended.
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
            epoch: 0,
            statuses: 0,
            expects_bulk: false,
            closing: false,
            paused: false,
            depth: DEPTH_MAX as usize,
            meter: None,
            is_throttled: false,
            is_starving: false,
            hung: false,
            is_leaving: false,
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

    /// Returns the bytes of answers that hold memory.
    pub(super) fn held(&self) -> u64 {
        self.unsent() + self.unreleased
    }

    /// Returns the buffer for a complete reply.
    pub(super) fn replies(&mut self) -> &mut Vec<u8> {
        if self.speaking { &mut self.later } else { &mut self.batch }
    }

    /// Notes that a simple reply that is sent in pieces begins or ends.
    pub(super) fn set_speaking(&mut self, speaking: bool) {
        self.speaking = speaking;
        if !speaking {
            self.batch.append(&mut self.later);
        }
    }

    /// Returns true if the connection, of which this many requests are under way, may start another one.
    pub(super) fn may_start(&self, under_way: usize) -> bool {
        under_way < self.depth && self.statuses < STATUSES_MAX
    }

    /// Returns true in the middle of a write's payload.
    pub(super) fn awaits_payload(&self) -> bool {
        matches!(&self.phase, Phase::Serving(receiver, _) if receiver.missing() > 0)
    }

    pub(super) fn is_drained(&self) -> bool {
        self.out.is_empty() && self.batch.is_empty() && self.later.is_empty()
    }

    /// Queues the batch, so that data by reference can follow it.
    fn queue_batch(&mut self) {
        if !self.batch.is_empty() {
            let batch = std::mem::take(&mut self.batch);
            self.out.push_foreign(Aggregate::from_vec(batch), None);
        }
    }

    /// Queues bytes by reference, behind the header at the end of the batch.
    pub(super) fn push(&mut self, bytes: Aggregate, telling: Option<Telling>) {
        let batch = std::mem::take(&mut self.batch);
        let mut message = Aggregate::from_vec(batch);
        message.concatenate(bytes);
        self.out.push_foreign(message, telling);
    }

    /// Notes that a request that moved `moved` bytes was answered at once, and sends the answers after some
    /// of them. The client can then work while the server answers the rest. If all answers left together at
    /// the end of the turn, client and server would only take turns.
    pub(super) fn send_early(&mut self, moved: u64, counters: &Counters) {
        self.answered += moved;
        if self.answered >= EARLY_BYTES && self.out.is_empty() && !self.speaking {
            self.answered = 0;
            // An error occurs again at the end of the turn, and is handled there.
            let _ = self.send_batch(counters);
        }
    }

    /// Called when the client sends nothing more and its requests wait for its limit. If it was killed, they
    /// must not be carried out some time later, over what others have written meanwhile.
    ///
    /// # Errors
    /// The client did not take its leave with `NBD_CMD_DISC`.
    pub(super) fn check_leaving(&mut self, form: Form, counters: &Counters) -> io::Result<()> {
        if !self.is_leaving {
            let mut input = self.held.clone();
            input.extend(self.glance.unread(&self.link, counters)?);
            self.is_leaving = ends_with_disconnect(&input, form);
        }
        if self.is_leaving { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Removes the input that was peeked at. An error occurs again at the next receive.
    pub(super) fn take_looked(&mut self, counters: &Counters) {
        let _ = self.glance.take(&self.link, counters);
    }

    /// Sends of the batch what the link takes at once; nothing may be queued before it. Returns true if that
    /// was all.
    fn send_batch(&mut self, counters: &Counters) -> io::Result<bool> {
        match self.link.send(&[&self.batch], counters) {
            Ok(count) => {
                self.batch.drain(..count);
                self.moved = Instant::now();
                Ok(self.batch.is_empty())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends as much as the link takes.
    pub(super) fn flush(&mut self, pipe: &mut Pipe, counters: &Counters) -> io::Result<Flushed> {
        // Most turns end here: one call, and nothing is allocated.
        if self.out.is_empty() && !self.batch.is_empty() && self.send_batch(counters)? {
            return Ok(Flushed::All);
        }
        self.queue_batch();
        let before = self.out.bytes();
        let flushed = self.out.flush(&self.link, pipe, counters);
        if self.out.bytes() < before {
            self.moved = Instant::now();
        }
        flushed
    }
}
