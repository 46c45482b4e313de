//! Files read by their path, beside files that are opened first: the same bytes and errors.
//!
//! This is a program of its own, since a process forgets all its known directories at once.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{caller, is_watched, look};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use towline_store::directory::DirectoryStore;
use towline_store::memory::MemoryStore;
use towline_store::{Caller, Closing, FileStore, OpenHow, PathRead, ReadOutcome};
use towline_wire::Errno;
use towline_wire::request::open_flag::{DIRECT, DIRECTORY, NO_ACCESS_TIME, NO_FOLLOW, PATH};

const WRITE_ONLY: u32 = 1;
const READ_WRITE: u32 = 2;
const FLAGS: [u32; 9] = [
    0,
    NO_FOLLOW,
    NO_ACCESS_TIME,
    DIRECTORY,
    DIRECT,
    PATH,
    WRITE_ONLY,
    READ_WRITE,
    READ_WRITE | NO_FOLLOW,
];
const LENGTHS: [usize; 6] = [0, 1, 4096, 5000, 32 * 1024 - 1, 100_000];
/// Names in the directory `a/b` of the tree that [`fill`] makes.
const NAMES: [&str; 13] = [
    "empty",
    "page",
    "long",
    "sparse",
    "directory",
    "inside",
    "outside",
    "nowhere",
    "missing",
    "pipe",
    "socket",
    "device",
    "secret",
];

fn fill(root: &Path) {
    let directory = root.join("export/a/b");
    fs::create_dir_all(directory.join("directory")).unwrap();
    fs::write(root.join("beside"), "outside of the export").unwrap();
    let bytes =
        |length: usize| (0..length).map(|at| at as u8 ^ (at >> 8) as u8).collect::<Vec<_>>();
    for (name, length) in [("empty", 0), ("page", 4096), ("long", 70_000), ("secret", 9)] {
        fs::write(directory.join(name), bytes(length)).unwrap();
    }
    fs::File::create(directory.join("sparse")).unwrap().set_len(50_000).unwrap();
    fs::set_permissions(directory.join("secret"), Permissions::from_mode(0o000)).unwrap();
    symlink("../b/page", directory.join("inside")).unwrap();
    symlink("../../../beside", directory.join("outside")).unwrap();
    symlink("missing", directory.join("nowhere")).unwrap();
    mknodat(CWD, directory.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    drop(UnixListener::bind(directory.join("socket")).unwrap());
    let zeroes = makedev(1, 5);
    if mknodat(CWD, directory.join("device"), FileType::CharacterDevice, Mode::RUSR, zeroes)
        .is_err()
    {
        println!("SKIPPED reading a device by its path: making one takes root");
    }
}

/// The bytes, and whether the file was read in the short way.
fn by_path(
    store: &dyn FileStore,
    caller: &Caller,
    path: &[u8],
    flags: u32,
    length: usize,
) -> Result<(Vec<u8>, bool), Errno> {
    let root = store.root()?;
    match store.read_path(caller, (&*root, path), flags, length)? {
        PathRead::Ready(data, closing) => {
            Ok((data.to_vec().unwrap(), matches!(closing, Some(Closing::Descriptor(_)))))
        }
        PathRead::WouldBlock(file) => match file.read(0, length, true)? {
            ReadOutcome::Ready(data) => Ok((data.to_vec().unwrap(), false)),
            ReadOutcome::WouldBlock => panic!("a read that may wait would wait"),
        },
    }
}

fn opened_first(
    store: &dyn FileStore,
    caller: &Caller,
    path: &[u8],
    flags: u32,
    length: usize,
) -> Result<Vec<u8>, Errno> {
    let root = store.root()?;
    let (file, _) = store.open(caller, (&*root, path), OpenHow { flags, mode: 0 })?;
    match file.read(0, length, true)? {
        ReadOutcome::Ready(data) => Ok(data.to_vec().unwrap()),
        ReadOutcome::WouldBlock => panic!("a read that may wait would wait"),
    }
}

/// Compares both for all files, flags and lengths; returns how many were read in the short way.
fn compare(store: &dyn FileStore, caller: &Caller, before_each: impl Fn()) -> usize {
    let mut short = 0;
    for name in NAMES {
        let path = format!("a/b/{name}");
        for flags in FLAGS {
            for length in LENGTHS {
                before_each();
                let read = by_path(store, caller, path.as_bytes(), flags, length);
                let expected = opened_first(store, caller, path.as_bytes(), flags, length);
                short += usize::from(read.as_ref().is_ok_and(|(_, short)| *short));
                let read = read.map(|(bytes, _)| bytes);
                assert_eq!(read, expected, "{path}, flags {flags:o}, {length} bytes");
            }
        }
    }
    short
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn reading_by_path_is_opening_and_reading() {
    let temporary = tempfile::tempdir().unwrap();
    fill(temporary.path());
    let root = temporary.path().join("export");
    let store = DirectoryStore::new(&root, false).unwrap();
    let read_only = DirectoryStore::new(&root, true).unwrap();
    let user = Caller { uid: 65534, gid: 65534, enforce: true, ..caller() };
    // A thread that executes no requests relies on no known directory.
    assert_eq!(compare(&*store, &caller(), || {}), 0);
    compare(&*read_only, &caller(), || {});
    if rustix::process::geteuid().is_root() {
        compare(&*store, &user, || {});
    }

    // Nothing stays open. Known directories do, so they are made known before.
    let known = root.join("a/b");
    let make_known = |store: &DirectoryStore| {
        (0..1000).any(|_| {
            look(store, "a/b/page").unwrap();
            is_watched(&known)
        })
    };
    if !make_known(&store) || !make_known(&read_only) {
        return println!("SKIPPED reading in known directories: none is known on this file system");
    }
    let uses = || look(&store, "a/b/page").map(drop).unwrap();
    let before = open_files();
    assert!(compare(&*store, &caller(), uses) > 0, "never in the short way");
    assert!(open_files() <= before, "files stayed open");
    compare(&*read_only, &caller(), || look(&read_only, "a/b/page").map(drop).unwrap());
}

#[test]
fn so_it_is_in_memory() {
    let store: Arc<dyn FileStore> = MemoryStore::new("m", 1 << 20).unwrap();
    let root = store.root().unwrap();
    let at = |path: &'static str| (&*root, path.as_bytes());
    store.make_directory(&caller(), at("a"), 0o755).unwrap();
    store.make_directory(&caller(), at("a/b"), 0o755).unwrap();
    store.make_directory(&caller(), at("a/b/directory"), 0o755).unwrap();
    store.symlink(&caller(), at("a/b/inside"), b"../b/page").unwrap();
    store.symlink(&caller(), at("a/b/outside"), b"../../../beside").unwrap();
    store.make_node(&caller(), at("a/b/pipe"), 0o010_600, 0).unwrap();
    for (path, length, mode) in [("a/b/page", 4096, 0o644), ("a/b/secret", 9, 0)] {
        let how = OpenHow { flags: WRITE_ONLY | 0o100, mode };
        let (file, _) = store.open(&caller(), at(path), how).unwrap();
        file.write(0, &vec![7; length], false).unwrap();
    }
    compare(&*store, &caller(), || {});
    compare(&*store, &Caller { uid: 7, gid: 7, enforce: true, ..caller() }, || {});
}
