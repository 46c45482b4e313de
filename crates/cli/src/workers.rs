//! Threads that share one piece of work.

/// Does some work on so many threads at once, of which the caller's is one. Where the system allows no more of
/// them, those that there are do all of it.
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
