//! Starts a server for the time of the test: by socket activation, or with `$sock` or `$port` in its
//! arguments replaced.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::link::Link;
use crate::uri::Address;

/// Puts the listening socket, given as standard input, where socket activation has it, and becomes the
/// server. A shell does it because `LISTEN_PID` has to be the number of the process that the server is.
const ACTIVATE: &str = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; \
                        export LISTEN_PID LISTEN_FDS; exec \"$@\"";

/// A server started by this program; it is ended when this is dropped.
pub struct Launched {
    child: Child,
    /// Where it listens.
    pub address: Address,
    _directory: TempDir,
}

impl Launched {
    /// Starts `command` and waits until it listens. What it prints on standard error is shown only when
    /// `verbose`: a server under this test has much to complain about.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn start(command: &[String], timeout: Duration, verbose: bool) -> Result<Self, String> {
        let fail = |error: &dyn std::fmt::Display| format!("cannot start {}: {error}", command[0]);
        let directory = TempDir::with_prefix("nbd-conformance").map_err(|error| fail(&error))?;
        let path = directory.path().join("nbd.sock");
        if command.iter().any(|word| word.contains("$sock") || word.contains("$port")) {
            let port = free_port().map_err(|error| fail(&error))?;
            let sock = path.to_string_lossy().into_owned();
            let words = command
                .iter()
                .map(|word| word.replace("$sock", &sock).replace("$port", &port.to_string()));
            let address = if command.iter().any(|word| word.contains("$sock")) {
                Address::Unix(path)
            } else {
                Address::Tcp { host: "localhost".to_owned(), port }
            };
            let words: Vec<_> = words.collect();
            let child =
                spawn(Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()), verbose);
            let child = child.map_err(|error| fail(&error))?;
            let mut launched = Self { child, address, _directory: directory };
            launched.wait(timeout)?;
            return Ok(launched);
        }
        let listener = UnixListener::bind(&path).map_err(|error| fail(&error))?;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", ACTIVATE, "sh"]).args(command).stdin(File::from(OwnedFd::from(listener)));
        let child = spawn(&mut shell, verbose).map_err(|error| fail(&error))?;
        Ok(Self { child, address: Address::Unix(path), _directory: directory })
    }

    /// How the server ended, if it did.
    pub fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), String> {
        let deadline = Instant::now() + timeout;
        loop {
            match Link::connect(&self.address, timeout) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    return Err(format!("server does not listen on {}: {error}", self.address));
                }
                Err(_) => {}
            }
            if let Some(status) = self.ended() {
                return Err(format!("server ended ({status}) before it listened"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // It may have ended by itself; there is nobody to tell of an error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(command: &mut Command, verbose: bool) -> std::io::Result<Child> {
    let errors = if verbose { Stdio::inherit() } else { Stdio::null() };
    // What the server prints on standard output must not mix with the lines of the report.
    command.stdout(Stdio::null()).stderr(errors).spawn()
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("localhost", 0))?.local_addr()?.port())
}
