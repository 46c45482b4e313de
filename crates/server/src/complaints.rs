//! The limit on what is logged about clients. Whoever can connect could otherwise fill the disk that holds the log.

use log::Level;
use parking_lot::Mutex;
use std::fmt;
use std::time::{Duration, Instant};

/// Lines about clients that are logged in each [`PERIOD`]; others are only counted.
const LINES_MAX: u32 = 3;
const PERIOD: Duration = Duration::from_secs(1);

/// One for all servers of the process, as is the log.
static BUDGET: Mutex<Budget> = Mutex::new(Budget::new());

/// Logs a warning about a client, or counts it.
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    log(Level::Warn, line);
}

/// Logs a line about a client, or counts it, if lines of this level are logged.
pub(crate) fn log(level: Level, line: fmt::Arguments<'_>) {
    if !log::log_enabled!(level) {
        return;
    }
    let (may, left_out) = BUDGET.lock().take(Instant::now());
    tell(left_out);
    if may {
        log::log!(level, "{line}");
    }
}

/// Logs how many lines were left out, if lines may be logged again.
pub(crate) fn tell_left_out() {
    let left_out = BUDGET.lock().renew(Instant::now());
    tell(left_out);
}

fn tell(left_out: u64) {
    if left_out > 0 {
        log::warn!(
            "{left_out} more lines about clients were left out: at most {LINES_MAX} are logged in a second"
        );
    }
}

/// Lines of the current period, and those left out.
struct Budget {
    begun: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Budget {
    const fn new() -> Self {
        Self { begun: None, lines: 0, left_out: 0 }
    }

    /// Begins a new period if the last one is over. Returns the lines left out that nobody was told of; zero
    /// while the period lasts.
    fn renew(&mut self, now: Instant) -> u64 {
        if self.begun.is_some_and(|begun| now.saturating_duration_since(begun) < PERIOD) {
            return 0;
        }
        (self.begun, self.lines) = (Some(now), 0);
        std::mem::take(&mut self.left_out)
    }

    /// Takes one line. Returns true if it may be logged, and what [`Budget::renew`] returns.
    fn take(&mut self, now: Instant) -> (bool, u64) {
        let left_out = self.renew(now);
        let may = self.lines < LINES_MAX;
        match may {
            true => self.lines += 1,
            false => self.left_out += 1,
        }
        (may, left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_few_lines_and_a_count() {
        let (start, mut budget) = (Instant::now(), Budget::new());
        let at = |ms| start + Duration::from_millis(ms);
        let lines = (0..200).filter(|n| budget.take(at(*n)).0).count();
        assert_eq!(lines, LINES_MAX as usize);
        assert_eq!(budget.renew(at(999)), 0, "not yet");
        assert_eq!(budget.take(at(1000)), (true, 200 - u64::from(LINES_MAX)));
        assert_eq!(budget.take(at(1001)), (true, 0), "told once");
        assert_eq!((budget.take(at(1002)).0, budget.take(at(1003)).0), (true, false));
        assert_eq!(budget.renew(at(5000)), 1, "also if nothing more is logged");
        assert_eq!(budget.renew(at(9000)), 0);
    }
}
