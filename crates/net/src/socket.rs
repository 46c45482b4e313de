//! System calls on sockets that need raw addresses: gathered sends, receiving, passing descriptors.
#![allow(unsafe_code)]

use crate::Target;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::Pid;
use rustix::thread::{NanosleepRelativeResult, nanosleep, sched_yield};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// True when the other end of a socket or pipe is closed or has no open descriptor left.
#[must_use]
pub fn peer_closed(socket: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    match poll(&mut watched, Some(&Timespec::default())) {
        Ok(_) => !watched[0].revents().is_empty(),
        Err(_) => {
            // A filter forbids `ppoll(2)`: a close is noticed only after all earlier data was received.
            let how = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            match rustix::net::recv(socket, &mut [0], how) {
                Ok((_, count)) => count == 0,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
                Err(_) => true,
            }
        }
    }
}

/// Waits until a socket can be read or written, for at most about `limit`. May return early, so callers
/// check again. If a seccomp filter of this process, which may be a program under `towline run`, forbids
/// `ppoll(2)`, this waits only for [`MOMENT`].
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

/// The process at the other end of a Unix socket.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // it is what the kernel knows
pub struct PeerCredentials {
    /// Its number; `None` if it is in a PID namespace from which this process cannot see it.
    pub process: Option<Pid>,
    /// Its user when it connected, or called `listen(2)`.
    pub uid: u32,
    /// Its group then.
    pub gid: u32,
}

/// Returns the credentials of the peer of a Unix socket (`SO_PEERCRED`). Not by rustix, which takes the
/// number of a process that cannot be seen, 0, for an error.
///
/// # Errors
/// What `getsockopt(2)` says.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the kernel writes at most `length` bytes to the structure, for which any bytes are valid.
    let result = unsafe {
        let to = (&raw mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut length)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCredentials { process: Pid::from_raw(found.pid), uid: found.uid, gid: found.gid })
}

/// Returns the supplementary groups that the peer of a Unix socket had when it connected (`SO_PEERGROUPS`).
///
/// # Errors
/// What `getsockopt(2)` says.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 32];
    loop {
        let mut length = size_of_val(&groups[..]) as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERGROUPS);
        // SAFETY: the kernel writes at most `length` bytes to the list, for which any bytes are valid.
        let result = unsafe {
            let to = groups.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut length)
        };
        let (error, count) =
            (io::Error::last_os_error(), length as usize / size_of::<libc::gid_t>());
        match result {
            0 => {
                groups.truncate(count);
                return Ok(groups);
            }
            // There are more: so many.
            _ if error.raw_os_error() == Some(libc::ERANGE) && count > groups.len() => {
                groups.resize(count, 0);
            }
            _ => return Err(error),
        }
    }
}

/// Returns a number that stands for the network namespace of a socket of any kind, until the machine is restarted;
/// `None` before Linux 5.14.
#[must_use]
pub fn network_namespace(socket: BorrowedFd<'_>) -> Option<u64> {
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_NETNS_COOKIE);
    // SAFETY: the kernel writes at most `length` bytes to the number.
    let result = unsafe {
        let to = (&raw mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut length)
    };
    (result == 0).then_some(cookie)
}

/// Interval between checks where a program has forbidden itself to wait.
pub const MOMENT: Duration = Duration::from_millis(1);

/// Sleeps for about `time`; a signal may end it early. Under `towline run` this replaces
/// `std::thread::sleep`, which panics if a filter refuses `clock_nanosleep(2)`. If a filter refuses
/// `nanosleep(2)` too, this only yields the processor.
pub fn pause(time: Duration) {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    if matches!(nanosleep(&time), NanosleepRelativeResult::Err(_)) {
        sched_yield();
    }
}

/// A range of memory to send, by address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    address: *const u8,
    length: usize,
    /// Nothing else changes the memory.
    own: bool,
}

impl Piece {
    /// Refers to bytes of this process. The piece must be sent before `bytes` goes away, which
    /// [`crate::SendQueue`] ensures by holding the segment.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr(), length: bytes.len(), own: true }
    }

    /// Refers to a range of shared memory, which [`towline_mem::SharedMemory::address`] checks.
    pub(crate) fn shared(memory: &towline_mem::SharedMemory, offset: usize, length: usize) -> Self {
        Self { address: memory.address(offset, length), length, own: false }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Copies `count` bytes, starting at `from`, to shared memory.
    pub(crate) fn copy_to(
        &self,
        from: usize,
        count: usize,
        memory: &towline_mem::SharedMemory,
        at: usize,
    ) {
        assert!(from + count <= self.length, "copy beyond the piece");
        let target = memory.address(at, count);
        // SAFETY: the source is alive (see `of` and `shared`) and holds `from + count` bytes; the target
        // range was checked; a ring and the memory of a store are different mappings, so they do not
        // overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.address.add(from), target, count) };
    }

    /// Appends the bytes to a vector.
    pub(crate) fn extend(&self, out: &mut Vec<u8>) {
        let at = out.len();
        out.resize(at + self.length, 0);
        // SAFETY: the source is alive and holds `length` bytes; the target was just resized to hold them.
        unsafe { std::ptr::copy_nonoverlapping(self.address, out[at..].as_mut_ptr(), self.length) };
    }
}

