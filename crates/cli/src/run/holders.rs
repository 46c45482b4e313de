//! Watches the processes that have record locks with pidfds, which report their end. A server sees a killed
//! process only as a lost connection, which may come back, and keeps its locks for a while.
//!
//! Processes that want to watch files, or a connection, send their questions to the same socket, and what they list in
//! watched directories.

use super::directory::RunDirectory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use towline_instance::KEEPER;
use towline_instance::ready::Want;
use towline_instance::watches::{ASK_BYTES_MAX, Ask, LISTED_BYTES_MAX, Listed};
use towline_net::{Wait, receive_descriptors};

/// All processes that have registered. Before its first lock, each sends itself as an owner of locks together with a
/// descriptor of itself (`pidfd_open(2)`).
pub(super) struct Holders {
    socket: OwnedFd,
    known: Vec<(u64, OwnedFd)>,
    /// Questions, each with the descriptor that its answer is written to.
    asks: Vec<(Ask, OwnedFd)>,
    /// As above.
    wants: Vec<(Want, OwnedFd)>,
    /// What programs found in watched directories.
    listed: Vec<Listed>,
}

const _: () = assert!(ASK_BYTES_MAX <= LISTED_BYTES_MAX);

/// Returns true if the kernel reports the ends of processes (Linux 5.3).
pub(super) fn can_watch() -> bool {
    pidfd_open(getpid(), PidfdFlags::empty()).is_ok()
}

impl Holders {
    /// Starts to listen.
    pub(super) fn start(directory: &RunDirectory) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(directory.path().join(KEEPER))?)?;
        let (known, asks, wants, listed) = Default::default();
        Ok(Self { socket, known, asks, wants, listed })
    }

    /// Returns the descriptors that become readable when a process registers, asks or ends.
    pub(super) fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let known = self.known.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN));
        known.chain([self.event()])
    }

    /// Returns the one of them that becomes readable when a process registers or asks.
    pub(super) fn event(&self) -> PollFd<'_> {
        PollFd::new(&self.socket, PollFlags::IN)
    }

    /// Returns the processes that have ended since the last call, as owners of locks.
    pub(super) fn ended(&mut self) -> Vec<u64> {
        self.meet();
        if self.known.is_empty() {
            return Vec::new();
        }
        let mut wait: Vec<_> =
            self.known.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        if !poll(&mut wait, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return Vec::new();
        }
        let ended: Vec<bool> = wait.iter().map(|one| !one.revents().is_empty()).collect();
        let mut ended = ended.into_iter();
        let gone = self.known.extract_if(.., |_| ended.next().unwrap_or(false));
        gone.map(|(number, _)| number).collect()
    }

    /// Returns the questions that had arrived at the last call of [`Holders::ended`], each with the
    /// descriptor for its answer.
    pub(super) fn asks(&mut self) -> Vec<(Ask, OwnedFd)> {
        std::mem::take(&mut self.asks)
    }

    /// Returns the questions for connections that had arrived then.
    pub(super) fn wants(&mut self) -> Vec<(Want, OwnedFd)> {
        std::mem::take(&mut self.wants)
    }

    /// Returns what programs had said by then that they found in watched directories.
    pub(super) fn listed(&mut self) -> Vec<Listed> {
        std::mem::take(&mut self.listed)
    }

    fn meet(&mut self) {
        let mut packet = [0; LISTED_BYTES_MAX];
        while let Ok((count, fds)) = receive_descriptors(self.socket.as_fd(), &mut packet, Wait::No)
        {
            let Some(fd) = fds.into_iter().next() else {
                self.listed.extend(Listed::parse(&packet[..count]));
                continue;
            };
            if let Ok(number) = <[u8; 8]>::try_from(&packet[..count]) {
                if self.known.is_empty() {
                    // Each process takes one descriptor. Programs have been started already and do not
                    // inherit the raised limit.
                    crate::descriptors::raise_limit();
                }
                self.known.push((u64::from_ne_bytes(number), fd));
            } else if let Some(want) = Want::parse(&packet[..count]) {
                self.wants.push((want, fd));
            } else if let Some(ask) = Ask::parse(&packet[..count]) {
                self.asks.push((ask, fd));
            }
        }
    }
}
