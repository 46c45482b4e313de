//! The owner's side of write-backs: a context on this node's buffers was written to and is closed.

use crate::choose::Strategy;
use crate::counters::Way;
use crate::limits::LEASES_MAX;
use crate::message::{Control, Range};
use crate::state::{BUFFER_BYTES, Hungry, Landing, Lease, PeerId, State};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{Segment, Slice};
use towline_wire::{Errno, ProtocolError};

impl State {
    /// Handles a peer's write-back.
    pub(crate) fn update(
        &mut self,
        id: PeerId,
        operation: u64,
        strategy: Strategy,
        pushed: u64,
        ranges: Vec<Range>,
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        self.check_request(id, operation)?;
        if self.landings.contains_key(&(id, operation)) {
            return Err(ProtocolError { what: "operation number is in use", at: 0 });
        }
        let length = ranges.iter().map(|range| range.length).sum::<u64>();
        let result = match strategy {
            Strategy::Inline if payload.len() as u64 != length => {
                return Err(ProtocolError { what: "payload is not as long as its ranges", at: 0 });
            }
            Strategy::Inline => {
                self.count_in(Way::Inline, length, 2 * length);
                self.apply(id, &ranges, 0, payload).map(|()| true)
            }
            Strategy::Push => {
                let key = (id, pushed);
                let fits = |p: &crate::state::Pushed| p.holders == 0 && p.length == length;
                if !self.pushed.get(&key).is_some_and(fits) {
                    return Err(ProtocolError { what: "write-back of what was not pushed", at: 0 });
                }
                let Some(data) = self.pushed.remove(&key) else { return Ok(()) };
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.push_used -= data.buffers.len();
                }
                self.count_in(Way::Push, 0, length); // its bytes were counted when they arrived
                let mut result = Ok(true);
                for (index, buffer) in data.buffers.iter().enumerate() {
                    let at = index as u64 * BUFFER_BYTES;
                    let count = (length - at).min(BUFFER_BYTES) as usize;
                    if result.is_ok() {
                        let bytes = &buffer.bytes()[..count];
                        result = self.apply(id, &ranges, at, bytes).map(|()| true);
                    }
                }
                drop(data);
                self.feed();
                result
            }
            Strategy::Pull => self.offer(id, operation, ranges, length).map(|()| false),
            _ => Err(Errno::EOPNOTSUPP),
        };
        match result {
            Ok(true) => self.post(id, &Control::Done { operation }),
            Ok(false) => {}
            Err(errno) => self.post(id, &Control::Failed { operation, errno: errno.0 }),
        }
        Ok(())
    }

    fn offer(
        &mut self,
        id: PeerId,
        operation: u64,
        ranges: Vec<Range>,
        length: u64,
    ) -> Result<(), Errno> {
        self.resolve(&ranges, true)?;
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        if peer.landings >= LEASES_MAX {
            return Err(Errno::EAGAIN);
        }
        peer.landings += 1;
        let landing =
            Landing { ranges, length, applied: 0, buffer: None, granted_at: Instant::now() };
        self.landings.insert((id, operation), landing);
        self.counts.at(Way::Pull).operations += 1;
        self.hungry.push_back(Hungry::Landing(id, operation));
        self.feed();
        Ok(())
    }

    /// Takes a buffer for the next fragment of a write-back and grants it. Returns false if there is none.
    pub(crate) fn feed_landing(&mut self, id: PeerId, operation: u64) -> bool {
        let Some(landing) = self.landings.get_mut(&(id, operation)) else { return true };
        let Some(buffer) = self.pool.take() else { return false };
        landing.buffer = Some(buffer);
        landing.granted_at = Instant::now();
        let until = (landing.applied + BUFFER_BYTES).min(landing.length);
        self.post(id, &Control::Grant { operation, owner: true, until });
        true
    }

    /// Handles the arrival of a fragment of a write-back.
    pub(crate) fn landed(&mut self, id: PeerId, operation: u64, count: u64) {
        let Some(mut landing) = self.landings.remove(&(id, operation)) else { return };
        let Some(buffer) = landing.buffer.take() else { return };
        self.counts.at(Way::Pull).bytes_in += count;
        self.counts.at(Way::Pull).bytes_copied += 2 * count; // off the link, then into our buffers
        let bytes = &buffer.bytes()[..count as usize];
        let applied = self.apply(id, &landing.ranges, landing.applied, bytes);
        drop(buffer);
        landing.applied += count;
        let done = landing.applied == landing.length;
        if let (Ok(()), false) = (applied, done) {
            self.landings.insert((id, operation), landing);
            self.hungry.push_back(Hungry::Landing(id, operation));
        } else {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.landings -= 1;
            }
            let answer = match applied {
                Ok(()) => Control::Done { operation },
                Err(errno) => Control::Failed { operation, errno: errno.0 },
            };
            self.post(id, &answer);
        }
        self.feed();
    }

    /// Ends a write-back whose sender has given it up. What has arrived stays.
    pub(crate) fn end_landing(&mut self, id: PeerId, operation: u64) {
        if self.landings.remove(&(id, operation)).is_none() {
            return;
        }
        self.hungry.retain(|hungry| *hungry != Hungry::Landing(id, operation));
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.landings -= 1;
        }
        self.feed();
    }

    fn count_in(&mut self, way: Way, bytes: u64, copied: u64) {
        let counts = self.counts.at(way);
        counts.operations += 1;
        counts.bytes_in += bytes;
        counts.bytes_copied += copied;
    }

    /// Writes bytes into this node's buffers, starting `skip` bytes into the ranges.
    pub(crate) fn apply(
        &mut self,
        peer: PeerId,
        ranges: &[Range],
        skip: u64,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.resolve(ranges, true)?;
        let holds = |handle: u32| {
            let mine = |(key, lease): (&(PeerId, u64), &Lease)| {
                key.0 == peer && lease.handles.contains(&handle)
            };
            self.leases.iter().any(mine)
        };
        for range in ranges {
            let entry = self.entry(range.handle, range.generation)?;
            // Buffers that are being reclaimed change only through contexts that are open on them.
            if entry.closing && !holds(range.handle) {
                return Err(Errno::ESTALE);
            }
        }
        let (mut before, end) = (0, skip + bytes.len() as u64);
        for range in ranges {
            let (from, until) = (skip.max(before), end.min(before + range.length));
            if from < until
                && let Some(Some(entry)) = self.entries.get_mut(range.handle as usize)
            {
                let part = &bytes[(from - skip) as usize..(until - skip) as usize];
                write_slices(&mut entry.slices, range.offset + (from - before), part)?;
            }
            before += range.length;
        }
        Ok(())
    }
}

