//! Many sessions at once: a thousand of them take little memory, each client sees what others have
//! done with its next request, and clients that flood the server do not keep others from being
//! served.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::brittle::{Brittle, answer, ask, config_of};
use common::{
    CREATE, EXCLUSIVE, Process, Raw, TRUNCATE, counter, eventually, hello, hello_message, pattern,
    port, request, setup, setup_with, transports,
};
use std::future::Future;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Errno, Error, File, Lock, Operation, Options, SetAttr, Transport};
use towline_net::address::Address;
use towline_server::{Config, EngineWish, Export, ExportKind, Server};
use towline_wire::hello::{MAGIC, VERSION, resumed};
use towline_wire::limits::LANELESS_SESSIONS_MAX;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, lock, sync_kind};
use towline_wire::{Header, Hello, Kind, Reply, Request, Welcome};

#[test]
#[ignore = "not a test: the server of the others"]
fn child_server() {
    common::child_server();
}

const SESSIONS: usize = 1000;

/// Lets this process and servers that it starts have as many descriptors as they may.
fn take_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

#[test]
fn a_thousand_sessions_are_served_in_little_memory() {
    take_descriptors();
    let directory = TempDir::new().unwrap();
    let process = Process::start(directory.path());
    let first = Client::connect(&process.tcp(), Options::default()).unwrap();
    let data = pattern(100_000, 1);
    first.attach(b"mem").unwrap().write_path(b"f", CREATE, 0o600, &data).unwrap();
    let before = process.memory();
    let clients: Vec<(Client, File)> = (0..SESSIONS)
        .map(|_| {
            let client = Client::connect(&process.tcp(), Options::default()).unwrap();
            let root = client.attach(b"mem").unwrap();
            (client, root)
        })
        .collect();
    // Each session works, with an open file, no locks, and data that has to wait for grants.
    for (number, (_, root)) in clients.iter().enumerate() {
        let mut back = vec![0; data.len() + 1];
        assert_eq!(root.read_path(b"f", 0, &mut back).unwrap(), data.len());
        assert!(back[..data.len()] == data[..]);
        if number % 10 == 0 {
            root.write_path(format!("f{number}").as_bytes(), CREATE, 0o600, &data).unwrap();
        }
    }
    assert_eq!(counter(&first, "sessions"), SESSIONS as u64 + 1);
    let grown = process.memory().saturating_sub(before);
    let (pinned, sockets) = (process.pinned(), socket_pages());
    println!(
        "MEASURED {SESSIONS} sessions: {grown} MiB more in the server, {pinned} KiB pinned or locked; \
         all TCP of this machine holds {sockets} pages"
    );
    // The server's buffers are bounded by 16 MiB; the rest is a few KiB for each session.
    assert!(grown < 16 + 24, "memory grew by {grown} MiB for {SESSIONS} sessions");
    // Buffers are registered when a disk first uses them; there is no disk here.
    assert!(pinned < 1 << 10, "{pinned} KiB are pinned for sessions");
    assert_eq!(counter(&first, "payload_discarded"), 0);
}

/// Returns the results of these operations, all of which make progress meanwhile.
fn all_of<T: Unpin>(operations: impl IntoIterator<Item = Operation<T>>) -> Vec<T> {
    let context = &mut Context::from_waker(Waker::noop());
    let mut under_way: Vec<_> = operations.into_iter().enumerate().collect();
    let mut results: Vec<Option<T>> = under_way.iter().map(|_| None).collect();
    eventually("all are answered", || {
        under_way.retain_mut(|(number, operation)| {
            let Poll::Ready(result) = Pin::new(operation).poll(context) else { return true };
            results[*number] = Some(result.unwrap());
            false
        });
        under_way.is_empty()
    });
    results.into_iter().flatten().collect()
}

