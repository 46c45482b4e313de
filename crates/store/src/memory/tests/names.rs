//! Tests of paths, names, links, renames and listings.

use super::*;

#[test]
fn open_follows_its_flags() {
    let f = fixture(LIMIT);
    let file = f.file("a", b"abc");
    let (creat, excl, trunc) = (open_flag::CREATE, open_flag::EXCLUSIVE, open_flag::TRUNCATE);
    let (directory, no_follow) = (open_flag::DIRECTORY, open_flag::NO_FOLLOW);
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
    let link = f.open("s", no_follow | open_flag::PATH).unwrap();
    assert!(link.stat().unwrap().is_symlink());
    assert_eq!(f.store.read_link(&f.caller, (&*link, b"")).unwrap(), b"a");
    assert_eq!(f.open("dangling", creat | excl).err(), Some(Errno::EEXIST));
    f.open("dangling", creat).unwrap();
    assert!(f.stat("new").unwrap().is_file(), "created through the link");
    let path = f.open("a", open_flag::PATH).unwrap();
    assert_eq!(path.read(0, 1, true).err(), Some(Errno::EBADF));
    assert_eq!(path.write(0, b"x", false), Err(Errno::EBADF));
    f.open("s", READ_WRITE | trunc).unwrap();
    assert_eq!(file.stat().unwrap().size, 0, "truncated");
    let append = f.open("a", READ_WRITE | open_flag::APPEND).unwrap();
    file.write(0, b"12", false).unwrap();
    assert_eq!(append.write(0, b"34", true), Ok((2, 2)));
    let again = f.store.open(&f.caller, (&*path, b""), OpenHow { flags: 0, mode: 0 }).unwrap().0;
    assert_eq!(read(&again, 0, 9), b"1234", "reopened");
    assert_eq!(again.identity(), file.identity());
    f.store.make_node(&f.caller, f.at("fifo"), 0o010_644, 0).unwrap();
    assert_eq!(f.open("fifo", 0).err(), Some(Errno::ENXIO));
}

#[test]
fn temporary_files_may_be_linked() {
    let f = fixture(LIMIT);
    let temporary = open_flag::TEMPORARY | open_flag::DIRECTORY;
    assert_eq!(f.open(".", temporary).err(), Some(Errno::EINVAL));
    let file = f.open(".", temporary | READ_WRITE).unwrap();
    file.write(0, b"abc", false).unwrap();
    assert_eq!(file.stat().unwrap().links, 0);
    f.store.link(&f.caller, (&*file, b""), false, f.at("a")).unwrap();
    assert_eq!(read(&f.open("a", 0).unwrap(), 0, 9), b"abc");
    f.unlink("a").unwrap();
    let link = f.store.link(&f.caller, (&*file, b""), false, f.at("a"));
    assert_eq!(link, Err(Errno::ENOENT), "removed");
    let hidden = f.open(".", temporary | READ_WRITE | open_flag::EXCLUSIVE).unwrap();
    let link = f.store.link(&f.caller, (&*hidden, b""), false, f.at("a"));
    assert_eq!(link, Err(Errno::ENOENT), "never to be linked");
}

