//! Global aggregates: names of buffers that any node may hold, without their data.

use crate::Error;
use crate::limits::{HOMES_MAX, PARTS_MAX};
use std::collections::VecDeque;
use std::sync::Arc;
use towline_net::address::Address;

/// What may be done with buffers that were globalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Read and written back.
    ReadWrite,
}

/// What kind of memory the owner has, as far as other nodes care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartKind {
    /// Ordinary memory.
    Host,
    /// A buffer of a pool.
    Registered,
    /// Shared memory that cannot be given away: only a part of it was globalized, or it is not
    /// sealed as its access demands.
    Shared,
    /// A whole memfd, which can be given away and mapped.
    Mappable,
    /// Pages of a file.
    File,
}

/// The node that owns buffers, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// Number of the node, random.
    pub node: u64,
    /// Number of its machine: nodes with the same one can use each other's Unix sockets.
    pub host: u64,
    /// Where it listens; empty when it can only be reached by those it is linked with.
    pub addresses: Vec<Address>,
}

/// One range of an owner's buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Who owns it.
    pub home: Arc<Home>,
    /// Which entry of the owner's table.
    pub handle: u32,
    /// Generation of that entry: 64 random bits, new each time, so that handles cannot be guessed
    /// and old ones name nothing.
    pub generation: u64,
    /// Kind of memory. A hint: the owner knows best.
    pub kind: PartKind,
    /// What may be done with it. A hint as well: the owner checks.
    pub access: Access,
    /// First byte within the entry.
    pub offset: u64,
    /// Bytes, at least one.
    pub length: u64,
}

/// An ordered list of ranges of buffers of any owners: control information only. It can be split
/// and combined, packed into bytes, sent to others, and opened by a [`crate::Context`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Global {
    parts: VecDeque<Part>,
    length: u64,
}

impl Global {
    /// No bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes named by all parts.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True when no bytes are named.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The parts, in order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &Part> {
        self.parts.iter()
    }

    /// Adds a part at the end. Neighbours in the owner's buffers become one part.
    ///
    /// # Errors
    /// `Invalid`: the part is empty or ends beyond 2^64, or all together do.
    pub fn append(&mut self, part: Part) -> Result<(), Error> {
        self.length = self.grown(&part)?;
        if let Some(last) = self.parts.back_mut()
            && joins(last, &part)
        {
            last.length += part.length;
            return Ok(());
        }
        self.parts.push_back(part);
        Ok(())
    }

    /// Adds a part at the front.
    ///
    /// # Errors
    /// As [`Global::append`].
    pub fn prepend(&mut self, part: Part) -> Result<(), Error> {
        self.length = self.grown(&part)?;
        if let Some(first) = self.parts.front_mut()
            && joins(&part, first)
        {
            first.offset = part.offset;
            first.length += part.length;
            return Ok(());
        }
        self.parts.push_front(part);
        Ok(())
    }

    /// Adds all parts of `other` at the end.
    ///
    /// # Errors
    /// `Invalid`: the lengths together are beyond 2^64; nothing is added.
    pub fn concatenate(&mut self, other: Self) -> Result<(), Error> {
        if self.length.checked_add(other.length).is_none() {
            return Err(Error::Invalid("aggregate longer than 2^64 bytes"));
        }
        other.parts.into_iter().try_for_each(|part| self.append(part))
    }

    /// Takes the first `count` bytes off and returns them; all of them if there are fewer.
    #[must_use]
    pub fn split_to(&mut self, count: u64) -> Self {
        let mut head = Self::new();
        while head.length < count {
            let missing = count - head.length;
            let Some(first) = self.parts.front_mut() else { break };
            let mut part = first.clone();
            if first.length <= missing {
                self.parts.pop_front();
            } else {
                part.length = missing;
                first.offset += missing;
                first.length -= missing;
            }
            self.length -= part.length;
            head.length += part.length;
            head.parts.push_back(part);
        }
        head
    }

    /// Refuses what is too long to be packed or opened.
    pub(crate) fn check_limits(&self) -> Result<(), Error> {
        if self.parts.len() > PARTS_MAX {
            return Err(Error::Invalid("aggregate of more than 1024 parts"));
        }
        if self.homes().len() > HOMES_MAX {
            return Err(Error::Invalid("aggregate with parts of more than 64 nodes"));
        }
        Ok(())
    }

    /// The different owners, in the order in which they first occur.
    pub(crate) fn homes(&self) -> Vec<&Arc<Home>> {
        let mut homes: Vec<&Arc<Home>> = Vec::new();
        for part in &self.parts {
            if !homes.iter().any(|home| same_home(home, &part.home)) {
                homes.push(&part.home);
            }
        }
        homes
    }

    fn grown(&self, part: &Part) -> Result<u64, Error> {
        if part.length == 0 || part.offset.checked_add(part.length).is_none() {
            return Err(Error::Invalid("part is empty or ends beyond 2^64"));
        }
        self.length
            .checked_add(part.length)
            .ok_or(Error::Invalid("aggregate longer than 2^64 bytes"))
    }
}

pub(crate) fn same_home(a: &Arc<Home>, b: &Arc<Home>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

fn joins(a: &Part, b: &Part) -> bool {
    a.handle == b.handle
        && a.generation == b.generation
        && a.offset + a.length == b.offset
        && a.kind == b.kind
        && a.access == b.access
        && same_home(&a.home, &b.home)
}
