//! Commands over far networks: what they need from a server is requested together.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use support::far::Far;
use support::{World, noise, text};
use towline_wire::Request;

/// Opens and reads in one request.
fn opens_and_reads(requests: &[Request<'_>]) -> bool {
    matches!(requests, [Request::Open { .. }, Request::Read { .. }, ..])
}

#[test]
fn small_files_are_summed_together() {
    let world = World::new();
    let tree = world.local("served/tree");
    fs::create_dir_all(tree.join("b/below")).unwrap();
    for index in 0..100 {
        fs::write(tree.join(format!("a{index}")), noise(index * 50, 1)).unwrap();
        fs::write(tree.join(format!("b/below/{index}")), noise(index, 2)).unwrap();
    }
    fs::write(tree.join("a50x"), noise(1 << 20, 3)).unwrap();
    let sparse = fs::File::create(tree.join("a51x")).unwrap();
    sparse.write_all_at(b"end", 100_000).unwrap();
    let far = Far::new(&world, 32, opens_and_reads);
    assert_eq!(
        text(&["sum", "-r", &far.url("dir/tree")]),
        text(&["sum", "-r", tree.to_str().unwrap()])
    );
    // One for each directory, some for the two files that are not read in one piece.
    let requests = far.requests();
    assert!(requests <= 200 + 3 + 20, "{requests} requests");
}
