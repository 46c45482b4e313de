//! How many fragments of writes are granted at once: many while buffers are plentiful, so that a round trip moves
//! much data; few for each when they are scarce, so that nobody waits for those who send nothing.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Raw, eventually, message, pattern, request};
use std::collections::VecDeque;
use std::time::Duration;
use towline_client::{Client, Error, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, Server};
use towline_wire::limits::{CLIENT_STALL_SECONDS, FRAGMENT_BYTES_MAX, TRANSFER_BYTES_MAX};
use towline_wire::reply::parse_results;
use towline_wire::request::CURRENT;
use towline_wire::{Header, Kind, Reply, Request};

fn config(buffers: usize, port: u16) -> Config {
    Config {
        exports: vec![Export::new("mem", ExportKind::Memory(64 << 20))],
        listen: vec![Address::parse(&format!("tcp://127.0.0.1:{port}")).unwrap()],
        cores: 1,
        buffer_limit: (buffers * FRAGMENT_BYTES_MAX) as u64,
        ..Config::default()
    }
}

/// A server of one core with this many buffers, and its port.
fn server(buffers: usize) -> (Server, u16) {
    let server = Server::start(&config(buffers, 0)).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let port = address.port();
    (server, port)
}

const EXCLUSIVE: u32 = 0o200;

/// A client that sends data only when the test says so.
struct Peer(Raw);

impl Peer {
    /// Offers the longest write to a file in each of this many slots.
    fn offer(port: u16, name: &[u8], slots: u16) -> Self {
        let mut peer = Raw::greeted(port).0;
        let requests = [
            Request::Attach { name: b"mem" },
            Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: name },
            Request::Write {
                handle: CURRENT,
                offset: 0,
                length: TRANSFER_BYTES_MAX as u32,
                flags: 0,
            },
        ];
        for slot in 0..slots {
            peer.send(&request(slot, 1, &requests, TRANSFER_BYTES_MAX as u64));
        }
        Self(peer)
    }

    /// Returns the next grant.
    fn granted(&mut self) -> Header {
        let (header, _) = self.0.receive().expect("no grant");
        assert_eq!(header.kind, Kind::Grant);
        header
    }

    /// Returns all grants that arrive although nothing is sent.
    fn all_granted(&mut self) -> Vec<Header> {
        let mut grants = Vec::new();
        // The answer to a request that comes with the offers may leave before their grants, but not the next answer.
        for sequence in 1..=2 {
            self.0.send(&request(63, sequence, &[Request::Inquire { what: 0 }], 0));
            loop {
                let (header, _) = self.0.receive().expect("no answer");
                match header.kind {
                    Kind::Grant => grants.push(header),
                    kind => break assert_eq!((kind, header.slot), (Kind::Reply, 63)),
                }
            }
        }
        grants
    }

    /// Sends what was granted.
    fn send(&mut self, grant: &Header, data: &[u8]) {
        let mut header = Header::new(Kind::Data, grant.slot, 1);
        header.offset = grant.offset;
        let from = grant.offset as usize;
        self.0.send(&message(header, &[], &data[from..from + grant.word_a as usize]));
    }

    fn answered(&mut self) {
        let (header, body) = self.0.receive().expect("no answer");
        assert_eq!(header.kind, Kind::Reply);
        let results = &body[..header.body_bytes as usize];
        let failed = |reply: &Reply<'_>| matches!(reply, Reply::Failed { .. });
        assert!(!parse_results(results).unwrap().iter().any(failed));
    }
}

fn assert_holds(port: u16, name: &[u8], data: &[u8]) {
    let transport = Transport::Tcp("127.0.0.1".to_owned(), port);
    let client = Client::connect(&transport, Options::default()).unwrap();
    let file = client.attach(b"mem").unwrap().open(name, 0, 0).unwrap();
    let mut back = vec![0; data.len() + 1];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), data.len());
    assert!(back[..data.len()] == *data);
}

