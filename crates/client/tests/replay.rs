//! Connections that are cut at random points under load: every operation takes effect once, none
//! fails, and reads return what was written.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::proxy::Proxy;
use common::{CREATE, EXCLUSIVE, Random, Setup, TRUNCATE, counter, seed, setup_with};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_client::{Client, File, Options, SetAttr, Transport};
use towline_server::EngineWish;

/// Connects, and tries again if that very connection is cut.
fn connect(transport: &Transport) -> Client {
    loop {
        if let Ok(client) = Client::connect(transport, Options::default()) {
            return client;
        }
    }
}

/// Returns a proxy before a server, and how to reach that.
fn proxy_before(transport: &Transport, seed: u64, most: u64) -> (Proxy, Transport) {
    match transport {
        Transport::Tcp(host, port) => {
            let proxy = Proxy::start(*port, seed, most);
            let before = Transport::Tcp(host.clone(), proxy.port);
            (proxy, before)
        }
        Transport::Unix(socket) => {
            let before = socket.with_extension("proxy");
            (Proxy::start_unix(&before, socket.clone(), seed, most), Transport::Unix(before))
        }
        other => panic!("no proxy passes on the memory of {other:?}"),
    }
}

/// Ends connections of one of these clients at random moments, each once.
fn end_sockets(
    clients: &[Client],
    mut random: Random,
    ended: &AtomicU64,
    goes_on: impl Fn() -> bool,
) {
    let mut seen = HashSet::new();
    while goes_on() {
        std::thread::sleep(Duration::from_micros(random.any_size(20_000)));
        let Ok(socket) = random.pick(clients).fd() else { continue };
        if seen.insert(rustix::fs::fstat(&socket).unwrap().st_ino) {
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
            ended.fetch_add(1, Ordering::Relaxed);
        }
    }
}

const REGION: usize = 1 << 20;
const THREADS: u64 = 6;

/// What a thread has done, to be compared with what is there at the end.
#[derive(Default)]
struct Done {
    /// The names it left, with their contents.
    files: BTreeMap<String, Vec<u8>>,
    directories: HashSet<String>,
    /// Number of records it appended, to the log of small ones and to the log of large ones.
    small: u64,
    large: u64,
    region: Vec<u8>,
}

/// A record: thread, number, length, and bytes that follow from these.
fn record(thread: u64, number: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    for word in [thread, number, length as u64] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    let fill = (thread * 31 + number) as u8;
    bytes.resize(length, fill);
    bytes
}

/// Reads consecutive records; fails where there is none.
fn records(log: &[u8]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < log.len() {
        let word = |i: usize| {
            let from = at + 8 * i;
            let bytes = log.get(from..from + 8).unwrap_or_else(|| panic!("cut record at {at}"));
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let (thread, number, length) = (word(0), word(1), word(2) as usize);
        assert!(
            thread < THREADS && length >= 24 && at + length <= log.len(),
            "no record at {at}: thread {thread}, number {number}, length {length}"
        );
        assert!(
            log[at..at + length] == record(thread, number, length),
            "record {number} of thread {thread}, {length} bytes at {at}, is not in one piece"
        );
        found.push((thread, number));
        at += length;
    }
    found
}

struct Load<'a> {
    thread: u64,
    root: &'a File,
    random: Random,
    done: Done,
    next: u64,
}

