//! The second phase: cuts what arrives into requests, and says where payload goes.

use crate::check::{Checked, check, range};
use crate::constants::command;
use crate::request::header_bytes;
use crate::{Agreement, Command, Context, Error, Form, ProtocolError, Refusal, Request};

/// Longest list of contexts in a BLOCK_STATUS request, with its range.
const STATUS_PAYLOAD_MAX: usize = 8 + 4096;

/// What is done with each request.
pub trait Handler {
    /// True when no further request can be taken now: receive again later.
    fn is_full(&self) -> bool;

    /// A request that is dealt with after the next one; nothing of it was checked. For who can use that time to fetch memory.
    fn upcoming(&mut self, _request: &Request) {}

    /// A request without payload that is to be done. For BLOCK_STATUS `contexts` are the ones to
    /// report.
    fn command(&mut self, command: Command, request: &Request, contexts: &[Context]);

    /// A request that will not be done; its payload, if any, was skipped.
    fn refuse(&mut self, request: &Request, refusal: Refusal);

    /// A write that came with all of its payload; false: treat it like a longer one.
    fn write_now(&mut self, request: &Request, payload: &[u8]) -> bool;

    /// A write whose payload follows; it is skipped if this refuses.
    ///
    /// # Errors
    /// What the client is told.
    fn write_begin(&mut self, request: &Request) -> Result<(), Refusal>;

    /// Takes the first of these bytes, which are the next ones of the write; returns how many. 0: no room now,
    /// receive again later.
    fn put(&mut self, bytes: &[u8]) -> usize;
}

/// What became of some input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the input that were used; keep the rest.
    pub used: usize,
    /// The handler had no room: receive again when it has.
    pub blocked: bool,
    /// The client wants to disconnect: answer what is under way, then hang up.
    pub disconnect: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    /// Payload of a write: bytes missing.
    Payload(u64),
    /// List of contexts.
    Status(Request, usize),
    /// Payload to be thrown away before its request is refused.
    Skip(u64, Request, Refusal),
}

/// A server's side of the second phase.
#[derive(Debug)]
pub struct Receiver {
    agreed: Agreement,
    state: State,
    disconnected: bool,
}

impl Receiver {
    /// A receiver for what was agreed.
    #[must_use]
    pub fn new(agreed: Agreement) -> Self {
        Self { agreed, state: State::Header, disconnected: false }
    }

    /// What was agreed.
    #[must_use]
    pub fn agreed(&self) -> &Agreement {
        &self.agreed
    }

    /// The export has so many bytes now. What was agreed is kept where it became shorter: what is beyond its
    /// end then is up to the handler.
    pub fn grown(&mut self, size: u64) {
        self.agreed.export.size = self.agreed.export.size.max(size);
    }

    /// Bytes of a write's payload that are missing: they may be received without passing through here, and then be
    /// told by [`Receiver::placed`].
    #[must_use]
    pub fn missing(&self) -> u64 {
        match self.state {
            State::Payload(missing) => missing,
            _ => 0,
        }
    }

    /// Bytes of the payload were received without passing through here.
    pub fn placed(&mut self, count: usize) {
        if let State::Payload(missing) = self.state {
            let missing = missing.saturating_sub(count as u64);
            self.state = if missing == 0 { State::Header } else { State::Payload(missing) };
        }
    }

