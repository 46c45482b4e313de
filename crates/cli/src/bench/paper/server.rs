//! Starts a separate server for each system that is measured.

use crate::bench::nbd_client::Place;
use crate::bench::processes::cpu_seconds;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// `towline serve` as a child process, which is killed when dropped.
pub(super) struct Server {
    child: Child,
    /// Where NBD clients connect.
    pub(super) nbd: Place,
    metrics: String,
}

impl Server {
    /// Starts a server for one disk, described as for `--disk`. It runs on `processor`, or wherever the
    /// scheduler puts it. Its fragments have at most `fragment` bytes, or the default size.
    pub(super) fn start(
        disk: &str,
        processor: Option<usize>,
        fragment: Option<u64>,
    ) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| format!("own program: {error}"))?;
        let mut command = Command::new(program);
        command.args(["serve", "--cores", "1", "--nbd", "127.0.0.1:0"]);
        command.args(["--metrics", "127.0.0.1:0", "--disk", disk]);
        if let Some(fragment) = fragment {
            command.args(["--fragment", &fragment.to_string()]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A child inherits the processors of its parent.
        let pinned = processor.map(crate::bench::processor::Pinned::to).transpose()?;
        let spawned = command.spawn();
        drop(pinned);
        let mut child = spawned.map_err(|error| format!("cannot start a server: {error}"))?;
        let Some(output) = child.stderr.take() else { return Err("no output".into()) };
        let (mut nbd, mut metrics, mut said) = (None, None, String::new());
        let mut lines = BufReader::new(output).lines();
        while nbd.is_none() || metrics.is_none() {
            let Some(Ok(line)) = lines.next() else {
                let _ = child.wait();
                return Err(format!("the server for \"{disk}\" did not start: {}", said.trim()));
            };
            let word = |after: &str| {
                let rest = line.split_once(after)?.1;
                rest.split([' ', '/']).next().map(str::to_owned)
            };
            nbd = nbd.or_else(|| word("NBD on tcp://"));
            metrics = metrics.or_else(|| word("metrics on http://"));
            said.push_str(&line);
            said.push('\n');
        }
        // Drain later output, so that it does not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let nbd = Place::Tcp(nbd.unwrap_or_default());
        let metrics = metrics.unwrap_or_default();
        Ok(Self { child, nbd, metrics })
    }

    /// Returns the server's counters by name; stages have a `sum` and a `count` of their seconds.
    pub(super) fn counters(&self) -> Result<HashMap<String, f64>, String> {
        let failed = |error: std::io::Error| format!("metrics of the server: {error}");
        let mut socket = TcpStream::connect(&self.metrics).map_err(failed)?;
        socket.set_read_timeout(Some(Duration::from_secs(20))).map_err(failed)?;
        let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        socket.write_all(request.as_bytes()).map_err(failed)?;
        let mut text = String::new();
        socket.read_to_string(&mut text).map_err(failed)?;
        let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
        Ok(lines.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
    }

    /// See [`cpu_seconds`].
    pub(super) fn cpu_seconds(&self) -> f64 {
        cpu_seconds(&self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server holds nothing that it would have to clean up.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