impl Load<'_> {
    fn name(&mut self) -> String {
        self.next += 1;
        format!("t{}-{}", self.thread, self.next)
    }

    fn some_file(&mut self) -> Option<String> {
        let count = self.done.files.len() as u64;
        let index = self.random.below(count.max(1)) as usize;
        self.done.files.keys().nth(index).cloned()
    }

    fn run(&mut self, goes_on: impl Fn() -> bool, counts: &[AtomicU64; 12]) {
        let small = self.root.open(b"small", 2, 0).unwrap();
        let large = self.root.open(b"large", 2, 0).unwrap();
        let shared = self.root.open(b"shared", 2, 0).unwrap();
        self.done.region = vec![0; REGION];
        while goes_on() {
            let kind = self.random.below(12) as usize;
            self.step(kind, &small, &large, &shared);
            counts[kind].fetch_add(1, Ordering::Relaxed);
        }
        small.close().unwrap();
        large.close().unwrap();
        shared.close().unwrap();
    }

    fn step(&mut self, kind: usize, small: &File, large: &File, shared: &File) {
        let thread = self.thread;
        match kind {
            0 | 1 => {
                let bytes = record(thread, self.done.small, 24 + self.random.below(60) as usize);
                assert_eq!(small.append(&bytes).unwrap().0, bytes.len());
                self.done.small += 1;
            }
            2 => {
                // From inline through one granted fragment to several.
                let length = 10_000 + self.random.any_size(700_000) as usize;
                let bytes = record(thread, self.done.large, length);
                assert_eq!(large.append(&bytes).unwrap().0, bytes.len());
                self.done.large += 1;
            }
            3 => {
                let name = self.name();
                let file = self.root.open(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap();
                file.close().unwrap();
                self.done.files.insert(name, Vec::new());
            }
            4 => {
                // One request that creates, takes data and closes: each part takes effect once.
                let name = self.name();
                let length = self.random.any_size(600_000) as usize;
                let bytes = record(thread, self.next, length.max(24));
                self.root
                    .write_path(name.as_bytes(), CREATE | EXCLUSIVE, 0o600, &bytes)
                    .unwrap_or_else(|error| panic!("{name}, {length} bytes: {error}"));
                self.done.files.insert(name, bytes);
            }
            5 => {
                let Some(old) = self.some_file() else { return };
                let new = self.name();
                self.root.rename(old.as_bytes(), self.root, new.as_bytes(), 1).unwrap();
                let bytes = self.done.files.remove(&old).unwrap();
                self.done.files.insert(new, bytes);
            }
            6 => {
                let Some(name) = self.some_file() else { return };
                self.root.unlink(name.as_bytes(), false).unwrap();
                self.done.files.remove(&name);
            }
            7 => {
                let name = self.name();
                self.root.make_directory(name.as_bytes(), 0o700).unwrap();
                if self.random.below(2) == 0 {
                    self.root.unlink(name.as_bytes(), true).unwrap();
                } else {
                    self.done.directories.insert(name);
                }
            }
            8 | 9 => {
                let length = self.random.any_size(REGION as u64) as usize;
                let at = self.random.below((REGION - length) as u64 + 1) as usize;
                let fill = self.random.next() as u8;
                let bytes: Vec<u8> =
                    (0..length).map(|i| fill.wrapping_add((i / 64) as u8)).collect();
                let offset = thread * REGION as u64 + at as u64;
                assert_eq!(shared.write_at(&bytes, offset).unwrap(), length);
                self.done.region[at..at + length].copy_from_slice(&bytes);
            }
            10 => {
                let length = self.random.any_size(REGION as u64) as usize;
                let at = self.random.below((REGION - length) as u64 + 1) as usize;
                let mut bytes = vec![0xee; length];
                let offset = thread * REGION as u64 + at as u64;
                assert_eq!(shared.read_at(&mut bytes, offset).unwrap(), length);
                assert!(
                    bytes == self.done.region[at..at + length],
                    "{length} bytes read at {offset} differ from what was written"
                );
            }
            _ => {
                let Some(name) = self.some_file() else { return };
                let expected = self.done.files[&name].clone();
                let mut bytes = vec![0; expected.len() + 1];
                assert_eq!(
                    self.root.read_path(name.as_bytes(), 0, &mut bytes).unwrap(),
                    expected.len()
                );
                assert!(bytes[..expected.len()] == expected[..], "{name}: bytes differ");
                let size = self.root.stat_path(name.as_bytes(), false).unwrap().size;
                assert_eq!(size, expected.len() as u64);
            }
        }
    }
}

fn read_whole(root: &File, name: &[u8]) -> Vec<u8> {
    let file = root.open(name, 0, 0).unwrap();
    let mut bytes = vec![0; file.attr().size as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

fn check(root: &File, all: &[Done]) {
    for (log, count) in
        [("small", (|d: &Done| d.small) as fn(&Done) -> u64), ("large", |d: &Done| d.large)]
    {
        let mut found = records(&read_whole(root, log.as_bytes()));
        let total = found.len();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), total, "{log}: records were appended twice");
        let expected: Vec<(u64, u64)> = (0..THREADS)
            .flat_map(|thread| (0..count(&all[thread as usize])).map(move |n| (thread, n)))
            .collect();
        assert!(found == expected, "{log}: {total} records, {} appended", expected.len());
    }
    let shared = read_whole(root, b"shared");
    for (done, region) in all.iter().zip(shared.chunks(REGION)) {
        assert!(done.region == region, "writes were lost or misplaced");
    }
    let mut names: HashSet<String> = root
        .open(b".", 0, 0)
        .unwrap()
        .list_all(false)
        .unwrap()
        .into_iter()
        .map(|entry| String::from_utf8(entry.name).unwrap())
        .collect();
    for log in ["small", "large", "shared"] {
        assert!(names.remove(log));
    }
    for done in all {
        for (name, bytes) in &done.files {
            assert!(names.remove(name), "{name} is missing");
            assert!(read_whole(root, name.as_bytes()) == *bytes, "{name}: bytes differ");
        }
        for name in &done.directories {
            assert!(names.remove(name), "directory {name} is missing");
        }
    }
    assert!(names.is_empty(), "nobody made, or somebody removed: {names:?}");
}

/// Too few cuts to prove anything.
const CUTS: u64 = 20;

