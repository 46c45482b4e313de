//! Global aggregates: names of buffers that any node may hold, without the data.

use crate::Error;
use crate::limits::{HOMES_MAX, PARTS_MAX};
use std::collections::VecDeque;
use std::sync::Arc;
use towline_net::address::Address;

/// What other nodes may do with globalized buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read them.
    Read,
    /// Read them and write to them.
    ReadWrite,
}

/// The owner's kind of memory, as far as it matters to other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartKind {
    /// Ordinary memory.
    Host,
    /// A buffer of a pool.
    Registered,
    /// Shared memory that must not be passed on: only part of it was globalized, or its seals do not fit
    /// its access.
    Shared,
    /// A whole memfd, which can be passed on and mapped.
    Mappable,
    /// Pages of a file.
    File,
}

/// The node that owns buffers, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The node's number, random.
    pub node: u64,
    /// Number of its machine. Nodes with the same number can use each other's Unix sockets.
    pub host: u64,
    /// The addresses at which it listens; empty when only nodes linked to it can reach it.
    pub addresses: Vec<Address>,
}

/// One range of an owner's buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The owner.
    pub home: Arc<Home>,
    /// Index of the entry in the owner's table.
    pub handle: u32,
    /// Generation of that entry: 64 random bits, new each time, so that handles cannot be guessed and
    /// old ones refer to nothing.
    pub generation: u64,
    /// Kind of memory. A hint, because only the owner knows for sure.
    pub kind: PartKind,
    /// The allowed access. Also a hint, because the owner checks it.
    pub access: Access,
    /// Offset of the first byte within the entry.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub length: u64,
}

/// An ordered list of ranges of buffers of any owners: only control information. It can be split and
/// combined, packed into bytes, sent to other nodes, and opened as a [`crate::Context`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Global {
    parts: VecDeque<Part>,
    length: u64,
}

impl Global {
    /// Returns an aggregate of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of bytes in all parts.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the parts, in order.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = &Part> {
        self.parts.iter()
    }

    /// Adds a part at the end. Parts that are adjacent in the owner's buffers are joined.
    ///
    /// # Errors
    /// `Invalid`: the part is empty or ends beyond 2^64, or the total length is more than that.
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
    /// See [`Global::append`].
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
    /// `Invalid`: the total length is more than 2^64; nothing is added.
    pub fn concatenate(&mut self, other: Self) -> Result<(), Error> {
        if self.length.checked_add(other.length).is_none() {
            return Err(Error::Invalid("aggregate longer than 2^64 bytes"));
        }
        other.parts.into_iter().try_for_each(|part| self.append(part))
    }

    /// Removes the first `count` bytes, or all if there are fewer, and returns them.
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

    /// Refuses aggregates that are too long to be packed or opened.
    pub(crate) fn check_limits(&self) -> Result<(), Error> {
        if self.parts.len() > PARTS_MAX {
            return Err(Error::Invalid("aggregate of more than 1024 parts"));
        }
        if self.homes().len() > HOMES_MAX {
            return Err(Error::Invalid("aggregate with parts of more than 64 nodes"));
        }
        Ok(())
    }

    /// Returns the distinct owners, in the order in which they first occur.
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
