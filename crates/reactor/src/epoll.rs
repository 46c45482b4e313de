//! The event loop over epoll, which works on every Linux.

use crate::Event;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

pub(crate) struct Epoll {
    fd: OwnedFd,
    /// Events from the kernel that were not passed on yet.
    ready: Vec<epoll::Event>,
}

impl std::fmt::Debug for Epoll {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epoll").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: epoll::create(epoll::CreateFlags::CLOEXEC)?, ready: Vec::with_capacity(256) })
    }

    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.fd, fd, EventData::new_u64(token), flags)?)
    }

    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, fd)?)
    }

    /// Asks the kernel, without waiting, whether there are events.
    pub(crate) fn is_ready(&mut self) -> io::Result<bool> {
        if self.ready.is_empty() {
            self.ask(Some(Duration::ZERO))?;
        }
        Ok(!self.ready.is_empty())
    }

    fn ask(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        let spare = rustix::buffer::spare_capacity(&mut self.ready);
        match epoll::wait(&self.fd, spare, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns true when a system call was made.
    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        let asks = self.ready.is_empty();
        if asks {
            self.ask(timeout)?;
        }
        for event in self.ready.drain(..) {
            let flags = event.flags;
            let hung = EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP;
            events.push(Event {
                token: event.data.u64(),
                readable: flags.intersects(EventFlags::IN | hung),
                writable: flags.intersects(EventFlags::OUT | hung),
                hung: flags.intersects(hung),
            });
        }
        Ok(asks)
    }
}
