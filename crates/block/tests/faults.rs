//! Causes one fault at every place where the engine waits for a device: transfers that move less than asked
//! for, are interrupted, or fail. Each request is answered once, with the right data or an error, and all
//! memory is released.
#![allow(clippy::unwrap_used)] // a test should say where it fails

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};
use std::time::Instant;
use towline_block::{Disk, Driver, Engine, How, Limits, Output, OwnerKey, Piece, Work};
use towline_mem::{Pool, PoolBuffer};
use towline_store::block::{CacheMode, FileDisk, MemoryDisk};
use towline_store::{BlockStore, Direction, Extent, Geometry, Place, ZeroHow};

const SIZE: u64 = 256 * 1024;
const FRAGMENT: usize = 8192;
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOSPC: i32 = 28;
const ECANCELED: i32 = 125;

/// A file that never answers at once, so that all work goes through the driver.
#[derive(Debug)]
struct Waits(Arc<FileDisk>);

impl BlockStore for Waits {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn locate(&self, offset: u64, length: u64, direction: Direction) -> Option<Place> {
        // Some offsets have no place, so that both ways are used.
        let none = (offset / FRAGMENT as u64) % 5 == 4;
        if none { None } else { self.0.locate(offset, length, direction) }
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.0.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.0.zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.trim(offset, length)
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.cache(offset, length)
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.0.extents(offset, length, tell)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Only this many bytes are moved.
    Short(usize),
    /// No bytes are moved, as at the end of a file.
    Nothing,
    Errno(i32),
}

/// Does the work when told to; the piece of work with the given number fails.
struct Faulty {
    work: Vec<(u64, Work)>,
    begun: usize,
    fault: Option<(usize, Fault)>,
    numbers: BTreeMap<u64, usize>,
}

impl Driver for Faulty {
    fn begin(&mut self, token: u64, _: &Arc<Disk>, work: Work) {
        self.numbers.insert(token, self.begun);
        self.begun += 1;
        self.work.push((token, work));
    }
}

impl Faulty {
    /// Does one piece of work and returns the result for the engine.
    fn turn(&mut self) -> Option<(u64, io::Result<usize>, PoolBuffer)> {
        // The newest first, so that what lands is never the next in order.
        let (token, work) = self.work.pop()?;
        let number = self.numbers.remove(&token)?;
        let fault = self.fault.filter(|(at, _)| *at == number).map(|(_, fault)| fault);
        match work {
            Work::Transfer { place, mut buffer, direction, .. } => {
                let result = match fault {
                    Some(Fault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
                    Some(Fault::Nothing) => Ok(0),
                    other => {
                        let most = match other {
                            Some(Fault::Short(most)) => most,
                            _ => usize::MAX,
                        };
                        let length = (place.length as usize).min(most);
                        let file = File::from(place.file.try_clone().unwrap());
                        match direction {
                            Direction::Read => {
                                file.read_at(&mut buffer.bytes_mut()[..length], place.offset)
                            }
                            Direction::Write => {
                                file.write_at(&buffer.bytes()[..length], place.offset)
                            }
                        }
                    }
                };
                Some((token, result, buffer))
            }
            Work::Call(call) => {
                let (result, buffer) = call();
                let result = match fault {
                    Some(Fault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
                    _ => result,
                };
                Some((token, result, buffer))
            }
            Work::At(..) | Work::Ask(_) => panic!("nothing was asked"),
        }
    }
}

/// The contents before, and the data written.
static CONTENTS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    [0, 31].map(|seed| (0..SIZE).map(|at| (at / 512 * 13 + at * 7 + seed) as u8 | 1).collect())
});

fn contents(which: usize, range: Range<u64>) -> &'static [u8] {
    &CONTENTS[which][range.start as usize..range.end as usize]
}

/// The outcome of a request.
#[derive(Debug, Default)]
struct Outcome {
    error: Option<i32>,
    over: bool,
    covered: u64,
}

struct World {
    engine: Engine<usize>,
    owner: OwnerKey,
    disk: Arc<Disk>,
    pools: [Arc<Pool>; 2],
    driver: Faulty,
    outcomes: Vec<Outcome>,
}

impl World {
    fn new(file: &File, path: &std::path::Path, fault: Option<(usize, Fault)>) -> Self {
        file.write_all_at(contents(0, 0..SIZE), 0).unwrap();
        let store = FileDisk::open(path, CacheMode::Cached, false).unwrap();
        let pools = [Pool::new(FRAGMENT, 8), Pool::new(512, 4)];
        let [fragments, small] = pools.clone();
        let mut engine = Engine::new(Limits { fragments, small, owner_bytes_max: 1 << 20 });
        Self {
            owner: engine.add_owner(),
            engine,
            disk: Arc::new(Disk::new("disk", "", Arc::new(Waits(store)), false)),
            pools,
            driver: Faulty { work: Vec::new(), begun: 0, fault, numbers: BTreeMap::new() },
            outcomes: Vec::new(),
        }
    }

