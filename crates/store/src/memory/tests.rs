//! Tests of the memory store.

use super::MemoryStore;
use crate::{Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, XattrAction};
use std::sync::Arc;
use towline_mem::{Aggregate, Segment};
use towline_wire::{Attr, Errno, Timestamp};

const LIMIT: u64 = 64 * 1024 * 1024;
const KIB: usize = 1024;
const BLOCK: usize = 64 * KIB;
const CREATE: u32 = (libc::O_CREAT | libc::O_RDWR) as u32;
const READ_WRITE: u32 = libc::O_RDWR as u32;

/// A store, its root, and a caller: short names for the tests.
pub(super) struct Fixture {
    pub(super) store: Arc<MemoryStore>,
    pub(super) root: Arc<dyn OpenFile>,
    pub(super) caller: Caller,
}

type File = Arc<dyn OpenFile>;

pub(super) fn free_caller() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false }
}

fn user(uid: u32, gid: u32) -> Caller {
    Caller { uid, gid, groups: Arc::new([]), enforce: true }
}

pub(super) fn fixture(limit: u64) -> Fixture {
    let store = MemoryStore::new("test", limit).unwrap();
    let root = store.root().unwrap();
    Fixture { store, root, caller: free_caller() }
}

impl Fixture {
    fn at<'a>(&'a self, path: &'a str) -> (&'a dyn OpenFile, &'a [u8]) {
        (&*self.root, path.as_bytes())
    }

    fn as_user(&self, uid: u32, gid: u32) -> Self {
        Self { store: self.store.clone(), root: self.root.clone(), caller: user(uid, gid) }
    }

    fn open(&self, path: &str, flags: u32) -> Result<File, Errno> {
        let how = OpenHow { flags, mode: 0o644 };
        self.store.open(&self.caller, self.at(path), how).map(|(file, _)| file)
    }

    fn stat(&self, path: &str) -> Result<Attr, Errno> {
        self.store.stat(&self.caller, self.at(path), false)
    }

    fn mkdir(&self, path: &str) -> Result<Attr, Errno> {
        self.store.make_directory(&self.caller, self.at(path), 0o755)
    }

    fn symlink(&self, target: &str, path: &str) -> Result<Attr, Errno> {
        self.store.symlink(&self.caller, self.at(path), target.as_bytes())
    }

    fn link(&self, old: &str, new: &str) -> Result<Attr, Errno> {
        self.store.link(&self.caller, self.at(old), false, self.at(new))
    }

    fn unlink(&self, path: &str) -> Result<(), Errno> {
        self.store.unlink(&self.caller, self.at(path), false)
    }

    fn rmdir(&self, path: &str) -> Result<(), Errno> {
        self.store.unlink(&self.caller, self.at(path), true)
    }

    fn rename(&self, old: &str, new: &str, flags: u32) -> Result<(), Errno> {
        self.store.rename(&self.caller, self.at(old), self.at(new), flags)
    }

    fn set(&self, path: &str, set: SetAttr) -> Result<Attr, Errno> {
        self.store.set_attr(&self.caller, self.at(path), true, &set)
    }

    fn chmod(&self, path: &str, mode: u32) -> Result<Attr, Errno> {
        self.set(path, SetAttr { mode: Some(mode), ..SetAttr::default() })
    }

    fn file(&self, path: &str, bytes: &[u8]) -> File {
        let file = self.open(path, CREATE).unwrap();
        assert_eq!(file.write(0, bytes, false).unwrap().0, bytes.len(), "short write");
        file
    }

    fn used(&self) -> u64 {
        self.store.tree().arena.usage().1
    }
}

fn read(file: &File, offset: u64, length: usize) -> Vec<u8> {
    aggregate(file, offset, length).to_vec().unwrap()
}

fn aggregate(file: &File, offset: u64, length: usize) -> Aggregate {
    match file.read(offset, length, false).unwrap() {
        ReadOutcome::Ready(aggregate) => aggregate,
        ReadOutcome::WouldBlock => panic!("a memory store never waits"),
    }
}

fn resize(fixture: &Fixture, file: &File, size: u64) -> Result<Attr, Errno> {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fixture.store.set_attr(&fixture.caller, (&**file, b""), true, &set)
}

/// Names and cookies, up to a number of entries.
struct Collected {
    entries: Vec<(u64, Vec<u8>, Option<Attr>)>,
    room: usize,
}

