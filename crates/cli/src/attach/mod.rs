//! `towline attach`: remote disks as local block devices.
//!
//! The command starts a background process that serves the device (`serve.rs`), waits until the device
//! can be used, and prints its name. A record of it serves `--list`, `--resume` and `towline detach`.

mod serve;

use crate::report::{Failure, Outcome, Report, writable};
use crate::serve::parse_bytes;
use crate::text::human;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::process::{Command, ExitCode, Stdio};
use towline_attach::{Kind, Record, read_ahead, ublk};

const EXAMPLES: &str = "\
The disk becomes /dev/ublkbN (--ublk: requests go to a process of ours) or /dev/nbdN (--nbd: the
kernel speaks NBD itself). Without either flag it is ublk where the kernel has it. The module has
to be loaded: modprobe ublk_drv, or modprobe nbd.

The device outlives the server and the process that serves it: requests wait until the server is
back, and after the process was killed until `towline attach --resume`.

Examples:
  towline attach towline://host/vm1
  towline attach nbd://host/vm1
  towline attach 'nbd+unix:///scratch?socket=/run/nbd.sock' --nbd --number 3
  towline attach nbd://host/vm1 --dead-after 300 --queues 2
  towline attach towline://host/backups --read-ahead 16M
  towline attach --list
  towline attach --resume
  towline detach /dev/ublkb0

Exit status: 0 attached, 1 not, 2 wrong usage.";

/// Longest read-ahead in bytes; anything beyond is taken for a mistake.
const READ_AHEAD_MAX: u64 = 1 << 30;

/// Highest number of a device, for which the kernel has 20 bits.
const NUMBER_MAX: i64 = (1 << 20) - 1;

/// Longest time that can be given, 30 days, because the kernel counts ticks in 32 bits.
const SECONDS_MAX: u64 = 30 * 24 * 3600;

/// Arguments for a new device, which `--list` and `--resume` refuse.
const NEW: [&str; 9] =
    ["url", "ublk", "nbd", "number", "queues", "depth", "read_ahead", "dead_after", "timeout"];

/// Arguments of `attach`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The disk: a Towline URL such as towline://HOST/NAME, nbd://HOST/NAME or
    /// nbd+unix:///NAME?socket=PATH.
    #[arg(value_name = "URL", required_unless_present_any = ["list", "resume"])]
    url: Option<String>,
    /// Through ublk: /dev/ublkbN.
    #[arg(long)]
    ublk: bool,
    /// Through the kernel's NBD client: /dev/nbdN.
    #[arg(long, conflicts_with = "ublk")]
    nbd: bool,
    /// N in the name of the device; any that is free unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=NUMBER_MAX))]
    number: Option<u32>,
    /// Connections to the server, with ublk each with a queue and a thread; default: one for each
    /// processor, at most 4. One where the server does not allow more.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=128))]
    queues: Option<u16>,
    /// Requests under way in each queue (ublk); default: 64.
    #[arg(long, value_name = "N", conflicts_with = "nbd",
        value_parser = clap::value_parser!(u16).range(1..=4096))]
    depth: Option<u16>,
    /// Bytes that the kernel reads ahead of sequential readers of the device, like `blockdev --setra` (which counts
    /// sectors); 0 for nothing. Default: by the time that the server takes to answer, 512K to 8M.
    #[arg(long, value_name = "SIZE", value_parser = read_ahead_bytes)]
    read_ahead: Option<u64>,
    /// Seconds that requests wait for a server that went away before they fail; default: for ever.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    dead_after: Option<u64>,
    /// Seconds until the kernel asks again on another connection (NBD); default: 30.
    #[arg(long, value_name = "SECONDS", conflicts_with = "ublk",
        value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    timeout: Option<u64>,
    /// Stay in the foreground, for a service manager; print the device when it can be used.
    #[arg(long)]
    foreground: bool,
    /// List what is attached.
    #[arg(long, conflicts_with_all = NEW, conflicts_with_all = ["foreground", "resume"])]
    list: bool,
    /// With --list: as JSON.
    #[arg(long, requires = "list")]
    json: bool,
    /// Go on with devices whose process is gone: all, or this one.
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, default_missing_value = "",
        conflicts_with_all = NEW)]
    resume: Option<String>,
    /// With --resume: go on although the server's machine failed, which loses what was written and not synced.
    #[arg(long, conflicts_with_all = NEW, conflicts_with = "list")]
    force: bool,
    /// The process in the background.
    #[arg(long, hide = true, requires = "foreground")]
    background: bool,
}

