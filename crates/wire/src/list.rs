//! Iteration over a message body: a sequence of operations or of their results.

use crate::codec::{ProtocolError, Reader};
use crate::limits::COMPOUND_OPS_MAX;
use std::marker::PhantomData;

/// An item of a [`List`].
pub trait Listed<'a>: Sized {
    /// Error text for more than [`COMPOUND_OPS_MAX`] items.
    const TOO_MANY: &'static str;

    /// Decodes the next item.
    ///
    /// # Errors
    /// Unknown tag, truncated field, or invalid value.
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError>;

    /// Returns the error text for items after this one, if this has to be the last.
    fn last(&self) -> Option<&'static str>;
}

/// Iterates over the items of a body and ends after the first error: that of an item, more than
/// [`COMPOUND_OPS_MAX`] items, or an item after one that has to be the last.
#[derive(Clone, Debug)]
pub struct List<'a, T> {
    reader: Reader<'a>,
    count: usize,
    last: Option<&'static str>,
    items: PhantomData<T>,
}

impl<'a, T: Listed<'a>> List<'a, T> {
    /// Starts at the first byte of `body`.
    #[must_use]
    pub fn of(body: &'a [u8]) -> Self {
        Self { reader: Reader::new(body), count: 0, last: None, items: PhantomData }
    }

    #[inline(always)]
    fn read(&mut self) -> Result<T, ProtocolError> {
        if self.count == COMPOUND_OPS_MAX {
            return Err(self.reader.error(T::TOO_MANY));
        }
        if let Some(why) = self.last {
            return Err(self.reader.error(why));
        }
        self.count += 1;
        let item = T::read(&mut self.reader)?;
        self.last = item.last();
        Ok(item)
    }
}

impl<'a, T: Listed<'a>> Iterator for List<'a, T> {
    type Item = Result<T, ProtocolError>;

    // Otherwise each item is copied through memory twice more.
    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let read = self.read();
        if read.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(read)
    }
}
