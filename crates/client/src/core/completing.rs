//! What the leader receives completes requests.

use super::sending::coarse_ms;
use super::{Checked, Core, Out, Slot, State, Status};
use crate::Error;
use crate::borrow::{Borrowed, Refusal};
use crate::lent::exclusive;
use parking_lot::MutexGuard;
use std::sync::Arc;
use towline_net::{Link, Sink, Target};
use towline_wire::header::{data_flag, reply_flag, request_flag};
use towline_wire::limits::AHEAD_MILLISECONDS;
use towline_wire::{Errno, Header, Kind, ProtocolError};

/// Completes requests with what the leader receives.
pub(super) struct Completing<'a> {
    pub(super) core: &'a Arc<Core>,
    pub(super) link: Arc<Link>,
    /// Messages to be sent in answer: data that was granted, requests sent again.
    answers: Vec<Out>,
    /// Locked from one message to the next of those that came together, and never while anything is waited for.
    state: Option<MutexGuard<'a, State>>,
}

impl Slot {
    /// Counts data that came. False: it had no place.
    fn land(&mut self, header: &Header, length: u64) -> bool {
        let end = header.offset.checked_add(length);
        let has_place = matches!(self.status, Status::Waiting)
            && end.is_some_and(|end| end <= self.target.len() as u64);
        if has_place {
            self.landed += length;
        }
        has_place
    }

    /// Zeroes stand for what is not sent.
    fn fill_hole(&mut self, header: &Header) -> Result<(), ProtocolError> {
        let length = header.word_b as usize;
        if !self.land(header, length as u64) {
            return Err(ProtocolError { what: "hole beyond what was asked for", at: 16 });
        }
        if let Some(part) = self.target.part_mut(header.offset as usize, length) {
            exclusive(part).fill(0);
        }
        Ok(())
    }
}

impl<'a> Completing<'a> {
    pub(super) fn new(core: &'a Arc<Core>, link: Arc<Link>) -> Self {
        Self { core, link, answers: Vec::new(), state: None }
    }

    /// Unlocks the state; yields what is to be sent.
    pub(super) fn into_answers(self) -> Vec<Out> {
        self.answers
    }

    /// What a reply lends; `None` when it cannot be mapped here, and the request is sent again.
    fn borrow(
        &mut self,
        state: &mut State,
        header: &Header,
        body: &[u8],
    ) -> Result<Option<Borrowed>, ProtocolError> {
        let slot = &mut state.slots[usize::from(header.slot)];
        let Some(memories) = &mut state.memories else {
            return Err(ProtocolError { what: "lent what was not asked for", at: 1 });
        };
        slot.indebted = header.flags & reply_flag::LIVE == 0;
        match memories.borrow(header, body, &self.link, slot.target.len()) {
            Ok(borrowed) => Ok(Some(borrowed)),
            Err(Refusal::Illegal(error)) => Err(error),
            Err(Refusal::Unmapped) => {
                // Too little address space, for one. From now on everything is sent.
                state.memories = None;
                slot.clear_flag(request_flag::BORROWS);
                slot.indebted = false;
                self.answers.push(slot.out(header.slot));
                Ok(None)
            }
        }
    }
}

impl Sink for Completing<'_> {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let mut state = self.state.take().unwrap_or_else(|| self.core.state.lock());
        let taken = self.take(&mut state, header, body);
        self.state = Some(state);
        taken
    }

    fn place(
        &mut self,
        header: &Header,
        _body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>> {
        // What is received to there may be waited for.
        let mut state = self.state.take().unwrap_or_else(|| self.core.state.lock());
        let slot = state
            .slots
            .get_mut(usize::from(header.slot))
            // Once it is answered the buffer may be gone at any moment, whatever the server sends.
            .filter(|s| s.sequence == header.sequence && matches!(s.status, Status::Waiting))?;
        let from = usize::try_from(header.offset).ok()?.checked_add(done)?;
        let part = slot.target.part_mut(from, rest)?;
        slot.received = slot.received.max(from + rest);
        Some(Target::Own(exclusive(part)))
    }

    fn expects_bulk(&self) -> bool {
        let bulk = |state: &State| state.bulk > 0;
        self.state.as_deref().map_or_else(|| bulk(&self.core.state.lock()), bulk)
    }
}

impl Completing<'_> {
    /// Takes a message.
    fn take(
        &mut self,
        state: &mut State,
        header: &Header,
        body: &[u8],
    ) -> Result<(), ProtocolError> {
        if header.kind == Kind::Notice {
            return Ok(()); // A server that shuts down closes the lane, and then we reconnect.
        }
        if header.kind == Kind::Reply && header.flags & reply_flag::AHEAD != 0 {
            state.leave_ends = Some(coarse_ms() + AHEAD_MILLISECONDS);
        }
        let number = usize::from(header.slot);
        let current = state.slots.get_mut(number).filter(|slot| slot.sequence == header.sequence);
        let Some(slot) = current else { return Ok(()) };
        match header.kind {
            Kind::Reply if header.flags & reply_flag::UNKNOWN != 0 => {
                self.core.complete(state, number, Err(Error::Unknown));
                Ok(())
            }
            Kind::Reply => {
                if !matches!(slot.status, Status::Waiting) {
                    return Ok(()); // Answered before: that may be in use by now.
                }
                let mut results = body;
                let mut borrowed = None;
                if header.flags & reply_flag::LENT != 0 {
                    borrowed = self.borrow(state, header, body)?;
                    if borrowed.is_none() {
                        return Ok(());
                    }
                    results = &body[..header.offset as usize];
                } else {
                    slot.land(header, u64::from(header.payload_bytes));
                }
                let slot = &mut state.slots[number];
                let outcome = &mut slot.outcome;
                outcome.results.clear();
                outcome.results.extend_from_slice(results);
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
                if let Some((at, errno)) = slot.failed {
                    if at == 0 {
                        self.core.complete(state, number, Err(errno.into()));
                        return Ok(());
                    }
                    outcome.payload = outcome.payload.min(at as usize);
                }
                if let Some(stamps) = &mut slot.stamps {
                    stamps.answered(header.word_b);
                }
                self.core.complete(state, number, Ok(()));
                Ok(())
            }
            Kind::Data => {
                if header.word_a != 0 {
                    let errno = Errno(u16::try_from(header.word_a).unwrap_or(Errno::EIO.0));
                    slot.failed.get_or_insert((header.offset, errno));
                } else if header.flags & data_flag::HOLE != 0 {
                    slot.fill_hole(header)?;
                } else if slot.land(header, header.payload_bytes.into()) && !body.is_empty() {
                    let (at, length) = (header.offset, header.payload_bytes);
                    slot.checksums.push(Checked { at, length, sums: body.to_vec() });
                }
                Ok(())
            }
            Kind::Grant => {
                let (from, length) = (header.offset, u64::from(header.word_a));
                if from.checked_add(length).is_none_or(|end| end > slot.source.len() as u64) {
                    return Err(ProtocolError { what: "grant beyond what was offered", at: 16 });
                }
                self.answers.push(slot.part(from, header.word_a, header.slot, 0));
                Ok(())
            }
            _ => Err(ProtocolError { what: "message of a kind that only clients send", at: 0 }),
        }
    }
}
