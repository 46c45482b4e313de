//! A file system that can be made to hang, a server, and clients.

use crate::support::{have, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;
use towline_client::{Client, Options, Transport};

/// How long anything that does not hang may take, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// `O_RDWR`, `O_CREAT`.
pub(crate) const WRITE: u32 = 2;
pub(crate) const CREATE: u32 = 0o100;
/// Requests at once: more than the server has threads for one export of this kind.
pub(crate) const LOOKS: usize = 24;
pub(crate) const LONG: usize = 8 << 20;

/// A process that is killed when dropped.
pub(crate) struct Ended(pub(crate) Child);

impl Ended {
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mounted FUSE file system.
pub(crate) struct Mounted {
    process: Ended,
    pub(crate) point: PathBuf,
}

impl Mounted {
    /// Returns `None`, and prints the reason, if a file system cannot be had.
    pub(crate) fn new(directory: &Path) -> Option<Self> {
        if !["fuse2fs", "fusermount3", "mke2fs"].iter().all(|program| have(program)) {
            return None;
        }
        if fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
            eprintln!("SKIPPED: /dev/fuse cannot be opened here");
            return None;
        }
        let (image, point) = (directory.join("image"), directory.join("mounted"));
        fs::create_dir(&point).unwrap();
        fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let paths = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let command = |program: &str| {
            let mut command = Command::new(program);
            command.env("PATH", &paths).stdin(Stdio::null()).stdout(Stdio::null());
            command
        };
        assert!(command("mke2fs").args(["-q", "-F"]).arg(&image).status().unwrap().success());
        let mut mount = command("fuse2fs");
        let process = Ended(mount.args(["-f", "-o", "rw"]).args([&image, &point]).spawn().unwrap());
        let mut mounted = Self { process, point };
        let mut refused = false;
        wait_until("the file system is mounted", || {
            refused = mounted.process.0.try_wait().unwrap().is_some();
            refused || mounted.point.join("lost+found").exists()
        });
        if refused {
            eprintln!("SKIPPED: file systems of FUSE cannot be mounted here");
            return None;
        }
        Some(mounted)
    }

    pub(crate) fn hang(&self) {
        self.process.signal(Signal::STOP);
        let threads = format!("/proc/{}/task", self.process.0.id());
        // Threads stop one by one: one that has not stopped yet would still answer.
        let is_stopped = |thread: io::Result<fs::DirEntry>| {
            let state = fs::read_to_string(thread.unwrap().path().join("stat"));
            state.is_ok_and(|state| state.contains(") T "))
        };
        wait_until("it is stopped", || fs::read_dir(&threads).unwrap().all(is_stopped));
    }

    pub(crate) fn go_on(&self) {
        self.process.signal(Signal::CONT);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Once it is killed, nothing hangs any more.
        let _ = self.process.0.kill();
        let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(&self.point).status();
    }
}

/// A server.
pub(crate) struct Serving {
    pub(crate) process: Ended,
    pub(crate) port: u16,
    /// Its output during the start.
    pub(crate) said: String,
    /// Its output since then.
    says: Receiver<String>,
}

impl Serving {
    /// Starts a server with exports of one kind, `--dir` or `--disk`, and more arguments.
    pub(crate) fn new(cores: u32, kind: &str, exports: [(&str, &Path); 2], more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.env("RUST_LOG", "info").args(["serve", "--listen", "tcp://127.0.0.1:0"]);
        command.args(["--cores", &cores.to_string()]);
        // Room for four fragments of transfers per core.
        command.args(["--buffer-limit", &format!("{cores}M")]);
        for (name, path) in exports {
            command.arg(kind).arg(format!("{name}={}", path.display()));
        }
        command.args(more);
        let mut process = Ended(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let port = loop {
            let line = lines.next().expect(&said).unwrap();
            said += &line;
            let port = line.split("tcp://127.0.0.1:").nth(1);
            if let Some(port) = port.and_then(|rest| rest.split(' ').next()) {
                break port.parse().unwrap();
            }
        };
        let (sender, says) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|l| sender.send(l)));
        Self { process, port, said, says }
    }

    /// Waits for a line of output with these words, and returns it.
    #[track_caller]
    pub(crate) fn says(&self, words: &str) -> String {
        loop {
            match self.says.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(words) => return line,
                Ok(_) => {}
                Err(error) => panic!("never said \"{words}\": {error}"),
            }
        }
    }
}

/// Connects a client. Where the server may not answer, call this only on threads that are not awaited.
pub(crate) fn connect(port: u16, nearest: bool) -> Client {
    let host = "127.0.0.1".to_owned();
    let transport =
        if nearest { Transport::Nearest(host, port) } else { Transport::Tcp(host, port) };
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(2);
    Client::connect(&transport, options).unwrap()
}

/// Does some work on its own thread. Returns the receiver of its result.
pub(crate) fn begin<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver
}

#[track_caller]
pub(crate) fn in_time<T>(receiver: &Receiver<T>, what: &str) -> T {
    match receiver.recv_timeout(PATIENCE) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("hung as well: {what}"),
        Err(RecvTimeoutError::Disconnected) => panic!("failed: {what}"),
    }
}

/// Does all kinds of work on the export that does not hang, with more data than the server has buffers for.
pub(crate) fn work_on(client: &Client, name: &str) {
    let root = client.attach(b"local").unwrap();
    let path = |what: &str| format!("{name}-{what}").into_bytes();
    let data = vec![7; LONG];
    let file = root.open(&path("new"), WRITE | CREATE, 0o600).unwrap();
    assert_eq!(file.write_at(&data, 0).unwrap(), LONG);
    let mut found = vec![0; LONG];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), LONG);
    assert!(found == data);
    file.close().unwrap();
    root.rename(&path("new"), &root, &path("old"), 0).unwrap();
    assert_eq!(root.stat_path(&path("old"), true).unwrap().size, LONG as u64);
    root.unlink(&path("old"), false).unwrap();
    client.statistics().unwrap();
}
