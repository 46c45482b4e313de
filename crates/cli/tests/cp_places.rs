//! Where the copies of `cp` go: several sources in one target, links in it, and long paths.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::fs::{AtFlags, Mode, OFlags};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use support::{TOWLINE, World, bad, good, names, noise, set_mode};

/// The first copy of a file with several names may be replaced by a later source before the other names are made.
#[test]
fn names_of_one_file_are_not_linked_to_what_a_later_source_brings() {
    let world = World::new();
    let path = |name: &str| world.local(name).display().to_string();
    for directory in ["one/d", "two/d"] {
        fs::create_dir_all(world.local(directory)).unwrap();
    }
    for name in ["f", "g"] {
        fs::write(world.local("two/d").join(name), "two").unwrap();
        let _ = fs::remove_file(world.local("one/d/f"));
        let _ = fs::remove_file(world.local("one/d/g"));
        fs::write(world.local("one/d/f"), "one").unwrap();
        fs::hard_link(world.local("one/d/f"), world.local("one/d/g")).unwrap();
        let other = if name == "f" { "g" } else { "f" };
        let ways = [("one/d", "two/d"), ("one/.", "two/."), ("one/d", "two/.")];
        for (number, (first, second)) in ways.into_iter().enumerate() {
            let target = format!("{name}{number}");
            good(&["mkdir", &world.url(&format!("dir/{target}"))]);
            good(&["cp", "-a", &path(first), &path(second), &world.url(&format!("dir/{target}"))]);
            let copies = world.local("served").join(target).join("d");
            assert_eq!(fs::read_to_string(copies.join(name)).unwrap(), "two", "{first} {second}");
            assert_eq!(fs::read_to_string(copies.join(other)).unwrap(), "one", "{first} {second}");
        }
        fs::remove_file(world.local("two/d").join(name)).unwrap();
    }
}

/// Links in the target may lead to what is copied.
#[test]
fn a_source_is_not_replaced_by_a_further_name_of_its_copy() {
    let world = World::new();
    let served = world.local("served");
    let inode = |name: &str| fs::metadata(served.join(name)).unwrap().ino();
    let local = served.display().to_string();
    for base in [world.url("dir"), local] {
        for directory in ["a", "b"] {
            fs::create_dir(served.join(directory)).unwrap();
        }
        fs::write(served.join("a/x"), "data").unwrap();
        fs::hard_link(served.join("a/x"), served.join("a/y")).unwrap();
        symlink("../a/y", served.join("b/y")).unwrap();
        let source = |name: &str| world.url(&format!("dir/a/{name}"));
        // Whichever is copied first.
        for names in [["x", "y"], ["y", "x"]] {
            let [one, other] = names.map(source);
            let complaint = bad(1, &["cp", "-aj1", &one, &other, &format!("{base}/b")]);
            assert!(complaint.contains("is the same file as the source"), "{complaint}");
            assert_eq!(inode("a/x"), inode("a/y"));
        }
        for directory in ["a", "b"] {
            fs::remove_dir_all(served.join(directory)).unwrap();
        }
    }
}

/// They are no leftovers of an earlier copy, whichever source brings them.
#[test]
fn named_files_with_the_names_of_parts_are_copied_too() {
    let world = World::new();
    let path = |name: &str| world.local(name).display().to_string();
    let (part, left) = (".a.towline-part", ".b.000000000.towline-part");
    for directory in ["one", "two"] {
        fs::create_dir(world.local(directory)).unwrap();
    }
    fs::write(world.local("one").join(part), "important").unwrap();
    fs::write(world.local("one").join(left), "important").unwrap();
    fs::write(world.local("two/a"), noise(3 << 20, 5)).unwrap();
    fs::write(world.local("two/b"), noise(100_000, 5)).unwrap();
    let (one, left) = (path(&format!("one/{part}")), path(&format!("one/{left}")));
    for (number, sources) in [
        [&one, &left, &path("two/a"), &path("two/b")],
        [&path("two/b"), &path("two/a"), &one, &left],
    ]
    .into_iter()
    .map(|sources| sources.map(String::as_str).to_vec())
    .chain([vec!["one/.", "two/."], vec!["two/.", "one/."]])
    .enumerate()
    {
        for option in ["-r", "-r --resume", "-rj1"] {
            let target = format!("{number}{option}");
            fs::create_dir(world.local("served").join(&target)).unwrap();
            let mut command = Command::new(TOWLINE);
            command.arg("cp").args(option.split(' ')).args(&sources).current_dir(&world.path);
            let output = command.arg(world.url(&format!("dir/{target}"))).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let copies = names(&world.local("served").join(target));
            assert_eq!(
                copies,
                [part, ".b.000000000.towline-part", "a", "b"],
                "{sources:?} {option}"
            );
        }
    }
}

