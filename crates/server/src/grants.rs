//! Requests under way, and the grants with which the server fetches their data.
//!
//! Each fragment of at most 256 KiB that a client may send has a buffer of the core's bounded pool. Transfers
//! take turns. So memory is bounded whatever the number of clients, and no byte is sent that has no place to
//! land. While buffers are plentiful, a whole transfer may be on its way, so that far clients write as fast as they
//! read; otherwise two fragments of it ([`Running::grants_max`]). And the reply to a write reserves a buffer for the
//! client's next write (an advance grant, [`Leave`]). The first fragment of that write then comes with the request:
//! one round trip instead of two.

use crate::elsewhere::Errand;
use crate::helpers::Helper;
use crate::native::SessionDisks;
use crate::stats::Stages;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_block::Meter;
use towline_mem::{Pool, Reserved};
use towline_session::{Compound, Session};
use towline_store::{Caller, FileStore};
use towline_wire::header::reply_flag;
use towline_wire::limits::{AHEAD_MILLISECONDS, FRAGMENT_BYTES_MAX, GRANTS_MAX, SLOTS_MAX};
use towline_wire::{Header, Kind};

/// Maximum number of advance grants of a session: enough for this many requests under way.
const LEAVES_MAX: usize = 32;
/// Fragments that a transfer has on their way when buffers are scarce: one is written while the next arrives.
pub(crate) const GRANTS_SCARCE: usize = 2;
/// Fragments on their way over one lane from which on its transfers get no more than that: 16 MiB in a round trip.
const LANE_GRANTS_MAX: usize = 64;
/// How long pages are copied for a session after a promise was broken: it takes longer, and hardly any file shrinks all
/// the time.
pub(crate) const COPIED_FOR: Duration = Duration::from_secs(60);

/// A fragment that the client was told to send.
pub(crate) struct Grant {
    pub(crate) offset: u64,
    pub(crate) length: usize,
    pub(crate) buffer: Reserved,
    /// Bytes that have been received into the buffer.
    pub(crate) placed: usize,
    /// The data comes under an advance grant.
    pub(crate) ahead: bool,
}

/// Returns the message that tells a client to send this part of the data it offered.
pub(crate) fn grant_message(slot: u16, sequence: u32, offset: u64, length: usize) -> Header {
    let mut header = Header::new(Kind::Grant, slot, sequence);
    header.offset = offset;
    header.word_a = length as u32;
    header
}

/// An advance grant: one of the next requests of a session may send its first fragment at once.
pub(crate) struct Leave {
    pub(crate) buffer: Reserved,
    pub(crate) given: Instant,
}

/// A request under way. The allocation is reused for later requests.
pub(crate) struct Running {
    pub(crate) compound: Compound,
    pub(crate) caller: Arc<Caller>,
    pub(crate) sequence: u32,
    /// The client can read the data in place.
    pub(crate) borrows: bool,
    pub(crate) arrived: Instant,
    pub(crate) stages: Stages,
    pub(crate) grants: VecDeque<Grant>,
    /// Fragments that have arrived, for a thread that may block.
    pub(crate) landed: Vec<Grant>,
    /// Bytes granted so far.
    pub(crate) granted: u64,
    pub(crate) data_since: Option<Instant>,
    /// Bytes that a thread that may block is to fetch.
    pub(crate) expected: u64,
    /// The client's meter, if the client is limited.
    pub(crate) meter: Option<Arc<Meter>>,
    /// The request waits for somebody else: for a lock, unless its session has no lane, for events, or for the end
    /// of a process.
    pub(crate) waits: bool,
    /// Buffer for the first fragment, which follows the request, and the fragment's length.
    pub(crate) ahead: Option<(Reserved, usize)>,
    /// The core received data of the request and wrote it.
    pub(crate) fetched: bool,
    /// Another thread shall make the listing.
    pub(crate) helper: Option<Helper>,
}

impl Running {
    /// Creates a value that holds no request yet.
    pub(crate) fn new(caller: &Arc<Caller>, now: Instant) -> Self {
        Self {
            compound: Compound::default(),
            caller: caller.clone(),
            sequence: 0,
            borrows: false,
            arrived: now,
            stages: Stages::default(),
            grants: VecDeque::new(),
            landed: Vec::new(),
            granted: 0,
            data_since: None,
            expected: 0,
            meter: None,
            waits: false,
            ahead: None,
            fetched: false,
            helper: None,
        }
    }

    /// Forgets the request. Fields that every request sets stay as they are.
    pub(crate) fn clear(&mut self) {
        self.compound.clear();
        self.stages = Stages::default();
        if !self.grants.is_empty() {
            self.grants.clear();
        }
        self.landed.clear();
        (self.granted, self.expected) = (0, 0);
        (self.data_since, self.meter, self.ahead) = (None, None, None);
        (self.waits, self.fetched, self.helper) = (false, false, None);
    }

    /// Returns true while the request waits for data.
    pub(crate) fn is_transfer(&self) -> bool {
        self.compound.missing().is_some()
    }

    /// Returns how many of its fragments may be on their way over a lane that has `granted` of all requests.
    pub(crate) fn grants_max(&self, is_low: bool, granted: usize, pool: &Pool) -> usize {
        let is_limited = is_low || self.meter.is_some() || granted >= LANE_GRANTS_MAX;
        if is_limited || !pool.is_plentiful() { GRANTS_SCARCE } else { GRANTS_MAX }
    }

