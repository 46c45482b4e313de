//! Spins for a while before sleeping.
//!
//! Waking a sleeper costs the peer a system call and both sides about ten microseconds, in virtual
//! machines five times as much. Spinning notices data at once, but occupies the processor meanwhile. So
//! it pays only if data does arrive soon and no other thread wants the processor. [`Spin`] learns both
//! from experience; it needs no knowledge of the network or of where the peer runs.

use rustix::thread::sched_yield;
use std::time::{Duration, Instant};

/// After several failed attempts, this many waits sleep at once before the next attempt.
const PAUSE_IN_VAIN: u32 = 15;
/// The same while another thread wants the processor, which may keep it for milliseconds once it has it.
const PAUSE_CONTENDED: u32 = 1023;
/// After this many failed attempts in a row, one attempt spins longer.
const VAIN_BEFORE_LONG: u32 = 2;
/// Factor by which a long attempt is longer.
const LONG: u32 = 4;
/// Most short attempts between two long ones that did not help.
const SHORT_BETWEEN: u32 = 63;
/// Spin this long before checking whether another thread wants the processor.
const SOON: Duration = Duration::from_micros(5);
/// `sched_yield` takes longer than this only if another thread ran.
const YIELDED: Duration = Duration::from_micros(5);
/// Two looks are further apart than this only if something else ran on the processor in between.
const PREEMPTED: Duration = Duration::from_micros(30);

/// This many looks at memory cost about as much as reading the clock.
const LOOKS: usize = 32;

/// Looks at memory repeatedly, for about as long as reading the clock takes.
pub fn look_often(is_there: impl Fn() -> bool) -> bool {
    (0..LOOKS).any(|_| {
        let found = is_there();
        if !found {
            std::hint::spin_loop();
        }
        found
    })
}

/// Decides how long to spin before sleeping, and whether to spin at all.
///
/// If both ends sleep, and waking up takes longer than they spin, each finds the other asleep for ever:
/// every answer arrives just after the other end has given up. So one attempt in many is longer. If it
/// finds something, the peer is awake, and short attempts suffice from then on. If these keep failing,
/// the peer is simply far away, and long attempts become rare.
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    /// Waits that sleep at once before the next attempt.
    pause: u32,
    /// Length of the next pause, if the next attempt fails too.
    next_pause: u32,
    /// Failed attempts in a row.
    vain: u32,
    /// Short attempts left before the next long one, and the number to set after that one.
    short: u32,
    next_short: u32,
}

