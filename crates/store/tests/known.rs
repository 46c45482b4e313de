//! Tests of known directories: whatever other processes change, the next request sees it.
//!
//! This is a program of its own, since after the first call of `requests_arrived` every store that
//! the thread uses relies on further calls.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{caller, is_watched, look};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Instant;
use towline_store::directory::{DirectoryStore, requests_arrived};
use towline_store::{FileStore, OpenHow};
use towline_wire::Errno;

/// Returns the inode that a fresh store finds, which knows no directory yet.
fn truth(root: &Path, path: &str) -> Result<u64, Errno> {
    look(&DirectoryStore::new(root, false).unwrap(), path)
}

#[derive(Clone, Debug)]
enum Step {
    Look(usize, usize),
    Open(usize, usize),
    Move(usize, usize),
    Remove(usize),
    Make(usize),
    Link(usize, usize),
    File(usize, usize),
}

const DIRECTORIES: [&str; 6] = ["a", "b", "a/c", "a/d", "a/c/e", "b/f"];
const NAMES: [&str; 2] = ["x", "y"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let directory = 0..DIRECTORIES.len();
    let name = 0..NAMES.len();
    let step = prop_oneof![
        10 => (directory.clone(), name.clone()).prop_map(|(d, n)| Step::Look(d, n)),
        5 => (directory.clone(), name.clone()).prop_map(|(d, n)| Step::Open(d, n)),
        1 => (directory.clone(), directory.clone()).prop_map(|(d, e)| Step::Move(d, e)),
        1 => directory.clone().prop_map(Step::Remove),
        2 => directory.clone().prop_map(Step::Make),
        1 => (directory.clone(), directory.clone()).prop_map(|(d, e)| Step::Link(d, e)),
        3 => (directory, name).prop_map(|(d, n)| Step::File(d, n)),
    ];
    prop::collection::vec(step, 1..150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_finds_what_is_there(steps in steps()) {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path();
        let store = DirectoryStore::new(root, false).unwrap();
        // Changes may fail where something is missing or in the way; that is part of the test.
        for step in steps {
            match step {
                Step::Look(d, n) => {
                    let path = format!("{}/{}", DIRECTORIES[d], NAMES[n]);
                    let found = look(&store, &path);
                    prop_assert_eq!(found, truth(root, &path), "{}", path);
                }
                Step::Open(d, n) => {
                    let path = format!("{}/{}", DIRECTORIES[d], NAMES[n]);
                    requests_arrived(Instant::now());
                    let top = store.root().unwrap();
                    let how = OpenHow { flags: 0, mode: 0 };
                    let found = store.open(&caller(), (&*top, path.as_bytes()), how);
                    let found = found.map(|(_, attr)| attr.inode);
                    prop_assert_eq!(found, truth(root, &path), "{}", path);
                }
                Step::Move(d, e) => {
                    let _ = fs::rename(root.join(DIRECTORIES[d]), root.join(DIRECTORIES[e]));
                }
                Step::Remove(d) => {
                    let _ = fs::remove_dir_all(root.join(DIRECTORIES[d]));
                    let _ = fs::remove_file(root.join(DIRECTORIES[d]));
                }
                Step::Make(d) => {
                    let _ = fs::create_dir_all(root.join(DIRECTORIES[d]));
                }
                Step::Link(d, e) => {
                    // Relative, so that the link stays inside.
                    let up = "../".repeat(DIRECTORIES[d].matches('/').count());
                    let _ = symlink(format!("{up}{}", DIRECTORIES[e]), root.join(DIRECTORIES[d]));
                }
                Step::File(d, n) => {
                    let _ = fs::write(root.join(DIRECTORIES[d]).join(NAMES[n]), "x");
                }
            }
        }
    }
}

#[test]
fn a_known_directory_that_leaves_the_export_is_forgotten() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("export");
    fs::create_dir_all(root.join("d")).unwrap();
    fs::write(root.join("d/f"), "x").unwrap();
    let store = DirectoryStore::new(&root, false).unwrap();
    for _ in 0..10 {
        look(&store, "d/f").unwrap();
    }
    fs::rename(root.join("d"), temporary.path().join("gone")).unwrap();
    assert_eq!(look(&store, "d/f"), Err(Errno::ENOENT));
    fs::create_dir(root.join("d")).unwrap();
    for _ in 0..10 {
        assert_eq!(look(&store, "d/f"), Err(Errno::ENOENT));
    }
    fs::write(root.join("d/f"), "y").unwrap();
    assert_eq!(look(&store, "d/f"), truth(&root, "d/f"));
}

