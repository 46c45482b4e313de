//! Replaces a lost lane and resends unanswered requests.

use super::completing::Completing;
use super::{Core, Outcome, Receiving, Slot, Status, connection_error, server_of};
use crate::Error;
use crate::borrow::Memories;
use crate::disks::OpenDisks;
use crate::first_use::FirstUse;
use crate::handshake::{Failure, Greeted, greet};
use crate::reclaim::{OpenFiles, Renamed, RequestNumber};
use smallvec::SmallVec;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use towline_net::{Counters, Incoming, Input};
use towline_wire::hello::resumed;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::reply::parse_results;
use towline_wire::request::parse_compound;
use towline_wire::{Errno, Header, Kind, Reply, Request, Welcome};

/// A lane that stood for this long worked, even if nothing arrived over it: a request may wait for a
/// lock for hours.
const STANDS: Duration = Duration::from_secs(5);

/// A time without a lane that works.
pub(super) struct Outage {
    since: Instant,
    /// When the last new lane was established.
    restored: Instant,
    /// The time to wait before the next try.
    pause: Duration,
    /// The user has been told.
    told: bool,
}

impl Outage {
    pub(super) fn begin() -> Self {
        let now = Instant::now();
        Self { since: now, restored: now, pause: Duration::from_millis(5), told: false }
    }

    /// A new lane is established, which has to prove itself.
    pub(super) fn ends(&mut self) {
        self.restored = Instant::now();
    }

    /// True if the loss at `now` of a lane over which nothing arrived belongs to this outage.
    fn goes_on(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.restored) < STANDS
    }
}

impl Core {
    /// Replaces a lost lane and resends unanswered requests. Called by the leader.
    pub(super) fn reconnect(self: &Arc<Self>, receiving: &mut Receiving, cause: &io::Error) {
        if cause.kind() == io::ErrorKind::InvalidData {
            let what = "sent an invalid message";
            return self.give_up(&connection_error(&self.transport, what, cause));
        }
        self.take_arrived(receiving);
        let shut_down = io::Error::new(io::ErrorKind::ConnectionReset, "the server shut down");
        let cause = if self.state.lock().shut_down { &shut_down } else { cause };
        let is_given_up = |outage: &Outage| outage.since.elapsed() >= self.options.reconnect;
        let last = receiving.outage.take().filter(|outage| outage.goes_on(Instant::now()));
        let mut outage = match last {
            None => Outage::begin(),
            Some(outage) if is_given_up(&outage) => {
                let what = format!(
                    "connection lost ({cause}); for {:?} the server has dropped each new one before \
                     anything arrived over it, its log may say why",
                    self.options.reconnect
                );
                let error = io::ErrorKind::ConnectionReset.into();
                receiving.outage = Some(outage);
                return self.give_up(&connection_error(&self.transport, &what, &error));
            }
            Some(mut outage) => {
                self.pause(&mut outage, cause);
                outage
            }
        };
        let failed = loop {
            match self.go_on(receiving) {
                Ok(Ok(())) => {
                    outage.ends();
                    receiving.outage = Some(outage);
                    return;
                }
                Ok(Err(error)) if is_given_up(&outage) => break self.lost_again(&error),
                Err(Failure::Final(error)) => break error,
                Err(Failure::Io(error)) if is_given_up(&outage) => {
                    let what = format!(
                        "connection lost ({cause}) and not restored within {:?}",
                        self.options.reconnect
                    );
                    break connection_error(&self.transport, &what, &error);
                }
                Ok(Err(_)) | Err(Failure::Io(_)) => {}
            }
            self.pause(&mut outage, cause);
        };
        receiving.outage = Some(outage);
        self.give_up(&failed);
    }

    /// Tries once to go on over a new lane; the inner error says that it was lost again. Called by the leader.
    pub(super) fn go_on(
        self: &Arc<Self>,
        receiving: &mut Receiving,
    ) -> Result<io::Result<()>, Failure> {
        let (near, session, is_given_up) = {
            let state = self.state.lock();
            (state.near, (state.session, state.secret), state.given_up.is_some())
        };
        // Until they end, they have what was reopened, also locks.
        receiving.begun.retain(|begun| self.end(*begun).is_err());
        self.connected_as.store((self.options.connects_as)(), Ordering::Relaxed);
        let greet = || greet(&self.transport, near, self.client, session, &self.options);
        let mut greeted = greet()?;
        if is_given_up && greeted.welcome.resumed == resumed::JOINED {
            // Its slots carry requests that have failed here.
            self.end(session)?;
            greeted = greet()?;
            if greeted.welcome.resumed == resumed::JOINED {
                return Err(Failure::Io(io::ErrorKind::ResourceBusy.into()));
            }
        }
        let Welcome { session, secret, resumed, .. } = greeted.welcome;
        let went_on = self.resume(receiving, greeted);
        match went_on {
            Ok(()) => receiving.begun.clear(),
            Err(_) if resumed == resumed::NEW => receiving.begun.push((session, secret)),
            Err(_) => {}
        }
        Ok(went_on)
    }

