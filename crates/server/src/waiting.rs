//! Requests that are held back before they begin. Those of clients of low priority wait until nobody else
//! asks or their turn comes; those of clients that exceed the limit of a disk or export wait until their time
//! comes; those of users whose groups are not known, until they are.
//!
//! When its lane ends, a request held back is forgotten, and the client sends it again; but requests of the
//! processes of a `towline run` are executed. A session holds back at most as many requests as it has slots,
//! so memory is bounded.

use crate::complaints;
use crate::core::Core;
use crate::priority::Turn;
use rustix::process::Pid;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_block::{ClientKey, Meter};
use towline_net::{Link, LinkKind, peer_credentials};
use towline_session::Exports as _;
use towline_store::directory::requests_arrived;
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::request::Operations;
use towline_wire::{Header, ProtocolError, Request};

/// A request and its context.
pub(crate) struct Arrived<'a> {
    pub(crate) session: u64,
    /// Its lane.
    pub(crate) lane: usize,
    pub(crate) header: &'a Header,
    /// Bytes that follow the request without a grant.
    pub(crate) ahead: u32,
    pub(crate) body: &'a [u8],
    pub(crate) payload: &'a [u8],
    pub(crate) at: Instant,
    /// The client's limits apply to the request.
    pub(crate) may_wait: bool,
    /// The next request has arrived, too.
    pub(crate) is_followed: bool,
}

impl Arrived<'_> {
    fn keep(&self) -> Kept {
        // Data that follows the request comes too early; the client will send it again.
        Kept {
            session: self.session,
            header: *self.header,
            body: self.body.to_vec(),
            payload: self.payload.to_vec(),
            at: self.at,
        }
    }
}

/// An owned copy of a request that is held back.
pub(crate) struct Kept {
    session: u64,
    header: Header,
    body: Vec<u8>,
    payload: Vec<u8>,
    at: Instant,
}

impl Kept {
    /// Returns true if this is the request that `header` gives up, and asks only for locks or events. A limit
    /// cannot be overtaken by giving up anything else.
    fn is_given_up(&self, session: u64, header: &Header) -> bool {
        let (slot, sequence) = (self.header.slot, self.header.sequence);
        let waits = |request| matches!(request, Ok(Request::Lock { .. } | Request::Events { .. }));
        (self.session, slot, sequence) == (session, header.slot, header.sequence)
            && Operations::of(&self.body).all(waits)
    }
}

/// A request of a client that has used up its limit.
struct Throttled {
    until: Instant,
    meter: Arc<Meter>,
    kept: Kept,
}

/// Requests held back, of all sessions of a core, in order of arrival.
#[derive(Default)]
pub(crate) struct Waiting {
    /// Requests of limited clients.
    throttled: VecDeque<Throttled>,
    /// Those that are looked at again at the moment.
    due: VecDeque<Throttled>,
    /// Requests of low priority.
    low: VecDeque<Kept>,
    /// Requests of users whose groups are being looked up.
    unknown: VecDeque<(u32, Kept)>,
    turn: Turn,
    /// Others have sent a request in this turn of the core.
    others: bool,
}

