//! Per-thread cache of page-sized buffers.
//!
//! The system's allocator takes hundreds of instructions to allocate a buffer of a page, and every small
//! read needs one. So a thread reuses the buffers that it has let go of.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Only buffers of this capacity are kept.
const BYTES: usize = 4096;
/// Most buffers kept per thread: as many as a core fills before it sends them.
const KEPT_MAX: usize = 16;

thread_local! {
    static KEPT: RefCell<Vec<Arc<Vec<u8>>>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer that nothing else refers to.
#[derive(Debug)]
pub struct Fresh(Arc<Vec<u8>>);

impl Fresh {
    /// Returns a buffer with room for `bytes` bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        let kept = if bytes == BYTES { KEPT.with_borrow_mut(Vec::pop) } else { None };
        Self(kept.unwrap_or_else(|| Arc::new(Vec::with_capacity(bytes))))
    }

    /// Makes the buffer shareable, with its contents.
    #[must_use]
    pub fn share(self) -> Arc<Vec<u8>> {
        self.0
    }
}

impl Deref for Fresh {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Fresh {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        Arc::get_mut(&mut self.0).expect("nobody else has it")
    }
}

/// Keeps a buffer for reuse if nothing else refers to it and it has the right capacity.
pub(crate) fn keep(mut buffer: Arc<Vec<u8>>) {
    if let Some(bytes) = Arc::get_mut(&mut buffer)
        && bytes.capacity() == BYTES
    {
        bytes.clear();
        KEPT.with_borrow_mut(|kept| {
            if kept.len() < KEPT_MAX {
                kept.push(buffer);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Aggregate;

    #[test]
    fn buffers_come_again_empty_unless_somebody_has_them() {
        let mut buffer = Fresh::with_capacity(BYTES);
        buffer.extend_from_slice(b"old");
        let at = buffer.as_ptr();
        let shared = buffer.share();
        let (first, second) =
            (Aggregate::from_shared(shared.clone()), Aggregate::from_shared(shared));
        first.let_go();
        let other = Fresh::with_capacity(BYTES);
        assert_ne!(other.as_ptr(), at, "somebody had it");
        second.let_go();
        let again = Fresh::with_capacity(BYTES);
        assert_eq!((again.as_ptr(), again.len()), (at, 0));
        // Buffers of another size, or beyond the limit, are not kept.
        Aggregate::from_vec(vec![0; 9000]).let_go();
        assert_eq!(KEPT.with_borrow(Vec::len), 0);
        let many: Vec<_> = (0..KEPT_MAX + 5).map(|_| Fresh::with_capacity(BYTES)).collect();
        many.into_iter().for_each(|one| keep(one.share()));
        assert_eq!(KEPT.with_borrow(Vec::len), KEPT_MAX);
    }
}
