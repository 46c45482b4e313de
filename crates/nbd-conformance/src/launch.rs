//! Starts a server for the time of the test: by socket activation, or with `$sock` or `$port` in its
//! arguments replaced. A server that ends by itself can be started again at the same place.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::link::Link;
use crate::uri::Address;

/// Puts the listening socket, given as standard input, where socket activation has it, and becomes the
/// server. A shell does it because `LISTEN_PID` has to be the number of the process that the server is.
const ACTIVATE: &str = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1; \
                        export LISTEN_PID LISTEN_FDS; exec \"$@\"";

/// Pause between two looks at a server that is starting or ending.
const PAUSE: Duration = Duration::from_millis(10);

/// A server started by this program; it is ended when this is dropped.
pub struct Launched {
    /// Where it listens.
    pub address: Address,
    words: Vec<String>,
    /// The socket the server is given; none when it makes its own.
    listener: Option<UnixListener>,
    verbose: bool,
    timeout: Duration,
    child: Child,
    _directory: TempDir,
}

impl Launched {
    /// Starts `command` and waits until it listens. What it prints on standard error is shown only when
    /// `verbose`: a server under this test has much to complain about.
    ///
    /// # Errors
    /// A sentence for the user.
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
        launched.wait()?;
        Ok(launched)
    }

    /// How the server ended, if it did. After a rule failed it is worth `patience`: a server that
    /// crashes takes some time to be gone.
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

    /// Starts a server that has ended again, where it was.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn restart(&mut self) -> Result<(), String> {
        if let (Address::Unix(path), None) = (&self.address, &self.listener) {
            // The dead server's socket is in the way; it may be gone already.
            let _ = std::fs::remove_file(path);
        }
        self.child = spawn(&self.words, self.listener.as_ref(), self.verbose)
            .map_err(|error| format!("cannot start {} again: {error}", self.words[0]))?;
        self.wait()
    }

    /// Waits until the server takes connections.
    fn wait(&mut self) -> Result<(), String> {
        if self.listener.is_some() {
            return Ok(()); // the socket listens already
        }
        let deadline = Instant::now() + self.timeout;
        while let Err(error) = Link::connect(&self.address, self.timeout) {
            if let Some(status) = self.ended(PAUSE) {
                return Err(format!("server ended ({status}) before it listened"));
            }
            if Instant::now() > deadline {
                return Err(format!("server does not listen on {}: {error}", self.address));
            }
        }
        Ok(())
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // It may have ended by itself; there is nobody to tell of an error.
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
    // What the server prints on standard output must not mix with the lines of the report.
    command.stdout(Stdio::null()).stderr(errors).spawn()
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("localhost", 0))?.local_addr()?.port())
}
