//! Tests that every disk behaves like an array of bytes.

use super::{CacheMode, DelayStore, FileDisk, MemoryDisk, StripeDisk};
use crate::{BlockStore, Direction, Now, ZeroHow};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SIZE: u64 = 300 * 1024;

/// Returns a disk on a file of zeros that is deleted when the test ends.
fn file(mode: CacheMode, size: u64) -> Arc<dyn BlockStore> {
    // Not on tmpfs, which has no O_DIRECT on older kernels.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.as_file().set_len(size).unwrap();
    FileDisk::open(file.path(), mode, false).unwrap()
}

fn disks() -> Vec<(&'static str, Arc<dyn BlockStore>)> {
    let memory = |size| -> Arc<dyn BlockStore> { MemoryDisk::new("test", size).unwrap() };
    vec![
        ("memory", memory(SIZE)),
        ("cached", file(CacheMode::Cached, SIZE)),
        ("direct", file(CacheMode::Direct, SIZE)),
        ("read-direct", file(CacheMode::ReadDirect, SIZE)),
        ("stripe", StripeDisk::new((0..3).map(|_| memory(SIZE / 3)).collect(), 4096).unwrap()),
        ("delay", DelayStore::new(memory(SIZE), Duration::ZERO, 0)),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64, bool),
    Trim(u64, u64),
    Read(u64, u64),
    Extents(u64, u64),
}

/// A range inside the disk, often aligned to pages.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let page = (0..SIZE / 4096, 1..20u64).prop_map(|(at, count)| (at * 4096, count * 4096));
    let any = (0..SIZE, 1..40_000u64);
    prop_oneof![page, any].prop_map(|(at, count)| (at, count.min(SIZE - at)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (range(), any::<u8>()).prop_map(|((at, count), byte)| Step::Write(at, count, byte)),
        (range(), any::<bool>()).prop_map(|((at, count), hard)| Step::Zero(at, count, hard)),
        range().prop_map(|(at, count)| Step::Trim(at, count)),
        range().prop_map(|(at, count)| Step::Read(at, count)),
        range().prop_map(|(at, count)| Step::Extents(at, count)),
    ]
}

/// Reads in every possible way; the results must agree.
fn read_all_ways(disk: &dyn BlockStore, at: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![1; count as usize];
    disk.read(at, &mut bytes).unwrap();
    let mut now = vec![2; count as usize];
    if let Now::Done(result) = disk.read_now(at, &mut now) {
        result.unwrap();
        assert_eq!(bytes, now, "read_now at {at}");
    }
    let mut appended = b"before".to_vec();
    if let Now::Done(result) = disk.append_now(at, count as usize, &mut appended) {
        result.unwrap();
        assert_eq!(appended.split_at(6), (&b"before"[..], &bytes[..]), "append_now at {at}");
    } else {
        assert_eq!(appended, b"before");
    }
    if let Some(lent) = disk.lend(at, count) {
        assert!(lent.len() <= count);
        let lent = lent.to_vec().unwrap();
        assert_eq!(bytes[..lent.len()], lent, "lend at {at}");
    }
    let hole = disk.hole_now(at, count) as usize;
    assert!(bytes[..hole].iter().all(|byte| *byte == 0), "hole of {hole} at {at}");
    if let Some(place) = disk.locate(at, count, Direction::Read) {
        assert!(place.length > 0 && place.length <= count);
        if !place.direct {
            let mut part = vec![3; place.length as usize];
            rustix::io::pread(&*place.file, &mut part, place.offset).unwrap();
            assert_eq!(bytes[..part.len()], part, "locate at {at}");
        }
    }
    bytes
}

