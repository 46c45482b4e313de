//! Memory for direct access, past the page cache: devices need to have it aligned.

/// Alignment of memory, offsets and lengths that every device accepts, in bytes.
pub const ALIGNMENT: usize = 4096;

/// Returns a buffer that has `length` zeros from an aligned place on, and that place.
#[must_use]
pub fn aligned_zeroes(length: usize) -> (Vec<u8>, usize) {
    let bytes = vec![0; length + ALIGNMENT];
    // Within the buffer even if `align_offset` gives up, as it may.
    let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    (bytes, start)
}
