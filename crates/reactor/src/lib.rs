//! One event loop per core: reports which descriptors became ready, over io_uring or, where that is
//! forbidden, over epoll.
//!
//! Readiness is reported once for each change (edge-triggered), so users read until the kernel returns
//! `EAGAIN` or fewer bytes than requested. Users that cannot write ask for an event
//! ([`Reactor::watch_writable`]); otherwise every read by a peer from a Unix socket, which makes it
//! writable, would wake this thread for nothing. The data itself is moved by system calls that do not
//! wait: on this project's sockets a send or receive tried at once nearly always succeeds, and one
//! buffer per core then serves all connections, instead of one posted buffer per lane.
//!
//! Reading a file, in contrast, waits for a device. [`Reactor::submit`] gives such a [`Transfer`] to the
//! ring, with the buffer that it owns until it is [`Finished`]; buffers are registered with the ring when
//! they are first used. [`Reactor::send`] sends memory without copying it, and reports when the network no
//! longer needs it.

mod disk;
mod epoll;
mod guess;
pub mod processor;
#[allow(unsafe_code)] // passing memory to the ring
mod registered;
#[allow(unsafe_code)] // lists of addresses for the kernel
mod send;
#[allow(unsafe_code)] // pushing to the submission queue
mod uring;

pub use disk::{Finished, Transfer};
pub use send::Sent;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use towline_mem::{Aggregate, Guard};

/// The mechanism by which the loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// io_uring with multishot polls.
    Uring,
    /// epoll, which works everywhere.
    Epoll,
}

/// A change of readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token with which the descriptor is watched.
    pub token: u64,
    /// Reading may succeed, or the peer closed.
    pub readable: bool,
    /// Writing may succeed.
    pub writable: bool,
    /// The peer sends nothing more: reading reaches the end, and no further event will say so.
    pub hung: bool,
}

/// An event loop. Belongs to the thread that created it.
#[derive(Debug)]
pub struct Reactor {
    inner: Inner,
    /// See [`Reactor::take_refusal`].
    refusal: Option<io::Error>,
    waits: u64,
    guess: guess::Guess,
}

#[derive(Debug)]
enum Inner {
    Uring(Box<uring::Uring>),
    Epoll(epoll::Epoll),
}

impl Reactor {
    /// Creates a loop with the engine asked for. Without a wish it uses io_uring, or epoll if the kernel
    /// refuses.
    ///
    /// # Errors
    /// The engine asked for is not available: `EPERM` or `ENOSYS` where io_uring is disabled.
    pub fn new(wish: Option<Engine>) -> io::Result<Self> {
        let mut refusal = None;
        let inner = match wish {
            Some(Engine::Epoll) => Inner::Epoll(epoll::Epoll::new()?),
            Some(Engine::Uring) => Inner::Uring(Box::new(uring::Uring::new()?)),
            None => match uring::Uring::new() {
                Ok(ring) => Inner::Uring(Box::new(ring)),
                Err(error) => {
                    refusal = Some(error);
                    Inner::Epoll(epoll::Epoll::new()?)
                }
            },
        };
        Ok(Self { inner, refusal, waits: 0, guess: guess::Guess::default() })
    }

    /// Takes the error with which the kernel refused io_uring to a loop without a wish.
    pub fn take_refusal(&mut self) -> Option<io::Error> {
        self.refusal.take()
    }

    /// Returns the engine in use.
    #[must_use]
    pub fn engine(&self) -> Engine {
        match self.inner {
            Inner::Uring(_) => Engine::Uring,
            Inner::Epoll(_) => Engine::Epoll,
        }
    }

