//! Tests of the directory back end against the file system of the temporary directory.

use super::DirectoryStore;
use crate::{Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, Source, XattrAction};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use towline_wire::{Attr, Errno, Timestamp};

const RDWR: u32 = 2;
const WRONLY: u32 = 1;
const CREAT: u32 = 0o100;
const EXCL: u32 = 0o200;
const TRUNC: u32 = 0o1000;
const NONBLOCK: u32 = 0o4000;
const DIRECT: u32 = 0o40_000;
const DIRECTORY: u32 = 0o200_000;
const NOFOLLOW: u32 = 0o400_000;
const PATH: u32 = 0o10_000_000;
const TMPFILE: u32 = 0o20_200_000;

/// `outside/secret` lies beside the root `export` of the store.
struct Fixture {
    temporary: TempDir,
    store: Arc<DirectoryStore>,
    root: Arc<dyn OpenFile>,
    caller: Caller,
}

impl Fixture {
    fn new() -> Self {
        Self::with(false, |_| {})
    }

    fn with(read_only: bool, prepare: impl Fn(&PathBuf)) -> Self {
        rustix::process::umask(rustix::fs::Mode::empty());
        let temporary = TempDir::new().unwrap();
        fs::set_permissions(temporary.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(temporary.path().join("outside")).unwrap();
        fs::write(temporary.path().join("outside/secret"), "secret").unwrap();
        let root = temporary.path().join("export");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        prepare(&root);
        let store = DirectoryStore::new(&root, read_only).unwrap();
        let root = store.root().unwrap();
        let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
        Self { temporary, store, root, caller }
    }

    fn local(&self, path: &str) -> PathBuf {
        self.temporary.path().join("export").join(path)
    }

    fn open_at(&self, base: &Arc<dyn OpenFile>, path: &[u8], flags: u32) -> Result<Arc<dyn OpenFile>, Errno> {
        let how = OpenHow { flags, mode: 0o644 };
        self.store.open(&self.caller, (&**base, path), how).map(|(file, _)| file)
    }

    fn open(&self, path: &[u8], flags: u32) -> Result<Arc<dyn OpenFile>, Errno> {
        self.open_at(&self.root, path, flags)
    }

    fn fails(&self, path: &[u8], flags: u32) -> Errno {
        self.open(path, flags).err().expect("opening succeeded")
    }

    fn stat(&self, path: &[u8], follow: bool) -> Result<Attr, Errno> {
        self.store.stat(&self.caller, (&*self.root, path), follow)
    }

    fn at<'a>(&'a self, path: &'a [u8]) -> (&'a dyn OpenFile, &'a [u8]) {
        (&*self.root, path)
    }

    fn user(uid: u32, groups: &[u32]) -> Caller {
        Caller { uid, gid: uid, groups: groups.into(), enforce: true }
    }
}

fn read(file: &Arc<dyn OpenFile>, offset: u64, length: usize) -> Vec<u8> {
    let outcome = match file.read(offset, length, false).unwrap() {
        ReadOutcome::WouldBlock => file.read(offset, length, true).unwrap(),
        ready => ready,
    };
    match outcome {
        ReadOutcome::Ready(bytes) => bytes.to_vec().unwrap(),
        ReadOutcome::WouldBlock => panic!("a waiting read would wait"),
    }
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED {test}: needs root");
    }
    root
}

#[derive(Default)]
struct Names {
    seen: Vec<(u64, u64, u8, Vec<u8>, Option<Attr>)>,
    room: usize,
}

impl Listing for Names {
    fn entry(&mut self, cookie: u64, inode: u64, kind: u8, name: &[u8], attr: Option<Attr>) -> bool {
        if self.seen.len() == self.room {
            return false;
        }
        self.seen.push((cookie, inode, kind, name.to_vec(), attr));
        true
    }
}

