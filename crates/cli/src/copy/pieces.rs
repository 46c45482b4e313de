//! Copies a large file in pieces, several at once, and leaves out holes.

use super::handle::Handle;
use super::part;
use super::stamp::Stamp;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::report::{Failure, Outcome};
use crate::workers::together;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use towline_client::{Errno, File};
use towline_wire::limits::TRANSFER_BYTES_MAX;

/// Pieces of one file under way at once: one is read while another is sent.
const LANES: u64 = 4;
/// Shorter pieces cost more in round trips than they gain by overlapping.
const PIECE_BYTES_MIN: u64 = 1024 * 1024;
/// How often the part notes its progress, from which a killed copy can go on: after this many bytes, but no
/// sooner than after [`STAMP_PAUSE`], because the noted bytes must be on the disk.
const STAMP_BYTES: u64 = 64 * 1024 * 1024;
const STAMP_PAUSE: Duration = Duration::from_secs(5);

/// Walks through the data of a file in pieces and leaves out holes.
pub(super) struct Extents {
    at: u64,
    data_end: u64,
    size: u64,
    piece: u64,
    sparse: bool,
}

impl Extents {
    /// Starts at `from` in a file of `size` bytes. Only a sparse file is asked for holes.
    pub(super) fn new(from: u64, size: u64, piece: u64, sparse: bool) -> Self {
        Self { at: from, data_end: if sparse { from } else { size }, size, piece, sparse }
    }

    /// Returns start and end of the next piece. `data` and `hole` find the next data or hole at or after an
    /// offset, like `lseek(2)`.
    pub(super) fn next(
        &mut self,
        data: impl FnOnce(u64) -> Outcome<Option<u64>>,
        hole: impl FnOnce(u64) -> Outcome<Option<u64>>,
    ) -> Outcome<Option<(u64, u64)>> {
        if self.at >= self.size {
            return Ok(None);
        }
        if self.sparse && self.at >= self.data_end {
            match data(self.at)? {
                Some(start) if start < self.size => self.at = start.max(self.at),
                _ => {
                    self.at = self.size;
                    return Ok(None);
                }
            }
            // A hole before this offset means that the file is changing; then everything counts as data.
            let end = hole(self.at)?.filter(|end| *end > self.at);
            self.data_end = end.unwrap_or(self.size).min(self.size);
        }
        let start = self.at;
        self.at = self.data_end.min(start.saturating_add(self.piece));
        Ok(Some((start, self.at)))
    }
}

/// A copy of the data of one open file into another.
pub(super) struct Transfer<'a> {
    /// From here.
    pub(super) source: &'a Handle,
    /// To here, at the same offsets.
    pub(super) target: &'a Handle,
    /// Length of the source.
    pub(super) size: u64,
    /// The target is complete up to this offset.
    pub(super) from: u64,
    /// The source may have holes.
    pub(super) sparse: bool,
    /// Both files are in one export, so the server can copy.
    pub(super) inside: bool,
    /// Notes progress in the target.
    pub(super) stamp: &'a Stamp,
    /// Counts the bytes of each piece.
    pub(super) progress: &'a Progress,
    /// Asks to stop.
    pub(super) interrupt: &'a Interrupt,
}

struct State {
    extents: Extents,
    /// Starts of the pieces under way.
    under_way: BTreeSet<u64>,
    /// Bytes of the pieces that are complete.
    copied: u64,
    /// End of the furthest piece that is complete.
    furthest: u64,
    /// The offset in the last note, and when it was written.
    noted: u64,
    noted_at: Instant,
    /// The part could not be made durable. A second try may succeed although data is lost, because the kernel
    /// reports that only once. So nothing more is noted.
    note_failed: bool,
    failure: Option<Failure>,
}

impl State {
    /// Returns the offset before which all data is in the target, which is at least that long.
    fn done(&self) -> u64 {
        self.under_way.first().map_or(self.furthest, |first| self.furthest.min(*first))
    }
}