/// Writes into an entry's memory at offset `at`.
fn write_slices(slices: &mut [Slice], at: u64, bytes: &[u8]) -> Result<(), Errno> {
    let (mut before, end) = (0, at + bytes.len() as u64);
    for slice in slices {
        let (from, until) = (at.max(before), end.min(before + slice.length));
        if from < until {
            let part = &bytes[(from - at) as usize..(until - at) as usize];
            let offset = slice.offset + (from - before);
            let start = offset as usize;
            match &mut slice.segment {
                // Other holders of the bytes, such as a message being sent, keep the old ones.
                Segment::Host(memory) => {
                    Arc::make_mut(memory)[start..start + part.len()].copy_from_slice(part);
                }
                Segment::Registered(buffer) => {
                    let buffer = Arc::get_mut(buffer).ok_or(Errno::EBUSY)?;
                    buffer.bytes_mut()[start..start + part.len()].copy_from_slice(part);
                }
                Segment::Shared(memory, _) if memory.is_writable() => memory.copy_in(start, part),
                Segment::File(file) => write_file(file.as_fd(), offset, part)?,
                _ => return Err(Errno::EACCES),
            }
        }
        before += slice.length;
    }
    Ok(())
}

fn write_file(
    file: std::os::fd::BorrowedFd<'_>,
    mut offset: u64,
    mut bytes: &[u8],
) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::EIO),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Errno::of(&error.into())),
        }
    }
    Ok(())
}