    /// Returns the number of system calls made so far to wait or to change what is watched.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.waits
    }

    /// Reports when a descriptor becomes readable, until [`Reactor::unwatch`]. `token` must not be in
    /// use and must not be `u64::MAX`.
    ///
    /// # Errors
    /// What `epoll_ctl(2)` or the ring says.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.watch(fd, token),
            Inner::Epoll(epoll) => {
                self.waits += 1;
                epoll.watch(fd, token)
            }
        }
    }

    /// Reports once, immediately or later, that the descriptor watched with `token` is writable. (epoll
    /// reports every such change without being asked, and the ring those of a peer that sends nothing more.)
    ///
    /// # Errors
    /// What the ring says.
    pub fn watch_writable(&mut self, token: u64) -> io::Result<()> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.watch_writable(token),
            Inner::Epoll(_) => Ok(()),
        }
    }

    /// Stops watching. Must be called before the descriptor is closed. Events already on their way may
    /// still be reported.
    ///
    /// # Errors
    /// What `epoll_ctl(2)` or the ring says.
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.unwatch(token),
            Inner::Epoll(epoll) => {
                self.waits += 1;
                epoll.unwatch(fd)
            }
        }
    }

    /// Starts to read or write a file, on the ring. Nothing is submitted before the next
    /// [`Reactor::wait`]. The transfer owns its buffer until it is finished.
    ///
    /// # Errors
    /// Returns the transfer if there is no ring, or the ring is broken.
    pub fn submit(&mut self, token: u64, transfer: Transfer) -> Result<(), Transfer> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.submit(token, transfer),
            Inner::Epoll(_) => Err(transfer),
        }
    }

    /// Returns the number of buffers registered with the ring.
    #[must_use]
    pub fn registered_buffers(&self) -> usize {
        match &self.inner {
            Inner::Uring(ring) => ring.registered_buffers(),
            Inner::Epoll(_) => 0,
        }
    }

    /// True when [`Reactor::send`] can be used: io_uring of Linux 6.1 or later.
    #[must_use]
    pub fn sends_zero_copy(&self) -> bool {
        matches!(&self.inner, Inner::Uring(ring) if ring.sends_zero_copy())
    }

    /// Sends slices over a socket from where they lie in memory (`SEND_ZC`), without waiting: as many
    /// bytes as the socket takes, which [`Sent::Taken`] reports. The slices are kept until
    /// [`Sent::Released`]; `keeps_open` has to keep the socket open until then. At most one such send
    /// may be in progress per socket, and nothing else may be sent on it meanwhile, or the bytes mix.
    ///
    /// # Errors
    /// `Unsupported` for slices that are not in memory, or if [`Reactor::sends_zero_copy`] is false;
    /// what the ring says.
    pub fn send(
        &mut self,
        token: u64,
        socket: BorrowedFd<'_>,
        keeps_open: Guard,
        bytes: Aggregate,
    ) -> io::Result<()> {
        match &mut self.inner {
            Inner::Uring(ring) if ring.sends_zero_copy() => {
                ring.send(token, socket, send::Gathered::new(bytes, keeps_open)?)
            }
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// True when [`Reactor::take_sent`] has something to return.
    #[must_use]
    pub fn has_sent(&self) -> bool {
        matches!(&self.inner, Inner::Uring(ring) if !ring.sent.is_empty())
    }

    /// Appends the results of sends since the last call to `sent`.
    pub fn take_sent(&mut self, sent: &mut Vec<Sent>) {
        if let Inner::Uring(ring) = &mut self.inner {
            sent.append(&mut ring.sent);
        }
    }

    /// True when [`Reactor::take_finished`] has something to return.
    #[must_use]
    pub fn has_finished(&self) -> bool {
        matches!(&self.inner, Inner::Uring(ring) if !ring.finished.is_empty())
    }

    /// Appends the transfers that have finished since the last call to `finished`.
    pub fn take_finished(&mut self, finished: &mut Vec<Finished>) {
        if let Inner::Uring(ring) = &mut self.inner {
            finished.append(&mut ring.finished);
        }
    }

    /// True when [`Reactor::wait`] would not have to wait. Makes no system call over io_uring, one over
    /// epoll.
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        match &mut self.inner {
            Inner::Uring(ring) => ring.is_ready(),
            Inner::Epoll(epoll) => {
                self.waits += 1;
                // On an error, let `wait` report it.
                epoll.is_ready().unwrap_or(true)
            }
        }
    }

    /// True when [`Reactor::is_ready`] notices that a watched descriptor became readable as soon as the
    /// system call that caused it, in any process, has returned: that call sets a flag in the ring's
    /// memory. (A ring without this, before Linux 6.1, notices it when this thread is next interrupted;
    /// over epoll a system call asks.)
    #[must_use]
    pub fn tells_at_once(&self) -> bool {
        matches!(&self.inner, Inner::Uring(ring) if ring.tells_at_once())
    }

    /// Returns the descriptor that is most likely readable: the only one that [`Reactor::wait`] reported
    /// last time, if there is something to report again. The caller tries it without asking the ring. If
    /// it finds nothing there, it calls [`Reactor::guessed_wrong`] and asks the ring. Nothing is lost,
    /// because the ring reports the event again when asked, which happens after a few guesses: the
    /// fewer, the larger `took` is, the time since the last guess in units of small requests. (Over
    /// epoll nothing is guessed.)
    pub fn guess(&mut self, took: u32) -> Option<Event> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.has_only_changes().then(|| self.guess.next(took)).flatten(),
            Inner::Epoll(_) => None,
        }
    }

    /// Records that there was nothing to read where [`Reactor::guess`] said.
    pub fn guessed_wrong(&mut self) {
        self.guess.was_wrong();
    }

    /// Waits for changes and appends them to `events`. `None` waits without limit, zero not at all (and,
    /// over io_uring, makes no system call if there is nothing).
    ///
    /// # Errors
    /// What the kernel says; interruptions and timeouts are not errors.
    pub fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> io::Result<()> {
        let before = events.len();
        match &mut self.inner {
            Inner::Uring(ring) => {
                self.waits += u64::from(ring.wait(timeout, events)?);
                self.guess.told(&events[before..]);
                Ok(())
            }
            Inner::Epoll(epoll) => {
                self.waits += u64::from(epoll.wait(timeout, events)?);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn ready(reactor: &mut Reactor, timeout_ms: u64) -> Vec<Event> {
        let mut events = Vec::new();
        reactor.wait(Some(Duration::from_millis(timeout_ms)), &mut events).unwrap();
        events
    }

    fn tells_readiness(engine: Engine) {
        let mut reactor = match Reactor::new(Some(engine)) {
            Ok(reactor) => reactor,
            Err(error) => {
                eprintln!("SKIPPED: {engine:?} cannot be had here: {error}");
                return;
            }
        };
        assert_eq!(reactor.engine(), engine);
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        reactor.watch(near.as_fd(), 7).unwrap();
        // epoll reports it without being asked.
        let first = ready(&mut reactor, 0);
        assert!(first.iter().all(|e| e.token == 7 && e.writable && !e.readable), "{first:?}");
        assert!(!reactor.is_ready());
        tells_room(&mut reactor, &mut near, &mut far);
        for round in 0..100u8 {
            far.write_all(&[round]).unwrap();
            if round % 2 == 0 {
                assert!(reactor.is_ready(), "round {round}");
            }
            let events = ready(&mut reactor, 1000);
            assert!(events.iter().any(|e| e.token == 7 && e.readable), "round {round}: {events:?}");
            let mut byte = [0];
            near.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [round]);
        }
        drop(far);
        assert!(ready(&mut reactor, 1000).iter().any(|e| e.readable));
        reactor.unwatch(near.as_fd(), 7).unwrap();
    }

    /// A full socket is reported when it has room again, each time it was full.
    fn tells_room(reactor: &mut Reactor, near: &mut UnixStream, far: &mut UnixStream) {
        for round in 0..3 {
            let mut sent = 0;
            while let Ok(count) = near.write(&[0; 65536]) {
                sent += count;
            }
            // Asking twice has the same effect as asking once.
            reactor.watch_writable(7).unwrap();
            reactor.watch_writable(7).unwrap();
            let full = ready(reactor, 0);
            assert!(full.iter().all(|e| !e.writable), "round {round}: {full:?}");
            far.read_exact(&mut vec![0; sent]).unwrap();
            let room = ready(reactor, 1000);
            assert!(room.iter().any(|e| e.token == 7 && e.writable), "round {round}: {room:?}");
            assert!(!reactor.is_ready(), "round {round}: told once");
        }
    }

    /// Nor is a full socket reported as having room because its peer sends nothing more.
    fn tells_only_room(engine: Engine) {
        let Ok(mut reactor) = Reactor::new(Some(engine)) else {
            return eprintln!("SKIPPED: {engine:?} cannot be had here");
        };
        let (mut near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        reactor.watch(near.as_fd(), 7).unwrap();
        let mut sent = 0;
        let mut fill = || {
            while let Ok(count) = near.write(&[0; 65536]) {
                sent += count;
            }
            std::mem::take(&mut sent)
        };
        let mut full = fill();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        // The end itself is reported; epoll reports with it that writing fails or not, but only once.
        assert!(ready(&mut reactor, 1000).iter().any(|e| e.token == 7 && e.hung));
        for round in 0..3 {
            reactor.watch_writable(7).unwrap();
            for _ in 0..10 {
                let events = ready(&mut reactor, 0);
                assert!(events.iter().all(|e| !e.writable), "round {round}: {events:?}");
            }
            assert!(!reactor.is_ready(), "round {round}: it may sleep");
            far.read_exact(&mut vec![0; full]).unwrap();
            let room = ready(&mut reactor, 1000);
            assert!(room.iter().any(|e| e.token == 7 && e.writable), "round {round}: {room:?}");
            full = fill();
        }
        reactor.unwatch(near.as_fd(), 7).unwrap();
    }

    #[test]
    fn a_peer_that_sends_nothing_more_makes_no_room() {
        tells_only_room(Engine::Uring);
        tells_only_room(Engine::Epoll);
    }

    /// A peer that only reads causes no event.
    #[test]
    fn a_reading_peer_does_not_wake() {
        let Some(mut reactor) = ring() else { return };
        let (mut near, mut far) = UnixStream::pair().unwrap();
        reactor.watch(near.as_fd(), 7).unwrap();
        assert!(ready(&mut reactor, 0).is_empty());
        near.write_all(&[1]).unwrap();
        far.read_exact(&mut [0]).unwrap();
        assert!(ready(&mut reactor, 0).is_empty());
    }

    /// Returns the ring, or says that there is none here.
    fn ring() -> Option<Reactor> {
        let ring = Reactor::new(Some(Engine::Uring));
        ring.map_err(|error| eprintln!("SKIPPED: no io_uring here: {error}")).ok()
    }

    /// Guessing misses nothing: neither other descriptors nor what the guesses did not find.
    #[test]
    fn a_guess_is_who_was_alone_last_time() {
        let Some(mut reactor) = ring() else { return };
        if !reactor.tells_at_once() {
            return eprintln!("SKIPPED: this kernel's ring does not tell at once");
        }
        let (near, mut far) = UnixStream::pair().unwrap();
        let (other, mut other_far) = UnixStream::pair().unwrap();
        for (socket, token) in [(&near, 7), (&other, 8)] {
            socket.set_nonblocking(true).unwrap();
            reactor.watch(socket.as_fd(), token).unwrap();
        }
        assert!(ready(&mut reactor, 0).is_empty());
        far.write_all(&[1]).unwrap();
        assert_eq!(reactor.guess(1), None, "nobody had news before");
        let tokens = |events: Vec<Event>| events.iter().map(|e| e.token).collect::<Vec<_>>();
        assert_eq!(tokens(ready(&mut reactor, 1000)), [7]);
        assert_eq!(reactor.guess(1), None, "there is no news");
        other_far.write_all(&[1]).unwrap();
        let guess =
            std::iter::from_fn(|| reactor.guess(1)).map(|event| event.token).collect::<Vec<_>>();
        assert!(!guess.is_empty() && guess.iter().all(|token| *token == 7), "{guess:?}");
        far.write_all(&[2]).unwrap();
        let mut both = tokens(ready(&mut reactor, 1000));
        both.sort_unstable();
        assert_eq!(both, [7, 8]);
        other_far.write_all(&[2]).unwrap();
        assert_eq!(reactor.guess(1), None, "two had news");
        assert_eq!(tokens(ready(&mut reactor, 1000)), [8]);
        other_far.write_all(&[3]).unwrap();
        assert_eq!(reactor.guess(1).map(|event| event.token), Some(8));
        reactor.guessed_wrong();
        assert_eq!(reactor.guess(1), None);
        assert_eq!(tokens(ready(&mut reactor, 1000)), [8]);
    }

    #[test]
    fn buffers_are_registered_once_and_used_many_times() {
        let Some(mut reactor) = ring() else { return };
        let pool = towline_mem::Pool::new(4096, 2);
        let file = tempfile::tempfile().unwrap();
        let file = std::sync::Arc::new(std::os::fd::OwnedFd::from(file));
        for round in 0..10u8 {
            for write in [true, false] {
                let mut buffer = pool.take().unwrap();
                buffer.bytes_mut().fill(if write { round } else { 0xee });
                let (file, range) = (file.clone(), 0..4096);
                let transfer = Transfer { file, offset: 0, buffer, range, write, durable: false };
                assert!(reactor.submit(1, transfer).is_ok());
                let mut finished = Vec::new();
                for _ in 0..1000 {
                    ready(&mut reactor, 100);
                    reactor.take_finished(&mut finished);
                    if !finished.is_empty() {
                        break;
                    }
                }
                let done = finished.pop().unwrap();
                assert!(done.registered, "round {round}");
                assert_eq!(done.result.unwrap(), 4096);
                assert!(done.buffer.bytes().iter().all(|byte| *byte == round));
            }
        }
        assert_eq!(reactor.registered_buffers(), 1, "the last buffer given back comes first");
    }

    #[test]
    fn sends_from_memory_tell_when_it_is_free_again() {
        let Some(mut reactor) = ring() else { return };
        if !reactor.sends_zero_copy() {
            return eprintln!("SKIPPED: this kernel's ring has no SEND_ZC");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let near = std::sync::Arc::new(near);
        let data: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
        let mut rest = Aggregate::from_vec(data.clone());
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; 100_000];
            far.read_exact(&mut got).map(|()| got)
        });
        let (mut sends, mut released, mut copied_sends) = (0, 0, 0);
        for _ in 0..1000 {
            if rest.is_empty() && released == sends {
                break;
            }
            let mut taken = rest.is_empty();
            if !taken {
                reactor.send(7, near.as_fd(), near.clone(), rest.clone()).unwrap();
                sends += 1;
            }
            let mut sent = Vec::new();
            for _ in 0..1000 {
                ready(&mut reactor, 100);
                reactor.take_sent(&mut sent);
                for event in sent.drain(..) {
                    match event {
                        Sent::Taken { token, result, released: over } => {
                            assert_eq!(token, 7);
                            taken = true;
                            released += usize::from(over);
                            match result {
                                Ok(count) => rest.advance(count as u64),
                                Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                            }
                        }
                        Sent::Released { token, copied } => {
                            assert_eq!(token, 7);
                            released += 1;
                            copied_sends += usize::from(copied);
                        }
                    }
                }
                if taken {
                    break;
                }
            }
        }
        assert!(reader.join().unwrap().unwrap() == data);
        assert!(sends > 0 && released == sends, "{released} of {sends} are released");
        assert!(copied_sends > 0, "within a machine the kernel copies, and says so");
    }

    #[test]
    fn epoll_tells_readiness() {
        tells_readiness(Engine::Epoll);
    }

    #[test]
    fn uring_tells_readiness() {
        tells_readiness(Engine::Uring);
    }
}
