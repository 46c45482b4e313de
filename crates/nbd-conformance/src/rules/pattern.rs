//! Pseudo-random data and numbers from a seed.

/// A small random number generator (xorshift64*): the same seed gives the same test.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `limit`, which must not be 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Returns bytes that differ for each `tag` and position, so that misplaced data shows.
pub(super) fn pattern(tag: u64, length: u64) -> Vec<u8> {
    let mut random = Random::new(tag);
    let words = (0..length.div_ceil(8)).flat_map(|_| random.next().to_be_bytes());
    words.take(usize::try_from(length).unwrap_or(usize::MAX)).collect()
}

/// Returns true if all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
