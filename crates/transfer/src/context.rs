//! Contexts: access to the bytes of a global aggregate, from opening to acknowledgement.

use crate::choose::{Choice, Situation, Strategy, choose};
use crate::completion::start;
use crate::counters::Way;
use crate::global::PartKind;
use crate::message::Range;
use crate::node::Node;
use crate::operation::{Group, Held, Job, Memory, OperationId, Run, wire_number};
use crate::state::{BUFFER_BYTES, OWN, PeerId, State};
use crate::{Error, Intent};
use std::sync::Arc;
use std::time::Duration;
use towline_mem::{Aggregate, PoolBuffer, Segment};

/// The part of a context that belongs to one owner.
#[derive(Debug)]
pub(crate) struct Piece {
    peer: PeerId,
    held: Held,
    ranges: Vec<Range>,
    length: u64,
    way: Way,
    memory: Memory,
    /// Ranges that were written and have to be written back, sorted and not touching each other.
    dirty: Vec<(u64, u64)>,
}

/// The data of a global aggregate, at this node. Closing it acknowledges, and writes back what was
/// written. Dropping it gives up: what was written is lost, except in mapped memory, where it already
/// is.
#[derive(Debug)]
pub struct Context {
    node: Node,
    pieces: Vec<Piece>,
    intent: Intent,
    choice: Choice,
    length: u64,
}

impl Piece {
    pub(crate) fn of(run: Run, number: u64, index: usize) -> Self {
        let in_place = matches!(run.way, Way::Map | Way::Push | Way::Own);
        let memory = if in_place {
            Memory::InPlace(run.in_place)
        } else {
            Memory::Buffers(run.buffers.into_iter().map(Arc::new).collect())
        };
        let held = Held {
            peer: run.peer,
            number: run.pushed.unwrap_or(wire_number(number, index)),
            is_push: run.pushed.is_some(),
        };
        let (peer, ranges, length, way) = (run.peer, run.ranges, run.length, run.way);
        Self { peer, held, ranges, length, way, memory, dirty: Vec::new() }
    }

