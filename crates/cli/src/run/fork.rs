//! The two processes of a run: the one that the user started becomes the program, and another one, the
//! keeper, keeps what the programs share until the last of them has ended.
//!
//! The keeper is an orphan, so that the program has no child that it does not know of: a process between
//! the two ended at once. Where orphans become the program's children, or the kernel cannot show the keeper
//! a process that is not its parent, it is a child that tells nobody of its end: no signal to its parent,
//! and `wait` does not see it without `__WCLONE` or `__WALL`. It has a session of its own: signals of the
//! terminal are the program's.

use super::keeper::Keeper;
use super::others::Others;
use super::signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, WaitOptions, child_subreaper, getpid, getppid, pidfd_open, waitpid,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use towline_instance::Prepared;

/// What ends a process of a group or a session, or is sent by mistake: the end of the run is the end of
/// its programs. And what comes of writing to who has ended.
const HELD: [i32; 7] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGPIPE,
];

/// How long to let events gather: a program that opens and closes much would wake us for each.
const GATHER: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// How often processes are looked for that cannot be waited for.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Which of the two processes goes on after [`apart`].
pub(super) enum Side {
    /// The one that becomes the program.
    Program,
    /// The one that keeps the run.
    Keeper(Program),
}

/// Makes two processes of this one. No other thread may run yet.
pub(super) fn apart() -> io::Result<Side> {
    let pid = getpid();
    let takes_orphans = pid.is_init() || child_subreaper()?.is_some();
    // Here: when the keeper begins, the program may have ended, and its number be another's.
    let fd = pidfd_open(pid, PidfdFlags::empty()).ok();
    let is_orphan = fd.is_some() && !takes_orphans;
    match (split()?, is_orphan) {
        (Some(between), true) => {
            match waitpid(Some(between), WaitOptions::from_bits_retain(libc::__WCLONE as u32))? {
                Some((_, status)) if status.exit_status() == Some(0) => Ok(Side::Program),
                _ => Err(io::ErrorKind::OutOfMemory.into()),
            }
        }
        (Some(_), false) => Ok(Side::Program),
        (None, true) => match split() {
            Ok(None) => Ok(Side::Keeper(Program::new(pid, fd))),
            result => std::process::exit(i32::from(result.is_err())),
        },
        (None, false) => Ok(Side::Keeper(Program::new(pid, fd))),
    }
}

/// As `fork`, without a signal at the child's end: the child in the parent, nothing in the child.
#[allow(unsafe_code)]
fn split() -> io::Result<Option<Pid>> {
    // All arguments are zero, so their order, which differs among machines, does not matter.
    // SAFETY: as `fork`. There is no other thread whose locks the child would find taken for ever, and
    // no handler of `pthread_atfork` that it needs; libc asks the kernel for its thread's number where
    // that matters.
    match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(Pid::from_raw(child as i32)),
    }
}

/// A duplicate of a descriptor that came along with the command line that names it.
#[allow(unsafe_code)]
pub(super) fn inherited(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: a number that may be one; nobody closes it meanwhile, as no other thread runs.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok())?
}

/// The program, as the keeper sees it.
pub(super) struct Program {
    pid: Pid,
    /// `None` where the kernel has none (before Linux 5.3); it is our parent then.
    fd: Option<OwnedFd>,
}

impl Program {
    /// For its keeper.
    pub(super) fn new(pid: Pid, fd: Option<OwnedFd>) -> Self {
        signals::hold(&HELD);
        // Fails only for the leader of a group, which a new process is not.
        let _ = rustix::process::setsid();
        Self { pid, fd }
    }

    /// True when it has ended; what it started may not have.
    pub(super) fn has_ended(&self) -> bool {
        let Some(fd) = &self.fd else { return getppid() != Some(self.pid) };
        let mut wait = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut wait, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// How to find what it leaves behind.
    pub(super) fn others(&self, directory: &Path) -> Others {
        Others::new(directory, self.pid)
    }

    /// Keeps files until the program has ended, and all that it left behind.
    pub(super) fn keep_until_end(
        &self,
        mut keeper: Option<&mut Keeper>,
        others: &Others,
        state: &Prepared,
    ) {
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut is_over = false;
        loop {
            let gathers = keeper.as_mut().is_some_and(|keeper| keeper.work());
            if !is_over && self.has_ended() {
                is_over = true;
                // What it left in its connections and descriptors.
                while keeper.as_mut().is_some_and(|keeper| keeper.work()) {}
            }
            let mut limit = keeper.as_ref().and_then(|keeper| keeper.limit());
            if is_over {
                if fds.is_empty() {
                    fds = others.find();
                    if fds.is_empty() {
                        if !state.is_used() {
                            return;
                        }
                        // Somebody who cannot be found by the environment.
                        limit = limit.or(Some(&LOOK));
                    }
                    // Nobody who waits for the end of the program's output waits for them.
                    let_go();
                }
            } else if self.fd.is_none() {
                limit = limit.or(Some(&LOOK));
            }
            let programs = match is_over {
                true => &fds[..],
                false => self.fd.as_slice(),
            };
            let mut wait: Vec<_> =
                programs.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let ours = wait.len();
            if gathers {
                // What was closed meanwhile is seen then.
                limit = Some(&GATHER);
            } else {
                wait.extend(keeper.iter().flat_map(|keeper| keeper.events()));
            }
            // Fails only when a signal comes.
            let _ = poll(&mut wait, limit);
            if let (Some(keeper), Some(last)) = (&keeper, wait[ours..].last())
                && !last.revents().is_empty()
            {
                keeper.meet();
            }
            if is_over {
                let ended: Vec<bool> =
                    wait[..ours].iter().map(|w| !w.revents().is_empty()).collect();
                let mut ended = ended.into_iter();
                fds.retain(|_| !ended.next().unwrap_or(false));
            }
        }
    }
}

/// Lets go of the streams that the program has, but for what is told of it.
pub(super) fn let_go_of_streams() {
    if let Ok(nothing) = nothing() {
        // Without it whoever reads what the program writes waits for us, too.
        let _ = rustix::stdio::dup2_stdin(nothing.as_fd());
        let _ = rustix::stdio::dup2_stdout(nothing.as_fd());
    }
}

fn let_go() {
    if let Ok(nothing) = nothing() {
        let _ = rustix::stdio::dup2_stderr(nothing.as_fd());
    }
}

fn nothing() -> io::Result<std::fs::File> {
    std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")
}
