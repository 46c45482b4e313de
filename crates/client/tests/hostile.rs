//! Peers that break the protocol, ask for too much or give nothing back: the server throws them out
//! or bounds them, and goes on serving honest clients.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{
    CREATE, Process, Random, Raw, counter, eventually, hello, hello_message, message, pattern,
    request, seed,
};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Errno, File, Options};
use towline_net::{Wait, receive_descriptors};
use towline_server::EngineWish;
use towline_wire::hello::want;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, DIRECTORY};
use towline_wire::{Header, Hello, Kind, Reply, Request};

#[test]
#[ignore = "not a test: the server that the others attack"]
fn child_server() {
    common::child_server();
}

/// An honest client, who has to be served whatever others do.
struct Honest {
    client: Client,
    root: File,
    rounds: u8,
}

/// How long an honest client may have to wait for a few small requests, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Honest {
    fn new(process: &Process) -> Self {
        let client = Client::connect(&process.tcp(), Options::default()).unwrap();
        let root = client.attach(b"mem").unwrap();
        Self { client, root, rounds: 0 }
    }

    fn check(&mut self, after: &str) {
        let start = Instant::now();
        self.rounds = self.rounds.wrapping_add(1);
        let data = pattern(100_000, self.rounds);
        self.root
            .write_path(b"honest", CREATE, 0o600, &data)
            .unwrap_or_else(|error| panic!("after {after}: {error}"));
        let mut back = vec![0; 100_001];
        let length = self.root.read_path(b"honest", &mut back).unwrap();
        assert!(length == 100_000 && back[..length] == data[..], "after {after}: bytes differ");
        assert!(start.elapsed() < PATIENCE, "after {after}: took {:?}", start.elapsed());
    }

    /// A newcomer is served, too.
    fn check_new(&mut self, process: &Process, after: &str) {
        let start = Instant::now();
        let client = Client::connect(&process.tcp(), Options::default())
            .unwrap_or_else(|error| panic!("after {after}: {error}"));
        client.attach(b"dir").unwrap_or_else(|error| panic!("after {after}: {error}"));
        assert!(start.elapsed() < PATIENCE, "after {after}: took {:?}", start.elapsed());
        client.close();
        self.check(after);
    }
}

fn start() -> (TempDir, Process, Honest) {
    let directory = TempDir::new().unwrap();
    let process = Process::start(directory.path());
    let honest = Honest::new(&process);
    (directory, process, honest)
}

fn header(edit: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut header = Header::new(Kind::Request, 0, 1);
    edit(&mut header);
    header.to_bytes().to_vec()
}

const ATTACH: Request<'_> = Request::Attach { name: b"mem" };
const WRITE: Request<'_> = Request::Write { handle: CURRENT, offset: 0, length: 1, flags: 0 };

