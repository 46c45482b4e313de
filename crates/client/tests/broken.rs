//! A faulty back end: a request that panics in the server fails, and no other request with it.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::brittle::{Brittle, answer, ask, config, config_of, peer_on};
use common::{Raw, ShmRaw, eventually, hello, hello_message, message, request};
use std::io::Read;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use towline_client::{Client, Error, File, Lock, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, Export, ExportKind, OwnStore, Server};
use towline_store::FileStore;
use towline_store::block::CacheMode;
use towline_wire::event;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, lock, open_flag, sync_kind, valid};
use towline_wire::{Errno, Header, Hello, Kind, Reply, Request, Timestamp, Welcome};

/// Starts a server over TCP; returns it with its address.
fn served(config: impl FnOnce(Address) -> Config) -> (Server, SocketAddr) {
    let server = Server::start(&config(Address::parse("tcp://127.0.0.1:0").unwrap())).unwrap();
    let Some(Address::Tcp(at)) = server.addresses().first().cloned() else { panic!() };
    (server, at)
}

/// Does everything that a client can do to a file of the brittle store.
fn use_file(root: &File, name: &[u8]) -> [Result<(), Error>; 6] {
    let file = root.open(name, 2, 0).unwrap();
    let long = vec![1; 3 << 20];
    [
        root.stat_path(name, true).map(drop),
        root.make_directory(name, 0o700).map(drop),
        file.read_at(&mut [0; 7], 0).map(drop),
        file.write_at(b"short", 0).map(drop),
        file.write_at(&long, 0).map(drop),
        file.sync(sync_kind::DATA),
    ]
}

/// The server does not lose one core and hang with its clients: all cores end, and the clients find
/// the next server.
#[test]
fn a_server_that_panics_outside_of_requests_ends_and_clients_go_on_with_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let listen = || Address::Unix(path.clone());
    // The failing core is the first one, which accepts connections, and then another one.
    for failing in 0..2 {
        let server = Server::start(&config(false, listen(), 2)).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        server.when_failed(move |why| tell.send(why.to_owned()).unwrap());
        let transport = Transport::Unix(path.clone());
        // Connections are distributed to the cores in turn.
        let connect = |_| Client::connect(&transport, Options::default()).unwrap();
        let clients: Vec<Client> = (0..2).map(connect).collect();
        let roots: Vec<File> = clients.iter().map(|c| c.attach(b"b").unwrap()).collect();
        std::thread::scope(|scope| {
            let file = roots[failing].open(b"clinging", 0, 0).unwrap();
            scope.spawn(move || drop(file.close()));
            let why = told.recv().unwrap();
            assert!(why.contains(&format!("core {failing} failed because of a bug")), "{why}");
            server.stop();
            let next = Server::start(&config(false, listen(), 2)).unwrap();
            for client in &clients {
                let root = client.attach(b"b").unwrap();
                root.stat_path(b"sound", true).unwrap();
            }
            next.stop();
        });
    }
}

#[test]
fn a_request_that_panics_takes_no_other_along() {
    for may_hang in [false, true] {
        let (server, at) = served(|listen| config(may_hang, listen, 1));
        let transport = Transport::Tcp(at.ip().to_string(), at.port());
        let connect = || Client::connect(&transport, Options::default()).unwrap();
        let (bystander, client) = (connect(), connect());
        let (watched, root) = (bystander.attach(b"b").unwrap(), client.attach(b"b").unwrap());
        // More often than there are threads that may block.
        for round in 0..20 {
            for (call, result) in use_file(&root, b"broken").into_iter().enumerate() {
                let error = result.expect_err("it was answered although it panicked");
                assert_eq!(error.errno(), Errno::EIO, "round {round}, call {call}: {error}");
                // Nobody knows whether a change was made.
                let changes = [1, 3, 4].contains(&call);
                assert_eq!(matches!(error, Error::Unknown), changes, "call {call}: {error}");
            }
        }
        for root in [&watched, &root] {
            for result in use_file(root, b"sound") {
                result.unwrap();
            }
        }
        server.stop();
    }
}

