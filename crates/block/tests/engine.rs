//! Whatever the order in which fragments land, each read is reported completely, and ordered reads never mix.
#![allow(clippy::unwrap_used)] // a test should say where it fails

use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_block::{
    Changes, DataPath, Delivery, Disk, Driver, Engine, How, Limits, Output, Piece, Work,
};
use towline_mem::Pool;
use towline_store::BlockStore;
use towline_store::block::{DelayStore, ForeignDisk, MemoryDisk, StripeDisk};

const SIZE: u64 = 1 << 20;
const FRAGMENT: u64 = 16 * 1024;
const OWNER_FRAGMENTS: usize = 5;

/// Collects the work that the engine starts; the test decides when it is done.
#[derive(Default)]
struct Later(Vec<(u64, Work)>);

impl Driver for Later {
    fn begin(&mut self, token: u64, _: &Arc<Disk>, work: Work) {
        self.0.push((token, work));
    }
}

fn byte(at: u64) -> u8 {
    (at / 256 * 7 + at) as u8 | 1
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    from: u64,
    length: u64,
    ordered: bool,
    owner: usize,
}

fn asked() -> impl Strategy<Value = Asked> {
    let range = (0..SIZE - 200_000, 1..200_000u64);
    (range, 0..2usize).prop_map(|((from, length), owner)| {
        // A connection has one form of reply, as with NBD.
        Asked { from, length, ordered: owner == 0, owner }
    })
}

/// What was reported of one read.
struct Told {
    covered: Vec<bool>,
    over: bool,
}