    fn begin(&mut self) -> usize {
        self.outcomes.push(Outcome::default());
        self.outcomes.len() - 1
    }

    /// Works until everything is reported. Reads return the contents before or, if `written`, also the data
    /// written.
    fn run(&mut self, written: bool) {
        for _ in 0..100_000 {
            self.engine.pump(&mut self.driver);
            while let Some(output) = self.engine.next_output() {
                let (tag, over) = match output {
                    Output::Piece { tag, offset, piece: Piece::Data(bytes), last, .. } => {
                        let bytes = bytes.to_vec().unwrap();
                        let [before, after] = [0, 1]
                            .map(|which| contents(which, offset..offset + bytes.len() as u64));
                        if bytes != before {
                            assert!(written, "wrong bytes from {offset} on");
                            for (at, byte) in bytes.iter().enumerate() {
                                let right = *byte == before[at] || *byte == after[at];
                                assert!(right, "byte {}", offset + at as u64);
                            }
                        }
                        self.outcomes[tag].covered += bytes.len() as u64;
                        (tag, last.is_some())
                    }
                    Output::Failed { tag, error, last, .. } => {
                        self.outcomes[tag].error = error.raw_os_error();
                        (tag, last.is_some())
                    }
                    Output::Done { tag, result, .. } => {
                        self.outcomes[tag].error = result.err().and_then(|e| e.raw_os_error());
                        (tag, true)
                    }
                    other => panic!("{other:?}"),
                };
                assert!(!self.outcomes[tag].over, "request {tag} was over already");
                self.outcomes[tag].over |= over;
            }
            self.engine.set_unsent(self.owner, 0);
            match self.driver.turn() {
                Some((token, result, buffer)) => {
                    self.engine.finished(token, result, buffer, &mut self.driver);
                }
                None if self.engine.has_work() => {}
                None => return,
            }
        }
        panic!("it does not come to an end");
    }

    fn write(&mut self, range: Range<u64>, durable: bool) -> usize {
        let tag = self.begin();
        let (owner, disk) = (self.owner, self.disk.clone());
        let now = Instant::now();
        let key = self.engine.write(owner, tag, &disk, range.clone(), durable, now).unwrap();
        let mut at = range.start;
        while at < range.end {
            let Ok((mut buffer, length)) = self.engine.room(key) else {
                self.run(true);
                continue;
            };
            buffer.bytes_mut()[..length].copy_from_slice(contents(1, at..at + length as u64));
            at += length as u64;
            self.engine.filled(key, buffer, length, &mut self.driver);
        }
        tag
    }
}

/// Does reads and writes of all kinds with this fault among them. Returns false if there was less work than
/// that.
fn script(file: &tempfile::NamedTempFile, fault: (usize, Fault)) -> bool {
    let what = format!("{fault:?}");
    let mut world = World::new(file.as_file(), file.path(), Some(fault));
    let reads = [
        (0..100_000u64, How::Pieces),
        (5..30_000, How::Ordered),
        (4096..4096 + 8192, How::Whole),
        (50_000..120_000, How::Ordered),
    ];
    for (range, how) in reads.clone() {
        let tag = world.begin();
        let (owner, disk) = (world.owner, world.disk.clone());
        world.engine.read(owner, tag, &disk, range, how, Instant::now());
    }
    world.run(false);
    let soft = world.write(100..60_000, false);
    let hard = world.write(70_000..110_000, true);
    let small = world.write(120_000..120_100, false);
    world.run(true);
    let (owner, disk) = (world.owner, world.disk.clone());
    let last = world.begin();
    world.engine.read(owner, last, &disk, 0..SIZE, How::Pieces, Instant::now());
    world.run(true);

    let harmless = matches!(fault.1, Fault::Short(_) | Fault::Errno(EINTR | EAGAIN | ECANCELED));
    let failed: Vec<usize> =
        (0..world.outcomes.len()).filter(|tag| world.outcomes[*tag].error.is_some()).collect();
    assert!(world.outcomes.iter().all(|outcome| outcome.over), "{what}: {:?}", world.outcomes);
    let happened = world.driver.begun > fault.0;
    if harmless || !happened {
        assert_eq!(failed, [0; 0], "{what}");
    } else {
        assert!(failed.len() <= 1, "{what}: one fault fails one request: {failed:?}");
    }
    for tag in &failed {
        let expected = match fault.1 {
            Fault::Errno(errno) => errno,
            _ => EIO,
        };
        assert_eq!(world.outcomes[*tag].error, Some(expected), "{what}");
    }
    for (tag, (range, _)) in reads.iter().enumerate().filter(|(tag, _)| !failed.contains(tag)) {
        assert_eq!(world.outcomes[tag].covered, range.end - range.start, "{what}: read {tag}");
    }
    // Without space nothing was written that could be lost.
    let lost = failed.contains(&hard) && fault.1 != Fault::Errno(ENOSPC);
    assert_eq!(world.disk.has_failed(), lost, "{what}: a durable write failed");
    // Writes answered without an error are in the file.
    let mut bytes = vec![0; SIZE as usize];
    file.as_file().read_exact_at(&mut bytes, 0).unwrap();
    for (tag, range) in [(soft, 100..60_000), (hard, 70_000..110_000), (small, 120_000..120_100)] {
        let there = bytes[range.start as usize..range.end as usize] == *contents(1, range);
        assert!(there || failed.contains(&tag), "{what}: write {tag}");
    }
    assert!(bytes[120_100..] == *contents(0, 120_100..SIZE), "{what}: beyond them");
    assert_eq!(world.engine.requests_of(world.owner), 0, "{what}");
    assert!(world.pools.iter().all(|pool| pool.in_use().0 == 0), "{what}: memory is back");
    happened
}

