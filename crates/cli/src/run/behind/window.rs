//! How much of what programs have written may be under way to a server.
//!
//! Whoever asks the server for anything waits for all of it, so it is no more than makes writing faster: four times as
//! much is tried, and kept if it is 1.3 times as fast; now and then half as much is tried, and kept if it is hardly
//! slower. How long answers take does not count: they come late also over radio or from a busy machine, where more
//! under way helps.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};
use towline_instance::behind::RECORD_BYTES_MAX;

/// Bytes that may be under way: at least, and at first, and at most.
const BYTES: RangeInclusive<usize> = RECORD_BYTES_MAX..=8 << 20;
/// How much faster writing must be for more to be under way, and how much faster for not less.
const FASTER: f64 = 1.3;
const HARDLY_FASTER: f64 = 1.15;
/// How long a rate is measured at least, and at most; until as much as may be under way has been taken: once if that is
/// more than before, or twice.
const PERIOD: Duration = Duration::from_millis(20);
const PERIOD_MAX: Duration = Duration::from_secs(1);
/// How long it stays before something else is tried: at first, since the machine may have been busy when more was of no
/// use, and at most.
const STEADY: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(1);

pub(super) struct Window {
    bytes: usize,
    step: Step,
    /// How long to wait before something else is tried.
    patience: Duration,
    /// The rate, in bytes per second, with what was under way before this step.
    rate: f64,
    under_way: usize,
    /// Number of bytes that the server has ever taken.
    taken: u64,
    /// What is under way until this many were taken was not sent in this step.
    from: u64,
    /// When the rate began to be measured, and the number of bytes then.
    began: Option<(Instant, u64)>,
    /// Since when nothing is under way, and how long the last answer took.
    empty: Option<(Instant, Duration)>,
}

#[derive(Clone, Copy)]
enum Step {
    /// More may be under way than before, which was this much.
    More { before: usize },
    /// Until something else is tried: less, or more.
    Steady { since: Instant, tries_less: bool },
    /// Less may be under way than before.
    Less { before: usize },
}

/// A request under way.
pub(super) struct Mark {
    pub(super) length: usize,
    at: Instant,
}

impl Window {
    pub(super) fn new() -> Self {
        let (bytes, step) = (*BYTES.start(), Step::More { before: *BYTES.start() });
        Self {
            bytes,
            step,
            patience: *STEADY.start(),
            rate: 0.0,
            under_way: 0,
            taken: 0,
            from: 0,
            began: None,
            empty: None,
        }
    }

