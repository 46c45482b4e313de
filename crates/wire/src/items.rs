//! What payloads consist of: one item after the other, as many as there are.

use crate::codec::{ProtocolError, Reader};
use crate::limits::NAME_BYTES_MAX;
use std::marker::PhantomData;

/// What [`Items`] iterates over.
pub trait Item<'a>: Sized {
    /// Reads the next.
    ///
    /// # Errors
    /// A cut field, or a value that must not be.
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError>;
}

/// The items of a payload. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Items<'a, T>(Reader<'a>, PhantomData<T>);

impl<'a, T: Item<'a>> Items<'a, T> {
    /// Reads `payload` from its first byte.
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

/// True for what may be a name in a directory, or no name.
pub(crate) fn is_name(name: &[u8]) -> bool {
    name.len() <= NAME_BYTES_MAX && !name.contains(&0) && !name.contains(&b'/')
}
