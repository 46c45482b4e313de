//! Data to write directly, past the page cache.

use std::borrow::Cow;
use std::ops::Deref;
use towline_mem::{ALIGNMENT, aligned_zeroes};

/// Data that lies in memory as a device needs it.
pub(super) struct Aligned<'a> {
    bytes: Cow<'a, [u8]>,
    start: usize,
}

impl<'a> Aligned<'a> {
    /// Copies the data unless it is aligned.
    pub(super) fn of(data: &'a [u8]) -> Self {
        if data.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return Self::as_it_is(data);
        }
        let (mut bytes, start) = aligned_zeroes(data.len());
        bytes.truncate(start + data.len());
        bytes[start..].copy_from_slice(data);
        Self { bytes: Cow::Owned(bytes), start }
    }

    /// For data that no device reads.
    pub(super) fn as_it_is(data: &'a [u8]) -> Self {
        Self { bytes: Cow::Borrowed(data), start: 0 }
    }
}

impl Deref for Aligned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
