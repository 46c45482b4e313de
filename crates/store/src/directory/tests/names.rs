//! Tests of opening, creating and listing names.

use super::*;
use rustix::fs::XattrFlags;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_wire::attr::attr_flag;

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
    // Reopen references through themselves.
    let reference = f.open(b"d/new", PATH | RDWR | TRUNC | CREAT).unwrap();
    assert_eq!(reference.read(0, 1, true).unwrap_err(), Errno::EBADF);
    assert_eq!(read(&f.open_at(&reference, b"", 0).unwrap(), 0, 9), b"hello");
    let link = f.open(b"link", PATH | NOFOLLOW).unwrap();
    assert!(link.stat().unwrap().is_symlink());
    assert_eq!(f.store.read_link(&f.caller, (&*link, b"")).unwrap(), b"file");
    assert_eq!(f.open_at(&link, b"", 0).err(), Some(Errno::ELOOP));
    assert_eq!(f.store.read_link(&f.caller, f.at(b"file")).unwrap_err(), Errno::EINVAL);
    assert_eq!(f.store.read_link(&f.caller, f.at(b"d/new")).unwrap_err(), Errno::EINVAL);
    let file = f.open(b"d/new", PATH).unwrap();
    let itself = f.store.read_link(&f.caller, (&*file, b""));
    assert_eq!(itself.unwrap_err(), Errno::ENOENT, "as by readlinkat(2) for an empty path");
    let link = f.open(b"link", PATH | NOFOLLOW).unwrap();
    assert!(f.store.read_link(&f.caller, (&*link, b"")).is_ok());
    assert!(f.stat(b"link", false).unwrap().is_symlink());
    assert!(f.stat(b"link", true).unwrap().is_file());
    assert!(f.stat(b"./link", true).unwrap().is_file());
}

/// What was created was created, even if another process removes it at once.
#[test]
fn names_that_vanish_are_no_errors() {
    let f = Fixture::new();
    f.open(b"file", CREAT | RDWR).unwrap();
    let stop = AtomicBool::new(false);
    let wrong = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = fs::remove_file(f.local("new"));
                }
            });
        }
        let wrong = (0..150_000).find_map(|round| {
            let made = f.store.link(&f.caller, f.at(b"file"), false, f.at(b"new"));
            made.err().filter(|error| *error != Errno::EEXIST).map(|error| (round, error))
        });
        stop.store(true, Ordering::Relaxed);
        wrong
    });
    assert_eq!(wrong, None);
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
            if name == b"." || name == b".." {
                // The parent of the root is not shown.
                assert_eq!((inode, kind), (f.root.stat().unwrap().inode, 4));
                continue;
            }
            let attr = attr.expect("attributes were asked for");
            assert_eq!(attr.inode, inode);
            let name = String::from_utf8(name).unwrap();
            assert_eq!((kind, attr.size), (8, name[4..].parse().unwrap()));
            assert!(!deleted.contains(&name), "{name} was deleted before");
            assert!(seen.insert(name.clone()), "{name} came twice");
            fs::remove_file(f.local(&name)).unwrap();
        }
        if end {
            break;
        }
        // Some that have not been listed yet.
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
fn listings_tell_of_extended_attributes_only_when_asked() {
    let f = Fixture::new();
    for name in ["plain", "tagged"] {
        fs::write(f.local(name), name).unwrap();
    }
    let flags = XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(f.local("tagged"), "user.tag", b"1", flags) {
        println!("SKIPPED: no extended attributes here: {error}");
        return;
    }
    let directory = f.open(b".", DIRECTORY).unwrap();
    for xattrs in [false, true] {
        let mut names = Names { room: 100, xattrs, ..Names::default() };
        assert!(directory.read_directory(0, true, &mut names).unwrap());
        let none = |name: &[u8]| {
            let (.., attr) = names.seen.iter().find(|entry| entry.3 == name).unwrap();
            attr.unwrap().flags & attr_flag::NO_XATTRS != 0
        };
        assert_eq!((none(b"plain"), none(b"tagged")), (xattrs, false));
    }
}

