//! Short writes to memory disks that are copied straight from the ring of a lane into the disk's memory.
//!
//! Most of the time of such a write is spent waiting for memory. So several are taken together: for each, the
//! session, the disk and the target are looked up once and the target is prefetched; then all are copied, and
//! then all are answered. Nothing is allocated. A write that is special in any way (limits, checksums, low
//! priority, an error, a repeated request) takes the normal path ([`Core::disk_request`]); nothing has been
//! changed by then.

use super::answers::put_together;
use super::requests::{may_change, within};
use super::{EXPECTED_BYTES, Open};
use crate::core::{Core, elapsed_ns, shm_link};
use crate::grants::Served;
use crate::stats::Stages;
use std::time::Instant;
use towline_net::Payload;
use towline_wire::disk::disk_flag;
use towline_wire::header::request_flag;
use towline_wire::request::parse_disk_request;
use towline_wire::{Errno, Header, Kind, Reply, Request};

/// A write that has been taken and waits to be copied and answered.
pub(crate) struct Taken {
    slot: u16,
    sequence: u32,
    /// Tag of the operation, for statistics.
    operation: u8,
    write: Plain,
    /// The disk's epoch when the request was taken.
    epoch: u64,
    /// The data was copied.
    landed: bool,
}

/// The fields of a write that may be plain.
#[derive(Clone, Copy)]
struct Plain {
    disk: u32,
    offset: u64,
    length: u64,
}

impl Plain {
    fn of(body: &[u8]) -> Option<Self> {
        match parse_disk_request(body).ok()? {
            Request::DiskWrite { disk, flags, offset, length, .. }
                if flags & disk_flag::CHECKSUMS == 0 =>
            {
                Some(Self { disk, offset, length: length.into() })
            }
            _ => None,
        }
    }
}

impl Core {
    /// Prefetches the target of a write that will be taken after the next one: most likely neither the target
    /// nor its page table entry is in any cache.
    pub(crate) fn expect_disk_request(&self, session: u64, body: &[u8]) {
        if let Some(Plain { disk, offset, length }) = Plain::of(body)
            && let Some(Open { disk, .. }) =
                self.sessions.get(session).and_then(|served| served.disks.open.get(&disk))
            && within(disk, offset, length, Errno::EINVAL).is_ok()
            && let Some((memory, at)) = disk.store.landing(offset, length)
        {
            memory.expect_writes(at, length.min(EXPECTED_BYTES) as usize);
        }
    }

    /// Takes a plain write of `length` bytes to a disk in memory, to be copied and answered by
    /// [`Core::land_taken`]. Returns false, and does nothing, if the write is not plain.
    pub(crate) fn take_write(
        &mut self,
        session: u64,
        lane: usize,
        header: &Header,
        body: &[u8],
        length: usize,
    ) -> bool {
        self.try_take_write(session, lane, header, body, length).is_some()
    }

    fn try_take_write(
        &mut self,
        session: u64,
        lane: usize,
        header: &Header,
        body: &[u8],
        bytes: usize,
    ) -> Option<()> {
        let write = Plain::of(body)?;
        let Plain { disk, offset, length } = write;
        let lane = self.lanes.get_mut(lane)?.as_mut()?;
        let Served { session, disks, is_low, .. } = self.sessions.get_mut(session)?;
        let Open { disk, meter } = disks.open.get(&disk)?;
        let is_plain = length == bytes as u64
            && header.offset == 0
            && header.flags & request_flag::AHEAD == 0
            && !*is_low
            && !meter.as_ref().is_some_and(|meter| meter.is_limited());
        if !is_plain || may_change(&mut self.disk_sizes, disk, offset, length).is_err() {
            return None;
        }
        let (memory, at) = disk.store.landing(offset, length)?;
        if !session.slots.begin_next(header) {
            return None;
        }
        memory.expect_writes(at, length.min(EXPECTED_BYTES) as usize);
        // The record of what the slot did before a restart is no longer needed.
        session.take_recorded(header.slot);
        lane.ahead = false;
        lane.place.begin();
        if let Some(loans) = &mut lane.loans {
            loans.take_back(header);
        }
        // Files closed before this request must be closed before it runs.
        self.closing.clear();
        self.waiting.note_other();
        disk.changes.note(offset, length);
        let Header { slot, sequence, .. } = *header;
        let (operation, epoch) = (body[0], disk.epoch());
        self.taken.push(Taken { slot, sequence, operation, write, epoch, landed: false });
        Some(())
    }

    /// Copies the payloads of the writes that were taken, the first one at `since`, and answers them.
    pub(crate) fn land_taken(
        &mut self,
        session: u64,
        lane: usize,
        payloads: &[Payload<'_>],
        since: Instant,
    ) {
        let mut taken = std::mem::take(&mut self.taken);
        debug_assert_eq!(taken.len(), payloads.len(), "each was taken once");
        let found = self.sessions.get_mut(session).zip(self.lanes.get_mut(lane));
        let Some((served, Some(lane_of))) = found else { return };
        for (taken, payload) in taken.iter_mut().zip(payloads) {
            let Plain { disk, offset, length } = taken.write;
            let Some(Open { disk, .. }) = served.disks.open.get(&disk) else { continue };
            if let Some((memory, at)) = disk.store.landing(offset, length) {
                payload.copy_to(memory, at);
                disk.store.landed(offset, length);
                self.engine.note_landed(length);
                taken.landed = true;
            }
        }
        let server = elapsed_ns(since);
        for Taken { slot, sequence, operation, epoch, landed, .. } in taken.drain(..) {
            let mut reply = Header::new(Kind::Reply, slot, sequence);
            self.shared.sign(&mut reply, server);
            let stored = match landed {
                true => Reply::Stored { epoch },
                // The disk has shrunk meanwhile.
                false => Reply::Failed { errno: Errno::EIO.0 },
            };
            put_together(&mut self.message, reply, &stored);
            lane_of.out.push_short([&self.message, b""]);
            served.session.slots.answer(slot, Some([&self.message, b""]));
            self.statistics.count(operation);
            self.timed.push(Stages { server, ..Stages::default() });
        }
        self.taken = taken;
        // If the client is looking for answers, it can send more while the core goes on with its input. A
        // client that sleeps is woken once, at the end of the turn.
        if shm_link(&self.lanes, lane).is_some_and(|link| !link.peer_sleeps()) {
            self.flush(lane);
        }
    }
}
