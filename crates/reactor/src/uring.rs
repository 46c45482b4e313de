//! The event loop over io_uring: multishot polls, and one system call to submit and wait.

use crate::Event;
use crate::disk::{Finished, Transfer};
use crate::registered::Registered;
use crate::send::{Gathered, Sent};
use foldhash::fast::RandomState;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Set in the user data of a removal; the rest identifies the poll to remove.
const REMOVAL: u64 = 1 << 63;
/// Set in the user data of a transfer; the rest is its place in the table.
const TRANSFER: u64 = 1 << 62;
/// Set in the user data of a send; the rest is its place in the table.
const SEND: u64 = 1 << 61;
/// Set in the user data of a poll for writability; the rest is the number of the descriptor's main poll.
const WRITABLE: u64 = 1 << 60;

#[derive(Clone, Copy)]
struct Poll {
    token: u64,
    fd: i32,
    /// A poll for writability is active, or will be with the next wait.
    writable: bool,
}

pub(crate) struct Uring {
    ring: IoUring,
    /// Polls by a unique number, because a token may be used again while its old poll is still ending.
    polls: HashMap<u64, Poll, RandomState>,
    numbers: HashMap<u64, u64, RandomState>,
    next: u64,
    /// Polls that the kernel ended and that have to be armed again.
    rearm: Vec<u64>,
    /// Removals that failed because their poll was firing, and have to be repeated.
    remove: Vec<u64>,
    /// Transfers that the kernel works on; they own their buffers until it is done.
    transfers: Vec<Option<UnderWay>>,
    free_transfers: Vec<usize>,
    pub(crate) finished: Vec<Finished>,
    registered: Registered,
    /// Sends that the kernel refers to; they own their bytes until it releases them.
    sends: Vec<Option<(u64, Gathered)>>,
    free_sends: Vec<usize>,
    pub(crate) sent: Vec<Sent>,
    /// The kernel supports zero-copy sends.
    sends_zero_copy: bool,
    /// The kernel signals events in the ring's memory as they happen.
    tells_at_once: bool,
}

struct UnderWay {
    token: u64,
    transfer: Transfer,
    registered: bool,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("watched", &self.polls.len()).finish_non_exhaustive()
    }
}

/// `IORING_ENTER_GETEVENTS` of the kernel's interface.
const ENTER_GETEVENTS: u32 = 1;

/// `IORING_SEND_ZC_REPORT_USAGE` and `IORING_NOTIF_USAGE_ZC_COPIED` of the same interface.
const SEND_ZC_REPORT_USAGE: u16 = 1 << 3;
const NOTIF_USAGE_ZC_COPIED: u32 = 1 << 31;

const INTEREST: u32 = (libc::POLLIN | libc::POLLRDHUP) as u32;
/// What a poll for writability is about. The kernel adds that the peer sends nothing more.
const ROOM: i16 = libc::POLLOUT | libc::POLLHUP | libc::POLLERR;

impl Uring {
    pub(crate) fn new() -> io::Result<Self> {
        let deferring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(4096)
            .build(256);
        let tells_at_once = deferring.is_ok();
        let ring = deferring.or_else(|_| IoUring::builder().setup_cqsize(4096).build(256))?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        // A filter of system calls may allow making a ring but not using it.
        ring.submit()?;
        let mut probe = io_uring::Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let sends_zero_copy = probed && probe.is_supported(opcode::SendMsgZc::CODE);
        Ok(Self {
            ring,
            polls: HashMap::default(),
            numbers: HashMap::default(),
            next: 0,
            rearm: Vec::new(),
            remove: Vec::new(),
            transfers: Vec::new(),
            free_transfers: Vec::new(),
            finished: Vec::new(),
            registered: Registered::default(),
            sends: Vec::new(),
            free_sends: Vec::new(),
            sent: Vec::new(),
            sends_zero_copy,
            tells_at_once,
        })
    }

    pub(crate) fn tells_at_once(&self) -> bool {
        self.tells_at_once
    }