impl Transfer<'_> {
    /// Copies everything and returns how many bytes of data that were. After a failure, notes how far it got, if
    /// that can still be written.
    pub(super) fn run(&self) -> Outcome<u64> {
        let piece = (self.size.saturating_sub(self.from) / LANES)
            .next_multiple_of(PIECE_BYTES_MIN)
            .clamp(PIECE_BYTES_MIN, TRANSFER_BYTES_MAX as u64);
        let state = Mutex::new(State {
            extents: Extents::new(self.from, self.size, piece, self.sparse),
            under_way: BTreeSet::new(),
            copied: 0,
            furthest: self.from,
            noted: self.from,
            noted_at: Instant::now(),
            note_failed: false,
            failure: None,
        });
        let inside = AtomicBool::new(self.inside);
        let lanes = self.size.saturating_sub(self.from).div_ceil(piece).min(LANES);
        together(lanes as usize, || self.lane(&state, &inside, piece));
        let mut state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if state.extents.at < self.size {
            state.failure.get_or_insert_with(|| Errno::ENOMEM.into());
        }
        match state.failure.take() {
            None => Ok(state.copied),
            Some(failure) => {
                if !state.note_failed {
                    // Without the note the part is not continued; nothing else depends on it.
                    let _ = part::note(self.stamp, self.target, state.done());
                }
                Err(failure)
            }
        }
    }

    fn lane(&self, state: &Mutex<State>, inside: &AtomicBool, piece: u64) {
        let mut buffer = Vec::new();
        if buffer.try_reserve_exact(piece as usize).is_err() {
            // The lanes that have memory do all the work.
            return;
        }
        while let Some((start, end)) = self.take(state) {
            let result = self.piece(start, end, inside, &mut buffer, piece);
            let mut now = locked(state);
            if let Err(failure) = result {
                // The piece stays under way, so nothing after it counts as done.
                now.failure.get_or_insert(failure);
                return;
            }
            self.progress.bytes(end - start);
            now.under_way.remove(&start);
            now.copied += end - start;
            now.furthest = now.furthest.max(end);
            let done = now.done();
            if done >= now.noted + STAMP_BYTES && now.noted_at.elapsed() >= STAMP_PAUSE {
                (now.noted, now.noted_at) = (done, Instant::now());
                drop(now);
                if let Err(failure) = part::note(self.stamp, self.target, done) {
                    let mut now = locked(state);
                    now.note_failed = true;
                    now.failure.get_or_insert(failure);
                    return;
                }
            }
        }
    }

    fn take(&self, state: &Mutex<State>) -> Option<(u64, u64)> {
        let mut now = locked(state);
        if now.failure.is_some() {
            return None;
        }
        match now.extents.next(|at| self.source.data(at), |at| self.source.hole(at)) {
            Ok(Some(_)) if self.interrupt.came() => {
                now.failure = Some(Failure::new("interrupted"));
                None
            }
            Ok(Some((start, end))) => {
                now.under_way.insert(start);
                Some((start, end))
            }
            Ok(None) => None,
            Err(failure) => {
                now.failure = Some(failure);
                None
            }
        }
    }

    fn piece(
        &self,
        start: u64,
        end: u64,
        inside: &AtomicBool,
        buffer: &mut Vec<u8>,
        piece: u64,
    ) -> Outcome<()> {
        if let (true, Handle::Remote(source), Handle::Remote(target)) =
            (inside.load(Ordering::Relaxed), self.source, self.target)
        {
            match copy_inside(source, target, start, end) {
                Err(failure) if cannot_copy_inside(&failure) => {
                    inside.store(false, Ordering::Relaxed);
                }
                result => return result,
            }
        }
        buffer.resize(piece as usize, 0);
        let buffer = &mut buffer[..(end - start) as usize];
        match self.source.read_at(buffer, start) {
            Ok(read) if read == buffer.len() => {}
            Ok(_) => return Err(shrunk()),
            // The file may have been truncated after the server announced the data and before it sent it.
            Err(failure) if failure.is(Errno::EIO) && self.source.attr()?.size < end => {
                return Err(shrunk());
            }
            // The message names the target, so it must say that the source failed.
            Err(failure) => return Err(failure.with("in reading the source")),
        }
        self.target.write_at(buffer, start)
    }
}

fn copy_inside(source: &File, target: &File, start: u64, end: u64) -> Outcome<()> {
    let mut at = start;
    while at < end {
        match source.copy_range(at, target, at, end - at)? {
            0 => return Err(shrunk()),
            copied => at += copied,
        }
    }
    Ok(())
}

fn cannot_copy_inside(failure: &Failure) -> bool {
    [Errno::EXDEV, Errno::EOPNOTSUPP, Errno::ENOSYS, Errno::EINVAL].iter().any(|e| failure.is(*e))
}

