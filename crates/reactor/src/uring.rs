//! The loop over io_uring: multishot polls, one system call to submit and to wait.

use crate::Event;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Token of requests whose completion means nothing (removals).
const IGNORED: u64 = u64::MAX;

#[derive(Debug, Default)]
struct Watched {
    fds: std::collections::HashMap<u64, i32>,
}

pub(crate) struct Uring {
    ring: IoUring,
    watched: Watched,
    /// Polls that the kernel ended by itself and that have to be armed again.
    rearm: Vec<u64>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("watched", &self.watched.fds.len()).finish_non_exhaustive()
    }
}

/// `IORING_ENTER_GETEVENTS` of the kernel's interface.
const ENTER_GETEVENTS: u32 = 1;

const INTEREST: u32 = (libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP) as u32;

impl Uring {
    pub(crate) fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(4096)
            .build(256)
            .or_else(|_| IoUring::builder().setup_cqsize(4096).build(256))?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self { ring, watched: Watched::default(), rearm: Vec::new() })
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: every entry pushed here is a poll or a removal, which name descriptors and
            // tokens by value and refer to no memory of ours.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    fn arm(&mut self, fd: i32, token: u64) -> io::Result<()> {
        let poll = opcode::PollAdd::new(types::Fd(fd), INTEREST).multi(true).build();
        self.push(&poll.user_data(token))
    }

    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.watched.fds.insert(token, fd.as_raw_fd());
        self.arm(fd.as_raw_fd(), token)
    }

    pub(crate) fn unwatch(&mut self, token: u64) -> io::Result<()> {
        self.watched.fds.remove(&token);
        self.push(&opcode::PollRemove::new(token).build().user_data(IGNORED))?;
        // At once: the descriptor is about to be closed, and the poll holds the open file.
        self.ring.submit().map(|_| ())
    }

    /// Returns true when a system call was made.
    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        for token in std::mem::take(&mut self.rearm) {
            if let Some(fd) = self.watched.fds.get(&token).copied() {
                self.arm(fd, token)?;
            }
        }
        let entered = match timeout {
            Some(Duration::ZERO) => {
                let pending = self.ring.submission().len() as u32;
                // SAFETY: no argument is passed, and the queue's entries are as `push` says.
                // Deferred work runs only inside `io_uring_enter` that asks for events.
                unsafe { self.ring.submitter().enter::<()>(pending, 0, ENTER_GETEVENTS, None) }
            }
            Some(limit) => {
                let limit = types::Timespec::from(limit);
                let arguments = types::SubmitArgs::new().timespec(&limit);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
            None => self.ring.submitter().submit_and_wait(1),
        };
        match entered {
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) => {}
            Err(error) => return Err(error),
        }
        for completion in self.ring.completion() {
            let token = completion.user_data();
            if token == IGNORED || !self.watched.fds.contains_key(&token) {
                continue;
            }
            if !cqueue::more(completion.flags()) {
                self.rearm.push(token);
            }
            let result = completion.result();
            if result < 0 {
                if -result == libc::ECANCELED {
                    continue;
                }
                events.push(Event { token, readable: true, writable: true });
                continue;
            }
            let hung = libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP;
            let flags = result as i16;
            events.push(Event {
                token,
                readable: flags & (libc::POLLIN | hung) != 0,
                writable: flags & (libc::POLLOUT | hung) != 0,
            });
        }
        Ok(true)
    }
}
