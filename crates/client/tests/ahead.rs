//! Sending the first fragment of a long write along with its request, by leave of the server: to
//! files and to disks.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{
    CREATE, Process, Raw, counter, eventually, message, pattern, request, say_ahead, setup,
};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Error, Options, Transport};
use towline_net::address::Address;
use towline_server::{CacheMode, Config, DiskExport, DiskKind, EngineWish, Server};
use towline_wire::header::{data_flag, reply_flag, request_flag};
use towline_wire::limits::AHEAD_MILLISECONDS;
use towline_wire::reply::parse_results;
use towline_wire::request::CURRENT;
use towline_wire::{Errno, Header, Kind, Reply, Request};

const LENGTH: usize = 100_000;

/// A peer that writes to a file of its own, with raw messages.
struct Peer {
    raw: Raw,
    sequence: u32,
}

impl Peer {
    fn new(port: u16) -> Self {
        Self { raw: Raw::greeted(port).0, sequence: 0 }
    }

    /// Returns a request to write to a file of this name, whose directory may be missing.
    fn request(&mut self, name: &[u8], flags: u8) -> Vec<u8> {
        self.sequence += 1;
        let requests = [
            Request::Attach { name: b"mem" },
            Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: name },
            Request::Write { handle: CURRENT, offset: 0, length: LENGTH as u32, flags: 0 },
        ];
        let mut bytes = request(0, self.sequence, &requests, LENGTH as u64);
        if flags & request_flag::AHEAD != 0 {
            say_ahead(&mut bytes, LENGTH);
        }
        bytes
    }

    fn ask(&mut self, name: &[u8], flags: u8) {
        let bytes = self.request(name, flags);
        self.raw.send(&bytes);
    }

    fn send_data(&mut self, data: &[u8], flags: u8) {
        let mut header = Header::new(Kind::Data, 0, self.sequence);
        header.flags = flags;
        self.raw.send(&message(header, &[], data));
    }

    /// Waits for the grant and uses it.
    fn send_granted(&mut self, data: &[u8]) {
        let (header, _) = self.raw.receive().expect("no grant");
        assert_eq!((header.kind, header.word_a), (Kind::Grant, LENGTH as u32));
        self.send_data(data, 0);
    }

    /// Returns the outcome of the answer, and whether it gives leave.
    fn answer(&mut self) -> (Option<Errno>, bool) {
        let (header, body) = self.raw.receive().expect("thrown out");
        assert_eq!((header.kind, header.sequence), (Kind::Reply, self.sequence));
        let errno = match parse_results(&body).unwrap().last() {
            Some(Reply::Failed { errno }) => Some(Errno(*errno)),
            _ => None,
        };
        (errno, header.flags & reply_flag::AHEAD != 0)
    }

    /// Writes without leave, under a grant. Returns whether the answer gives leave.
    fn write_granted(&mut self, name: &[u8], data: &[u8]) -> bool {
        self.ask(name, 0);
        self.send_granted(data);
        let (errno, leave) = self.answer();
        assert_eq!(errno, None);
        leave
    }

    fn ask_ahead(&mut self, name: &[u8], data: &[u8]) {
        self.ask(name, request_flag::AHEAD);
        self.send_data(data, data_flag::AHEAD);
    }
}

fn assert_holds(client: &Client, name: &[u8], data: &[u8]) {
    let mut back = vec![0; data.len() + 1];
    assert_eq!(client.attach(b"mem").unwrap().read_path(name, 0, &mut back).unwrap(), data.len());
    assert!(back[..data.len()] == *data, "{} holds other bytes", name.escape_ascii());
}