/// Like two threads of a program of a `towline run`, of which one finds that the server has restarted.
#[test]
fn what_is_locked_while_others_are_reopened_is_remembered() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let store = Brittle { may_hang: true, ..Brittle::default() };
    let gate = store.gate.clone();
    let server = Server::start(&config_of(store, Address::Unix(path.clone()), 1)).unwrap();
    let client = Client::connect(&Transport::Unix(path), Options::default()).unwrap();
    let root = client.attach(b"b").unwrap();
    let _stuck = root.open(b"stuck", 0, 0).unwrap();
    let whole = Lock { family: lock::FLOCK, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
    let closed = gate.lock.lock().unwrap();
    std::thread::scope(|scope| {
        let reopening = scope.spawn(|| client.reclaim());
        eventually("a file is being reopened", || gate.knocks.load(Ordering::Relaxed) > 0);
        let file = root.open(b"sound", 0, 0).unwrap();
        file.lock(&whole, false).unwrap();
        drop(closed);
        reopening.join().unwrap().unwrap();
        assert!(client.has_locked(file.handle()), "it would be lost with the next server");
    });
    server.stop();
}

/// They stay in the listen queue meanwhile.
#[test]
fn who_comes_while_every_core_waits_for_a_device_is_served_afterwards() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let store = Brittle::default();
    let gate = store.gate.clone();
    let server = Server::start(&config_of(store, Address::Unix(path.clone()), 1)).unwrap();
    let transport = Transport::Unix(path);
    let connect = || Client::connect(&transport, Options::default());
    let root = connect().unwrap().attach(b"b").unwrap();
    std::thread::scope(|scope| {
        let closed = gate.lock.lock().unwrap();
        scope.spawn(|| root.stat_path(b"stuck", true).unwrap());
        eventually("the core is known to wait", || {
            server.statistics_json().contains("\"cores_waiting\":1")
        });
        let newcomer = scope.spawn(connect);
        // Connections are now accepted by another thread, if at all, twenty times a second.
        std::thread::sleep(Duration::from_millis(500));
        assert!(!newcomer.is_finished(), "{:?}", newcomer.join().unwrap().err());
        drop(closed);
        newcomer.join().unwrap().unwrap().attach(b"b").unwrap();
    });
    server.stop();
}

/// Writes that wait for a device, and whatever else waits for it, are carried out by threads that may block.
#[test]
fn who_writes_to_a_slow_device_keeps_nobody_else_waiting() {
    const DATA_SYNC: u32 = 0o10_000;
    const FULL_SYNC: u32 = 0o4_010_000;
    const DIRECT: u32 = 0o40_000;
    let store = Brittle::default();
    let gate = store.gate.clone();
    let (server, at) = served(|listen| config_of(store, listen, 1));
    let transport = Transport::Tcp(at.ip().to_string(), at.port());
    let client = Client::connect(&transport, Options::default()).unwrap();
    let root = client.attach(b"b").unwrap();
    let (mut bystander, _) = Raw::greeted(at.port());
    let base = ask(&mut bystander, 1, &[Request::Attach { name: b"b" }]).unwrap();
    let mut sequence = 1;
    for flags in [DATA_SYNC, FULL_SYNC, DIRECT] {
        let file = root.open(b"stuck", 2 | flags, 0).unwrap();
        // A fragment, several, and a write whose first fragment is sent ahead.
        for bytes in [100 << 10, 3 << 20, 1 << 20] {
            let (closed, knocks) = (gate.lock.lock().unwrap(), gate.knocks.load(Ordering::Relaxed));
            std::thread::scope(|scope| {
                let writing = scope.spawn(|| file.write_at(&vec![1; bytes], 7));
                let waits = || gate.knocks.load(Ordering::Relaxed) > knocks;
                eventually("the write waits for the device", waits);
                sequence += 1;
                let stat = Request::Stat { base, flags: 0, path: b"sound" };
                let answer = ask(&mut bystander, sequence, &[stat]);
                drop(closed);
                assert_eq!(answer, Ok(0));
                assert_eq!(writing.join().unwrap().unwrap(), bytes);
            });
        }
    }
    server.stop();
}

