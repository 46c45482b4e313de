//! A number of things that are under way on threads.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Default)]
pub(super) struct Pending {
    count: Mutex<usize>,
    ended: Condvar,
}

/// One of these things; it is over when this is dropped.
pub(super) struct UnderWay(Arc<Pending>);

impl Pending {
    pub(super) fn begin(self: &Arc<Self>) -> UnderWay {
        *self.count() += 1;
        UnderWay(Arc::clone(self))
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

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.ended.notify_all();
    }
}
