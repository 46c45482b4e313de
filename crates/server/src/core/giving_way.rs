//! A core gives way to the clients whose turn it is.
//!
//! When the connections whose turn it is have all been answered, and many others ask, the core lets other threads of its
//! processor run before the next connection has its turn. Clients on this processor then ask again at once and their
//! turns go on, so few of them run at a time and find their memory in the caches. Without that, the clients of a busy
//! processor queue for it instead of for the core, each of them for every single request.
//!
//! First the core yields. That does not help clients of other sessions or control groups, among which the kernel shares
//! out the processor first. So if nothing has come, the core sleeps until something does, but not for long, and only for
//! clients that run on this processor and move much: for the others, waiting longer for their turns would gain little.
//! Those that do not ask in time lose the rest of their turn and are awaited more and more rarely: they do something
//! else, or other programs keep the processor.

use super::Core;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So many connections are awaited at a time.
const AWAITED_MAX: usize = 2;
/// Clients that take longer than this to ask again do something else, or other programs run.
const LONG: Duration = Duration::from_micros(500);
/// Maximum number of turns of a connection in which it is not awaited after it was in vain.
const PAUSE_MAX: u32 = 1023;

/// Where the client of a connection runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// Nobody knows, or on another machine.
    #[default]
    Unknown,
    /// On the processor of the core.
    Here,
    /// On another processor, or its bytes arrive there.
    Elsewhere,
}

/// What a connection stores about being awaited.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Turns in which it is not awaited before that is tried again.
    left: u32,
    /// How many these were after it was awaited in vain the last time.
    pause: u32,
}

impl Trust {
    /// Returns true if the connection is to be awaited in the turn that begins.
    fn is_due(&mut self) -> bool {
        let is_due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        is_due
    }

    /// Notes whether the connection has asked in time.
    pub(super) fn learn(&mut self, has_asked: bool) {
        self.pause = if has_asked { 0 } else { (2 * self.pause + 1).min(PAUSE_MAX) };
        self.left = self.pause;
    }
}

#[derive(Debug)]
struct Awaited {
    token: u64,
    is_here: bool,
}

#[derive(Debug, Default)]
pub(super) struct GivingWay {
    /// Connections that may go on with their turns: those that began last.
    awaited: VecDeque<Awaited>,
    /// The core gives way before it serves the next connection.
    is_due: bool,
    /// Since when it has given way, or since somebody else asked meanwhile.
    since: Option<Instant>,
    /// Connections that waited for their turn then.
    waiting: usize,
    /// The core sleeps until something comes.
    sleeps: bool,
}

impl GivingWay {
    /// Notes that a connection's turn begins.
    pub(super) fn begins(&mut self, token: u64, trust: &mut Trust, client: Whereabouts) {
        if client == Whereabouts::Elsewhere || !trust.is_due() {
            return;
        }
        if self.awaited.len() == AWAITED_MAX {
            self.awaited.pop_front();
        }
        self.awaited.push_back(Awaited { token, is_here: client == Whereabouts::Here });
    }

    /// Called when no connection whose turn it is has asked, before one of `waiting` others has its turn. Returns true
    /// if the core should give way first. `goes_on` tells whether a turn is not over.
    pub(super) fn is_wanted(
        &mut self,
        waiting: usize,
        mut goes_on: impl FnMut(u64) -> bool,
    ) -> bool {
        self.awaited.retain(|awaited| goes_on(awaited.token));
        if self.awaited.len() < AWAITED_MAX {
            self.since = None;
            return false;
        }
        // Each client that runs before those that are awaited asks once, and then waits for its own turn.
        let has_come = waiting > std::mem::replace(&mut self.waiting, waiting);
        let is_patient = has_come || self.sleeps;
        self.is_due = self.since.is_none_or(|since| is_patient && since.elapsed() < LONG);
        if self.is_due && (has_come || self.since.is_none()) {
            self.since = Some(Instant::now());
        }
        self.is_due
    }

    /// Removes the connections that were awaited in vain.
    pub(super) fn take_late(&mut self) -> impl Iterator<Item = u64> {
        let late = self.since.take().is_some();
        let late = if late { std::mem::take(&mut self.awaited) } else { VecDeque::new() };
        late.into_iter().map(|awaited| awaited.token)
    }