#[test]
fn illegal_messages_end_the_connection_and_are_counted() {
    let (_directory, process, mut honest) = start();
    let body = |tag: u8| message(Header::new(Kind::Request, 0, 1), &[tag; 30], &[]);
    let read = Request::Read { handle: CURRENT, offset: 0, length: 1 };
    let after_hello: Vec<(&str, Vec<u8>)> = vec![
        ("noise", (0..200u8).rev().collect()),
        ("second hello", hello_message(&hello())),
        ("absurd body", header(|h| h.body_bytes = u32::MAX)),
        ("absurd payload", header(|h| h.payload_bytes = u32::MAX)),
        ("payload beyond what rides along", header(|h| h.payload_bytes = 256 * 1024)),
        ("slot beyond the last", header(|h| h.slot = 64)),
        ("highest slot", header(|h| h.slot = u16::MAX)),
        (
            "no kind",
            header(|_| {}).iter().enumerate().map(|(i, b)| if i == 0 { 0 } else { *b }).collect(),
        ),
        ("request without operations", header(|_| {})),
        ("unknown operation", body(200)),
        ("cut operation", body(2)),
        ("too many operations", request(0, 1, &[ATTACH; 17], 0)),
        ("zero in a path", request(0, 1, &[Request::Stat { base: 1, flags: 0, path: b"a\0b" }], 0)),
        (
            "long path",
            request(0, 1, &[Request::Stat { base: 1, flags: 0, path: &[b'x'; 4096] }], 0),
        ),
        ("two writes", request(0, 1, &[ATTACH, WRITE, WRITE], 2)),
        ("two reads", request(0, 1, &[ATTACH, read, read], 0)),
        ("write without its bytes", request(0, 1, &[ATTACH, WRITE], 0)),
        ("offer of more than the write", request(0, 1, &[ATTACH, WRITE], 1 << 40)),
        ("offer without write", request(0, 1, &[ATTACH], 1)),
        (
            "write longer than the limit",
            request(
                0,
                1,
                &[
                    ATTACH,
                    Request::Write { handle: CURRENT, offset: 0, length: u32::MAX, flags: 0 },
                ],
                u32::MAX.into(),
            ),
        ),
        (
            "sequence that jumps",
            [request(0, 1, &[ATTACH], 0), request(0, 3, &[ATTACH], 0)].concat(),
        ),
        (
            "sequence that falls",
            [request(0, 9, &[ATTACH], 0), request(0, 8, &[ATTACH], 0)].concat(),
        ),
        (
            "slot that is busy",
            [
                request(
                    0,
                    1,
                    &[
                        ATTACH,
                        Request::Write { handle: CURRENT, offset: 0, length: 100_000, flags: 0 },
                    ],
                    100_000,
                ),
                request(
                    1,
                    1,
                    &[
                        ATTACH,
                        Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"busy" },
                        Request::Write { handle: CURRENT, offset: 0, length: 100_000, flags: 0 },
                    ],
                    100_000,
                ),
                request(1, 2, &[ATTACH], 0),
            ]
            .concat(),
        ),
        ("reply to a server", header(|h| h.kind = Kind::Reply)),
        ("grant to a server", header(|h| h.kind = Kind::Grant)),
        ("notice to a server", header(|h| h.kind = Kind::Notice)),
        ("welcome to a server", header(|h| h.kind = Kind::Welcome)),
    ];
    let mut errors = counter(&honest.client, "protocol_errors");
    let mut judge = |name: &str, mut peer: Raw| {
        assert!(peer.thrown_out(), "{name}: not thrown out");
        let now = counter(&honest.client, "protocol_errors");
        assert!(now > errors, "{name}: not counted");
        errors = now;
        honest.check(name);
    };
    for (name, bytes) in after_hello {
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&bytes);
        judge(name, peer);
    }
    for (name, bytes) in [
        ("noise for a hello", vec![0xff; 72]),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".to_vec()),
        ("request before the hello", request(0, 1, &[ATTACH], 0)),
        ("goodbye before the hello", header(|h| h.kind = Kind::Goodbye)),
        ("data before the hello", message(Header::new(Kind::Data, 0, 1), &[], &[0; 100])),
        ("wrong magic", hello_message(&Hello { magic: 1, ..hello() })),
        ("cut hello", message(Header::new(Kind::Hello, 0, 0), &[0; 20], &[])),
        ("long hello", message(Header::new(Kind::Hello, 0, 0), &[0; 100], &[])),
    ] {
        let mut peer = Raw::connect(process.port);
        peer.send(&bytes);
        judge(name, peer);
    }
}

#[test]
fn another_version_is_told_so() {
    let (_directory, process, mut honest) = start();
    let mut peer = Raw::connect(process.port);
    peer.send(&hello_message(&Hello { version: 999, ..hello() }));
    let (kind, body) = peer.receive().map(|(header, body)| (header.kind, body)).unwrap();
    let welcome = towline_wire::Welcome::parse(&body).unwrap();
    assert_eq!((kind, welcome.errno, welcome.session), (Kind::Welcome, Errno::EPROTO.0, 0));
    // It got no session: what it asks for now is not served.
    peer.send(&request(0, 1, &[ATTACH], 0));
    assert!(peer.thrown_out());
    honest.check("another version");
}

fn results(peer: &mut Raw) -> Vec<u8> {
    loop {
        let (header, body) = peer.receive().expect("thrown out");
        if header.kind == Kind::Reply {
            return body[..header.body_bytes as usize].to_vec();
        }
    }
}

fn last_errno(body: &[u8]) -> Option<Errno> {
    match parse_results(body).unwrap().last() {
        Some(Reply::Failed { errno }) => Some(Errno(*errno)),
        _ => None,
    }
}

