//! Reading the memory of a mapped file again, after others may have changed the file.

use super::{
    AT_ONCE, Access, CHANGING_AT, IS_LOCKED_AT, KEEPS_AT, ORIGINALS_AT, PAGES_AT, bytes, changed,
    is_set, milliseconds, runs,
};
use std::ops::Range;
use towline_mem::page_bytes;

/// How long a request of a killed process may take to reach the file, in milliseconds.
const LATE_MS: u64 = 2000;

/// What to do after the remote file was read again, byte by byte.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Renewal {
    /// Changed in the file: belongs into the pages and the originals, also if it differs from both. A process
    /// that was killed may have written back what it had stored, or read the file, without noting that in the
    /// originals; what others stored under later locks counts.
    pub new: Vec<Range<usize>>,
    /// Stored to, and the same in the file: belongs into the originals.
    pub same: Vec<Range<usize>>,
}

impl Renewal {
    /// Compares what the file holds (`new`) with the memory (`now`) and its originals (`was`), all equally long.
    ///
    /// What was stored and is not in the file yet stays. Of bytes that were changed in both, those in the file
    /// count if it is locked by the programs that store to it (`single`): nobody else can have changed it since.
    /// Otherwise those in the memory count. Bytes that have not changed are left out: a process may store to them
    /// at this moment.
    #[must_use]
    pub fn of(new: &[u8], now: &[u8], was: &[u8], single: bool) -> Self {
        let mut renewal = Self::default();
        let is_new =
            |at: usize| new[at] != was[at] && new[at] != now[at] && (single || now[at] == was[at]);
        for pages in changed(new, now) {
            renewal.new.extend(bytes(pages, is_new));
        }
        for pages in changed(now, was) {
            renewal.same.extend(bytes(pages, |at| now[at] != was[at] && new[at] == now[at]));
        }
        renewal
    }
}

/// Reads known pages from `first` on again by `read`, which fills memory from an offset of the remote file on and returns
/// how many bytes there were. Stores that are not written back yet stay. Returns whether that has changed the memory.
/// The caller holds the file's [`Turn`](super::Turn).
///
/// # Errors
/// Those of both files.
pub fn renew<E>(
    memory: &impl Access<Error = E>,
    first: usize,
    known: &[u8],
    read: impl Fn(&mut [u8], usize) -> Result<usize, E>,
) -> Result<bool, E> {
    let keeps = is_set(memory, KEEPS_AT)?;
    let single = is_set(memory, IS_LOCKED_AT)?;
    let room = AT_ONCE.min(known.len()) * page_bytes();
    let (mut new, mut now, mut was) = (vec![0; room], vec![0; room], vec![0; room]);
    let mut has_changed = false;
    for run in runs(known, |known| known != 0) {
        let (length, at) = (run.len() * page_bytes(), (first + run.start) * page_bytes());
        let (new, now, was) = (&mut new[..length], &mut now[..length], &mut was[..length]);
        let count = read(new, at)?;
        new[count..].fill(0);
        let (pages, originals) = (PAGES_AT + at as u64, ORIGINALS_AT + at as u64);
        memory.get(pages, now)?;
        if !keeps {
            if new != now {
                memory.put(pages, new)?;
                has_changed = true;
            }
            continue;
        }
        memory.get(originals, was)?;
        let Renewal { new: changed, same } = Renewal::of(new, now, was, single);
        has_changed |= !changed.is_empty();
        for part in &changed {
            memory.put(pages + part.start as u64, &new[part.clone()])?;
        }
        for part in changed.into_iter().chain(same) {
            memory.put(originals + part.start as u64, &new[part])?;
        }
    }
    Ok(has_changed)
}

/// The bytes of the remote file that a call is changing, or was when its process was killed.
#[derive(Clone, Copy, Default)]
pub(super) struct Changing {
    start: u64,
    /// The same as `start` if there are none.
    end: u64,
    /// When they were first read again, by [`milliseconds`]; 0 if they were not.
    renewed: u64,
}

impl Changing {
    pub(super) fn of<E>(memory: &impl Access<Error = E>) -> Result<Self, E> {
        let mut numbers = [[0; 8]; 3];
        memory.get(CHANGING_AT, numbers.as_flattened_mut())?;
        let [start, end, renewed] = numbers.map(u64::from_ne_bytes);
        Ok(Self { start, end, renewed })
    }

    pub(super) fn put<E>(self, memory: &impl Access<Error = E>) -> Result<(), E> {
        let Self { start, end, renewed } = self;
        memory.put(CHANGING_AT, [start, end, renewed].map(u64::to_ne_bytes).as_flattened())
    }

    /// Returns what it is while another call changes bytes, too.
    pub(super) fn and(self, within: Range<u64>) -> Self {
        let Range { start, end } = within;
        match self.is_empty() {
            true => Self { start, end, renewed: 0 },
            false => Self { start: self.start.min(start), end: self.end.max(end), renewed: 0 },
        }
    }

    fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

/// Reads again by `read`, as of [`renew`], what a process was [`changing`](super::changing) that was killed meanwhile, of
/// the `pages` of the memory; also the next time for a while, as its last request may still be on its way. The caller holds the
/// file's [`Turn`](super::Turn).
///
/// # Errors
/// Those of both files.
pub fn renew_interrupted<E>(
    memory: &impl Access<Error = E>,
    pages: impl FnOnce() -> Result<usize, E>,
    read: impl Fn(&mut [u8], usize) -> Result<usize, E>,
) -> Result<(), E> {
    let changing = Changing::of(memory)?;
    if changing.is_empty() {
        return Ok(());
    }
    let (page, pages) = (page_bytes() as u64, pages()? as u64);
    let [first, end] = [changing.start / page, changing.end.div_ceil(page)].map(|at| at.min(pages));
    let mut known = vec![0; (end - first) as usize];
    memory.get(first, &mut known)?;
    let now = milliseconds();
    renew(memory, first as usize, &known, read)?;
    match changing.renewed {
        0 => Changing { renewed: now, ..changing }.put(memory),
        renewed if now.abs_diff(renewed) > LATE_MS => Changing::default().put(memory),
        _ => Ok(()),
    }
}
