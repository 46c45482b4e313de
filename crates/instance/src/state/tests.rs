use super::*;
use crate::{STATE, Taken};
use std::os::unix::ffi::OsStrExt;

#[test]
fn both_sides_see_the_same_table() {
    let name = format!("towline-instance-test-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir(&directory).unwrap();
    let bytes = directory.as_os_str().as_bytes();
    let config = Config { family: 5, ..Config::default() };
    let prepared = State::prepare(bytes, &config).unwrap();
    let first = prepared.map().unwrap();
    let second = State::open(bytes).unwrap();
    assert_eq!(second.config(), Some(config), "before the run has begun");
    let roots = [7, 9].map(|handle| Root { handle, inode: handle + 1, epoch: 11 });
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| second.has_begun());
        first.begin(&roots);
        waits.join().unwrap()
    });
    assert!(waits);
    assert_eq!([0, 1].map(|mount| second.root(mount)), roots.map(Some));
    assert_eq!(second.root(MOUNTS_MAX), None);
    first.note_name(b"src");
    assert!(second.may_have_name(b"src") && !second.may_have_name(b"lib"));
    first.note_watched(7 << 40);
    assert!(second.may_be_watched(7 << 40) && !second.may_be_watched(7));
    first.fail();
    assert!(second.has_begun(), "too late for that");
    let is_abandoned = || Prepared::abandoned(bytes).is_ok();
    assert!(!is_abandoned());
    assert!(prepared.is_used(), "by the mapping, without a descriptor");
    assert!(!is_abandoned());
    assert!(second.is_unused());
    let taken: Vec<usize> = (0..100).map(|_| first.take().unwrap()).collect();
    let mut all = taken.clone();
    all.push(second.take().unwrap());
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 101, "no entry is given twice");
    assert!(!second.is_unused());
    let entry = first.entry(taken[3]).unwrap();
    assert!(entry.change(Taken::Free, Taken::Open));
    assert!(!entry.change(Taken::Free, Taken::Open));
    entry.set_path(b"a/b");
    assert_eq!(second.entry(taken[3]).unwrap().path(), b"a/b");
    assert!([&b"a/b"[..], b"a"].iter().all(|path| entry.is_below(path)));
    assert!([&b"a/"[..], b"b", b"a/b/c", b"a/bc", b"aa"].iter().all(|path| !entry.is_below(path)));
    let mut used: Vec<usize> = second.used().collect();
    used.sort_unstable();
    assert_eq!(used, all);
    let [one, two] = [1, 2].map(|process| Holder::new(process, false));
    drop(entry.lock(one));
    let held = second.entry(taken[3]).unwrap().lock(one);
    assert!((0..2).all(|_| entry.try_lock(two).is_none()), "it stays locked");
    drop(held);
    assert!(entry.try_lock(two).is_some());
    let _held = entry.lock(one);
    assert!(entry.leave(7));
    assert_eq!(entry.taken(), Taken::Leaving);
    assert!(!entry.close_left(8), "somebody else's");
    assert!(entry.close_left(7));
    assert!(!entry.close_abandoned(), "the keeper came too late");
    assert!(entry.change(Taken::Closed, Taken::Open));
    assert!(entry.leave(9));
    assert!(entry.close_abandoned());
    assert!(!entry.close_left(9), "the keeper was faster");
    second.give_back(taken[3]);
    assert_eq!(entry.taken(), Taken::Free);
    let again: Vec<usize> = (0..200).map(|_| first.take().unwrap()).collect();
    assert!(again.contains(&taken[3]));
    assert!(second.entry(ENTRIES).is_none());
    assert!(first.executes(77) && first.executes(77) && first.executes(78));
    assert!(second.executed(|| 77) && !first.executed(|| 77) && !first.executed(|| 79));
    assert!(first.executes(78) && second.executed(|| 78));
    assert!(!second.executed(|| 78), "it was noted twice");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_run_that_fails_or_is_over_says_so() {
    let name = format!("towline-instance-over-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir(&directory).unwrap();
    let bytes = directory.as_os_str().as_bytes();
    let prepared = State::prepare(bytes, &Config::default()).unwrap();
    let abandoned = || Prepared::abandoned(bytes).err().map(|e| e.kind());
    assert_eq!(abandoned(), Some(io::ErrorKind::WouldBlock), "it has a keeper");
    assert!(!prepared.is_used());
    assert_eq!(State::open(bytes).err().map(|e| e.kind()), Some(io::ErrorKind::WouldBlock));
    drop(prepared);
    assert_eq!(abandoned(), None);
    std::fs::remove_file(directory.join(STATE)).unwrap();
    assert_eq!(abandoned(), Some(io::ErrorKind::NotFound));
    let library = vec![0; CONFIG_BYTES];
    let long = State::prepare(bytes, &Config { library, ..Config::default() });
    assert_eq!(long.err().map(|e| e.kind()), Some(io::ErrorKind::InvalidInput));
    let prepared = State::prepare(bytes, &Config::default()).unwrap();
    let second = State::open(bytes).unwrap();
    prepared.map().unwrap().fail();
    assert!(!second.has_begun());
    std::fs::remove_dir_all(&directory).unwrap();
}
