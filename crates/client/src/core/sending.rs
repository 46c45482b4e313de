//! Sending requests: filling their slots, and sending or queueing their messages.

use super::waiting::{FailOnPanic, wake_all};
use super::{Core, GATHER, Look, Messages, Out, Outgoing, SlotRef, State, Status, Wait};
use crate::disks::Closing;
use crate::lent::{Buffer, shared};
use crate::times::Stamps;
use crate::{Error, Lock};
use parking_lot::MutexGuard;
use smallvec::SmallVec;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use towline_wire::header::request_flag;
use towline_wire::limits::{HEADER_BYTES, INLINE_BYTES_MAX, TRANSFER_BYTES_MAX};
use towline_wire::request::{CURRENT, append_compound};
use towline_wire::{Errno, Header, Kind, Request};

/// Inline data up to this length is copied into the message; longer inline data is sent from where
/// it is.
const COPIED_BYTES_MAX: usize = 1024;

/// Milliseconds of the coarse monotonic clock: almost free to read, exact to a few milliseconds.
pub(super) fn coarse_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

impl Core {
    /// Closes or ends something once no request under way needs it, without waiting for the answer.
    pub(crate) fn close_later(self: &Arc<Self>, closing: Closing) {
        self.state.lock().close_some_time(closing);
        self.close_pending();
    }

    /// [`Core::close_later`] for a file, but the message is queued to leave with the next one.
    pub(crate) fn close_with_next(&self, handle: u64) {
        let mut state = self.state.lock();
        let closing = Closing::File(handle);
        if state.given_up.is_some() || state.free.is_empty() || state.needs(closing).is_some() {
            return state.close_some_time(closing);
        }
        if let Some(messages) = self.fill_unanswered(&mut state, &closing.request()) {
            state.queues = true;
            drop(state);
            self.out.lock().queue(messages);
        }
    }

    /// Tells the server which process goes on with a session, before whatever this client asks for later. Returns
    /// false if that cannot be sent now.
    pub(crate) fn hand_over_session(&self, (session, secret): (u64, u64), process: u64) -> bool {
        let mut state = self.state.lock();
        let request = Request::HandOver { session, secret, process };
        // Not among those that are pending, which are sent in any order.
        let messages = match state.given_up {
            None => self.fill_unanswered(&mut state, &request),
            Some(_) => None,
        };
        drop(state);
        messages.map(|messages| self.send_all(messages)).is_some()
    }

    /// Takes a slot for a request whose answer nobody waits for, and returns its message; `None` if there is no slot.
    fn fill_unanswered(&self, state: &mut State, request: &Request<'_>) -> Option<Messages> {
        let request = std::slice::from_ref(request);
        let slot = self.fill(state, request, Buffer::none(), Buffer::none())?;
        let found = &mut state.slots[usize::from(slot.slot)];
        found.abandoned = true;
        Some(Messages::of(found.out(slot.slot), state.lane))
    }

