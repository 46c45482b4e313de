//! Which way data went: one line of counters for each way.

use std::fmt;

/// How the bytes of one operation moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// In the control message that answers the request, or that carries the write-back.
    Inline,
    /// In messages that the side with the data sent on its own, into memory granted beforehand.
    Push,
    /// In messages that the side without the data granted one by one.
    Pull,
    /// Read by the receiver from the owner's memory (`process_vm_readv(2)`): a pull without
    /// messages.
    PullDirect,
    /// Not at all: the receiver mapped the owner's memory.
    Map,
    /// Not at all: the node opened its own buffers.
    Own,
}

impl Way {
    /// All ways, in the order of their counters.
    pub const ALL: [Self; 6] =
        [Self::Inline, Self::Push, Self::Pull, Self::PullDirect, Self::Map, Self::Own];

    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Inline => "inline",
            Self::Push => "push",
            Self::Pull => "pull",
            Self::PullDirect => "pull-direct",
            Self::Map => "map",
            Self::Own => "own",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Counts of one way. Bytes are counted where they are sent and where they arrive; copies are
/// counted by the node whose thread makes them, so that the sum over both nodes, divided by the
/// bytes, says how often the data was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations begun at this node, as receiver of the data.
    pub operations: u64,
    /// Bytes that arrived in contexts (or, for write-backs, in buffers) of this node.
    pub bytes_in: u64,
    /// Bytes of this node's memory that went to others.
    pub bytes_out: u64,
    /// Bytes that a thread of this node copied, in the kernel or outside, counted once a copy.
    pub bytes_copied: u64,
}

/// Counts of all ways of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WayCounts([Counts; 6]);

impl WayCounts {
    /// The counts of one way.
    #[must_use]
    pub fn of(&self, way: Way) -> Counts {
        self.0[way as usize]
    }

    /// Bytes that came in or went out by messages: zero at a node that only routes descriptors.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        self.0.iter().map(|counts| counts.bytes_in + counts.bytes_out).sum()
    }

    pub(crate) fn at(&mut self, way: Way) -> &mut Counts {
        &mut self.0[way as usize]
    }
}

impl fmt::Display for WayCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12}{:>12}{:>16}{:>16}{:>16}",
            "way", "operations", "bytes in", "bytes out", "bytes copied"
        )?;
        for way in Way::ALL {
            let c = self.of(way);
            if c != Counts::default() {
                writeln!(
                    f,
                    "{way:<12}{:>12}{:>16}{:>16}{:>16}",
                    c.operations, c.bytes_in, c.bytes_out, c.bytes_copied
                )?;
            }
        }
        Ok(())
    }
}
