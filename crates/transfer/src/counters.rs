//! Counters for each way in which data is moved.

use std::fmt;

/// The way in which the bytes of an operation are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// In the control message that answers the request or carries the write-back.
    Inline,
    /// In messages that the side with the data sends on its own, into memory granted beforehand.
    Push,
    /// In messages that the side without the data grants one by one.
    Pull,
    /// The receiver reads them from the owner's memory (`process_vm_readv(2)`): a pull without messages.
    PullDirect,
    /// Not moved: the receiver maps the owner's memory.
    Map,
    /// Not moved: the node opened its own buffers.
    Own,
}

impl Way {
    /// All ways, in the order of their counters.
    pub const ALL: [Self; 6] =
        [Self::Inline, Self::Push, Self::Pull, Self::PullDirect, Self::Map, Self::Own];

    /// Returns the name for tables.
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

/// Counters of one way. Bytes are counted both where they are sent and where they arrive. Copies are
/// counted by the node whose thread makes them, so the sum over both nodes divided by the bytes is the
/// number of times that the data was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations that this node started as receiver of the data.
    pub operations: u64,
    /// Bytes that arrived in contexts (or, for write-backs, in buffers) of this node.
    pub bytes_in: u64,
    /// Bytes of this node's memory that went to other nodes.
    pub bytes_out: u64,
    /// Bytes that a thread of this node copied, in the kernel or outside it; each copy counts.
    pub bytes_copied: u64,
}

/// Counters of all ways of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WayCounts([Counts; 6]);

impl WayCounts {
    /// Returns the counters of one way.
    #[must_use]
    pub fn of(&self, way: Way) -> Counts {
        self.0[way as usize]
    }

    /// Returns the sum of bytes that came in and went out; zero at a node that only routes descriptors.
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
