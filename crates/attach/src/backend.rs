//! What is behind the queues of a device.

use crate::Error;
use std::os::fd::RawFd;
use std::time::Instant;

/// What a disk is like, and so what the device is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes.
    pub size: u64,
    /// Smallest unit of requests, bytes, a power of two.
    pub block_minimum: u32,
    /// Unit that is served best, bytes, a power of two.
    pub block_preferred: u32,
    /// Longest read or write, bytes.
    pub transfer_maximum: u32,
    /// It cannot be written.
    pub read_only: bool,
    /// Seeks cost time.
    pub rotational: bool,
    /// What was written may be lost until it is flushed.
    pub flush: bool,
    /// A single write can be made durable.
    pub fua: bool,
    /// Ranges can be given back.
    pub trim: bool,
    /// Ranges can be zeroed without sending zeroes.
    pub zero: bool,
    /// Several connections see one disk, and a flush on one covers all.
    pub connections: bool,
}

impl Geometry {
    /// Bytes that a device of this machine has of it: whole blocks, of at least 512 bytes.
    #[must_use]
    pub fn whole_blocks(&self) -> u64 {
        let block = u64::from(self.block_minimum.max(512));
        self.size / block * block
    }

    /// The same where a device is to be made.
    ///
    /// # Errors
    /// When that is nothing.
    pub(crate) fn device_bytes(&self) -> Result<u64, Error> {
        match self.whole_blocks() {
            0 => Err(Error::Refused(format!(
                "the disk has {} bytes, and a device needs a block of {}",
                self.size,
                self.block_minimum.max(512)
            ))),
            bytes => Ok(bytes),
        }
    }

    /// Longest read or write of a device, bytes: whole pages, as far as the server takes them and
    /// at most `limit`.
    ///
    /// # Errors
    /// When the server takes less than a page.
    pub fn transfer_bytes(&self, limit: u32) -> Result<u32, Error> {
        let page = towline_mem::page_bytes() as u32;
        match self.transfer_maximum.min(limit) / page * page {
            0 => Err(Error::Refused(format!(
                "the server takes at most {} bytes at once, and a device needs a page of {page}",
                self.transfer_maximum
            ))),
            bytes => Ok(bytes),
        }
    }
}

/// What is to be done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // a back end has to handle each
pub enum Operation {
    /// Fill the buffer.
    Read,
    /// Write the buffer; `durable`: not done before it is on stable storage.
    Write {
        /// Not done before it is on stable storage.
        durable: bool,
    },
    /// Make durable what was written before; the range is empty.
    Flush,
    /// The contents are no longer needed.
    Trim,
    /// Make it read as zeroes.
    Zero {
        /// Space has to stay or become allocated.
        allocate: bool,
        /// Not done before it is on stable storage.
        durable: bool,
    },
}

/// One request of the kernel.
#[derive(Debug)]
pub struct Request {
    /// Names it among those under way; below the depth of the queue.
    pub tag: u16,
    /// What is to be done.
    pub operation: Operation,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// For reads and writes just as long as the request. It belongs to the back end until the
    /// request is finished; its capacity must stay as it is.
    pub buffer: Vec<u8>,
}

/// A request that is over.
#[derive(Debug)]
pub struct Finished {
    /// Of the request.
    pub tag: u16,
    /// All of it, or an error number of Linux.
    pub result: Result<(), i32>,
    /// Of the request; after a failure an empty one will do.
    pub buffer: Vec<u8>,
}

/// Serves the requests of one queue, in any order and many at once. It never waits, except for a
/// new connection to a server that went away.
pub trait Backend {
    /// Takes a request. It is finished later.
    fn begin(&mut self, request: Request);

    /// Moves on whatever can be moved on: called when the descriptor is ready, when the time has
    /// come, and after requests were begun.
    fn turn(&mut self);

    /// A request that is over, if there is one.
    fn finished(&mut self) -> Option<Finished>;

    /// The descriptor to wait for, and whether also until it can be written.
    fn interest(&self) -> Option<(RawFd, bool)>;

    /// When to call [`Backend::turn`] although nothing happened.
    fn deadline(&self) -> Option<Instant>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_whole_blocks_and_moves_whole_pages() {
        let page = towline_mem::page_bytes() as u32;
        let disk = Geometry {
            size: 10_000_001,
            block_minimum: 1,
            block_preferred: 4096,
            transfer_maximum: 3 * page + 17,
            read_only: false,
            rotational: false,
            flush: true,
            fua: true,
            trim: false,
            zero: false,
            connections: true,
        };
        assert_eq!(disk.device_bytes().unwrap(), 9_999_872);
        assert_eq!(disk.transfer_bytes(u32::MAX).unwrap(), 3 * page);
        assert_eq!(disk.transfer_bytes(2 * page).unwrap(), 2 * page);
        let short = Geometry { size: 511, transfer_maximum: page - 1, ..disk };
        assert!(short.device_bytes().unwrap_err().to_string().contains("511 bytes"));
        let said = short.transfer_bytes(u32::MAX).unwrap_err().to_string();
        assert!(said.contains(&format!("at most {} bytes at once", page - 1)), "{said}");
    }
}
