//! Requests under way, and the grants by which their data is fetched.
//!
//! A transfer gets leave to use a buffer of the core's bounded pool for each fragment of at most 256 KiB,
//! two at a time; transfers take turns. So memory is bounded whatever the number of clients, and no
//! byte is sent that has no place to land. Where there is plenty, the answer to a write keeps a buffer for the client's
//! next one, whose first fragment then comes with the request: one round trip, not two.

use crate::elsewhere::Errand;
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

/// Requests of a session that may have leave at once: each of so many under way has it in its turn.
const LEAVES_MAX: usize = 8;

/// A fragment that the client was told to send.
pub(crate) struct Grant {
    pub(crate) offset: u64,
    pub(crate) length: usize,
    pub(crate) buffer: Reserved,
    /// Bytes that are in their place.
    pub(crate) placed: usize,
    /// The data comes by leave that was given before the request.
    pub(crate) ahead: bool,
}

/// Tells a client to send these bytes of what it offered.
pub(crate) fn grant_message(slot: u16, sequence: u32, offset: u64, length: usize) -> Header {
    let mut header = Header::new(Kind::Grant, slot, sequence);
    header.offset = offset;
    header.word_a = length as u32;
    header
}

/// Leave for one of the next requests of a session to send its first fragment at once.
pub(crate) struct Leave {
    pub(crate) buffer: Reserved,
    pub(crate) given: Instant,
}

/// A request under way. Its memory is used again for another one.
pub(crate) struct Running {
    pub(crate) compound: Compound,
    pub(crate) caller: Arc<Caller>,
    pub(crate) sequence: u32,
    /// The client can read the data in place.
    pub(crate) borrows: bool,
    pub(crate) arrived: Instant,
    pub(crate) stages: Stages,
    pub(crate) grants: VecDeque<Grant>,
    /// Bytes granted so far.
    pub(crate) granted: u64,
    pub(crate) data_since: Option<Instant>,
    /// Bytes that a thread will bring that may block.
    pub(crate) expected: u64,
    /// What measures its client, if that is limited.
    pub(crate) meter: Option<Arc<Meter>>,
    /// It waits for a lock, unless its session has no lane, or for events.
    pub(crate) waits: bool,
    /// It is to wait for no lock any more.
    pub(crate) cancelled: bool,
    /// For its first fragment, which follows it and has so many bytes.
    pub(crate) ahead: Option<(Reserved, usize)>,
    /// Data of it was received and written by the core.
    pub(crate) fetched: bool,
}

impl Running {
    /// Of no request yet.
    pub(crate) fn new(caller: &Arc<Caller>, now: Instant) -> Self {
        Self {
            compound: Compound::default(),
            caller: caller.clone(),
            sequence: 0,
            borrows: false,
            arrived: now,
            stages: Stages::default(),
            grants: VecDeque::new(),
            granted: 0,
            data_since: None,
            expected: 0,
            meter: None,
            waits: false,
            cancelled: false,
            ahead: None,
            fetched: false,
        }
    }

    /// Forgets the request; what every one has of its own stays until it is set anew.
    pub(crate) fn clear(&mut self) {
        self.compound.clear();
        self.stages = Stages::default();
        if !self.grants.is_empty() {
            self.grants.clear();
        }
        (self.granted, self.expected) = (0, 0);
        (self.data_since, self.meter, self.ahead) = (None, None, None);
        (self.waits, self.cancelled, self.fetched) = (false, false, false);
    }

    /// True while data is to come for it.
    pub(crate) fn is_transfer(&self) -> bool {
        self.compound.missing().is_some()
    }

    /// The next fragment to be granted, if one may be now.
    pub(crate) fn next_grant(&self) -> Option<(u64, usize)> {
        let (done, missing) = self.compound.missing()?;
        let end = done + missing;
        // What is written elsewhere is away meanwhile, and cannot take in the next fragment.
        let most = if self.compound.writes_elsewhere().is_some() { 1 } else { GRANTS_MAX };
        if self.grants.len() >= most || self.granted >= end {
            return None;
        }
        let length = (end - self.granted).min(FRAGMENT_BYTES_MAX as u64);
        Some((self.granted, length as usize))
    }
}

/// A session as a core keeps it.
pub(crate) struct Served {
    pub(crate) session: Session,
    /// Its lane, if it has one now.
    pub(crate) lane: Option<u64>,
    pub(crate) laneless_since: Instant,
    pub(crate) running: Vec<Option<Box<Running>>>,
    /// Its requests that are with threads of stores that may hang: their stores.
    pub(crate) away: Vec<Arc<dyn FileStore>>,
    /// Requests that go there when those before them have come back.
    pub(crate) waiting: VecDeque<Errand>,
    /// Its client has low priority: others go before it.
    pub(crate) is_low: bool,
    /// What measures its client at exports that limit it, by account.
    pub(crate) meters: Vec<(u32, Arc<Meter>)>,
    /// What it has of disks.
    pub(crate) disks: SessionDisks,
    /// What its client may send ahead, in the order in which it was told.
    pub(crate) leaves: VecDeque<Leave>,
    /// Pages of files go before replies, not with them: a lane ended since such pages could not be read behind their reply.
    pub(crate) data_first: bool,
    /// Bit for each slot whose request came again on this lane, while it was under way.
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
            data_first: false,
            came_again: 0,
        }
    }

    /// Takes back what was granted to a lane that is gone. The transfers go on where they are when
    /// the client sends their requests again on its next lane: what was done before is not repeated.
    pub(crate) fn suspend_transfers(&mut self) {
        self.leaves.clear();
        self.came_again = 0;
        for running in self.running.iter_mut().flatten() {
            if let Some((done, _)) = running.compound.missing() {
                running.grants.clear();
                running.granted = done;
            }
        }
    }

    /// Keeps a buffer for so many bytes of its next request, if it has few and there are plenty, which `reply` tells. True: it is kept.
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

    /// The leave of a request that so many bytes follow. One that offers data, and none of it follows, is of a client that forgot its
    /// leave.
    pub(crate) fn take_leave(&mut self, ahead: u32, now: Instant) -> Option<Leave> {
        if ahead == 0 {
            let forgotten = Duration::from_millis(AHEAD_MILLISECONDS);
            self.leaves.retain(|leave| now - leave.given <= forgotten);
            return None;
        }
        self.leaves.pop_front()
    }

    /// A request that is under way came again. True: for the first time on this lane; whoever sends it more often has it wait
    /// in no more places.
    pub(crate) fn comes_again(&mut self, slot: u16) -> bool {
        let bit = 1 << slot;
        let first = self.came_again & bit == 0;
        self.came_again |= bit;
        first
    }

    /// True when the request of this slot waits for data.
    pub(crate) fn is_transfer(&self, slot: u16) -> bool {
        let running = self.running.get(usize::from(slot)).and_then(Option::as_ref);
        running.is_some_and(|running| running.is_transfer())
    }
}
