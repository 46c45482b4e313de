//! Pool buffers registered with the ring: their pages are pinned once instead of for each transfer. A
//! buffer is registered when it is first used, so that idle servers pin nothing.

use io_uring::IoUring;
use std::collections::HashMap;
use towline_mem::PoolBuffer;

/// Most buffers of one ring. The table of this size is created with the first one. The kernel's own
/// limit is 16384.
const PLACES: u16 = 8192;

/// The registered buffers and their places in the ring's table.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    /// Places by the number of the memory, which is unique.
    places: HashMap<u64, u16>,
    state: State,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Untried,
    Works,
    /// The kernel refused the table, or pinning more memory.
    Closed,
}

impl Registered {
    /// Returns the place of a buffer in the ring's table, and registers it if needed. `None` if it
    /// cannot be registered; then it is used like any other memory.
    pub(crate) fn place(&mut self, ring: &IoUring, buffer: &mut PoolBuffer) -> Option<u16> {
        if let Some(place) = self.places.get(&buffer.number()) {
            return Some(*place);
        }
        if self.state == State::Untried {
            let made = ring.submitter().register_buffers_sparse(PLACES.into());
            self.state = if made.is_ok() { State::Works } else { State::Closed };
        }
        let place = u16::try_from(self.places.len()).ok().filter(|place| *place < PLACES)?;
        if self.state == State::Closed {
            return None;
        }
        let bytes = buffer.bytes_mut();
        let memory = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the kernel pins the pages now and uses them only for operations that name this place.
        // Those are pushed with a buffer of the same number, whose memory stays the same as long as its
        // pool lives, and they own that buffer until they are done.
        let done = unsafe {
            ring.submitter().register_buffers_update(place.into(), &[memory], Some(&[0]))
        };
        if done.is_err() {
            // Most likely RLIMIT_MEMLOCK; buffers registered before stay registered.
            self.state = State::Closed;
            return None;
        }
        self.places.insert(buffer.number(), place);
        Some(place)
    }

    /// Returns the number of registered buffers.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}