/// Whoever removes, replaces or shortens a large file waits until it is freed.
#[test]
fn who_frees_a_large_file_keeps_nobody_else_waiting() {
    let store = Brittle::default();
    let gate = store.gate.clone();
    let (server, at) = served(|listen| config_of(store, listen, 1));
    let (mut client, _) = Raw::greeted(at.port());
    let (mut bystander, _) = Raw::greeted(at.port());
    let attach = [Request::Attach { name: b"b" }];
    let base = ask(&mut client, 1, &attach).unwrap();
    let base_too = ask(&mut bystander, 1, &attach).unwrap();
    let (path, flags, mode) = (b"large", 0, 0);
    let resize = |size| Request::SetAttr {
        base,
        flags,
        valid: valid::SIZE,
        mode,
        uid: 0,
        gid: 0,
        size,
        accessed: Timestamp::default(),
        modified: Timestamp::default(),
        path,
    };
    let freeing = [
        Request::Unlink { base, flags, path },
        Request::Rename { base, flags, path: b"sound", new_base: base, new_path: path },
        resize(0),
        Request::Open { base, flags: 2 | open_flag::TRUNCATE, mode, path },
    ];
    let stat = |base| Request::Stat { base, flags: 0, path: b"sound" };
    for (sequence, freeing) in (2..).zip(freeing) {
        let (closed, knocks) = (gate.lock.lock().unwrap(), gate.knocks.load(Ordering::Relaxed));
        // What follows in the request waits, too.
        client.send(&request(0, sequence, &[freeing, stat(base)], 0));
        eventually("it is being freed", || gate.knocks.load(Ordering::Relaxed) > knocks);
        assert_eq!(ask(&mut bystander, sequence, &[stat(base_too)]), Ok(0), "{freeing:?}");
        drop(closed);
        let (_, body) = client.receive().unwrap();
        let results = parse_results(&body).unwrap();
        assert!(matches!(results[..], [_, Reply::Attributes { .. }]), "{freeing:?}: {results:?}");
    }
    server.stop();
}

/// The reply that announced the pages has left by then: the lane ends, and the client asks again
/// and gets the error.
#[test]
fn pages_that_cannot_be_sent_fail_their_read_and_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let server = Server::start(&config(false, Address::Unix(path.clone()), 1)).unwrap();
    let client = Client::connect(&Transport::Unix(path), Options::default()).unwrap();
    let root = client.attach(b"b").unwrap();
    let (torn, sound) = (root.open(b"torn", 0, 0).unwrap(), root.open(b"sound", 0, 0).unwrap());
    for _ in 0..3 {
        assert_eq!(torn.read_at(&mut [0; 7], 0).unwrap_err().errno(), Errno::EISDIR);
        let mut bytes = [0; 7];
        assert_eq!(sound.read_at(&mut bytes, 0).unwrap(), 7);
        assert_eq!(&bytes, b"content");
    }
    server.stop();
}

/// Opens a file for writing what cannot be stored, with the first request; returns its handle.
fn open_unstored(raw: &mut Raw) -> u64 {
    let attach = Request::Attach { name: b"b" };
    let open = Request::Open { base: CURRENT, flags: 2, mode: 0, path: b"unstored" };
    ask(raw, 1, &[attach, open]).unwrap()
}

/// Sends the second request of a session three times, on a new connection after each answer, which is this error.
/// Returns the last connection.
fn fails_though_the_answer_is_lost(
    mut raw: Raw,
    (port, welcome): (u16, &Welcome),
    asked: Request<'_>,
    wanted: u16,
) -> Raw {
    for _ in 0..3 {
        raw.send(&request(0, 2, &[asked], 0));
        let (_, body) = raw.receive().unwrap();
        let results = parse_results(&body).unwrap();
        assert!(matches!(results[..], [Reply::Failed { errno }] if errno == wanted), "{results:?}");
        raw = Raw::connect(port);
        let session = Hello { session: welcome.session, secret: welcome.secret, ..hello() };
        raw.send(&hello_message(&session));
        raw.receive().unwrap();
    }
    raw
}

/// The kernel reports lost data once. A client whose lane ends with that answer, and which asks
/// again, must get it as well.
#[test]
fn a_sync_that_failed_is_told_though_its_answer_was_lost() {
    let (server, at) = served(|listen| config(false, listen, 1));
    let (mut raw, welcome) = Raw::greeted(at.port());
    let handle = open_unstored(&mut raw);
    let sync = Request::Sync { handle, kind: sync_kind::DATA };
    raw = fails_though_the_answer_is_lost(raw, (at.port(), &welcome), sync, 5);
    // A new sync has nothing to report.
    raw.send(&request(0, 3, &[Request::Sync { handle, kind: sync_kind::DATA }], 0));
    let (_, body) = raw.receive().unwrap();
    assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Done {}]));
    server.stop();
}

