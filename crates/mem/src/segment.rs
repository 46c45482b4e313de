//! The kinds of memory that a message can consist of.

use crate::{PoolBuffer, SharedMemory};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};

/// A value that a slice keeps alive. As long as it lives, the owner of the memory does not reuse the range.
pub type Guard = Arc<dyn Any + Send + Sync>;

/// Returns 64 KiB of zeros, shared by all callers. Holes of files are sent from them.
pub fn zeros() -> &'static Arc<Vec<u8>> {
    const BYTES: usize = 64 * 1024;
    static ZEROS: LazyLock<Arc<Vec<u8>>> = LazyLock::new(|| Arc::new(vec![0; BYTES]));
    &ZEROS
}

/// A piece of memory of a stated kind. Cloning shares it.
#[derive(Clone)]
#[non_exhaustive]
pub enum Segment {
    /// Ordinary memory of this process.
    Host(Arc<Vec<u8>>),
    /// A buffer of a bounded pool, returned to it with the last slice.
    Registered(Arc<PoolBuffer>),
    /// A range of a memfd that is mapped here and perhaps elsewhere. It can be copied from the mapping
    /// or sent from the descriptor. The guard keeps the range from being reused.
    Shared(Arc<SharedMemory>, Option<Guard>),
    /// Pages of a file, sent with `sendfile(2)`. Offsets are file offsets.
    File(Arc<OwnedFd>),
}

impl Segment {
    /// Returns the name of the kind, for counters and messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Host(_) => "host",
            Self::Registered(_) => "registered",
            Self::Shared(..) => "shared",
            Self::File(_) => "file",
        }
    }

    /// True when the bytes are zeros that stand for a hole: those of [`zeros`].
    #[must_use]
    pub fn is_hole(&self) -> bool {
        matches!(self, Self::Host(bytes) if Arc::ptr_eq(bytes, zeros()))
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(a), Self::Host(b)) => Arc::ptr_eq(a, b),
            (Self::Registered(a), Self::Registered(b)) => Arc::ptr_eq(a, b),
            (Self::Shared(a, None), Self::Shared(b, None)) => Arc::ptr_eq(a, b),
            (Self::File(a), Self::File(b)) => Arc::ptr_eq(a, b),
            // Each guarded range keeps its own guard.
            _ => false,
        }
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind())
    }
}
