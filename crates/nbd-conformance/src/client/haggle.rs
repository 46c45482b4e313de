//! The handshake: greeting and option haggling.

use crate::ensure;
use crate::link::Link;
use crate::rule::Problem;
use crate::target::Target;
use crate::wire::*;

/// Longest option reply that the kit accepts: a name and a description of maximum length fit.
const REPLY_LENGTH_MAX: u32 = 64 << 10;
/// Most replies to one option.
const REPLIES_MAX: usize = 10_000;

/// One reply to an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionReply {
    /// Type: one of `REP_*`.
    pub kind: u32,
    /// Payload.
    pub data: Vec<u8>,
}

/// All replies to an option; the last one is `ACK` or an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Replies before the final one.
    pub replies: Vec<OptionReply>,
    /// The final reply.
    pub last: OptionReply,
}

/// Block size constraints, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Smallest addressable length and alignment.
    pub minimum: u32,
    /// Smallest efficient size.
    pub preferred: u32,
    /// Largest payload.
    pub maximum: u32,
}

/// One piece of information about an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Info {
    /// Size in bytes and transmission flags.
    Export {
        /// Size in bytes.
        size: u64,
        /// Transmission flags.
        flags: u16,
    },
    /// The canonical name.
    Name(Vec<u8>),
    /// The description.
    Description(Vec<u8>),
    /// Block size constraints.
    BlockSize(BlockSizes),
    /// A type that this kit does not know.
    Other(u16, Vec<u8>),
}

impl Answer {
    /// Returns true if the server accepted the option.
    pub fn is_ack(&self) -> bool {
        self.last.kind == REP_ACK
    }

    /// Returns the name of the final reply, with the server's message if there is one.
    pub fn outcome(&self) -> String {
        let name = reply_name(self.last.kind);
        match std::str::from_utf8(&self.last.data) {
            Ok(text) if !text.is_empty() => format!("{name} \"{}\"", text.escape_debug()),
            _ => name,
        }
    }

    /// Parses the information in an answer to `INFO` or `GO`.
    ///
    /// # Errors
    /// Fails on replies of other types and on payloads of the wrong length.
    pub fn infos(&self) -> Result<Vec<Info>, Problem> {
        self.replies.iter().map(parse_info).collect()
    }

    /// Returns size and transmission flags from a successful answer to `INFO` or `GO`.
    ///
    /// # Errors
    /// Fails if the answer is an error or the information is missing.
    pub fn export(&self) -> Result<(u64, u16), Problem> {
        ensure!(self.is_ack(), "export refused: {}", self.outcome());
        let found = self.infos()?.into_iter().find_map(|info| match info {
            Info::Export { size, flags } => Some((size, flags)),
            _ => None,
        });
        found.ok_or_else(|| Problem::Fail("ACK without INFO_EXPORT".to_owned()))
    }

    /// Returns the block size constraints, if sent.
    ///
    /// # Errors
    /// As [`Self::infos`].
    pub fn block_sizes(&self) -> Result<Option<BlockSizes>, Problem> {
        Ok(self.infos()?.into_iter().find_map(|info| match info {
            Info::BlockSize(sizes) => Some(sizes),
            _ => None,
        }))
    }

    /// Returns identifier and name of the contexts in an answer to `LIST_META_CONTEXT` or
    /// `SET_META_CONTEXT`.
    ///
    /// # Errors
    /// Fails on replies of other types, short payloads and names that are not UTF-8.
    pub fn contexts(&self) -> Result<Vec<(u32, String)>, Problem> {
        let parse = |reply: &OptionReply| {
            ensure!(
                reply.kind == REP_META_CONTEXT,
                "{} in an answer of contexts",
                reply_name(reply.kind)
            );
            let Some((id, name)) = reply.data.split_first_chunk::<4>() else {
                return Err(Problem::Fail(format!("context of {} bytes", reply.data.len())));
            };
            let name = check_string("name of a context", name)?;
            Ok((u32::from_be_bytes(*id), name))
        };
        self.replies.iter().map(parse).collect()
    }
}