#[test]
fn a_fault_at_every_place() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let faults = [
        Fault::Short(1),
        Fault::Short(512),
        Fault::Short(4096),
        Fault::Nothing,
        Fault::Errno(EINTR),
        Fault::Errno(EAGAIN),
        Fault::Errno(ECANCELED),
        Fault::Errno(EIO),
        Fault::Errno(ENOSPC),
    ];
    for fault in faults {
        let places = (0..).take_while(|place| script(&file, (*place, fault))).count();
        assert!((40..1000).contains(&places), "{places} places");
    }
}

/// Otherwise whoever shortens a disk that is in use would make it read-only for all its clients.
#[test]
fn a_durable_write_beyond_the_end_of_a_shortened_disk_loses_nothing() {
    let store = MemoryDisk::new("disk", SIZE).unwrap();
    let disk = Arc::new(Disk::new("disk", "", store, false));
    let (fragments, small) = (Pool::new(FRAGMENT, 8), Pool::new(512, 4));
    let mut engine = Engine::new(Limits { fragments, small, owner_bytes_max: 1 << 20 });
    let owner = engine.add_owner();
    let mut driver = Faulty { work: Vec::new(), begun: 0, fault: None, numbers: BTreeMap::new() };
    let range = SIZE - 4096..SIZE;
    let key = engine.write(owner, 0, &disk, range, true, Instant::now()).unwrap();
    let (buffer, length) = engine.room(key).unwrap();
    disk.resize(SIZE / 2).unwrap();
    engine.filled(key, buffer, length, &mut driver);
    let Some(Output::Done { result, .. }) = engine.next_output() else { panic!("it is over") };
    assert_eq!(result.unwrap_err().raw_os_error(), Some(EIO));
    assert!(!disk.has_failed(), "there was nothing that could be lost");
}

/// Its payload may take long to arrive. The disk would be as long again as the write reaches.
#[test]
fn a_write_that_was_under_way_does_not_make_a_shortened_file_long_again() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(SIZE).unwrap();
    for durable in [false, true] {
        let store = FileDisk::open(file.path(), CacheMode::Cached, false).unwrap();
        store.resize(SIZE).unwrap();
        let disk = Arc::new(Disk::new("disk", "", store, false));
        let (fragments, small) = (Pool::new(FRAGMENT, 8), Pool::new(512, 4));
        let limits = Limits { fragments: fragments.clone(), small, owner_bytes_max: 1 << 20 };
        let mut engine = Engine::new(limits);
        let owner = engine.add_owner();
        let mut driver =
            Faulty { work: Vec::new(), begun: 0, fault: None, numbers: BTreeMap::new() };
        let range = SIZE - FRAGMENT as u64..SIZE;
        let key = engine.write(owner, 0, &disk, range, durable, Instant::now()).unwrap();
        let (buffer, length) = engine.room(key).unwrap();
        disk.resize(SIZE / 2).unwrap();
        engine.filled(key, buffer, length, &mut driver);
        let Some(Output::Done { result, .. }) = engine.next_output() else { panic!("it is over") };
        assert_eq!(result.unwrap_err().raw_os_error(), Some(EIO));
        assert_eq!(file.as_file().metadata().unwrap().len(), SIZE / 2);
        assert!(!disk.has_failed());
        assert_eq!(fragments.in_use().0, 0);
    }
}
