//! Servers that are killed at random moments and restarted with the state they left: every
//! operation takes effect once, and none fails.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, EXCLUSIVE, Process, Random, counter, seed};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Errno, File, Options};
use towline_wire::request::rename_flag;

#[test]
#[ignore = "not a test: the server that the others kill"]
fn child_server() {
    common::child_server();
}

const GRACE: Duration = Duration::from_secs(60);
const CLIENTS: u64 = 8;
const DATA_SYNC: u32 = 0o10_000;

/// What a name refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    File(u64),
    Directory(u64),
    Symlink(u64),
    Whiteout(u64),
}

impl Node {
    fn inode(self) -> u64 {
        let (Self::File(inode)
        | Self::Directory(inode)
        | Self::Symlink(inode)
        | Self::Whiteout(inode)) = self;
        inode
    }
}

/// A client that changes names of its own, and knows the result to expect.
struct Load<'a> {
    number: u64,
    root: &'a File,
    home: File,
    log: File,
    random: Random,
    names: BTreeMap<String, Node>,
    /// Whether the file system has whiteouts.
    whiteouts: bool,
    next: u64,
    /// Small and large records: number, offset and length.
    appended: Vec<(u64, u64, u64)>,
    counts: BTreeMap<&'static str, u64>,
}

impl Load<'_> {
    fn fresh(&mut self) -> String {
        self.next += 1;
        // Some names begin with a directory that the server has to look up.
        let prefix = if self.random.below(3) == 0 { "../home{}/" } else { "" };
        format!("{}n{}", prefix.replace("{}", &self.number.to_string()), self.next)
    }

    fn key(name: &str) -> String {
        name.rsplit('/').next().unwrap().to_owned()
    }

    fn some(&mut self, wanted: impl Fn(&Node) -> bool) -> Option<String> {
        let names: Vec<_> = self.names.iter().filter(|(_, n)| wanted(n)).collect();
        if names.is_empty() {
            return None;
        }
        Some(self.random.pick(&names).0.clone())
    }

    fn took(&mut self, name: &str, node: Node) {
        let old = self.names.insert(Self::key(name), node);
        assert_eq!(old, None, "{name}");
    }

    fn step(&mut self) -> Option<&'static str> {
        Some(match self.random.below(12) {
            0 => {
                let name = self.fresh();
                let file = self.home.open(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap();
                self.took(&name, Node::File(file.attr().inode));
                file.close().unwrap();
                "create"
            }
            1 => {
                let name = self.fresh();
                let data = vec![self.next as u8; 1 + self.random.below(20_000) as usize];
                // A file whose mode does not allow opening it is still reopened after a restart.
                let mode = if self.random.below(2) == 0 { 0o400 } else { 0o600 };
                self.home
                    .write_path(name.as_bytes(), CREATE | EXCLUSIVE, mode, &data)
                    .unwrap_or_else(|error| panic!("{name} {mode:o}: {error}"));
                let attr = self.home.stat_path(name.as_bytes(), false).unwrap();
                assert_eq!((attr.size, attr.mode & 0o7777), (data.len() as u64, mode));
                self.took(&name, Node::File(attr.inode));
                "create and write"
            }
            2 => {
                let name = self.fresh();
                let attr = self.home.make_directory(name.as_bytes(), 0o700).unwrap();
                self.took(&name, Node::Directory(attr.inode));
                "mkdir"
            }
            3 => {
                let name = self.fresh();
                let attr = self.home.symlink(name.as_bytes(), b"nowhere").unwrap();
                self.took(&name, Node::Symlink(attr.inode));
                "symlink"
            }
            4 => {
                let old = self.some(|n| matches!(n, Node::File(_)))?;
                let name = self.fresh();
                let attr =
                    self.home.link(old.as_bytes(), false, &self.home, name.as_bytes()).unwrap();
                assert_eq!(attr.inode, self.names[&old].inode());
                self.took(&name, Node::File(attr.inode));
                "link"
            }
            5 | 6 => {
                let name = self.some(|_| true)?;
                let node = self.names.remove(&name).unwrap();
                self.home
                    .unlink(name.as_bytes(), matches!(node, Node::Directory(_)))
                    .unwrap_or_else(|error| panic!("unlink {name}: {error}"));
                "unlink"
            }
            7 | 8 => {
                let old = self.some(|_| true)?;
                let new = self.fresh();
                let mut flags = if self.random.below(2) == 0 { 0 } else { rename_flag::NO_REPLACE };
                let leaves = self.whiteouts && self.random.below(3) == 0;
                flags |= if leaves { rename_flag::WHITEOUT } else { 0 };
                let node = self.names.remove(&old).unwrap();
                self.home
                    .rename(old.as_bytes(), &self.home, new.as_bytes(), flags)
                    .unwrap_or_else(|error| panic!("rename {old} {new} {flags}: {error}"));
                self.took(&new, node);
                if leaves {
                    let attr = self.home.stat_path(old.as_bytes(), false).unwrap();
                    self.took(&old, Node::Whiteout(attr.inode));
                    return Some("rename leaving a whiteout");
                }
                "rename"
            }
            9 => {
                let old = self.some(|n| matches!(n, Node::File(_)))?;
                let new = self.some(|n| matches!(n, Node::File(_)))?;
                let exchange = self.random.below(2) == 0;
                let flags = if exchange { rename_flag::EXCHANGE } else { 0 };
                self.home
                    .rename(old.as_bytes(), &self.home, new.as_bytes(), flags)
                    .unwrap_or_else(|error| panic!("rename {old} over {new}: {error}"));
                let (a, b) = (self.names[&old], self.names[&new]);
                self.names.insert(new.clone(), a);
                if exchange {
                    self.names.insert(old, b);
                } else if a != b {
                    self.names.remove(&old);
                }
                "rename over"
            }
            10 => {
                let length = match self.random.below(10) {
                    0 => 16 * 1024 + self.random.below(700_000),
                    _ => 24 + self.random.below(3000),
                };
                self.next += 1;
                let record = record(self.number, self.next, length);
                let (count, at) = self.log.append(&record).unwrap();
                assert_eq!(count as u64, length);
                self.appended.push((self.next, at, length));
                "append"
            }
            _ => {
                let name = self.some(|n| matches!(n, Node::File(_)))?;
                let set = |how| {
                    let (name, value) = (name.as_bytes(), b"value");
                    self.home.set_xattr(name, true, b"user.towline", value, how)
                };
                match set(1) {
                    Ok(()) => {}
                    Err(error) if error.errno() == Errno::EEXIST => {
                        self.home.remove_xattr(name.as_bytes(), true, b"user.towline").unwrap();
                        return Some("remove xattr");
                    }
                    // Files without write permission, and file systems without extended attributes.
                    Err(error)
                        if [Errno::EACCES, Errno::EPERM, Errno::EOPNOTSUPP]
                            .contains(&error.errno()) =>
                    {
                        return None;
                    }
                    Err(error) => panic!("set xattr: {error}"),
                }
                "make xattr"
            }
        })
    }
}