impl Waiting {
    /// Returns when to check again.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.throttled.iter().map(|throttled| throttled.until).min()
    }

    /// Notes a request that is not of low priority.
    pub(crate) fn note_other(&mut self) {
        self.others = true;
        if !self.low.is_empty() {
            self.turn.other();
        }
    }

    /// Notes that limits have changed: all waiting requests are checked again.
    pub(crate) fn limits_changed(&mut self) {
        let now = Instant::now();
        self.throttled.iter_mut().for_each(|throttled| throttled.until = now);
    }

    /// Removes the waiting requests of a session, in order.
    fn take_all(&mut self, session: u64) -> Vec<Kept> {
        let is_of_session = |throttled: &Throttled| throttled.kept.session == session;
        let throttled = take_some(&mut self.throttled, is_of_session);
        let due = take_some(&mut self.due, is_of_session);
        let unknown = take_some(&mut self.unknown, |(_, kept)| kept.session == session);
        // Those of low priority have not come to their limits yet.
        let low = take_some(&mut self.low, |kept| kept.session == session);
        let limited = throttled.into_iter().chain(due).map(|throttled| throttled.kept);
        limited.chain(unknown.into_iter().map(|(_, kept)| kept)).chain(low).collect()
    }

    /// Returns true if a request of the session is held back.
    pub(crate) fn holds(&self, session: u64) -> bool {
        let limited = self.throttled.iter().chain(&self.due).map(|throttled| &throttled.kept);
        let unknown = self.unknown.iter().map(|(_, kept)| kept);
        limited.chain(unknown).chain(&self.low).any(|kept| kept.session == session)
    }

    /// Keeps a request until the groups of its user are known.
    pub(crate) fn keep_for(&mut self, user: u32, arrived: &Arrived<'_>) {
        self.unknown.push_back((user, arrived.keep()));
    }

    /// Forgets the waiting requests of a session and returns their slots.
    pub(crate) fn forget(&mut self, session: u64) -> Vec<u16> {
        self.take_all(session).iter().map(|kept| kept.header.slot).collect()
    }

    /// Removes a request for locks or events that is held back and was given up.
    pub(crate) fn take_given_up(&mut self, session: u64, header: &Header) -> Option<Kept> {
        let given_up = |kept: &Kept| kept.is_given_up(session, header);
        if let Some(place) = self.low.iter().position(given_up) {
            return self.low.remove(place);
        }
        if let Some(place) = self.unknown.iter().position(|(_, kept)| given_up(kept)) {
            return self.unknown.remove(place).map(|(_, kept)| kept);
        }
        let place = self.throttled.iter().position(|other| given_up(&other.kept))?;
        self.throttled.remove(place).map(|throttled| throttled.kept)
    }
}

/// Removes the elements for which `is_taken` is true.
fn take_some<T>(queue: &mut VecDeque<T>, is_taken: impl Fn(&T) -> bool) -> VecDeque<T> {
    let (taken, others) = std::mem::take(queue).into_iter().partition(is_taken);
    *queue = others;
    taken
}

/// Returns how many bytes a request moves: none if it is longer than any that is carried out.
fn bytes_of(request: &Request<'_>) -> u64 {
    match request {
        Request::DiskRead { length, .. } | Request::DiskWrite { length, .. }
            if *length as usize <= TRANSFER_BYTES_MAX =>
        {
            (*length).into()
        }
        _ => 0,
    }
}

impl Core {
    /// Begins a request, or holds it back if its client has low priority.
    ///
    /// # Errors
    /// The request is malformed.
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

    /// Returns true if a request of low priority could begin.
    pub(crate) fn has_low_request(&self) -> bool {
        self.waiting.low.iter().any(|kept| self.has_room(kept.session))
    }

    /// Returns true if the answer to a request can be sent, or can never be sent.
    fn has_room(&self, session: u64) -> bool {
        let lane = self.sessions.get(session).and_then(|served| served.lane);
        let lane = lane.and_then(|lane| self.lanes.get(lane as usize)?.as_ref());
        lane.is_none_or(|lane| !lane.is_full())
    }