/// Such as NFS says only when a file is closed that there was no space for what was written to it.
#[test]
fn a_close_tells_what_could_not_be_stored_though_its_answer_was_lost() {
    let (server, at) = served(|listen| config(true, listen, 1));
    let (mut raw, welcome) = Raw::greeted(at.port());
    let handle = open_unstored(&mut raw);
    let close = Request::Close { handle };
    raw = fails_though_the_answer_is_lost(raw, (at.port(), &welcome), close, 28);
    assert_eq!(ask(&mut raw, 3, &[Request::Close { handle }]), Err(Errno::EBADF), "it is closed");
    // What only reads has stored nothing.
    let root = ask(&mut raw, 4, &[Request::Attach { name: b"b" }]).unwrap();
    let open = |flags| Request::Open { base: root, flags, mode: 0, path: b"unstored" };
    let handle = ask(&mut raw, 5, &[open(0)]).unwrap();
    assert_eq!(ask(&mut raw, 6, &[Request::Close { handle }]), Ok(0));
    // Who asks before the close is told then.
    let handle = ask(&mut raw, 7, &[open(1)]).unwrap();
    let settle = Request::Sync { handle, kind: sync_kind::SETTLE };
    assert_eq!(ask(&mut raw, 8, &[settle]), Err(Errno::ENOSPC));
    assert_eq!(ask(&mut raw, 9, &[Request::Close { handle }]), Ok(0));
    server.stop();
}

/// Also if threads that may wait do everything, and a thread of the store reports the events.
#[test]
fn files_of_any_store_are_watched_as_far_as_it_can_tell() {
    for may_hang in [false, true] {
        let store = Brittle { may_hang, ..Brittle::default() };
        let witnesses = store.witnesses.clone();
        let (server, at) = served(|listen| config_of(store, listen, 1));
        let transport = Transport::Tcp(at.ip().to_string(), at.port());
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"b").unwrap();
        let [sound, broken] = [&b"sound"[..], b"broken"].map(|name| root.open(name, 0, 0).unwrap());
        assert_eq!(broken.watch(event::ALL).unwrap_err().errno(), Errno::EIO);
        assert_eq!(sound.watch(0).unwrap_err().errno(), Errno::EINVAL);
        assert!(witnesses.lock().unwrap().is_empty());
        sound.watch(event::MODIFY).unwrap();
        sound.watch(event::MODIFY | event::ATTRIB).unwrap();
        sound.watch(event::ATTRIB).unwrap();
        let watching = witnesses.lock().unwrap().clone();
        assert_eq!(watching.len(), 2);
        let handle = sound.handle();
        for round in 0..100 {
            let waits = client.start_events().unwrap();
            if round % 2 == 0 {
                // Once this is answered, the request for events waits.
                client.exports().unwrap();
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for witness in &watching {
                        witness.saw(event::MODIFY | event::ATTRIB | event::OPEN, 0, b"");
                    }
                });
            });
            let mut told = waits.wait().unwrap().events;
            while told.len() < 2 {
                told.extend(client.events().unwrap().events);
            }
            let told: Vec<_> = told.iter().map(|event| (event.handle, event.mask)).collect();
            assert_eq!(told, [(handle, event::MODIFY), (handle, event::ATTRIB)]);
        }
        watching[0].lost();
        assert!(client.events().unwrap().lost);
        witnesses.lock().unwrap().clear();
        drop(watching);
        server.stop();
    }
}

/// The thread that waits for the file system cannot be ended, and its process neither. What the server has claimed and
/// locked is needed by the next one.
#[test]
fn a_server_that_ends_while_a_file_system_hangs_lets_go_of_its_disks() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let store = Brittle { may_hang: true, ..Brittle::default() };
    let gate = store.gate.clone();
    let disk = DiskKind::File(file.path().to_owned(), CacheMode::Cached);
    let (server, at) = served(|listen| Config {
        disks: vec![DiskExport::new("d", disk)],
        ..config_of(store, listen, 1)
    });
    assert!(file.as_file().try_lock().is_err(), "the disk is served");
    let (mut raw, _) = Raw::greeted(at.port());
    let base = ask(&mut raw, 1, &[Request::Attach { name: b"b" }]).unwrap();
    let closed = gate.lock.lock().unwrap();
    raw.send(&request(0, 2, &[Request::Stat { base, flags: 0, path: b"stuck" }], 0));
    eventually("a thread waits", || gate.knocks.load(Ordering::Relaxed) > 0);
    server.stop();
    file.as_file().try_lock().unwrap();
    drop(closed);
}

