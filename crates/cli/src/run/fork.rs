//! The two processes of a run.
//!
//! The program's parent is a child of the process that the user started, so that the latter can end
//! with the program while the former goes on: it adopts what the program leaves in the background,
//! and keeps their remote files open until the last of them has ended. Neither has threads (but for
//! the server of `--serve`): each waits for all it has to do in one place.

use super::keeper::Keeper;
use super::signals::{self, Mask, Signals};
use crate::report::Outcome;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// What others send to us is meant for the program.
const PASSED_ON: [i32; 4] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];
/// The terminal sends these to the program, too, which decides; we wait for what it does.
const LEFT_TO_THE_PROGRAM: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];
const ALL: [i32; 7] = [
    PASSED_ON[0],
    PASSED_ON[1],
    PASSED_ON[2],
    PASSED_ON[3],
    LEFT_TO_THE_PROGRAM[0],
    LEFT_TO_THE_PROGRAM[1],
    libc::SIGCHLD,
];

/// How long to let events gather: a program that opens and closes much would wake us for each.
const GATHER: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Which of the two processes goes on after [`apart`].
pub(super) enum Side {
    /// The one that the user waits for: it gets the exit status from the other.
    Waits(Other),
    /// The one that runs the program, and tells its exit status.
    Runs {
        /// Where it is told.
        tell: std::io::PipeWriter,
        /// Its children.
        children: Children,
    },
}

/// The process that runs the program, as the other one sees it.
pub(super) struct Other {
    pid: Pid,
    status: std::io::PipeReader,
    signals: Signals,
}

/// Makes two processes of this one. No other thread may run yet.
#[allow(unsafe_code)]
pub(super) fn apart() -> Outcome<Side> {
    let (status, tell) = io::pipe()?;
    let before = signals::hold(&ALL);
    // SAFETY: nothing was started yet: there is no other thread whose locks the child would find
    // taken for ever.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let signals = Signals::new(&ALL)?;
    let Some(pid) = Pid::from_raw(child) else {
        drop(status);
        // What the program leaves behind becomes a child of this process.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(io::Error::from)?;
        return Ok(Side::Runs { tell, children: Children { signals, before } });
    };
    drop(tell);
    Ok(Side::Waits(Other { pid, status, signals }))
}

impl Other {
    /// Waits for the exit status that it tells, and passes signals on; `None`: it ended without a
    /// word.
    pub(super) fn told(mut self) -> Option<u8> {
        loop {
            let mut wait = [
                PollFd::from_borrowed_fd(self.status.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            ];
            match poll(&mut wait, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
            let is_told = !wait[0].revents().is_empty();
            while let Some(signal) = self.signals.next() {
                pass_on(signal, self.pid);
            }
            if is_told {
                let mut byte = [0];
                return (self.status.read(&mut byte).ok()? == 1).then_some(byte[0]);
            }
        }
    }
}

fn pass_on(signal: i32, to: Pid) {
    if PASSED_ON.contains(&signal)
        && let Some(signal) = Signal::from_named_raw(signal)
    {
        // Fails only when it has ended.
        let _ = kill_process(to, signal);
    }
}

/// The children of this process: the program, and what it leaves behind.
pub(super) struct Children {
    signals: Signals,
    /// The mask of signals that programs start with.
    before: Mask,
}

impl Children {
    /// Runs `start`, which starts the program, with the signals that the program is to have.
    pub(super) fn start<T>(&self, start: impl FnOnce() -> T) -> T {
        signals::with_mask(&self.before, start)
    }

    /// Waits until the program has ended, and reaps what it left behind meanwhile.
    pub(super) fn until_end_of(
        &self,
        program: u32,
        keeper: &mut Option<Keeper>,
    ) -> io::Result<ExitStatus> {
        let program = Pid::from_raw(program as i32);
        let signal = |signal| program.into_iter().for_each(|pid| pass_on(signal, pid));
        self.until(keeper, signal, |ended| match ended {
            Some((pid, status)) if Some(pid) == program => {
                Some(Ok(ExitStatus::from_raw(WaitStatus::as_raw(status))))
            }
            Some(_) => None,
            None => Some(Err(io::Error::from_raw_os_error(libc::ECHILD))),
        })?
    }

    /// Waits until all that is left of the run has ended.
    pub(super) fn until_end_of_all(&self, keeper: &mut Option<Keeper>) -> io::Result<()> {
        self.until(keeper, |_| {}, |ended| ended.is_none().then_some(()))
    }

    /// Does what comes until `over` gives something. It is told of each child that has ended, and
    /// `None` when no child is left.
    fn until<T>(
        &self,
        keeper: &mut Option<Keeper>,
        signal: impl Fn(i32),
        mut over: impl FnMut(Option<(Pid, WaitStatus)>) -> Option<T>,
    ) -> io::Result<T> {
        loop {
            while let Some(came) = self.signals.next() {
                signal(came);
            }
            loop {
                let ended = match rustix::process::wait(WaitOptions::NOHANG) {
                    Ok(None) => break,
                    Ok(Some(ended)) => Some(ended),
                    Err(rustix::io::Errno::CHILD) => None,
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => return Err(error.into()),
                };
                if let Some(result) = over(ended) {
                    return Ok(result);
                }
            }
            let gathers = keeper.as_mut().is_some_and(Keeper::work);
            let mut wait = vec![PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN)];
            wait.extend(keeper.iter().flat_map(Keeper::events));
            let limit = if gathers {
                // What was closed meanwhile is seen then.
                wait.swap_remove(1);
                Some(&GATHER)
            } else {
                keeper.as_ref().and_then(Keeper::limit)
            };
            let waited = poll(&mut wait, limit);
            let has_come = wait.len() > 1 && wait.last().is_some_and(|w| !w.revents().is_empty());
            if let (Some(keeper), true) = (&keeper, has_come) {
                keeper.meet();
            }
            match waited {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// True while a process of the run is left, after the program itself has ended.
pub(super) fn has_others() -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Lets go of the terminal.
pub(super) fn to_background() -> io::Result<()> {
    let nothing = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(nothing.as_fd())?;
    rustix::stdio::dup2_stdout(nothing.as_fd())?;
    rustix::stdio::dup2_stderr(nothing.as_fd())?;
    Ok(())
}
