//! Handles each message that a core receives from a lane.

use crate::core::{Core, elapsed_ns};
use crate::grants::{COPIED_FOR, Running};
use crate::guarded::guarded;
use crate::handshake;
use crate::lane::Lane;
use crate::stats::SPLIT_EVERY;
use crate::waiting::Arrived;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_mem::Aggregate;
use towline_net::{Payload, Sink, Target};
use towline_session::slots::Arrival;
use towline_store::directory::requests_arrived;
use towline_wire::header::{data_flag, reply_flag, request_flag};
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::request::is_repeatable;
use towline_wire::{Errno, Header, Kind, ProtocolError, Request};

/// Longest body of a hello, with room for additions in later versions.
const HELLO_BYTES_MAX: u32 = 1024;

/// A core while it reads from one of its lanes.
pub(crate) struct Serving<'a> {
    pub(crate) core: &'a mut Core,
    /// The stores have been told that a request arrived.
    pub(crate) news: bool,
    /// When the first of the requests was taken that are taken while they are still in a ring.
    pub(crate) since: Option<Instant>,
    /// Another request follows the next one.
    pub(crate) is_followed: bool,
    pub(crate) index: usize,
}

fn wrong<T>(what: &'static str) -> Result<T, ProtocolError> {
    Err(ProtocolError { what, at: 0 })
}