#[test]
fn a_part_is_left_no_more_than_the_whole() {
    let f = fixture(LIMIT);
    for path in ["a", "a/part", "a/part/d", "a/part/d/e", "a/part/d/e/below"] {
        f.mkdir(path).unwrap();
    }
    f.file("a/beside", b"above");
    f.file("a/part/file", b"in it");
    f.symlink("../beside", "a/part/up").unwrap();
    f.symlink("../../../beside", "a/part/d/e/up").unwrap();
    f.symlink("../../file", "a/part/d/e/down").unwrap();
    f.symlink("../part/file", "a/part/around").unwrap();
    f.symlink("part", "a/link").unwrap();
    let part = f.store.below(&f.caller, b"a/part/").unwrap();
    let root = part.root().unwrap();
    let open = |base: &File, path: &str, flags| {
        let how = OpenHow { flags, mode: 0o644 };
        part.open(&f.caller, (&**base, path.as_bytes()), how).map(|(file, _)| file)
    };
    assert_eq!(root.identity(), f.open("a/part", 0).unwrap().identity());
    let e = open(&root, "d/e", open_flag::DIRECTORY).unwrap();
    for (base, path) in [
        (&root, "up"),
        (&root, "around"),
        (&root, ".."),
        (&root, "../beside"),
        (&root, "d/../../beside"),
        (&root, "d/e/up"),
        (&e, "up"),
        (&e, "../../../beside"),
        (&e, "../../.."),
    ] {
        assert_eq!(open(base, path, 0).err(), Some(Errno::EXDEV), "{path}");
        let stat = part.stat(&f.caller, (&**base, path.as_bytes()), true);
        assert_eq!(stat.err(), Some(Errno::EXDEV), "{path}");
    }
    for (base, path) in [(&root, "d/e/down"), (&e, "down"), (&e, "../../file")] {
        assert_eq!(read(&open(base, path, 0).unwrap(), 0, 9), b"in it");
    }
    let new = part.make_directory(&f.caller, (&*e, b"../../../x"), 0o755);
    assert_eq!(new.err(), Some(Errno::EXDEV));
    // An open directory that was moved out leads only down.
    f.store.rename(&f.caller, f.at("a/part/d/e"), f.at("a/e"), 0).unwrap();
    assert_eq!(open(&e, "..", 0).err(), Some(Errno::EXDEV));
    assert_eq!(open(&e, "../beside", 0).err(), Some(Errno::EXDEV));
    assert!(open(&e, "below", 0).is_ok());
    // Changes through one store are visible in the other, and both share the space.
    open(&root, "new", CREATE).unwrap().write(0, &[7; BLOCK], false).unwrap();
    assert_eq!(f.stat("a/part/new").unwrap().size, BLOCK as u64);
    assert_eq!(part.stat_fs(&*e).unwrap(), f.store.stat_fs(&*root).unwrap());
    // The same directory by any path is the same store.
    let below = |path: &str| f.store.below(&f.caller, path.as_bytes());
    for path in ["a/part", "a/link", "./a/../a/part/."] {
        assert!(Arc::ptr_eq(&below(path).unwrap(), &part));
    }
    assert!(!Arc::ptr_eq(&below("a/part/d").unwrap(), &part));
    for (path, errno) in [
        ("a/none", Errno::ENOENT),
        ("a/beside", Errno::ENOTDIR),
        ("..", Errno::EXDEV),
        ("/", Errno::EXDEV),
    ] {
        assert_eq!(below(path).err(), Some(errno), "{path}");
    }
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
    let e = f.open("d/e", open_flag::PATH).unwrap();
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
    for flags in [3, 6, 7, 8] {
        assert_eq!(f.rename("a", "b", flags), Err(Errno::EINVAL), "{flags}");
    }
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
fn whiteouts_are_left_at_old_names() {
    let (replaces, keeps) = (4, 5);
    let f = fixture(LIMIT);
    f.mkdir("d").unwrap();
    f.mkdir("d/e").unwrap();
    f.file("a", b"a");
    f.file("b", b"b");
    let set = SetAttr { mode: Some(0o2777), gid: Some(77), ..SetAttr::default() };
    f.set("d", set).unwrap();
    let used = f.used();
    let inodes = |path: &str| f.stat(path).unwrap().inode;
    let before = ["a", "d/e"].map(inodes);

    assert_eq!(f.rename("a", "b", keeps), Err(Errno::EEXIST));
    assert_eq!(f.rename("a", "d", replaces), Err(Errno::EISDIR));
    f.set("d/e", SetAttr { uid: Some(4242), ..SetAttr::default() }).unwrap();
    let user = f.as_user(4242, 4242);
    assert_eq!(user.rename("a", "d/a", replaces), Err(Errno::EPERM), "sticky");
    assert_eq!(f.used(), used, "what failed has left nothing");
    user.rename("d/e", "d/moved", keeps).unwrap();
    f.rename("a", "b", replaces).unwrap();
    assert_eq!(["b", "d/moved"].map(inodes), before);
    let left = ["a", "d/e"].map(|path| f.stat(path).unwrap());
    let own = f.stat("b").unwrap();
    for (attr, owner) in left.iter().zip([(own.uid, own.gid), (4242, 77)]) {
        assert_eq!((attr.mode, attr.rdev, attr.links), (0o020_000, 0, 1));
        assert_eq!((attr.uid, attr.gid), owner);
    }
    assert_eq!(f.stat("d").unwrap().links, 3);
    assert_eq!(f.open("a", 0).err(), Some(Errno::ENXIO));

    // Whiteouts are files like others: they can be replaced, moved, leave whiteouts themselves and be removed.
    f.rename("b", "a", 0).unwrap();
    assert_eq!(inodes("a"), before[0]);
    f.rename("d/e", "d/f", keeps).unwrap();
    assert_eq!((inodes("d/f"), f.stat("d/e").unwrap().rdev), (left[1].inode, 0));
    f.link("a", "same").unwrap();
    f.rename("a", "same", replaces).unwrap();
    assert_eq!(inodes("a"), before[0], "two names of one file both stay");
    for path in ["d/e", "d/f", "same"] {
        f.unlink(path).unwrap();
    }
    f.rename("d/moved", "d/e", 0).unwrap();
    f.file("b", b"b");
    assert_eq!(f.used(), used);
}

#[test]
fn a_whiteout_for_which_there_is_no_room_changes_nothing() {
    let f = fixture(LIMIT);
    f.mkdir("full").unwrap();
    f.mkdir("empty").unwrap();
    f.file("a", b"a");
    let used = f.used();
    f.store.set_limit(used);
    assert_eq!(f.rename("a", "b", 4), Err(Errno::ENOSPC));
    assert_eq!(f.rename("full", "empty", 4), Err(Errno::ENOSPC));
    assert_eq!(f.used(), used);
    assert!(f.stat("a").unwrap().is_file() && f.stat("b").is_err());
    f.store.set_limit(LIMIT);
    f.mkdir("empty/still").unwrap();
    assert_eq!(f.rename("full", "empty", 4), Err(Errno::ENOTEMPTY));
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
fn deep_trees_go_without_recursion() {
    let f = fixture(LIMIT);
    let mut directory = f.root.clone();
    for _ in 0..50_000 {
        f.store.make_directory(&f.caller, (&*directory, b"d"), 0o755).unwrap();
        let how = OpenHow { flags: open_flag::PATH, mode: 0 };
        directory = f.store.open(&f.caller, (&*directory, b"d"), how).unwrap().0;
    }
    drop(directory);
    drop(f);
}

#[test]
fn what_takes_no_more_memory_works_although_the_limit_was_lowered() {
    let f = fixture(LIMIT);
    f.file("a", &[1; 8 * KIB]);
    let set_xattr = |path, value| {
        let action = XattrAction::Set(b"user.a", value, 0);
        f.store.xattr(&f.caller, f.at(path), true, action)
    };
    set_xattr("a", b"value").unwrap();
    f.store.set_limit(f.used() / 2);
    assert_eq!(f.mkdir("new").err(), Some(Errno::ENOSPC));
    assert_eq!(f.rename("a", "b", 0), Ok(()));
    assert_eq!(set_xattr("b", b"other").map(drop), Ok(()));
    let file = f.open("b", READ_WRITE).unwrap();
    assert_eq!(file.allocate(0, 0, 8 * KIB as u64), Ok(()));
}
