//! Receives messages directly from a ring in shared memory.

use crate::input::invalid;
use crate::{Counters, Payload, ShmLink, Sink};
use smallvec::SmallVec;
use std::io;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind};

/// Shorter payloads of requests are copied out of the ring with everything else that is there, which
/// costs less than handling them one by one.
const IN_PLACE_BYTES_MIN: usize = 1024;
/// Most messages taken together.
const IN_PLACE_TOGETHER: usize = 8;
/// Longest body of a message taken in place. Attributes and other results of a compound of a few
/// operations are shorter.
const BODY_BYTES_MAX: usize = 224;

/// The beginning of a message in a ring.
struct Head {
    bytes: [u8; HEADER_BYTES + BODY_BYTES_MAX],
    header: Header,
}

impl Head {
    /// Reads the head of the message that begins `skip` bytes after the first unread byte. `None` if the
    /// head is incomplete, too long or invalid.
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

    /// Returns the payload's offset in the message and its length.
    fn payload(&self) -> (usize, usize) {
        (HEADER_BYTES + self.header.body_bytes as usize, self.header.payload_bytes as usize)
    }
}

/// Hands over messages at the front of a ring in place, so that their payload is copied only once, to its
/// final place: replies, and requests whose payload is long enough. Returns false if there is none, or the
/// sink does not want it in place.
///
/// For several requests, hands over all heads first and then all payloads. A processor that reads memory
/// that it has just written waits until its earlier writes have reached the cache, so it pays to read
/// nothing else between two copies.
pub(crate) fn receive_in_place(
    link: &ShmLink,
    sink: &mut dyn Sink,
    counters: &Counters,
) -> io::Result<bool> {
    let unread = link.unread()?;
    let (mut taken, mut count, mut failed) = (0, 0, Ok(()));
    let mut payloads: SmallVec<[Payload<'_>; IN_PLACE_TOGETHER]> = SmallVec::new();
    while count < IN_PLACE_TOGETHER
        && !sink.is_full()
        && let Some(head) = Head::peek(link, taken, unread)
    {
        let (start, length) = head.payload();
        let end = taken + start + length;
        let is_reply = head.header.kind == Kind::Reply;
        let is_request = head.header.kind == Kind::Request && length >= IN_PLACE_BYTES_MIN;
        if !(is_reply || is_request) || end > unread {
            break;
        }
        link.expect(end, unread);
        let payload = link.payload(taken + start, length);
        let wanted = match is_reply {
            true => sink.reply_in_place(&head.header, head.body(), &payload),
            false => sink.message_in_place(&head.header, head.body(), length),
        };
        match wanted {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                failed = Err(invalid(error));
                break;
            }
        }
        if is_request {
            payloads.push(payload);
        }
        (taken, count) = (end, count + 1);
    }
    if count > 0 {
        if !payloads.is_empty() {
            sink.land(&payloads);
        }
        link.received(unread, taken);
        Counters::add(&counters.messages_received, count as u64);
        Counters::add(&counters.bytes_received, taken as u64);
    }
    failed.map(|()| taken > 0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Doorbell, Input, Link, Payload, SHM_BYTES, ShmSide, Target};
    use std::sync::Arc;
    use towline_mem::SharedMemory;
    use towline_wire::ProtocolError;

    pub(crate) fn pair() -> [Link; 2] {
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

    /// Takes payloads in place unless the body says "no"; records all messages and how they were taken.
    #[derive(Default)]
    struct Both {
        taken: Vec<(u32, Vec<u8>, bool)>,
        /// Messages whose payloads have not been landed: sequence number and length.
        waiting: Vec<(u32, usize)>,
        /// How many payloads were landed together.
        together: Vec<usize>,
        full_at: usize,
        /// The payload of a reply that was not taken in place.
        bulk: Vec<u8>,
    }

    impl Sink for Both {
        fn message(
            &mut self,
            header: &Header,
            _: &[u8],
            payload: &[u8],
        ) -> Result<(), ProtocolError> {
            assert!(self.waiting.is_empty(), "another message before all are landed");
            let whole = [&std::mem::take(&mut self.bulk)[..], payload].concat();
            self.taken.push((header.sequence, whole, false));
            Ok(())
        }

        fn message_in_place(
            &mut self,
            header: &Header,
            body: &[u8],
            length: usize,
        ) -> Result<bool, ProtocolError> {
            match body {
                b"no" => return Ok(false),
                b"wrong" => return Err(ProtocolError { what: "wrong", at: 0 }),
                _ => {}
            }
            self.waiting.push((header.sequence, length));
            Ok(true)
        }

        fn land(&mut self, payloads: &[Payload<'_>]) {
            self.together.push(payloads.len());
            let memory = SharedMemory::create("target", 64 * 1024).unwrap();
            assert_eq!(payloads.len(), self.waiting.len());
            for ((sequence, length), payload) in self.waiting.drain(..).zip(payloads) {
                assert_eq!(payload.len(), length);
                payload.copy_to(&memory, 7);
                let mut copied = vec![0; length];
                memory.copy_out(7, &mut copied);
                self.taken.push((sequence, copied, true));
            }
        }

        fn reply_in_place(
            &mut self,
            header: &Header,
            body: &[u8],
            payload: &Payload<'_>,
        ) -> Result<bool, ProtocolError> {
            if body == b"no" {
                return Ok(false);
            }
            let mut copied = vec![0; payload.len()];
            payload.copy_out(&mut copied);
            self.taken.push((header.sequence, copied, true));
            Ok(true)
        }

        fn place(&mut self, _: &Header, _: &[u8], done: usize, rest: usize) -> Option<Target<'_>> {
            self.bulk.resize(done + rest, 0);
            Some(Target::Own(&mut self.bulk[done..]))
        }

        fn expects_bulk(&self) -> bool {
            false
        }

        fn is_full(&self) -> bool {
            self.taken.len() + self.waiting.len() == self.full_at
        }
    }

    fn message(kind: Kind, sequence: u32, body: &[u8], length: usize) -> Vec<u8> {
        let mut header = Header::new(kind, 0, sequence);
        (header.body_bytes, header.payload_bytes) = (body.len() as u32, length as u32);
        let payload = (0..length).map(|at| (at as u32 * 7 + sequence) as u8);
        header.to_bytes().into_iter().chain(body.iter().copied()).chain(payload).collect()
    }

    /// For any messages between two requests, and for any place where the ring wraps.
    #[test]
    fn messages_come_in_their_order_however_they_are_taken() {
        let ([near, far], counters) = (pair(), Counters::default());
        let mut input = Input::default();
        let mut scratch = vec![0; 128 * 1024];
        let mut sequence = 0;
        let mut in_place = 0;
        for (round, kind) in (0..1200).zip([Kind::Request, Kind::Reply].into_iter().cycle()) {
            let mut sink = Both { full_at: usize::MAX, ..Both::default() };
            let mut expected = Vec::new();
            for at in 0..round % 7 + 1 {
                sequence += 1;
                let length = [4096, 16, 1024, 1023, 16 * 1024, 5003, 0][(round * 3 + at) % 7];
                let long = [5; BODY_BYTES_MAX + 1];
                let body: &[u8] = [b"body".as_slice(), b"no", &long][(round / 2 + at * at) % 3];
                let bytes = message(kind, sequence, body, length);
                let taken = length >= 1024 || kind == Kind::Reply;
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
        assert_eq!((sink.taken.len(), sink.together), (2, vec![1]), "what came before is landed");
    }

    /// The ring is freed as payloads are landed, and only a limited number waits for that.
    #[test]
    fn some_are_landed_together() {
        let ([near, far], counters) = (pair(), Counters::default());
        let (mut input, mut scratch) = (Input::default(), vec![0; 128 * 1024]);
        let mut sink = Both { full_at: usize::MAX, ..Both::default() };
        let count = 2 * IN_PLACE_TOGETHER + 3;
        let bytes: Vec<u8> = (1..=count)
            .flat_map(|at| message(Kind::Request, at as u32, b"body", 1024 + at))
            .collect();
        near.send(&[&bytes], &counters).unwrap();
        let Link::Shm(ring) = &far else { unreachable!() };
        let mut left = ring.unread().unwrap();
        while sink.taken.len() < count {
            let before = sink.taken.len();
            input.receive(&far, &mut scratch, None, &mut sink, &counters).unwrap();
            let taken: usize = sink.taken[before..]
                .iter()
                .map(|(_, bytes, _)| HEADER_BYTES + 4 + bytes.len())
                .sum();
            left -= taken;
            assert_eq!(ring.unread().unwrap(), left);
        }
        assert_eq!(sink.together, [IN_PLACE_TOGETHER, IN_PLACE_TOGETHER, 3]);
        let told = sink.taken.iter().map(|(sequence, ..)| *sequence as usize);
        assert!(told.eq(1..=count));
        let received = counters.messages_received.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(received, count as u64);
    }

    #[test]
    fn what_comes_is_all_that_is_looked_at() {
        let ([near, far], counters) = (pair(), Counters::default());
        let Link::Shm(ring) = &far else { unreachable!() };
        let mut sink = Both { full_at: usize::MAX, ..Both::default() };
        // Nothing, part of a header, and a header that claims more than there is.
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
