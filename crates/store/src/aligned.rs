//! Memory for direct access, past the page cache: devices need to have it aligned.

use std::borrow::Cow;
use std::ops::Deref;

/// Alignment of memory, offsets and lengths that every device accepts, in bytes.
pub(crate) const ALIGNMENT: u64 = 4096;

/// Returns a buffer that has `length` zeros from an aligned place on, and that place.
pub(crate) fn zeroes(length: usize) -> (Vec<u8>, usize) {
    let bytes = vec![0; length + ALIGNMENT as usize];
    let start = bytes.as_ptr().align_offset(ALIGNMENT as usize);
    (bytes, start)
}

/// Data that lies in memory as a device needs it.
pub(crate) struct Aligned<'a> {
    bytes: Cow<'a, [u8]>,
    start: usize,
}

impl<'a> Aligned<'a> {
    /// Copies the data unless it is aligned.
    pub(crate) fn of(data: &'a [u8]) -> Self {
        if data.as_ptr().addr().is_multiple_of(ALIGNMENT as usize) {
            return Self::as_it_is(data);
        }
        let (mut bytes, start) = zeroes(data.len());
        bytes.truncate(start + data.len());
        bytes[start..].copy_from_slice(data);
        Self { bytes: Cow::Owned(bytes), start }
    }

    /// For data that no device reads.
    pub(crate) fn as_it_is(data: &'a [u8]) -> Self {
        Self { bytes: Cow::Borrowed(data), start: 0 }
    }
}

impl Deref for Aligned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
