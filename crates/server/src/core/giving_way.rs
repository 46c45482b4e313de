//! A core gives way to the clients whose turn it is.
//!
//! When the connections whose turn it is have been answered, and many others ask, the core lets other threads of its
//! processor run before the next connection has its turn (one or two have theirs at a time, see `abreast.rs`). Clients on
//! this processor then ask again at once and their turns go on, so few of them run at a time and find their memory in the
//! caches. Without that, the clients of a busy processor queue for it instead of for the core, each of them for every
//! single request.
//!
//! First the core yields, unless something has come already. That does not help clients of other sessions or control
//! groups, among which the kernel shares out the processor first. So if still nothing has come, the core sleeps until
//! something does, but not for long, and only for clients that run on this processor and ask over sockets: the others gain
//! less than waiting for them costs. Those that do not ask in time are no longer first in their turn, or lose it, and are
//! awaited more rarely for a while: they do something else, or other programs keep the processor.

use super::Core;
use super::abreast::Abreast;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Clients that take longer than this to ask again do something else, or other programs run.
const PROMPT: Duration = Duration::from_micros(200);
/// How long those whose turn it is are awaited while nobody asks: as soon as the core notices, see [`FAR`].
const LONG: Duration = Duration::from_micros(500);
/// How long while others ask, as soon as the core notices: each of them once, before the processor is free for those that are
/// awaited.
const LONGEST: Duration = Duration::from_millis(5);
/// What wakes a core that is not woken by anything else. A timer that expires after the next tick of the kernel (4 ms at 250
/// Hz) costs nothing to set; an earlier one has to be written to the processor's clock and removed again, for each of which a
/// virtual machine stops.
const FAR: Duration = Duration::from_millis(6);
/// After the core has waited longer than `LONG`, when the processor may have been idle, it sleeps no longer than `LONG` each time
/// until so many times what was too long is over: a fiftieth of the time may be lost so.
const NEAR: u32 = 50;
/// Maximum number of turns of a connection in which it is not awaited after it was in vain.
const PAUSE_MAX: u32 = 15;

/// Where the client of a connection runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// Nobody knows, on another machine, or on this processor, but not slept for.
    #[default]
    Unknown,
    /// On the processor of the core, which may sleep for it.
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

/// What the core has to expect of a connection whose turn began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing: its turn is over, or it waits for the next one.
    Over,
    /// Nothing yet: the server still works on what it has asked.
    Unanswered,
    /// More requests.
    Open,
}

#[derive(Debug)]
struct Awaited {
    token: u64,
    is_here: bool,
}

/// The core waits for the connections whose turn it is.
#[derive(Debug)]
struct Wait {
    began: Instant,
    /// When the last connection asked that is not awaited; at first, when the wait began.
    since: Instant,
    /// Connections that waited for their turn then.
    waiting: usize,
}

#[derive(Debug, Default)]
pub(super) struct GivingWay {
    /// Connections that may go on with their turns: those that began last.
    awaited: VecDeque<Awaited>,
    abreast: Abreast,
    wait: Option<Wait>,
    /// The core gives way before it serves the next connection.
    is_due: bool,
    /// The core may sleep until something comes.
    is_patient: bool,
    /// Until when the core sleeps for `LONG` at most.
    near_until: Option<Instant>,
}

impl GivingWay {
    /// Notes that a connection's turn begins.
    pub(super) fn begins(&mut self, token: u64, trust: &mut Trust, client: Whereabouts) {
        self.wait = None;
        self.abreast.begins();
        self.awaited.retain(|awaited| awaited.token != token);
        if client == Whereabouts::Elsewhere || !trust.is_due() {
            return;
        }
        while self.awaited.len() >= self.abreast.number() {
            self.awaited.pop_front();
        }
        self.awaited.push_back(Awaited { token, is_here: client == Whereabouts::Here });
    }

    /// Returns true if the connection goes on with its turn before others are served.
    pub(super) fn awaits(&self, token: u64) -> bool {
        self.awaited.iter().any(|awaited| awaited.token == token)
    }

