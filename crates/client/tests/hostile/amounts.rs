//! Peers that ask for too much or give nothing back: the server bounds them.

use super::common::{
    CREATE, Raw, ShmRaw, counter, eventually, hello, hello_message, pattern, request,
};
use super::{ATTACH, PATIENCE, big_write, common, header, start};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use towline_client::{Client, Options, Transport};
use towline_net::address::Address;
use towline_net::{Wait, receive_descriptors};
use towline_server::{Config, EngineWish, Export, ExportKind, Server};
use towline_wire::hello::want;
use towline_wire::request::CURRENT;
use towline_wire::{Errno, Header, Hello, Kind, Request};

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
    // Small writes need no grant, and large ones get their turn once stalled peers are thrown out,
    // after the time allowed for using a grant.
    honest.root.write_path(b"small", CREATE, 0o600, &[1; 10_000]).unwrap();
    let mut back = vec![0; 10_001];
    assert_eq!(honest.root.read_path(b"small", 0, &mut back).unwrap(), 10_000);
    drop(peers);
    honest.check("unused grants");
}

/// A request that is resent while it waits for a buffer waits only once.
#[test]
fn requests_that_are_sent_again_and_again_take_no_memory() {
    let (_directory, process, honest) = start();
    let mut peers = Vec::new();
    for number in 0..30 {
        let (mut peer, _) = Raw::greeted(process.port);
        for slot in 0..10 {
            peer.send(&big_write(slot, format!("g{number}-{slot}").as_bytes()));
        }
        peers.push(peer);
    }
    eventually("grants", || counter(&honest.client, "buffer_bytes_in_use") >= 15 << 20);
    let (mut peer, _) = Raw::greeted(process.port);
    let write = big_write(0, b"again");
    peer.send(&write);
    // The server looks at all of it before it throws out peers that do not use their buffers.
    let before = process.memory();
    for _ in 0..100 {
        peer.send(&write.repeat(20_000));
    }
    let grown = process.memory().saturating_sub(before);
    assert!(grown < 16, "memory grew by {grown} MiB for one request");
    drop(peers);
}

#[test]
fn half_messages_take_little_memory_and_harm_nobody() {
    let (_directory, process, mut honest) = start();
    let before = process.memory();
    let mut peers = Vec::new();
    for number in 0..600 {
        // As much of a message as the limits allow, but never its end.
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
        // Slot by slot: the server answers each request before it looks at the next, so slots can
        // be reused without reading the answers.
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
    // Each lane may hold 2 MiB, and the answer that exceeds them.
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
            // These bytes exist only in a buffer of the server.
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
            // No answer follows, so only the end of the connection tells the server that nobody is
            // there.
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

/// A connection over shared memory takes more descriptors than the one that it begins with.
#[test]
fn clients_stay_on_their_socket_if_there_are_no_descriptors_for_shared_memory() {
    let (directory, mut process, mut honest) = start();
    for spare in 1..5 {
        process.limit_descriptors(process.next_descriptor() + spare);
        let shm = Transport::Shm(directory.path().join("socket"));
        let client = Client::connect(&shm, Options::default())
            .unwrap_or_else(|error| panic!("with {spare} descriptors: {error}"));
        let root = client.attach(b"mem").unwrap();
        root.write_path(b"honest", CREATE, 0o600, &pattern(1000, 1)).unwrap();
        honest.check("a client came when descriptors were scarce");
    }
}

/// Any peer that has a doorbell's descriptor can take its rings, and make its reads and writes
/// wait: so the doorbell of a peer over shared memory wakes the server for that peer only.
#[test]
fn bells_that_are_spoiled_by_peers_wake_the_server_for_others() {
    let (directory, process, _) = start();
    // One peer for each core.
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
                std::thread::sleep(Duration::from_millis(1)); // the server goes to sleep meanwhile
            }
        }
        done.send(()).unwrap();
    });
    checked.recv_timeout(PATIENCE).expect("clients wait for a core that nobody can wake");
}

/// A client may have been stopped when it has sent a few requests, or many.
#[test]
fn answers_that_nobody_takes_from_a_ring_do_not_keep_the_server_awake() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(64 << 20))],
        listen: vec![Address::Unix(socket.clone())],
        cores: 1,
        engine: EngineWish::Epoll,
        spin: Duration::ZERO,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let client = Client::connect(&Transport::Unix(socket.clone()), Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"bytes", CREATE, 0o600, &pattern(1 << 20, 1)).unwrap();
    let reading = |slot| {
        let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"bytes" };
        let read = Request::Read { handle: CURRENT, offset: 0, length: 1 << 20 };
        request(slot, 1, &[ATTACH, open, read], 0)
    };
    // Of more than four the server keeps not all answers, so the last request stays where it is.
    for reads in [2, 6] {
        let peer = ShmRaw::greeted(&socket);
        peer.send(&(0..reads - 1).flat_map(reading).collect::<Vec<_>>());
        eventually("the ring of answers is full", || peer.answered() == 1 << 20);
        peer.send(&reading(reads - 1));
        let calls = || counter(&client, "system_calls");
        let before = calls();
        std::thread::sleep(Duration::from_millis(500));
        let made = calls() - before;
        assert!(made < 50, "{made} calls while {reads} answers waited");
        eventually("all are answered", || {
            peer.take_answers();
            peer.answered() > u64::from(reads) << 20
        });
    }
    server.stop();
}

/// Each keeps what it has read of a file in the state of that time, whatever becomes of the file.
#[test]
fn who_takes_no_answers_keeps_the_memory_of_rewritten_files_only_for_a_while() {
    const MIB: usize = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(16 << 20))],
        listen: vec![Address::Unix(socket.clone())],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let client = Client::connect(&Transport::Unix(socket.clone()), Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    let file = root.open(b"bytes", CREATE, 0o600).unwrap();
    let rewrite = |with| file.write_at(&pattern(4 * MIB, with), 0);
    rewrite(0).unwrap();
    let mut deaf = Vec::new();
    let refused = loop {
        assert!(deaf.len() < 200, "they get memory without limit");
        // A socket for reads and writes like any other.
        let socket = UnixStream::connect(&socket).unwrap();
        let mut peer = Raw(TcpStream::from(OwnedFd::from(socket)));
        peer.send(&hello_message(&hello()));
        peer.receive().expect("no welcome");
        for slot in 0..4 {
            let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"bytes" };
            let offset = u64::from(slot) << 20;
            let read = Request::Read { handle: CURRENT, offset, length: MIB as u32 };
            peer.send(&request(slot, 1, &[ATTACH, open, read], 0));
        }
        deaf.push(peer);
        match rewrite(deaf.len() as u8) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(refused.errno(), Errno::ENOSPC);
    eventually("there is memory again", || rewrite(0).is_ok_and(|count| count == 4 * MIB));
    drop(deaf);
    server.stop();
}
