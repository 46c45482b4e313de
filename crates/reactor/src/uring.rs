//! The loop over io_uring: multishot polls, one system call to submit and to wait.

use crate::Event;
use crate::disk::{Finished, Transfer};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Set in the user data of a removal; the rest is the number of the poll to be removed.
const REMOVAL: u64 = 1 << 63;
/// Set in the user data of a transfer; the rest is its place in the table.
const TRANSFER: u64 = 1 << 62;

#[derive(Clone, Copy)]
struct Poll {
    token: u64,
    fd: i32,
}

pub(crate) struct Uring {
    ring: IoUring,
    /// Polls by a number of their own: a token may be used again while its old poll is ending.
    polls: HashMap<u64, Poll>,
    numbers: HashMap<u64, u64>,
    next: u64,
    /// Polls that the kernel ended by itself and that have to be armed again.
    rearm: Vec<u64>,
    /// Removals that came while their poll was firing and have to be asked for again.
    remove: Vec<u64>,
    /// Transfers that the kernel works on, which own their buffers here until it is done.
    transfers: Vec<Option<(u64, Transfer)>>,
    free_transfers: Vec<usize>,
    pub(crate) finished: Vec<Finished>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("watched", &self.polls.len()).finish_non_exhaustive()
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
        Ok(Self {
            ring,
            polls: HashMap::new(),
            numbers: HashMap::new(),
            next: 0,
            rearm: Vec::new(),
            remove: Vec::new(),
            transfers: Vec::new(),
            free_transfers: Vec::new(),
            finished: Vec::new(),
        })
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: polls and removals name descriptors and tokens by value. A transfer's buffer
            // and file are kept in `transfers` until its completion, also when the ring is dropped.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    fn arm(&mut self, fd: i32, number: u64) -> io::Result<()> {
        let poll = opcode::PollAdd::new(types::Fd(fd), INTEREST).multi(true).build();
        self.push(&poll.user_data(number))
    }

    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let number = self.next;
        self.next += 1;
        self.polls.insert(number, Poll { token, fd: fd.as_raw_fd() });
        self.numbers.insert(token, number);
        self.arm(fd.as_raw_fd(), number)
    }

    pub(crate) fn unwatch(&mut self, token: u64) -> io::Result<()> {
        let Some(number) = self.numbers.remove(&token) else { return Ok(()) };
        self.polls.remove(&number);
        self.push_removal(number)?;
        // At once: the descriptor is about to be closed, and the poll holds the open file.
        self.ring.submit().map(|_| ())
    }

    fn push_removal(&mut self, number: u64) -> io::Result<()> {
        self.push(&opcode::PollRemove::new(number).build().user_data(REMOVAL | number))
    }

    pub(crate) fn submit(&mut self, token: u64, mut transfer: Transfer) -> Result<(), Transfer> {
        let fd = types::Fd(transfer.file.as_raw_fd());
        let part = transfer.part();
        let Ok(length) = u32::try_from(part.len()) else { return Err(transfer) };
        let entry = if transfer.write {
            let flags = if transfer.durable { libc::RWF_DSYNC } else { 0 };
            let entry = opcode::Write::new(fd, part.as_ptr(), length).offset(transfer.offset);
            entry.rw_flags(flags).build()
        } else {
            let part = transfer.part_mut();
            opcode::Read::new(fd, part.as_mut_ptr(), length).offset(transfer.offset).build()
        };
        let place = self.free_transfers.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        if self.push(&entry.user_data(TRANSFER | place as u64)).is_err() {
            self.free_transfers.push(place);
            return Err(transfer);
        }
        self.transfers[place] = Some((token, transfer));
        Ok(())
    }

    fn transferred(
        transfers: &mut [Option<(u64, Transfer)>],
        free: &mut Vec<usize>,
        place: usize,
        result: i32,
    ) -> Option<Finished> {
        let (token, transfer) = transfers.get_mut(place)?.take()?;
        free.push(place);
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some(Finished { token, result, buffer: transfer.buffer })
    }

    /// Returns true when a system call was made.
    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        for number in std::mem::take(&mut self.rearm) {
            if let Some(poll) = self.polls.get(&number).copied() {
                self.arm(poll.fd, number)?;
            }
        }
        for number in std::mem::take(&mut self.remove) {
            self.push_removal(number)?;
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
            let number = completion.user_data();
            if number & TRANSFER != 0 && number & REMOVAL == 0 {
                let place = (number & !TRANSFER) as usize;
                let result = completion.result();
                let (transfers, free) = (&mut self.transfers, &mut self.free_transfers);
                self.finished.extend(Self::transferred(transfers, free, place, result));
                continue;
            }
            if number & REMOVAL != 0 {
                if completion.result() == -libc::EALREADY {
                    self.remove.push(number & !REMOVAL);
                }
                continue;
            }
            let Some(&Poll { token, .. }) = self.polls.get(&number) else { continue };
            if !cqueue::more(completion.flags()) {
                self.rearm.push(number);
            }
            let result = completion.result();
            if result < 0 {
                if -result == libc::ECANCELED {
                    continue;
                }
                events.push(Event { token, readable: true, writable: true, hung: true });
                continue;
            }
            let hung = libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP;
            let flags = result as i16;
            events.push(Event {
                token,
                readable: flags & (libc::POLLIN | hung) != 0,
                writable: flags & (libc::POLLOUT | hung) != 0,
                hung: flags & hung != 0,
            });
        }
        Ok(true)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may still write to the buffers: they go when it is done with them.
        while self.transfers.iter().any(Option::is_some) {
            let done = match self.ring.submit_and_wait(1) {
                Ok(_) => self.ring.completion().map(|c| c.user_data()).collect::<Vec<_>>(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => {
                    // Leaking them is the only safe thing left.
                    std::mem::forget(std::mem::take(&mut self.transfers));
                    return;
                }
            };
            for number in done {
                if number & TRANSFER != 0 && number & REMOVAL == 0 {
                    self.transfers[(number & !TRANSFER) as usize] = None;
                }
            }
        }
    }
}
