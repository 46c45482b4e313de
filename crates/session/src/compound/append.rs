//! Appends that take effect exactly once, even if the server is killed meanwhile.
//!
//! The kernel appends, so that programs outside the server, and truncations, are respected. The length
//! of the file is recorded before. After a restart, either the file still has that length (nothing was
//! done), or the bytes at that offset are the beginning of the data (the rest is written there).

use super::once::{Before, Draft, server};
use crate::files::Opened;
use crate::record::{Intent, Kind, Place};
use crate::state::Verdict;
use towline_store::{OpenFile, OpenHow, ReadOutcome, SetAttr};
use towline_wire::Errno;

/// Bytes compared at once.
const COMPARE_BYTES: usize = 256 * 1024;

/// The outcome of an append.
pub(super) enum Appended {
    /// The number of bytes written, and the offset at which they start.
    Now(usize, u64),
    /// It had begun before the restart, and the bytes belong at this offset; see [`write_again`].
    Before(u64),
}

/// Why an append failed.
pub(super) enum Failure {
    /// The operation failed.
    Errno(Errno),
    /// It is unknown whether the append was made before the restart.
    Undecided,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Appends `data`; `draft` records it.
pub(super) fn append(
    opened: &Opened,
    data: &[u8],
    draft: Option<Draft>,
) -> Result<Appended, Failure> {
    let Some(mut draft) = draft.filter(|_| opened.store.survives_restart()) else {
        let (count, at) = opened.file.write(0, data, true)?;
        return Ok(Appended::Now(count, at));
    };
    let place = Place::contents(opened.file.identity());
    let journal = draft.journal.clone();
    let _guard = journal.state().guard(&[place], opened.store.may_hang());
    journal.settle(draft.slot, &place, |intent| {
        if intent.reserved {
            return None;
        }
        Some(if began(opened, intent).ok()?? { Verdict::Reserved } else { Verdict::NotDone })
    });
    if let Before::Intended(intent) = draft.before() {
        let same = intent.kind == Kind::Append && intent.places[0] == place;
        if !same || intent.length != data.len() as u64 {
            return Err(Failure::Undecided);
        }
        match began(opened, &intent)? {
            Some(true) => return Ok(Appended::Before(intent.offset)),
            Some(false) => {}
            None => return Err(Failure::Undecided),
        }
    }
    draft.intend_append(place, opened.file.stat()?.size, data.len() as u64);
    let (count, at) = opened.file.write(0, data, true)?;
    Ok(Appended::Now(count, at))
}

/// Returns whether an append began before the restart. If so, extends the file over its whole range, so
/// that nothing else is appended there. `None`: the file was shortened since.
fn began(opened: &Opened, intent: &Intent) -> Result<Option<bool>, Errno> {
    let size = opened.file.stat()?.size;
    if size <= intent.offset {
        return Ok((size == intent.offset && !intent.reserved).then_some(false));
    }
    let end = intent.offset.checked_add(intent.length).ok_or(Errno::EFBIG)?;
    if size < end {
        let set = SetAttr { size: Some(end), ..SetAttr::default() };
        opened.store.set_attr(&server(), (&*opened.file, b""), true, &set)?;
    }
    Ok(Some(true))
}

/// Writes the missing rest of data whose writing at `offset` began before the restart. Fails if other
/// data is there.
pub(super) fn write_again(opened: &Opened, offset: u64, data: &[u8]) -> Result<(), Failure> {
    let readable = match opened.flags & 3 {
        1 => {
            let how = OpenHow::default();
            opened.store.open(&server(), (&*opened.file, b""), how).map(|(file, _)| file)
        }
        _ => Ok(opened.file.clone()),
    };
    let file = readable.map_err(|_| Failure::Undecided)?;
    let mut same = 0;
    let mut differs = false;
    for (number, part) in data.chunks(COMPARE_BYTES).enumerate() {
        let at = (number * COMPARE_BYTES) as u64;
        let found = read(&*file, offset + at, part.len())?;
        for (found, wanted) in found.iter().zip(part) {
            differs |= found != wanted;
            match (differs, found) {
                (false, _) => same += 1,
                (true, 0) => {}
                (true, _) => return Err(Failure::Undecided),
            }
        }
        differs |= found.len() < part.len();
    }
    let (mut done, end) = (same, data.len());
    while done < end {
        let (count, _) = opened.file.write(offset + done as u64, &data[done..], false)?;
        if count == 0 {
            return Err(Errno::ENOSPC.into());
        }
        done += count;
    }
    Ok(())
}

fn read(file: &dyn OpenFile, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let ReadOutcome::Ready(data) = file.read(offset, length, true)? else {
        return Err(Errno::EAGAIN);
    };
    let mut bytes = vec![0; data.len() as usize];
    let count = data.copy_to(&mut bytes).map_err(|error| Errno::of(&error))?;
    bytes.truncate(count);
    Ok(bytes)
}
