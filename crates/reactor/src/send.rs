//! Sending memory without copying it: what is passed to the kernel, and what it reports.

use std::io;
use std::mem::MaybeUninit;
use towline_mem::{Aggregate, Guard, Segment};

/// Most slices of one send.
const SLICES_MAX: usize = 64;

/// A report about a send.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // senders have to handle each variant
pub enum Sent {
    /// The socket took some bytes, or refused with `WouldBlock` or another error.
    Taken {
        /// The token that it was sent with.
        token: u64,
        /// Number of bytes taken.
        result: io::Result<usize>,
        /// The memory is already free: no [`Sent::Released`] follows.
        released: bool,
    },
    /// The network no longer needs the memory.
    Released {
        /// The token that it was sent with.
        token: u64,
        /// The kernel copied the bytes after all, as it does within a machine.
        copied: bool,
    },
}

/// Bytes to send, and the list of their addresses, which stay in place until the kernel releases them.
pub(crate) struct Gathered {
    message: Box<libc::msghdr>,
    _vectors: Box<[libc::iovec]>,
    _bytes: Aggregate,
    _keeps_open: Guard,
}

impl Gathered {
    /// Gathers the first slices of `bytes`, as many as fit into one send.
    ///
    /// # Errors
    /// `Unsupported`: a slice is not in memory.
    pub(crate) fn new(bytes: Aggregate, keeps_open: Guard) -> io::Result<Self> {
        let mut vectors = Vec::with_capacity(bytes.slices().len().min(SLICES_MAX));
        for slice in bytes.slices().take(SLICES_MAX) {
            let (from, length) = (slice.offset as usize, slice.length as usize);
            let address = match &slice.segment {
                Segment::Host(memory) => memory[from..from + length].as_ptr(),
                Segment::Registered(buffer) => buffer.bytes()[from..from + length].as_ptr(),
                Segment::Shared(memory, _) => memory.address(from, length),
                _ => return Err(io::ErrorKind::Unsupported.into()),
            };
            vectors.push(libc::iovec { iov_base: address.cast_mut().cast(), iov_len: length });
        }
        let mut vectors = vectors.into_boxed_slice();
        // SAFETY: an all-zero msghdr is valid: no name, no control data.
        let mut message: Box<libc::msghdr> =
            Box::new(unsafe { MaybeUninit::zeroed().assume_init() });
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len() as _;
        Ok(Self { message, _vectors: vectors, _bytes: bytes, _keeps_open: keeps_open })
    }

    /// Returns the message for the kernel; valid as long as `self` lives, even if `self` is moved.
    pub(crate) fn message(&self) -> *const libc::msghdr {
        &raw const *self.message
    }
}
