//! Threads that measure together.

use super::processor::start_spread;
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

/// Calls `run` for each part on a thread of its own, with the time that it may take, and returns the results in
/// the order of the parts. If processors are scarce, threads start one after the other. So all wait for the last
/// one, and end at the same time. Several start spread over the processors, as the clients `first` and following of all.
pub(super) fn at_once<P: Send, R: Send>(
    first: usize,
    parts: impl ExactSizeIterator<Item = P>,
    limit: Duration,
    run: impl Fn(P, Duration) -> Result<R, String> + Sync,
) -> Vec<Result<R, String>> {
    let (run, all, end) = (&run, &Barrier::new(parts.len()), &OnceLock::new());
    let are_several = parts.len() > 1;
    std::thread::scope(|scope| {
        let begin = move |number, part| {
            all.wait();
            if are_several {
                start_spread(first + number);
            }
            let began = Instant::now();
            run(part, end.get_or_init(|| began + limit).saturating_duration_since(began))
        };
        let threads =
            parts.enumerate().map(|(number, part)| scope.spawn(move || begin(number, part)));
        let threads: Vec<_> = threads.collect();
        let lost = |_| Err("a thread failed".to_owned());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(lost)).collect()
    })
}
