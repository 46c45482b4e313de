//! A file system that hangs under an export: whoever uses it waits, and nobody else, though all are
//! served by one core; the server can be stopped; and what was asked is answered when it goes on. And
//! a local device that does not answer: the core that asks it is told of, and the others go on.
//!
//! The first is a file system of FUSE whose process is stopped and continued, the second one that is
//! frozen.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;
use support::have;
use towline_client::{Client, Errno, Options, Transport};

/// How long anything may take that does not hang, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);
/// `O_RDWR`, `O_CREAT`.
const WRITE: u32 = 2;
const CREATE: u32 = 0o100;
/// More than the server has threads for one such export.
const LOOKS: usize = 24;
const LONG: usize = 8 << 20;

/// Waits until something is so; a test that waits too long fails.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..1200 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("waited too long until {what}");
}

/// A process that ends with this.
struct Ended(Child);

impl Ended {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mounted file system of FUSE.
struct Mounted {
    process: Ended,
    point: PathBuf,
}

impl Mounted {
    /// `None`, said loudly, where none can be had.
    fn new(directory: &Path) -> Option<Self> {
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

    fn hang(&self) {
        self.process.signal(Signal::STOP);
        let state = format!("/proc/{}/stat", self.process.0.id());
        wait_until("it is stopped", || fs::read_to_string(&state).unwrap().contains(") T "));
    }

    fn go_on(&self) {
        self.process.signal(Signal::CONT);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Killed, it hangs nobody any more.
        let _ = self.process.0.kill();
        let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(&self.point).status();
    }
}

/// A server.
struct Serving {
    process: Ended,
    port: u16,
    /// What it has said while it started.
    said: String,
    /// What it says since.
    says: Receiver<String>,
}

impl Serving {
    fn new(cores: u32, exports: [(&str, &Path); 2]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.env("RUST_LOG", "info").args(["serve", "--listen", "tcp://127.0.0.1:0"]);
        command.args(["--cores", &cores.to_string()]);
        // Room for four fragments of transfers.
        command.args(["--buffer-limit", &format!("{cores}M")]);
        for (name, path) in exports {
            command.arg("--dir").arg(format!("{name}={}", path.display()));
        }
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

    /// Waits for a line with these words.
    #[track_caller]
    fn says(&self, words: &str) -> String {
        loop {
            match self.says.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(words) => return line,
                Ok(_) => {}
                Err(error) => panic!("never said \"{words}\": {error}"),
            }
        }
    }
}

/// A client; to be called where the server may not answer only by threads that are not waited for.
fn connect(port: u16, nearest: bool) -> Client {
    let host = "127.0.0.1".to_owned();
    let transport =
        if nearest { Transport::Nearest(host, port) } else { Transport::Tcp(host, port) };
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(2);
    Client::connect(&transport, options).unwrap()
}

/// Does something on a thread of its own; what it yields.
fn begin<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver
}

#[track_caller]
fn in_time<T>(receiver: &Receiver<T>, what: &str) -> T {
    match receiver.recv_timeout(PATIENCE) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("hung as well: {what}"),
        Err(RecvTimeoutError::Disconnected) => panic!("failed: {what}"),
    }
}

