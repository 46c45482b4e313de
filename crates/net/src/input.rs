//! Splits received bytes into messages.
//!
//! Headers, bodies and small payloads are read into a buffer that the caller lends (one for all lanes of
//! a core). The payload of a data message or a reply is bulk: it goes straight to the place that the
//! receiver names, and only the part that arrived together with the header is copied there.

use crate::in_ring::receive_in_place;
use crate::socket::is_nothing;
use crate::{Counters, Link, Payload, Spin, Target};
use smallvec::SmallVec;
use std::io;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind, ProtocolError};

/// Receives the messages of a lane, and names the place for bulk payload. [`Input::receive`] does not
/// wait once it has handed over a message, so a sink may take a lock at its first message and hold it
/// until `receive` returns.
pub trait Sink {
    /// Handles a whole message. `payload` is empty for bulk, for which [`Sink::place`] was called.
    ///
    /// # Errors
    /// The message is illegal; the lane will be closed.
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &[u8],
    ) -> Result<(), ProtocolError>;

    /// Returns memory for the next part of the bulk payload of `header`: at least one byte and at most
    /// `rest` bytes. `done` bytes are already in place. `None` discards the payload.
    fn place(
        &mut self,
        header: &Header,
        body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>>;

    /// Reports how many bytes were put where [`Sink::place`] said.
    fn placed(&mut self, _header: &Header, _count: usize) {}

    /// Reports that nothing can be stored in the memory that [`Sink::place`] has named behind `done` bytes, as
    /// it is not mapped, for one. True: the sink names no more memory for this message, and the rest is
    /// discarded. False: the lane fails.
    fn is_refused(&mut self, _header: &Header, _done: usize) -> bool {
        false
    }

    /// Like [`Sink::message`], for a request over shared memory whose payload, of the given length, is
    /// still where its sender put it. True: the payload goes to [`Sink::land`]. False: the whole message
    /// goes to [`Sink::message`].
    ///
    /// # Errors
    /// See [`Sink::message`].
    fn message_in_place(
        &mut self,
        _header: &Header,
        _body: &[u8],
        _length: usize,
    ) -> Result<bool, ProtocolError> {
        Ok(false)
    }

    /// Takes the payloads of the messages that [`Sink::message_in_place`] has accepted since the last
    /// call, in the same order. The sender may change them at any time.
    fn land(&mut self, _payloads: &[Payload<'_>]) {}

    /// Like [`Sink::message`], for a complete reply over shared memory, whose payload is still where
    /// its sender put it; the sender may change it at any time. False: the reply goes to [`Sink::place`]
    /// and [`Sink::message`].
    ///
    /// # Errors
    /// See [`Sink::message`].
    fn reply_in_place(
        &mut self,
        _header: &Header,
        _body: &[u8],
        _payload: &Payload<'_>,
    ) -> Result<bool, ProtocolError> {
        Ok(false)
    }

    /// True when bulk is expected next, so that [`Input::receive`] reads only a little ahead.
    fn expects_bulk(&self) -> bool;

    /// Inspects the header of a message that has not fully arrived yet.
    ///
    /// # Errors
    /// The message is not wanted, and none of it should be kept; the lane will be closed.
    fn announced(&mut self, _header: &Header) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// Announces a message that [`Sink::message`] will get after the next one, so that the sink can
    /// prefetch memory for it.
    fn upcoming(&mut self, _header: &Header, _body: &[u8]) {}

    /// True when no further message is wanted for now. [`Input::receive`] keeps messages that it has
    /// already received for its next call.
    fn is_full(&self) -> bool {
        false
    }
}

/// What [`Input::receive`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Something was received and handled; there may be more.
    Progress,
    /// There is nothing more for now.
    Drained,
    /// The peer closed the link.
    Closed,
}

/// The receiving half of a lane.
#[derive(Debug, Default)]
pub struct Input {
    /// The beginning of an incomplete message.
    partial: Vec<u8>,
    bulk: Option<Bulk>,
    /// `partial` may hold complete messages, because the sink was full when they arrived.
    full: bool,
}

/// A message whose bulk payload has not completely arrived.
#[derive(Debug)]
struct Bulk {
    header: Header,
    /// That of a read or a write is short.
    body: SmallVec<[u8; 32]>,
    done: usize,
}

/// Bytes read ahead where bulk is expected; bulk among them has to be copied.
const AHEAD_BYTES: usize = 4 * HEADER_BYTES;

/// True for payload that goes straight to its place.
fn is_bulk(header: &Header) -> bool {
    header.payload_bytes > 0 && matches!(header.kind, Kind::Data | Kind::Reply)
}

impl Input {
    /// True when the peer is in the middle of a message.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty() || self.bulk.is_some()
    }

    /// Receives once and hands complete messages to `sink`. With `wait`, waits for the first byte, and
    /// spins before sleeping where that helps.
    ///
    /// # Errors
    /// The link is broken, or (as `InvalidData`) the peer sent an invalid message.
    pub fn receive(
        &mut self,
        link: &Link,
        scratch: &mut [u8],
        wait: Option<&mut Spin>,
        sink: &mut dyn Sink,
        counters: &Counters,
    ) -> io::Result<Incoming> {
        if self.bulk.is_some() {
            return self.receive_bulk(link, scratch, wait, sink, counters);
        }
        let have = self.partial.len();
        if have > 0 {
            scratch[..have].copy_from_slice(&self.partial);
        }
        if std::mem::take(&mut self.full) {
            self.parse(&scratch[..have], sink, counters)?;
            return Ok(Incoming::Progress);
        }
        let mut wait = wait;
        if have == 0
            && let Link::Shm(link) = link
        {
            if let Some(spin) = wait.take() {
                while !link.readable() {
                    link.wait_readable(spin)?;
                }
            }
            if receive_in_place(link, sink, counters)? {
                return Ok(Incoming::Progress);
            }
        }
        let ahead = if sink.expects_bulk() {
            (have + AHEAD_BYTES).max(self.end_of_partial()).min(scratch.len())
        } else {
            scratch.len()
        };
        let count = match receive(
            link,
            &mut Target::Own(&mut scratch[have..ahead]),
            wait,
            false,
            counters,
        )? {
            Some(0) => return Ok(Incoming::Closed),
            Some(count) => count,
            None => return Ok(Incoming::Drained),
        };
        let drained = have + count < ahead;
        self.parse(&scratch[..have + count], sink, counters)?;
        // Messages kept because the sink is full do not make the link readable, so they count as progress.
        let done = drained && self.bulk.is_none() && !self.full;
        Ok(if done { Incoming::Drained } else { Incoming::Progress })
    }

    /// Returns where the incomplete message ends, or where its bulk begins; 0 if its header is incomplete.
    fn end_of_partial(&self) -> usize {
        let header = self.partial.first_chunk().and_then(|head| Header::parse(head).ok());
        header.map_or(0, |header| {
            let payload = if is_bulk(&header) { 0 } else { header.payload_bytes as usize };
            HEADER_BYTES + header.body_bytes as usize + payload
        })
    }

    /// Hands the complete messages in `bytes` to the sink, and keeps the incomplete rest.
    fn parse(
        &mut self,
        mut bytes: &[u8],
        sink: &mut dyn Sink,
        counters: &Counters,
    ) -> io::Result<()> {
        while let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
            let header = Header::parse(head).map_err(invalid)?;
            let body_end = HEADER_BYTES + header.body_bytes as usize;
            let end = body_end + header.payload_bytes as usize;
            let needed = if is_bulk(&header) { body_end } else { end };
            if bytes.len() < needed {
                sink.announced(&header).map_err(invalid)?;
                break;
            }
            if sink.is_full() {
                self.full = true;
                break;
            }
            let body = &bytes[HEADER_BYTES..body_end];
            if is_bulk(&header) {
                let present = &bytes[body_end..bytes.len().min(end)];
                let done = place_all(sink, &header, body, 0, present, counters);
                if bytes.len() < end {
                    self.partial.clear();
                    self.bulk = Some(Bulk { header, body: SmallVec::from_slice(body), done });
                    return Ok(());
                }
                Counters::add(&counters.messages_received, 1);
                sink.message(&header, body, &[]).map_err(invalid)?;
            } else {
                Counters::add(&counters.messages_received, 1);
                let behind = &bytes[end..];
                if let Some(head) = behind.first_chunk::<HEADER_BYTES>()
                    && let Ok(next) = Header::parse(head)
                    && let Some(body) = behind[HEADER_BYTES..].get(..next.body_bytes as usize)
                {
                    sink.upcoming(&next, body);
                }
                sink.message(&header, body, &bytes[body_end..end]).map_err(invalid)?;
            }
            bytes = &bytes[end..];
        }
        if !bytes.is_empty() {
            self.partial.clear();
            self.partial.extend_from_slice(bytes);
        } else if !self.partial.is_empty() {
            self.partial = Vec::new(); // most lanes have nothing here most of the time
        }
        Ok(())
    }

    /// Receives the next part of a bulk payload.
    fn receive_bulk(
        &mut self,
        link: &Link,
        scratch: &mut [u8],
        wait: Option<&mut Spin>,
        sink: &mut dyn Sink,
        counters: &Counters,
    ) -> io::Result<Incoming> {
        let Some(bulk) = &mut self.bulk else { return Ok(Incoming::Progress) };
        let rest = bulk.header.payload_bytes as usize - bulk.done;
        let mut ahead = &mut [][..];
        let (wanted, received) = match sink.place(&bulk.header, &bulk.body, bulk.done, rest) {
            Some(mut target) => {
                let mut target = target.limited(rest);
                let wanted = target.len();
                // Also receive what follows the bulk, or learn that nothing does, without another system
                // call.
                if wanted == rest && wait.is_none() && matches!(link, Link::Socket(..)) {
                    ahead = &mut scratch[..AHEAD_BYTES];
                }
                let received = match ahead.is_empty() {
                    true => receive(link, &mut target, wait, true, counters),
                    false => some(link.receive_ahead(&mut target, ahead, counters)),
                };
                let received = match received {
                    // The socket still has what it could not store.
                    Err(error)
                        if error.raw_os_error() == Some(libc::EFAULT)
                            && sink.is_refused(&bulk.header, bulk.done) =>
                    {
                        return Ok(Incoming::Progress);
                    }
                    received => received?,
                };
                let count = received.unwrap_or(0).min(wanted);
                Counters::add(&counters.bytes_received_placed, count as u64);
                if count > 0 {
                    sink.placed(&bulk.header, count);
                }
                (wanted, received)
            }
            None => {
                let wanted = rest.min(scratch.len());
                let mut target = Target::Own(&mut scratch[..wanted]);
                let received = receive(link, &mut target, wait, true, counters)?;
                Counters::add(&counters.payload_discarded, received.unwrap_or(0) as u64);
                (wanted, received)
            }
        };
        let count = match received {
            Some(0) => return Ok(Incoming::Closed),
            Some(count) => count,
            None => return Ok(Incoming::Drained),
        };
        let drained = count < wanted + ahead.len();
        bulk.done += count.min(wanted);
        if bulk.done == bulk.header.payload_bytes as usize {
            let bulk = self.bulk.take().expect("was just used");
            Counters::add(&counters.messages_received, 1);
            sink.message(&bulk.header, &bulk.body, &[]).map_err(invalid)?;
            let is_all = drained && !ahead.is_empty();
            self.parse(&ahead[..count - wanted], sink, counters)?;
            let done = is_all && self.bulk.is_none() && !self.full;
            return Ok(if done { Incoming::Drained } else { Incoming::Progress });
        }
        Ok(if drained { Incoming::Drained } else { Incoming::Progress })
    }
}

