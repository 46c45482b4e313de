//! Waiting for answers: one of the threads that wait receives for all.

use super::completing::Completing;
use super::{Core, Look, Messages, Outcome, Receiving, SlotRef, State, Status, Wait, server_of};
use crate::Error;
use crate::borrow::Borrowed;
use crate::disks::Closing;
use crate::lent::{Buffer, exclusive};
use parking_lot::{Condvar, MutexGuard};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use towline_net::Incoming;
use towline_wire::Errno;

/// Of a leader: should it panic, nobody waits for ever for what it would have received.
pub(super) struct FailOnPanic<'a>(pub(super) &'a Core);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        self.0.fail_all(&Error::Connection {
            server: server_of(&self.0.transport),
            what: "given up: the thread that received for all panicked".into(),
            errno: Errno::EIO,
        });
        self.0.wake();
    }
}

/// Wakes. A waker that panics is somebody else's mistake: it must not end a call of this thread, whose buffers are in use.
pub(super) fn wake_all(woken: Vec<Waker>) {
    for waker in woken {
        if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
            log::error!("a waker panicked");
        }
    }
}

impl Core {
    /// Tells who waits that a request is over, or gives its slot back when nobody does.
    pub(super) fn tell(&self, state: &mut State, slot: u16) {
        let found = &mut state.slots[usize::from(slot)];
        if found.sending > 0 || !matches!(found.status, Status::Done(_)) {
            return;
        }
        // Of an abandoned one, too: a change of the same bytes may wait for it.
        for waiter in found.waiters.drain(..) {
            waiter.notify_one();
        }
        if found.abandoned {
            return self.release(state, slot);
        }
        if let Some(waker) = found.waker.take() {
            state.woken.push(waker);
        }
        // Somebody may wait for its slot, see `Core::park`.
        self.slot_free.notify_one();
    }

    /// Waits for one request, whose outcome comes to its place; yields its buffer.
    pub(crate) fn wait(
        self: &Arc<Self>,
        slot: &SlotRef,
        outcome: &mut Outcome,
    ) -> Result<Vec<u8>, Error> {
        self.wait_locked(self.state.lock(), slot, &mut |found| found.move_to(outcome))
    }

