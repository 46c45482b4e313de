//! The transmission phase: sends requests and receives replies, several in flight.

use std::collections::HashMap;
use std::fmt;

use super::chunk::Chunk;
use super::haggle::{BlockSizes, Haggle, be32, be64, context_data, info_data};
use super::reply::{Pending, Reply};
use crate::link::{Broken, Link};
use crate::rule::Problem;
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

/// Longest payload of one chunk that the kit accepts.
const CHUNK_LENGTH_MAX: u64 = 128 << 20;

/// Form of requests and replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Simple => "simple replies",
            Self::Structured => "structured replies",
            Self::Extended => "extended headers",
        })
    }
}

/// A request. Its fields may have any values, valid or not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Command: one of `CMD_*`.
    pub command: u16,
    /// Command flags.
    pub flags: u16,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in the header, in bytes: of the effect or of the payload.
    pub length: u64,
    /// Bytes sent after the header.
    pub payload: Vec<u8>,
}

impl Request {
    /// Makes a request without payload.
    pub fn new(command: u16, offset: u64, length: u64) -> Self {
        Self { command, offset, length, ..Self::default() }
    }

    /// Makes a read.
    pub fn read(offset: u64, length: u64) -> Self {
        Self::new(CMD_READ, offset, length)
    }

    /// Makes a write.
    pub fn write(offset: u64, data: &[u8]) -> Self {
        let mut request = Self::new(CMD_WRITE, offset, data.len() as u64);
        request.payload = data.to_vec();
        request
    }

    /// Sets the command flags.
    #[must_use]
    pub fn with(mut self, flags: u16) -> Self {
        self.flags = flags;
        self
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} of {}", command_name(self.command), self.offset, self.length)?;
        if self.flags != 0 {
            write!(f, " with flags {:#x}", self.flags)?;
        }
        Ok(())
    }
}

/// A connection in the transmission phase.
pub struct Session {
    /// The connection.
    pub link: Link,
    /// Form of requests and replies.
    pub mode: Mode,
    /// Size of the export in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Block size constraints, if the server announced them.
    pub blocks: Option<BlockSizes>,
    /// Selected metadata contexts: identifier and name.
    pub contexts: Vec<(u32, String)>,
    next_cookie: u64,
    pending: HashMap<u64, Pending>,
    done: HashMap<u64, Reply>,
}

impl Session {
    /// Connects and performs the handshake in the given mode, without metadata contexts.
    ///
    /// # Errors
    /// Skips if the server does not offer the mode; fails if the handshake fails.
    pub fn open(target: &Target, mode: Mode) -> Result<Self, Problem> {
        Self::open_with_contexts(target, mode, &[])
    }

    /// Like [`Self::open`], with the metadata contexts that the given queries select.
    ///
    /// # Errors
    /// As [`Self::open`]; skips if the server does not know metadata contexts.
    pub fn open_with_contexts(
        target: &Target,
        mode: Mode,
        queries: &[&str],
    ) -> Result<Self, Problem> {
        let mut haggle = Haggle::open(target)?;
        match mode {
            Mode::Simple => {}
            Mode::Structured => negotiate(&mut haggle, OPT_STRUCTURED_REPLY, mode)?,
            Mode::Extended => negotiate(&mut haggle, OPT_EXTENDED_HEADERS, mode)?,
        }
        let mut contexts = Vec::new();
        if !queries.is_empty() {
            let answer =
                haggle.option(OPT_SET_META_CONTEXT, &context_data(&target.export, queries))?;
            if answer.last.kind == REP_ERR_UNSUP {
                skip!("server does not offer metadata contexts");
            }
            ensure!(answer.is_ack(), "SET_META_CONTEXT: {}", answer.outcome());
            contexts = answer.contexts()?;
        }
        let mut session = Self::go(haggle, target, mode)?;
        session.contexts = contexts;
        Ok(session)
    }

    /// Ends haggling with `GO`; in simple mode with `EXPORT_NAME` if the server does not know `GO`.
    ///
    /// # Errors
    /// Fails if the server refuses.
    pub fn go(mut haggle: Haggle, target: &Target, mode: Mode) -> Result<Self, Problem> {
        let answer = haggle.option(OPT_GO, &info_data(&target.export, &[INFO_BLOCK_SIZE]))?;
        if answer.last.kind == REP_ERR_UNSUP && mode == Mode::Simple {
            return Self::export_name(haggle, &target.export);
        }
        let (size, flags) = answer.export().map_err(|problem| problem.during("GO"))?;
        let blocks = answer.block_sizes()?;
        Ok(Self::new(haggle.link, mode, size, flags, blocks))
    }