#[test]
fn paths_never_leave_the_root() {
    let f = Fixture::with(false, |root| {
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir(root.join("sibling")).unwrap();
        fs::write(root.join("sibling/file"), "inside").unwrap();
        symlink("/etc/passwd", root.join("absolute")).unwrap();
        symlink("../outside/secret", root.join("relative")).unwrap();
        symlink("../outside", root.join("dir")).unwrap();
        symlink("../../sibling", root.join("a/b/link")).unwrap();
        symlink("../../../outside", root.join("a/b/out")).unwrap();
    });
    for path in [&b"../outside/secret"[..], b"..", b"a/../../outside/secret", b"a/b/../../../x",
        b"/etc/passwd", b"/", b"absolute", b"relative", b"dir/secret", b"dir", b"dir/", b"a/b/out/secret"]
    {
        assert_eq!(f.fails(path, PATH), Errno::EXDEV, "{}", path.escape_ascii());
        let created = f.fails(path, RDWR | CREAT);
        // Linux looks first whether the last name can be one of a file at all.
        let expected = [Errno::EXDEV, Errno::EISDIR];
        assert!(expected.contains(&created), "{}: {created}", path.escape_ascii());
        assert_eq!(f.stat(path, true).unwrap_err(), Errno::EXDEV, "{}", path.escape_ascii());
    }
    let base = f.open(b"a/b", PATH | DIRECTORY).unwrap();
    for path in [&b"../../sibling/file"[..], b"link/file", b"x/../../../sibling/file"] {
        let result = f.open_at(&base, path, 0);
        if path.starts_with(b"x") {
            assert_eq!(result.err(), Some(Errno::ENOENT));
        } else {
            assert_eq!(read(&result.unwrap(), 0, 100), b"inside");
        }
    }
    for path in [&b"../../.."[..], b"../../../outside/secret", b"out/secret", b"/sibling/file"] {
        assert_eq!(f.open_at(&base, path, PATH).err(), Some(Errno::EXDEV), "{}", path.escape_ascii());
    }
    let up = f.open_at(&base, b"../..", PATH).unwrap();
    assert_eq!(up.identity(), f.root.identity());
}

#[test]
fn changes_never_leave_the_root() {
    let f = Fixture::with(false, |root| {
        symlink("../outside", root.join("dir")).unwrap();
        fs::write(root.join("file"), "x").unwrap();
    });
    let (store, caller) = (&f.store, &f.caller);
    let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    for path in [&b"dir/new"[..], b"../outside/new", b"/tmp/new"] {
        assert_eq!(store.make_directory(caller, f.at(path), 0o755).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.symlink(caller, f.at(path), b"x").unwrap_err(), Errno::EXDEV);
        assert_eq!(store.make_node(caller, f.at(path), 0o100_644, 0).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.rename(caller, f.at(b"file"), f.at(path), 0).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.link(caller, f.at(b"file"), false, f.at(path)).unwrap_err(), Errno::EXDEV);
    }
    for path in [&b"dir/secret"[..], b"../outside/secret"] {
        assert_eq!(store.unlink(caller, f.at(path), false).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.rename(caller, f.at(path), f.at(b"new"), 0).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.link(caller, f.at(path), false, f.at(b"new")).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.set_attr(caller, f.at(path), true, &set).unwrap_err(), Errno::EXDEV);
        assert_eq!(store.access(caller, f.at(path), 4).unwrap_err(), Errno::EXDEV);
        let list = store.xattr(caller, f.at(path), true, XattrAction::List);
        assert_eq!(list.unwrap_err(), Errno::EXDEV);
    }
    // A slash at the end makes Linux follow a link.
    assert_eq!(f.stat(b"dir/", false).unwrap_err(), Errno::EXDEV);
    assert_eq!(store.link(caller, f.at(b"dir/"), false, f.at(b"n")).unwrap_err(), Errno::EXDEV);
    assert_eq!(store.make_directory(caller, f.at(b"dir/"), 0o755).unwrap_err(), Errno::EEXIST);
    for path in [&b".."[..], b".", b"a/.."] {
        assert!(store.rename(caller, f.at(b"file"), f.at(path), 0).is_err());
        assert!(store.unlink(caller, f.at(path), true).is_err());
        assert!(store.make_directory(caller, f.at(path), 0o755).is_err());
    }
    assert!(fs::read_dir(f.temporary.path().join("outside")).unwrap().count() == 1);
}

