//! Parts: the hidden files that hold a copy until it is complete, and what they remember.
//!
//! The part of `NAME` is `.NAME.towline-part`. An extended attribute tells which version of the
//! source it comes from and up to where it is complete; only a part that has it and whose source
//! is unchanged is ever continued.

use super::handle::Handle;
use super::stamp::Stamp;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_wire::limits::NAME_BYTES_MAX;

/// The extended attribute of a part.
pub(super) const STAMP: &str = "user.towline.part";
const SUFFIX: &str = ".towline-part";

/// Name of the part of a large file, the same in every run so that it is found again.
pub(super) fn name(of: &[u8]) -> Vec<u8> {
    with_suffix(of, SUFFIX)
}

/// Name of a part that this run alone uses, for a file written in one piece.
pub(super) fn unique_name(of: &[u8], run: u32) -> Vec<u8> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    with_suffix(of, &format!(".{run:08x}{count:x}{SUFFIX}"))
}

fn with_suffix(of: &[u8], suffix: &str) -> Vec<u8> {
    let mut name = Vec::with_capacity(NAME_BYTES_MAX);
    name.push(b'.');
    if of.len() + 1 + suffix.len() <= NAME_BYTES_MAX {
        name.extend_from_slice(of);
    } else {
        // A checksum keeps apart what the cut makes equal.
        let sum = format!("~{:08x}", crc32c::crc32c(of));
        name.extend_from_slice(&of[..NAME_BYTES_MAX - 1 - suffix.len() - sum.len()]);
        name.extend_from_slice(sum.as_bytes());
    }
    name.extend_from_slice(suffix.as_bytes());
    name
}

/// Notes that the part is complete up to `done`. A store without extended attributes keeps no such
/// note, and the part is then never continued.
pub(super) fn note(stamp: &Stamp, part: &Handle, done: u64) {
    if let Err(failure) = part.set_xattr(STAMP, stamp.text(done).as_bytes()) {
        log::debug!("part is not marked for being continued: {failure}");
    }
}

/// Up to where the part is complete, if it is one of the same source.
pub(super) fn done(stamp: &Stamp, part: &Handle) -> Option<u64> {
    let done = stamp.read(&part.xattr(STAMP)?)?;
    // A part that lost data after a crash is shorter than its note says.
    part.attr().ok().filter(|attr| attr.size >= done).map(|_| done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_are_hidden_and_never_too_long() {
        assert_eq!(name(b"a"), b".a.towline-part");
        let (long, other) = ([b'x'; 255], [&[b'x'; 254][..], b"y"].concat());
        assert_eq!(name(&long).len(), 255);
        assert_ne!(name(&long), name(&other));
        assert_ne!(unique_name(b"a", 1), unique_name(b"a", 1));
        assert!(unique_name(&long, u32::MAX).len() <= 255);
    }
}