    /// Returns all bytes, by reference.
    fn aggregate(&self) -> Aggregate {
        match &self.memory {
            Memory::InPlace(aggregate) => aggregate.clone(),
            Memory::Buffers(buffers) => of_buffers(buffers, 0, self.length),
        }
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        match &self.memory {
            Memory::InPlace(aggregate) => {
                let mut rest = aggregate.clone();
                rest.advance(offset);
                rest.copy_to(target)?;
            }
            Memory::Buffers(buffers) => {
                let mut done = 0;
                while done < target.len() {
                    let at = offset + done as u64;
                    let from = (at % BUFFER_BYTES) as usize;
                    let bytes = buffers[(at / BUFFER_BYTES) as usize].bytes();
                    let count = (bytes.len() - from).min(target.len() - done);
                    target[done..done + count].copy_from_slice(&bytes[from..from + count]);
                    done += count;
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, state: &mut State, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.memory {
            Memory::InPlace(held) if self.peer == OWN => {
                // While the context holds them, buffers of a pool cannot be written, and others would be
                // copied as a whole.
                drop(std::mem::take(held));
                let written = state.apply(OWN, &self.ranges, offset, bytes);
                // The write may have replaced buffers; other holders keep the old bytes.
                *held = state.resolve(&self.ranges, true).map_err(Error::Refused)?;
                written.map_err(Error::Refused)?;
            }
            Memory::InPlace(aggregate) => {
                let mut rest = aggregate.clone();
                rest.advance(offset);
                let part = rest.split_to(bytes.len() as u64);
                let mut done = 0;
                for slice in part.slices() {
                    let Segment::Shared(memory, _) = &slice.segment else {
                        return Err(Error::Invalid("memory of the context is not writable"));
                    };
                    let count = slice.length as usize;
                    memory.copy_in(slice.offset as usize, &bytes[done..done + count]);
                    done += count;
                }
            }
            Memory::Buffers(buffers) => {
                let mut done = 0;
                while done < bytes.len() {
                    let at = offset + done as u64;
                    let from = (at % BUFFER_BYTES) as usize;
                    let buffer = Arc::get_mut(&mut buffers[(at / BUFFER_BYTES) as usize])
                        .ok_or(Error::Invalid("bytes of the context are in use elsewhere"))?;
                    let target = &mut buffer.bytes_mut()[from..];
                    let count = target.len().min(bytes.len() - done);
                    target[..count].copy_from_slice(&bytes[done..done + count]);
                    done += count;
                }
                add_range(&mut self.dirty, offset, offset + bytes.len() as u64);
            }
        }
        Ok(())
    }
}

fn of_buffers(buffers: &[Arc<PoolBuffer>], from: u64, until: u64) -> Aggregate {
    let (mut aggregate, mut at) = (Aggregate::new(), from);
    while at < until {
        let inside = at % BUFFER_BYTES;
        let count = (BUFFER_BYTES - inside).min(until - at);
        let buffer = buffers[(at / BUFFER_BYTES) as usize].clone();
        aggregate.append(Segment::Registered(buffer), inside, count);
        at += count;
    }
    aggregate
}

/// Adds a range to sorted ranges that do not touch each other.
fn add_range(ranges: &mut Vec<(u64, u64)>, mut from: u64, mut until: u64) {
    ranges.retain(|&(start, end)| {
        let touches = start <= until && from <= end;
        if touches {
            (from, until) = (from.min(start), until.max(end));
        }
        !touches
    });
    let at = ranges.partition_point(|range| range.0 < from);
    ranges.insert(at, (from, until));
}

/// Returns the part of `ranges` from byte `from` to byte `until` of all their bytes.
fn cut(ranges: &[Range], from: u64, until: u64) -> Vec<Range> {
    let (mut cut, mut before) = (Vec::new(), 0);
    for range in ranges {
        let (start, end) = (from.max(before), until.min(before + range.length));
        if start < end {
            let offset = range.offset + (start - before);
            cut.push(Range { offset, length: end - start, ..*range });
        }
        before += range.length;
    }
    cut
}

impl Context {
    pub(crate) fn new(node: Node, pieces: Vec<Piece>, intent: Intent, choice: Choice) -> Self {
        let length = pieces.iter().map(|piece| piece.length).sum();
        Self { node, pieces, intent, choice, length }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the way that the bytes took and their number, for each owner.
    pub fn ways(&self) -> impl Iterator<Item = (Way, u64)> {
        self.pieces.iter().map(|piece| (piece.way, piece.length))
    }

    /// Copies the bytes at `offset` into `target`.
    ///
    /// # Errors
    /// `Invalid`: beyond the end; an error in reading a file of this node.
    pub fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        self.check(offset, target.len())?;
        let (mut before, end) = (0, offset + target.len() as u64);
        for piece in &self.pieces {
            let (from, until) = (offset.max(before), end.min(before + piece.length));
            if from < until {
                let part = &mut target[(from - offset) as usize..(until - offset) as usize];
                piece.read(from - before, part)?;
            }
            before += piece.length;
        }
        Ok(())
    }

    /// Copies all bytes.
    ///
    /// # Errors
    /// See [`Context::read_at`].
    pub fn to_vec(&self) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.length as usize];
        self.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns all bytes by reference, for sending them on or writing them to a file. The context's
    /// buffers stay in use as long as the aggregate is kept. After the context is closed, mapped memory
    /// may change.
    #[must_use]
    pub fn aggregate(&self) -> Aggregate {
        let mut all = Aggregate::new();
        for piece in &self.pieces {
            all.concatenate(piece.aggregate());
        }
        all
    }

    /// Writes bytes at `offset`. The owners get them when the context is closed; if their memory is
    /// mapped, or belongs to this node, at once.
    ///
    /// # Errors
    /// `Invalid`: the context was opened for reading, the range goes beyond the end, or an aggregate of
    /// the context is kept; `Refused(EACCES)`: buffers of this node that were globalized for reading.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        if self.intent == Intent::Read {
            return Err(Error::Invalid("context was opened for reading"));
        }
        self.check(offset, bytes.len())?;
        let (mut before, end) = (0, offset + bytes.len() as u64);
        self.node.0.with(|state| {
            for piece in &mut self.pieces {
                let (from, until) = (offset.max(before), end.min(before + piece.length));
                if from < until {
                    let part = &bytes[(from - offset) as usize..(until - offset) as usize];
                    piece.write(state, from - before, part)?;
                }
                before += piece.length;
            }
            Ok(())
        })
    }

