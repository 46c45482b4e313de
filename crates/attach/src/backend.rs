//! The interface between the queues of a device and the connection to the server.

use crate::Error;
use std::fmt::{self, Display};
use std::os::fd::RawFd;
use std::time::Instant;

/// Size, block sizes and abilities of a disk, which its device takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub size: u64,
    /// Smallest unit of requests in bytes, a power of two.
    pub block_minimum: u32,
    /// Unit that the server handles best, in bytes, a power of two.
    pub block_preferred: u32,
    /// Longest read or write in bytes.
    pub transfer_maximum: u32,
    /// The disk cannot be written.
    pub read_only: bool,
    /// Seeks take time, as on a rotating disk.
    pub rotational: bool,
    /// Writes may be lost until they are flushed.
    pub flush: bool,
    /// Single writes can be made durable (FUA).
    pub fua: bool,
    /// Ranges can be trimmed.
    pub trim: bool,
    /// Ranges can be zeroed without sending zeroes.
    pub zero: bool,
    /// Several connections see the same disk, and a flush on one covers all of them.
    pub connections: bool,
}

impl Geometry {
    /// Returns the size of a local device for this disk: whole blocks, of at least 512 bytes.
    #[must_use]
    pub fn whole_blocks(&self) -> u64 {
        let block = u64::from(self.block_minimum.max(512));
        self.size / block * block
    }

    /// Returns the same, if a device of this size can exist.
    ///
    /// # Errors
    /// If there is not a single whole block.
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

    /// Checks that the users of a device can continue with this disk.
    ///
    /// # Errors
    /// If it lacks something that the device has: then it is not the disk that the device was made of.
    pub(crate) fn continues(&self, device: DeviceGeometry) -> Result<(), Error> {
        let block = self.block_minimum.max(512);
        if block <= device.block
            && self.size >= device.bytes
            && (device.read_only || !self.read_only)
        {
            return Ok(());
        }
        let now = DeviceGeometry { bytes: self.whole_blocks(), block, read_only: self.read_only };
        Err(Error::Refused(format!("this is another disk: {now}, and the device has {device}")))
    }

    /// Checks that several connections may be used together. Otherwise a read on one could miss what was written
    /// on another, and a flush on one would not cover it. `what` names the server in the error.
    ///
    /// # Errors
    /// If the server does not announce that they see the same disk.
    pub fn shareable(&self, what: impl Display) -> Result<(), Error> {
        match self.connections {
            true => Ok(()),
            false => Err(Error::Refused(format!(
                "{what}: the server does not announce that several connections see the same data, as it did \
                 before: let it do so, or detach with --force and attach again"
            ))),
        }
    }

    /// Returns the longest read or write of a device in bytes: whole pages, limited by the server and
    /// by `limit`.
    ///
    /// # Errors
    /// If the server accepts less than a page.
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

/// What a device has, as its users know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceGeometry {
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Unit of requests in bytes.
    pub(crate) block: u32,
    /// It cannot be written.
    pub(crate) read_only: bool,
}

impl Display for DeviceGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.read_only { ", read-only" } else { "" };
        write!(f, "{} bytes in blocks of {}{mode}", self.bytes, self.block)
    }
}

/// What a request does to its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // a back end has to handle each
pub enum Operation {
    /// Fill the buffer.
    Read,
    /// Write the buffer.
    Write {
        /// Complete only once the data is on stable storage.
        durable: bool,
    },
    /// Make earlier writes durable; the range is empty.
    Flush,
    /// Discard the contents, which are no longer needed.
    Trim,
    /// Make the range read as zeroes.
    Zero {
        /// Keep the space allocated, or allocate it.
        allocate: bool,
        /// Complete only once the zeroes are on stable storage.
        durable: bool,
    },
}

/// One request of the kernel.
#[derive(Debug)]
pub struct Request {
    /// Identifies the request among those under way; less than the depth of the queue.
    pub tag: u16,
    /// What the request does.
    pub operation: Operation,
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// For reads and writes exactly as long as the request. It belongs to the back end until the
    /// request is finished, and its capacity must not change.
    pub buffer: Vec<u8>,
}

/// A finished request.
#[derive(Debug)]
pub struct Finished {
    /// Tag of the request.
    pub tag: u16,
    /// Success of the whole request, or a Linux error number.
    pub result: Result<(), i32>,
    /// Buffer of the request; after a failure it may be an empty one.
    pub buffer: Vec<u8>,
}

/// Serves the requests of one queue, many at a time and in any order. It never blocks, except while
/// it connects to a server again.
pub trait Backend {
    /// Accepts a request, which finishes later.
    fn begin(&mut self, request: Request);

    /// Makes progress without blocking. The queue calls it when the descriptor is ready, when the
    /// deadline has passed, and after it has begun requests.
    fn turn(&mut self);

    /// Returns a finished request, if there is one.
    fn finished(&mut self) -> Option<Finished>;

    /// Returns the descriptor to wait for, and whether to wait for writability as well.
    fn interest(&self) -> Option<(RawFd, bool)>;

    /// Returns the time at which to call [`Backend::turn`] even if nothing happened.
    fn deadline(&self) -> Option<Instant>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Geometry = Geometry {
        size: 10_000_001,
        block_minimum: 1,
        block_preferred: 4096,
        transfer_maximum: 1 << 20,
        read_only: false,
        rotational: false,
        flush: true,
        fua: true,
        trim: false,
        zero: false,
        connections: true,
    };

    #[test]
    fn a_device_continues_only_with_a_disk_that_has_all_of_it() {
        let device = DeviceGeometry { bytes: DISK.whole_blocks(), block: 512, read_only: false };
        for disk in [
            DISK,
            Geometry { size: device.bytes, ..DISK },
            Geometry { size: 1 << 30, block_minimum: 512, ..DISK },
        ] {
            disk.continues(device).unwrap();
        }
        for (disk, said) in [
            (Geometry { size: device.bytes - 1, ..DISK }, "9999360 bytes in blocks of 512"),
            (Geometry { block_minimum: 1024, ..DISK }, "blocks of 1024"),
            (Geometry { read_only: true, ..DISK }, "blocks of 512, read-only"),
        ] {
            let refused = disk.continues(device).unwrap_err().to_string();
            assert!(
                refused.starts_with("this is another disk: ") && refused.contains(said),
                "{refused}"
            );
        }
        let device = DeviceGeometry { read_only: true, block: 4096, ..device };
        for read_only in [false, true] {
            Geometry { read_only, block_minimum: 4096, ..DISK }.continues(device).unwrap();
        }
    }

    #[test]
    fn a_device_has_whole_blocks_and_moves_whole_pages() {
        let page = towline_mem::page_bytes() as u32;
        let disk = Geometry { transfer_maximum: 3 * page + 17, ..DISK };
        assert_eq!(disk.device_bytes().unwrap(), 9_999_872);
        assert_eq!(disk.transfer_bytes(u32::MAX).unwrap(), 3 * page);
        assert_eq!(disk.transfer_bytes(2 * page).unwrap(), 2 * page);
        let short = Geometry { size: 511, transfer_maximum: page - 1, ..disk };
        assert!(short.device_bytes().unwrap_err().to_string().contains("511 bytes"));
        let said = short.transfer_bytes(u32::MAX).unwrap_err().to_string();
        assert!(said.contains(&format!("at most {} bytes at once", page - 1)), "{said}");
    }
}
