//! A core gives way to the clients whose turn it is.
//!
//! When the connections whose turn it is have all been answered, and others wait, the core lets other threads of its
//! processor run before the next connection has its turn. Clients on this processor then ask again at once and their
//! turns go on, so few of them run at a time and find their memory in the caches. If that brings no requests, as the
//! clients run elsewhere, or if other programs keep the processor for long, the core gives way more and more rarely.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many connections have turns at a time.
const TURNS_MAX: usize = 2;
/// Clients that take longer than this to ask again do something else, or other programs run.
const LONG: Duration = Duration::from_micros(300);
/// Maximum number of turns that begin without giving way after it did not help.
const PAUSE_MAX: u32 = 1023;

#[derive(Debug, Default)]
pub(super) struct GivingWay {
    /// Connections that may go on with their turns, by the tokens of their events: those that began last.
    at_turn: VecDeque<u64>,
    /// The core gives way before it serves the next connection.
    is_due: bool,
    /// The core has given way, for this time.
    gave: Option<Duration>,
    /// Turns that begin without giving way before it is tried again.
    left: u32,
    /// How many that were after it did not help the last time.
    pause: u32,
}

impl GivingWay {
    /// Notes that a connection's turn begins.
    pub(super) fn begins(&mut self, token: u64) {
        if self.at_turn.len() == TURNS_MAX {
            self.at_turn.pop_front();
        }
        self.at_turn.push_back(token);
    }

    /// Called when no connection whose turn it is has asked, before another one has its turn. Returns true if the core
    /// should give way first. `goes_on` tells whether a turn is not over.
    pub(super) fn is_wanted(&mut self, goes_on: impl FnMut(&u64) -> bool) -> bool {
        if self.gave.take().is_some() {
            self.learn(false);
        }
        self.at_turn.retain(goes_on);
        if self.at_turn.len() < TURNS_MAX {
            return false;
        }
        self.is_due = self.left == 0;
        if !self.is_due {
            self.left -= 1;
        }
        self.is_due
    }

    /// Called when a connection goes on with its turn.
    pub(super) fn goes_on(&mut self) {
        if let Some(took) = self.gave.take() {
            self.learn(took < LONG);
        }
    }

    /// Lets other threads run if that is due. Returns true if it was.
    pub(super) fn give_way(&mut self) -> bool {
        let is_due = std::mem::take(&mut self.is_due);
        if is_due {
            let before = Instant::now();
            rustix::thread::sched_yield();
            self.gave = Some(before.elapsed());
        }
        is_due
    }

    fn learn(&mut self, helps: bool) {
        self.pause = if helps { 0 } else { (2 * self.pause + 1).min(PAUSE_MAX) };
        self.left = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_given_while_that_brings_requests_and_rarely_while_not() {
        let mut way = GivingWay::default();
        way.begins(1);
        assert!(!way.is_wanted(|_| true), "another turn may begin");
        way.begins(2);
        for _ in 0..10 {
            assert!(way.is_wanted(|_| true));
            way.gave = Some(Duration::ZERO);
            way.goes_on();
        }
        let mut given = 0;
        for token in 3..10_003 {
            if way.is_wanted(|_| true) {
                given += 1;
                way.gave = Some(Duration::ZERO);
                assert!(!way.is_wanted(|_| true), "nobody has asked");
            }
            way.begins(token);
            assert!(way.at_turn.len() <= TURNS_MAX + 1);
        }
        assert!((10..25).contains(&given), "{given}");
    }

    #[test]
    fn who_keeps_the_processor_for_long_is_not_given_it_again_soon() {
        let mut way = GivingWay::default();
        (0..2).for_each(|token| way.begins(token));
        assert!(way.is_wanted(|_| true));
        way.gave = Some(LONG);
        way.goes_on();
        assert!(!way.is_wanted(|_| true));
        (3..5).for_each(|token| way.begins(token));
        assert!(way.is_wanted(|_| true));
    }

    /// Nobody asks whether to give way while there are always some that ask rarely.
    #[test]
    fn turns_that_begin_without_a_question_take_no_memory() {
        let mut way = GivingWay::default();
        (0..1000).for_each(|token| way.begins(token));
        assert_eq!(way.at_turn, [998, 999]);
    }

    #[test]
    fn nobody_is_awaited_whose_turn_is_over() {
        let mut way = GivingWay::default();
        (0..4).for_each(|token| way.begins(token));
        assert!(!way.is_wanted(|token| *token == 3));
        assert_eq!(way.at_turn, [3]);
    }
}