    fn check(&self, offset: u64, length: usize) -> Result<(), Error> {
        match offset.checked_add(length as u64) {
            Some(end) if end <= self.length => Ok(()),
            _ => Err(Error::Invalid("range goes beyond the end of the context")),
        }
    }

    /// Closes the context: writes back, acknowledges, and waits until the owners have everything.
    ///
    /// # Errors
    /// See [`Node::wait`]; the owners may have part of what was written.
    pub fn close(self) -> Result<(), Error> {
        let node = self.node.clone();
        let operation = self.start_close(None);
        node.wait(operation, None).map(|_| ())
    }

    /// Like [`Context::close`], but waits at most `limit`; closing continues after that.
    ///
    /// # Errors
    /// `TimedOut`, and those of [`Context::close`].
    pub fn close_within(self, limit: Duration) -> Result<(), Error> {
        let node = self.node.clone();
        let operation = self.start_close(None);
        node.wait(operation, Some(limit)).map(|_| ())
    }

    /// Starts to close the context. The operation ends when the owners have what was written.
    #[must_use]
    pub fn start_close(mut self, group: Option<Group>) -> OperationId {
        let (pieces, choice) = (std::mem::take(&mut self.pieces), self.choice);
        self.node.0.with(|state| {
            let (mut runs, mut leases) = (Vec::new(), Vec::new());
            for piece in pieces {
                leases.push(piece.held);
                let Memory::Buffers(buffers) = &piece.memory else { continue };
                for (from, until) in &piece.dirty {
                    let source = of_buffers(buffers, *from, *until);
                    let ranges = cut(&piece.ranges, *from, *until);
                    runs.push(write_back(state, piece.peer, ranges, source, choice));
                }
            }
            let number = state.number();
            let job = Job::Close { leases, acknowledged: true, choice };
            start(state, number, job, runs, group);
            OperationId(number)
        })
    }
}

/// Returns a run that writes bytes back to their owner.
fn write_back(
    state: &State,
    peer: PeerId,
    ranges: Vec<Range>,
    source: Aggregate,
    choice: Choice,
) -> Run {
    let granted = state.granted_by(peer);
    let automatic = choose(&Situation {
        length: source.len(),
        kind: PartKind::Host,
        passes_descriptors: false,
        reads_memory: false,
        granted,
        writes: true,
    });
    let fits_inline = source.len() <= towline_wire::limits::INLINE_BYTES_MAX as u64;
    let strategy = match choice {
        Choice::Forced(Strategy::Inline) if fits_inline => Strategy::Inline,
        Choice::Forced(Strategy::Push) => Strategy::Push,
        Choice::Forced(Strategy::Pull) => Strategy::Pull,
        // The other strategies cannot write back.
        _ => automatic,
    };
    let way = match strategy {
        Strategy::Inline => Way::Inline,
        Strategy::Push => Way::Push,
        _ => Way::Pull,
    };
    let mut run = Run::new(peer, ranges, way);
    (run.strategy, run.source) = (Some(strategy), source);
    run
}

impl Drop for Context {
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        if pieces.is_empty() {
            return;
        }
        let leases: Vec<Held> = pieces.iter().map(|piece| piece.held).collect();
        drop(pieces); // return the buffers before waiting operations are fed
        self.node.0.with(|state| {
            for lease in leases {
                state.give_back(lease, false);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_ranges_are_joined() {
        let mut ranges = Vec::new();
        for (from, until) in [(10, 20), (30, 40), (20, 25), (0, 5), (24, 31)] {
            add_range(&mut ranges, from, until);
        }
        assert_eq!(ranges, [(0, 5), (10, 40)]);
    }
}
