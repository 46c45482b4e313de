//! Reading and writing files on the ring.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::PoolBuffer;

/// A read or write of a file, which owns what it moves until it is finished.
#[derive(Debug)]
pub struct Transfer {
    /// The file.
    pub file: Arc<OwnedFd>,
    /// First byte in the file.
    pub offset: u64,
    /// Memory.
    pub buffer: PoolBuffer,
    /// Which bytes of `buffer`.
    pub range: Range<usize>,
    /// Write, else read.
    pub write: bool,
    /// A write that is not done before it is on stable storage.
    pub durable: bool,
}

impl Transfer {
    /// The bytes concerned.
    #[must_use]
    pub fn part(&self) -> &[u8] {
        &self.buffer.bytes()[self.range.clone()]
    }

    pub(crate) fn part_mut(&mut self) -> &mut [u8] {
        &mut self.buffer.bytes_mut()[self.range.clone()]
    }
}

/// A transfer that is over.
#[derive(Debug)]
pub struct Finished {
    /// What it was submitted under.
    pub token: u64,
    /// Bytes moved; fewer than asked for at the end of a file.
    pub result: io::Result<usize>,
    /// Its memory.
    pub buffer: PoolBuffer,
    /// The memory was registered with the ring.
    pub registered: bool,
}
