//! The contents of a copy's journal: one JSON object a line, first source and target, then each piece that
//! is on stable storage. A torn last line is ignored.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::BufRead;

/// Identifies an end, so that a later run can tell whether it is still the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    /// Identifies the end and, if possible, the version of its contents.
    pub(super) is: String,
    /// Length in bytes.
    pub(super) size: u64,
    /// The same identity and length mean the same contents.
    pub(super) sure: bool,
}

/// What a stamp is of.
enum Kind {
    /// A disk of one of our servers.
    Remote,
    /// A disk of another server, or a device: it may be the same as any other end.
    Any,
    /// A local file.
    File,
}

impl Stamp {
    fn kind(&self) -> Kind {
        match self.is.split(' ').next() {
            Some("disk") => Kind::Remote,
            Some("file") => Kind::File,
            _ => Kind::Any,
        }
    }

    /// Returns true if the two may be the same disk, although their stamps differ. (That a local file is a disk of a
    /// server on this machine is told by [`End::place_of_server`](super::end::End::place_of_server).)
    pub(super) fn may_be(&self, other: &Self) -> bool {
        match (self.kind(), other.kind()) {
            (Kind::Any, _) | (_, Kind::Any) | (Kind::Remote, Kind::File) => true,
            (Kind::File, _) | (Kind::Remote, Kind::Remote) => false,
        }
    }
}

/// Source and target of a copy.
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
    /// Returns for source and target whether the same identity means the same contents.
    pub(super) fn sure(&self) -> (bool, bool) {
        (self.source_is.sure, self.target_is.sure)
    }
}

/// A piece that was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    /// Offset of the first byte.
    pub(super) offset: u64,
    /// Length in bytes.
    pub(super) length: u64,
    /// crc32c of the bytes; `None` if all are zero, copied or not. In a journal, `None` withdraws what was
    /// noted before.
    pub(super) sum: Option<u32>,
}

/// What an earlier copy left.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Nothing.
    Nothing,
    /// A copy whose source or target has changed since; this names the one that has.
    Other(&'static str),
    /// Finished pieces in order.
    Pieces(Vec<Piece>),
}

impl Left {
    /// Reads a journal for a copy between source and target as they are `now`.
    pub(super) fn read(journal: impl BufRead, now: &Title) -> Self {
        let mut lines = journal.lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return Self::Nothing };
        // Journals are named by checksums, so this may be the journal of another copy.
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
        // Later pieces replace earlier ones with the same offset.
        let pieces: BTreeMap<_, _> = lines.map(|piece| (piece.offset, piece)).collect();
        Self::Pieces(pieces.into_values().filter(|piece| piece.sum.is_some()).collect())
    }
}

/// Returns the target of the copy whose journal this is.
pub(super) fn target(journal: impl BufRead) -> Option<Stamp> {
    let first = journal.lines().next().and_then(Result::ok);
    let title = first.and_then(|line| serde_json::from_str::<Title>(&line).ok());
    title.map(|title| title.target_is)
}

/// Formats a line of a journal.
pub(super) fn line(what: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(what).map(|line| line + "\n")
}
