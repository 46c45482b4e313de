//! A queue's connection to an NBD server: many requests under way, simple replies, and when the
//! connection is lost another one, on which all that was not answered is asked again.
//!
//! Asking again is safe as every request names the range it is about, and the kernel has no other
//! request for a range that it is still writing.

use super::source::Source;
use crate::ublk::Event;
use crate::{Backend, Error, Finished, Geometry, Operation, Request};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use towline_nbd::constants::{REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command, command_flag};

const REQUEST_BYTES: usize = 28;
const REPLY_BYTES: usize = 16;
/// Requests that one system call sends, at most two parts each.
const GATHER: usize = 32;
/// Replies without data, and the beginnings of others, that one system call reads.
const INBOX_BYTES: usize = 32 * 1024;
/// Between attempts to connect: grows from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// The protocol's error of a server that is about to end: ask the next one.
const SHUTDOWN: u32 = towline_nbd::Error::Shutdown as u32;

struct Pending {
    request: Request,
    header: [u8; REQUEST_BYTES],
}

/// What a lane is reading.
enum Reading {
    /// The header of a reply.
    Header,
    /// Data of the request with this tag, and how much of it came.
    Data(u16, usize),
}

/// A connection that serves a queue, see [`Backend`].
pub struct Lane {
    source: Source,
    geometry: Geometry,
    tell: Sender<Event>,
    socket: Option<OwnedFd>,
    pending: Vec<Option<Pending>>,
    /// Tags in the order in which they are to be sent; of the first, `sent` bytes were.
    outbox: VecDeque<u16>,
    sent: usize,
    blocked: bool,
    inbox: Box<[u8]>,
    /// What is in the inbox and not looked at.
    unread: std::ops::Range<usize>,
    reading: Reading,
    finished: VecDeque<Finished>,
    /// Counts connections and is part of each cookie, so that no answer is taken for another's.
    generation: u32,
    pause: Duration,
    again: Instant,
    /// When the server went away, and how long requests wait for it.
    away: Option<Instant>,
    patience: Option<Duration>,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Lane {
    /// Connects. Requests wait for a server that went away for `patience`, then they fail until it
    /// is back; without it they wait for ever. Another size of the disk is told by `tell`.
    ///
    /// # Errors
    /// When the server cannot be reached or has no such disk.
    pub fn connect(
        source: &Source,
        patience: Option<Duration>,
        tell: Sender<Event>,
    ) -> Result<Self, Error> {
        let connection = source.connect()?;
        let mut lane = Self {
            source: source.clone(),
            geometry: connection.geometry,
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
            away: None,
            patience,
        };
        lane.adopt(connection.socket)?;
        Ok(lane)
    }

    /// What the disk is like.
    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// False until a connection that was lost is replaced.
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
        // Interrupted or not: whoever waits looks at everything anyway.
        let _ = rustix::event::poll(&mut interest, until.as_ref());
    }

