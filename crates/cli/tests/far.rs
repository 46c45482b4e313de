//! Commands over far networks: what they need from a server is requested together.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use support::far::Far;
use support::{World, bad, good, noise, run, text};
use towline_wire::Request;

/// Opens and reads in one request.
fn opens_and_reads(requests: &[Request<'_>]) -> bool {
    matches!(
        requests,
        [Request::ReadPath { .. }] | [Request::Open { .. }, Request::Read { .. }, ..]
    )
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

#[test]
fn the_next_files_are_opened_and_read_together() {
    let world = World::new();
    let far = Far::new(&world, 32, opens_and_reads);
    let mut arguments = vec!["cat".to_owned()];
    let mut whole = Vec::new();
    for index in 0..60 {
        let data = noise(index * 4000, index as u32);
        fs::write(world.local(&format!("served/{index}")), &data).unwrap();
        whole.extend(data);
        arguments.push(far.url(&format!("dir/{index}")));
    }
    assert!(good(&arguments) == whole);
    // Another one for the root of the export.
    assert_eq!(far.requests(), 60 + 1);
}

#[test]
fn files_are_written_in_order_whatever_their_size() {
    let world = World::new();
    let lengths = [0, 1, 256 << 10, (256 << 10) + 1, 3 << 20, (1 << 20) + (256 << 10), 5];
    let mut arguments = vec!["cat".to_owned()];
    let mut whole = Vec::new();
    for (index, length) in lengths.into_iter().enumerate() {
        let data = noise(length, index as u32);
        for export in ["dir", "mem"] {
            let url = world.url(&format!("{export}/{index}"));
            let path = world.local(&index.to_string());
            fs::write(&path, &data).unwrap();
            good(&["cp", path.to_str().unwrap(), &url]);
            whole.extend(&data);
            arguments.push(url);
        }
    }
    assert!(good(&arguments) == whole);
    // What cannot be opened or read is told, and the rest is written.
    arguments.insert(3, world.url("dir/none"));
    arguments.insert(6, world.url("dir"));
    arguments.insert(7, world.url("none/none"));
    let output = run(&arguments);
    assert!(output.stdout == whole);
    let complaint = bad(1, &arguments);
    let told: Vec<&str> = complaint.lines().collect();
    assert_eq!(told.len(), 3, "{complaint}");
    assert!(told[0].contains("/dir/none: no such file"), "{complaint}");
    assert!(told[1].contains("is a directory"), "{complaint}");
    assert!(told[2].contains("no export"), "{complaint}");
}

#[test]
fn named_files_are_opened_and_summed_together() {
    let world = World::new();
    let far = Far::new(&world, 32, opens_and_reads);
    let (mut remote, mut local) = (vec!["sum".to_owned()], vec!["sum".to_owned()]);
    for index in 0..60 {
        let path = world.local(&format!("served/{index}"));
        fs::write(&path, noise(index * 4000, index as u32)).unwrap();
        remote.push(far.url(&format!("dir/{index}")));
        local.push(path.display().to_string());
    }
    assert_eq!(sums(&text(&remote)), sums(&text(&local)));
    // Another one for the root of the export.
    assert_eq!(far.requests(), 60 + 1);
}

/// Checksums and lengths, without the names.
fn sums(lines: &str) -> Vec<&str> {
    lines.lines().map(|line| line.rsplit_once("  ").unwrap().0).collect()
}

#[test]
fn named_files_are_summed_whatever_their_size() {
    let world = World::new();
    let (mut remote, mut local) = (vec!["sum".to_owned()], vec!["sum".to_owned()]);
    let first = 256 << 10;
    for (index, length) in [0, 1, first - 1, first, first + 1, 3 << 20].into_iter().enumerate() {
        // The last bytes of one are behind a hole that begins in what is read with opening it.
        for hole in [0, 1 << 20] {
            let path = world.local(&format!("served/{index}-{hole}"));
            let file = fs::File::create(&path).unwrap();
            file.write_all_at(&noise(length, index as u32), 0).unwrap();
            file.write_all_at(&noise(5 * hole.min(1), 7), (length + hole) as u64).unwrap();
            remote.push(world.url(&format!("dir/{index}-{hole}")));
            local.push(path.display().to_string());
        }
    }
    assert_eq!(sums(&text(&remote)), sums(&text(&local)));
    // What cannot be summed is told, and the rest is summed.
    remote.insert(2, world.url("dir/none"));
    remote.insert(4, world.url("dir"));
    remote.insert(5, world.local("none").display().to_string());
    let output = run(&remote);
    assert_eq!(sums(std::str::from_utf8(&output.stdout).unwrap()), sums(&text(&local)));
    let complaint = bad(1, &remote);
    let told: Vec<&str> = complaint.lines().collect();
    assert_eq!(told.len(), 3, "{complaint}");
    assert!(told[0].contains("/dir/none: no such file"), "{complaint}");
    assert!(told[1].contains("use -r"), "{complaint}");
    assert!(told[2].contains("no such file"), "{complaint}");
}

/// A tree of 40 directories with two files each, half of them two levels deep.
fn many_directories(world: &World) -> PathBuf {
    let tree = world.local("served/tree");
    for index in 0..20 {
        let below = tree.join(format!("d{index}/below"));
        fs::create_dir_all(&below).unwrap();
        for directory in [below.parent().unwrap(), &below] {
            fs::write(directory.join("one"), noise(index, 1)).unwrap();
            fs::write(directory.join("two"), noise(index, 2)).unwrap();
        }
    }
    tree
}

#[test]
fn directories_are_removed_together() {
    let world = World::new();
    let tree = many_directories(&world);
    let far = Far::new(&world, 16, |requests| match requests {
        [Request::Open { path, .. }, Request::ReadDir { .. }] => path.starts_with(b"d"),
        _ => false,
    });
    good(&["rm", "-r", &far.url("dir/tree")]);
    assert!(!tree.exists());
    // For each directory one to open and list it and one to remove it; for the tree also one for the root of the
    // export, and two that tell that it is a directory.
    assert_eq!(far.requests(), 2 * 41 + 80 + 3);
}

#[test]
fn the_files_of_a_directory_are_removed_together() {
    let world = World::new();
    let tree = world.local("served/tree");
    fs::create_dir(&tree).unwrap();
    (0..40).for_each(|index| fs::write(tree.join(format!("f{index}")), "").unwrap());
    let far = Far::new(
        &world,
        32,
        |requests| matches!(requests, [Request::Unlink { path, .. }] if path.starts_with(b"f")),
    );
    good(&["rm", "-r", &far.url("dir/tree")]);
    assert!(!tree.exists());
    assert_eq!(far.requests(), 2 + 40 + 3);
}

#[test]
fn directories_are_listed_together_to_be_summed() {
    let world = World::new();
    let tree = many_directories(&world);
    let far = Far::new(&world, 16, |requests| match requests {
        [Request::Open { path, .. }, Request::ReadDir { .. }, ..] => path.starts_with(b"tree/"),
        _ => false,
    });
    let local = text(&["sum", "-r", tree.to_str().unwrap()]);
    assert_eq!(text(&["sum", "-r", &far.url("dir/tree")]), local);
    // For the tree also one for the root of the export, and its status.
    assert_eq!(far.requests(), 41 + 80 + 2);
}

#[test]
fn named_files_are_looked_at_together() {
    let world = World::new();
    let far = Far::new(&world, 32, |requests| matches!(requests, [Request::Stat { .. }]));
    let mut arguments = vec!["stat".to_owned(), "--json".to_owned()];
    for index in 0..60 {
        fs::write(world.local(&format!("served/{index}")), "").unwrap();
        arguments.push(far.url(&format!("dir/{index}")));
    }
    let looked = text(&arguments);
    for (index, line) in looked.lines().enumerate() {
        assert!(line.contains(&format!("\"name\":\"{index}\"")), "{line}");
    }
    // Another one for the root of the export.
    assert_eq!((looked.lines().count(), far.requests()), (60, 60 + 1));
    // What cannot be looked at is told, and the rest is shown.
    let (first, none, last) = (world.url("dir/0"), world.url("dir/none"), world.url("dir/1"));
    let output = run(&["stat", "--json", &first, &none, &last]);
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 2);
    assert!(bad(1, &["stat", &first, &none, &last]).contains("/dir/none: no such file"));
}