#[test]
fn a_directory_moved_out_leads_nowhere() {
    let f = Fixture::with(false, |root| {
        fs::create_dir_all(root.join("a/moved")).unwrap();
        fs::write(root.join("a/moved/mine"), "mine").unwrap();
        fs::create_dir(root.join("gone")).unwrap();
    });
    let moved = f.open(b"a/moved", DIRECTORY).unwrap();
    let gone = f.open(b"gone", DIRECTORY).unwrap();
    fs::rename(f.local("a/moved"), f.temporary.path().join("outside/moved")).unwrap();
    fs::remove_dir(f.local("gone")).unwrap();
    assert_eq!(read(&f.open_at(&moved, b"mine", 0).unwrap(), 0, 10), b"mine");
    for path in [&b".."[..], b"../secret", b"../../export", b"x/../../secret"] {
        let error = f.open_at(&moved, path, PATH).err().unwrap();
        let expected = if path.starts_with(b"x") { Errno::ENOENT } else { Errno::EXDEV };
        assert_eq!(error, expected, "{}", path.escape_ascii());
    }
    assert_eq!(f.open_at(&gone, b"../a", PATH).err(), Some(Errno::ENOENT));
    let outside = fs::metadata(f.temporary.path().join("outside")).unwrap().ino();
    let mut names = Names { room: 100, ..Names::default() };
    assert!(moved.read_directory(0, true, &mut names).unwrap());
    let parent = names.seen.iter().find(|entry| entry.3 == b"..").unwrap();
    assert_ne!(parent.1, outside);
    assert_eq!(parent.1, moved.stat().unwrap().inode);
}

#[test]
fn magic_links_are_not_followed() {
    let store = DirectoryStore::new(std::path::Path::new("/proc/self"), true).unwrap();
    let root = store.root().unwrap();
    let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
    for path in [&b"root/etc/passwd"[..], b"cwd", b"exe", b"fd/0"] {
        let how = OpenHow { flags: PATH, mode: 0 };
        let error = store.open(&caller, (&*root, path), how).err();
        assert_eq!(error, Some(Errno::ELOOP), "{}", path.escape_ascii());
    }
    // Files without a size are read to their end all the same.
    let how = OpenHow { flags: 0, mode: 0 };
    let (status, _) = store.open(&caller, (&*root, b"status"), how).unwrap();
    assert!(read(&status, 0, 100_000).starts_with(b"Name:"));
}

