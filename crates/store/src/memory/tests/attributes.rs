//! Tests of permissions, times and extended attributes.

use super::*;

fn own(uid: Option<u32>, gid: Option<u32>) -> SetAttr {
    SetAttr { uid, gid, ..SetAttr::default() }
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
    assert_eq!(
        one.set("a", own(None, Some(100))).unwrap().mode & 0o7777,
        0o755,
        "cleared by chown"
    );
    let (two, keep) = (f.as_user(2000, 200), Some(u32::MAX));
    for set in [own(keep, None), own(keep, keep)] {
        one.chmod("a", 0o6755).unwrap();
        assert_eq!(two.set("a", set), Err(Errno::EPERM), "it would clear the bits");
        assert_eq!(f.stat("a").unwrap().mode & 0o7777, 0o6755);
        assert_eq!(one.set("a", set).unwrap().mode & 0o7777, 0o755);
        assert!(two.set("a", set).is_ok(), "nothing to clear");
    }
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
