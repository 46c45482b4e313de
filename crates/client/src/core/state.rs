//! Operations on the locked state: the lead, free slots, and requests that others must wait for.

use super::reconnect::requests_of;
use super::sending::coarse_ms;
use super::{Messages, Out, Outcome, Receiving, Slot, SlotRef, State, Status};
use crate::disks::Closing;
use crate::lent::Buffer;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use towline_net::LinkKind;
use towline_wire::{Header, Kind, Request};

impl Slot {
    /// True for an operation, which owns its buffers. A thread that waits in a call takes its
    /// result itself, into the buffer that it lent.
    pub(super) fn is_owned(&self) -> bool {
        matches!((&self.source, &self.target), (Buffer::Owned(_), Buffer::Owned(_)))
    }

    /// True if a server that shut down in order and did not answer may still have begun the request,
    /// see [`notice::SHUTDOWN`](towline_wire::header::notice::SHUTDOWN).
    pub(super) fn may_have_begun(&self) -> bool {
        requests_of(&self.message).is_none_or(|all| all.iter().any(Request::waits))
    }

    /// A free slot.
    pub(super) fn fresh() -> Self {
        Self {
            sequence: 0,
            order: 0,
            status: Status::Free,
            outcome: Outcome::default(),
            message: Arc::default(),
            rides: false,
            ahead: 0,
            sending: 0,
            was_sent: false,
            source: Buffer::none(),
            target: Buffer::none(),
            bulk: false,
            received: 0,
            landed: 0,
            granted: 0,
            checksums: Vec::new(),
            failed: None,
            alters: false,
            lock: None,
            renames: false,
            closes: None,
            opens: false,
            closes_opened: false,
            indebted: false,
            abandoned: false,
            cancelled: false,
            stamps: None,
            waiters: SmallVec::new(),
            waker: None,
        }
    }
}

impl State {
    /// Takes a permission to send data ahead of a grant; returns the number of bytes, zero if there
    /// is no permission or all have expired.
    pub(super) fn take_leave(&mut self) -> usize {
        if self.leaves.is_empty() {
            return 0;
        }
        let now = coarse_ms();
        let mut leaves = std::iter::from_fn(|| self.leaves.pop_front());
        leaves.find(|(_, end)| now < *end).map_or(0, |(bytes, _)| bytes)
    }

    /// True while a thread receives for all.
    pub(super) fn is_led(&self) -> bool {
        self.receiving.is_none()
    }

    /// Takes the lead, if nobody has it. Nobody leads when the session was given up: there is
    /// nothing to receive, and a leader would try to reconnect.
    pub(super) fn take_lead(&mut self) -> Option<Box<Receiving>> {
        if self.given_up.is_some() {
            return None;
        }
        let mut receiving = self.receiving.take()?;
        receiving.bulk = self.bulk > 0;
        Some(receiving)
    }

    /// Returns the messages of a request that has just taken its slot.
    pub(super) fn messages(&mut self, slot: &SlotRef) -> Messages {
        let mut before = self.releases();
        if self.slots[usize::from(slot.slot)].stamps.is_some() {
            before.extend(self.processor());
        }
        let found = &mut self.slots[usize::from(slot.slot)];
        let (message, after) = (found.out(slot.slot), found.out_ahead(slot.slot));
        Messages { lane: self.lane, before, message, after }
    }

    /// Returns a message that tells the server the processor on which this thread runs, if the server is on this
    /// machine, does not learn that from the link, and was last told another one.
    fn processor(&mut self) -> Option<Out> {
        if !matches!(self.link.kind(), LinkKind::Unix | LinkKind::Shm) {
            return None;
        }
        let here = (self.lane, rustix::thread::sched_getcpu());
        if self.told.replace(here) == Some(here) {
            return None;
        }
        let mut header = Header::new(Kind::Processor, 0, 0);
        header.word_a = here.1 as u32;
        Some(Out::header(&header))
    }

    /// Returns messages that give back what was lent to slots that are now free. A slot in use
    /// gives its loan back with its request.
    pub(super) fn releases(&mut self) -> Vec<Out> {
        let mut releases = Vec::new();
        if self.debts == 0 {
            return releases;
        }
        self.debts = 0;
        for number in &self.free {
            let slot = &mut self.slots[usize::from(*number)];
            if std::mem::take(&mut slot.indebted) {
                let header = Header::new(Kind::Release, *number, slot.sequence);
                releases.push(Out::header(&header));
            }
        }
        releases
    }