#[test]
fn a_whole_write_is_granted_while_buffers_are_plentiful() {
    let (_server, port) = server(64);
    let data = pattern(TRANSFER_BYTES_MAX, 1);
    let mut peer = Peer::offer(port, b"file", 1);
    let grants = peer.all_granted();
    assert_eq!(grants.len(), 32);
    grants.iter().for_each(|grant| peer.send(grant, &data));
    peer.answered();
    assert_holds(port, b"file", &data);
}

#[test]
fn who_is_granted_much_and_sends_nothing_keeps_nobody_from_writing() {
    let (_server, port) = server(64);
    let mut greedy = Peer::offer(port, b"greedy", 8);
    // Three quarters of the buffers, and two for each write that came later.
    let granted = greedy.all_granted().len();
    assert!((48..=48 + 7 * 2).contains(&granted), "{granted}");
    // Others get two at a time.
    let data = pattern(TRANSFER_BYTES_MAX, 2);
    let mut peer = Peer::offer(port, b"file", 1);
    let mut grants = VecDeque::from(peer.all_granted());
    assert_eq!(grants.len(), 2);
    for _ in 2..32 {
        peer.send(&grants.pop_front().unwrap(), &data);
        grants.push_back(peer.granted());
    }
    grants.iter().for_each(|grant| peer.send(grant, &data));
    peer.answered();
    assert_holds(port, b"file", &data);
}

#[test]
fn one_client_is_not_granted_all_buffers_however_many_there_are() {
    let (_server, port) = server(256);
    let granted = Peer::offer(port, b"greedy", 8).all_granted().len();
    assert!((64..=64 + 7 * 2).contains(&granted), "{granted}");
}

/// A fragment takes longer than a client may do nothing.
#[test]
fn who_sends_little_at_a_time_is_served() {
    if std::env::var_os("TOWLINE_LONG").is_none() {
        return println!("SKIPPED a client that is slow for 40 s: `make test-long` tries it");
    }
    let (_server, port) = server(64);
    let data = pattern(TRANSFER_BYTES_MAX, 3);
    let mut peer = Peer::offer(port, b"file", 1);
    let mut grants = peer.all_granted().into_iter();
    let first = grants.next().unwrap();
    let mut header = Header::new(Kind::Data, first.slot, 1);
    header.offset = first.offset;
    let fragment = message(header, &[], &data[..first.word_a as usize]);
    let (beginning, rest) = fragment.split_at(fragment.len() / 2);
    for part in beginning.chunks(beginning.len().div_ceil(4)) {
        peer.0.send(part);
        std::thread::sleep(Duration::from_secs(CLIENT_STALL_SECONDS / 3));
    }
    peer.0.send(rest);
    grants.for_each(|grant| peer.send(&grant, &data));
    peer.answered();
    assert_holds(port, b"file", &data);
}

/// The file was created before its data was waited for: a server that stops has begun the request, though it granted
/// nothing.
#[test]
fn a_write_that_waits_for_a_buffer_when_the_server_stops_may_have_begun() {
    let directory = tempfile::TempDir::new().unwrap();
    // Below the ports that the kernel gives to outgoing connections, one of which could take the server's place.
    let port = 20_000 + (std::process::id() % 10_000) as u16;
    let mut config = config(2, port);
    let kind = ExportKind::Directory(directory.path().to_path_buf());
    config.exports.push(Export::new("dir", kind));
    let server = Server::start(&config).unwrap();
    let mut greedy = Peer::offer(port, b"greedy", 1);
    assert_eq!(greedy.all_granted().len(), 2);
    let transport = Transport::Tcp("127.0.0.1".to_owned(), port);
    let client = Client::connect(&transport, Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    let write = std::thread::spawn(move || {
        root.write_path(b"new", CREATE | EXCLUSIVE, 0o600, &pattern(65_536, 3))
    });
    eventually("it was not created", || directory.path().join("new").exists());
    server.stop();
    let _next = Server::start(&config).unwrap();
    assert_eq!(write.join().unwrap().unwrap_err(), Error::Unknown);
}
