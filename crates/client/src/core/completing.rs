//! Completes requests with the messages that the leading thread receives.

use super::sending::coarse_ms;
use super::{Checked, Core, Out, Slot, State, Status};
use crate::Error;
use crate::borrow::{Borrowed, Refusal};
use crate::lent::exclusive;
use parking_lot::MutexGuard;
use std::sync::Arc;
use towline_net::{Link, Payload, Sink, Target};
use towline_wire::disk::checksum_bytes;
use towline_wire::header::{data_flag, notice, reply_flag, request_flag};
use towline_wire::limits::{
    AHEAD_MILLISECONDS, FRAGMENT_BYTES_MAX, GRANTS_MAX, INLINE_BYTES_MAX, SLOTS_MAX,
};
use towline_wire::{Errno, Header, Kind, ProtocolError};

/// Longer payloads are copied with the state unlocked.
const COPIED_IN_PLACE_MAX: usize = INLINE_BYTES_MAX;

/// Receives messages for the leader.
pub(super) struct Completing<'a, 'l> {
    pub(super) core: &'a Arc<Core>,
    pub(super) link: &'l Arc<Link>,
    /// Locked from the first message on, once for all messages received together.
    pub(super) state: Option<MutexGuard<'a, State>>,
    /// Messages to send in response: granted data, and requests to be resent.
    pub(super) answers: Vec<Out>,
    /// Bulk data is expected.
    pub(super) bulk: bool,
}

impl Slot {
    /// Counts data that arrived. Returns false if the request is over or the data does not fit its
    /// target.
    fn land(&mut self, header: &Header, length: u64) -> bool {
        let end = header.offset.checked_add(length);
        let has_place = matches!(self.status, Status::Waiting)
            && end.is_some_and(|end| end <= self.target.len() as u64);
        if has_place {
            self.landed += length;
        }
        has_place
    }

    /// Keeps the checksums of data that arrived, at most for as many bytes as the target holds.
    fn note_checksums(&mut self, header: &Header, sums: &[u8]) -> Result<(), ProtocolError> {
        let (at, length) = (header.offset, header.payload_bytes);
        let fit = length > 0 && sums.len() == checksum_bytes(length as usize);
        if !fit || self.landed > self.target.len() as u64 {
            return Err(ProtocolError { what: "checksums of data that did not arrive", at: 0 });
        }
        self.checksums.push(Checked { at, length, sums: sums.to_vec() });
        Ok(())
    }

    /// Fills with zeroes what the server announces as a hole instead of sending it.
    fn fill_hole(&mut self, header: &Header) -> Result<(), ProtocolError> {
        let length = header.word_b as usize;
        if !self.land(header, length as u64) {
            return Err(ProtocolError { what: "hole beyond the requested range", at: 16 });
        }
        self.target.each_part(header.offset as usize, length, |_, part| part.fill(0));
        Ok(())
    }
}

/// Returns what a reply lends. Returns `None` if this process cannot map it; `answers` then
/// contains the request, to be resent.
fn borrow(
    state: &mut State,
    answers: &mut Vec<Out>,
    link: &Arc<Link>,
    header: &Header,
    body: &[u8],
) -> Result<Option<Borrowed>, ProtocolError> {
    let slot = &mut state.slots[usize::from(header.slot)];
    slot.indebted = header.flags & reply_flag::LIVE == 0;
    let borrowed = match &mut state.memories {
        Some(memories) => memories.borrow(header, body, link, slot.target.len()),
        None => Err(Refusal::Unmapped),
    };
    match borrowed {
        Ok(borrowed) => Ok(Some(borrowed)),
        Err(Refusal::Illegal(error)) => Err(error),
        Err(Refusal::Unmapped) => {
            // For example, address space may be short. From now on all data is sent; other requests
            // may already have asked to borrow.
            state.memories = None;
            let mut asked = false;
            slot.change_header(|header| {
                asked = header.flags & request_flag::BORROWS != 0;
                header.flags &= !request_flag::BORROWS;
            });
            if !asked {
                return Err(ProtocolError { what: "memory lent without a request", at: 1 });
            }
            slot.indebted = false;
            answers.push(slot.out(header.slot));
            Ok(None)
        }
    }
}

/// Forgets a memory that the server will not lend from again.
fn forget(state: &mut State, link: &Link, number: u64) -> Result<(), ProtocolError> {
    let Some(memories) = &mut state.memories else { return Ok(()) };
    match memories.forget(number, link) {
        Err(Refusal::Illegal(error)) => Err(error),
        Err(Refusal::Unmapped) => {
            state.memories = None;
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// The slot that a message is for, unless it has since been used for another request.
fn current<'a>(state: &'a mut State, header: &Header) -> Option<&'a mut Slot> {
    let slot = state.slots.get_mut(usize::from(header.slot))?;
    (slot.sequence == header.sequence).then_some(slot)
}

/// Where a part of the payload of a reply or data message belongs, or its first bytes if that is not one piece.
fn place_of<'a>(
    state: &mut State,
    header: &Header,
    done: usize,
    rest: usize,
) -> Option<&'a mut [u8]> {
    // Once the request is answered its buffer may be freed at any moment, whatever the server
    // sends.
    let slot = current(state, header).filter(|slot| matches!(slot.status, Status::Waiting))?;
    let from = usize::try_from(header.offset).ok()?.checked_add(done)?;
    if slot.failed.is_some_and(|(at, _)| from as u64 >= at) {
        return None; // nobody gets what follows a failure
    }
    let part = slot.target.part_mut(from, rest)?;
    slot.received = slot.received.max(from + part.len());
    Some(exclusive(part))
}

