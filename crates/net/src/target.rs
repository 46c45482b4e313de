//! Where received bytes go.

use std::ops::Range;
use towline_mem::SharedMemory;

/// Memory that bytes are received into.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // who receives has to handle each
pub enum Target<'a> {
    /// The receiver's alone.
    Own(&'a mut [u8]),
    /// A range of memory that others may read and write meanwhile, such as a disk's. It is mapped
    /// for writing.
    Shared(&'a SharedMemory, Range<usize>),
}

impl Target<'_> {
    /// Bytes that it takes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(_, range) => range.len(),
        }
    }

    /// True for no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same place, for no more than so many bytes.
    pub(crate) fn limited(&mut self, most: usize) -> Target<'_> {
        let length = self.len().min(most);
        match self {
            Self::Own(bytes) => Target::Own(&mut bytes[..length]),
            Self::Shared(memory, range) => {
                Target::Shared(memory, range.start..range.start + length)
            }
        }
    }

    /// Copies the first of these bytes to its beginning; returns how many.
    pub fn put(&mut self, source: &[u8]) -> usize {
        let count = self.len().min(source.len());
        match self {
            Self::Own(bytes) => bytes[..count].copy_from_slice(&source[..count]),
            Self::Shared(memory, range) => memory.copy_in(range.start, &source[..count]),
        }
        count
    }

    /// Copies a range of another memory to `at`.
    ///
    /// # Panics
    /// When a range is not inside.
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
