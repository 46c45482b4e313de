//! Copies a short file: in one round trip if the request that creates it has room for all of it.

use super::attributes::{self, Parent};
use super::end::{End, Status};
use super::file::{Existing, Files, looked_at};
use super::part;
use crate::report::{Failure, Outcome};
use std::sync::atomic::Ordering;
use towline_client::{Attr, Errno};
use towline_wire::limits::INLINE_BYTES_MAX;

/// Errors that may be about what is only part of a request for a whole file: giving it an owner, or renaming it only
/// if that replaces nothing, which not every file system can do.
const OF_WHOLE: [Errno; 3] = [Errno::EPERM, Errno::EINVAL, Errno::EOPNOTSUPP];

impl Files {
    /// Writes a file in one piece to a part, which then gets its name.
    pub(super) fn whole(
        &self,
        source: &End,
        target: &End,
        status: &Status,
        mut existing: Existing,
        data: &[u8],
        parent: &Parent,
    ) -> Outcome<()> {
        let attr = &status.attr;
        if self.met.load(Ordering::Relaxed) {
            existing = self.look(target, existing)?;
        }
        let is_new = !matches!(existing, Existing::There(_));
        if is_new && self.fits_request(source, target, attr, data, parent)? {
            match self.in_one_request(target, attr, data) {
                Err(failure) if failure.is(Errno::EEXIST) => existing = Existing::Unknown,
                Err(failure) if OF_WHOLE.iter().any(|errno| failure.is(*errno)) => {
                    self.refused.store(true, Ordering::Relaxed);
                }
                result => return result.map_err(|failure| failure.about(target)),
            }
        }
        let existing = self.look(target, existing)?;
        let legacy = self.legacy(source, target, status, &existing, parent)?;
        let part = self.own_part(target)?;
        let mode = self.wanted.mode_before(attr, legacy.replaced.as_ref());
        let written = part
            .write_new(mode, data)
            .and_then(|()| self.finish(source, &part, attr, &legacy, Some(data)))
            .and_then(|()| part.rename(target));
        written.map_err(|failure| without_part(&part, failure).about(target))
    }

    /// Looks at the target, unless that was done before, and notes whether something was there.
    fn look(&self, target: &End, existing: Existing) -> Outcome<Existing> {
        let existing = looked_at(target, existing)?;
        self.met.store(matches!(existing, Existing::There(_)), Ordering::Relaxed);
        Ok(existing)
    }

    /// Returns true if one request can make the file with everything that it is to have.
    fn fits_request(
        &self,
        source: &End,
        target: &End,
        attr: &Attr,
        data: &[u8],
        parent: &Parent,
    ) -> Outcome<bool> {
        let refused = self.refused.load(Ordering::Relaxed);
        if data.len() > INLINE_BYTES_MAX || target.is_local() || self.verify || refused {
            return Ok(false);
        }
        if self.wanted.xattr && !attributes::xattrs(source, attr)?.is_empty() {
            return Ok(false);
        }
        let inherits = || parent.hands_down(target);
        Ok(self.wanted.access_list((source, attr), None, inherits)?.is_none())
    }

    /// Makes a file that must not exist. The data is in the request, too: if the server is killed, at most the part
    /// is left.
    fn in_one_request(&self, target: &End, attr: &Attr, data: &[u8]) -> Outcome<()> {
        let part = self.own_part(target)?;
        let mode = self.wanted.mode_before(attr, None);
        let written = target.write_through(&part, mode, data, &self.wanted.rest(attr, None));
        written.map_err(|failure| without_part(&part, failure))
    }

    /// Returns a part for this file that nobody else uses.
    pub(super) fn own_part(&self, target: &End) -> Outcome<End> {
        target.sibling(&part::unique_name(target.name(), self.run))
    }
}

/// Removes a part after a failure.
fn without_part(part: &End, failure: Failure) -> Failure {
    // The error of the copy matters, not that of the clean-up.
    let _ = part.unlink();
    failure
}
