//! Exports of files with limits on what each client may ask for per second.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::proxy::Proxy;
use common::{
    CREATE, EXCLUSIVE, Raw, eventually, hello, hello_message, message, no_faster, pattern, port,
    request, seed, transports,
};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Error, File, Group, Lock, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, Export, ExportKind, RateLimit, Server};
use towline_wire::hello::resumed;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, encode_compound, lock};
use towline_wire::{Errno, Header, Hello, Kind, Reply, Request, Welcome};

const MIB: usize = 1 << 20;

/// A server with the exports `dir` and `mem` and the disk `disk`, all limited, and the export `free`.
struct World {
    server: Server,
    exports: Vec<Export>,
    transports: Vec<Transport>,
    /// What `dir` shows.
    data: PathBuf,
    _directory: TempDir,
}

fn limited(operations: u64, bytes: u64) -> World {
    let directory = TempDir::new().unwrap();
    let data = directory.path().join("data");
    std::fs::create_dir_all(data.join("below")).unwrap();
    let limit = RateLimit { operations, bytes };
    let export = |name, kind, limit| Export { limit, ..Export::new(name, kind) };
    let socket = directory.path().join("s");
    let config = Config {
        exports: vec![
            export("dir", ExportKind::Directory(data.clone()), limit),
            export("mem", ExportKind::Memory(64 << 20), limit),
            export("free", ExportKind::Memory(64 << 20), RateLimit::default()),
        ],
        disks: vec![DiskExport { limit, ..DiskExport::new("disk", DiskKind::Memory(1 << 20)) }],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 2,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let transports = transports(&server, socket);
    World { server, exports: config.exports, transports, data, _directory: directory }
}

fn connect(transport: &Transport) -> Client {
    Client::connect(transport, Options::default()).unwrap()
}

#[test]
fn requests_are_limited_over_all_sessions_of_a_client() {
    for transport in &limited(100, 0).transports {
        // Also for a directory of the export that is attached as a root.
        for export in [&b"dir"[..], b"dir/below", b"mem"] {
            let roots: Vec<File> =
                (0..2).map(|_| connect(transport).attach(export).unwrap()).collect();
            let start = Instant::now();
            // A group belongs to one session.
            let mut groups = [Group::new(), Group::new()];
            for (root, group) in roots.iter().zip(&mut groups) {
                for number in 0..20 {
                    group.add(root.start_stat_path(b".", true).unwrap(), number);
                }
            }
            for group in &mut groups {
                while let Some((_, done)) = group.wait_any() {
                    done.unwrap();
                }
            }
            no_faster(start, 40.0, 100.0);
        }
    }
}

#[test]
fn bytes_are_limited_both_ways() {
    for transport in &limited(0, 10 * MIB as u64).transports {
        for export in [&b"dir"[..], b"mem"] {
            let file = connect(transport).attach(export).unwrap();
            let file = file.open(b"f", CREATE, 0o600).unwrap();
            let start = Instant::now();
            // A granted write, an inline write, and a single read longer than the limit allows at
            // once.
            let data = pattern(MIB, 3);
            file.write_all_at(&data, 0).unwrap();
            file.write_all_at(&data[..4096], MIB as u64).unwrap();
            // Asks for more than there is: only what is there counts.
            let mut back = vec![0; 4 * MIB];
            for _ in 0..2 {
                assert_eq!(file.read_at(&mut back, 0).unwrap(), MIB + 4096);
            }
            assert!(back[..MIB] == data && back[MIB..MIB + 4096] == data[..4096]);
            file.stat().unwrap();
            no_faster(start, 3.0, 10.0);
        }
    }
}

/// A write that had to wait until everything else is quiet is asked for its data at once.
#[test]
fn a_write_goes_on_when_it_may() {
    let world = limited(0, 3 * MIB as u64);
    let root = connect(&world.transports[0]).attach(b"dir").unwrap();
    let file = root.open(b"f", CREATE, 0o600).unwrap();
    let writer = std::thread::spawn(move || {
        for length in [8 * MIB, MIB] {
            file.write_all_at(&vec![1; length], 0).unwrap();
        }
    });
    common::eventually("all is written", || writer.is_finished());
    writer.join().unwrap();
}

#[test]
fn other_exports_are_not_held_up() {
    let world = limited(2, 0);
    for transport in &world.transports {
        let client = connect(transport);
        let (slow, free) = (client.attach(b"mem").unwrap(), client.attach(b"free").unwrap());
        let mut group = Group::new();
        let start = Instant::now();
        for number in 0..3 {
            group.add(slow.start_stat_path(b".", true).unwrap(), number);
        }
        for _ in 0..100 {
            free.stat_path(b".", true).unwrap();
        }
        let others = start.elapsed();
        let mut order = Vec::new();
        while let Some((tag, done)) = group.wait_any() {
            done.unwrap();
            order.push(tag);
        }
        assert_eq!(order, [0, 1, 2]);
        no_faster(start, 2.0, 2.0);
        assert!(others < start.elapsed());
    }
}

#[test]
fn what_waits_survives_lost_lanes() {
    let world = limited(1000, 0);
    let proxy = Proxy::start(common::port(&world.transports), seed(), 30_000);
    let transport = Transport::Tcp("127.0.0.1".into(), proxy.port);
    // Even the first greeting may be cut.
    let client = (0..100).find_map(|_| Client::connect(&transport, Options::default()).ok());
    let root = client.unwrap().attach(b"mem").unwrap();
    for round in 0..200 {
        let started: Vec<_> = (0..16)
            .map(|number| format!("{round}-{number}"))
            .map(|name| root.start_create(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap())
            .collect();
        for operation in started {
            operation.wait().unwrap();
        }
        if proxy.cuts.load(Ordering::Relaxed) >= 5 {
            return;
        }
    }
    panic!("the proxy does not cut");
}

/// Processes of a `towline run` do not wait for everything they ask for: it is done even if they
/// are killed.
#[test]
fn what_a_killed_process_had_asked_for_is_done() {
    let world = limited(2, 0);
    for (number, transport) in world.transports.iter().enumerate() {
        let mut options = Options::default();
        (options.family, options.reconnect) = (7, Duration::ZERO);
        let client = Client::connect(transport, options).unwrap();
        let root = client.attach(b"dir").unwrap();
        let name = |file: u32| format!("{number}-{file}");
        let started: Vec<_> = (0..10)
            .map(|file| {
                root.start_create(name(file).as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap()
            })
            .collect();
        rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Write).unwrap();
        for file in 0..10 {
            let path = world.data.join(name(file));
            common::eventually("what was asked for is done", || path.exists());
        }
        drop(started);
    }
}

/// A lock request that is given up is not made later, whether it waited for the holder or for its
/// turn.
#[test]
fn a_lock_that_waits_is_given_up() {
    let world = limited(50, 0);
    let root = connect(&world.transports[0]).attach(b"mem").unwrap();
    let holder = root.open(b"f", CREATE, 0o600).unwrap();
    let whole =
        Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
    holder.lock(&whole, false).unwrap();
    let file = connect(&world.transports[1]).attach(b"mem").unwrap().open(b"f", 2, 0).unwrap();
    for _ in 0..20 {
        let waits = file.start_lock(&whole).unwrap();
        waits.cancel();
        match waits.wait() {
            Err(Error::Errno(errno)) => assert_eq!(errno, Errno::EINTR),
            other => panic!("{other:?}"),
        }
    }
}

/// Returns a peer and the handle of an export's root.
fn raw(world: &World, exports: [&[u8]; 2]) -> (Raw, [u64; 2]) {
    let (mut peer, _) = Raw::greeted(port(&world.transports));
    let mut sequence = 0;
    let roots = exports.map(|name| {
        sequence += 1;
        peer.send(&request(1, sequence, &[Request::Attach { name }], 0));
        let (_, body) = peer.receive().expect("a reply");
        match parse_results(&body).unwrap()[..] {
            [Reply::Opened { handle, .. }] => handle,
            ref other => panic!("{other:?}"),
        }
    });
    (peer, roots)
}

fn stat(base: u64) -> Request<'static> {
    Request::Stat { base, flags: 0, path: b"" }
}

#[test]
fn giving_up_a_request_does_not_let_it_overtake_the_limit() {
    let world = limited(50, 0);
    let (mut peer, [root, _]) = raw(&world, [b"mem", b"free"]);
    let start = Instant::now();
    for sequence in 1..=40 {
        let cancel = message(Header::new(Kind::Cancel, 0, sequence), &[], &[]);
        peer.send(&[request(0, sequence, &[stat(root)], 0), cancel].concat());
        assert!(peer.receive().is_some());
    }
    no_faster(start, 40.0, 50.0);
}

#[test]
fn a_request_that_begins_in_another_export_is_limited() {
    let world = limited(50, 0);
    let (mut peer, [limited, free]) = raw(&world, [b"mem", b"free"]);
    let start = Instant::now();
    for sequence in 1..=40 {
        peer.send(&request(0, sequence, &[stat(free), stat(limited)], 0));
        assert!(peer.receive().is_some());
    }
    no_faster(start, 40.0, 50.0);
}

/// Otherwise all clients of its machine would wait for twelve days.
#[test]
fn an_offer_that_is_refused_is_not_owed() {
    let world = limited(0, MIB as u64);
    let attach = [Request::Attach { name: b"mem" }];
    let (mut peer, _) = Raw::greeted(port(&world.transports));
    peer.send(&request(0, 1, &attach, 1 << 40));
    assert!(peer.thrown_out());
    let (mut other, _) = Raw::greeted(port(&world.transports));
    other.send(&request(0, 1, &attach, 0));
    assert!(other.receive().is_some());
}

/// It is longer than any that is carried out. Otherwise the next one would wait for an hour.
#[test]
fn a_read_of_a_disk_that_is_refused_is_not_owed() {
    let world = limited(0, MIB as u64);
    let (mut peer, _) = Raw::greeted(port(&world.transports));
    let mut ask = |sequence, asked: Request<'_>| {
        peer.send(&request(0, sequence, &[asked], 0));
        peer.receive().expect("an answer").1
    };
    ask(1, Request::DiskOpen { disk: 0, name: b"disk" });
    let read = |length| Request::DiskRead { disk: 0, flags: 0, offset: 0, length };
    let body = ask(2, read(u32::MAX));
    assert!(
        matches!(parse_results(&body).unwrap()[..], [Reply::Failed { errno }] if errno == Errno::EINVAL.0)
    );
    ask(3, read(512));
}

