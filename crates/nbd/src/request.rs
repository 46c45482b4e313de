//! Requests as they arrive.

use crate::constants::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, command};
use crate::{Form, ProtocolError};

/// What a request asks for; commands that the protocol does not know have no place here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, clippy::exhaustive_enums)] // the protocol's own words; it fixes the set
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
    /// Command, as sent.
    pub kind: u16,
    /// Chosen by the client, repeated in each reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes concerned; with `PAYLOAD_LEN`, bytes that follow.
    pub length: u64,
}

/// Bytes of a request's header.
#[must_use]
pub fn header_bytes(form: Form) -> usize {
    if form == Form::Extended { 32 } else { 28 }
}

impl Request {
    /// Reads a header, which is [`header_bytes`] long.
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

    /// True for a flag of `constants::command_flag`.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}
