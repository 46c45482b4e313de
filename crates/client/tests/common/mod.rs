//! Shared by the integration tests: servers in this process and in child processes, random numbers,
//! and peers that send raw bytes.
#![allow(dead_code, clippy::unwrap_used)] // each test uses a part; one that cannot go on says where

pub(crate) mod brittle;
pub(crate) mod processors;
pub(crate) mod proxy;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, File, Options, Transport};
use towline_mem::SharedMemory;
use towline_net::address::Address;
use towline_net::{SHM_BYTES, Wait, receive_descriptors};
use towline_server::{
    CacheMode, Config, DiskExport, DiskKind, EngineWish, Export, ExportKind, Server,
};
use towline_wire::hello::want;
use towline_wire::{Header, Hello, Kind, Request, Welcome};

/// `O_CREAT | O_RDWR`.
pub(crate) const CREATE: u32 = 0o100 | 2;
/// `O_EXCL`.
pub(crate) const EXCLUSIVE: u32 = 0o200;
/// `O_TRUNC`.
pub(crate) const TRUNCATE: u32 = 0o1000;

/// A server in this process, and every way to reach it.
pub(crate) struct Setup {
    pub(crate) server: Option<Server>,
    pub(crate) transports: Vec<Transport>,
    /// The directory that the export `dir` shows.
    pub(crate) data: PathBuf,
    _directory: TempDir,
}

/// Starts a server with the exports `dir` and `mem`, the latter of `memory` bytes.
pub(crate) fn setup_with(engine: EngineWish, memory: u64) -> Setup {
    setup_in(&std::env::temp_dir(), engine, memory)
}

/// As [`setup_with`], with the directory and the socket in `place`.
pub(crate) fn setup_in(place: &Path, engine: EngineWish, memory: u64) -> Setup {
    let directory = TempDir::new_in(place).unwrap();
    let data = directory.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let socket = directory.path().join("socket");
    let export = |name: &str, kind, read_only| Export { read_only, ..Export::new(name, kind) };
    let config = Config {
        exports: vec![
            export("dir", ExportKind::Directory(data.clone()), false),
            export("mem", ExportKind::Memory(memory), false),
            export("ro", ExportKind::Directory(data.clone()), true),
        ],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 2,
        engine,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let transports = transports(&server, socket);
    Setup { server: Some(server), transports, data, _directory: directory }
}

/// Every way to reach a server whose first address is TCP, and which listens on this socket.
pub(crate) fn transports(server: &Server, socket: PathBuf) -> Vec<Transport> {
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let tcp = Transport::Tcp(address.ip().to_string(), address.port());
    vec![tcp, Transport::Unix(socket.clone()), Transport::Shm(socket)]
}

/// The port of the first of these, which is TCP.
pub(crate) fn port(transports: &[Transport]) -> u16 {
    match transports[0] {
        Transport::Tcp(_, port) => port,
        _ => panic!("no TCP"),
    }
}

pub(crate) fn setup(engine: EngineWish) -> Setup {
    setup_with(engine, 256 << 20)
}

impl Setup {
    /// The port of its TCP listener.
    pub(crate) fn port(&self) -> u16 {
        port(&self.transports)
    }

    /// A new client over TCP.
    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.transports[0], Options::default()).unwrap()
    }
}

/// Removes a directory with its contents.
pub(crate) fn remove(parent: &File, name: &[u8]) {
    let directory = parent.open(name, 0, 0).unwrap();
    for entry in directory.list_all(true).unwrap() {
        if entry.attr.unwrap().is_directory() {
            remove(&directory, &entry.name);
        } else {
            directory.unlink(&entry.name, false).unwrap();
        }
    }
    parent.unlink(name, true).unwrap();
}

/// Bytes that differ between seeds and between places.
pub(crate) fn pattern(length: usize, seed: u8) -> Vec<u8> {
    const PERIOD: usize = 65536;
    let byte = |i: usize| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8);
    let period: Vec<u8> = (0..length.min(PERIOD)).map(|i| byte(i).wrapping_add(seed)).collect();
    let mut bytes = period.repeat(length.div_ceil(PERIOD));
    bytes.truncate(length);
    bytes
}

/// Waits until a condition holds; fails with `what` if it does not in time.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "not within 60 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Checks that nobody gets more than the rate allows, which must hold however slow the machine is.
/// The first tenth of a second is free.
pub(crate) fn no_faster(start: Instant, work: f64, rate: f64) {
    let least = Duration::from_secs_f64(work / rate) - Duration::from_millis(120);
    assert!(start.elapsed() >= least, "{:?} for what takes {least:?}", start.elapsed());
}

