//! Requests on a lane that is new: what was open is opened again before anybody else uses it.

use std::io;
use std::time::{Duration, Instant};
use towline_net::{Counters, Incoming, Input, Link, Sink, Target};
use towline_wire::reply::parse_results;
use towline_wire::request::encode_compound;
use towline_wire::{Header, Kind, ProtocolError, Reply, Request};

/// A lane that nobody else uses yet; it carries one request at a time.
pub(crate) struct FirstUse<'a> {
    pub(crate) link: &'a Link,
    pub(crate) slot: u16,
    pub(crate) sequence: u32,
    /// How long each answer may take.
    pub(crate) limit: Duration,
}

/// Takes the answer to one request.
struct Answer {
    slot: u16,
    sequence: u32,
    results: Option<Vec<u8>>,
}

impl Sink for Answer {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        // The session may still be answering requests of the connection before this one, if their file
        // system hung.
        let is_awaited = (header.slot, header.sequence) == (self.slot, self.sequence);
        if header.kind == Kind::Reply && is_awaited {
            parse_results(body)?;
            self.results = Some(body.to_vec());
        }
        Ok(())
    }

    fn place(&mut self, _: &Header, _: &[u8], _: usize, _: usize) -> Option<Target<'_>> {
        None
    }

    fn expects_bulk(&self) -> bool {
        false
    }
}

impl FirstUse<'_> {
    /// Sends a request for this user and group and waits for its reply. Returns whether it succeeded.
    pub(crate) fn exchange(
        &mut self,
        identity: (u32, u32),
        requests: &[Request<'_>],
    ) -> io::Result<bool> {
        let results = self.ask(identity, requests)?;
        let replies = parse_results(&results).unwrap_or_default();
        Ok(!matches!(replies.last(), None | Some(Reply::Failed { .. })))
    }

    /// Sends a request for this user and group and waits for its results.
    pub(crate) fn ask(
        &mut self,
        identity: (u32, u32),
        requests: &[Request<'_>],
    ) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let body = encode_compound(requests);
        let mut header = Header::new(Kind::Request, self.slot, self.sequence);
        header.body_bytes = body.len() as u32;
        (header.word_a, header.word_b) = identity;
        let mut message = header.to_bytes().to_vec();
        message.extend_from_slice(&body);
        let counters = Counters::default();
        let mut done = 0;
        while done < message.len() {
            match self.link.send(&[&message[done..]], &counters) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.link.wait_writable(None)?;
                }
                Err(error) => return Err(error),
            }
        }
        let mut answer = Answer { slot: self.slot, sequence: self.sequence, results: None };
        let (mut input, mut scratch) = (Input::default(), vec![0; 96 * 1024]);
        let asked = Instant::now();
        loop {
            if let Some(results) = answer.results.take() {
                return Ok(results);
            }
            match input.receive(self.link, &mut scratch, None, &mut answer, &counters)? {
                Incoming::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                Incoming::Progress => {}
                Incoming::Drained if answer.results.is_some() => {}
                Incoming::Drained => {
                    let left = self.limit.saturating_sub(asked.elapsed());
                    if left.is_zero() {
                        let what = format!("no answer within {:?}", self.limit);
                        return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                    }
                    self.link.wait_readable(left)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use towline_net::LinkKind;
    use towline_wire::codec::Field;

    /// A server whose file system hung may answer a request of the connection before this one.
    #[test]
    fn answers_to_other_requests_are_not_taken_for_the_awaited_one() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let answer = |sequence, reply: &Reply<'_>| {
            let mut body = Vec::new();
            reply.encode(&mut body);
            let mut header = Header::new(Kind::Reply, 7, sequence);
            header.body_bytes = body.len() as u32;
            (&far).write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
        };
        let link = Link::Socket(near.into(), LinkKind::Unix);
        let limit = Duration::from_secs(60);
        let mut lane = FirstUse { link: &link, slot: 7, sequence: 0, limit };
        answer(5, &Reply::Failed { errno: 5 });
        answer(1, &Reply::Done {});
        answer(5, &Reply::Failed { errno: 5 });
        assert!(lane.exchange((0, 0), &[Request::Reclaimed {}]).unwrap());
        answer(1, &Reply::Done {});
        answer(2, &Reply::Failed { errno: 5 });
        answer(1, &Reply::Done {});
        assert!(!lane.exchange((0, 0), &[Request::Reclaimed {}]).unwrap());
    }
}
