//! Cut connections, killed servers, and failing machines.

use crate::common::proxy::Proxy;
use crate::common::{Process, Random, eventually, pattern, seed};
use crate::setup::{Model, SIZE, disks, own};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Disk, Durability, Errno, Error, Group, Options, Transport};
use towline_mem::Aggregate;
use towline_server::{DiskExport, DiskKind, OwnStore};
use towline_store::{BlockStore, Continuity, Direction, Extent, Geometry, Now, Place, ZeroHow};

fn connect(port: u16) -> Client {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        match Client::connect(&transport, Options::default()) {
            Ok(client) => return client,
            Err(error) => assert!(Instant::now() < limit, "not connected within 60 s: {error}"),
        }
    }
}

#[test]
fn cut_connections_lose_and_double_nothing() {
    let (disks, seed) = (disks(), seed());
    let mut random = Random::new(seed);
    let proxy = Proxy::start(disks.port(), seed ^ 1, 1 << 20);
    for kind in ["memory", "delay", "cached"] {
        let client = connect(proxy.port);
        // The connection may be cut while the disk is being opened: that request is repeated, too.
        let disk = client.disk(kind.as_bytes()).unwrap().with_checksums(random.below(2) == 0);
        let mut model = Model::new();
        let limit = Instant::now() + Duration::from_secs(60);
        let enough = proxy.cuts.load(Ordering::Relaxed) + 10;
        while proxy.cuts.load(Ordering::Relaxed) < enough && Instant::now() < limit {
            model.step(&disk, &mut random, kind);
        }
        assert!(proxy.cuts.load(Ordering::Relaxed) >= enough, "{kind}: not cut often enough");
    }
    // Many at once.
    const BLOCK: usize = 64 << 10;
    for kind in ["delay", "memory"] {
        proxy.calm.store(false, Ordering::Relaxed);
        let client = connect(proxy.port);
        let disk = client.disk(kind.as_bytes()).unwrap();
        for round in 0..3u8 {
            let mut group = Group::new();
            for number in 0..SIZE / BLOCK {
                let data = pattern(BLOCK, round.wrapping_mul(64) ^ number as u8);
                let written = disk.start_write_at(data, (number * BLOCK) as u64, false).unwrap();
                group.add(written, number as u64);
            }
            while let Some((_, written)) = group.wait_any() {
                written.unwrap();
            }
            disk.flush().unwrap();
        }
        proxy.calm.store(true, Ordering::Relaxed);
        let mut all = vec![0; SIZE];
        disk.read_at(&mut all, 0).unwrap();
        for (number, block) in all.chunks(BLOCK).enumerate() {
            let expected = pattern(BLOCK, 2u8.wrapping_mul(64) ^ number as u8);
            assert!(block == expected, "{kind}: block {number}");
        }
    }
}

#[test]
fn a_killed_server_loses_nothing_that_its_kernel_has() {
    let mut random = Random::new(seed());
    for keeps_state in [false, true] {
        let directory = TempDir::new().unwrap();
        let image = std::fs::File::create(directory.path().join("disk")).unwrap();
        image.set_len(SIZE as u64).unwrap();
        let mut server = Process::start_with(directory.path(), keeps_state, Duration::ZERO);
        let client = Client::connect(&server.tcp(), Options::default()).unwrap();
        let disk = client.disk(b"file").unwrap();
        disk.zero(0, SIZE as u64, towline_client::ZeroHow::default()).unwrap();
        let volatile = client.disk(b"memory").unwrap();
        volatile.write_at(&[1; 4096], 0).unwrap();
        let mut model = Model::new();
        const BLOCK: usize = 96 << 10;
        for round in 0..3 {
            for _ in 0..10 {
                model.step(&disk, &mut random, "before");
            }
            let mut group = Group::new();
            for number in 0..20 {
                let (at, data) = (number * BLOCK, pattern(BLOCK, random.next() as u8));
                model.bytes[at..at + BLOCK].copy_from_slice(&data);
                group.add(disk.start_write_at(data, at as u64, false).unwrap(), number as u64);
            }
            group.wait_any().unwrap().1.unwrap();
            server.kill();
            server.restart();
            while let Some((number, written)) = group.wait_any() {
                written.unwrap_or_else(|error| panic!("round {round}, write {number}: {error}"));
            }
            disk.flush().unwrap();
            let mut all = vec![0; SIZE];
            disk.read_at(&mut all, 0).unwrap();
            assert!(all == model.bytes, "round {round}, state {keeps_state}");
        }
        // The memory disk is gone, and its zeroes are not passed off as what was written.
        let gone = volatile.read_at(&mut [0; 4096], 0).unwrap_err();
        assert_eq!(gone.errno(), Errno::ESTALE);
        drop(volatile);
        client.disk(b"memory").unwrap().read_at(&mut [0; 4096], 0).unwrap();
    }
}

