//! The read pattern of a file, and what follows from it.

use crate::known::changes;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use towline_client::{Error, Operation};

/// How much older than an answer that has just arrived data may be.
pub(crate) const VALID: Duration = Duration::from_millis(100);
/// Bytes of a piece at first, and at most; reads of more than half the maximum are long.
pub(super) const WINDOW_BYTES: std::ops::RangeInclusive<usize> = 32 * 1024..=512 * 1024;
/// Bytes of the longest reads for which data is requested early. Longer ones are answered without a pause anyway.
pub(super) const LONG_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Requests that take less time are near enough.
pub(crate) const FAR: Duration = Duration::from_millis(4);
/// Maximum number of pieces that a file has at a time, 4 MiB in all.
const PIECES_MAX: usize = 8;
/// Longest trip that counts: one that takes longer may have been held up.
const TRIP_MAX: Duration = Duration::from_secs(1);
/// Number of sequential reads before more is requested than they want.
const IN_ORDER: i32 = 2;
/// Start value of that count after most of a piece was not used: this many more sequential reads are
/// needed.
const IN_VAIN: i32 = -32;
/// The read pattern of a file.
pub(super) struct Reader {
    mount: usize,
    handle: u64,
    /// The size that the file had when it was opened, if that is known: nothing is requested early beyond it.
    size: u64,
    /// Where the last read ended.
    next: u64,
    /// Number of previous successive reads that each began where the one before ended.
    in_order: i32,
    /// Number of bytes to request next.
    window: usize,
    /// How many pieces to have at a time, and the most that have turned out to be of use.
    depth: usize,
    depth_max: usize,
    /// The shortest time that a piece took to arrive for which the reader waited, with no other one under way.
    pub(super) trip: Duration,
    /// The shortest time that a long read took, and the time that a short one took, if it is known.
    long_read: Duration,
    pub(super) short_read: Option<Duration>,
    /// Data read ahead, each piece beginning where the one before ends.
    pub(super) pieces: VecDeque<Piece>,
}

/// Data read ahead.
pub(super) struct Piece {
    pub(super) from: u64,
    /// Number of bytes requested.
    pub(super) wanted: usize,
    pub(super) data: Data,
    pub(super) asked: Instant,
    /// When it is too old.
    pub(super) until: Instant,
    /// Number of changes before it was requested.
    pub(super) changes: u64,
    /// The reader had to wait for it.
    pub(super) is_awaited: bool,
    /// End of the furthest read from it, in bytes.
    pub(super) used: usize,
}

pub(super) enum Data {
    /// Memory whose first bytes, of this number, are the file's.
    Here(Vec<u8>, usize),
    /// Under way.
    Asked(Operation<(usize, Vec<u8>)>),
}

impl Data {
    pub(super) fn memory(self) -> Option<Vec<u8>> {
        if let Self::Here(memory, _) = self { Some(memory) } else { None }
    }
}

impl Piece {
    fn is_old(&self) -> bool {
        Instant::now() > self.until
    }

    fn is_valid(&self) -> bool {
        self.changes == changes() && !self.is_old()
    }

    /// Returns where the data ends, or would end.
    fn end(&self) -> u64 {
        let length = if let Data::Here(_, length) = self.data { length } else { self.wanted };
        self.from + length as u64
    }

    /// True if the file ended at its end.
    fn is_last(&self) -> bool {
        matches!(self.data, Data::Here(_, length) if length < self.wanted)
    }