#[test]
fn open_flags_mean_what_they_mean_on_linux() {
    let f = Fixture::with(false, |root| {
        fs::write(root.join("file"), "0123456789").unwrap();
        fs::create_dir(root.join("d")).unwrap();
        symlink("file", root.join("link")).unwrap();
        symlink("nowhere", root.join("dangling")).unwrap();
    });
    assert_eq!(f.fails(b"none", 0), Errno::ENOENT);
    assert_eq!(f.fails(b"", CREAT | 3), Errno::EINVAL);
    assert_eq!(f.fails(b"file", CREAT | EXCL | RDWR), Errno::EEXIST);
    assert_eq!(f.fails(b"dangling", CREAT | EXCL | RDWR), Errno::EEXIST);
    assert_eq!(f.fails(b"file", DIRECTORY), Errno::ENOTDIR);
    assert_eq!(f.fails(b"file/x", 0), Errno::ENOTDIR);
    assert_eq!(f.fails(b"link", NOFOLLOW), Errno::ELOOP);
    assert_eq!(f.fails(b"d", RDWR), Errno::EISDIR);
    let how = OpenHow { flags: RDWR | CREAT | EXCL | NONBLOCK | 0x8000_0000, mode: 0o7751 };
    let (file, attr) = f.store.open(&f.caller, f.at(b"d/new"), how).unwrap();
    assert_eq!((attr.mode, attr.size, attr.links), (0o107_751, 0, 1));
    assert_eq!(file.write(0, b"hello", false).unwrap(), (5, 0));
    let reader = f.open(b"d/new", 0).unwrap();
    assert_eq!(reader.write(0, b"x", false).unwrap_err(), Errno::EBADF);
    assert_eq!(reader.allocate(0, 0, 10).unwrap_err(), Errno::EBADF);
    let writer = f.open(b"d/new", WRONLY).unwrap();
    assert_eq!(writer.read(0, 1, true).unwrap_err(), Errno::EBADF);
    assert_eq!(writer.identity(), reader.identity());
    assert_eq!(f.open(b"d", 0).unwrap().read(0, 1, true).unwrap_err(), Errno::EISDIR);
    drop(f.open(b"link", WRONLY | TRUNC).unwrap());
    assert_eq!(f.stat(b"file", false).unwrap().size, 0);
    // References, reopened through themselves.
    let reference = f.open(b"d/new", PATH | RDWR | TRUNC | CREAT).unwrap();
    assert_eq!(reference.read(0, 1, true).unwrap_err(), Errno::EBADF);
    assert_eq!(read(&f.open_at(&reference, b"", 0).unwrap(), 0, 9), b"hello");
    let link = f.open(b"link", PATH | NOFOLLOW).unwrap();
    assert!(link.stat().unwrap().is_symlink());
    assert_eq!(f.store.read_link(&f.caller, (&*link, b"")).unwrap(), b"file");
    assert_eq!(f.open_at(&link, b"", 0).err(), Some(Errno::ELOOP));
    assert_eq!(f.store.read_link(&f.caller, f.at(b"file")).unwrap_err(), Errno::EINVAL);
    assert_eq!(f.store.read_link(&f.caller, f.at(b"d/new")).unwrap_err(), Errno::EINVAL);
    assert!(f.stat(b"link", false).unwrap().is_symlink());
    assert!(f.stat(b"link", true).unwrap().is_file());
    assert!(f.stat(b"./link", true).unwrap().is_file());
}

#[test]
fn files_without_a_name_get_one() {
    let f = Fixture::new();
    let Ok(file) = f.open(b".", TMPFILE | RDWR) else {
        eprintln!("SKIPPED O_TMPFILE: not supported here");
        return;
    };
    file.write(0, b"nameless", false).unwrap();
    assert_eq!(file.stat().unwrap().links, 0);
    let attr = f.store.link(&f.caller, (&*file, b""), false, f.at(b"named")).unwrap();
    assert_eq!(attr.links, 1);
    assert_eq!(fs::read(f.local("named")).unwrap(), b"nameless");
    let other = f.open(b".", TMPFILE | RDWR | EXCL).unwrap();
    let linked = f.store.link(&f.caller, (&*other, b""), false, f.at(b"other"));
    assert_eq!(linked.unwrap_err(), Errno::ENOENT);
}

#[test]
fn fifos_devices_and_sockets_only_as_references() {
    let f = Fixture::new();
    f.store.make_node(&f.caller, f.at(b"fifo"), 0o010_644, 0).unwrap();
    f.store.make_node(&f.caller, f.at(b"socket"), 0o140_644, 0).unwrap();
    let mut names = vec![&b"fifo"[..], b"socket"];
    if is_root("device nodes") {
        let null = rustix::fs::makedev(1, 3);
        let attr = f.store.make_node(&f.caller, f.at(b"null"), 0o020_666, null).unwrap();
        assert_eq!(attr.rdev, null);
        names.push(b"null");
    }
    for name in names {
        for flags in [0, WRONLY, RDWR] {
            assert_eq!(f.fails(name, flags), Errno::ENXIO, "{}", name.escape_ascii());
        }
        let reference = f.open(name, PATH).unwrap();
        assert_eq!(f.open_at(&reference, b"", RDWR).err(), Some(Errno::ENXIO));
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        let result = f.store.set_attr(&f.caller, (&*reference, b""), true, &set);
        assert_eq!(result.unwrap_err(), Errno::EINVAL);
    }
}

