//! Tests of file data: sharing, holes, space, copies.

use super::*;
use crate::memory::arena::page_bytes;

#[test]
fn bytes_come_back() {
    let f = fixture(LIMIT);
    let bytes = pattern(3 * BLOCK + 777, 1);
    let file = f.file("a", &bytes);
    assert_eq!(read(&file, 0, usize::MAX / 4), bytes, "whole file");
    assert_eq!(read(&file, 65_000, 2000), bytes[65_000..67_000], "across a block");
    assert!(read(&file, bytes.len() as u64, 10).is_empty(), "at the end");
    assert_eq!(file.write(70_000, b"changed", false).unwrap(), (7, 70_000));
    assert_eq!(read(&file, 69_999, 9)[1..8], *b"changed", "overwritten");
    assert_eq!(file.write(5, b"tail", true).unwrap(), (4, bytes.len() as u64), "append");
    let attr = f.stat("a").unwrap();
    assert_eq!(attr.size, bytes.len() as u64 + 4, "size");
    assert_eq!(attr.blocks, attr.size.next_multiple_of(page_bytes()) / 512, "blocks");
}

#[test]
fn reads_share_blocks_and_never_change() {
    let f = fixture(LIMIT);
    let old = pattern(2 * BLOCK, 1);
    let file = f.file("a", &old);
    let held = aggregate(&file, 0, 2 * BLOCK);
    assert_eq!(held.slices().len(), 2, "one slice for each block");
    assert!(held.slices().all(|s| matches!(s.segment, Segment::Shared(_, Some(_)))), "no copy");
    file.write(100, &pattern(BLOCK, 9), false).unwrap();
    assert_eq!(held.to_vec().unwrap(), old, "after a write");
    resize(&f, &file, 10).unwrap();
    assert_eq!(held.to_vec().unwrap(), old, "after a truncation");
    drop(file);
    f.unlink("a").unwrap();
    f.file("b", &pattern(4 * BLOCK, 77));
    assert_eq!(held.to_vec().unwrap(), old, "after the file is gone");
}

/// Returns the place of the first slice in memory.
fn place(aggregate: &Aggregate) -> u64 {
    aggregate.slices().next().unwrap().offset
}

#[test]
fn lent_blocks_are_not_written_even_when_nobody_holds_them() {
    let f = fixture(LIMIT);
    let file = f.file("a", &pattern(BLOCK, 1));
    let small = place(&aggregate(&file, 0, 1000));
    file.write(0, b"x", false).unwrap();
    assert_eq!(place(&aggregate(&file, 0, 1000)), small, "a short read is copied when sent");
    let large = place(&aggregate(&file, 0, BLOCK));
    assert_eq!(large, small, "reading moves nothing");
    file.write(1, b"y", false).unwrap();
    assert_ne!(place(&aggregate(&file, 0, 1000)), large, "a lent block is replaced");
    assert_eq!(read(&file, 0, 3)[..2], *b"xy", "and its bytes kept");
    let memory = f.store.tree().arena.memory().clone();
    let mut byte = [1];
    memory.copy_out(large as usize + 5, &mut byte);
    assert_eq!(byte, [0], "the old block was punched");
}

#[test]
fn stale_pages_are_never_seen() {
    let f = fixture(LIMIT);
    for round in 0..20 {
        drop(f.file("secret", &[0xaa; 4 * BLOCK]));
        f.unlink("secret").unwrap();
        let file = f.open("b", CREATE).unwrap();
        file.write(5000 + round * 7, b"z", false).unwrap();
        file.write(100_000, b"z", false).unwrap();
        resize(&f, &file, 3 * BLOCK as u64).unwrap();
        let seen = read(&file, 0, 3 * BLOCK);
        assert_eq!(seen.iter().filter(|byte| **byte != 0).count(), 2, "only what was written");
        f.unlink("b").unwrap();
    }
}

#[test]
fn growing_shows_zeros() {
    let f = fixture(LIMIT);
    let file = f.file("a", &[7; 10_000]);
    for lent in [false, true] {
        let held = lent.then(|| aggregate(&file, 0, 10_000));
        resize(&f, &file, 4100).unwrap();
        resize(&f, &file, 10_000).unwrap();
        let seen = read(&file, 0, 10_000);
        assert!(seen[..4100].iter().all(|byte| *byte == 7), "kept");
        assert!(seen[4100..].iter().all(|byte| *byte == 0), "zeros");
        drop(held);
        file.write(0, &[7; 10_000], false).unwrap();
    }
}

