//! Requests that are not begun yet: of clients of low priority, until nobody else asks or their turn has come,
//! and of clients that ask a disk for more than they may, until their time has come.
//!
//! When its lane ends such a request is forgotten, and the client asks again. A session has no more
//! of them than slots, so their memory is bounded.

use crate::core::Core;
use crate::priority::Turn;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_block::{ClientKey, Meter};
use towline_net::{Link, LinkKind};
use towline_store::directory::requests_arrived;
use towline_wire::{Header, ProtocolError, Request};

/// A request and what came with it.
pub(crate) struct Arrived<'a> {
    pub(crate) session: u64,
    /// Its lane.
    pub(crate) lane: usize,
    pub(crate) header: &'a Header,
    pub(crate) body: &'a [u8],
    pub(crate) payload: &'a [u8],
    pub(crate) at: Instant,
}

impl Arrived<'_> {
    fn keep(&self) -> Kept {
        Kept {
            session: self.session,
            header: *self.header,
            body: self.body.to_vec(),
            payload: self.payload.to_vec(),
            at: self.at,
        }
    }
}

/// The same for as long as it waits.
pub(crate) struct Kept {
    session: u64,
    header: Header,
    body: Vec<u8>,
    payload: Vec<u8>,
    at: Instant,
}

impl Kept {
    fn is(&self, session: u64, header: &Header) -> bool {
        let (slot, sequence) = (self.header.slot, self.header.sequence);
        (self.session, slot, sequence) == (session, header.slot, header.sequence)
    }
}

/// Requests that wait, of all sessions of a core, in the order in which they came.
#[derive(Default)]
pub(crate) struct Waiting {
    /// Until this time.
    throttled: VecDeque<(Instant, Kept)>,
    /// Of low priority.
    low: VecDeque<Kept>,
    turn: Turn,
    /// Others have asked for something in this turn of the core.
    others: bool,
}

impl Waiting {
    /// When to look again.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.throttled.iter().map(|(until, _)| *until).min()
    }

    /// Forgets what waits of a session; yields the slots.
    pub(crate) fn forget(&mut self, session: u64) -> Vec<u16> {
        let mut slots = Vec::new();
        let mut stays = |kept: &Kept| {
            let goes = kept.session == session;
            slots.extend(goes.then_some(kept.header.slot));
            !goes
        };
        self.throttled.retain(|(_, kept)| stays(kept));
        self.low.retain(stays);
        slots
    }

    /// Takes out a request, if it waits because of its priority.
    pub(crate) fn take_low(&mut self, session: u64, header: &Header) -> Option<Kept> {
        let place = self.low.iter().position(|kept| kept.is(session, header))?;
        self.low.remove(place)
    }
}

/// Bytes that a request moves.
fn bytes_of(request: &Request<'_>) -> u64 {
    match request {
        Request::DiskRead { length, .. } | Request::DiskWrite { length, .. } => (*length).into(),
        _ => 0,
    }
}

impl Core {
    /// Begins a request, or has it wait for others if its client has low priority.
    ///
    /// # Errors
    /// It is no legal request.
    pub(crate) fn take_request(&mut self, arrived: &Arrived<'_>) -> Result<(), ProtocolError> {
        let is_low = self.sessions.get(&arrived.session).is_some_and(|served| served.is_low);
        if is_low {
            self.waiting.low.push_back(arrived.keep());
            return Ok(());
        }
        self.waiting.others = true;
        if !self.waiting.low.is_empty() {
            self.waiting.turn.other();
        }
        self.begin_request(arrived)
    }

    /// True when a request of low priority could be begun now.
    pub(crate) fn has_low_request(&self) -> bool {
        self.waiting.low.iter().any(|kept| self.has_room(kept.session))
    }

    /// The answer of a request can be sent now, or it cannot be sent at all.
    fn has_room(&self, session: u64) -> bool {
        let lane = self.sessions.get(&session).and_then(|served| served.lane);
        let lane = lane.and_then(|lane| self.lanes.get(lane as usize)?.as_ref());
        lane.is_none_or(|lane| !lane.is_full())
    }

    /// Begins requests of low priority: as many as are due, if others asked for something in this turn; else until
    /// others do.
    pub(crate) fn begin_low(&mut self) {
        let others = std::mem::take(&mut self.waiting.others);
        if self.waiting.low.is_empty() {
            return;
        }
        // What others get leaves before.
        self.grant();
        self.flush_dirty();
        for _ in 0..self.waiting.low.len() {
            if others && !self.waiting.turn.is_low_due() {
                return;
            }
            let Some(kept) = self.waiting.low.pop_front() else { return };
            if !self.has_room(kept.session) {
                self.waiting.low.push_back(kept);
                continue;
            }
            self.waiting.turn.low();
            if others {
                self.statistics.low_among_others.fetch_add(1, Ordering::Relaxed);
            }
            self.begin_kept(kept);
            self.flush_dirty();
            if !others && self.has_news() {
                return;
            }
        }
    }

    /// Begins what has waited.
    pub(crate) fn begin_kept(&mut self, kept: Kept) {
        let Kept { session, header, body, payload, at } = kept;
        let lane = self.sessions.get(&session).and_then(|served| served.lane);
        let Some(lane) = lane.map(|lane| lane as usize) else { return };
        let (header, body, payload) = (&header, &body[..], &payload[..]);
        self.closing.clear();
        requests_arrived(Instant::now());
        let arrived = Arrived { session, lane, header, body, payload, at };
        if let Err(error) = self.begin_request(&arrived) {
            self.close_lane(lane, &io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }

    /// True when a request has to wait, and then it does: the client has had what it may. Else it
    /// is charged.
    pub(crate) fn throttle(&mut self, request: &Request<'_>, arrived: &Arrived<'_>) -> bool {
        let meter = self.meter(request, arrived.session);
        let Some(meter) = meter else { return false };
        let now = Instant::now();
        let Some(until) = meter.waits(now) else {
            meter.charge(now, bytes_of(request));
            return false;
        };
        self.waiting.throttled.push_back((until, arrived.keep()));
        true
    }

    fn meter(&self, request: &Request<'_>, session: u64) -> Option<Arc<Meter>> {
        self.sessions.get(&session)?.disks.meter(request.disk()?)
    }

    /// Begins what has waited long enough.
    pub(crate) fn resume_throttled(&mut self) {
        let Some(wake) = self.waiting.next_wake() else { return };
        let now = Instant::now();
        if wake > now {
            return;
        }
        for (until, kept) in std::mem::take(&mut self.waiting.throttled) {
            if until > now {
                self.waiting.throttled.push_back((until, kept));
                continue;
            }
            // Looked at anew: it waits again when another one was faster.
            self.begin_kept(kept);
        }
    }
}

/// Who is at the other end: for limits, which all connections of one client share.
pub(crate) fn client_of(link: &Link) -> Option<ClientKey> {
    use rustix::net::sockopt::socket_peercred;
    let fd = link.fd()?;
    match link.kind() {
        LinkKind::Tcp => {
            let address = SocketAddr::try_from(rustix::net::getpeername(fd).ok()??);
            Some(ClientKey::Machine(address.ok()?.ip().to_canonical()))
        }
        _ => Some(ClientKey::Process(socket_peercred(fd).ok()?.pid.as_raw_pid())),
    }
}