    /// Returns how many bytes may be under way.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        self.under_way >= self.bytes
    }

    /// Notes that a request is about to be sent.
    pub(super) fn sends(&mut self, length: usize, now: Instant) -> Mark {
        self.under_way += length;
        if let Some((since, took)) = self.empty.take()
            && now.saturating_duration_since(since) > took
        {
            // The rate would be that of the program.
            self.began = None;
        }
        Mark { length, at: now }
    }

    /// Notes that a request is over. Returns how long it took.
    pub(super) fn is_over(&mut self, mark: &Mark, is_written: bool, now: Instant) -> Duration {
        self.under_way = self.under_way.saturating_sub(mark.length);
        self.taken += mark.length as u64;
        let took = now.saturating_duration_since(mark.at);
        self.empty = (self.under_way == 0).then_some((now, took));
        if !is_written {
            self.began = None;
        } else if let Some((since, from)) = self.began {
            let (time, bytes) = (now.saturating_duration_since(since), self.taken - from);
            let windows = if matches!(self.step, Step::More { .. }) { 1 } else { 2 };
            let is_enough = bytes >= windows * self.bytes as u64 || time >= PERIOD_MAX;
            if time >= PERIOD && is_enough {
                self.take_step(bytes as f64 / time.as_secs_f64(), now);
            }
        } else if self.taken >= self.from {
            self.began = Some((now, self.taken));
        }
        took
    }

    fn take_step(&mut self, rate: f64, now: Instant) {
        self.began = None;
        let (most, least) = (*BYTES.end(), *BYTES.start());
        let (bytes, step) = match self.step {
            Step::More { .. } if rate > FASTER * self.rate => {
                self.patience = *STEADY.start();
                self.more(rate, now)
            }
            Step::More { before } => {
                self.patience = (2 * self.patience).min(*STEADY.end());
                (before, Step::Steady { since: now, tries_less: true })
            }
            Step::Less { .. } if HARDLY_FASTER * rate > self.rate => self.less(rate, now),
            Step::Less { before } => {
                self.patience = (2 * self.patience).min(*STEADY.end());
                (before, Step::Steady { since: now, tries_less: false })
            }
            Step::Steady { since, tries_less } => {
                self.rate = rate;
                if now.saturating_duration_since(since) < self.patience {
                    (self.bytes, self.step)
                } else if self.bytes > least && (tries_less || self.bytes == most) {
                    self.less(rate, now)
                } else {
                    self.more(rate, now)
                }
            }
        };
        if bytes != self.bytes {
            self.from = self.taken + self.under_way as u64;
        }
        (self.bytes, self.step) = (bytes, step);
    }

    /// Returns the next step if this rate was reached with what may be under way now.
    fn more(&mut self, rate: f64, now: Instant) -> (usize, Step) {
        self.rate = rate;
        match self.bytes {
            bytes if bytes < *BYTES.end() => {
                ((4 * bytes).min(*BYTES.end()), Step::More { before: bytes })
            }
            bytes => (bytes, Step::Steady { since: now, tries_less: true }),
        }
    }

    fn less(&mut self, rate: f64, now: Instant) -> (usize, Step) {
        self.rate = rate;
        match self.bytes {
            bytes if bytes > *BYTES.start() => {
                ((bytes / 2).max(*BYTES.start()), Step::Less { before: bytes })
            }
            bytes => (bytes, Step::Steady { since: now, tries_less: false }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const TRIP: Duration = Duration::from_millis(20);

    /// A server that takes bytes at some rate, and a program that writes to it all the time.
    struct Link {
        now: Instant,
        window: Window,
    }

    impl Link {
        /// Returns how many records may be under way between what is tried.
        fn records(&self) -> usize {
            let bytes = match self.window.step {
                Step::More { before } | Step::Less { before } => before,
                Step::Steady { .. } => self.window.bytes,
            };
            bytes / RECORD_BYTES_MAX
        }

        fn new() -> Self {
            Self { now: Instant::now(), window: Window::new() }
        }

        /// Sends for eight seconds; `late` is added to the time of an answer. Returns the bytes per second that were
        /// taken in the second half.
        fn send(&mut self, rate: f64, late: impl Fn(u32) -> Duration) -> f64 {
            const TIME: Duration = Duration::from_secs(8);
            let (begin, window) = (self.now, &mut self.window);
            let mut free = begin;
            let (mut sent, mut taken) = (VecDeque::<(Mark, Instant)>::new(), 0);
            for number in 0.. {
                while !window.is_full() {
                    free = free.max(self.now) + Duration::from_secs_f64((64 << 10) as f64 / rate);
                    let mark = window.sends(64 << 10, self.now);
                    sent.push_back((mark, free + TRIP + late(number)));
                }
                let (mark, at) = sent.pop_front().unwrap();
                self.now = self.now.max(at);
                window.is_over(&mark, true, self.now);
                if self.now > begin + TIME {
                    break;
                }
                taken += if self.now > begin + TIME / 2 { mark.length } else { 0 };
            }
            for (mark, _) in sent {
                window.is_over(&mark, false, self.now);
            }
            taken as f64 / (TIME / 2).as_secs_f64()
        }
    }

    fn at_once(_: u32) -> Duration {
        Duration::ZERO
    }

    #[test]
    fn as_much_is_under_way_as_is_of_use() {
        for (rate, least, most) in [(2e6, 1, 1), (50e6, 4, 16), (1e10, 32, 32)] {
            let mut link = Link::new();
            let reached = link.send(rate, at_once);
            let records = link.records();
            assert!((least..=most).contains(&records), "{records} records at {rate}");
            assert!(reached > rate.min(400e6) * 0.85, "{reached} of {rate}");
        }
    }

    #[test]
    fn it_becomes_less_and_more_again() {
        let mut link = Link::new();
        for rate in [1e10, 2e6, 2e6, 2e6] {
            link.send(rate, at_once);
        }
        assert!(link.records() <= 4, "{}", link.records());
        link.send(1e10, at_once);
        assert_eq!(link.records(), 32);
    }

    #[test]
    fn late_answers_are_no_reason_for_less() {
        let mut link = Link::new();
        let reached = link.send(1e9, |number| TRIP * (number.wrapping_mul(2_654_435_761) >> 30));
        assert!(reached > 80e6, "{reached}");
    }

    #[test]
    fn what_is_sent_now_and_then_changes_nothing() {
        let mut link = Link::new();
        for _ in 0..1000 {
            let mark = link.window.sends(100, link.now);
            link.now += TRIP;
            assert_eq!(link.window.is_over(&mark, true, link.now), TRIP);
            link.now += 2 * TRIP;
        }
        assert_eq!(link.window.bytes(), *BYTES.start());
        link.window.sends(*BYTES.start(), link.now);
        assert!(link.window.is_full());
    }
}
