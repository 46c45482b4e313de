//! The handshake: greeting and option haggling.
//!
//! An option is processed once it has arrived completely. An option that is too long is skipped as it arrives
//! and then refused, so that the stream stays in step.

mod options;

use crate::constants::{
    INIT_MAGIC, OPTION_BYTES_MAX, OPTION_MAGIC, OPTION_REPLY_MAGIC, OPTIONS_MAX, REPLIES_BYTES_MAX,
    client_flag, option_reply, server_flag,
};
use crate::{Agreement, Catalogue, Context, Form, ProtocolError};

/// How the handshake ended.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // the caller has to handle each
pub enum Ended {
    /// The transmission phase begins.
    Agreed(Box<Agreement>),
    /// The client gives up: send the pending output, then hang up.
    Aborted,
    /// The client broke no rule but cannot have what it asked for, and its option has no reply that says so: send
    /// the pending output, then hang up. The text is for the log.
    Refused(&'static str),
}

/// The result of [`Haggle::receive`].
#[derive(Debug)]
pub struct Progress {
    /// Bytes of the input that were consumed; pass the rest again together with what follows.
    pub used: usize,
    /// Set when the handshake is over.
    pub ended: Option<Ended>,
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Option,
    /// Skips the payload of an option that is too long.
    Skip {
        option: u32,
        rest: u64,
    },
}

/// The server's side of the handshake.
#[derive(Debug)]
pub struct Haggle {
    state: State,
    no_zeroes: bool,
    form: Form,
    /// Contexts chosen by SET_META_CONTEXT, and the export they belong to.
    contexts: Option<(Vec<u8>, Vec<Context>)>,
    options: u32,
}

impl Default for Haggle {
    fn default() -> Self {
        Self {
            state: State::ClientFlags,
            no_zeroes: false,
            form: Form::Simple,
            contexts: None,
            options: 0,
        }
    }
}

const OPTION_HEADER_BYTES: usize = 16;

impl Haggle {
    /// Returns the greeting, which the server sends first.
    #[must_use]
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = server_flag::FIXED_NEWSTYLE | server_flag::NO_ZEROES;
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Consumes bytes from the client and appends the replies to `out`. Stops before the next option while
    /// `out` holds `REPLIES_BYTES_MAX` bytes: call again when they are sent.
    ///
    /// # Errors
    /// The client broke a rule, and the protocol leaves only hanging up. The contents of `out` may still be
    /// sent.
    pub fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
        catalogue: &dyn Catalogue,
    ) -> Result<Progress, ProtocolError> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match self.state {
                State::ClientFlags => {
                    let Some((bytes, _)) = rest.split_first_chunk::<4>() else { break };
                    self.client_flags(u32::from_be_bytes(*bytes))?;
                    used += 4;
                }
                State::Skip { option, rest: missing } => {
                    let here = missing.min(rest.len() as u64);
                    used += here as usize;
                    self.state = State::Skip { option, rest: missing - here };
                    if missing > here {
                        break;
                    }
                    self.state = State::Option;
                    let text = "option is too long";
                    option_error(out, option, option_reply::ERR_TOO_BIG, text);
                }
                State::Option => {
                    if out.len() >= REPLIES_BYTES_MAX {
                        break;
                    }
                    let Some((option, length)) = option_header(rest)? else { break };
                    self.options += 1;
                    if self.options > OPTIONS_MAX {
                        return Err(ProtocolError("too many options"));
                    }
                    if length > OPTION_BYTES_MAX {
                        if option == crate::constants::option::EXPORT_NAME {
                            return Err(ProtocolError("export name is too long"));
                        }
                        used += OPTION_HEADER_BYTES;
                        self.state = State::Skip { option, rest: length as u64 };
                        continue;
                    }
                    let Some(payload) = rest.get(OPTION_HEADER_BYTES..OPTION_HEADER_BYTES + length)
                    else {
                        self.options -= 1;
                        break;
                    };
                    used += OPTION_HEADER_BYTES + length;
                    if let Some(ended) = self.option(option, payload, out, catalogue)? {
                        return Ok(Progress { used, ended: Some(ended) });
                    }
                }
            }
        }
        Ok(Progress { used, ended: None })
    }

    fn client_flags(&mut self, flags: u32) -> Result<(), ProtocolError> {
        if flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES) != 0 {
            return Err(ProtocolError("unknown client flags"));
        }
        self.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.state = State::Option;
        Ok(())
    }
}

/// Returns the option and the length of its payload once the 16-byte header has arrived.
fn option_header(bytes: &[u8]) -> Result<Option<(u32, usize)>, ProtocolError> {
    let Some((header, _)) = bytes.split_first_chunk::<OPTION_HEADER_BYTES>() else {
        return Ok(None);
    };
    if header[..8] != OPTION_MAGIC.to_be_bytes() {
        return Err(ProtocolError("option without its magic number"));
    }
    let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|i| header[at + i]));
    Ok(Some((word(8), word(12) as usize)))
}

/// Appends a reply to an option.
fn option_reply_message(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[&[u8]]) {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(length as u32).to_be_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
}

fn option_error(out: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    option_reply_message(out, option, kind, &[text.as_bytes()]);
}

#[cfg(test)]
mod tests;
