//! Waiting for answers: one of the waiting threads receives for all.

use super::completing::Completing;
use super::reconnect::requests_of;
use super::{Core, Look, Messages, Outcome, Receiving, SlotRef, State, Status, Wait, server_of};
use crate::borrow::Borrowed;
use crate::disks::Closing;
use crate::lent::Buffer;
use crate::{Error, Lock};
use parking_lot::{Condvar, MutexGuard};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use towline_net::{Incoming, LinkKind};
use towline_wire::Errno;
use towline_wire::request::lock::{FLOCK, UNLOCK};

/// Fails all requests if the leader panics, so that nobody waits for ever for what it would have
/// received.
pub(super) struct FailOnPanic<'a>(pub(super) &'a Core);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        let error = Error::Connection {
            server: server_of(&self.0.transport),
            what: "given up: the thread that received for all panicked".into(),
            errno: Errno::EIO,
        };
        self.0.fail_all(&error, None);
        self.0.wake();
    }
}

/// Calls wakers. A waker that panics must not end a call of this thread, whose buffers are in use.
pub(super) fn wake_all(woken: Vec<Waker>) {
    for waker in woken {
        if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
            log::error!("a waker panicked");
        }
    }
}

impl Core {
    /// If a request is over, wakes those who wait for it, or frees its slot if it was abandoned.
    pub(super) fn tell(&self, state: &mut State, slot: u16) {
        let found = &mut state.slots[usize::from(slot)];
        if found.sending > 0 || !matches!(found.status, Status::Done(_)) {
            return;
        }
        // Also for an abandoned request: an overlapping change may wait for it.
        for waiter in found.waiters.drain(..) {
            waiter.notify_one();
        }
        if found.abandoned {
            let unwanted = found.outcome.opened.take();
            state.closing.extend(unwanted.map(Closing::File));
            return self.release(state, slot);
        }
        if let Some(waker) = found.waker.take() {
            state.woken.push(waker);
        }
        // A thread may wait for its slot, see `Core::park`.
        self.slot_free.notify_one();
    }

    /// Waits for one request and moves its outcome to `outcome`; returns its buffer.
    pub(crate) fn wait(
        self: &Arc<Self>,
        slot: &SlotRef,
        outcome: &mut Outcome,
    ) -> Result<Vec<u8>, Error> {
        self.wait_locked(self.state.lock(), slot, &mut |found| found.move_to(outcome))
    }

    /// [`Core::wait`] with the state already locked; `look` sees the outcome.
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

