//! How a core learns that there is something to do.

use super::resting::LONG_BYTES;
use super::{Core, IDLE, REFUSING, TICK, shm_link};
use crate::lane::Lane;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_net::{Counters, Link, look_often};

/// Moving this many bytes takes about as long as a small request.
const SMALL_BYTES: u64 = 16 * 1024;

/// How often to look whether a client over shared memory has taken answers. It rings when it has taken half of
/// what the ring holds; it may also have been stopped, for any time.
const UNTAKEN: Duration = Duration::from_millis(100);

impl Core {
    /// Receives from the connection that most likely has news, without asking the ring. Returns true if
    /// something was received.
    pub(super) fn try_guess(&mut self, scratch: &mut [u8]) -> bool {
        let received =
            |core: &Self| core.statistics.counters.bytes_received.load(Ordering::Relaxed);
        let before = received(self);
        let moved = self.bytes_moved();
        let since = moved - std::mem::replace(&mut self.guessed_at, moved);
        let took = 1 + u32::try_from(since / SMALL_BYTES).unwrap_or(u32::MAX - 1);
        let Some(event) = self.reactor.guess(took) else { return false };
        self.event(event, scratch);
        self.serve_next(scratch);
        let came = received(self) != before;
        if !came {
            self.reactor.guessed_wrong();
        }
        came
    }

    /// Returns the bytes that this core has received and sent so far.
    pub(super) fn bytes_moved(&self) -> u64 {
        let counters = &self.statistics.counters;
        let Counters { bytes_received, bytes_sent_copied, bytes_sent_file, .. } = counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        load(bytes_received)
            + load(bytes_sent_copied)
            + load(bytes_sent_file)
            + load(&counters.bytes_sent_in_place)
    }

    /// Spins for a while, then prepares to sleep. Returns true if there is work.
    pub(super) fn spin_or_prepare_sleep(&mut self) -> bool {
        if let Some(link) = self.answered.take().and_then(|index| shm_link(&self.lanes, index))
            && !link.readable()
        {
            link.prepare_send();
        }
        // A client that shares the processor may have sent its next request while it was being answered, so
        // this check is made even when spinning does not pay.
        if self.reactor.tells_at_once() && self.reactor.is_ready() {
            return true;
        }
        let moved = self.bytes_moved();
        let since = moved - std::mem::replace(&mut self.idle_at, moved);
        let is_asked_next = since >= LONG_BYTES && self.engine.is_at_rest();
        let rests = is_asked_next && self.resting.is_wanted(Instant::now(), moved);
        let Self { spin, reactor, lanes, shm_lanes, late, statistics, timed, .. } = self;
        let shm_readable =
            || shm_lanes.iter().filter_map(|at| lanes.get(*at)?.as_ref()).any(Lane::has_news);
        let due = late.peek().map(|late| late.at);
        let mut look = || {
            let is_due = due.is_some_and(|at| Instant::now() >= at);
            let readable = || !shm_lanes.is_empty() && look_often(shm_readable);
            let found = is_due || reactor.is_ready() || readable();
            if !found {
                statistics.record_times(timed);
            }
            found.then_some(())
        };
        let found = if rests { look() } else { spin.until(look) };
        if found.is_some() {
            return true;
        }
        self.statistics.record_times(&mut self.timed);
        self.order.round.pauses();
        self.tell_idle();
        !self.prepare_sleep()
    }

    /// Has the clients over shared memory ring from now on. Returns false if there is work other than reading from
    /// connections that are queued already.
    pub(super) fn prepare_sleep(&self) -> bool {
        let mut sleep = true;
        for index in &self.shm_lanes {
            if let Some(Some(lane)) = self.lanes.get(*index)
                && let Link::Shm(link) = &*lane.link
            {
                // The answers of a full lane may still be prepared by threads that may block, which ring.
                let full = lane.is_full() || lane.place.is_queued();
                sleep &= link.prepare_sleep(full, !lane.out.is_empty());
            }
        }
        sleep
    }

    /// Returns true if something arrived that was not looked at.
    pub(crate) fn has_news(&mut self) -> bool {
        let mut lanes = self.shm_lanes.iter().filter_map(|at| self.lanes.get(*at)?.as_ref());
        !self.order.is_empty() || self.reactor.is_ready() || lanes.any(Lane::has_news)
    }

    pub(super) fn timeout(&self) -> Option<Duration> {
        let is_untaken =
            |at: &usize| self.lanes[*at].as_ref().is_some_and(|lane| !lane.out.is_empty());
        let untaken = self.shm_lanes.iter().any(is_untaken).then_some(UNTAKEN);
        let refusing = (!self.refusing.is_empty()).then_some(REFUSING);
        let tick = (self.ticking || self.draining.is_some() || self.wants_ticks()).then_some(TICK);
        let left = |at: Instant| at.saturating_duration_since(Instant::now());
        let nbd = self.nbd.next_wake().map(left);
        let late = self.late.peek().map(|late| left(late.at));
        let waiting = self.waiting.next_wake().map(left);
        let stay = self.staying.stays().then_some(IDLE);
        [untaken, refusing, tick, nbd, late, waiting, stay].into_iter().flatten().min()
    }
}
