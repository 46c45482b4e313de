//! Threads that share one piece of work.

/// Runs `work` on `workers` threads at once, the caller's included. If the system allows fewer threads, those
/// that could be started do all the work.
pub(crate) fn together(workers: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..workers {
            if std::thread::Builder::new().spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}