/// A disk with a cache that a failure of its machine empties.
struct Fragile {
    identity: u64,
    epoch: u64,
    durable: Arc<Mutex<Vec<u8>>>,
    cached: Mutex<Vec<u8>>,
    /// The next flush or durable write fails, and a flush drops what it should write.
    fails: AtomicBool,
    /// Flushes wait while this is locked.
    gate: Mutex<()>,
    /// Flushes that have begun.
    flushes: AtomicU32,
}

impl std::fmt::Debug for Fragile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fragile")
    }
}

impl Fragile {
    fn new() -> Arc<Self> {
        Self::with(1, 1, Arc::new(Mutex::new(vec![0; SIZE])))
    }

    fn with(identity: u64, epoch: u64, durable: Arc<Mutex<Vec<u8>>>) -> Arc<Self> {
        let cached = Mutex::new(durable.lock().clone());
        let fails = AtomicBool::new(false);
        let (gate, flushes) = (Mutex::default(), AtomicU32::new(0));
        Arc::new(Self { identity, epoch, durable, cached, fails, gate, flushes })
    }

    /// The disk after its machine has failed and started again.
    fn after_failure(&self) -> Arc<Self> {
        Self::with(self.identity, self.epoch + 1, self.durable.clone())
    }

    /// The disk after a restart of the server, on a machine that kept running.
    fn after_restart(&self) -> Arc<Self> {
        let next = Self::with(self.identity, self.epoch, self.durable.clone());
        next.cached.lock().copy_from_slice(&self.cached.lock());
        next
    }
}

