//! Buffers of requests under way: owned, or lent by a caller who waits.
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

// SAFETY: the lender waits until the request is over (see the constructors), whichever thread
// moves the bytes meanwhile, and only one does: sending is under the lock of the send queue,
// receiving is done by the one leader.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Nothing.
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

    /// The bytes, for as long as the request lives; the caller must hold it alive, which every
    /// user does by completing requests only between uses of their buffers.
    pub(crate) fn bytes(&self) -> *const [u8] {
        match self {
            Self::Owned(bytes) => &raw const bytes[..],
            Self::Source(address, length) => std::ptr::slice_from_raw_parts(*address, *length),
            Self::Target(address, length) => std::ptr::slice_from_raw_parts(*address, *length),
        }
    }

    /// A part to receive into; `None` beyond the end or when it is only to be sent from.
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

    /// Gives owned memory back.
    pub(crate) fn into_owned(self) -> Vec<u8> {
        match self {
            Self::Owned(bytes) => bytes,
            _ => Vec::new(),
        }
    }
}

/// Reads through a pointer of [`Buffer::bytes`] while the request is known to be alive.
pub(crate) fn shared<'a>(bytes: *const [u8]) -> &'a [u8] {
    // SAFETY: see `Buffer::bytes`: a request whose parts wait to be sent is not over. Parts are looked at with the queue locked, by
    // who sends, and only those of its lane; with another lane, or none any more, which comes with the queue locked, they no longer
    // count. While a request takes its slot, its source is there.
    unsafe { &*bytes }
}

/// Writes through a pointer of [`Buffer::part_mut`] while the request is known to be alive.
pub(crate) fn exclusive<'a>(bytes: *mut [u8]) -> &'a mut [u8] {
    // SAFETY: as `shared`; only the leader receives, and into one place at a time.
    unsafe { &mut *bytes }
}
