//! Splits a run into two processes. The one that the user started becomes the program. The other, the keeper,
//! keeps what the programs share until the last of them has ended.
//!
//! The keeper is an orphan, so that the program has no child that it does not know of: an intermediate
//! process between the two ends at once. If orphans would become the program's children, or the kernel cannot
//! give the keeper a pidfd of a process that is not its parent, the keeper is a child that does not report
//! its end: it sends no signal to its parent, and `wait` does not see it without `__WCLONE` or `__WALL`. The
//! keeper has its own session, so signals of the terminal go only to the program.

use super::keeper::Keeper;
use super::others::Others;
use super::signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Dir, DirEntry, Mode, OFlags};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{
    Pid, PidfdFlags, WaitOptions, child_subreaper, getpid, getppid, pidfd_open, waitpid,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use towline_instance::Prepared;

/// Signals that the keeper blocks: those sent to end a group or session, or by mistake, since the run ends
/// when its programs end; and the one for writing to a closed connection.
const HELD: [i32; 7] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGPIPE,
];

/// How long to let events accumulate: a program that opens and closes many files would wake the keeper for
/// each.
const GATHER: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// How often to check on processes that cannot be waited for.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Which of the two processes this is after [`apart`].
pub(super) enum Side {
    /// The process that becomes the program.
    Program,
    /// The keeper, with the program as it sees it.
    Keeper(Program),
}

/// Splits this process in two. No other thread may be running yet.
pub(super) fn apart() -> io::Result<Side> {
    let pid = getpid();
    let takes_orphans = pid.is_init() || child_subreaper()?.is_some();
    // Taken here, because by the time the keeper starts, the program may have ended and its number may have
    // been reused.
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

/// Like `fork`, but the child's end sends no signal. Returns the child in the parent, and `None` in the
/// child.
#[allow(unsafe_code)]
fn split() -> io::Result<Option<Pid>> {
    // All arguments are zero, so their order, which differs between architectures, does not matter.
    //
    // SAFETY: as for `fork`. No other thread is running whose locks the child would find taken forever, and
    // the child needs no handler of `pthread_atfork`; libc asks the kernel for its thread's number where that
    // matters.
    match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(Pid::from_raw(child as i32)),
    }
}

/// Returns a duplicate of an inherited descriptor that the command line names.
#[allow(unsafe_code)]
pub(super) fn inherited(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: if the number is not an open descriptor, duplicating it fails; nothing closes it meanwhile, as
    // no other thread runs.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok())?
}

/// The program, as seen by the keeper.
pub(super) struct Program {
    pid: Pid,
    /// Pidfd of the program. `None` if the kernel has none (before Linux 5.3); the program is then the
    /// keeper's parent.
    fd: Option<OwnedFd>,
}

impl Program {
    /// Creates the keeper's view of the program, and prepares this process to be the keeper.
    pub(super) fn new(pid: Pid, fd: Option<OwnedFd>) -> Self {
        signals::hold(&HELD);
        // Fails only for the leader of a process group, which a new process is not.
        let _ = rustix::process::setsid();
        Self { pid, fd }
    }

    /// Returns true if the program has ended. Processes that it started may still run.
    pub(super) fn has_ended(&self) -> bool {
        let Some(fd) = &self.fd else { return getppid() != Some(self.pid) };
        let mut wait = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut wait, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Returns the means to find the processes that the program leaves behind.
    pub(super) fn others(&self, directory: &Path) -> Others {
        Others::new(directory, self.pid)
    }

    /// Runs the keeper until the program and all processes that it left behind have ended.
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
                // Handle what the program left in its connections and descriptors.
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
                        // A process that cannot be found by its environment still uses the state.
                        limit = limit.or(Some(&LOOK));
                    }
                    // Programs that wait for the end of the program's output must not also wait for
                    // background processes.
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
                // Files closed in the meantime are seen afterwards.
                limit = Some(&GATHER);
                wait.extend(keeper.iter().flat_map(|keeper| keeper.questions()));
            } else {
                wait.extend(keeper.iter().flat_map(|keeper| keeper.events()));
            }
            // Fails only when a signal arrives.
            let _ = poll(&mut wait, limit);
            if is_over {
                let ended: Vec<bool> =
                    wait[..ours].iter().map(|w| !w.revents().is_empty()).collect();
                let mut ended = ended.into_iter();
                fds.retain(|_| !ended.next().unwrap_or(false));
            }
        }
    }
}

/// Releases the descriptors that are the program's: its standard streams, except standard error, which is
/// used for messages, and whatever else it inherits. Otherwise readers of its output would also wait for the
/// keeper, and locks (`flock`) and ports would stay taken as long as the keeper lives.
pub(super) fn let_go_of_inherited() {
    if let Ok(nothing) = nothing() {
        let _ = rustix::stdio::dup2_stdin(nothing.as_fd());
        let _ = rustix::stdio::dup2_stdout(nothing.as_fd());
    }
    close_all_inherited();
}

/// Closes all descriptors that this process had when it was executed, except the standard streams. To be called
/// before it has others. Without `/proc` they stay.
pub(crate) fn close_all_inherited() {
    for fd in descriptors().unwrap_or_default() {
        close_inherited(fd);
    }
}

/// Returns the numbers of the open descriptors, except the standard streams.
fn descriptors() -> rustix::io::Result<Vec<RawFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open("/proc/self/fd", flags, Mode::empty())?;
    let number = |entry: DirEntry| entry.file_name().to_str().ok()?.parse().ok();
    let numbers = Dir::new(folder)?.flatten().filter_map(number);
    Ok(numbers.filter(|fd| *fd > 2).collect())
}

/// Closes a descriptor that this process had when it was executed. Those that it has opened itself all close
/// on `exec`.
#[allow(unsafe_code)]
fn close_inherited(fd: RawFd) {
    // SAFETY: no other thread runs that could close the descriptor meanwhile; if it is closed already, the
    // call fails.
    let flags = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    if flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC)) {
        // SAFETY: nothing here owns an inherited descriptor.
        unsafe { rustix::io::close(fd) };
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
