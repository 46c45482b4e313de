//! The process that stays: it starts the program, adopts what the program leaves in the background,
//! and keeps their remote files open until the last of them has ended.
//!
//! The program's parent is a child of the process that the user started, so that the latter can end
//! with the program while the former goes on.

use crate::report::Outcome;
use rustix::process::{Pid, WaitOptions, WaitStatus};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

/// Which of the two processes goes on after [`apart`].
pub(super) enum Side {
    /// The one that the user waits for: it gets the exit status from the other.
    Waits { child: Pid, status: std::io::PipeReader },
    /// The one that runs the program, and tells its exit status.
    Runs(std::io::PipeWriter),
}

/// Makes two processes of this one. No other thread may run yet.
#[allow(unsafe_code)]
pub(super) fn apart() -> Outcome<Side> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: nothing was started yet: there is no other thread whose locks the child would find
    // taken for ever.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let Some(child) = Pid::from_raw(child) else {
        drop(reader);
        // What the program leaves behind becomes a child of this process.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(io::Error::from)?;
        return Ok(Side::Runs(writer));
    };
    Ok(Side::Waits { child, status: reader })
}

/// Waits for the exit status that the other process tells; `None`: it ended without a word.
pub(super) fn told(mut status: std::io::PipeReader) -> Option<u8> {
    let mut byte = [0];
    loop {
        match status.read(&mut byte) {
            Ok(1) => return Some(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

/// Waits until the program has ended, and reaps what it left behind meanwhile.
pub(super) fn until_end_of(program: &Child) -> io::Result<ExitStatus> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() as u32 == program.id() => {
                return Ok(ExitStatus::from_raw(WaitStatus::as_raw(status)));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
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

/// Tells the exit status, lets go of the terminal, and waits for all that is left of the run.
pub(super) fn in_background(status: u8, mut tell: std::io::PipeWriter) -> io::Result<()> {
    let nothing = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(nothing.as_fd())?;
    rustix::stdio::dup2_stdout(nothing.as_fd())?;
    rustix::stdio::dup2_stderr(nothing.as_fd())?;
    // Fails only when nobody waits any more.
    let _ = tell.write_all(&[status]);
    drop(tell);
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Nobody is left.
            Err(_) => return Ok(()),
        }
    }
}
