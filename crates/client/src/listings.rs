//! Buffers for listings, kept for reuse: clearing a new one each time would cost as much as listing
//! a directory of a hundred files.

use crate::names::LIST_BYTES;
use parking_lot::Mutex;

/// Most buffers kept: 2 MiB in total.
const KEPT: usize = 16;

#[derive(Default)]
pub(crate) struct Listings(Mutex<Vec<Vec<u8>>>);

impl Listings {
    /// Returns a buffer of [`LIST_BYTES`] that holds the bytes of an earlier listing, or zeros.
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
