//! Handles what arrives over a link: puts data in its place, and dispatches control messages.

use crate::choose::Strategy;
use crate::counters::Way;
use crate::limits::{MESSAGE_BYTES_MAX, MESSAGE_COST_BYTES, MESSAGE_WINDOW_BYTES};
use crate::message::{Control, operation_of, stream};
use crate::owner::PUSH_BIT;
use crate::state::{Arrived, BUFFER_BYTES, PeerId, State};
use std::sync::Arc;
use towline_net::{Incoming, Sink, Target};
use towline_wire::{Header, Kind, ProtocolError};

struct Arrivals<'a> {
    state: &'a mut State,
    peer: PeerId,
}

fn wrong(what: &'static str) -> ProtocolError {
    ProtocolError { what, at: 0 }
}

impl State {
    /// Receives what has arrived from a peer, up to a share that leaves a turn to other peers.
    pub(crate) fn receive_from(&mut self, id: PeerId) {
        const ROUNDS: usize = 64;
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let (link, counters) = (peer.link.clone(), self.counters.clone());
        let mut input = std::mem::take(&mut peer.input);
        let mut scratch = std::mem::take(&mut self.scratch);
        for _ in 0..ROUNDS {
            let mut arrivals = Arrivals { state: self, peer: id };
            match input.receive(&link, &mut scratch, None, &mut arrivals, &counters) {
                Ok(Incoming::Progress) => self.flush(id), // grants and answers leave early
                Ok(Incoming::Drained) => break,
                Ok(Incoming::Closed) | Err(_) => self.lose(id),
            }
            if !self.peers.contains_key(&id) {
                break;
            }
        }
        self.scratch = scratch;
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.input = input;
        }
    }
}

