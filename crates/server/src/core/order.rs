//! Which connections are read from first, where more can be read than a core serves at once.
//!
//! A client that shares the processors with the server asks again as soon as it is answered. Served then, it finds its memory in their
//! caches; served behind all the others, it does not. So a connection begins [`ROW`] requests before those are served that wait for
//! their turn, if it asks in time; and between two looks for who asks again, only so many connections are served as move [`LOOK_BYTES`].
//! With 184 clients each waits longer for its turn, and is over with its requests sooner. Nobody is waited for.

use super::{Core, NBD_TOKENS};
use crate::lane::Lane;
use crate::nbd::Nbd;
use std::collections::VecDeque;

/// Requests that a connection begins in its turn.
const ROW: u32 = 4;
/// Bytes that are moved, about, before the next look for who asks again.
const LOOK_BYTES: u64 = 128 * 1024;
/// Connections that are served meanwhile, at least: so many that clients and core work side by side.
const WIDTH_MIN: u64 = 2;
/// The same at most, whose answers are sent together.
const WIDTH_MAX: u64 = 64;

/// What a connection has to know of its turn.
#[derive(Debug, Default)]
pub(crate) struct Place {
    is_queued: bool,
    /// Requests that it may still begin in its turn.
    left: u32,
}

impl Place {
    /// The connection begins a request.
    pub(crate) fn begin(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

/// Connections that can be read from, by the tokens of their events.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// It is their turn.
    first: VecDeque<u64>,
    /// They wait for it.
    rest: VecDeque<u64>,
    /// Connections served since the bytes were looked at that had been moved until then.
    served: u64,
    moved: u64,
}

impl Order {
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.rest.is_empty()
    }

    /// A connection can be read from. One that `is_within` a message or a transfer need not wait for its end.
    fn push(&mut self, token: u64, place: &mut Place, is_within: bool) {
        if !std::mem::replace(&mut place.is_queued, true) {
            let goes_on = is_within || place.left > 0;
            if goes_on { &mut self.first } else { &mut self.rest }.push_back(token);
        }
    }

    /// The next one, with a new turn if it had waited for that; `None` where another connection has got its token meanwhile.
    fn pop<'a>(&mut self, place: impl FnOnce(u64) -> Option<&'a mut Place>) -> Option<u64> {
        let goes_on = self.first.pop_front();
        let token = goes_on.or_else(|| self.rest.pop_front())?;
        let place = place(token).filter(|place| place.is_queued)?;
        place.is_queued = false;
        if goes_on.is_none() {
            place.left = ROW;
        }
        self.served += 1;
        Some(token)
    }

    /// How many to serve before the next look, by the bytes that were `moved` so far for those served before.
    fn width(&mut self, moved: u64) -> u64 {
        let since = moved - std::mem::replace(&mut self.moved, moved);
        let each = since / std::mem::take(&mut self.served).max(1);
        (LOOK_BYTES / each.max(1)).clamp(WIDTH_MIN, WIDTH_MAX)
    }
}

/// The place of the connection with this token, and whether it is within a message or a transfer.
fn place_at<'a>(
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
    /// There is something to be read from a connection.
    pub(super) fn queue(&mut self, token: u64) {
        let Self { order, nbd, lanes, .. } = self;
        if let Some((place, is_within)) = place_at(nbd, lanes, token) {
            order.push(token, place, is_within);
        }
    }

    /// Reads from those who are next; from all before the end.
    pub(super) fn serve_next(&mut self, scratch: &mut [u8]) {
        if self.order.is_empty() {
            return;
        }
        let width = match self.draining {
            Some(_) => u64::MAX,
            None => self.order.width(self.bytes_moved()),
        };
        for _ in 0..width {
            if self.order.is_empty() {
                return;
            }
            let Self { order, nbd, lanes, .. } = self;
            if let Some(token) = order.pop(|token| Some(place_at(nbd, lanes, token)?.0)) {
                self.read(token, scratch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections that ask again as soon as one request of theirs is served, as many served between two looks as `width`.
    fn serve(order: &mut Order, places: &mut [Place], width: usize, requests: usize) -> Vec<u64> {
        let mut served = Vec::new();
        while served.len() < requests {
            let mut asked = Vec::new();
            for _ in 0..width {
                let next = order.pop(|token| places.get_mut(token as usize)).unwrap();
                places[next as usize].begin();
                asked.push(next);
            }
            for token in &asked {
                order.push(*token, &mut places[*token as usize], false);
            }
            served.append(&mut asked);
        }
        served
    }

    fn connections(count: usize) -> (Order, Vec<Place>) {
        let mut order = Order::default();
        let mut places = (0..count).map(|_| Place::default()).collect::<Vec<_>>();
        for (token, place) in places.iter_mut().enumerate() {
            order.push(token as u64, place, false);
        }
        (order, places)
    }

    #[test]
    fn each_makes_a_row_of_requests_in_its_turn_and_all_have_turns() {
        let (mut order, mut places) = connections(3);
        let served = serve(&mut order, &mut places, 1, 15);
        assert_eq!(served, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]);
        let (mut order, mut places) = connections(7);
        let served = serve(&mut order, &mut places, 2, 7 * 4 * 10);
        for token in 0..7 {
            let count = served.iter().filter(|served| **served == token).count();
            assert!((36..=44).contains(&count), "{token}: {count} of 40: {served:?}");
        }
    }

    #[test]
    fn who_is_within_a_message_goes_on_and_nobody_is_queued_twice() {
        let (mut order, mut places) = connections(3);
        for token in 0..3 {
            order.push(token, &mut places[token as usize], true);
        }
        let mut pop = |order: &mut Order| order.pop(|token| places.get_mut(token as usize));
        assert_eq!(pop(&mut order), Some(0));
        order.push(0, &mut places[0], true);
        let mut pop = |order: &mut Order| order.pop(|token| places.get_mut(token as usize));
        let rest = std::iter::from_fn(|| pop(&mut order)).collect::<Vec<_>>();
        assert_eq!(rest, [0, 1, 2]);
        assert!(order.is_empty());
    }

    #[test]
    fn a_connection_that_has_got_the_token_of_another_is_not_taken_for_it() {
        let (mut order, mut places) = connections(2);
        places[0] = Place::default();
        let mut pop = || order.pop(|token| places.get_mut(token as usize));
        assert_eq!([pop(), pop(), pop()], [None, Some(1), None]);
    }

    #[test]
    fn more_small_requests_than_long_ones_are_served_between_two_looks() {
        let mut order = Order { served: 10, ..Order::default() };
        assert_eq!(order.width(10 * 64 * 1024), WIDTH_MIN);
        order.served = 10;
        assert_eq!(order.width(10 * 64 * 1024 + 10 * 4096), 32);
        order.served = 10;
        assert_eq!(order.width(10 * 64 * 1024 + 10 * 4096 + 100), WIDTH_MAX);
    }
}
