//! Makes what was written to a device durable, in another process.
//!
//! While its server is away, opening a device and flushing it wait in the kernel, and no signal ends that. So another
//! process of this program does both, and this one can be interrupted while it waits for the other.

use crate::report::{Failure, Outcome, say};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time after which a user is told why nothing happens.
const NOTICE: Duration = Duration::from_secs(5);
/// Interval for checking whether the other process has ended, or this one should.
const LOOK: Duration = Duration::from_millis(5);

/// Makes earlier writes to the device at this path durable. Calls `told` if that takes long, and gives up once
/// `stopped` returns true.
///
/// # Errors
/// If the device is in use, if not everything could be written, or if it was given up.
pub(super) fn settle(path: &str, told: impl FnOnce(), stopped: impl Fn() -> bool) -> Outcome<()> {
    let mut other = Command::new(std::env::current_exe()?)
        .args(["detach", "--settle", path])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Only this process decides what Ctrl-C means.
        .process_group(0)
        .spawn()?;
    let Some(status) = wait(&mut other, NOTICE, told, stopped)? else {
        return Err(Failure::new("interrupted while waiting for its server; it stays attached"));
    };
    let mut said = String::new();
    if let Some(mut output) = other.stdout.take() {
        output.read_to_string(&mut said)?;
    }
    match said.trim_end() {
        _ if status.success() => Ok(()),
        "" => Err(Failure::new(format!("the process that flushes it ended: {status}"))
            .with("it stays attached")),
        said => Err(Failure::new(said)),
    }
}

/// Waits for a process. Calls `told` if that takes longer than `notice`. Once `stopped` returns true, kills the
/// process and returns `None`. It then ends when the kernel's wait does.
fn wait(
    process: &mut Child,
    notice: Duration,
    told: impl FnOnce(),
    stopped: impl Fn() -> bool,
) -> io::Result<Option<ExitStatus>> {
    let (begun, mut told) = (Instant::now(), Some(told));
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(Some(status));
        }
        if stopped() {
            process.kill()?;
            return Ok(None);
        }
        if begun.elapsed() >= notice
            && let Some(told) = told.take()
        {
            told();
        }
        std::thread::sleep(LOOK);
    }
}

/// The other process. Prints why it fails.
pub(super) fn run(path: &str) -> ExitCode {
    match flush(path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Whoever would read it may have been interrupted.
            let _ = say(failure);
            ExitCode::FAILURE
        }
    }
}

fn flush(path: &str) -> Outcome<()> {
    let open =
        |access| rustix::fs::open(path, access | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    let device = match open(OFlags::RDWR) {
        Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) => {
            return match open(OFlags::RDONLY) {
                Err(Errno::BUSY) => Err(in_use()),
                _ => Ok(()),
            };
        }
        Err(Errno::BUSY) => return Err(in_use()),
        // The device is gone already.
        Err(Errno::NOENT | Errno::NXIO) => return Ok(()),
        other => other?,
    };
    rustix::fs::fsync(&device).map_err(|error| {
        Failure::from(error).with("not everything could be written; it stays attached")
    })
}

fn in_use() -> Failure {
    Failure::new("it is in use (mounted?); unmount it first, or use --force")
}

#[cfg(test)]
mod tests {
    use super::{flush, wait};
    use std::cell::Cell;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn who_waits_long_is_told_why_and_can_give_up() {
        let told = Cell::new(false);
        let mut long = Command::new("sleep").arg("60").spawn().unwrap();
        let ended = wait(&mut long, Duration::ZERO, || told.set(true), || told.get()).unwrap();
        assert!(ended.is_none() && told.get());
        let killed = long.wait().unwrap();
        assert_eq!(killed.signal(), Some(libc::SIGKILL));
        let mut short = Command::new("true").spawn().unwrap();
        let nothing = || panic!("there is nothing to tell");
        let ended = wait(&mut short, Duration::from_secs(600), nothing, || false).unwrap();
        assert!(ended.unwrap().success());
    }

    #[test]
    fn what_could_not_be_flushed_is_said() {
        let said = flush("/dev/null").unwrap_err().to_string();
        assert_eq!(said, "invalid argument; not everything could be written; it stays attached");
        flush("/dev/no-such-device").unwrap();
    }
}
