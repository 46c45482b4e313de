//! Peers that break the protocol, ask for too much or give nothing back: the server throws them out
//! or bounds them, and goes on serving honest clients. Also servers that treat their clients in
//! this way.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod amounts;
#[path = "../common/mod.rs"]
mod common;
mod messages;
mod rings;
mod server;
mod talkers;

use common::{CREATE, Process, Raw, pattern, request};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, File, Options, Transport};
use towline_wire::request::CURRENT;
use towline_wire::{Header, Kind, Request};

#[test]
#[ignore = "not a test: the server that the others attack"]
fn child_server() {
    common::child_server();
}

/// An honest client, which must be served whatever others do.
struct Honest {
    client: Client,
    root: File,
    rounds: u8,
}

/// How long an honest client may have to wait for a few small requests on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Honest {
    fn new(process: &Process) -> Self {
        Self::over(&process.tcp())
    }

    fn over(transport: &Transport) -> Self {
        let client = Client::connect(transport, Options::default()).unwrap();
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
        let length = self.root.read_path(b"honest", 0, &mut back).unwrap();
        assert!(length == 100_000 && back[..length] == data[..], "after {after}: bytes differ");
        assert!(start.elapsed() < PATIENCE, "after {after}: took {:?}", start.elapsed());
    }

    /// Checks that a newcomer is served, too.
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

fn results(peer: &mut Raw) -> Vec<u8> {
    loop {
        let (header, body) = peer.receive().expect("thrown out");
        if header.kind == Kind::Reply {
            return body[..header.body_bytes as usize].to_vec();
        }
    }
}

fn big_write(slot: u16, name: &[u8]) -> Vec<u8> {
    let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: name };
    let write = Request::Write { handle: CURRENT, offset: 0, length: 8 << 20, flags: 0 };
    request(slot, 1, &[ATTACH, open, write], 8 << 20)
}
