//! Queues what is to be sent on a lane, and chooses how each slice leaves.

use crate::in_place::InPlace;
use crate::socket::Piece;
use crate::{Counters, Link, Pipe};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use towline_mem::{Aggregate, Segment, Slice};
use towline_wire::{Errno, Header, Kind};

/// Shared slices of at least this size are sent with `sendfile`, smaller ones are copied. A store must
/// not rewrite the pages of a slice of at least this size that it has handed out.
pub const SENDFILE_BYTES_MIN: u64 = 32 * 1024;

const PIECES: usize = 64;

/// Capacity kept for reuse once the short messages have been sent.
const SHORT_BYTES_KEPT: usize = 6 * 1024;

/// Most data of a message that is copied though it could be referred to.
const SMALL_BYTES_MAX: u64 = 4096;

/// Outcome of [`SendQueue::flush`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Everything was sent.
    All,
    /// The link takes no more at the moment; flush again when it is writable.
    Blocked,
    /// Only if allowed: the front of the queue is for [`SendQueue::take_in_place`], or was taken by it.
    Kept,
}

/// Creates the message that tells a peer that promised bytes could not be read.
pub type Telling = Box<dyn Fn(Errno) -> Vec<u8> + Send>;

/// Errors after which the send is simply tried again.
const WAITS: [io::ErrorKind; 2] = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];

/// How the peer learns that bytes of a message could not be read.
enum Failure {
    /// From a message for this slot number and sequence number.
    Slot(u16, u32),
    /// From a message of a protocol that this crate does not know.
    Told(Telling),
    /// There is no message for that, so the link has to break.
    Break,
}

struct Message {
    /// Number of bytes of [`Short`] that are sent before this message.
    short: usize,
    rest: Aggregate,
    failure: Failure,
    /// Number of messages this counts as, including the short ones before it.
    count: u64,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message").field("rest", &self.rest).finish_non_exhaustive()
    }
}

/// Messages waiting to be sent over one link, in order. Holds references to the data; only short
/// messages are copied.
#[derive(Debug, Default)]
pub struct SendQueue {
    messages: VecDeque<Message>,
    bytes: u64,
    short: Short,
    pub(crate) in_place: InPlace,
}

/// The bytes of short messages, and of the beginnings of long ones, in one reused buffer.
#[derive(Debug, Default)]
struct Short {
    bytes: Vec<u8>,
    /// Number of bytes that were sent.
    done: usize,
    /// Where the bytes queued behind all long messages begin; less than `done` once some of them were sent.
    behind: usize,
    /// Number of messages in the bytes queued behind all long messages.
    messages: u64,
}

impl Short {
    /// The bytes queued behind all long messages.
    fn last(&self) -> &[u8] {
        &self.bytes[self.behind.max(self.done)..]
    }

    /// Marks `count` more bytes as sent.
    fn advance(&mut self, count: usize) {
        self.done += count;
        if self.done == self.bytes.len() {
            (self.done, self.behind) = (0, 0);
            self.bytes.clear();
            self.bytes.shrink_to(SHORT_BYTES_KEPT);
        } else if self.done > SHORT_BYTES_KEPT.max(self.bytes.len() / 2) {
            self.bytes.drain(..self.done);
            self.behind = self.behind.saturating_sub(self.done);
            self.done = 0;
        }
    }
}

impl SendQueue {
    /// Adds a message of a few hundred bytes at most, which is copied.
    pub fn push_short(&mut self, parts: [&[u8]; 2]) {
        self.copy(parts);
        self.short.messages += 1;
    }

    fn copy(&mut self, parts: [&[u8]; 2]) {
        for part in parts {
            self.bytes += part.len() as u64;
            self.short.bytes.extend_from_slice(part);
        }
    }