#[test]
fn a_thousand_sessions_that_ask_at_the_same_time_share_the_buffers() {
    const BYTES: usize = 64 << 10;
    take_descriptors();
    let directory = TempDir::new().unwrap();
    let process = Process::start(directory.path());
    let watcher = Client::connect(&process.tcp(), Options::default()).unwrap();
    let before = process.memory();
    let files: Vec<(Client, File)> = (0..SESSIONS)
        .map(|number| {
            let client = Client::connect(&process.tcp(), Options::default()).unwrap();
            // Both of them on both cores.
            let export = [&b"dir"[..], b"mem"][number / 2 % 2];
            let root = client.attach(export).unwrap();
            let file = root.open(format!("f{number}").as_bytes(), CREATE, 0o600).unwrap();
            (client, file)
        })
        .collect();
    let data = |number: usize| {
        let mut data = pattern(BYTES, number as u8);
        data[..8].copy_from_slice(&number.to_le_bytes());
        data
    };
    let numbered = || files.iter().map(|(_, file)| file).enumerate();
    let write = |(number, file): (usize, &File)| file.start_write_at(data(number), 0).unwrap();
    let writes: Vec<_> = numbered().map(write).collect();
    assert!(all_of(writes).iter().all(|(count, _)| *count == BYTES));
    let read = |(_, file): (usize, &File)| file.start_read_at(vec![0; BYTES + 1], 0).unwrap();
    let reads: Vec<_> = numbered().map(read).collect();
    for (number, (count, buffer)) in all_of(reads).into_iter().enumerate() {
        assert!(count == BYTES && buffer[..BYTES] == data(number), "file {number}");
    }
    let most = counter(&watcher, "buffer_bytes_peak");
    let grown = process.memory().saturating_sub(before);
    println!("MEASURED {SESSIONS} at once: {most} bytes of buffers, {grown} MiB more");
    // No data was sent before all had asked.
    assert_eq!(most, 16 << 20, "bytes of buffers");
    assert!(grown < 16 + 24, "memory grew by {grown} MiB for {SESSIONS} sessions");
    assert_eq!(counter(&watcher, "payload_discarded"), 0);
}

/// Pages that the kernel holds for TCP, for all processes of this machine.
fn socket_pages() -> u64 {
    let text = std::fs::read_to_string("/proc/net/sockstat").unwrap();
    let tcp = text.lines().find(|line| line.starts_with("TCP:")).unwrap();
    let words: Vec<&str> = tcp.split(' ').collect();
    let at = words.iter().position(|word| *word == "mem").unwrap();
    words[at + 1].parse().unwrap()
}

#[test]
fn what_is_written_is_sent_once_however_many_write() {
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let data = pattern(64 << 10, 3);
    std::thread::scope(|scope| {
        for writer in 0..48 {
            let (setup, data) = (&setup, &data);
            scope.spawn(move || {
                let root = setup.client().attach(b"mem").unwrap();
                let file = root.open(format!("f{writer}").as_bytes(), CREATE, 0o600).unwrap();
                for part in 0..8 {
                    file.write_at(data, part * data.len() as u64).unwrap();
                }
            });
        }
    });
    assert_eq!(counter(&setup.client(), "payload_discarded"), 0);
}

/// Clients that come and go do not fill the memory, and those that have something open do not lose it to them.
#[test]
fn sessions_without_a_lane_are_not_kept_without_limit() {
    let directory = TempDir::new().unwrap();
    let config = Config {
        exports: vec![Export::new("dir", ExportKind::Directory(directory.path().into()))],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap()],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let transports = transports(&server, directory.path().join("unused"));
    let watcher = Client::connect(&transports[0], Options::default()).unwrap();
    let port = port(&transports);
    let (sessions, lanes) = (|| counter(&watcher, "sessions"), || counter(&watcher, "lanes"));
    let leaves = |opens: bool| {
        let (mut raw, welcome) = Raw::greeted(port);
        if opens {
            raw.send(&request(0, 1, &[Request::Attach { name: b"dir" }], 0));
            assert!(raw.receive().is_some());
        }
        welcome
    };
    let gone = |opens: bool| {
        let welcome = leaves(opens);
        eventually("its lane ends", || lanes() == 1);
        welcome
    };
    let is_kept = |welcome: &Welcome| {
        let Welcome { session, secret, .. } = *welcome;
        let mut raw = Raw::connect(port);
        raw.send(&hello_message(&Hello { session, secret, ..hello() }));
        let again = Welcome::parse(&raw.receive().unwrap().1).unwrap();
        again.resumed == resumed::JOINED
    };
    let [first, second] = [gone(true), gone(true)];
    let empty = gone(false);
    for _ in 2..LANELESS_SESSIONS_MAX {
        leaves(true);
    }
    let kept = gone(true);
    assert_eq!(sessions(), LANELESS_SESSIONS_MAX as u64 + 1);
    // That with nothing open has ended, and the one without a lane for longest.
    assert!(is_kept(&second) && is_kept(&kept));
    assert!(!is_kept(&first) && !is_kept(&empty));
    eventually("no more are kept", || sessions() == LANELESS_SESSIONS_MAX as u64 + 1);
    server.stop();
}

