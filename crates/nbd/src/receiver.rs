//! The transmission phase: cuts the stream into requests and hands payload to the handler.

use crate::check::{Checked, check, range};
use crate::constants::command;
use crate::request::header_bytes;
use crate::{Agreement, Command, Context, Error, Form, ProtocolError, Refusal, Request};

/// Longest payload of a BLOCK_STATUS request: a length (8 bytes) and a list of context ids.
const STATUS_PAYLOAD_MAX: usize = 8 + 4096;

/// Carries out the requests that a [`Receiver`] finds.
pub trait Handler {
    /// Returns true if the handler cannot take another request at the moment.
    fn is_full(&self) -> bool;

    /// Announces the request that follows the next one. It is unchecked. A handler can use the time to
    /// prefetch memory.
    fn upcoming(&mut self, _request: &Request) {}

    /// Carries out a valid request without payload. For BLOCK_STATUS, `contexts` are the ones to report.
    fn command(&mut self, command: Command, request: &Request, contexts: &[Context]);

    /// Answers a request that is refused; its payload, if any, has been skipped.
    fn refuse(&mut self, request: &Request, refusal: Refusal);

    /// Carries out a write whose whole payload has arrived. Returns false to have it treated like a longer
    /// one.
    fn write_now(&mut self, request: &Request, payload: &[u8]) -> bool;

    /// Begins a write whose payload follows; on an error the payload is skipped.
    ///
    /// # Errors
    /// The refusal that the client gets.
    fn write_begin(&mut self, request: &Request) -> Result<(), Refusal>;

    /// Takes bytes from the front of `bytes`, the next ones of the write, and returns how many it took; 0
    /// means that there is no room at the moment.
    fn put(&mut self, bytes: &[u8]) -> usize;
}

/// The result of [`Receiver::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the input that were consumed; keep the rest.
    pub used: usize,
    /// The handler had no room: call again when it has.
    pub blocked: bool,
    /// The client disconnects: answer the requests under way, then hang up.
    pub disconnect: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    /// Receives the payload of a write, of which this many bytes are missing.
    Payload(u64),
    /// Receives a list of contexts of this length.
    Status(Request, usize),
    /// Skips this many bytes of payload, then refuses the request.
    Skip(u64, Request, Refusal),
}

/// The server's side of the transmission phase.
#[derive(Debug)]
pub struct Receiver {
    agreed: Agreement,
    state: State,
    disconnected: bool,
}

impl Receiver {
    /// Creates a receiver for this agreement.
    #[must_use]
    pub fn new(agreed: Agreement) -> Self {
        Self { agreed, state: State::Header, disconnected: false }
    }

    /// Returns the agreement.
    #[must_use]
    pub fn agreed(&self) -> &Agreement {
        &self.agreed
    }

    /// Notes that the export has grown to `size` bytes. A smaller size is ignored: the handler deals with
    /// requests beyond the end of an export that shrank.
    pub fn grown(&mut self, size: u64) {
        self.agreed.export.size = self.agreed.export.size.max(size);
    }

    /// Returns how many bytes of a write's payload are missing. They may be received by other means and
    /// reported with [`Receiver::placed`].
    #[must_use]
    pub fn missing(&self) -> u64 {
        match self.state {
            State::Payload(missing) => missing,
            _ => 0,
        }
    }

    /// Returns true in the middle of a payload that is skipped.
    #[must_use]
    pub fn is_skipping(&self) -> bool {
        matches!(self.state, State::Skip(..))
    }

    /// Notes that `count` bytes of the payload were received by other means.
    pub fn placed(&mut self, count: usize) {
        if let State::Payload(missing) = self.state {
            let missing = missing.saturating_sub(count as u64);
            self.state = if missing == 0 { State::Header } else { State::Payload(missing) };
        }
    }

    /// Consumes bytes from the client.
    ///
    /// # Errors
    /// The stream is no longer in step.
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

    /// Begins a request and returns how much of its payload it consumed.
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

    /// Handles a BLOCK_STATUS request with a payload: a 64-bit length, then the ids of contexts.
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

/// Returns the request behind this one if its header has arrived and is valid.
fn behind(request: &Request, payload: &[u8], form: Form) -> Option<Request> {
    let own =
        if request.kind == command::WRITE { usize::try_from(request.length).ok()? } else { 0 };
    let header = payload.get(own..)?.get(..header_bytes(form))?;
    Request::parse(header, form).ok()
}

#[cfg(test)]
mod tests;
