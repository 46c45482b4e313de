//! Runs one or many client processes that start together.

use super::local::Local;
use super::processes::{self, mark, mark_after};
use super::processor::{Pinned, end_with_parent};
use super::result::{Measured, summary};
use super::threads::at_once;
use super::tree;
use super::workload::{Args, Worker};
use crate::report::say;
use std::process::Command;
use std::time::{Duration, Instant};

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

    /// Runs for `left` seconds and measures the last `secs` of them.
    fn run(&mut self, left: f64, secs: f64) -> Result<Measured, String> {
        let end = Instant::now() + Duration::from_secs_f64(left);
        self.measured().start(left - secs);
        loop {
            match self {
                Self::Remote(worker) => worker.run(end)?,
                Self::Local(local) => local.run(end)?,
            }
            // A scan may be over before the ramp is.
            if !self.measured().is_ramping() || Instant::now() >= end {
                break;
            }
        }
        self.measured().end();
        Ok(std::mem::replace(self.measured(), Measured::new()))
    }

    fn measured(&mut self) -> &mut Measured {
        match self {
            Self::Remote(worker) => worker.measured(),
            Self::Local(local) => local.measured(),
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
        let mut loads = loads(args, 0)?;
        if args.ramp > 0.0 {
            let ramp = Duration::from_secs_f64(args.ramp);
            // Ends with the process, if that fails before.
            std::thread::spawn(move || mark_after(ramp, "start"));
        } else {
            mark("start")?;
        }
        let measured = run_all(&mut loads, 0, args.ramp + args.secs, args.secs);
        mark("end")?;
        measured?
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

/// Connects the clients of process `number`.
fn loads(args: &Args, number: usize) -> Result<Vec<Load>, String> {
    let first = number * args.threads;
    (first..first + args.threads).map(|client| Load::new(args, client)).collect()
}

/// Runs clients, numbered from `first`, together for `left` seconds, each on a thread of its own, and measures the last `secs` of them.
fn run_all(
    loads: &mut [Load],
    first: usize,
    left: f64,
    secs: f64,
) -> Result<Vec<Measured>, String> {
    if let [load] = loads {
        return Ok(vec![load.run(left, secs)?]);
    }
    let results = at_once(first, loads.iter_mut(), Duration::from_secs_f64(left), |load, left| {
        load.run(left.as_secs_f64(), secs)
    });
    results.into_iter().collect()
}

/// Runs a client process: connects, and then its part of what [`processes::together`] does.
fn work(args: &Args, number: usize) -> Result<(), String> {
    end_with_parent();
    let _pinned = pin(args, number)?;
    let mut loads = loads(args, number)?;
    let first = number * args.threads;
    processes::take_part(|left| run_all(&mut loads, first, left, args.secs))
}

/// Runs several client processes at the same time and collects their results.
fn many(args: &Args) -> Result<Vec<Measured>, String> {
    let Args { procs, ramp, secs, .. } = *args;
    processes::together(procs, ramp, secs, |number, command| tell(args, number, command))
}

/// Adds the arguments that start a client process.
fn tell(args: &Args, number: usize, command: &mut Command) {
    command.args(["bench", "file", "--server", &args.server, "--op", &args.op]);
    for (flag, value) in [
        ("--bs", args.bs.to_string()),
        ("--qd", args.qd.to_string()),
        ("--procs", args.procs.to_string()),
        ("--threads", args.threads.to_string()),
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
}