/// A counter of the server's statistics.
pub(crate) fn counter(client: &Client, name: &str) -> u64 {
    counter_in(&client.statistics().unwrap(), name)
}

/// Returns a counter in these statistics.
pub(crate) fn counter_in(statistics: &str, name: &str) -> u64 {
    let (_, rest) = statistics
        .split_once(&format!("\"{name}\":"))
        .unwrap_or_else(|| panic!("no counter {name} in {statistics}"));
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

/// A small random number generator (xorshift64*), so that a seed repeats a run.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    /// A number from 1 to `most`; small ones are as likely as large ones.
    pub(crate) fn any_size(&mut self, most: u64) -> u64 {
        let bits = u64::from(64 - most.leading_zeros());
        let bound = 1 << (1 + self.below(bits));
        1 + self.below(bound).min(most - 1)
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

/// The seed of this run: `TOWLINE_SEED` if set; otherwise a new one in the long tier, and always
/// the same in the fast tier, whose verdict must not depend on chance. It is printed, so that the
/// output of a failed test says how to repeat it.
pub(crate) fn seed() -> u64 {
    let seed = match std::env::var("TOWLINE_SEED") {
        Ok(text) => text.parse().expect("TOWLINE_SEED is not a number"),
        Err(_) if long().is_none() => 1,
        Err(_) => {
            let mut bytes = [0; 4];
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
            u32::from_le_bytes(bytes).into()
        }
    };
    eprintln!("TOWLINE_SEED={seed}");
    seed
}

/// Reports, past the capture of a test's output, that something was not tested, and why.
pub(crate) fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {what}");
}

/// Whether renames in a directory can leave whiteouts, which not all file systems have.
pub(crate) fn has_whiteouts(place: &Path) -> bool {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let directory = TempDir::new_in(place).unwrap();
    let [old, new] = ["old", "new"].map(|name| directory.path().join(name));
    std::fs::write(&old, "").unwrap();
    renameat_with(CWD, &old, CWD, &new, RenameFlags::WHITEOUT).is_ok()
}

/// How many times as much as usual to try: the value of `TOWLINE_LONG`, which selects the long
/// tier; `None` in the fast one.
pub(crate) fn long() -> Option<u64> {
    let text = std::env::var("TOWLINE_LONG").ok()?;
    Some(text.parse().expect("TOWLINE_LONG is no number"))
}

const CHILD: &str = "TOWLINE_TEST_SERVER";

/// A server in a process of its own, which can be killed. The test program runs itself again as the
/// server, and must have a test of this form:
///
/// ```ignore
/// #[test]
/// #[ignore = "not a test: the server that other tests kill"]
/// fn child_server() {
///     common::child_server();
/// }
/// ```
pub(crate) struct Process {
    child: Child,
    pub(crate) port: u16,
    directory: PathBuf,
    keeps_state: bool,
    lock_grace: Duration,
}

/// The body of that test: serves until its standard input ends.
pub(crate) fn child_server() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let mut words = text.splitn(4, ' ');
    let mut word = || words.next().unwrap();
    let (port, keeps_state, grace) = (word(), word() == "true", word().parse().unwrap());
    let directory = Path::new(word());
    let mut disks = vec![DiskExport::new("memory", DiskKind::Memory(8 << 20))];
    let image = directory.join("disk");
    if image.exists() {
        disks.push(DiskExport::new("file", DiskKind::File(image, CacheMode::Cached)));
    }
    let config = Config {
        exports: vec![
            Export::new("dir", ExportKind::Directory(directory.join("data"))),
            Export::new("mem", ExportKind::Memory(64 << 20)),
        ],
        listen: vec![
            Address::parse(&format!("tcp://127.0.0.1:{port}")).unwrap(),
            Address::Unix(directory.join("socket")),
        ],
        disks,
        cores: 2,
        buffer_limit: 16 << 20,
        state: keeps_state.then(|| directory.join("state")),
        lock_grace: Duration::from_millis(grace),
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    println!("serving");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    server.stop();
}

/// A port that nobody listens on, below those that the kernel gives to outgoing connections: one of
/// these could otherwise take a server's place while it is away.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + ((std::process::id() as u16).wrapping_mul(37) % 10_000) + number;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Process {
    /// Starts a server for `directory`: exports `dir` (its folder `data`) and `mem` (64 MiB), the
    /// disks `memory` (8 MiB) and, if it exists, `file` (its file `disk`), with 16 MiB of buffers.
    pub(crate) fn start(directory: &Path) -> Self {
        Self::start_with(directory, false, Duration::ZERO)
    }

    /// As `start`; with `keeps_state`, the server keeps its sessions in the folder `state`.
    pub(crate) fn start_with(directory: &Path, keeps_state: bool, lock_grace: Duration) -> Self {
        std::fs::create_dir_all(directory.join("data")).unwrap();
        let port = free_port();
        let child = spawn(directory, port, keeps_state, lock_grace);
        Self { child, port, directory: directory.to_path_buf(), keeps_state, lock_grace }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again after [`Process::kill`].
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.directory, self.port, self.keeps_state, self.lock_grace);
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops all its threads: if it is then killed, it never sees what is sent to it from now on.
    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
            stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
        };
        eventually("it stops", || std::fs::read_dir(&tasks).unwrap().all(is_stopped));
    }

    pub(crate) fn tcp(&self) -> Transport {
        Transport::Tcp("127.0.0.1".into(), self.port)
    }

    pub(crate) fn transports(&self) -> [Transport; 3] {
        let socket = self.directory.join("socket");
        [self.tcp(), Transport::Unix(socket.clone()), Transport::Shm(socket)]
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// True if one of its descriptors refers to this file.
    pub(crate) fn has_open(&self, path: &Path) -> bool {
        let mut all = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        all.any(|fd| std::fs::read_link(fd.unwrap().path()).is_ok_and(|to| to == path))
    }

    /// The number that its next descriptor gets.
    pub(crate) fn next_descriptor(&self) -> u64 {
        let all = format!("/proc/{}/fd", self.child.id());
        (0..).find(|number| !Path::new(&format!("{all}/{number}")).is_symlink()).unwrap()
    }

    /// Limits the number of its descriptors from now on.
    pub(crate) fn limit_descriptors(&mut self, most: u64) {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
        let pid = Pid::from_raw(self.child.id() as i32);
        let limit = Rlimit { current: Some(most), ..getrlimit(Resource::Nofile) };
        prlimit(pid, Resource::Nofile, limit).unwrap();
    }

    /// Resident memory in MiB, without pages of files and of shared memory.
    pub(crate) fn memory(&self) -> u64 {
        self.kib("RssAnon:") >> 10
    }

    /// Memory that the kernel may not reclaim, in KiB.
    pub(crate) fn pinned(&self) -> u64 {
        self.kib("VmPin:") + self.kib("VmLck:")
    }

    fn kib(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(directory: &Path, port: u16, keeps_state: bool, lock_grace: Duration) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_server", "--ignored", "--nocapture"])
        .env(
            CHILD,
            format!("{port} {keeps_state} {} {}", lock_grace.as_millis(), directory.display()),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("serving") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the server did not start");
    }
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    child
}

/// A peer that sends arbitrary bytes.
pub(crate) struct Raw(pub(crate) TcpStream);

/// A message with this header, whose lengths are set to those of body and payload.
pub(crate) fn message(mut header: Header, body: &[u8], payload: &[u8]) -> Vec<u8> {
    header.body_bytes = body.len() as u32;
    header.payload_bytes = payload.len() as u32;
    [&header.to_bytes()[..], body, payload].concat()
}

/// A request that offers `offered` bytes, to follow when granted.
pub(crate) fn request(slot: u16, sequence: u32, requests: &[Request<'_>], offered: u64) -> Vec<u8> {
    let mut header = Header::new(Kind::Request, slot, sequence);
    header.offset = offered;
    message(header, &towline_wire::request::encode_compound(requests), &[])
}

/// The hello of a new session.
pub(crate) fn hello() -> Hello {
    use towline_wire::hello::{MAGIC, VERSION};
    Hello { magic: MAGIC, version: VERSION, client: 1, ..Hello::default() }
}

pub(crate) fn hello_message(hello: &Hello) -> Vec<u8> {
    let mut body = Vec::new();
    hello.encode(&mut body);
    message(Header::new(Kind::Hello, 0, 0), &body, &[])
}

impl Raw {
    pub(crate) fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self(stream)
    }

    /// Connects and begins a session.
    pub(crate) fn greeted(port: u16) -> (Self, Welcome) {
        let mut raw = Self::connect(port);
        raw.send(&hello_message(&hello()));
        let (header, body) = raw.receive().expect("no welcome");
        assert_eq!(header.kind, Kind::Welcome);
        (raw, Welcome::parse(&body).unwrap())
    }

    /// Sends, unless the server has already ended the connection.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Returns the next message, with its payload (if any) behind its body; `None` if thrown out.
    pub(crate) fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; 32];
        self.0.read_exact(&mut head).ok()?;
        let header = Header::parse(&head).unwrap();
        let mut rest = vec![0; (header.body_bytes + header.payload_bytes) as usize];
        self.0.read_exact(&mut rest).ok()?;
        Some((header, rest))
    }

    /// Reads until the server ends the connection; returns false if it does not within a minute.
    pub(crate) fn thrown_out(&mut self) -> bool {
        let mut buffer = [0; 65536];
        loop {
            match self.0.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// Makes the first of these messages, a request, say that `ahead` bytes of its data follow at once.
pub(crate) fn say_ahead(bytes: &mut [u8], ahead: usize) {
    let head = bytes.first_chunk_mut().unwrap();
    let mut header = Header::parse(head).unwrap();
    header.set_ahead(ahead as u32);
    *head = header.to_bytes();
}

/// A peer over shared memory that writes arbitrary bytes.
pub(crate) struct ShmRaw {
    pub(crate) socket: UnixStream,
    bell: OwnedFd,
    memory: SharedMemory,
}

impl ShmRaw {
    /// Size of the ring towards the server.
    pub(crate) const RING_BYTES: usize = 512 << 10;
    // Where its positions and its bytes are, and the positions in the other ring.
    pub(crate) const WRITTEN: usize = 256;
    const READ: usize = 256 + 128;
    pub(crate) const BYTES: usize = 4096;
    const ANSWERED: usize = 512;
    pub(crate) const TAKEN: usize = 512 + 128;

    pub(crate) fn greeted(socket: &Path) -> Self {
        let socket = UnixStream::connect(socket).unwrap();
        let asked = hello_message(&Hello { want: want::SHARED_MEMORY, ..hello() });
        (&socket).write_all(&asked).unwrap();
        let (_, given) = receive_descriptors(&socket, &mut [0; 512], Wait::Any).unwrap();
        let [memory, bell] = <[_; 2]>::try_from(given).unwrap();
        Self { socket, bell, memory: SharedMemory::open(memory, SHM_BYTES, true).unwrap() }
    }

    /// Sends bytes that fit behind those sent before, without going round the ring's end.
    pub(crate) fn send(&self, bytes: &[u8]) {
        let written = self.memory.word64(Self::WRITTEN);
        let at = written.load(Ordering::Relaxed);
        self.memory.copy_in(Self::BYTES + at as usize % Self::RING_BYTES, bytes);
        written.store(at + bytes.len() as u64, Ordering::Release);
        self.ring();
    }

    /// Wakes the server.
    pub(crate) fn ring(&self) {
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).unwrap();
    }

    /// Stores any word anywhere, and does not wake the server.
    pub(crate) fn store(&self, at: usize, word: u64) {
        self.memory.word64(at).store(word, Ordering::Release);
    }

    /// Sends whatever the ring holds once more. Returns the bytes sent in all.
    pub(crate) fn send_again(&self) -> u64 {
        let written = self.read() + Self::RING_BYTES as u64;
        self.store(Self::WRITTEN, written);
        written
    }

    /// Returns the bytes that the server has read.
    pub(crate) fn read(&self) -> u64 {
        self.memory.word64(Self::READ).load(Ordering::Acquire)
    }

    /// Returns the bytes that the server has not read.
    pub(crate) fn unread(&self) -> u64 {
        self.memory.word64(Self::WRITTEN).load(Ordering::Acquire) - self.read()
    }

    /// Returns the bytes of answers in the ring so far.
    pub(crate) fn answered(&self) -> u64 {
        self.memory.word64(Self::ANSWERED).load(Ordering::Acquire)
    }

    /// Takes the answers that are in the ring, and throws them away.
    pub(crate) fn take_answers(&self) {
        self.store(Self::TAKEN, self.answered());
    }

    /// True once the server has ended the connection; false if it does not within a minute.
    pub(crate) fn thrown_out(&self) -> bool {
        self.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        match (&self.socket).read(&mut [0; 64]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Waits for the first answer, and returns its body.
    pub(crate) fn answer(&self) -> Vec<u8> {
        eventually("it is answered", || self.answered() > 0);
        let at = Self::BYTES + Self::RING_BYTES;
        let mut head = [0; 32];
        self.memory.copy_out(at, &mut head);
        let mut body = vec![0; Header::parse(&head).unwrap().body_bytes as usize];
        self.memory.copy_out(at + head.len(), &mut body);
        body
    }
}
