//! The buffers of a core's disks, and how many of them a disk that may hang may have.

use crate::Disk;
use crate::engine::Limits;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use towline_mem::PoolBuffer;

/// Bytes of buffers that one disk that may hang may keep at once.
const DISK_BYTES_MAX: u64 = 2 << 20;
/// All of them together: one part in so many of the buffers, so that a disk that hangs leaves the rest to others.
const SHARE: u64 = 2;

/// Why there is no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // callers do something else for each
pub enum Short {
    /// All of them are in use.
    Memory,
    /// The disk, which may hang, has what it may have: others can go on.
    Disk,
    /// None is needed any more.
    Nothing,
}

/// Gives buffers to requests.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) limits: Limits,
    /// Disks that may hang, and the bytes of the buffers that they keep: those that are being read into or
    /// written from, or that wait for what is to be written.
    kept: Vec<(Weak<Disk>, Arc<AtomicU64>)>,
}

impl Memory {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, kept: Vec::new() }
    }

    /// A buffer for so many bytes.
    pub(crate) fn take(&mut self, disk: &Arc<Disk>, length: u64) -> Result<PoolBuffer, Short> {
        if !disk.store.may_hang() {
            return self.limits.take(length).ok_or(Short::Memory);
        }
        if !self.has_room_for(disk) {
            return Err(Short::Disk);
        }
        let buffer = self.limits.take(length).ok_or(Short::Memory)?;
        let known =
            self.kept.iter().find(|(known, _)| std::ptr::eq(known.as_ptr(), &raw const **disk));
        if let Some((_, account)) = known {
            return Ok(buffer.charged_to(account));
        }
        self.kept.retain(|(known, _)| known.strong_count() > 0);
        let account = Arc::default();
        let buffer = buffer.charged_to(&account);
        self.kept.push((Arc::downgrade(disk), account));
        Ok(buffer)
    }

    /// True unless this disk, or all that may hang together, keep what they may.
    pub(crate) fn has_room_for(&self, disk: &Disk) -> bool {
        let kept = |all: bool| {
            let some =
                self.kept.iter().filter(|(known, _)| all || std::ptr::eq(known.as_ptr(), disk));
            some.map(|(_, bytes)| bytes.load(Ordering::Relaxed)).sum::<u64>()
        };
        let fragment = self.limits.fragments.buffer_bytes() as u64;
        let (own, all) = (kept(false), kept(true));
        (own == 0 || own + fragment <= DISK_BYTES_MAX)
            && (all == 0 || all + fragment <= self.limits.fragments.bytes() / SHARE)
    }
}