#[test]
fn a_read_only_export_changes_nothing() {
    let f = Fixture::with(true, |root| fs::write(root.join("file"), "data").unwrap());
    let (store, caller) = (&f.store, &f.caller);
    assert_eq!(read(&f.open(b"file", 0).unwrap(), 0, 9), b"data");
    assert_eq!(read(&f.open(b"file", CREAT).unwrap(), 0, 9), b"data");
    for flags in [WRONLY, RDWR, TRUNC, RDWR | TRUNC | CREAT] {
        assert_eq!(f.fails(b"file", flags), Errno::EROFS);
    }
    assert_eq!(f.fails(b"new", CREAT), Errno::EROFS);
    assert_eq!(f.fails(b"new", CREAT | RDWR | EXCL), Errno::EROFS);
    assert_eq!(f.fails(b"new", RDWR), Errno::ENOENT);
    assert_eq!(f.fails(b"file", CREAT | EXCL), Errno::EEXIST);
    assert_eq!(f.fails(b".", TMPFILE | RDWR), Errno::EROFS);
    let file = f.open(b"file", PATH).unwrap();
    assert_eq!(f.open_at(&file, b"", RDWR).err(), Some(Errno::EROFS));
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let change = XattrAction::Set(b"user.a", b"b", 0);
    assert_eq!(store.set_attr(caller, f.at(b"file"), true, &set).unwrap_err(), Errno::EROFS);
    assert_eq!(store.unlink(caller, f.at(b"file"), false).unwrap_err(), Errno::EROFS);
    assert_eq!(store.make_directory(caller, f.at(b"d"), 0o755).unwrap_err(), Errno::EROFS);
    assert_eq!(store.make_node(caller, f.at(b"d"), 0o644, 0).unwrap_err(), Errno::EROFS);
    assert_eq!(store.symlink(caller, f.at(b"d"), b"x").unwrap_err(), Errno::EROFS);
    assert_eq!(store.rename(caller, f.at(b"file"), f.at(b"d"), 0).unwrap_err(), Errno::EROFS);
    assert_eq!(store.link(caller, f.at(b"file"), true, f.at(b"d")).unwrap_err(), Errno::EROFS);
    assert_eq!(store.xattr(caller, f.at(b"file"), true, change).unwrap_err(), Errno::EROFS);
    assert_eq!(store.access(caller, f.at(b"file"), 2).unwrap_err(), Errno::EROFS);
    store.access(caller, f.at(b"file"), 4).unwrap();
    assert_eq!(fs::read_dir(f.local(".")).unwrap().count(), 1);
}

#[test]
fn names_are_bytes() {
    let f = Fixture::new();
    let name = b"\xff\xfe caf\xe9 \n";
    let file = f.open(name, CREAT | RDWR).unwrap();
    let mut names = Names { room: 10, ..Names::default() };
    assert!(f.open(b".", DIRECTORY).unwrap().read_directory(0, false, &mut names).unwrap());
    let entry = names.seen.iter().find(|entry| entry.3 == name).unwrap();
    assert_eq!((entry.1, entry.2), (file.stat().unwrap().inode, 8));
    f.store.rename(&f.caller, f.at(name), f.at(b"\x80"), 1).unwrap();
    f.store.symlink(&f.caller, f.at(b"\x81"), b"\x80").unwrap();
    assert_eq!(f.store.read_link(&f.caller, f.at(b"\x81")).unwrap(), b"\x80");
    assert_eq!(f.stat(b"\x81", true).unwrap().inode, entry.1);
    let long = [b'a'; 256];
    assert_eq!(f.fails(&long, CREAT), Errno::ENAMETOOLONG);
}