    /// Takes a message with little data in memory and copies it, if nothing else waits: a socket takes one piece
    /// in less time than two. Returns false if the message has to be added otherwise.
    pub fn push_small(&mut self, beginning: [&[u8]; 2], data: &mut Aggregate) -> bool {
        if !self.is_empty() || data.len() > SMALL_BYTES_MAX {
            return false;
        }
        let mut slices = data.slices();
        let (Some(slice), None) = (slices.next(), slices.next()) else { return false };
        let (from, length) = (slice.offset as usize, slice.length as usize);
        match &slice.segment {
            Segment::Host(bytes) => {
                self.copy(beginning);
                self.copy([&bytes[from..from + length], b""]);
            }
            Segment::Shared(memory, _) => {
                self.copy(beginning);
                memory.append_to(from, length, &mut self.short.bytes);
                self.bytes += length as u64;
            }
            _ => return false,
        }
        self.short.messages += 1;
        std::mem::take(data).let_go();
        true
    }

    /// Adds a message; its beginning, a few hundred bytes at most, is copied. If bytes of it cannot be read, the link
    /// breaks, with [`io::ErrorKind::UnexpectedEof`].
    pub fn push_promised(&mut self, beginning: [&[u8]; 2], rest: Aggregate) {
        self.copy(beginning);
        self.append(rest, Failure::Break);
    }

    /// Adds a message whose header, body and payload are already in one aggregate.
    pub fn push(&mut self, message: Aggregate, slot: u16, sequence: u32) {
        self.append(message, Failure::Slot(slot, sequence));
    }

    /// Adds a message of another protocol. If bytes of it cannot be read, `telling` creates the message
    /// that says so; without it the link breaks.
    pub fn push_foreign(&mut self, message: Aggregate, telling: Option<Telling>) {
        self.append(message, telling.map_or(Failure::Break, Failure::Told));
    }

    fn append(&mut self, rest: Aggregate, failure: Failure) {
        self.bytes += rest.len();
        let short = self.short.last().len();
        self.short.behind = self.short.bytes.len();
        let count = 1 + std::mem::take(&mut self.short.messages);
        self.messages.push_back(Message { short, rest, failure, count });
    }

