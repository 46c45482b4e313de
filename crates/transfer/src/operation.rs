//! Operations that were started and can be waited for.

use crate::choose::{Choice, Strategy};
use crate::context::Context;
use crate::counters::Way;
use crate::message::Range;
use crate::state::{BUFFER_BYTES, PeerId};
use crate::{Error, Intent};
use std::sync::Arc;
use towline_mem::{Aggregate, PoolBuffer};

/// Identifies an operation of a node: opening or closing a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId(pub(crate) u64);

/// A set of operations whose results are taken in the order in which they finish. With one group per
/// thread, threads do not get each other's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group(pub(crate) u64);

/// The result of an operation.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finished {
    /// The data has arrived.
    Opened(Context),
    /// The owners have what was written, and the acknowledgement was sent.
    Closed,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Waiting for buffers.
    Waiting,
    /// Waiting for the buffers of other runs: its data needs none and is there.
    InPlace,
    /// Requested from the owner.
    Asked,
    /// Finished.
    Done,
}

/// The part of an operation that concerns one owner.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) peer: PeerId,
    pub(crate) ranges: Vec<Range>,
    pub(crate) length: u64,
    pub(crate) stage: Stage,
    pub(crate) way: Way,
    /// `None`: only a lease.
    pub(crate) strategy: Option<Strategy>,
    /// The buffers for the data, one fragment in each.
    pub(crate) buffers: Vec<PoolBuffer>,
    pub(crate) received: u64,
    pub(crate) granted: u64,
    /// Data that is read in place: mapped, pushed before, or this node's own.
    pub(crate) in_place: Aggregate,
    /// The number of the push that `in_place` belongs to.
    pub(crate) pushed: Option<u64>,
    /// For a write-back: what is still to be sent, and how much was sent.
    pub(crate) source: Aggregate,
    pub(crate) sent: u64,
}

impl Run {
    pub(crate) fn new(peer: PeerId, ranges: Vec<Range>, way: Way) -> Self {
        let length = ranges.iter().map(|range| range.length).sum();
        Self {
            peer,
            ranges,
            length,
            stage: Stage::Waiting,
            way,
            strategy: None,
            buffers: Vec::new(),
            received: 0,
            granted: 0,
            in_place: Aggregate::new(),
            pushed: None,
            source: Aggregate::new(),
            sent: 0,
        }
    }

    /// Returns the number of pool buffers that its data needs.
    pub(crate) fn buffers_needed(&self) -> u64 {
        let lands = match self.way {
            Way::Inline | Way::Pull | Way::PullDirect => self.source.is_empty(),
            Way::Push | Way::Map | Way::Own => false,
        };
        if lands { self.length.div_ceil(BUFFER_BYTES) } else { 0 }
    }
}

/// The work of an operation.
#[derive(Debug)]
pub(crate) enum Job {
    Open {
        intent: Intent,
        choice: Choice,
    },
    /// Closes contexts once everything was written back: the leases, and whether to acknowledge.
    Close {
        leases: Vec<Held>,
        acknowledged: bool,
        choice: Choice,
    },
}

/// A lease that a context holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) peer: PeerId,
    pub(crate) number: u64,
    pub(crate) is_push: bool,
}

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) job: Job,
    pub(crate) runs: Vec<Run>,
    pub(crate) unfinished: usize,
    pub(crate) error: Option<Error>,
    pub(crate) group: Option<u64>,
    pub(crate) is_finished: bool,
}

/// Returns the number of a run on the wire. Operations have fewer than 2^16 runs, and their own numbers
/// stay below 2^47.
pub(crate) fn wire_number(operation: u64, run: usize) -> u64 {
    operation << 16 | run as u64
}

/// Returns the operation and the run of a number on the wire.
pub(crate) fn from_wire(number: u64) -> (u64, usize) {
    (number >> 16, (number & 0xffff) as usize)
}

/// The memory of one run of an open context.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Buffers of the pool, one fragment in each.
    Buffers(Vec<Arc<PoolBuffer>>),
    /// Memory that is read, and possibly written, in place.
    InPlace(Aggregate),
}
