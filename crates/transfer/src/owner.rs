//! The owner's side: other nodes read this node's buffers; see `writeback.rs` for the way back.
//!
//! Every request is checked here, whatever its descriptor says: the handle's generation, the range and
//! the access. A refused request changes nothing.

use crate::choose::Strategy;
use crate::counters::Way;
use crate::global::Access;
use crate::limits::{
    FRAGMENTS_AHEAD, LEASES_MAX, MAPPED_PARTS_MAX, QUEUED_MAX, REGIONS_MAX, SLICES_MAX,
};
use crate::message::{Control, Place, Range, Want, stream};
use crate::state::{BUFFER_BYTES, Lease, OWN, PeerId, State};
use std::sync::Arc;
use towline_mem::{Aggregate, Region, Segment, SharedMemory, Slice};
use towline_net::{Wait, send_descriptors};
use towline_wire::limits::INLINE_BYTES_MAX;
use towline_wire::{Errno, ProtocolError};

/// Set in the numbers of pushes, which the side that pushes chooses; not set in those of requests.
pub(crate) const PUSH_BIT: u64 = 1 << 63;

/// Size of the tag that is sent with each descriptor: operation, length of the memory.
pub(crate) const TAG_BYTES: usize = 16;

impl State {
    /// Returns the slices of this node's buffers that `ranges` name.
    pub(crate) fn resolve(&self, ranges: &[Range], writes: bool) -> Result<Aggregate, Errno> {
        let mut found = Aggregate::new();
        for range in ranges {
            let entry = self.entry(range.handle, range.generation)?;
            if writes && entry.access != Access::ReadWrite {
                return Err(Errno::EACCES);
            }
            let end = range.offset.checked_add(range.length).ok_or(Errno::ERANGE)?;
            if range.length == 0 || end > entry.length {
                return Err(Errno::ERANGE);
            }
            let mut before = 0;
            for slice in &entry.slices {
                let from = range.offset.max(before);
                let until = end.min(before + slice.length);
                if from < until {
                    let offset = slice.offset + (from - before);
                    found.append(slice.segment.clone(), offset, until - from);
                }
                before += slice.length;
            }
            if found.slices().len() > SLICES_MAX {
                return Err(Errno::E2BIG);
            }
        }
        Ok(found)
    }

    /// Records that a context is open on the ranges.
    pub(crate) fn begin_lease(
        &mut self,
        peer: PeerId,
        operation: u64,
        ranges: &[Range],
    ) -> Result<(), Errno> {
        let mut handles: Vec<u32> = ranges.iter().map(|range| range.handle).collect();
        handles.sort_unstable();
        handles.dedup();
        let of = |handle: &u32| self.entries.get(*handle as usize).and_then(Option::as_ref);
        if handles.iter().any(|handle| of(handle).is_none_or(|entry| entry.closing)) {
            return Err(Errno::ESTALE);
        }
        for handle in &handles {
            if let Some(Some(entry)) = self.entries.get_mut(*handle as usize) {
                entry.leases += 1;
            }
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.leases += 1;
        }
        let lease = Lease { handles, ..Lease::default() };
        self.leases.insert((peer, operation), lease);
        Ok(())
    }

    /// Ends a lease, because its context was closed (acknowledged or given up) or, with `None`, lost
    /// with its link.
    pub(crate) fn end_lease(&mut self, peer: PeerId, operation: u64, acknowledged: Option<bool>) {
        // An unknown lease has already ended: a context is closed again if its operation had failed.
        let Some(lease) = self.leases.remove(&(peer, operation)) else { return };
        for handle in lease.handles {
            if let Some(Some(entry)) = self.entries.get_mut(handle as usize) {
                entry.leases -= 1;
                entry.acknowledged += u64::from(acknowledged == Some(true));
                entry.lost += u64::from(acknowledged.is_none());
            }
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.leases -= 1;
        }
    }

    /// Handles a peer's request for ranges of this node's buffers.
    pub(crate) fn fetch(
        &mut self,
        id: PeerId,
        operation: u64,
        want: Want,
        granted: u64,
        ranges: &[Range],
    ) -> Result<(), ProtocolError> {
        self.check_request(id, operation)?;
        if self.leases.contains_key(&(id, operation)) {
            return Err(ProtocolError { what: "operation number is in use", at: 0 });
        }
        if let Err(errno) = self.answer_fetch(id, operation, want, granted, ranges) {
            self.end_lease(id, operation, Some(false));
            self.post(id, &Control::Failed { operation, errno: errno.0 });
        }
        Ok(())
    }

