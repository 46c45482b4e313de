//! Changes of attributes in and above known directories.
//!
//! This is a program of its own with one test, since a process forgets all its known directories at once.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{is_watched, look};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use towline_store::directory::DirectoryStore;
use towline_wire::Errno;

const CHANGES: usize = 50;

fn change_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn only_changes_of_the_directories_above_make_them_forgotten() {
    let temporary = tempfile::tempdir().unwrap();
    let root = temporary.path();
    fs::create_dir_all(root.join("above/known")).unwrap();
    for directory in ["", "above", "above/known"] {
        change_mode(&root.join(directory), 0o755);
    }
    for file in ["file", "above/file", "above/known/file"] {
        fs::write(root.join(file), "x").unwrap();
    }
    let store = DirectoryStore::new(root, false).unwrap();
    let known = root.join("above/known");
    let is_known = || {
        look(&store, "above/known/file").unwrap();
        is_watched(&known)
    };
    if !(0..1000).any(|_| is_known()) {
        return println!(
            "SKIPPED changes of attributes: no directory is known on this file system"
        );
    }
    let stays = |number: &usize| {
        for file in ["file", "above/file", "above/known/file"] {
            change_mode(&root.join(file), 0o600 + (number % 2) as u32);
        }
        is_known()
    };
    // Everything is forgotten every two seconds, and known again with the third use.
    let stayed = (0..CHANGES).filter(stays).count();
    assert!(stayed > CHANGES * 3 / 4, "known after {stayed} of {CHANGES} changes of files");

    loses_the_right_to_search(&store, &root.join("above"));
}

/// A server that is not root and may not search a directory any more finds nothing in those below.
fn loses_the_right_to_search(store: &DirectoryStore, above: &Path) {
    let nobody = rustix::process::Uid::from_raw(65534);
    let (changed, wait) = std::sync::mpsc::channel();
    let (ready, go_on) = std::sync::mpsc::channel();
    std::thread::scope(move |scope| {
        scope.spawn(move || {
            // Only this thread's. The channel tells the other one if it fails.
            if rustix::thread::set_thread_res_uid(nobody, nobody, nobody).is_err() {
                return println!("SKIPPED loss of a right to search: it takes root");
            }
            for _ in 0..20 {
                for _ in 0..10 {
                    look(store, "above/known/file").unwrap();
                }
                ready.send(()).unwrap();
                wait.recv().unwrap();
                assert_eq!(look(store, "above/known/file"), Err(Errno::EACCES));
                ready.send(()).unwrap();
                wait.recv().unwrap();
            }
        });
        let mut mode = [0o700, 0o755].into_iter().cycle();
        while go_on.recv().is_ok() {
            change_mode(above, mode.next().unwrap());
            changed.send(()).unwrap();
        }
    });
}
