//! Tests that nothing leads out of the export.

use super::*;

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
    for path in [
        &b"../outside/secret"[..],
        b"..",
        b"a/../../outside/secret",
        b"a/b/../../../x",
        b"/etc/passwd",
        b"/",
        b"absolute",
        b"relative",
        b"dir/secret",
        b"dir",
        b"dir/",
        b"a/b/out/secret",
    ] {
        assert_eq!(f.fails(path, PATH), Errno::EXDEV, "{}", path.escape_ascii());
        let created = f.fails(path, RDWR | CREAT);
        // Linux first checks whether the last component can be the name of a file at all.
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
        assert_eq!(
            f.open_at(&base, path, PATH).err(),
            Some(Errno::EXDEV),
            "{}",
            path.escape_ascii()
        );
    }
    let up = f.open_at(&base, b"../..", PATH).unwrap();
    assert_eq!(up.identity(), f.root.identity());
}

#[test]
fn a_part_is_left_no_more_than_the_whole() {
    let f = Fixture::with(false, |root| {
        fs::create_dir_all(root.join("a/part/d/e")).unwrap();
        fs::write(root.join("a/beside"), "above").unwrap();
        fs::write(root.join("a/part/file"), "in it").unwrap();
        symlink("../beside", root.join("a/part/up")).unwrap();
        symlink("../../../beside", root.join("a/part/d/e/up")).unwrap();
        symlink("../../file", root.join("a/part/d/e/down")).unwrap();
        symlink("../part/file", root.join("a/part/around")).unwrap();
        symlink("part", root.join("a/link")).unwrap();
    });
    let part = f.store.below(&f.caller, b"a/part/").unwrap();
    let root = part.root().unwrap();
    let how = |flags| OpenHow { flags, mode: 0o644 };
    let open = |base: &Arc<dyn OpenFile>, path: &[u8], flags| {
        part.open(&f.caller, (&**base, path), how(flags)).map(|(file, _)| file)
    };
    assert_eq!(root.identity(), f.open(b"a/part", PATH).unwrap().identity());
    let e = open(&root, b"d/e", PATH | DIRECTORY).unwrap();
    for (base, path) in [
        (&root, &b"up"[..]),
        (&root, b"around"),
        (&root, b".."),
        (&root, b"../beside"),
        (&root, b"d/../../beside"),
        (&root, b"d/e/up"),
        (&e, b"up"),
        (&e, b"../../../beside"),
        (&e, b"../../.."),
    ] {
        let shown = path.escape_ascii();
        assert_eq!(open(base, path, 0).err(), Some(Errno::EXDEV), "{shown}");
        assert_eq!(open(base, path, PATH).err(), Some(Errno::EXDEV), "{shown}");
        assert_eq!(
            part.stat(&f.caller, (&**base, path), true).err(),
            Some(Errno::EXDEV),
            "{shown}"
        );
    }
    for (base, path) in [(&root, &b"d/e/down"[..]), (&e, b"down"), (&e, b"../../file")] {
        assert_eq!(read(&open(base, path, 0).unwrap(), 0, 100), b"in it");
    }
    // After enough uses the directories are known, but still do not lead out.
    for _ in 0..9 {
        assert_eq!(open(&root, b"d/e/up", 0).err(), Some(Errno::EXDEV));
        assert_eq!(read(&open(&root, b"d/e/down", 0).unwrap(), 0, 100), b"in it");
    }
    let new = part.make_directory(&f.caller, (&*e, b"../../../x"), 0o755);
    assert_eq!(new.unwrap_err(), Errno::EXDEV);
    // An open directory that was moved out leads only down.
    fs::create_dir(f.local("a/part/d/e/below")).unwrap();
    fs::rename(f.local("a/part/d/e"), f.local("a/e")).unwrap();
    assert_eq!(open(&e, b"..", PATH).err(), Some(Errno::EXDEV));
    assert_eq!(open(&e, b"../beside", 0).err(), Some(Errno::EXDEV));
    assert!(open(&e, b"below", PATH).is_ok());
    // The same directory by any path is the same store.
    for path in [&b"a/part"[..], b"a/link", b"./a/../a/part/."] {
        assert!(Arc::ptr_eq(&f.store.below(&f.caller, path).unwrap(), &part));
    }
    assert!(!Arc::ptr_eq(&f.store.below(&f.caller, b"a/part/d").unwrap(), &part));
    for (path, errno) in [
        (&b"a/none"[..], Errno::ENOENT),
        (b"a/beside", Errno::ENOTDIR),
        (b"../outside", Errno::EXDEV),
        (b"/", Errno::EXDEV),
    ] {
        assert_eq!(f.store.below(&f.caller, path).err(), Some(errno), "{}", path.escape_ascii());
    }
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
    // A trailing slash makes Linux follow a link.
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
    // As on the server itself: `..` still leads to the old parent.
    assert!(f.open_at(&gone, b"../a", PATH).is_ok());
    assert_eq!(f.open_at(&gone, b"../../secret", PATH).err(), Some(Errno::EXDEV));
    assert_eq!(f.open_at(&gone, b"a", PATH).err(), Some(Errno::ENOENT));
    let mut names = Names { room: 100, ..Names::default() };
    assert!(moved.read_directory(0, true, &mut names).unwrap());
    let parent = names.seen.iter().find(|entry| entry.3 == b"..").unwrap();
    assert_eq!(parent.4, None);
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
    // Files without a size are still read to their end.
    let how = OpenHow { flags: 0, mode: 0 };
    let (status, _) = store.open(&caller, (&*root, b"status"), how).unwrap();
    assert!(read(&status, 0, 100_000).starts_with(b"Name:"));
}
