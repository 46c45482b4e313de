//! Remembers which file system does not support reads that fail instead of waiting.
//!
//! There `preadv2(RWF_NOWAIT)` returns `EOPNOTSUPP` (tmpfs, for example), or `EPERM` where a
//! container forbids it. The answer holds for all files of a file system, so the result for one
//! file saves a useless system call for the next one, which may be opened for a single read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// No device has this number.
const NONE: u64 = u64::MAX;

/// The device of an export that was last found not to support it. One is enough: an export seldom
/// has more than one file system, and forgetting costs one system call.
#[derive(Debug)]
pub(super) struct Residency {
    mute: AtomicU64,
}

impl Default for Residency {
    fn default() -> Self {
        Self { mute: AtomicU64::new(NONE) }
    }
}

impl Residency {
    /// Returns whether the call is worth trying on files of this device.
    pub(super) fn may_tell(&self, device: u64) -> bool {
        self.mute.load(Relaxed) != device
    }

    /// Records that the call is not supported on this device.
    pub(super) fn cannot_tell(&self, device: u64) {
        self.mute.store(device, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_device_that_cannot_tell_is_spared() {
        let residency = Residency::default();
        assert!(residency.may_tell(7));
        residency.cannot_tell(7);
        assert!(!residency.may_tell(7));
        assert!(residency.may_tell(8));
        residency.cannot_tell(8);
        assert!(residency.may_tell(7), "asked again, at the cost of one call");
    }
}
