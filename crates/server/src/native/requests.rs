//! Handles each request to a disk.

use super::{Kind, Open, Reading, SessionDisks, Tag, Under, Writing};
use crate::core::{Core, Ticket, elapsed_ns};
use crate::extents::{allocation, written};
use crate::grants::Served;
use crate::nbd::driver::Apart;
use crate::stats::Stages;
use crate::waiting::{Arrived, client_of};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Disk, How, OwnerKey, Status};
use towline_mem::{Aggregate, SharedMemory};
use towline_store::{Now, ZeroHow};
use towline_wire::codec::Field;
use towline_wire::disk::{
    Checking, DISKS_MAX, EXTENTS_MAX, checksums, disk_flag, disk_kind, extent_kind,
    first_difference,
};
use towline_wire::extents::Extents;
use towline_wire::header::request_flag;
use towline_wire::limits::{HEADER_BYTES, TRANSFER_BYTES_MAX};
use towline_wire::request::parse_disk_request;
use towline_wire::{Errno, Header, Kind as MessageKind, ProtocolError, Reply, Request};

/// Reads of up to this many bytes in memory are answered at once, by a copy.
const READ_NOW_BYTES_MAX: u32 = 32 * 1024;

type Work = Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>;

/// The outcome of starting a request.
enum Begun<'a> {
    /// The answer.
    Answer(Reply<'a>),
    /// The request has been answered, or will be.
    Goes,
}

impl Core {
    /// Handles a request to a disk.
    ///
    /// # Errors
    /// The request is malformed, or a write does not match its data.
    pub(crate) fn disk_request(&mut self, arrived: &Arrived<'_>) -> Result<(), ProtocolError> {
        self.serves_disks = true;
        let request = parse_disk_request(arrived.body)?;
        let length = match request {
            Request::DiskWrite { length, .. } => u64::from(length),
            _ => 0,
        };
        let (offered, inline) = (arrived.header.offset, arrived.payload.len() as u64);
        if length > TRANSFER_BYTES_MAX as u64 {
            return Err(ProtocolError { what: "write longer than the limit", at: 0 });
        }
        if (offered > 0 && inline > 0) || length != offered + inline {
            let what = "write does not match the bytes sent or offered";
            return Err(ProtocolError { what, at: 0 });
        }
        let is_about_disks = matches!(
            request,
            Request::DiskList { .. }
                | Request::DiskOpen { .. }
                | Request::DiskInfo { .. }
                | Request::DiskClose { .. }
        );
        if !is_about_disks && self.throttle_disk(&request, arrived) {
            return Ok(());
        }
        let list;
        let begun = match request {
            Request::DiskList { skip } => {
                list = self.shared.disks.names(skip as usize);
                Ok(Begun::Answer(Reply::Bytes { value: &list }))
            }
            _ => self.begin_disk_request(&request, arrived),
        };
        let reply = match begun {
            Ok(Begun::Goes) => return Ok(()),
            Ok(Begun::Answer(reply)) => reply,
            Err(errno) => Reply::Failed { errno: errno.0 },
        };
        let server = elapsed_ns(arrived.at);
        self.statistics.count(request.tag());
        self.timed.push(Stages { server, ..Stages::default() });
        let Header { slot, sequence, .. } = *arrived.header;
        let header = Header::new(MessageKind::Reply, slot, sequence);
        self.answer_disk(arrived.session, header, server, &reply, request.modifies());
        Ok(())
    }

