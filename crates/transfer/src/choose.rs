//! Chooses the strategy that moves the data; the only place where that is decided.
//!
//! The limits are those of the wire ([`towline_wire::limits::INLINE_BYTES_MAX`], the payload that a
//! request may carry) and of the network layer. The file protocol uses the same constants.

use crate::PartKind;
use std::fmt::Write;
use towline_wire::limits::{FRAGMENT_BYTES_MAX, INLINE_BYTES_MAX};

/// A way to bring data to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// The data is part of the control message: at most 16 KiB.
    Inline,
    /// The side that has the data sends it into memory granted beforehand.
    Push,
    /// The side that wants the data requests it, grant by grant, into buffers of its pool.
    Pull,
    /// A pull without messages: the receiver reads the owner's memory. Both are processes of one user on
    /// one machine.
    PullDirect,
    /// The receiver maps the owner's memory; nothing is moved.
    Map,
}

/// How the strategy is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Choice {
    /// By [`choose`].
    #[default]
    Automatic,
    /// By the caller. The operation fails if that strategy cannot be used.
    Forced(Strategy),
}

/// What is known when the strategy is chosen.
#[derive(Clone, Copy, Debug)]
pub struct Situation {
    /// Number of bytes to move.
    pub length: u64,
    /// The least capable kind of memory among the parts, from [`least_capable`].
    pub kind: PartKind,
    /// The link passes descriptors: it runs over a Unix socket, shared memory, or inside the process.
    pub passes_descriptors: bool,
    /// A trial read of the other side's memory succeeded: same machine, user and process table.
    pub reads_memory: bool,
    /// Bytes of the other side's memory that were granted beforehand to the choosing side.
    pub granted: u64,
    /// The data is written back to its owner, not fetched.
    pub writes: bool,
}

/// From this size on a mapping costs no more than a pull (measured with the example `strategies`), and
/// it needs no buffers of the pool.
pub const MAP_BYTES_MIN: u64 = 64 * 1024;
/// Most bytes pushed without a request: one fragment. Beyond that the receiver should decide when.
pub const PUSH_BYTES_MAX: u64 = FRAGMENT_BYTES_MAX as u64;

/// Returns the best strategy for a situation.
#[must_use]
pub fn choose(situation: &Situation) -> Strategy {
    let Situation { length, kind, passes_descriptors, reads_memory, granted, writes } = *situation;
    let mappable = kind == PartKind::Mappable && passes_descriptors && !writes;
    if mappable && length >= MAP_BYTES_MIN {
        Strategy::Map
    } else if length <= INLINE_BYTES_MAX as u64 && (writes || granted < length) {
        Strategy::Inline
    } else if length <= PUSH_BYTES_MAX && granted >= length {
        Strategy::Push
    } else if kind != PartKind::File && reads_memory && !writes {
        Strategy::PullDirect
    } else {
        Strategy::Pull
    }
}

/// Returns the kind that limits what can be done with all parts: files before memory, memory before
/// mappable memory.
#[must_use]
pub fn least_capable(kinds: impl IntoIterator<Item = PartKind>) -> PartKind {
    let rank = |kind: &PartKind| match kind {
        PartKind::File => 0,
        PartKind::Host => 1,
        PartKind::Registered => 2,
        PartKind::Shared => 3,
        PartKind::Mappable => 4,
    };
    kinds.into_iter().min_by_key(rank).unwrap_or(PartKind::Host)
}

/// Returns the rule as a table: the choice for each link, kind of memory and length.
#[must_use]
pub fn table() -> String {
    const KIB: u64 = 1024;
    let lengths = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];
    let mut out = format!("{:<8}{:<12}{:<10}", "link", "memory", "granted");
    for length in lengths {
        let _ = write!(out, "{:>12}", format!("{} KiB", length / KIB));
    }
    out.push('\n');
    for (link, near) in [("tcp", false), ("unix", true), ("shm", true)] {
        for (kind, name) in
            [(PartKind::Host, "host"), (PartKind::Mappable, "mappable"), (PartKind::File, "file")]
        {
            for granted in [0, 1024 * KIB] {
                let _ = write!(out, "{link:<8}{name:<12}{granted:<10}");
                for length in lengths {
                    let chosen = choose(&Situation {
                        length,
                        kind,
                        passes_descriptors: near,
                        reads_memory: near,
                        granted,
                        writes: false,
                    });
                    let _ = write!(out, "{:>12}", format!("{chosen:?}"));
                }
                out.push('\n');
            }
        }
    }
    out
}
