//! Events that every store must report, and events that it must not.

use super::record::{Record, Seen};
use super::{O_DIRECTORY, Stage, Watching};
use crate::{Listing, SetAttr, Witness};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_wire::Attr;
use towline_wire::event::{
    ACCESS, ALL, ATTRIB, CLOSE_NOWRITE, CLOSE_WRITE, CREATE, DELETE, IGNORED, ISDIR, MODIFY,
    MOVE_SELF, MOVED_FROM, MOVED_TO, OPEN,
};

over_stores!(
    witnesses_are_told_what_they_asked_for,
    the_two_halves_of_a_move_have_one_cookie,
    who_has_left_is_told_nothing_and_may_come_back,
    a_removed_file_ends_its_watch,
    a_removed_directory_ends_its_watch,
    a_replaced_file_and_a_replaced_directory_end_their_watches,
    a_directory_that_moved_and_is_removed_ends_its_watch,
    a_file_with_another_name_is_still_there,
    a_file_without_a_name_is_watched_until_it_is_closed,
    a_link_is_watched_itself,
    thousands_are_watched,
    a_witness_may_leave_while_it_is_told,
    a_witness_may_own_watches,
    names_are_told_as_they_are,
    pure_reads_are_no_changes,
    looking_is_no_access,
);

fn witnesses_are_told_what_they_asked_for(stage: &Stage) {
    stage.mkdir("d");
    let masks = [CREATE, DELETE, CREATE | DELETE, ATTRIB, 0];
    let witnesses: Vec<_> = masks.iter().map(|mask| stage.watch("d", *mask)).collect();
    stage.symlink("x", "d/f");
    stage.unlink("d/f");
    stage.chmod("d", 0o700);
    stage.rmdir("d");
    stage.settle();
    let (create, delete) = ("CREATE f", "DELETE f");
    let wanted: [&[&str]; 5] = [&[create], &[delete], &[create, delete], &["ATTRIB|ISDIR"], &[]];
    for ((record, _), wanted) in witnesses.iter().zip(wanted) {
        assert_eq!(record.words(), [wanted, &["DELETE_SELF", "IGNORED"]].concat());
    }
}

fn the_two_halves_of_a_move_have_one_cookie(stage: &Stage) {
    stage.mkdir("a");
    stage.mkdir("b");
    drop(stage.create("a/f"));
    let ((a, _keep_a), (b, _keep_b)) = (stage.watch("a", ALL), stage.watch("b", ALL));
    let (file, _keep) = stage.watch("a/f", ALL);
    stage.rename("a/f", "b/g");
    stage.settle();
    let (a, b) = (a.take(), b.take());
    assert_eq!((a.len(), b.len()), (1, 1));
    assert_eq!((a[0].mask, &a[0].name[..]), (MOVED_FROM, &b"f"[..]));
    assert_eq!((b[0].mask, &b[0].name[..]), (MOVED_TO, &b"g"[..]));
    assert_ne!(a[0].cookie, 0);
    assert_eq!(a[0].cookie, b[0].cookie);
    assert_eq!(file.take(), [Seen { mask: MOVE_SELF, cookie: 0, name: Vec::new() }]);
    let first = a[0].cookie;
    let (a, _keep_a) = stage.watch("a", MOVED_FROM | MOVED_TO);
    stage.rename("b/g", "a/f");
    stage.settle();
    assert_ne!(a.take()[0].cookie, first);
}

fn who_has_left_is_told_nothing_and_may_come_back(stage: &Stage) {
    drop(stage.create("f"));
    let (gone, watching) = stage.watch("f", ATTRIB);
    let (stays, keep) = stage.watch("f", ATTRIB);
    stage.chmod("f", 0o600);
    stage.settle();
    drop(watching);
    assert_eq!(gone.take().len(), 1);
    stage.chmod("f", 0o640);
    stage.settle();
    assert!(gone.seen().is_empty());
    assert_eq!(stays.take().len(), 2);
    let back = stage.watch_by("f", ATTRIB, &gone);
    stage.chmod("f", 0o600);
    stage.settle();
    assert_eq!((gone.take().len(), stays.take().len()), (1, 1));
    // All watches end, and a new one begins.
    drop((back, keep));
    stage.chmod("f", 0o640);
    let _back = stage.watch_by("f", ATTRIB, &gone);
    stage.chmod("f", 0o600);
    stage.settle();
    assert_eq!((gone.take().len(), stays.take().len()), (1, 0));
}

fn a_removed_file_ends_its_watch(stage: &Stage) {
    drop(stage.create("f"));
    let (all, watching) = stage.watch("f", ALL);
    let (little, _keep) = stage.watch("f", OPEN);
    stage.unlink("f");
    drop(stage.create("f"));
    stage.chmod("f", 0o600);
    stage.settle();
    assert_eq!(all.words(), ["ATTRIB", "DELETE_SELF", "IGNORED"]);
    assert_eq!(little.words(), ["DELETE_SELF", "IGNORED"]);
    // The name now belongs to another file.
    let (new, _keep_new) = stage.watch("f", ALL);
    drop(watching);
    stage.chmod("f", 0o640);
    stage.settle();
    assert_eq!(new.words(), ["ATTRIB"]);
    assert_eq!(all.seen().len(), 3);
}

