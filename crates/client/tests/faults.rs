//! Connections cut at random, servers killed, peers that break the protocol.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Errno, Error, Options, Transport};
use towline_server::{Config, Export, ExportKind, Server};

const CREATE: u32 = 0o100 | 2;
const EXCLUSIVE: u32 = 0o200;

fn config(directory: &Path, port: u16) -> Config {
    Config {
        exports: vec![
            Export::new("dir", ExportKind::Directory(directory.to_path_buf())),
            Export::new("mem", ExportKind::Memory(64 << 20)),
        ],
        listen: vec![
            towline_net::address::Address::parse(&format!("tcp://127.0.0.1:{port}")).unwrap(),
        ],
        cores: 2,
        ..Config::default()
    }
}

fn port_of(server: &Server) -> u16 {
    let towline_net::address::Address::Tcp(address) = server.addresses()[0] else {
        panic!("no TCP")
    };
    address.port()
}

fn tcp(port: u16) -> Transport {
    Transport::Tcp("127.0.0.1".into(), port)
}

/// Forwards connections and cuts each after a random number of bytes.
struct Cutter {
    port: u16,
    cuts: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

fn cutter(target: u16, mut random: u64) -> Cutter {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (cuts, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (cut, calm) = (cuts.clone(), over.clone());
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else { continue };
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let budget = Arc::new(AtomicU64::new(2_000 + random % 400_000));
            for (mut from, mut to) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap()),
                (far.try_clone().unwrap(), near.try_clone().unwrap()),
            ] {
                let (budget, cut, calm) = (budget.clone(), cut.clone(), calm.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 8192];
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        let left = budget.load(Ordering::Relaxed);
                        let pass = if calm.load(Ordering::Relaxed) {
                            count
                        } else {
                            count.min(left as usize)
                        };
                        budget.store(left.saturating_sub(count as u64), Ordering::Relaxed);
                        if to.write_all(&buffer[..pass]).is_err() {
                            break;
                        }
                        if pass < count {
                            cut.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                    }
                    // Both directions end together, in the middle of whatever was under way.
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    Cutter { port, cuts, over }
}

#[test]
fn operations_take_effect_once_though_connections_are_cut() {
    let directory = TempDir::new().unwrap();
    let server = Server::start(&config(directory.path(), 0)).unwrap();
    for export in ["dir", "mem"] {
        let seed = 0x1234_5678_9abc_def1;
        eprintln!("export {export}, seed {seed:#x}");
        let cutter = cutter(port_of(&server), seed);
        let client = Client::connect(&tcp(cutter.port), Options::default()).unwrap();
        let root = client.attach(export.as_bytes()).unwrap();
        root.write_path(b"log", CREATE, 0o600, b"").unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let root = &root;
                scope.spawn(move || {
                    let log = root.open(b"log", 2, 0).unwrap();
                    let whole = root.open(format!("w{thread}").as_bytes(), CREATE, 0o600).unwrap();
                    for round in 0..150u32 {
                        // Each of these would show if it took effect twice or not at all.
                        log.append(&[&[thread], &round.to_le_bytes()[..]].concat()).unwrap();
                        let name = format!("x{thread}-{round}");
                        let file = root.open(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap();
                        file.close().unwrap();
                        let next = format!("y{thread}-{round}");
                        root.rename(name.as_bytes(), root, next.as_bytes(), 0).unwrap();
                        if round % 2 == 0 {
                            root.unlink(next.as_bytes(), false).unwrap();
                        }
                        let data = vec![round as u8; 40_000];
                        assert_eq!(
                            whole.write_at(&data, u64::from(round % 7) * 40_000).unwrap(),
                            40_000
                        );
                        let mut back = vec![0; 40_000];
                        assert_eq!(
                            whole.read_at(&mut back, u64::from(round % 7) * 40_000).unwrap(),
                            40_000
                        );
                        assert!(back == data, "round {round}: bytes differ");
                    }
                });
            }
        });
        cutter.over.store(true, Ordering::Relaxed);
        let mut log = vec![0; 4 * 150 * 5 + 100];
        let length = root.read_path(b"log", 0, &mut log).unwrap();
        let mut records: Vec<&[u8]> = log[..length].chunks(5).collect();
        records.sort_unstable();
        records.dedup();
        assert_eq!((length, records.len()), (4 * 150 * 5, 4 * 150), "records lost or doubled");
        let names = root.open(b".", 0, 0).unwrap().list_all(false).unwrap();
        assert_eq!(names.iter().filter(|e| e.name[0] == b'y').count(), 4 * 75);
        assert_eq!(names.iter().filter(|e| e.name[0] == b'x').count(), 0);
        let cuts = cutter.cuts.load(Ordering::Relaxed);
        eprintln!("{cuts} cuts");
        assert!(cuts > 20, "the test cut only {cuts} times");
        client.close();
        for entry in root_names(&server, export) {
            drop(entry);
        }
    }
}

