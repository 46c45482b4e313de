//! The buffers of a core's disks, and the share of them that disks that may hang can take.

use crate::Disk;
use crate::engine::Limits;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use towline_mem::PoolBuffer;

/// Maximum size of the buffers that one disk that may hang can hold at once, in bytes.
const DISK_BYTES_MAX: u64 = 2 << 20;
/// All disks that may hang together can hold one part in this many of the buffers; the rest stays free for
/// others.
const SHARE: u64 = 2;

/// Why no buffer is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // callers treat each differently
pub enum Short {
    /// All buffers are in use.
    Memory,
    /// The disk, which may hang, holds all it is allowed; other disks can go on.
    Disk,
    /// No further buffer is needed.
    Nothing,
}

/// Gives buffers to requests.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) limits: Limits,
    /// Disks that may hang, and the bytes of the buffers that each holds: those being read into or written
    /// from, and those waiting for data to write.
    kept: Vec<(Weak<Disk>, Arc<AtomicU64>)>,
}

impl Memory {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, kept: Vec::new() }
    }

    /// Takes a buffer for `length` bytes.
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

    /// Returns true unless this disk, or all disks that may hang together, hold all they are allowed.
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