    /// Takes bytes of the client.
    ///
    /// # Errors
    /// The stream is not in step any more.
    pub fn receive(
        &mut self,
        input: &[u8],
        handler: &mut dyn Handler,
    ) -> Result<Received, ProtocolError> {
        let mut used = 0;
        let mut blocked = false;
        while !self.disconnected {
            let rest = &input[used..];
            match self.state {
                State::Header => {
                    let bytes = header_bytes(self.agreed.form);
                    let Some((header, payload)) = rest.split_at_checked(bytes) else { break };
                    if handler.is_full() {
                        blocked = true;
                        break;
                    }
                    let request = Request::parse(header, self.agreed.form)?;
                    if let Some(next) = behind(&request, payload, self.agreed.form) {
                        handler.upcoming(&next);
                    }
                    used += bytes + self.request(request, payload, handler)?;
                }
                State::Payload(missing) => {
                    if rest.is_empty() {
                        break;
                    }
                    let wanted = missing.min(rest.len() as u64) as usize;
                    let count = handler.put(&rest[..wanted]);
                    if count == 0 {
                        blocked = true;
                        break;
                    }
                    used += count;
                    self.placed(count);
                }
                State::Status(request, length) => {
                    let Some(payload) = rest.get(..length) else { break };
                    used += length;
                    self.state = State::Header;
                    self.status(request, payload, handler);
                }
                State::Skip(missing, request, refusal) => {
                    let here = missing.min(rest.len() as u64);
                    used += here as usize;
                    if here < missing {
                        self.state = State::Skip(missing - here, request, refusal);
                        break;
                    }
                    self.state = State::Header;
                    handler.refuse(&request, refusal);
                }
            }
        }
        Ok(Received { used, blocked, disconnect: self.disconnected })
    }

    /// Begins a request; returns how much of its payload was used at once.
    fn request(
        &mut self,
        request: Request,
        payload_here: &[u8],
        handler: &mut dyn Handler,
    ) -> Result<usize, ProtocolError> {
        let Checked { outcome, payload } = check(&request, &self.agreed)?;
        match outcome {
            Ok(Command::Disconnect) => self.disconnected = true,
            Ok(Command::Write) => {
                if let Some(bytes) = payload_here.get(..payload as usize)
                    && handler.write_now(&request, bytes)
                {
                    return Ok(bytes.len());
                }
                self.state = match handler.write_begin(&request) {
                    Ok(()) => State::Payload(payload),
                    Err(refusal) => State::Skip(payload, request, refusal),
                };
            }
            Ok(Command::BlockStatus) if payload > 0 => {
                debug_assert!(payload as usize <= STATUS_PAYLOAD_MAX, "checked");
                self.state = State::Status(request, payload as usize);
            }
            Ok(command) => handler.command(command, &request, &self.agreed.contexts),
            Err(refusal) if payload > 0 => self.state = State::Skip(payload, request, refusal),
            Err(refusal) => handler.refuse(&request, refusal),
        }
        Ok(0)
    }

    /// A BLOCK_STATUS request for some of the contexts: 64-bit length, then their ids.
    fn status(&self, mut request: Request, payload: &[u8], handler: &mut dyn Handler) {
        let Some((length, ids)) = payload.split_first_chunk::<8>() else { return };
        let wrong = |text| Refusal { error: Error::Inval, text };
        request.length = u64::from_be_bytes(*length);
        if let Err(refusal) = range(Command::BlockStatus, &request, &self.agreed) {
            return handler.refuse(&request, refusal);
        }
        let mut contexts = Vec::new();
        for id in ids.as_chunks::<4>().0 {
            let id = u32::from_be_bytes(*id);
            let Some(context) = self.agreed.contexts.iter().find(|c| c.id() == id) else {
                return handler.refuse(&request, wrong("metadata context was not chosen"));
            };
            if contexts.contains(context) {
                return handler.refuse(&request, wrong("metadata context is named twice"));
            }
            contexts.push(*context);
        }
        if contexts.is_empty() {
            return handler.refuse(&request, wrong("no metadata context is named"));
        }
        handler.command(Command::BlockStatus, &request, &contexts);
    }
}

/// The request behind this one, if all of it has come and that is a request.
fn behind(request: &Request, payload: &[u8], form: Form) -> Option<Request> {
    let own =
        if request.kind == command::WRITE { usize::try_from(request.length).ok()? } else { 0 };
    let header = payload.get(own..)?.get(..header_bytes(form))?;
    Request::parse(header, form).ok()
}

#[cfg(test)]
mod tests;