impl Completing<'_, '_> {
    /// Handles a reply whose payload is in place.
    fn reply(&mut self, header: &Header, body: &[u8]) -> Result<(), ProtocolError> {
        let core = self.core;
        let state = self.state.get_or_insert_with(|| core.state.lock());
        if header.flags & reply_flag::AHEAD != 0 {
            let bytes = usize::try_from(header.offset).unwrap_or(usize::MAX);
            let leave = (bytes.min(FRAGMENT_BYTES_MAX), coarse_ms() + AHEAD_MILLISECONDS);
            state.leaves.push_back(leave);
            state.leaves.truncate(SLOTS_MAX); // there cannot be more requests than slots
        }
        let number = usize::from(header.slot);
        let Some(slot) = current(state, header) else { return Ok(()) };
        if header.flags & reply_flag::UNKNOWN != 0 {
            core.complete(state, number, Err(Error::Unknown));
            return Ok(());
        }
        if !matches!(slot.status, Status::Waiting) {
            return Ok(()); // already answered: the outcome may be in use
        }
        let mut results = body;
        let mut borrowed = None;
        if header.flags & reply_flag::LENT != 0 {
            borrowed = borrow(state, &mut self.answers, self.link, header, body)?;
            if borrowed.is_none() {
                return Ok(());
            }
            results = &body[..header.offset as usize];
        } else {
            slot.land(header, u64::from(header.payload_bytes));
        }
        let slot = &mut state.slots[number];
        let outcome = &mut slot.outcome;
        outcome.results.set(results);
        match &borrowed {
            Some(borrowed) => {
                outcome.payload = borrowed.len();
                outcome.landed = borrowed.len() as u64;
                outcome.checksums.clear();
            }
            None => {
                (outcome.payload, outcome.landed) = (slot.received, slot.landed);
                outcome.checksums = std::mem::take(&mut slot.checksums);
            }
        }
        outcome.borrowed = borrowed;
        outcome.failed = None;
        if let Some((at, errno)) = slot.failed {
            outcome.failed = (at == 0).then_some(errno);
            outcome.payload = outcome.payload.min(at as usize);
        }
        if let Some(stamps) = &mut slot.stamps {
            stamps.answered(header.word_b);
        }
        core.complete(state, number, Ok(()));
        Ok(())
    }
}

impl Sink for Completing<'_, '_> {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        if header.kind == Kind::Reply {
            return self.reply(header, body);
        }
        let core = self.core;
        let state = self.state.get_or_insert_with(|| core.state.lock());
        if header.kind == Kind::Notice {
            match header.flags {
                // The lane ends next, and the client then reconnects.
                notice::SHUTDOWN => state.shut_down = true,
                notice::FORGOTTEN => forget(state, self.link, header.offset)?,
                _ => {}
            }
            return Ok(());
        }
        let Some(slot) = current(state, header) else { return Ok(()) };
        match header.kind {
            Kind::Data => {
                if header.word_a != 0 {
                    let errno = Errno(u16::try_from(header.word_a).unwrap_or(Errno::EIO.0));
                    slot.failed.get_or_insert((header.offset, errno));
                } else if header.flags & data_flag::HOLE != 0 {
                    slot.fill_hole(header)?;
                } else if slot.land(header, header.payload_bytes.into()) && !body.is_empty() {
                    slot.note_checksums(header, body)?;
                }
                Ok(())
            }
            // A request that is over needs no more data, and its source may be gone.
            Kind::Grant if !matches!(slot.status, Status::Waiting) => Ok(()),
            Kind::Grant => {
                let (from, length) = (header.offset, u64::from(header.word_a));
                let end = from.saturating_add(length);
                if end > slot.source.len() as u64 {
                    return Err(ProtocolError { what: "grant beyond the offered range", at: 16 });
                }
                // Accept each byte once and few parts at a time, so that the queue stays bounded. A
                // part that has left still counts until its sender notes that: this may be true of
                // all parts granted before, and of the first fragment.
                if length == 0 || from < slot.granted || slot.sending > 2 * GRANTS_MAX {
                    return Err(ProtocolError { what: "more grants than there may be", at: 16 });
                }
                slot.granted = end;
                self.answers.push(slot.part(from, header.word_a, header.slot, 0));
                Ok(())
            }
            _ => Err(ProtocolError { what: "message of a kind that only clients send", at: 0 }),
        }
    }

    fn reply_in_place(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &Payload<'_>,
    ) -> Result<bool, ProtocolError> {
        if payload.len() > COPIED_IN_PLACE_MAX {
            return Ok(false);
        }
        if !payload.is_empty() {
            let core = self.core;
            let state = self.state.get_or_insert_with(|| core.state.lock());
            match place_of(state, header, 0, payload.len()) {
                Some(place) if place.len() == payload.len() => payload.copy_out(place),
                _ => return Ok(false),
            }
        }
        self.reply(header, body).map(|()| true)
    }

    fn place(
        &mut self,
        header: &Header,
        _body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>> {
        // Does not stay locked: the payload may still have to arrive.
        let place = match &mut self.state {
            Some(state) => place_of(state, header, done, rest),
            None => place_of(&mut self.core.state.lock(), header, done, rest),
        };
        place.map(Target::Own)
    }

    fn is_refused(&mut self, header: &Header, done: usize) -> bool {
        // Memory of a caller that passes on what others gave it, as under `towline run`.
        let core = self.core;
        let state = self.state.get_or_insert_with(|| core.state.lock());
        let Some(slot) = current(state, header) else { return false };
        let from = header.offset + done as u64;
        if slot.failed.is_none_or(|(at, _)| from < at) {
            slot.failed = Some((from, Errno::EFAULT));
        }
        true
    }

    fn expects_bulk(&self) -> bool {
        self.bulk
    }
}
