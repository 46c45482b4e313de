//! Tests that a stripe asks each member once for all chunks of a range, and gets the same as if it
//! asked chunk by chunk.

use super::StripeDisk;
use crate::block::{CacheMode, FileDisk, MemoryDisk};
use crate::{BlockStore, Extent, Geometry, ZeroHow};
use proptest::prelude::*;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: u64 = 4096;
/// Bytes of a chunk.
const CHUNK: u64 = 4 * PAGE;
/// Bytes of a member: whole chunks, and a part of one that is not used.
const MEMBER: u64 = 10 * CHUNK + PAGE;
const SIZE: u64 = 3 * 10 * CHUNK;

/// A disk that counts the calls that a stripe makes once for each member.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn BlockStore>,
    calls: AtomicUsize,
}

impl Counting {
    fn new(inner: Arc<dyn BlockStore>) -> Arc<Self> {
        Arc::new(Self { inner, calls: AtomicUsize::new(0) })
    }

    fn counted(&self) -> &dyn BlockStore {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &*self.inner
    }

    fn take_calls(&self) -> usize {
        self.calls.swap(0, Ordering::Relaxed)
    }
}

impl BlockStore for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.inner.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.counted().zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.counted().trim(offset, length)
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        self.counted().cache(offset, length)
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.counted().extents(offset, length, tell)
    }
}

fn file(size: u64) -> Arc<dyn BlockStore> {
    // Not on tmpfs, which cannot tell allocated zeros from a hole.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.as_file().set_len(size).unwrap();
    FileDisk::open(file.path(), CacheMode::Cached, false).unwrap()
}

/// A stripe and its members.
struct Striped {
    disk: Arc<StripeDisk>,
    members: Vec<Arc<Counting>>,
}

impl Striped {
    fn new(members: impl IntoIterator<Item = Arc<dyn BlockStore>>) -> Self {
        let members: Vec<_> = members.into_iter().map(Counting::new).collect();
        let stores = members.iter().map(|member| member.clone() as _).collect();
        Self { disk: StripeDisk::new(stores, CHUNK).unwrap(), members }
    }

    fn mixed() -> Self {
        Self::new([file(MEMBER), MemoryDisk::new("test", MEMBER).unwrap(), file(MEMBER + CHUNK)])
    }

    /// Does something for each part of a range, chunk by chunk.
    fn each(&self, at: u64, length: u64, mut work: impl FnMut(&dyn BlockStore, u64, u64)) {
        let mut done = 0;
        while done < length {
            let part = self.disk.part(at + done, length - done);
            work(&*self.members[part.member].inner, part.offset, part.length);
            done += part.length;
        }
    }

    /// Returns the extents of a range, chunk by chunk.
    fn extents_by_chunk(&self, at: u64, length: u64) -> Vec<Extent> {
        let mut list = Vec::new();
        self.each(at, length, |member, at, length| {
            member
                .extents(at, length, &mut |extent| {
                    append(&mut list, extent);
                    true
                })
                .unwrap();
        });
        list
    }

    /// Returns the first extents of a range, until `tell` was called `most` times.
    fn extents(&self, at: u64, length: u64, most: usize) -> Vec<Extent> {
        let (mut list, mut told) = (Vec::new(), 0);
        self.disk
            .extents(at, length, &mut |extent| {
                assert!(told < most && extent.length > 0);
                append(&mut list, extent);
                told += 1;
                told < most
            })
            .unwrap();
        list
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        self.disk.read(0, &mut bytes).unwrap();
        bytes
    }

    fn take_calls(&self) -> Vec<usize> {
        self.members.iter().map(|member| member.take_calls()).collect()
    }
}

/// Adds an extent, merging it with its neighbour if both are of one kind.
fn append(list: &mut Vec<Extent>, extent: Extent) {
    match list.last_mut() {
        Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => {
            last.length += extent.length;
        }
        _ => list.push(extent),
    }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Write,
    Zero,
    Allocate,
    Trim,
}