/// Sends the pieces without waiting. With `more`, the kernel may hold them back until more data follows.
pub(crate) fn send_pieces(fd: BorrowedFd<'_>, pieces: &[Piece], more: bool) -> io::Result<usize> {
    const PIECES_MAX: usize = 64;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
    if let [piece @ Piece { own: true, .. }] = pieces {
        // SAFETY: the memory is alive, and nothing else changes it.
        let bytes = unsafe { std::slice::from_raw_parts(piece.address, piece.length) };
        // Not with the C library's `send`, which is a thread cancellation point and takes 30 ns longer.
        return Ok(rustix::net::send(fd, bytes, SendFlags::from_bits_retain(flags as u32))?);
    }
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
    let count = pieces.len().min(PIECES_MAX);
    for (vector, piece) in vectors.iter_mut().zip(pieces) {
        *vector = libc::iovec { iov_base: piece.address.cast_mut().cast(), iov_len: piece.length };
    }
    // SAFETY: an all-zero msghdr is valid: no name, no control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = count as _;
    // SAFETY: the vectors and the memory they refer to outlive the call, which only reads them.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// How long to wait when receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something arrives.
    Any,
    /// Until the target is full, so that a whole fragment takes one wake-up.
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

/// True when nothing has arrived and nothing is wrong.
pub(crate) fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Receives into `target`.
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    target: &mut Target<'_>,
    wait: Wait,
) -> io::Result<usize> {
    if let Target::Own(bytes) = target {
        // Not with the C library's `recv`; see `send_pieces`.
        return Ok(rustix::net::recv(fd, &mut **bytes, wait.flags())?.1);
    }
    let vector = vector_of(target);
    let flags = wait.flags().bits() as i32;
    // SAFETY: the memory is alive and may be written, as `Target` requires; no reference to shared
    // memory is created.
    let received = unsafe { libc::recv(fd.as_raw_fd(), vector.iov_base, vector.iov_len, flags) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Makes each later [`look`] start after the data that was peeked at and is still in the socket.
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

/// Receives without waiting and leaves the data in the socket.
pub(crate) fn look(fd: BorrowedFd<'_>, target: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(fd, target, RecvFlags::DONTWAIT | RecvFlags::PEEK)?.1)
}

/// Receives without waiting; bytes that do not fit `target` go to `ahead`.
pub(crate) fn receive_two(
    fd: BorrowedFd<'_>,
    target: &mut Target<'_>,
    ahead: &mut [u8],
) -> io::Result<usize> {
    let mut vectors = [vector_of(target), vector_of(&mut Target::Own(ahead))];
    // SAFETY: an all-zero msghdr is valid: no name, no control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: the vectors and the memory they refer to outlive the call, and may be written.
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

/// Sends bytes together with descriptors over a Unix socket. [`Wait::No`] does not wait for room even if
/// the socket is a blocking one, as a peer can make a socket that it has passed.
///
/// # Errors
/// What `sendmsg(2)` says, but not that a signal has interrupted it.
pub fn send_descriptors(
    fd: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    wait: Wait,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let wait = if wait == Wait::No { SendFlags::DONTWAIT } else { SendFlags::empty() };
    let flags = SendFlags::NOSIGNAL | wait;
    let bytes = [IoSlice::new(bytes)];
    // Handlers of signals run meanwhile, under `towline run` after that.
    Ok(retry_on_intr(|| rustix::net::sendmsg(&fd, &bytes, &mut control, flags))?)
}

/// Receives bytes and at most four descriptors that came with them.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    #[test]
    fn sockets_of_all_kinds_of_a_process_are_in_one_network_namespace() {
        let (one, other) = UnixStream::pair().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = [one.as_fd(), other.as_fd(), tcp.as_fd()].map(network_namespace);
        assert!(found.iter().all(|cookie| *cookie == found[0]), "{found:?}");
    }
}