    /// Returns the number of bytes waiting.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of messages waiting, including one that is partly sent.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages.len() + self.short.messages as usize
    }

    /// True when nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.short.bytes.is_empty()
    }

    /// Sends as much as the link takes without waiting; pages of files go through `pipe`.
    ///
    /// # Errors
    /// The link is broken.
    pub fn flush(
        &mut self,
        link: &Link,
        pipe: &mut Pipe,
        counters: &Counters,
    ) -> io::Result<Flushed> {
        while !self.is_empty() {
            if self.is_kept() {
                return Ok(Flushed::Kept);
            }
            let sent = match self.file_at_front(link) {
                Some((segment, offset, length)) => {
                    self.send_file(link, &segment, offset, length, pipe, counters)
                }
                None => self.send_memory(link, counters),
            };
            match sent {
                Ok(count) => self.advance(count, counters),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Flushed::Blocked);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Flushed::All)
    }

    /// Returns the slices that are sent before any short message, in order.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &Slice> {
        let messages = self.messages.iter().take_while(|message| message.short == 0);
        messages.flat_map(|message| message.rest.slices())
    }

    fn file_at_front(&self, link: &Link) -> Option<(Segment, u64, u64)> {
        let front = self.messages.front().filter(|message| message.short == 0)?;
        let slice = front.rest.slices().next()?;
        let by_reference = leaves_by_reference(&slice.segment, slice.length, link);
        by_reference.then(|| (slice.segment.clone(), slice.offset, slice.length))
    }

    /// Sends a slice by reference; if that is impossible, replaces part of it by a copy in memory.
    fn send_file(
        &mut self,
        link: &Link,
        segment: &Segment,
        offset: u64,
        length: u64,
        pipe: &mut Pipe,
        counters: &Counters,
    ) -> io::Result<u64> {
        let file = match segment {
            Segment::File(file) => file.as_fd(),
            Segment::Shared(memory, _) => memory.fd(),
            _ => unreachable!("leaves_by_reference takes only these"),
        };
        match link.send_file(file, offset, length as usize, pipe, counters) {
            Ok(0) => {
                // The file was truncated after its length was promised. Zeros replace the missing bytes, and
                // a message right behind them says so.
                self.replace_front(vec![0; length as usize], Some(Errno::EIO))?;
                return Ok(0);
            }
            Ok(sent) => return Ok(sent as u64),
            Err(error) if WAITS.contains(&error.kind()) => return Err(error),
            // An error of the file, of a link or machine that has no such call, or of the link, which fails
            // again below.
            Err(_) => {}
        }
        // Copying is the only way left: read the file into a buffer, a part at a time.
        let mut bytes = vec![0; length.min(256 * 1024) as usize];
        match rustix::io::pread(file, &mut bytes, offset) {
            Ok(0) => self.replace_front(vec![0; length as usize], Some(Errno::EIO))?,
            Ok(count) => {
                bytes.truncate(count);
                self.replace_front(bytes, None)?;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                let errno = Errno::of(&error.into());
                self.replace_front(vec![0; length as usize], Some(errno))?;
            }
        }
        Ok(0)
    }

    /// Replaces the first bytes of the front slice by `bytes`. With `failure`, inserts a message after
    /// the front one that tells the receiver that these bytes could not be read.
    fn replace_front(&mut self, bytes: Vec<u8>, failure: Option<Errno>) -> io::Result<()> {
        let message = self.messages.front_mut().expect("flush saw a message");
        let told = match (failure, &message.failure) {
            (None, _) => None,
            (Some(errno), Failure::Slot(slot, sequence)) => {
                let mut header = Header::new(Kind::Data, *slot, *sequence);
                header.word_a = errno.0.into();
                Some((header.to_bytes().to_vec(), Failure::Slot(*slot, *sequence)))
            }
            (Some(errno), Failure::Told(telling)) => Some((telling(errno), Failure::Break)),
            // Keep the slice: a later flush would send the replacement.
            (Some(_), Failure::Break) => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let length = bytes.len() as u64;
        message.rest.advance(length);
        message.rest.prepend(Segment::Host(Arc::new(bytes)), 0, length);
        if let Some((told, failure)) = told {
            let told = Message { short: 0, rest: Aggregate::from_vec(told), failure, count: 1 };
            self.bytes += told.rest.len();
            // It goes before the reply, because the reply makes the receiver look at the result.
            self.messages.insert(1, told);
        }
        Ok(())
    }

    /// Sends from memory, up to the next slice that is sent by reference.
    fn send_memory(&self, link: &Link, counters: &Counters) -> io::Result<u64> {
        if self.messages.is_empty() {
            let sent = link.send_pieces(&[Piece::of(self.short.last())], false, counters);
            return sent.map(|count| count as u64);
        }
        let mut pieces: SmallVec<[Piece; 8]> = SmallVec::new();
        let mut more = false;
        let mut at = self.short.done;
        'gathered: {
            for message in &self.messages {
                if pieces.len() == PIECES {
                    break 'gathered;
                }
                if message.short > 0 {
                    pieces.push(Piece::of(&self.short.bytes[at..at + message.short]));
                    at += message.short;
                }
                for slice in message.rest.slices() {
                    let (from, length) = (slice.offset as usize, slice.length as usize);
                    if leaves_by_reference(&slice.segment, slice.length, link) {
                        more = true;
                        break 'gathered;
                    }
                    if pieces.len() == PIECES {
                        break 'gathered;
                    }
                    pieces.push(match &slice.segment {
                        Segment::Host(bytes) => Piece::of(&bytes[from..from + length]),
                        Segment::Registered(buffer) => {
                            Piece::of(&buffer.bytes()[from..from + length])
                        }
                        Segment::Shared(memory, _) => Piece::shared(memory, from, length),
                        // Files always leave by reference or by replacement; future kinds are copied.
                        _ => break 'gathered,
                    });
                }
            }
            let last = self.short.last();
            if pieces.len() < PIECES && !last.is_empty() {
                pieces.push(Piece::of(last));
            }
        }
        link.send_pieces(&pieces, more, counters).map(|count| count as u64)
    }

    /// Removes `count` sent bytes from the queue.
    pub(crate) fn advance(&mut self, mut count: u64, counters: &Counters) {
        self.bytes -= count;
        let mut short = 0;
        while let Some(front) = self.messages.front_mut() {
            let before = count.min(front.short as u64);
            front.short -= before as usize;
            short += before;
            count -= before;
            let whole = front.rest.len();
            if front.short > 0 || count < whole {
                front.rest.advance(count);
                count = 0;
                break;
            }
            count -= whole;
            if let Some(sent) = self.messages.pop_front() {
                Counters::add(&counters.messages_sent, sent.count);
                sent.rest.let_go();
            }
        }
        self.short.advance((short + count) as usize);
        if self.messages.is_empty() && self.short.bytes.is_empty() {
            Counters::add(&counters.messages_sent, std::mem::take(&mut self.short.messages));
        }
    }
}