/// All kinds of work on the export that does not hang; more data than the server has buffers for.
fn work_on(client: &Client, name: &str) {
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

#[test]
fn those_who_do_not_use_a_file_system_that_hangs_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::new(directory.path()) else { return };
    let local = directory.path().join("local");
    fs::create_dir(&local).unwrap();
    fs::write(mounted.point.join("known"), vec![1; 100_000]).unwrap();
    let mut serving = Serving::new(1, [("hangs", &mounted.point), ("local", &local)]);
    assert!(serving.said.contains("\"hangs\" has files on fuse"), "{}", serving.said);
    assert!(!serving.said.contains("\"local\" has files"), "{}", serving.said);
    let port = serving.port;

    // All is well while it does not hang.
    let writer = connect(port, false);
    let hangs = writer.attach(b"hangs").unwrap();
    let file = hangs.open(b"known", WRITE, 0).unwrap();
    let mut found = vec![0; 200_000];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), 100_000);
    assert!(found[..100_000].iter().all(|byte| *byte == 1));
    assert_eq!(hangs.stat_path(b"missing", true).unwrap_err().errno(), Errno::ENOENT);
    // A session that will end while it has something open there.
    let leaving = connect(port, false);
    let open = leaving.attach(b"hangs").unwrap().open(b"known", WRITE, 0).unwrap();
    open.write_at(b"left", 150_000).unwrap();

    mounted.hang();
    let looks: Vec<_> = (0..LOOKS)
        .map(|number| {
            begin(move || {
                let client = connect(port, number % 2 == 0);
                let root = client.attach(b"hangs").unwrap();
                root.stat_path(format!("never-{number}").as_bytes(), true).map_err(|e| e.errno())
            })
        })
        .collect();
    let data: Vec<u8> = (0..LONG).map(|at| (at / 1000) as u8).collect();
    let written = {
        let data = data.clone();
        begin(move || (file.write_at(&data, 0).map_err(|e| e.errno()), file))
    };
    let listed = begin(move || {
        let root = connect(port, false).attach(b"hangs").unwrap();
        root.list_all(true).unwrap().len()
    });
    let left = begin(move || drop((open, leaving)));

    for nearest in [false, true] {
        let other = begin(move || work_on(&connect(port, nearest), "other"));
        in_time(&other, "another session");
    }
    in_time(&left, "a session that ends");
    // The very session that has requests there as well.
    let same = begin(move || {
        work_on(&writer, "same");
        writer
    });
    let writer = in_time(&same, "the same session");
    for look in &looks {
        assert!(look.try_recv().is_err(), "answered, though the file system hangs");
    }
    assert!(written.try_recv().is_err() && listed.try_recv().is_err());

    // Everything that waited is answered.
    mounted.go_on();
    for look in &looks {
        assert_eq!(in_time(look, "a look at a name").err(), Some(Errno::ENOENT));
    }
    let (count, file) = in_time(&written, "a write");
    assert_eq!(count.unwrap(), LONG);
    let read = begin(move || {
        let mut found = vec![0; LONG];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), LONG);
        file.close().unwrap();
        found
    });
    assert!(in_time(&read, "a read") == data);
    assert!(in_time(&listed, "a list") >= 2);

    // It can be stopped while requests hang.
    mounted.hang();
    let stopped = begin(move || connect(port, false).attach(b"hangs").err().map(|e| e.errno()));
    in_time(&begin(move || work_on(&writer, "last")), "others, once more");
    serving.process.signal(Signal::TERM);
    wait_until("the server has ended", || serving.process.0.try_wait().unwrap().is_some());
    assert!(serving.process.0.wait().unwrap().success());
    let refused = in_time(&stopped, "a request to a server that is gone");
    assert!(refused.is_some(), "answered by nobody");
}

#[test]
fn a_file_system_mounted_later_holds_up_nobody_else_either() {
    let directory = tempfile::tempdir().unwrap();
    let (tree, local) = (directory.path().join("tree"), directory.path().join("local"));
    fs::create_dir_all(&tree).unwrap();
    fs::create_dir(&local).unwrap();
    let serving = Serving::new(1, [("tree", &tree), ("local", &local)]);
    assert!(!serving.said.contains("has files on"), "{}", serving.said);
    let port = serving.port;
    // Open before, and of use after.
    let early = connect(port, false);
    let root = early.attach(b"tree").unwrap();
    let file = root.open(b"early", WRITE | CREATE, 0o600).unwrap();

    let Some(mounted) = Mounted::new(&tree) else { return };
    serving.says("\"tree\" has files on fuse");
    file.write_at(b"still here", 0).unwrap();
    fs::write(mounted.point.join("known"), b"known").unwrap();
    assert_eq!(root.stat_path(b"mounted/known", true).unwrap().size, 5);

    mounted.hang();
    let look = begin(move || {
        let root = connect(port, false).attach(b"tree").unwrap();
        root.stat_path(b"mounted/never", true).map_err(|e| e.errno())
    });
    for nearest in [false, true] {
        let other = begin(move || work_on(&connect(port, nearest), "other"));
        in_time(&other, "another session");
    }
    let same = begin(move || work_on(&early, "same"));
    in_time(&same, "a session from before");
    assert!(look.try_recv().is_err(), "answered, though the file system hangs");
    mounted.go_on();
    assert_eq!(in_time(&look, "a look at a name").err(), Some(Errno::ENOENT));
}