#[test]
fn forged_handles_and_sessions_open_nothing() {
    let (_directory, process, mut honest) = start();
    let seed = seed();
    let mut random = Random::new(seed);
    let (mut peer, welcome) = Raw::greeted(process.port);
    peer.send(&request(0, 1, &[ATTACH], 0));
    let body = results(&mut peer);
    let Some(Reply::Opened { handle, .. }) = parse_results(&body).unwrap().first().copied() else {
        panic!("not attached")
    };
    for sequence in 2..300 {
        // Near the real one, and anywhere.
        let forged = match sequence % 3 {
            0 => handle ^ (1 << random.below(64)),
            1 => random.next(),
            _ => handle.wrapping_add(random.below(20) + 1),
        };
        let requests = match random.below(6) {
            0 => [Request::Stat { base: forged, flags: 0, path: b"" }],
            1 => [Request::Read { handle: forged, offset: 0, length: 100 }],
            2 => [Request::Close { handle: forged }],
            3 => [Request::Unlink { base: forged, flags: DIRECTORY, path: b"x" }],
            4 => [Request::ReadDir { handle: forged, cookie: 0, length: 4096, attributes: 1 }],
            _ => [Request::Lock {
                handle: forged,
                owner: 1,
                family: 1,
                kind: 1,
                wait: 1,
                start: 0,
                length: 0,
            }],
        };
        peer.send(&request(0, sequence, &requests, 0));
        assert_eq!(last_errno(&results(&mut peer)), Some(Errno::EBADF), "{requests:?}");
    }
    // CURRENT without anything opened in the same request.
    peer.send(&request(1, 1, &[Request::Stat { base: CURRENT, flags: 0, path: b"" }], 0));
    assert_eq!(last_errno(&results(&mut peer)), Some(Errno::EBADF));
    // Reclaiming what it never had, at every kind of place.
    for (sequence, at) in
        [0, 1, CURRENT, u64::MAX >> 1, 1 << 32 | 65_535, 1 << 32 | 65_536, 1 << 63 | 7]
            .into_iter()
            .enumerate()
    {
        let reclaim = Request::Reclaim {
            handle: at,
            flags: 0,
            inode: 12345,
            export: b"mem",
            path: b"honest",
        };
        peer.send(&request(2, sequence as u32 + 1, &[reclaim], 0));
        assert!(last_errno(&results(&mut peer)).is_some(), "reclaimed {at:#x}");
    }
    honest.check("forged handles");

    // The session of another, without its secret: a new one, and the other keeps its lane.
    for secret in [0, 1, welcome.secret ^ 1, !welcome.secret] {
        let mut thief = Raw::connect(process.port);
        thief.send(&hello_message(&Hello { session: welcome.session, secret, ..hello() }));
        let (_, body) = thief.receive().unwrap();
        let theirs = towline_wire::Welcome::parse(&body).unwrap();
        assert_eq!(theirs.resumed, 0);
        assert_ne!(theirs.session, welcome.session);
        thief.send(&request(0, 1, &[Request::Stat { base: handle, flags: 0, path: b"" }], 0));
        assert_eq!(last_errno(&results(&mut thief)), Some(Errno::EBADF));
    }
    for session in [u64::MAX, 1, 2, 3, 1 << 40] {
        let mut thief = Raw::connect(process.port);
        thief.send(&hello_message(&Hello { session, ..hello() }));
        let (_, body) = thief.receive().unwrap();
        assert_eq!(towline_wire::Welcome::parse(&body).unwrap().resumed, 0);
    }
    peer.send(&request(3, 1, &[Request::Stat { base: handle, flags: 0, path: b"" }], 0));
    assert_eq!(last_errno(&results(&mut peer)), None, "the owner lost its lane to a thief");
    honest.check("stolen sessions");
}

fn big_write(slot: u16, name: &[u8]) -> Vec<u8> {
    let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: name };
    let write = Request::Write { handle: CURRENT, offset: 0, length: 8 << 20, flags: 0 };
    request(slot, 1, &[ATTACH, open, write], 8 << 20)
}

