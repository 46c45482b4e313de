//! Signals as something to wait for beside descriptors: no handler runs, and no thread is needed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A set of signals, as libc has it.
pub(super) type Mask = libc::sigset_t;

/// From now on these signals wait, for this thread and those that it makes; gives the mask from
/// before.
#[allow(unsafe_code)]
pub(super) fn hold(signals: &[i32]) -> Mask {
    let mut before = set_of(&[]);
    // SAFETY: both are sets, and outlive the call, which cannot fail with a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set_of(signals), &raw mut before) };
    before
}

/// Runs `work` with a mask of before, which is what a program started by it begins with.
#[allow(unsafe_code)]
pub(super) fn with_mask<T>(mask: &Mask, work: impl FnOnce() -> T) -> T {
    let mut held = set_of(&[]);
    // SAFETY: both are sets, and outlive the call, which cannot fail with a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut held) };
    let result = work();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const held, std::ptr::null_mut()) };
    result
}

/// SIGPIPE was ignored when this process began.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before the runtime of the language, which ignores that signal.
#[allow(unsafe_code)]
extern "C" fn note_pipe_signal() {
    // SAFETY: all zero is valid, and the structure outlives the call.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut now);
        PIPE_WAS_IGNORED.store(now.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
}

#[used]
#[allow(unsafe_code)]
#[unsafe(link_section = ".init_array")]
static NOTE_PIPE_SIGNAL: extern "C" fn() = note_pipe_signal;

/// Takes back that the runtime of the language ignores SIGPIPE, which programs would inherit: they find
/// it as this process did.
#[allow(unsafe_code)]
pub(crate) fn take_pipe_signal() {
    let was = if PIPE_WAS_IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither needs a handler.
    unsafe { libc::signal(libc::SIGPIPE, was) };
}

#[allow(unsafe_code)]
fn set_of(signals: &[i32]) -> Mask {
    // SAFETY: all zero is an empty set; numbers that are none are refused and change nothing.
    unsafe {
        let mut set = std::mem::zeroed();
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Signals that are held, one after the other. The descriptor is readable when there is one.
pub(super) struct Signals(OwnedFd);

impl Signals {
    /// Those of `signals`, which [`hold`] has to hold, that this process gets.
    #[allow(unsafe_code)]
    pub(super) fn new(signals: &[i32]) -> io::Result<Self> {
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set outlives the call.
        let fd = unsafe { libc::signalfd(-1, &set_of(signals), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, which is ours.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next one, if there is one.
    #[allow(unsafe_code)]
    pub(super) fn next(&self) -> Option<i32> {
        // SAFETY: all zero is a valid value.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&info);
        // SAFETY: as many bytes as the structure has; each value of them is valid.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), bytes) };
        (read == bytes as isize).then_some(info.ssi_signo as i32)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
