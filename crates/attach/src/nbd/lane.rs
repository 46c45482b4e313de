//! A queue's connection to an NBD server: many requests under way, with simple or structured replies. A
//! lost connection is replaced, and unanswered requests are repeated on the new one.
//!
//! Repeating is safe because every request names its range, and the kernel has no other request for a
//! range while it is being written.

use super::bytes::{be16, be32, be64};
use super::source::{Connection, Source, take_leave};
use crate::error::Logged;
use crate::ublk::Event;
use crate::{Backend, Error, Finished, Geometry, Operation, Request};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use towline_nbd::constants::{
    REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command, command_flag,
};

const REQUEST_BYTES: usize = 28;
const REPLY_BYTES: usize = 16;
/// Length of the header of a chunk in a structured reply.
const CHUNK_BYTES: usize = 20;
/// Longest error chunk: two numbers and a text of 4096 bytes, with room to spare.
const ERROR_BYTES_MAX: usize = 8192;
/// Maximum number of separate parts of a read; chunks beside each other are one part.
const PARTS_MAX: usize = 1024;
/// Maximum number of requests, of at most two parts, in one system call.
const GATHER: usize = 32;
/// Room for replies without data and for the beginnings of others, read by one system call.
const INBOX_BYTES: usize = 32 * 1024;
/// Pause between attempts to connect, which grows from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// The protocol's error of a server that is shutting down: the request is repeated on another connection.
const SHUTDOWN: u32 = towline_nbd::Error::Shutdown as u32;

struct Pending {
    request: Request,
    header: [u8; REQUEST_BYTES],
    /// Parts of the buffer of a read that have been received or announced.
    filled: SmallVec<[Range<usize>; 1]>,
    /// The first error in a structured reply.
    failed: Option<i32>,
}

impl Pending {
    /// Returns the number of bytes of a read that have neither been received nor announced.
    fn missing(&self) -> usize {
        self.request.length as usize - self.filled.iter().map(Range::len).sum::<usize>()
    }
}

/// What a lane is reading.
enum Reading {
    /// The header of a reply or chunk.
    Header,
    /// Data for this part of the buffer of the request with this tag; with `last`, the request is then done.
    Data { tag: u16, place: Range<usize>, last: bool },
}

/// A connection that serves a queue as its [`Backend`].
pub struct Lane {
    source: Source,
    geometry: Geometry,
    /// There are, or may be, other connections for the same device or the same callers.
    shared: bool,
    tell: Sender<Event>,
    socket: Option<OwnedFd>,
    pending: Vec<Option<Pending>>,
    /// Tags of unsent requests, in sending order. `sent` bytes of the first have been sent.
    outbox: VecDeque<u16>,
    sent: usize,
    blocked: bool,
    inbox: Box<[u8]>,
    /// Part of the inbox that has not been parsed yet.
    unread: Range<usize>,
    reading: Reading,
    finished: VecDeque<Finished>,
    /// Number of the connection, a part of each cookie, so that no reply of an earlier connection is accepted.
    generation: u32,
    pause: Duration,
    again: Instant,
    /// Why the connection was lost, or has not been replaced yet.
    logged: Logged,
    /// When the connection was made.
    since: Instant,
    /// When the last connection that lasted was lost. The server is away until another one lasts.
    away: Option<Instant>,
    patience: Option<Duration>,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Lane {
    /// Connects. While the server is away, requests wait for `patience`, then they fail until it is
    /// back; without a limit they wait for ever. A lane that is `shared`, one of several for the same device,
    /// takes a server for away that does not announce that all of them see the same data. Changes of the disk's
    /// size are reported through `tell`.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such disk, or makes no such announcement to a shared lane.
    pub fn connect(
        source: &Source,
        shared: bool,
        patience: Option<Duration>,
        tell: Sender<Event>,
    ) -> Result<Self, Error> {
        let connection = source.connect_for_chunks()?;
        if shared {
            connection.geometry.shareable(source)?;
        }
        Self::adopting(source, connection, shared, patience, tell)
    }

    /// Uses an existing connection, otherwise like [`Lane::connect`].
    pub(super) fn adopting(
        source: &Source,
        connection: Connection,
        shared: bool,
        patience: Option<Duration>,
        tell: Sender<Event>,
    ) -> Result<Self, Error> {
        let mut lane = Self {
            source: source.clone(),
            geometry: connection.geometry,
            shared,
            tell,
            socket: None,
            pending: Vec::new(),
            outbox: VecDeque::new(),
            sent: 0,
            blocked: false,
            inbox: vec![0; INBOX_BYTES].into(),
            unread: 0..0,
            reading: Reading::Header,
            finished: VecDeque::new(),
            generation: 0,
            pause: PAUSE.0,
            again: Instant::now(),
            logged: Logged::default(),
            since: Instant::now(),
            away: None,
            patience,
        };
        lane.adopt(connection.socket)?;
        Ok(lane)
    }

    /// Returns size, block sizes and abilities of the disk.
    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns false while the connection is lost and not yet replaced.
    pub(super) fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// Waits until [`Backend::turn`] has something to do, or `bell` can be read.
    pub(super) fn wait(&self, bell: &OwnedFd) {
        let mut interest = vec![PollFd::new(bell, PollFlags::IN)];
        if let Some(socket) = &self.socket {
            let flags = if self.blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            interest.push(PollFd::new(socket, flags));
        }
        let until = self.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let until = until.and_then(|until| Timespec::try_from(until).ok());
        // An interrupted wait does no harm: the caller looks at everything anyway.
        let _ = rustix::event::poll(&mut interest, until.as_ref());
    }

    fn adopt(&mut self, socket: OwnedFd) -> Result<(), Error> {
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|error| Error::system(&self.source)(error.into()))?;
        self.socket = Some(socket);
        self.since = Instant::now();
        self.generation = self.generation.wrapping_add(1);
        Ok(())
    }