fn root_names(server: &Server, export: &str) -> Vec<Vec<u8>> {
    let client = Client::connect(&tcp(port_of(server)), Options::default()).unwrap();
    let root = client.attach(export.as_bytes()).unwrap();
    root.open(b".", 0, 0)
        .unwrap()
        .list_all(false)
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect()
}

/// What it did not answer it had not begun, and says so; so everything can be sent to the next one, which
/// knows nothing of these requests.
#[test]
fn a_server_that_stops_and_starts_again_leaves_nothing_unknown() {
    const APPEND: u32 = 0o2000;
    let directory = TempDir::new().unwrap();
    // Below the ports that the kernel gives to outgoing connections, see below.
    let port = 15_000 + (std::process::id() % 5_000) as u16;
    let mut config = config(directory.path(), port);
    let socket = socket_of(directory.path());
    config.listen.push(towline_net::address::Address::Unix(socket.clone()));
    let mut server = Server::start(&config).unwrap();
    let transports = [tcp(port), Transport::Unix(socket.clone()), Transport::Shm(socket)];
    let over = AtomicBool::new(false);
    // The last one serves until all threads have ended.
    let _server = std::thread::scope(|scope| {
        for (number, transport) in transports.iter().enumerate() {
            let client = Client::connect(transport, Options::default()).unwrap();
            for thread in 0..3 {
                let (root, over) = (client.attach(b"dir").unwrap(), &over);
                scope.spawn(move || {
                    let log = format!("log{number}-{thread}");
                    let file = root.open(log.as_bytes(), CREATE | APPEND, 0o600).unwrap();
                    let mut written = 0u64;
                    while !over.load(Ordering::Relaxed) {
                        // Twice, it would exist.
                        let name = format!("d{number}-{thread}-{written}");
                        root.make_directory(name.as_bytes(), 0o700).unwrap();
                        file.append(&written.to_le_bytes()).unwrap();
                        written += 1;
                    }
                    assert_eq!(file.stat().unwrap().size, written * 8, "{log}");
                });
            }
        }
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(150));
            server.stop();
            server = Server::start(&config).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        server
    });
}

const CHILD: &str = "TOWLINE_TEST_SERVER";

/// Not a test in itself: the server that other tests kill.
#[test]
fn child_server() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let (port, directory) = text.split_once(' ').unwrap();
    let directory = Path::new(directory);
    let mut config = config(directory, port.parse().unwrap());
    config.listen.push(towline_net::address::Address::Unix(socket_of(directory)));
    let server = Server::start(&config).unwrap();
    println!("port {}", port_of(&server));
    std::thread::sleep(Duration::from_secs(120));
}

/// The Unix socket on which a child listens, too.
fn socket_of(directory: &Path) -> PathBuf {
    directory.with_extension("socket")
}

fn start_child(directory: &Path, port: u16) -> (Child, u16) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_server", "--nocapture"])
        .env(CHILD, format!("{port} {}", directory.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("port ") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut output, &mut line).unwrap() > 0, "server ended");
    }
    let port = line.trim().rsplit(' ').next().unwrap().parse().unwrap();
    std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
    (child, port)
}

