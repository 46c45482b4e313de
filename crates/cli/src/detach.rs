//! `towline detach`: ends devices that `towline attach` made.

mod settle;

use crate::interrupt::Interrupt;
use crate::report::{Failure, Outcome, Report};
use rustix::process::{Pid, Signal};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use towline_attach::{Error, Kind, Origin, Record, nbd, ublk};

const EXAMPLES: &str = "\
What was written to the device is first made durable on the server. A device that is mounted or
otherwise in use is left alone. While its server is away this waits, and can be interrupted.

Examples:
  towline detach /dev/ublkb0
  towline detach nbd://host/vm1
  towline detach --force nbd3

Exit status: 0 all detached, 1 something was not, 2 wrong usage.";

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
    /// The process that makes what was written to a device durable.
    #[arg(long, hide = true, conflicts_with = "force")]
    settle: bool,
}

/// Runs `detach`.
pub(crate) fn run(args: &Args) -> ExitCode {
    if let (true, Some(path)) = (args.settle, args.devices.first()) {
        return settle::run(path);
    }
    let report = Report::new("detach");
    let interrupt = Interrupt::new(
        "towline: detach: stopped in the middle; `towline attach --list` shows what is still attached",
    );
    for device in &args.devices {
        if interrupt.came() {
            break;
        }
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
            report.check(device, detach(record, args.force, &report, &interrupt));
        }
    }
    interrupt.end();
    report.status()
}

fn failure(error: &Error) -> Failure {
    Failure::new(error.to_string())
}

fn detach(record: &Record, force: bool, report: &Report, interrupt: &Interrupt) -> Outcome<()> {
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
        let path = format!("/dev/{}", record.name());
        let told = || {
            let text =
                "waiting for the server; `towline detach --force` gives up what is not written yet";
            report.warning(&path, text);
        };
        settle::settle(&path, told, || interrupt.came())?;
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