    /// A request under way that must be over before these requests are sent: it changes what they
    /// change, or needs what they close.
    pub(super) fn due_before(&self, requests: &[Request<'_>]) -> Option<SlotRef> {
        let slot = match Closing::of(requests) {
            Some(closing) => self.needs(closing)?,
            None => self.overlapping(requests)?,
        };
        Some(SlotRef { slot, sequence: self.slots[usize::from(slot)].sequence })
    }

    /// A change under way that overlaps the change these requests make.
    fn overlapping(&self, requests: &[Request<'_>]) -> Option<u16> {
        if self.changes.is_empty() {
            return None;
        }
        let (disk, range) = requests.first()?.disk_change()?;
        let meets = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        let mut others = self.changes.iter();
        others.find(|(_, of, other)| *of == disk && meets(other)).map(|(slot, ..)| *slot)
    }

    /// A request under way that needs what `closing` closes: it may have to be resent to a
    /// restarted server, where closed files and disks are not reopened. Lock requests do not count:
    /// the server answers a waiting one when its file is closed. Nor does what nobody waits for.
    pub(super) fn needs(&self, closing: Closing) -> Option<u16> {
        let needs = |request: &Request<'_>| match (closing, request) {
            (Closing::File(_), Request::Lock { .. } | Request::Bind { .. }) => false,
            (Closing::Process(_), _) => false,
            (Closing::File(handle), _) => request.handles().contains(&handle),
            (Closing::Disk(disk), _) => request.disk() == Some(disk),
        };
        // The common case: nothing is under way.
        if self.free.len() == self.slots.len() {
            return None;
        }
        let waits = |slot: &Slot| {
            matches!(slot.status, Status::Waiting)
                && requests_of(&slot.message).is_some_and(|all| all.iter().any(needs))
        };
        self.slots.iter().position(waits).map(|slot| slot as u16)
    }

    /// Notes a close that is to be sent, by the next session if this one was given up.
    pub(super) fn close_some_time(&mut self, closing: Closing) {
        if self.given_up.is_some() {
            self.forget(closing);
        }
        self.closing.push(closing);
    }

    /// Takes out a pending close of something that no request under way needs.
    pub(super) fn next_closing(&mut self) -> Option<Closing> {
        let place = self.closing.iter().rposition(|closing| self.needs(*closing).is_none())?;
        Some(self.closing.remove(place))
    }

    /// True if no request is under way and no close is pending, but for the next session.
    pub(crate) fn is_idle(&self) -> bool {
        let waits = |slot: &Slot| matches!(slot.status, Status::Waiting);
        self.given_up.is_some() || self.closing.is_empty() && !self.slots.iter().any(waits)
    }

    /// Prefetches the data lent to this request, since it is about to be copied. Does nothing if
    /// the request is not over.
    pub(super) fn expect(&self, slot: &SlotRef) {
        let found = &self.slots[usize::from(slot.slot)];
        if found.sequence == slot.sequence
            && let Some(borrowed) = &found.outcome.borrowed
        {
            borrowed.expect();
        }
    }

    /// The slot of an operation that is over but not taken, see [`super::Core::park`].
    pub(super) fn to_park(&self) -> Option<usize> {
        self.slots.iter().position(|slot| {
            slot.is_owned() && slot.sending == 0 && matches!(slot.status, Status::Done(_))
        })
    }

    /// True if a slot is free or becomes free without receiving anything: an operation that is over
    /// can be parked, and a call that is over gives its slot back when its thread runs.
    pub(super) fn has_room(&self) -> bool {
        let is_left = |slot: &Slot| match slot.status {
            Status::Copying => true,
            Status::Done(_) => !slot.is_owned(),
            Status::Free | Status::Waiting => false,
        };
        !self.free.is_empty() || self.to_park().is_some() || self.slots.iter().any(is_left)
    }

    /// True if one of these requests is over or, with `None`, if there is room for another request.
    pub(super) fn is_over(&self, slots: Option<&[SlotRef]>) -> bool {
        let over = |slot: &SlotRef| {
            let found = &self.slots[usize::from(slot.slot)];
            found.sequence != slot.sequence
                || (found.sending == 0 && !matches!(found.status, Status::Waiting))
        };
        slots.map_or_else(|| self.has_room(), |slots| slots.iter().any(over))
    }
}
