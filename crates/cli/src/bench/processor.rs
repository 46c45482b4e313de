//! Chooses the processors that a measurement runs on. Left to the scheduler, that alone decides a latency.

use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps the calling thread on one processor. When dropped, the thread may run where it could before.
pub(super) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// Pins to a processor, counted from zero.
    ///
    /// # Errors
    /// A message if the processor does not exist or this process may not use it.
    pub(super) fn to(processor: usize) -> Result<Self, String> {
        let failed = |error: rustix::io::Errno| format!("processor {processor}: {error}");
        if processor >= CpuSet::MAX_CPU {
            return Err(failed(rustix::io::Errno::INVAL));
        }
        let before = sched_getaffinity(None).map_err(failed)?;
        let mut wanted = CpuSet::new();
        wanted.set(processor);
        sched_setaffinity(None, &wanted).map_err(failed)?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // These processors were allowed before. If they no longer are, the thread can only stay pinned.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Moves the calling thread to a processor: client `number` of many to the next after the one before. Then the thread may run
/// where it could before. Whoever starts clients wakes them, and the kernel may move what is woken to the processor of what
/// wakes it, and leave it there: of 184 clients, 139 were on one of two.
pub(super) fn start_spread(number: usize) {
    let usable = usable();
    if let [_, _, ..] = usable[..] {
        // Where this is not allowed, clients start where the kernel puts them.
        drop(Pinned::to(usable[number % usable.len()]));
    }
}

/// Returns the processors that this process may use.
pub(super) fn usable() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
}

/// Ends this process when its parent ends, so that no part of a measurement goes on alone.
pub(super) fn end_with_parent() {
    // If this fails, the process ends a little later: when it next communicates with its parent.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getcpu;

    #[test]
    fn clients_start_on_all_processors_and_may_run_where_they_could_before() {
        let before = usable();
        for number in 0..2 * before.len() {
            // Right after that, the scheduler may move the thread.
            let starts = || {
                start_spread(number);
                sched_getcpu() == before[number % before.len()]
            };
            assert!((0..100).any(|_| starts()), "{number}");
            assert_eq!(usable(), before);
        }
    }
}
