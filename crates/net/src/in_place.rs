//! Chooses the queued data that may be sent from where it lies in memory, without copying.

use crate::SendQueue;
use towline_mem::{Aggregate, Segment};

/// Less data is copied, which costs less than waiting until the network has finished with the memory.
const IN_PLACE_BYTES_MIN: u64 = 32 * 1024;
/// Most slices in one send.
const SLICES_MAX: usize = 64;

/// State of sending a queue's data in place.
#[derive(Debug, Default)]
pub(crate) struct InPlace {
    /// Whether sending in place is allowed.
    allowed: bool,
    /// The kernel has the front of the queue. Nothing else may be sent until it reports how much it took.
    pub(crate) taken: bool,
}

impl SendQueue {
    /// Sets whether long runs of pool buffers wait for [`SendQueue::take_in_place`].
    pub fn allow_in_place(&mut self, allowed: bool) {
        self.in_place.allowed = allowed;
    }

    /// True when the front of the queue must not be sent by an ordinary send.
    pub(crate) fn is_kept(&self) -> bool {
        self.in_place.taken || (self.in_place.allowed && self.front_in_place().is_some())
    }

    /// Returns the front of the queue if it should be sent in place. Nothing else is sent until
    /// [`SendQueue::returned`] is called.
    pub fn take_in_place(&mut self) -> Option<Aggregate> {
        if self.in_place.taken || !self.in_place.allowed {
            return None;
        }
        let count = self.front_in_place()?;
        let mut bytes = Aggregate::new();
        for slice in self.slices().take(count) {
            bytes.append(slice.segment.clone(), slice.offset, slice.length);
        }
        self.in_place.taken = true;
        Some(bytes)
    }

    /// Records that the socket took `count` of the bytes from [`SendQueue::take_in_place`].
    pub fn returned(&mut self, count: u64, counters: &crate::Counters) {
        self.in_place.taken = false;
        self.advance(count, counters);
    }

    /// Returns the number of slices at the front for one send in place; `None` if they have too few bytes.
    fn front_in_place(&self) -> Option<usize> {
        let mut bytes = 0;
        let mut count = 0;
        for slice in self.slices().take(SLICES_MAX) {
            match slice.segment {
                Segment::Host(_) => {}
                Segment::Registered(_) => bytes += slice.length,
                _ => break,
            }
            count += 1;
        }
        (bytes >= IN_PLACE_BYTES_MIN).then_some(count)
    }
}
