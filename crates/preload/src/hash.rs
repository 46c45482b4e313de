//! Hashes of names, for tables of this process.

/// Returns a hash of a text.
pub(crate) fn hash(seed: u64, text: &[u8]) -> u32 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(SPREAD);
    let (words, rest) = text.as_chunks();
    let hash = words.iter().fold(seed, |hash, word| mix(hash, u64::from_ne_bytes(*word)));
    let rest = rest.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    (mix(hash, rest) >> 32) as u32
}