/// Uses this transport for as many seconds.
fn under_load(setup: &Setup, transport: &Transport, export: &str, seconds: u64) {
    let seed = seed();
    let cuts = Arc::new(AtomicU64::new(0));
    // Nothing passes through a proxy to a memory that both share.
    let is_shared = matches!(transport, Transport::Shm(_));
    let through = (!is_shared).then(|| proxy_before(transport, seed, 4 << 20));
    let cuts = through.as_ref().map_or(&cuts, |(proxy, _)| &proxy.cuts);
    let direct = setup.client();
    let plain = direct.attach(export.as_bytes()).unwrap();
    for (name, size) in [("small", 0), ("large", 0), ("shared", THREADS * REGION as u64)] {
        let file = plain.open(name.as_bytes(), CREATE | TRUNCATE, 0o600).unwrap();
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        file.set_attr(b"", true, &set).unwrap();
    }
    // Two clients, each used by several threads.
    let to = through.as_ref().map_or(transport, |(_, before)| before);
    let clients = [connect(to), connect(to)];
    let roots = clients.each_ref().map(|client| client.attach(export.as_bytes()).unwrap());
    let until =
        Instant::now() + Duration::from_secs(common::long().map_or(seconds, |length| 40 * length));
    let counts: [AtomicU64; 12] = Default::default();
    let operations = || counts.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
    // Longer on a machine so busy that the run would prove little.
    let goes_on = || {
        let proves_little = cuts.load(Ordering::Relaxed) <= CUTS || operations() <= 200;
        let now = Instant::now();
        now < until || (proves_little && now < until + Duration::from_secs(60))
    };
    let all: Vec<Done> = std::thread::scope(|scope| {
        if is_shared {
            scope.spawn(|| end_sockets(&clients, Random::new(seed), cuts, goes_on));
        }
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (root, counts, goes_on) = (&roots[thread as usize % 2], &counts, &goes_on);
                let random = Random::new(seed + 1 + thread);
                scope.spawn(move || {
                    let done = Done::default();
                    let mut load = Load { thread, root, random, done, next: 0 };
                    load.run(goes_on, counts);
                    load.done
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    if let Some((proxy, _)) = &through {
        proxy.calm.store(true, Ordering::Relaxed);
    }
    check(&plain, &all);
    let (cuts, replays) = (cuts.load(Ordering::Relaxed), counter(&direct, "replays"));
    let what = format!("{export} over {transport:?}");
    eprintln!("{what}: {cuts} cuts, {replays} replays, {counts:?} operations");
    assert!(cuts > CUTS, "only {cuts} cuts: the test proves little");
    assert!(replays > 0, "no request was answered from memory");
    let operations = operations();
    assert!(operations > 200, "only {operations} operations in spite of cuts");
}

#[test]
fn every_operation_takes_effect_once_on_a_directory() {
    let setup = setup_with(EngineWish::Automatic, 1 << 20);
    under_load(&setup, &setup.transports[0], "dir", 4);
}

#[test]
fn every_operation_takes_effect_once_in_memory() {
    let setup = setup_with(EngineWish::Automatic, 1 << 30);
    under_load(&setup, &setup.transports[0], "mem", 4);
}

#[test]
fn every_operation_takes_effect_once_over_a_unix_socket() {
    let setup = setup_with(EngineWish::Automatic, 1 << 20);
    under_load(&setup, &setup.transports[1], "dir", 2);
}

#[test]
fn every_operation_takes_effect_once_over_shared_memory() {
    let setup = setup_with(EngineWish::Automatic, 1 << 30);
    under_load(&setup, &setup.transports[2], "mem", 2);
}

#[test]
fn small_operations_survive_cuts_in_every_handshake() {
    let seed = seed();
    let setup = setup_with(EngineWish::Epoll, 64 << 20);
    let over = |transport: &Transport, name: &str| {
        let (proxy, before) = proxy_before(transport, seed, 1000);
        let client = connect(&before);
        let root = client.attach(b"mem").unwrap();
        let log = root.open(name.as_bytes(), CREATE, 0o600).unwrap();
        for number in 0..100 {
            log.append(&record(0, number, 40)).unwrap();
        }
        let cuts = proxy.cuts.load(Ordering::Relaxed);
        proxy.calm.store(true, Ordering::Relaxed);
        let expected = (0..100).map(|n| (0, n)).collect::<Vec<_>>();
        assert_eq!(records(&read_whole(&root, name.as_bytes())), expected, "{transport:?}");
        assert!(cuts > 20, "only {cuts} cuts: the test proves little");
    };
    // Most of the time they wait before they connect again.
    std::thread::scope(|scope| {
        scope.spawn(|| over(&setup.transports[0], "tcp"));
        scope.spawn(|| over(&setup.transports[1], "unix"));
    });
}
