//! Transfers the pieces of a disk, several at a time.

use super::end::End;
use super::journal::{Journal, write_journal};
use super::noted::Piece;
use super::pieces::{PIECE_BYTES, Plan, is_zero, runs};
use super::stream::{self, Output};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::report::{Failure, Outcome};
use crate::workers::together;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Written pieces are made durable and noted in the journal after this many pieces or this time.
const NOTE_PIECES: usize = 1024;
const NOTE_TIME: Duration = Duration::from_secs(1);
/// Units in which zeroes are looked for: the allocation unit of most file systems, and more where each
/// run is a request of its own.
const UNIT_LOCAL_BYTES: u64 = 4096;
const UNIT_REMOTE_BYTES: u64 = 64 * 1024;

/// The source of a copy.
pub(super) enum Source {
    /// A disk, and the part of it that is still to be read.
    Disk(Mutex<Plan>, End),
    /// Standard input, and the offset that has been read; `None` at its end.
    Input(Mutex<Option<u64>>),
}

/// The target of a copy.
pub(super) enum Target {
    /// A disk.
    Disk {
        /// The disk.
        end: End,
        /// From this offset on there are only holes, where nothing has been written yet.
        holes_from: u64,
    },
    /// Standard output.
    Output(Output),
}

impl Default for Target {
    fn default() -> Self {
        Self::Output(Output::default())
    }
}

/// What an earlier run of the same copy left.
#[derive(Default)]
pub(super) struct Earlier {
    /// Pieces that the earlier run copied.
    pub(super) pieces: Vec<Piece>,
    /// Whether these pieces are certainly unchanged in the source and in the target. Otherwise they are
    /// read and compared.
    pub(super) sure: (bool, bool),
}

struct State {
    /// Pieces that are in the target.
    done: Vec<Piece>,
    /// How many of them are in the journal.
    noted: usize,
    noted_at: Instant,
    /// A thread is making pieces durable.
    noting: bool,
    /// A flush failed. The next one may succeed although what was written before is lost: a kernel reports that
    /// only once. So nothing is noted any more.
    flush_failed: bool,
    journal: Option<Journal>,
    /// Pieces of an earlier run that this one has not overwritten, by offset.
    earlier: BTreeMap<u64, Piece>,
    from_earlier: u64,
    copied_again: u64,
    failure: Option<Failure>,
}

/// A copy under way.
pub(super) struct Transfer<'a> {
    /// The source.
    pub(super) source: Source,
    /// The target.
    pub(super) target: Target,
    sure: (bool, bool),
    progress: &'a Progress,
    state: Mutex<State>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails once the copy should stop.
fn go_on(interrupt: &Interrupt) -> Outcome<()> {
    if interrupt.came() {
        return Err(Failure::new("interrupted; the copy is not complete"));
    }
    Ok(())
}

impl<'a> Transfer<'a> {
    /// Prepares a copy that may take over pieces of an earlier one.
    pub(super) fn new(
        source: Source,
        target: Target,
        journal: Option<Journal>,
        earlier: Earlier,
        progress: &'a Progress,
    ) -> Self {
        let state = State {
            done: Vec::new(),
            noted: 0,
            noted_at: Instant::now(),
            noting: false,
            flush_failed: false,
            journal,
            earlier: earlier.pieces.into_iter().map(|piece| (piece.offset, piece)).collect(),
            from_earlier: 0,
            copied_again: 0,
            failure: None,
        };
        Self { source, target, sure: earlier.sure, progress, state: Mutex::new(state) }
    }

    /// Returns true if the copy can be resumed later.
    pub(super) fn has_journal(&self) -> bool {
        locked(&self.state).journal.is_some()
    }

    /// Removes the journal, because there is nothing left to resume.
    pub(super) fn forget_journal(&mut self) {
        if let Some(journal) = locked(&self.state).journal.take() {
            journal.remove();
        }
    }

    /// Returns the bytes taken over from an earlier run.
    pub(super) fn taken_over(&self) -> u64 {
        locked(&self.state).from_earlier
    }

