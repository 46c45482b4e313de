//! The part of the export that writing rules use. Each of them checks that its change landed in the right
//! place and that nothing else changed.

use super::pattern::pattern;
use super::read::difference;
use crate::client::{Request, Session};
use crate::rule::Problem;
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

/// Runs a check in every mode on a writable export; skips on a read-only one.
pub(super) fn each_writable(
    target: &Target,
    check: impl Fn(&mut Session) -> Result<String, Problem>,
) -> Result<String, Problem> {
    target.each_mode(|session| {
        if session.has(FLAG_READ_ONLY) {
            skip!("export is read-only");
        }
        check(session)
    })
}

/// Runs a check in every mode on a read-only export; skips on a writable one.
pub(super) fn each_read_only(
    target: &Target,
    check: impl Fn(&mut Session) -> Result<String, Problem>,
) -> Result<String, Problem> {
    target.each_mode(|session| {
        if !session.has(FLAG_READ_ONLY) {
            skip!("export is not read-only");
        }
        check(session)
    })
}

/// Three adjacent parts of the export filled with known data; a rule changes the middle one.
pub(super) struct Area {
    /// Length of each part in bytes.
    pub(super) length: u64,
    content: Vec<u8>,
}

impl Area {
    /// Fills an area, in parts of at most `length` bytes; skips if the export is too small.
    pub(super) fn fill(
        session: &mut Session,
        target: &Target,
        length: u64,
    ) -> Result<Self, Problem> {
        let length = target.share(3, length);
        if length == 0 {
            skip!("export has less than three blocks");
        }
        let content = pattern(target.seed ^ 0xa5ea, 3 * length);
        for (number, part) in content.chunks(length as usize).enumerate() {
            session.succeed(&Request::write(number as u64 * length, part))?;
        }
        Ok(Self { length, content })
    }

    /// Returns the offset of the middle part.
    pub(super) fn middle(&self) -> u64 {
        self.length
    }

    /// Fails unless the outer parts are unchanged and the middle part holds `middle`. `None` skips the
    /// middle part.
    pub(super) fn check(
        &self,
        session: &mut Session,
        middle: Option<&[u8]>,
    ) -> Result<(), Problem> {
        for (number, name) in ["before", "in", "after"].into_iter().enumerate() {
            let offset = number as u64 * self.length;
            let start = offset as usize;
            let expected = match (number, middle) {
                (1, None) => continue,
                (1, Some(middle)) => middle,
                _ => &self.content[start..start + self.length as usize],
            };
            let data = session.read(offset, self.length)?;
            if let Some(place) = difference(&data, expected) {
                return Err(Problem::Fail(format!(
                    "wrong byte at {} ({name} the range concerned)",
                    offset + place as u64
                )));
            }
        }
        Ok(())
    }

    /// Returns the bytes with which the middle part was filled.
    pub(super) fn original_middle(&self) -> &[u8] {
        let length = self.length as usize;
        &self.content[length..2 * length]
    }
}

/// Fails unless the request gets one of `errors`, the connection stays in step and nothing changes.
pub(super) fn refused_unchanged(
    session: &mut Session,
    target: &Target,
    area: &Area,
    request: &Request,
    errors: &[u32],
) -> Result<(), Problem> {
    let reply = session.transact(request)?;
    session.in_step(target)?;
    ensure!(reply.error != 0, "{request}: success");
    area.check(session, Some(area.original_middle())).map_err(|problem| {
        problem.during(format_args!("{request} was refused but did something"))
    })?;
    ensure!(errors.contains(&reply.error), "{request}: {}", reply.outcome());
    Ok(())
}