    /// Called when a connection goes on with its turn.
    pub(super) fn goes_on(&mut self, trust: &mut Trust) {
        if let Some(since) = self.since.take() {
            trust.learn(since.elapsed() < LONG);
        }
    }
}

impl Core {
    /// Lets other threads run if that is due. Returns how long to wait for events after that if it was. `has_work`: the
    /// core may not sleep.
    pub(super) fn give_way(&mut self, has_work: bool) -> Option<Duration> {
        if !std::mem::take(&mut self.order.way.is_due) {
            return None;
        }
        rustix::thread::sched_yield();
        let are_here = self.order.way.awaited.iter().all(|awaited| awaited.is_here);
        self.order.way.sleeps = !has_work && are_here && self.order.moves_much();
        let sleeps = self.order.way.sleeps && !self.reactor.is_ready() && self.prepare_sleep();
        let limit = || self.timeout().map_or(LONG, |timeout| timeout.min(LONG));
        Some(if sleeps { limit() } else { Duration::ZERO })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(tokens: std::ops::Range<u64>) -> (GivingWay, Vec<Trust>) {
        let mut way = GivingWay::default();
        let mut trust: Vec<_> = tokens.clone().map(|_| Trust::default()).collect();
        for (token, trust) in tokens.zip(&mut trust) {
            way.begins(token, trust, Whereabouts::Here);
        }
        (way, trust)
    }

    #[test]
    fn it_is_given_while_that_brings_requests_and_rarely_while_not() {
        let (mut way, mut trust) = begun(0..1);
        assert!(!way.is_wanted(9, |_| true), "another turn may begin");
        way.begins(1, &mut trust[0], Whereabouts::Here);
        for _ in 0..10 {
            assert!(way.is_wanted(9, |_| true));
            way.goes_on(&mut trust[0]);
        }
        // Nobody has asked.
        assert!(way.is_wanted(9, |_| true));
        assert!(!way.is_wanted(9, |_| true));
        assert!(way.take_late().eq([0, 1]));
        let mut trust = [Trust::default(), Trust::default()];
        let mut given = 0;
        for turn in 0..10_000 {
            way.begins(turn % 2, &mut trust[turn as usize % 2], Whereabouts::Here);
            if way.is_wanted(9, |_| true) {
                given += 1;
                assert!(!way.is_wanted(9, |_| true));
                way.take_late().for_each(|token| trust[token as usize].learn(false));
            }
        }
        assert!((10..25).contains(&given), "{given}");
    }

    #[test]
    fn who_asks_before_those_that_are_awaited_prolongs_that() {
        let (mut way, _) = begun(0..2);
        for waiting in [1, 2, 5] {
            assert!(way.is_wanted(waiting, |_| true));
        }
        way.sleeps = true;
        assert!(way.is_wanted(5, |_| true), "something else woke the core");
        way.sleeps = false;
        assert!(!way.is_wanted(5, |_| true));
        assert!(way.take_late().eq([0, 1]));
        assert_eq!(way.take_late().count(), 0);
    }

    #[test]
    fn clients_of_a_processor_that_others_keep_for_long_are_not_awaited_again_soon() {
        let (mut way, mut trust) = begun(0..2);
        let long_ago = Instant::now().checked_sub(LONG).unwrap();
        assert!(way.is_wanted(1, |_| true));
        way.since = Some(long_ago);
        way.goes_on(&mut trust[0]);
        assert!([trust[0].is_due(), trust[0].is_due()] == [false, true]);
        assert!(way.is_wanted(1, |_| true));
        way.since = Some(long_ago);
        assert!(!way.is_wanted(2, |_| true));
    }

    #[test]
    fn only_two_are_awaited_and_none_elsewhere_or_whose_turn_is_over() {
        let (mut way, mut trust) = begun(0..1000);
        way.begins(1000, &mut trust[0], Whereabouts::Elsewhere);
        assert!(way.awaited.iter().map(|awaited| awaited.token).eq([998, 999]));
        assert!(!way.is_wanted(1, |token| token == 999));
        assert!(way.awaited.iter().map(|awaited| awaited.token).eq([999]));
    }
}