impl Serving<'_> {
    fn session(&self) -> Option<u64> {
        self.core.lanes[self.index].as_ref()?.session
    }

    /// Returns the file request that a message belongs to.
    fn running(&mut self, session: u64, header: &Header) -> Option<&mut Running> {
        let served = self.core.sessions.get_mut(session)?;
        let running = served.running.get_mut(usize::from(header.slot))?.as_deref_mut();
        running.filter(|running| running.sequence == header.sequence)
    }

    /// Returns true if there is a place for data that was sent ahead.
    fn is_awaited(&mut self, session: u64, header: &Header) -> bool {
        match self.running(session, header) {
            Some(running) => running.grants.front().is_some_and(|grant| grant.ahead),
            None => {
                let served = self.core.sessions.get_mut(session);
                served.is_some_and(|served| served.disks.awaits_ahead(header))
            }
        }
    }

    fn request(
        &mut self,
        session: u64,
        header: &Header,
        body: &[u8],
        payload: &[u8],
        is_followed: bool,
    ) -> Result<(), ProtocolError> {
        let mut own = *header;
        let (ahead, header) = (own.take_ahead(), &own);
        // Files closed before this request must be closed before it runs.
        if !self.core.closing.is_empty() {
            self.core.closing.clear();
        }
        let arrived = Instant::now();
        if !std::mem::replace(&mut self.news, true) {
            requests_arrived(arrived);
        }
        let Some(Some(lane)) = self.core.lanes.get_mut(self.index) else { return Ok(()) };
        let Some(served) = self.core.sessions.get_mut(session) else { return Ok(()) };
        if served.has_ended {
            return Ok(());
        }
        lane.ahead = ahead > 0;
        lane.place.begin();
        let is_low = served.is_low;
        let arrival = served.session.slots.arrive(header)?;
        if let Some(loans) = &mut lane.loans {
            loans.take_back(header);
        }
        match arrival {
            Arrival::Running if !served.comes_again(header.slot) => {}
            Arrival::Running => {
                // Sent again on a new lane, so the client still wants what it waits for.
                let running = served.running.get_mut(usize::from(header.slot));
                if let Some(running) = running.and_then(|r| r.take_if(|r| r.waits)) {
                    self.core.drive(session, header.slot, running, arrived);
                    return Ok(());
                }
                if served.is_transfer(header.slot) {
                    self.core.grant_queue.push(served.is_low, (session, header.slot));
                }
                if served.disks.is_transfer(header.slot) {
                    self.core.disk_grants.push(served.is_low, (session, header.slot));
                }
            }
            Arrival::Replay(mut reply) => {
                self.core.statistics.replays.fetch_add(1, Ordering::Relaxed);
                reply[1] = reply[1] & !reply_flag::AHEAD | reply_flag::REPLAYED;
                if let Some(Some(lane)) = self.core.lanes.get_mut(self.index) {
                    lane.out.push(Aggregate::from_vec(reply), header.slot, header.sequence);
                }
            }
            Arrival::Execute => {
                if let Some(left) = served.session.slots.take_left(header.slot) {
                    self.core.close_left(session, left);
                }
                let lane = self.index;
                let at = arrived;
                let may_wait = true;
                let arrived = Arrived {
                    session,
                    lane,
                    header,
                    ahead,
                    body,
                    payload,
                    at,
                    may_wait,
                    is_followed,
                };
                self.core.take_request(&arrived, is_low)?;
            }
        }
        Ok(())
    }

    /// Writes a fragment that has arrived completely, and continues the request after the last one.
    fn data(&mut self, session: u64, header: &Header) -> Result<(), ProtocolError> {
        let is_ahead = header.flags & data_flag::AHEAD != 0;
        if is_ahead && !self.is_awaited(session, header) {
            return Ok(());
        }
        if self.core.disk_data(session, self.index, header)? {
            return Ok(());
        }
        // The data may be late: its write stopped early, and a later operation of the request is waiting.
        let Some(running) = self.running(session, header).filter(|running| running.is_transfer())
        else {
            return Ok(());
        };
        // Checked before the request is taken: it goes on if the client sends it again on its next lane.
        let Some(grant) = running.grants.front() else { return wrong("data without a grant") };
        let is_granted =
            grant.offset == header.offset && grant.length == header.payload_bytes as usize;
        if !is_granted || grant.placed != grant.length || grant.ahead != is_ahead {
            return wrong("data does not match its grant");
        }
        let Some(mut running) = self.core.take_running(session, header.slot, header.sequence)
        else {
            return Ok(());
        };
        let Some(mut grant) = running.grants.pop_front() else { return Ok(()) };
        if let Some(Some(lane)) = self.core.lanes.get_mut(self.index) {
            lane.granted = lane.granted.saturating_sub(1);
            lane.since = Instant::now();
        }
        if let Some(store) = running.compound.writes_elsewhere().cloned() {
            running.landed.push(grant);
            self.core.write_elsewhere(session, header.slot, running, store);
            return Ok(());
        }
        let start = Instant::now();
        let bytes = &grant.buffer.buffer().bytes()[..grant.length];
        let last = guarded(|| running.compound.write_fragment(bytes)).unwrap_or_else(|| {
            running.compound.broken();
            true
        });
        let took = elapsed_ns(start);
        running.stages.storage += took;
        running.stages.overlapped += took;
        running.fetched = true;
        drop(grant);
        self.core.wrote(session, header.slot, running, last);
        Ok(())
    }

    fn cancel(&mut self, session: u64, header: &Header) {
        // Only a wait for a lock or an event can be cancelled, and it has to begin first.
        if let Some(kept) = self.core.waiting.take_given_up(session, header) {
            self.core.begin_kept(kept, false);
        }
        let awaited = self.running(session, header).map(|running| &mut running.compound);
        let gives_up = awaited.filter(|compound| compound.waits_for_events());
        if let Some(compound) = gives_up {
            compound.interrupted();
            if let Some(running) = self.core.take_running(session, header.slot, header.sequence) {
                self.core.drive(session, header.slot, running, Instant::now());
            }
            return;
        }
        let shared = &self.core.shared;
        let waited = shared.locks.lock().cancel(session, header.slot, header.sequence);
        if !waited {
            // The request may be about to ask for the lock, or to ask again, or threads may have it.
            if let Some(served) = self.core.sessions.get_mut(session) {
                served.session.slots.cancel(header.slot, header.sequence);
            }
            return;
        }
        if let Some(mut running) = self.core.take_running(session, header.slot, header.sequence) {
            running.compound.locked(Err(Errno::EINTR));
            self.core.drive(session, header.slot, running, Instant::now());
        }
    }
}

