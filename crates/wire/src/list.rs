//! What bodies consist of: operations, or their results, one after the other.

use crate::codec::{ProtocolError, Reader};
use crate::limits::COMPOUND_OPS_MAX;
use std::marker::PhantomData;

/// What a [`List`] consists of.
pub trait Listed<'a>: Sized {
    /// What is said of more than [`COMPOUND_OPS_MAX`].
    const TOO_MANY: &'static str;

    /// Reads the next.
    ///
    /// # Errors
    /// Unknown tag, cut field, or a value that must not be.
    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError>;

    /// Why nothing may follow it, if so.
    fn last(&self) -> Option<&'static str>;
}

/// The items of a body, one after the other. Ends after the first error, which is that of an item,
/// one more than [`COMPOUND_OPS_MAX`], or something after the last.
#[derive(Clone, Debug)]
pub struct List<'a, T> {
    reader: Reader<'a>,
    count: usize,
    last: Option<&'static str>,
    items: PhantomData<T>,
}

impl<'a, T: Listed<'a>> List<'a, T> {
    /// All items of a body.
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

    // Else each item travels through memory twice more.
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