fn shrunk() -> Failure {
    Failure::new("the source became shorter while it was copied")
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads both files and returns the offset of the first difference. Skips holes that both have.
pub(super) fn first_difference(
    source: &Handle,
    target: &Handle,
    size: u64,
    sparse: bool,
) -> Outcome<Option<u64>> {
    if target.attr()?.size != size {
        return Ok(Some(size.min(target.attr()?.size)));
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < size {
        if sparse {
            let data = [source.data(at)?, target.data(at)?];
            match data.into_iter().flatten().min() {
                Some(next) if next < size => at = next.max(at),
                _ => break,
            }
        }
        let length = (size - at).min(TRANSFER_BYTES_MAX as u64) as usize;
        left.resize(length, 0);
        right.resize(length, 0);
        let read = (source.read_at(&mut left, at)?, target.read_at(&mut right, at)?);
        if read != (length, length) || crc32c::crc32c(&left) != crc32c::crc32c(&right) {
            let same = left.iter().zip(&right).take_while(|(a, b)| a == b).count();
            return Ok(Some(at + same as u64));
        }
        at += length as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Data extents of a file, as a store would tell them.
    fn walk(data: &[(u64, u64)], from: u64, size: u64, piece: u64) -> Vec<(u64, u64)> {
        let next_data = |at: u64| {
            let here = data.iter().find(|(_, end)| *end > at).map(|(start, _)| (*start).max(at));
            Ok(here)
        };
        let next_hole = |at: u64| {
            let inside = data.iter().find(|(start, end)| *start <= at && at < *end);
            Ok(Some(inside.map_or(at, |(_, end)| *end)))
        };
        let mut extents = Extents::new(from, size, piece, true);
        let mut pieces = Vec::new();
        while let Some(piece) = extents.next(next_data, next_hole).unwrap() {
            pieces.push(piece);
        }
        pieces
    }

    #[test]
    fn holes_are_left_out() {
        assert_eq!(walk(&[], 0, 100, 10), []);
        assert_eq!(walk(&[(0, 5), (90, 100)], 0, 100, 10), [(0, 5), (90, 100)]);
        assert_eq!(walk(&[(20, 45)], 0, 100, 10), [(20, 30), (30, 40), (40, 45)]);
        assert_eq!(walk(&[(20, 45)], 33, 100, 10), [(33, 43), (43, 45)], "goes on in the middle");
        assert_eq!(walk(&[(20, 500)], 0, 100, 50), [(20, 70), (70, 100)], "grew meanwhile");
        assert_eq!(walk(&[(200, 500)], 0, 100, 50), []);
        assert_eq!(walk(&[(0, 10)], 0, 0, 10), []);
    }

    #[test]
    fn a_file_without_holes_is_not_asked_for_them() {
        let mut extents = Extents::new(0, 25, 10, false);
        let mut next = || extents.next(|_| panic!("asked"), |_| panic!("asked")).unwrap();
        let pieces = [next(), next(), next(), next()];
        assert_eq!(pieces, [Some((0, 10)), Some((10, 20)), Some((20, 25)), None]);
    }

    /// Returns an open file of this size, with these bytes at these offsets.
    fn file(size: u64, parts: &[(u64, &[u8])]) -> Handle {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        for (offset, bytes) in parts {
            file.write_all_at(bytes, *offset).unwrap();
        }
        Handle::Local(file)
    }

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let size = TRANSFER_BYTES_MAX as u64 + 100;
        let compare = |left: &[(u64, &[u8])], right: &[(u64, &[u8])]| {
            let (left, right) = (file(size, left), file(size, right));
            [false, true].map(|sparse| first_difference(&left, &right, size, sparse).unwrap())
        };
        assert_eq!(compare(&[], &[]), [None; 2]);
        assert_eq!(compare(&[(5000, &[0; 5000])], &[]), [None; 2], "zeros and a hole");
        assert_eq!(compare(&[(size - 1, b"x")], &[(size - 1, b"x")]), [None; 2]);
        for at in [0, 5, size - 101, size - 100, size - 1] {
            assert_eq!(compare(&[(at, b"x")], &[]), [Some(at); 2], "a hole of the target");
            assert_eq!(compare(&[], &[(at, b"x")]), [Some(at); 2], "a hole of the source");
        }
        assert_eq!(compare(&[(7, b"x"), (9, b"a")], &[(7, b"y"), (9, b"b")]), [Some(7); 2]);
    }

    #[test]
    fn files_of_other_lengths_differ_where_the_shorter_one_ends() {
        for (source, target) in [(10, 7), (7, 10)] {
            let found = first_difference(&file(source, &[]), &file(target, &[]), source, false);
            assert_eq!(found.unwrap(), Some(7));
        }
    }

    #[test]
    fn only_what_lies_before_every_gap_is_done() {
        let mut state = State {
            extents: Extents::new(0, 0, 1, false),
            under_way: BTreeSet::from([30, 50]),
            copied: 0,
            furthest: 20,
            noted: 0,
            noted_at: Instant::now(),
            note_failed: false,
            failure: None,
        };
        assert_eq!(state.done(), 20, "the target may be no longer than that");
        state.furthest = 70;
        assert_eq!(state.done(), 30);
        state.under_way.clear();
        assert_eq!(state.done(), 70);
    }
}
