//! One event loop per core: tells which descriptors became ready, over io_uring or, where that is
//! forbidden, over epoll.
//!
//! Readiness is told once for each change (edge-triggered), so a user reads or writes until the
//! kernel says `EAGAIN` or moves fewer bytes than asked. The data itself is moved by system calls
//! that do not wait: on the sockets of this project a send or receive tried at once nearly always
//! succeeds, and one buffer per core then serves all connections instead of one posted per lane.
//!
//! Files are another matter: reading one waits for a device. [`Reactor::submit`] gives such a
//! [`Transfer`] to the ring, with the buffer that it owns until it is [`Finished`].

mod disk;
mod epoll;
#[allow(unsafe_code)] // pushing to the submission queue
mod uring;

pub use disk::{Finished, Transfer};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How the loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// io_uring with multishot polls.
    Uring,
    /// epoll, everywhere.
    Epoll,
}

/// A change of readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What the descriptor was watched under.
    pub token: u64,
    /// Reading may succeed (also: the peer closed).
    pub readable: bool,
    /// Writing may succeed.
    pub writable: bool,
    /// The peer sends nothing more: what can be read ends, and no further event will say so.
    pub hung: bool,
}

/// An event loop. Belongs to the thread that made it.
#[derive(Debug)]
pub struct Reactor {
    inner: Inner,
    waits: u64,
}

#[derive(Debug)]
enum Inner {
    Uring(Box<uring::Uring>),
    Epoll(epoll::Epoll),
}

impl Reactor {
    /// A loop on the engine asked for; without a wish io_uring, or epoll when the kernel refuses.
    ///
    /// # Errors
    /// The engine asked for cannot be had: `EPERM` or `ENOSYS` where io_uring is switched off.
    pub fn new(wish: Option<Engine>) -> io::Result<Self> {
        let inner = match wish {
            Some(Engine::Epoll) => Inner::Epoll(epoll::Epoll::new()?),
            Some(Engine::Uring) => Inner::Uring(Box::new(uring::Uring::new()?)),
            None => match uring::Uring::new() {
                Ok(ring) => Inner::Uring(Box::new(ring)),
                Err(_) => Inner::Epoll(epoll::Epoll::new()?),
            },
        };
        Ok(Self { inner, waits: 0 })
    }

    /// The engine in use.
    #[must_use]
    pub fn engine(&self) -> Engine {
        match self.inner {
            Inner::Uring(_) => Engine::Uring,
            Inner::Epoll(_) => Engine::Epoll,
        }
    }

    /// System calls made to wait or to change what is watched, so far.
    #[must_use]
    pub fn system_calls(&self) -> u64 {
        self.waits
    }

    /// Watches a descriptor until [`Reactor::unwatch`]; `token` must not be in use and not be
    /// `u64::MAX`.
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

    /// Stops watching; call it before the descriptor is closed. Events already on their way may
    /// still be told.
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

    /// Begins to read or write a file, on the ring; nothing is submitted before the next
    /// [`Reactor::wait`]. The transfer owns its buffer until it is finished.
    ///
    /// # Errors
    /// The transfer comes back where there is no ring, or when the ring is broken.
    pub fn submit(&mut self, token: u64, transfer: Transfer) -> Result<(), Transfer> {
        match &mut self.inner {
            Inner::Uring(ring) => ring.submit(token, transfer),
            Inner::Epoll(_) => Err(transfer),
        }
    }

    /// Moves the transfers that finished since the last call to `finished`.
    pub fn take_finished(&mut self, finished: &mut Vec<Finished>) {
        if let Inner::Uring(ring) = &mut self.inner {
            finished.append(&mut ring.finished);
        }
    }

    /// Waits for changes and appends them to `events`; `None` waits without end, zero not at all.
    ///
    /// # Errors
    /// What the kernel says; interruptions and time-outs are no errors.
    pub fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> io::Result<()> {
        match &mut self.inner {
            Inner::Uring(ring) => {
                self.waits += u64::from(ring.wait(timeout, events)?);
                Ok(())
            }
            Inner::Epoll(epoll) => {
                self.waits += 1;
                epoll.wait(timeout, events)
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
        let first = ready(&mut reactor, 1000);
        assert!(first.iter().all(|e| e.token == 7 && e.writable && !e.readable), "{first:?}");
        for round in 0..100u8 {
            far.write_all(&[round]).unwrap();
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

    #[test]
    fn epoll_tells_readiness() {
        tells_readiness(Engine::Epoll);
    }

    #[test]
    fn uring_tells_readiness() {
        tells_readiness(Engine::Uring);
    }
}
