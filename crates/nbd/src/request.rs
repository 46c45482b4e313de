//! Request headers and commands.

use crate::constants::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, command};
use crate::{Form, ProtocolError};

/// The known commands; [`Request::kind`] can also hold an unknown one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, clippy::exhaustive_enums)] // named as in the protocol, which fixes the set
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
}

impl Command {
    pub(crate) fn of(number: u16) -> Option<Self> {
        Some(match number {
            command::READ => Self::Read,
            command::WRITE => Self::Write,
            command::DISC => Self::Disconnect,
            command::FLUSH => Self::Flush,
            command::TRIM => Self::Trim,
            command::CACHE => Self::Cache,
            command::WRITE_ZEROES => Self::WriteZeroes,
            command::BLOCK_STATUS => Self::BlockStatus,
            _ => return None,
        })
    }
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Number of the command, as sent.
    pub kind: u16,
    /// Chosen by the client and repeated in each reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range; with `PAYLOAD_LEN`, length of the payload that follows.
    pub length: u64,
}

/// Returns the length of a request's header.
#[must_use]
pub fn header_bytes(form: Form) -> usize {
    if form == Form::Extended { 32 } else { 28 }
}

/// Returns true if everything that a client sent ends with a request to disconnect, which must be its
/// last one. `input` is the end of it, at least a header long unless less was sent.
#[must_use]
pub fn ends_with_disconnect(input: &[u8], form: Form) -> bool {
    let last = input.len().checked_sub(header_bytes(form)).map(|at| &input[at..]);
    last.and_then(|last| Request::parse(last, form).ok()).is_some_and(|r| r.kind == command::DISC)
}

impl Request {
    /// Parses a header, which must be [`header_bytes`] long.
    pub(crate) fn parse(bytes: &[u8], form: Form) -> Result<Self, ProtocolError> {
        let wrong = ProtocolError("request without its magic number");
        let at = |from: usize, count: usize| {
            let mut number = [0; 8];
            number[8 - count..].copy_from_slice(&bytes[from..from + count]);
            u64::from_be_bytes(number)
        };
        let magic = if form == Form::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if at(0, 4) != u64::from(magic) {
            return Err(wrong);
        }
        Ok(Self {
            flags: at(4, 2) as u16,
            kind: at(6, 2) as u16,
            cookie: at(8, 8),
            offset: at(16, 8),
            length: at(24, header_bytes(form) - 24),
        })
    }

    /// Returns true if `flag`, one of `constants::command_flag`, is set.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}
