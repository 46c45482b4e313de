//! Short writes that stand in a ring, and are copied from there to where they belong in the memory of a disk.
//!
//! Most of what such a write takes is waiting for memory. So some are taken together: each is looked at once, its session and its
//! disk are looked up once, and its place is asked for; then all are copied, and then all are answered. Nothing is allocated. Whatever is
//! not plain about one (limits, checksums, a low priority, something to be refused, a request that comes again) goes the way of all
//! requests ([`Core::disk_request`]): nothing was changed then.

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

/// A write that was taken, and waits to be copied and answered.
pub(crate) struct Taken {
    slot: u16,
    sequence: u32,
    /// Tag of the operation, for statistics.
    operation: u8,
    write: Plain,
    /// The disk's when the request was taken.
    epoch: u64,
    /// It was copied.
    landed: bool,
}

/// What a write says that may be plain.
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
    /// A request will be taken after the one that is about to be. Where it writes is fetched meanwhile: it is in no
    /// cache, most likely, and neither is what tells where its page is.
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

    /// Takes a plain write of so many bytes to a disk whose memory takes them as they are: to be copied and answered
    /// by [`Core::land_taken`]. False: it is no such, and nothing was done.
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
        // A record of what the slot did before a restart has no use any more.
        session.take_recorded(header.slot);
        lane.ahead = false;
        if let Some(loans) = &mut lane.loans {
            loans.take_back(header);
        }
        // What was closed before this came is closed before it is executed.
        self.closing.clear();
        self.waiting.note_other();
        disk.changes.note(offset, length);
        let Header { slot, sequence, .. } = *header;
        let (operation, epoch) = (body[0], disk.epoch());
        self.taken.push(Taken { slot, sequence, operation, write, epoch, landed: false });
        Some(())
    }

    /// Copies the payloads of the writes that were taken since then, and answers them.
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
                // The disk became shorter meanwhile.
                false => Reply::Failed { errno: Errno::EIO.0 },
            };
            put_together(&mut self.message, reply, &stored);
            lane_of.out.push_short([&self.message, b""]);
            served.session.slots.answer(slot, Some([&self.message, b""]));
            self.statistics.count(operation);
            self.timed.push(Stages { server, ..Stages::default() });
        }
        self.taken = taken;
        // While the core goes on with what else came the client asks for more, if it looks for answers. One that sleeps is woken
        // once, at the end of the turn.
        if shm_link(&self.lanes, lane).is_some_and(|link| !link.peer_sleeps()) {
            self.flush(lane);
        }
    }
}
