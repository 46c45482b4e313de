//! Private decoders of this crate, for the fuzzers.

use crate::kept::hold;

/// Decodes a packet between a server and the holder of its files; an accepted packet must be its only encoding.
pub fn held(bytes: &[u8]) {
    if let Some((kind, entries)) = hold::parse(bytes) {
        assert_eq!(hold::message(kind, &entries), bytes);
    }
}