fn parse_info(reply: &OptionReply) -> Result<Info, Problem> {
    ensure!(reply.kind == REP_INFO, "{} in an answer of information", reply_name(reply.kind));
    let Some((kind, data)) = reply.data.split_first_chunk::<2>() else {
        return Err(Problem::Fail(format!("information of {} bytes", reply.data.len())));
    };
    let wrong = |name: &str, demanded: usize| {
        Problem::Fail(format!("{name} of {} bytes, not {demanded}", reply.data.len()))
    };
    Ok(match u16::from_be_bytes(*kind) {
        INFO_EXPORT => {
            let data: &[u8; 10] = data.try_into().map_err(|_| wrong("INFO_EXPORT", 12))?;
            Info::Export { size: be64(&data[..8]), flags: u16::from_be_bytes([data[8], data[9]]) }
        }
        INFO_NAME => Info::Name(data.to_vec()),
        INFO_DESCRIPTION => Info::Description(data.to_vec()),
        INFO_BLOCK_SIZE => {
            let data: &[u8; 12] = data.try_into().map_err(|_| wrong("INFO_BLOCK_SIZE", 14))?;
            Info::BlockSize(BlockSizes {
                minimum: be32(&data[..4]),
                preferred: be32(&data[4..8]),
                maximum: be32(&data[8..]),
            })
        }
        other => Info::Other(other, data.to_vec()),
    })
}

/// Decodes a big-endian integer from the first four bytes.
///
/// # Panics
/// If there are fewer; callers have to check the length.
pub fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Decodes a big-endian integer from the first eight bytes.
///
/// # Panics
/// If there are fewer; callers have to check the length.
pub fn be64(bytes: &[u8]) -> u64 {
    u64::from(be32(bytes)) << 32 | u64::from(be32(&bytes[4..]))
}

/// Checks the rules of the text that hold for every string.
///
/// # Errors
/// Fails on invalid UTF-8, NUL, and more than 4096 bytes.
pub fn check_string(what: &str, bytes: &[u8]) -> Result<String, Problem> {
    ensure!(bytes.len() <= STRING_MAX, "{what} has {} bytes, more than {STRING_MAX}", bytes.len());
    ensure!(!bytes.contains(&0), "{what} contains NUL");
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err(Problem::Fail(format!("{what} is not UTF-8: {error}"))),
    }
}

/// Encodes the data of `OPT_INFO` and `OPT_GO`.
pub fn info_data(export: &str, requests: &[u16]) -> Vec<u8> {
    let mut data = Vec::new();
    data.extend_from_slice(&(export.len() as u32).to_be_bytes());
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&(requests.len() as u16).to_be_bytes());
    data.extend(requests.iter().flat_map(|request| request.to_be_bytes()));
    data
}

/// Encodes the data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
pub fn context_data(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    data.extend_from_slice(&(export.len() as u32).to_be_bytes());
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend_from_slice(&(query.len() as u32).to_be_bytes());
        data.extend_from_slice(query.as_bytes());
    }
    data
}

/// A connection in the handshake phase.
pub struct Haggle {
    /// The connection.
    pub link: Link,
    /// Handshake flags of the server.
    pub server_flags: u16,
    /// Whether both sides agreed to omit the zeroes after `EXPORT_NAME`.
    pub no_zeroes: bool,
}

impl Haggle {
    /// Connects, and answers the greeting with every client flag that the server allows.
    ///
    /// # Errors
    /// Fails if the greeting is not that of a newstyle server.
    pub fn open(target: &Target) -> Result<Self, Problem> {
        let (mut link, server_flags) = Self::greet(target)?;
        let mut flags = C_FIXED_NEWSTYLE;
        let no_zeroes = server_flags & FLAG_NO_ZEROES != 0;
        if no_zeroes {
            flags |= C_NO_ZEROES;
        }
        link.send(&flags.to_be_bytes())?;
        Ok(Self { link, server_flags, no_zeroes })
    }

