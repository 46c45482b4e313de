//! A set that all processes of the run add to: it never forgets a key, and may take others for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// One bit for all keys with the same place.
#[repr(transparent)]
pub(crate) struct Set<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Set<WORDS> {
    pub(crate) fn add(&self, key: &[u8]) {
        let (word, bit) = Self::place_of(key);
        self.0[word].fetch_or(bit, Ordering::AcqRel);
    }

    /// Returns false if the key was not added.
    pub(crate) fn may_have(&self, key: &[u8]) -> bool {
        let (word, bit) = Self::place_of(key);
        self.0[word].load(Ordering::Acquire) & bit != 0
    }

    /// Returns the word and bit of a key (FNV-1a).
    fn place_of(key: &[u8]) -> (usize, u64) {
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = key.iter().fold(0xcbf2_9ce4_8422_2325, mix) >> 32;
        (hash as usize / 64 % WORDS, 1 << (hash % 64))
    }
}
