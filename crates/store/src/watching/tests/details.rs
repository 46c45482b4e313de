//! Cases that the comparison of random operations leaves out.

use super::record::Record;
use super::{O_DIRECTORY, Stage};
use crate::{Listing, OpenHow, SetAttr};
use std::collections::HashMap;
use towline_wire::Attr;
use towline_wire::event::{
    ACCESS, ALL, ATTRIB, CLOSE_NOWRITE, CLOSE_WRITE, CREATE, DELETE, IGNORED, MODIFY, OPEN,
};
use towline_wire::request::open_flag::{TEMPORARY, of_this_machine};

over_stores!(
    what_is_opened_is_told_by_the_name_it_was_opened_by,
    a_file_that_moved_is_told_by_its_new_name,
    a_removed_file_is_told_by_its_old_name_until_it_is_closed,
    reading_and_listing_are_told,
    a_new_length_by_a_path_is_told,
    a_temporary_file_is_told_when_it_gets_a_name,
    two_that_exchange_their_names_have_two_cookies,
    what_is_outside_of_a_part_is_told_nevertheless,
    the_order_is_that_of_what_happened,
    a_watch_begins_while_names_come_and_go,
);

fn what_is_opened_is_told_by_the_name_it_was_opened_by(stage: &Stage) {
    stage.mkdir("a");
    stage.mkdir("b");
    drop(stage.create("a/f"));
    stage.link("a/f", "b/g");
    let ((a, _a), (b, _b)) = (stage.watch("a", ALL), stage.watch("b", ALL));
    let file = stage.open("b/g", 1).unwrap();
    file.write(0, b"x", false).unwrap();
    drop(file);
    stage.chmod("a/f", 0o600);
    stage.settle();
    assert_eq!(a.words(), ["ATTRIB f"]);
    assert_eq!(b.words(), ["OPEN g", "MODIFY g", "CLOSE_WRITE g"]);
    stage.unlink("a/f");
    stage.chmod("b/g", 0o640);
    stage.settle();
    assert_eq!(a.words()[1..], ["DELETE f"]);
    assert_eq!(b.words()[3..], ["ATTRIB g"]);
}

fn a_file_that_moved_is_told_by_its_new_name(stage: &Stage) {
    stage.mkdir("a");
    stage.mkdir("b");
    let file = stage.create("a/f");
    let ((a, _a), (b, _b)) = (stage.watch("a", MODIFY), stage.watch("b", MODIFY | CLOSE_WRITE));
    file.write(0, b"x", false).unwrap();
    stage.rename("a/f", "b/g");
    file.write(0, b"x", false).unwrap();
    stage.rename("b/g", "b/h");
    drop(file);
    stage.settle();
    assert_eq!(a.words(), ["MODIFY f"]);
    assert_eq!(b.words(), ["MODIFY g", "CLOSE_WRITE h"]);
}

fn a_removed_file_is_told_by_its_old_name_until_it_is_closed(stage: &Stage) {
    stage.mkdir("d");
    let (record, _keep) = stage.watch("d", DELETE | MODIFY | CLOSE_WRITE);
    // Enough files that the store checks which of them are closed.
    for number in 0..200 {
        let name = format!("d/f{number}");
        let file = stage.create(&name);
        stage.unlink(&name);
        if number % 100 == 0 {
            file.write(0, b"x", false).unwrap();
        }
    }
    stage.settle();
    let words = record.words();
    let of = |name: &str| -> Vec<_> {
        words.iter().filter(|words| words.ends_with(name)).cloned().collect()
    };
    assert_eq!(of(" f100"), ["DELETE f100", "MODIFY f100", "CLOSE_WRITE f100"]);
    assert_eq!(of(" f199"), ["DELETE f199", "CLOSE_WRITE f199"]);
}

struct Nothing;

impl Listing for Nothing {
    fn entry(&mut self, _: u64, _: u64, _: u8, _: &[u8], _: Option<Attr>) -> bool {
        true
    }
}

fn reading_and_listing_are_told(stage: &Stage) {
    stage.mkdir("d");
    stage.create("d/f").write(0, &[1; 100_000], false).unwrap();
    let access = ACCESS | OPEN | CLOSE_NOWRITE | CLOSE_WRITE;
    let (directory, _d) = stage.watch("d", access);
    let (file, _f) = stage.watch("d/f", access);
    let opened = stage.open("d", O_DIRECTORY).unwrap();
    assert!(opened.read_directory(0, false, &mut Nothing).unwrap());
    drop(opened);
    stage.settle();
    assert_eq!(directory.words(), ["OPEN|ISDIR", "ACCESS|ISDIR", "CLOSE_NOWRITE|ISDIR"]);
    directory.take();
    let opened = stage.open("d/f", 0).unwrap();
    opened.read(0, 10, true).unwrap();
    opened.read(100_000, 10, true).unwrap();
    drop(opened);
    stage.settle();
    assert_eq!(directory.words(), ["OPEN f", "ACCESS f", "CLOSE_NOWRITE f"]);
    assert_eq!(file.words(), ["OPEN", "ACCESS", "CLOSE_NOWRITE"]);
}

