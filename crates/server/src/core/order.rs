//! The order in which connections are read when more of them are readable than a core serves at once.
//!
//! A client that shares the processors with the server sends its next request as soon as it is answered. If
//! that request is served right away, the client's memory is still in the caches; if all others come first,
//! it is not. So connections have turns: in its turn, a connection starts [`ROW`] requests before the waiting
//! connections are served, or as many as move [`ROW_BYTES`], provided that it sends them in time. Between two
//! checks for new requests, the core serves only as many connections as move [`LOOK_BYTES`]. With 184 clients,
//! each one waits longer for its turn but finishes its requests sooner.
//!
//! While many ask all the time, the core lets those run whose turn it is (`giving_way.rs`) and gives them longer turns.
//! Others whose turn is not over, since they did not ask in time, are served between two turns: if they went first,
//! each of them would ask again at once, and all clients would queue for the processor.
//!
//! A connection that asks after all others have had their turns goes before those that always ask, so who asks
//! rarely hardly waits.

use super::giving_way::{GivingWay, Trust, Turn, Whereabouts};
use super::round::Round;
use super::{Core, NBD_TOKENS};
use crate::grants::Served;
use crate::lane::Lane;
use crate::nbd::Nbd;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Requests that a connection may start in its turn.
const ROW: u32 = 16;
/// So many times as long are all turns while many ask, most of them on the core's processor: to have a client's memory in
/// the caches again costs more than others gain by waiting less.
const LONG_TURN: u32 = 2;
/// Bytes after which a connection starts no more requests in its turn.
const ROW_BYTES: u64 = 1 << 20;
/// How often a connection may be read in its turn. Ends the turn of one that is always in the middle of a message.
const READS: u32 = 64;
/// Bytes that are moved, roughly, before the core checks for new requests.
const LOOK_BYTES: u64 = 128 * 1024;
/// Minimum number of connections served between two checks: enough for clients and core to work in parallel.
const WIDTH_MIN: u64 = 2;
/// Maximum number of connections served between two checks; their answers are sent together.
const WIDTH_MAX: u64 = 64;
/// Of more connections that ask all the time, those whose turn it is are awaited.
const CROWD: u64 = 8;

/// What a connection stores about its turn.
#[derive(Debug, Default)]
pub(crate) struct Place {
    is_queued: bool,
    /// Requests this connection may still start in its current turn.
    left: u32,
    /// Bytes that may still be moved before it starts no more.
    bytes_left: u64,
    /// How often it may still be read in its current turn.
    reads: u32,
    /// How many turns had been given when it was last served.
    turn: u64,
    /// The last round in which it had a turn.
    round: u64,
    /// It had asked rarely when its turn began.
    was_rare: bool,
    /// Processor on which its client ran when that was last looked at.
    pub(super) client_on: Option<u32>,
    /// The client was found elsewhere than before: it is looked at again with its next request.
    pub(super) looks_again: bool,
    /// Where that is, seen from the core.
    pub(super) client: Whereabouts,
    /// It runs on this machine, and a core sleeps for it where both run on one processor.
    pub(super) is_local: bool,
    /// Bytes that requests have to move for the core to sleep for the client while both run on one processor;
    /// `u64::MAX`: it never does; `None`: nobody has asked yet.
    pub(super) slept_from: Option<u64>,
    /// Most bytes moved at once since the client was last looked at.
    pub(super) most: u64,
    pub(super) trust: Trust,
}

impl Place {
    /// Returns true if the connection waits to be read.
    pub(super) fn is_queued(&self) -> bool {
        self.is_queued
    }

    /// Notes that the connection starts a request.
    pub(crate) fn begin(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Notes that the connection was awaited in vain. That ends its turn if it would be first again.
    fn was_late(&mut self) {
        if self.client != Whereabouts::Here {
            self.left = 0;
        }
        self.trust.learn(false);
    }

    /// Notes that so many bytes were, or will be, moved for the connection.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.most = self.most.max(bytes);
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        if self.bytes_left == 0 {
            self.left = 0;
        }
    }
}

/// The queues of [`Order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    First,
    Late,
    Rare,
    Rest,
}

/// Connections that can be read, by the tokens of their events.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Connections whose turn it is.
    first: VecDeque<u64>,
    /// Others whose turn is not over.
    late: VecDeque<u64>,
    /// How many of these are served before the next turn begins, at most.
    late_due: usize,
    /// Connections that had not asked for as long as all others had their turns.
    rare: VecDeque<u64>,
    /// Other connections that wait for their turn.
    rest: VecDeque<u64>,
    /// One of `rare` was served last, before the others.
    was_rare: bool,
    /// Turns given so far.
    turns: u64,
    /// Whether the connection that was removed last should move is to be looked at: it begins its turn while others wait
    /// for theirs or ask all the time, or was to be looked at again.
    looks: bool,
    pub(super) round: Round,
    pub(super) way: GivingWay,
    /// Connections served since [`Order::width`] was last asked.
    served: u64,
    /// Bytes that had been moved until then.
    moved: u64,
}

