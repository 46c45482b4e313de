//! Connections that move to the core on the processor of their client.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::brittle::{Brittle, answer, ask, config_of, greeted_on, peer_on};
use common::processors::processors;
use common::{
    CREATE, Raw, Setup, counter, counter_in, eventually, hello, hello_message, message, request,
    setup, skipped,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_client::{Client, File, Lock, Options, Transport};
use towline_net::address::Address;
use towline_server::{EngineWish, Export, ExportKind, Server};
use towline_wire::hello::resumed;
use towline_wire::request::{lock, write_flag};
use towline_wire::{Errno, Header, Hello, Kind, Request, Welcome};

/// Enough that some always wait for their turn.
const PEERS: usize = 16;
const RECORD: usize = 8;
/// More than there are peers on one core, so that connections move in both directions.
const MOVES: u64 = 16;
/// Sessions that ask for nothing, on one core: more than there are peers.
const IDLE: usize = 30;
/// What a peer does before it goes to the other processor.
const ACTS: usize = 200;
/// One of so many acts is in a hurry.
const HURRY: usize = 100;
/// Long enough to be lent.
const LENT: usize = 32 * 1024;
const LOCK: Lock =
    Lock { family: lock::FLOCK, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };

/// A peer with an open file that it has locked, and into which it writes.
struct Peer {
    raw: Raw,
    welcome: Welcome,
    sequence: u32,
    handle: u64,
    written: u64,
}

impl Peer {
    fn new(port: u16, name: &[u8]) -> Self {
        let (raw, welcome) = Raw::greeted(port);
        let mut peer = Self { raw, welcome, sequence: 0, handle: 0, written: 0 };
        peer.handle = peer.open(name).unwrap();
        peer.lock(peer.handle).unwrap();
        peer
    }

    fn ask(&mut self, requests: &[Request<'_>]) -> Result<u64, Errno> {
        self.sequence += 1;
        ask(&mut self.raw, self.sequence, requests)
    }

    fn open(&mut self, name: &[u8]) -> Result<u64, Errno> {
        let base = self.ask(&[Request::Attach { name: b"mem" }])?;
        self.ask(&[Request::Open { base, flags: CREATE, mode: 0o600, path: name }])
    }

    fn lock(&mut self, handle: u64) -> Result<u64, Errno> {
        let (family, kind) = (lock::FLOCK, lock::EXCLUSIVE);
        self.ask(&[Request::Lock { handle, owner: 0, family, kind, wait: 0, start: 0, length: 0 }])
    }

    /// Writes the next record.
    fn write(&mut self) {
        let offset = self.written * RECORD as u64;
        let write = self.next_record(offset, 0);
        self.raw.send(&write);
        answer(&mut self.raw).unwrap();
    }

    /// Appends the next record. If the peer `hurries`, it does not wait for the answer, but goes on over a new connection
    /// and asks there again.
    fn append(&mut self, hurries: Option<u16>) {
        let append = self.next_record(0, write_flag::APPEND);
        self.raw.send(&append);
        if let Some(port) = hurries {
            let mut before = self.return_again(port);
            self.raw.send(&append);
            assert!(before.thrown_out(), "the old connection is still there");
        }
        answer(&mut self.raw).unwrap();
    }

    /// A request that writes the next record.
    fn next_record(&mut self, offset: u64, flags: u32) -> Vec<u8> {
        self.sequence += 1;
        let write = Request::Write { handle: self.handle, offset, length: RECORD as u32, flags };
        let body = towline_wire::request::encode_compound(&[write]);
        let header = Header::new(Kind::Request, 0, self.sequence);
        let record = self.written.to_le_bytes();
        self.written += 1;
        message(header, &body, &record)
    }

    /// Goes on with its session over a new connection. Returns the old one.
    fn return_again(&mut self, port: u16) -> Raw {
        let before = std::mem::replace(&mut self.raw, Raw::connect(port));
        let Welcome { session, secret, .. } = self.welcome;
        self.raw.send(&hello_message(&Hello { session, secret, ..hello() }));
        let (_, body) = self.raw.receive().unwrap();
        let welcome = Welcome::parse(&body).unwrap();
        assert_eq!((welcome.session, welcome.resumed), (session, resumed::JOINED));
        before
    }
}

fn name(number: usize) -> Vec<u8> {
    format!("file{number}").into_bytes()
}

/// Fails unless a file consists of these records, once each and in order.
fn assert_written(root: &File, name: &[u8], records: u64) {
    let length = records as usize * RECORD;
    let mut bytes = vec![0; length + 1];
    assert_eq!(root.read_path(name, 0, &mut bytes).unwrap(), length);
    let expected: Vec<u8> = (0..records).flat_map(u64::to_le_bytes).collect();
    assert!(bytes[..length] == expected, "the records of {}", name.escape_ascii());
}

/// A client that says on which processor it runs, with an open file that it has locked.
struct Teller {
    client: Client,
    file: File,
}

impl Teller {
    fn new(transport: &Transport, name: &[u8]) -> Self {
        let client = Client::connect(transport, Options::default()).unwrap();
        let file = client.attach(b"mem").unwrap().open(name, CREATE, 0o600).unwrap();
        file.lock(&LOCK, false).unwrap();
        Self { client, file }
    }

    /// Writes something, and reads it: over shared memory, it is lent.
    fn write_and_read(&self, seed: u8) {
        let written = vec![seed; LENT];
        assert_eq!(self.file.write_at(&written, 0).unwrap(), LENT);
        let mut read = vec![0; LENT];
        assert_eq!(self.file.read_at(&mut read, 0).unwrap(), LENT);
        assert!(read == written, "other bytes than were written");
    }
}

/// Lets peers act all the time, on one processor and then on the other one, until some of their connections have moved.
fn peers_that_moved<P: Send>(
    setup: &Setup,
    processors: &[CpuSet; 2],
    begin: impl Fn(usize) -> P + Sync,
    act: impl Fn(&mut P, usize) + Sync,
) -> Vec<P> {
    let (watcher, over) = (setup.client(), AtomicBool::new(false));
    let run = |number: usize| {
        let mut peer = begin(number);
        // Connections are distributed to the cores in turn, so on each processor are some of both.
        for processor in processors.iter().cycle().skip(number / 2) {
            sched_setaffinity(None, processor).unwrap();
            (0..ACTS).for_each(|which| act(&mut peer, which));
            if over.load(Ordering::Relaxed) {
                break;
            }
        }
        peer
    };
    let run = &run;
    std::thread::scope(|scope| {
        let peers: Vec<_> = (0..PEERS).map(|number| scope.spawn(move || run(number))).collect();
        let have_moved = || counter(&watcher, "lanes_moved") >= MOVES;
        let outcome = catch_unwind(AssertUnwindSafe(|| eventually("some have moved", have_moved)));
        over.store(true, Ordering::Relaxed);
        outcome.unwrap_or_else(|cause| resume_unwind(cause));
        peers.into_iter().map(|peer| peer.join().unwrap()).collect()
    })
}

#[test]
fn who_moves_keeps_files_and_locks_and_is_found_again() {
    let Some(processors) = processors() else {
        return skipped("connections that move between cores: there is one processor");
    };
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = setup(engine);
        // They keep nobody from moving to their core.
        let _idle = [(); IDLE].map(|()| greeted_on(0, setup.port(), &hello()));
        let begin = |number: usize| Peer::new(setup.port(), &name(number));
        let mut peers = peers_that_moved(&setup, &processors, begin, |peer, _| peer.write());
        let client = setup.client();
        let root = client.attach(b"mem").unwrap();
        let (mut stranger, _) = Raw::greeted(setup.port());
        let attached = ask(&mut stranger, 1, &[Request::Attach { name: b"mem" }]).unwrap();
        for (number, peer) in peers.iter_mut().enumerate() {
            let name = name(number);
            assert_written(&root, &name, peer.written);

            let open = Request::Open { base: attached, flags: 2, mode: 0, path: &name };
            let sequence = 2 + 4 * number as u32;
            let handle = ask(&mut stranger, sequence, &[open]).unwrap();
            let mut lock = |more| {
                let (family, kind) = (lock::FLOCK, lock::EXCLUSIVE);
                let (start, length) = (0, 0);
                let lock = Request::Lock { handle, owner: 0, family, kind, wait: 0, start, length };
                ask(&mut stranger, sequence + more, &[lock])
            };
            assert_eq!(lock(1), Err(Errno::EAGAIN), "{number} has lost its lock");
            drop(peer.return_again(setup.port()));
            peer.write();
            assert_eq!(lock(2), Err(Errno::EAGAIN), "{number} has lost its lock on its way");
            peer.ask(&[Request::Close { handle: peer.handle }]).unwrap();
            lock(3).unwrap();
        }
    }
}

#[test]
fn who_moves_and_does_not_wait_for_answers_appends_each_record_once() {
    let Some(processors) = processors() else {
        return skipped("connections that move between cores: there is one processor");
    };
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = setup(engine);
        let port = setup.port();
        let begin = |number: usize| Peer::new(port, &name(number));
        let act = |peer: &mut Peer, which| peer.append((which % HURRY == 0).then_some(port));
        let peers = peers_that_moved(&setup, &processors, begin, act);
        let client = setup.client();
        let root = client.attach(b"mem").unwrap();
        for (number, peer) in peers.iter().enumerate() {
            assert_written(&root, &name(number), peer.written);
        }
        drop(peers);
        eventually("the connections have ended", || counter(&client, "lanes") == 1);
    }
}