    /// Called when no connection whose turn it is has asked, before one of `waiting` others has its turn. Returns true
    /// if the core should give way first.
    pub(super) fn is_wanted(&mut self, waiting: usize, turn: impl Fn(u64) -> Turn) -> bool {
        let mut are_open = true;
        self.awaited.retain(|awaited| {
            let turn = turn(awaited.token);
            are_open &= turn != Turn::Unanswered;
            turn != Turn::Over
        });
        if !are_open || self.awaited.len() < self.abreast.number() {
            (self.wait, self.is_due) = (None, false);
            return false;
        }
        let now = Instant::now();
        let Some(wait) = &mut self.wait else {
            self.abreast.gives();
            self.wait = Some(Wait { began: now, since: now, waiting });
            self.is_due = true;
            return true;
        };
        if !self.is_due {
            let quiet = now - wait.since;
            // Each client that runs before those that are awaited asks once, and then waits for its own turn.
            let has_come = waiting > std::mem::replace(&mut wait.waiting, waiting);
            if has_come {
                wait.since = now;
            }
            let is_long = now - wait.since >= LONG || now - wait.began >= LONGEST;
            self.is_due = (has_come || self.is_patient) && !is_long;
            self.has_waited(quiet, now);
        }
        self.is_due
    }

    /// Removes the connections that were awaited in vain.
    pub(super) fn take_late(&mut self) -> impl Iterator<Item = u64> {
        let late = self.wait.take().map(|_| std::mem::take(&mut self.awaited));
        late.unwrap_or_default().into_iter().map(|awaited| awaited.token)
    }

    /// Called when a connection goes on with its turn.
    pub(super) fn goes_on(&mut self, token: u64, trust: &mut Trust) {
        if !self.awaits(token) {
            return;
        }
        self.abreast.asks();
        if let Some(wait) = self.wait.take() {
            let since = wait.since.elapsed();
            trust.learn(since < PROMPT);
            self.has_waited(since, wait.since + since);
        }
    }

    /// Notes how long nobody has asked, if the core may have slept meanwhile.
    fn has_waited(&mut self, quiet: Duration, now: Instant) {
        if let Some(too_long) = quiet.checked_sub(LONG).filter(|_| self.is_patient) {
            let near_until = self.near_until.map_or(now, |until| until.max(now));
            self.near_until = Some((near_until + NEAR * too_long).min(now + NEAR * FAR));
        }
    }

    /// Returns true if the core may sleep until one of those that are awaited asks.
    pub(super) fn may_sleep(&self) -> bool {
        !self.awaited.is_empty() && self.awaited.iter().all(|awaited| awaited.is_here)
    }

    /// Returns how long to sleep at most: long enough that the timer costs nothing, unless that has lately been too long.
    fn nap(&self, now: Instant) -> Duration {
        if self.near_until.is_some_and(|until| now < until) { LONG } else { FAR }
    }
}