/// Like a process of a `towline run`, which does not wait for its last closes: files left open
/// would take the places of others of the run.
#[test]
fn what_a_process_asked_for_before_it_ended_is_done_by_stores_that_may_hang() {
    let (server, at) = served(|listen| config(true, listen, 2));
    let mut options = Options::default();
    options.family = 0x5eed;
    let other = Client::connect(&Transport::Tcp("127.0.0.1".into(), at.port()), options).unwrap();
    let root = other.attach(b"b").unwrap();
    let files: Vec<File> = (0..5).map(|_| root.open(b"sound", 2, 0).unwrap()).collect();
    let mut raw = Raw::connect(at.port());
    raw.send(&hello_message(&Hello { family: 0x5eed, ..hello() }));
    raw.receive().unwrap();
    let close = |(slot, file): (usize, &File)| {
        request(slot as u16, 1, &[Request::Close { handle: file.handle() }], 0)
    };
    let mut messages: Vec<u8> = files.iter().enumerate().flat_map(close).collect();
    messages.extend_from_slice(&Header::new(Kind::Goodbye, 0, 0).to_bytes());
    raw.send(&messages);
    for file in files {
        let is_closed = |e: Error| e.errno() == Errno::EBADF;
        eventually("it is closed", || file.sync(sync_kind::DATA).is_err_and(is_closed));
        let _ = file.into_handle();
    }
    server.stop();
}

/// A member of a family closes a file, on one core, after another member has asked for a lock on it
/// and before the other core has taken that lock.
#[test]
fn a_lock_asked_for_while_its_file_is_closed_does_not_stay() {
    let (store, local) = (Brittle { may_hang: true, ..Brittle::default() }, Brittle::default());
    let (gate, core_gate) = (store.gate.clone(), local.gate.clone());
    let mut config = config_of(store, Address::parse("tcp://127.0.0.1:0").unwrap(), 2);
    let local = OwnStore(Arc::new(local) as Arc<dyn FileStore>);
    config.exports.push(Export::new("local", ExportKind::Own(local)));
    let server = Server::start(&config).unwrap();
    let Some(Address::Tcp(at)) = server.addresses().first().cloned() else { panic!() };
    let [mut locking, mut closing] =
        [0, 1].map(|core| peer_on(core, at.port(), &Hello { family: 0x5eed, ..hello() }));
    let mut blocking = peer_on(0, at.port(), &hello());
    let mut stranger = peer_on(1, at.port(), &hello());
    let attached = |peer: &mut Raw, name| ask(peer, 1, &[Request::Attach { name }]).unwrap();
    let (root, local) = (attached(&mut locking, b"b"), attached(&mut blocking, b"local"));
    let open = |base| Request::Open { base, flags: 2, mode: 0, path: b"sound" };
    let lock = |handle| Request::Lock {
        handle,
        owner: 0,
        family: lock::FLOCK,
        kind: lock::EXCLUSIVE,
        wait: 0,
        start: 0,
        length: 0,
    };
    let stuck = |base| Request::Stat { base, flags: 0, path: b"stuck" };
    let handle = ask(&mut locking, 2, &[open(root)]).unwrap();

    // A thread of the store runs the request up to the lock, while the core waits for a device.
    let (closed, core_closed) = (gate.lock.lock().unwrap(), core_gate.lock.lock().unwrap());
    locking.send(&request(0, 3, &[stuck(root), lock(handle)], 0));
    eventually("a thread has the request", || gate.knocks.load(Ordering::Relaxed) > 0);
    blocking.send(&request(0, 2, &[stuck(local)], 0));
    eventually("the core waits", || core_gate.knocks.load(Ordering::Relaxed) > 0);
    drop(closed);
    std::thread::sleep(Duration::from_millis(200));
    ask(&mut closing, 1, &[Request::Close { handle }]).unwrap();
    drop(core_closed);
    assert_eq!(answer(&mut locking), Err(Errno::EBADF));
    let root = attached(&mut stranger, b"b");
    let opened = ask(&mut stranger, 2, &[open(root)]).unwrap();
    assert_eq!(ask(&mut stranger, 3, &[lock(opened)]), Ok(0), "somebody has the lock");
    server.stop();
}