    /// Returns offset and length of the next fragment to grant, if it is one of the `most` that may be on their
    /// way.
    pub(crate) fn next_grant(&self, most: usize) -> Option<(u64, usize)> {
        let (done, missing) = self.compound.missing()?;
        let end = done + missing;
        // What waits for a store that may hang holds as little memory as possible.
        let may_hang = self.compound.writes_elsewhere().is_some_and(|store| store.may_hang());
        let most = if may_hang { 1 } else { most };
        if self.grants.len() + self.landed.len() >= most || self.granted >= end {
            return None;
        }
        let length = (end - self.granted).min(FRAGMENT_BYTES_MAX as u64);
        Some((self.granted, length as usize))
    }
}

/// A core's record of a session.
pub(crate) struct Served {
    pub(crate) session: Session,
    /// The session's lane, if it has one.
    pub(crate) lane: Option<u64>,
    pub(crate) laneless_since: Instant,
    pub(crate) running: Vec<Option<Box<Running>>>,
    /// Stores whose threads have a request of this session, once for each request.
    pub(crate) away: Vec<Arc<dyn FileStore>>,
    /// Requests that go to those threads when the ones before them have returned.
    pub(crate) waiting: VecDeque<Errand>,
    /// The client has low priority: others go first.
    pub(crate) is_low: bool,
    /// The client's meters at exports that limit it, by account.
    pub(crate) meters: Vec<(u32, Arc<Meter>)>,
    /// The session's open disks and requests to them.
    pub(crate) disks: SessionDisks,
    /// Advance grants of the client, in the order in which it learned of them.
    pub(crate) leaves: VecDeque<Leave>,
    /// When a lane ended because pages that a message had promised could not be read. Then pages of files are copied
    /// before they are promised, for [`COPIED_FOR`], and those of disks go before the reply.
    pub(crate) promise_broken: Option<Instant>,
    /// The session ends as soon as its requests under way allow it. Nobody can join it any more.
    pub(crate) has_ended: bool,
    /// One bit for each slot whose running request was sent again on this lane.
    came_again: u64,
}

impl Served {
    pub(crate) fn new(session: Session, lane: u64) -> Self {
        let running = (0..SLOTS_MAX).map(|_| None).collect();
        let disks = SessionDisks::default();
        Self {
            session,
            lane: Some(lane),
            laneless_since: Instant::now(),
            running,
            away: Vec::new(),
            waiting: VecDeque::new(),
            is_low: false,
            meters: Vec::new(),
            disks,
            leaves: VecDeque::new(),
            promise_broken: None,
            has_ended: false,
            came_again: 0,
        }
    }

    /// Takes back the grants of a lane that is gone. When the client sends the requests again on its next
    /// lane, their transfers continue where they are; nothing is done twice.
    pub(crate) fn suspend_transfers(&mut self) {
        self.leaves.clear();
        self.came_again = 0;
        for running in self.running.iter_mut().flatten() {
            if let Some((done, _)) = running.compound.missing() {
                running.grants.clear();
                running.landed.clear();
                running.granted = done;
            }
        }
    }

    /// Gives the client an advance grant for `bytes` bytes, and says so in `reply`, if it has few and buffers
    /// are plentiful. Returns true if it did.
    pub(crate) fn give_leave(
        &mut self,
        pool: &Arc<Pool>,
        bytes: usize,
        reply: &mut Header,
        now: Instant,
    ) -> bool {
        let has_enough = self.leaves.len() >= LEAVES_MAX;
        if has_enough || self.is_low || self.lane.is_none() || !pool.is_plentiful() {
            return false;
        }
        let Some(buffer) = pool.reserve() else { return false };
        self.leaves.push_back(Leave { buffer, given: now });
        reply.flags |= reply_flag::AHEAD;
        reply.offset = bytes as u64;
        true
    }

    /// Takes the advance grant of a request that `ahead` bytes follow. A client that offers data but sends
    /// none of it ahead has forgotten its grants; old ones are dropped.
    pub(crate) fn take_leave(&mut self, ahead: u32, now: Instant) -> Option<Leave> {
        if ahead == 0 {
            let forgotten = Duration::from_millis(AHEAD_MILLISECONDS);
            self.leaves.retain(|leave| now - leave.given <= forgotten);
            return None;
        }
        self.leaves.pop_front()
    }

    /// Notes that a running request was sent again. Returns true the first time on this lane; further repeats
    /// must not queue it again.
    pub(crate) fn comes_again(&mut self, slot: u16) -> bool {
        let bit = 1 << slot;
        let first = self.came_again & bit == 0;
        self.came_again |= bit;
        first
    }

    /// Returns true while requests of the session are under way that the client must not repeat with a server
    /// that knows nothing of them. What waits for others, or for data that may come again or never, does not
    /// count.
    pub(crate) fn is_at_work(&self) -> bool {
        let is_lost = self.lane.is_none();
        let waits = |running: &Running| {
            running.waits || running.is_transfer() && (is_lost || running.compound.is_repeatable())
        };
        !self.away.is_empty() || self.running.iter().flatten().any(|running| !waits(running))
    }

    /// Returns true if no request of the session is under way, so that it can move to another core with its lane.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_busy = !self.away.is_empty() || !self.waiting.is_empty() || self.is_low;
        !is_busy
            && !self.has_ended
            && self.running.iter().all(Option::is_none)
            && self.disks.is_at_rest()
    }

    /// Returns true if the server has done all that the client has asked so far; it may wait for more data.
    pub(crate) fn is_answered(&self) -> bool {
        self.away.is_empty()
            && self.waiting.is_empty()
            && self.running.iter().flatten().all(|running| running.is_transfer())
            && !self.disks.is_busy()
    }

    /// Returns true if the request of this slot waits for data.
    pub(crate) fn is_transfer(&self, slot: u16) -> bool {
        let running = self.running.get(usize::from(slot)).and_then(Option::as_ref);
        running.is_some_and(|running| running.is_transfer())
    }
}