#[test]
fn links_in_a_known_directory_never_lead_out() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path().join("export");
    fs::create_dir_all(root.join("d")).unwrap();
    fs::write(temporary.path().join("secret"), "x").unwrap();
    fs::write(root.join("inside"), "x").unwrap();
    symlink("../../secret", root.join("d/out")).unwrap();
    symlink("../inside", root.join("d/in")).unwrap();
    let store = DirectoryStore::new(&root, false).unwrap();
    for _ in 0..10 {
        assert_eq!(look(&store, "d/out"), Err(Errno::EXDEV));
        assert_eq!(look(&store, "d/in"), truth(&root, "inside"));
    }
}

#[test]
fn a_directory_that_is_not_there_is_looked_for_less_and_less() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path();
    let store = DirectoryStore::new(root, false).unwrap();
    let is_known = |name: &str| {
        look(&store, &format!("{name}/f")).unwrap();
        is_watched(&root.join(name))
    };
    let make = |name: &str| {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("f"), "x").unwrap();
    };
    make("there");
    if !(0..1000).any(|_| is_known("there")) {
        return println!(
            "SKIPPED directories that are not there: none is known on this file system"
        );
    }
    for _ in 0..100 {
        assert_eq!(look(&store, "missing/f"), Err(Errno::ENOENT));
    }
    make("missing");
    assert!(!(0..10).any(|_| is_known("missing")), "it was looked for after each few uses");
    assert!((0..10_000).any(|_| is_known("missing")), "it is never known");
}

#[test]
fn changes_of_other_threads_are_seen_at_once() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path();
    fs::create_dir_all(root.join("a")).unwrap();
    fs::create_dir_all(root.join("b")).unwrap();
    fs::write(root.join("a/f"), "x").unwrap();
    fs::write(root.join("b/f"), "y").unwrap();
    let store = DirectoryStore::new(root, false).unwrap();
    let (changed, wait) = std::sync::mpsc::channel();
    let (seen, go_on) = std::sync::mpsc::channel();
    // The scope owns the ends of the channels, so that a failure here ends the other thread.
    std::thread::scope(move |scope| {
        scope.spawn(move || {
            for _ in 0..300 {
                fs::rename(root.join("a"), root.join("c")).unwrap();
                fs::rename(root.join("b"), root.join("a")).unwrap();
                fs::rename(root.join("c"), root.join("b")).unwrap();
                changed.send(()).unwrap();
                go_on.recv().unwrap();
            }
        });
        while wait.recv().is_ok() {
            // Often enough that the directory becomes known, and is used while the queue is quiet.
            for _ in 0..6 {
                assert_eq!(look(&store, "a/f"), truth(root, "a/f"));
            }
            seen.send(()).unwrap();
        }
    });
}

/// The operations of one request are executed one after the other, and so may be several requests
/// that arrived together.
#[test]
fn a_request_finds_what_it_has_changed_itself() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path();
    fs::create_dir(root.join("d")).unwrap();
    fs::write(root.join("d/f"), "x").unwrap();
    let store = DirectoryStore::new(root, false).unwrap();
    for _ in 0..10 {
        look(&store, "d/f").unwrap();
    }
    requests_arrived(Instant::now());
    let top = store.root().unwrap();
    let stat = |path: &[u8]| store.stat(&caller(), (&*top, path), true).map(|attr| attr.inode);
    let inode = stat(b"d/f").unwrap();
    store.rename(&caller(), (&*top, b"d"), (&*top, b"e"), 0).unwrap();
    assert_eq!(stat(b"d/f"), Err(Errno::ENOENT));
    assert_eq!(stat(b"e/f"), Ok(inode));
}
