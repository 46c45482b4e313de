//! Threads that share one piece of work, or jobs that make further jobs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

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

/// Waiting jobs, and the number of jobs under way, which may add more. The last job is taken first, so that
/// trees are walked depth first.
pub(crate) struct Queue<T> {
    state: Mutex<(Vec<T>, usize)>,
    changed: Condvar,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Adds jobs. The last one is taken first.
    pub(crate) fn push(&self, jobs: Vec<T>) {
        self.locked().0.extend(jobs);
        self.changed.notify_all();
    }

    /// Waits for a job. Returns `None` if there is none and none can be added any more.
    pub(crate) fn take(&self) -> Option<(T, UnderWay<'_, T>)> {
        let idle = |state: &mut (Vec<T>, usize)| state.0.is_empty() && state.1 > 0;
        let waited = self.changed.wait_while(self.locked(), idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let job = state.0.pop()?;
        state.1 += 1;
        Some((job, UnderWay(self)))
    }

    fn locked(&self) -> MutexGuard<'_, (Vec<T>, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that was taken. Dropping this marks it as done, even after a panic: the other workers would wait for
/// it otherwise.
pub(crate) struct UnderWay<'a, T>(&'a Queue<T>);

impl<T> Drop for UnderWay<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        state.1 -= 1;
        if state.1 == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_panics_leaves_no_other_waiting() {
        let queue = Queue::default();
        queue.push(vec!["job"]);
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _job = queue.take();
                panic!("as a worker may");
            });
            assert!(panics.join().is_err());
        });
        assert!(queue.take().is_none());
    }
}