impl Spin {
    /// Spins for at most `limit` each time; zero never spins.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { limit, pause: 0, next_pause: 0, vain: 0, short: 0, next_short: 0 }
    }

    /// Calls `look` until it finds something. Returns `None` when it is time to sleep: after the limit,
    /// occasionally after four times the limit, or at once if spinning has failed recently. Each failure
    /// after the first doubles the pause until the next attempt; the pause becomes much longer while
    /// another thread wants the processor.
    pub fn until<T>(&mut self, look: impl FnMut() -> Option<T>) -> Option<T> {
        self.unless(|| false, look)
    }

    /// [`Spin::until`] for a peer that may need this very processor: then `is_in_the_way` returns true. It is not asked
    /// while spinning helps.
    pub fn unless<T>(
        &mut self,
        is_in_the_way: impl FnOnce() -> bool,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if self.limit.is_zero() {
            return None;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        // Data that is already there says nothing about spinning, and needs no look at the clock.
        if let Some(found) = look() {
            return Some(found);
        }
        if self.next_pause > 0 && is_in_the_way() {
            self.pause = PAUSE_IN_VAIN;
            return None;
        }
        let limit = self.next_limit();
        let start = Instant::now();
        let (mut last, mut ask) = (start, start + SOON);
        loop {
            if let Some(found) = look() {
                self.found(last - start < self.limit);
                return Some(found);
            }
            let mut now = Instant::now();
            let mut contended = now - last > PREEMPTED;
            if now >= ask {
                ask = start + self.limit.max(ask - start) * 2;
                sched_yield();
                let before = std::mem::replace(&mut now, Instant::now());
                contended |= now - before > YIELDED;
            }
            if contended {
                self.pause = self.next_pause.max(1);
                self.next_pause = (self.pause * 4 + 1).min(PAUSE_CONTENDED);
                return look();
            }
            if now - start >= limit {
                self.in_vain();
                return None;
            }
            last = now;
        }
    }

    /// Returns how long to spin this time.
    fn next_limit(&mut self) -> Duration {
        if self.vain < VAIN_BEFORE_LONG {
            return self.limit;
        }
        if self.short > 0 {
            self.short -= 1;
            return self.limit;
        }
        self.short = self.next_short;
        self.next_short = (self.next_short * 2 + 1).min(SHORT_BETWEEN);
        self.limit * LONG
    }

    /// Records that spinning found something; `soon`: within the usual limit.
    fn found(&mut self, soon: bool) {
        self.next_pause = 0;
        self.vain = 0;
        if soon {
            (self.short, self.next_short) = (0, 0);
        }
    }

    fn in_vain(&mut self) {
        self.pause = self.next_pause.min(PAUSE_IN_VAIN);
        self.next_pause = self.pause * 2 + 1;
        self.vain = self.vain.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_comes_while_it_looks() {
        let mut spin = Spin::new(Duration::from_secs(60));
        let mut looks = 0;
        let found = spin.until(|| {
            looks += 1;
            (looks == 3).then_some("it")
        });
        // If the machine was busy for a moment, giving up is right.
        assert!(found == Some("it") || spin.pause > 0);
    }

    #[test]
    fn spins_less_and_less_in_vain_and_at_once_again_after_a_find() {
        let mut spin = Spin::new(Duration::from_nanos(1));
        let tries = |spin: &mut Spin, waits: usize| {
            let mut tried = 0;
            for _ in 0..waits {
                let mut looked = false;
                spin.until(|| {
                    looked = true;
                    None::<()>
                });
                tried += usize::from(looked);
            }
            tried
        };
        // Five attempts lead to the longest pause; from then on one wait in 16 spins.
        assert!(tries(&mut spin, 1000) <= 5 + 1000 / 16 + 1);
        for _ in 0..=PAUSE_CONTENDED {
            let mut looks = 0;
            spin.until(|| {
                looks += 1;
                (looks == 2).then_some(())
            });
        }
        assert_eq!((spin.pause, spin.next_pause), (0, 0));
        assert_eq!(tries(&mut spin, 1), 1);
    }

    /// The limits of `tries` attempts that all fail.
    fn vain_limits(spin: &mut Spin, tries: usize) -> Vec<Duration> {
        let one = |_| {
            let limit = spin.next_limit();
            spin.in_vain();
            limit
        };
        (0..tries).map(one).collect()
    }

    #[test]
    fn one_look_in_many_is_long_while_nothing_comes() {
        let limit = Duration::from_micros(100);
        let mut spin = Spin::new(limit);
        let limits = vain_limits(&mut spin, 1000);
        let long: Vec<_> = (0..1000).filter(|at| limits[*at] > limit).collect();
        assert_eq!(long[..5], [2, 3, 5, 9, 17]);
        assert!(limits.iter().all(|one| *one == limit || *one == limit * LONG));
        assert!(long[7..].windows(2).all(|two| two[1] - two[0] == SHORT_BETWEEN as usize + 1));
    }

    #[test]
    fn a_peer_that_was_asleep_is_awake_after_a_long_look() {
        let limit = Duration::from_micros(100);
        let mut spin = Spin::new(limit);
        assert_eq!(vain_limits(&mut spin, 2), [limit; 2]);
        assert_eq!(spin.next_limit(), limit * LONG);
        spin.found(false);
        // From here on the peer answers at once.
        assert_eq!(spin.next_limit(), limit);
        spin.found(true);
        // If both fall asleep again, it starts over.
        assert_eq!(vain_limits(&mut spin, 3), [limit, limit, limit * LONG]);
    }

    #[test]
    fn a_peer_that_is_far_away_costs_few_long_looks() {
        let limit = Duration::from_micros(100);
        let mut spin = Spin::new(limit);
        let mut long = 0;
        for _ in 0..10_000 {
            if spin.next_limit() > limit {
                spin.found(false);
                long += 1;
            } else {
                spin.in_vain();
            }
        }
        assert!(long < 10_000 / SHORT_BETWEEN, "{long} long looks");
    }

    #[test]
    fn who_is_in_the_way_of_its_peer_does_not_spin() {
        let mut spin = Spin::new(Duration::from_nanos(1));
        assert_eq!(spin.unless(|| panic!("it may help"), || None::<()>), None);
        let mut looks = 0;
        let mut wait = |spin: &mut Spin, is_in_the_way: bool| {
            let before = looks;
            spin.unless(
                || is_in_the_way,
                || {
                    looks += 1;
                    None::<()>
                },
            );
            looks - before
        };
        for _ in 0..10 {
            while spin.pause > 0 {
                assert_eq!(wait(&mut spin, true), 0);
            }
            assert_eq!(wait(&mut spin, true), 1);
            assert_eq!(spin.pause, PAUSE_IN_VAIN, "it is asked again");
        }
        spin.pause = 0;
        assert!(wait(&mut spin, false) > 1);
    }

    #[test]
    fn a_limit_of_zero_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        assert_eq!(spin.until(|| Some(())), None);
    }
}
