//! Runs one or many client processes that start together.

use super::local::Local;
use super::processor::{Pinned, end_with_parent};
use super::result::{Measured, Sent, monotonic, summary};
use super::tree;
use super::workload::{Args, Worker};
use crate::report::say;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Prints a mark that tells the harness what to count, and gives it time to take its figures before the
/// measurement goes on.
fn mark(text: &str) -> Result<(), String> {
    say(format_args!("#{text}"))?;
    std::thread::sleep(Duration::from_millis(8));
    Ok(())
}

/// A client, ready to run its workload.
enum Load {
    Remote(Worker),
    Local(Local),
}

impl Load {
    fn new(args: &Args, number: usize) -> Result<Self, String> {
        if args.server.starts_with('/') {
            return Ok(Self::Local(Local::new(args, number as u64)?));
        }
        Ok(Self::Remote(Worker::new(args, number as u64)?))
    }

    fn run(&mut self, secs: f64) -> Result<Measured, String> {
        match self {
            Self::Remote(worker) => worker.run(secs),
            Self::Local(local) => local.run(secs),
        }
    }
}

/// Runs the clients and prints the result.
pub(super) fn run(args: &Args) -> Result<(), String> {
    tree::check(args)?;
    if let Some(number) = args.worker {
        return work(args, number);
    }
    let results = if args.procs == 1 {
        let _pinned = pin(args, 0)?;
        let mut load = Load::new(args, 0)?;
        mark("start")?;
        let measured = load.run(args.secs);
        mark("end")?;
        vec![measured?]
    } else {
        many(args)?
    };
    let summary = summary(&results);
    say(&summary)?;
    match summary["errors"].as_u64() {
        Some(0) => Ok(()),
        _ => Err("operations failed, see \"errors\"".into()),
    }
}

fn pin(args: &Args, number: usize) -> Result<Option<Pinned>, String> {
    if args.pin.is_empty() {
        return Ok(None);
    }
    Pinned::to(args.pin[number % args.pin.len()]).map(Some)
}

/// Runs a client process: connects, reports that it is ready, waits for the start, runs the workload and
/// sends the result to its parent.
fn work(args: &Args, number: usize) -> Result<(), String> {
    end_with_parent();
    let _pinned = pin(args, number)?;
    let mut load = Load::new(args, number)?;
    say("ready")?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(|e| e.to_string())?;
    // The start may arrive late, but all clients end at the same time.
    let end: f64 = line.trim().parse().map_err(|_| format!("client {number}: never started"))?;
    let measured = load.run((end - monotonic()).max(0.0))?;
    let text = serde_json::to_string(&measured.to_sent()).map_err(|e| e.to_string())?;
    say(text)
}

struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(args: &Args, number: usize) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "file", "--server", &args.server, "--op", &args.op]);
        for (flag, value) in [
            ("--bs", args.bs.to_string()),
            ("--qd", args.qd.to_string()),
            ("--procs", args.procs.to_string()),
            ("--secs", args.secs.to_string()),
            ("--files", args.files.to_string()),
            ("--bigsize", args.bigsize.to_string()),
            ("--worker", number.to_string()),
        ] {
            command.args([flag, &value]);
        }
        if let Some(coalesce) = args.coalesce {
            command.args(["--coalesce", &coalesce.to_string()]);
        }
        if let Some(spin) = args.spin_us {
            command.args(["--spin-us", &spin.to_string()]);
        }
        if !args.pin.is_empty() {
            let list: Vec<_> = args.pin.iter().map(ToString::to_string).collect();
            command.args(["--pin", &list.join(",")]);
        }
        command.args(args.again.then_some("--again"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(count) if count > 0 => Ok(line),
            _ => Err("a client process ended early".into()),
        }
    }
}

/// Runs several client processes at the same time and collects their results.
fn many(args: &Args) -> Result<Vec<Measured>, String> {
    let mut processes = Vec::new();
    for number in 0..args.procs {
        processes.push(Process::start(args, number).map_err(|e| format!("client process: {e}"))?);
    }
    for process in &mut processes {
        process.line()?;
    }
    mark("start")?;
    let end = format!("{}\n", monotonic() + args.secs);
    for process in &mut processes {
        if let Some(mut input) = process.child.stdin.take() {
            input.write_all(end.as_bytes()).map_err(|e| e.to_string())?;
        }
    }
    std::thread::sleep(Duration::from_secs_f64(args.secs));
    mark("end")?;
    let mut results = Vec::new();
    for mut process in processes {
        let line = process.line()?;
        let sent: Sent = serde_json::from_str(&line).map_err(|e| e.to_string())?;
        results.push(sent.into_measured());
        let status = process.child.wait().map_err(|e| e.to_string())?;
        if !status.success() {
            return Err("a client process failed".into());
        }
    }
    Ok(results)
}