impl BlockStore for Fragile {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE as u64,
            block_minimum: 512,
            block_preferred: 4096,
            rotational: false,
            read_only: false,
        }
    }

    fn continuity(&self) -> Option<Continuity> {
        Some(Continuity { identity: self.identity, epoch: self.epoch })
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Now {
        Now::WouldBlock
    }

    fn hole_now(&self, _: u64, _: u64) -> u64 {
        0
    }

    fn lend(&self, _: u64, _: u64) -> Option<Aggregate> {
        None
    }

    fn write_now(&self, _: u64, _: &[u8], _: bool) -> Now {
        Now::WouldBlock
    }

    fn locate(&self, _: u64, _: u64, _: Direction) -> Option<Place> {
        None
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let from = offset as usize;
        target.copy_from_slice(&self.cached.lock()[from..from + target.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        if durable && self.fails.swap(false, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let range = offset as usize..offset as usize + data.len();
        self.cached.lock()[range.clone()].copy_from_slice(data);
        if durable {
            self.durable.lock()[range].copy_from_slice(data);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let _open = self.gate.lock();
        if self.fails.swap(false, Ordering::Relaxed) {
            self.cached.lock().copy_from_slice(&self.durable.lock());
            return Err(io::Error::from_raw_os_error(5));
        }
        self.durable.lock().copy_from_slice(&self.cached.lock());
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, _: ZeroHow) -> io::Result<()> {
        self.write(offset, &vec![0; length as usize], false)
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

/// Writes, restarts the server, and returns the results of the next calls.
fn after(
    write: impl Fn(&towline_client::Disk),
    next: impl Fn(&Fragile) -> Arc<Fragile>,
) -> (Result<u8, Error>, Result<(), Error>) {
    let store = Fragile::new();
    let mut disks = own(store.clone());
    let client = disks.client();
    let disk = client.disk(b"own").unwrap();
    write(&disk);
    disks.restart(next(&store));
    let mut byte = [9; 512];
    let read = disk.read_at(&mut byte, 0).map(|()| byte[0]);
    (read, disk.flush())
}

#[test]
fn unflushed_writes_that_are_lost_are_told() {
    let write = |disk: &towline_client::Disk| disk.write_at(&[1; 512], 0).unwrap();
    let lost = Err(Error::WritesLost { disk: "own".into() });
    assert_eq!(after(write, Fragile::after_failure), (lost.clone().map(|()| 0), lost.clone()));
    // Not if the machine kept running,
    assert_eq!(after(write, Fragile::after_restart), (Ok(1), Ok(())));
    // nor after a flush,
    let flushed = |disk: &towline_client::Disk| {
        write(disk);
        disk.flush().unwrap();
    };
    assert_eq!(after(flushed, Fragile::after_failure), (Ok(1), Ok(())));
    // nor after a durable write, nor if nothing was written.
    let durable = |disk: &towline_client::Disk| disk.write_durable_at(&[1; 512], 0).unwrap();
    assert_eq!(after(durable, Fragile::after_failure), (Ok(1), Ok(())));
    assert_eq!(after(|_| {}, Fragile::after_failure), (Ok(0), Ok(())));
    // A change after the flush counts.
    let again = |disk: &towline_client::Disk| {
        flushed(disk);
        disk.trim(0, 512).unwrap();
    };
    assert_eq!(after(again, Fragile::after_failure).1, lost);
    // Another disk of the same name is not taken for it.
    let other = |old: &Fragile| Fragile::with(2, old.epoch, old.durable.clone());
    let stale = Err(Error::from(Errno::ESTALE));
    assert_eq!(after(flushed, other), (stale.clone().map(|()| 0), stale));
}

/// Uses a disk in two sessions, and returns what each finds after its server's machine failed.
fn both_after(
    use_it: impl Fn(&Disk, &Disk),
    durability: &Durability,
) -> (Result<(), Error>, Result<(), Error>) {
    let store = Fragile::new();
    let mut disks = own(store.clone());
    let (first, second) = (disks.client(), disks.client());
    let one = first.disk_sharing(b"own", durability).unwrap();
    let other = second.disk_sharing(b"own", durability).unwrap();
    use_it(&one, &other);
    disks.restart(store.after_failure());
    // The other session learns first.
    let flushed = other.flush();
    (one.read_at(&mut [9; 512], 0), flushed)
}

#[test]
fn sessions_that_share_a_disk_lose_writes_together() {
    let lost = Err(Error::WritesLost { disk: "own".into() });
    let both_lost = (lost.clone(), lost);
    let write = |disk: &Disk| disk.write_at(&[1; 512], 0).unwrap();
    assert_eq!(both_after(|one, _| write(one), &Durability::default()), both_lost);
    // A flush covers the writes of both,
    let flushed = |one: &Disk, other: &Disk| {
        write(one);
        other.flush().unwrap();
    };
    assert_eq!(both_after(flushed, &Durability::default()), (Ok(()), Ok(())));
    // but not those that were answered after it was sent.
    let too_late = |one: &Disk, other: &Disk| {
        write(one);
        let flush = other.start_flush().unwrap();
        write(one);
        flush.wait().unwrap();
    };
    assert_eq!(both_after(too_late, &Durability::default()), both_lost);
    // What somebody else wrote before counts until it is flushed.
    assert_eq!(both_after(|_, _| (), &Durability::inherited(1)), both_lost);
    let settled = |_: &Disk, other: &Disk| other.flush().unwrap();
    assert_eq!(both_after(settled, &Durability::inherited(1)), (Ok(()), Ok(())));
}

#[test]
fn a_disk_is_not_shared_with_another_one_or_after_a_loss() {
    let store = Fragile::new();
    let mut disks = own(store.clone());
    let lost = Error::WritesLost { disk: "own".into() };
    let inherited = Durability::inherited(2);
    for _ in 0..2 {
        assert_eq!(disks.client().disk_sharing(b"own", &inherited).err(), Some(lost.clone()));
    }
    let (durability, client) = (Durability::default(), disks.client());
    let _disk = client.disk_sharing(b"own", &durability).unwrap();
    // Another disk takes its place, which the first session has not seen yet.
    disks.restart(Fragile::with(2, 1, store.durable.clone()));
    let opened = disks.client().disk_sharing(b"own", &durability);
    assert_eq!(opened.err(), Some(Errno::ESTALE.into()));
}

#[test]
fn who_asks_for_the_properties_of_a_disk_learns_of_a_loss() {
    let store = Fragile::new();
    let disks = own(store.clone());
    let (client, durability) = (disks.client(), Durability::default());
    let disk = client.disk_sharing(b"own", &durability).unwrap();
    disk.write_at(&[1; 512], 0).unwrap();
    store.fails.store(true, Ordering::Relaxed);
    assert_eq!(disk.flush().unwrap_err().errno(), Errno::EIO);
    // The operator has the server forgive the failure.
    let export = DiskExport::new("own", DiskKind::Own(OwnStore(store)));
    disks.server.as_ref().unwrap().replace(&[], &[export]).unwrap();
    let (other, lost) = (disks.client(), Error::WritesLost { disk: "own".into() });
    assert_eq!(other.disk(b"own").unwrap().refresh().err(), None, "it wrote nothing");
    assert_eq!(disk.refresh(), Err(lost.clone()));
    assert_eq!(other.disk_sharing(b"own", &durability).err(), Some(lost));
}

#[test]
fn a_flush_that_failed_is_told_after_a_restart_too() {
    let store = Fragile::new();
    let mut disks = own(store.clone());
    let (writer, other) = (disks.client(), disks.client());
    let (mine, theirs) = (writer.disk(b"own").unwrap(), other.disk(b"own").unwrap());
    mine.write_at(&[1; 512], 0).unwrap();
    store.fails.store(true, Ordering::Relaxed);
    assert_eq!(theirs.flush().unwrap_err().errno(), Errno::EIO);
    // The new server's flushes succeed, and it offers the disk for writing.
    for _ in 0..2 {
        disks.restart(store.after_restart());
        assert_eq!(mine.flush(), Err(Error::WritesLost { disk: "own".into() }));
        // A client that had written nothing goes on, and loses nothing.
        theirs.write_at(&[2; 512], 512).unwrap();
    }
    theirs.flush().unwrap();
}

#[test]
fn a_disk_that_refuses_changes_since_a_flush_failed_says_so() {
    let store = Fragile::new();
    let disks = own(store.clone());
    let (writer, client) = (disks.client(), disks.client());
    let (mine, theirs) = (writer.disk(b"own").unwrap(), client.disk(b"own").unwrap());
    let told = |expected: bool| {
        let info = theirs.refresh().unwrap();
        assert_eq!((info.read_only, info.failed), (expected, expected));
        assert_eq!(client.disk(b"own").unwrap().info().read_only, expected, "opened later");
        let listed = client.disks().unwrap();
        let (_, text) = listed.iter().find(|(name, _)| name == "own").unwrap();
        assert_eq!(text.contains("since a flush failed"), expected, "{text}");
    };
    told(false);
    mine.write_at(&[1; 512], 0).unwrap();
    store.fails.store(true, Ordering::Relaxed);
    assert_eq!(mine.flush().unwrap_err().errno(), Errno::EIO);
    told(true);
    disks.reload(store);
    told(false);
}

/// Its success says nothing about the changes from before.
#[test]
fn a_flush_that_waits_while_the_disk_fails_and_is_forgiven() {
    let store = Fragile::new();
    let disks = own(store.clone());
    let (writer, other) = (disks.client(), disks.client());
    let (mine, theirs) = (writer.disk(b"own").unwrap(), other.disk(b"own").unwrap());
    mine.write_at(&[1; 512], 0).unwrap();
    let closed = store.gate.lock();
    let flush = std::thread::spawn(move || mine.flush());
    eventually("the flush waits", || store.flushes.load(Ordering::Relaxed) == 1);
    store.fails.store(true, Ordering::Relaxed);
    assert_eq!(theirs.write_durable_at(&[2; 512], 512).unwrap_err().errno(), Errno::EIO);
    disks.reload(store.clone());
    drop(closed);
    assert_eq!(flush.join().unwrap(), Err(Error::WritesLost { disk: "own".into() }));
}

/// The write is answered before the machine fails, and the answer is taken when the client is back.
#[test]
fn a_write_that_was_answered_and_not_taken_is_told_to_be_lost() {
    let store = Fragile::new();
    let mut disks = own(store.clone());
    let client = disks.client();
    let disk = client.disk(b"own").unwrap();
    let write = disk.start_write_at(vec![1; 512], 0, false).unwrap();
    eventually("it is answered", || {
        client.progress();
        client.is_idle()
    });
    disks.restart(store.after_failure());
    client.disks().unwrap(); // over the next lane
    let lost = Err(Error::WritesLost { disk: "own".into() });
    if let Err(error) = write.wait() {
        assert_eq!(Err(error), lost);
    }
    assert_eq!(disk.read_at(&mut [9; 512], 0), lost);
}