    /// Connects, and answers the greeting with the given client flags.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(target: &Target, flags: u32) -> Result<Self, Problem> {
        let (mut link, server_flags) = Self::greet(target)?;
        link.send(&flags.to_be_bytes())?;
        Ok(Self { link, server_flags, no_zeroes: flags & C_NO_ZEROES != 0 })
    }

    /// Connects and receives the greeting. Returns the connection and the handshake flags.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn greet(target: &Target) -> Result<(Link, u16), Problem> {
        let mut link = target.connect()?;
        let greeting = link.recv(18).map_err(|broken| Problem::from(broken).during("greeting"))?;
        let magic = be64(&greeting);
        ensure!(magic == GREETING_MAGIC, "greeting begins with {magic:#018x}, not NBDMAGIC");
        let magic = be64(&greeting[8..]);
        ensure!(magic == OPTION_MAGIC, "second magic is {magic:#018x}, not IHAVEOPT");
        Ok((link, u16::from_be_bytes([greeting[16], greeting[17]])))
    }

    /// Sends an option without waiting for its reply.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub fn send(&mut self, option: u32, data: &[u8]) -> Result<(), Problem> {
        Ok(self.link.send(&option_message(option, data))?)
    }

    /// Receives one reply to `option`.
    ///
    /// # Errors
    /// Fails on a wrong magic, a reply to another option, and a payload that is too long.
    pub fn recv(&mut self, option: u32) -> Result<OptionReply, Problem> {
        let header = self.link.recv(20)?;
        let magic = be64(&header);
        ensure!(magic == OPTION_REPLY_MAGIC, "reply begins with {magic:#018x}");
        let echoed = be32(&header[8..]);
        ensure!(echoed == option, "reply is to option {echoed}, not {option}");
        let length = be32(&header[16..]);
        ensure!(length <= REPLY_LENGTH_MAX, "reply of {length} bytes");
        let data = self.link.recv(length as usize)?;
        Ok(OptionReply { kind: be32(&header[12..]), data })
    }

    /// Receives the replies to `option` up to the final one.
    ///
    /// # Errors
    /// As [`Self::recv`].
    pub fn answer(&mut self, option: u32) -> Result<Answer, Problem> {
        let mut replies = Vec::new();
        loop {
            let reply = self.recv(option)?;
            if reply.kind == REP_ACK || reply.kind & REP_ERROR != 0 {
                return Ok(Answer { replies, last: reply });
            }
            replies.push(reply);
            ensure!(replies.len() <= REPLIES_MAX, "more than {REPLIES_MAX} replies to one option");
        }
    }

    /// Sends an option and receives its answer.
    ///
    /// # Errors
    /// As [`Self::recv`].
    pub fn option(&mut self, option: u32, data: &[u8]) -> Result<Answer, Problem> {
        self.send(option, data)?;
        self.answer(option).map_err(|problem| problem.during(format_args!("option {option}")))
    }

    /// Checks that the server is still in step, that is, understands the next option.
    ///
    /// # Errors
    /// Fails if the answer to an `INFO` for the export is wrong.
    pub fn in_step(&mut self, target: &Target) -> Result<(), Problem> {
        let after = |problem: Problem| problem.during("the connection is not in step afterwards");
        let answer = self.option(OPT_INFO, &info_data(&target.export, &[])).map_err(after)?;
        // A server that rejects INFO as unknown is in step, too.
        if answer.last.kind == REP_ERR_UNSUP {
            return Ok(());
        }
        answer.export().map(drop).map_err(after)
    }
}

/// Encodes an option.
pub fn option_message(option: u32, data: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(16 + data.len());
    message.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    message.extend_from_slice(&option.to_be_bytes());
    message.extend_from_slice(&(data.len() as u32).to_be_bytes());
    message.extend_from_slice(data);
    message
}