    /// Adds an entry to the submission queue; submits the queue if it is full.
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: polls and removals name descriptors and tokens by value. A transfer's buffer and
            // file are kept in `transfers` until its completion, also when the ring is dropped. A send's
            // bytes and the list of their addresses are kept in `sends` until the kernel releases them;
            // the kernel only reads them, and holds their pages itself if the ring is dropped before.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    fn arm(&mut self, fd: i32, number: u64) -> io::Result<()> {
        let events = if number & WRITABLE != 0 { libc::POLLOUT as u32 } else { INTEREST };
        let poll = opcode::PollAdd::new(types::Fd(fd), events).multi(true).build();
        self.push(&poll.user_data(number))
    }

    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let number = self.next;
        self.next += 1;
        self.polls.insert(number, Poll { token, fd: fd.as_raw_fd(), writable: false });
        self.numbers.insert(token, number);
        self.arm(fd.as_raw_fd(), number)
    }

    pub(crate) fn watch_writable(&mut self, token: u64) -> io::Result<()> {
        let Some(number) = self.numbers.get(&token).copied() else { return Ok(()) };
        let Some(poll) = self.polls.get_mut(&number) else { return Ok(()) };
        if std::mem::replace(&mut poll.writable, true) {
            return Ok(());
        }
        let once = opcode::PollAdd::new(types::Fd(poll.fd), libc::POLLOUT as u32).build();
        self.push(&once.user_data(WRITABLE | number))
    }

    pub(crate) fn unwatch(&mut self, token: u64) -> io::Result<()> {
        let Some(number) = self.numbers.remove(&token) else { return Ok(()) };
        if self.polls.remove(&number).is_some_and(|poll| poll.writable) {
            self.push_removal(WRITABLE | number)?;
        }
        self.push_removal(number)?;
        // Submit now: the descriptor is about to be closed, and the poll holds the open file.
        self.ring.submit().map(|_| ())
    }

    fn push_removal(&mut self, number: u64) -> io::Result<()> {
        self.push(&opcode::PollRemove::new(number).build().user_data(REMOVAL | number))
    }

    pub(crate) fn submit(&mut self, token: u64, mut transfer: Transfer) -> Result<(), Transfer> {
        let fd = types::Fd(transfer.file.as_raw_fd());
        let Ok(length) = u32::try_from(transfer.part().len()) else { return Err(transfer) };
        let fixed = self.registered.place(&self.ring, &mut transfer.buffer);
        let offset = transfer.offset;
        let flags = if transfer.durable { libc::RWF_DSYNC } else { 0 };
        let entry = if transfer.write {
            let from = transfer.part().as_ptr();
            match fixed {
                Some(place) => opcode::WriteFixed::new(fd, from, length, place)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
                None => opcode::Write::new(fd, from, length).offset(offset).rw_flags(flags).build(),
            }
        } else {
            let to = transfer.part_mut().as_mut_ptr();
            match fixed {
                Some(place) => opcode::ReadFixed::new(fd, to, length, place).offset(offset).build(),
                None => opcode::Read::new(fd, to, length).offset(offset).build(),
            }
        };
        let place = self.free_transfers.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        if self.push(&entry.user_data(TRANSFER | place as u64)).is_err() {
            self.free_transfers.push(place);
            return Err(transfer);
        }
        let registered = fixed.is_some();
        self.transfers[place] = Some(UnderWay { token, transfer, registered });
        Ok(())
    }

    /// Returns the number of buffers registered with the ring.
    pub(crate) fn registered_buffers(&self) -> usize {
        self.registered.len()
    }

    fn transferred(
        transfers: &mut [Option<UnderWay>],
        free: &mut Vec<usize>,
        place: usize,
        result: i32,
    ) -> Option<Finished> {
        let UnderWay { token, transfer, registered } = transfers.get_mut(place)?.take()?;
        free.push(place);
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some(Finished { token, result, buffer: transfer.buffer, registered })
    }

    pub(crate) fn sends_zero_copy(&self) -> bool {
        self.sends_zero_copy
    }

    pub(crate) fn send(
        &mut self,
        token: u64,
        socket: BorrowedFd<'_>,
        gathered: Gathered,
    ) -> io::Result<()> {
        let entry = opcode::SendMsgZc::new(types::Fd(socket.as_raw_fd()), gathered.message())
            .flags((libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as u32)
            .ioprio(SEND_ZC_REPORT_USAGE)
            .build();
        let place = self.free_sends.pop().unwrap_or_else(|| {
            self.sends.push(None);
            self.sends.len() - 1
        });
        // Before the push, because from then on the kernel may read it.
        self.sends[place] = Some((token, gathered));
        let pushed = self.push(&entry.user_data(SEND | place as u64));
        if pushed.is_err() {
            self.sends[place] = None;
            self.free_sends.push(place);
        }
        pushed
    }

    /// Handles a completion of a send, and drops its bytes with the last one.
    fn send_completed(
        sends: &mut [Option<(u64, Gathered)>],
        free: &mut Vec<usize>,
        completion: &cqueue::Entry,
    ) -> Option<Sent> {
        let place = (completion.user_data() & !SEND) as usize;
        let (flags, result) = (completion.flags(), completion.result());
        let token = sends.get(place)?.as_ref()?.0;
        let over = cqueue::notif(flags) || !cqueue::more(flags);
        if over {
            sends[place] = None;
            free.push(place);
        }
        Some(if cqueue::notif(flags) {
            Sent::Released { token, copied: result as u32 & NOTIF_USAGE_ZC_COPIED != 0 }
        } else {
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            Sent::Taken { token, result, released: over }
        })
    }

    /// True when there is something to submit or to receive.
    pub(crate) fn is_ready(&mut self) -> bool {
        if !self.rearm.is_empty() || !self.remove.is_empty() {
            return true;
        }
        let submission = self.ring.submission();
        // Deferred work produces completions only in the next `io_uring_enter`; until then there is only
        // this flag.
        let news = submission.taskrun() || submission.cq_overflow() || !submission.is_empty();
        drop(submission);
        news || !self.ring.completion().is_empty()
    }

    /// True when the kernel has something to report and it can only be changes of readiness.
    pub(crate) fn has_only_changes(&mut self) -> bool {
        let idle = |places: usize, free: &[usize]| places == free.len();
        if !self.rearm.is_empty()
            || !self.remove.is_empty()
            || !idle(self.transfers.len(), &self.free_transfers)
            || !idle(self.sends.len(), &self.free_sends)
        {
            return false;
        }
        let submission = self.ring.submission();
        submission.taskrun() && !submission.cq_overflow() && submission.is_empty()
    }

    /// Returns true when a system call was made.
    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<bool> {
        if timeout == Some(Duration::ZERO) && !self.is_ready() {
            return Ok(false);
        }
        for number in std::mem::take(&mut self.rearm) {
            if let Some(poll) = self.polls.get(&(number & !WRITABLE)).copied() {
                self.arm(poll.fd, number)?;
            }
        }
        for number in std::mem::take(&mut self.remove) {
            self.push_removal(number)?;
        }
        let entered = match timeout {
            Some(Duration::ZERO) => {
                let pending = self.ring.submission().len() as u32;
                // SAFETY: no argument is passed, and the queue's entries are valid as `push` explains.
                // Deferred work runs only in an `io_uring_enter` that asks for events.
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
            if number & SEND != 0 && number & REMOVAL == 0 {
                let (sends, free) = (&mut self.sends, &mut self.free_sends);
                self.sent.extend(Self::send_completed(sends, free, &completion));
                continue;
            }
            if number & REMOVAL != 0 {
                if completion.result() == -libc::EALREADY {
                    self.remove.push(number & !REMOVAL);
                }
                continue;
            }
            let Some(poll) = self.polls.get_mut(&(number & !WRITABLE)) else { continue };
            let token = poll.token;
            let result = completion.result();
            if number & WRITABLE != 0 {
                poll.writable = cqueue::more(completion.flags());
                if result >= 0 && result as i16 & ROOM == 0 {
                    // Each one-shot poll would report this at once. One that lasts reports it only once.
                    if !std::mem::replace(&mut poll.writable, true) {
                        self.rearm.push(number);
                    }
                    continue;
                }
            } else if !cqueue::more(completion.flags()) {
                self.rearm.push(number);
            }
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
        // The kernel may still write to the buffers, so free them only when it is done with them.
        while self.transfers.iter().any(Option::is_some) {
            let done = match self.ring.submit_and_wait(1) {
                Ok(_) => self.ring.completion().map(|c| c.user_data()).collect::<Vec<_>>(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => {
                    // The only safe option left is to leak them.
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