    /// Ends haggling with `EXPORT_NAME`.
    ///
    /// # Errors
    /// Fails if the server closes the connection.
    pub fn export_name(mut haggle: Haggle, export: &str) -> Result<Self, Problem> {
        haggle.send(OPT_EXPORT_NAME, export.as_bytes())?;
        let reply = haggle.link.recv(10)?;
        if !haggle.no_zeroes {
            haggle.link.recv(EXPORT_NAME_PADDING)?;
        }
        let flags = u16::from_be_bytes([reply[8], reply[9]]);
        Ok(Self::new(haggle.link, Mode::Simple, be64(&reply), flags, None))
    }

    /// Makes a session on a connection on which haggling has ended.
    pub fn new(link: Link, mode: Mode, size: u64, flags: u16, blocks: Option<BlockSizes>) -> Self {
        Self {
            link,
            mode,
            size,
            flags,
            blocks,
            contexts: Vec::new(),
            // A large number with different halves, so that mixed-up bytes show.
            next_cookie: 0xa1b2_c3d4_0000_0001,
            pending: HashMap::new(),
            done: HashMap::new(),
        }
    }

    /// Returns true if the server announced the transmission flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Skips unless the server announced the transmission flag.
    ///
    /// # Errors
    /// The skip.
    pub fn need(&self, flag: u16, name: &str) -> Result<(), Problem> {
        if !self.has(flag) {
            skip!("{name} is not announced");
        }
        Ok(())
    }

