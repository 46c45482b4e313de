//! Tests of reads, writes, appends, holes and copies.

use super::*;

#[test]
fn reads_refer_to_pages_or_copy() {
    let f = Fixture::new();
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    fs::write(f.local("file"), &bytes).unwrap();
    let file = f.open(b"file", 0).unwrap();
    for (offset, length) in [
        (0, 10),
        (4090, 20),
        (299_990, 100),
        (300_000, 5),
        (400_000, 5),
        (0, 40_000),
        (1, 299_999),
        (0, 1_000_000),
        (280_000, 100_000),
        (300_000, 100_000),
        (500_000, 100_000),
        (12_345, 32 * 1024),
    ] {
        let end = (offset + length).min(bytes.len());
        let expected = bytes.get(offset..end).unwrap_or_default();
        assert_eq!(read(&file, offset as u64, length), expected, "{offset} {length}");
        let ReadOutcome::Ready(again) = file.read(offset as u64, length, false).unwrap() else {
            panic!("what was just read is not in memory");
        };
        let kind = again.slices().next().map(|slice| slice.segment.kind());
        let reference = expected.len() >= 32 * 1024;
        let expected_kind = if reference { Some("file") } else { Some("host") };
        assert!(expected.is_empty() && kind.is_none() || kind == expected_kind);
    }
    assert_eq!(file.read(u64::MAX, 5, true).unwrap_err(), Errno::EINVAL);
    assert_eq!(read(&file, 0, 0), b"");
}

#[test]
fn a_read_that_would_wait_says_so() {
    let f = Fixture::new();
    let bytes = vec![7u8; 256 * 1024];
    fs::write(f.local("file"), &bytes).unwrap();
    let file = f.open(b"file", 0).unwrap();
    file.sync(true).unwrap();
    let local = fs::File::open(f.local("file")).unwrap();
    rustix::fs::fadvise(&local, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    if let ReadOutcome::Ready(_) = file.read(100_000, 10, false).unwrap() {
        eprintln!("SKIPPED cold reads: pages stay in memory here");
        return;
    }
    assert!(matches!(file.read(0, bytes.len(), false).unwrap(), ReadOutcome::WouldBlock));
    assert_eq!(read(&file, 0, bytes.len()), bytes);
    assert!(matches!(file.read(0, bytes.len(), false).unwrap(), ReadOutcome::Ready(_)));
}

#[test]
fn holes_are_found_and_punched() {
    let f = Fixture::new();
    let file = f.open(b"file", CREAT | RDWR).unwrap();
    let block = 256 * 1024;
    file.write(0, &vec![1; block], false).unwrap();
    file.write(3 * block as u64, &vec![2; block], false).unwrap();
    assert_eq!(read(&file, block as u64, 2 * block), vec![0; 2 * block]);
    match file.seek(0, 4).unwrap() {
        hole if hole == 4 * block as u64 => eprintln!("SKIPPED holes: none on this file system"),
        hole => {
            assert_eq!(hole, block as u64);
            assert_eq!(file.seek(hole, 3).unwrap(), 3 * block as u64);
            let before = file.stat().unwrap().blocks;
            file.allocate(3, 0, block as u64).unwrap();
            assert!(file.stat().unwrap().blocks < before);
            assert_eq!(file.seek(0, 3).unwrap(), 3 * block as u64);
        }
    }
    assert_eq!(file.seek(4 * block as u64, 3).unwrap_err(), Errno::ENXIO);
    assert_eq!(file.seek(0, 0).unwrap_err(), Errno::EINVAL);
    assert_eq!(file.allocate(8, 0, 4096).unwrap_err(), Errno::EOPNOTSUPP);
    file.allocate(1, 0, 8 * block as u64).unwrap();
    assert_eq!(file.stat().unwrap().size, 4 * block as u64);
    file.allocate(0, 0, 8 * block as u64).unwrap();
    assert_eq!(file.stat().unwrap().size, 8 * block as u64);
    // An append ignores the position that a seek left.
    file.seek(0, 4).unwrap();
    assert_eq!(file.write(0, b"end", true).unwrap(), (3, 8 * block as u64));
}

#[test]
fn appends_from_threads_do_not_overlap() {
    let f = Fixture::new();
    let first = f.open(b"log", CREAT | RDWR).unwrap();
    let (threads, rounds, bytes) = (8, 200, 37);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let file =
                if thread % 2 == 0 { first.clone() } else { f.open(b"log", WRONLY).unwrap() };
            let first = &first;
            scope.spawn(move || {
                for round in 0..rounds {
                    let data = vec![(thread * 31 + round) as u8; bytes];
                    let (count, offset) = file.write(12345, &data, true).unwrap();
                    assert_eq!(count, bytes);
                    assert_eq!(read(first, offset, bytes), data);
                }
            });
        }
    });
    assert_eq!(first.stat().unwrap().size, (threads * rounds * bytes) as u64);
    assert_eq!(first.write(0, b"", true).unwrap().1, (threads * rounds * bytes) as u64);
}