fn check(disk: &dyn BlockStore, model: &mut [u8], step: &Step) {
    match *step {
        Step::Write(at, count, byte) => {
            let data = vec![byte; count as usize];
            match disk.write_now(at, &data, false) {
                Now::Done(result) => result.unwrap(),
                Now::WouldBlock => disk.write(at, &data, byte % 8 == 0).unwrap(),
            }
            model[at as usize..(at + count) as usize].fill(byte);
        }
        Step::Zero(at, count, allocate) => {
            disk.zero(at, count, ZeroHow { allocate, fast: false }).unwrap();
            model[at as usize..(at + count) as usize].fill(0);
        }
        Step::Trim(at, count) => {
            disk.trim(at, count).unwrap();
            // The disk may have kept any of the data.
            disk.read(at, &mut model[at as usize..(at + count) as usize]).unwrap();
        }
        Step::Read(at, count) => {
            let bytes = read_all_ways(disk, at, count);
            assert!(bytes == model[at as usize..(at + count) as usize], "read at {at}+{count}");
        }
        Step::Extents(at, count) => {
            let mut told = at;
            disk.extents(at, count, &mut |extent| {
                let end = told + extent.length;
                assert!(extent.length > 0 && end <= at + count);
                let zero = model[told as usize..end as usize].iter().all(|byte| *byte == 0);
                assert!(zero || !extent.zero, "zeroes at {told}+{}", extent.length);
                told = end;
                true
            })
            .unwrap();
            assert_eq!(told, at + count, "extents cover the range");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn every_disk_behaves_like_its_bytes(steps in proptest::collection::vec(step(), 1..25)) {
        for (name, disk) in disks() {
            let mut model = vec![0; SIZE as usize];
            for step in &steps {
                eprintln!("{name}: {step:?}");
                check(&*disk, &mut model, step);
            }
            disk.flush().unwrap();
            let bytes = read_all_ways(&*disk, 0, SIZE);
            prop_assert!(bytes == model, "{} at the end", name);
        }
    }
}

#[test]
fn a_file_that_shrinks_gives_eio() {
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().set_len(SIZE).unwrap();
    let disk = FileDisk::open(named.path(), CacheMode::Cached, false).unwrap();
    named.as_file().set_len(SIZE / 2).unwrap();
    let error = disk.read(SIZE - 4096, &mut [0; 4096]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // On tmpfs `lend` does not check whether the pages exist; sending them then fails.
    let lent = disk.lend(SIZE - 65536, 65536);
    assert!(lent.is_none_or(|lent| lent.to_vec().is_err()));
    assert_eq!(disk.hole_now(SIZE / 2, SIZE / 2), 0, "not a hole but nothing at all");
}

#[test]
fn what_is_no_disk_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let open = |path: &std::path::Path| FileDisk::open(path, CacheMode::Cached, false);
    assert!(open(directory.path()).is_err());
    assert!(open("/dev/null".as_ref()).is_err());
    let empty = tempfile::NamedTempFile::new().unwrap();
    for mode in [CacheMode::Direct, CacheMode::ReadDirect] {
        let error = FileDisk::open(empty.path(), mode, false).unwrap_err();
        assert!(error.to_string().contains("it is empty"), "{error}");
    }
    assert!(StripeDisk::new(Vec::new(), 4096).is_err());
    assert!(MemoryDisk::new("test", 0).is_err());
}

#[test]
fn an_empty_file_is_a_disk_that_may_grow() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    let disk = FileDisk::open(empty.path(), CacheMode::Cached, false).unwrap();
    assert_eq!(disk.geometry().size, 0);
    let mut extents = 0;
    disk.extents(0, 0, &mut |_| {
        extents += 1;
        true
    })
    .unwrap();
    assert_eq!(extents, 0);
    assert_eq!(disk.read(0, &mut [0; 512]).unwrap_err().raw_os_error(), Some(libc::EIO));
    disk.flush().unwrap();
    disk.resize(4096).unwrap();
    disk.write(0, &[7; 4096], false).unwrap();
    assert_eq!(std::fs::read(empty.path()).unwrap(), [7; 4096]);
}

#[test]
fn a_stripe_lies_on_its_members_in_turn() {
    let members: Vec<Arc<dyn BlockStore>> =
        (0..2).map(|_| MemoryDisk::new("test", 10_000).unwrap() as _).collect();
    let stripe = StripeDisk::new(members.clone(), 4096).unwrap();
    // The rest of each member is shorter than a chunk.
    assert_eq!(stripe.geometry().size, 4 * 4096);
    stripe.write(4096, &[7; 8192], false).unwrap();
    let first = |member: usize, at| {
        let mut byte = [9];
        members[member].read(at, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!((first(0, 0), first(1, 0), first(0, 4096), first(1, 4096)), (0, 7, 7, 0));
}

#[test]
fn memory_is_taken_by_writes_alone() {
    let disk = MemoryDisk::new("test", 1 << 30).unwrap();
    let mut bytes = vec![1; 1 << 20];
    assert!(matches!(disk.read_now(0, &mut bytes), Now::Done(Ok(()))));
    assert_eq!(disk.hole_now(0, 1 << 30), 1 << 30);
    disk.write(4096, &[1], false).unwrap();
    let mut extents = Vec::new();
    let mut tell = |extent: crate::Extent| {
        extents.push((extent.length, extent.hole));
        true
    };
    disk.extents(0, 1 << 20, &mut tell).unwrap();
    assert_eq!(extents, [(4096, true), (4096, false), ((1 << 20) - 8192, true)]);
}

/// One bit of memory for each page of a disk that is almost empty would be too much.
#[test]
fn parts_that_were_never_written_take_no_memory_when_they_are_looked_at() {
    const TIB: u64 = 1 << 40;
    let disk = MemoryDisk::new("test", 2 * TIB).unwrap();
    for at in [0, 5 << 27, TIB - 4096, TIB + 12345] {
        disk.write(at, &[1], false).unwrap();
    }
    let bits = || rustix::fs::fstat(disk.written.fd()).unwrap().st_blocks * 512;
    let before = bits();
    let extents = || {
        let mut extents = Vec::new();
        let mut tell = |extent: crate::Extent| {
            extents.push((extent.length, extent.hole));
            true
        };
        disk.extents(0, 2 * TIB, &mut tell).unwrap();
        extents
    };
    let data = (4096, false);
    let expected = [
        data,
        ((5 << 27) - 4096, true),
        data,
        (TIB - 8192 - (5 << 27), true),
        data,
        (12288, true),
        data,
        (TIB - 16384, true),
    ];
    assert_eq!(extents(), expected);
    disk.trim(4096, 2 * TIB - 4096).unwrap();
    assert_eq!(extents(), [data, (2 * TIB - 4096, true)]);
    assert!(bits() <= before + 8 * 4096, "from {before} to {} bytes", bits());
}

/// Blocks move in memory meanwhile: each time that all pages of a huge page are written.
#[test]
fn memory_that_is_full_stays_what_was_written() {
    const BLOCK: usize = towline_mem::HUGE_BYTES;
    let disk = MemoryDisk::new("test", 4 * BLOCK as u64 + 4096).unwrap();
    let pages = 4 * BLOCK / 4096 + 1;
    std::thread::scope(|scope| {
        for part in 0..2 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..6_u8 {
                    // Each page is written by one of the two threads.
                    for page in (part..pages).step_by(2) {
                        let at = (page * 4096) as u64;
                        disk.write(at, &[round; 4096], false).unwrap();
                        let mut found = [9; 4096];
                        disk.read(at, &mut found).unwrap();
                        assert_eq!(found, [round; 4096], "page {page}");
                        if page % 100 == usize::from(round) {
                            disk.trim(at, 4096).unwrap();
                            disk.read(at, &mut found).unwrap();
                            assert_eq!(found, [0; 4096], "page {page}");
                        }
                    }
                }
            });
        }
    });
    for page in 0..pages {
        let (mut found, expected) = ([9; 4096], if page % 100 == 5 { 0 } else { 5 });
        disk.read((page * 4096) as u64, &mut found).unwrap();
        assert_eq!(found, [expected; 4096], "page {page}");
    }
}