impl Order {
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> u64 {
        (self.first.len() + self.rare.len() + self.waiting()) as u64
    }

    /// Returns how many connections wait until those whose turn it is, or which ask rarely, are served.
    fn waiting(&self) -> usize {
        self.late.len() + self.rest.len()
    }

    /// Adds a connection that can be read. A connection in the middle of a message or transfer (`is_within`)
    /// goes on with its turn.
    fn push(&mut self, token: u64, place: &mut Place, is_within: bool) {
        if std::mem::replace(&mut place.is_queued, true) {
            return;
        }
        let goes_on = place.reads > 0 && (is_within || place.left > 0);
        let is_first = is_within
            || !self.is_crowded()
            || place.client != Whereabouts::Here
            || place.was_rare
            || self.way.awaits(token);
        let want_turns = (self.rare.len() + self.rest.len()) as u64;
        // Clients that queue for the processor do not wait here.
        let others = want_turns.max(self.round.active());
        let is_rare = place.turn + others < self.turns;
        let queue = match (goes_on, is_rare) {
            (true, _) if is_first => &mut self.first,
            (_, true) => &mut self.rare,
            (true, _) => &mut self.late,
            _ => &mut self.rest,
        };
        queue.push_back(token);
    }

    /// Returns true if so many ask all the time that those whose turn it is are awaited.
    fn is_crowded(&self) -> bool {
        self.round.active() > CROWD
    }

    /// Returns true if most of these are on this machine (`Place::is_local`).
    pub(super) fn has_local_crowd(&self) -> bool {
        self.is_crowded() && self.round.are_local()
    }

    /// Returns true if far fewer ask all the time.
    pub(super) fn has_emptied(&self) -> bool {
        2 * self.round.active() <= CROWD
    }

    /// Returns true if only such connections ask as wait until those whose turn it is are served.
    pub(super) fn only_others_ask(&self) -> bool {
        self.first.is_empty() && self.rare.is_empty() && self.waiting() > 0
    }

    /// Returns the queue of the connection that is next.
    fn next(&mut self) -> Next {
        // Every second time, so that neither kind can keep the other from being served.
        self.was_rare = !self.was_rare && !self.rare.is_empty();
        if self.first.is_empty() {
            // Those that come late while others do are served after the next turn has begun.
            self.late_due = self.late_due.min(self.late.len());
        }
        if self.was_rare {
            Next::Rare
        } else if !self.first.is_empty() {
            Next::First
        } else if self.late_due > 0 || self.rest.is_empty() && !self.late.is_empty() {
            self.late_due = self.late_due.saturating_sub(1);
            Next::Late
        } else if !self.rest.is_empty() {
            self.late_due = usize::MAX;
            Next::Rest
        } else {
            Next::Rare
        }
    }

    /// Removes the next connection, which gets a new turn if it had to wait for one. `None`: another
    /// connection has this token by now.
    fn pop<'a>(&mut self, place: impl FnOnce(u64) -> Option<&'a mut Place>) -> Option<u64> {
        let next = self.next();
        let queue = match next {
            Next::First => &mut self.first,
            Next::Late => &mut self.late,
            Next::Rare => &mut self.rare,
            Next::Rest => &mut self.rest,
        };
        let token = queue.pop_front()?;
        let place = place(token).filter(|place| place.is_queued)?;
        place.is_queued = false;
        let is_crowded = self.is_crowded();
        let goes_on = matches!(next, Next::First | Next::Late);
        let begins = !goes_on && (is_crowded || !self.rest.is_empty());
        self.looks = begins || goes_on && place.looks_again;
        if goes_on {
            if is_crowded {
                self.way.goes_on(token, &mut place.trust);
            }
            place.reads = place.reads.saturating_sub(1);
        } else {
            let is_rare = next == Next::Rare;
            place.was_rare = is_rare;
            self.turns += 1;
            let (is_local, is_here) = (place.is_local, place.client == Whereabouts::Here);
            self.round.begin(&mut place.round, is_rare, is_local, is_here);
            if is_crowded && !is_rare {
                self.way.begins(token, &mut place.trust, place.client);
            }
            let length = if is_crowded && self.round.are_here() { LONG_TURN } else { 1 };
            (place.left, place.bytes_left) = (length * ROW, u64::from(length) * ROW_BYTES);
            place.reads = length * READS - 1;
        }
        place.turn = self.turns;
        self.served += 1;
        Some(token)
    }

    /// Returns how many connections to serve before the next check, from the bytes moved for those served
    /// since this was last asked.
    fn width(&mut self, moved: u64) -> u64 {
        let since = moved - std::mem::replace(&mut self.moved, moved);
        let each = since / std::mem::take(&mut self.served).max(1);
        (LOOK_BYTES / each.max(1)).clamp(WIDTH_MIN, WIDTH_MAX)
    }
}