/// Checks that `other` sees with its next request what `one` has done.
fn see_each_other(one: &File, other: &File, round: u8) {
    let set = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
    let cut = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    let missing = |path: &[u8]| other.stat_path(path, true).err().map(|error| error.errno());
    // A name that was missing before.
    assert_eq!(missing(b"d/new"), Some(Errno::ENOENT));
    one.write_path(b"d/new", CREATE | EXCLUSIVE, 0o600, b"").unwrap();
    assert_eq!(other.stat_path(b"d/new", true).unwrap().size, 0);
    // Bytes, short and long, over those that `other` has read before, and in an open file.
    let file = other.open(b"d/new", 0, 0).unwrap();
    for length in [10, 5000, 200_000] {
        let bytes = pattern(length, round);
        one.write_path(b"d/new", 2, 0, &bytes).unwrap();
        let mut back = vec![0; length];
        assert_eq!(file.read_at(&mut back, 0).unwrap(), length);
        assert!(back == bytes, "an old read of {length} bytes");
        assert_eq!(other.read_path(b"d/new", 0, &mut back).unwrap(), length);
        assert!(back == bytes, "an old read by name of {length} bytes");
    }
    // Attributes and length.
    one.set_attr(b"d/new", true, &set(0o640)).unwrap();
    assert_eq!(other.stat_path(b"d/new", true).unwrap().mode & 0o7777, 0o640);
    one.set_attr(b"d/new", true, &cut(7)).unwrap();
    assert_eq!(file.stat().unwrap().size, 7);
    let mut back = [0; 100];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 7);
    // A directory in the path of a name in constant use gets another name.
    one.rename(b"d", one, b"e", 0).unwrap();
    assert_eq!(missing(b"d/new"), Some(Errno::ENOENT));
    assert_eq!(other.stat_path(b"e/new", true).unwrap().size, 7);
    one.rename(b"e", one, b"d", 0).unwrap();
    // Another file takes its place.
    one.write_path(b"d/next", CREATE | TRUNCATE, 0o600, b"next").unwrap();
    one.rename(b"d/next", one, b"d/new", 0).unwrap();
    assert_eq!(other.read_path(b"d/new", 0, &mut back).unwrap(), 4);
    let names = other.open(b"d", 0, 0).unwrap().list_all(false).unwrap();
    assert_eq!(names.iter().map(|entry| &entry.name[..]).collect::<Vec<_>>(), [b"new"]);
    one.unlink(b"d/new", false).unwrap();
    assert_eq!(missing(b"d/new"), Some(Errno::ENOENT));
}

#[test]
fn two_clients_see_each_others_changes_at_once() {
    let setup = setup(EngineWish::Automatic);
    let clients: Vec<Client> =
        setup.transports.iter().map(|t| Client::connect(t, Options::default()).unwrap()).collect();
    for export in [&b"dir"[..], b"mem"] {
        let roots: Vec<File> =
            clients.iter().map(|client| client.attach(export).unwrap()).collect();
        roots[0].make_directory(b"d", 0o700).unwrap();
        for round in 0..10 {
            for one in &roots {
                for other in &roots {
                    see_each_other(one, other, round);
                }
            }
        }
    }
}