    /// Returns the bytes that were copied again because they had changed since the earlier run.
    pub(super) fn copied_again(&self) -> u64 {
        locked(&self.state).copied_again
    }

    /// Copies with this many threads. Returns all pieces in order.
    pub(super) fn run(&mut self, jobs: usize, interrupt: &Interrupt) -> Outcome<Vec<Piece>> {
        together(jobs, || self.work(interrupt));
        let failure = locked(&self.state).failure.take();
        if let Some(failure) = failure {
            // Finished pieces are worth keeping, but a failed target may fail again.
            if !locked(&self.state).flush_failed {
                let _ = self.note();
            }
            return Err(failure);
        }
        if let Target::Disk { end, .. } = &self.target {
            end.flush()?;
        }
        // Whoever wrote the stream may have been interrupted, too, and what looked like its end was not.
        go_on(interrupt)?;
        let mut done = std::mem::take(&mut locked(&self.state).done);
        done.sort_unstable_by_key(|piece| piece.offset);
        Ok(done)
    }

    fn work(&self, interrupt: &Interrupt) {
        let mut buffer = Vec::with_capacity(PIECE_BYTES as usize);
        let result = self.pieces(&mut buffer, interrupt);
        if let Err(failure) = result {
            locked(&self.state).failure.get_or_insert(failure);
            if let Target::Output(output) = &self.target {
                output.end();
            }
        }
    }

    fn pieces(&self, buffer: &mut Vec<u8>, interrupt: &Interrupt) -> Outcome<()> {
        while locked(&self.state).failure.is_none() {
            let Some((range, holds_data)) = self.next(buffer)? else { return Ok(()) };
            go_on(interrupt)?;
            let length = range.end - range.start;
            let piece = match holds_data {
                true => self.data(range, buffer)?,
                false => {
                    self.take_back(&range)?;
                    self.zero(&range)?;
                    self.progress.bytes(length);
                    Piece { offset: range.start, length, sum: None }
                }
            };
            self.finish(piece)?;
        }
        Ok(())
    }

    /// Returns the next range and whether it may hold data. Data of a stream is in the buffer then.
    fn next(&self, buffer: &mut Vec<u8>) -> Outcome<Option<(Range<u64>, bool)>> {
        match &self.source {
            Source::Disk(plan, _) => Ok(locked(plan).next()),
            Source::Input(at) => {
                let mut at = locked(at);
                let Some(start) = *at else { return Ok(None) };
                stream::take(&mut std::io::stdin().lock(), buffer)?;
                let end = start + buffer.len() as u64;
                *at = Some(end).filter(|_| buffer.len() as u64 == PIECE_BYTES);
                if buffer.is_empty() {
                    return Ok(None);
                }
                self.progress.found(0, buffer.len() as u64);
                if let Target::Disk { end: target, .. } = &self.target {
                    if target.is_file() {
                        target.grow(end)?;
                    } else if end.next_multiple_of(target.block()) > target.size() {
                        let what = format!("{} bytes are not enough for the stream", target.size());
                        return Err(Failure::new(what).about(target.name()));
                    }
                }
                Ok(Some((start..end, true)))
            }
        }
    }

    fn data(&self, range: Range<u64>, buffer: &mut Vec<u8>) -> Outcome<Piece> {
        let (offset, length) = (range.start, range.end - range.start);
        let earlier = locked(&self.state).earlier.get(&offset).copied();
        if let Some(piece) = earlier.filter(|piece| piece.length == length) {
            if self.is_there(&piece, buffer)? {
                locked(&self.state).from_earlier += length;
                self.progress.already(length);
                return Ok(piece);
            }
            locked(&self.state).copied_again += length;
        }
        self.take_back(&range)?;
        if let Source::Disk(_, disk) = &self.source {
            read(disk, &range, buffer)?;
        }
        let sum = if is_zero(buffer) { None } else { Some(crc32c::crc32c(buffer)) };
        self.write(buffer, offset)?;
        self.progress.bytes(length);
        Ok(Piece { offset, length, sum })
    }

