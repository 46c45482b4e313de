//! Buffers of requests under way: owned, or lent by a caller that waits.
#![allow(unsafe_code)]

/// Memory of a request, at a fixed address until the request is over.
pub(crate) enum Buffer {
    /// Moved into the request.
    Owned(Vec<u8>),
    /// Lent to be sent from.
    Source(*const u8, usize),
    /// Lent to be received into.
    Target(*mut u8, usize),
}

// SAFETY: the lender waits until the request is over (see the constructors), whichever thread moves
// the bytes meanwhile, and only one thread does: sending is under the lock of the send queue,
// receiving is done by the one leader.
unsafe impl Send for Buffer {}

impl Buffer {
    /// An empty buffer.
    pub(crate) fn none() -> Self {
        Self::Owned(Vec::new())
    }

    /// # Safety
    /// The caller must not return, nor let `bytes` go, before the request is over.
    pub(crate) unsafe fn source(bytes: &[u8]) -> Self {
        Self::Source(bytes.as_ptr(), bytes.len())
    }

    /// # Safety
    /// The caller must not return, nor use `bytes`, before the request is over.
    pub(crate) unsafe fn target(bytes: &mut [u8]) -> Self {
        Self::Target(bytes.as_mut_ptr(), bytes.len())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Owned(bytes) => bytes.len(),
            Self::Source(_, length) | Self::Target(_, length) => *length,
        }
    }

    /// The bytes. The pointer is valid while the request lives, which the caller must ensure:
    /// requests are completed only between uses of their buffers.
    pub(crate) fn bytes(&self) -> *const [u8] {
        match self {
            Self::Owned(bytes) => &raw const bytes[..],
            Self::Source(address, length) => std::ptr::slice_from_raw_parts(*address, *length),
            Self::Target(address, length) => std::ptr::slice_from_raw_parts(*address, *length),
        }
    }

    /// A part to receive into; `None` beyond the end or for a buffer that can only be sent from.
    pub(crate) fn part_mut(&mut self, from: usize, length: usize) -> Option<*mut [u8]> {
        if from.checked_add(length)? > self.len() {
            return None;
        }
        match self {
            Self::Owned(bytes) => Some(&raw mut bytes[from..from + length]),
            Self::Target(address, _) => {
                Some(std::ptr::slice_from_raw_parts_mut(address.wrapping_add(from), length))
            }
            Self::Source(..) => None,
        }
    }

    /// Returns owned memory; empty for lent memory.
    pub(crate) fn into_owned(self) -> Vec<u8> {
        match self {
            Self::Owned(bytes) => bytes,
            _ => Vec::new(),
        }
    }
}

/// Reads through a pointer of [`Buffer::bytes`] while the request is known to be alive.
pub(crate) fn shared<'a>(bytes: *const [u8]) -> &'a [u8] {
    // SAFETY: as `Buffer::bytes` says, a request whose parts wait to be sent is not over. Only the
    // sending thread reads parts, with the queue locked, and only those of the queue's lane. The
    // lane is replaced or ended with the queue locked, and then earlier parts no longer count.
    // While a request takes its slot, its source exists.
    unsafe { &*bytes }
}

/// Writes through a pointer of [`Buffer::part_mut`] while the request is known to be alive.
pub(crate) fn exclusive<'a>(bytes: *mut [u8]) -> &'a mut [u8] {
    // SAFETY: as `shared`; only the leader receives, and into one place at a time.
    unsafe { &mut *bytes }
}