    fn adopt(&mut self, socket: OwnedFd) -> Result<(), Error> {
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|error| Error::system(&self.source)(error.into()))?;
        self.socket = Some(socket);
        self.generation = self.generation.wrapping_add(1);
        Ok(())
    }

    /// Takes leave of a connection: all that was asked on it is to be asked again.
    fn lost(&mut self, why: &str) {
        let Some(socket) = self.socket.take() else { return };
        // Also ends polls of it, which would keep it open.
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        log::warn!("{}: {why}; connecting again", self.source);
        self.unread = 0..0;
        self.reading = Reading::Header;
        self.blocked = false;
        self.sent = 0;
        self.outbox =
            (0..self.pending.len() as u16).filter(|tag| self.at(*tag).is_some()).collect();
        self.pause = PAUSE.0;
        self.again = Instant::now();
        self.away = Some(Instant::now());
    }

    fn at(&self, tag: u16) -> Option<&Pending> {
        self.pending.get(usize::from(tag))?.as_ref()
    }

    fn reconnect(&mut self) {
        if Instant::now() < self.again {
            return;
        }
        let adopted = self.source.connect().and_then(|connection| {
            let (old, new) = (self.geometry, connection.geometry);
            if new.read_only && !old.read_only || new.block_minimum > old.block_minimum {
                return Err(Error::Refused(format!("{}: another disk now", self.source)));
            }
            if new.size != old.size {
                log::warn!("{}: {} bytes now, were {}", self.source, new.size, old.size);
                self.geometry.size = new.size;
                let _ = self.tell.send(Event::Resized(new.size));
            }
            self.adopt(connection.socket)
        });
        if let Err(error) = adopted {
            log::info!("{error}");
            self.again = Instant::now() + self.pause;
            self.pause = (self.pause * 2).min(PAUSE.1);
            if self.is_given_up() {
                self.fail_all();
            }
            return;
        }
        self.away = None;
        log::warn!("{}: connected again, {} requests to repeat", self.source, self.outbox.len());
        let generation = self.generation;
        for pending in self.pending.iter_mut().flatten() {
            pending.header = header(&pending.request, generation);
        }
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
            // What is unread is the beginning of a header.
            self.inbox.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
            let (_, room) = self.inbox.split_at_mut(self.unread.end);
            let mut nothing = [];
            let (target, wanted) = match self.reading {
                Reading::Header => (&mut nothing[..], 0),
                Reading::Data(tag, done) => match &mut self.pending[usize::from(tag)] {
                    Some(Pending { request, .. }) => {
                        let length = request.length as usize;
                        (&mut request.buffer[done..length], length - done)
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
            if let Reading::Data(_, done) = &mut self.reading {
                *done += read.min(wanted);
            }
            self.unread.end += read.saturating_sub(wanted);
        }
    }

    /// Looks at what is in the inbox.
    fn look(&mut self) -> Result<(), String> {
        loop {
            match self.reading {
                Reading::Data(tag, done) => {
                    let Some(Some(Pending { request, .. })) =
                        self.pending.get_mut(usize::from(tag))
                    else {
                        return Err("data of nothing".to_owned());
                    };
                    let length = request.length as usize;
                    let copied = self.unread.len().min(length - done);
                    let from = self.unread.start;
                    request.buffer[done..done + copied]
                        .copy_from_slice(&self.inbox[from..from + copied]);
                    self.unread.start += copied;
                    if done + copied < length {
                        self.reading = Reading::Data(tag, done + copied);
                        return Ok(());
                    }
                    self.reading = Reading::Header;
                    self.finish(tag, Ok(()));
                }
                Reading::Header if self.unread.len() < REPLY_BYTES => return Ok(()),
                Reading::Header => {
                    let mut head = [0; REPLY_BYTES];
                    head.copy_from_slice(&self.inbox[self.unread.start..][..REPLY_BYTES]);
                    self.unread.start += REPLY_BYTES;
                    self.reply(head)?;
                }
            }
        }
    }

    fn reply(&mut self, head: [u8; REPLY_BYTES]) -> Result<(), String> {
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if word(0) != SIMPLE_REPLY_MAGIC {
            return Err("the server broke the protocol: no reply where one should be".to_owned());
        }
        let (error, generation, tag) = (word(4), word(8), word(12));
        let known = u16::try_from(tag).ok().filter(|tag| {
            let waiting = self.outbox.contains(tag);
            generation == self.generation && !waiting && self.at(*tag).is_some()
        });
        let Some(tag) = known else {
            return Err("the server broke the protocol: a reply to no request".to_owned());
        };
        match error {
            0 => {
                let reads = self.at(tag).is_some_and(|p| p.request.operation == Operation::Read);
                if reads {
                    self.reading = Reading::Data(tag, 0);
                } else {
                    self.finish(tag, Ok(()));
                }
                Ok(())
            }
            SHUTDOWN => Err("the server is about to end".to_owned()),
            // The protocol's numbers are those of Linux.
            error => {
                let error = i32::try_from(error).ok().filter(|error| *error < 4096);
                self.finish(tag, Err(error.unwrap_or(libc::EIO)));
                Ok(())
            }
        }
    }

    fn finish(&mut self, tag: u16, result: Result<(), i32>) {
        if let Some(pending) = self.pending[usize::from(tag)].take() {
            let buffer = pending.request.buffer;
            self.finished.push_back(Finished { tag, result, buffer });
        }
    }
}

/// What is sent behind the header of a request.
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

impl Backend for Lane {
    fn begin(&mut self, request: Request) {
        if self.is_given_up() {
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
        self.pending[place] = Some(Pending { request, header });
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