#[test]
fn leave_is_for_one_write_each_and_never_the_way_to_lose_one() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let mut peer = Peer::new(setup.port());
    let discarded = || counter(&client, "payload_discarded");
    let data: Vec<_> = (0..8).map(|seed| pattern(LENGTH, seed)).collect();

    assert!(peer.write_granted(b"a", &data[0]), "no leave where there are buffers in plenty");
    for (round, data) in data[1..4].iter().enumerate() {
        peer.ask_ahead(b"a", data);
        assert_eq!(peer.answer(), (None, true), "round {round}");
        assert_holds(&client, b"a", data);
    }
    assert_eq!(discarded(), 0);

    // Leave used for a write that fails before its data is needed: the data is discarded, and
    // nothing of it stays behind.
    peer.ask_ahead(b"no/such", &data[4]);
    assert_eq!(peer.answer(), (Some(Errno::ENOENT), false));
    // The leave is used up: data sent ahead without leave is discarded and granted later.
    peer.ask_ahead(b"b", &data[5]);
    peer.send_granted(&data[6]);
    assert_eq!(peer.answer(), (None, true));
    assert_holds(&client, b"b", &data[6]);
    assert_eq!(discarded(), 2 * LENGTH as u64);

    // Data for no request at all does not get a peer thrown out.
    peer.sequence += 7;
    peer.send_data(&data[7], data_flag::AHEAD);
    peer.sequence -= 7;
    peer.ask_ahead(b"b", &data[7]);
    assert_eq!(peer.answer(), (None, true));
    assert_holds(&client, b"b", &data[7]);

    // Data announced as sent ahead may not arrive as granted data. Data sent ahead without that is
    // discarded.
    for (asked, sent) in [(request_flag::AHEAD, 0), (0, data_flag::AHEAD)] {
        let mut peer = Peer::new(setup.port());
        assert!(peer.write_granted(b"c", &data[0]));
        peer.ask(b"c", asked);
        peer.send_data(&data[1], sent);
        if asked == 0 {
            peer.send_granted(&data[2]);
            // Its leave still holds, and it gets another one.
            assert_eq!(peer.answer(), (None, true));
            assert_holds(&client, b"c", &data[2]);
        } else {
            assert!(peer.raw.thrown_out());
        }
    }
    eventually("buffers come back", || {
        drop(client.attach(b"mem").unwrap());
        counter(&client, "buffer_bytes_in_use") == 0
    });
}

/// Otherwise the file would begin with what others had left in the buffer.
#[test]
fn data_that_begins_before_its_grant_is_not_taken() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let data = pattern(LENGTH, 1);
    assert!(Peer::new(setup.port()).write_granted(b"secret", &data));
    let mut peer = Peer::new(setup.port());
    let mut header = Header::new(Kind::Data, 0, 1);
    header.payload_bytes = LENGTH as u32;
    let (begun, rest) = data.split_at(LENGTH / 3);
    let mut bytes = peer.request(b"mine", 0);
    bytes.extend_from_slice(&header.to_bytes());
    bytes.extend_from_slice(begun);
    peer.raw.send(&bytes);
    let (header, _) = peer.raw.receive().expect("no grant");
    assert_eq!(header.kind, Kind::Grant);
    peer.raw.send(rest);
    assert!(peer.raw.thrown_out());
    let mut back = [0; 1];
    assert_eq!(client.attach(b"mem").unwrap().read_path(b"mine", 0, &mut back).unwrap(), 0);
}