fn check(
    reads: &[Asked],
    buffers: usize,
    delivery: Delivery,
    members: u32,
    may_hang: bool,
    mut choices: impl Iterator<Item = usize>,
) {
    let each = SIZE / u64::from(members);
    let all: Vec<Arc<dyn BlockStore>> = (0..members)
        .map(|_| -> Arc<dyn BlockStore> { MemoryDisk::new("test", each).unwrap() })
        .collect();
    let stripe = StripeDisk::new(all, 64 * 1024).unwrap();
    stripe.write(0, &(0..SIZE).map(byte).collect::<Vec<_>>(), false).unwrap();
    let store = DelayStore::new(stripe, Duration::ZERO, 0);
    let store: Arc<dyn BlockStore> = if may_hang { ForeignDisk::new(store) } else { store };
    let disk = Arc::new(Disk::new("test", "", store, false).delivered(delivery));
    let fragments = Pool::new(FRAGMENT as usize, buffers);
    let small = Pool::new(4096, 2);
    let limits = Limits {
        fragments: fragments.clone(),
        small,
        owner_bytes_max: OWNER_FRAGMENTS as u64 * FRAGMENT,
    };
    let mut engine: Engine<usize> = Engine::new(limits);
    let owners = [engine.add_owner(), engine.add_owner()];
    let mut told: Vec<Told> = Vec::new();
    for (tag, read) in reads.iter().enumerate() {
        let how = if read.ordered { How::Ordered } else { How::Pieces };
        let range = read.from..read.from + read.length;
        engine.read(owners[read.owner], tag, &disk, range, how, Instant::now());
        told.push(Told { covered: vec![false; read.length as usize], over: false });
    }
    let mut later = Later::default();
    let mut speaking = None;
    loop {
        engine.pump(&mut later);
        let held = fragments.in_use().0;
        assert!(
            delivery.serial || may_hang || held <= 2 * OWNER_FRAGMENTS,
            "two connections hold {held} fragments"
        );
        while let Some(output) = engine.next_output() {
            let Output::Piece { tag, offset, piece: Piece::Data(bytes), first, last } = output
            else {
                panic!("something failed")
            };
            let (read, told) = (reads[tag], &mut told[tag]);
            let bytes = bytes.to_vec().unwrap();
            for (at, got) in (offset..).zip(&bytes) {
                assert_eq!(*got, byte(at), "byte {at} of read {tag}");
                let place = &mut told.covered[(at - read.from) as usize];
                assert!(!std::mem::replace(place, true), "byte {at} came twice");
            }
            if read.ordered {
                assert_eq!(first, offset == read.from, "in order");
                assert_eq!(speaking.unwrap_or(tag), tag, "reads in order do not mix");
                speaking = last.is_none().then_some(tag);
            }
            assert!(!std::mem::replace(&mut told.over, last.is_some()), "told after its end");
        }
        for owner in owners {
            engine.set_unsent(owner, 0);
        }
        if engine.has_work() {
            continue;
        }
        if later.0.is_empty() {
            break;
        }
        let next = choices.next().unwrap_or(0) % later.0.len();
        let (token, Work::Call(call)) = later.0.swap_remove(next) else { panic!("no call") };
        let (result, buffer) = call();
        engine.finished(token, result, buffer, &mut later);
    }
    for (tag, told) in told.iter().enumerate() {
        assert!(told.over && told.covered.iter().all(|there| *there), "read {tag} is whole");
    }
    assert_eq!(owners.map(|owner| engine.requests_of(owner)), [0, 0]);
    assert_eq!(fragments.in_use().0, 0, "memory is given back");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn reads_are_told_whole_and_in_turn(
        reads in proptest::collection::vec(asked(), 1..8),
        buffers in 1usize..24,
        serial in any::<bool>(),
        sendfile in any::<bool>(),
        members in 0u32..3,
        may_hang in any::<bool>(),
        choices in proptest::collection::vec(any::<usize>(), 0..200),
    ) {
        let path = if sendfile { DataPath::Sendfile } else { DataPath::Auto };
        let delivery = Delivery { path, serial };
        check(&reads, buffers, delivery, 1 << members, may_hang, choices.into_iter());
    }

    #[test]
    fn changes_are_noted(ranges in proptest::collection::vec((0..SIZE - 1, 1..100_000u64), 0..6)) {
        let changes = Changes::default();
        let mut model = vec![false; SIZE as usize];
        for (from, length) in ranges {
            let end = (from + length).min(SIZE);
            changes.note(from, end - from);
            let grain = towline_block::GRAIN;
            let noted = from / grain * grain..(end.next_multiple_of(grain)).min(SIZE);
            model[noted.start as usize..noted.end as usize].fill(true);
        }
        let mut at = 0;
        while at < SIZE {
            let (length, changed) = changes.run(at, SIZE - at);
            prop_assert!(model[at as usize..(at + length) as usize].iter().all(|c| *c == changed));
            at += length;
        }
    }
}

/// Returns the order in which fragments are reported that land last to first, and how many each landing
/// reports.
fn landing_backwards(delivery: Delivery) -> (Vec<u64>, Vec<usize>) {
    let memory = MemoryDisk::new("test", SIZE).unwrap();
    let store = DelayStore::new(memory, Duration::ZERO, 0);
    let disk = Arc::new(Disk::new("test", "", store, false).delivered(delivery));
    let (fragments, small) = (Pool::new(FRAGMENT as usize, 16), Pool::new(4096, 2));
    let mut engine: Engine<u8> = Engine::new(Limits { fragments, small, owner_bytes_max: SIZE });
    let owner = engine.add_owner();
    engine.read(owner, 0, &disk, 0..4 * FRAGMENT, How::Pieces, Instant::now());
    let mut later = Later::default();
    engine.pump(&mut later);
    let (mut offsets, mut told) = (Vec::new(), Vec::new());
    while let Some((token, Work::Call(call))) = later.0.pop() {
        let (result, buffer) = call();
        engine.finished(token, result, buffer, &mut Later::default());
        let before = offsets.len();
        while let Some(Output::Piece { offset, .. }) = engine.next_output() {
            offsets.push(offset / FRAGMENT);
        }
        told.push(offsets.len() - before);
    }
    (offsets, told)
}

