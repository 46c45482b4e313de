//! Disks for Towline's own clients, over their sessions.
//!
//! The path of a request: lane -> `Serving` -> [`requests`] -> engine of disks -> [`answers`] -> send queue
//! of the lane. Data of long writes is sent under grants, as for files, straight into the buffers from which
//! it is written, or into the memory of a memory disk ([`data`]). Small reads of data in memory, and small
//! writes into memory, skip the engine; over shared memory these writes are copied once, from the ring
//! ([`in_ring`]).
//!
//! Reads belong to the lane: when it is lost they are forgotten, and the client sends them again. Changes
//! belong to the session: they continue, and are answered when the client sends them again.

mod answers;
mod data;
mod in_ring;
mod requests;

pub(crate) use in_ring::Taken;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Disk, Meter, OwnerKey, RequestKey};
use towline_mem::PoolBuffer;
use towline_wire::disk::Checking;
use towline_wire::limits::SLOTS_MAX;
use towline_wire::{Errno, Header};

/// How much of the target of the next write is prefetched: after some cache lines the processor continues by
/// itself.
pub(crate) const EXPECTED_BYTES: u64 = 256;

/// A client's request; the engine returns it with the outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tag {
    session: u64,
    slot: u16,
    sequence: u32,
    /// The owner for the lane's reads or the session's changes.
    owner: OwnerKey,
}

/// A session's open disks and requests.
#[derive(Default)]
pub(crate) struct SessionDisks {
    /// Open disks, by the numbers that the client chose.
    open: BTreeMap<u32, Open>,
    /// Owner of the session's changes.
    owner: Option<OwnerKey>,
    /// Requests under way, by slot; empty until the first one.
    requests: Vec<Option<Under>>,
}

/// An open disk.
struct Open {
    disk: Arc<Disk>,
    /// The client's meter, if the client is known.
    meter: Option<Arc<Meter>>,
}

/// A request under way.
struct Under {
    sequence: u32,
    /// Tag of the operation, for statistics.
    operation: u8,
    arrived: Instant,
    disk: Arc<Disk>,
    /// The disk's epoch when the request arrived: a later change can only make it out of date.
    epoch: u64,
    kind: Kind,
}

enum Kind {
    Read(Reading),
    Write(Writing),
    /// Extents.
    Status,
    /// Any other change that is answered with `Stored`.
    Change,
    Flush,
    /// A range is being read into memory.
    Cache,
    /// To this size; zero: to that which the back end has now.
    Resize(u64),
}

struct Reading {
    offset: u64,
    length: u32,
    checksums: bool,
    /// Why a part of it could not be read.
    failed: Option<Errno>,
}

struct Writing {
    key: RequestKey,
    length: u64,
    /// Data that came with the request and waits for a buffer.
    inline: Option<Vec<u8>>,
    grants: VecDeque<Granted>,
    /// Bytes granted so far.
    granted: u64,
    /// Bytes received so far.
    filled: u64,
    checking: Option<Checking>,
    /// Why the data must not be written.
    failed: Option<Errno>,
    data_since: Option<Instant>,
    /// Bytes of its first fragment; zero: none was granted.
    first: usize,
}

/// A part of a write that the client was told to send.
struct Granted {
    /// Offset in the write.
    offset: u64,
    length: usize,
    /// `None`: the data is received into the disk's own memory.
    buffer: Option<PoolBuffer>,
    /// Bytes received into their place.
    placed: usize,
    /// The disk has shrunk meanwhile: the data is thrown away.
    lost: bool,
    /// The data comes under an advance grant.
    ahead: bool,
}

impl SessionDisks {
    /// Returns true if a disk is open.
    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Returns the client's meter at this disk, if the client is limited.
    pub(crate) fn meter(&self, disk: u32) -> Option<Arc<Meter>> {
        self.open.get(&disk)?.meter.as_ref().filter(|meter| meter.is_limited()).cloned()
    }

    /// Returns true if the client is limited at one of its disks.
    fn are_limited(&self) -> bool {
        self.open.values().any(|open| open.meter.as_ref().is_some_and(|meter| meter.is_limited()))
    }

    /// Returns true if the write's next data comes under an advance grant.
    pub(crate) fn awaits_ahead(&mut self, header: &Header) -> bool {
        let Some(under) = self.find(header.slot, header.sequence) else { return false };
        let Kind::Write(write) = &under.kind else { return false };
        write.grants.front().is_some_and(|granted| granted.ahead)
    }

    fn put(&mut self, slot: u16, under: Under) {
        if self.requests.is_empty() {
            self.requests.resize_with(SLOTS_MAX, || None);
        }
        self.requests[usize::from(slot)] = Some(under);
    }

    fn find(&mut self, slot: u16, sequence: u32) -> Option<&mut Under> {
        let under = self.requests.get_mut(usize::from(slot))?.as_mut()?;
        (under.sequence == sequence).then_some(under)
    }

    fn take(&mut self, slot: u16, sequence: u32) -> Option<Under> {
        let place = self.requests.get_mut(usize::from(slot))?;
        place.take_if(|under| under.sequence == sequence)
    }

    /// Returns true if no request is under way.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.requests.iter().all(Option::is_none)
    }

    /// Takes the owner of the session's changes; the next change gets a new one.
    pub(crate) fn take_owner(&mut self) -> Option<OwnerKey> {
        self.owner.take()
    }

    /// Returns true while a request is under way that needs nothing more from the client.
    pub(crate) fn is_busy(&self) -> bool {
        self.requests.iter().flatten().any(|under| match &under.kind {
            Kind::Write(write) => write.filled >= write.length,
            _ => true,
        })
    }

    /// Returns true if the request of this slot waits for data.
    pub(crate) fn is_transfer(&self, slot: u16) -> bool {
        let under = self.requests.get(usize::from(slot)).and_then(Option::as_ref);
        under.is_some_and(|under| matches!(&under.kind, Kind::Write(w) if w.filled < w.length))
    }
}
