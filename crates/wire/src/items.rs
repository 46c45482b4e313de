//! Iteration over a payload that is a sequence of items, such as entries or events.

use crate::codec::{ProtocolError, Reader};
use crate::limits::NAME_BYTES_MAX;
use std::marker::PhantomData;

/// An item of [`Items`].
pub trait Item<'a>: Sized {
    /// Decodes the next item.
    ///
    /// # Errors
    /// Truncated field, or invalid value.
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError>;
}

/// Iterates over the items of a payload and ends after the first error.
#[derive(Clone, Debug)]
pub struct Items<'a, T>(Reader<'a>, PhantomData<T>);

impl<'a, T: Item<'a>> Items<'a, T> {
    /// Starts at the first byte of `payload`.
    #[must_use]
    pub fn new(payload: &'a [u8]) -> Self {
        Self(Reader::new(payload), PhantomData)
    }
}

impl<'a, T: Item<'a>> Iterator for Items<'a, T> {
    type Item = Result<T, ProtocolError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let item = T::read(&mut self.0);
        if item.is_err() {
            self.0 = Reader::new(&[]);
        }
        Some(item)
    }
}

/// Returns true for a valid name in a directory, and for an empty one.
pub(crate) fn is_name(name: &[u8]) -> bool {
    name.len() <= NAME_BYTES_MAX && !name.contains(&0) && !name.contains(&b'/')
}