/// Those of a client are sent again on its next lane, and those of a process of a `towline run` are done.
#[test]
fn what_waits_behind_a_malformed_request_is_released() {
    for family in [0, 7] {
        let world = limited(0, 0);
        let limit = |bytes| {
            let mut exports = world.exports.clone();
            exports[0].limit = RateLimit { operations: 0, bytes };
            world.server.replace(&exports, &[]).unwrap();
        };
        let mut peer = Raw::connect(port(&world.transports));
        peer.send(&hello_message(&Hello { family, ..hello() }));
        let welcome = Welcome::parse(&peer.receive().unwrap().1).unwrap();
        peer.send(&request(0, 1, &[Request::Attach { name: b"dir" }], 0));
        let (_, body) = peer.receive().unwrap();
        let &[Reply::Opened { handle: base, .. }] = &parse_results(&body).unwrap()[..] else {
            panic!("not opened");
        };
        limit(1);
        // Accepted at once, and then owed.
        let write = [
            Request::Open { base, flags: CREATE, mode: 0o600, path: b"f" },
            Request::Write { handle: CURRENT, offset: 0, length: 4096, flags: 0 },
        ];
        let header = Header::new(Kind::Request, 0, 2);
        peer.send(&message(header, &encode_compound(&write), &pattern(4096, 1)));
        assert!(peer.receive().is_some());
        let reads = Request::Read { handle: base, offset: 0, length: 1 };
        let malformed = request(1, 1, &[stat(base), reads, reads], 0);
        let names = [b"a", b"b", b"c"];
        let makes = |slot: u16| {
            let make = Request::MakeDir { base, mode: 0o700, path: names[usize::from(slot) - 2] };
            request(slot, 1, &[make], 0)
        };
        peer.send(&[malformed, makes(2), makes(3), makes(4)].concat());
        // Answered once the others are held back.
        peer.send(&request(5, 1, &[Request::Inquire { what: 0 }], 0));
        assert_eq!(peer.receive().unwrap().0.slot, 5);
        limit(0);
        assert!(peer.thrown_out());
        let is_made = || names.map(|name| world.data.join(str::from_utf8(name).unwrap()).exists());
        if family != 0 {
            eventually("what was asked for is done", || is_made() == [true; 3]);
        }
        let mut peer = Raw::connect(port(&world.transports));
        let Welcome { session, secret, .. } = welcome;
        peer.send(&hello_message(&Hello { session, secret, family, ..hello() }));
        let welcome = Welcome::parse(&peer.receive().unwrap().1).unwrap();
        assert_eq!(welcome.resumed, resumed::JOINED);
        for slot in 2..5 {
            peer.send(&makes(slot));
            let (header, body) = peer.receive().expect("an answer");
            assert_eq!(header.slot, slot);
            assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Attributes { .. }]));
        }
        assert_eq!(is_made(), [true; 3]);
        world.server.stop();
    }
}