/// A range inside the disk: of whole pages or chunks, or any.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let of = |unit: u64, most: u64| {
        (0..SIZE / unit, 1..=most).prop_map(move |(at, count)| (at * unit, count * unit))
    };
    prop_oneof![of(CHUNK, 30), of(PAGE, 30), of(1, SIZE)]
        .prop_map(|(at, length)| (at, length.min(SIZE - at)))
}

fn change() -> impl Strategy<Value = (Change, (u64, u64))> {
    use Change::{Allocate, Trim, Write, Zero};
    (prop_oneof![Just(Write), Just(Zero), Just(Allocate), Just(Trim)], range())
}

/// Changes a stripe and, chunk by chunk, another one.
fn apply(striped: &Striped, by_chunk: &Striped, change: Change, at: u64, length: u64) {
    let zero = |allocate| {
        let how = ZeroHow { allocate, fast: false };
        striped.disk.zero(at, length, how).unwrap();
        by_chunk.each(at, length, |member, at, length| member.zero(at, length, how).unwrap());
    };
    match change {
        Change::Write => {
            for either in [striped, by_chunk] {
                either.disk.write(at, &vec![7; length as usize], false).unwrap();
            }
        }
        Change::Zero => zero(false),
        Change::Allocate => zero(true),
        Change::Trim => {
            striped.disk.trim(at, length).unwrap();
            by_chunk.each(at, length, |member, at, length| member.trim(at, length).unwrap());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn asking_each_member_once_is_asking_chunk_by_chunk(
        changes in proptest::collection::vec(change(), 1..12),
        ranges in proptest::collection::vec((range(), 1..40_usize), 1..12),
    ) {
        let (striped, by_chunk) = (Striped::mixed(), Striped::mixed());
        for (change, (at, length)) in changes {
            striped.take_calls();
            apply(&striped, &by_chunk, change, at, length);
            prop_assert!(striped.take_calls().iter().all(|calls| *calls <= 1));
        }
        prop_assert!(striped.bytes() == by_chunk.bytes());
        for ((at, length), most) in ranges {
            let expected = striped.extents_by_chunk(at, length);
            prop_assert_eq!(&striped.extents(at, length, usize::MAX), &expected);
            // Who stops early has heard of the beginning of the same extents.
            let first = striped.extents(at, length, most);
            let (last, before) = first.split_last().unwrap();
            prop_assert_eq!(before, &expected[..before.len()]);
            let same = Extent { length: last.length, ..expected[before.len()] };
            prop_assert_eq!(last, &same);
            prop_assert!(last.length <= expected[before.len()].length);
        }
    }
}

#[test]
fn a_long_extent_is_looked_for_once() {
    let striped = Striped::new([(); 3].map(|()| file(MEMBER)));
    let hole = Extent { length: SIZE - 2, hole: true, zero: true };
    assert_eq!(striped.extents(1, SIZE - 2, usize::MAX), [hole]);
    assert_eq!(striped.take_calls(), [1; 3]);

    // Data on one member: the other two are still asked once.
    striped.members[1].inner.write(0, &[7; MEMBER as usize], false).unwrap();
    let extents = striped.extents(0, SIZE, usize::MAX);
    assert_eq!(extents.len(), 21);
    assert_eq!(striped.take_calls(), [1; 3]);

    // Who wants one extent does not pay for more.
    assert_eq!(striped.extents(CHUNK, SIZE - CHUNK, 1).len(), 1);
    assert_eq!(striped.take_calls(), [0, 1, 0]);
}

/// Stripes of one kind are told together: a map of a large empty disk takes no time for each chunk.
#[test]
fn stripes_of_one_kind_are_told_at_once() {
    const LARGE: u64 = 1 << 30;
    let striped = Striped::new([(); 2].map(|()| file(LARGE)));
    striped.disk.write(LARGE, &[7; CHUNK as usize], false).unwrap();
    let (mut told, mut end) = (0, 0);
    striped
        .disk
        .extents(0, 2 * LARGE, &mut |extent| {
            told += 1;
            end += extent.length;
            true
        })
        .unwrap();
    assert_eq!(end, 2 * LARGE);
    assert!(told < 20, "{told} calls");
}