#[test]
fn data_has_to_match_its_grant() {
    let (_directory, process, mut honest) = start();
    let data = |edit: fn(&mut Header), length: usize| {
        let mut header = Header::new(Kind::Data, 0, 1);
        edit(&mut header);
        message(header, &[], &vec![7; length])
    };
    for (name, bytes, out) in [
        ("other offset", data(|h| h.offset = 1, 256 * 1024), true),
        ("offset beyond all", data(|h| h.offset = u64::MAX, 256 * 1024), true),
        ("less than granted", data(|_| {}, 100), true),
        ("nothing", data(|_| {}, 0), true),
        // Possibly meant for a request that is over: ignored.
        ("other slot", data(|h| h.slot = 9, 1000), false),
        ("other sequence", data(|h| h.sequence = 5, 1000), false),
    ] {
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&big_write(0, b"w"));
        let (header, _) = peer.receive().expect("no grant");
        assert_eq!((header.kind, header.word_a), (Kind::Grant, 256 * 1024));
        peer.send(&bytes);
        if out {
            assert!(peer.thrown_out(), "{name}: not thrown out");
        } else {
            peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
            assert!(last_errno(&results(&mut peer)).is_none(), "{name}");
        }
        honest.check(name);
    }
    // Data that nobody asked for, with and without a request.
    let (mut peer, _) = Raw::greeted(process.port);
    for slot in 0..10 {
        peer.send(&message(Header::new(Kind::Data, slot, 1), &[], &vec![7; 200_000]));
    }
    peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
    assert!(last_errno(&results(&mut peer)).is_none());
    honest.check("data without request");
}

#[test]
fn grants_that_are_not_used_do_not_starve_others() {
    let (_directory, process, mut honest) = start();
    let before = process.memory();
    // 30 peers with 60 transfers each want 14 GiB of buffers; there are 16 MiB.
    let mut peers = Vec::new();
    for number in 0..30 {
        let (mut peer, _) = Raw::greeted(process.port);
        for slot in 0..60 {
            peer.send(&big_write(slot, format!("g{number}-{slot}").as_bytes()));
        }
        peers.push(peer);
    }
    eventually("grants", || counter(&honest.client, "buffer_bytes_in_use") > 0);
    let grown = process.memory() - before;
    assert!(grown < 64, "memory grew by {grown} MiB for unused grants");
    // Small writes need no grant, and large ones get their turn once the stalled are thrown out:
    // within the time that is stated for using a grant.
    honest.root.write_path(b"small", CREATE, 0o600, &[1; 10_000]).unwrap();
    let mut back = vec![0; 10_001];
    assert_eq!(honest.root.read_path(b"small", &mut back).unwrap(), 10_000);
    drop(peers);
    honest.check("unused grants");
}

#[test]
fn half_messages_take_little_memory_and_harm_nobody() {
    let (_directory, process, mut honest) = start();
    let before = process.memory();
    let mut peers = Vec::new();
    for number in 0..600 {
        // As much of one message as the limits allow, but never its end.
        let mut half = match number % 3 {
            0 => header(|h| (h.body_bytes, h.payload_bytes) = (80 * 1024, 16 * 1024)),
            1 => header(|h| (h.kind, h.body_bytes) = (Kind::Hello, 80 * 1024)),
            _ => header(|h| (h.kind, h.payload_bytes) = (Kind::Cancel, 256 * 1024)),
        };
        half.resize(79 * 1024, 0);
        let mut peer = Raw::connect(process.port);
        peer.send(&half);
        peers.push(peer);
    }
    honest.check("half messages before the hello");
    for number in 0..200 {
        let (mut peer, _) = Raw::greeted(process.port);
        let attach = request(0, 1, &[ATTACH], 0);
        peer.send(&attach[..1 + number % (attach.len() - 1)]);
        peers.push(peer);
    }
    honest.check_new(&process, "half messages");
    let grown = process.memory() - before;
    assert!(grown < 32, "memory grew by {grown} MiB for 600 half messages without a hello");
    drop(peers);
    honest.check_new(&process, "the end of half messages");
}

