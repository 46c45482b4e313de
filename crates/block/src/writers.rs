//! Keeps writes under way from making a file long again that becomes shorter.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// How often to look whether writes are over that a shorter disk waits for.
const LOOK: Duration = Duration::from_millis(1);

/// Counts the writes under way of a disk, and knows where the disk is about to end.
#[derive(Debug)]
pub(crate) struct Writers {
    limit: AtomicU64,
    /// Writes under way that began in even phases, and in odd ones: while those of one phase are waited for,
    /// new ones count in the other.
    under_way: [AtomicU64; 2],
    phase: AtomicUsize,
}

/// The phase in which a write began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase(usize);

impl Default for Writers {
    fn default() -> Self {
        let limit = AtomicU64::new(u64::MAX);
        Self { limit, under_way: Default::default(), phase: AtomicUsize::default() }
    }
}

impl Writers {
    /// Counts a write, which must not go beyond the [`Writers::limit`] as it is afterwards.
    pub(crate) fn begin(&self) -> Phase {
        let phase = self.phase.load(Ordering::Relaxed) % 2;
        // Either this write sees a new limit, or who sets the limit sees this write.
        self.under_way[phase].fetch_add(1, Ordering::SeqCst);
        Phase(phase)
    }

    /// Ends a write.
    pub(crate) fn end(&self, Phase(phase): Phase) {
        self.under_way[phase].fetch_sub(1, Ordering::Release);
    }

    /// Returns the byte that no write which begins may go beyond.
    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::SeqCst)
    }

    /// Sets the limit, calls `shorten` when all writes are over that began before, and removes the limit.
    pub(crate) fn shorten<R>(&self, limit: u64, shorten: impl FnOnce() -> R) -> R {
        self.limit.store(limit, Ordering::SeqCst);
        // A write may have read the phase before it changed, so both have to be waited for.
        for _ in 0..2 {
            let phase = self.phase.fetch_add(1, Ordering::SeqCst) % 2;
            while self.under_way[phase].load(Ordering::SeqCst) > 0 {
                std::thread::sleep(LOOK);
            }
        }
        let result = shorten();
        self.limit.store(u64::MAX, Ordering::SeqCst);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_shorter_disk_waits_for_all_writes_from_before_and_for_no_other() {
        let writers = Writers::default();
        for _ in 0..3 {
            let shortened = AtomicBool::new(false);
            let is_shortened = || shortened.load(Ordering::SeqCst);
            std::thread::scope(|scope| {
                let before = [writers.begin(), writers.begin()];
                scope.spawn(|| writers.shorten(7, || shortened.store(true, Ordering::SeqCst)));
                while writers.limit() != 7 {
                    assert!(!is_shortened());
                    std::thread::yield_now();
                }
                // There is always some write under way.
                let mut last = writers.begin();
                for write in before {
                    std::thread::sleep(10 * LOOK);
                    assert!(!is_shortened());
                    writers.end(write);
                }
                while !is_shortened() {
                    let next = writers.begin();
                    writers.end(std::mem::replace(&mut last, next));
                    std::thread::yield_now();
                }
                writers.end(last);
            });
            assert_eq!(writers.limit(), u64::MAX);
        }
    }
}