/// Returns the turn of the connection with this token, and whether it is in the middle of a message or
/// transfer.
pub(super) fn place_at<'a>(
    nbd: &'a mut Nbd,
    lanes: &'a mut [Option<Lane>],
    token: u64,
) -> Option<(&'a mut Place, bool)> {
    if token >= NBD_TOKENS {
        return nbd.place_of((token - NBD_TOKENS) as usize);
    }
    Some(lanes.get_mut(token as usize)?.as_mut()?.place())
}

impl Core {
    /// Queues a connection that has become readable.
    pub(crate) fn queue(&mut self, token: u64) {
        let Self { order, nbd, lanes, .. } = self;
        if let Some((place, is_within)) = place_at(nbd, lanes, token) {
            order.push(token, place, is_within);
        }
    }

    /// Queues a connection behind all others, though no event will report what it has sent, since that is
    /// not new.
    pub(crate) fn queue_last(&mut self, token: u64) {
        let Self { order, nbd, lanes, .. } = self;
        if let Some((place, is_within)) = place_at(nbd, lanes, token) {
            place.reads = 0;
            order.push(token, place, is_within);
        }
    }

    /// Queues the lanes over shared memory to which something has arrived, and sends what has room by now:
    /// while the core is awake, no event reports either.
    pub(super) fn look_at_rings(&mut self) {
        let Self { order, lanes, shm_lanes, dirty, .. } = self;
        for index in shm_lanes.iter().copied() {
            let Some(Some(lane)) = lanes.get_mut(index) else { continue };
            if !lane.out.is_empty() {
                dirty.push(index);
            }
            if !lane.place.is_queued && lane.has_input() {
                let (place, is_within) = lane.place();
                order.push(index as u64, place, is_within);
            }
        }
    }

    /// Reads from the next connections; from all of them when the server shuts down.
    pub(super) fn serve_next(&mut self, scratch: &mut [u8]) {
        self.read_next(scratch);
        self.roam();
        self.tell_load();
    }

    /// Tells the other cores how much is asked of this one.
    pub(super) fn tell_load(&self) {
        let turn = self.order.round.turn_time().map_or(0, |turn| turn.as_nanos() as u64);
        self.tell(self.order.round.active(), turn);
    }

    /// Tells the other cores that nothing is asked of this one at the moment.
    pub(super) fn tell_idle(&self) {
        self.tell(0, 0);
    }

    fn tell(&self, active: u64, turn_ns: u64) {
        self.statistics.active.store(active, Ordering::Relaxed);
        self.statistics.turn_ns.store(turn_ns, Ordering::Relaxed);
    }

    /// Returns what to expect of a connection whose turn began.
    fn turn_of(&self, token: u64) -> Turn {
        let (place, is_answered) = match token.checked_sub(NBD_TOKENS) {
            Some(index) => match self.nbd.place_and_owner(index as usize) {
                Some((place, owner)) => (place, self.engine.requests_of(owner) == 0),
                None => return Turn::Over,
            },
            None => match self.lanes.get(token as usize) {
                Some(Some(lane)) => {
                    let served = lane.session.and_then(|id| self.sessions.get(id));
                    (&lane.place, served.is_none_or(Served::is_answered))
                }
                _ => return Turn::Over,
            },
        };
        match place.left > 0 && place.reads > 0 && !place.is_queued {
            false => Turn::Over,
            true if is_answered => Turn::Open,
            true => Turn::Unanswered,
        }
    }

    fn read_next(&mut self, scratch: &mut [u8]) {
        let queued = self.order.len();
        if queued == 0 {
            return;
        }
        let width = match self.draining {
            None if queued > WIDTH_MIN => self.order.width(self.bytes_moved()),
            _ => queued,
        };
        for _ in 0..width {
            if self.order.is_empty() {
                return;
            }
            if self.draining.is_none() && self.order.only_others_ask() && self.order.is_crowded() {
                let waiting = self.order.waiting();
                let mut way = std::mem::take(&mut self.order.way);
                let is_wanted = way.is_wanted(waiting, |token| self.turn_of(token));
                self.order.way = way;
                if is_wanted {
                    return;
                }
                let Self { order, nbd, lanes, .. } = self;
                for token in order.way.take_late() {
                    if let Some((place, _)) = place_at(nbd, lanes, token) {
                        place.was_late();
                    }
                }
            }
            let Self { order, nbd, lanes, .. } = self;
            if let Some(token) = order.pop(|token| Some(place_at(nbd, lanes, token)?.0))
                && !(self.order.looks && self.hand_over(token))
            {
                self.read(token, scratch);
            }
        }
    }
}

#[cfg(test)]
mod tests;
