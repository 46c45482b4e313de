//! Handles each request of an NBD client.

use super::driver::CoreDriver;
use super::lane::{Filling, NbdLane, UNSENT_BYTES_MAX};
use super::lanes::PLACED_BYTES_MIN;
use crate::core::Ticket;
use crate::extents::{allocation, written};
use crate::native::EXPECTED_BYTES;
use crate::stats::{CoreStatistics, NBD_TAGS, Stages};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Disk, Engine, How, Meter, OwnerKey, Status};
use towline_nbd::constants::{EXTENTS_MAX, command as number, command_flag as flag};
use towline_nbd::reply::Replying;
use towline_nbd::{Command, Context, Error, Form, Handler, Refusal, Request};
use towline_net::Target;
use towline_store::{Now, ZeroHow};

/// Reads of up to this many bytes in memory are answered at once, by a copy.
const READ_NOW_BYTES_MAX: u64 = 32 * 1024;

const BECAME_SHORTER: Refusal = Refusal { error: Error::Io, text: "the disk became shorter" };

/// A request of an NBD client; the engine returns it with the outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tag {
    pub(super) lane: usize,
    pub(super) owner: OwnerKey,
    pub(super) replying: Replying,
    pub(super) command: Command,
    pub(super) length: u64,
    /// The contexts of a BLOCK_STATUS, as a set of bits.
    pub(super) contexts: u32,
}

/// A core while it reads from one of its NBD lanes.
pub(super) struct Serving<'a> {
    pub(super) index: usize,
    pub(super) lane: &'a mut NbdLane,
    pub(super) disk: &'a Arc<Disk>,
    pub(super) form: Form,
    pub(super) engine: &'a mut Engine<Ticket>,
    pub(super) driver: CoreDriver<'a>,
    pub(super) statistics: &'a CoreStatistics,
    pub(super) shutting_down: bool,
    /// Size of the disk in bytes, once a request of this turn has read it.
    pub(super) size: Option<u64>,
    pub(super) arrived: Instant,
}