fn a_removed_directory_ends_its_watch(stage: &Stage) {
    stage.mkdir("d");
    stage.mkdir("d/e");
    let ((outer, _a), (inner, _b)) = (stage.watch("d", ALL), stage.watch("d/e", CREATE));
    let (root, _c) = stage.watch("", DELETE);
    stage.rmdir("d/e");
    stage.rmdir("d");
    stage.settle();
    assert_eq!(inner.words(), ["DELETE_SELF", "IGNORED"]);
    assert_eq!(outer.words(), ["DELETE|ISDIR e", "DELETE_SELF", "IGNORED"]);
    assert_eq!(root.words()[0], "DELETE|ISDIR d");
}

fn a_replaced_file_and_a_replaced_directory_end_their_watches(stage: &Stage) {
    drop((stage.create("f"), stage.create("g")));
    for name in ["a", "b", "c", "d"] {
        stage.mkdir(name);
    }
    let (file, _keep) = stage.watch("f", CREATE);
    let ((a, _a), (b, _b)) = (stage.watch("a", CREATE), stage.watch("b", ATTRIB));
    stage.rename("g", "f");
    stage.rename("c", "a");
    stage.rename("d", "b");
    stage.settle();
    assert_eq!(file.words(), ["DELETE_SELF", "IGNORED"]);
    assert_eq!(a.words(), ["DELETE_SELF", "IGNORED"]);
    assert_eq!(b.words(), ["ATTRIB|ISDIR", "DELETE_SELF", "IGNORED"]);
}

fn a_directory_that_moved_and_is_removed_ends_its_watch(stage: &Stage) {
    stage.mkdir("a");
    stage.mkdir("b");
    stage.mkdir("a/d");
    let (directory, _keep) = stage.watch("a/d", MOVE_SELF);
    stage.rename("a/d", "b/d");
    stage.rename("b/d", "a/e");
    stage.rename("a/e", "b/f");
    stage.rmdir("b/f");
    directory.wait_for(|seen| seen.last().is_some_and(|last| last.mask == IGNORED));
    assert_eq!(directory.words(), ["MOVE_SELF", "DELETE_SELF", "IGNORED"]);
}

fn a_file_with_another_name_is_still_there(stage: &Stage) {
    drop(stage.create("f"));
    let (file, _keep) = stage.watch("f", ATTRIB);
    stage.link("f", "g");
    stage.unlink("f");
    stage.chmod("g", 0o600);
    stage.settle();
    assert_eq!(file.words(), ["ATTRIB"]);
    stage.unlink("g");
    stage.settle();
    assert_eq!(file.words(), ["ATTRIB", "DELETE_SELF", "IGNORED"]);
}

fn a_file_without_a_name_is_watched_until_it_is_closed(stage: &Stage) {
    let file = stage.create("f");
    stage.unlink("f");
    let record = Record::new();
    let watch = file.watch(ATTRIB | MODIFY, record.clone()).unwrap();
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    stage.store.set_attr(&stage.caller, (&*file, b""), true, &mode).unwrap();
    file.write(0, b"x", false).unwrap();
    stage.settle();
    assert_eq!(record.words(), ["ATTRIB", "MODIFY"]);
    drop(watch);
}

fn a_link_is_watched_itself(stage: &Stage) {
    drop(stage.create("f"));
    stage.symlink("f", "l");
    let (link, _keep) = stage.watch("l", ALL);
    stage.chmod("f", 0o600);
    stage.settle();
    assert!(link.seen().is_empty());
    stage.rename("l", "m");
    stage.unlink("m");
    stage.settle();
    assert_eq!(link.words(), ["MOVE_SELF", "ATTRIB", "DELETE_SELF", "IGNORED"]);
}

fn thousands_are_watched(stage: &Stage) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const COUNT: usize = 3000;
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let record = Record::new();
    let mut kept = Vec::new();
    let names: Vec<String> = (0..COUNT).map(|number| format!("f{number}")).collect();
    for name in &names {
        stage.store.make_node(&stage.caller, stage.at(name), 0o100_644, 0).unwrap();
        kept.push(stage.watch_by(name, ATTRIB, &record));
    }
    for name in &names {
        stage.chmod(name, 0o600);
    }
    record.wait_for(|seen| seen.len() == COUNT);
    drop(kept);
    for name in &names {
        stage.unlink(name);
    }
    stage.settle();
    assert_eq!(record.seen().len(), COUNT);
    assert_eq!(record.losses(), 0);
}

fn a_witness_may_leave_while_it_is_told(stage: &Stage) {
    drop(stage.create("f"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let file = stage.create("f");
            while !stop.load(Ordering::Relaxed) {
                file.write(0, b"x", false).unwrap();
            }
        });
        let mut told = Vec::new();
        for _ in 0..200 {
            let (record, watching) = stage.watch("f", MODIFY);
            record.wait_for(|seen| !seen.is_empty());
            drop(watching);
            told.push(record);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(told.iter().flat_map(|record| record.take()).all(|seen| seen.mask == MODIFY));
    });
}