/// Counts messages: a request and its data arrive, and an answer leaves.
#[test]
fn writers_need_no_grant_from_their_second_write_on() {
    const WRITES: u64 = 20;
    let setup = setup(EngineWish::Automatic);
    for (transport, length) in
        setup.transports.iter().flat_map(|via| [(via, 64 << 10), (via, 1 << 20)])
    {
        let client = Client::connect(transport, Options::default()).unwrap();
        let file = client.attach(b"mem").unwrap().open(b"f", CREATE, 0o600).unwrap();
        let fragments = length as u64 / (256 << 10);
        let write = |seed: u8| {
            let data = pattern(length, seed);
            assert_eq!(file.write_at(&data, 0).unwrap(), length);
            let mut back = vec![0; length];
            assert_eq!(file.read_at(&mut back, 0).unwrap(), length);
            assert!(back == data, "{transport:?}: other bytes");
        };
        write(0);
        let data = pattern(length, 1);
        let before = counter(&client, "messages_sent");
        for _ in 0..WRITES {
            file.write_at(&data, 0).unwrap();
        }
        let sent = counter(&client, "messages_sent") - before;
        // The last one is the answer to this question itself. Grants are needed only beyond the
        // first fragment; a client that did not run for as long as its leave holds needs one more.
        let least = WRITES + WRITES * fragments.saturating_sub(1) + 1;
        assert!(
            (least..least + 3).contains(&sent),
            "{transport:?}, {length}: {sent} messages, not {least}"
        );
        for seed in 2..5 {
            write(seed);
        }
        assert_eq!(counter(&client, "payload_discarded"), 0);
        client.close();
    }
}

/// A server with disks: memory, a file, and a stripe of two files whose chunks are shorter than a fragment.
fn with_disks() -> (TempDir, Server, Client) {
    let directory = TempDir::new().unwrap();
    let file = |name: &str| {
        let path = directory.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        path
    };
    let stripe = DiskKind::Stripe(64 << 10, vec![file("a"), file("b")], CacheMode::Cached);
    let kinds = [
        ("memory", DiskKind::Memory(16 << 20)),
        ("file", DiskKind::File(file("file"), CacheMode::Cached)),
        ("stripe", stripe),
    ];
    let config = Config {
        disks: kinds.into_iter().map(|(name, kind)| DiskExport::new(name, kind)).collect(),
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap()],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let transport = Transport::Tcp(address.ip().to_string(), address.port());
    let client = Client::connect(&transport, Options::default()).unwrap();
    (directory, server, client)
}

/// Counts messages, as for files. As much is sent ahead as the disk's first fragment takes.
#[test]
fn writers_to_disks_need_no_grant_from_their_second_write_on() {
    const WRITES: u64 = 20;
    let (_directory, _server, client) = with_disks();
    for (name, length, checked, grants) in [
        ("memory", 64 << 10, false, 0),
        ("memory", 64 << 10, true, 0),
        ("memory", 1 << 20, false, 7),
        ("file", 64 << 10, false, 0),
        ("file", 64 << 10, true, 0),
        ("file", 1 << 20, false, 7),
        ("stripe", 64 << 10, false, 0),
        ("stripe", 1 << 20, false, 15),
    ] {
        let disk = client.disk(name.as_bytes()).unwrap().with_checksums(checked);
        let what = format!("{name}, {length}, checked {checked}");
        // Two, since the write before may have left leave for more than this disk takes.
        for seed in 0..2 {
            disk.write_at(&pattern(length, seed), 1 << 20).unwrap();
        }
        let data = pattern(length, 2);
        let before = counter(&client, "messages_sent");
        for _ in 0..WRITES {
            disk.write_at(&data, 1 << 20).unwrap();
        }
        let sent = counter(&client, "messages_sent") - before;
        // A client that is held up for a second has lost its leave.
        let least = WRITES + WRITES * grants + 1;
        let most = least + WRITES / 2;
        assert!((least..most).contains(&sent), "{what}: {sent} messages, not {least}");
        let mut back = vec![0; length];
        disk.read_at(&mut back, 1 << 20).unwrap();
        assert!(back == data, "{what}: other bytes");
    }
    // Several writes under way get leave in turn.
    let disk = client.disk(b"memory").unwrap();
    let mut before = 0;
    for round in 0..6 {
        if round == 1 {
            before = counter(&client, "messages_sent");
        }
        let writes: Vec<_> = (0..8)
            .map(|at| disk.start_write_at(pattern(64 << 10, at as u8), at << 20, false).unwrap())
            .collect();
        for write in writes {
            write.wait().unwrap();
        }
    }
    let sent = counter(&client, "messages_sent") - before;
    assert!((41..60).contains(&sent), "{sent} messages, not some 41");
    // Leave used for a write that fails at once: the data is discarded, and the session goes on.
    let data = pattern(64 << 10, 9);
    disk.write_at(&data, 0).unwrap();
    let before = counter(&client, "payload_discarded");
    match disk.write_at(&data, 16 << 20) {
        Err(Error::Errno(errno)) => assert_eq!(errno, Errno::ENOSPC),
        other => panic!("{other:?}"),
    }
    disk.write_at(&data, 0).unwrap();
    let discarded = counter(&client, "payload_discarded");
    assert!(discarded - before <= 64 << 10, "{discarded}, {before}");
    // Discarded by the first write to the stripe that is longer than its chunks: the write before
    // had left leave for a whole fragment.
    assert!(before <= 128 << 10, "{before}");
    eventually("buffers come back", || {
        client.statistics().unwrap();
        counter(&client, "buffer_bytes_in_use") == 0
    });
}