/// Under the limit, requests would wait for a week; they are overtaken by those that need not wait.
#[test]
fn another_limit_holds_at_once_for_those_who_are_connected() {
    for place in 0..limited(0, 0).transports.len() {
        let world = limited(0, 0);
        let limit = |bytes| {
            let mut exports = world.exports.clone();
            for export in &mut exports[..2] {
                export.limit = RateLimit { operations: 0, bytes };
            }
            world.server.replace(&exports, &[]).unwrap();
        };
        let client = connect(&world.transports[place]);
        let open = |export: &[u8]| client.attach(export).unwrap().open(b"file", CREATE, 0o600);
        let free = open(b"free").unwrap();
        for export in [&b"dir"[..], b"mem"] {
            let slow = open(export).unwrap();
            slow.write_at(&pattern(MIB, 1), 0).unwrap();
            for _ in 0..2 {
                limit(1);
                // Accepted at once, and then owed.
                slow.write_at(&pattern(MIB, 2), 0).unwrap();
                let mut group = Group::new();
                group.add(slow.start_read_at(vec![0; 4096], 0).unwrap(), 1);
                group.add(free.start_read_at(vec![0; 4096], 0).unwrap(), 2);
                assert_eq!(
                    group.wait_any().map(|(tag, done)| (tag, done.is_ok())),
                    Some((2, true))
                );
                limit(0);
                let (tag, read) = group.wait_any().unwrap();
                let (length, bytes) = read.unwrap();
                assert_eq!((tag, length), (1, 4096));
                assert!(bytes == pattern(MIB, 2)[..4096]);
            }
        }
    }
}
