//! What comes with a message, where it stands.

use std::borrow::Cow;
use std::ops::Range;
use towline_mem::SharedMemory;

/// The payload of a message.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_enums)] // who receives has to handle each
pub enum Payload<'a> {
    /// In memory of the receiver's.
    Own(&'a [u8]),
    /// In memory that its sender may change at any time: two ranges, the second behind the first.
    Shared(&'a SharedMemory, [Range<usize>; 2]),
}

impl<'a> Payload<'a> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(_, [first, second]) => first.len() + second.len(),
        }
    }

    /// True for no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes as they are now, which nobody else changes.
    #[must_use]
    pub fn bytes(&self) -> Cow<'a, [u8]> {
        match self {
            Self::Own(bytes) => Cow::Borrowed(bytes),
            Self::Shared(memory, [first, second]) => {
                let mut bytes = vec![0; self.len()];
                let (front, back) = bytes.split_at_mut(first.len());
                memory.copy_out(first.start, front);
                memory.copy_out(second.start, back);
                Cow::Owned(bytes)
            }
        }
    }

    /// Copies it to another memory.
    ///
    /// # Panics
    /// When it does not fit there, or the memory is mapped read-only.
    pub fn copy_to(&self, target: &SharedMemory, at: usize) {
        match self {
            Self::Own(bytes) => target.copy_in(at, bytes),
            Self::Shared(memory, [first, second]) => {
                target.copy_from(at, memory, first.clone());
                target.copy_from(at + first.len(), memory, second.clone());
            }
        }
    }
}