/// Neither side uses it: the client asks for a grant, and the server has its buffer back.
#[test]
fn leave_that_is_old_is_gone_on_both_sides() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let root = client.attach(b"mem").unwrap();
    let file = root.open(b"f", CREATE, 0o600).unwrap();
    let data = pattern(LENGTH, 3);
    file.write_at(&data, 0).unwrap();
    assert!(counter(&client, "buffer_bytes_in_use") > 0, "nothing is kept for the next write");
    std::thread::sleep(Duration::from_millis(AHEAD_MILLISECONDS + 50));
    file.write_at(&data, 0).unwrap();
    let mut peer = Peer::new(setup.port());
    assert!(peer.write_granted(b"p", &data));
    // So many, unless this takes long: leave that the peer has not used expires after a second, and
    // the peer gets more.
    const LEAVES: u64 = 32;
    let mut forgetful = Peer::new(setup.port());
    for _ in 0..2 {
        let start = Instant::now();
        let gets = (0..2 * LEAVES).filter(|_| forgetful.write_granted(b"p", &data)).count() as u64;
        let most = LEAVES * (2 + 2 * start.elapsed().as_secs());
        assert!((LEAVES..=most).contains(&gets), "{gets} times in {:?}", start.elapsed());
        std::thread::sleep(Duration::from_millis(AHEAD_MILLISECONDS + 50));
    }
    eventually("the buffers are free again", || counter(&client, "buffer_bytes_in_use") == 0);
    assert_eq!(counter(&client, "payload_discarded"), 0);
    // A peer that sends ahead too late has to send its data twice.
    let later = pattern(LENGTH, 4);
    peer.ask_ahead(b"p", &later);
    peer.send_granted(&later);
    assert_eq!(peer.answer(), (None, true));
    assert_eq!(counter(&client, "payload_discarded"), LENGTH as u64);
    assert_holds(&client, b"p", &later);
}

#[test]
#[ignore = "not a test: a server with few buffers"]
fn child_server() {
    common::child_server();
}

/// A quarter of the buffers is never reserved for anybody, so peers without leave make progress.
#[test]
fn buffers_that_are_kept_starve_nobody() {
    let directory = TempDir::new().unwrap();
    let process = Process::start(directory.path());
    let data = pattern(LENGTH, 1);
    let mut peers = Vec::new();
    let mut with_leave = 0;
    for _ in 0..100 {
        let mut peer = Peer::new(process.port);
        with_leave += u32::from(peer.write_granted(b"x", &data));
        peers.push(peer);
    }
    assert!((1..100).contains(&with_leave), "{with_leave} of 100 have leave");
    let client = Client::connect(&process.tcp(), Options::default()).unwrap();
    let long = pattern(7 << 20, 2);
    client.attach(b"mem").unwrap().write_path(b"y", CREATE, 0o600, &long).unwrap();
    assert_holds(&client, b"y", &long);
}