    /// Copies the data from `offset` on and returns its length.
    pub(super) fn copy_to(&mut self, target: &mut [u8], offset: u64) -> usize {
        let Data::Here(memory, length) = &self.data else { return 0 };
        let at = offset.checked_sub(self.from).and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|at| at < length) else { return 0 };
        let count = target.len().min(length - at);
        target[..count].copy_from_slice(&memory[at..at + count]);
        self.used = self.used.max(at + count);
        count
    }

    /// Waits until it is here.
    pub(super) fn arrive(&mut self) -> Result<(), Error> {
        let Data::Asked(operation) = &mut self.data else { return Ok(()) };
        let looked = Pin::new(&mut *operation).poll(&mut Context::from_waker(Waker::noop()));
        self.is_awaited = looked.is_pending();
        let arrived = match looked {
            Poll::Ready(arrived) => arrived,
            Poll::Pending => {
                let nothing = Data::Here(Vec::new(), 0);
                let Data::Asked(operation) = std::mem::replace(&mut self.data, nothing) else {
                    return Ok(());
                };
                operation.wait()
            }
        };
        arrived.map(|(length, memory)| self.data = Data::Here(memory, length))
    }
}

/// What a read does next.
pub(super) enum Next {
    /// It is over.
    End,
    /// Reads the bytes that it wants.
    Read,
    /// Reads this many bytes.
    ReadAhead(usize),
    /// Requests another piece, which begins here, and goes on.
    Ask(u64),
    /// Waits for this piece, and goes on.
    Wait(Piece),
}

impl Reader {
    /// Starts with a file whose first bytes, up to `next`, may have come with opening it.
    pub(super) fn new(mount: usize, handle: u64, size: u64, next: u64) -> Self {
        Self {
            mount,
            handle,
            size,
            next,
            in_order: IN_ORDER - 1,
            window: *WINDOW_BYTES.start(),
            depth: 1,
            depth_max: PIECES_MAX,
            trip: TRIP_MAX,
            long_read: TRIP_MAX,
            short_read: None,
            pieces: VecDeque::new(),
        }
    }

    pub(super) fn is(&self, mount: usize, handle: u64) -> bool {
        self.handle == handle && self.mount == mount
    }

    /// Notes a read.
    pub(super) fn reads(&mut self, offset: u64, length: usize) {
        self.in_order = if offset == self.next { self.in_order.saturating_add(1) } else { 0 };
        self.next = offset.saturating_add(length as u64);
    }

    /// Notes how long a long read took. Returns true if it is to be found out how long a short one takes.
    pub(super) fn took(&mut self, time: Duration) -> bool {
        self.long_read = self.long_read.min(time);
        self.trip = self.trip.min(time);
        self.in_order >= IN_ORDER && self.long_read > FAR && self.short_read.is_none()
    }

    /// Returns true if long reads take long because the server is far: what follows them is better requested
    /// before. If the network is slow, this would only delay other requests.
    pub(super) fn is_far(&self) -> bool {
        self.long_read > FAR && self.short_read.is_some_and(|short| 4 * short > self.long_read)
    }

    /// Goes on with a read: copies the data that is there and returns its length and what to do next.
    pub(super) fn go_on(
        &mut self,
        target: &mut [u8],
        offset: u64,
        spare: &mut Option<Vec<u8>>,
    ) -> (usize, Next) {
        let mut done = 0;
        while let Some(mut first) = self.pieces.pop_front() {
            let at = offset + done as u64;
            if !first.is_valid() || at < first.from || at > first.end() {
                self.pieces.push_front(first);
                self.drop_all(spare);
                break;
            }
            if let Data::Asked(_) = first.data {
                let next = self.pieces.back().map_or(first.end(), Piece::end);
                if 1 + self.pieces.len() < self.depth && next < self.size {
                    self.pieces.push_front(first);
                    return (done, Next::Ask(next));
                }
                return (done, Next::Wait(first));
            }
            done += first.copy_to(&mut target[done..], at);
            let is_last = first.is_last();
            // At the end of the file a read is short; the next one asks whether the file still ends there.
            if done == target.len() || (done > 0 && is_last) {
                self.pieces.push_front(first);
                return (done, Next::End);
            }
            self.judge(first, spare);
            if is_last {
                // The file has become shorter, perhaps for a moment only.
                self.drop_all(spare);
                return (done, Next::Read);
            }
        }
        let wanted = target.len() - done;
        let is_long = is_long(wanted);
        if self.in_order < IN_ORDER || (is_long && !(wanted <= LONG_BYTES_MAX && self.is_far())) {
            return (done, Next::Read);
        }
        if is_long {
            self.window = *WINDOW_BYTES.end();
            self.depth = self.depth.max(2).min(self.depth_max);
        }
        if self.depth > 1 && self.next <= self.size {
            return (done, Next::Ask(offset + done as u64));
        }
        if is_long {
            return (done, Next::Read);
        }
        self.window = self.window.max(4 * wanted).min(*WINDOW_BYTES.end());
        (done, Next::ReadAhead(self.window))
    }

