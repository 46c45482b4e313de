//! System calls on sockets that need addresses: gathered sends, sendfile, descriptors.
#![allow(unsafe_code)]

use crate::Target;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::thread::{NanosleepRelativeResult, nanosleep, sched_yield};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// True when the other end of a socket is closed, or nobody has it any more.
pub(crate) fn peer_closed(socket: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    match poll(&mut watched, Some(&Timespec::default())) {
        Ok(_) => !watched[0].revents().is_empty(),
        Err(_) => {
            // Where waiting is forbidden: seen once what was sent before is taken.
            let how = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(socket, &mut [0], how) {
                Ok((_, count)) => count == 0,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
                Err(_) => true,
            }
        }
    }
}

/// Waits until a socket can be read or written, at most about `limit`. It may come back before: whoever waits looks
/// again. So it does after a moment where a filter of this process, which may be a program that `towline run` started,
/// forbids `ppoll(2)`.
pub(crate) fn wait(
    socket: BorrowedFd<'_>,
    flags: PollFlags,
    limit: Option<Duration>,
) -> io::Result<()> {
    let time = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    });
    match poll(&mut [PollFd::from_borrowed_fd(socket, flags)], time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS | rustix::io::Errno::NOSYS) => {
            pause(limit.unwrap_or(MOMENT).min(MOMENT));
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// After how long one looks again where a program has forbidden itself to wait.
pub const MOMENT: Duration = Duration::from_millis(1);

/// Sleeps for about this time, which a signal may cut short. In programs that `towline run` started it takes the place of
/// `std::thread::sleep`, which panics where a filter refuses `clock_nanosleep(2)`. Where one refuses `nanosleep(2)`, too,
/// it only lets others run.
pub fn pause(time: Duration) {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    if matches!(nanosleep(&time), NanosleepRelativeResult::Err(_)) {
        sched_yield();
    }
}

/// Memory to be sent, by address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    address: *const u8,
    length: usize,
    /// Nobody else changes it.
    own: bool,
}

impl Piece {
    /// Bytes of this process. The piece must be sent before `bytes` goes away, which
    /// [`crate::SendQueue`] ensures by holding the segment.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr(), length: bytes.len(), own: true }
    }

    /// A range of shared memory, checked by [`towline_mem::SharedMemory::address`].
    pub(crate) fn shared(memory: &towline_mem::SharedMemory, offset: usize, length: usize) -> Self {
        Self { address: memory.address(offset, length), length, own: false }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Copies to a place in shared memory.
    pub(crate) fn copy_to(
        &self,
        from: usize,
        count: usize,
        memory: &towline_mem::SharedMemory,
        at: usize,
    ) {
        assert!(from + count <= self.length, "copy beyond the piece");
        let target = memory.address(at, count);
        // SAFETY: the source is alive (see `of` and `shared`) and holds `from + count` bytes, the
        // target range was checked; a ring and the memory of a store are different mappings.
        unsafe { std::ptr::copy_nonoverlapping(self.address.add(from), target, count) };
    }

    /// Appends the bytes to a vector.
    pub(crate) fn extend(&self, out: &mut Vec<u8>) {
        let at = out.len();
        out.resize(at + self.length, 0);
        // SAFETY: the source is alive and holds `length` bytes; the target was just made.
        unsafe { std::ptr::copy_nonoverlapping(self.address, out[at..].as_mut_ptr(), self.length) };
    }
}

/// Sends the pieces without waiting; with `more` the kernel may hold them back for what follows.
pub(crate) fn send_pieces(fd: BorrowedFd<'_>, pieces: &[Piece], more: bool) -> io::Result<usize> {
    const PIECES_MAX: usize = 64;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
    if let [piece @ Piece { own: true, .. }] = pieces {
        // SAFETY: the memory is alive, and nobody changes it.
        let bytes = unsafe { std::slice::from_raw_parts(piece.address, piece.length) };
        // Not by the C library, in which it is a point at which threads can be cancelled: that costs 30 ns.
        return Ok(rustix::net::send(fd, bytes, SendFlags::from_bits_retain(flags as u32))?);
    }
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
    let count = pieces.len().min(PIECES_MAX);
    for (vector, piece) in vectors.iter_mut().zip(pieces) {
        *vector = libc::iovec { iov_base: piece.address.cast_mut().cast(), iov_len: piece.length };
    }
    // SAFETY: all zero is a valid msghdr: no name, no control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = count as _;
    // SAFETY: the vectors and the memory they name outlive the call, which only reads them.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// How long to wait when receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something came.
    Any,
    /// Until the target is full: one wake-up for a whole fragment.
    Full,
}

impl Wait {
    fn flags(self) -> RecvFlags {
        match self {
            Self::No => RecvFlags::DONTWAIT,
            Self::Any => RecvFlags::empty(),
            Self::Full => RecvFlags::WAITALL,
        }
    }
}

/// True when nothing came, and nothing is wrong.
pub(crate) fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Receives.
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    target: &mut Target<'_>,
    wait: Wait,
) -> io::Result<usize> {
    if let Target::Own(bytes) = target {
        // Not by the C library, as in `send_pieces`.
        return Ok(rustix::net::recv(fd, &mut **bytes, wait.flags())?.1);
    }
    let vector = vector_of(target);
    let flags = wait.flags().bits() as i32;
    // SAFETY: the memory is alive and may be written as `Target` says; no reference to shared memory is made.
    let received = unsafe { libc::recv(fd.as_raw_fd(), vector.iov_base, vector.iov_len, flags) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// From now on each [`look`] begins behind what was looked at and is still there.
pub(crate) fn begin_to_look(fd: BorrowedFd<'_>) -> io::Result<()> {
    let offset: libc::c_int = 0;
    // SAFETY: the option's value is an integer, which the call only reads.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives without waiting what stays in the socket.
pub(crate) fn look(fd: BorrowedFd<'_>, target: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(fd, target, RecvFlags::DONTWAIT | RecvFlags::PEEK)?.1)
}

/// Receives without waiting: what `target` does not take goes to `ahead`.
pub(crate) fn receive_two(
    fd: BorrowedFd<'_>,
    target: &mut Target<'_>,
    ahead: &mut [u8],
) -> io::Result<usize> {
    let mut vectors = [vector_of(target), vector_of(&mut Target::Own(ahead))];
    // SAFETY: all zero is a valid msghdr: no name, no control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: the vectors and the memory they name outlive the call, and may be written.
    let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

fn vector_of(target: &mut Target<'_>) -> libc::iovec {
    let (address, length) = match target {
        Target::Own(bytes) => (bytes.as_mut_ptr(), bytes.len()),
        Target::Shared(memory, range) => {
            assert!(memory.is_writable(), "shared memory is mapped read-only");
            (memory.address(range.start, range.len()), range.len())
        }
    };
    libc::iovec { iov_base: address.cast(), iov_len: length }
}

/// Sends bytes together with descriptors over a Unix socket.
///
/// # Errors
/// What `sendmsg(2)` says.
pub fn send_descriptors(
    fd: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    Ok(rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Receives bytes and the descriptors that came with them, at most four.
///
/// # Errors
/// What `recvmsg(2)` says; `EMFILE` when not all descriptors could be received.
pub fn receive_descriptors(
    fd: impl AsFd,
    target: &mut [u8],
    wait: Wait,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | wait.flags();
    let received = rustix::net::recvmsg(fd, &mut [IoSliceMut::new(target)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(rustix::io::Errno::MFILE.into());
    }
    Ok((received.bytes, descriptors))
}