#[test]
fn direct_files_take_any_alignment() {
    let f = Fixture::new();
    let Ok(file) = f.open(b"direct", CREAT | RDWR | DIRECT) else {
        eprintln!("SKIPPED O_DIRECT: not supported here");
        return;
    };
    let bytes: Vec<u8> = (0..100_001u32).map(|i| i as u8).collect();
    assert_eq!(file.write(3, &bytes[..], false).unwrap(), (bytes.len(), 3));
    assert_eq!(read(&file, 4, 99), bytes[1..100]);
    assert_eq!(read(&file, 3, 200_000), bytes);
    assert_eq!(file.write(0, b"tail", true).unwrap(), (4, 100_004));
    let again = f.open(b"direct", DIRECT).unwrap();
    assert_eq!(read(&again, 4096, 8192), bytes[4093..4093 + 8192]);
}

#[test]
fn aligned_accesses_of_a_direct_file_stay_direct() {
    let f = Fixture::new();
    let Ok(file) = f.open(b"direct", CREAT | RDWR | DIRECT) else {
        eprintln!("SKIPPED O_DIRECT: not supported here");
        return;
    };
    let flags = || rustix::fs::fcntl_getfl(file.descriptor().unwrap()).unwrap();
    let is_direct = || flags().contains(rustix::fs::OFlags::DIRECT);
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    // Wherever the data lies in the server's memory.
    for at in [0, 1, 8, 513] {
        assert_eq!(file.write(0, &bytes[at..at + 8192], false).unwrap(), (8192, 0));
        assert_eq!(file.write(8192, &bytes[at..at + 131_072], false).unwrap(), (131_072, 8192));
        for (offset, length) in [(0, 4096), (4096, 4096), (8192, 131_072), (135_168, 65_536)] {
            let end = (offset + length).min(139_264);
            let wanted: Vec<u8> =
                (offset..end).map(|i| bytes[at + if i < 8192 { i } else { i - 8192 }]).collect();
            assert_eq!(read(&file, offset as u64, length), wanted, "{offset} {length}");
        }
    }
    assert_eq!(file.write(0, &bytes[1..4097], true).unwrap(), (4096, 139_264));
    assert_eq!(read(&file, 139_264, 8192), bytes[1..4097]);
    assert!(is_direct());
    // The end of the file need not be aligned.
    fs::write(f.local("short"), &bytes[..5000]).unwrap();
    let short = f.open(b"short", DIRECT).unwrap();
    assert_eq!(read(&short, 4096, 4096), bytes[4096..5000]);
    let flags = rustix::fs::fcntl_getfl(short.descriptor().unwrap()).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::DIRECT));
}

#[test]
fn threads_that_meet_a_direct_file_together_take_any_alignment() {
    let f = Fixture::new();
    fs::write(f.local("direct"), [7; 9000]).unwrap();
    for _ in 0..500 {
        let Ok(file) = f.open(b"direct", RDWR | DIRECT) else {
            eprintln!("SKIPPED O_DIRECT: not supported here");
            return;
        };
        let start = std::sync::Barrier::new(4);
        let meet = |thread: u64| {
            start.wait();
            match thread {
                0 => assert_eq!(file.write(13, &[7; 100], false).unwrap(), (100, 13)),
                _ => assert_eq!(read(&file, thread, 100), [7; 100]),
            }
        };
        std::thread::scope(|scope| {
            let meet = &meet;
            (0..4).for_each(|thread| drop(scope.spawn(move || meet(thread))));
        });
    }
}

#[test]
fn ranges_are_copied() {
    let f = Fixture::new();
    let file = f.open(b"file", CREAT | RDWR).unwrap();
    file.write(0, &[5; 10_000], false).unwrap();
    let other = f.open(b"other", CREAT | RDWR).unwrap();
    let copy = |from: &Arc<dyn OpenFile>, offset, to: &Arc<dyn OpenFile>, to_offset, length| {
        f.store.copy_range(&**from, offset, &**to, to_offset, length)
    };
    assert_eq!(copy(&file, 1000, &other, 50, 20_000).unwrap(), 9000);
    assert_eq!(read(&other, 49, 20_000), [&[0][..], &[5; 9000]].concat());
    assert_eq!(copy(&file, 0, &file, 10, 100).unwrap_err(), Errno::EINVAL);
    assert_eq!(copy(&file, 0, &file, 20_000, 100).unwrap(), 100);
    let reader = f.open(b"other", 0).unwrap();
    assert_eq!(copy(&file, 0, &reader, 0, 1).unwrap_err(), Errno::EBADF);
    let (writer, directory) = (f.open(b"other", WRONLY).unwrap(), f.open(b".", 0).unwrap());
    assert_eq!(copy(&writer, 0, &file, 0, 1).unwrap_err(), Errno::EBADF);
    assert_eq!(copy(&writer, 0, &directory, 0, 1).unwrap_err(), Errno::EISDIR);
    assert_eq!(copy(&directory, 0, &reader, 0, 1).unwrap_err(), Errno::EISDIR);
    let reference = f.open(b"other", PATH).unwrap();
    assert_eq!(copy(&reference, 0, &directory, 0, 1).unwrap_err(), Errno::EBADF);
    let foreign = Fixture::new();
    let elsewhere = foreign.open(b"x", CREAT | RDWR).unwrap();
    assert_eq!(copy(&file, 0, &elsewhere, 0, 1).unwrap_err(), Errno::EXDEV);
}