    /// Adds a piece that was requested, unless another thread has added others.
    pub(super) fn add(&mut self, piece: Piece) {
        if self.pieces.back().is_none_or(|last| last.end() == piece.from) {
            self.pieces.push_back(piece);
        }
    }

    /// Puts back a piece that was waited for, unless another thread has added others.
    pub(super) fn put_back(&mut self, piece: Piece) {
        if self.pieces.front().is_none_or(|next| next.from == piece.from + piece.wanted as u64) {
            self.pieces.push_front(piece);
        }
    }

    /// Begins anew with a piece that was waited for while no other one was under way.
    pub(super) fn begin(&mut self, piece: Piece) {
        if piece.wanted == *WINDOW_BYTES.end() {
            self.trip = self.trip.min(piece.asked.elapsed());
        }
        self.pieces = VecDeque::from([piece]);
    }

    /// Adapts to how much of a piece was used, and takes its memory.
    fn judge(&mut self, piece: Piece, spare: &mut Option<Vec<u8>>) {
        let length = (piece.end() - piece.from) as usize;
        if piece.used == length {
            let is_long = self.window == *WINDOW_BYTES.end();
            self.window = (2 * self.window).min(*WINDOW_BYTES.end());
            // The more pieces there are, the older they are when they are used.
            let age = piece.asked.elapsed().saturating_sub(self.trip);
            if is_long && piece.is_awaited && age <= VALID / 4 {
                self.depth = (2 * self.depth).min(self.depth_max);
            }
        } else if self.depth > 1 && piece.changes == changes() && piece.is_old() {
            // Perhaps because there were so many.
            self.depth_max = self.depth / 2;
            self.depth = self.depth_max;
        } else {
            self.window = *WINDOW_BYTES.start();
            self.depth = 1;
            if piece.used < length / 2 {
                self.in_order = IN_VAIN;
            }
        }
        *spare = piece.data.memory().or(spare.take());
    }

    /// Forgets all pieces. Those behind the first one are not judged: they are unused because of it.
    fn drop_all(&mut self, spare: &mut Option<Vec<u8>>) {
        if let Some(first) = std::mem::take(&mut self.pieces).pop_front() {
            self.judge(first, spare);
        }
    }
}