#[test]
fn listings_resume_while_entries_are_deleted() {
    let f = Fixture::new();
    let count = 1500;
    for i in 0..count {
        fs::write(f.local(&format!("file{i:04}")), vec![b'x'; i]).unwrap();
    }
    let directory = f.open(b".", DIRECTORY).unwrap();
    let mut seen = BTreeSet::new();
    let mut deleted = BTreeSet::new();
    let mut cookie = 0;
    loop {
        let mut names = Names { room: 37, ..Names::default() };
        let end = directory.read_directory(cookie, true, &mut names).unwrap();
        for (next, inode, kind, name, attr) in names.seen {
            cookie = next;
            let attr = attr.expect("attributes were asked for");
            assert_eq!(attr.inode, inode);
            if name == b"." || name == b".." {
                // The parent of the root is not shown.
                assert_eq!((inode, kind), (f.root.stat().unwrap().inode, 4));
                continue;
            }
            let name = String::from_utf8(name).unwrap();
            assert_eq!((kind, attr.size), (8, name[4..].parse().unwrap()));
            assert!(!deleted.contains(&name), "{name} was deleted before");
            assert!(seen.insert(name.clone()), "{name} came twice");
            fs::remove_file(f.local(&name)).unwrap();
        }
        if end {
            break;
        }
        // Some that did not come yet.
        for i in 0..10 {
            let other = format!("file{:04}", (seen.len() * 7 + i * 131) % count);
            if fs::remove_file(f.local(&other)).is_ok() {
                deleted.insert(other);
            }
        }
    }
    assert_eq!(seen.len() + deleted.len(), count);
}

