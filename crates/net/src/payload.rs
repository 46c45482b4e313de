//! The payload of a message, still where its sender put it.

use std::ops::Range;
use towline_mem::SharedMemory;

/// The payload of a message, in memory that its sender may change at any time. It consists of two
/// ranges, one after the other.
#[derive(Clone, Debug)]
pub struct Payload<'a> {
    pub(crate) memory: &'a SharedMemory,
    pub(crate) ranges: [Range<usize>; 2],
}

impl Payload<'_> {
    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// True when the payload is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the payload to private memory of this process.
    ///
    /// # Panics
    /// When `target` has a different length.
    pub fn copy_out(&self, target: &mut [u8]) {
        let [first, second] = &self.ranges;
        let (front, back) = target.split_at_mut(first.len());
        self.memory.copy_out(first.start, front);
        if !back.is_empty() {
            self.memory.copy_out(second.start, back);
        }
    }

    /// Copies the payload to other shared memory, at offset `at`.
    ///
    /// # Panics
    /// When the payload does not fit there, or the memory is mapped read-only.
    pub fn copy_to(&self, target: &SharedMemory, at: usize) {
        let [first, second] = &self.ranges;
        target.copy_from(at, self.memory, first.clone());
        if !second.is_empty() {
            target.copy_from(at + first.len(), self.memory, second.clone());
        }
    }
}