pub(super) fn is_long(wanted: usize) -> bool {
    wanted > *WINDOW_BYTES.end() / 2
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test that cannot go on should say where

    use super::*;

    const LONG: usize = *WINDOW_BYTES.end();
    const LATER: Duration = Duration::from_secs(3600);

    /// A piece that was waited for.
    fn piece(from: usize) -> Piece {
        Piece {
            from: from as u64,
            wanted: LONG,
            data: Data::Here(vec![0; LONG], LONG),
            asked: Instant::now(),
            until: Instant::now() + LATER,
            changes: changes(),
            is_awaited: true,
            used: 0,
        }
    }

    /// A reader that has used up all but the last byte of the first of these pieces.
    fn reader(mut pieces: Vec<Piece>) -> Reader {
        let mut reader = Reader::new(0, 0, u64::MAX, 0);
        (reader.window, reader.trip, reader.depth) = (LONG, LATER, pieces.len());
        (reader.next, reader.in_order) = (LONG as u64 - 1, IN_ORDER);
        pieces[0].used = LONG - 1;
        reader.pieces = pieces.into();
        reader
    }

    /// Reads 64 KiB from the last of `used` bytes on, and returns how many were there and what comes next.
    fn read(reader: &mut Reader, used: usize) -> (usize, Next) {
        let (mut target, offset) = (vec![0; 64 * 1024], used as u64 - 1);
        reader.reads(offset, target.len());
        reader.go_on(&mut target, offset, &mut None)
    }

    #[test]
    fn who_waits_for_pieces_gets_more_of_them() {
        let mut one = reader(vec![piece(0)]);
        assert!(matches!(read(&mut one, LONG), (1, Next::Ask(from)) if from == LONG as u64));
        assert_eq!(one.depth, 2);
        let mut none_more = reader(vec![piece(0)]);
        none_more.depth_max = 1;
        assert!(matches!(read(&mut none_more, LONG), (1, Next::ReadAhead(LONG))));
        // These were there in time.
        let mut fast = reader(vec![Piece { is_awaited: false, ..piece(0) }]);
        assert!(matches!(read(&mut fast, LONG), (1, Next::ReadAhead(LONG))));
        let mut short = reader(vec![piece(0)]);
        short.size = LONG as u64 + 1;
        assert!(matches!(read(&mut short, LONG), (1, Next::ReadAhead(LONG))), "near the end");
    }

    #[test]
    fn long_reads_that_take_long_are_requested_before() {
        let mut target = vec![0; 2 * LONG];
        let mut reads = |reader: &mut Reader| {
            let offset = reader.next;
            reader.reads(offset, target.len());
            reader.go_on(&mut target, offset, &mut None).1
        };
        let mut one = Reader::new(0, 0, u64::MAX, 0);
        assert!(matches!(reads(&mut one), Next::Read), "nothing is known yet");
        assert!(one.took(2 * FAR));
        one.short_read = Some(FAR / 10);
        assert!(matches!(reads(&mut one), Next::Read), "the network is slow");
        one.short_read = Some(FAR);
        let next = one.next;
        assert!(matches!(reads(&mut one), Next::Ask(from) if from == next));
        one.depth_max = 1;
        assert!(matches!(reads(&mut one), Next::Read), "it was in vain");
        let mut near = Reader::new(0, 0, u64::MAX, 0);
        near.in_order = IN_ORDER;
        assert!(!near.took(FAR / 2));
        assert!(!near.took(2 * FAR), "one of them was fast");
    }

    #[test]
    fn the_end_of_a_file_that_has_become_shorter_is_asked_for_once() {
        let mut shrunk = reader(vec![piece(0), piece(LONG)]);
        shrunk.size = 9 * LONG as u64;
        shrunk.pieces[1].data = Data::Here(Vec::new(), 0);
        assert!(matches!(read(&mut shrunk, LONG), (1, Next::End)), "a short read");
        shrunk.reads(LONG as u64, LONG);
        assert!(matches!(shrunk.go_on(&mut [0; 9], LONG as u64, &mut None), (0, Next::Read)));
    }

    #[test]
    fn pieces_that_are_old_when_it_is_their_turn_are_fewer_from_then_on() {
        let past = Instant::now().checked_sub(Duration::from_nanos(1)).unwrap();
        let in_time = Piece { is_awaited: false, ..piece(0) };
        let old = Piece { until: past, ..piece(LONG) };
        let mut four = reader(vec![in_time, old, piece(2 * LONG), piece(3 * LONG)]);
        assert!(matches!(read(&mut four, LONG), (1, Next::Ask(from)) if from == LONG as u64));
        assert_eq!((four.depth, four.depth_max, four.pieces.len()), (2, 2, 0));
        // Not so if the reader is elsewhere.
        let mut two = reader(vec![piece(0), piece(LONG)]);
        assert!(matches!(read(&mut two, 9 * LONG), (0, Next::Read)));
        assert_eq!((two.depth, two.depth_max, two.pieces.len()), (1, PIECES_MAX, 0));
    }
}