    /// Waits for any of several requests and moves its outcome to `outcome`; returns its index and
    /// its buffer.
    pub(crate) fn wait_any<'a>(
        self: &Arc<Self>,
        slots: impl Iterator<Item = &'a SlotRef> + Clone,
        outcome: &mut Outcome,
    ) -> (usize, Result<Vec<u8>, Error>) {
        // The list is needed only if this has to wait.
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

    /// Checks whether a request is over, after making what progress is possible without waiting. If
    /// it is not over, `waker` will be woken once it is.
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
            // The state was unlocked while the request was resent: its answer may have arrived
            // without finding a waker.
            if finished.is_some() || !state.is_over(Some(std::slice::from_ref(slot))) {
                break finished;
            }
        };
        // Dropped after the state is unlocked: dropping a waker can run any code, too.
        let mut old = None;
        if finished.is_none() {
            old = state.slots[usize::from(slot.slot)].waker.replace(waker.clone());
        }
        self.leave(state);
        drop(old);
        finished
    }

    /// Called when a thread stops waiting: hands over the lead, and sends closes that waited for a
    /// slot.
    pub(super) fn leave(self: &Arc<Self>, state: MutexGuard<'_, State>) {
        self.hand_over(&state);
        let closes = !state.closing.is_empty();
        drop(state);
        if closes {
            self.close_pending();
        }
    }

    /// Receives what has arrived without waiting, for callers that wait for [`crate::Client::fd`]
    /// elsewhere.
    pub(crate) fn progress(self: &Arc<Self>) {
        self.advance_once(Wait::No);
    }

    /// [`Core::progress`] that leaves a lost lane to others.
    pub(crate) fn glance(self: &Arc<Self>) {
        self.advance_once(Wait::Never);
    }

    fn advance_once(self: &Arc<Self>, wait: Wait<'_>) {
        let lead = self.state.lock().take_lead();
        if let Some(receiving) = lead {
            self.leave(self.lead(receiving, wait));
        }
    }

    /// Asks the server to give up a request that waits for a lock or for events.
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

    /// Gives up interest in a request: its slot is freed once it is over, and what it has opened is closed.
    pub(crate) fn abandon(self: &Arc<Self>, slot: &SlotRef) {
        let mut state = self.state.lock();
        let parked = state.parked.remove(slot);
        let found = &mut state.slots[usize::from(slot.slot)];
        let mut waker = None;
        if let Some(finished) = parked {
            let unwanted = finished.ok().and_then(|(outcome, _)| outcome.opened);
            state.closing.extend(unwanted.map(Closing::File));
        } else if found.sequence == slot.sequence {
            found.abandoned = true;
            waker = found.waker.take();
            self.tell(&mut state, slot.slot);
        }
        let closes = !state.closing.is_empty();
        drop(state);
        drop(waker);
        if closes {
            self.close_pending();
        }
    }

    /// Frees the slot of a request that is over.
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

    /// Takes the outcome of a request if it is over, ends the request and returns its buffer. The
    /// calling thread copies lent data to its target here, with the state unlocked.
    pub(super) fn take(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        slot: &SlotRef,
        look: Look<'_>,
    ) -> Option<Result<Vec<u8>, Error>> {
        // Looked up only if there are any: a group comes here for each of its requests.
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
            self.hand_over(state);
            let whole = MutexGuard::unlocked(state, || borrowed.copy_to(&mut target));
            state.slots[number].target = target;
            if !whole {
                match &state.given_up {
                    Some(given_up) => result = Err(given_up.error.clone()),
                    None => {
                        self.ask_again(state, number, &borrowed);
                        return None;
                    }
                }
            }
        }
        Some(self.take_result(state, number, result, look))
    }

    /// Ends a request with this result and frees its slot.
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
        // An operation gets its buffer back: the target of a read, else the source of a write.
        let target = std::mem::replace(&mut found.target, Buffer::none()).into_owned();
        let source = std::mem::replace(&mut found.source, Buffer::none()).into_owned();
        let buffer = if target.is_empty() { source } else { target };
        if let Some(stamps) = found.stamps.take() {
            state.times.finish(&stamps);
        }
        self.release(state, number as u16);
        result.map(|()| buffer)
    }

    /// Frees the slot of an operation that is over but not taken yet, for callers that start more
    /// operations than there are slots before they take any. Returns false if no slot could be
    /// freed.
    pub(super) fn park(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) -> bool {
        let Some(number) = state.to_park() else { return false };
        let slot = &mut state.slots[number];
        if let Some(borrowed) = slot.outcome.borrowed.take() {
            // The state stays locked: the owner of the operation may look for it at any moment.
            if !borrowed.copy_to(&mut slot.target) {
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

    /// Makes a request wait for its answer again, because the data lent to it was lost with the
    /// lane.
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
        // If its lane is still the current one, the leader resends it on noticing that this lane is
        // lost.
        if !borrowed.is_of(&state.link) {
            let messages = Messages::of(out, state.lane);
            MutexGuard::unlocked(state, || self.send_all(messages));
        }
    }

    /// Waits until something may have changed for these slots or, with `None`, until a slot may be
    /// free: by leading, or by sleeping while another thread leads.
    pub(super) fn advance<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slots: Option<&[SlotRef]>,
    ) -> MutexGuard<'a, State> {
        if slots.is_none() && state.is_over(None) {
            // The slot of a call that is over is freed by its own thread, with nothing to receive.
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

    /// If nobody leads, wakes a sleeping thread to lead. Every thread that stops waiting calls
    /// this, also one that was itself woken, by this or by its answer: so the lead is never lost.
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

    /// Sends messages that were queued to leave with others, since the leader may sleep until
    /// something arrives. Unlocks the state meanwhile: the queue is locked before the state, never
    /// after it.
    fn send_queued<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if !state.queues {
            return state;
        }
        drop(state);
        let _ = self.flush(); // the leader deals with a broken link
        self.state.lock()
    }

    /// Wakes tasks whose requests are over. The caller holds no lock.
    fn wake(&self) {
        let woken = std::mem::take(&mut self.state.lock().woken);
        wake_all(woken);
    }

    /// Leads once: receives for all threads, replaces a lost lane, and puts `receiving` back.
    pub(super) fn lead<'a>(
        self: &'a Arc<Self>,
        mut receiving: Box<Receiving>,
        wait: Wait<'_>,
    ) -> MutexGuard<'a, State> {
        let panics = FailOnPanic(self);
        let mut state = match self.receive(&mut receiving, wait) {
            Ok(state) => state,
            // After an invalid message, the rest of the stream has no meaning.
            Err(error)
                if matches!(wait, Wait::Never) && error.kind() != io::ErrorKind::InvalidData =>
            {
                self.state.lock()
            }
            Err(error) => {
                // Before reconnecting, which can take long.
                self.wake();
                self.reconnect(&mut receiving, &error);
                self.state.lock()
            }
        };
        if !state.near
            && !matches!(wait, Wait::Never)
            && state.requested >= self.options.nearer_after
        {
            drop(state);
            self.wake();
            self.move_nearer(&mut receiving);
            state = self.state.lock();
        }
        std::mem::forget(panics);
        self.put_back(&mut state, receiving);
        state
    }

    /// Gives the lead back, and wakes tasks whose requests are over.
    pub(super) fn put_back(&self, state: &mut MutexGuard<'_, State>, receiving: Box<Receiving>) {
        state.receiving = Some(receiving);
        if !state.woken.is_empty() {
            let woken = std::mem::take(&mut state.woken);
            MutexGuard::unlocked(state, || wake_all(woken));
        }
    }

    /// Receives once; returns with the state locked.
    fn receive<'a>(
        self: &'a Arc<Self>,
        receiving: &mut Receiving,
        wait: Wait<'_>,
    ) -> io::Result<MutexGuard<'a, State>> {
        let Receiving { input, scratch, spin, link, bulk, outage, .. } = receiving;
        let flushed = matches!(wait, Wait::ForNew) || self.flush()?;
        let looks = matches!(wait, Wait::No);
        let wait = match wait {
            Wait::No | Wait::Never => None,
            Wait::ForNew => Some(spin),
            Wait::For(_) if !flushed => {
                link.wait_either(Some(Duration::from_millis(100)))?;
                None
            }
            // A request that was answered early is over once the last of its data has been sent, by
            // this thread or another: then there may be nothing more to receive.
            Wait::For(slots) => (!self.state.lock().is_over(slots)).then_some(spin),
        };
        let (link, bulk) = (&*link, *bulk);
        let mut sink = Completing { core: self, link, state: None, answers: Vec::new(), bulk };
        let incoming = input.receive(link, scratch, wait, &mut sink, &self.counters)?;
        let Completing { mut state, answers, .. } = sink;
        if state.is_some() {
            *outage = None; // a message has arrived: the lane works
        }
        if !answers.is_empty() {
            drop(state.take());
            self.send_answers(answers)?;
        }
        match incoming {
            Incoming::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
            // Rings do not tell; whoever does not wait would never learn of it.
            Incoming::Drained if looks && link.kind() == LinkKind::Shm && link.peer_closed() => {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            _ => Ok(state.unwrap_or_else(|| self.state.lock())),
        }
    }

    /// Ends a waiting request with this result, and takes note of what the request locked, renamed,
    /// closed or changed.
    pub(super) fn complete(&self, state: &mut State, slot: usize, result: Result<(), Error>) {
        if matches!(state.slots[slot].status, Status::Waiting) {
            state.bulk -= usize::from(state.slots[slot].bulk);
            if state.slots[slot].alters {
                self.count_change();
            }
            let found = &mut state.slots[slot];
            if let Some((handle, lock)) = found.lock
                && result.is_ok()
            {
                match found.outcome.single().map(|_| ()).map_err(|error| error.errno()) {
                    Ok(()) => state.files.remember_lock(handle, &lock),
                    // The server gave up the lock that this would have converted.
                    Err(Errno::EAGAIN | Errno::EINTR) if lock.family == FLOCK => {
                        state.files.remember_lock(handle, &Lock { kind: UNLOCK, ..lock });
                    }
                    Err(_) => {}
                }
            }
            if found.renames
                && result.is_ok()
                && found.outcome.single().is_ok()
                && let Some([request]) = requests_of(&found.message).as_deref()
            {
                state.files.remember_renamed(found.order, request);
            }
            let leaves_open = found.opens && result.is_ok();
            found.outcome.opened = if leaves_open { found.outcome.first_opened() } else { None };
            if found.closes_opened
                && result.is_ok()
                && let Some(handle) = found.outcome.left_open()
            {
                state.closing.push(Closing::File(handle));
            }
            let closed = found.closes.take();
            found.status = Status::Done(result);
            if let Some(closed) = closed {
                // It was closed when its server ended, and the next one does not know it.
                if matches!(closed, Closing::File(handle) if state.files.is_lost(handle)) {
                    found.outcome = Outcome::done();
                }
                state.forget(closed);
            }
            // They are in no order, and a slot has at most one.
            let of_it = |(changing, ..): &(u16, _, _)| usize::from(*changing) == slot;
            if let Some(place) = state.changes.iter().position(of_it) {
                state.changes.swap_remove(place);
            }
            self.tell(state, slot as u16);
        }
    }
}
