//! After long messages a core rests instead of spinning, where that makes nobody wait.
//!
//! A client that has one request under way waits for each answer, so a core that is awake when the next request comes
//! serves it sooner (1 MiB over TCP: by 7 to 15 %). A client that has several is still busy with earlier answers when it
//! sends the next request; then spinning only costs CPU, up to a third of what the server uses. No message tells which
//! it is. So the core tries both in turns and compares how fast bytes move. Where it waits for a disk it always spins.

use std::time::{Duration, Instant};

/// Moving fewer bytes between two waits says nothing: waking up takes longer than a client is busy with them.
pub(super) const LONG_BYTES: u64 = 256 * 1024;
/// Waits after long messages in one block of a trial; all of a block spin, or all rest.
const BLOCK: u32 = 8;
/// Blocks of a trial: the first one does not count, then spinning and resting take turns.
const BLOCKS: u32 = 9;
/// Waits after long messages from one trial to the next.
const BETWEEN: u32 = 1024;
/// Blocks with a longer wait are not compared: the clients had nothing to ask for.
const PAUSE: Duration = Duration::from_millis(5);
/// The core rests if bytes then take at most this many percent of the time that they take otherwise.
const PERCENT: u128 = 108;

/// Decides whether to rest.
#[derive(Debug, Default)]
pub(super) struct Resting {
    rests: bool,
    /// Waits left until the next trial.
    left: u32,
    trial: Trial,
}

#[derive(Debug, Default)]
struct Trial {
    /// Completed blocks, and waits in the current one.
    blocks: u32,
    waits: u32,
    /// When the current block began, and how many bytes had been moved by then.
    began: Option<(Instant, u64)>,
    last: Option<Instant>,
    spinning: Pace,
    resting: Pace,
}

/// Time in which bytes were moved.
#[derive(Debug, Default)]
struct Pace {
    time: Duration,
    bytes: u64,
}

impl Pace {
    /// Returns true if bytes take at most [`PERCENT`] of the time that they take at the other pace.
    fn keeps_up_with(&self, other: &Self) -> bool {
        let cost = |time: Duration, bytes: u64| time.as_nanos() * u128::from(bytes);
        100 * cost(self.time, other.bytes) <= PERCENT * cost(other.time, self.bytes)
    }
}

impl Resting {
    /// Returns true if the core should rest now, `moved` bytes after it began to serve, of which at least
    /// [`LONG_BYTES`] since the last wait.
    pub(super) fn is_wanted(&mut self, now: Instant, moved: u64) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return self.rests;
        }
        if let Some(rests) = self.trial.result(now, moved) {
            *self = Self { rests, left: BETWEEN, trial: Trial::default() };
            return rests;
        }
        self.trial.rests()
    }
}

impl Trial {
    /// Returns true if the current block rests.
    fn rests(&self) -> bool {
        self.blocks.is_multiple_of(2) && self.blocks > 0
    }

    /// Notes that a wait begins. Returns whether to rest from now on, once enough is known.
    fn result(&mut self, now: Instant, moved: u64) -> Option<bool> {
        let last = self.last.replace(now);
        if last.is_some_and(|last| now - last > PAUSE) {
            (self.waits, self.began) = (0, None);
        }
        let (began, before) = *self.began.get_or_insert((now, moved));
        if self.waits < BLOCK {
            self.waits += 1;
            return None;
        }
        let pace = if self.rests() { &mut self.resting } else { &mut self.spinning };
        if self.blocks > 0 {
            pace.time += now - began;
            pace.bytes += moved - before;
        }
        self.blocks += 1;
        (self.waits, self.began) = (1, Some((now, moved)));
        (self.blocks == BLOCKS).then(|| self.resting.keeps_up_with(&self.spinning))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const US: Duration = Duration::from_micros(1);

    /// Serves a client that asks for 1 MiB each time. `takes` says how long that takes, by the number of the wait and
    /// whether the core rests meanwhile. Returns how many of the last waits rested.
    fn rested(
        resting: &mut Resting,
        waits: u32,
        last: u32,
        takes: impl Fn(u32, bool) -> Duration,
    ) -> u32 {
        let (mut now, mut moved, mut rested) = (Instant::now(), 0, 0);
        for wait in 0..waits {
            let rests = resting.is_wanted(now, moved);
            rested += u32::from(rests && wait >= waits - last);
            now += takes(wait, rests);
            moved += MIB;
        }
        rested
    }

    #[test]
    fn it_rests_where_that_makes_nobody_wait() {
        let noise = |wait| 40 * (wait % 3) * US;
        let busy = |wait, _| 130 * US + noise(wait);
        assert_eq!(rested(&mut Resting::default(), 300, 100, busy), 100);
        let waiting = |wait, rests| (130 + 20 * u32::from(rests)) * US + noise(wait);
        assert_eq!(rested(&mut Resting::default(), 300, 100, waiting), 0);
    }

    #[test]
    fn it_learns_anew_and_trials_are_rare() {
        let mut resting = Resting::default();
        let waiting = |_, rests| (130 + 20 * u32::from(rests)) * US;
        let tries = rested(&mut resting, 20_000, 20_000, waiting);
        assert!((20..20_000 / 25).contains(&tries), "{tries}");
        let busy = |_, _| 130 * US;
        assert!(rested(&mut resting, 20_000, 20_000, busy) > 18_000);
        assert!(rested(&mut resting, 20_000, 10_000, waiting) < 10_000 / 25);
    }

    #[test]
    fn pauses_of_the_clients_say_nothing() {
        // With the pauses, resting would seem to be far slower, or far faster.
        for slow in [true, false] {
            let pauses = |wait: u32, rests| {
                let is_long = wait.is_multiple_of(20) && rests == slow;
                if is_long { 100 * PAUSE } else { 130 * US }
            };
            assert_eq!(rested(&mut Resting::default(), 600, 100, pauses), 100, "{slow}");
        }
    }
}