/// Puts bulk bytes that arrived together with their header into place; returns how many bulk bytes are done.
fn place_all(
    sink: &mut dyn Sink,
    header: &Header,
    body: &[u8],
    mut done: usize,
    present: &[u8],
    counters: &Counters,
) -> usize {
    let mut rest = present;
    while !rest.is_empty() {
        let missing = header.payload_bytes as usize - done;
        match sink.place(header, body, done, missing) {
            Some(mut target) if !target.is_empty() => {
                let count = target.put(rest);
                sink.placed(header, count);
                rest = &rest[count..];
                done += count;
            }
            _ => {
                Counters::add(&counters.payload_discarded, rest.len() as u64);
                done += rest.len();
                break;
            }
        }
    }
    done
}

fn receive(
    link: &Link,
    target: &mut Target<'_>,
    wait: Option<&mut Spin>,
    full: bool,
    counters: &Counters,
) -> io::Result<Option<usize>> {
    some(match wait {
        Some(spin) => link.receive_wait(target, spin, full),
        None => link.receive_to(target, counters),
    })
}

/// Returns the number of bytes received; `None` if nothing was there.
fn some(received: io::Result<usize>) -> io::Result<Option<usize>> {
    match received {
        Ok(count) => Ok(Some(count)),
        Err(error) if is_nothing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn invalid(error: ProtocolError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::local_pair;

    /// A sink that takes one message at a time.
    #[derive(Default)]
    struct OneByOne {
        taken: Vec<u32>,
        full: bool,
    }

    impl Sink for OneByOne {
        fn message(&mut self, header: &Header, _: &[u8], _: &[u8]) -> Result<(), ProtocolError> {
            self.taken.push(header.sequence);
            self.full = true;
            Ok(())
        }

        fn place(&mut self, _: &Header, _: &[u8], _: usize, _: usize) -> Option<Target<'_>> {
            None
        }

        fn expects_bulk(&self) -> bool {
            false
        }

        fn is_full(&self) -> bool {
            self.full
        }
    }

    /// A sink that takes bulk and records the order of messages.
    #[derive(Default)]
    struct Taking {
        memory: Vec<u8>,
        taken: Vec<u32>,
    }

    impl Sink for Taking {
        fn message(&mut self, header: &Header, _: &[u8], _: &[u8]) -> Result<(), ProtocolError> {
            self.taken.push(header.sequence);
            Ok(())
        }

        fn place(&mut self, _: &Header, _: &[u8], done: usize, rest: usize) -> Option<Target<'_>> {
            self.memory.resize(done + rest, 0);
            Some(Target::Own(&mut self.memory[done..]))
        }

        fn expects_bulk(&self) -> bool {
            true
        }
    }

    #[test]
    fn what_follows_bulk_comes_with_its_end() {
        let payload: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
        // The number of messages behind the bulk, and of system calls for everything.
        for (behind, calls) in [(0, 2), (3, 2), (9, 4)] {
            let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
            let near = Link::Socket(near.into(), crate::LinkKind::Unix);
            let mut head = Header::new(Kind::Data, 0, 1);
            head.payload_bytes = payload.len() as u32;
            let others = (2..2 + behind).flat_map(|n| Header::new(Kind::Cancel, 0, n).to_bytes());
            let bytes = [&head.to_bytes()[..], &payload, &others.collect::<Vec<_>>()].concat();
            std::io::Write::write_all(&mut &far, &bytes).unwrap();
            let counters = Counters::default();
            let (mut input, mut sink) = (Input::default(), Taking::default());
            let mut scratch = [0; 1024];
            let mut last = Incoming::Progress;
            while last == Incoming::Progress {
                last = input.receive(&near, &mut scratch, None, &mut sink, &counters).unwrap();
            }
            assert_eq!(sink.taken, (1..2 + behind).collect::<Vec<_>>());
            assert!(sink.memory == payload, "other bytes");
            let made = counters.system_calls.load(std::sync::atomic::Ordering::Relaxed);
            assert_eq!((made, last), (calls, Incoming::Drained), "{behind} messages behind");
        }
    }

    #[test]
    fn what_a_full_sink_leaves_is_not_called_drained() {
        let (near, far) = local_pair();
        let counters = Counters::default();
        let messages: Vec<u8> =
            (1..4).flat_map(|n| Header::new(Kind::Request, 0, n).to_bytes()).collect();
        far.send(&[&messages], &counters).unwrap();
        let (mut input, mut sink, mut scratch) = (Input::default(), OneByOne::default(), [0; 1024]);
        for expected in [Incoming::Progress, Incoming::Progress, Incoming::Progress] {
            let told = input.receive(&near, &mut scratch, None, &mut sink, &counters).unwrap();
            assert_eq!(told, expected, "after {:?}", sink.taken);
            sink.full = false;
        }
        assert_eq!(sink.taken, [1, 2, 3]);
        let told = input.receive(&near, &mut scratch, None, &mut sink, &counters).unwrap();
        assert_eq!(told, Incoming::Drained);
    }
}
