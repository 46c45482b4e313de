//! Parts: the hidden files that hold a copy until it is complete, and what they remember.
//!
//! The part of `NAME` is `.NAME.towline-part`. An extended attribute tells which version of the
//! source it comes from and up to where it is complete; only a part that has it and whose source
//! is unchanged is ever continued.

use super::end::End;
use super::handle::Handle;
use super::stamp::Stamp;
use crate::report::Outcome;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use towline_wire::limits::NAME_BYTES_MAX;

/// The extended attribute that holds a part's stamp.
pub(super) const STAMP: &str = "user.towline.part";
const SUFFIX: &str = ".towline-part";

/// Returns the name of a large file's part. It is the same in every run, so that it is found again.
pub(super) fn name(of: &[u8]) -> Vec<u8> {
    with_suffix(of, SUFFIX.as_bytes())
}

/// Returns a name for a part that no other run uses.
pub(super) fn unique_name(of: &[u8], run: u32) -> Vec<u8> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    with_suffix(of, format!(".{run:08x}{count:x}{SUFFIX}").as_bytes())
}

/// Returns true if this may be the name of a part.
fn is_part(name: &[u8]) -> bool {
    name.ends_with(SUFFIX.as_bytes())
}

/// Returns true for a part with the unique name of another run, of one of these files. That run was most
/// likely killed, since its part is still there.
pub(super) fn is_of_another_run<'a>(
    part: &[u8],
    run: u32,
    mut files: impl Iterator<Item = &'a [u8]>,
) -> bool {
    let Some(rest) = part.strip_suffix(SUFFIX.as_bytes()) else { return false };
    let Some(dot) = rest.iter().rposition(|b| *b == b'.') else { return false };
    let number = &rest[dot + 1..];
    number.len() > 8
        && number.iter().all(u8::is_ascii_hexdigit)
        && !number.starts_with(format!("{run:08x}").as_bytes())
        && files.any(|file| with_suffix(file, &part[dot..]) == part)
}

/// The copies of this command that have names of parts, because their sources have. They are never taken for parts.
#[derive(Default)]
pub(super) struct NotParts(Mutex<HashSet<String>>);

impl NotParts {
    /// Notes a place that a copy takes, if it has the name of a part.
    pub(super) fn note(&self, place: &End) {
        if is_part(place.name()) {
            self.locked().insert(place.to_string());
        }
    }

    /// Returns true if a copy takes this place.
    pub(super) fn has(&self, place: &End) -> bool {
        self.locked().contains(&place.to_string())
    }

    fn locked(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn with_suffix(of: &[u8], suffix: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(NAME_BYTES_MAX);
    name.push(b'.');
    if of.len() + 1 + suffix.len() <= NAME_BYTES_MAX {
        name.extend_from_slice(of);
    } else {
        // A checksum tells apart names that are equal once cut off.
        let sum = format!("~{:08x}", crc32c::crc32c(of));
        name.extend_from_slice(&of[..NAME_BYTES_MAX - 1 - suffix.len() - sum.len()]);
        name.extend_from_slice(sum.as_bytes());
    }
    name.extend_from_slice(suffix);
    name
}

/// Notes that the part is complete up to `done`, and stays so when its machine crashes. A store without
/// extended attributes keeps no such note, and the part is then never continued.
///
/// # Errors
/// What was written cannot be kept.
pub(super) fn note(stamp: &Stamp, part: &Handle, done: u64) -> Outcome<()> {
    part.sync_data()?;
    if let Err(failure) = part.set_xattr(STAMP, stamp.text(done).as_bytes()) {
        log::debug!("cannot mark the partial copy for --resume: {failure}");
    }
    Ok(())
}

/// Returns up to where the part is complete, if it belongs to the same version of the source.
pub(super) fn done(stamp: &Stamp, part: &Handle) -> Option<u64> {
    let done = stamp.read(&part.xattr(STAMP)?)?;
    // A part that lost data in a crash is shorter than its note says.
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

    #[test]
    fn parts_of_other_runs_are_known() {
        let files = || [&b"a"[..], &[b'x'; 255]].into_iter();
        for file in files() {
            assert!(is_of_another_run(&unique_name(file, 7), 8, files()));
            assert!(!is_of_another_run(&unique_name(file, 7), 7, files()), "our own");
            assert!(!is_of_another_run(&name(file), 8, files()), "these can be continued");
        }
        let other = unique_name(b"b", 7);
        for name in [&b"a"[..], b".a.cafe.towline-part", b".towline-part", b"", &other] {
            assert!(!is_of_another_run(name, 8, files()), "{}", name.escape_ascii());
        }
    }
}
