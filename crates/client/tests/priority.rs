//! Clients of low priority: others go first, all make progress, and requests that wait for their
//! turn are not lost.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, EXCLUSIVE, Random, pattern, proxy::Proxy, setup};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use towline_client::{Client, Error, File, Lock, Options, Priority, Transport};
use towline_net::address::Address;
use towline_server::{
    Config, DiskExport, DiskKind, EngineWish, Export, ExportKind, OwnStore, Server,
};
use towline_store::block::MemoryDisk;
use towline_store::{BlockStore, Extent, Geometry, Now, ZeroHow};
use towline_wire::Errno;
use towline_wire::request::lock;

fn low() -> Options {
    let mut options = Options::default();
    options.priority = Priority::Low;
    options
}

/// A disk whose reads stop the core: each read reports this, and waits until it may go on.
struct Stopper {
    memory: Arc<MemoryDisk>,
    stopped: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl std::fmt::Debug for Stopper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stopper")
    }
}

impl BlockStore for Stopper {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
        self.stopped.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        Now::Done(self.read(offset, target))
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.memory.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.memory.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.memory.zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.memory.trim(offset, length)
    }

    fn cache(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.memory.extents(offset, length, tell)
    }
}

/// Requests that arrive for one turn of a core are begun in order of priority, not of arrival.
/// Inode numbers show the order.
#[test]
fn what_came_together_is_begun_by_priority() {
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let ((stopped, has_stopped), (go_on, may_go_on)) = (channel(), channel());
        let memory = MemoryDisk::new("stopper", 1 << 20).unwrap();
        let stopper = Stopper { memory, stopped, go_on: Mutex::new(may_go_on) };
        let mem = Export::new("m", ExportKind::Memory(1 << 24));
        let config = Config {
            exports: vec![mem],
            disks: vec![DiskExport::new("d", DiskKind::Own(OwnStore(Arc::new(stopper))))],
            listen: vec![Address::Unix(socket.clone())],
            cores: 1,
            engine,
            ..Config::default()
        };
        let server = Server::start(&config).unwrap();
        let connect = |options| Client::connect(&Transport::Unix(socket.clone()), options).unwrap();
        let (normal, slow) = (connect(Options::default()), connect(low()));
        let (root, slow_root) = (normal.attach(b"m").unwrap(), slow.attach(b"m").unwrap());
        let disk = connect(Options::default()).disk(b"d").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| disk.read_at(&mut [0; 512], 0).unwrap());
            has_stopped.recv().unwrap();
            let create = |root: &File, name: String| {
                root.start_create(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap()
            };
            let mut started: Vec<_> =
                (0..2).map(|number| create(&slow_root, format!("slow{number}"))).collect();
            started.extend((0..20).map(|number| create(&root, format!("{number}"))));
            go_on.send(()).unwrap();
            for operation in started {
                operation.wait().unwrap();
            }
        });
        let inode = |name: &str| root.stat_path(name.as_bytes(), true).unwrap().inode;
        let others: Vec<u64> = (0..20).map(|number| inode(&number.to_string())).collect();
        assert!(others.is_sorted(), "{others:?}");
        assert!(others[19] < inode("slow0") && inode("slow0") < inode("slow1"));
        server.stop();
    }
}

/// While others make requests without end, a client of low priority completes everything.
#[test]
fn all_get_on() {
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = setup(engine);
        for transport in &setup.transports {
            let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
            let connect = |options| Client::connect(transport, options).unwrap();
            std::thread::scope(|scope| {
                for number in 0..4u8 {
                    let (root, stop, asked) =
                        (connect(Options::default()).attach(b"mem").unwrap(), &stop, &asked);
                    scope.spawn(move || {
                        let data = pattern(100_000, number);
                        let file = root.open(&[b'0' + number], CREATE, 0o600).unwrap();
                        while !stop.load(Ordering::Relaxed) {
                            file.write_all_at(&data, 0).unwrap();
                            assert_eq!(file.read_at(&mut vec![0; 100_000], 0).unwrap(), 100_000);
                            asked.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                // One client on each core, whichever that is.
                let clients: Vec<Client> = (0..2).map(|_| connect(low())).collect();
                for (number, client) in clients.iter().enumerate() {
                    for export in [&b"mem"[..], b"dir"] {
                        use_file(&client.attach(export).unwrap(), number as u8);
                    }
                }
                let before = asked.load(Ordering::Relaxed);
                common::eventually("others get on", || asked.load(Ordering::Relaxed) > before);
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
}

fn use_file(root: &File, number: u8) {
    let name = [b'l', b'0' + number];
    let data = pattern(1_500_000, number);
    for _ in 0..3 {
        let file = root.open(&name, CREATE | EXCLUSIVE, 0o600).unwrap();
        file.write_all_at(&data, 0).unwrap();
        let mut back = vec![0; data.len()];
        let mut at = 0;
        while at < back.len() {
            at += file.read_at(&mut back[at..], at as u64).unwrap();
        }
        assert!(back == data);
        file.close().unwrap();
        root.unlink(&name, false).unwrap();
    }
}

/// A request that waits for its turn when its connection is cut is sent again, and done once.
#[test]
fn what_waits_is_not_lost() {
    let setup = setup(EngineWish::Automatic);
    let proxy = Proxy::start(setup.port(), 7, 40_000);
    let transport = Transport::Tcp("127.0.0.1".into(), proxy.port);
    // Even the first greeting may be cut.
    let client = (0..100).find_map(|_| Client::connect(&transport, low()).ok()).unwrap();
    let root = client.attach(b"mem").unwrap();
    let other = setup.client().attach(b"mem").unwrap();
    let mut random = Random::new(1);
    for round in 0..60 {
        let names: Vec<String> = (0..20).map(|number| format!("{round}-{number}")).collect();
        let started: Vec<_> = names
            .iter()
            .map(|name| root.start_create(name.as_bytes(), CREATE | EXCLUSIVE, 0o600).unwrap())
            .collect();
        other.stat_path(b".", true).unwrap();
        for operation in started {
            operation.wait().unwrap();
        }
        let length = random.below(100_000) as usize;
        let file = root.open(names[0].as_bytes(), 2, 0).unwrap();
        file.append(&pattern(length, round)).unwrap();
        assert_eq!(file.stat().unwrap().size, length as u64);
    }
    assert!(proxy.cuts.load(Ordering::Relaxed) > 10);
    assert_eq!(other.list_all(false).unwrap().len(), 1200);
}

/// A lock request can be given up, whether its turn has come or not.
#[test]
fn a_lock_that_waits_is_given_up() {
    let setup = setup(EngineWish::Automatic);
    let root = setup.client().attach(b"mem").unwrap();
    let held = root.open(b"f", CREATE, 0o600).unwrap();
    let whole =
        Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
    held.lock(&whole, false).unwrap();
    let slow = Client::connect(&setup.transports[0], low()).unwrap().attach(b"mem").unwrap();
    let file = slow.open(b"f", 2, 0).unwrap();
    for _ in 0..100 {
        let waits = file.start_lock(&whole).unwrap();
        waits.cancel();
        match waits.wait() {
            Err(Error::Errno(errno)) => assert_eq!(errno, Errno::EINTR),
            other => panic!("{other:?}"),
        }
    }
}