#[test]
fn peers_that_ask_for_much_and_read_nothing_are_bounded() {
    let (_directory, process, mut honest) = start();
    let names = honest.root.make_directory(b"names", 0o755).unwrap();
    assert!(names.is_directory());
    let directory = honest.root.open(b"names", 0, 0).unwrap();
    for number in 0..2000 {
        let name = format!("{number:0200}");
        directory.start_create(name.as_bytes(), CREATE, 0o600).unwrap();
    }
    honest.root.write_path(b"bytes", CREATE, 0o600, &pattern(30_000, 1)).unwrap();
    let before = process.memory();
    let listing = |slot, sequence| {
        let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"names" };
        let list = Request::ReadDir { handle: CURRENT, cookie: 0, length: 1 << 20, attributes: 1 };
        request(slot, sequence, &[ATTACH, open, list, Request::Close { handle: CURRENT }], 0)
    };
    let reading = |slot, sequence| {
        let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"bytes" };
        let read = Request::Read { handle: CURRENT, offset: 0, length: 30_000 };
        request(slot, sequence, &[ATTACH, open, read, Request::Close { handle: CURRENT }], 0)
    };
    let inquiring = |slot, sequence| request(slot, sequence, &[Request::Inquire { what: 1 }], 0);
    let mut peers = Vec::new();
    let kinds: [&dyn Fn(u16, u32) -> Vec<u8>; 3] = [&listing, &reading, &inquiring];
    for number in 0..12 {
        let (mut peer, _) = Raw::greeted(process.port);
        let mut bytes = Vec::new();
        // One slot after the other: the server answers each before it looks at the next, so that
        // the same slots can be used again without hearing of the answers.
        for sequence in 1..10 {
            for slot in 0..60 {
                bytes.extend(kinds[number % 3](slot, sequence));
            }
        }
        peer.0.set_nonblocking(true).unwrap();
        let _ = std::io::Write::write(&mut peer.0, &bytes);
        peers.push(peer);
        honest.check("requests without reading the answers");
    }
    std::thread::sleep(Duration::from_millis(300));
    honest.check_new(&process, "requests without reading the answers");
    let grown = process.memory() - before;
    // Each lane may hold 2 MiB, and the answer that goes beyond that.
    assert!(grown < 12 * 4 + 16, "memory grew by {grown} MiB for 12 peers that read nothing");
}

#[test]
fn reads_past_the_page_cache_that_nobody_takes_are_bounded() {
    const DIRECT: u32 = 0o40_000;
    let (directory, process, mut honest) = start();
    std::fs::write(directory.path().join("data/large"), vec![1; 8 << 20]).unwrap();
    let before = process.memory();
    let mut peers = Vec::new();
    for _ in 0..4 {
        let (mut peer, _) = Raw::greeted(process.port);
        let mut bytes = Vec::new();
        for slot in 0..20 {
            // Such bytes are nowhere but in a buffer of the server.
            let attach = Request::Attach { name: b"dir" };
            let open = Request::Open { base: CURRENT, flags: DIRECT, mode: 0, path: b"large" };
            let read = Request::Read { handle: CURRENT, offset: 0, length: 8 << 20 };
            bytes.extend(request(slot, 1, &[attach, open, read], 0));
        }
        peer.send(&bytes);
        peers.push(peer);
    }
    std::thread::sleep(Duration::from_millis(1500));
    honest.check("direct reads without reading the answers");
    let grown = process.memory() - before;

    assert!(grown < 16 + 4 * 12, "memory grew by {grown} MiB for 4 peers that read nothing");
}

#[test]
fn thousands_of_connections_are_held_and_let_go() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    // For this process and, since it is inherited, for the server.
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let (_directory, process, mut honest) = start();
    let count = maximum.map_or(4000, |most| (most as usize).saturating_sub(500)).min(4000);
    let before = process.memory();
    let mut peers = Vec::new();
    for number in 0..count {
        let mut peer = Raw::connect(process.port);
        match number % 4 {
            0 => peer.send(&hello_message(&hello())),
            1 => peer.send(&[1, 0, 0]),
            _ => {}
        }
        peers.push(peer);
        if number % 500 == 0 {
            honest.check("many connections");
        }
    }
    eventually("all connections accepted", || {
        counter(&honest.client, "lanes") > count as u64
            && counter(&honest.client, "sessions") > count as u64 / 4
    });
    honest.check_new(&process, "thousands of connections");
    let grown = process.memory() - before;
    assert!(grown < 40, "memory grew by {grown} MiB for {count} connections");
    drop(peers);
    eventually("lanes of closed connections end", || counter(&honest.client, "lanes") < 10);
    honest.check_new(&process, "the end of thousands of connections");
}