#[test]
fn reads_refer_to_pages_or_copy() {
    let f = Fixture::new();
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    fs::write(f.local("file"), &bytes).unwrap();
    let file = f.open(b"file", 0).unwrap();
    for (offset, length) in [(0, 10), (4090, 20), (299_990, 100), (300_000, 5), (400_000, 5),
        (0, 40_000), (1, 299_999), (0, 1_000_000), (280_000, 100_000), (300_000, 100_000),
        (500_000, 100_000), (12_345, 32 * 1024)]
    {
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
    // Appending is not led astray by the position that seeking left.
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
            let file = if thread % 2 == 0 { first.clone() } else { f.open(b"log", WRONLY).unwrap() };
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
fn attributes_are_set_by_name_and_by_file() {
    let f = Fixture::with(false, |root| {
        fs::write(root.join("file"), "0123456789").unwrap();
        symlink("file", root.join("link")).unwrap();
    });
    let (store, caller) = (&f.store, &f.caller);
    let times = Some((Timestamp::new(-5, 6), Timestamp::new(7, 8)));
    let set = SetAttr { mode: Some(0o4711), size: Some(4), times, ..SetAttr::default() };
    let before = f.stat(b"file", true).unwrap();
    let attr = store.set_attr(caller, f.at(b"link"), true, &set).unwrap();
    assert_eq!((attr.mode, attr.size), (0o104_711, 4));
    assert_eq!((attr.accessed, attr.modified), (Timestamp::new(-5, 6), Timestamp::new(7, 8)));
    assert_ne!(attr.change, before.change);
    let set = SetAttr { times: Some((Timestamp::OMIT, Timestamp::NOW)), ..SetAttr::default() };
    let link = store.set_attr(caller, f.at(b"link"), false, &set).unwrap();
    assert!(link.is_symlink() && link.modified.seconds > 1_000_000);
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let result = store.set_attr(caller, f.at(b"link"), false, &mode);
    assert_eq!(result.unwrap_err(), Errno::EOPNOTSUPP);
    for flags in [0, RDWR, PATH] {
        let file = f.open(b"file", flags).unwrap();
        let size = u64::from(flags);
        let set = SetAttr { mode: Some(0o640), size: Some(size), ..SetAttr::default() };
        let attr = store.set_attr(caller, (&*file, b""), true, &set).unwrap();
        assert_eq!((attr.mode, attr.size), (0o100_640, size));
    }
    let bad = Some((Timestamp::new(0, 1_000_000_000), Timestamp::NOW));
    let set = SetAttr { times: bad, ..SetAttr::default() };
    assert_eq!(store.set_attr(caller, f.at(b"file"), true, &set).unwrap_err(), Errno::EINVAL);
    let size = SetAttr { size: Some(0), ..SetAttr::default() };
    assert_eq!(store.set_attr(caller, f.at(b"."), true, &size).unwrap_err(), Errno::EISDIR);
    if is_root("owners") {
        let set = SetAttr { uid: Some(12), gid: Some(13), ..SetAttr::default() };
        let attr = store.set_attr(caller, f.at(b"link"), false, &set).unwrap();
        assert_eq!((attr.uid, attr.gid), (12, 13));
        assert_eq!(f.stat(b"file", true).unwrap().uid, 0);
    }
}

#[test]
fn extended_attributes_of_files_links_and_references() {
    let f = Fixture::with(false, |root| {
        fs::write(root.join("file"), "").unwrap();
        symlink("file", root.join("link")).unwrap();
    });
    fn act(f: &Fixture, at: Source<'_>, follow: bool, how: XattrAction<'_>) -> Result<Vec<u8>, Errno> {
        f.store.xattr(&f.caller, at, follow, how)
    }
    let value = vec![b'v'; 2000];
    let set = XattrAction::Set(b"user.name", &value, 0);
    match act(&f, f.at(b"file"), true, set) {
        Err(Errno::EOPNOTSUPP) => {
            eprintln!("SKIPPED extended attributes: not supported here");
            return;
        }
        result => assert_eq!(result, Ok(Vec::new())),
    }
    let get = XattrAction::Get(b"user.name");
    for (path, flags) in [(&b"file"[..], 0), (b"link", RDWR), (b"file", PATH)] {
        let file = f.open(path, flags).unwrap();
        assert_eq!(act(&f, (&*file, b""), true, get).unwrap(), value);
        let names = act(&f, (&*file, b""), true, XattrAction::List).unwrap();
        assert!(names.split(|byte| *byte == 0).any(|name| name == b"user.name"));
        let exists = XattrAction::Set(b"user.name", b"w", 1);
        assert_eq!(act(&f, (&*file, b""), true, exists).unwrap_err(), Errno::EEXIST);
    }
    assert_eq!(act(&f, f.at(b"link"), true, get).unwrap(), value);
    // User attributes are not for links.
    assert_eq!(act(&f, f.at(b"link"), false, set).unwrap_err(), Errno::EPERM);
    if is_root("attributes of links") {
        let set = XattrAction::Set(b"trusted.link", b"mine", 0);
        act(&f, f.at(b"link"), false, set).unwrap();
        let get = XattrAction::Get(b"trusted.link");
        assert_eq!(act(&f, f.at(b"link"), false, get).unwrap(), b"mine");
        assert_eq!(act(&f, f.at(b"file"), false, get).unwrap_err(), Errno::ENODATA);
    }
    act(&f, f.at(b"file"), true, XattrAction::Remove(b"user.name")).unwrap();
    assert_eq!(act(&f, f.at(b"file"), true, get).unwrap_err(), Errno::ENODATA);
    let large = vec![b'v'; 65537];
    assert!(act(&f, f.at(b"file"), true, XattrAction::Set(b"user.large", &large, 0)).is_err());
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
    let foreign = Fixture::new();
    let elsewhere = foreign.open(b"x", CREAT | RDWR).unwrap();
    assert_eq!(copy(&file, 0, &elsewhere, 0, 1).unwrap_err(), Errno::EXDEV);
}

#[test]
fn the_file_system_is_told_and_synchronized() {
    let f = Fixture::new();
    let stat = f.store.stat_fs().unwrap();
    assert!(stat.blocks > 0 && stat.name_bytes_max >= 255);
    f.store.sync().unwrap();
    let file = f.open(b"x", CREAT | RDWR).unwrap();
    file.sync(false).unwrap();
    file.sync(true).unwrap();
    assert!(f.store.may_block());
    let reference = f.open(b"x", PATH).unwrap();
    assert_eq!(reference.sync(true).unwrap_err(), Errno::EBADF);
}

#[test]
fn callers_have_the_rights_of_their_user() {
    if !is_root("identities") {
        return;
    }
    let mut f = Fixture::with(false, |root| {
        fs::write(root.join("private"), "root").unwrap();
        fs::set_permissions(root.join("private"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(root.join("group"), "team").unwrap();
        fs::set_permissions(root.join("group"), fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::chown(root.join("group"), None, Some(4321)).unwrap();
        fs::create_dir(root.join("open")).unwrap();
        fs::set_permissions(root.join("open"), fs::Permissions::from_mode(0o777)).unwrap();
        fs::create_dir_all(root.join("closed/sub")).unwrap();
        fs::write(root.join("closed/file"), "").unwrap();
        fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o744)).unwrap();
    });
    f.caller = Fixture::user(1234, &[]);
    assert_eq!(f.fails(b"private", 0), Errno::EACCES);
    assert_eq!(f.fails(b"group", 0), Errno::EACCES);
    assert_eq!(f.fails(b"new", CREAT | RDWR), Errno::EACCES);
    assert_eq!(f.stat(b"closed/file", true).unwrap_err(), Errno::EACCES);
    let error = |mode| f.store.access(&f.caller, f.at(b"private"), mode).unwrap_err();
    assert_eq!(error(4), Errno::EACCES);
    f.store.access(&f.caller, f.at(b"private"), 0).unwrap();
    let chown = SetAttr { uid: Some(0), ..SetAttr::default() };
    let file = f.open(b"open/mine", CREAT | RDWR).unwrap();
    let attr = file.stat().unwrap();
    assert_eq!((attr.uid, attr.gid), (1234, 1234));
    let denied = f.store.set_attr(&f.caller, (&*file, b""), true, &chown);
    assert_eq!(denied.unwrap_err(), Errno::EPERM);
    // Writing as that user takes the set-user-id bit off.
    let suid = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
    assert_eq!(f.store.set_attr(&f.caller, f.at(b"open/mine"), true, &suid).unwrap().mode & 0o7777, 0o4755);
    file.write(0, b"x", false).unwrap();
    assert_eq!(file.stat().unwrap().mode & 0o7777, 0o755);
    // Capabilities that have nothing to do with permission bits are gone, too.
    for name in [&b"trusted.x"[..], b"security.capability"] {
        let set = XattrAction::Set(name, b"\x01\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 0);
        let result = f.store.xattr(&f.caller, (&*file, b""), true, set);
        assert_eq!(result.unwrap_err(), Errno::EPERM, "{}", name.escape_ascii());
    }
    let device = f.store.make_node(&f.caller, f.at(b"open/null"), 0o020_666, 259);
    assert_eq!(device.unwrap_err(), Errno::EPERM);
    // Attributes in a listing need the right to search.
    let closed = f.open(b"closed", DIRECTORY).unwrap();
    let mut names = Names { room: 10, ..Names::default() };
    closed.read_directory(0, true, &mut names).unwrap();
    let hidden = names.seen.iter().find(|entry| entry.3 == b"file").unwrap();
    assert!(hidden.4.is_none());
    // References, /proc and links through it work for users as well.
    let reference = f.open(b"open/mine", PATH).unwrap();
    let set = SetAttr { mode: Some(0o600), size: Some(0), ..SetAttr::default() };
    f.store.set_attr(&f.caller, (&*reference, b""), true, &set).unwrap();
    f.store.link(&f.caller, (&*file, b""), true, f.at(b"open/again")).unwrap();
    drop(f.open_at(&reference, b"", RDWR).unwrap());
    f.store.access(&f.caller, f.at(b"open/mine"), 6).unwrap();
    f.caller = Fixture::user(1234, &[4321, 77]);
    assert_eq!(read(&f.open(b"group", 0).unwrap(), 0, 10), b"team");
    assert_eq!(f.fails(b"group", RDWR), Errno::EACCES);
    f.caller = Fixture::user(u32::MAX, &[]);
    assert_eq!(f.fails(b"group", 0), Errno::EPERM);
    f.caller = Fixture::user(0, &[]);
    assert_eq!(read(&f.open(b"private", 0).unwrap(), 0, 10), b"root");
    assert!(rustix::process::geteuid().is_root() && rustix::process::getegid().is_root());
    assert!(rustix::fs::stat("/proc/self/fd").is_ok());
    fs::write(f.local("private"), "still root").unwrap();
    assert_eq!(fs::metadata(f.local("private")).unwrap().uid(), 0);
}
