//! Operations that were started and complete later: one, any of a group, or as futures.

use crate::Error;
use crate::core::{Core, Outcome, SlotRef};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

pub(crate) type Convert<T> = Box<dyn FnOnce(&Outcome, Vec<u8>) -> Result<T, Error> + Send>;

/// A request under way. Dropping it does not undo it; its answer is then ignored.
///
/// As a future it makes progress only when polled. Between polls, another use of the same client
/// has to, or [`crate::Client::progress`], called when [`crate::Client::fd`] is readable (or
/// writable, while [`crate::Client::waits_to_send`]). The thread that makes the progress calls the
/// waker, with nothing locked: the waker may poll at once, and must not wait for this client.
pub struct Operation<T> {
    core: Arc<Core>,
    slot: Option<SlotRef>,
    convert: Option<Convert<T>>,
}

impl<T> Operation<T> {
    pub(crate) fn new(core: Arc<Core>, slot: SlotRef, convert: Convert<T>) -> Self {
        Self { core, slot: Some(slot), convert: Some(convert) }
    }

    fn convert(&mut self, finished: Result<Vec<u8>, Error>, outcome: &Outcome) -> Result<T, Error> {
        self.slot = None;
        let convert = self.convert.take().expect("an operation finishes once");
        convert(outcome, finished?)
    }

    /// Waits for this operation, making progress for all others meanwhile.
    ///
    /// # Errors
    /// As the call that it completes.
    pub fn wait(mut self) -> Result<T, Error> {
        let slot = self.slot.as_ref().expect("not finished before").clone();
        let mut outcome = Outcome::default();
        let finished = self.core.wait(&slot, &mut outcome);
        self.convert(finished, &outcome)
    }

    /// Asks the server to stop waiting for a lock or for events. The operation then ends with
    /// `EINTR`, or with its result if that was faster.
    pub fn cancel(&self) {
        if let Some(slot) = &self.slot {
            self.core.cancel(slot);
        }
    }
}

impl<T: Unpin> Future for Operation<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let slot = self.slot.as_ref().expect("polled after completion").clone();
        let mut outcome = Outcome::default();
        match self.core.poll(&slot, context.waker(), &mut outcome) {
            Some(finished) => Poll::Ready(self.convert(finished, &outcome)),
            None => Poll::Pending,
        }
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.core.abandon(&slot);
        }
    }
}

/// A completion group: operations of one client, taken in the order in which they finish. Use one
/// group per thread.
pub struct Group<T> {
    core: Option<Arc<Core>>,
    operations: Vec<(u64, Operation<T>)>,
    /// Where to look first for a finished operation: after the last one taken, since answers mostly
    /// arrive in order.
    next: usize,
}

impl<T> Default for Group<T> {
    fn default() -> Self {
        Self { core: None, operations: Vec::new(), next: 0 }
    }
}

impl<T> Group<T> {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operation under a tag of the caller's choice.
    ///
    /// # Panics
    /// If it belongs to another client than those added before.
    pub fn add(&mut self, operation: Operation<T>, tag: u64) {
        let core = self.core.get_or_insert_with(|| operation.core.clone());
        assert!(Arc::ptr_eq(core, &operation.core), "operations of two clients in one group");
        self.operations.push((tag, operation));
    }

    /// Number of operations not taken yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// True if all operations were taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Waits until any operation has finished and takes it; `None` when the group is empty.
    pub fn wait_any(&mut self) -> Option<(u64, Result<T, Error>)> {
        let core = self.core.as_ref().filter(|_| !self.operations.is_empty())?;
        let first = self.next % self.operations.len();
        let (before, behind) = self.operations.split_at(first);
        let slots = behind.iter().chain(before);
        let slots = slots.map(|(_, o)| o.slot.as_ref().expect("still waiting"));
        let mut outcome = Outcome::default();
        let (place, finished) = core.wait_any(slots, &mut outcome);
        let index = (first + place) % self.operations.len();
        self.next = index + 1;
        let (tag, mut operation) = self.operations.swap_remove(index);
        Some((tag, operation.convert(finished, &outcome)))
    }
}