#[test]
fn fragments_are_told_as_they_land_unless_disk_and_network_work_in_series() {
    assert_eq!(landing_backwards(Delivery::default()), (vec![3, 2, 1, 0], vec![1, 1, 1, 1]));
    let serial = Delivery { serial: true, ..Delivery::default() };
    assert_eq!(landing_backwards(serial), (vec![3, 2, 1, 0], vec![0, 0, 0, 4]));
}

#[test]
fn bytes_are_counted_by_their_way() {
    let moved = |path| {
        let memory = MemoryDisk::new("test", SIZE).unwrap();
        memory.write(0, &[7; 4 * FRAGMENT as usize], false).unwrap();
        let disk = Arc::new(
            Disk::new("test", "", memory, false).delivered(Delivery { path, serial: false }),
        );
        let (fragments, small) = (Pool::new(FRAGMENT as usize, 16), Pool::new(4096, 2));
        let mut engine: Engine<u8> =
            Engine::new(Limits { fragments, small, owner_bytes_max: SIZE });
        let owner = engine.add_owner();
        engine.read(owner, 0, &disk, 0..4 * FRAGMENT, How::Pieces, Instant::now());
        engine.pump(&mut Later::default());
        let moved = engine.moved();
        (moved.lent / FRAGMENT, moved.staged / FRAGMENT)
    };
    assert_eq!(moved(DataPath::Auto), (4, 0));
    assert_eq!(moved(DataPath::Sendfile), (4, 0));
    assert_eq!(moved(DataPath::Staged), (0, 4));
    assert_eq!(moved(DataPath::ZeroCopy), (0, 4));
}

/// A core that goes to sleep while there are outputs leaves clients without answers.
#[test]
fn answers_that_nobody_has_taken_are_work() {
    let memory = MemoryDisk::new("test", SIZE).unwrap();
    let disk = Arc::new(Disk::new("test", "", memory, false));
    let (fragments, small) = (Pool::new(FRAGMENT as usize, 16), Pool::new(4096, 2));
    let mut engine: Engine<u8> = Engine::new(Limits { fragments, small, owner_bytes_max: SIZE });
    let owner = engine.add_owner();
    assert!(!engine.has_work());
    engine.read(owner, 0, &disk, 0..FRAGMENT, How::Pieces, Instant::now());
    engine.pump(&mut Later::default());
    assert!(engine.has_work());
    while engine.next_output().is_some() {}
    assert!(!engine.has_work());
}

/// A connection's requests are forgotten with it, however much has landed.
#[test]
fn an_owner_that_goes_leaves_nothing() {
    for landed in 0..6 {
        let memory = MemoryDisk::new("test", SIZE).unwrap();
        let disk =
            Arc::new(Disk::new("test", "", DelayStore::new(memory, Duration::ZERO, 0), false));
        let fragments = Pool::new(FRAGMENT as usize, 16);
        let small = Pool::new(4096, 2);
        let limits = Limits { fragments: fragments.clone(), small, owner_bytes_max: SIZE };
        let mut engine: Engine<u8> = Engine::new(limits);
        let owner = engine.add_owner();
        for how in [How::Ordered, How::Ordered] {
            engine.read(owner, 0, &disk, 0..3 * FRAGMENT, how, Instant::now());
        }
        let mut later = Later::default();
        engine.pump(&mut later);
        let land = |engine: &mut Engine<u8>, later: &mut Later| {
            let Some((token, Work::Call(call))) = later.0.pop() else { panic!("no call") };
            let (result, buffer) = call();
            engine.finished(token, result, buffer, &mut Later::default());
        };
        for _ in 0..landed {
            land(&mut engine, &mut later);
        }
        engine.remove_owner(owner);
        while !later.0.is_empty() {
            land(&mut engine, &mut later);
        }
        while engine.next_output().is_some() {}
        assert_eq!(fragments.in_use().0, 0, "after {landed} fragments");
    }
}