/// A record: client, number, length, and bytes that follow from these.
fn record(client: u64, number: u64, length: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length as usize);
    for word in [client, number, length] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.resize(length as usize, (client * 31 + number) as u8);
    bytes
}

/// Returns which client appended which record where.
fn records(log: &[u8]) -> Vec<(u64, u64, u64, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < log.len() {
        let word = |i: usize| {
            let from = at + 8 * i;
            let bytes = log.get(from..from + 8).unwrap_or_else(|| panic!("cut record at {at}"));
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let (client, number, length) = (word(0), word(1), word(2));
        assert!(client < CLIENTS && length >= 24, "no record at {at}: {client} {number} {length}");
        let end = at + length as usize;
        assert!(end <= log.len() && log[at..end] == record(client, number, length), "at {at}");
        found.push((client, number, at as u64, length));
        at = end;
    }
    found
}

/// The contents of a directory, as the machine itself sees them.
fn tree(directory: &Path) -> BTreeMap<String, Node> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            let node = if meta.is_dir() {
                Node::Directory(meta.ino())
            } else if meta.is_symlink() {
                Node::Symlink(meta.ino())
            } else if meta.file_type().is_char_device() {
                Node::Whiteout(meta.ino())
            } else {
                Node::File(meta.ino())
            };
            (entry.file_name().into_string().unwrap(), node)
        })
        .collect()
}

/// Kills the server again and again, at least 50 times and until `enough` operations are done.
fn rounds(server: &Mutex<Process>, random: &mut Random, done: &AtomicU64, enough: u64) {
    let mut kills = 0;
    let limit = Instant::now() + Duration::from_secs(200);
    while kills < 50 || done.load(Ordering::Relaxed) < enough {
        std::thread::sleep(Duration::from_millis(5 + random.below(60)));
        let mut server = server.lock().unwrap();
        server.kill();
        server.restart();
        kills += 1;
        if Instant::now() > limit {
            // After a panic this thread would wait for the clients, which wait for one another.
            eprintln!(
                "after {kills} kills: only {done:?} of {enough} done, clients failed or hang"
            );
            std::process::exit(1);
        }
    }
    eprintln!("{kills} kills");
}