/// Makes as many requests at once as a session may, takes the answers, and starts again; reconnects
/// when thrown out.
fn flood(port: u16, stop: &AtomicBool) {
    let mut buffer = vec![0; 1 << 20];
    while !stop.load(Ordering::Relaxed) {
        let (mut peer, _) = Raw::greeted(port);
        peer.0.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        for sequence in 1.. {
            for slot in 0..64 {
                let attach = Request::Attach { name: b"mem" };
                let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"large" };
                let read = Request::Read { handle: CURRENT, offset: 0, length: 256 << 10 };
                let close = Request::Close { handle: CURRENT };
                peer.send(&request(slot, sequence, &[attach, open, read, close], 0));
            }
            // Until nothing more arrives: either everything is answered, or the server takes its
            // time, and reusing slots that are still in use gets this peer thrown out.
            let ended = loop {
                match peer.0.read(&mut buffer) {
                    _ if stop.load(Ordering::Relaxed) => return,
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() != std::io::ErrorKind::WouldBlock,
                }
            };
            if ended {
                break;
            }
        }
    }
}

/// Ends the floods, even if the test fails.
struct Dam<'a>(&'a AtomicBool);

impl Drop for Dam<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn who_floods_the_server_does_not_starve_others() {
    const HONEST: usize = 2;
    const FLOODS: u64 = 6;
    let directory = TempDir::new().unwrap();
    let process = Process::start(directory.path());
    let client = Client::connect(&process.tcp(), Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"large", CREATE, 0o600, &pattern(1 << 20, 1)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let dam = Dam(&stop);
        for _ in 0..FLOODS {
            scope.spawn(|| flood(process.port, &stop));
        }
        eventually("the flood begins", || counter(&client, "sessions") > FLOODS);
        let honest: Vec<_> = (0..HONEST)
            .map(|number| {
                let process = &process;
                scope.spawn(move || {
                    let client = Client::connect(&process.tcp(), Options::default()).unwrap();
                    let root = client.attach(b"mem").unwrap();
                    let name = format!("honest{number}");
                    for round in 0..10 {
                        let data = pattern(70_000, round);
                        root.write_path(name.as_bytes(), CREATE, 0o600, &data).unwrap();
                        let mut back = vec![0; data.len()];
                        assert_eq!(
                            root.read_path(name.as_bytes(), 0, &mut back).unwrap(),
                            data.len()
                        );
                        assert!(back == data);
                    }
                })
            })
            .collect();
        let mut waited = 0;
        while honest.iter().any(|thread| !thread.is_finished()) && waited < 2400 {
            waited += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(dam);
        assert!(waited < 2400, "honest clients are not served within two minutes");
        for thread in honest {
            thread.join().unwrap();
        }
    });
}