#[test]
fn holes_stay_holes() {
    let f = fixture(LIMIT);
    let file = f.open("a", CREATE).unwrap();
    file.write(1 << 40, b"end", false).unwrap();
    let page = page_bytes();
    assert_eq!(f.stat("a").unwrap().blocks, page / 512, "one page");
    let held = aggregate(&file, 0, 300 * KIB);
    assert!(held.slices().all(|slice| matches!(slice.segment, Segment::Host(_))), "zeros");
    assert_eq!(held.to_vec().unwrap(), vec![0; 300 * KIB]);
    assert_eq!(file.seek(0, 3), Ok(1 << 40), "data");
    assert_eq!(file.seek(0, 4), Ok(0), "hole");
    assert_eq!(file.seek(1 << 40, 4), Ok((1 << 40) + 3), "the end is a hole");
    assert_eq!(file.seek((1 << 40) + 3, 3), Err(Errno::ENXIO));
    file.write(0, &[1; 3 * BLOCK], false).unwrap();
    file.allocate(3, 904, page * 5 / 2).unwrap();
    let seen = read(&file, 0, 3 * BLOCK);
    let zero = |at: usize| (904..904 + page as usize * 5 / 2).contains(&at);
    assert!(seen.iter().enumerate().all(|(at, byte)| (*byte == 0) == zero(at)), "punched");
    assert_eq!(file.seek(0, 4), Ok(page), "hole of whole pages");
    assert_eq!(file.seek(page, 3), Ok(2 * page), "data behind it");
    file.allocate(16, 0, 5).unwrap();
    assert_eq!(read(&file, 0, 6), [0, 0, 0, 0, 0, 1], "zero range");
}

#[test]
fn allocation_is_charged_and_kept() {
    let f = fixture(4 << 20);
    let file = f.open("a", CREATE).unwrap();
    file.allocate(1, 0, 2 << 20).unwrap();
    assert_eq!((f.stat("a").unwrap().size, f.stat("a").unwrap().blocks), (0, 4096));
    assert_eq!(file.allocate(0, 0, 5 << 20), Err(Errno::ENOSPC));
    assert_eq!(file.allocate(0, 0, i64::MAX as u64), Err(Errno::ENOSPC));
    let other = f.open("b", CREATE).unwrap();
    let (count, _) = other.write(0, &vec![1; 4 << 20], false).unwrap();
    assert!(count < 2 << 20, "what is left");
    assert_eq!(file.write(0, &vec![2; 2 << 20], false).unwrap().0, 2 << 20, "was reserved");
    assert_eq!(file.allocate(2, 0, 1), Err(Errno::EOPNOTSUPP));
    assert_eq!(file.allocate(0, 0, 0), Err(Errno::EINVAL));
    assert_eq!(file.allocate(0, i64::MAX as u64, 1), Err(Errno::EFBIG));
}

#[test]
fn full_store_loses_nothing() {
    let f = fixture(1 << 20);
    let start = f.used();
    let file = f.file("a", &[1; 500 * KIB]);
    let (count, _) = file.write(500 * KIB as u64, &vec![2; 1 << 20], false).unwrap();
    assert!(count > 400 * KIB && count < 524 * KIB, "partial write of {count}");
    assert_eq!(f.stat("a").unwrap().size, (500 * KIB + count) as u64);
    let end = (500 * KIB + count) as u64;
    assert_eq!(file.write(end.next_multiple_of(page_bytes()), b"x", false), Err(Errno::ENOSPC));
    let held = aggregate(&file, 0, 500 * KIB);
    assert_eq!(file.write(0, &[3; 500 * KIB], false).unwrap().0, 500 * KIB, "overwriting");
    assert_eq!(held.to_vec().unwrap(), [1; 500 * KIB]);
    let mut made = 0;
    while f.mkdir(&format!("d{made}")).is_ok() {
        made += 1;
        assert!(made < 100, "no end of space");
    }
    let name = "n".repeat(200);
    assert_eq!(f.symlink("t", &name), Err(Errno::ENOSPC));
    assert_eq!(f.stat(&name), Err(Errno::ENOENT));
    let seen = read(&file, 0, 1 << 20);
    assert_eq!(seen[..500 * KIB], [3; 500 * KIB]);
    assert!(seen[500 * KIB..].iter().all(|byte| *byte == 2), "kept");
    drop(file);
    f.unlink("a").unwrap();
    (0..made).for_each(|at| f.rmdir(&format!("d{at}")).unwrap());
    assert_eq!(f.used(), start, "all given back");
}