#[test]
fn operations_take_effect_once_though_the_server_is_killed() {
    let seed = seed();
    let directory = TempDir::new().unwrap();
    let data = directory.path().join("data");
    let whiteouts = common::has_whiteouts(directory.path());
    if !whiteouts {
        common::skipped("whiteouts: the file system of the temporary directory has none");
    }
    let server = Mutex::new(Process::start_with(directory.path(), true, GRACE));
    let transport = server.lock().unwrap().tcp();
    let (over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let ready = Barrier::new(CLIENTS as usize + 1);
    let mut random = Random::new(seed);
    let loads: Vec<_> = std::thread::scope(|scope| {
        let (over, transport, done, ready) = (&over, &transport, &done, &ready);
        let threads: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let random = Random::new(seed + 1 + number);
                scope.spawn(move || {
                    let client = Client::connect(transport, Options::default()).unwrap();
                    let root = client.attach(b"dir").unwrap();
                    let name = format!("home{number}");
                    root.make_directory(name.as_bytes(), 0o700).unwrap();
                    let home = root.open(name.as_bytes(), 0, 0).unwrap();
                    // Not all clients may read what they write.
                    let flags = if number % 2 == 0 { CREATE } else { 0o100 | 1 };
                    // Some writes wait for the device, and so are done by other threads.
                    let flags = if number % 4 == 3 { flags | DATA_SYNC } else { flags };
                    let log = root.open(b"log", flags, 0o600).unwrap();
                    let mut load = Load {
                        number,
                        root: &root,
                        home,
                        log,
                        random,
                        names: BTreeMap::new(),
                        whiteouts,
                        next: 0,
                        appended: Vec::new(),
                        counts: BTreeMap::new(),
                    };
                    ready.wait();
                    while !over.load(Ordering::Relaxed) {
                        if let Some(what) = load.step() {
                            *load.counts.entry(what).or_default() += 1;
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    let names = load.home.list_all(false).unwrap();
                    assert_eq!(names.len(), load.names.len());
                    assert!(load.root.stat().unwrap().is_directory());
                    (load.names, load.appended, load.counts)
                })
            })
            .collect();
        ready.wait();
        rounds(&server, &mut random, done, 1500);
        over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut counts = BTreeMap::new();
    let mut wanted = BTreeSet::new();
    for (number, (names, appended, counted)) in loads.iter().enumerate() {
        assert_eq!(&tree(&data.join(format!("home{number}"))), names, "client {number}");
        wanted.extend(appended.iter().map(|&(n, at, length)| (number as u64, n, at, length)));
        for (what, count) in counted {
            *counts.entry(*what).or_insert(0) += count;
        }
    }
    let found = records(&std::fs::read(data.join("log")).unwrap());
    assert_eq!(found.len(), wanted.len(), "records lost or doubled");
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
    eprintln!("{counts:?}");
    let client = Client::connect(&transport, Options::default()).unwrap();
    eprintln!("{} answered from the record after the last kill", counter(&client, "replays"));
}

/// What all clients try at once, of which one has to succeed, and how the others fail.
const RACES: [(&str, Errno); 6] = [
    ("mkdir", Errno::EEXIST),
    ("rmdir", Errno::ENOENT),
    ("create", Errno::EEXIST),
    ("rename", Errno::ENOENT),
    ("link", Errno::EEXIST),
    ("unlink", Errno::ENOENT),
];

#[test]
fn one_of_many_wins_though_the_server_is_killed() {
    let seed = seed();
    let directory = TempDir::new().unwrap();
    let server = Mutex::new(Process::start_with(directory.path(), true, GRACE));
    let transport = server.lock().unwrap().tcp();
    std::fs::write(directory.path().join("data/source"), b"x").unwrap();
    let (over, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let barrier = Barrier::new(CLIENTS as usize);
    let wins = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    let mut random = Random::new(seed);
    let raced = AtomicU64::new(0);
    let ready = Barrier::new(CLIENTS as usize + 1);
    std::thread::scope(|scope| {
        let (over, stop, barrier, wins, transport) = (&over, &stop, &barrier, &wins, &transport);
        let (failures, raced, ready) = (&failures, &raced, &ready);
        let race = move |number: u64| {
            let client = Client::connect(transport, Options::default()).unwrap();
            let root = client.attach(b"dir").unwrap();
            let mut round = 0u64;
            ready.wait();
            loop {
                let (what, lost) = RACES[round as usize % RACES.len()];
                let name = format!("race{}", round / RACES.len() as u64);
                let name = name.as_bytes();
                barrier.wait();
                let result = match what {
                    "mkdir" => root.make_directory(name, 0o700).map(drop),
                    "rmdir" => root.unlink(name, true),
                    "create" => root.open(name, CREATE | EXCLUSIVE, 0o600).map(drop),
                    "rename" => root.rename(name, &root, format!("won{number}").as_bytes(), 0),
                    "link" => root.link(b"source", false, &root, name).map(drop),
                    _ => root.unlink(name, false),
                };
                // Reported after all have met: the others would wait for a panicking thread for
                // ever.
                match result {
                    Ok(()) => drop(wins.fetch_add(1, Ordering::Relaxed)),
                    Err(error) if error.errno() == lost => {}
                    Err(error) => {
                        let error = format!("client {number}, round {round}, {what}: {error}");
                        failures.lock().unwrap().push(error);
                    }
                }
                if barrier.wait().is_leader() {
                    let winners = wins.swap(0, Ordering::Relaxed);
                    let mut failures = failures.lock().unwrap();
                    if winners != 1 {
                        failures.push(format!("round {round}, {what}: {winners} clients won"));
                    }
                    let ends = over.load(Ordering::Relaxed) || !failures.is_empty();
                    stop.store(ends, Ordering::Relaxed);
                    raced.fetch_add(1, Ordering::Relaxed);
                }
                barrier.wait();
                round += 1;
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        let threads: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(move || race(n))).collect();
        ready.wait();
        rounds(&server, &mut random, raced, 150);
        over.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{failures:#?}");
    eprintln!("{raced:?} races");
}
