//! A number of things that are under way on threads.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Pending {
    count: Mutex<usize>,
    ended: Condvar,
}

impl Pending {
    pub(super) fn begin(&self) {
        *self.count() += 1;
    }

    /// Must follow each [`Pending::begin`].
    pub(super) fn end(&self) {
        *self.count() -= 1;
        self.ended.notify_all();
    }

    pub(super) fn is_none(&self) -> bool {
        *self.count() == 0
    }

    /// Waits until nothing is under way; returns false if that takes longer than `limit`.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let waited = self.ended.wait_timeout_while(self.count(), limit, |count| *count > 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