/// As long as each turn of a core served all clients over shared memory, but only two of the others, they read
/// seven times as much.
#[test]
fn clients_over_shared_memory_do_not_starve_those_over_sockets() {
    const NEAR: usize = 60;
    const FAR: usize = 40;
    const READS: u64 = 100;
    let setup = setup(EngineWish::Automatic);
    std::fs::write(setup.data.join("file"), pattern(65536, 1)).unwrap();
    let connect = |transport| {
        let client = Client::connect(transport, Options::default()).unwrap();
        client.attach(b"dir").unwrap()
    };
    // Connections are distributed to the two cores in turn.
    let near = (0..NEAR).map(|_| connect(&setup.transports[2])).collect::<Vec<_>>();
    let far = (0..FAR).map(|at| connect(&setup.transports[at / 2 % 2])).collect::<Vec<_>>();
    let (begin, stop) = (Barrier::new(NEAR + FAR + 1), AtomicBool::new(false));
    let [near_reads, far_reads] = [const { AtomicU64::new(0) }; 2];
    std::thread::scope(|scope| {
        let dam = Dam(&stop);
        let all = near.iter().map(|root| (root, &near_reads));
        for (root, reads) in all.chain(far.iter().map(|root| (root, &far_reads))) {
            let (begin, stop) = (&begin, &stop);
            scope.spawn(move || {
                let mut buffer = vec![0; 65536];
                begin.wait();
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(root.read_path(b"file", 0, &mut buffer).unwrap(), 65536);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        begin.wait();
        let enough = READS * (NEAR + FAR) as u64;
        let done = || near_reads.load(Ordering::Relaxed) + far_reads.load(Ordering::Relaxed);
        eventually("the clients do not read", || done() >= enough);
        drop(dam);
    });
    let near = near_reads.into_inner() / NEAR as u64;
    let far = far_reads.into_inner() / FAR as u64;
    // One that asks in time reads up to four times in its turn.
    assert!(near <= 4 * far, "{near} reads over shared memory in the time of {far} others");
}

/// Returns what a client says about a server that answers its hello so.
fn refused_by(welcome: Welcome) -> Error {
    let mut body = Vec::new();
    Welcome { magic: MAGIC, ..welcome }.encode(&mut body);
    refused_with(body)
}

/// Returns what a client says about a server that answers its hello with this body of a welcome.
fn refused_with(body: Vec<u8>) -> Error {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = [0; 512];
        assert!(socket.read(&mut hello).unwrap() > 0);
        socket.write_all(&common::message(Header::new(Kind::Welcome, 0, 0), &body, &[])).unwrap();
    });
    let refused = Client::connect(&Transport::Unix(path), Options::default()).err().unwrap();
    server.join().unwrap();
    refused
}

/// Returns the beginning of a hello or welcome of another version, and `more` bytes that only that version understands.
fn of_another_version(more: usize) -> Vec<u8> {
    let mut body = MAGIC.to_le_bytes().to_vec();
    body.extend(999_u16.to_le_bytes());
    body.resize(body.len() + more, 0xff);
    body
}

/// As when one end was updated and the other not yet.
#[test]
fn a_server_of_another_version_is_named() {
    for more in [0, 7, 500] {
        let refused = refused_with(of_another_version(more));
        assert_eq!(refused.errno(), Errno::EPROTO);
        let said = refused.to_string();
        assert!(
            said.contains("version 999") && said.contains(&format!("version {VERSION}")),
            "{said}"
        );
    }
    let refused = refused_with(b"HTTP/1.1 400 Bad Request".to_vec());
    assert!(refused.to_string().contains("another protocol"), "{refused}");
}

#[test]
fn a_client_of_another_version_is_told_the_servers_version() {
    let setup = setup(EngineWish::Automatic);
    for more in [0, 7, 500] {
        let mut raw = Raw::connect(setup.port());
        raw.send(&common::message(Header::new(Kind::Hello, 0, 0), &of_another_version(more), &[]));
        let (header, body) = raw.receive().expect("it was cut off");
        let welcome = Welcome::parse(&body).unwrap();
        assert_eq!(header.kind, Kind::Welcome);
        assert_eq!((welcome.version, welcome.errno), (VERSION, Errno::EPROTO.0), "{more}");
    }
}

#[test]
fn a_server_that_wants_more_than_clients_can_is_understood() {
    let wants =
        Welcome { version: VERSION, authentication: 3, encryption: 4, ..Welcome::default() };
    let refused = refused_by(Welcome { errno: Errno::EPROTONOSUPPORT.0, ..wants });
    assert_eq!(refused.errno(), Errno::EPROTONOSUPPORT);
    let said = refused.to_string();
    assert!(said.contains("authentication 3 and encryption 4"), "{said}");
    // As if it had been asked for that.
    for welcome in [Welcome { authentication: 0, ..wants }, Welcome { encryption: 0, ..wants }] {
        let refused = refused_by(Welcome { session: 1, slots: 4, ..welcome });
        assert_eq!(refused.errno(), Errno::EPROTO, "{refused}");
        assert!(refused.to_string().contains("not asked for"), "{refused}");
    }
}

/// The operation before the lock, in the same compound, waits for a device meanwhile.
#[test]
fn a_lock_is_given_up_before_it_is_asked_for() {
    let setup = setup(EngineWish::Automatic);
    let root = setup.client().attach(b"dir").unwrap();
    let holder = root.open(b"locked", CREATE, 0o600).unwrap();
    let (family, kind) = (lock::FLOCK, lock::EXCLUSIVE);
    holder.lock(&Lock { family, kind, owner: 0, start: 0, length: 0 }, false).unwrap();
    let (mut raw, _) = Raw::greeted(setup.port());
    let requests = [
        Request::Attach { name: b"dir" },
        Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"locked" },
        Request::Sync { handle: CURRENT, kind: sync_kind::DATA },
        Request::Lock { handle: CURRENT, owner: 0, family, kind, wait: 1, start: 0, length: 0 },
    ];
    let cancel = Header::new(Kind::Cancel, 0, 1).to_bytes();
    raw.send(&[&request(0, 1, &requests, 0)[..], &cancel].concat());
    let (_, body) = raw.receive().expect("it waits");
    let results = parse_results(&body).unwrap();
    assert!(
        matches!(results[3], Reply::Failed { errno } if errno == Errno::EINTR.0),
        "{results:?}"
    );
}

