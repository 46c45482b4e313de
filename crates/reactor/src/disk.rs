//! Reads and writes of files on the ring.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::PoolBuffer;

/// A read or write of a file. It owns its memory until it is finished.
#[derive(Debug)]
pub struct Transfer {
    /// The file.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// The memory to read into or write from.
    pub buffer: PoolBuffer,
    /// The range of `buffer` to transfer.
    pub range: Range<usize>,
    /// True for a write, false for a read.
    pub write: bool,
    /// For writes: finish only when the data is on stable storage.
    pub durable: bool,
}

impl Transfer {
    /// Returns the bytes to transfer.
    #[must_use]
    pub fn part(&self) -> &[u8] {
        &self.buffer.bytes()[self.range.clone()]
    }

    pub(crate) fn part_mut(&mut self) -> &mut [u8] {
        &mut self.buffer.bytes_mut()[self.range.clone()]
    }
}

/// A transfer that has finished.
#[derive(Debug)]
pub struct Finished {
    /// The token that it was submitted with.
    pub token: u64,
    /// Number of bytes transferred; fewer than requested at the end of a file.
    pub result: io::Result<usize>,
    /// The transfer's memory.
    pub buffer: PoolBuffer,
    /// True if the memory is registered with the ring.
    pub registered: bool,
}