    /// Sends a request and returns its cookie.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub fn send(&mut self, request: &Request) -> Result<u64, Problem> {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(1);
        self.send_as(cookie, request)?;
        Ok(cookie)
    }

    /// Sends a request with a cookie chosen by the caller.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub fn send_as(&mut self, cookie: u64, request: &Request) -> Result<(), Problem> {
        let message = self.encode(cookie, request);
        self.expect_reply(cookie, request);
        Ok(self.link.send(&message)?)
    }

    /// Registers a request that the caller sends directly on the connection.
    pub fn expect_reply(&mut self, cookie: u64, request: &Request) {
        let contexts = self.contexts.iter().map(|(id, _)| *id).collect();
        self.pending.insert(cookie, Pending::new(self.mode, request.clone(), contexts));
    }

    /// Encodes a request. In extended mode, adds the flag that writes must have.
    pub fn encode(&self, cookie: u64, request: &Request) -> Vec<u8> {
        let mut flags = request.flags;
        if self.mode == Mode::Extended && request.command == CMD_WRITE {
            flags |= CMD_FLAG_PAYLOAD_LEN;
        }
        encode(self.mode, flags, cookie, request)
    }

    /// Waits for the whole reply to the request with this cookie.
    ///
    /// # Errors
    /// Fails on messages that cannot be parsed, unknown cookies, and lost connections.
    pub fn wait(&mut self, cookie: u64) -> Result<Reply, Problem> {
        loop {
            if let Some(reply) = self.done.remove(&cookie) {
                return Ok(reply);
            }
            self.recv_message()?;
        }
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn transact(&mut self, request: &Request) -> Result<Reply, Problem> {
        let during = |problem: Problem| problem.during(request);
        let cookie = self.send(request).map_err(during)?;
        self.wait(cookie).map_err(during)
    }

    /// Reads and returns the data.
    ///
    /// # Errors
    /// Fails on an error reply.
    pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, Problem> {
        self.transact(&Request::read(offset, length))?.data()
    }

    /// Sends a request that has to succeed, and returns its reply.
    ///
    /// # Errors
    /// Fails on an error reply.
    pub fn succeed(&mut self, request: &Request) -> Result<Reply, Problem> {
        let reply = self.transact(request)?;
        ensure!(reply.error == 0, "{request}: {}", reply.outcome());
        Ok(reply)
    }

    /// Checks that the server is still in step, that is, answers a read correctly.
    ///
    /// # Errors
    /// Fails if it is not.
    pub fn in_step(&mut self, target: &Target) -> Result<(), Problem> {
        let length = target.block().min(self.size);
        let after = |problem: Problem| problem.during("the connection is not in step afterwards");
        let reply = self.transact(&Request::read(0, length)).map_err(after)?;
        ensure!(!reply.simple || self.mode == Mode::Simple, "a simple reply, not {}", self.mode);
        reply.data().map(drop).map_err(after)
    }

    fn recv_message(&mut self) -> Result<(), Problem> {
        let magic = u32::from_be_bytes(self.link.recv_array()?);
        match (magic, self.mode) {
            (SIMPLE_REPLY_MAGIC, Mode::Simple | Mode::Structured) => self.recv_simple(),
            (STRUCTURED_REPLY_MAGIC, Mode::Structured) => self.recv_chunk(16),
            (EXTENDED_REPLY_MAGIC, Mode::Extended) => self.recv_chunk(28),
            _ => Err(Problem::Fail(format!(
                "message begins with {magic:#010x}, which cannot be with {}",
                self.mode
            ))),
        }
    }

    fn recv_simple(&mut self) -> Result<(), Problem> {
        let header = self.link.recv(12)?;
        let (error, cookie) = (be32(&header), be64(&header[4..]));
        let mut pending = self.take(cookie)?;
        let data = if error == 0 { pending.simple_payload() } else { 0 };
        let data = self.recv_payload(data)?;
        pending.simple(error, data);
        self.done.insert(cookie, pending.finish());
        Ok(())
    }

    fn recv_chunk(&mut self, header: usize) -> Result<(), Problem> {
        let header = self.link.recv(header)?;
        let flags = u16::from_be_bytes([header[0], header[1]]);
        let kind = u16::from_be_bytes([header[2], header[3]]);
        let cookie = be64(&header[4..]);
        let (offset, length) = match self.mode {
            Mode::Extended => (Some(be64(&header[12..])), be64(&header[20..])),
            _ => (None, u64::from(be32(&header[12..]))),
        };
        ensure!(length <= CHUNK_LENGTH_MAX, "chunk of {length} bytes");
        let payload = self.recv_payload(length)?;
        let mut pending = self.take(cookie)?;
        pending.chunk(Chunk { flags, kind, offset, payload });
        if flags & REPLY_FLAG_DONE != 0 {
            self.done.insert(cookie, pending.finish());
        } else {
            self.pending.insert(cookie, pending);
        }
        Ok(())
    }

    fn recv_payload(&mut self, length: u64) -> Result<Vec<u8>, Broken> {
        self.link.recv(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn take(&mut self, cookie: u64) -> Result<Pending, Problem> {
        let text = || {
            format!(
                "message with cookie {cookie:#x}, which no request in flight has (a wrong cookie, or a message after the final one)"
            )
        };
        self.pending.remove(&cookie).ok_or_else(|| Problem::Fail(text()))
    }
}

/// Encodes a request with exactly these flags.
pub fn encode(mode: Mode, flags: u16, cookie: u64, request: &Request) -> Vec<u8> {
    let mut message = Vec::with_capacity(32 + request.payload.len());
    let magic = match mode {
        Mode::Extended => EXTENDED_REQUEST_MAGIC,
        _ => REQUEST_MAGIC,
    };
    message.extend_from_slice(&magic.to_be_bytes());
    message.extend_from_slice(&flags.to_be_bytes());
    message.extend_from_slice(&request.command.to_be_bytes());
    message.extend_from_slice(&cookie.to_be_bytes());
    message.extend_from_slice(&request.offset.to_be_bytes());
    match mode {
        Mode::Extended => message.extend_from_slice(&request.length.to_be_bytes()),
        _ => message.extend_from_slice(&(request.length as u32).to_be_bytes()),
    }
    message.extend_from_slice(&request.payload);
    message
}

fn negotiate(haggle: &mut Haggle, option: u32, mode: Mode) -> Result<(), Problem> {
    let answer = haggle.option(option, &[])?;
    if answer.last.kind == REP_ERR_UNSUP {
        skip!("server does not offer {mode}");
    }
    ensure!(answer.is_ack(), "{mode}: {}", answer.outcome());
    Ok(())
}