/// A client comes back on another connection before the server has seen the end of the first one, and a third
/// connection gets its number. That one is not taken for one that has ended, which would be read to its end
/// before anybody else has a turn.
#[test]
fn the_end_of_a_connection_is_not_that_of_the_next_one() {
    let store = Brittle::default();
    let gate = store.gate.clone();
    let mut config = config_of(store, Address::parse("tcp://127.0.0.1:0").unwrap(), 1);
    config.exports.push(Export::new("mem", ExportKind::Memory(64 << 20)));
    let server = Server::start(&config).unwrap();
    let Address::Tcp(at) = server.addresses()[0] else { panic!("no TCP") };
    let port = at.port();
    let (first, Welcome { session, secret, .. }) = Raw::greeted(port);
    let (mut blocker, _) = Raw::greeted(port);
    let stuck = ask(&mut blocker, 1, &[Request::Attach { name: b"b" }]).unwrap();
    let stuck = [Request::Stat { base: stuck, flags: 0, path: b"stuck" }];
    let attach = [Request::Attach { name: b"mem" }];
    let (mut other, _) = Raw::greeted(port);
    let root = ask(&mut other, 1, &attach).unwrap();
    let make = |base| [Request::MakeDir { base, mode: 0o700, path: b"made" }];

    let closed = gate.lock.lock().unwrap();
    blocker.send(&request(0, 2, &stuck, 0));
    eventually("the core waits", || gate.knocks.load(Ordering::Relaxed) == 1);
    // In this order: somebody connects, which makes the server accept all, and the first connection ends.
    let _connected = Raw::connect(port);
    drop(first);
    let mut again = Raw::connect(port);
    again.send(&hello_message(&Hello { session, secret, ..hello() }));
    let mut next = Raw::connect(port);
    next.send(&hello_message(&hello()));
    drop(closed);
    answer(&mut blocker).unwrap();
    let welcome = Welcome::parse(&again.receive().unwrap().1).unwrap();
    assert_eq!(welcome.resumed, resumed::JOINED);
    assert_eq!(next.receive().unwrap().0.kind, Kind::Welcome);

    // As long as it has a grant, the server reads little at once from it.
    let next_root = ask(&mut next, 1, &attach).unwrap();
    let write = [
        Request::Open { base: next_root, flags: CREATE, mode: 0o600, path: b"f" },
        Request::Write { handle: CURRENT, offset: 0, length: 8 << 20, flags: 0 },
    ];
    next.send(&request(1, 1, &write, 8 << 20));
    assert_eq!(next.receive().unwrap().0.kind, Kind::Grant);
    let closed = gate.lock.lock().unwrap();
    blocker.send(&request(0, 3, &stuck, 0));
    eventually("the core waits", || gate.knocks.load(Ordering::Relaxed) == 2);
    let stat = [Request::Stat { base: next_root, flags: 0, path: b"" }];
    let mut many: Vec<u8> = (1..=200).flat_map(|at| request(2, at, &stat, 0)).collect();
    many.extend(request(3, 1, &make(next_root), 0));
    next.send(&many);
    other.send(&request(0, 2, &make(root), 0));
    drop(closed);
    assert!(answer(&mut other).is_ok(), "it had its turn after all requests of another one");
}
