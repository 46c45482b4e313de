//! `towline detach`: ends devices that `towline attach` made.

use crate::report::{Failure, Outcome, Report};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use towline_attach::{Error, Kind, Origin, Record, nbd, ublk};

const EXAMPLES: &str = "\
What was written to the device is first made durable on the server. A device that is mounted or
otherwise in use is left alone.

Examples:
  towline detach /dev/ublkb0
  towline detach nbd://host/vm1
  towline detach --force nbd3

Exit status: 0 all detached, 1 something was not, 2 wrong usage.";

/// Time after which a user is told why nothing happens.
const NOTICE: Duration = Duration::from_secs(5);
/// Time limit for the background process to end.
const LEAVE: Duration = Duration::from_secs(20);

/// Arguments of `detach`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Devices, or the URLs of their disks.
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<String>,
    /// Detach although it is in use, or its server or its process is gone: what was not written
    /// yet is lost, and requests under way fail.
    #[arg(long)]
    force: bool,
}

/// Runs `detach`.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("detach");
    for device in &args.devices {
        let wanted = device.trim_start_matches("/dev/");
        let same_disk = |record: &Record| {
            record.url == *device
                || Origin::parse(device).is_ok_and(|origin| origin.to_string() == record.url)
        };
        let found: Vec<_> = Record::all()
            .into_iter()
            .filter(|record| record.name() == wanted || same_disk(record))
            .collect();
        if found.is_empty() {
            report.error(device, Failure::new("not attached; see `towline attach --list`"));
        }
        for record in &found {
            report.check(device, detach(record, args.force, &report));
        }
    }
    report.status()
}

fn failure(error: &Error) -> Failure {
    Failure::new(error.to_string())
}

fn detach(record: &Record, force: bool, report: &Report) -> Outcome<()> {
    if force {
        kill(record);
    } else {
        if !record.is_held() {
            if !record.exists() {
                // Another program removed the device; only its record is left.
                record.remove();
                return Ok(());
            }
            let text = "the process that served it is gone; continue with `towline attach --resume`, or use --force";
            return Err(Failure::new(text));
        }
        settle(record, report)?;
    }
    let ended = match record.kind {
        // What has its number now may belong to another program.
        _ if !record.exists() => Ok(()),
        Kind::Nbd => nbd::Kernel::detach(record.number),
        Kind::Ublk => ublk::Control::open().and_then(|mut control| {
            if control.information(record.number)?.is_none() {
                return Ok(());
            }
            control.stop(record.number)?;
            if force { control.delete_later(record.number) } else { control.delete(record.number) }
        }),
    };
    ended.map_err(|error| failure(&error))?;
    let end = Instant::now() + LEAVE;
    while record.is_held() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    record.remove();
    Ok(())
}

/// Makes earlier writes durable. Fails if the device is in use.
fn settle(record: &Record, report: &Report) -> Outcome<()> {
    let path = format!("/dev/{}", record.name());
    let open =
        |access| rustix::fs::open(&path, access | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    let file = match open(OFlags::RDWR) {
        Err(rustix::io::Errno::ROFS | rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) => {
            return match open(OFlags::RDONLY) {
                Err(rustix::io::Errno::BUSY) => Err(in_use()),
                _ => Ok(()),
            };
        }
        Err(rustix::io::Errno::BUSY) => return Err(in_use()),
        // The device is gone already.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NXIO) => return Ok(()),
        other => other?,
    };
    let told = || {
        let text =
            "waiting for the server; `towline detach --force` gives up what is not written yet";
        report.warning(&path, text);
    };
    with_notice(NOTICE, told, || rustix::fs::fsync(&file)).map_err(|error| {
        Failure::from(error).with("not everything could be written; it stays attached")
    })
}

/// Does something that may wait so deep in the kernel that no signal ends it, and calls `told` if it takes
/// longer than `patience`.
fn with_notice<T>(patience: Duration, told: impl FnOnce() + Send, work: impl FnOnce() -> T) -> T {
    let (working, done) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let watch = move || {
            if done.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                told();
            }
        };
        // Without a thread it waits silently.
        let _ = std::thread::Builder::new().spawn_scoped(scope, watch);
        let result = work();
        drop(working);
        result
    })
}

fn in_use() -> Failure {
    Failure::new("it is in use (mounted?); unmount it first, or use --force")
}

/// Kills the process that serves the device, and waits until it is gone.
fn kill(record: &Record) {
    let end = Instant::now() + LEAVE;
    while record.is_held() && Instant::now() < end {
        if let Some(process) = i32::try_from(record.process).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process(process, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::with_notice;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn who_waits_long_is_told_why() {
        let (told, telling) = mpsc::channel();
        let told = move || told.send(()).unwrap();
        // It ends only once it was told.
        with_notice(Duration::ZERO, told, || telling.recv().unwrap());
        let quick =
            with_notice(Duration::from_secs(600), || panic!("there is nothing to tell"), || 7);
        assert_eq!(quick, 7);
    }
}
