//! Sending memory without copying it: what the kernel is shown, and what it tells.

use std::io;
use std::mem::MaybeUninit;
use towline_mem::{Aggregate, Guard, Segment};

/// Most slices of one send.
const SLICES_MAX: usize = 64;

/// What became of a send.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // whoever sends has to handle each
pub enum Sent {
    /// The socket took so many bytes, or refused with `WouldBlock` or an error.
    Taken {
        /// What it was sent under.
        token: u64,
        /// Bytes.
        result: io::Result<usize>,
        /// The memory is free again already: no [`Sent::Released`] follows.
        released: bool,
    },
    /// The network is done with the memory.
    Released {
        /// What it was sent under.
        token: u64,
        /// The kernel had copied the bytes after all, as it does within a machine.
        copied: bool,
    },
}

/// Bytes to be sent, with their list of addresses, in one place until the kernel lets go of them.
pub(crate) struct Gathered {
    message: Box<libc::msghdr>,
    _vectors: Box<[libc::iovec]>,
    _bytes: Aggregate,
    _keeps_open: Guard,
}

impl Gathered {
    /// The first slices of `bytes`, as many as fit into one send.
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
        // SAFETY: all zero is a valid msghdr: no name, no control data.
        let mut message: Box<libc::msghdr> =
            Box::new(unsafe { MaybeUninit::zeroed().assume_init() });
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len() as _;
        Ok(Self { message, _vectors: vectors, _bytes: bytes, _keeps_open: keeps_open })
    }

    /// For the kernel; valid as long as this lives, wherever it is moved.
    pub(crate) fn message(&self) -> *const libc::msghdr {
        &raw const *self.message
    }
}