    /// Returns true if a piece of an earlier run is unchanged on both sides. Where that is not certain,
    /// its bytes are compared.
    fn is_there(&self, piece: &Piece, buffer: &mut Vec<u8>) -> Outcome<bool> {
        let range = piece.offset..piece.offset + piece.length;
        let mut same = |end: &End, sure: bool| -> Outcome<bool> {
            if sure {
                return Ok(true);
            }
            read(end, &range, buffer)?;
            Ok(Some(crc32c::crc32c(buffer)) == piece.sum)
        };
        let (Source::Disk(_, source), Target::Disk { end, .. }) = (&self.source, &self.target)
        else {
            return Ok(false);
        };
        Ok(same(source, self.sure.0)? && same(end, self.sure.1)?)
    }

    /// Withdraws what an earlier run noted about this range, before it is overwritten.
    fn take_back(&self, range: &Range<u64>) -> Outcome<()> {
        let mut state = locked(&self.state);
        let State { earlier, journal, .. } = &mut *state;
        let pieces: Vec<_> = earlier.range(range.clone()).map(|(_, piece)| *piece).collect();
        if !pieces.is_empty() {
            write_journal(journal, |journal| journal.take_back(&pieces))?;
        }
        for piece in pieces {
            earlier.remove(&piece.offset);
        }
        Ok(())
    }

    fn write(&self, buffer: &mut Vec<u8>, offset: u64) -> Outcome<()> {
        let end = match &self.target {
            Target::Output(output) => return output.write(buffer, offset).map(drop),
            Target::Disk { end, .. } => end,
        };
        // Fill the last block with zeroes.
        buffer.resize(buffer.len().next_multiple_of(end.block() as usize), 0);
        let unit = if end.is_local() { UNIT_LOCAL_BYTES } else { UNIT_REMOTE_BYTES };
        let runs = runs(buffer, unit.max(end.block()) as usize);
        if let [(_, false)] = runs[..] {
            return end.write_all(buffer, offset);
        }
        for (run, zero) in runs {
            let at = offset + run.start as u64;
            match zero {
                true => self.zero(&(at..offset + run.end as u64))?,
                false => end.write(&buffer[run], at)?,
            }
        }
        Ok(())
    }

    fn zero(&self, range: &Range<u64>) -> Outcome<()> {
        let length = range.end - range.start;
        match &self.target {
            Target::Output(output) => output.zero(range.start, length).map(drop),
            Target::Disk { holes_from, .. } if *holes_from <= range.start => Ok(()),
            Target::Disk { end, holes_from } => {
                let length = length.next_multiple_of(end.block());
                end.zero(range.start, length.min(holes_from - range.start))
            }
        }
    }

    fn finish(&self, piece: Piece) -> Outcome<()> {
        let mut state = locked(&self.state);
        state.done.push(piece);
        let due =
            state.done.len() - state.noted >= NOTE_PIECES || state.noted_at.elapsed() >= NOTE_TIME;
        if !due || state.noting || state.journal.is_none() {
            return Ok(());
        }
        state.noting = true;
        drop(state);
        let noted = self.note();
        locked(&self.state).noting = false;
        noted
    }

    /// Makes finished pieces durable, and notes them.
    fn note(&self) -> Outcome<()> {
        let Target::Disk { end, .. } = &self.target else { return Ok(()) };
        let count = locked(&self.state).done.len();
        end.flush().inspect_err(|_| locked(&self.state).flush_failed = true)?;
        let mut state = locked(&self.state);
        let State { done, noted, journal, noted_at, earlier, .. } = &mut *state;
        write_journal(journal, |journal| {
            let is_new = |piece: &&Piece| earlier.get(&piece.offset) != Some(piece);
            let new: Vec<_> = done[*noted..count].iter().filter(is_new).copied().collect();
            journal.note(&new)
        })?;
        (*noted, *noted_at) = (count, Instant::now());
        Ok(())
    }
}

fn read(end: &End, range: &Range<u64>, buffer: &mut Vec<u8>) -> Outcome<()> {
    let length = (range.end - range.start) as usize;
    buffer.resize(length.next_multiple_of(end.block() as usize), 0);
    end.read(buffer, range.start)?;
    buffer.truncate(length);
    Ok(())
}