/// Parses a read-ahead, which the kernel counts in KiB.
fn read_ahead_bytes(text: &str) -> Result<u64, String> {
    let bytes = if text == "0" { 0 } else { parse_bytes(text)? };
    match bytes % 1024 == 0 && bytes <= READ_AHEAD_MAX {
        true => Ok(bytes),
        false => Err("whole KiB, at most 1G".to_owned()),
    }
}

/// Runs `attach`.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("attach");
    if args.list {
        report.output(list(args.json));
    } else if let Some(device) = &args.resume {
        resume(args, device, &report);
    } else if let Some(url) = &args.url {
        report.check(url, attach(args, url, &report));
    }
    report.status()
}

fn attach(args: &Args, url: &str, report: &Report) -> Outcome<()> {
    // First, so that the kernel is not blamed for a mistyped URL.
    let origin = serve::origin(url)?;
    let kind = kind(args)?;
    fits(args, kind)?;
    if args.foreground {
        serve::attach(args, &origin, kind).map_err(|failure| failure.about(&origin))
    } else {
        start(args, url, kind, report)
    }
}

/// Chooses between ublk and NBD, by the flags and by what the kernel has.
fn kind(args: &Args) -> Outcome<Kind> {
    if args.nbd {
        return Ok(Kind::Nbd);
    }
    let ours = args.url.as_deref().is_some_and(towline_client::Url::looks_like);
    match ublk::Control::open() {
        Ok(_) => Ok(Kind::Ublk),
        Err(_) if !args.ublk && !ours && std::path::Path::new("/sys/module/nbd").exists() => {
            Ok(Kind::Nbd)
        }
        Err(error) if args.ublk || ours => Err(failure(&error)),
        Err(error) => {
            Err(failure(&error).with("nor is the kernel's NBD client loaded (modprobe nbd)"))
        }
    }
}

fn failure(error: &towline_attach::Error) -> Failure {
    Failure::new(error.to_string())
}

/// Refuses flags that do not apply to the chosen kind.
fn fits(args: &Args, kind: Kind) -> Outcome<()> {
    match kind {
        Kind::Nbd if args.depth.is_some() => {
            Err(Failure::new("--depth needs ublk, which this kernel has not loaded"))
        }
        Kind::Ublk if args.timeout.is_some() => {
            Err(Failure::new("--timeout only applies to --nbd: ublk waits for this process"))
        }
        _ => Ok(()),
    }
}

/// Starts the background process and waits until its device can be used.
fn start(args: &Args, url: &str, kind: Kind, report: &Report) -> Outcome<()> {
    let mut flags = vec![url.to_owned()];
    flags.push(match kind {
        Kind::Ublk => "--ublk".to_owned(),
        Kind::Nbd => "--nbd".to_owned(),
    });
    let mut flag = |name: &str, value: Option<String>| {
        flags.extend(value.map(|value| format!("--{name}={value}")));
    };
    flag("number", args.number.map(|n| n.to_string()));
    flag("queues", args.queues.map(|n| n.to_string()));
    flag("depth", args.depth.map(|n| n.to_string()));
    flag("read-ahead", args.read_ahead.map(|n| n.to_string()));
    flag("dead-after", args.dead_after.map(|n| n.to_string()));
    flag("timeout", args.timeout.map(|n| n.to_string()));
    in_background(&flags, report)
}

fn in_background(flags: &[String], report: &Report) -> Outcome<()> {
    let program = std::env::current_exe()?;
    let mut child = Command::new(program)
        .arg("attach")
        .args(["--foreground", "--background"])
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut device = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut device)?;
    }
    if device.ends_with('\n') {
        let mut out = std::io::stdout();
        let said = out.write_all(device.as_bytes()).and_then(|()| out.flush());
        return said.and_then(|()| writable()).map_err(|error| {
            let attached = format!("{} is attached", device.trim_end());
            Failure::from(error).about("standard output").with(attached)
        });
    }
    child.wait()?;
    // The process has given the reason on standard error.
    report.failed_elsewhere();
    Ok(())
}