    /// Refuses requests that no honest peer sends.
    pub(crate) fn check_request(&self, id: PeerId, operation: u64) -> Result<(), ProtocolError> {
        if operation & PUSH_BIT != 0 {
            return Err(ProtocolError { what: "operation has the number of a push", at: 0 });
        }
        self.check_reads(id)
    }

    /// Refuses a peer for which too many messages wait already.
    pub(crate) fn check_reads(&self, id: PeerId) -> Result<(), ProtocolError> {
        if self.peers.get(&id).is_some_and(|peer| peer.out.messages() > QUEUED_MAX) {
            return Err(ProtocolError { what: "peer asks but does not read", at: 0 });
        }
        Ok(())
    }

    /// Begins a lease and answers a fetch by its strategy.
    fn answer_fetch(
        &mut self,
        id: PeerId,
        operation: u64,
        want: Want,
        granted: u64,
        ranges: &[Range],
    ) -> Result<(), Errno> {
        let Some(peer) = self.peers.get(&id) else { return Ok(()) };
        if peer.leases >= LEASES_MAX {
            return Err(Errno::EAGAIN);
        }
        let same_user = peer.same_user;
        let data = self.resolve(ranges, want == Want::Lease)?;
        self.begin_lease(id, operation, ranges)?;
        match want {
            Want::Lease => self.post(id, &Control::Done { operation }),
            Want::Data(Strategy::Inline) => {
                if data.len() > INLINE_BYTES_MAX as u64 {
                    return Err(Errno::EOPNOTSUPP);
                }
                let data = unpaged(data)?;
                self.count_out(id, Way::Inline, &data);
                self.post_with(id, &Control::Done { operation }, data);
            }
            Want::Data(Strategy::Pull) => {
                if let Some(lease) = self.leases.get_mut(&(id, operation)) {
                    lease.rest = data;
                }
                self.send_granted(id, operation, granted);
            }
            Want::Data(Strategy::PullDirect) => {
                let regions = regions(&data).filter(|_| same_user).ok_or(Errno::EOPNOTSUPP)?;
                self.counts.at(Way::PullDirect).bytes_out += data.len();
                self.post(id, &Control::Regions { operation, regions });
                // Hold ordinary memory, which a write-back may replace by a copy, so that it stays while
                // it is read. Other memory is written in place; a hold on buffers of a pool would forbid that.
                if let Some(lease) = self.leases.get_mut(&(id, operation)) {
                    for Slice { segment, offset, length } in data.slices() {
                        if matches!(segment, Segment::Host(_)) {
                            lease.direct.append(segment.clone(), *offset, *length);
                        }
                    }
                }
            }
            Want::Data(Strategy::Map) => self.give_away(id, operation, ranges, &data)?,
            Want::Data(Strategy::Push) => return Err(Errno::EOPNOTSUPP),
        }
        Ok(())
    }

    /// Sends what is granted of a fetch, one fragment per message, and reports when that was everything.
    pub(crate) fn send_granted(&mut self, id: PeerId, operation: u64, until: u64) {
        if let Some(lease) = self.leases.get_mut(&(id, operation)) {
            // No honest peer grants more ahead, and all that is granted is queued at once.
            let most = lease.sent.saturating_add(FRAGMENTS_AHEAD * BUFFER_BYTES);
            lease.granted = lease.granted.max(until.min(most));
        }
        while let Some(lease) = self.leases.get_mut(&(id, operation)) {
            if lease.rest.is_empty() {
                return;
            }
            let room = lease.granted.saturating_sub(lease.sent);
            if room == 0 {
                return;
            }
            let fragment = lease.rest.split_to(room.min(BUFFER_BYTES));
            let (offset, is_last) = (lease.sent, lease.rest.is_empty());
            lease.sent += fragment.len();
            self.count_out(id, Way::Pull, &fragment);
            self.post_data(id, stream::FETCH, operation, offset, fragment);
            if is_last {
                self.post(id, &Control::Done { operation });
            }
        }
    }