    fn begin_disk_request(
        &mut self,
        request: &Request<'_>,
        arrived: &Arrived<'_>,
    ) -> Result<Begun<'static>, Errno> {
        let Some(served) = self.sessions.get_mut(arrived.session) else { return Ok(Begun::Goes) };
        match *request {
            Request::DiskOpen { disk: number, name } => {
                let disk = self.shared.disks.disk(name).ok_or(Errno::ENOENT)?;
                disk.store.refresh().map_err(|error| Errno::of(&error))?;
                if served.disks.open.len() >= DISKS_MAX && !served.disks.open.contains_key(&number)
                {
                    return Err(Errno::EMFILE);
                }
                let reply = description(&disk);
                let lane = self.lanes.get(arrived.lane).and_then(Option::as_ref);
                let client = lane.and_then(|lane| client_of(&lane.link));
                let meter = client.map(|client| disk.meter(client));
                served.disks.open.insert(number, Open { disk, meter });
                return Ok(Begun::Answer(reply));
            }
            Request::DiskClose { disk } => {
                let closed = served.disks.open.remove(&disk).ok_or(Errno::EBADF)?;
                let mut others =
                    served.disks.open.values().filter_map(|open| memory_of(&open.disk));
                if let Some(memory) = memory_of(&closed.disk)
                    && let Some(Some(lane)) = self.lanes.get_mut(arrived.lane)
                    && !others.any(|other| Arc::ptr_eq(other, memory))
                {
                    lane.forget(memory);
                }
                return Ok(Begun::Answer(Reply::Done {}));
            }
            _ => {}
        }
        let number = request.disk().unwrap_or(u32::MAX);
        let disk = &served.disks.open.get(&number).ok_or(Errno::EBADF)?.disk;
        // Small writes into memory come first: they do not clone the disk, since that atomic operation would
        // wait until the written lines are in the cache.
        if let Request::DiskWrite { flags, offset, length, .. } = *request {
            may_change(&mut self.disk_sizes, disk, offset, length.into())?;
            if flags & disk_flag::CHECKSUMS == 0
                && let Some(stored) = write_now(disk, arrived, offset, flags)
            {
                return stored.map(Begun::Answer);
            }
        }
        let disk = disk.clone();
        match *request {
            Request::DiskInfo { .. } => {
                disk.store.refresh().map_err(|error| Errno::of(&error))?;
                Ok(Begun::Answer(description(&disk)))
            }
            Request::DiskRead { flags, offset, length, .. } => {
                within(&disk, offset, length.into(), Errno::EINVAL)?;
                if length as usize > TRANSFER_BYTES_MAX {
                    return Err(Errno::EINVAL);
                }
                let checksums = flags & disk_flag::CHECKSUMS != 0;
                let reading = Reading { offset, length, checksums, failed: None };
                self.read_disk(arrived, &disk, reading)
            }
            Request::DiskWrite { flags, offset, length, checksums, .. } => {
                if flags & disk_flag::CHECKSUMS == 0 {
                    return self.write_disk(arrived, &disk, offset, flags, None);
                }
                let checking =
                    Checking::new(length as usize, checksums).map_err(|_| Errno::EBADMSG)?;
                if !arrived.payload.is_empty()
                    && first_difference(arrived.payload, checksums).is_some()
                {
                    return Err(Errno::EBADMSG);
                }
                if let Some(stored) = write_now(&disk, arrived, offset, flags) {
                    return stored.map(Begun::Answer);
                }
                self.write_disk(arrived, &disk, offset, flags, Some(checking))
            }
            Request::DiskFlush { .. } => self.ask_disk(arrived, &disk, Kind::Flush, {
                let disk = disk.clone();
                Box::new(move || disk.flush().map(|()| Vec::new()))
            }),
            Request::DiskZero { flags, offset, length, .. } => {
                may_change(&mut self.disk_sizes, &disk, offset, length)?;
                disk.changes.note(offset, length);
                let how = ZeroHow {
                    allocate: flags & disk_flag::ALLOCATE != 0,
                    fast: flags & disk_flag::FAST != 0,
                };
                let work = changing(&disk, flags, move |disk| disk.zero(offset, length, how));
                self.ask_disk(arrived, &disk, Kind::Change, work)
            }
            Request::DiskTrim { flags, offset, length, .. } => {
                may_change(&mut self.disk_sizes, &disk, offset, length)?;
                disk.changes.note(offset, length);
                let work = changing(&disk, flags, move |disk| disk.store.trim(offset, length));
                self.ask_disk(arrived, &disk, Kind::Change, work)
            }
            Request::DiskStatus { kind, offset, length, most, .. } => {
                within(&disk, offset, length, Errno::EINVAL)?;
                if length == 0 || kind > extent_kind::WRITTEN {
                    return Err(Errno::EINVAL);
                }
                let most = most.clamp(1, EXTENTS_MAX) as usize;
                let asked = disk.clone();
                let work: Work = Box::new(move || match kind {
                    extent_kind::ALLOCATION => {
                        allocation(&asked, offset, length, most).map(|list| vec![list])
                    }
                    _ => Ok(vec![written(&asked, offset, length, most)]),
                });
                self.ask_disk(arrived, &disk, Kind::Status, work)
            }
            Request::DiskCache { offset, length, .. } => {
                within(&disk, offset, length, Errno::EINVAL)?;
                let asked = disk.clone();
                let work: Work =
                    Box::new(move || asked.store.cache(offset, length).map(|()| Vec::new()));
                self.ask_disk(arrived, &disk, Kind::Cache, work)
            }
            Request::DiskResize { size, .. } => {
                let resized = disk.clone();
                let work: Work = Box::new(move || resized.resize(size).map(|()| Vec::new()));
                self.ask_disk(arrived, &disk, Kind::Resize(size), work)
            }
            _ => Err(Errno::ENOSYS),
        }
    }

    /// Records a request that will be answered later.
    fn note(&mut self, arrived: &Arrived<'_>, disk: &Arc<Disk>, kind: Kind) {
        let under = Under {
            sequence: arrived.header.sequence,
            operation: arrived.body.first().copied().unwrap_or(0),
            arrived: arrived.at,
            disk: disk.clone(),
            epoch: disk.epoch(),
            kind,
        };
        if let Some(served) = self.sessions.get_mut(arrived.session) {
            served.disks.put(arrived.header.slot, under);
        }
    }

    /// Returns the owner of a session's changes.
    fn session_owner(&mut self, session: u64) -> Option<OwnerKey> {
        let Served { disks: SessionDisks { owner, .. }, .. } = self.sessions.get_mut(session)?;
        Some(*owner.get_or_insert_with(|| self.engine.add_owner()))
    }

    fn ask_disk(
        &mut self,
        arrived: &Arrived<'_>,
        disk: &Arc<Disk>,
        kind: Kind,
        work: Work,
    ) -> Result<Begun<'static>, Errno> {
        let Some(owner) = self.session_owner(arrived.session) else { return Ok(Begun::Goes) };
        // A disk that becomes shorter waits for its writes. One at a time does, so these threads are few.
        let waits = matches!(kind, Kind::Resize(size) if size > 0);
        self.note(arrived, disk, kind);
        let ticket = Ticket::Native(arrived.tag(owner));
        let (engine, mut driver) = self.engine_and_driver();
        match waits {
            true => engine.ask(owner, ticket, disk, work, arrived.at, &mut Apart(driver)),
            false => engine.ask(owner, ticket, disk, work, arrived.at, &mut driver),
        }
        Ok(Begun::Goes)
    }

    fn read_disk(
        &mut self,
        arrived: &Arrived<'_>,
        disk: &Arc<Disk>,
        reading: Reading,
    ) -> Result<Begun<'static>, Errno> {
        let Reading { offset, length, checksums, .. } = reading;
        if length == 0 {
            // The engine reports nothing for it.
            return Ok(Begun::Answer(Reply::Read { length, errno: 0 }));
        }
        if self.show(arrived, disk, &reading) {
            self.answered(arrived);
            return Ok(Begun::Goes);
        }
        if length <= READ_NOW_BYTES_MAX {
            let before = Instant::now();
            if let Some(message) = self.read_now(arrived, disk, &reading)? {
                let storage = elapsed_ns(before);
                let server = elapsed_ns(arrived.at);
                let stages = Stages { server, storage, is_split: true, ..Stages::default() };
                self.statistics.count(arrived.body[0]);
                self.timed.push(stages);
                let Header { slot, sequence, .. } = *arrived.header;
                if let Some(Some(lane)) = self.lanes.get_mut(arrived.lane) {
                    lane.out.push(Aggregate::from_vec(message), slot, sequence);
                }
                self.answered(arrived);
                return Ok(Begun::Goes);
            }
        }
        let Some(Some(lane)) = self.lanes.get_mut(arrived.lane) else { return Ok(Begun::Goes) };
        let owner = *lane.reads.get_or_insert_with(|| self.engine.add_owner());
        self.note(arrived, disk, Kind::Read(reading));
        let how = if checksums { How::Copied } else { How::Pieces };
        let range = offset..offset + u64::from(length);
        let ticket = Ticket::Native(arrived.tag(owner));
        self.engine.read(owner, ticket, disk, range, how, arrived.at);
        Ok(Begun::Goes)
    }

    /// Frees the slot of a read whose answer is on its lane.
    fn answered(&mut self, arrived: &Arrived<'_>) {
        if let Some(served) = self.sessions.get_mut(arrived.session) {
            served.session.slots.answer(arrived.header.slot, None);
        }
        self.dirty.push(arrived.lane);
    }

    /// Answers a read with the location of the data, in memory that the client maps. Returns false if the
    /// data has to be sent. Limited clients always get it sent, because a client with the memory could read
    /// all of it unnoticed.
    fn show(&mut self, arrived: &Arrived<'_>, disk: &Disk, reading: &Reading) -> bool {
        let Reading { offset, length, checksums, .. } = *reading;
        let borrows = arrived.header.flags & request_flag::BORROWS != 0;
        if !borrows || checksums || length == 0 || disk.is_limited() {
            return false;
        }
        let Some(Some(lane)) = self.lanes.get_mut(arrived.lane) else { return false };
        let Some(loans) = &mut lane.loans else { return false };
        let mut extents = Extents::default();
        let memory = disk.store.in_place(offset, length.into(), &mut |at, length| {
            // A part of a read, which is at most 8 MiB.
            extents.push(at, length as u32);
        });
        let Some(memory) = memory else { return false };
        let Header { slot, sequence, .. } = *arrived.header;
        let mut message = std::mem::take(&mut self.message);
        message.clear();
        message.resize(HEADER_BYTES, 0);
        Reply::Read { length, errno: 0 }.encode(&mut message);
        let mut reply = Header::new(MessageKind::Reply, slot, sequence);
        let shown = loans.show(&mut reply, &mut message, HEADER_BYTES, memory, extents);
        if shown {
            // Nothing was read here, so all the time is control.
            let server = elapsed_ns(arrived.at);
            self.shared.sign(&mut reply, server);
            message[..HEADER_BYTES].copy_from_slice(&reply.to_bytes());
            lane.out.push_short([&message, b""]);
            let stages = Stages { server, is_split: true, ..Stages::default() };
            self.statistics.count(arrived.body[0]);
            self.timed.push(stages);
        }
        self.message = message;
        shown
    }

    /// Returns the complete answer to a read of data in memory; `None` if the read would block.
    fn read_now(
        &self,
        arrived: &Arrived<'_>,
        disk: &Disk,
        reading: &Reading,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let Header { slot, sequence, .. } = *arrived.header;
        let length = reading.length as usize;
        let mut results = Vec::with_capacity(16);
        Reply::Read { length: reading.length, errno: 0 }.encode(&mut results);
        // With checksums: a data message, followed by the reply.
        let sums = if reading.checksums { length.div_ceil(4096) * 4 } else { 0 };
        let head = HEADER_BYTES + if reading.checksums { sums } else { results.len() };
        let mut message = Vec::with_capacity(head + length + HEADER_BYTES + results.len());
        message.resize(head + length, 0);
        match disk.store.read_now(reading.offset, &mut message[head..]) {
            Now::Done(Ok(())) => {}
            Now::Done(Err(error)) => return Err(Errno::of(&error)),
            Now::WouldBlock => return Ok(None),
        }
        let mut reply = Header::new(MessageKind::Reply, slot, sequence);
        reply.body_bytes = results.len() as u32;
        self.shared.sign(&mut reply, elapsed_ns(arrived.at));
        if reading.checksums && length > 0 {
            let mut data = Header::new(MessageKind::Data, slot, sequence);
            data.body_bytes = sums as u32;
            data.payload_bytes = reading.length;
            let sums = checksums(&message[head..]);
            message[..HEADER_BYTES].copy_from_slice(&data.to_bytes());
            message[HEADER_BYTES..head].copy_from_slice(&sums);
            message.extend_from_slice(&reply.to_bytes());
            message.extend_from_slice(&results);
        } else {
            reply.payload_bytes = reading.length;
            message[..HEADER_BYTES].copy_from_slice(&reply.to_bytes());
            message[HEADER_BYTES..HEADER_BYTES + results.len()].copy_from_slice(&results);
        }
        Ok(Some(message))
    }

    fn write_disk(
        &mut self,
        arrived: &Arrived<'_>,
        disk: &Arc<Disk>,
        offset: u64,
        flags: u32,
        checking: Option<Checking>,
    ) -> Result<Begun<'static>, Errno> {
        let durable = flags & disk_flag::DURABLE != 0;
        let (inline, length) =
            (arrived.payload, arrived.payload.len() as u64 + arrived.header.offset);
        let Some(owner) = self.session_owner(arrived.session) else { return Ok(Begun::Goes) };
        let ticket = Ticket::Native(arrived.tag(owner));
        let range = offset..offset + length;
        let key = self.engine.write(owner, ticket, disk, range, durable, arrived.at);
        let Some(key) = key else { return Err(Errno::EIO) };
        let writing = Writing {
            key,
            length,
            inline: (!inline.is_empty()).then(|| inline.to_vec()),
            grants: VecDeque::new(),
            granted: 0,
            filled: 0,
            checking,
            failed: None,
            data_since: Some(Instant::now()),
            first: 0,
        };
        self.note(arrived, disk, Kind::Write(writing));
        self.queue_disk_write(arrived.session, arrived.header.slot);
        Ok(Begun::Goes)
    }
}

