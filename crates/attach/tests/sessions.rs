//! Several queues of a device, each with a session of its own with a Towline server.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_attach::{Backend, BackendOptions, Operation, Origin, Request};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, OwnStore, Server};
use towline_store::{BlockStore, Continuity, Extent, Geometry, ZeroHow};

const LENGTH: u32 = 512;
/// Longer than any request takes.
const LONG: Duration = Duration::from_secs(20);

/// A disk of which only this boot of its machine counts.
#[derive(Debug)]
struct Booted(u64);

impl BlockStore for Booted {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: 1 << 20,
            block_minimum: 512,
            block_preferred: 4096,
            rotational: false,
            read_only: false,
        }
    }

    fn continuity(&self) -> Option<Continuity> {
        Some(Continuity { identity: 1, epoch: self.0 })
    }

    fn read(&self, _: u64, target: &mut [u8]) -> io::Result<()> {
        target.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, _: u64, _: u64, _: ZeroHow) -> io::Result<()> {
        Ok(())
    }

    fn trim(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn cache(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn extents(&self, _: u64, length: u64, tell: &mut dyn FnMut(Extent) -> bool) -> io::Result<()> {
        tell(Extent { length, hole: false, zero: false });
        Ok(())
    }
}

struct World {
    directory: TempDir,
    server: Option<Server>,
}

impl World {
    fn new() -> Self {
        let mut world = Self { directory: tempfile::tempdir().unwrap(), server: None };
        world.boot(1);
        world
    }

    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("socket")
    }

    /// The server's machine starts, again.
    fn boot(&mut self, boot: u64) {
        drop(self.server.take());
        let disk = DiskExport::new("disk", DiskKind::Own(OwnStore(Arc::new(Booted(boot)))));
        let config = Config {
            disks: vec![disk],
            listen: vec![Address::Unix(self.socket())],
            cores: 1,
            ..Config::default()
        };
        self.server = Some(Server::start(&config).unwrap());
    }

    /// Connects the queues of a device.
    fn queues<const COUNT: usize>(&self, options: &BackendOptions) -> [Box<dyn Backend>; COUNT] {
        let url = format!("towline+unix:///disk?socket={}", self.socket().display());
        let origin = Origin::parse(&url).unwrap();
        std::array::from_fn(|_| origin.backend(options, mpsc::channel().0).unwrap())
    }
}

/// Carries out a request on a queue, and returns its result.
fn ask(queue: &mut dyn Backend, operation: Operation) -> Result<(), i32> {
    let length = if operation == Operation::Flush { 0 } else { LENGTH };
    let buffer = vec![0; length as usize];
    queue.begin(Request { tag: 0, operation, offset: 0, length, buffer });
    let end = Instant::now() + LONG;
    loop {
        queue.turn();
        if let Some(finished) = queue.finished() {
            return finished.result;
        }
        assert!(Instant::now() < end, "{operation:?} does not finish");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const WRITE: Operation = Operation::Write { durable: false };

#[test]
fn a_flush_on_one_queue_finds_that_writes_on_another_were_lost() {
    let mut world = World::new();
    let [mut first, mut second] = world.queues(&BackendOptions { depth: 1, ..Default::default() });
    ask(&mut *first, WRITE).unwrap();
    world.boot(2);
    assert_eq!(ask(&mut *second, Operation::Flush), Err(libc::EIO));
    assert_eq!(ask(&mut *first, Operation::Read), Err(libc::EIO));
}

#[test]
fn what_was_written_on_one_queue_and_flushed_on_another_is_not_lost() {
    let mut world = World::new();
    let [mut first, mut second] = world.queues(&BackendOptions { depth: 1, ..Default::default() });
    ask(&mut *first, WRITE).unwrap();
    ask(&mut *second, Operation::Flush).unwrap();
    world.boot(2);
    for queue in [&mut first, &mut second] {
        ask(&mut **queue, Operation::Read).unwrap();
        ask(&mut **queue, WRITE).unwrap();
    }
}

/// Options of a queue that soon gives up a server that is away.
fn impatient() -> BackendOptions {
    let patience = Some(Duration::from_millis(20));
    BackendOptions { patience, depth: 1, ..BackendOptions::default() }
}

/// What the server's machine has lost is noticed, as if the queue had waited.
#[test]
fn a_queue_goes_on_when_a_server_that_was_given_up_is_back() {
    for (boot, then) in [(1, Ok(())), (2, Err(libc::EIO))] {
        let mut world = World::new();
        let [mut queue] = world.queues(&impatient());
        ask(&mut *queue, WRITE).unwrap();
        drop(world.server.take());
        ask(&mut *queue, Operation::Read).unwrap_err();
        world.boot(boot);
        let end = Instant::now() + LONG;
        while queue.interest().is_none() {
            assert!(Instant::now() < end, "the server is not tried again");
            let _ = ask(&mut *queue, Operation::Read); // one of them comes when it may be tried
        }
        assert_eq!(ask(&mut *queue, Operation::Read), then);
    }
}

#[test]
fn a_queue_whose_server_was_given_up_waits_for_the_kernel_only() {
    let mut world = World::new();
    let [mut queue] = world.queues(&impatient());
    assert!(queue.interest().is_some());
    drop(world.server.take());
    let end = Instant::now() + LONG;
    while queue.interest().is_some() {
        assert!(Instant::now() < end, "the descriptor of a dead session is waited for");
        queue.turn();
    }
    ask(&mut *queue, Operation::Read).unwrap_err();
    assert!(queue.interest().is_none() && queue.deadline().is_none());
}
