//! Starts a server for the duration of the test: by socket activation, or by replacing `$sock` or `$port`
//! in its arguments. A server that has exited can be started again at the same address.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::link::{Broken, Link};
use crate::uri::Address;

/// Shell script that moves the listening socket from standard input to descriptor 3, as socket activation
/// demands, and becomes the server. `LISTEN_PID` has to be the server's process number, which only the
/// process itself knows before `exec`.
const ACTIVATE: &str = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; \
                        export LISTEN_PID LISTEN_FDS; exec \"$@\"";

/// Interval at which a server that is starting or exiting is checked.
const PAUSE: Duration = Duration::from_millis(10);

/// A server started by this program. Dropping it kills the server.
pub struct Launched {
    /// Where the server listens.
    pub address: Address,
    words: Vec<String>,
    /// The socket passed to the server; none if it makes its own.
    listener: Option<UnixListener>,
    verbose: bool,
    timeout: Duration,
    child: Child,
    _directory: TempDir,
}

impl Launched {
    /// Starts `command` and waits until it listens or, on a socket passed to it, greets. Shows its standard
    /// error only if `verbose`, because a server under test has much to complain about.
    ///
    /// # Errors
    /// An error message for the user.
    pub fn start(command: &[String], timeout: Duration, verbose: bool) -> Result<Self, String> {
        let fail = |error: io::Error| format!("cannot start {}: {error}", command[0]);
        let directory = TempDir::with_prefix("nbd-conformance").map_err(fail)?;
        let path = directory.path().join("nbd.sock");
        let names = |name: &str| command.iter().any(|word| word.contains(name));
        let (address, listener) = if names("$sock") {
            (Address::Unix(path.clone()), None)
        } else if names("$port") {
            let port = free_port().map_err(fail)?;
            (Address::Tcp { host: "localhost".to_owned(), port }, None)
        } else {
            let listener = UnixListener::bind(&path).map_err(fail)?;
            (Address::Unix(path.clone()), Some(listener))
        };
        let words: Vec<_> = command.iter().map(|word| substitute(word, &path, &address)).collect();
        let child = spawn(&words, listener.as_ref(), verbose).map_err(fail)?;
        let mut launched =
            Self { address, words, listener, verbose, timeout, child, _directory: directory };
        if launched.listener.is_some() {
            launched.wait_for_greeting()?;
        } else {
            launched.wait_for_socket()?;
        }
        Ok(launched)
    }

    /// Returns how the server exited, if it did. Waits up to `patience`, because a server that crashes takes
    /// some time to exit.
    pub fn ended(&mut self, patience: Duration) -> Option<String> {
        let deadline = Instant::now() + patience;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status.to_string());
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Starts a server that has exited again, at the same address.
    ///
    /// # Errors
    /// An error message for the user.
    pub fn restart(&mut self) -> Result<(), String> {
        if let (Address::Unix(path), None) = (&self.address, &self.listener) {
            // The dead server's socket file may still exist and would be in the way.
            let _ = std::fs::remove_file(path);
        }
        self.child = spawn(&self.words, self.listener.as_ref(), self.verbose)
            .map_err(|error| format!("cannot start {} again: {error}", self.words[0]))?;
        if self.listener.is_some() {
            return Ok(()); // the socket listens already
        }
        self.wait_for_socket()
    }

    /// Waits until the server accepts connections.
    fn wait_for_socket(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.timeout;
        while let Err(error) = Link::connect(&self.address, self.timeout) {
            if let Some(status) = self.ended(PAUSE) {
                return Err(self.early_end(&status, "before it listened"));
            }
            if Instant::now() > deadline {
                return Err(format!("server does not listen on {}: {error}", self.address));
            }
        }
        Ok(())
    }

    /// Waits until the server does something with a connection to the socket passed to it, which takes
    /// connections even if there is no server.
    fn wait_for_greeting(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.timeout;
        let mut link = Link::connect(&self.address, PAUSE)
            .map_err(|error| format!("cannot connect to {}: {error}", self.address))?;
        // What it greets with is for the rules to judge.
        while let Err(Broken::TimedOut { .. }) = link.recv(1) {
            if let Some(status) = self.ended(Duration::ZERO) {
                return Err(self.early_end(&status, "before it greeted"));
            }
            if Instant::now() > deadline {
                return Err("server does not greet on the socket passed to it; one that wants to \
                            make its own needs $sock or $port in its arguments"
                    .to_owned());
            }
        }
        Ok(())
    }

    /// Describes the end of a server that exited before any rule was tried.
    pub fn early_end(&self, status: &str, when: &str) -> String {
        let hint = if self.verbose { "" } else { "; --verbose shows what it printed" };
        format!("server ended ({status}) {when}{hint}")
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // Errors can be ignored: the server may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn substitute(word: &str, path: &Path, address: &Address) -> String {
    let word = word.replace("$sock", &path.to_string_lossy());
    match address {
        Address::Tcp { port, .. } => word.replace("$port", &port.to_string()),
        Address::Unix(_) => word,
    }
}

fn spawn(words: &[String], listener: Option<&UnixListener>, verbose: bool) -> io::Result<Child> {
    let mut command = match listener {
        None => {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).stdin(Stdio::null());
            command
        }
        Some(listener) => {
            let socket = File::from(OwnedFd::from(listener.try_clone()?));
            let mut command = Command::new("/bin/sh");
            command.args(["-c", ACTIVATE, "sh"]).args(words).stdin(socket);
            command
        }
    };
    let errors = if verbose { Stdio::inherit() } else { Stdio::null() };
    // The server's standard output must not mix with the lines of the report.
    command.stdout(Stdio::null()).stderr(errors).spawn()
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("localhost", 0))?.local_addr()?.port())
}
