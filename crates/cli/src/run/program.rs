//! The program of a run: this process becomes it, or waits for it if something has to be printed at its end.

use super::signals::{self, Signals};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process;

/// Signals that other processes send to Towline but mean for the program.
const PASSED_ON: [i32; 4] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];
/// These, those that the terminal also sends to the program, and SIGCHLD. The program decides how to react to
/// the terminal's, and Towline waits for the outcome.
const ALL: [i32; 7] = [
    PASSED_ON[0],
    PASSED_ON[1],
    PASSED_ON[2],
    PASSED_ON[3],
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGCHLD,
];

/// A command to execute.
pub(super) struct Command {
    /// A path, or a name to look up in `PATH`.
    pub(super) program: OsString,
    /// Its arguments, starting with its name.
    pub(super) arguments: Vec<OsString>,
}

/// Environment variables to set for the program (`Some`) or to remove (`None`).
type Variables<'a> = [(&'a str, Option<&'a OsStr>); 2];

/// Becomes the program, which inherits everything else from this process. Returns the error if that fails. No
/// other thread may be running.
#[allow(unsafe_code)]
pub(super) fn become_one(command: &Command, variables: Variables) -> io::Error {
    let text = |text: &OsString| CString::new(text.as_bytes());
    // Arguments of a process contain no zero bytes.
    let program = CString::new(command.program.as_bytes());
    let arguments = command.arguments.iter().map(text).collect::<Result<Vec<_>, _>>();
    let (Ok(program), Ok(texts)) = (program, arguments) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut arguments: Vec<_> = texts.iter().map(|argument| argument.as_ptr()).collect();
    arguments.push(std::ptr::null());
    for (name, value) in variables {
        // SAFETY: no other thread is running that could access the environment.
        unsafe {
            match value {
                Some(value) => std::env::set_var(name, value),
                None => std::env::remove_var(name),
            }
        }
    }
    // SAFETY: all strings end with a zero byte, and the list of them ends with a null pointer; both outlive
    // the call.
    unsafe { libc::execvp(program.as_ptr(), arguments.as_ptr()) };
    io::Error::last_os_error()
}

/// Runs the program to its end and forwards signals. Returns its exit status, or 128 plus the number of the
/// signal that ended it.
#[allow(unsafe_code)]
pub(super) fn wait_for(command: &Command, variables: Variables) -> io::Result<u8> {
    let before = signals::hold(&ALL);
    let are_ignored = signals::ignore_children(false);
    let signals = Signals::new(&ALL)?;
    let mut program = process::Command::new(&command.program);
    program.arg0(&command.arguments[0]).args(&command.arguments[1..]);
    for (name, value) in variables {
        match value {
            Some(value) => program.env(name, value),
            None => program.env_remove(name),
        };
    }
    // SAFETY: the closure only makes async-signal-safe calls, which are allowed in the child after fork.
    unsafe {
        program.pre_exec(move || {
            // The standard library resets SIGPIPE in the child to its default action, whatever this process
            // has.
            signals::take_pipe_signal();
            signals::ignore_children(are_ignored);
            // Here, as this process must not be ended by a signal while it starts the program.
            signals::set_mask(&before);
            Ok(())
        });
    }
    let mut child = program.spawn()?;
    let pid = Pid::from_child(&child);
    loop {
        while let Some(signal) = signals.next() {
            if PASSED_ON.contains(&signal)
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                // Fails only if the program has ended.
                let _ = kill_process(pid, signal);
            }
        }
        if let Some(status) = child.try_wait()? {
            return Ok(match (status.code(), status.signal()) {
                (Some(code), _) => code as u8,
                (None, signal) => 128 + signal.unwrap_or(0) as u8,
            });
        }
        // Fails only when a signal arrives.
        let _ = poll(&mut [PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)], None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    /// Executing the program can take long, for instance from a slow file system.
    #[test]
    #[allow(unsafe_code)]
    fn a_signal_that_comes_while_the_program_begins_is_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        std::fs::copy("/bin/sleep", &path).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: these commands take a number.
        let fcntl = |what, with: i32| unsafe { libc::fcntl(file.as_raw_fd(), what, with) };
        // A lease holds up whatever opens the file, as its execution does. This process is sent a signal then:
        // one that does nothing.
        const SET_SIGNAL: i32 = 10;
        if fcntl(SET_SIGNAL, libc::SIGURG) != 0 || fcntl(libc::F_SETLEASE, libc::F_WRLCK) != 0 {
            println!("SKIPPED: no leases here: {}", io::Error::last_os_error());
            return;
        }
        let (sender, thread) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            let arguments = ["program", "300"].map(OsString::from).to_vec();
            let command = Command { program: path.into_os_string(), arguments };
            wait_for(&command, [("LD_PRELOAD", None), ("TOWLINE_RUN", None)])
        });
        let thread = thread.recv().unwrap().as_raw_nonzero().get();
        let tell = |signal: i32| {
            let process = std::process::id() as usize;
            // SAFETY: a plain system call on a thread of this process.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread as usize, signal as usize) };
        };
        let end = Instant::now() + Duration::from_secs(60);
        let pause = || {
            assert!(Instant::now() < end, "it takes too long");
            std::thread::sleep(Duration::from_millis(1));
        };
        while fcntl(libc::F_GETLEASE, 0) == libc::F_WRLCK {
            pause();
        }
        tell(libc::SIGTERM);
        fcntl(libc::F_SETLEASE, libc::F_UNLCK);
        while !waiting.is_finished() {
            pause();
            // The kernel drops the one for the end of the program, as other threads here do not block it.
            tell(libc::SIGCHLD);
        }
        assert_eq!(waiting.join().unwrap().unwrap(), 128 + libc::SIGTERM as u8);
    }
}