#[test]
fn connections_that_end_with_their_last_message_are_let_go() {
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = common::setup(engine);
        let mut peers = Vec::new();
        for _ in 0..50 {
            peers.push(Raw::greeted(setup.port()).0);
        }
        let goodbye = Header::new(Kind::Goodbye, 0, 0).to_bytes();
        for mut peer in peers {
            // No answer comes, so nothing but the end tells the server that nobody is there.
            peer.send(&goodbye);
        }
        let watcher = setup.client();
        eventually("no connection is left but one", || counter(&watcher, "lanes") <= 2);
        eventually("no session is left but one", || counter(&watcher, "sessions") == 1);
    }
}

#[test]
fn connections_beyond_the_limit_of_descriptors_do_not_stop_the_server() {
    let (_directory, mut process, mut honest) = start();
    process.limit_descriptors(200);
    let peers: Vec<Raw> = (0..400).map(|_| Raw::connect(process.port)).collect();
    for _ in 0..20 {
        honest.check("more connections than descriptors");
    }
    drop(peers);
    eventually("descriptors come back", || {
        Client::connect(&process.tcp(), Options::default()).is_ok()
    });
    honest.check_new(&process, "descriptors came back");
    assert!(process.is_alive());
}

/// Whoever has a descriptor can take what was rung, and have reads and writes of it wait: that of a peer over shared memory
/// wakes the server for that peer only.
#[test]
fn bells_that_are_spoiled_by_peers_wake_the_server_for_others() {
    let (directory, process, _) = start();
    // One for each core.
    let mut peers = Vec::new();
    for _ in 0..2 {
        let socket = UnixStream::connect(directory.path().join("socket")).unwrap();
        let asked = hello_message(&Hello { want: want::SHARED_MEMORY, ..hello() });
        std::io::Write::write_all(&mut &socket, &asked).unwrap();
        let (_, given) = receive_descriptors(&socket, &mut [0; 512], Wait::Any).unwrap();
        let [_, bell] = <[_; 2]>::try_from(given).unwrap();
        rustix::fs::fcntl_setfl(&bell, rustix::fs::OFlags::empty()).unwrap();
        std::thread::spawn(move || while rustix::io::read(&bell, &mut [0; 8][..]).is_ok() {});
        peers.push(socket);
    }
    let (done, checked) = std::sync::mpsc::channel();
    let transports = process.transports();
    std::thread::spawn(move || {
        for transport in transports.iter().cycle().take(12) {
            let client = Client::connect(transport, Options::default()).unwrap();
            let root = client.attach(b"mem").unwrap();
            for round in 0..50 {
                root.write_path(b"honest", CREATE, 0o600, &pattern(1000, round)).unwrap();
                std::thread::sleep(Duration::from_millis(1)); // the server sleeps meanwhile
            }
        }
        done.send(()).unwrap();
    });
    checked.recv_timeout(PATIENCE).expect("clients wait for a core that nobody can wake");
}

#[test]
fn random_damage_to_legal_traffic_harms_nobody() {
    let (_directory, mut process, mut honest) = start();
    let seed = seed();
    let mut random = Random::new(seed);
    honest.check("nothing");
    for round in 0..400 {
        let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"damaged" };
        let write = Request::Write { handle: CURRENT, offset: 0, length: 40_000, flags: 0 };
        let read = Request::Read { handle: CURRENT, offset: 0, length: 50_000 };
        let mut bytes = request(0, 1, &[ATTACH, open, write], 40_000);
        let mut data = Header::new(Kind::Data, 0, 1);
        data.offset = 0;
        bytes.extend(message(data, &[], &[9; 40_000]));
        bytes.extend(request(1, 1, &[ATTACH, open, read], 0));
        bytes.extend(request(
            2,
            1,
            &[ATTACH, Request::ReadDir { handle: CURRENT, cookie: 0, length: 9000, attributes: 1 }],
            0,
        ));
        for _ in 0..=random.below(3) {
            // In headers and bodies for most, where it matters more.
            let end = if random.below(3) == 0 { bytes.len() } else { 250 };
            let at = random.below(end as u64) as usize;
            bytes[at] = if random.below(2) == 0 {
                random.next() as u8
            } else {
                bytes[at] ^ (1 << random.below(8))
            };
        }
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&bytes[..bytes.len() - random.below(100) as usize]);
        if random.below(2) == 0 {
            peer.0.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
            peer.thrown_out();
        }
        drop(peer);
        if round % 20 == 0 {
            honest.check("random damage");
        }
    }
    assert!(process.is_alive());
    honest.check_new(&process, "random damage");
}