/// A request for a lock is given up while a thread of the store has it and nobody waits yet.
#[test]
fn a_lock_given_up_before_it_is_asked_for_is_not_waited_for() {
    let store = Brittle { may_hang: true, ..Brittle::default() };
    let gate = store.gate.clone();
    let (server, at) = served(|listen| config_of(store, listen, 1));
    let [(mut holder, _), (mut peer, _)] = [(); 2].map(|()| Raw::greeted(at.port()));
    let (kind, family, wait) = (lock::EXCLUSIVE, lock::FLOCK, lock::WAIT);
    let lock = |handle| Request::Lock { handle, owner: 0, family, kind, wait, start: 0, length: 0 };
    let open = |peer: &mut Raw| {
        let root = ask(peer, 1, &[Request::Attach { name: b"b" }]).unwrap();
        let open = Request::Open { base: root, flags: 2, mode: 0, path: b"sound" };
        (root, ask(peer, 2, &[open]).unwrap())
    };
    let (_, held) = open(&mut holder);
    ask(&mut holder, 3, &[lock(held)]).unwrap();
    let (root, handle) = open(&mut peer);
    let closed = gate.lock.lock().unwrap();
    let stuck = Request::Stat { base: root, flags: 0, path: b"stuck" };
    peer.send(&request(0, 3, &[stuck, lock(handle)], 0));
    eventually("a thread has the request", || gate.knocks.load(Ordering::Relaxed) > 0);
    peer.send(&Header::new(Kind::Cancel, 0, 3).to_bytes());
    // Once this is answered, the request is given up.
    peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
    assert_eq!(peer.receive().unwrap().0.slot, 1);
    drop(closed);
    assert_eq!(answer(&mut peer), Err(Errno::EINTR));
    server.stop();
}

/// Fills the ring of a peer with one request, and messages to which there is no answer.
fn ring_with(mut bytes: Vec<u8>) -> Vec<u8> {
    let cancel = Header::new(Kind::Cancel, 7, 1);
    let filling = vec![0; bytes.len().next_multiple_of(32) - bytes.len()];
    bytes.extend(message(cancel, &filling, &[]));
    let rest = (ShmRaw::RING_BYTES - bytes.len()) / 32;
    bytes.extend(cancel.to_bytes().repeat(rest));
    bytes
}

/// A peer over shared memory can go on after it has closed its socket. Here the store keeps it from
/// being slower than the server.
#[test]
fn a_peer_that_hangs_up_and_talks_on_is_thrown_out() {
    const ROUNDS_MAX: usize = (256 << 20) / ShmRaw::RING_BYTES;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let store = Brittle::default();
    let gate = store.gate.clone();
    let server = Server::start(&config_of(store, Address::Unix(path.clone()), 1)).unwrap();
    let peer = Arc::new(ShmRaw::greeted(&path));
    peer.send(&ring_with(request(0, 1, &[Request::Attach { name: b"b" }], 0)));
    let body = peer.answer();
    let Reply::Opened { handle, .. } = parse_results(&body).unwrap()[0] else { panic!("{body:?}") };
    let (talker, rounds) = (peer.clone(), AtomicUsize::new(0));
    *gate.bell.lock().unwrap() = Some(Box::new(move || {
        if rounds.fetch_add(1, Ordering::Relaxed) < ROUNDS_MAX {
            talker.send_again();
        }
    }));
    let stuck = Request::Stat { base: handle, flags: 0, path: b"stuck" };
    eventually("the ring is empty", || peer.unread() == 0);
    peer.send(&ring_with(request(1, 1, &[stuck], 0)));
    peer.socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&peer.socket).read(&mut [0; 64]).unwrap(), 0);
    let rounds = gate.knocks.load(Ordering::Relaxed);
    assert!((1..ROUNDS_MAX / 2).contains(&rounds), "the ring was read {rounds} times");
    server.stop();
}
