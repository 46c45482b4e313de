//! One or many client processes, started together.

use super::result::{Measured, Sent, summary};
use super::workload::{Args, Worker};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Prints a mark that tells the harness what to count.
fn mark(text: &str) {
    println!("#{text}");
    // Flushed by the line end on a terminal only.
    let _ = std::io::stdout().flush();
}

/// Runs the clients and prints the result.
pub(super) fn run(args: &Args) -> Result<(), String> {
    if let Some(number) = args.worker {
        return work(args, number);
    }
    let results = if args.procs <= 1 {
        let worker = Worker::new(args, 0)?;
        mark("start");
        let measured = worker.run();
        mark("end");
        vec![measured?]
    } else {
        many(args)?
    };
    let summary = summary(&results);
    println!("{summary}");
    match summary["errors"].as_u64() {
        Some(0) => Ok(()),
        _ => Err("operations failed, see \"errors\"".into()),
    }
}

/// A client process: connects, says so, waits for the start, runs, and tells its parent.
fn work(args: &Args, number: usize) -> Result<(), String> {
    let worker = Worker::new(args, number)?;
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(|e| e.to_string())?;
    let measured = worker.run()?;
    let text = serde_json::to_string(&measured.to_sent()).map_err(|e| e.to_string())?;
    println!("{text}");
    Ok(())
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

fn many(args: &Args) -> Result<Vec<Measured>, String> {
    let mut processes = Vec::new();
    for number in 0..args.procs {
        processes.push(Process::start(args, number).map_err(|e| format!("client process: {e}"))?);
    }
    for process in &mut processes {
        process.line()?;
    }
    mark("start");
    for process in &mut processes {
        if let Some(mut input) = process.child.stdin.take() {
            input.write_all(b"go\n").map_err(|e| e.to_string())?;
        }
    }
    std::thread::sleep(std::time::Duration::from_secs_f64(args.secs));
    mark("end");
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
