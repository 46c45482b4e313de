//! Signals that can be waited for together with descriptors, without handlers or threads.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A set of signals, in libc's representation.
pub(super) type Mask = libc::sigset_t;

/// Blocks these signals for this thread and threads that it creates later. Returns the previous mask.
#[allow(unsafe_code)]
pub(super) fn hold(signals: &[i32]) -> Mask {
    let mut before = set_of(&[]);
    // SAFETY: both pointers are to signal sets that outlive the call, which cannot fail with a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set_of(signals), &raw mut before) };
    before
}

/// Sets the mask of this thread. Async-signal-safe.
#[allow(unsafe_code)]
pub(super) fn set_mask(mask: &Mask) {
    // SAFETY: the set outlives the call, which cannot fail with a valid `how`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

/// Sets whether the end of a child is ignored: then it sends no SIGCHLD, and nobody can wait for it. Programs
/// started later inherit that. Returns whether it was ignored before. Async-signal-safe.
#[allow(unsafe_code)]
pub(super) fn ignore_children(ignored: bool) -> bool {
    let action = if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: both are predefined actions, so no handler function is involved.
    unsafe { libc::signal(libc::SIGCHLD, action) == libc::SIG_IGN }
}

/// True if SIGPIPE was ignored when this process started.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Records how SIGPIPE is handled. Runs before the Rust runtime, which ignores that signal.
#[allow(unsafe_code)]
extern "C" fn note_pipe_signal() {
    // SAFETY: a zeroed `sigaction` is valid, and it outlives the call.
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

/// Restores SIGPIPE to its state from before the Rust runtime, which ignores it. Programs started later would
/// inherit that.
#[allow(unsafe_code)]
pub(crate) fn take_pipe_signal() {
    let was = if PIPE_WAS_IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: both are predefined actions, so no handler function is involved.
    unsafe { libc::signal(libc::SIGPIPE, was) };
}

#[allow(unsafe_code)]
fn set_of(signals: &[i32]) -> Mask {
    // SAFETY: a zeroed set is empty; `sigaddset` rejects invalid numbers without changing the set.
    unsafe {
        let mut set = std::mem::zeroed();
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Delivers blocked signals one by one. The descriptor is readable when one is pending.
pub(super) struct Signals(OwnedFd);

impl Signals {
    /// Receives those of `signals` that are sent to this process. They must be blocked with [`hold`].
    #[allow(unsafe_code)]
    pub(super) fn new(signals: &[i32]) -> io::Result<Self> {
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set outlives the call.
        let fd = unsafe { libc::signalfd(-1, &set_of(signals), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` is a new descriptor that nothing else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns the next pending signal, if any.
    #[allow(unsafe_code)]
    pub(super) fn next(&self) -> Option<i32> {
        // SAFETY: a zeroed `signalfd_siginfo` is a valid value.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&info);
        // SAFETY: the structure has `bytes` bytes to write to, and any values of them are valid.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), bytes) };
        (read == bytes as isize).then_some(info.ssi_signo as i32)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
