//! Processes of this program that measure together: they start when all are ready, and end together.

use super::result::{Measured, Sent, monotonic};
use crate::report::{note, say};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Prints a mark that tells the harness what to count, and gives it time to take its figures before the
/// measurement goes on.
pub(super) fn mark(text: &str) -> Result<(), String> {
    say(format_args!("#{text}"))?;
    std::thread::sleep(Duration::from_millis(8));
    Ok(())
}

/// Reports that this process is ready, waits for the start, calls `run` with the seconds to measure, and
/// sends the result to its parent, which is in [`together`].
pub(super) fn take_part(run: impl FnOnce(f64) -> Result<Measured, String>) -> Result<(), String> {
    say("ready")?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(|e| e.to_string())?;
    // The start may arrive late, but all processes end at the same time.
    let end: f64 = line.trim().parse().map_err(|_| "the measurement never started")?;
    let measured = run((end - monotonic()).max(0.0))?;
    let text = serde_json::to_string(&measured.to_sent()).map_err(|e| e.to_string())?;
    say(text)
}

/// Runs `count` processes of this program, which [take part](take_part), and collects their results. `tell`
/// gets the number of each and adds its arguments.
pub(super) fn together(
    count: usize,
    secs: f64,
    tell: impl Fn(usize, &mut Command),
) -> Result<Vec<Measured>, String> {
    let start = |number| {
        let mut command = Command::new(std::env::current_exe()?);
        tell(number, &mut command);
        Process::start(&mut command)
    };
    let mut processes = (0..count)
        .map(start)
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|error| format!("client process: {error}"))?;
    for process in &mut processes {
        process.line()?;
    }
    mark("start")?;
    let end = format!("{}\n", monotonic() + secs);
    for process in &mut processes {
        if let Some(mut input) = process.child.stdin.take() {
            input.write_all(end.as_bytes()).map_err(|e| e.to_string())?;
        }
    }
    std::thread::sleep(Duration::from_secs_f64(secs));
    mark("end")?;
    let (mut results, mut errors) = (Vec::new(), BTreeSet::new());
    for mut process in processes {
        let line = process.line()?;
        let sent: Sent = serde_json::from_str(&line).map_err(|e| e.to_string())?;
        results.push(sent.into_measured());
        let status = process.child.wait().map_err(|e| e.to_string())?;
        if !status.success() {
            return Err(process.failure());
        }
        errors.extend(process.errors());
    }
    // Many clients often meet the same error.
    errors.iter().for_each(note);
    Ok(results)
}

struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    errors: ChildStderr,
}

impl Process {
    fn start(command: &mut Command) -> std::io::Result<Self> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (output, errors) =
            child.stdout.take().zip(child.stderr.take()).ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, output: BufReader::new(output), errors })
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(count) if count > 0 => Ok(line),
            _ => Err(self.failure()),
        }
    }

    /// Returns the lines of errors of the process, which has ended.
    fn errors(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        // What cannot be read was not said.
        let _ = self.errors.read_to_end(&mut said);
        String::from_utf8_lossy(&said).lines().map(str::to_owned).collect()
    }

    /// Returns why the process, which has ended, failed.
    fn failure(&mut self) -> String {
        match self.errors().last() {
            Some(line) => line.strip_prefix("towline: bench: ").unwrap_or(line).to_owned(),
            None => "a client process ended early".to_owned(),
        }
    }
}
