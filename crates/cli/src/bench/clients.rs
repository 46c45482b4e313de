//! Runs one or many client processes that start together.

use super::local::Local;
use super::processes::{self, mark};
use super::processor::{Pinned, end_with_parent};
use super::result::{Measured, summary};
use super::threads::at_once;
use super::tree;
use super::workload::{Args, Worker};
use crate::report::say;
use std::process::Command;
use std::time::Duration;

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
        let mut loads = loads(args, 0)?;
        mark("start")?;
        let measured = run_all(&mut loads, args.secs);
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

/// Runs clients together, each on a thread of its own.
fn run_all(loads: &mut [Load], secs: f64) -> Result<Vec<Measured>, String> {
    if let [load] = loads {
        return Ok(vec![load.run(secs)?]);
    }
    let limit = Duration::from_secs_f64(secs);
    let results = at_once(loads.iter_mut(), limit, |load, limit| load.run(limit.as_secs_f64()));
    results.into_iter().collect()
}

/// Runs a client process: connects, and then its part of what [`processes::together`] does.
fn work(args: &Args, number: usize) -> Result<(), String> {
    end_with_parent();
    let _pinned = pin(args, number)?;
    let mut loads = loads(args, number)?;
    processes::take_part(|secs| run_all(&mut loads, secs))
}

/// Runs several client processes at the same time and collects their results.
fn many(args: &Args) -> Result<Vec<Measured>, String> {
    processes::together(args.procs, args.secs, |number, command| tell(args, number, command))
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
