//! The two processes of a run: the one that the user started becomes the program, and its child, the
//! keeper, keeps what the programs share until the last of them has ended.
//!
//! The keeper is a child that tells nobody of its end (no signal to its parent, and `wait` does not see
//! it without `__WCLONE`), so the program has no child that it does not know of. It has a session of its
//! own: signals of the terminal are the program's.

use super::keeper::Keeper;
use super::others::Others;
use super::signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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
#[allow(unsafe_code)]
pub(super) fn apart() -> io::Result<Side> {
    let program = getpid();
    // No flags, and no signal at the end. All arguments are zero, so their order, which differs among
    // machines, does not matter.
    // SAFETY: as `fork`. There is no other thread whose locks the child would find taken for ever, and
    // no handler of `pthread_atfork` that it needs; libc asks the kernel for its thread's number where
    // that matters.
    match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Keeper(Program::new(program))),
        _ => Ok(Side::Program),
    }
}

/// The program, as the keeper sees it.
pub(super) struct Program {
    pid: Pid,
    /// `None` where the kernel has none (before Linux 5.3).
    fd: Option<OwnedFd>,
}

impl Program {
    /// For a child of it that tells nobody of its end.
    pub(super) fn new(pid: Pid) -> Self {
        signals::hold(&HELD);
        // Fails only for the leader of a group, which a new process is not.
        let _ = rustix::process::setsid();
        // Should it end before this, the number may be somebody else's, but our parent is another one, too.
        let fd = pidfd_open(pid, PidfdFlags::empty()).ok();
        Self { pid, fd }
    }

    /// True when it has ended; what it started may not have.
    pub(super) fn has_ended(&self) -> bool {
        if getppid() != Some(self.pid) {
            return true;
        }
        let Some(fd) = &self.fd else { return false };
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
        keeper: &mut Option<Keeper>,
        others: &Others,
        state: &Prepared,
    ) {
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut is_over = false;
        loop {
            let gathers = keeper.as_mut().is_some_and(Keeper::work);
            if !is_over && self.has_ended() {
                is_over = true;
                // What it left in its connections and descriptors.
                while keeper.as_mut().is_some_and(Keeper::work) {}
            }
            let mut limit = keeper.as_ref().and_then(Keeper::limit);
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
                wait.extend(keeper.iter().flat_map(Keeper::events));
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
