//! Buffers for listings, used again: to clear a new one each time costs as much as a directory of a
//! hundred files.

use crate::names::LIST_BYTES;
use parking_lot::Mutex;

/// Buffers kept at most: 2 MiB.
const KEPT: usize = 16;

#[derive(Default)]
pub(crate) struct Listings(Mutex<Vec<Vec<u8>>>);

impl Listings {
    /// A buffer of [`LIST_BYTES`] with the bytes of some earlier listing, or zeros.
    pub(crate) fn take(&self) -> Vec<u8> {
        let kept = self.0.lock().pop();
        kept.unwrap_or_else(|| vec![0; LIST_BYTES])
    }

    pub(crate) fn give_back(&self, listing: Vec<u8>) {
        let mut kept = self.0.lock();
        if kept.len() < KEPT && listing.len() == LIST_BYTES {
            kept.push(listing);
        }
    }
}
