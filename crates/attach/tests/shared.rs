//! Several connections for the same device: they go on only with a server that says that they see the same data.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use support::{DEFAULT, HAS_FLAGS, handshake, words};
use tempfile::TempDir;
use towline_attach::nbd::{Caller, Source};
use towline_attach::{BackendOptions, Finished, Operation, Origin, Request};

const CAN_MULTI_CONN: u16 = 1 << 8;
/// Longer than the server is away.
const PATIENCE: Duration = Duration::from_secs(30);
const LENGTH: u32 = 4;
const DISC: u8 = 2;

/// A connection of the scripted server.
struct Connection {
    /// The server announces that several connections see the same data.
    announces: bool,
    /// What is read, or nothing: then the server hangs up when it should be read.
    byte: Option<u8>,
}

/// The server hangs up, is back without the announcement, and then with it.
const RESTARTED: [Connection; 3] = [
    Connection { announces: true, byte: None },
    Connection { announces: false, byte: Some(2) },
    Connection { announces: true, byte: Some(3) },
];

struct World {
    source: Source,
    served: JoinHandle<Vec<usize>>,
    _directory: TempDir,
}

impl World {
    /// Serves these connections, one after the other; yields the number of requests on each.
    fn new(connections: &'static [Connection]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let source = Source::parse(&format!("nbd+unix:///?socket={}", path.display())).unwrap();
        let listener = UnixListener::bind(path).unwrap();
        let served = std::thread::spawn(move || {
            connections.iter().map(|connection| serve(&listener, connection)).collect()
        });
        Self { source, served, _directory: directory }
    }
}

/// Returns the number of requests until one of the two hung up.
fn serve(listener: &UnixListener, connection: &Connection) -> usize {
    let (mut stream, _) = listener.accept().unwrap();
    let flags = if connection.announces { HAS_FLAGS | CAN_MULTI_CONN } else { HAS_FLAGS };
    handshake(&mut stream, 1 << 20, flags).unwrap();
    let mut requests = 0;
    let mut request = [0; 28];
    while stream.read_exact(&mut request).is_ok() && request[7] != DISC {
        requests += 1;
        let cookie = &request[8..16];
        let reply = match (request[7], connection.byte) {
            // One extent for whoever asks for extents.
            (7, _) => {
                [words(&[0x668e_33ef, 1 << 16 | 5]), cookie.to_vec(), words(&[12, 9, 1 << 20, 0])]
            }
            (_, Some(byte)) => {
                [words(&[0x6744_6698, 0]), cookie.to_vec(), vec![byte; LENGTH as usize]]
            }
            (_, None) => break,
        }
        .concat();
        stream.write_all(&reply).unwrap();
    }
    requests
}

/// Reads through a lane of a device, and returns what was read.
fn read(source: Source, shared: bool) -> Vec<u8> {
    let origin = Origin::Nbd(source);
    let options = BackendOptions {
        several: shared,
        patience: Some(PATIENCE),
        depth: 1,
        ..BackendOptions::default()
    };
    let mut lane = origin.backend(&options, mpsc::channel().0).unwrap();
    let buffer = vec![0; LENGTH as usize];
    lane.begin(Request { tag: 0, operation: Operation::Read, offset: 0, length: LENGTH, buffer });
    loop {
        lane.turn();
        if let Some(Finished { result, buffer, .. }) = lane.finished() {
            result.unwrap();
            return buffer;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn requests_wait_for_a_server_that_announces_it_again() {
    let world = World::new(&RESTARTED);
    assert_eq!(read(world.source, true), [3; LENGTH as usize]);
    assert_eq!(world.served.join().unwrap(), [1, 0, 1]);
}

#[test]
fn a_single_connection_needs_no_announcement() {
    let world = World::new(&RESTARTED[..2]);
    assert_eq!(read(world.source, false), [2; LENGTH as usize]);
    assert_eq!(world.served.join().unwrap(), [1, 1]);
}

#[test]
fn a_device_does_not_begin_without_the_announcement() {
    let world = World::new(&RESTARTED[1..2]);
    let origin = Origin::Nbd(world.source);
    let options = BackendOptions { several: true, depth: 1, ..BackendOptions::default() };
    let refused = origin.backend(&options, mpsc::channel().0).err().unwrap().to_string();
    let expected = "the server does not announce that several connections see the same data";
    assert!(refused.starts_with(&format!("{origin}: {expected}")), "{refused}");
    assert_eq!(world.served.join().unwrap(), [0]);
}

#[test]
fn a_disk_that_was_asked_for_by_the_empty_name_is_found_again_by_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a socket");
    let listener = UnixListener::bind(&path).unwrap();
    let served = std::thread::spawn(move || {
        [(); 2].map(|()| handshake(&mut listener.accept().unwrap().0, 1 << 20, HAS_FLAGS).unwrap())
    });
    let url = format!("nbd+unix:///?socket={}", path.display());
    let found = Origin::parse(&url).unwrap().look().unwrap();
    assert!(found.origin.to_string().starts_with("nbd+unix:///the%20first%20one?socket="));
    assert_eq!(found.origin.look().unwrap().origin, found.origin);
    assert_eq!(served.join().unwrap(), ["", DEFAULT]);
}

/// Otherwise servers log a lost connection: one in five seconds for each attached disk, which is asked for its size.
#[test]
fn whoever_needs_a_connection_no_longer_takes_leave() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let served = std::thread::spawn(move || {
        [(); 2].map(|()| {
            let (mut stream, _) = listener.accept().unwrap();
            handshake(&mut stream, 1 << 20, HAS_FLAGS).unwrap();
            let mut said = Vec::new();
            stream.read_to_end(&mut said).unwrap();
            (said.len(), said.get(7).copied())
        })
    });
    let source = Source::parse(&format!("nbd+unix:///?socket={}", path.display())).unwrap();
    Origin::Nbd(source.clone()).look().unwrap();
    drop(Caller::connect(&source, None).unwrap());
    assert_eq!(served.join().unwrap(), [(28, Some(DISC)); 2]);
}

/// Callers know of each other only later.
#[test]
fn calls_that_may_be_shared_wait_as_well() {
    let world = World::new(&RESTARTED);
    let caller = Caller::connect(&world.source, Some(PATIENCE)).unwrap();
    assert_eq!(caller.read(vec![0; LENGTH as usize], 0), Ok(vec![3; LENGTH as usize]));
    drop(caller);
    assert_eq!(world.served.join().unwrap(), [2, 0, 1]);
}