/// Like the table of a session, which gets the events of its watches and holds them.
struct Owner {
    _watching: Watching,
}

impl Witness for Owner {
    fn saw(&self, _: u32, _: u32, _: &[u8]) {}

    fn lost(&self) {}
}

fn a_witness_may_own_watches(stage: &Stage) {
    drop((stage.create("f"), stage.create("g")));
    let file = stage.refer("f");
    let (other, watching) = stage.watch("g", ATTRIB);
    // The witness is dropped with its watch, and drops the watch that it owns.
    let watch = file.watch(ATTRIB, Arc::new(Owner { _watching: watching })).unwrap();
    drop(watch);
    stage.chmod("g", 0o600);
    stage.settle();
    assert!(other.seen().is_empty());
    // Here it is dropped with its file.
    let (_, watching) = stage.watch("g", ATTRIB);
    let watch = file.watch(ATTRIB, Arc::new(Owner { _watching: watching })).unwrap();
    let (end, _keep) = stage.watch("f", 0);
    stage.unlink("f");
    end.wait_for(|seen| seen.iter().any(|one| one.mask == IGNORED));
    drop(watch);
    stage.settle();
}

fn names_are_told_as_they_are(stage: &Stage) {
    stage.mkdir("d");
    let (record, _keep) = stage.watch("d", CREATE);
    let directory = stage.refer("d");
    let odd: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let names = [odd, vec![b'n'; 255], vec![0xff], b"\n".to_vec(), vec![b'a'; 16], vec![b'a'; 15]];
    for name in &names {
        stage.store.make_directory(&stage.caller, (&*directory, name), 0o755).unwrap();
    }
    stage.settle();
    let seen = record.take();
    assert_eq!(seen.len(), names.len());
    for (seen, name) in seen.iter().zip(&names) {
        assert_eq!((seen.mask, &seen.name), (CREATE | ISDIR, name));
    }
}

struct Everything;

impl Listing for Everything {
    fn wants_xattrs(&self) -> bool {
        true
    }

    fn entry(&mut self, _: u64, _: u64, _: u8, _: &[u8], _: Option<Attr>) -> bool {
        true
    }
}

fn pure_reads_are_no_changes(stage: &Stage) {
    stage.mkdir("d");
    stage.create("d/f").write(0, &[1; 100_000], false).unwrap();
    let changes = CREATE | DELETE | MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | MOVE_SELF;
    let paths = ["", "d", "d/f"];
    let kept: Vec<_> = paths.iter().map(|path| stage.watch(path, changes)).collect();
    for _ in 0..5 {
        // Makes the directory known to the store.
        crate::directory::requests_arrived(std::time::Instant::now());
        let directory = stage.open("d", O_DIRECTORY).unwrap();
        assert!(directory.read_directory(0, true, &mut Everything).unwrap());
        let file = stage.open("d/f", 0).unwrap();
        for length in [10, 4096, 100_000] {
            file.read(0, length, true).unwrap();
        }
        stage.store.stat(&stage.caller, stage.at("d/f"), true).unwrap();
        stage.store.access(&stage.caller, stage.at("d/f"), 4).unwrap();
        file.stat().unwrap();
        directory.path().unwrap();
        file.sync(true).unwrap();
        stage.store.stat_fs(&*file).unwrap();
        stage.store.look_at_mounts();
    }
    stage.settle();
    let told = kept.iter().flat_map(|(record, _)| record.take());
    let other: Vec<_> = told.filter(|one| one.name != b"settled").collect();
    assert!(other.is_empty(), "{other:?}");
}

fn looking_is_no_access(stage: &Stage) {
    stage.mkdir("d");
    drop(stage.create("d/f"));
    stage.symlink("d/f", "l");
    let access = ACCESS | OPEN | CLOSE_NOWRITE | CLOSE_WRITE;
    let paths = ["", "d", "d/f", "l"];
    let kept: Vec<_> = paths.iter().map(|path| stage.watch(path, access)).collect();
    for _ in 0..5 {
        crate::directory::requests_arrived(std::time::Instant::now());
        for path in paths.into_iter().filter(|path| !path.is_empty()) {
            stage.store.stat(&stage.caller, stage.at(path), true).unwrap();
            stage.store.stat(&stage.caller, stage.at(path), false).unwrap();
            stage.store.access(&stage.caller, stage.at(path), 4).unwrap();
            stage.refer(path).stat().unwrap();
        }
        stage.store.read_link(&stage.caller, stage.at("l")).unwrap();
        stage.chmod("d/f", 0o600);
        stage.store.below(&stage.caller, b"d").unwrap();
    }
    stage.settle();
    let told: Vec<_> = kept.iter().flat_map(|(record, _)| record.take()).collect();
    assert!(told.is_empty(), "{told:?}");
}
