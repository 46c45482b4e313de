//! Turns the engine's outputs into messages.

use super::requests::description;
use super::{Kind, Tag};
use crate::core::{Core, elapsed_ns};
use crate::stats::Stages;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Output, Piece, Status, Times};
use towline_mem::{Aggregate, Segment};
use towline_wire::codec::Field;
use towline_wire::disk::{DiskExtent, checksums, encode_extents};
use towline_wire::header::data_flag;
use towline_wire::limits::{HEADER_BYTES, READ_BYTES_MAX};
use towline_wire::{Errno, Header, Kind as MessageKind, Reply};

impl Core {
    /// Handles an output of the engine for a request of a session.
    pub(crate) fn answer_native(&mut self, tag: Tag, told: Output<()>) {
        match told {
            Output::Piece { offset, piece, first, last, .. } => {
                self.tell_piece(tag, offset, piece, first, last);
            }
            Output::Failed { error, last, .. } => {
                let Some(under) = self.reading(tag) else { return };
                if let Kind::Read(reading) = &mut under.kind {
                    reading.failed.get_or_insert(Errno::of(&error));
                }
                if let Some(times) = last {
                    let Tag { session, slot, sequence, .. } = tag;
                    self.finish_disk_request(session, slot, sequence, Ok(()), Some(times));
                }
            }
            Output::Done { result, times, .. } => {
                let Tag { session, slot, sequence, .. } = tag;
                self.finish_disk_request(session, slot, sequence, result, Some(times));
            }
            Output::Extents { result, times, .. } => self.tell_extents(tag, result, times),
        }
    }

    /// Returns the read with this tag, unless its lane is gone.
    fn reading(&mut self, tag: Tag) -> Option<&mut super::Under> {
        let served = self.sessions.get_mut(tag.session)?;
        let lane = self.lanes.get(served.lane? as usize)?.as_ref()?;
        if lane.reads != Some(tag.owner) {
            return None;
        }
        served.disks.find(tag.slot, tag.sequence)
    }

    fn tell_piece(
        &mut self,
        tag: Tag,
        offset: u64,
        piece: Piece,
        first: bool,
        last: Option<Times>,
    ) {
        let Tag { session, slot, sequence, .. } = tag;
        let Some(under) = self.reading(tag) else { return };
        let Kind::Read(reading) = &under.kind else { return };
        let (from, sums) = (offset - reading.offset, reading.checksums);
        let Some(served) = self.sessions.get(session) else { return };
        let rides = first && last.is_some() && !sums;
        match piece {
            // This is all the data: it goes with the reply.
            Piece::Data(bytes) if rides => return self.finish_read(tag, bytes, last),
            Piece::Lent(bytes)
                if rides
                    && served.promise_broken.is_none()
                    && bytes.len() <= READ_BYTES_MAX as u64 =>
            {
                return self.finish_read(tag, bytes, last);
            }
            _ => {}
        }
        let Some(index) = served.lane.map(|index| index as usize) else { return };
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        let mut header = Header::new(MessageKind::Data, slot, sequence);
        header.offset = from;
        match piece {
            Piece::Hole(length) => {
                header.flags = data_flag::HOLE;
                // A read is at most 8 MiB.
                header.word_b = length as u32;
                lane.send_header(&header);
            }
            Piece::Data(mut bytes) | Piece::Lent(mut bytes) => {
                while !bytes.is_empty() {
                    let mut part = bytes.split_to(READ_BYTES_MAX as u64);
                    let sums = if sums { checksums_of(&part) } else { Vec::new() };
                    header.payload_bytes = part.len() as u32;
                    header.body_bytes = sums.len() as u32;
                    let mut head = header.to_bytes().to_vec();
                    head.extend_from_slice(&sums);
                    header.offset += part.len();
                    let length = head.len() as u64;
                    part.prepend(Segment::Host(Arc::new(head)), 0, length);
                    lane.out.push(part, slot, sequence);
                }
            }
        }
        self.dirty.push(index);
        if last.is_some() {
            self.finish_disk_request(session, slot, sequence, Ok(()), last);
        }
    }

    /// Answers a read whose data goes with the reply.
    fn finish_read(&mut self, tag: Tag, data: Aggregate, times: Option<Times>) {
        let Tag { session, slot, sequence, .. } = tag;
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.take(slot, sequence) else { return };
        served.session.slots.answer(slot, None);
        let index = served.lane.map(|lane| lane as usize);
        let mut results = Vec::with_capacity(16);
        Reply::Read { length: data.len() as u32, errno: 0 }.encode(&mut results);
        let mut header = Header::new(MessageKind::Reply, slot, sequence);
        header.body_bytes = results.len() as u32;
        header.payload_bytes = data.len() as u32;
        self.shared.sign(&mut header, elapsed_ns(under.arrived));
        let mut head = header.to_bytes().to_vec();
        head.extend_from_slice(&results);
        let mut message = Aggregate::from_vec(head);
        message.concatenate(data);
        if let Some(Some(lane)) = index.and_then(|index| self.lanes.get_mut(index)) {
            lane.out.push_promised([b"", b""], message);
            self.dirty.extend(index);
        }
        self.record_disk(under.operation, under.arrived, times, 0);
    }

