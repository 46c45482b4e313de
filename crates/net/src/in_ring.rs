//! Requests that are handed over while they stand in a ring.

use crate::input::invalid;
use crate::{Counters, ShmLink, Sink};
use std::io;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind};

/// Shorter payloads are copied out of the ring with all that is there: that costs less than taking them one by one.
const IN_PLACE_BYTES_MIN: usize = 1024;
/// Most bytes of the body of a message with such a payload.
const BODY_BYTES_MAX: usize = 128;

/// The beginning of a message that stands in a ring.
struct Head {
    bytes: [u8; HEADER_BYTES + BODY_BYTES_MAX],
    header: Header,
}

impl Head {
    /// The message that begins so many bytes behind the first; `None` where its head is not all there, too long, or none.
    fn peek(link: &ShmLink, skip: usize, unread: usize) -> Option<Self> {
        let mut bytes = [0; HEADER_BYTES + BODY_BYTES_MAX];
        let present = (unread - skip).min(bytes.len());
        link.peek(skip, &mut bytes[..present]);
        let header = Header::parse(bytes[..present].first_chunk()?).ok()?;
        let body_end = HEADER_BYTES.checked_add(header.body_bytes as usize)?;
        (body_end <= present).then_some(Self { bytes, header })
    }

    fn body(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..][..self.header.body_bytes as usize]
    }

    /// Where its payload begins, and how many bytes it has.
    fn payload(&self) -> (usize, usize) {
        (HEADER_BYTES + self.header.body_bytes as usize, self.header.payload_bytes as usize)
    }
}

