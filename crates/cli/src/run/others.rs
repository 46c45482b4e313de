//! Finds processes that a run left behind.
//!
//! The environment that a process was executed with names its run. So this also finds processes that the
//! library does not reach, and those that are just being executed. (Processes that overwrite their
//! environment are found by their lock on the state.)

use rustix::fs::{CWD, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};
use towline_instance::VARIABLE;

/// The kernel assigns process numbers in ascending order. If the run is no older than this...
const YOUNG: Duration = Duration::from_secs(2);
/// ...and at most this many numbers follow its own, they are tried one by one.
const NEXT_MAX: u32 = 512;

/// How often, and after which pause, to look again at a process without environment: one that is being
/// executed has none for a moment.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(2);

/// Finds the processes of a run.
pub(super) struct Others {
    /// `NAME=VALUE` as in their environment.
    named: Vec<u8>,
    program: u32,
    began: Instant,
}

impl Others {
    /// Finds processes of the run with this directory, which starts now with this program.
    pub(super) fn new(directory: &Path, program: Pid) -> Self {
        Self {
            named: [VARIABLE.as_bytes(), b"=", directory.as_os_str().as_bytes()].concat(),
            program: program.as_raw_nonzero().get() as u32,
            began: Instant::now(),
        }
    }

    /// Returns descriptors of all of them except the program, which become readable when the processes have
    /// ended.
    pub(super) fn find(&self) -> Vec<OwnedFd> {
        let own = std::process::id();
        let others = self.numbers().into_iter().filter(|pid| *pid != own && *pid != self.program);
        others.filter_map(|pid| self.descriptor(pid)).collect()
    }

    /// Returns numbers of processes (and threads) that include all that may belong to the run.
    fn numbers(&self) -> Vec<u32> {
        // The last word is the number that was assigned most recently.
        let load = read("/proc/loadavg").unwrap_or_default();
        let last = load.trim_ascii_end().rsplit(|byte| *byte == b' ').next().and_then(number);
        let last = last.unwrap_or(0);
        if self.began.elapsed() < YOUNG && last >= self.program && last - self.program < NEXT_MAX {
            return (self.program + 1..=last).collect();
        }
        let folder = rustix::fs::open("/proc", READ | OFlags::DIRECTORY, Mode::empty());
        let entries = folder.and_then(rustix::fs::Dir::read_from).into_iter().flatten().flatten();
        entries.filter_map(|entry| number(entry.file_name().to_bytes())).collect()
    }

    /// Returns a descriptor of a process, if it belongs to the run.
    fn descriptor(&self, number: u32) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
        for _ in 0..TRIES {
            // Opened first: if the number is reused later, the check below reads the new process's
            // environment.
            let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            let environment = read(format!("/proc/{number}/environ")).ok()?;
            if environment.split(|byte| *byte == 0).any(|variable| variable == self.named) {
                return Some(fd);
            }
            // Kernel threads and processes that have ended have no program either.
            let program = format!("/proc/{number}/exe");
            let is_other = !environment.is_empty();
            if is_other || rustix::fs::readlinkat(CWD, program, Vec::new()).is_err() {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
        None
    }
}

const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

/// Reads a file with direct system calls; see `remove_all` in `directory.rs`.
fn read(path: impl rustix::path::Arg) -> rustix::io::Result<Vec<u8>> {
    let file = rustix::fs::open(path, READ, Mode::empty())?;
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::io::read(&file, &mut part)? {
            0 => return Ok(bytes),
            count => bytes.extend_from_slice(&part[..count]),
        }
    }
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn processes_are_found_by_what_names_the_run() {
        let directory = Path::new("/nonexistent/run-of-a-test");
        let own = Pid::from_raw(std::process::id() as i32).unwrap();
        let mut others = Others::new(directory, own);
        assert!(others.find().is_empty());
        let start = |value: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo; read x"]).env(VARIABLE, value);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // It has been executed once it prints something.
            std::io::Read::read(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
            child
        };
        let mut children =
            [start("/nonexistent/run-of-a-test"), start("/nonexistent/run-of-a-test2")];
        assert_eq!(others.find().len(), 1);
        // As if the numbers had wrapped around since.
        others.began -= YOUNG;
        assert_eq!(others.find().len(), 1);
        for child in &mut children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert!(others.find().is_empty());
    }
}