impl Listing for Collected {
    fn entry(&mut self, cookie: u64, _: u64, _: u8, name: &[u8], attr: Option<Attr>) -> bool {
        if self.room == 0 {
            return false;
        }
        self.room -= 1;
        self.entries.push((cookie, name.to_vec(), attr));
        true
    }
}

fn list(directory: &File, cookie: u64, room: usize) -> (Vec<(u64, String)>, bool) {
    let mut listing = Collected { entries: Vec::new(), room };
    let end = directory.read_directory(cookie, true, &mut listing).unwrap();
    let text = |name: Vec<u8>| String::from_utf8(name).unwrap();
    (listing.entries.into_iter().map(|(cookie, name, _)| (cookie, text(name))).collect(), end)
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

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
    assert_eq!(attr.blocks, attr.size.div_ceil(4096) * 8, "blocks");
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

/// Where the bytes of a slice stand.
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
    assert_eq!(f.stat("a").unwrap().blocks, 8, "one page");
    let held = aggregate(&file, 0, 300 * KIB);
    assert!(held.slices().all(|slice| matches!(slice.segment, Segment::Host(_))), "zeros");
    assert_eq!(held.to_vec().unwrap(), vec![0; 300 * KIB]);
    assert_eq!(file.seek(0, 3), Ok(1 << 40), "data");
    assert_eq!(file.seek(0, 4), Ok(0), "hole");
    assert_eq!(file.seek(1 << 40, 4), Ok((1 << 40) + 3), "the end is a hole");
    assert_eq!(file.seek((1 << 40) + 3, 3), Err(Errno::ENXIO));
    file.write(0, &[1; 3 * BLOCK], false).unwrap();
    file.allocate(3, 5000, 100_000).unwrap();
    let seen = read(&file, 0, 3 * BLOCK);
    let zero = |at: usize| (5000..105_000).contains(&at);
    assert!(seen.iter().enumerate().all(|(at, byte)| (*byte == 0) == zero(at)), "punched");
    assert_eq!(file.seek(4096, 4), Ok(8192), "hole of whole pages");
    assert_eq!(file.seek(8192, 3), Ok(102_400), "data behind it");
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
    assert_eq!(file.write(end.next_multiple_of(4096), b"x", false), Err(Errno::ENOSPC));
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
fn open_follows_its_flags() {
    let f = fixture(LIMIT);
    let file = f.file("a", b"abc");
    let (creat, excl, trunc) = (libc::O_CREAT as u32, libc::O_EXCL as u32, libc::O_TRUNC as u32);
    let (directory, no_follow) = (libc::O_DIRECTORY as u32, libc::O_NOFOLLOW as u32);
    assert_eq!(f.open("a", creat | excl).err(), Some(Errno::EEXIST));
    assert_eq!(f.open("a", directory).err(), Some(Errno::ENOTDIR));
    assert_eq!(f.open("a/", 0).err(), Some(Errno::ENOTDIR));
    assert_eq!(f.open("new/", creat).err(), Some(Errno::EISDIR));
    assert_eq!(f.open("none", 0).err(), Some(Errno::ENOENT));
    assert_eq!(f.open("a/b", 0).err(), Some(Errno::ENOTDIR));
    assert_eq!(f.open(&"n".repeat(256), creat).err(), Some(Errno::ENAMETOOLONG));
    assert_eq!(f.open(".", READ_WRITE).err(), Some(Errno::EISDIR));
    assert_eq!(f.open("/a", 0).err(), Some(Errno::EXDEV));
    assert_eq!(f.open("..", 0).err(), Some(Errno::EXDEV));
    f.symlink("a", "s").unwrap();
    f.symlink("new", "dangling").unwrap();
    assert_eq!(f.open("s", no_follow).err(), Some(Errno::ELOOP));
    let link = f.open("s", no_follow | libc::O_PATH as u32).unwrap();
    assert!(link.stat().unwrap().is_symlink());
    assert_eq!(f.store.read_link(&f.caller, (&*link, b"")).unwrap(), b"a");
    assert_eq!(f.open("dangling", creat | excl).err(), Some(Errno::EEXIST));
    f.open("dangling", creat).unwrap();
    assert!(f.stat("new").unwrap().is_file(), "created through the link");
    let path = f.open("a", libc::O_PATH as u32).unwrap();
    assert_eq!(path.read(0, 1, true).err(), Some(Errno::EBADF));
    assert_eq!(path.write(0, b"x", false), Err(Errno::EBADF));
    f.open("s", READ_WRITE | trunc).unwrap();
    assert_eq!(file.stat().unwrap().size, 0, "truncated");
    let append = f.open("a", READ_WRITE | libc::O_APPEND as u32).unwrap();
    file.write(0, b"12", false).unwrap();
    assert_eq!(append.write(0, b"34", false), Ok((2, 2)));
    let again = f.store.open(&f.caller, (&*path, b""), OpenHow { flags: 0, mode: 0 }).unwrap().0;
    assert_eq!(read(&again, 0, 9), b"1234", "reopened");
    assert_eq!(again.identity(), file.identity());
    f.store.make_node(&f.caller, f.at("fifo"), 0o010_644, 0).unwrap();
    assert_eq!(f.open("fifo", 0).err(), Some(Errno::ENXIO));
}

#[test]
fn temporary_files_may_be_linked() {
    let f = fixture(LIMIT);
    let temporary = libc::O_TMPFILE as u32;
    assert_eq!(f.open(".", temporary).err(), Some(Errno::EINVAL));
    let file = f.open(".", temporary | READ_WRITE).unwrap();
    file.write(0, b"abc", false).unwrap();
    assert_eq!(file.stat().unwrap().links, 0);
    f.store.link(&f.caller, (&*file, b""), false, f.at("a")).unwrap();
    assert_eq!(read(&f.open("a", 0).unwrap(), 0, 9), b"abc");
    f.unlink("a").unwrap();
    let link = f.store.link(&f.caller, (&*file, b""), false, f.at("a"));
    assert_eq!(link, Err(Errno::ENOENT), "removed");
    let hidden = f.open(".", temporary | READ_WRITE | libc::O_EXCL as u32).unwrap();
    let link = f.store.link(&f.caller, (&*hidden, b""), false, f.at("a"));
    assert_eq!(link, Err(Errno::ENOENT), "never to be linked");
}

#[test]
fn links_resolve_inside() {
    let f = fixture(LIMIT);
    f.mkdir("d").unwrap();
    f.mkdir("d/e").unwrap();
    f.file("d/x", b"x");
    f.symlink("../d/./e/..//x", "d/s").unwrap();
    f.symlink("d/s", "t").unwrap();
    f.symlink("d/", "slashed").unwrap();
    f.symlink("/d", "absolute").unwrap();
    f.symlink("../..", "d/out").unwrap();
    f.symlink("loop", "loop").unwrap();
    let follow = |path| f.store.stat(&f.caller, f.at(path), true).map(|attr| attr.inode);
    let x = f.stat("d/x").unwrap().inode;
    assert_eq!(follow("t"), Ok(x));
    assert_eq!(follow("slashed/x"), Ok(x));
    assert_eq!(follow("slashed/../t"), Ok(x));
    assert_eq!(follow("t/"), Err(Errno::ENOTDIR));
    assert_eq!(follow("absolute"), Err(Errno::EXDEV));
    assert_eq!(follow("d/out"), Err(Errno::EXDEV));
    assert_eq!(follow("loop"), Err(Errno::ELOOP));
    assert!(f.stat("slashed").unwrap().is_symlink());
    assert!(f.stat("slashed/").unwrap().is_directory());
    for at in 0..45 {
        let target = if at == 0 { "d".into() } else { format!("chain{}", at - 1) };
        f.symlink(&target, &format!("chain{at}")).unwrap();
    }
    assert!(follow("chain39").is_ok(), "forty links");
    assert_eq!(follow("chain40"), Err(Errno::ELOOP));
    let e = f.open("d/e", libc::O_PATH as u32).unwrap();
    assert_eq!(f.store.stat(&f.caller, (&*e, b"../x"), true).unwrap().inode, x);
}

#[test]
fn names_follow_the_rules() {
    let f = fixture(LIMIT);
    f.mkdir("d").unwrap();
    assert_eq!(f.mkdir("d"), Err(Errno::EEXIST));
    assert_eq!(f.mkdir("d/.."), Err(Errno::EEXIST));
    f.mkdir("d/sub/").unwrap();
    assert_eq!(f.stat("d").unwrap().links, 3);
    assert_eq!(f.rmdir("d"), Err(Errno::ENOTEMPTY));
    assert_eq!(f.rmdir("d/."), Err(Errno::EINVAL));
    assert_eq!(f.rmdir("d/.."), Err(Errno::ENOTEMPTY));
    assert_eq!(f.unlink("d"), Err(Errno::EISDIR));
    let file = f.file("d/a", b"abc");
    assert_eq!(f.rmdir("d/a"), Err(Errno::ENOTDIR));
    assert_eq!(f.unlink("d/a/"), Err(Errno::ENOTDIR));
    assert_eq!(f.link("d", "e"), Err(Errno::EPERM));
    assert_eq!(f.link("d/a", "b").unwrap().links, 2);
    assert_eq!(f.link("d/a", "b"), Err(Errno::EEXIST));
    assert_eq!(f.symlink("x", "s/"), Err(Errno::ENOENT));
    f.unlink("d/a").unwrap();
    f.unlink("b").unwrap();
    assert_eq!(file.stat().unwrap().links, 0);
    assert_eq!(read(&file, 0, 9), b"abc", "open files stay");
    let sub = f.open("d/sub", 0).unwrap();
    f.rmdir("d/sub").unwrap();
    assert_eq!(f.stat("d").unwrap().links, 2);
    let made = f.store.make_directory(&f.caller, (&*sub, b"x"), 0o755);
    assert_eq!(made, Err(Errno::ENOENT), "removed directory");
    assert_eq!(list(&sub, 0, 9), (vec![], true));
    assert_eq!(f.store.make_node(&f.caller, f.at("n"), 0o040_000, 0), Err(Errno::EPERM));
    assert_eq!(f.store.make_node(&f.caller, f.at("n"), 0o160_000, 0), Err(Errno::EINVAL));
    let node = f.store.make_node(&f.caller, f.at("n"), 0o020_600, 0x103).unwrap();
    assert_eq!((node.mode, node.rdev), (0o020_600, 0x103));
}

#[test]
fn renames_follow_the_rules() {
    let f = fixture(LIMIT);
    for path in ["d", "d/e", "d/e/f", "empty", "full", "full/x"] {
        f.mkdir(path).unwrap();
    }
    f.file("a", b"a");
    f.file("b", b"b");
    assert_eq!(f.rename("d", "d/e/g", 0), Err(Errno::EINVAL), "into itself");
    assert_eq!(f.rename("d/e/f", "d", 0), Err(Errno::ENOTEMPTY), "onto an ancestor");
    assert_eq!(f.rename("d/e/f", "d", 2), Err(Errno::EINVAL), "exchange with an ancestor");
    assert_eq!(f.rename("d", "full", 0), Err(Errno::ENOTEMPTY));
    assert_eq!(f.rename("a", "empty", 0), Err(Errno::EISDIR));
    assert_eq!(f.rename("d", "a", 0), Err(Errno::ENOTDIR));
    assert_eq!(f.rename("a/", "c", 0), Err(Errno::ENOTDIR));
    assert_eq!(f.rename("a", "c/", 0), Err(Errno::ENOTDIR));
    assert_eq!(f.rename("d/.", "c", 0), Err(Errno::EBUSY));
    assert_eq!(f.rename("a", "d/..", 0), Err(Errno::EBUSY));
    assert_eq!(f.rename("a", "b", 1), Err(Errno::EEXIST));
    assert_eq!(f.rename("a", "none", 2), Err(Errno::ENOENT));
    assert_eq!(f.rename("a", "b", 3), Err(Errno::EINVAL));
    f.link("a", "same").unwrap();
    f.rename("a", "same", 0).unwrap();
    assert!(f.stat("a").is_ok(), "two names of one file both stay");
    f.rename("a", "d/e", 2).unwrap();
    assert!(f.stat("a/f").unwrap().is_directory(), "exchanged");
    assert_eq!((f.stat("d").unwrap().links, f.stat(".").unwrap().links), (2, 6));
    f.rename("a", "empty", 0).unwrap();
    assert!(f.stat("empty/f").unwrap().is_directory(), "replaced");
    assert_eq!(f.stat(".").unwrap().links, 5);
    f.rename("full/x", "d/moved", 0).unwrap();
    assert_eq!(f.stat("d/moved/..").unwrap().inode, f.stat("d").unwrap().inode);
    assert_eq!((f.stat("d").unwrap().links, f.stat("full").unwrap().links), (3, 2));
}

#[test]
fn listings_are_stable() {
    let f = fixture(LIMIT);
    f.mkdir("d").unwrap();
    (0..100).for_each(|at| drop(f.file(&format!("d/{at}"), b"")));
    let directory = f.open("d", 0).unwrap();
    let (first, end) = list(&directory, 0, 3);
    assert_eq!(first, [(1, ".".into()), (2, "..".into()), (3, "0".into())]);
    assert!(!end);
    let mut seen = Vec::new();
    let mut cookie = 2;
    loop {
        let (entries, end) = list(&directory, cookie, 7);
        for (next, name) in entries {
            cookie = next;
            f.unlink(&format!("d/{name}")).unwrap();
            seen.push(name);
        }
        f.file(&format!("d/new{}", seen.len()), b"");
        f.unlink(&format!("d/new{}", seen.len())).unwrap();
        if end {
            break;
        }
    }
    assert_eq!(seen, (0..100).map(|at| at.to_string()).collect::<Vec<_>>());
    let mut listing = Collected { entries: Vec::new(), room: 9 };
    f.file("d/z", b"123");
    assert!(directory.read_directory(0, true, &mut listing).unwrap());
    let attr = |at: usize| listing.entries[at].2.unwrap();
    assert_eq!(attr(0), f.stat("d").unwrap());
    assert_eq!(attr(1).inode, f.stat(".").unwrap().inode);
    assert_eq!(attr(2), f.stat("d/z").unwrap());
}

#[test]
fn permissions_are_enforced() {
    let f = fixture(LIMIT);
    let (one, two) = (f.as_user(1000, 100), f.as_user(2000, 200));
    let root = f.as_user(0, 0);
    let made = one.mkdir("home").unwrap();
    assert_eq!((made.uid, made.gid), (1000, 100));
    one.file("home/a", b"secret");
    one.chmod("home/a", 0o600).unwrap();
    assert_eq!(two.open("home/a", 0).err(), Some(Errno::EACCES));
    assert_eq!(two.open("home/new", CREATE).err(), Some(Errno::EACCES));
    assert_eq!(two.chmod("home/a", 0o666), Err(Errno::EPERM));
    assert_eq!(two.unlink("home/a"), Err(Errno::EACCES));
    assert!(root.open("home/a", READ_WRITE).is_ok());
    one.chmod("home", 0o700).unwrap();
    assert_eq!(two.stat("home/a"), Err(Errno::EACCES));
    assert_eq!(two.store.access(&two.caller, two.at("home"), 4), Err(Errno::EACCES));
    one.file("tmp", b"");
    assert_eq!(two.unlink("tmp"), Err(Errno::EPERM), "sticky");
    assert_eq!(two.rename("tmp", "mine", 0), Err(Errno::EPERM), "sticky");
    assert_eq!(two.link("tmp", "mine"), Err(Errno::EPERM), "protected");
    let own = |uid, gid| SetAttr { uid, gid, ..SetAttr::default() };
    assert_eq!(one.set("tmp", own(Some(2000), None)), Err(Errno::EPERM));
    assert_eq!(one.set("tmp", own(None, Some(200))), Err(Errno::EPERM));
    one.set("tmp", own(Some(1000), Some(100))).unwrap();
    let times =
        |accessed, modified| SetAttr { times: Some((accessed, modified)), ..SetAttr::default() };
    let (now, some) = (Timestamp::NOW, Timestamp::new(5, 6));
    one.chmod("tmp", 0o602).unwrap();
    assert!(two.set("tmp", times(now, now)).is_ok());
    assert_eq!(two.set("tmp", times(some, now)), Err(Errno::EPERM));
    one.chmod("tmp", 0o600).unwrap();
    assert_eq!(two.set("tmp", times(now, now)), Err(Errno::EACCES));
    let attr = one.set("tmp", times(some, Timestamp::OMIT)).unwrap();
    assert_eq!(attr.accessed, some);
    assert_eq!(one.set("tmp", times(Timestamp::new(1, 1 << 30), some)), Err(Errno::EINVAL));
    let size = SetAttr { size: Some(5), ..SetAttr::default() };
    assert_eq!(two.set("tmp", size), Err(Errno::EACCES));
    let device = |f: &Fixture| f.store.make_node(&f.caller, f.at("dev"), 0o020_600, 7);
    assert_eq!(device(&one), Err(Errno::EPERM));
    assert!(device(&root).is_ok());
}

#[test]
fn set_id_bits_and_groups() {
    let f = fixture(LIMIT);
    let one = f.as_user(1000, 100);
    let file = one.file("a", b"x");
    one.chmod("a", 0o6755).unwrap();
    file.write(0, b"y", false).unwrap();
    assert_eq!(f.stat("a").unwrap().mode & 0o7777, 0o755, "cleared by writing");
    one.chmod("a", 0o6755).unwrap();
    let gid = SetAttr { gid: Some(100), ..SetAttr::default() };
    assert_eq!(one.set("a", gid).unwrap().mode & 0o7777, 0o755, "cleared by chown");
    let root = f.as_user(0, 0);
    root.chmod("a", 0o4755).unwrap();
    root.open("a", READ_WRITE).unwrap().write(0, b"z", false).unwrap();
    assert_eq!(f.stat("a").unwrap().mode & 0o7777, 0o4755, "root may");
    root.mkdir("g").unwrap();
    root.set("g", SetAttr { gid: Some(300), mode: Some(0o2777), ..SetAttr::default() }).unwrap();
    assert_eq!(one.file("g/a", b"").stat().unwrap().gid, 300);
    let sub = one.mkdir("g/sub").unwrap();
    assert_eq!((sub.gid, sub.mode & 0o7777), (300, 0o2755));
}

#[test]
fn times_and_change_counter_follow() {
    let f = fixture(LIMIT);
    let file = f.file("a", b"abc");
    let before = f.stat("a").unwrap();
    read(&file, 0, 3);
    let after = f.stat("a").unwrap();
    assert!(after.accessed > before.accessed, "first read after a change");
    assert_eq!((after.change, after.changed), (before.change, before.changed));
    read(&file, 0, 3);
    assert_eq!(f.stat("a").unwrap().accessed, after.accessed, "relatime");
    file.write(0, b"d", false).unwrap();
    let written = f.stat("a").unwrap();
    assert!(written.modified > after.modified && written.changed > after.changed);
    assert!(written.change > after.change && written.created == before.created);
    f.chmod("a", 0o600).unwrap();
    let changed = f.stat("a").unwrap();
    assert_eq!(changed.modified, written.modified);
    assert!(changed.changed > written.changed && changed.change > written.change);
    let directory = f.stat(".").unwrap();
    f.link("a", "b").unwrap();
    assert!(f.stat(".").unwrap().modified > directory.modified);
    assert!(f.stat("a").unwrap().change > changed.change);
}

#[test]
fn extended_attributes() {
    let f = fixture(LIMIT);
    let used = f.used();
    drop(f.file("a", b""));
    fn act(f: &Fixture, path: &str, action: XattrAction<'_>) -> Result<Vec<u8>, Errno> {
        f.store.xattr(&f.caller, f.at(path), false, action)
    }
    let set = |name: &'static [u8], value: &'static [u8], flags| {
        act(&f, "a", XattrAction::Set(name, value, flags))
    };
    assert_eq!(set(b"user.x", b"1", 2), Err(Errno::ENODATA));
    assert!(set(b"user.x", b"1", 1).is_ok());
    assert_eq!(set(b"user.x", b"1", 1), Err(Errno::EEXIST));
    assert!(set(b"user.y", b"22", 0).is_ok());
    assert!(set(b"trusted.t", b"", 0).is_ok());
    assert_eq!(set(b"strange", b"", 0), Err(Errno::EOPNOTSUPP));
    assert_eq!(set(b"", b"", 0), Err(Errno::ERANGE));
    let big = vec![0; 65537];
    assert_eq!(act(&f, "a", XattrAction::Set(b"user.b", &big, 0)), Err(Errno(7)));
    assert_eq!(act(&f, "a", XattrAction::Get(b"user.y")).unwrap(), b"22");
    assert_eq!(act(&f, "a", XattrAction::Get(b"user.z")), Err(Errno::ENODATA));
    assert_eq!(act(&f, "a", XattrAction::List).unwrap(), b"trusted.t\0user.x\0user.y\0");
    let one = f.as_user(1000, 100);
    assert_eq!(act(&one, "a", XattrAction::List).unwrap(), b"user.x\0user.y\0");
    assert_eq!(act(&one, "a", XattrAction::Remove(b"user.x")), Err(Errno::EACCES));
    assert!(act(&f, "a", XattrAction::Remove(b"user.x")).is_ok());
    assert_eq!(act(&f, "a", XattrAction::Remove(b"user.x")), Err(Errno::ENODATA));
    f.symlink("a", "s").unwrap();
    assert_eq!(act(&f, "s", XattrAction::Set(b"user.x", b"", 0)), Err(Errno::EPERM));
    for at in 0..15 {
        act(&f, "a", XattrAction::Set(format!("user.{at}").as_bytes(), &big[1..], 0)).unwrap();
    }
    let full = act(&f, "a", XattrAction::Set(b"user.full", &big[1..], 0));
    assert_eq!(full, Err(Errno::ENOSPC));
    f.unlink("a").unwrap();
    f.unlink("s").unwrap();
    assert_eq!(f.used(), used, "all given back");
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
    f.store.copy_range(&*source, 0, &*source, 20 << 20, 200_000).unwrap();
    assert_eq!(read(&source, 20 << 20, 200_000), read(&source, 0, 200_000));
}

#[test]
fn deep_trees_go_without_recursion() {
    let f = fixture(LIMIT);
    let mut directory = f.root.clone();
    for _ in 0..50_000 {
        f.store.make_directory(&f.caller, (&*directory, b"d"), 0o755).unwrap();
        let how = OpenHow { flags: libc::O_PATH as u32, mode: 0 };
        directory = f.store.open(&f.caller, (&*directory, b"d"), how).unwrap().0;
    }
    drop(directory);
    drop(f);
}

#[test]
fn many_threads_agree() {
    let f = fixture(LIMIT);
    for path in ["x", "y", "x/sub", "y/sub"] {
        f.mkdir(path).unwrap();
    }
    let shared = f.file("shared", b"");
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (f, shared) = (&f, &shared);
            scope.spawn(move || {
                for round in 0..1500u64 {
                    let name = format!("x/{}", (thread + round) % 5);
                    let file = f.open(&name, CREATE);
                    if let Ok(file) = file {
                        file.write(round * 999, &[thread as u8; 5000], false).unwrap();
                        drop(aggregate(&file, 0, 1 << 20));
                    }
                    shared.write(0, &[thread as u8; 8], true).unwrap();
                    let _ = f.rename(&name, &format!("y/sub/{}", round % 3), (round % 3) as u32);
                    let _ = f.rename("x/sub", "y/sub/moved", 0);
                    let _ = f.rename("y/sub/moved", "x/sub", 0);
                    let _ = f.rename("y/sub", "x/sub", 2);
                    let _ = f.unlink(&format!("y/sub/{}", round % 3));
                    list(&f.open("x", 0).unwrap(), 0, 100);
                    list(&f.open("y", 0).unwrap(), 0, 100);
                    let _ = f.rmdir("x/sub");
                    let _ = f.mkdir("x/sub");
                    let _ = f.mkdir("y/sub");
                }
            });
        }
    });
    let size = shared.stat().unwrap().size;
    assert_eq!(size, 8 * 1500 * 8, "appends are atomic");
    let bytes = read(&shared, 0, size as usize);
    assert!(bytes.chunks(8).all(|chunk| chunk.iter().all(|byte| *byte == chunk[0])), "whole");
    remove_all(&f, ".");
    drop(shared);
    let fresh = fixture(LIMIT);
    assert_eq!(f.used(), fresh.used(), "all given back");
    assert_eq!(f.stat(".").unwrap().links, 2, "links counted");
}

fn remove_all(f: &Fixture, path: &str) {
    for (_, name) in list(&f.open(path, 0).unwrap(), 2, usize::MAX).0 {
        let child = format!("{path}/{name}");
        if f.stat(&child).unwrap().is_directory() {
            remove_all(f, &child);
            f.rmdir(&child).unwrap();
        } else {
            f.unlink(&child).unwrap();
        }
    }
}

#[test]
fn readers_see_whole_writes() {
    let f = fixture(LIMIT);
    let file = f.file("a", &vec![0; 4 * BLOCK]);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (0..3000u32).for_each(|round| {
                file.write(0, &vec![round as u8; 4 * BLOCK], false).unwrap();
            });
        });
        while !writer.is_finished() {
            let held = aggregate(&file, 0, 4 * BLOCK);
            std::thread::yield_now();
            let bytes = held.to_vec().unwrap();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "mixed bytes");
        }
    });
}

/// All names in a directory.
pub(super) fn names(f: &Fixture, path: &str) -> std::collections::BTreeSet<String> {
    let directory = f.open(path, libc::O_DIRECTORY as u32).unwrap();
    list(&directory, 0, usize::MAX).0.into_iter().map(|(_, name)| name).collect()
}
