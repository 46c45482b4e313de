//! Checks the rules of the NBD specification on `towline serve --disk` with every kind of disk.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use nbd_conformance::launch::Launched;
use nbd_conformance::report::{Line, Verdict};
use nbd_conformance::rules;
use nbd_conformance::target::Target;
use nbd_conformance::uri::Location;
use std::path::Path;
use std::time::Duration;

/// So large that the longest payload, 32 MiB, is not the whole disk.
const SIZE: u64 = 40 << 20;

fn file(directory: &Path, name: &str) -> String {
    let path = directory.join(name);
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Checks every rule on a disk, for instance `mem:40M`.
fn conforms(disk: &str) {
    let disk = format!("disk={disk}");
    let words = [env!("CARGO_BIN_EXE_towline"), "serve", "--disk", &disk, "--nbd", "unix://$sock"];
    let words = words.map(str::to_owned);
    let patience = Duration::from_secs(30);
    let mut server = Launched::start(&words, patience, true).unwrap();
    let location = Location { address: server.address.clone(), export: "disk".to_owned() };
    let mut target = Target::new(location, patience, 1);
    target.probe().unwrap();
    let mut failed = Vec::new();
    for rule in rules::all() {
        let line = Line::of_launched(rule, &target, true, &mut server).unwrap();
        if line.verdict == Verdict::Fail {
            failed.push(format!("{} {}: {}", rule.level, rule.id, line.seen));
        }
    }
    assert!(failed.is_empty(), "{disk}:\n{}", failed.join("\n"));
}

#[test]
fn memory() {
    conforms("mem:40M");
}

#[test]
fn slow_device() {
    conforms("delay:40M:50:4000000000");
}

#[test]
fn file_cached() {
    let directory = tempfile::tempdir().unwrap();
    conforms(&file(directory.path(), "a"));
}

#[test]
fn file_read_only() {
    let directory = tempfile::tempdir().unwrap();
    conforms(&format!("{}:ro", file(directory.path(), "a")));
}

#[test]
fn stripes() {
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (file(directory.path(), "a"), file(directory.path(), "b"));
    conforms(&format!("stripe:64K:{first},{second}"));
}

#[test]
fn file_direct() {
    // Not on tmpfs, which does not support direct access.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    conforms(&format!("{}:direct", file(directory.path(), "a")));
}
