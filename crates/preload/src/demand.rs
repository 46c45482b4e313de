//! Memory that is filled when it is touched. As the library starts no threads, the run's pager
//! (`cli/run/pager.rs`) fills the pages. It gets this process's userfaultfd and descriptors of the mapped
//! files.
//!
//! If the pager is killed, nobody fills the pages, and zeros must not pass for data. So this process keeps
//! the userfaultfd open, too, so that a thread that touches a page waits, and has a pipe whose other end
//! the pager holds: when that closes, the kernel sends `SIGBUS`.

use crate::descriptors::{Open, Own};
use crate::guard::checked;
use crate::{own, process, start};
use libc::c_int;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use std::ffi::OsStr;
use std::io::Error;
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
/// Set if there is no pager, or this process may have no userfaultfd.
static IS_UNUSABLE: AtomicBool = AtomicBool::new(false);
/// Token of the child that is being made.
static TOKEN: AtomicU64 = AtomicU64::new(0);

fn number(error: &Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Pager {
    /// Connects to the pager. For `token`, see [`Message::Hello`].
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
            // Before the lifeline can kill us: the pager may have no thread for us.
            this.answer()?;
        }
        this.watch()?;
        Ok(this)
    }

    /// Makes the kernel send `SIGBUS` when the other end of the lifeline is closed.
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
        let wait = towline_net::Wait::Any;
        let sent = towline_net::send_descriptors(&self.socket, &message.to_bytes(), with, wait);
        sent.map(drop).map_err(|error| number(&error))
    }

    /// Reads the answer to [`Message::Hello`] or [`Message::Begin`].
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

    /// Makes touches of missing pages wait for the pager. Children inherit these pages only by
    /// [`will_fork`] and [`go_on`], since nobody would fill them there otherwise.
    fn register(&self, at: usize, length: usize) -> Result<(), i32> {
        userfault::register(&self.userfault, at, length).map_err(|error| number(&error))?;
        inherit(at, length, false)
    }
}

/// Sets whether children inherit this memory.
pub(crate) fn inherit(at: usize, length: usize, does: bool) -> Result<(), i32> {
    let advice = if does { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
    // SAFETY: memory of ours, whose contents stay.
    unsafe { checked(libc::SYS_madvise, [at, length, advice as usize, 0, 0, 0]) }.map(drop)
}

fn pager() -> Result<MutexGuard<'static, Option<Pager>>, i32> {
    PAGER_OF_THIS.lock().map_err(|_| libc::EIO)
}

/// Returns false if it is known that nothing can be filled when it is touched.
pub(crate) fn may_be() -> bool {
    !IS_UNUSABLE.load(Ordering::Relaxed)
}

/// Makes a new mapping, which no thread knows or can touch yet, filled when it is touched. All values are
/// multiples of the page size; `fd` is a descriptor of the file.
///
/// # Errors
/// If it fails, nothing has changed.
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
    // SAFETY: the program passed it to this call, so it keeps it open.
    let placeholder = unsafe { BorrowedFd::borrow_raw(fd) };
    pager.say(begin, &[placeholder])?;
    pager.answer()?;
    // Last, so that the pager, if it still fills previous memory at this address, finds nothing registered.
    let registered = pager.register(at, length);
    if registered.is_err() {
        let _ = pager.say(Message::End { at: at as u64, length: length as u64 }, &[]);
    }
    registered
}

/// Tells the pager that memory is about to be unmapped, or has just become a mapping of another file.
pub(crate) fn end(at: usize, length: usize) {
    if let Ok(pager) = pager()
        && let Some(pager) = &*pager
    {
        // Fails only if the pager has ended, which the kernel reports.
        let _ = pager.say(Message::End { at: at as u64, length: length as u64 }, &[]);
    }
}

/// Runs `remap`, which resizes or moves a mapping and returns its new address.
pub(crate) fn resize(
    (from, old): (usize, usize),
    new: usize,
    remap: impl FnOnce() -> Result<usize, i32>,
) -> Result<usize, i32> {
    // Held throughout, so that no other thread starts a mapping at the old address.
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

/// Moves our descriptor away from a number that the program wants.
pub(crate) fn move_from(fd: i32) -> Result<(), i32> {
    let mut pager = pager()?;
    let Some(Pager { userfault, socket, lifeline }) = &mut *pager else { return Ok(()) };
    for ours in [userfault, socket, lifeline] {
        if ours.as_raw_fd() == fd {
            let moved = own::duplicate(fd, Own::Memory)?;
            // SAFETY: just made, and closed by its owner only.
            *ours = unsafe { OwnedFd::from_raw_fd(moved) };
        }
    }
    Ok(())
}

/// Announces a child that will have the mappings of this process.
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

/// In the child, after [`will_fork`] and [`disown`]: connects to the pager, which knows the mappings. Does
/// not wait.
pub(crate) fn meet_again() -> Result<(), i32> {
    let met = Pager::new(TOKEN.load(Ordering::Relaxed))?;
    *PAGER_OF_THIS.try_lock().map_err(|_| libc::EIO)? = Some(met);
    Ok(())
}

/// In the child, after [`meet_again`]: makes this memory filled when it is touched.
pub(crate) fn go_on(at: usize, length: usize) -> Result<(), i32> {
    pager()?.as_ref().ok_or(libc::EIO)?.register(at, length)
}