fn resume(args: &Args, device: &str, report: &Report) {
    let wanted = device.trim_start_matches("/dev/");
    let records = Record::all();
    let found: Vec<_> =
        records.iter().filter(|r| wanted.is_empty() || r.name() == wanted).collect();
    if found.is_empty() && !wanted.is_empty() {
        report.error(device, Failure::new("not attached; see `towline attach --list`"));
    }
    for record in found {
        if record.is_held() {
            if !wanted.is_empty() {
                report.error(device, Failure::new("served already"));
            }
            continue;
        }
        let resumed = if !record.exists() {
            // Its server may be gone as well, and would be waited for.
            Err(Failure::new("the device is gone; `towline detach` removes its record"))
        } else if args.foreground {
            serve::resume(args, record)
        } else {
            let mut flags = vec![format!("--resume={}", record.name())];
            flags.extend(args.force.then(|| "--force".to_owned()));
            in_background(&flags, report)
        };
        report.check(record.name(), resumed);
    }
}

/// Returns the state of a device for `--list`.
fn state(record: &Record) -> &'static str {
    match (record.exists(), record.is_held()) {
        (false, _) => "gone",
        (true, true) => "served",
        (true, false) => "waiting",
    }
}

fn list(json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let records = Record::all();
    if json {
        let rows: Vec<_> = records
            .iter()
            .map(|record| {
                serde_json::json!({
                    "device": format!("/dev/{}", record.name()),
                    "url": record.url,
                    "state": state(record),
                    "process": record.process,
                    "size": record.size_now(),
                    "connections": record.connections,
                    "read_ahead": read_ahead::of(&record.name()).ok(),
                })
            })
            .collect();
        return writeln!(out, "{}", serde_json::Value::Array(rows));
    }
    if records.is_empty() && out.is_terminal() {
        return writeln!(out, "nothing is attached");
    }
    for record in &records {
        let device = format!("/dev/{}", record.name());
        let (size, state) = (human(record.size_now()), state(record));
        writeln!(out, "{device:<14} {size:>8} {state:<8} {:>7} {}", record.process, record.url)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Args, NEW, in_background};
    use crate::report::Report;
    use clap::Parser;
    use std::process::ExitCode;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(line: &str) -> Option<Args> {
        Cli::try_parse_from(format!("attach {line}").split(' ')).ok().map(|cli| cli.args)
    }

    #[test]
    fn a_device_that_cannot_be_resumed_keeps_no_other_from_it() {
        // The process is this test program, which takes no such flags and so fails.
        let report = Report::new("attach");
        assert!(in_background(&["--resume=ublkb9".to_owned()], &report).is_ok());
        assert_eq!(format!("{:?}", report.status()), format!("{:?}", ExitCode::FAILURE));
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
        let flags = [
            "--ublk",
            "--nbd",
            "--number=1",
            "--queues=1",
            "--depth=1",
            "--read-ahead=1M",
            "--dead-after=1",
            "--timeout=1",
        ];
        assert_eq!(flags.len() + 1, NEW.len(), "and the URL");
        for flag in flags {
            assert!(parsed(&format!("{flag} nbd://host/vm1")).is_some(), "{flag}");
            let lines =
                ["--list", "--list --json", "--resume", "--resume=ublkb0", "--resume --force"];
            for line in lines {
                assert!(parsed(line).is_some(), "{line}");
                assert!(parsed(&format!("{line} {flag}")).is_none(), "{line} {flag}");
            }
        }
        for line in [
            "--list nbd://host/vm1",
            "--resume=ublkb0 nbd://host/vm1",
            "--list --foreground",
            "--list --resume",
            "--list --force",
            "--force nbd://host/vm1",
            "--nbd --depth=1 nbd://host/vm1",
            "--ublk --timeout=1 nbd://host/vm1",
            "--ublk --nbd nbd://host/vm1",
            // The kernel would take them for any number, or count them modulo 2^32 ticks.
            "--number=4294967295 nbd://host/vm1",
            "--nbd --timeout=4294968 nbd://host/vm1",
            "--dead-after=18446744073709551615 nbd://host/vm1",
        ] {
            assert!(parsed(line).is_none(), "{line}");
        }
    }
}