impl Serving<'_> {
    fn tag(&self, command: Command, request: &Request) -> Tag {
        Tag {
            lane: self.index,
            owner: self.lane.owner,
            replying: Replying::to(request, self.form),
            command,
            length: request.length,
            contexts: 0,
        }
    }

    /// Records a request that was answered at once.
    fn record(&mut self, command: Command) {
        let now = Instant::now();
        let server = now.duration_since(self.arrived).as_nanos() as u64;
        self.arrived = now;
        let stages = Stages { server, ..Stages::default() };
        self.statistics.record(NBD_TAGS + command as u8, stages);
    }

    fn read(&mut self, request: &Request) {
        if request.length <= READ_NOW_BYTES_MAX {
            let replying = Replying::to(request, self.form);
            let batch = self.lane.replies();
            let before = batch.len();
            replying.data(batch, request.offset, request.length as u32, true);
            match self.disk.store.append_now(request.offset, request.length as usize, batch) {
                Now::Done(Ok(())) => {
                    self.engine.count_staged(request.length);
                    self.lane.send_early(request.length, &self.statistics.counters);
                    return self.record(Command::Read);
                }
                Now::Done(Err(error)) => {
                    batch.truncate(before);
                    let error = protocol_error(&error);
                    replying.error(batch, error, error.text());
                    return;
                }
                Now::WouldBlock => batch.truncate(before),
            }
        }
        // Once data is sent, a simple reply cannot tell of an error any more.
        if self.form == Form::Simple && !self.has_room_for(request) {
            return self.refuse(request, BECAME_SHORTER);
        }
        let tag = self.tag(Command::Read, request);
        let range = request.offset..request.offset + request.length;
        let how = match self.form {
            Form::Simple => How::Ordered,
            _ if !request.has(flag::DF) => How::Pieces,
            _ if request.length <= self.engine.fragment_bytes() => How::Whole,
            _ => {
                let text = "too long to be read in one piece";
                return self.refuse(request, Refusal { error: Error::Overflow, text });
            }
        };
        let ticket = Ticket::Nbd(tag);
        self.engine.read(self.lane.owner, ticket, self.disk, range, how, self.arrived);
    }

    fn ask(
        &mut self,
        tag: Tag,
        call: impl FnOnce(&Disk) -> io::Result<Vec<Vec<Status>>> + Send + 'static,
    ) {
        let disk = self.disk.clone();
        let asked = disk.clone();
        let call = Box::new(move || call(&asked));
        let ticket = Ticket::Nbd(tag);
        self.engine.ask(self.lane.owner, ticket, &disk, call, self.arrived, &mut self.driver);
    }

    /// Fails once after a failure of the disk that was forgiven, even if another connection's flush has met it:
    /// the client, which may have several connections, must learn that what it wrote may be lost.
    fn flush(&mut self, tag: Tag) {
        let epoch = self.lane.epoch;
        // The answer tells the client about everything that was answered before, but not about changes under
        // way.
        if self.engine.requests_of(self.lane.owner) == 0 {
            self.lane.epoch = self.disk.next_epoch();
        }
        self.ask(tag, move |disk| disk.flush_since(epoch).map(|()| Vec::new()));
    }

    fn write_zeroes(&mut self, tag: Tag, request: &Request) {
        let (offset, length) = (request.offset, request.length);
        let how =
            ZeroHow { allocate: request.has(flag::NO_HOLE), fast: request.has(flag::FAST_ZERO) };
        let durable = request.has(flag::FUA);
        self.disk.changes.note(offset, length);
        self.ask(tag, move |disk| {
            disk.zero(offset, length, how)?;
            if durable {
                disk.flush()?;
            };
            Ok(Vec::new())
        });
    }

    fn trim(&mut self, tag: Tag, request: &Request) {
        let (offset, length) = (request.offset, request.length);
        let durable = request.has(flag::FUA);
        self.disk.changes.note(offset, length);
        self.ask(tag, move |disk| {
            disk.store.trim(offset, length)?;
            if durable {
                disk.flush()?;
            };
            Ok(Vec::new())
        });
    }

    fn block_status(&mut self, mut tag: Tag, request: &Request, contexts: &[Context]) {
        let (offset, length) = (request.offset, request.length);
        let most = if request.has(flag::REQ_ONE) { 1 } else { EXTENTS_MAX };
        tag.contexts = contexts.iter().fold(0, |set, context| set | 1 << context.number);
        let mut contexts: Vec<usize> = contexts.iter().map(|context| context.number).collect();
        // The tag keeps them as a set, so the lists follow in this order.
        contexts.sort_unstable();
        self.lane.statuses += 1;
        self.ask(tag, move |disk| {
            let status = |number: &usize| match number {
                0 => allocation(disk, offset, length, most),
                _ => Ok(written(disk, offset, length, most)),
            };
            contexts.iter().map(status).collect()
        });
    }

    /// Returns the reason if a command cannot be carried out now.
    fn refusal(&mut self, command: Command, request: &Request) -> Option<Refusal> {
        let changes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        if self.shutting_down {
            Some(Refusal { error: Error::Shutdown, text: Error::Shutdown.text() })
        } else if changes && self.disk.has_failed() {
            Some(Refusal { error: Error::Perm, text: "read-only since a flush failed" })
        } else if changes && !self.has_room_for(request) {
            Some(BECAME_SHORTER)
        } else {
            None
        }
    }

    /// Returns true for a write whose payload is better received straight into the disk's memory.
    fn is_bulk(&self, request: &Request) -> bool {
        request.length >= PLACED_BYTES_MIN
            && self.disk.store.landing(request.offset, request.length).is_some()
    }

    /// Returns the client's meter, if the client is limited.
    fn limiting(&self) -> Option<&Meter> {
        self.lane.meter.as_deref().filter(|meter| meter.is_limited())
    }

    /// Returns until when the client has to wait because it has used up its limit.
    pub(super) fn waits(&self) -> Option<Instant> {
        self.limiting()?.waits(Instant::now())
    }

    /// Charges for a request that was taken and moves `bytes` bytes.
    fn charge(&mut self, bytes: u64) {
        self.lane.place.begin();
        self.lane.place.spend(bytes);
        if let Some(meter) = self.limiting() {
            meter.charge(Instant::now(), 1, bytes);
        }
    }

    /// Returns true if the range of a request still lies inside the disk. Reads the size once for all requests
    /// that arrived together.
    fn has_room_for(&mut self, request: &Request) -> bool {
        let size = match self.size {
            Some(size) => size,
            // A device that is gone has no size.
            None => *self.size.insert(self.disk.store.refresh().unwrap_or(0)),
        };
        request.offset.checked_add(request.length).is_some_and(|end| end <= size)
    }
}