    /// Begins requests of low priority. If others have sent requests in this turn, begins only as many as are
    /// due; otherwise, until others do.
    pub(crate) fn begin_low(&mut self) {
        let others = std::mem::take(&mut self.waiting.others);
        if self.waiting.low.is_empty() {
            return;
        }
        // The others' answers and grants leave first.
        self.grant();
        self.flush_dirty();
        for _ in 0..self.waiting.low.len() {
            if others && !self.waiting.turn.is_low_due() {
                return;
            }
            // Requests of one session stay in order, since they wait for the same lane.
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

    /// Begins a request that was held back; with `may_wait`, it may be held back again.
    pub(crate) fn begin_kept(&mut self, kept: Kept, may_wait: bool) {
        if let Err((lane, error)) = self.try_kept(kept, may_wait) {
            self.close_lane(lane, &io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }

    /// Does the same, but leaves it to the caller to close the lane.
    ///
    /// # Errors
    /// The request that came over this lane is malformed.
    fn try_kept(&mut self, kept: Kept, may_wait: bool) -> Result<(), (usize, ProtocolError)> {
        let Kept { session, header, body, payload, at } = kept;
        let lane = self.sessions.get(session).and_then(|served| served.lane);
        let Some(lane) = lane.map(|lane| lane as usize) else { return Ok(()) };
        let (header, body, payload) = (&header, &body[..], &payload[..]);
        self.closing.clear();
        requests_arrived(Instant::now());
        let (ahead, is_followed) = (0, false);
        let arrived =
            Arrived { session, lane, header, ahead, body, payload, at, may_wait, is_followed };
        self.begin_request(&arrived).map_err(|error| (lane, error))
    }

    /// Begins the requests that wait for the groups of this user.
    pub(crate) fn begin_kept_for(&mut self, user: u32) {
        for (_, kept) in take_some(&mut self.waiting.unknown, |(other, _)| *other == user) {
            match self.sessions.get(kept.session).is_some_and(|served| served.is_low) {
                true => self.waiting.low.push_back(kept),
                false => self.begin_kept(kept, true),
            }
        }
    }

    /// Begins all requests of a session whose lane ends, if it belongs to a `towline run`: the process may
    /// have been killed, but it relies on them. Other clients send them again.
    pub(crate) fn begin_all_of(&mut self, session: u64) {
        if !self.sessions.get(session).is_some_and(|served| served.session.family) {
            return;
        }
        for kept in self.waiting.take_all(session) {
            // A malformed one could only end the lane, which ends anyway; the others still need it.
            if let Err((_, error)) = self.try_kept(kept, false) {
                complaints::warn(format_args!(
                    "a request that was held back breaks the protocol: {error}"
                ));
            }
        }
    }

    /// Returns true, and keeps the request, if it has to wait because its client has used up its limit or has
    /// another request waiting for that. Otherwise charges for the request and for `bytes` bytes.
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

    /// Does the same for a request to a disk.
    pub(crate) fn throttle_disk(&mut self, request: &Request<'_>, arrived: &Arrived<'_>) -> bool {
        let disk = request.disk();
        let served = self.sessions.get(arrived.session);
        let meter = served.zip(disk).and_then(|(served, disk)| served.disks.meter(disk));
        meter.is_some_and(|meter| self.waits_for(&meter, bytes_of(request), arrived))
    }

    /// Returns the meter for a file request, if the export of one of its operations limits clients: that of the
    /// first one which does. The bytes that it reads are charged when their number is known.
    pub(crate) fn file_meter(&mut self, arrived: &Arrived<'_>) -> Option<Arc<Meter>> {
        if !self.shared.exports.are_limited() {
            return None;
        }
        let mut requests = Operations::of(arrived.body).map_while(Result::ok);
        requests.find_map(|request| self.meter_of(&request, arrived))
    }

    /// Does the same for one operation.
    fn meter_of(&mut self, request: &Request<'_>, arrived: &Arrived<'_>) -> Option<Arc<Meter>> {
        let exports = &self.shared.exports;
        let served = self.sessions.get_mut(arrived.session)?;
        let terms = match request {
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

    /// Begins requests that have waited long enough.
    pub(crate) fn resume_throttled(&mut self) {
        let Some(wake) = self.waiting.next_wake() else { return };
        let now = Instant::now();
        if wake > now {
            return;
        }
        self.waiting.due = std::mem::take(&mut self.waiting.throttled);
        while let Some(throttled) = self.waiting.due.pop_front() {
            if throttled.until > now {
                self.waiting.throttled.push_back(throttled);
                continue;
            }
            // Checked again: another request may have been faster, and then this one waits again.
            self.begin_kept(throttled.kept, true);
        }
    }
}

/// Returns the client at the other end, for limits, which all its connections share.
pub(crate) fn client_of(link: &Link) -> Option<ClientKey> {
    let fd = link.fd()?;
    match link.kind() {
        LinkKind::Tcp => {
            let address = SocketAddr::try_from(rustix::net::getpeername(fd).ok()??);
            Some(ClientKey::Machine(address.ok()?.ip().to_canonical()))
        }
        // All processes that cannot be seen from here are one client.
        _ => {
            Some(ClientKey::Process(peer_credentials(fd).ok()?.process.map_or(0, Pid::as_raw_pid)))
        }
    }
}