impl Arrived<'_> {
    fn tag(&self, owner: OwnerKey) -> Tag {
        let Header { slot, sequence, .. } = *self.header;
        Tag { session: self.session, slot, sequence, owner }
    }
}

/// Checks a change. Reads the size again, once for all requests that arrived together (`sizes`): a write
/// beyond the end of a file that has shrunk would make it longer again.
pub(super) fn may_change(
    sizes: &mut Vec<(u64, u64)>,
    disk: &Disk,
    offset: u64,
    length: u64,
) -> Result<(), Errno> {
    if disk.read_only || disk.has_failed() {
        return Err(Errno::EROFS);
    }
    within(disk, offset, length, Errno::ENOSPC)?;
    let known = sizes.iter().find(|(identity, _)| *identity == disk.identity);
    let size = match known {
        Some((_, size)) => *size,
        None => {
            // A device that is gone has no size.
            let size = disk.store.refresh().unwrap_or(0);
            sizes.push((disk.identity, size));
            size
        }
    };
    if offset + length > size { Err(Errno::EIO) } else { Ok(()) }
}

/// Writes the data of a request if that does not block; `None`: it would. The range has been checked.
fn write_now(
    disk: &Disk,
    arrived: &Arrived<'_>,
    offset: u64,
    flags: u32,
) -> Option<Result<Reply<'static>, Errno>> {
    let durable = flags & disk_flag::DURABLE != 0;
    let inline = arrived.payload;
    let length = inline.len() as u64 + arrived.header.offset;
    let epoch = disk.epoch();
    disk.changes.note(offset, length);
    if length > 0 {
        if inline.is_empty() {
            return None;
        }
        let Now::Done(result) = disk.write_now(offset, inline, durable) else { return None };
        if let Err(error) = result {
            return Some(Err(Errno::of(&error)));
        }
    }
    Some(Ok(Reply::Stored { epoch }))
}

