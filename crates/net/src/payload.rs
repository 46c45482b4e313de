//! What comes with a message, where it stands.

use std::ops::Range;
use towline_mem::SharedMemory;

/// The payload of a message, in memory that its sender may change at any time: two ranges, the second behind the first.
#[derive(Clone, Debug)]
pub struct Payload<'a> {
    pub(crate) memory: &'a SharedMemory,
    pub(crate) ranges: [Range<usize>; 2],
}

impl Payload<'_> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// True for no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies it to memory of this process alone.
    ///
    /// # Panics
    /// When that has another length.
    pub fn copy_out(&self, target: &mut [u8]) {
        let [first, second] = &self.ranges;
        let (front, back) = target.split_at_mut(first.len());
        self.memory.copy_out(first.start, front);
        if !back.is_empty() {
            self.memory.copy_out(second.start, back);
        }
    }

    /// Copies it to another memory.
    ///
    /// # Panics
    /// When it does not fit there, or the memory is mapped read-only.
    pub fn copy_to(&self, target: &SharedMemory, at: usize) {
        let [first, second] = &self.ranges;
        target.copy_from(at, self.memory, first.clone());
        if !second.is_empty() {
            target.copy_from(at + first.len(), self.memory, second.clone());
        }
    }
}