/// Roots of these file systems have the same inode number.
#[test]
fn files_of_several_file_systems_are_told_apart() {
    let store = DirectoryStore::new("/dev".as_ref(), true).unwrap();
    let (root, caller) = (store.root().unwrap(), Fixture::new().caller);
    let stat = |path: &[u8]| store.stat(&caller, (&*root, path), true).unwrap();
    assert_eq!(stat(b"").file_system(), 0, "that of the export itself");
    let mut seen = BTreeSet::from([stat(b"").identity()]);
    let mut devices = BTreeSet::from([fs::metadata("/dev").unwrap().dev()]);
    for name in ["pts", "shm", "mqueue"] {
        let Ok(local) = fs::metadata(format!("/dev/{name}")) else { continue };
        if !devices.insert(local.dev()) {
            continue;
        }
        let identity = stat(name.as_bytes()).identity();
        assert!(seen.insert(identity), "{name} is {}", local.ino());
        // Whichever way it is requested.
        let how = OpenHow { flags: DIRECTORY, mode: 0 };
        let (open, attr) = store.open(&caller, (&*root, name.as_bytes()), how).unwrap();
        let below = store.below(&caller, name.as_bytes()).unwrap().root().unwrap();
        let mut names = Names { room: 100, ..Names::default() };
        open.read_directory(0, true, &mut names).unwrap();
        let listed = names.seen.iter().find(|entry| entry.3 == b".").unwrap().4.unwrap();
        for attr in [attr, open.stat().unwrap(), below.stat().unwrap(), listed] {
            assert_eq!((attr.inode, attr.identity()), (local.ino(), identity), "{name}");
        }
    }
    if devices.len() == 1 {
        eprintln!("SKIPPED: nothing is mounted below /dev");
    }
}

/// Returns the blocks of a file that is left, if any.
fn blocks_left(remains: Option<Remains>) -> Option<u64> {
    let file = remains?.downcast::<OwnedFd>().expect("it keeps the file");
    let stat = rustix::fs::fstat(&*file).unwrap();
    assert_eq!(stat.st_nlink, 0, "the name is gone already");
    Some(stat.st_blocks as u64)
}

#[test]
fn large_files_stay_until_what_is_left_of_them_is_dropped() {
    let f = Fixture::new();
    let caller = &f.caller;
    let make = |name: &[u8], bytes| f.open(name, CREAT | RDWR).unwrap().allocate(0, 0, bytes);
    let unlink = |name| f.store.unlink(caller, f.at(name), false);
    let replace = |flags| f.store.rename(caller, f.at(b"small"), f.at(b"large"), flags);
    let large = FREED_BYTES_MAX + 4096;
    let is_large = |blocks: u64| blocks * 512 >= large;
    make(b"large", large).unwrap();
    make(b"small", 4096).unwrap();
    f.store.make_directory(caller, f.at(b"d"), 0o755).unwrap();
    f.store.link(caller, f.at(b"large"), false, f.at(b"d/link")).unwrap();

    // Nothing that has another name goes.
    assert!(unlink(b"d/link").unwrap().is_none());
    for flags in [1, 2, 2] {
        let renamed = replace(flags);
        assert!(matches!(renamed, Ok(None) | Err(Errno::EEXIST)), "{flags}: {renamed:?}");
    }
    // Whiteouts, where the file system has them, change nothing about what is replaced.
    let left = match replace(4) {
        Err(Errno::EINVAL) => replace(0),
        left => left,
    };
    assert!(blocks_left(left.unwrap()).is_some_and(is_large));
    assert!(unlink(b"large").unwrap().is_none(), "small by now");
    for name in [&b"d/large"[..], b"large"] {
        make(name, large).unwrap();
        assert!(blocks_left(unlink(name).unwrap()).is_some_and(is_large));
        assert_eq!(f.stat(name, false).unwrap_err(), Errno::ENOENT);
    }
    make(b"large", large).unwrap();
    assert_eq!(unlink(b"large/").unwrap_err(), Errno::ENOTDIR);
    assert_eq!(f.store.unlink(caller, f.at(b"large"), true).unwrap_err(), Errno::ENOTDIR);
}