    pub(super) fn lost_again(&self, error: &io::Error) -> Error {
        connection_error(&self.transport, "connection lost again while reopening files", error)
    }

    /// Takes what arrived before the lane was lost: sending on it may have failed first.
    fn take_arrived(self: &Arc<Self>, receiving: &mut Receiving) {
        let Receiving { input, scratch, link, .. } = receiving;
        loop {
            let (state, answers, bulk) = (None, Vec::new(), false);
            let mut sink = Completing { core: self, link: &*link, state, answers, bulk };
            let arrived = input.receive(link, scratch, None, &mut sink, &self.counters);
            if !matches!(arrived, Ok(Incoming::Progress)) {
                return;
            }
        }
    }

    /// Waits before the next try, longer each time. Tells the user about the outage before the first
    /// wait.
    fn pause(&self, outage: &mut Outage, cause: &io::Error) {
        if !outage.told {
            let server = server_of(&self.transport);
            log::warn!(
                "{server}: connection lost ({cause}); retrying for {:?}",
                self.options.reconnect
            );
            outage.told = true;
        }
        towline_net::pause(outage.pause);
        outage.pause = (outage.pause * 2).min(Duration::from_millis(500));
    }

    /// Moves to shared memory if enough requests were made for it to pay and none is under way, as the user who has connected:
    /// the server may let another one not act for whom this one does. Called by the leader.
    pub(super) fn move_nearer(self: &Arc<Self>, receiving: &mut Receiving) {
        let session = {
            let mut state = self.state.lock();
            let is_idle =
                |slot: &Slot| !matches!(slot.status, Status::Waiting) && slot.sending == 0;
            if state.near
                || state.given_up.is_some()
                || state.requested < self.options.nearer_after
                || !state.slots.iter().all(is_idle)
                || (self.options.connects_as)() != self.connected_as()
            {
                return;
            }
            state.near = true;
            (state.session, state.secret)
        };
        // Requests begun meanwhile are resent, but take effect once. If the move fails, everything
        // stays as it is; if the server has already ended the old lane, it is found lost later.
        if let Ok(greeted) = greet(&self.transport, true, self.client, session, &self.options)
            && greeted.welcome.resumed == resumed::JOINED
            && let Err(error) = self.resume(receiving, greeted)
        {
            self.reconnect(receiving, &error);
        }
    }

    /// Ends a session that is not continued: its locks would be in the way of the next one.
    fn end(&self, session: (u64, u64)) -> io::Result<()> {
        let greeted = greet(&self.transport, false, self.client, session, &self.options);
        let Ok(Greeted { link, .. }) = greeted else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let counters = Counters::default();
        link.send(&[&Header::new(Kind::Goodbye, 0, 0).to_bytes()], &counters)?;
        if let Some(fd) = link.fd() {
            rustix::net::shutdown(fd, rustix::net::Shutdown::Write)?;
        }
        // The session is over when the server closes the lane, after reading it to the end.
        let limit = Instant::now() + self.options.greeting;
        while !matches!(link.receive(&mut [0; 64], &counters), Ok(0)) {
            if Instant::now() >= limit {
                return Err(io::ErrorKind::TimedOut.into());
            }
            link.wait_readable(Duration::from_millis(100))?;
        }
        Ok(())
    }

