//! The place for received bytes.

use std::ops::Range;
use towline_mem::SharedMemory;

/// Memory into which bytes are received.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // receivers have to handle each variant
pub enum Target<'a> {
    /// Memory that belongs to the receiver alone.
    Own(&'a mut [u8]),
    /// A range of memory that others may read and write at the same time, such as that of a disk. It is
    /// mapped for writing.
    Shared(&'a SharedMemory, Range<usize>),
}

impl Target<'_> {
    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(_, range) => range.len(),
        }
    }

    /// True when the target has no room.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the same place, limited to `most` bytes.
    pub(crate) fn limited(&mut self, most: usize) -> Target<'_> {
        let length = self.len().min(most);
        match self {
            Self::Own(bytes) => Target::Own(&mut bytes[..length]),
            Self::Shared(memory, range) => {
                Target::Shared(memory, range.start..range.start + length)
            }
        }
    }

    /// Copies as many bytes of `source` as fit to the beginning of the target; returns how many.
    pub fn put(&mut self, source: &[u8]) -> usize {
        let count = self.len().min(source.len());
        match self {
            Self::Own(bytes) => bytes[..count].copy_from_slice(&source[..count]),
            Self::Shared(memory, range) => memory.copy_in(range.start, &source[..count]),
        }
        count
    }

    /// Copies a range of shared memory to offset `at`.
    ///
    /// # Panics
    /// When a range is not inside its memory.
    pub(crate) fn put_shared(&mut self, at: usize, memory: &SharedMemory, from: Range<usize>) {
        match self {
            Self::Own(bytes) => memory.copy_out(from.start, &mut bytes[at..at + from.len()]),
            Self::Shared(target, range) => {
                assert!(at + from.len() <= range.len(), "copy beyond the target");
                target.copy_from(range.start + at, memory, from);
            }
        }
    }
}