    /// Sends pending closes while there are free slots, leaving those of files and disks that
    /// requests under way need. Nobody waits for the answers.
    pub(crate) fn close_pending(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            if state.free.is_empty() || state.given_up.is_some() {
                return;
            }
            let Some(closing) = state.next_closing() else { return };
            let Some(messages) = self.fill_unanswered(&mut state, &closing.request()) else {
                return;
            };
            drop(state);
            self.send_all(messages);
        }
    }

    pub(crate) fn close(&self) {
        self.out.lock().messages.push_back(Out::header(&Header::new(Kind::Goodbye, 0, 0)));
        // If this does not reach the server, it ends the session by itself some time later.
        let _ = self.flush();
    }

    /// Takes a free slot for a request; `None` if there is none.
    pub(super) fn fill(
        &self,
        state: &mut State,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
    ) -> Option<SlotRef> {
        let number = state.free.pop()?;
        let inline = source.len() <= INLINE_BYTES_MAX;
        let writes = |request: &Request<'_>| {
            matches!(request, Request::Write { .. } | Request::DiskWrite { .. })
        };
        let ahead = if !inline && requests.iter().any(writes) { state.take_leave() } else { 0 };
        let slot = &mut state.slots[usize::from(number)];
        // This request gives back what the slot's last reply lent.
        state.debts -= usize::from(std::mem::take(&mut slot.indebted));
        slot.sequence = slot.sequence.wrapping_add(1);
        state.requested += 1;
        slot.order = state.requested;
        // Waiting for events is not part of any request's cost.
        let is_measured = !matches!(requests, [Request::Events { .. }]);
        slot.stamps = is_measured.then(|| Stamps::of(slot.sequence)).flatten();
        slot.rides = inline && source.len() > COPIED_BYTES_MAX;
        slot.ahead = ahead.min(source.len());
        let mut header = Header::new(Kind::Request, number, slot.sequence);
        (header.word_a, header.word_b) = self.identity();
        if state.memories.is_some() {
            header.flags = request_flag::BORROWS;
        }
        if inline {
            header.payload_bytes = source.len() as u32;
        } else {
            header.offset = source.len() as u64;
            if slot.ahead > 0 {
                header.set_ahead(slot.ahead as u32);
            }
        }
        // Reuse the memory of the slot's last message, unless that is still being sent.
        if Arc::strong_count(&slot.message) > 1 {
            slot.message = Arc::default();
        }
        if let Some(message) = Arc::get_mut(&mut slot.message) {
            message.clear();
            message.extend_from_slice(&[0; HEADER_BYTES]);
            append_compound(requests, message);
            header.body_bytes = (message.len() - HEADER_BYTES) as u32;
            message[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
            if inline && !slot.rides {
                for piece in source.pieces(0, source.len()) {
                    message.extend_from_slice(shared(piece));
                }
            }
        }
        (slot.sending, slot.was_sent) = (0, false);
        slot.source = source;
        slot.target = target;
        slot.bulk = slot.target.len() > INLINE_BYTES_MAX
            && !requests
                .iter()
                .any(|request| matches!(request, Request::ReadDir { .. } | Request::Events { .. }));
        state.bulk += usize::from(slot.bulk);
        slot.received = 0;
        slot.landed = 0;
        slot.checksums.clear();
        slot.failed = None;
        slot.alters = self.options.changes.is_some() && requests.iter().any(Request::alters);
        slot.lock = match *requests {
            [Request::Lock { handle, owner, family, kind, start, length, .. }] => {
                Some((handle, Lock { family, kind, owner, start, length }))
            }
            _ => None,
        };
        slot.renames = matches!(requests, [Request::Rename { .. }]);
        slot.closes = Closing::of(requests);
        slot.closes_opened = matches!(requests, [.., Request::Close { handle: CURRENT }]);
        slot.opens = !slot.closes_opened && matches!(requests, [Request::Open { .. }, ..]);
        if slot.alters {
            self.count_change();
        }
        (slot.abandoned, slot.cancelled) = (false, false);
        slot.status = Status::Waiting;
        slot.waiters.clear();
        slot.waker = None;
        if let Some((disk, range)) = requests.first().and_then(Request::disk_change) {
            state.changes.push((number, disk, range));
        }
        let sequence = state.slots[usize::from(number)].sequence;
        Some(SlotRef { slot: number, sequence })
    }

    /// Sends a request and waits until it is over; `look` sees its outcome, if it has one.
    ///
    /// A call of a single thread takes three locks: the state's to take a slot and the lead, the
    /// queue's to send, and the state's again when the answer has arrived.
    pub(super) fn exchange(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
        look: Look<'_>,
    ) -> Result<(), Error> {
        let (mut state, slot) =
            self.fill_when_possible(requests, source, target, true)?.ok_or(Errno::EAGAIN)?;
        let messages = state.messages(&slot);
        let measured = state.slots[usize::from(slot.slot)].stamps.is_some();
        let lead = state.take_lead();
        drop(state);
        let Some(receiving) = lead else {
            self.send_all(messages);
            self.note_sent(&slot, measured);
            return self.wait_locked(self.state.lock(), &slot, look).map(drop);
        };
        let panics = FailOnPanic(self);
        // Not `send_all`, which waits for another thread that leads to make room.
        let sent = matches!(self.send_now(messages), Ok(true));
        self.note_sent(&slot, measured);
        std::mem::forget(panics);
        let wait = match sent {
            true => Wait::ForNew,
            false => Wait::For(Some(std::slice::from_ref(&slot))),
        };
        self.wait_locked(self.lead(receiving, wait), &slot, look).map(drop)
    }

    /// Takes a slot and sends a request. If fewer than `coalesce` messages are queued, queues it
    /// instead, until a thread waits for an answer. Returns `None` if there is no free slot and
    /// `waits` is false.
    pub(crate) fn submit_if_room(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
        coalesce: usize,
        waits: bool,
    ) -> Result<Option<SlotRef>, Error> {
        let Some((mut state, slot)) = self.fill_when_possible(requests, source, target, waits)?
        else {
            return Ok(None);
        };
        let messages = state.messages(&slot);
        let measured = state.slots[usize::from(slot.slot)].stamps.is_some();
        state.queues |= coalesce > 0;
        drop(state);
        if coalesce > 0 {
            let mut out = self.out.lock();
            if out.messages.len() + 1 + messages.before.len() < coalesce {
                out.queue(messages);
                return Ok(Some(slot));
            }
        }
        self.send_all(messages);
        self.note_sent(&slot, measured);
        Ok(Some(slot))
    }

    /// Takes a slot for a request as soon as it may be sent; returns with the state locked. Returns
    /// `None` if there is no free slot and `waits` is false.
    fn fill_when_possible(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
        waits: bool,
    ) -> Result<Option<(MutexGuard<'_, State>, SlotRef)>, Error> {
        if source.len() > TRANSFER_BYTES_MAX || target.len() > TRANSFER_BYTES_MAX {
            return Err(Errno::EINVAL.into());
        }
        let mut state = self.state.lock();
        loop {
            state = self.begin_anew(state).inspect_err(|_| {
                if let Some(closing) = Closing::of(requests) {
                    self.close_later(closing);
                }
            })?;
            if let Some(other) = state.due_before(requests) {
                // These requests run in the order they were made: so a request resent after a
                // restart of the server neither undoes one answered later nor finds its file
                // closed.
                state = self.advance(state, Some(&[other]));
            } else if state.free.is_empty() && !self.park(&mut state) {
                if !waits {
                    self.hand_over(&state);
                    return Ok(None);
                }
                state = self.advance(state, None);
            } else if !state.free.is_empty() {
                break;
            }
        }
        self.hand_over(&state);
        if let Some(error) = requests.first().and_then(|r| state.disks.failure(r)) {
            return Err(error);
        }
        if state.files.is_stale(requests) {
            return Err(Errno::ESTALE.into());
        }
        let slot = self.fill(&mut state, requests, source, target).ok_or(Errno::EAGAIN)?;
        Ok(Some((state, slot)))
    }

    /// Notes that a measured request has been sent.
    fn note_sent(&self, slot: &SlotRef, measured: bool) {
        if measured
            && let Some(stamps) = &mut self.state.lock().slots[usize::from(slot.slot)].stamps
        {
            stamps.sent();
        }
    }

    /// Sends messages, or queues what the link does not take. The leader deals with what stays
    /// queued, and with a broken link.
    pub(super) fn send_all(&self, messages: Messages) {
        if matches!(self.send_now(messages), Ok(false)) {
            // A leader may be asleep until something arrives: wait for room here, while the leader
            // reads, so that both directions make progress.
            while self.state.lock().is_led() {
                let limit = Some(Duration::from_millis(10));
                let waited = self.link().wait_writable(limit);
                if waited.is_err() || !matches!(self.flush(), Ok(false)) {
                    return;
                }
            }
        }
    }

    /// Sends queued messages and then these, without waiting. Returns false if some stay queued.
    pub(super) fn send_now(&self, mut messages: Messages) -> io::Result<bool> {
        self.with_out(|out| {
            let checked = out.check_link();
            let is_only = out.messages.is_empty() && messages.is_one() && messages.lane == out.lane;
            if is_only && checked.is_ok() {
                // The common case: a single message that would leave the queue at once.
                let only = &mut messages.message;
                let rest = only.rest();
                let sent = out.link.send(&rest[..rest.len().min(GATHER)], &self.counters);
                drop(rest);
                if let Ok(count) = sent {
                    only.done = count;
                    if only.is_sent() {
                        if let Some((slot, _)) = &only.data {
                            self.part_sent(&mut self.state.lock(), *slot, &mut out.woken);
                        }
                        return Ok(true);
                    }
                }
            }
            out.queue(messages);
            checked?;
            self.send_queue(out)
        })
    }

    /// Works on the locked queue, then calls the wakers that this has made due.
    fn with_out<T>(&self, work: impl FnOnce(&mut Outgoing) -> T) -> T {
        let mut out = self.out.lock();
        let done = work(&mut out);
        let woken = std::mem::take(&mut out.woken);
        drop(out);
        wake_all(woken);
        done
    }

    /// Sends queued messages and then these, as [`Core::send_now`].
    pub(super) fn send_answers(&self, answers: Vec<Out>) -> io::Result<bool> {
        self.out.lock().messages.extend(answers);
        self.flush()
    }

    pub(crate) fn waits_to_send(&self) -> bool {
        !self.out.lock().messages.is_empty()
    }

    /// Sends queued messages without waiting. Returns false if some stay queued.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        self.with_out(|out| {
            if out.messages.is_empty() {
                return Ok(true);
            }
            out.check_link()?;
            self.send_queue(out)
        })
    }

    fn send_queue(&self, out: &mut Outgoing) -> io::Result<bool> {
        while !out.messages.is_empty() {
            let parts: SmallVec<[&[u8]; 8]> =
                out.messages.iter().take(GATHER / 2).flat_map(Out::rest).take(GATHER).collect();
            let sent = out.link.send(&parts, &self.counters);
            drop(parts);
            match sent {
                Ok(count) => self.sent(out, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Marks `count` more bytes of the queue as sent.
    fn sent(&self, out: &mut Outgoing, mut count: usize) {
        let Outgoing { messages, woken, .. } = out;
        // Locked once for all messages, and only if one of them carries data.
        let mut state = None;
        while let Some(front) = messages.front_mut() {
            let rest: usize = front.rest().iter().map(|part| part.len()).sum();
            if count < rest {
                front.done += count;
                return;
            }
            count -= rest;
            if let Some(Out { data: Some((slot, _)), .. }) = messages.pop_front() {
                self.part_sent(state.get_or_insert_with(|| self.state.lock()), slot, woken);
            }
        }
    }

    /// Notes that a part of a source has been sent; a request answered before that is over with its
    /// last part.
    fn part_sent(&self, state: &mut State, slot: u16, woken: &mut Vec<Waker>) {
        let found = &mut state.slots[usize::from(slot)];
        found.sending = found.sending.saturating_sub(1);
        if found.sending == 0 {
            self.tell(state, slot);
            woken.append(&mut state.woken);
        }
    }
}