/// Checks this in `smaps`, if the kernel can make huge pages.
#[test]
fn memory_that_is_full_becomes_huge_pages() {
    const BLOCK: usize = towline_mem::HUGE_BYTES;
    let probe = towline_mem::SharedMemory::create("probe", BLOCK).unwrap();
    probe.copy_in(0, &vec![1; BLOCK]);
    if let Err(error) = probe.make_huge(0) {
        eprintln!("no huge pages here: {error}");
        return;
    }
    let disk = MemoryDisk::new("huge-test", 3 * BLOCK as u64).unwrap();
    disk.write(0, &vec![1; BLOCK], false).unwrap();
    disk.write(BLOCK as u64, &vec![1; BLOCK - 4096], false).unwrap();
    let huge = || {
        // The kernel maps moved memory again when it is touched.
        disk.read(0, &mut vec![0; 2 * BLOCK]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let ours = maps.split("/memfd:huge-test").nth(1).unwrap();
        let line = ours.lines().find(|line| line.starts_with("ShmemPmdMapped:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    };
    let becomes_huge = || {
        let mut tries = 0;
        while huge() == 0 && tries < 2000 {
            std::thread::sleep(Duration::from_millis(5));
            tries += 1;
        }
        assert_eq!(huge(), BLOCK, "the first is full, of the second a page is missing");
    };
    becomes_huge();
    for _ in 0..3 {
        disk.trim(4096, 4096).unwrap();
        disk.write(4096, &[2; 4096], false).unwrap();
        becomes_huge();
    }
}

/// On every disk that can be resized, added bytes read as zeros, and bytes cut off are gone.
#[test]
fn disks_that_change_their_size() {
    /// Whole pages, and whole stripes of three members.
    const HALF: u64 = 36 * 4096;
    let members = || (0..3).map(|_| file(CacheMode::Cached, SIZE / 3)).collect();
    let mut disks = disks();
    disks.push(("stripe of files", StripeDisk::new(members(), 4096).unwrap()));
    for (name, disk) in disks {
        assert!(disk.resizes(), "{name}");
        disk.write(0, &vec![7; SIZE as usize], false).unwrap();
        disk.resize(HALF).unwrap();
        assert_eq!((disk.geometry().size, disk.refresh().unwrap()), (HALF, HALF), "{name}");
        for (at, count) in [(HALF, 4096), (HALF - 4096, 8192), (0, SIZE)] {
            let errno = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
            let mut bytes = vec![0; count as usize];
            assert_eq!(errno(disk.read(at, &mut bytes)), Some(libc::EIO), "{name} {at} {count}");
            assert!(disk.in_place(at, count, &mut |_, _| {}).is_none(), "{name} {at}");
            let zeroed = disk.zero(at, count, ZeroHow::default());
            assert!(zeroed.is_err() || disk.geometry().size == HALF, "{name} {at}");
        }
        assert_eq!(disk.hole_now(HALF, 128 * 1024), 0, "{name}: nothing, not even a hole");
        disk.write(0, &vec![7; HALF as usize], false).unwrap();
        disk.resize(2 * SIZE).unwrap();
        let mut bytes = vec![1; 2 * SIZE as usize];
        disk.read(0, &mut bytes).unwrap();
        let (old, new) = bytes.split_at(HALF as usize);
        assert!(old.iter().all(|byte| *byte == 7), "{name}: what stays is as it was");
        assert!(new.iter().all(|byte| *byte == 0), "{name}: what is added is empty");
        disk.write(2 * SIZE - 4096, &[9; 4096], false).unwrap();
        let mut last = [0; 4096];
        disk.read(2 * SIZE - 4096, &mut last).unwrap();
        assert_eq!(last, [9; 4096], "{name}");
        assert_eq!(disk.resize(0).unwrap_err().raw_os_error(), Some(libc::EINVAL), "{name}");
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let errno = |disk: &dyn BlockStore, size| disk.resize(size).unwrap_err().raw_os_error();
    let memory = MemoryDisk::new("test", SIZE).unwrap();
    memory.resize(16 * SIZE).unwrap();
    assert_eq!(errno(&*memory, 16 * SIZE + 4096), Some(libc::EFBIG));
    assert_eq!(memory.geometry().size, 16 * SIZE);

    // Only whole stripes, and all members or none.
    let files: Vec<_> = (0..3).map(|_| file(CacheMode::Cached, SIZE / 3)).collect();
    let stripe = StripeDisk::new(files.clone(), 4096).unwrap();
    assert_eq!(errno(&*stripe, SIZE + 4096), Some(libc::EINVAL));
    let limited = MemoryDisk::new("test", SIZE / 3).unwrap();
    let members: Vec<Arc<dyn BlockStore>> = vec![files[0].clone(), limited, files[1].clone()];
    let stripe = StripeDisk::new(members, 4096).unwrap();
    assert_eq!(errno(&*stripe, 20 * SIZE), Some(libc::EFBIG));
    assert_eq!((stripe.geometry().size, files[0].geometry().size), (SIZE, SIZE / 3));
    stripe.resize(2 * SIZE).unwrap();
    assert_eq!(stripe.geometry().size, 2 * SIZE);
}

/// Old data in the unused end of a longer member must not become visible.
#[test]
fn a_stripe_that_grows_into_its_members_shows_zeroes() {
    let members = [file(CacheMode::Cached, 4 << 12), file(CacheMode::Cached, 1 << 12)];
    members[0].write(0, &[5; 4 << 12], false).unwrap();
    let stripe = StripeDisk::new(members.to_vec(), 4096).unwrap();
    assert_eq!(stripe.geometry().size, 2 << 12);
    stripe.resize(6 << 12).unwrap();
    let mut bytes = vec![1; 6 << 12];
    stripe.read(0, &mut bytes).unwrap();
    assert!(bytes[..4096].iter().all(|byte| *byte == 5));
    assert!(bytes[4096..].iter().all(|byte| *byte == 0));
}

/// Each extent begins where the one before it ends, even if data is freed while they are told.
#[test]
fn extents_of_a_changing_file_have_no_gaps() {
    let disk = file(CacheMode::Cached, 2 * 4096);
    let stop = AtomicBool::new(false);
    let wrong = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                disk.write(0, &[7; 4096], false).unwrap();
                disk.trim(0, 4096).unwrap();
            }
        });
        let wrong = (0..150_000).find_map(|round| {
            let mut told = Vec::new();
            let outcome = disk.extents(0, 2 * 4096, &mut |extent| {
                told.push(extent.length);
                true
            });
            let whole_pages = told.iter().all(|length| length.is_multiple_of(4096));
            let is_right = outcome.is_ok() && whole_pages && told.iter().sum::<u64>() == 2 * 4096;
            (!is_right).then_some((round, told, outcome))
        });
        stop.store(true, Ordering::Relaxed);
        wrong
    });
    assert!(wrong.is_none(), "{wrong:?}");
}

/// If a member ends early, the extents of the others must not be reported at another place.
#[test]
fn extents_of_a_stripe_end_where_its_shortest_member_does() {
    const CHUNK: u64 = 64 * 1024;
    let files = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    for file in &files {
        file.as_file().set_len(4 * CHUNK).unwrap();
    }
    let members = files.iter().map(|file| -> Arc<dyn BlockStore> {
        FileDisk::open(file.path(), CacheMode::Cached, false).unwrap()
    });
    let stripe = StripeDisk::new(members.collect(), CHUNK).unwrap();
    for chunk in [0, 2] {
        stripe.write(chunk * CHUNK, &[7; CHUNK as usize], false).unwrap();
    }
    files[0].as_file().set_len(CHUNK + CHUNK / 2).unwrap();
    let mut told = Vec::new();
    stripe
        .extents(0, 4 * CHUNK, &mut |extent| {
            told.push((extent.length, extent.zero));
            true
        })
        .unwrap();
    assert_eq!(told, [(CHUNK, false), (CHUNK, true)]);
    let beyond = stripe.extents(2 * CHUNK, CHUNK, &mut |_| true).unwrap_err();
    assert_eq!(beyond.raw_os_error(), Some(libc::EIO));
}