#[test]
fn copies_share_and_keep_holes() {
    let f = fixture(LIMIT);
    let bytes = pattern(3 * BLOCK + 100, 3);
    let source = f.file("a", &bytes);
    resize(&f, &source, 10 << 20).unwrap();
    source.write((10 << 20) - 5, b"ender", false).unwrap();
    for shift in [0u64, 5000, BLOCK as u64] {
        let target = f.file("b", &vec![0xee; 11 << 20]);
        let copied = f.store.copy_range(&*source, 0, &*target, shift, 1 << 30).unwrap();
        assert_eq!(copied, 10 << 20, "up to the end");
        let mut expected = vec![0xee; 11 << 20];
        let start = shift as usize;
        expected[start..start + (10 << 20)].copy_from_slice(&read(&source, 0, 10 << 20));
        assert!(read(&target, 0, 11 << 20) == expected, "shifted by {shift}");
        assert!(target.stat().unwrap().blocks < (2 << 20) / 512, "holes stay holes");
        target.write(shift + 10, b"other", false).unwrap();
        assert_eq!(read(&source, 10, 5), bytes[10..15], "the source does not change");
        f.unlink("b").unwrap();
    }
    let overlap = f.store.copy_range(&*source, 0, &*source, 100, 200);
    assert_eq!(overlap, Err(Errno::EINVAL));
    let error = |from: &File, to: &File| f.store.copy_range(&**from, 0, &**to, 0, 1).unwrap_err();
    let (reader, writer) = (f.open("a", 0).unwrap(), f.open("a", 1).unwrap());
    let (directory, reference) = (f.open(".", 0).unwrap(), f.open("a", open_flag::PATH).unwrap());
    assert_eq!(error(&writer, &source), Errno::EBADF);
    assert_eq!(error(&source, &reader), Errno::EBADF);
    assert_eq!(error(&writer, &directory), Errno::EISDIR);
    assert_eq!(error(&directory, &reader), Errno::EISDIR);
    assert_eq!(error(&reference, &directory), Errno::EBADF);
    f.store.copy_range(&*source, 0, &*source, 20 << 20, 200_000).unwrap();
    assert_eq!(read(&source, 20 << 20, 200_000), read(&source, 0, 200_000));
}

#[test]
fn no_more_pages_than_paid_for() {
    let f = fixture(LIMIT);
    for round in 0..8 {
        f.file("big", &vec![1; 16 << 20]);
        f.unlink("big").unwrap();
        (0..200).for_each(|at| drop(f.file(&format!("{round}.{at}"), b"small")));
    }
    let taken = rustix::fs::fstat(f.store.tree().arena.memory().fd()).unwrap().st_blocks as u64;
    assert!(taken * 512 < f.used() + LIMIT / 8 + page_bytes(), "{taken} blocks");
}

/// What readers hold of files that were rewritten is in no file, but takes memory all the same.
#[test]
fn readers_hold_no_more_than_the_limit_and_256_mib_besides_it() {
    const MIB: usize = 1 << 20;
    let f = fixture(16 * MIB as u64);
    let arena = || f.store.tree().arena.clone();
    let file = f.file("a", &[0; MIB]);
    let mut held = Vec::new();
    while held.len() < 400 {
        held.push(aggregate(&file, 0, MIB));
        match file.write(0, &vec![held.len() as u8; MIB], false) {
            Ok((count, _)) if count == MIB => {}
            Ok(_) | Err(Errno::ENOSPC) => break,
            Err(error) => panic!("{error}"),
        }
        assert_eq!(f.store.is_overfull(), held.len() >= 16 + 256, "{} held", held.len());
    }
    assert_eq!(held.len(), 2 * 16 + 256);
    assert!(f.store.is_overfull());
    let kept = held.iter().enumerate();
    kept.for_each(|(at, held)| assert!(held.to_vec().unwrap() == [at as u8; MIB], "{at}"));
    assert_eq!(f.file("b", b"").write(0, &[1], false), Err(Errno::ENOSPC), "of another file, too");
    drop(held);
    assert!(!f.store.is_overfull());
    assert_eq!(file.write(0, &[7; MIB], false).unwrap().0, MIB);
    drop(file);
    f.unlink("a").unwrap();
    let taken = rustix::fs::fstat(arena().memory().fd()).unwrap().st_blocks as u64 * 512;
    assert!(arena().resident_bytes() >= taken, "{taken} bytes taken");
    assert!(arena().resident_bytes() <= 2 * MIB as u64, "an eighth of the limit stays");
}

#[test]
fn a_copy_ends_where_the_largest_file_ends() {
    const TOP: u64 = i64::MAX as u64;
    let f = fixture(LIMIT);
    let (from, to) = (f.file("a", &pattern(20_000, 3)), f.file("b", b""));
    let copy = |target, length| f.store.copy_range(&*from, 0, &*to, target, length);
    assert_eq!(copy(TOP - 5000, 9000), Ok(5000));
    assert_eq!(read(&to, TOP - 5000, 5000), pattern(5000, 3));
    assert_eq!((copy(TOP, 9000), copy(TOP, 0)), (Err(Errno::EFBIG), Err(Errno::EFBIG)));
    assert_eq!(copy(TOP + 1, 9000), Err(Errno::EINVAL));
}