#[test]
fn who_says_where_it_runs_moves_with_what_it_has_on_loan() {
    let Some(processors) = processors() else {
        return skipped("connections that move between cores: there is one processor");
    };
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        for kind in [1, 2] {
            let setup = setup(engine);
            let transport = &setup.transports[kind];
            let begin = |number: usize| Teller::new(transport, &name(number));
            let act = |peer: &mut Teller, which| peer.write_and_read(which as u8);
            let peers = peers_that_moved(&setup, &processors, begin, act);
            let stranger = setup.client();
            let is_shm = matches!(transport, Transport::Shm(_));
            assert_eq!(counter(&stranger, "replies_lent") > 0, is_shm);
            let root = stranger.attach(b"mem").unwrap();
            for (number, peer) in peers.into_iter().enumerate() {
                let file = root.open(&name(number), 2, 0).unwrap();
                assert_eq!(file.lock(&LOCK, false), Err(Errno::EAGAIN.into()), "{number}");
                peer.write_and_read(0);
                let Teller { client, file: theirs } = peer;
                drop(theirs);
                drop(client);
                eventually("its lock is free", || file.lock(&LOCK, false).is_ok());
            }
            eventually("all loans are over", || counter(&stranger, "bytes_on_loan") == 0);
        }
    }
}

