//! Requests that are not begun yet: of clients of low priority, until nobody else asks or their turn has come,
//! and of clients that ask a disk or an export for more than they may, until their time has come.
//!
//! When its lane ends such a request is forgotten, and the client asks again; but what the processes of a run asked for
//! is done. A session has no more of them than slots, so their memory is bounded.

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
use towline_session::Exports as _;
use towline_store::directory::requests_arrived;
use towline_wire::request::Operations;
use towline_wire::{Header, ProtocolError, Request};

/// A request and what came with it.
pub(crate) struct Arrived<'a> {
    pub(crate) session: u64,
    /// Its lane.
    pub(crate) lane: usize,
    pub(crate) header: &'a Header,
    /// Bytes that follow it without a grant.
    pub(crate) ahead: u32,
    pub(crate) body: &'a [u8],
    pub(crate) payload: &'a [u8],
    pub(crate) at: Instant,
    /// Its client's limits hold for it.
    pub(crate) may_wait: bool,
}

impl Arrived<'_> {
    fn keep(&self) -> Kept {
        // What follows it comes too early, and will have to come again.
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

/// A request of a client that has had what it may.
struct Throttled {
    until: Instant,
    meter: Arc<Meter>,
    kept: Kept,
}

/// Requests that wait, of all sessions of a core, in the order in which they came.
#[derive(Default)]
pub(crate) struct Waiting {
    /// Until this time.
    throttled: VecDeque<Throttled>,
    /// Of low priority.
    low: VecDeque<Kept>,
    turn: Turn,
    /// Others have asked for something in this turn of the core.
    others: bool,
}

impl Waiting {
    /// When to look again.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.throttled.iter().map(|throttled| throttled.until).min()
    }

    /// A request that is not of low priority has come.
    pub(crate) fn note_other(&mut self) {
        self.others = true;
        if !self.low.is_empty() {
            self.turn.other();
        }
    }

    /// Limits have changed: who waits looks again.
    pub(crate) fn limits_changed(&mut self) {
        let now = Instant::now();
        self.throttled.iter_mut().for_each(|throttled| throttled.until = now);
    }

    /// Takes out what waits of a session, in its order.
    fn take_all(&mut self, session: u64) -> Vec<Kept> {
        let (throttled, others): (VecDeque<_>, _) = std::mem::take(&mut self.throttled)
            .into_iter()
            .partition(|throttled| throttled.kept.session == session);
        self.throttled = others;
        let (low, others): (VecDeque<_>, _) =
            std::mem::take(&mut self.low).into_iter().partition(|kept| kept.session == session);
        self.low = others;
        // Those of low priority come to their limits later.
        throttled.into_iter().map(|throttled| throttled.kept).chain(low).collect()
    }

    /// Forgets what waits of a session; yields the slots.
    pub(crate) fn forget(&mut self, session: u64) -> Vec<u16> {
        self.take_all(session).iter().map(|kept| kept.header.slot).collect()
    }

    /// Takes out a request, if it waits.
    pub(crate) fn take(&mut self, session: u64, header: &Header) -> Option<Kept> {
        if let Some(place) = self.low.iter().position(|kept| kept.is(session, header)) {
            return self.low.remove(place);
        }
        let place = self.throttled.iter().position(|other| other.kept.is(session, header))?;
        self.throttled.remove(place).map(|throttled| throttled.kept)
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
    pub(crate) fn take_request(
        &mut self,
        arrived: &Arrived<'_>,
        is_low: bool,
    ) -> Result<(), ProtocolError> {
        if is_low {
            self.waiting.low.push_back(arrived.keep());
            return Ok(());
        }
        self.waiting.note_other();
        self.begin_request(arrived)
    }

    /// True when a request of low priority could be begun now.
    pub(crate) fn has_low_request(&self) -> bool {
        self.waiting.low.iter().any(|kept| self.has_room(kept.session))
    }

    /// The answer of a request can be sent now, or it cannot be sent at all.
    fn has_room(&self, session: u64) -> bool {
        let lane = self.sessions.get(session).and_then(|served| served.lane);
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
            // Those of one session keep their order, as they wait for the same lane.
            let next = self.waiting.low.iter().position(|kept| self.has_room(kept.session));
            let Some(kept) = next.and_then(|next| self.waiting.low.remove(next)) else { return };
            self.waiting.turn.low();
            if others {
                self.statistics.low_among_others.fetch_add(1, Ordering::Relaxed);
            }
            self.begin_kept(kept, true);
            self.flush_dirty();
            if !others && self.has_news() {
                return;
            }
        }
    }

    /// Begins what has waited, unless it may wait still.
    pub(crate) fn begin_kept(&mut self, kept: Kept, may_wait: bool) {
        let Kept { session, header, body, payload, at } = kept;
        let lane = self.sessions.get(session).and_then(|served| served.lane);
        let Some(lane) = lane.map(|lane| lane as usize) else { return };
        let (header, body, payload) = (&header, &body[..], &payload[..]);
        self.closing.clear();
        requests_arrived(Instant::now());
        let arrived = Arrived { session, lane, header, ahead: 0, body, payload, at, may_wait };
        if let Err(error) = self.begin_request(&arrived) {
            self.close_lane(lane, &io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }

    /// The lane of a session ends: what was asked by a process of a run is done although it may have been killed, as it relies
    /// on it. Others ask again.
    pub(crate) fn begin_all_of(&mut self, session: u64) {
        if !self.sessions.get(session).is_some_and(|served| served.session.family) {
            return;
        }
        for kept in self.waiting.take_all(session) {
            self.begin_kept(kept, false);
        }
    }

    /// True when a request has to wait, since its client has had what it may, or one of its requests waits for that; and then it
    /// does. Else it is charged for itself and for so many bytes.
    pub(crate) fn waits_for(
        &mut self,
        meter: &Arc<Meter>,
        bytes: u64,
        arrived: &Arrived<'_>,
    ) -> bool {
        let now = Instant::now();
        let is_before = |other: &Throttled| {
            other.kept.session == arrived.session && Arc::ptr_eq(&other.meter, meter)
        };
        let behind = self.waiting.throttled.iter().any(is_before).then_some(now);
        match meter.waits(now).or(behind).filter(|_| arrived.may_wait) {
            Some(until) => {
                let (meter, kept) = (meter.clone(), arrived.keep());
                self.waiting.throttled.push_back(Throttled { until, meter, kept });
                true
            }
            None => {
                meter.charge(now, 1, bytes);
                false
            }
        }
    }

    /// The same for a request to a disk.
    pub(crate) fn throttle_disk(&mut self, request: &Request<'_>, arrived: &Arrived<'_>) -> bool {
        let disk = request.disk();
        let served = self.sessions.get(arrived.session);
        let meter = served.zip(disk).and_then(|(served, disk)| served.disks.meter(disk));
        meter.is_some_and(|meter| self.waits_for(&meter, bytes_of(request), arrived))
    }

    /// What measures the client of a request on files, if its export limits clients. What it reads is charged when
    /// that is known.
    pub(crate) fn file_meter(&mut self, arrived: &Arrived<'_>) -> Option<Arc<Meter>> {
        let exports = &self.shared.exports;
        if !exports.are_limited() {
            return None;
        }
        let served = self.sessions.get_mut(arrived.session)?;
        let terms = match Operations::of(arrived.body).next()?.ok()? {
            Request::Attach { name } | Request::Reclaim { export: name, .. } => {
                exports.find(name.split(|byte| *byte == b'/').next()?)?.1
            }
            request => served.session.files.lock().find(request.handles()[0]).ok()?.terms,
        };
        let account = terms.account;
        let known = served.meters.iter().find(|(known, _)| *known == account);
        let meter = match known {
            Some((_, meter)) => meter.clone(),
            None => {
                let lane = self.lanes.get(arrived.lane)?.as_ref()?;
                let meter = exports.meter(account, client_of(&lane.link)?)?;
                served.meters.push((account, meter.clone()));
                meter
            }
        };
        Some(meter).filter(|meter| meter.is_limited())
    }

    /// Begins what has waited long enough.
    pub(crate) fn resume_throttled(&mut self) {
        let Some(wake) = self.waiting.next_wake() else { return };
        let now = Instant::now();
        if wake > now {
            return;
        }
        for throttled in std::mem::take(&mut self.waiting.throttled) {
            if throttled.until > now {
                self.waiting.throttled.push_back(throttled);
                continue;
            }
            // Looked at anew: it waits again when another one was faster.
            self.begin_kept(throttled.kept, true);
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
