//! A link over shared memory: one byte ring in each direction, and flags that say which side sleeps.
//!
//! Positions count all bytes ever written or read. A side with nothing to do sets its sleeping flag,
//! checks once more, and sleeps. After moving bytes, the other side clears the flag and wakes it: the
//! server with an eventfd that its event loop watches, the client with a futex. The peer is not trusted:
//! its positions are read once and checked before use.

use crate::socket::{Piece, Wait, receive_descriptors, send_descriptors};
use crate::{Doorbell, Payload, Spin, Target, look_often};
use rustix::thread::futex;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use towline_mem::SharedMemory;

/// Size of the ring towards the server.
const TO_SERVER_BYTES: usize = 512 * 1024;
/// Size of the ring towards the client.
const TO_CLIENT_BYTES: usize = 1024 * 1024;
const CONTROL_BYTES: usize = 4096;
/// Size of the shared memory of one link.
pub const SHM_BYTES: usize = CONTROL_BYTES + TO_SERVER_BYTES + TO_CLIENT_BYTES;

// Offsets of the words. Words written by different sides are on different cache lines.
const CLIENT_SLEEPS: usize = 0;
const SERVER_SLEEPS: usize = 128;
const RINGS: [usize; 2] = [256, 512];
/// Set when memory lent over the link may change.
const LOANS_ENDED: usize = 1024;
const WRITTEN: usize = 0;
const READ: usize = 128;

/// Most bytes of a file that are read into the ring before the peer can take them.
const FILE_PART_BYTES: usize = 256 * 1024;

/// How long to spin for room in a full ring before sleeping: about the time in which a peer copies a piece.
const ROOM_SPIN: Duration = Duration::from_micros(20);

/// Bytes that [`ShmLink::expect`] fetches: the head of a message, and enough of its payload for the
/// processor's own prefetching to start.
const EXPECTED_BYTES: usize = 256;

/// Most bytes that [`ShmLink::prepare_send`] fetches; longer messages do not gain from it.
const PREPARED_BYTES_MAX: usize = 8192;

/// Which end of the link this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmSide {
    /// Sleeps on a futex.
    Client,
    /// Sleeps in its event loop.
    Server,
}

/// One end of a shared-memory link. Its Unix socket stays open beside it: each side learns of the
/// other's death when the socket closes.
#[derive(Debug)]
pub struct ShmLink {
    memory: Arc<SharedMemory>,
    side: ShmSide,
    doorbell: Doorbell,
    /// Wakes the client instead of the futex, if it waits for more than this link.
    client_bell: Option<Doorbell>,
    socket: OwnedFd,
    /// This side's positions, never read back from memory that the peer can write.
    written: AtomicU64,
    read: AtomicU64,
    /// The peer's read position when it was last needed, after checking. The peer's word is in the
    /// peer's cache, and reading it for every message would make both sides wait for it.
    peer_read: AtomicU64,
    /// Length of the last message sent.
    last_sent: AtomicUsize,
    /// Something was sent that will wake the peer only together with what follows.
    owes_wake: AtomicBool,
    /// For waits until there is room in the ring.
    room_spin: Mutex<Spin>,
}

/// Where a ring's words and bytes are in the memory, and its size.
struct Ring {
    words: usize,
    base: usize,
    bytes: usize,
}

const TO_SERVER: Ring = Ring { words: RINGS[0], base: CONTROL_BYTES, bytes: TO_SERVER_BYTES };
const TO_CLIENT: Ring =
    Ring { words: RINGS[1], base: CONTROL_BYTES + TO_SERVER_BYTES, bytes: TO_CLIENT_BYTES };

fn impossible() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "peer set an impossible ring position")
}