/// The core was idle when it began what it hangs in, and nobody knows yet that it does.
#[test]
fn a_core_that_hangs_attracts_nobody() {
    if processors().is_none() {
        return skipped("connections that move between cores: there is one processor");
    }
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("socket");
    let store = Brittle::default();
    let gate = store.gate.clone();
    let mut config = config_of(store, Address::parse("tcp://127.0.0.1:0").unwrap(), 2);
    config.exports.push(Export::new("mem", ExportKind::Memory(64 << 20)));
    config.listen.push(Address::Unix(socket.clone()));
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP address") };
    let mut stuck = peer_on(1, address.port(), &hello());
    let base = ask(&mut stuck, 1, &[Request::Attach { name: b"b" }]).unwrap();
    let transport = Transport::Shm(socket);
    let peers: Vec<_> = (0..PEERS).map(|n| Teller::new(&transport, &name(n))).collect();
    std::thread::scope(|scope| {
        for peer in &peers {
            scope.spawn(|| (0..ACTS).for_each(|_| peer.write_and_read(1)));
        }
    });
    let closed = gate.lock.lock().unwrap();
    stuck.send(&request(0, 2, &[Request::Stat { base, flags: 0, path: b"stuck" }], 0));
    eventually("the core hangs", || gate.knocks.load(Ordering::Relaxed) > 0);
    let moved = || counter_in(&server.statistics_json(), "lanes_moved");
    let (before, over, acts) = (moved(), AtomicBool::new(false), AtomicU64::new(0));
    let attracted = std::thread::scope(|scope| {
        for peer in &peers {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    peer.write_and_read(2);
                    acts.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let have_acted = || acts.load(Ordering::Relaxed) > (PEERS * ACTS) as u64;
        let outcome = catch_unwind(AssertUnwindSafe(|| eventually("others go on", have_acted)));
        let attracted = moved() - before;
        over.store(true, Ordering::Relaxed);
        drop(closed);
        outcome.map(|()| attracted).unwrap_or_else(|cause| resume_unwind(cause))
    });
    assert!(attracted <= 1, "{attracted} connections were handed over to it");
}