fn leaves_by_reference(segment: &Segment, length: u64, link: &Link) -> bool {
    match segment {
        Segment::File(_) => true,
        Segment::Shared(..) => length >= SENDFILE_BYTES_MIN && link.sends_files(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LinkKind;
    use crate::local::local_pair;
    use std::sync::atomic::Ordering;

    /// If a file can neither be sent nor read, the peer is told and the link goes on.
    #[test]
    fn a_file_that_cannot_be_read_does_not_end_the_link() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Link::Socket(near.into(), LinkKind::Unix);
        let unreadable = std::fs::File::open("/").unwrap();
        let mut message = Aggregate::from_vec(b"header".to_vec());
        message.append(Segment::File(Arc::new(unreadable.into())), 0, 5);
        let (counters, mut queue, mut pipe) =
            (Counters::default(), SendQueue::default(), Pipe::one_of(1));
        queue.push(message, 3, 7);
        queue.push_short([b"next", b""]);
        assert!(matches!(queue.flush(&near, &mut pipe, &counters).unwrap(), Flushed::All));
        drop(near);
        let mut got = Vec::new();
        std::io::Read::read_to_end(&mut &far, &mut got).unwrap();
        let mut told = Header::new(Kind::Data, 3, 7);
        told.word_a = Errno::EISDIR.0.into();
        assert_eq!(got, [&b"header\0\0\0\0\0"[..], &told.to_bytes()[..], b"next"].concat());
    }

    /// Nothing of a file is kept in memory while the ring of shared memory is full.
    #[test]
    fn files_are_read_right_into_the_ring() {
        let [near, _far] = crate::in_ring::tests::pair();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 20).unwrap();
        let mut queue = SendQueue::default();
        let mut message = Aggregate::from_vec(b"header".to_vec());
        message.append(Segment::File(Arc::new(file.into())), 0, 4 << 20);
        queue.push(message, 3, 7);
        let flushed = queue.flush(&near, &mut Pipe::none(), &Counters::default());
        assert_eq!(flushed.unwrap(), Flushed::Blocked);
        let slices = queue.slices().collect::<Vec<_>>();
        assert!(matches!(slices[..], [Slice { segment: Segment::File(_), .. }]), "{slices:?}");
    }

    #[test]
    fn little_data_is_copied_if_nothing_else_waits() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Link::Socket(near.into(), LinkKind::Unix);
        let memory = Arc::new(towline_mem::SharedMemory::create("m", 4096).unwrap());
        memory.copy_in(100, b"shared");
        let mut of_memory = Aggregate::new();
        of_memory.append(Segment::Shared(memory, None), 100, 6);
        let mut of_host = Aggregate::from_vec(b"from the host".to_vec());
        of_host.advance(5);
        let mut long = Aggregate::from_vec(vec![0; SMALL_BYTES_MAX as usize + 1]);
        let mut of_two = Aggregate::from_vec(b"two".to_vec());
        of_two.append(Segment::Host(Arc::new(b"parts".to_vec())), 0, 5);
        let (counters, mut queue) = (Counters::default(), SendQueue::default());
        for rest in [&mut long, &mut of_two] {
            assert!(!queue.push_small([b"head", b""], rest) && !rest.is_empty());
        }
        for (data, sent) in [(&mut of_memory, "head,shared"), (&mut of_host, "head,the host")] {
            assert!(queue.push_small([b"head", b","], data) && data.is_empty());
            assert!(!queue.push_small([b"", b""], &mut Aggregate::from_vec(vec![1])), "one waits");
            assert_eq!((queue.messages(), queue.bytes()), (1, sent.len() as u64));
            assert_eq!(queue.slices().count(), 0);
            let flushed = queue.flush(&near, &mut Pipe::none(), &counters).unwrap();
            assert!(flushed == Flushed::All && queue.is_empty());
            let mut got = vec![0; sent.len()];
            std::io::Read::read_exact(&mut &far, &mut got).unwrap();
            assert_eq!(got, sent.as_bytes());
        }
    }

    /// Otherwise the peer would take the replacement for data.
    #[test]
    fn a_promise_that_cannot_be_kept_ends_the_link() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Link::Socket(near.into(), LinkKind::Unix);
        let (counters, mut queue, mut pipe) =
            (Counters::default(), SendQueue::default(), Pipe::one_of(1));
        let mut pages = Aggregate::new();
        let unreadable = std::fs::File::open("/").unwrap();
        pages.append(Segment::File(Arc::new(unreadable.into())), 0, 5);
        queue.push_promised([b"header", b"body"], pages);
        for _ in 0..2 {
            let error = queue.flush(&near, &mut pipe, &counters).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    /// Long and short messages are sent in the order in which they were queued, however little the link
    /// takes at once.
    #[test]
    fn short_messages_keep_their_place() {
        let (near, far) = local_pair();
        let (counters, mut queue, mut pipe) =
            (Counters::default(), SendQueue::default(), Pipe::one_of(1));
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        let mut received = |limit: usize| {
            let mut room = vec![0; limit];
            if let Ok(count) = far.receive(&mut room, &Counters::default()) {
                got.extend_from_slice(&room[..count]);
            }
            got.len()
        };
        for round in 0..600u32 {
            let fill = round as u8;
            if round % 3 == 0 {
                let long = vec![fill; 5000];
                sent.extend_from_slice(&long);
                queue.push(Aggregate::from_vec(long), 0, 0);
            } else if round % 3 == 1 {
                let beginning = vec![fill ^ 0x5a; 30 + round as usize % 11];
                sent.extend_from_slice(&[&beginning[..], &[fill; 7], &[fill; 900]].concat());
                let rest = Aggregate::from_vec(vec![fill; 900]);
                queue.push_promised([&beginning, &[fill; 7]], rest);
            } else {
                let short = vec![fill; 40 + round as usize % 7];
                sent.extend_from_slice(&short);
                queue.push_short([&short, b""]);
            }
            if round % 5 == 0 {
                // The link holds 256 KiB, and less is taken out of it than is queued.
                queue.flush(&near, &mut pipe, &counters).unwrap();
                received(3000);
            }
            assert!(!queue.is_empty() || round % 5 == 0);
        }
        assert!(queue.bytes() > 0 && queue.messages() > 0, "the link was never full");
        while received(10_000) < sent.len() {
            queue.flush(&near, &mut pipe, &counters).unwrap();
        }
        assert_eq!((queue.bytes(), queue.messages(), queue.is_empty()), (0, 0, true));
        assert_eq!(counters.messages_sent.load(Ordering::Relaxed), 600);
        assert!(got == sent);
    }
}
