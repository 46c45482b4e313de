//! Disks for clients of our own, over their sessions.
//!
//! A request's way: lane -> `Serving` -> [`requests`] -> engine of disks -> [`answers`] -> send queue
//! of the lane. Data of long writes comes under grants, as for files, straight into the buffers it
//! is written from, or into the memory of a memory disk ([`data`]). Small reads of what is in memory, and small writes into it, skip the
//! engine; such writes over shared memory are copied once, from the ring ([`in_ring`]).
//!
//! Reads belong to the lane: when it is lost they are forgotten, and the client asks again. Changes
//! belong to the session: they go on, and are answered when the client asks again.

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

/// How much is fetched of where the next request writes: the processor goes on by itself once it has seen some lines.
pub(crate) const EXPECTED_BYTES: u64 = 256;

/// A request of a client, as the engine hands it back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tag {
    session: u64,
    slot: u16,
    sequence: u32,
    /// The lane's or the session's.
    owner: OwnerKey,
}

/// What a session has of disks.
#[derive(Default)]
pub(crate) struct SessionDisks {
    /// By the numbers that the client gave them.
    open: BTreeMap<u32, Open>,
    /// Owns its changes.
    owner: Option<OwnerKey>,
    /// Requests under way, by slot; empty until there is one.
    requests: Vec<Option<Under>>,
}

/// An open disk.
struct Open {
    disk: Arc<Disk>,
    /// What measures the client, if it is known.
    meter: Option<Arc<Meter>>,
}

/// A request under way.
struct Under {
    sequence: u32,
    /// Tag of the operation, for statistics.
    operation: u8,
    arrived: Instant,
    disk: Arc<Disk>,
    /// The disk's when the request came: what happens meanwhile can only make it older.
    epoch: u64,
    kind: Kind,
}

enum Kind {
    Read(Reading),
    Write(Writing),
    /// Extents.
    Status,
    /// Everything that is answered by `Stored`.
    Change,
    /// A range is brought into memory.
    Cache,
    Resize,
}

struct Reading {
    offset: u64,
    length: u32,
    checksums: bool,
    /// Why a part of it could not be had.
    failed: Option<Errno>,
}

struct Writing {
    key: RequestKey,
    length: u64,
    /// Came with the request and waits for a buffer.
    inline: Option<Vec<u8>>,
    grants: VecDeque<Granted>,
    /// Bytes granted so far, and those of them that came.
    granted: u64,
    filled: u64,
    checking: Option<Checking>,
    /// Why what was sent is not to be written.
    failed: Option<Errno>,
    data_since: Option<Instant>,
    /// Bytes of its first fragment; zero: none was granted.
    first: usize,
}

/// A part of a write that the client was told to send.
struct Granted {
    /// Of the write.
    offset: u64,
    length: usize,
    /// `None`: it is received into the disk's own memory.
    buffer: Option<PoolBuffer>,
    /// Bytes that are in their place.
    placed: usize,
    /// The disk became shorter meanwhile: what comes is thrown away.
    lost: bool,
    /// The data comes by leave that was given before the request.
    ahead: bool,
}

impl SessionDisks {
    /// What measures the client at this disk, if it is limited.
    pub(crate) fn meter(&self, disk: u32) -> Option<Arc<Meter>> {
        self.open.get(&disk)?.meter.as_ref().filter(|meter| meter.is_limited()).cloned()
    }

    /// The client is limited at one of its disks.
    fn are_limited(&self) -> bool {
        self.open.values().any(|open| open.meter.as_ref().is_some_and(|meter| meter.is_limited()))
    }

    /// The next data for a write is to come by leave.
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

    /// True while something is under way that needs nothing more of the client.
    pub(crate) fn is_busy(&self) -> bool {
        self.requests.iter().flatten().any(|under| match &under.kind {
            Kind::Write(write) => write.filled >= write.length,
            _ => true,
        })
    }

    /// True when the request of this slot waits for data.
    pub(crate) fn is_transfer(&self, slot: u16) -> bool {
        let under = self.requests.get(usize::from(slot)).and_then(Option::as_ref);
        under.is_some_and(|under| matches!(&under.kind, Kind::Write(w) if w.filled < w.length))
    }
}
