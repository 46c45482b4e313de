//! A connection, over any kind of transport.

use crate::address::is_within_machine;
use crate::local::LocalLink;
use crate::socket::{self, Piece, Wait};
use crate::{Counters, Pipe, ShmLink, Spin, Target};
use rustix::event::PollFlags;
use rustix::net::sockopt::socket_incoming_cpu;
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkKind {
    /// TCP.
    Tcp,
    /// A Unix stream socket.
    Unix,
    /// Shared memory.
    Shm,
    /// Queues inside the process.
    Local,
}

/// A connected stream of bytes whose operations never wait unless they say so.
#[derive(Debug)]
#[non_exhaustive]
pub enum Link {
    /// A TCP or Unix stream socket.
    Socket(OwnedFd, LinkKind),
    /// Rings in shared memory.
    Shm(Box<ShmLink>),
    /// Queues in this process.
    Local(LocalLink),
}

impl Link {
    /// Returns the kind of the link.
    #[must_use]
    pub fn kind(&self) -> LinkKind {
        match self {
            Self::Socket(_, kind) => *kind,
            Self::Shm(_) => LinkKind::Shm,
            Self::Local(_) => LinkKind::Local,
        }
    }

    /// Returns the descriptor to watch: the socket, or the socket that accompanies shared memory.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(fd, _) => Some(fd.as_fd()),
            Self::Shm(link) => Some(link.socket().as_fd()),
            Self::Local(_) => None,
        }
    }

    /// Returns the processor on which the bytes of a TCP connection arrived last: where the client runs, if it is on
    /// this machine, else where the interrupts of the network card are handled. `None` for other links, whose clients
    /// can tell ([`Kind::Processor`](towline_wire::Kind::Processor)). Costs a system call (`SO_INCOMING_CPU`, socket(7)).
    #[must_use]
    pub fn arrives_on(&self) -> Option<u32> {
        let Self::Socket(fd, LinkKind::Tcp) = self else { return None };
        // The kernel says -1 while it does not know.
        socket_incoming_cpu(fd).ok().filter(|processor| *processor != u32::MAX)
    }

    /// True when the peer of a TCP connection ran on this processor when it last sent something. Costs up to three
    /// system calls.
    fn peer_runs_here(&self) -> bool {
        self.arrives_on() == Some(rustix::thread::sched_getcpu() as u32) && is_within_machine(self)
    }

    /// True when the peer has closed its end or is gone. Data that it sent before may still be unread.
    /// Costs a system call.
    #[must_use]
    pub fn peer_closed(&self) -> bool {
        self.fd().is_some_and(socket::peer_closed)
    }

    /// Receives into `target`; zero bytes mean that the peer closed the link.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing, and what the socket says.
    pub fn receive(&self, target: &mut [u8], counters: &Counters) -> io::Result<usize> {
        self.receive_to(&mut Target::Own(target), counters)
    }

    /// Like [`Link::receive`], into memory of any kind.
    ///
    /// # Errors
    /// See [`Link::receive`].
    pub fn receive_to(&self, target: &mut Target<'_>, counters: &Counters) -> io::Result<usize> {
        let count = match self {
            Self::Socket(fd, _) => {
                Counters::add(&counters.system_calls, 1);
                socket::receive(fd.as_fd(), target, Wait::No)?
            }
            Self::Shm(link) => link.receive(target)?,
            Self::Local(link) => link.receive(target, false)?,
        };
        Counters::add(&counters.bytes_received, count as u64);
        Ok(count)
    }

    /// Like [`Link::receive_to`], but bytes that follow go to `ahead`; returns the number of bytes in
    /// both together. Only sockets receive into `ahead`, with the same system call.
    ///
    /// # Errors
    /// See [`Link::receive`].
    pub fn receive_ahead(
        &self,
        target: &mut Target<'_>,
        ahead: &mut [u8],
        counters: &Counters,
    ) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return self.receive_to(target, counters) };
        Counters::add(&counters.system_calls, 1);
        let count = socket::receive_two(fd.as_fd(), target, ahead)?;
        Counters::add(&counters.bytes_received, count as u64);
        Ok(count)
    }

    /// Makes each later [`Link::look`] start where the last one ended.
    pub(crate) fn begin_to_look(&self) -> io::Result<()> {
        self.fd().map_or(Err(io::ErrorKind::Unsupported.into()), socket::begin_to_look)
    }

    /// Like [`Link::receive`], but leaves the data in the socket.
    pub(crate) fn look(&self, target: &mut [u8], counters: &Counters) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        Counters::add(&counters.system_calls, 1);
        let count = socket::look(fd.as_fd(), target)?;
        Counters::add(&counters.bytes_received, count as u64);
        Ok(count)
    }

    /// Removes data from a socket that [`Link::look`] has returned, and counted, before.
    pub(crate) fn take(&self, target: &mut [u8], counters: &Counters) -> io::Result<usize> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        Counters::add(&counters.system_calls, 1);
        socket::receive(fd.as_fd(), &mut Target::Own(target), Wait::No)
    }

    /// Returns all that can be received, and leaves it in the socket. If [`Link::begin_to_look`] was
    /// called, only what was not looked at; call it again then.
    pub(crate) fn unread(&self, counters: &Counters) -> io::Result<Vec<u8>> {
        let Self::Socket(fd, _) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        Counters::add(&counters.system_calls, 2);
        let mut unread = vec![0; rustix::io::ioctl_fionread(fd)? as usize];
        if !unread.is_empty() {
            let count = socket::look(fd.as_fd(), &mut unread)?;
            unread.truncate(count);
        }
        Ok(unread)
    }

    /// Receives at least one byte, waiting for it; spins first where that helps. Zero bytes mean that
    /// the peer closed the link. With `full`, a socket waits without spinning until all of `target` is
    /// filled or the peer closes: one wake-up for many bytes costs less than a system call for each
    /// packet.
    ///
    /// # Errors
    /// What the socket says.
    pub fn receive_wait(
        &self,
        target: &mut Target<'_>,
        spin: &mut Spin,
        full: bool,
    ) -> io::Result<usize> {
        match self {
            Self::Socket(fd, _) => {
                if !full
                    && let Some(received) = spin.unless(
                        || self.peer_runs_here(),
                        || {
                            let received = socket::receive(fd.as_fd(), target, Wait::No);
                            (!received.as_ref().is_err_and(socket::is_nothing)).then_some(received)
                        },
                    )
                {
                    return received;
                }
                let wait = if full { Wait::Full } else { Wait::Any };
                loop {
                    match socket::receive(fd.as_fd(), target, wait) {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            self.poll(PollFlags::IN, None)?;
                        }
                        other => return other,
                    }
                }
            }
            Self::Shm(link) => loop {
                match link.receive(target) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        link.wait_readable(spin)?;
                    }
                    other => return other,
                }
            },
            Self::Local(link) => link.receive(target, true),
        }
    }

    /// Waits until sending may succeed, for at most about `limit`; over shared memory, for at most 100 ms.
    ///
    /// # Errors
    /// The peer is gone.
    pub fn wait_writable(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Socket(..) => self.poll(PollFlags::OUT, limit),
            Self::Shm(link) => link.wait_writable(),
            Self::Local(link) => {
                link.wait_writable();
                Ok(())
            }
        }
    }

    fn poll(&self, flags: PollFlags, limit: Option<Duration>) -> io::Result<()> {
        self.fd().map_or(Ok(()), |fd| socket::wait(fd, flags, limit))
    }

    /// Sends as many bytes of the parts as the link takes without waiting; returns how many.
    ///
    /// # Errors
    /// `WouldBlock` when it takes none, and what the socket says.
    pub fn send(&self, parts: &[&[u8]], counters: &Counters) -> io::Result<usize> {
        if let [part] | [part, []] = parts {
            return self.send_pieces(&[Piece::of(part)], false, counters);
        }
        let pieces: SmallVec<[Piece; 8]> =
            parts.iter().filter(|part| !part.is_empty()).map(|part| Piece::of(part)).collect();
        self.send_pieces(&pieces, false, counters)
    }

    /// Waits until the link can be read, for at most about `limit`; over shared memory, for at most 100 ms.
    ///
    /// # Errors
    /// The peer is gone.
    pub fn wait_readable(&self, limit: Duration) -> io::Result<()> {
        match self {
            Self::Socket(..) => self.poll(PollFlags::IN, Some(limit)),
            Self::Shm(link) => link.wait_readable(&mut Spin::new(Duration::ZERO)),
            Self::Local(_) => {
                std::thread::yield_now();
                Ok(())
            }
        }
    }

    /// Waits until the link can be read or written, for at most about `limit`; over shared memory, for
    /// at most 100 ms.
    ///
    /// # Errors
    /// The peer is gone.
    pub fn wait_either(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Socket(..) => self.poll(PollFlags::IN | PollFlags::OUT, limit),
            Self::Shm(link) => link.wait_either(),
            Self::Local(_) => {
                std::thread::yield_now();
                Ok(())
            }
        }
    }

    pub(crate) fn send_pieces(
        &self,
        pieces: &[Piece],
        more: bool,
        counters: &Counters,
    ) -> io::Result<usize> {
        let count = match self {
            Self::Socket(fd, _) => {
                Counters::add(&counters.system_calls, 1);
                socket::send_pieces(fd.as_fd(), pieces, more)?
            }
            Self::Shm(link) => link.send_pieces(pieces, more)?,
            Self::Local(link) => {
                let mut bytes = Vec::new();
                for piece in pieces {
                    piece.extend(&mut bytes);
                }
                link.send(&bytes)?
            }
        };
        Counters::add(&counters.bytes_sent_copied, count as u64);
        Ok(count)
    }

    /// Sends bytes of a file that are not in the memory of this process: sockets take its pages by reference,
    /// and shared memory has them copied into its ring. Zero: the file ends at or before `offset`.
    ///
    /// # Errors
    /// `Unsupported` by links inside of a process; that of the file or of the link.
    pub(crate) fn send_file(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        pipe: &mut Pipe,
        counters: &Counters,
    ) -> io::Result<usize> {
        let (fd, kind) = match self {
            Self::Socket(fd, kind) => (fd, kind),
            Self::Shm(link) => {
                let sent = link.send_file(file, offset, length);
                let is_full = matches!(&sent, Err(e) if e.kind() == io::ErrorKind::WouldBlock);
                Counters::add(&counters.system_calls, u64::from(!is_full));
                let count = sent?;
                Counters::add(&counters.bytes_sent_copied, count as u64);
                return Ok(count);
            }
            Self::Local(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        // A Unix socket takes little at once, so that most of what the pipe holds would be found again.
        let mut none = Pipe::none();
        let pipe = if *kind == LinkKind::Tcp { pipe } else { &mut none };
        let mut calls = 0;
        let sent = pipe.send(fd.as_fd(), file, offset, length, &mut calls);
        Counters::add(&counters.system_calls, calls);
        let count = sent?;
        Counters::add(&counters.bytes_sent_file, count as u64);
        Ok(count)
    }

    /// True when file pages can be sent by reference.
    pub(crate) fn sends_files(&self) -> bool {
        matches!(self, Self::Socket(..))
    }
}