/// Returns true for a request that a server which shuts down must not begin: it waits for data, which may
/// not come in time, after operations that its client could not repeat.
fn is_for_the_next_server(arrived: &Arrived<'_>) -> bool {
    arrived.header.offset > 0 && !is_repeatable(arrived.body)
}

impl Core {
    /// Begins a request, or leaves it to the next server if this one shuts down.
    ///
    /// # Errors
    /// The request is malformed. Its lane has to end, and its slot is free.
    pub(crate) fn begin_request(&mut self, arrived: &Arrived<'_>) -> Result<(), ProtocolError> {
        if self.draining.is_some() && is_for_the_next_server(arrived) {
            return Ok(());
        }
        let begun = self.try_begin(arrived);
        if begun.is_err()
            && let Some(served) = self.sessions.get_mut(arrived.session)
        {
            // The session outlives the lane, and its client would wait for an answer for ever.
            served.session.slots.answer(arrived.header.slot, None);
        }
        begun
    }

    fn try_begin(&mut self, arrived: &Arrived<'_>) -> Result<(), ProtocolError> {
        let Arrived { session, lane, header, ahead, body, payload, at, .. } = *arrived;
        // A request that has to wait does not use its advance grant.
        let leave = match (ahead, header.offset) {
            (0, 0) => None,
            _ => self.sessions.get_mut(session).and_then(|served| served.take_leave(ahead, at)),
        };
        if body.first().is_some_and(|tag| Request::is_disk_tag(*tag)) {
            if let Some(served) = self.sessions.get_mut(session) {
                // The record of what the slot did before a restart is no longer needed.
                served.session.take_recorded(header.slot);
            }
            let is_ahead = leave.is_some();
            drop(leave); // so that the write can have its buffer
            self.disk_request(arrived)?;
            if is_ahead {
                self.expect_ahead(session, lane, header, ahead);
            }
            return Ok(());
        }
        // Before it is charged: a client must not owe what it could never send.
        if header.offset > TRANSFER_BYTES_MAX as u64 {
            return wrong("write longer than the limit");
        }
        if self.waits_for_groups(arrived) {
            return Ok(());
        }
        let meter = self.file_meter(arrived);
        let written = header.offset + payload.len() as u64;
        if meter.as_ref().is_some_and(|meter| self.waits_for(meter, written, arrived)) {
            return Ok(());
        }
        let Some(served) = self.sessions.get_mut(session) else { return Ok(()) };
        let peer = self.lanes.get(lane).and_then(|lane| lane.as_ref()?.peer.as_ref());
        let caller = self.callers.find(header.word_a, header.word_b, peer);
        let spare = self.spare.take();
        let mut running = spare.unwrap_or_else(|| Box::new(Running::new(caller, at)));
        let Header { slot, sequence, offset, .. } = *header;
        let only = running.compound.begin(slot, sequence, body, payload, offset)?;
        if served.promise_broken.is_some_and(|since| at < since + COPIED_FOR) {
            running.compound.copy();
        }
        let recorded = served.session.take_recorded(header.slot);
        if let Some(journal) = &served.session.journal
            && running.compound.keep(journal, recorded)
        {
            self.statistics.replays.fetch_add(1, Ordering::Relaxed);
        }
        if !Arc::ptr_eq(&running.caller, caller) {
            running.caller = caller.clone();
        }
        running.sequence = header.sequence;
        running.borrows = header.flags & request_flag::BORROWS != 0;
        running.arrived = at;
        running.meter = meter;
        running.ahead = leave.map(|leave| (leave.buffer, ahead as usize));
        if arrived.is_followed && running.compound.lists() {
            running.helper = self.helper();
            if running.helper.is_some() {
                running.compound.share();
            }
        }
        running.stages.is_split = header.sequence % SPLIT_EVERY == 1;
        let now = if running.stages.is_split { Instant::now() } else { at };
        self.drive_only(session, slot, running, now, only.as_ref());
        Ok(())
    }
}

