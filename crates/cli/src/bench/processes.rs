//! Processes of this program that measure together: they start when all are ready, and end together.

use super::processor::start_spread;
use super::result::{Measured, Sent, monotonic};
use crate::report::{note, say};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The time that a harness has to take its figures after a mark.
const MARK: Duration = Duration::from_millis(8);

/// Prints a mark that tells the harness what to count, and gives it time to take its figures before the
/// measurement goes on.
pub(super) fn mark(text: &str) -> Result<(), String> {
    say(format_args!("#{text}"))?;
    std::thread::sleep(MARK);
    Ok(())
}

/// Does the same so that this time is over after `ramp`, or later if that is shorter.
pub(super) fn mark_after(ramp: Duration, text: &str) -> Result<(), String> {
    std::thread::sleep(ramp.saturating_sub(MARK));
    mark(text)
}

/// Reports that this process is ready, waits for the start, calls `run` with the seconds that are left, and
/// sends the results of its clients to its parent, which is in [`together`].
pub(super) fn take_part(
    run: impl FnOnce(f64) -> Result<Vec<Measured>, String>,
) -> Result<(), String> {
    say("ready")?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(|e| e.to_string())?;
    let start: Option<(usize, f64)> = line
        .split_once(' ')
        .and_then(|(number, end)| Some((number.parse().ok()?, end.trim().parse().ok()?)));
    let (number, end) = start.ok_or("the measurement never started")?;
    start_spread(number);
    // The start may arrive late, but all processes end at the same time.
    let measured = run((end - monotonic()).max(0.0))?;
    let sent: Vec<Sent> = measured.iter().map(Measured::to_sent).collect();
    let text = serde_json::to_string(&sent).map_err(|e| e.to_string())?;
    say(text)
}

/// Runs `count` processes of this program, which [take part](take_part), and collects their results. They run for
/// `ramp` and `secs` seconds, and measure the latter. `tell`
/// gets the number of each and adds its arguments. What they say on standard error is passed on, each line once:
/// many often meet the same error.
pub(super) fn together(
    count: usize,
    ramp: f64,
    secs: f64,
    tell: impl Fn(usize, &mut Command),
) -> Result<Vec<Measured>, String> {
    let failed = |error| format!("client process: {error}");
    let (errors, said) = std::io::pipe().map_err(failed)?;
    std::thread::scope(|scope| {
        scope.spawn(|| pass_on(errors));
        let start = |number| {
            let mut command = Command::new(std::env::current_exe()?);
            tell(number, &mut command);
            Process::start(command.stderr(said.try_clone()?))
        };
        let processes = (0..count).map(start).collect::<std::io::Result<Vec<_>>>();
        // With the last process the pipe ends, and with it the thread.
        drop(said);
        measure(processes.map_err(failed)?, ramp, secs)
    })
}

/// Prints each line that differs from all before.
fn pass_on(errors: PipeReader) {
    let mut known = HashSet::new();
    for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
        if !known.contains(&line) {
            note(String::from_utf8_lossy(&line));
            known.insert(line);
        }
    }
}

/// Returns the CPU seconds of all threads of a process so far. Threads that have ended are not counted.
pub(super) fn cpu_seconds(process: &Child) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.id()));
    let ran = |task: std::fs::DirEntry| -> Option<f64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    tasks.into_iter().flatten().flatten().filter_map(ran).sum::<f64>() / 1e9
}

fn measure(mut processes: Vec<Process>, ramp: f64, secs: f64) -> Result<Vec<Measured>, String> {
    for process in &mut processes {
        process.line()?;
    }
    if ramp <= 0.0 {
        mark("start")?;
    }
    let begin = monotonic() + ramp;
    for (number, process) in processes.iter_mut().enumerate() {
        if let Some(mut input) = process.child.stdin.take() {
            let start = format!("{number} {}\n", begin + secs);
            input.write_all(start.as_bytes()).map_err(|e| e.to_string())?;
        }
    }
    let until = |then: f64| Duration::from_secs_f64((then - monotonic()).max(0.0));
    if ramp > 0.0 {
        mark_after(until(begin), "start")?;
    }
    std::thread::sleep(until(begin + secs));
    mark("end")?;
    let mut results = Vec::new();
    for process in &mut processes {
        let line = process.line()?;
        let sent: Vec<Sent> = serde_json::from_str(&line).map_err(|e| e.to_string())?;
        results.extend(sent.into_iter().map(Sent::into_measured));
        let status = process.child.wait().map_err(|e| e.to_string())?;
        if !status.success() {
            return Err("a client process failed".into());
        }
    }
    Ok(results)
}

/// A client process. It ends at the latest with this value.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> std::io::Result<Self> {
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

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