#[test]
fn a_killed_server_is_gone_on_with() {
    let directory = TempDir::new().unwrap();
    // Below the ports that the kernel gives to outgoing connections: one of these could otherwise
    // take the server's place while it is away.
    let port = 20_000 + (std::process::id() % 10_000) as u16;
    let (mut child, port) = start_child(directory.path(), port);
    let client = Client::connect(&tcp(port), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    root.make_directory(b"d", 0o755).unwrap();
    let deep = root.open(b"d", 0, 0).unwrap();
    let file = deep.open(b"f", CREATE, 0o600).unwrap();
    let memory = client.attach(b"mem").unwrap();
    let lost = memory.open(b"f", CREATE, 0o600).unwrap();
    let over = AtomicBool::new(false);
    let kills = 4;
    std::thread::scope(|scope| {
        let (file, root, over) = (&file, &root, &over);
        scope.spawn(move || {
            let mut round = 0u64;
            while !over.load(Ordering::Relaxed) {
                let data = round.to_le_bytes();
                assert_eq!(file.write_at(&data, round % 100 * 8).unwrap(), 8);
                let mut back = [0; 8];
                assert_eq!(file.read_at(&mut back, round % 100 * 8).unwrap(), 8);
                assert_eq!(back, data);
                assert!(root.stat_path(b"d/f", true).unwrap().size >= 8);
                round += 1;
            }
        });
        scope.spawn(move || {
            let mut unknown = 0;
            for round in 0.. {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let name = format!("e{round}");
                match root.make_directory(name.as_bytes(), 0o700) {
                    Ok(_) => assert!(root.stat_path(name.as_bytes(), false).is_ok()),
                    // Under way when the server was killed: its outcome is unknown, and it is not
                    // repeated.
                    Err(Error::Unknown) => unknown += 1,
                    Err(error) => panic!("{name}: {error}"),
                }
            }
            assert!(unknown <= kills, "{unknown} outcomes unknown after {kills} kills");
        });
        for _ in 0..kills {
            std::thread::sleep(Duration::from_millis(300));
            child.kill().unwrap();
            child.wait().unwrap();
            (child, _) = start_child(directory.path(), port);
        }
        std::thread::sleep(Duration::from_millis(300));
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(deep.stat_path(b"f", true).unwrap().inode, file.attr().inode);
    assert_eq!(lost.write_at(b"x", 0).unwrap_err().errno(), Errno::ESTALE);
    assert!(
        client
            .attach(b"mem")
            .unwrap()
            .open(b".", 0, 0)
            .unwrap()
            .list_all(false)
            .unwrap()
            .is_empty()
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_server_killed_while_nothing_is_asked_leaves_nothing_unknown() {
    let directory = TempDir::new().unwrap();
    let port = 10_000 + (std::process::id() % 10_000) as u16;
    let (mut child, port) = start_child(directory.path(), port);
    let socket = socket_of(directory.path());
    let unix = Transport::Unix(socket.clone());
    let clients = [&tcp(port), &unix, &Transport::Shm(socket.clone())]
        .map(|transport| Client::connect(transport, Options::default()).unwrap());
    let roots = clients.each_ref().map(|client| client.attach(b"dir").unwrap());
    for round in 0..4 {
        for (number, root) in roots.iter().enumerate() {
            let name = format!("{round}-{number}");
            root.make_directory(name.as_bytes(), 0o700).unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
        child.kill().unwrap();
        child.wait().unwrap();
        (child, _) = start_child(directory.path(), port);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_server_that_stays_away_gives_an_error_in_time() {
    let directory = TempDir::new().unwrap();
    let server = Server::start(&config(directory.path(), 0)).unwrap();
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(2);
    let client = Client::connect(&tcp(port_of(&server)), options).unwrap();
    let root = client.attach(b"dir").unwrap();
    server.stop();
    let start = Instant::now();
    let error = root.stat_path(b"x", true).unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// The kernel accepts connections for a server that is stopped.
#[test]
fn a_server_that_says_nothing_is_not_waited_for_for_ever() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = Options::default();
    options.greeting = Duration::from_millis(50);
    let at = tcp(silent.local_addr().unwrap().port());
    let Err(error) = Client::connect(&at, options) else { panic!("nobody had answered") };
    assert!(error.to_string().contains("no answer within 50ms"), "{error}");
    assert!(error.to_string().contains("no Towline server"), "{error}");
    assert_eq!(error.errno(), Errno::ETIMEDOUT);
}

/// The server was restarted, and hangs as soon as it is asked for a file.
#[test]
fn a_server_that_opens_nothing_again_is_not_waited_for_for_ever() {
    use towline_wire::hello::{MAGIC, VERSION, resumed};
    let directory = TempDir::new().unwrap();
    let server = Server::start(&config(directory.path(), 0)).unwrap();
    let port = port_of(&server);
    let mut options = Options::default();
    (options.reconnect, options.greeting) = (Duration::from_millis(200), Duration::from_millis(50));
    let client = Client::connect(&tcp(port), options).unwrap();
    let root = client.attach(b"dir").unwrap();
    server.stop();
    let silent = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::spawn(move || {
        let mut peers = Vec::new();
        for peer in silent.incoming() {
            let mut peer = peer.unwrap();
            peer.read_exact(&mut vec![0; hello().len()]).unwrap();
            let welcome = towline_wire::Welcome {
                magic: MAGIC,
                version: VERSION,
                session: 1,
                slots: 4,
                resumed: resumed::NEW,
                ..Default::default()
            };
            let mut body = Vec::new();
            welcome.encode(&mut body);
            let mut header = towline_wire::Header::new(towline_wire::Kind::Welcome, 0, 0);
            header.body_bytes = body.len() as u32;
            peer.write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
            peers.push(peer);
        }
    });
    let error = root.stat_path(b"x", true).unwrap_err();
    assert!(error.to_string().contains("no answer within 50ms"), "{error}");
    assert_eq!(error.errno(), Errno::ETIMEDOUT);
}

/// The first bytes of a legal lane: hello for a new session.
fn hello() -> Vec<u8> {
    use towline_wire::hello::{MAGIC, VERSION};
    let mut body = Vec::new();
    let hello = towline_wire::Hello { magic: MAGIC, version: VERSION, ..Default::default() };
    hello.encode(&mut body);
    let mut header = towline_wire::Header::new(towline_wire::Kind::Hello, 0, 0);
    header.body_bytes = body.len() as u32;
    [&header.to_bytes()[..], &body].concat()
}

/// Says hello and reads the welcome.
fn greet(peer: &mut TcpStream) {
    peer.write_all(&hello()).unwrap();
    let mut head = [0; 32];
    peer.read_exact(&mut head).unwrap();
    let header = towline_wire::Header::parse(&head).unwrap();
    peer.read_exact(&mut vec![0; header.body_bytes as usize]).unwrap();
}

#[test]
fn hostile_peers_are_thrown_out_and_harm_nobody() {
    use towline_wire::{Header, Kind, Request};
    let directory = TempDir::new().unwrap();
    let server = Server::start(&config(directory.path(), 0)).unwrap();
    let port = port_of(&server);
    let client = Client::connect(&tcp(port), Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    let request = |slot: u16, sequence: u32, requests: &[Request<'_>], offered: u64| {
        let body = towline_wire::request::encode_compound(requests);
        let mut header = Header::new(Kind::Request, slot, sequence);
        header.body_bytes = body.len() as u32;
        header.offset = offered;
        [&header.to_bytes()[..], &body].concat()
    };
    let attach = request(0, 1, &[Request::Attach { name: b"mem" }], 0);
    let raw = |edit: fn(&mut Header)| {
        let mut header = Header::new(Kind::Request, 0, 1);
        edit(&mut header);
        header.to_bytes().to_vec()
    };
    let attacks: Vec<(&str, bool, Vec<u8>, bool)> = vec![
        ("noise", false, (0..200u8).collect(), true),
        ("request before the hello", false, attach.clone(), true),
        ("second hello", true, hello(), true),
        ("absurd body", true, raw(|h| h.body_bytes = u32::MAX), true),
        ("absurd payload", true, raw(|h| h.payload_bytes = u32::MAX), true),
        ("empty compound", true, raw(|_| {}), true),
        ("data not granted", true, raw(|h| h.kind = Kind::Data), false),
        ("reply to the server", true, raw(|h| h.kind = Kind::Reply), true),
        (
            "sequence out of order",
            true,
            [&attach[..], &request(0, 7, &[Request::Inquire { what: 0 }], 0)].concat(),
            true,
        ),
        (
            "two writes",
            true,
            request(0, 1, &[Request::Write { handle: 1, offset: 0, length: 1, flags: 0 }; 2], 2),
            true,
        ),
        (
            "offer that does not match",
            true,
            request(0, 1, &[Request::Write { handle: 1, offset: 0, length: 1, flags: 0 }], 1 << 40),
            true,
        ),
        (
            "forged handles",
            true,
            request(0, 1, &[Request::Stat { base: 0xdead_beef_0000_0001, flags: 0, path: b"" }], 0),
            false,
        ),
        ("half a message", true, attach[..attach.len() - 3].to_vec(), false),
    ];
    for (name, greeted, bytes, thrown_out) in attacks {
        let mut peer = TcpStream::connect(("127.0.0.1", port)).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        if greeted {
            greet(&mut peer);
        }
        peer.write_all(&bytes).unwrap();
        if thrown_out {
            // Whatever it answers first, it ends the connection.
            let ended = peer.read_to_end(&mut Vec::new());
            assert!(
                ended.is_ok()
                    || ended.as_ref().unwrap_err().kind() == std::io::ErrorKind::ConnectionReset,
                "{name}: not thrown out: {ended:?}"
            );
        }
        root.write_path(b"honest", CREATE, 0o600, &vec![7; 100_000])
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut back = vec![0; 100_001];
        assert_eq!(root.read_path(b"honest", 0, &mut back).unwrap(), 100_000, "{name}");
    }
    let statistics = client.statistics().unwrap();
    assert!(!statistics.contains("\"protocol_errors\":0"), "{statistics}");
    // Many at once: some say nothing, others read nothing.
    let idle: Vec<TcpStream> =
        (0..400).filter_map(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
    let asking: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut peer = TcpStream::connect(("127.0.0.1", port)).unwrap();
            greet(&mut peer);
            let mut bytes = attach.clone();
            for slot in 1..60 {
                bytes.extend(request(slot, 1, &[Request::Inquire { what: 1 }], 0));
            }
            peer.write_all(&bytes).unwrap();
            peer
        })
        .collect();
    root.stat_path(b"honest", true).unwrap();
    drop((idle, asking));
    root.stat_path(b"honest", true).unwrap();
}

#[test]
fn a_full_store_loses_nothing_and_locks_hold_between_clients() {
    use towline_client::Lock;
    use towline_wire::request::lock;
    let directory = TempDir::new().unwrap();
    let server = Server::start(&config(directory.path(), 0)).unwrap();
    let first = Client::connect(&tcp(port_of(&server)), Options::default()).unwrap();
    let second = Client::connect(&tcp(port_of(&server)), Options::default()).unwrap();
    let root = first.attach(b"mem").unwrap();
    root.write_path(b"kept", CREATE, 0o600, &vec![5; 1 << 20]).unwrap();
    let file = root.open(b"full", CREATE, 0o600).unwrap();
    let mut written = 0u64;
    let full = loop {
        match file.write_at(&vec![6; 1 << 20], written) {
            Ok(count) => written += count as u64,
            Err(error) => break error,
        }
        assert!(written < 65 << 20, "the limit does not hold");
    };
    assert_eq!(full.errno(), Errno::ENOSPC);
    let mut back = vec![0; 1 << 20];
    assert_eq!(root.read_path(b"kept", 0, &mut back).unwrap(), 1 << 20);
    assert!(back.iter().all(|b| *b == 5));
    file.close().unwrap();
    root.unlink(b"full", false).unwrap();
    root.write_path(b"again", CREATE, 0o600, &vec![1; 2 << 20]).unwrap();

    let other = second.attach(b"mem").unwrap();
    let (a, b) = (root.open(b"kept", 2, 0).unwrap(), other.open(b"kept", 2, 0).unwrap());
    let range =
        Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 10 };
    a.lock(&range, false).unwrap();
    assert_eq!(b.lock(&range, false).unwrap_err().errno(), Errno::EAGAIN);
    assert!(b.test_lock(&range).unwrap().is_some());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| b.lock(&range, true));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!waiting.is_finished(), "the lock was given twice");
        a.close().unwrap();
        waiting.join().unwrap().unwrap();
    });
}
