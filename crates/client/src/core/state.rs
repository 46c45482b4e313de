//! What is known of requests under way, while the state is locked.

use super::reconnect::requests_of;
use super::sending::coarse_ms;
use super::{Messages, Out, Outcome, Receiving, Slot, SlotRef, State, Status};
use crate::disks::Closing;
use crate::lent::Buffer;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use towline_wire::{Header, Kind, Request};

impl Slot {
    /// Of an operation. Whoever waits in a call takes its result itself, into the buffer that it lent.
    pub(super) fn is_owned(&self) -> bool {
        matches!((&self.source, &self.target), (Buffer::Owned(_), Buffer::Owned(_)))
    }

    /// One that is free.
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
            closes: None,
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
    /// Bytes that a long write may send at once, if there is leave that is not too old.
    pub(super) fn take_leave(&mut self) -> usize {
        if self.leaves.is_empty() {
            return 0;
        }
        let now = coarse_ms();
        let mut leaves = std::iter::from_fn(|| self.leaves.pop_front());
        leaves.find(|(_, end)| now < *end).map_or(0, |(bytes, _)| bytes)
    }

    /// True while somebody receives for all.
    pub(super) fn is_led(&self) -> bool {
        self.receiving.is_none()
    }

    /// Takes the lead, if nobody has it. When nothing works any more there is nothing to receive: whoever did would try to connect again.
    pub(super) fn take_lead(&mut self) -> Option<Box<Receiving>> {
        if self.dead.is_some() {
            return None;
        }
        let mut receiving = self.receiving.take()?;
        receiving.bulk = self.bulk > 0;
        Some(receiving)
    }

    /// The messages of a request that just took its slot.
    pub(super) fn messages(&mut self, slot: &SlotRef) -> Messages {
        let before = self.releases();
        let found = &mut self.slots[usize::from(slot.slot)];
        let (message, after) = (found.out(slot.slot), found.out_ahead(slot.slot));
        Messages { lane: self.lane, before, message, after }
    }

    /// Gives back what was lent to slots that nobody is using; those that are used again say so by
    /// that.
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

    /// A request under way that has to be over before these are sent: it changes what they would change, or needs what they close.
    pub(super) fn due_before(&self, requests: &[Request<'_>]) -> Option<SlotRef> {
        let slot = match Closing::of(requests) {
            Some(closing) => self.needs(closing)?,
            None => self.overlapping(requests)?,
        };
        Some(SlotRef { slot, sequence: self.slots[usize::from(slot)].sequence })
    }

    /// A change under way of what these requests would change, too.
    fn overlapping(&self, requests: &[Request<'_>]) -> Option<u16> {
        if self.changes.is_empty() {
            return None;
        }
        let (disk, range) = requests.first()?.disk_change()?;
        let meets = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        let mut others = self.changes.iter();
        others.find(|(_, of, other)| *of == disk && meets(other)).map(|(slot, ..)| *slot)
    }

    /// A request under way that needs what is to be closed: should it be asked again of another server, that has to be open there,
    /// and what is closed is not opened again. One that waits for a lock is told that its file is closed.
    pub(super) fn needs(&self, closing: Closing) -> Option<u16> {
        let needs = |request: &Request<'_>| match (closing, request) {
            (Closing::File(_), Request::Lock { .. }) | (Closing::Process(_), _) => false,
            (Closing::File(handle), _) => request.handles().contains(&handle),
            (Closing::Disk(disk), _) => request.disk() == Some(disk),
        };
        // Nearly always nothing is under way.
        if self.free.len() == self.slots.len() {
            return None;
        }
        let waits = |slot: &Slot| {
            matches!(slot.status, Status::Waiting)
                && requests_of(&slot.message).is_some_and(|all| all.iter().any(needs))
        };
        self.slots.iter().position(waits).map(|slot| slot as u16)
    }

    /// Takes out what can be closed now.
    pub(super) fn next_closing(&mut self) -> Option<Closing> {
        let place = self.closing.iter().rposition(|closing| self.needs(*closing).is_none())?;
        Some(self.closing.remove(place))
    }

    pub(crate) fn is_idle(&self) -> bool {
        let waits = |slot: &Slot| matches!(slot.status, Status::Waiting);
        self.closing.is_empty() && !self.slots.iter().any(waits)
    }

    /// The lent data of this request, if it is over, will be copied soon.
    pub(super) fn expect(&self, slot: &SlotRef) {
        let found = &self.slots[usize::from(slot.slot)];
        if found.sequence == slot.sequence
            && let Some(borrowed) = &found.outcome.borrowed
        {
            borrowed.expect();
        }
    }

    /// The slot of an operation that is over, see [`super::Core::park`].
    pub(super) fn to_park(&self) -> Option<usize> {
        self.slots.iter().position(|slot| {
            slot.is_owned() && slot.sending == 0 && matches!(slot.status, Status::Done(_))
        })
    }

    /// True when there is a free slot, or one that becomes free without anything being received: that of an operation that is
    /// over, or of a call that is, whose thread takes it.
    pub(super) fn has_room(&self) -> bool {
        let is_left = |slot: &Slot| match slot.status {
            Status::Copying => true,
            Status::Done(_) => !slot.is_owned(),
            Status::Free | Status::Waiting => false,
        };
        !self.free.is_empty() || self.to_park().is_some() || self.slots.iter().any(is_left)
    }

    pub(super) fn is_over(&self, slots: Option<&[SlotRef]>) -> bool {
        let over = |slot: &SlotRef| {
            let found = &self.slots[usize::from(slot.slot)];
            found.sequence != slot.sequence
                || (found.sending == 0 && !matches!(found.status, Status::Waiting))
        };
        slots.map_or_else(|| self.has_room(), |slots| slots.iter().any(over))
    }
}