/// A local file system whose device takes no writes for a while: it is frozen.
struct Frozen {
    point: PathBuf,
}

impl Frozen {
    /// `None`, said loudly, where none can be had.
    fn new(directory: &Path) -> Option<Self> {
        let (image, point) = (directory.join("image"), directory.join("mounted"));
        fs::create_dir(&point).unwrap();
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let made = ran("mke2fs", &["-q", "-F", "-t", "ext4", image.to_str().unwrap()]);
        let frozen = Self { point };
        let point = frozen.point.to_str().unwrap();
        if !(made && ran("mount", &["-o", "loop", image.to_str().unwrap(), point])) {
            eprintln!("SKIPPED: no file system can be made and mounted here");
            return None;
        }
        Some(frozen)
    }

    fn freeze(&self) -> bool {
        let done = ran("fsfreeze", &["--freeze", self.point.to_str().unwrap()]);
        if !done {
            eprintln!("SKIPPED: a file system cannot be frozen here");
        }
        done
    }

    fn thaw(&self) {
        assert!(ran("fsfreeze", &["--unfreeze", self.point.to_str().unwrap()]));
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // Where it is not frozen, or not mounted, these fail.
        let _ = ran("fsfreeze", &["--unfreeze", self.point.to_str().unwrap()]);
        let _ = ran("umount", &["--lazy", self.point.to_str().unwrap()]);
    }
}

/// Runs a program of the system; true: it was there and did what it was told.
fn ran(program: &str, arguments: &[&str]) -> bool {
    let paths = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(program);
    command.env("PATH", paths).args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Of two cores one waits for a device, first the one that accepts connections, then the other.
#[test]
fn a_device_that_does_not_answer_is_told_and_other_cores_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("local");
    fs::create_dir(&local).unwrap();
    let Some(frozen) = Frozen::new(directory.path()) else { return };
    let serving = Serving::new(2, [("frozen", &frozen.point), ("local", &local)]);
    let port = serving.port;
    let mut told = Vec::new();
    for round in 0..2 {
        // Connections are dealt out to the cores in turn: 0, then 0 and 1.
        let others: Vec<_> = (0..round).map(|_| connect(port, false)).collect();
        let stuck = connect(port, false);
        let root = stuck.attach(b"frozen").unwrap();
        if !frozen.freeze() {
            return;
        }
        let name = format!("new-{round}").into_bytes();
        let made = begin(move || root.open(&name, WRITE | CREATE, 0o600).map(drop));
        let line = serving.says("has been waiting");
        assert!(line.contains("openat2 of") && line.contains("mounted"), "{line}");
        told.extend(
            line.split_whitespace().skip_while(|word| *word != "core").nth(1).map(str::to_owned),
        );
        for number in 0..4 {
            let other = begin(move || {
                let client = connect(port, number % 2 == 1);
                work_on(&client, "other");
                client.statistics().unwrap()
            });
            let statistics = in_time(&other, "a new session while a core waits");
            assert!(statistics.contains("\"cores_waiting\":1"), "{statistics}");
        }
        assert!(made.try_recv().is_err(), "made, though the file system is frozen");
        frozen.thaw();
        in_time(&made, "what had to wait").unwrap();
        serving.says("goes on after");
        drop(others);
    }
    told.sort();
    told.dedup();
    assert_eq!(told.len(), 2, "both cores had their turn: {told:?}");
}
