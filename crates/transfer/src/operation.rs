//! Operations: what was started and can be waited for.

use crate::choose::{Choice, Strategy};
use crate::context::Context;
use crate::counters::Way;
use crate::message::Range;
use crate::state::{BUFFER_BYTES, PeerId};
use crate::{Error, Intent};
use std::sync::Arc;
use towline_mem::{Aggregate, PoolBuffer};

/// Names something that was started at a node: opening a context, or closing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationId(pub(crate) u64);

/// A set of operations whose results are taken in the order in which they finish: one per thread
/// spares threads from each other's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group(pub(crate) u64);

/// What an operation came to.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finished {
    /// The data is here.
    Opened(Context),
    /// What was written is with the owners, and they were told.
    Closed,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// For buffers.
    Waiting,
    /// The owner was asked.
    Asked,
    /// All is in place.
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
    /// Where data lands, a fragment a buffer.
    pub(crate) buffers: Vec<PoolBuffer>,
    pub(crate) received: u64,
    pub(crate) granted: u64,
    /// What is read in place: mapped, pushed before, or our own.
    pub(crate) in_place: Aggregate,
    /// The push that `in_place` is of.
    pub(crate) pushed: Option<u64>,
    /// A write-back: what is still to be sent, and how much was.
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

    /// Buffers that its data needs in our pool.
    pub(crate) fn buffers_needed(&self) -> u64 {
        let lands = match self.way {
            Way::Inline | Way::Pull | Way::PullDirect => self.source.is_empty(),
            Way::Push | Way::Map | Way::Own => false,
        };
        if lands { self.length.div_ceil(BUFFER_BYTES) } else { 0 }
    }
}

/// What an operation does.
#[derive(Debug)]
pub(crate) enum Job {
    Open {
        intent: Intent,
        choice: Choice,
    },
    /// Contexts to close once all was written back: peer, number, and whether it is a push.
    Close {
        leases: Vec<Held>,
        acknowledged: bool,
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

/// Number of a run on the wire. Operations have fewer than 2^16 runs, and their own numbers stay
/// below 2^47.
pub(crate) fn wire_number(operation: u64, run: usize) -> u64 {
    operation << 16 | run as u64
}

/// The operation and the run of a number on the wire.
pub(crate) fn from_wire(number: u64) -> (u64, usize) {
    (number >> 16, (number & 0xffff) as usize)
}

/// The memory of one run of an open context.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Buffers of the pool, a fragment each.
    Buffers(Vec<Arc<PoolBuffer>>),
    /// Memory that is read, and perhaps written, where it is.
    InPlace(Aggregate),
}