    /// Continues over a new lane. If this fails, a session that the lane has begun is to be ended.
    fn resume(self: &Arc<Self>, receiving: &mut Receiving, greeted: Greeted) -> io::Result<()> {
        let Greeted { link, welcome } = greeted;
        let mut out = self.out.lock();
        receiving.input = Input::default();
        let mut locked = self.state.lock();
        let state = &mut *locked;
        let unsent =
            state.slots.iter().map(|slot| out.messages.iter().any(|out| out.is_unsent(slot)));
        let unsent: Vec<bool> = unsent.collect();
        if welcome.resumed != resumed::JOINED {
            for slot in state.slots.iter().filter(|slot| matches!(slot.status, Status::Waiting)) {
                if let Some((handle, lock)) = &slot.lock {
                    state.files.give_up(*handle, lock);
                }
            }
            // The last slot is reserved for this.
            let mut lane = FirstUse {
                link: &link,
                slot: state.slots.len() as u16,
                sequence: 0,
                limit: self.options.greeting,
            };
            let place_of = self.options.place_of;
            let under_way = unanswered_renames(&state.slots, &state.files);
            let maybe = state.given_up.as_ref().map_or(&under_way, |given_up| &given_up.renamed);
            state
                .files
                .reclaim(place_of, maybe, |identity, requests| lane.exchange(identity, requests))?;
            state.disks.reclaim(|request, take| {
                let results = lane.ask(self.identity(), std::slice::from_ref(request))?;
                let replies = parse_results(&results).unwrap_or_default();
                take(replies.first().copied().unwrap_or(Reply::Done {}));
                Ok(())
            })?;
            if welcome.resumed == resumed::REMEMBERED {
                lane.exchange(self.identity(), &[Request::Reclaimed {}])?;
            }
        }
        out.messages.clear();
        out.lane += 1;
        state.lane = out.lane;
        state.memories = Memories::of(&link, self.options.hide);
        state.debts = 0;
        state.leaves.clear();
        let shut_down = std::mem::take(&mut state.shut_down);
        let link = Arc::new(link);
        (receiving.link, out.link) = (link.clone(), link.clone());
        state.link = link;
        state.session = welcome.session;
        state.secret = welcome.secret;
        state.boot_epoch = welcome.boot_epoch;
        state.given_up = None;
        let mut numbers: Vec<usize> = (0..state.slots.len()).collect();
        numbers.sort_unstable_by_key(|number| state.slots[*number].order);
        for number in numbers {
            let slot = &mut state.slots[number];
            // A request that no server has received or begun has not taken effect. What was sent on the
            // lane before this one may have, though it was not sent again.
            let unbegun = !slot.was_sent && (unsent[number] || shut_down && !slot.may_have_begun());
            slot.was_sent = !unbegun;
            slot.sending = 0;
            slot.indebted = false;
            if !matches!(slot.status, Status::Waiting) {
                self.tell(state, number as u16);
                continue;
            }
            if welcome.resumed == resumed::NEW && !unbegun && !is_repeatable(&slot.message) {
                self.complete(state, number, Err(Error::Unknown));
                continue;
            }
            // A close that nobody waits for is sent: the file may have been opened, and locked,
            // through another session of the family.
            if !slot.abandoned
                && let Some(result) = unless_resent(
                    &state.files,
                    &state.disks,
                    &slot.message,
                    &mut slot.outcome,
                    welcome.resumed != resumed::JOINED,
                )
            {
                self.complete(state, number, result);
                continue;
            }
            slot.received = 0;
            slot.landed = 0;
            slot.checksums.clear();
            slot.failed = None;
            slot.change_header(|header| {
                header.take_ahead();
            });
            out.messages.push_back(slot.out(number as u16));
            if slot.cancelled {
                out.messages.push_back(slot.cancellation(number as u16));
            }
        }
        drop(locked);
        drop(out);
        // A task that was polled next waits until something arrives. The leader deals with a broken link.
        let _ = self.flush();
        Ok(())
    }
}

/// The operations of a request that was sent.
pub(super) fn requests_of(message: &[u8]) -> Option<SmallVec<[Request<'_>; 4]>> {
    let header = message.first_chunk().and_then(|head| Header::parse(head).ok())?;
    let body = message.get(HEADER_BYTES..)?.get(..header.body_bytes as usize)?;
    parse_compound(body).ok()
}

/// True for a request that may be sent to a server without memory of it, even if an earlier run of
/// the server may have executed it.
fn is_repeatable(message: &[u8]) -> bool {
    requests_of(message).is_some_and(|requests| requests.iter().all(Request::repeatable))
}

/// What has been renamed if the requests under way were executed, by the number of the request.
pub(super) fn unanswered_renames(
    slots: &[Slot],
    files: &OpenFiles,
) -> Vec<(RequestNumber, Renamed)> {
    let under_way =
        slots.iter().filter(|slot| slot.renames && matches!(slot.status, Status::Waiting));
    let renamed = |slot: &Slot| {
        let requests = requests_of(&slot.message)?;
        Some((slot.order, files.renamed_by(requests.first()?)?))
    };
    under_way.filter_map(renamed).collect()
}

/// Returns the result of a request that was under way when the lane was lost, if it need not be
/// resent. If the server has restarted, a close of a file or disk that was not reopened has
/// succeeded. Other requests for a file or disk that could not be reopened fail, also if the lane on
/// which that turned out was lost, too.
fn unless_resent(
    files: &OpenFiles,
    disks: &OpenDisks,
    message: &[u8],
    outcome: &mut Outcome,
    has_restarted: bool,
) -> Option<Result<(), Error>> {
    let requests = requests_of(message)?;
    let is_closed = match requests[..] {
        [Request::Close { handle }] => !files.knows(handle),
        [Request::DiskClose { disk }] => !disks.knows(disk),
        _ => false,
    };
    if is_closed && has_restarted {
        *outcome = Outcome::done();
        return Some(Ok(()));
    }
    if let Some(error) = requests.first().and_then(|request| disks.failure(request)) {
        return Some(Err(error));
    }
    files.is_stale(&requests).then_some(Err(Errno::ESTALE.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_of_a_lane_that_stood_for_long_begins_a_new_outage() {
        let outage = Outage::begin();
        assert!(outage.goes_on(outage.restored + STANDS / 2));
        assert!(!outage.goes_on(outage.restored + STANDS));
    }
}