impl Handler for Serving<'_> {
    fn is_full(&self) -> bool {
        self.lane.unsent() > UNSENT_BYTES_MAX
            || !self.lane.may_start(self.engine.requests_of(self.lane.owner))
            || self.waits().is_some()
    }

    fn upcoming(&mut self, request: &Request) {
        if request.kind != number::WRITE {
            return;
        }
        let length = request.length.min(EXPECTED_BYTES);
        let size = self.disk.store.geometry().size;
        if request.offset.checked_add(length).is_some_and(|end| end <= size)
            && let Some((memory, at)) = self.disk.store.landing(request.offset, length)
        {
            memory.expect_writes(at, length as usize);
        }
    }

    fn command(&mut self, command: Command, request: &Request, contexts: &[Context]) {
        if let Some(refusal) = self.refusal(command, request) {
            return self.refuse(request, refusal);
        }
        self.charge(if command == Command::Read { request.length } else { 0 });
        self.lane.expects_bulk = false;
        let tag = self.tag(command, request);
        match command {
            Command::Read => self.read(request),
            Command::Flush => self.flush(tag),
            Command::Trim => self.trim(tag, request),
            Command::WriteZeroes => self.write_zeroes(tag, request),
            Command::Cache => {
                let (offset, length) = (request.offset, request.length);
                self.ask(tag, move |disk| disk.store.cache(offset, length).map(|()| Vec::new()));
            }
            Command::BlockStatus => self.block_status(tag, request, contexts),
            Command::Write | Command::Disconnect => {}
        }
    }

    fn refuse(&mut self, request: &Request, refusal: Refusal) {
        self.charge(0);
        let replying = Replying::to(request, self.form);
        replying.error(self.lane.replies(), refusal.error, refusal.text);
    }

    fn write_now(&mut self, request: &Request, payload: &[u8]) -> bool {
        if let Some(refusal) = self.refusal(Command::Write, request) {
            self.refuse(request, refusal);
            return true;
        }
        let durable = request.has(flag::FUA);
        self.lane.expects_bulk = self.is_bulk(request);
        self.disk.changes.note(request.offset, request.length);
        let Now::Done(result) = self.disk.write_now(request.offset, payload, durable) else {
            return false;
        };
        self.charge(request.length);
        let replying = Replying::to(request, self.form);
        match result {
            Ok(()) => {
                self.engine.count_written(request.length);
                replying.done(self.lane.replies());
                self.lane.send_early(request.length, &self.statistics.counters);
                self.record(Command::Write);
            }
            Err(error) => {
                let error = protocol_error(&error);
                replying.error(self.lane.replies(), error, error.text());
            }
        }
        true
    }

    fn write_begin(&mut self, request: &Request) -> Result<(), Refusal> {
        if let Some(refusal) = self.refusal(Command::Write, request) {
            return Err(refusal);
        }
        self.charge(request.length);
        self.lane.expects_bulk = self.is_bulk(request);
        let ticket = Ticket::Nbd(self.tag(Command::Write, request));
        let range = request.offset..request.offset + request.length;
        let durable = request.has(flag::FUA);
        let owner = self.lane.owner;
        let key = self.engine.write(owner, ticket, self.disk, range, durable, self.arrived);
        self.lane.filling =
            key.map(|key| Filling { key, buffer: None, in_place: false, length: 0, filled: 0 });
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        let Some(mut target) = self.target(bytes.len()) else { return 0 };
        let count = target.put(bytes);
        self.placed(count);
        count
    }
}

impl Serving<'_> {
    /// Returns where the next bytes of the write go, at most `most` if they go into the disk's own memory;
    /// `None`: there is no room at the moment.
    pub(super) fn target(&mut self, most: usize) -> Option<Target<'_>> {
        let filling = self.lane.filling.as_mut()?;
        if filling.buffer.is_none() {
            filling.in_place = self.engine.landing(filling.key, most).is_some();
            if filling.in_place {
                let (memory, range) = self.engine.landing(filling.key, most)?;
                return Some(Target::Shared(memory, range));
            }
            let (buffer, length) = self.engine.room(filling.key).ok()?;
            (filling.buffer, filling.length, filling.filled) = (Some(buffer), length, 0);
        }
        let range = filling.filled..filling.length;
        filling.buffer.as_mut().map(|buffer| Target::Own(&mut buffer.bytes_mut()[range]))
    }

    /// Notes that `count` bytes were put into the place from [`Serving::target`].
    pub(super) fn placed(&mut self, count: usize) {
        let Some(filling) = self.lane.filling.as_mut() else { return };
        if filling.in_place {
            return self.engine.landed(filling.key, count);
        }
        filling.filled += count;
        if filling.filled == filling.length
            && let Some(buffer) = filling.buffer.take()
        {
            self.engine.filled(filling.key, buffer, filling.length, &mut self.driver);
        }
    }
}

/// Returns the protocol's error for an error of a store.
pub(super) fn protocol_error(error: &io::Error) -> Error {
    error.raw_os_error().map_or(Error::Io, Error::of)
}
