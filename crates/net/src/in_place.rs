//! Which of what waits to be sent may leave from where it lies, without being copied.

use crate::SendQueue;
use towline_mem::{Aggregate, Segment};

/// Less than this is copied: that costs less than waiting for the network to be done with it.
const IN_PLACE_BYTES_MIN: u64 = 32 * 1024;
/// Most slices of one send.
const SLICES_MAX: usize = 64;

/// What of a queue is sent in place.
#[derive(Debug, Default)]
pub(crate) struct InPlace {
    /// Whether it may be.
    allowed: bool,
    /// The kernel has the front of the queue: nothing else may be sent before it says how much of
    /// it it took.
    pub(crate) taken: bool,
}

impl SendQueue {
    /// Lets long runs of pool buffers wait for [`SendQueue::take_in_place`], or no longer.
    pub fn allow_in_place(&mut self, allowed: bool) {
        self.in_place.allowed = allowed;
    }

    /// True when the front of the queue is not to be sent by an ordinary send.
    pub(crate) fn is_kept(&self) -> bool {
        self.in_place.taken || (self.in_place.allowed && self.front_in_place().is_some())
    }

    /// The front of the queue, if it is to be sent in place; nothing else is sent before
    /// [`SendQueue::returned`].
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

    /// The socket took so many of the bytes of [`SendQueue::take_in_place`].
    pub fn returned(&mut self, count: u64, counters: &crate::Counters) {
        self.in_place.taken = false;
        self.advance(count, counters);
    }

    /// Slices at the front that go in one send in place, if they are worth it.
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