    /// Passes the descriptors of the memory that holds the data.
    fn give_away(
        &mut self,
        id: PeerId,
        operation: u64,
        ranges: &[Range],
        data: &Aggregate,
    ) -> Result<(), Errno> {
        let mut memories: Vec<Arc<SharedMemory>> = Vec::new();
        let mut places = Vec::new();
        for slice in data.slices() {
            let Segment::Shared(memory, _) = &slice.segment else { return Err(Errno::EOPNOTSUPP) };
            let known = memories.iter().position(|other| Arc::ptr_eq(other, memory));
            let index = known.unwrap_or_else(|| {
                memories.push(memory.clone());
                memories.len() - 1
            });
            if index >= MAPPED_PARTS_MAX {
                return Err(Errno::EOPNOTSUPP);
            }
            places.push(Place { memory: index as u8, offset: slice.offset, length: slice.length });
        }
        // All of the memory becomes visible to the peer, so all of it must have been globalized.
        for range in ranges {
            let entry = self.entry(range.handle, range.generation)?;
            let whole = |memory: &Arc<SharedMemory>| {
                entry.slices.iter().any(|slice| {
                    is_mappable(slice, entry.access)
                        && matches!(&slice.segment, Segment::Shared(m, _) if Arc::ptr_eq(m, memory))
                })
            };
            let used = self.resolve(std::slice::from_ref(range), false)?;
            let all = used
                .slices()
                .all(|slice| matches!(&slice.segment, Segment::Shared(memory, _) if whole(memory)));
            if !all {
                return Err(Errno::EOPNOTSUPP);
            }
        }
        let Some(peer) = self.peers.get(&id) else { return Ok(()) };
        let channel = peer.channel.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        for memory in &memories {
            let mut tag = operation.to_le_bytes().to_vec();
            tag.extend_from_slice(&(memory.len() as u64).to_le_bytes());
            match send_descriptors(channel, &tag, &[memory.fd()], Wait::No) {
                Ok(TAG_BYTES) => {}
                // The peer does not receive what it requested.
                Ok(_) | Err(_) => return Err(Errno::EAGAIN),
            }
        }
        self.counts.at(Way::Map).bytes_out += data.len();
        let memories = memories.len() as u8; // at most MAPPED_PARTS_MAX
        self.post(id, &Control::Mapped { operation, memories, places });
        Ok(())
    }

    /// Handles a grant, for a write-back (`owner`) or a fetch.
    pub(crate) fn granted(&mut self, id: PeerId, operation: u64, owner: bool, until: u64) {
        if owner {
            self.send_update(id, operation, until);
        } else if id != OWN {
            self.send_granted(id, operation, until);
        }
    }
}

/// True for shared memory that can be passed on: all of it was globalized, and its seals permit the
/// access and no more.
pub(crate) fn is_mappable(slice: &Slice, access: Access) -> bool {
    let Segment::Shared(memory, _) = &slice.segment else { return false };
    let whole = slice.offset == 0 && slice.length == memory.len() as u64;
    let sealed = memory.refuses_writers().unwrap_or(false);
    whole
        && match access {
            Access::Read => sealed,
            Access::ReadWrite => !sealed && memory.is_writable(),
        }
}

/// Returns the same bytes without file pages, because reading data for a control message must not fail later.
fn unpaged(data: Aggregate) -> Result<Aggregate, Errno> {
    if data.slices().any(|slice| matches!(slice.segment, Segment::File(_))) {
        return data.to_vec().map(Aggregate::from_vec).map_err(|error| errno_of(&error));
    }
    Ok(data)
}

fn errno_of(error: &std::io::Error) -> Errno {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Errno::EIO,
        _ => Errno::of(error),
    }
}

/// Returns the data's places in this process's address space; `None` if some of it is not in memory or
/// there are too many pieces.
fn regions(data: &Aggregate) -> Option<Vec<Region>> {
    if data.slices().len() > REGIONS_MAX {
        return None;
    }
    data.slices()
        .map(|slice| {
            let (from, length) = (slice.offset as usize, slice.length as usize);
            let address = match &slice.segment {
                Segment::Host(bytes) => bytes[from..from + length].as_ptr().addr(),
                Segment::Registered(buffer) => buffer.bytes()[from..from + length].as_ptr().addr(),
                Segment::Shared(memory, _) => memory.address(from, length).addr(),
                _ => return None,
            };
            Some(Region { address: address as u64, length: slice.length })
        })
        .collect()
}