    fn tell_extents(&mut self, tag: Tag, result: io::Result<Vec<Vec<Status>>>, times: Times) {
        let Tag { session, slot, sequence, .. } = tag;
        let list = match result {
            Ok(mut lists) => lists.pop().unwrap_or_default(),
            Err(error) => {
                return self.finish_disk_request(session, slot, sequence, Err(error), Some(times));
            }
        };
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.take(slot, sequence) else { return };
        let extents: Vec<DiskExtent> =
            list.iter().map(|s| DiskExtent { length: s.length, flags: s.flags }).collect();
        let value = encode_extents(&extents);
        let reply = Reply::Bytes { value: &value };
        let header = Header::new(MessageKind::Reply, slot, sequence);
        self.answer_disk(session, header, elapsed_ns(under.arrived), &reply, false);
        self.record_disk(under.operation, under.arrived, Some(times), 0);
    }

    /// Ends a request and answers it according to its kind.
    pub(crate) fn finish_disk_request(
        &mut self,
        session: u64,
        slot: u16,
        sequence: u32,
        result: io::Result<()>,
        times: Option<Times>,
    ) {
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.take(slot, sequence) else { return };
        let mut data = 0;
        let failed = match &under.kind {
            Kind::Read(reading) => reading.failed,
            Kind::Write(write) => {
                data = write.data_since.map_or(0, elapsed_ns);
                write.failed
            }
            _ => None,
        };
        let epoch = under.epoch;
        let reply = match (failed, result) {
            (Some(errno), _) => Reply::Failed { errno: errno.0 },
            (None, Err(error)) => Reply::Failed { errno: Errno::of(&error).0 },
            (None, Ok(())) => match &under.kind {
                Kind::Read(reading) => Reply::Read { length: reading.length, errno: 0 },
                Kind::Write(_) | Kind::Change => Reply::Stored { epoch },
                // Not that of its arrival: the disk may have failed and been forgiven while it waited.
                Kind::Flush => Reply::Stored { epoch: under.disk.epoch() },
                Kind::Status | Kind::Cache => Reply::Done {},
                Kind::Resize(_) => description(&under.disk),
            },
        };
        let remember =
            matches!(under.kind, Kind::Write(_) | Kind::Change | Kind::Flush | Kind::Resize(_));
        let mut header = Header::new(MessageKind::Reply, slot, sequence);
        if let Kind::Write(write) = &under.kind
            && let Some(bytes) = self.leave_after(write)
            && let Some(served) = self.sessions.get_mut(session)
            && !served.disks.are_limited()
            && served.give_leave(&self.pool, bytes, &mut header, Instant::now())
        {
            self.ticking = true;
        }
        self.answer_disk(session, header, elapsed_ns(under.arrived), &reply, remember);
        self.record_disk(under.operation, under.arrived, times, data);
    }

    /// Sends an answer without data after completing `header`; with `remember`, the slot keeps it. The
    /// request took `server_ns` nanoseconds.
    pub(crate) fn answer_disk(
        &mut self,
        session: u64,
        mut header: Header,
        server_ns: u64,
        reply: &Reply<'_>,
        remember: bool,
    ) {
        let Some(served) = self.sessions.get_mut(session) else { return };
        let mut message = std::mem::take(&mut self.message);
        let slot = header.slot;
        self.shared.sign(&mut header, server_ns);
        put_together(&mut message, header, reply);
        // If the lane is lost, the answer is only remembered: the client asks again on its next lane.
        let index = served.lane.map(|lane| lane as usize);
        if let Some(Some(lane)) = index.and_then(|index| self.lanes.get_mut(index)) {
            lane.out.push_short([&message, b""]);
            self.dirty.extend(index);
        }
        served.session.slots.answer(slot, remember.then_some([&message, b""]));
        self.message = message;
    }

    fn record_disk(&mut self, operation: u8, arrived: Instant, times: Option<Times>, data: u64) {
        let disk = times.map_or(0, |times| times.disk);
        // It is not measured how much of its data is written while the rest is on its way.
        let (server, is_split) = (elapsed_ns(arrived), data == 0);
        let stages = Stages { server, storage: disk, disk, data, is_split, ..Stages::default() };
        self.statistics.count(operation);
        self.timed.push(stages);
    }
}

/// Builds an answer without data in `message`, replacing its contents.
pub(super) fn put_together(message: &mut Vec<u8>, mut header: Header, reply: &Reply<'_>) {
    message.clear();
    message.resize(HEADER_BYTES, 0);
    reply.encode(message);
    header.body_bytes = (message.len() - HEADER_BYTES) as u32;
    message[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
}

fn checksums_of(bytes: &Aggregate) -> Vec<u8> {
    if let [slice] = &bytes.slices().collect::<Vec<_>>()[..]
        && let Segment::Registered(buffer) = &slice.segment
    {
        let from = slice.offset as usize;
        return checksums(&buffer.bytes()[from..from + slice.length as usize]);
    }
    // Reads with checksums are in pool buffers; this is for anything else.
    let mut copy = vec![0; bytes.len() as usize];
    match bytes.copy_to(&mut copy) {
        Ok(_) => checksums(&copy),
        Err(_) => Vec::new(),
    }
}
