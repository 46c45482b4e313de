//! Numbers as NBD sends them: the most significant byte first.

/// The number at the start of `bytes`, of which there are enough.
pub(super) fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

/// As [`be16`].
pub(super) fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// As [`be16`].
pub(super) fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(bytes)) << 32 | u64::from(be32(&bytes[4..]))
}
