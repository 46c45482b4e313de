//! Tests of the memory store.

mod attributes;
mod data;
mod names;
mod threads;

use crate::memory::MemoryStore;
use crate::{Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, XattrAction};
use std::sync::Arc;
use towline_mem::{Aggregate, Segment};
use towline_wire::request::open_flag;
use towline_wire::{Attr, Errno, Timestamp};

const LIMIT: u64 = 64 * 1024 * 1024;
const KIB: usize = 1024;
const BLOCK: usize = 64 * KIB;
const CREATE: u32 = open_flag::CREATE | 2;
const READ_WRITE: u32 = 2;

/// A store, its root and a caller, with short helper functions.
pub(in crate::memory) struct Fixture {
    pub(in crate::memory) store: Arc<MemoryStore>,
    pub(in crate::memory) root: Arc<dyn OpenFile>,
    pub(in crate::memory) caller: Caller,
}

type File = Arc<dyn OpenFile>;

pub(in crate::memory) fn free_caller() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false }
}

fn user(uid: u32, gid: u32) -> Caller {
    Caller { uid, gid, groups: Arc::new([]), enforce: true }
}

pub(in crate::memory) fn fixture(limit: u64) -> Fixture {
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
        self.store.unlink(&self.caller, self.at(path), false).map(drop)
    }

    fn rmdir(&self, path: &str) -> Result<(), Errno> {
        self.store.unlink(&self.caller, self.at(path), true).map(drop)
    }

    fn rename(&self, old: &str, new: &str, flags: u32) -> Result<(), Errno> {
        self.store.rename(&self.caller, self.at(old), self.at(new), flags).map(drop)
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

/// Collects names and cookies, up to a number of entries.
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

/// Returns all names in a directory.
pub(in crate::memory) fn names(f: &Fixture, path: &str) -> std::collections::BTreeSet<String> {
    let directory = f.open(path, open_flag::DIRECTORY).unwrap();
    list(&directory, 0, usize::MAX).0.into_iter().map(|(_, name)| name).collect()
}
