//! Rounds of turns: how many connections of a core ask all the time, and how long their turns take.
//!
//! A round is over when one of these connections begins its second turn.

use std::time::{Duration, Instant};

/// How long turns are measured. After connections have moved, it takes a while until turns take what they will.
const MEASURED: Duration = Duration::from_millis(200);

/// The part of the connections that may leave after turns were measured, though they are at home: what that changes has
/// to be seen before more do.
const LEAVING_PART: u64 = 8;

#[derive(Debug, Default)]
pub(super) struct Round {
    number: u64,
    /// Connections that have had a turn in it, and that had one in the last round.
    count: u64,
    before: u64,
    /// Turns in it of clients on this machine, and on the core's processor.
    local: u64,
    here: u64,
    /// Those were most turns of the last round.
    are_local: bool,
    are_here: bool,
    /// When the measurement began, with a round, and the turns in the rounds since then.
    began: Option<Instant>,
    turns: u32,
    /// How long a turn took when that was last measured, while no connection moved.
    turn_time: Option<Duration>,
    /// Connections at home that may still leave before turns are measured again.
    may_leave: u64,
}

impl Round {
    /// Notes that a connection, which asks all the time or rarely, begins a turn. `last` is the last round in which it
    /// had one. `is_local`, `is_here`: its client runs on this machine, on the core's processor.
    pub(super) fn begin(&mut self, last: &mut u64, is_rare: bool, is_local: bool, is_here: bool) {
        if *last == self.number && !is_rare {
            self.end(Instant::now());
        }
        *last = self.number;
        self.count += 1;
        self.local += u64::from(is_local);
        self.here += u64::from(is_here);
    }

    fn end(&mut self, now: Instant) {
        if let Some(began) = self.began {
            self.turns += self.count as u32;
            let took = now.saturating_duration_since(began);
            if took >= MEASURED {
                self.turn_time = Some(took / self.turns.max(1));
                self.began = None;
                self.may_leave = (self.active() / LEAVING_PART).max(1);
            }
        }
        if self.began.is_none() {
            (self.began, self.turns) = (Some(now), 0);
        }
        self.are_local = 2 * std::mem::take(&mut self.local) > self.count;
        self.are_here = 2 * std::mem::take(&mut self.here) > self.count;
        (self.before, self.count) = (self.count, 0);
        self.number += 1;
    }

    /// Returns how many connections ask all the time.
    pub(super) fn active(&self) -> u64 {
        self.count.max(self.before)
    }

    /// Returns true if most turns of the last round were of clients on this machine.
    pub(super) fn are_local(&self) -> bool {
        self.are_local
    }

    /// Returns true if most of them were of clients on the core's processor.
    pub(super) fn are_here(&self) -> bool {
        self.are_here
    }

    /// Returns how long a turn takes, if that is known.
    pub(super) fn turn_time(&self) -> Option<Duration> {
        self.turn_time
    }

    /// Returns true if one of them may leave though it is at home.
    pub(super) fn may_leave_home(&self) -> bool {
        self.may_leave > 0
    }

    /// Notes that one of them has come from another core.
    pub(super) fn joined(&mut self) {
        self.before = self.active() + 1;
        self.began = None;
    }

    /// Notes that one of them leaves for another core.
    pub(super) fn left(&mut self, is_home: bool) {
        self.may_leave = self.may_leave.saturating_sub(is_home.into());
        (self.count, self.before) = (self.count.saturating_sub(1), self.before.saturating_sub(1));
        self.began = None;
    }

    /// Notes that nobody asks at the moment.
    pub(super) fn pauses(&mut self) {
        (self.began, self.may_leave) = (None, 0);
    }

    /// Notes that there is none any more.
    pub(super) fn nobody_asks(&mut self) {
        *self = Self { number: self.number, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three connections have turns of 10 ms each, until `until`.
    fn turns(round: &mut Round, last: &mut [u64; 3], now: &mut Instant, until: Duration) {
        let end = *now + until;
        while *now < end {
            for last in last.iter_mut() {
                if *last == round.number {
                    round.end(*now);
                }
                round.begin(last, false, true, false);
                *now += Duration::from_millis(10);
            }
        }
    }

    #[test]
    fn turns_are_measured_while_no_connection_moves() {
        let (mut round, mut last, mut now) = (Round::default(), [u64::MAX; 3], Instant::now());
        turns(&mut round, &mut last, &mut now, MEASURED);
        assert_eq!(round.turn_time(), None);
        turns(&mut round, &mut last, &mut now, MEASURED);
        assert_eq!(round.turn_time(), Some(Duration::from_millis(10)));
        assert!(round.may_leave_home());
        round.left(true);
        assert!(!round.may_leave_home());
        // One that is always moving keeps turns from being measured: what was known remains.
        let known = round.turn_time();
        for _ in 0..10 {
            round.left(false);
            now += MEASURED;
            round.joined();
            turns(&mut round, &mut last, &mut now, MEASURED / 2);
            assert_eq!(round.turn_time(), known);
        }
        assert_eq!((round.are_local(), round.are_here()), (true, false));
        round.nobody_asks();
        assert_eq!((round.active(), round.turn_time()), (0, None));
    }
}
