//! Received bytes, cut into messages.
//!
//! Headers, bodies and small payloads are read into a buffer that the caller lends (one for all
//! lanes of a core). The payload of a data message, and of a reply, is bulk: it goes straight to
//! the place that the receiver names, and only what came along in the buffer is copied there.

use crate::in_ring::receive_in_place;
use crate::socket::is_nothing;
use crate::{Counters, Link, Payload, Spin, Target};
use std::io;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind, ProtocolError};

/// Where bulk payload goes, and who is told of messages. Nothing is waited for between a message and the return of
/// [`Input::receive`], so that a sink may hold a lock from its first message on.
pub trait Sink {
    /// A whole message; `payload` is empty for bulk, which was announced by [`Sink::place`].
    ///
    /// # Errors
    /// The message is illegal: the lane will be closed.
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        payload: &[u8],
    ) -> Result<(), ProtocolError>;

    /// Memory for the next part of the bulk payload of `header`, of which `done` bytes are
    /// already in place; at most `rest` bytes, at least one. `None`: it is thrown away.
    fn place(
        &mut self,
        header: &Header,
        body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>>;

    /// So many bytes were put where [`Sink::place`] said.
    fn placed(&mut self, _header: &Header, _count: usize) {}

    /// As [`Sink::message`], with a payload of so many bytes that is still where its sender put it. Only of requests over
    /// shared memory. True: [`Sink::land`] shall get it. False: [`Sink::message`] shall get all of it.
    ///
    /// # Errors
    /// As [`Sink::message`].
    fn message_in_place(
        &mut self,
        _header: &Header,
        _body: &[u8],
        _length: usize,
    ) -> Result<bool, ProtocolError> {
        Ok(false)
    }

    /// The payloads of the messages that [`Sink::message_in_place`] has taken since this was called last, in their order. They may change
    /// at any time.
    fn land(&mut self, _payloads: &[Payload<'_>]) {}

    /// As [`Sink::message`], of a reply over shared memory that is all there, with its payload still where its sender put it; it may
    /// change at any time. False: [`Sink::place`] and [`Sink::message`] shall get it.
    ///
    /// # Errors
    /// As [`Sink::message`].
    fn reply_in_place(
        &mut self,
        _header: &Header,
        _body: &[u8],
        _payload: &Payload<'_>,
    ) -> Result<bool, ProtocolError> {
        Ok(false)
    }

    /// True when bulk is expected next, so that little is read ahead of it.
    fn expects_bulk(&self) -> bool;

    /// Looks at the header of a message whose rest has not come yet.
    ///
    /// # Errors
    /// It is not wanted, and nothing is to be kept of it: the lane will be closed.
    fn announced(&mut self, _header: &Header) -> Result<(), ProtocolError> {
        Ok(())
    }

    /// A message that [`Sink::message`] will get after the one that it gets next. For who can use that time to fetch memory.
    fn upcoming(&mut self, _header: &Header, _body: &[u8]) {}

    /// True when no further message is wanted for now: [`Input::receive`] keeps those that it
    /// already has for its next call.
    fn is_full(&self) -> bool {
        false
    }
}

/// What [`Input::receive`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Received and handled something: there may be more.
    Progress,
    /// Nothing more for now.
    Drained,
    /// The peer closed.
    Closed,
}

/// The receiving half of a lane.
#[derive(Debug, Default)]
pub struct Input {
    /// Beginning of a message that is not complete.
    partial: Vec<u8>,
    bulk: Option<Bulk>,
    /// `partial` may hold complete messages, which were not wanted when they came.
    full: bool,
}

#[derive(Debug)]
struct Bulk {
    header: Header,
    body: Vec<u8>,
    done: usize,
}

/// Bytes that are read ahead where bulk is expected: it is copied from there.
const AHEAD_BYTES: usize = 4 * HEADER_BYTES;

fn is_bulk(header: &Header) -> bool {
    header.payload_bytes > 0 && matches!(header.kind, Kind::Data | Kind::Reply)
}

impl Input {
    /// True when the peer is in the middle of a message.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty() || self.bulk.is_some()
    }

    /// Receives once and hands complete messages to `sink`. With `wait`, waits for the first byte,
    /// spinning first where that helps.
    ///
    /// # Errors
    /// The link is broken, or (as `InvalidData`) the peer sent what is no message.
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
        // What was kept because the sink is full is no news for whoever waits for the link.
        let done = drained && self.bulk.is_none() && !self.full;
        Ok(if done { Incoming::Drained } else { Incoming::Progress })
    }

    /// Where the message that has begun ends, or its bulk begins, as far as its header is here.
    fn end_of_partial(&self) -> usize {
        let header = self.partial.first_chunk().and_then(|head| Header::parse(head).ok());
        header.map_or(0, |header| {
            let payload = if is_bulk(&header) { 0 } else { header.payload_bytes as usize };
            HEADER_BYTES + header.body_bytes as usize + payload
        })
    }

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
                    self.bulk = Some(Bulk { header, body: body.to_vec(), done });
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
                // What is behind its end, or that nothing is, without another system call.
                if wanted == rest && wait.is_none() && matches!(link, Link::Socket(..)) {
                    ahead = &mut scratch[..AHEAD_BYTES];
                }
                let received = match ahead.is_empty() {
                    true => receive(link, &mut target, wait, true, counters)?,
                    false => some(link.receive_ahead(&mut target, ahead, counters))?,
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

/// Puts bytes that came along with a header into place; returns how many.
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

/// What was received, if anything was there.
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

    /// Takes one message at a time.
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

    /// Takes bulk, and notes what came in which order.
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
        // How many messages follow, and system calls for all.
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