fn a_new_length_by_a_path_is_told(stage: &Stage) {
    drop(stage.create("f"));
    let (file, _keep) = stage.watch("f", MODIFY | ATTRIB | OPEN | CLOSE_WRITE);
    let set = SetAttr { size: Some(10), ..SetAttr::default() };
    stage.store.set_attr(&stage.caller, stage.at("f"), true, &set).unwrap();
    stage.settle();
    assert_eq!(file.words(), ["MODIFY"], "and not that it was opened for that");
}

fn a_temporary_file_is_told_when_it_gets_a_name(stage: &Stage) {
    stage.mkdir("d");
    let (record, _keep) = stage.watch("d", CREATE | DELETE | ATTRIB);
    let how = OpenHow { flags: TEMPORARY | of_this_machine(libc::O_RDWR), mode: 0o644 };
    let Ok((file, _)) = stage.store.open(&stage.caller, stage.at("d"), how) else {
        eprintln!("SKIPPED a_temporary_file_is_told_when_it_gets_a_name: not on this file system");
        return;
    };
    let own = Record::new();
    let _watch = file.watch(ATTRIB, own.clone()).unwrap();
    stage.store.link(&stage.caller, (&*file, b""), true, stage.at("d/f")).unwrap();
    stage.settle();
    assert_eq!(record.words(), ["CREATE f"]);
    assert_eq!(own.words(), ["ATTRIB"]);
    stage.chmod("d/f", 0o600);
    stage.unlink("d/f");
    stage.settle();
    assert_eq!(record.words(), ["CREATE f", "ATTRIB f", "DELETE f"]);
}

fn two_that_exchange_their_names_have_two_cookies(stage: &Stage) {
    stage.mkdir("a");
    stage.mkdir("b");
    drop(stage.create("a/f"));
    stage.mkdir("b/d");
    let record = Record::new();
    let watched = ["a", "b", "a/f", "b/d"];
    let _keep = watched.map(|path| stage.watch_by(path, ALL, &record));
    stage.store.rename(&stage.caller, stage.at("a/f"), stage.at("b/d"), 2).unwrap();
    stage.settle();
    let words = [
        "MOVED_FROM f",
        "MOVED_TO d",
        "MOVE_SELF",
        "MOVED_FROM|ISDIR d",
        "MOVED_TO|ISDIR f",
        "MOVE_SELF",
    ];
    assert_eq!(record.words(), words);
    let cookies: Vec<u32> = record.seen().iter().map(|seen| seen.cookie).collect();
    assert_eq!((cookies[0], cookies[3]), (cookies[1], cookies[4]));
    assert_ne!(cookies[0], cookies[3]);
}

fn what_is_outside_of_a_part_is_told_nevertheless(stage: &Stage) {
    stage.mkdir("part");
    let part = stage.store.below(&stage.caller, b"part").unwrap();
    let root = part.root().unwrap();
    let record = Record::new();
    let _watch = root.watch(CREATE | DELETE, record.clone()).unwrap();
    stage.symlink("x", "part/by the whole");
    part.symlink(&stage.caller, (&*root, b"by the part"), b"x").unwrap();
    stage.settle();
    assert_eq!(record.words(), ["CREATE by the whole", "CREATE by the part"]);
}

/// Creates and removes a few names again and again, from several threads.
fn bustle(stage: &Stage, rounds: usize) {
    std::thread::scope(|threads| {
        for thread in 0..4 {
            threads.spawn(move || {
                for round in 0..rounds {
                    let path = format!("d/{}", (thread + round) % 3);
                    let _ = stage.store.symlink(&stage.caller, stage.at(&path), b"x");
                    let _ = stage.store.unlink(&stage.caller, stage.at(&path), false);
                }
            });
        }
    });
}

fn the_order_is_that_of_what_happened(stage: &Stage) {
    stage.mkdir("d");
    let (record, _keep) = stage.watch("d", CREATE | DELETE);
    bustle(stage, 500);
    stage.settle();
    let mut there: HashMap<Vec<u8>, bool> = HashMap::new();
    for seen in record.take() {
        let before = there.insert(seen.name, seen.mask == CREATE).unwrap_or(false);
        assert_eq!(before, seen.mask == DELETE);
    }
    assert_eq!(record.losses(), 0);
}

fn a_watch_begins_while_names_come_and_go(stage: &Stage) {
    stage.mkdir("d");
    std::thread::scope(|threads| {
        threads.spawn(|| bustle(stage, 500));
        for _ in 0..100 {
            drop((stage.watch("d", ALL), stage.watch("", ALL)));
        }
    });
    let (record, _keep) = stage.watch("d", ALL);
    drop(stage.create("d/f"));
    stage.unlink("d/f");
    stage.rmdir("d");
    record.wait_for(|seen| seen.last().is_some_and(|last| last.mask == IGNORED));
    let words = ["CREATE f", "OPEN f", "CLOSE_WRITE f", "DELETE f", "DELETE_SELF", "IGNORED"];
    assert_eq!(record.words(), words);
}
