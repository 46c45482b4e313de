//! Which file system does not support reads that fail instead of waiting.
//!
//! `preadv2(RWF_NOWAIT)` answers `EOPNOTSUPP` there, tmpfs among them; or `EPERM` where a container forbids it. A file system decides that
//! for all its files, so what one file has shown spares the next one, opened for a single read,
//! a system call in vain.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// No device has this number.
const NONE: u64 = u64::MAX;

/// The device of an export that was last found unable to tell. One is enough: an export is seldom
/// more than one file system, and forgetting costs a system call.
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
    /// Whether files of this device are worth asking.
    pub(super) fn may_tell(&self, device: u64) -> bool {
        self.mute.load(Relaxed) != device
    }

    /// A file of this device answered `EOPNOTSUPP`.
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