    /// Closes a lost connection, and queues all its requests to be repeated.
    fn lost(&mut self, why: &str) {
        let Some(socket) = self.socket.take() else { return };
        // This also ends pending polls, which would keep the socket open.
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        self.unread = 0..0;
        self.reading = Reading::Header;
        self.blocked = false;
        self.sent = 0;
        self.outbox =
            (0..self.pending.len() as u16).filter(|tag| self.at(*tag).is_some()).collect();
        let why = Error::Refused(format!("{}: {why}", self.source));
        let lasts = self.patience.map_or(PAUSE.1, |patience| patience.min(PAUSE.1));
        if self.away.is_none() || self.since.elapsed() >= lasts {
            self.pause = PAUSE.0;
            self.logged = Logged::default();
            self.again = Instant::now();
            self.away = Some(Instant::now());
            match self.is_patient() {
                true => self.logged.warn(&why),
                false => log::info!("{why}"),
            }
        } else {
            // The server hangs up again and again, maybe whenever it is asked the same.
            self.put_off(&why);
        }
    }

    /// Puts off the next attempt to connect. Once the server has been away for too long, requests do not wait for it.
    fn put_off(&mut self, why: &Error) {
        self.logged.warn(why);
        self.again = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE.1);
        if self.is_given_up() {
            self.fail_all();
        }
    }

    fn at(&self, tag: u16) -> Option<&Pending> {
        self.pending.get(usize::from(tag))?.as_ref()
    }

    fn reconnect(&mut self) {
        if Instant::now() < self.again {
            return;
        }
        // Otherwise the last connection was lost before it had lasted.
        let lasted = self.away.is_none_or(|away| away >= self.since);
        let adopted = self.source.connect_for_chunks().and_then(|connection| {
            let (old, new) = (self.geometry, connection.geometry);
            if new.read_only && !old.read_only || new.block_minimum > old.block_minimum {
                return Err(Error::Refused(format!("{}: another disk now", self.source)));
            }
            if self.shared {
                new.shareable(&self.source)?;
            }
            if new.size != old.size {
                log::warn!("{}: {} bytes now, were {}", self.source, new.size, old.size);
                self.geometry.size = new.size;
                let _ = self.tell.send(Event::Resized(new.size));
            }
            self.adopt(connection.socket)
        });
        if let Err(error) = adopted {
            return self.put_off(&error);
        }
        if lasted {
            log::warn!("{}: reconnected, repeating {} requests", self.source, self.outbox.len());
        }
        let generation = self.generation;
        for pending in self.pending.iter_mut().flatten() {
            pending.header = header(&pending.request, generation);
            (pending.filled, pending.failed) = (SmallVec::new(), None);
        }
    }

    /// Returns true if a lost connection will be replaced.
    fn is_patient(&self) -> bool {
        self.patience.is_none_or(|patience| !patience.is_zero())
    }

    fn is_given_up(&self) -> bool {
        let away = self.away.map(|since| since.elapsed());
        away.zip(self.patience).is_some_and(|(away, patience)| away >= patience)
    }

    fn fail_all(&mut self) {
        self.outbox.clear();
        for slot in &mut self.pending {
            if let Some(Pending { request: Request { tag, buffer, .. }, .. }) = slot.take() {
                self.finished.push_back(Finished { tag, result: Err(libc::EIO), buffer });
            }
        }
    }

    fn send(&mut self) -> Result<(), Errno> {
        while let Some(socket) = self.socket.as_ref().filter(|_| !self.outbox.is_empty()) {
            let mut parts = Vec::with_capacity(2 * GATHER);
            let mut skip = self.sent;
            for tag in self.outbox.iter().take(GATHER) {
                let Some(Some(pending)) = self.pending.get(usize::from(*tag)) else { continue };
                for part in [&pending.header[..], payload(&pending.request)] {
                    let skipped = skip.min(part.len());
                    skip -= skipped;
                    if skipped < part.len() {
                        parts.push(IoSlice::new(&part[skipped..]));
                    }
                }
            }
            let mut sent = match rustix::io::writev(socket, &parts) {
                Ok(sent) => self.sent + sent,
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
            while let Some(tag) = self.outbox.front() {
                let length = match self.at(*tag) {
                    Some(pending) => REQUEST_BYTES + payload(&pending.request).len(),
                    None => 0,
                };
                if sent < length {
                    break;
                }
                sent -= length;
                self.outbox.pop_front();
            }
            self.sent = sent;
        }
        self.blocked = false;
        Ok(())
    }

    fn receive(&mut self) -> Result<(), String> {
        loop {
            self.look()?;
            let Some(socket) = &self.socket else { return Ok(()) };
            // The unread bytes are the beginning of a header.
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let (_, room) = self.inbox.split_at_mut(self.unread.end);
            let mut nothing = [];
            let (target, wanted) = match self.reading {
                Reading::Header => (&mut nothing[..], 0),
                Reading::Data { tag, ref place, .. } => match &mut self.pending[usize::from(tag)] {
                    Some(Pending { request, .. }) => {
                        (&mut request.buffer[place.clone()], place.len())
                    }
                    None => return Err("data of nothing".to_owned()),
                },
            };
            let mut parts = [IoSliceMut::new(target), IoSliceMut::new(room)];
            let skip = usize::from(wanted == 0);
            let read = match rustix::io::readv(socket.as_fd(), &mut parts[skip..]) {
                Ok(0) => return Err("the server closed the connection".to_owned()),
                Ok(read) => read,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.to_string()),
            };
            if let Reading::Data { place, .. } = &mut self.reading {
                place.start += read.min(wanted);
            }
            self.unread.end += read.saturating_sub(wanted);
        }
    }

    /// Parses the contents of the inbox.
    fn look(&mut self) -> Result<(), String> {
        loop {
            let Reading::Data { tag, place, last } = &mut self.reading else {
                if self.header()? {
                    continue;
                }
                return Ok(());
            };
            let Some(Some(pending)) = self.pending.get_mut(usize::from(*tag)) else {
                return Err("data of nothing".to_owned());
            };
            let from = self.unread.start;
            let copied = self.unread.len().min(place.len());
            pending.request.buffer[place.start..place.start + copied]
                .copy_from_slice(&self.inbox[from..from + copied]);
            self.unread.start += copied;
            place.start += copied;
            if place.start < place.end {
                return Ok(());
            }
            let (tag, last) = (*tag, *last);
            self.reading = Reading::Header;
            if last {
                self.finish_told(tag);
            }
        }
    }

    /// Parses the header of a reply or chunk, and all of it except data. Returns false if it is not
    /// complete yet.
    fn header(&mut self) -> Result<bool, String> {
        let bytes = &self.inbox[self.unread.clone()];
        let magic = bytes.first_chunk().map(|magic| u32::from_be_bytes(*magic));
        let used = match magic {
            None => return Ok(false),
            Some(SIMPLE_REPLY_MAGIC) => match bytes.first_chunk::<REPLY_BYTES>() {
                None => return Ok(false),
                Some(head) => {
                    let head = *head;
                    self.simple(&head)?;
                    REPLY_BYTES
                }
            },
            Some(STRUCTURED_REPLY_MAGIC) => match self.chunk()? {
                None => return Ok(false),
                Some(used) => used,
            },
            Some(_) => {
                let what = "the server broke the protocol: expected a reply header";
                return Err(what.to_owned());
            }
        };
        self.unread.start += used;
        Ok(true)
    }

    /// Returns the tag of the request that a reply names, which must be sent and unanswered.
    fn known(&self, cookie: [u32; 2]) -> Result<u16, String> {
        let [generation, tag] = cookie;
        let known = u16::try_from(tag).ok().filter(|tag| {
            let waiting = self.outbox.contains(tag);
            generation == self.generation && !waiting && self.at(*tag).is_some()
        });
        known.ok_or_else(|| "the server broke the protocol: reply to an unknown request".to_owned())
    }

    fn reads(&self, tag: u16) -> bool {
        self.at(tag).is_some_and(|pending| pending.request.operation == Operation::Read)
    }

    fn simple(&mut self, head: &[u8; REPLY_BYTES]) -> Result<(), String> {
        let tag = self.known([be32(&head[8..]), be32(&head[12..])])?;
        match be32(&head[4..]) {
            0 if self.reads(tag) => {
                let length = self.at(tag).map_or(0, |pending| pending.request.length);
                let place = self.place(tag, None, length as usize)?;
                self.reading = Reading::Data { tag, place, last: true };
            }
            0 => self.finish(tag, Ok(())),
            error => {
                let error = errno(error)?;
                self.finish(tag, Err(error));
            }
        }
        Ok(())
    }

    /// Parses a chunk of a structured reply. Returns its length without data, or `None` if it is not
    /// complete yet.
    fn chunk(&mut self) -> Result<Option<usize>, String> {
        let bytes = &self.inbox[self.unread.clone()];
        let Some((head, body)) = bytes.split_first_chunk::<CHUNK_BYTES>() else { return Ok(None) };
        let last = be16(&head[4..]) & chunk::FLAG_DONE != 0;
        let (kind, length) = (be16(&head[6..]), be32(&head[16..]) as usize);
        let tag = self.known([be32(&head[8..]), be32(&head[12..])])?;
        let wrong = || Err("the server broke the protocol: malformed reply chunk".to_owned());
        let fixed = match (kind, length) {
            (chunk::NONE, 0) if last => 0,
            (chunk::OFFSET_DATA, 9..) if self.reads(tag) => 8,
            (chunk::OFFSET_HOLE, 12) if self.reads(tag) => 12,
            (kind, 6..=ERROR_BYTES_MAX) if kind & 1 << 15 != 0 => length,
            _ => return wrong(),
        };
        let Some(body) = body.get(..fixed) else { return Ok(None) };
        match kind {
            chunk::NONE => {}
            chunk::OFFSET_DATA => {
                let offset = be64(body);
                let place = self.place(tag, Some(offset), length - fixed)?;
                self.reading = Reading::Data { tag, place, last };
                return Ok(Some(CHUNK_BYTES + fixed));
            }
            chunk::OFFSET_HOLE => {
                let (offset, length) = (be64(body), be32(&body[8..]) as usize);
                let place = self.place(tag, Some(offset), length)?;
                if let Some(Some(pending)) = self.pending.get_mut(usize::from(tag)) {
                    pending.request.buffer[place].fill(0);
                }
            }
            _ => {
                let error = errno(be32(body))?;
                if let Some(Some(pending)) = self.pending.get_mut(usize::from(tag)) {
                    pending.failed.get_or_insert(error);
                }
            }
        }
        if last {
            self.finish_told(tag);
        }
        Ok(Some(CHUNK_BYTES + fixed))
    }

    /// Returns where in its buffer data of a read belongs: at this offset of the disk, or at its start.
    fn place(
        &mut self,
        tag: u16,
        offset: Option<u64>,
        length: usize,
    ) -> Result<Range<usize>, String> {
        let wrong = || "the server broke the protocol: unrequested data".to_owned();
        let pending = self.pending.get_mut(usize::from(tag)).and_then(Option::as_mut);
        let Pending { request, filled, .. } = pending.ok_or_else(wrong)?;
        let start = offset.map_or(Some(0), |offset| offset.checked_sub(request.offset));
        let start = start.and_then(|start| usize::try_from(start).ok()).ok_or_else(wrong)?;
        let end = start.checked_add(length).filter(|end| *end <= request.length as usize);
        let place = start..end.ok_or_else(wrong)?;
        // Twice the same would leave as much of the buffer as it was.
        if filled.iter().any(|part| part.start < place.end && place.start < part.end) {
            return Err(wrong());
        }
        match filled.iter().position(|part| part.end == place.start) {
            Some(before) => filled[before].end = place.end,
            None if filled.len() == PARTS_MAX => return Err(wrong()),
            None => filled.push(place.clone()),
        }
        Ok(place)
    }

    /// Finishes a request whose reply is complete.
    fn finish_told(&mut self, tag: u16) {
        let reads = self.reads(tag);
        let Some(pending) = self.at(tag) else { return };
        let result = match pending.failed {
            Some(error) => Err(error),
            // The server left out a part of the data.
            None if reads && pending.missing() > 0 => Err(libc::EIO),
            None => Ok(()),
        };
        self.finish(tag, result);
    }

    fn finish(&mut self, tag: u16, result: Result<(), i32>) {
        if let Some(pending) = self.pending[usize::from(tag)].take() {
            let buffer = pending.request.buffer;
            self.finished.push_back(Finished { tag, result, buffer });
        }
    }
}

