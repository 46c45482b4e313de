//! What stands in the journal of a copy: one JSON object a line, first what is copied to where, then
//! each piece that is on stable storage. A last line that is torn is one that was not written.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::BufRead;

/// What tells, in a later run, whether an end is still the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    /// Names the end and, where that can be told, the version of its bytes.
    pub(super) is: String,
    /// Its length, bytes.
    pub(super) size: u64,
    /// The same name and length say that the bytes are the same.
    pub(super) sure: bool,
}

/// What is copied to where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Title {
    /// As it was named.
    pub(super) source: String,
    /// What it was.
    pub(super) source_is: Stamp,
    /// As it was named.
    pub(super) target: String,
    /// What it was.
    pub(super) target_is: Stamp,
}

impl Title {
    /// True for source and target when, as they are still the same by name, their bytes are, too.
    pub(super) fn sure(&self) -> (bool, bool) {
        (self.source_is.sure, self.target_is.sure)
    }
}

/// A piece that was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    /// First byte.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) length: u64,
    /// crc32c of them; none: all zero, whether copied or not. In a journal: what was noted before holds no more.
    pub(super) sum: Option<u32>,
}

/// What an earlier copy left.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing.
    Nothing,
    /// A copy of what is now another source, or to another target: this changed.
    Other(&'static str),
    /// These pieces, in order.
    Pieces(Vec<Piece>),
}

impl Left {
    /// Reads a journal, for a copy of what is so `now`.
    pub(super) fn read(journal: impl BufRead, now: &Title) -> Self {
        let mut lines = journal.lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return Self::Nothing };
        // Names that have one checksum are as good as nothing.
        let Ok(then) = serde_json::from_str::<Title>(&first) else { return Self::Nothing };
        if then.source != now.source || then.target != now.target {
            return Self::Nothing;
        }
        if then.source_is != now.source_is {
            return Self::Other("source");
        }
        if then.target_is != now.target_is {
            return Self::Other("target");
        }
        let lines = lines.map_while(|line| serde_json::from_str::<Piece>(&line).ok());
        // Of two with one offset the second counts.
        let pieces: BTreeMap<_, _> = lines.map(|piece| (piece.offset, piece)).collect();
        Self::Pieces(pieces.into_values().filter(|piece| piece.sum.is_some()).collect())
    }
}

/// True for a journal of a copy to this target, however long that was then.
pub(super) fn is_to(journal: impl BufRead, target: &Stamp) -> bool {
    let first = journal.lines().next().and_then(Result::ok);
    let title = first.and_then(|line| serde_json::from_str::<Title>(&line).ok());
    title.is_some_and(|title| title.target_is.is == target.is)
}

/// A line of a journal.
pub(super) fn line(what: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(what).map(|line| line + "\n")
}