impl Core {
    /// Lets other threads run if that is due. Returns how long to wait for events after that if it was. `has_work`: the
    /// core may not sleep.
    pub(super) fn give_way(&mut self, has_work: bool) -> Option<Duration> {
        if !std::mem::take(&mut self.order.way.is_due) {
            return None;
        }
        if !self.reactor.is_ready() {
            rustix::thread::sched_yield();
        }
        let has_work = has_work || self.has_low_request();
        // A connection may have been queued after that was found: its answers were sent, and no event tells of what it has sent.
        let is_idle = self.order.only_others_ask();
        let way = &mut self.order.way;
        way.is_patient = !has_work && is_idle && way.may_sleep();
        if !way.is_patient || self.reactor.is_ready() || !self.prepare_sleep() {
            return Some(Duration::ZERO);
        }
        self.take_looked();
        let nap = self.order.way.nap(Instant::now());
        Some(self.timeout().map_or(nap, |timeout| timeout.min(nap)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(count: u64) -> (GivingWay, Vec<Trust>) {
        let mut way = GivingWay::default();
        let mut trust: Vec<_> = (0..count).map(|_| Trust::default()).collect();
        for (token, trust) in (0..count).zip(&mut trust) {
            way.begins(token, trust, Whereabouts::Here);
        }
        (way, trust)
    }

    /// Asks whether to give way, and does so.
    fn gives(way: &mut GivingWay, waiting: usize) -> bool {
        let is_wanted = way.is_wanted(waiting, |_| Turn::Open);
        assert!(is_wanted == way.is_wanted(waiting, |_| Turn::Open), "it has not given way yet");
        way.is_due = false;
        is_wanted
    }

    #[test]
    fn it_is_given_while_that_brings_requests_and_rarely_while_not() {
        let (mut way, mut trust) = begun(1);
        assert!(!way.is_wanted(9, |_| Turn::Open), "another turn may begin");
        way.begins(1, &mut trust[0], Whereabouts::Here);
        for _ in 0..10 {
            assert!(gives(&mut way, 9));
            way.goes_on(1, &mut trust[0]);
        }
        let mut trust = [Trust::default(), Trust::default()];
        let mut given = 0;
        for turn in 0..10_000 {
            way.begins(turn % 2, &mut trust[turn as usize % 2], Whereabouts::Here);
            if gives(&mut way, 9) {
                given += 1;
                // Nobody has asked.
                assert!(!way.is_wanted(9, |_| Turn::Open));
                way.take_late().for_each(|token| trust[token as usize].learn(false));
            }
        }
        assert!((300..350).contains(&given), "{given}");
    }

    #[test]
    fn who_asks_before_those_that_are_awaited_prolongs_that() {
        let (mut way, _) = begun(2);
        assert!([1, 2, 5].into_iter().all(|waiting| gives(&mut way, waiting)));
        way.is_patient = true;
        assert!(gives(&mut way, 5), "something else has woken the core");
        way.wait.as_mut().unwrap().began -= LONGEST;
        assert!(!way.is_wanted(6, |_| Turn::Open));
        assert!(way.take_late().eq([0, 1]));
        assert_eq!(way.take_late().count(), 0);
    }

    #[test]
    fn clients_of_a_processor_that_others_keep_for_long_are_not_awaited_again_soon() {
        let (mut way, mut trust) = begun(2);
        assert!(gives(&mut way, 1));
        way.wait.as_mut().unwrap().since -= PROMPT;
        way.goes_on(7, &mut trust[1]);
        assert!(way.wait.is_some(), "it was not awaited");
        way.goes_on(0, &mut trust[0]);
        assert!([trust[0].is_due(), trust[0].is_due()] == [false, true]);
    }

    #[test]
    fn after_a_sleep_that_was_too_long_sleeps_are_short_for_a_while() {
        for ends_by in ["nobody", "one that is awaited", "another"] {
            let (mut way, mut trust) = begun(2);
            let now = Instant::now();
            assert_eq!(way.nap(now), FAR);
            assert!(gives(&mut way, 1));
            way.is_patient = true;
            way.wait.as_mut().unwrap().since -= 2 * LONG;
            match ends_by {
                "nobody" => assert!(!way.is_wanted(1, |_| Turn::Open)),
                "another" => assert!(way.is_wanted(2, |_| Turn::Open)),
                _ => way.goes_on(0, &mut trust[0]),
            }
            // It was too long by this at least, and counts as no more than the longest sleep.
            assert_eq!(way.nap(now + NEAR * LONG), LONG, "{ends_by}");
            assert_eq!(way.nap(Instant::now() + NEAR * FAR), FAR);
        }
        let (mut way, mut trust) = begun(2);
        assert!(gives(&mut way, 1));
        way.is_patient = true;
        // However long this thread does not run.
        way.wait.as_mut().unwrap().since += Duration::from_secs(60);
        way.goes_on(0, &mut trust[0]);
        assert_eq!(way.nap(Instant::now()), FAR, "it has asked in time");
    }

    #[test]
    fn only_two_are_awaited_and_none_elsewhere_or_whose_turn_is_over_or_who_waits_for_an_answer() {
        let (mut way, mut trust) = begun(1000);
        way.begins(1000, &mut trust[0], Whereabouts::Elsewhere);
        way.begins(999, &mut trust[999], Whereabouts::Here);
        let awaited = |way: &GivingWay| way.awaited.iter().map(|a| a.token).collect::<Vec<_>>();
        assert_eq!(awaited(&way), [998, 999]);
        let unanswered = |token| if token == 999 { Turn::Unanswered } else { Turn::Open };
        assert!(gives(&mut way, 1));
        assert!(!way.is_wanted(1, unanswered));
        assert_eq!(way.take_late().count(), 0, "the server is late");
        assert!(gives(&mut way, 1));
        assert!(!way.is_wanted(1, |token| if token == 999 { Turn::Open } else { Turn::Over }));
        assert_eq!(awaited(&way), [999]);
    }
}