/// Converts an error of the protocol to a Linux error number, which most of them are. Fails if the server is
/// shutting down.
fn errno(error: u32) -> Result<i32, String> {
    match error {
        SHUTDOWN => Err("the server is shutting down".to_owned()),
        error => {
            let error = i32::try_from(error).ok().filter(|error| (1..4096).contains(error));
            Ok(error.unwrap_or(libc::EIO))
        }
    }
}

/// Returns the data that follows the header of a request.
fn payload(request: &Request) -> &[u8] {
    match request.operation {
        Operation::Write { .. } => &request.buffer[..request.length as usize],
        _ => &[],
    }
}

fn header(request: &Request, generation: u32) -> [u8; REQUEST_BYTES] {
    let fua = |durable: bool| if durable { command_flag::FUA } else { 0 };
    let (kind, flags) = match request.operation {
        Operation::Read => (command::READ, 0),
        Operation::Write { durable } => (command::WRITE, fua(durable)),
        Operation::Flush => (command::FLUSH, 0),
        Operation::Trim => (command::TRIM, 0),
        Operation::Zero { allocate, durable } => {
            (command::WRITE_ZEROES, fua(durable) | if allocate { command_flag::NO_HOLE } else { 0 })
        }
    };
    let mut bytes = [0; REQUEST_BYTES];
    bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..12].copy_from_slice(&generation.to_be_bytes());
    bytes[12..16].copy_from_slice(&u32::from(request.tag).to_be_bytes());
    bytes[16..24].copy_from_slice(&request.offset.to_be_bytes());
    bytes[24..28].copy_from_slice(&request.length.to_be_bytes());
    bytes
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Not in the middle of a request.
        if let Some(socket) = self.socket.as_ref().filter(|_| self.outbox.is_empty()) {
            take_leave(socket);
        }
    }
}

impl Backend for Lane {
    fn begin(&mut self, request: Request) {
        if self.socket.is_none() && self.is_given_up() {
            let Request { tag, buffer, .. } = request;
            self.finished.push_back(Finished { tag, result: Err(libc::EIO), buffer });
            return;
        }
        let place = usize::from(request.tag);
        if place >= self.pending.len() {
            self.pending.resize_with(place + 1, || None);
        }
        self.outbox.push_back(request.tag);
        let header = header(&request, self.generation);
        let filled = SmallVec::new();
        self.pending[place] = Some(Pending { request, header, filled, failed: None });
    }

    fn turn(&mut self) {
        if self.socket.is_none() {
            self.reconnect();
        }
        if let Err(error) = self.send() {
            self.lost(&error.to_string());
        }
        if let Err(why) = self.receive() {
            self.lost(&why);
        }
    }

    fn finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    fn interest(&self) -> Option<(RawFd, bool)> {
        self.socket.as_ref().map(|socket| (socket.as_raw_fd(), self.blocked))
    }

    fn deadline(&self) -> Option<Instant> {
        self.socket.is_none().then_some(self.again)
    }
}