impl Sink for Serving<'_> {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let is_followed = std::mem::take(&mut self.is_followed);
        if header.kind == Kind::Hello {
            let hello = handshake::parse(header, body)?;
            let Some(Some(lane)) = self.core.lanes.get_mut(self.index) else { return Ok(()) };
            if lane.session.is_some() || lane.hello.replace(hello).is_some() {
                return wrong("second hello on a connection");
            }
            return Ok(());
        }
        let Some(session) = self.session() else { return wrong("message before the hello") };
        match header.kind {
            Kind::Request => self.request(session, header, body, payload, is_followed),
            Kind::Data => self.data(session, header),
            Kind::Cancel => {
                self.cancel(session, header);
                Ok(())
            }
            Kind::Release => {
                let lane = self.core.lanes[self.index].as_mut();
                if let Some(loans) = lane.and_then(|lane| lane.loans.as_mut()) {
                    loans.take_back(header);
                }
                Ok(())
            }
            Kind::Processor => {
                if let Some(lane) = self.core.lanes[self.index].as_mut() {
                    lane.told = Some(header.word_a);
                }
                Ok(())
            }
            Kind::Goodbye => {
                self.core.begin_all_of(session);
                self.core.end_session(session);
                Ok(())
            }
            _ => wrong("message of a kind that only servers send"),
        }
    }

    fn message_in_place(
        &mut self,
        header: &Header,
        body: &[u8],
        length: usize,
    ) -> Result<bool, ProtocolError> {
        let Some(session) = self.session() else { return Ok(false) };
        self.since.get_or_insert_with(Instant::now);
        Ok(self.core.take_write(session, self.index, header, body, length))
    }

    fn land(&mut self, payloads: &[Payload<'_>]) {
        if let (Some(session), Some(since)) = (self.session(), self.since.take()) {
            self.core.land_taken(session, self.index, payloads, since);
        }
        debug_assert!(self.core.taken.is_empty(), "all that was taken is landed");
    }

    fn place(
        &mut self,
        header: &Header,
        _body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>> {
        let session = self.session()?;
        let is_ahead = header.flags & data_flag::AHEAD != 0;
        if self.running(session, header).is_none() {
            return self.core.disk_place(session, header, done, rest);
        }
        let grant = self.running(session, header)?.grants.front_mut()?;
        let is_granted = grant.offset == header.offset && done + rest <= grant.length;
        // Data that began before it was granted lacks its beginning in the buffer, which held other clients'
        // data.
        if !is_granted || grant.placed != done || grant.ahead != is_ahead {
            return None;
        }
        Some(Target::Own(&mut grant.buffer.buffer().bytes_mut()[done..done + rest]))
    }

    fn placed(&mut self, header: &Header, count: usize) {
        let Some(Some(lane)) = self.core.lanes.get_mut(self.index) else { return };
        lane.progressed = true;
        let Some(session) = lane.session else { return };
        match self.running(session, header).map(|running| running.grants.front_mut()) {
            Some(grant) => grant.into_iter().for_each(|grant| grant.placed += count),
            None => self.core.disk_placed(session, header, count),
        }
    }

    fn expects_bulk(&self) -> bool {
        self.core.lanes[self.index].as_ref().is_some_and(|lane| lane.granted > 0 || lane.ahead)
    }

    fn upcoming(&mut self, header: &Header, body: &[u8]) {
        self.is_followed = header.kind == Kind::Request;
        if header.kind == Kind::Request
            && header.payload_bytes > 0
            && body.first().is_some_and(|tag| Request::is_disk_tag(*tag))
            && let Some(session) = self.session()
        {
            self.core.expect_disk_request(session, body);
        }
    }

    fn announced(&mut self, header: &Header) -> Result<(), ProtocolError> {
        // A client that has not said hello gets no memory for messages of any size.
        let is_hello = header.kind == Kind::Hello && header.body_bytes <= HELLO_BYTES_MAX;
        if is_hello || self.session().is_some() {
            Ok(())
        } else {
            wrong("message before the hello")
        }
    }

    fn is_full(&self) -> bool {
        self.core.lanes[self.index].as_ref().is_some_and(Lane::is_full)
    }
}