impl ShmLink {
    /// Creates one end, over memory of at least [`SHM_BYTES`] bytes.
    ///
    /// # Errors
    /// `InvalidInput` when the memory is too small.
    pub fn new(
        memory: Arc<SharedMemory>,
        side: ShmSide,
        doorbell: Doorbell,
        socket: OwnedFd,
    ) -> io::Result<Self> {
        if memory.len() < SHM_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            memory,
            side,
            doorbell,
            client_bell: None,
            socket,
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            peer_read: AtomicU64::new(0),
            last_sent: AtomicUsize::new(0),
            owes_wake: AtomicBool::new(false),
            room_spin: Mutex::new(Spin::new(ROOM_SPIN)),
        })
    }

    /// Makes the client of this link sleep in `poll(2)` on a bell instead of the futex; both sides
    /// have to agree on that. Such a client uses [`ShmLink::prepare_wait`] instead of
    /// [`ShmLink::wait_readable`].
    #[must_use]
    pub fn with_client_bell(mut self, bell: Doorbell) -> Self {
        self.client_bell = Some(bell);
        self
    }

    /// Returns the bell that wakes this side, if it has one.
    #[must_use]
    pub fn own_bell(&self) -> Option<&Doorbell> {
        match self.side {
            ShmSide::Client => self.client_bell.as_ref(),
            ShmSide::Server => Some(&self.doorbell),
        }
    }

    /// Returns the socket that closes when the peer dies.
    #[must_use]
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns the server's bell.
    #[must_use]
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Returns the ring to the peer and the ring from the peer.
    fn rings(&self) -> (Ring, Ring) {
        match self.side {
            ShmSide::Client => (TO_SERVER, TO_CLIENT),
            ShmSide::Server => (TO_CLIENT, TO_SERVER),
        }
    }

    /// Returns the room in the ring towards the peer at this moment.
    fn space(&self, ring: &Ring) -> io::Result<usize> {
        let read = self.memory.word64(ring.words + READ).load(Ordering::Acquire);
        let unread = self.written.load(Ordering::Relaxed).wrapping_sub(read);
        if unread > ring.bytes as u64 {
            return Err(impossible());
        }
        // A thread that loads this may overwrite what the peer had read by then, so the acquire above
        // comes before.
        self.peer_read.store(read, Ordering::Release);
        Ok(ring.bytes - unread as usize)
    }

    /// Returns the room in the ring towards the peer: at least `wanted` if there is that much, otherwise
    /// all there is.
    fn space_for(&self, ring: &Ring, wanted: usize) -> io::Result<usize> {
        let read = self.peer_read.load(Ordering::Acquire);
        let unread = self.written.load(Ordering::Relaxed).wrapping_sub(read);
        match ring.bytes.checked_sub(unread as usize) {
            Some(known) if known >= wanted => Ok(known),
            _ => self.space(ring),
        }
    }

    /// Like [`ShmLink::space_for`], with an error if there is no room at all.
    fn room_for(&self, ring: &Ring, wanted: usize) -> io::Result<usize> {
        let room = self.space_for(ring, wanted)?;
        if room > 0 {
            return Ok(room);
        }
        // Only the peer can make room.
        if self.owes_wake.swap(false, Ordering::Relaxed) {
            self.wake_peer();
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Returns the number of unread bytes, after checking the peer's position.
    fn available(&self, ring: &Ring) -> io::Result<usize> {
        let written = self.memory.word64(ring.words + WRITTEN).load(Ordering::Acquire);
        let unread = written.wrapping_sub(self.read.load(Ordering::Relaxed));
        if unread > ring.bytes as u64 {
            return Err(impossible());
        }
        Ok(unread as usize)
    }

    /// True when there is something to receive, or the peer set an impossible position.
    #[must_use]
    pub fn readable(&self) -> bool {
        self.available(&self.rings().1).map_or(true, |count| count > 0)
    }

    /// True when there is room to send at least half of the ring, or the peer set an impossible position.
    #[must_use]
    pub fn writable(&self) -> bool {
        let ring = self.rings().0;
        self.space(&ring).map_or(true, |count| count >= ring.bytes / 2)
    }

    /// Sends pieces without waiting. With `more`, the peer is woken only by what is sent next.
    pub(crate) fn send_pieces(&self, pieces: &[Piece], more: bool) -> io::Result<usize> {
        let ring = self.rings().0;
        let wanted = pieces.iter().map(Piece::len).sum();
        let mut space = self.room_for(&ring, wanted)?;
        let start = self.written.load(Ordering::Relaxed);
        let mut position = start;
        'pieces: for piece in pieces {
            let mut from = 0;
            while from < piece.len() {
                let at = (position % ring.bytes as u64) as usize;
                let count = (piece.len() - from).min(space).min(ring.bytes - at);
                if count == 0 {
                    break 'pieces;
                }
                piece.copy_to(from, count, &self.memory, ring.base + at);
                (from, space, position) = (from + count, space - count, position + count as u64);
            }
        }
        let sent = (position - start) as usize;
        self.last_sent.store(sent, Ordering::Relaxed);
        self.publish(&ring, position, more);
        Ok(sent)
    }

    /// Reads a part of a file right into the ring. Returns how many bytes that was; zero: the file ends at or
    /// before `offset`.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room; what the file says, with `EAGAIN` as another kind.
    pub(crate) fn send_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let ring = self.rings().0;
        let length = length.min(FILE_PART_BYTES);
        let space = self.room_for(&ring, length)?;
        let start = self.written.load(Ordering::Relaxed);
        let at = (start % ring.bytes as u64) as usize;
        let count = length.min(space).min(ring.bytes - at);
        let read = self.memory.read_file(ring.base + at, count, file, offset);
        let count = read.map_err(|error| match error.kind() {
            // A file that says so will not tell when to try again.
            io::ErrorKind::WouldBlock => io::Error::other(error),
            _ => error,
        })?;
        if count > 0 {
            self.publish(&ring, start + count as u64, false);
        }
        Ok(count)
    }

    /// Lets the peer see what was written to the ring up to `position`, and wakes it unless there is `more`.
    fn publish(&self, ring: &Ring, position: u64, more: bool) {
        self.written.store(position, Ordering::Relaxed);
        self.memory.word64(ring.words + WRITTEN).store(position, Ordering::Release);
        self.owes_wake.store(more, Ordering::Relaxed);
        if !more {
            self.wake_peer();
        }
    }

    /// Prefetches the lines of the ring to which the next message will be written, assuming that it is
    /// as long as the last one. They are in the cache of the peer, which read the previous round's bytes
    /// from them. For threads that have nothing else to do.
    pub fn prepare_send(&self) {
        let ring = self.rings().0;
        let count = self.last_sent.swap(0, Ordering::Relaxed).min(PREPARED_BYTES_MAX);
        let at = (self.written.load(Ordering::Relaxed) % ring.bytes as u64) as usize;
        self.memory.expect_writes(ring.base + at, count.min(ring.bytes - at));
    }

    pub(crate) fn receive(&self, target: &mut Target<'_>) -> io::Result<usize> {
        let ring = self.rings().1;
        let available = self.available(&ring)?;
        if available == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let start = self.read.load(Ordering::Relaxed);
        let wanted = available.min(target.len());
        let mut done = 0;
        while done < wanted {
            let at = ((start + done as u64) % ring.bytes as u64) as usize;
            let count = (wanted - done).min(ring.bytes - at);
            let from = ring.base + at;
            target.put_shared(done, &self.memory, from..from + count);
            done += count;
        }
        self.received(available, done);
        Ok(done)
    }

    /// Returns the number of bytes that can be received.
    pub(crate) fn unread(&self) -> io::Result<usize> {
        self.available(&self.rings().1)
    }

    /// Returns the two ranges, one after the other, of `count` unread bytes, starting `skip` bytes after
    /// the first one. Callers must not ask for more than [`ShmLink::unread`] returned.
    fn standing(&self, ring: &Ring, skip: usize, count: usize) -> [Range<usize>; 2] {
        let start = self.read.load(Ordering::Relaxed) + skip as u64;
        let at = (start % ring.bytes as u64) as usize;
        let first = count.min(ring.bytes - at);
        let at = ring.base + at;
        [at..at + first, ring.base..ring.base + count - first]
    }

    /// Returns unread bytes as the payload of a message.
    pub(crate) fn payload(&self, skip: usize, count: usize) -> Payload<'_> {
        Payload { memory: &self.memory, ranges: self.standing(&self.rings().1, skip, count) }
    }

    /// Copies unread bytes and leaves them in the ring.
    pub(crate) fn peek(&self, skip: usize, target: &mut [u8]) {
        let [first, second] = self.standing(&self.rings().1, skip, target.len());
        let (front, back) = target.split_at_mut(first.len());
        self.memory.copy_out(first.start, front);
        if !back.is_empty() {
            self.memory.copy_out(second.start, back);
        }
    }

    /// Prefetches the first unread bytes from `skip` bytes after the first one. They are in the cache of
    /// the peer, which wrote them.
    pub(crate) fn expect(&self, skip: usize, unread: usize) {
        let count = unread.saturating_sub(skip).min(EXPECTED_BYTES);
        for part in self.standing(&self.rings().1, skip, count) {
            self.memory.expect_reads(part.start, part.len());
        }
    }

    /// Marks `count` bytes as read. `unread` is how many there were when they were looked at.
    pub(crate) fn received(&self, unread: usize, count: usize) {
        let ring = self.rings().1;
        let half = ring.bytes / 2;
        let position = self.read.load(Ordering::Relaxed) + count as u64;
        self.read.store(position, Ordering::Relaxed);
        self.memory.word64(ring.words + READ).store(position, Ordering::Release);
        // A sender that found the ring full waits until half of it is free, so that many pieces take one
        // wake-up. If it filled the ring only after `unread` was loaded, half of it is free once `count`
        // alone is that much.
        if count >= half || unread > half && unread - count <= half {
            self.wake_peer();
        }
    }

    /// True when the peer sleeps, so that the next send has to wake it.
    #[must_use]
    pub fn peer_sleeps(&self) -> bool {
        let flag = match self.side {
            ShmSide::Client => SERVER_SLEEPS,
            ShmSide::Server => CLIENT_SLEEPS,
        };
        self.memory.word32(flag).load(Ordering::Relaxed) != 0
    }

    fn wake_peer(&self) {
        // The peer sets its flag, fences, and checks the positions; this side stores a position, fences,
        // and checks the flag. So at least one of the two sees what the other has stored.
        fence(Ordering::SeqCst);
        let flag = match self.side {
            ShmSide::Client => SERVER_SLEEPS,
            ShmSide::Server => CLIENT_SLEEPS,
        };
        let word = self.memory.word32(flag);
        if word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::SeqCst) != 0 {
            match self.side {
                ShmSide::Client => self.doorbell.ring(),
                ShmSide::Server => match &self.client_bell {
                    Some(bell) => bell.ring(),
                    None => {
                        // Wake all threads: one may wait for data, others for room.
                        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
                    }
                },
            }
        }
    }

    /// Sets the server's sleeping flag, before its event loop waits: for bytes, unless it is `full` and has no
    /// room for what they ask, and for room to send if it `sends`. Returns false if there is work, so that it
    /// must not sleep.
    #[must_use]
    pub fn prepare_sleep(&self, full: bool, sends: bool) -> bool {
        self.prepare(|| !full && self.readable() || sends && self.writable())
    }

    /// Sets the sleeping flag of a side that is about to sleep on its bell. Returns false if it must not
    /// sleep, because bytes have arrived or (with `send`) there is room to send.
    #[must_use]
    pub fn prepare_wait(&self, send: bool) -> bool {
        self.prepare(|| self.readable() || (send && self.writable()))
    }

    fn prepare(&self, has_work: impl Fn() -> bool) -> bool {
        let flag = match self.side {
            ShmSide::Client => CLIENT_SLEEPS,
            ShmSide::Server => SERVER_SLEEPS,
        };
        self.memory.word32(flag).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if has_work() {
            self.memory.word32(flag).store(0, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// For the client: waits until bytes can be received, and spins first where that helps. Returns
    /// after at most 100 ms, or with an error once the server is gone.
    ///
    /// # Errors
    /// `ConnectionReset` when the server closed the socket.
    pub fn wait_readable(&self, spin: &mut Spin) -> io::Result<()> {
        self.wait(|| self.readable(), spin)
    }

    /// For the client: waits until there is room to send; otherwise like [`Self::wait_readable`].
    ///
    /// # Errors
    /// `ConnectionReset` when the server closed the socket.
    pub fn wait_writable(&self) -> io::Result<()> {
        self.wait_for_room(|| self.writable())
    }

    /// For the client: waits until bytes can be received or there is room to send; otherwise like
    /// [`Self::wait_readable`].
    ///
    /// # Errors
    /// `ConnectionReset` when the server closed the socket.
    pub fn wait_either(&self) -> io::Result<()> {
        self.wait_for_room(|| self.readable() || self.writable())
    }

    fn wait_for_room(&self, ready: impl Fn() -> bool) -> io::Result<()> {
        // If another thread already spins for room, sleep at once.
        match self.room_spin.try_lock() {
            Ok(mut spin) => self.wait(ready, &mut spin),
            Err(_) => self.wait(ready, &mut Spin::new(Duration::ZERO)),
        }
    }

    fn wait(&self, ready: impl Fn() -> bool, spin: &mut Spin) -> io::Result<()> {
        self.prepare_send();
        if spin.until(|| look_often(&ready).then_some(())).is_some() {
            return Ok(());
        }
        let word = self.memory.word32(CLIENT_SLEEPS);
        word.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if ready() {
            return Ok(()); // Leave the flag set: another thread may sleep.
        }
        let limit = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        match futex::wait(word, futex::Flags::empty(), 1, Some(&limit)) {
            Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Err(rustix::io::Errno::TIMEDOUT) if self.peer_closed() => {
                Err(io::ErrorKind::ConnectionReset.into())
            }
            Err(rustix::io::Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// True when the peer has closed its end of the socket.
    #[must_use]
    pub fn peer_closed(&self) -> bool {
        // Do not check by receiving: a descriptor may be waiting in the socket.
        crate::socket::peer_closed(self.socket.as_fd())
    }

    /// For the server: passes memory of which it will lend parts to the client, over the socket. The
    /// client has to receive it, so the server must not pass memory that the client does not expect.
    ///
    /// # Errors
    /// The client is gone, or the socket is full.
    pub fn hand_over(&self, memory: BorrowedFd<'_>, length: usize) -> io::Result<()> {
        let bytes = (length as u64).to_le_bytes();
        match send_descriptors(&self.socket, &bytes, &[memory], Wait::No)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// For the client: receives the next memory that the server passed, and its length according to the
    /// server.
    ///
    /// # Errors
    /// `InvalidData`: the server sent something else or nothing. `EMFILE`: this process has no
    /// descriptors left.
    pub fn take_over(&self) -> io::Result<(OwnedFd, usize)> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let none_left = Some(rustix::io::Errno::MFILE.raw_os_error());
        let mut bytes = [0; 8];
        let (count, descriptors) = receive_descriptors(&self.socket, &mut bytes, Wait::No)
            .map_err(|error| match error.raw_os_error() == none_left {
                true => error,
                false => wrong("memory lent without having been shared"),
            })?;
        let length = usize::try_from(u64::from_le_bytes(bytes));
        match (<[OwnedFd; 1]>::try_from(descriptors), length) {
            (Ok([memory]), Ok(length)) if count == bytes.len() => Ok((memory, length)),
            _ => Err(wrong("the descriptor handed over is not shared memory")),
        }
    }

    /// For the server: must be called before anything lent over this link changes, unless the client
    /// gave it back.
    pub fn end_loans(&self) {
        self.memory.word32(LOANS_ENDED).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// For the client, after reading lent memory: returns false if it may have changed meanwhile.
    #[must_use]
    pub fn loans_hold(&self) -> bool {
        // As in the reader of a sequence lock: the server sets the flag, and fences, before it changes
        // anything. So if the flag is clear after this fence, everything read before it was unchanged.
        // The server reads nothing that is stored here, so there is no need to wait for the stores of
        // the copy.
        fence(Ordering::Acquire);
        self.memory.word32(LOANS_ENDED).load(Ordering::Relaxed) == 0
    }
}

const _: () = assert!(RINGS[1] + READ + 8 <= LOANS_ENDED && LOANS_ENDED + 4 <= CONTROL_BYTES);