impl Arrivals<'_> {
    /// Checks a data message. Returns `Ok(false)` for data that is no longer wanted.
    fn check_data(&self, header: &Header) -> Result<bool, ProtocolError> {
        let number = operation_of(header);
        let end = header.offset.checked_add(header.payload_bytes.into());
        let (Some(end), 1..) = (end, header.payload_bytes) else {
            return Err(wrong("data is empty or beyond all transfers"));
        };
        match header.flags {
            stream::FETCH => {
                let operation = self.state.operations.get(&(number >> 16));
                let run = operation
                    .filter(|op| !op.is_finished)
                    .and_then(|op| op.runs.get((number & 0xffff) as usize));
                let Some(run) = run.filter(|run| run.peer == self.peer) else { return Ok(false) };
                if run.strategy != Some(Strategy::Pull) || !run.source.is_empty() {
                    return Err(wrong("data of a fetch that gets none"));
                }
                if header.offset != run.received || end > run.granted || run.buffers.is_empty() {
                    return Err(wrong("data without a grant"));
                }
            }
            stream::UPDATE => {
                let landing = self.state.landings.get(&(self.peer, number));
                let Some(landing) = landing else { return Ok(false) };
                let granted = (landing.applied + BUFFER_BYTES).min(landing.length);
                let whole = header.offset == landing.applied && end == granted;
                if !whole || landing.buffer.is_none() {
                    return Err(wrong("write-back without a grant"));
                }
            }
            stream::PUSH => {
                if number & PUSH_BIT == 0 {
                    return Err(wrong("push without the number of one"));
                }
                let pushed = self.state.pushed.get(&(self.peer, number));
                let (length, buffers, closed) =
                    pushed.map_or((0, 0, false), |p| (p.length, p.buffers.len(), p.holders > 0));
                let missing = end.div_ceil(BUFFER_BYTES).saturating_sub(buffers as u64);
                let reserve = self.state.peers.get(&self.peer).map_or(0, |peer| peer.push_in.len());
                // When the payload is complete, its buffers were already taken, so none is missing.
                if header.offset != length || closed || missing > reserve as u64 {
                    return Err(wrong("push into memory without a grant"));
                }
            }
            _ => return Err(wrong("data of an unknown kind")),
        }
        Ok(true)
    }

    fn data(&mut self, header: &Header) -> Result<(), ProtocolError> {
        if !self.check_data(header)? {
            return Ok(());
        }
        let (number, count) = (operation_of(header), u64::from(header.payload_bytes));
        match header.flags {
            stream::FETCH => self.state.received(self.peer, number, count),
            stream::UPDATE => self.state.landed(self.peer, number, count),
            _ => {
                if let Some(pushed) = self.state.pushed.get_mut(&(self.peer, number)) {
                    pushed.length += count;
                }
                let counts = self.state.counts.at(Way::Push);
                counts.bytes_in += count;
                counts.bytes_copied += count;
            }
        }
        Ok(())
    }

    /// Returns the memory for data that [`Self::check_data`] has accepted.
    fn place_of(&mut self, header: &Header, done: usize) -> Option<&mut [u8]> {
        let number = operation_of(header);
        let at = header.offset + done as u64;
        let inside = (at % BUFFER_BYTES) as usize;
        match header.flags {
            stream::FETCH => {
                let run = self.state.asked(Some(self.peer), number)?;
                let buffer = run.buffers.get_mut((at / BUFFER_BYTES) as usize)?;
                Some(&mut buffer.bytes_mut()[inside..])
            }
            stream::UPDATE => {
                let landing = self.state.landings.get_mut(&(self.peer, number))?;
                Some(&mut landing.buffer.as_mut()?.bytes_mut()[done..])
            }
            _ => {
                let peer = self.state.peers.get_mut(&self.peer)?;
                let pushed = self.state.pushed.entry((self.peer, number)).or_default();
                let index = (at / BUFFER_BYTES) as usize;
                if index == pushed.buffers.len() {
                    pushed.buffers.push(Arc::new(peer.push_in.pop()?));
                    peer.push_used += 1;
                }
                let buffer = Arc::get_mut(pushed.buffers.get_mut(index)?)?;
                Some(&mut buffer.bytes_mut()[inside..])
            }
        }
    }

    fn control(&mut self, body: &[u8], payload: &[u8]) -> Result<(), ProtocolError> {
        let peer = self.peer;
        let control = Control::decode(body)?;
        let takes_payload = matches!(
            control,
            Control::Done { .. } | Control::Update { strategy: Strategy::Inline, .. }
        );
        if !payload.is_empty() && !takes_payload {
            return Err(wrong("unexpected payload"));
        }
        match control {
            Control::Message { pushed, bytes } => return self.arrived(pushed, bytes),
            Control::Window { bytes } => {
                if let Some(peer) = self.state.peers.get_mut(&peer) {
                    let window = peer.window_out.saturating_add(bytes as usize);
                    peer.window_out = window.min(MESSAGE_WINDOW_BYTES);
                }
            }
            Control::Fetch { operation, want, granted, ranges } => {
                return self.state.fetch(peer, operation, want, granted, &ranges);
            }
            Control::Grant { operation, owner, until } => {
                // Each grant, however small, is answered by a message.
                self.state.check_reads(peer)?;
                self.state.granted(peer, operation, owner, until);
            }
            Control::Done { operation } => return self.state.done(peer, operation, payload),
            Control::Regions { operation, regions } => {
                return self.state.read_regions(peer, operation, &regions);
            }
            Control::Mapped { operation, memories, places } => {
                return self.state.map(peer, operation, memories, &places);
            }
            Control::Failed { operation, errno } => self.state.failed(operation, peer, errno),
            Control::Close { operation, acknowledged } => {
                self.state.end_lease(peer, operation, Some(acknowledged));
                self.state.end_landing(peer, operation);
            }
            Control::PushGrant { buffers } => {
                if let Some(peer) = self.state.peers.get_mut(&peer) {
                    peer.push_out = peer.push_out.saturating_add(buffers);
                }
            }
            Control::Update { operation, strategy, pushed, ranges } => {
                return self.state.update(peer, operation, strategy, pushed, ranges, payload);
            }
        }
        Ok(())
    }

    /// Queues a message from the peer's program.
    fn arrived(
        &mut self,
        pushed: Option<(u64, Vec<crate::message::Range>)>,
        bytes: &[u8],
    ) -> Result<(), ProtocolError> {
        let Some(peer) = self.state.peers.get_mut(&self.peer) else { return Ok(()) };
        let cost = bytes.len().max(MESSAGE_COST_BYTES);
        peer.window_in += cost;
        if bytes.len() > MESSAGE_BYTES_MAX || peer.window_in > MESSAGE_WINDOW_BYTES {
            return Err(wrong("message longer than the window"));
        }
        if let Some((number, ranges)) = &pushed {
            let length = ranges.iter().map(|range| range.length).sum::<u64>();
            let data = self.state.pushed.get_mut(&(self.peer, *number));
            let Some(data) = data.filter(|p| p.holders == 0 && p.length == length) else {
                return Err(wrong("message with data that was not pushed"));
            };
            data.holders = 1;
            data.ranges.clone_from(ranges);
        }
        self.state.inbox.push_back(Arrived {
            peer: self.peer,
            bytes: bytes.to_vec(),
            pushed: pushed.map(|(number, _)| number),
            cost,
        });
        Ok(())
    }
}

impl Sink for Arrivals<'_> {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        match header.kind {
            Kind::Request => self.control(body, payload),
            Kind::Data if body.is_empty() => self.data(header),
            _ => Err(wrong("message of an unknown kind")),
        }
    }

    fn place(
        &mut self,
        header: &Header,
        _body: &[u8],
        done: usize,
        _rest: usize,
    ) -> Option<Target<'_>> {
        if header.kind != Kind::Data || !self.check_data(header).unwrap_or(false) {
            return None;
        }
        self.place_of(header, done).map(Target::Own)
    }

    fn expects_bulk(&self) -> bool {
        let state = &*self.state;
        let granted = state.peers.get(&self.peer).is_some_and(|peer| !peer.push_in.is_empty());
        let landing = |(key, landing): (&(PeerId, u64), &crate::state::Landing)| {
            key.0 == self.peer && landing.buffer.is_some()
        };
        let pulls = |run: &crate::operation::Run| {
            run.peer == self.peer
                && run.strategy == Some(Strategy::Pull)
                && run.received < run.granted
        };
        granted
            || state.landings.iter().any(landing)
            || state.operations.values().any(|op| !op.is_finished && op.runs.iter().any(pulls))
    }

    fn announced(&mut self, header: &Header) -> Result<(), ProtocolError> {
        match header.kind {
            Kind::Request | Kind::Data => Ok(()),
            _ => Err(wrong("message of an unknown kind")),
        }
    }
}