    /// [`Core::wait`] for who has locked the state.
    pub(super) fn wait_locked<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slot: &SlotRef,
        look: Look<'_>,
    ) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(finished) = self.take(&mut state, slot, look) {
                self.leave(state);
                return finished;
            }
            state = self.advance(state, Some(std::slice::from_ref(slot)));
        }
    }

    /// Waits for any of several, whose outcome comes to its place; returns which one, by its place among them, and its buffer.
    pub(crate) fn wait_any<'a>(
        self: &Arc<Self>,
        slots: impl Iterator<Item = &'a SlotRef> + Clone,
        outcome: &mut Outcome,
    ) -> (usize, Result<Vec<u8>, Error>) {
        // Only who has to wait needs a list of them.
        let mut waited_for = Vec::new();
        let mut state = self.state.lock();
        loop {
            for (index, slot) in slots.clone().enumerate() {
                if state.is_over(Some(std::slice::from_ref(slot)))
                    && let Some(next) = slots.clone().nth(index + 1)
                {
                    state.expect(next);
                }
                let look = &mut |found: &mut Outcome| found.move_to(outcome);
                if let Some(finished) = self.take(&mut state, slot, look) {
                    self.leave(state);
                    return (index, finished);
                }
            }
            if waited_for.is_empty() {
                waited_for = slots.clone().cloned().collect();
            }
            state = self.advance(state, Some(&waited_for));
        }
    }

    /// Looks whether a request is over, making what progress is possible without waiting; if not,
    /// the waker is told when it is.
    pub(crate) fn poll(
        self: &Arc<Self>,
        slot: &SlotRef,
        waker: &Waker,
        outcome: &mut Outcome,
    ) -> Option<Result<Vec<u8>, Error>> {
        let mut state = self.state.lock();
        state = match state.take_lead() {
            None => self.send_queued(state),
            Some(receiving) => {
                drop(state);
                self.lead(receiving, Wait::No)
            }
        };
        let finished = loop {
            let finished = self.take(&mut state, slot, &mut |found| found.move_to(outcome));
            // While it was asked again the state was unlocked: the answer may have come, and found no waker.
            if finished.is_some() || !state.is_over(Some(std::slice::from_ref(slot))) {
                break finished;
            }
        };
        // Let go when the state is unlocked again: that may run anything, too.
        let mut old = None;
        if finished.is_none() {
            old = state.slots[usize::from(slot.slot)].waker.replace(waker.clone());
        }
        self.leave(state);
        drop(old);
        finished
    }

    /// What whoever stops waiting leaves to others, and what waited for a slot.
    fn leave(self: &Arc<Self>, state: MutexGuard<'_, State>) {
        self.hand_over(&state);
        let closes = !state.closing.is_empty();
        drop(state);
        if closes {
            self.close_pending();
        }
    }

    /// Receives what is there without waiting, for those who wait for [`Core::fd`] elsewhere.
    pub(crate) fn progress(self: &Arc<Self>) {
        let lead = self.state.lock().take_lead();
        if let Some(receiving) = lead {
            self.leave(self.lead(receiving, Wait::No));
        }
    }

    /// Asks the server to give up a request that waits for a lock, or for events.
    pub(crate) fn cancel(&self, slot: &SlotRef) {
        let mut state = self.state.lock();
        let lane = state.lane;
        let found = &mut state.slots[usize::from(slot.slot)];
        if found.sequence != slot.sequence {
            return;
        }
        found.cancelled = true;
        let message = found.cancellation(slot.slot);
        drop(state);
        self.send_all(Messages::of(message, lane));
    }

    pub(crate) fn abandon(&self, slot: &SlotRef) {
        let mut state = self.state.lock();
        let parked = state.parked.remove(slot);
        let found = &mut state.slots[usize::from(slot.slot)];
        if found.sequence != slot.sequence || parked.is_some() {
            return;
        }
        found.abandoned = true;
        let waker = found.waker.take();
        self.tell(&mut state, slot.slot);
        drop(state);
        drop(waker);
    }

    pub(super) fn release(&self, state: &mut State, slot: u16) {
        let found = &mut state.slots[usize::from(slot)];
        found.status = Status::Free;
        found.source = Buffer::none();
        found.target = Buffer::none();
        found.outcome.borrowed = None;
        found.outcome.results.let_go();
        state.debts += usize::from(found.indebted);
        state.free.push(slot);
        self.slot_free.notify_one();
    }

    /// Looks at the outcome of a request that is over, and ends it; yields its buffer. Lent data is copied to its place here, by the
    /// thread that wants it, and the state is unlocked meanwhile.
    pub(super) fn take(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        slot: &SlotRef,
        look: Look<'_>,
    ) -> Option<Result<Vec<u8>, Error>> {
        // Looked up only when there is something: this is asked for each request of a group.
        if !state.parked.is_empty()
            && let Some(finished) = state.parked.remove(slot)
        {
            return Some(finished.map(|(mut outcome, buffer)| {
                look(&mut outcome);
                buffer
            }));
        }
        let number = usize::from(slot.slot);
        let found = &mut state.slots[number];
        if found.sequence != slot.sequence
            || found.sending > 0
            || !matches!(found.status, Status::Done(_))
        {
            return None;
        }
        let Status::Done(mut result) = std::mem::replace(&mut found.status, Status::Copying) else {
            return None;
        };
        if result.is_ok()
            && let Some(borrowed) = found.outcome.borrowed.take()
        {
            let mut target = std::mem::replace(&mut found.target, Buffer::none());
            let place = target.part_mut(0, borrowed.len());
            self.hand_over(state);
            let whole = MutexGuard::unlocked(state, || {
                place.is_some_and(|place| borrowed.copy_to(exclusive(place)))
            });
            state.slots[number].target = target;
            if !whole {
                match &state.dead {
                    Some(error) => result = Err(error.clone()),
                    None => {
                        self.ask_again(state, number, &borrowed);
                        return None;
                    }
                }
            }
        }
        Some(self.take_result(state, number, result, look))
    }

    /// Ends a request with this result, and gives its slot back.
    fn take_result(
        &self,
        state: &mut State,
        number: usize,
        result: Result<(), Error>,
        look: Look<'_>,
    ) -> Result<Vec<u8>, Error> {
        let found = &mut state.slots[number];
        if result.is_ok() {
            look(&mut found.outcome);
        }
        // An operation gets its buffer back: that of a read, else that of a write.
        let target = std::mem::replace(&mut found.target, Buffer::none()).into_owned();
        let source = std::mem::replace(&mut found.source, Buffer::none()).into_owned();
        let buffer = if target.is_empty() { source } else { target };
        if let Some(stamps) = found.stamps.take() {
            state.times.finish(&stamps);
        }
        self.release(state, number as u16);
        result.map(|()| buffer)
    }

    /// Frees the slot of an operation that is over and was not taken yet, for those who start more
    /// operations than there are slots before they take any. False: there is none.
    pub(super) fn park(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) -> bool {
        let Some(number) = state.to_park() else { return false };
        let slot = &mut state.slots[number];
        if let Some(borrowed) = slot.outcome.borrowed.take() {
            // The state stays locked: whoever has the operation may look for it at any moment.
            let place = slot.target.part_mut(0, borrowed.len());
            if !place.is_some_and(|place| borrowed.copy_to(exclusive(place))) {
                self.ask_again(state, number, &borrowed);
                return false;
            }
        }
        let slot = &mut state.slots[number];
        let reference = SlotRef { slot: number as u16, sequence: slot.sequence };
        let Status::Done(result) = std::mem::replace(&mut slot.status, Status::Free) else {
            return false;
        };
        let mut outcome = Outcome::default();
        let look = &mut |found: &mut Outcome| found.move_to(&mut outcome);
        let finished = self.take_result(state, number, result, look);
        state.parked.insert(reference, finished.map(|buffer| (outcome, buffer)));
        true
    }

    /// Waits again for a request whose lent data went with the lane.
    pub(super) fn ask_again(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        number: usize,
        borrowed: &Borrowed,
    ) {
        let slot = &mut state.slots[number];
        slot.status = Status::Waiting;
        slot.received = 0;
        slot.failed = None;
        let out = slot.out(number as u16);
        state.bulk += usize::from(slot.bulk);
        // Else it is sent again when whoever leads notices that the lane is lost.
        if !borrowed.is_of(&state.link) {
            let messages = Messages::of(out, state.lane);
            MutexGuard::unlocked(state, || self.send_all(messages));
        }
    }

    /// Waits until something may have changed for these slots (or, with none, until a slot may be
    /// free): by leading, or by sleeping while somebody else leads.
    pub(super) fn advance<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slots: Option<&[SlotRef]>,
    ) -> MutexGuard<'a, State> {
        if slots.is_none() && state.is_over(None) {
            // Where it is a call that is over, its thread gives the slot back, without anything being received.
            if state.free.is_empty() && state.to_park().is_none() {
                self.slot_free.wait(&mut state);
            }
            return state;
        }
        if let Some(receiving) = state.take_lead() {
            drop(state);
            return self.lead(receiving, Wait::For(slots));
        }
        state = self.send_queued(state);
        if !state.is_led() || state.is_over(slots) {
            return state;
        }
        match slots {
            None => self.slot_free.wait(&mut state),
            Some(slots) => {
                let condvar = Arc::new(Condvar::new());
                for slot in slots {
                    state.slots[usize::from(slot.slot)].waiters.push(condvar.clone());
                }
                state.sleepers += 1;
                condvar.wait(&mut state);
                state.sleepers -= 1;
                for slot in slots {
                    let found = &mut state.slots[usize::from(slot.slot)];
                    found.waiters.retain(|waiter| !Arc::ptr_eq(waiter, &condvar));
                }
            }
        }
        state
    }

    /// Whoever stops waiting calls this: if nobody leads now, one of those who sleep has to. A
    /// thread that was woken does the same when it stops, so that the lead is never lost, whether
    /// it was woken by this or by its answer.
    pub(super) fn hand_over(&self, state: &State) {
        if state.is_led() {
            return;
        }
        let sleeper =
            (state.sleepers > 0).then(|| state.slots.iter().find_map(|slot| slot.waiters.first()));
        match sleeper.flatten() {
            Some(sleeper) => drop(sleeper.notify_one()),
            None => drop(self.slot_free.notify_one()),
        }
    }

    /// Sends what was started and waits to be sent with more, since the leader may sleep until
    /// something comes. The queue is locked before the state, never after it.
    fn send_queued<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if !state.queues {
            return state;
        }
        drop(state);
        let _ = self.flush(); // a broken link is the leader's business
        self.state.lock()
    }

    /// Wakes those whose requests are over. Nothing is locked.
    fn wake(&self) {
        let woken = std::mem::take(&mut self.state.lock().woken);
        wake_all(woken);
    }

    /// Receives once for all, by whoever took the lead with `receiving`, which goes back.
    pub(super) fn lead<'a>(
        self: &'a Arc<Self>,
        mut receiving: Box<Receiving>,
        wait: Wait<'_>,
    ) -> MutexGuard<'a, State> {
        let panics = FailOnPanic(self);
        let mut state = match self.receive(&mut receiving, wait) {
            Ok(state) => state,
            Err(error) => {
                // Not after what takes long.
                self.wake();
                self.reconnect(&mut receiving, &error);
                self.state.lock()
            }
        };
        if !state.near && state.requested >= self.options.nearer_after {
            drop(state);
            self.wake();
            self.move_nearer(&mut receiving);
            state = self.state.lock();
        }
        std::mem::forget(panics);
        state.receiving = Some(receiving);
        if !state.woken.is_empty() {
            let woken = std::mem::take(&mut state.woken);
            MutexGuard::unlocked(&mut state, || wake_all(woken));
        }
        state
    }

    /// Receives once; the state stays locked.
    fn receive<'a>(
        self: &'a Arc<Self>,
        receiving: &mut Receiving,
        wait: Wait<'_>,
    ) -> io::Result<MutexGuard<'a, State>> {
        let Receiving { input, scratch, spin, link, bulk } = receiving;
        let flushed = matches!(wait, Wait::ForNew) || self.flush()?;
        let wait = match wait {
            Wait::No => None,
            Wait::ForNew => Some(spin),
            Wait::For(_) if !flushed => {
                link.wait_either(Some(Duration::from_millis(100)))?;
                None
            }
            // A request that was answered early is over when the last of its data is sent, here or
            // by another thread: then nothing more may come.
            Wait::For(slots) => (!self.state.lock().is_over(slots)).then_some(spin),
        };
        let (link, bulk) = (&*link, *bulk);
        let mut sink = Completing { core: self, link, state: None, answers: Vec::new(), bulk };
        let incoming = input.receive(link, scratch, wait, &mut sink, &self.counters)?;
        let Completing { mut state, answers, .. } = sink;
        if !answers.is_empty() {
            drop(state.take());
            self.send_answers(answers)?;
        }
        match incoming {
            Incoming::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(state.unwrap_or_else(|| self.state.lock())),
        }
    }

    pub(super) fn complete(&self, state: &mut State, slot: usize, result: Result<(), Error>) {
        if matches!(state.slots[slot].status, Status::Waiting) {
            state.bulk -= usize::from(state.slots[slot].bulk);
            if state.slots[slot].alters {
                self.count_change();
            }
            let found = &mut state.slots[slot];
            if let Some((handle, lock)) = found.lock
                && result.is_ok()
                && found.outcome.single().is_ok()
            {
                state.files.remember_lock(handle, &lock);
            }
            let closed = found.closes.take();
            found.status = Status::Done(result);
            match closed {
                Some(Closing::File(handle)) => state.files.forget(handle),
                Some(Closing::Disk(disk)) => state.disks.forget(disk),
                Some(Closing::Process(_)) | None => {}
            }
            // In no order; a slot has one at most.
            let of_it = |(changing, ..): &(u16, _, _)| usize::from(*changing) == slot;
            if let Some(place) = state.changes.iter().position(of_it) {
                state.changes.swap_remove(place);
            }
            self.tell(state, slot as u16);
        }
    }
}