/// Unless the link is the target itself.
#[test]
fn a_directory_does_not_go_where_a_link_in_the_target_leads() {
    let world = World::new();
    let served = world.local("served");
    let other = served.join("other");
    for source in ["a", "served/a"] {
        fs::create_dir(world.local(source)).unwrap();
        fs::write(world.local(source).join("f"), "file").unwrap();
        set_mode(&world.local(source), 0o750);
    }
    for directory in ["other", "target"] {
        fs::create_dir(served.join(directory)).unwrap();
    }
    symlink("../other", served.join("target/a")).unwrap();
    symlink("other", served.join("link")).unwrap();
    let path = |name: &str| world.local(name).display().to_string();
    for (from, target) in [(path("a"), world.url("dir")), (world.url("dir/a"), path("served"))] {
        for option in ["-r", "-a", "--resume"] {
            let complaint = bad(1, &["cp", "-r", option, &from, &format!("{target}/target")]);
            assert!(complaint.contains("is not a directory and cannot be replaced"), "{complaint}");
            assert!(names(&other).is_empty(), "{option}");
        }
        for link in ["link", "link/"] {
            let whole = format!("{from}/.");
            good(&["cp", "-a", &whole, &from, &format!("{target}/{link}")]);
            assert_eq!(names(&other), ["a", "f"], "{link}");
            assert_eq!(fs::metadata(&other).unwrap().mode() & 0o7777, 0o750);
            assert!(fs::symlink_metadata(served.join("link")).unwrap().is_symlink());
            fs::remove_dir_all(&other).unwrap();
            fs::create_dir(&other).unwrap();
        }
    }
}

#[test]
fn deep_trees_without_files_keep_their_attributes() {
    const DEPTH: usize = 9;
    let world = World::new();
    let name = "d".repeat(250);
    let open = |at: &fs::File| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        fs::File::from(rustix::fs::openat(at, &*name, flags, Mode::empty()).unwrap())
    };
    let (tree, served) = (world.local("tree"), world.local("served"));
    fs::create_dir(&tree).unwrap();
    let mut here = fs::File::open(&tree).unwrap();
    for _ in 0..DEPTH {
        rustix::fs::mkdirat(&here, &*name, Mode::from_raw_mode(0o750)).unwrap();
        here = open(&here);
    }
    let facts = |top: &Path| {
        let mut here = fs::File::open(top).unwrap();
        let fact = |_| {
            here = open(&here);
            let metadata = here.metadata().unwrap();
            (metadata.mode(), metadata.mtime(), metadata.mtime_nsec())
        };
        (0..DEPTH).map(fact).collect::<Vec<_>>()
    };
    for option in ["-a", "-rp"] {
        let (there, back) = (world.url(&format!("dir/{option}")), world.local(option));
        good(&["cp", option, tree.to_str().unwrap(), &there]);
        assert_eq!(facts(&served.join(option)), facts(&tree));
        good(&["cp", option, &there, back.to_str().unwrap()]);
        assert_eq!(facts(&back), facts(&tree));
    }
}

/// The path of a part is longer than that of its file, and no path is longer than 4095 bytes.
#[test]
fn files_with_the_longest_paths_are_copied() {
    let world = World::new();
    let mut directory = String::new();
    let mut here = fs::File::open(world.local("served")).unwrap();
    let name = "d".repeat(200);
    while directory.len() + name.len() + 1 < 4090 {
        rustix::fs::mkdirat(&here, &*name, Mode::from_raw_mode(0o755)).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        here = rustix::fs::openat(&here, &*name, flags, Mode::empty()).unwrap().into();
        directory += &format!("{name}/");
    }
    for size in [10, 100_000, 2 << 20] {
        let (data, last) = (noise(size, 3), "f".repeat(4095 - directory.len()));
        fs::write(world.local("source"), &data).unwrap();
        fs::write(world.local("served/source"), &data).unwrap();
        let read = || {
            let file = rustix::fs::openat(&here, &*last, OFlags::RDONLY, Mode::empty());
            let mut found = Vec::new();
            fs::File::from(file.unwrap()).read_to_end(&mut found).unwrap();
            rustix::fs::unlinkat(&here, &*last, AtFlags::empty()).unwrap();
            found
        };
        good(&[
            "cp",
            world.local("source").to_str().unwrap(),
            &world.url(&format!("dir/{directory}{last}")),
        ]);
        assert!(read() == data, "{size} to the server");
        // Relative, since the whole path would be too long.
        let mut command = Command::new(TOWLINE);
        command.args(["cp", &world.url("dir/source"), &format!("{directory}{last}")]);
        let output = command.current_dir(world.local("served")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(read() == data, "{size} from the server");
    }
}