/// Returns the work for a change, followed by a flush if it must be durable.
fn changing(
    disk: &Arc<Disk>,
    flags: u32,
    change: impl FnOnce(&Disk) -> io::Result<()> + Send + 'static,
) -> Work {
    let disk = disk.clone();
    Box::new(move || {
        change(&disk)?;
        if flags & disk_flag::DURABLE != 0 {
            disk.flush()?;
        }
        Ok(Vec::new())
    })
}

/// Returns the memory of a memory disk.
fn memory_of(disk: &Disk) -> Option<&Arc<SharedMemory>> {
    disk.store.in_place(0, 0, &mut |_, _| ())
}

/// Returns the current properties of a disk.
pub(super) fn description(disk: &Disk) -> Reply<'static> {
    let geometry = disk.told_geometry();
    let mut flags = 0;
    if disk.read_only {
        flags |= disk_kind::READ_ONLY;
    }
    if disk.has_failed() {
        flags |= disk_kind::FAILED;
    }
    if geometry.rotational {
        flags |= disk_kind::ROTATIONAL;
    }
    Reply::Disk {
        size: geometry.size,
        block_minimum: geometry.block_minimum,
        block_preferred: geometry.block_preferred,
        flags,
        identity: disk.identity,
        epoch: disk.epoch(),
    }
}

/// Checks a range: `EINVAL` if it is not in whole blocks, `beyond` if it does not lie inside the disk, `EIO` if it did
/// before the disk shrank.
pub(super) fn within(disk: &Disk, offset: u64, length: u64, beyond: Errno) -> Result<(), Errno> {
    let geometry = disk.geometry();
    if !(offset | length).is_multiple_of(geometry.block_minimum.into()) {
        return Err(Errno::EINVAL);
    }
    match offset.checked_add(length) {
        None => Err(Errno::EINVAL),
        Some(end) if end > geometry.size => {
            Err(if disk.was_inside(end) { Errno::EIO } else { beyond })
        }
        Some(_) => Ok(()),
    }
}
