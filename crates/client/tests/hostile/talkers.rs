//! Peers that never stop sending: others still get their turn.

use super::common::{CREATE, Raw, message, pattern};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;
use towline_client::{Client, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, EngineWish, Export, ExportKind, Server};
use towline_wire::{Header, Kind};

/// What a peer may say before others must have been served.
const TALK_BYTES: u64 = 4 << 30;

/// Checks that a server of one core serves others while a peer sends these bytes again and again.
fn others_are_served_beside(what: &str, engine: EngineWish, bytes: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(64 << 20))],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 1,
        engine,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let (tell, told) = channel();
    let (mut talker, _) = Raw::greeted(address.port());
    std::thread::scope(|scope| {
        let client = Client::connect(&Transport::Unix(socket), Options::default()).unwrap();
        let root = client.attach(b"mem").unwrap();
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) && talker.0.write_all(bytes).is_ok() {
                sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
        });
        // Begin only when the talker talks.
        while sent.load(Ordering::Relaxed) < TALK_BYTES / 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        scope.spawn(move || {
            for round in 0..20 {
                let data = pattern(100_000, round);
                root.write_path(b"honest", CREATE, 0o600, &data).unwrap();
                let mut back = vec![0; 100_001];
                assert_eq!(root.read_path(b"honest", 0, &mut back).unwrap(), data.len());
            }
            tell.send(()).unwrap();
        });
        // Counted in bytes, not in seconds: a machine with much to do slows down both.
        let mut served = false;
        while !served && sent.load(Ordering::Relaxed) < TALK_BYTES {
            served = told.recv_timeout(Duration::from_millis(10)).is_ok();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(served, "{what}, {engine:?}: nobody else is served ({TALK_BYTES} bytes taken)");
    });
    server.stop();
}

#[test]
fn who_never_stops_talking_does_not_starve_others() {
    let cancel = Header::new(Kind::Cancel, 7, 1).to_bytes().repeat(8192);
    let release = Header::new(Kind::Release, 7, 1).to_bytes().repeat(8192);
    let processor = Header::new(Kind::Processor, 0, 0).to_bytes().repeat(8192);
    let data = message(Header::new(Kind::Data, 7, 1), &[], &vec![7; 256 << 10]).repeat(4);
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        others_are_served_beside("cancel", engine, &cancel);
        others_are_served_beside("release", engine, &release);
        others_are_served_beside("processor", engine, &processor);
        others_are_served_beside("data", engine, &data);
    }
}
