//! `towline cp` as its users run it: everything arrives, nothing is ever half there.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use support::{TOWLINE, World, bad, good, names, noise, run, set_mode, text};

const LARGE: usize = 20 << 20;

/// A tree with everything in it that a copy has to bring along.
fn make_tree(top: &Path) {
    fs::create_dir_all(top.join("sub/empty")).unwrap();
    for (index, size) in [0, 1, 4096, 16 * 1024, 16 * 1024 + 1, 300_000, 1 << 20].iter().enumerate()
    {
        fs::write(top.join(format!("sub/file{index}")), noise(*size, 7)).unwrap();
    }
    fs::write(top.join("large"), noise(LARGE, 9)).unwrap();
    fs::hard_link(top.join("large"), top.join("sub/large-too")).unwrap();
    fs::write(top.join(OsStr::from_bytes(b"not\xffutf8\nname")), b"x").unwrap();
    symlink("sub/file1", top.join("link")).unwrap();
    symlink("nowhere", top.join("dangling")).unwrap();
    let sparse = fs::File::create(top.join("sparse")).unwrap();
    sparse.write_all_at(b"data in the middle", 10 << 20).unwrap();
    sparse.set_len(30 << 20).unwrap();
    let mode = Mode::from_raw_mode(0o640);
    rustix::fs::mknodat(CWD, top.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    set_mode(&top.join("sub/file2"), 0o400);
    set_mode(&top.join("sub/file3"), 0o4755);
    set_mode(&top.join("sub"), 0o2750);
    // Not every file system of a test machine has them.
    let flags = XattrFlags::empty();
    let _ = rustix::fs::lsetxattr(top.join("large"), "user.note", b"kept", flags);
    for (index, name) in ["large", "sub/file1", "link", "sub/empty", "sub"].iter().enumerate() {
        set_times(&top.join(name), 1_000_000_000 + index as i64, 123_456_789);
    }
}

fn set_times(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

#[derive(Debug, PartialEq)]
struct Entry {
    mode: u32,
    links: u64,
    modified: Option<(i64, i64)>,
    contents: Vec<u8>,
    blocks_at_most_kib: bool,
    note: Vec<u8>,
}

/// Everything about a tree that a copy with `-a` keeps.
fn describe(top: &Path) -> BTreeMap<Vec<u8>, Entry> {
    let mut found = BTreeMap::new();
    let mut stack = vec![top.to_owned()];
    while let Some(path) = stack.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let contents = if metadata.is_symlink() {
            fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec()
        } else if metadata.is_file() {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        if metadata.is_dir() {
            stack.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let mut note = vec![0; 16];
        let length = rustix::fs::lgetxattr(&path, "user.note", &mut note).unwrap_or(0);
        note.truncate(length);
        let entry = Entry {
            mode: metadata.mode(),
            links: if metadata.is_dir() { 0 } else { metadata.nlink() },
            modified: Some((metadata.mtime(), metadata.mtime_nsec())),
            blocks_at_most_kib: metadata.is_file() && metadata.blocks() * 512 < metadata.size(),
            contents,
            note,
        };
        found.insert(path.strip_prefix(top).unwrap().as_os_str().as_bytes().to_vec(), entry);
    }
    found
}

#[test]
fn a_tree_survives_a_journey_through_every_transport_and_store() {
    let world = World::new();
    let tree = world.local("tree");
    make_tree(&tree);
    let before = describe(&tree);
    for (transport, other) in [("tcp", "unix"), ("unix", "shm"), ("shm", "tcp")] {
        let tree = tree.to_str().unwrap();
        let first = world.through(transport, &format!("mem/{transport}"));
        let second = world.through(transport, &format!("mem/{transport}-again"));
        let third = world.through(other, &format!("dir/{transport}"));
        let back = world.local(&format!("back-{transport}"));
        good(&["cp", "-a", tree, &first]);
        good(&["cp", "-a", "--verify", &first, &second]);
        good(&["cp", "-a", "--priority", "low", &second, &third]);
        good(&["cp", "-a", "--verify", "--jobs", "3", &third, back.to_str().unwrap()]);
        assert_same(&before, &describe(&back));
        assert_same(&before, &describe(&world.local(&format!("served/{transport}"))));
        good(&["rm", "-r", &first, &second, &third]);
    }
}

fn assert_same(before: &BTreeMap<Vec<u8>, Entry>, after: &BTreeMap<Vec<u8>, Entry>) {
    let names = |tree: &BTreeMap<Vec<u8>, Entry>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(before), names(after));
    for (name, entry) in before {
        let (name, other) = (String::from_utf8_lossy(name), &after[name]);
        // Contents apart: nobody wants to read 20 MiB of failure.
        assert!(entry.contents == other.contents, "{name}: contents differ");
        assert_eq!(entry.mode, other.mode, "{name}: {:o} {:o}", entry.mode, other.mode);
        assert_eq!(entry.links, other.links, "{name}");
        assert_eq!(entry.modified, other.modified, "{name}");
        assert_eq!(entry.note, other.note, "{name}");
        if name == "sparse" {
            assert!(other.blocks_at_most_kib, "holes were filled");
        }
    }
}

#[test]
fn many_files_arrive_and_sums_agree() {
    let world = World::new();
    let tree = world.local("tree");
    for directory in 0..20 {
        let directory = tree.join(format!("d{directory}"));
        fs::create_dir_all(&directory).unwrap();
        for file in 0..50 {
            fs::write(directory.join(format!("f{file}")), noise(file * 97, file as u32)).unwrap();
        }
    }
    let (tree, target) = (tree.to_str().unwrap(), world.url("mem/tree"));
    good(&["cp", "-r", tree, &target]);
    assert_eq!(text(&["sum", "-r", tree]), text(&["sum", "-r", &target]));
    assert_eq!(text(&["sum", "-r", tree]).lines().count(), 1000);
    good(&["cp", "-r", tree, &target]);
    assert_eq!(text(&["ls", &target]).lines().count(), 21, "inside the directory that exists");
}

#[test]
fn resume_skips_what_is_complete() {
    let world = World::new();
    let (tree, served) = (world.local("tree"), world.local("served"));
    make_tree(&tree);
    let (source, target) = (tree.to_str().unwrap(), world.url("dir/tree"));
    good(&["cp", "-r", "--resume", source, &target]);
    let inode = |name: &str| fs::metadata(served.join("tree").join(name)).unwrap().ino();
    let before = (inode("large"), inode("sub/file1"), inode("sub/file4"));
    fs::write(tree.join("sub/file4"), b"new").unwrap();
    good(&["cp", "-r", "--resume", &format!("{source}/."), &target]);
    let after = (inode("large"), inode("sub/file1"), inode("sub/file4"));
    assert_eq!((before.0, before.1), (after.0, after.1), "not copied again");
    assert_ne!(before.2, after.2);
    assert_eq!(fs::read(served.join("tree/sub/file4")).unwrap(), b"new");
}

#[test]
fn a_full_disk_is_told_and_leaves_no_file() {
    let world = World::new();
    let source = world.local("source");
    fs::write(&source, noise(LARGE, 3)).unwrap();
    let source = source.to_str().unwrap();
    let complaint = bad(1, &["cp", source, &world.url("small/target")]);
    assert!(complaint.contains("no space left on device"), "{complaint}");
    assert!(complaint.contains("was removed") || complaint.contains("are kept in"), "{complaint}");
    assert!(!text(&["ls", &world.url("small")]).contains("target"));
    good(&["cp", source, &world.url("mem/target")]);
}

#[test]
fn what_is_too_large_for_its_place_leaves_no_part() {
    let world = World::new();
    fs::write(world.local("served/large"), noise(LARGE, 9)).unwrap();
    fs::create_dir(world.local("target")).unwrap();
    let target = world.local("target/large").display().to_string();
    // In units of 512 or 1024 bytes, as the shell wants it.
    let limited = Command::new("sh")
        .args(["-c", "ulimit -f 8192 && exec \"$@\"", "sh", TOWLINE, "cp", "--resume"])
        .args([&world.url("dir/large"), &target])
        .output()
        .unwrap();
    let complaint = String::from_utf8(limited.stderr).unwrap();
    assert!(complaint.contains("file too large; the incomplete copy was removed"), "{complaint}");
    assert_eq!(fs::read_dir(world.local("target")).unwrap().count(), 0);
}

#[test]
fn what_only_closing_tells_is_told() {
    let world = World::new();
    let (library, target) = (world.local("late.so"), world.local("target"));
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/late.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(program);
    assert!(compiler.status().unwrap().success());
    fs::create_dir(&target).unwrap();
    for (name, length) in [("small", 5000), ("large", LARGE)] {
        fs::write(world.local("served").join(name), noise(length, 5)).unwrap();
        let copy = |late: &str| {
            let mut command = Command::new(TOWLINE);
            command.args(["cp", &world.url(&format!("dir/{name}"))]).arg(target.join(name));
            command.env("LD_PRELOAD", &library).env("LATE", late).output().unwrap()
        };
        let told = copy(&format!(".{name}."));
        let complaint = String::from_utf8_lossy(&told.stderr).into_owned();
        assert_eq!(told.status.code(), Some(1), "{name}: {complaint}");
        assert!(complaint.contains("quota"), "{name}: {complaint}");
        assert!(!target.join(name).exists(), "{name} is there, though it may not be whole");
        assert!(copy("another file").status.success());
        assert!(fs::read(target.join(name)).unwrap() == noise(length, 5));
    }
}

#[test]
fn errors_name_their_argument_and_the_others_are_copied() {
    let world = World::new();
    let (one, two) = (world.local("one"), world.local("two"));
    fs::write(&one, b"1").unwrap();
    fs::write(&two, b"2").unwrap();
    fs::create_dir(world.local("directory")).unwrap();
    let path = |name: &str| world.local(name).to_str().unwrap().to_owned();
    let (one, two, missing) = (path("one"), path("two"), path("missing"));
    let directory = path("directory");
    let mem = world.url("mem");
    let complaint = bad(1, &["cp", &one, &missing, &directory, &two, &mem]);
    assert!(complaint.contains(&format!("towline: cp: {missing}: no such file")), "{complaint}");
    assert!(
        complaint.contains(&format!("towline: cp: {directory}: is a directory")),
        "{complaint}"
    );
    assert_eq!(text(&["ls", &mem]), "one\ntwo\n");
    let complaint = bad(1, &["cp", &one, &two, &world.url("mem/nothing")]);
    assert!(complaint.contains("not a directory"), "{complaint}");
    let complaint = bad(1, &["cp", &one, &world.url("ro/x")]);
    assert!(complaint.contains("read-only file system"), "{complaint}");
    let complaint = bad(1, &["cp", &one, &world.url("nowhere/x")]);
    assert!(complaint.contains("no export \"nowhere\""), "{complaint}");
    let large = world.local("large");
    fs::write(&large, noise(LARGE, 5)).unwrap();
    let nowhere = world.url("mem/nowhere/x");
    let complaint = bad(1, &["cp", large.to_str().unwrap(), &nowhere]);
    assert!(complaint.contains(&format!("{nowhere}: no such file")), "{complaint}");
    let complaint = bad(1, &["cp", &world.url("mem/one"), &world.url("mem/one")]);
    assert!(complaint.contains("is the same file"), "{complaint}");
    good(&["ln", "-s", "one", &world.url("mem/link")]);
    let complaint = bad(1, &["cp", "-r", &world.url("mem/link"), &world.url("mem/one")]);
    assert!(complaint.contains("the file that the link leads to"), "{complaint}");
    assert_eq!(text(&["cat", &world.url("mem/one")]), "1");
    good(&["rm", &world.url("mem/link")]);
    let served = world.local("served/one");
    fs::write(&served, "one").unwrap();
    fs::hard_link(&served, world.local("served/other")).unwrap();
    let both = [world.url("dir/one"), served.to_str().unwrap().to_owned()];
    for (one, other) in [(0, 1), (1, 0)] {
        let complaint = bad(1, &["cp", &both[one], &both[other]]);
        assert!(complaint.contains("is the same file"), "{complaint}");
    }
    bad(1, &["cp", "-r", &directory, &world.url("mem/one")]);
    bad(1, &["cp", &one, &world.url("mem/nothing/")]);
    assert!(bad(2, &["cp", &one, &two]).contains("cp(1)"));
    bad(2, &["cp", &one]);
    let complaint = bad(1, &["cp", &one, "towline://127.0.0.1:1/x/y"]);
    assert!(complaint.contains("127.0.0.1:1"), "{complaint}");
}

#[test]
fn two_sources_do_not_take_one_place() {
    let world = World::new();
    let path = |name: &str| world.local(name).to_str().unwrap().to_owned();
    for directory in ["one", "two"] {
        fs::create_dir_all(world.local(directory).join("sub")).unwrap();
        fs::write(world.local(directory).join("same"), directory).unwrap();
        fs::write(world.local(directory).join("sub").join(directory), directory).unwrap();
    }
    let (one, two, mem) = (path("one/same"), path("two/same"), world.url("mem"));
    let complaint = bad(1, &["cp", &one, &two, &mem]);
    assert!(complaint.contains(&format!("{two}: not copied")), "{complaint}");
    assert_eq!(text(&["cat", &world.url("mem/same")]), "one");
    // Twice the same is a slip that harms nobody, and directories become one.
    let output = run(&["cp", &two, &two, &mem]);
    assert!(output.status.success() && !output.stderr.is_empty());
    good(&["cp", "-r", &path("one/sub"), &path("two/sub"), &mem]);
    assert_eq!(text(&["ls", &world.url("mem/sub")]), "one\ntwo\n");
    // Of files in them the last one stays.
    good(&["cp", "-r", &path("one/."), &path("two/."), &mem]);
    assert_eq!(text(&["cat", &world.url("mem/same")]), "two");
}

/// As in a tree that was copied and not finished.
#[test]
fn files_with_the_names_of_parts_are_copied_too() {
    let world = World::new();
    let tree = world.local("tree");
    fs::create_dir(&tree).unwrap();
    for number in 0..8 {
        fs::write(tree.join(format!("{number}")), noise(3 << 20, 5)).unwrap();
        fs::write(tree.join(format!(".{number}.towline-part")), b"part").unwrap();
    }
    good(&["cp", "-r", tree.to_str().unwrap(), &world.url("dir/tree")]);
    assert_eq!(names(&world.local("served/tree")), names(&tree));
    let sums = |tree: &str| text(&["sum", "-r", tree]);
    assert_eq!(sums(tree.to_str().unwrap()), sums(&world.url("dir/tree")));
}

#[test]
fn attributes_of_the_system_and_of_what_links_lead_to_are_kept() {
    let world = World::new();
    let (served, target) = (world.local("served"), world.local("target"));
    // `cap_net_raw=ep`, as `capabilities(7)` describes it.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (name, value) in [("security.capability", &capability[..]), ("user.note", b"kept")] {
        for length in [7, LARGE] {
            let source = served.join("source");
            fs::write(&source, noise(length, 5)).unwrap();
            if rustix::fs::lsetxattr(&source, name, value, XattrFlags::empty()).is_err() {
                println!("SKIPPED {name}: it cannot be set here");
                continue;
            }
            let _ = symlink("source", served.join("link"));
            for link in ["source", "link"] {
                good(&[
                    "cp",
                    "--preserve=all",
                    &world.url(&format!("dir/{link}")),
                    target.to_str().unwrap(),
                ]);
                let mut found = vec![0; 64];
                let length = rustix::fs::lgetxattr(&target, name, &mut found).unwrap_or(0);
                assert_eq!(found[..length], *value, "{name} of {link}");
                fs::remove_file(&target).unwrap();
            }
            fs::remove_file(&source).unwrap();
        }
    }
}

#[test]
fn a_directory_is_not_copied_into_itself_without_end() {
    let world = World::new();
    good(&["mkdir", "-p", &world.url("mem/a/b")]);
    let complaint = bad(1, &["cp", "-r", &world.url("mem/a"), &world.url("mem/a/b")]);
    assert!(complaint.contains("into itself"), "{complaint}");
    // The same directory from two sides.
    fs::create_dir_all(world.local("served/c/d")).unwrap();
    let source = world.local("served/c");
    good(&["cp", "-r", source.to_str().unwrap(), &world.url("dir/c/new")]);
    assert_eq!(names(&world.local("served/c/new")), ["d"]);
    // So many that the target is filled while it is found in the source.
    (0..2000).for_each(|n| fs::write(source.join(n.to_string()), "").unwrap());
    for source in [source.to_str().unwrap(), &world.through("unix", "dir/c")] {
        let complaint = bad(1, &["cp", "-r", source, &world.url("dir/c/d")]);
        assert!(complaint.contains("into itself"), "{complaint}");
        assert_eq!(names(&world.local("served/c/d")), ["c"]);
    }
}

#[test]
fn what_is_replaced_keeps_its_mode_and_links_are_written_through() {
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served"));
    for size in [10, 100_000, LARGE] {
        fs::write(&source, noise(size, 5)).unwrap();
        fs::write(served.join("old"), b"old").unwrap();
        set_mode(&served.join("old"), 0o620);
        if !served.join("link").exists() {
            symlink("old", served.join("link")).unwrap();
        }
        good(&["cp", source.to_str().unwrap(), &world.url("dir/link")]);
        assert!(fs::symlink_metadata(served.join("link")).unwrap().is_symlink());
        assert_eq!(fs::metadata(served.join("old")).unwrap().mode() & 0o777, 0o620, "{size}");
        assert!(fs::read(served.join("old")).unwrap() == noise(size, 5));
    }
    assert_eq!(names(&served), ["link", "old"]);
}

/// Names of the two access control lists.
const ACCESS_LIST: &str = "system.posix_acl_access";
const DEFAULT_LIST: &str = "system.posix_acl_default";

/// An access control list by which a user named there may write, and the group may not.
fn access_list() -> Vec<u8> {
    // Of version 2: tag, permissions and, for users by name, who: `acl(5)`, `linux/posix_acl_xattr.h`.
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (1u16, 6u16, u32::MAX),
        (2, 6, 1234),
        (4, 4, u32::MAX),
        (16, 6, u32::MAX),
        (32, 0, u32::MAX),
    ] {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&permissions.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}

/// A list of a file; empty where there is none.
fn list_of(file: &Path, name: &str) -> Vec<u8> {
    let mut value = [0; 100];
    let length = rustix::fs::lgetxattr(file, name, &mut value).unwrap_or(0);
    value[..length].to_vec()
}

#[test]
fn access_control_lists_are_kept_with_the_mode() {
    let world = World::new();
    let tree = world.local("served/tree");
    let list = access_list();
    let set = |path: &Path, name| rustix::fs::lsetxattr(path, name, &list, XattrFlags::empty());
    fs::create_dir_all(tree.join("below")).unwrap();
    let files = ["small", "middle", "large", "fifo", "."];
    for (file, size) in files.iter().zip([10, 100_000, 5 << 20]) {
        fs::write(tree.join(file), noise(size, 3)).unwrap();
    }
    fs::write(tree.join("plain"), b"").unwrap();
    rustix::fs::mknodat(CWD, tree.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    if files.iter().any(|file| set(&tree.join(file), ACCESS_LIST).is_err()) {
        return eprintln!("SKIPPED: no access control lists here");
    }
    set(&tree.join("below"), DEFAULT_LIST).unwrap();
    let (back, served) = (world.local("back"), world.local("served/again"));
    for (source, target, copy) in [
        (world.url("dir/tree"), back.display().to_string(), &back),
        (back.display().to_string(), world.url("dir/again"), &served),
    ] {
        good(&["cp", "-r", "--preserve=mode", &source, &target]);
        for file in files {
            let path = copy.join(file);
            assert_eq!(list_of(&path, ACCESS_LIST), list, "{target} {file}");
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o660, "{target} {file}");
        }
        assert!(list_of(&copy.join("plain"), ACCESS_LIST).is_empty());
        assert_eq!(list_of(&copy.join("below"), DEFAULT_LIST), list);
    }
    // Where there are no such lists the group gets what it had, not what others had.
    for what in ["-p", "-a"] {
        let target = world.url(&format!("mem/small{what}"));
        good(&["cp", what, &world.url("dir/tree/small"), &target]);
        assert!(text(&["stat", &target]).contains("(0640/"), "{what}");
    }
}

/// The group's bits of the mode of a file with an access control list say what all that it names may have at most.
#[test]
fn what_is_replaced_keeps_its_access_control_list() {
    let world = World::new();
    let list = access_list();
    let path = |name: &str| world.local(name).display().to_string();
    let ways = [
        (path("source"), world.url("dir/target"), world.local("served/target")),
        (world.url("dir/source"), path("target"), world.local("target")),
    ];
    for size in [10, 100_000, 5 << 20] {
        let data = noise(size, 3);
        for source in ["source", "served/source"] {
            fs::write(world.local(source), &data).unwrap();
        }
        for (source, target, file) in &ways {
            fs::write(file, b"old").unwrap();
            if rustix::fs::lsetxattr(file, ACCESS_LIST, &list, XattrFlags::empty()).is_err() {
                return eprintln!("SKIPPED: no access control lists here");
            }
            good(&["cp", source, target]);
            assert!(fs::read(file).unwrap() == data);
            assert_eq!(fs::metadata(file).unwrap().mode() & 0o7777, 0o660, "{size} {target}");
            assert_eq!(list_of(file, ACCESS_LIST), list, "{size} {target}");
        }
    }
}

#[test]
fn a_link_that_cannot_be_made_replaces_nothing() {
    let world = World::new();
    let source = world.local("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("one"), b"new").unwrap();
    fs::hard_link(source.join("one"), source.join("other")).unwrap();
    // Which of the two is copied and which is linked to it is not said.
    for (in_the_way, file) in [("one", "other"), ("other", "one")] {
        let target = world.local(&format!("served/{in_the_way}"));
        fs::create_dir_all(target.join(in_the_way)).unwrap();
        fs::write(target.join(file), b"old").unwrap();
        let from = format!("{}/.", source.display());
        bad(1, &["cp", "-a", &from, &world.url(&format!("dir/{in_the_way}"))]);
        let left = fs::read(target.join(file)).unwrap();
        assert!(left == b"old" || left == b"new");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 2, "nothing is left beside them");
    }
}

#[test]
fn devices_and_pipes_are_read_and_written_in_place() {
    let world = World::new();
    let source = world.local("source");
    fs::write(&source, noise(3 << 20, 5)).unwrap();
    good(&["cp", source.to_str().unwrap(), &world.url("mem/source")]);
    good(&["cp", &world.url("mem/source"), "/dev/null"]);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    let out = good(&["cp", &world.url("mem/source"), "/dev/stdout"]);
    assert!(out == noise(3 << 20, 5));
    // A directory stands for a stream that is closed: nothing is to appear in it.
    let script = "exec \"$0\" cp \"$1\" /dev/stdout >&-";
    let closed =
        Command::new("sh").args(["-c", script, TOWLINE, &world.url("mem/source")]).output();
    let complaint = String::from_utf8(closed.unwrap().stderr).unwrap();
    assert!(complaint.contains("/dev/stdout: bad file descriptor"), "{complaint}");
    let target = world.url("mem/piped");
    let mut copy = Command::new(TOWLINE)
        .args(["cp", "/dev/stdin", &target])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    copy.stdin.take().unwrap().write_all(b"through a pipe").unwrap();
    assert!(copy.wait().unwrap().success());
    assert_eq!(text(&["cat", &target]), "through a pipe");
}

/// Of what the kernel makes up while it is read the size says nothing.
#[test]
fn files_whose_size_says_nothing_are_copied_to_their_end() {
    let world = World::new();
    let target = world.local("copy");
    for name in ["version", "kallsyms"] {
        let Ok(expected) = fs::read(Path::new("/proc").join(name)) else {
            println!("SKIPPED /proc/{name}: it cannot be read");
            continue;
        };
        good(&["cp", &format!("/proc/{name}"), &world.url("dir/copy")]);
        good(&["cp", &world.url("dir/copy"), target.to_str().unwrap()]);
        assert_eq!(fs::metadata(&target).unwrap().len(), expected.len() as u64, "{name}");
        assert!(fs::read(&target).unwrap() == expected, "{name}");
    }
}

/// Files of `/sys` have the size of a page, and few bytes.
#[test]
fn files_that_end_before_their_size_are_copied_and_summed() {
    let source = Path::new("/sys/kernel/mm/transparent_hugepage");
    let read = |name: &str| fs::read(source.join(name));
    let Ok(expected) = read("enabled") else {
        return println!("SKIPPED files of /sys: there are none");
    };
    assert!(fs::metadata(source.join("enabled")).unwrap().len() > expected.len() as u64);
    let world = World::new();
    let (copy, file) = (world.url("dir/copy"), source.join("enabled"));
    let file = file.to_str().unwrap();
    good(&["cp", file, &copy]);
    assert_eq!(good(&["cat", &copy]), expected);
    let crc = |name: &str| text(&["sum", name]).split_once("  ").unwrap().0.to_owned();
    assert_eq!(crc(file).split(' ').next(), crc(&copy).split(' ').next());
    let complaint = bad(1, &["cp", "--verify", file, &world.url("dir/verified")]);
    assert!(complaint.contains("its size says nothing"), "{complaint}");
    // So is what nobody knows the size of, and what has none but holes.
    text(&["sum", "/proc/version"]);
    let hole = world.local("hole");
    fs::File::create(&hole).unwrap().set_len(100_000).unwrap();
    good(&["cp", hole.to_str().unwrap(), &copy]);
    assert_eq!(good(&["cat", &copy]), vec![0; 100_000]);
}

/// As by any others in a tree, wherever the links lead.
#[test]
fn links_are_replaced_by_files_whose_size_says_nothing() {
    let source = Path::new("/proc/sys/kernel/keys/maxkeys");
    let Ok(expected) = fs::read(source) else {
        return println!("SKIPPED {source:?}: it cannot be read");
    };
    let world = World::new();
    let (tree, place) = (world.url("dir/tree"), world.url("dir/tree/keys/maxkeys"));
    good(&["mkdir", "-p", &world.url("dir/tree/keys")]);
    good(&["ln", "-s", ".", &place]);
    good(&["cp", "-r", source.parent().unwrap().to_str().unwrap(), &tree]);
    assert_eq!(text(&["cat", &place]).as_bytes(), expected);
}

#[test]
fn progress_is_told_in_lines_where_there_is_no_terminal() {
    let world = World::new();
    let source = world.local("source");
    fs::write(&source, noise(5000, 5)).unwrap();
    let (source, target) = (source.to_str().unwrap(), world.url("mem/source"));
    let output = run(&["cp", "--progress", source, &target]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.starts_with("1 files, 4.9K bytes in "), "{told}");
}

/// Stacks of such a size make every start of a thread fail, as it does where memory or threads are limited.
#[test]
fn a_copy_needs_no_threads() {
    let world = World::new();
    let source = world.local("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("large"), noise(LARGE, 3)).unwrap();
    fs::write(source.join("small"), b"small").unwrap();
    let copy = |from: &OsStr, to: &OsStr| {
        let mut command = Command::new("timeout");
        command.args(["60", TOWLINE, "cp", "-r"]).args([from, to]);
        let output = command.env("RUST_MIN_STACK", (1_u64 << 46).to_string()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let (there, back) = (world.url("dir/there"), world.local("back"));
    copy(source.as_os_str(), OsStr::new(&there));
    copy(OsStr::new(&there), back.as_os_str());
    for name in ["large", "small"] {
        assert!(fs::read(source.join(name)).unwrap() == fs::read(back.join(name)).unwrap());
    }
}

/// Depths below which no path can name a file: the system takes 4095 bytes.
#[test]
fn trees_deeper_than_the_longest_path_are_copied() {
    const DEPTH: usize = 60;
    let world = World::new();
    let (tree, back) = (world.local("tree"), world.local("back"));
    let name = "d".repeat(200);
    fs::create_dir(&tree).unwrap();
    let open = |at: &fs::File, name: &str| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        fs::File::from(rustix::fs::openat(at, name, flags, Mode::empty()).unwrap())
    };
    let mut here = fs::File::open(&tree).unwrap();
    for depth in 0..DEPTH {
        let create = OFlags::WRONLY | OFlags::CREATE;
        for (file, size) in [("small", 7), ("part", 40_000), ("large", 2 << 20)] {
            if depth % 20 == 19 || file == "small" {
                let made = rustix::fs::openat(&here, file, create, Mode::from_raw_mode(0o640));
                let mut file = fs::File::from(made.unwrap());
                file.write_all(&noise(size + depth, depth as u32)).unwrap();
            }
        }
        rustix::fs::symlinkat("small", &here, "link").unwrap();
        rustix::fs::linkat(&here, "small", &here, "twin", AtFlags::empty()).unwrap();
        // Not every file system of a test machine has them.
        let path = format!("/proc/self/fd/{}/small", here.as_raw_fd());
        let _ = rustix::fs::lsetxattr(path, "user.note", b"kept", XattrFlags::empty());
        rustix::fs::mkdirat(&here, &*name, Mode::from_raw_mode(0o750)).unwrap();
        here = open(&here, &name);
    }
    let (source, target, back) =
        (tree.to_str().unwrap(), world.url("dir/tree"), back.to_str().unwrap());
    let sums = text(&["sum", "-r", source]);
    assert_eq!(sums.lines().count(), 2 * DEPTH + 2 * (DEPTH / 20));
    for option in ["--quiet", "--verify", "--resume"] {
        good(&["cp", "-a", option, &format!("{source}/."), &target]);
        assert_eq!(text(&["sum", "-r", &target]), sums);
        good(&["cp", "-a", option, &format!("{target}/."), back]);
        assert_eq!(text(&["sum", "-r", back]), sums);
    }
    let listed = text(&["ls", "-lR", &target]);
    assert_eq!(listed.lines().filter(|line| line.contains("link -> small")).count(), DEPTH);
    let mut here = (fs::File::open(source).unwrap(), fs::File::open(back).unwrap());
    for _ in 0..DEPTH {
        let facts = |at: &fs::File| {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let mut note = [0; 4];
            let path = format!("/proc/self/fd/{}/small", at.as_raw_fd());
            let note = rustix::fs::lgetxattr(path, "user.note", &mut note).map(|_| note);
            let link = rustix::fs::statat(at, "link", flags).unwrap();
            let small = rustix::fs::statat(at, "small", flags).unwrap();
            let directory = rustix::fs::fstat(at).unwrap();
            let of = |stat: rustix::fs::Stat| (stat.st_mode, stat.st_mtime, stat.st_mtime_nsec);
            (of(link), of(small), small.st_nlink, of(directory), note)
        };
        assert_eq!(facts(&here.0), facts(&here.1));
        here = (open(&here.0, &name), open(&here.1, &name));
    }
    good(&["rm", "-r", &target]);
    assert!(names(&world.local("served")).is_empty());
}
