//! Memory that is filled when it is touched. The library starts no threads, so the pages are filled by
//! the run's pager (`cli/run/pager.rs`), which gets the userfaultfd of this process, and descriptors of
//! the mapped files.
//!
//! Nobody fills them when the pager was killed. Zeros must not be taken for data then: we keep the
//! userfaultfd, too, so that whoever touches a page waits, and a pipe whose other end the pager has;
//! when that closes, the kernel sends us `SIGBUS`.

use crate::descriptors::{Open, Own};
use crate::guard::checked;
use crate::{own, process, start};
use libc::c_int;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use std::ffi::OsStr;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use towline_instance::PAGER;
use towline_instance::pager::Message;
use towline_instance::userfault;

/// The connection to the pager.
struct Pager {
    userfault: OwnedFd,
    socket: OwnedFd,
    lifeline: OwnedFd,
}

static PAGER_OF_THIS: Mutex<Option<Pager>> = Mutex::new(None);
/// There is none, or this process may have no userfaultfd.
static IS_UNUSABLE: AtomicBool = AtomicBool::new(false);
/// Announces the child that is being made.
static TOKEN: AtomicU64 = AtomicU64::new(0);

fn number(error: &Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Pager {
    /// Meets it. `token`: see [`Message::Hello`].
    fn new(token: u64) -> Result<Self, i32> {
        let errno = Errno::raw_os_error;
        let hidden = |fd: OwnedFd| own::hide(fd, Own::Memory);
        let userfault = hidden(userfault::create().map_err(|error| number(&error))?)?;
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
        let socket = hidden(socket.map_err(errno)?)?;
        let path = [start::directory(), b"/", PAGER.as_bytes()].concat();
        let address = SocketAddrUnix::new(OsStr::from_bytes(&path)).map_err(errno)?;
        rustix::net::connect(&socket, &address).map_err(errno)?;
        let (lifeline, other) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(errno)?;
        let this = Self { userfault, socket, lifeline: hidden(lifeline)? };
        this.say(Message::Hello { token }, &[this.userfault.as_fd(), other.as_fd()])?;
        drop(other);
        if token == 0 {
            // Before the lifeline can end us: the pager may have no thread for us.
            this.answer()?;
        }
        this.watch()?;
        Ok(this)
    }

    /// Asks the kernel for `SIGBUS` when the other end of the lifeline is closed.
    fn watch(&self) -> Result<(), i32> {
        const F_SETSIG: c_int = 10;
        let fd = self.lifeline.as_raw_fd() as usize;
        let set = |what: c_int, to: usize| {
            // SAFETY: a descriptor of ours, and numbers.
            unsafe { checked(libc::SYS_fcntl, [fd, what as usize, to, 0, 0, 0]) }
        };
        set(libc::F_SETOWN, process::id() as usize)?;
        set(F_SETSIG, libc::SIGBUS as usize)?;
        set(libc::F_SETFL, (libc::O_ASYNC | libc::O_NONBLOCK) as usize).map(drop)
    }

    fn say(&self, message: Message, with: &[BorrowedFd<'_>]) -> Result<(), i32> {
        loop {
            match towline_net::send_descriptors(&self.socket, &message.to_bytes(), with) {
                // A signal that waits until we are done.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                sent => return sent.map(drop).map_err(|error| number(&error)),
            }
        }
    }

    /// The answer to [`Message::Hello`] and [`Message::Begin`].
    fn answer(&self) -> Result<(), i32> {
        let mut bytes = [0; 4];
        loop {
            match rustix::io::read(&self.socket, &mut bytes) {
                Ok(4) => break,
                Ok(_) => return Err(libc::EPIPE),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.raw_os_error()),
            }
        }
        match i32::from_ne_bytes(bytes) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// From now on a touch of what is missing waits for the pager; children get these pages only by
    /// [`will_fork`] and [`go_on`], since nobody would fill them there otherwise.
    fn register(&self, at: usize, length: usize) -> Result<(), i32> {
        userfault::register(&self.userfault, at, length).map_err(|error| number(&error))?;
        inherit(at, length, false)
    }
}

/// Whether children have this memory.
pub(crate) fn inherit(at: usize, length: usize, does: bool) -> Result<(), i32> {
    let advice = if does { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
    // SAFETY: memory of ours; what it holds stays.
    unsafe { checked(libc::SYS_madvise, [at, length, advice as usize, 0, 0, 0]) }.map(drop)
}

fn pager() -> Result<MutexGuard<'static, Option<Pager>>, i32> {
    PAGER_OF_THIS.lock().map_err(|_| libc::EIO)
}

/// True unless it is known that nothing can be filled when it is touched.
pub(crate) fn may_be() -> bool {
    !IS_UNUSABLE.load(Ordering::Relaxed)
}

/// A new mapping, of which nobody knows yet and that nobody can touch, is filled when it is touched.
/// All in whole pages; `fd` is a descriptor of the file.
///
/// # Errors
/// When that cannot be; then it is as before.
pub(crate) fn begin(
    (at, length): (usize, usize),
    (open, fd): (Open, c_int),
    offset: i64,
    is_shared: bool,
) -> Result<(), i32> {
    let mut pager = pager()?;
    let pager = match &mut *pager {
        Some(pager) => pager,
        none => {
            let met = Pager::new(0).inspect_err(|_| IS_UNUSABLE.store(true, Ordering::Relaxed))?;
            none.insert(met)
        }
    };
    // The pager has descriptors of it, too.
    open.entry.shared.store(1, Ordering::Relaxed);
    let begin = Message::Begin {
        at: at as u64,
        length: length as u64,
        offset: offset as u64,
        entry: open.number as u32,
        is_shared,
    };
    // SAFETY: the program gave it to this call, so it keeps it open.
    let placeholder = unsafe { BorrowedFd::borrow_raw(fd) };
    pager.say(begin, &[placeholder])?;
    pager.answer()?;
    // Only now: what the pager still fills of memory that was here before finds nothing registered.
    let registered = pager.register(at, length);
    if registered.is_err() {
        let _ = pager.say(Message::End { at: at as u64, length: length as u64 }, &[]);
    }
    registered
}

/// Memory is about to be no longer of any file, or just has become of another.
pub(crate) fn end(at: usize, length: usize) {
    if let Ok(pager) = pager()
        && let Some(pager) = &*pager
    {
        // Fails only when the pager has gone, which the kernel tells.
        let _ = pager.say(Message::End { at: at as u64, length: length as u64 }, &[]);
    }
}

/// Runs `remap`, which makes a mapping longer or shorter, or moves it, and gives where it is then.
pub(crate) fn resize(
    (from, old): (usize, usize),
    new: usize,
    remap: impl FnOnce() -> Result<usize, i32>,
) -> Result<usize, i32> {
    // Held all the time, so that nobody begins a mapping meanwhile where this one was.
    let pager = pager()?;
    let pager = pager.as_ref().ok_or(libc::EIO)?;
    let to = remap()?;
    let [was, old, is, length] = [from, old, to, new].map(|number| number as u64);
    pager.say(Message::Resized { from: was, old, to: is, new: length }, &[])?;
    if to != from || length > old {
        pager.register(to, new)?;
    }
    Ok(to)
}

/// The program wants this number: what has it gets another one.
pub(crate) fn move_from(fd: i32) -> Result<(), i32> {
    let mut pager = pager()?;
    let Some(Pager { userfault, socket, lifeline }) = &mut *pager else { return Ok(()) };
    for ours in [userfault, socket, lifeline] {
        if ours.as_raw_fd() == fd {
            let moved = own::duplicate(fd, Own::Memory)?;
            // SAFETY: it was just made, and is closed by its owner only.
            *ours = unsafe { OwnedFd::from_raw_fd(moved) };
        }
    }
    Ok(())
}

/// A child that will have the mappings of this process is about to be made.
pub(crate) fn will_fork() -> Result<(), i32> {
    let mut token = [0; 8];
    rustix::rand::getrandom(&mut token[..], rustix::rand::GetRandomFlags::empty())
        .map_err(Errno::raw_os_error)?;
    let token = u64::from_ne_bytes(token) | 1;
    TOKEN.store(token, Ordering::Relaxed);
    let pager = pager()?;
    pager.as_ref().ok_or(libc::EIO)?.say(Message::Fork { token }, &[])
}

/// In the child: forgets the connection, whose descriptors are closed already.
pub(crate) fn disown() {
    if let Ok(mut pager) = PAGER_OF_THIS.try_lock() {
        std::mem::forget(pager.take());
    }
}

/// In the child, after [`will_fork`] and [`disown`]: meets the pager, which knows the mappings.
/// Nothing is waited for.
pub(crate) fn meet_again() -> Result<(), i32> {
    let met = Pager::new(TOKEN.load(Ordering::Relaxed))?;
    *PAGER_OF_THIS.try_lock().map_err(|_| libc::EIO)? = Some(met);
    Ok(())
}

/// In the child, after [`meet_again`]: this memory is filled when it is touched.
pub(crate) fn go_on(at: usize, length: usize) -> Result<(), i32> {
    pager()?.as_ref().ok_or(libc::EIO)?.register(at, length)
}