/// Hands over the requests with which a ring begins whose payload is worth to be copied once, to where it belongs. False: there is
/// none, or the sink wants none so.
pub(crate) fn receive_in_place(
    link: &ShmLink,
    sink: &mut dyn Sink,
    counters: &Counters,
) -> io::Result<bool> {
    let mut unread = link.unread()?;
    let mut found = Head::peek(link, 0, unread);
    let mut some = false;
    while let Some(head) = found {
        let (start, length) = head.payload();
        let end = start + length;
        let is_kind = head.header.kind == Kind::Request && length >= IN_PLACE_BYTES_MIN;
        if !is_kind || end > unread || sink.is_full() {
            break;
        }
        found = Head::peek(link, end, unread);
        if let Some(next) = &found {
            sink.upcoming(&next.header, next.body());
        }
        let payload = link.payload(start, length);
        if !sink.message_in_place(&head.header, head.body(), payload).map_err(invalid)? {
            break;
        }
        unread = link.received(unread, end)?;
        Counters::add(&counters.messages_received, 1);
        Counters::add(&counters.bytes_received, end as u64);
        some = true;
    }
    Ok(some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Doorbell, Input, Link, Payload, SHM_BYTES, ShmSide, Target};
    use std::sync::Arc;
    use towline_mem::SharedMemory;
    use towline_wire::ProtocolError;

    fn pair() -> [Link; 2] {
        let memory = Arc::new(SharedMemory::create("test", SHM_BYTES).unwrap());
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let bell = Doorbell::new(bell);
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let end = |side, socket: std::os::unix::net::UnixStream| {
            ShmLink::new(memory.clone(), side, bell.clone(), socket.into())
        };
        [end(ShmSide::Client, near), end(ShmSide::Server, far)]
            .map(|link| Link::Shm(Box::new(link.unwrap())))
    }

    /// Takes payloads in place unless its body says no; keeps all messages and how they came.
    #[derive(Default)]
    struct Both {
        taken: Vec<(u32, Vec<u8>, bool)>,
        upcoming: Vec<u32>,
        full_at: usize,
    }

    impl Sink for Both {
        fn message(
            &mut self,
            header: &Header,
            _: &[u8],
            payload: &[u8],
        ) -> Result<(), ProtocolError> {
            self.taken.push((header.sequence, payload.to_vec(), false));
            Ok(())
        }

        fn message_in_place(
            &mut self,
            header: &Header,
            body: &[u8],
            payload: Payload<'_>,
        ) -> Result<bool, ProtocolError> {
            match body {
                b"no" => return Ok(false),
                b"wrong" => return Err(ProtocolError { what: "wrong", at: 0 }),
                _ => {}
            }
            let whole = payload.bytes().into_owned();
            let memory = SharedMemory::create("target", 64 * 1024).unwrap();
            payload.copy_to(&memory, 7);
            let mut copied = vec![0; payload.len()];
            memory.copy_out(7, &mut copied);
            assert!(copied == whole, "{}", header.sequence);
            self.taken.push((header.sequence, whole, true));
            Ok(true)
        }

        fn place(&mut self, _: &Header, _: &[u8], _: usize, _: usize) -> Option<Target<'_>> {
            None
        }

        fn expects_bulk(&self) -> bool {
            false
        }

        fn upcoming(&mut self, header: &Header, _: &[u8]) {
            self.upcoming.push(header.sequence);
        }

        fn is_full(&self) -> bool {
            self.taken.len() == self.full_at
        }
    }

    fn message(kind: Kind, sequence: u32, body: &[u8], length: usize) -> Vec<u8> {
        let mut header = Header::new(kind, 0, sequence);
        (header.body_bytes, header.payload_bytes) = (body.len() as u32, length as u32);
        let payload = (0..length).map(|at| (at as u32 * 7 + sequence) as u8);
        header.to_bytes().into_iter().chain(body.iter().copied()).chain(payload).collect()
    }

    /// Whatever is between two requests, and wherever the ring ends.
    #[test]
    fn messages_come_in_their_order_however_they_are_taken() {
        let ([near, far], counters) = (pair(), Counters::default());
        let mut input = Input::default();
        let mut scratch = vec![0; 128 * 1024];
        let mut sequence = 0;
        let mut in_place = 0;
        for round in 0..600_usize {
            let mut sink = Both { full_at: usize::MAX, ..Both::default() };
            let mut expected = Vec::new();
            for at in 0..round % 7 + 1 {
                sequence += 1;
                let length = [4096, 16, 1024, 1023, 16 * 1024, 5003, 0][(round * 3 + at) % 7];
                let body: &[u8] = [b"body".as_slice(), b"no", &[5; 129]][(round + at * at) % 3];
                let bytes = message(Kind::Request, sequence, body, length);
                let taken = length >= 1024;
                expected.push((sequence, bytes[HEADER_BYTES + body.len()..].to_vec()));
                assert_eq!(near.send(&[&bytes], &counters).unwrap(), bytes.len());
                in_place += usize::from(taken && at == 0 && body == b"body");
            }
            while sink.taken.len() < expected.len() {
                input.receive(&far, &mut scratch, None, &mut sink, &counters).unwrap();
            }
            let found: Vec<_> =
                sink.taken.iter().map(|(at, bytes, _)| (*at, bytes.clone())).collect();
            assert!(found == expected, "round {round}");
            in_place -= usize::from(sink.taken[0].2);
        }
        assert_eq!(in_place, 0, "the first of what is there is taken in place, if it may be");
    }

    #[test]
    fn what_a_full_sink_leaves_comes_later() {
        let ([near, far], counters) = (pair(), Counters::default());
        let bytes: Vec<u8> =
            (1..4).flat_map(|at| message(Kind::Request, at, b"body", 2000)).collect();
        near.send(&[&bytes], &counters).unwrap();
        let (mut input, mut scratch) = (Input::default(), vec![0; 128 * 1024]);
        let mut sink = Both { full_at: 1, ..Both::default() };
        for _ in 0..3 {
            input.receive(&far, &mut scratch, None, &mut sink, &counters).unwrap();
            assert_eq!(sink.taken.len(), 1);
        }
        sink.full_at = usize::MAX;
        input.receive(&far, &mut scratch, None, &mut sink, &counters).unwrap();
        let taken: Vec<u32> = sink.taken.iter().map(|(sequence, ..)| *sequence).collect();
        assert_eq!(taken, [1, 2, 3]);
    }

    #[test]
    fn what_is_half_there_is_waited_for_and_what_is_wrong_ends_it() {
        let ([near, far], counters) = (pair(), Counters::default());
        let (mut input, mut scratch) = (Input::default(), vec![0; 128 * 1024]);
        let mut sink = Both { full_at: usize::MAX, ..Both::default() };
        let bytes = message(Kind::Request, 1, b"body", 2000);
        for half in bytes.chunks(1500) {
            assert!(sink.taken.is_empty());
            near.send(&[half], &counters).unwrap();
            input.receive(&far, &mut scratch, None, &mut sink, &counters).unwrap();
        }
        assert!(sink.taken[0].1 == bytes[HEADER_BYTES + 4..]);
        let [first, wrong] = [(2, &b"body"[..]), (3, b"wrong")]
            .map(|(sequence, body)| message(Kind::Request, sequence, body, 2000));
        near.send(&[&first, &wrong], &counters).unwrap();
        let failed = input.receive(&far, &mut scratch, None, &mut sink, &counters);
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!((sink.taken.len(), sink.upcoming), (2, vec![3]));
    }

    #[test]
    fn what_comes_is_all_that_is_looked_at() {
        let ([near, far], counters) = (pair(), Counters::default());
        let Link::Shm(ring) = &far else { unreachable!() };
        let mut sink = Both { full_at: usize::MAX, ..Both::default() };
        // Nothing, a part of a header, and a head that claims more than there is.
        let mut huge = message(Kind::Request, 1, b"", 0);
        huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        for part in [&b""[..], &[3; 20], &huge] {
            if !part.is_empty() {
                near.send(&[part], &counters).unwrap();
            }
            assert!(!receive_in_place(ring, &mut sink, &counters).unwrap());
        }
        assert!(sink.taken.is_empty());
    }
}
