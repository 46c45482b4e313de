//! `towline cp` as users run it: everything arrives, and no file is ever half copied.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use support::{
    TOWLINE, World, bad, forbidding, good, have, names, noise, run, set_mode, text, wait_until,
};

const LARGE: usize = 20 << 20;

/// Creates a tree with everything that a copy must preserve.
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
    // Not every file system of a test machine supports them.
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

/// Describes everything in a tree that `cp -a` keeps.
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
        // Compared separately, so that a failure does not print 20 MiB.
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
    // In units of 512 or 1024 bytes, depending on the shell.
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

/// As in a directory that may be listed but not entered, or one with a mounted file system whose server has gone.
#[test]
fn an_entry_that_cannot_be_looked_at_does_not_hide_the_others() {
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !have("setpriv") {
        return;
    }
    let world = World::new();
    let tree = world.local("tree");
    fs::create_dir_all(tree.join("closed")).unwrap();
    for name in ["closed/a", "closed/b", "open"] {
        fs::write(tree.join(name), "12345").unwrap();
    }
    set_mode(&tree.join("closed"), 0o444);
    let copy = world.url("small/copy");
    for arguments in [&["sum", "-r"][..], &["cp", "-r"]] {
        let mut command = Command::new(if is_root { "setpriv" } else { "env" });
        command.args(if is_root { &user[..] } else { &[] }).arg(TOWLINE).args(arguments).arg(&tree);
        command.args(if arguments[0] == "cp" { Some(&copy) } else { None });
        let output = command.output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{complaint}");
        let told =
            |name: &str| complaint.contains(&format!("/tree/closed/{name}: permission denied"));
        assert!(told("a") && told("b") && complaint.lines().count() == 2, "{complaint}");
    }
    set_mode(&tree.join("closed"), 0o755);
    assert_eq!(text(&["ls", "-R", &copy]).lines().filter(|line| *line == "open").count(), 1);
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
    // Whatever names lead to it.
    let served = world.local("served");
    fs::write(world.local("two/other"), "two").unwrap();
    for (directory, link) in
        [("first", "other"), ("second", "./other"), ("third", "../third/other")]
    {
        fs::create_dir(served.join(directory)).unwrap();
        fs::write(served.join(directory).join("other"), "old").unwrap();
        symlink(link, served.join(directory).join("same")).unwrap();
        let (target, local) = (world.url(&format!("dir/{directory}")), served.join(directory));
        let complaint = bad(1, &["cp", &one, &path("two/other"), &target]);
        assert!(complaint.contains("/two/other: not copied"), "{complaint}");
        let sources = [world.url("mem/same"), world.url("mem/other")];
        good(&["cp", &path("two/other"), &sources[1]]);
        let local = local.to_str().unwrap();
        let complaint = bad(1, &["cp", &sources[1], &sources[0], local]);
        assert!(complaint.contains("/mem/same: not copied"), "{complaint}");
        assert_eq!(fs::read_to_string(served.join(directory).join("other")).unwrap(), "two");
        // Two names of a file are two places.
        fs::remove_file(served.join(directory).join("same")).unwrap();
        fs::hard_link(format!("{local}/other"), format!("{local}/same")).unwrap();
        good(&["cp", &one, &path("two/other"), &target]);
        assert_eq!(fs::read_to_string(served.join(directory).join("same")).unwrap(), "one");
        assert_eq!(fs::read_to_string(served.join(directory).join("other")).unwrap(), "two");
    }
    good(&["rm", &world.url("mem/other")]);
    // Naming a source twice is a harmless mistake, and directories are merged.
    let output = run(&["cp", &two, &two, &mem]);
    assert!(output.status.success() && !output.stderr.is_empty());
    good(&["cp", "-r", &path("one/sub"), &path("two/sub"), &mem]);
    assert_eq!(text(&["ls", &world.url("mem/sub")]), "one\ntwo\n");
    // Of files with the same name, the last one stays.
    good(&["cp", "-r", &path("one/."), &path("two/."), &mem]);
    assert_eq!(text(&["cat", &world.url("mem/same")]), "two");
}

/// As in a tree from an unfinished copy.
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
fn a_directory_is_not_copied_into_itself_without_end() {
    let world = World::new();
    good(&["mkdir", "-p", &world.url("mem/a/b")]);
    let complaint = bad(1, &["cp", "-r", &world.url("mem/a"), &world.url("mem/a/b")]);
    assert!(complaint.contains("into itself"), "{complaint}");
    // The same directory, locally and remotely.
    fs::create_dir_all(world.local("served/c/d")).unwrap();
    let source = world.local("served/c");
    fs::write(source.join("file"), "").unwrap();
    for (source, new) in [(source.to_str().unwrap(), "new"), (&world.url("dir/c"), "other")] {
        let complaint = bad(1, &["cp", "-r", source, &world.url(&format!("dir/c/{new}"))]);
        assert!(complaint.contains("into itself"), "{complaint}");
        let copied = names(&world.local(&format!("served/c/{new}")));
        assert!(copied.contains(&"file".to_owned()) && !copied.contains(&new.to_owned()));
    }
    // Enough files that the target is filled before it is found in the source.
    (0..2000).for_each(|n| fs::write(source.join(n.to_string()), "").unwrap());
    for source in [source.to_str().unwrap(), &world.through("unix", "dir/c")] {
        let complaint = bad(1, &["cp", "-r", source, &world.url("dir/c/d")]);
        assert!(complaint.contains("into itself"), "{complaint}");
        assert_eq!(names(&world.local("served/c/d")), ["c"]);
    }
}

#[test]
fn a_link_that_cannot_be_made_replaces_nothing() {
    let world = World::new();
    let source = world.local("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("one"), b"new").unwrap();
    fs::hard_link(source.join("one"), source.join("other")).unwrap();
    // It is unspecified which of the two is copied and which is linked to it.
    for (in_the_way, file) in [("one", "other"), ("other", "one")] {
        let target = world.local(&format!("served/{in_the_way}"));
        fs::create_dir_all(target.join(in_the_way)).unwrap();
        fs::write(target.join(file), b"old").unwrap();
        let from = format!("{}/.", source.display());
        bad(1, &["cp", "-a", &from, &world.url(&format!("dir/{in_the_way}"))]);
        assert_eq!(fs::read(target.join(file)).unwrap(), b"new", "copied under its own name");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 2, "nothing is left beside them");
        // A link to this can be made, but it is not a copy.
        fs::remove_dir(target.join(in_the_way)).unwrap();
        let fifo = target.join(in_the_way);
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        fs::write(target.join(file), b"old").unwrap();
        run(&["cp", "-a", &from, &world.url(&format!("dir/{in_the_way}"))]);
        assert!(fs::symlink_metadata(target.join(file)).unwrap().is_file());
        assert_eq!(fs::read(target.join(file)).unwrap(), b"new");
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
    // A closed stream is replaced by a directory: nothing may be created in it.
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
    // What cannot be read twice is not said to be compared.
    let none = world.url("mem/none");
    for (from, to) in [("/dev/stdin", none.as_str()), (target.as_str(), "/dev/stdout")] {
        let complaint = bad(1, &["cp", "--verify", from, to]);
        assert!(complaint.contains("--verify cannot compare"), "{complaint}");
    }
    bad(1, &["stat", &none]);
    // Servers open neither; nobody waits.
    let (fifo, place) = (world.url("dir/fifo"), world.local("served/fifo"));
    rustix::fs::mknodat(CWD, &place, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (from, to) in [(fifo.as_str(), "/dev/null"), (source.to_str().unwrap(), fifo.as_str())] {
        let complaint = bad(1, &["cp", from, to]);
        assert!(complaint.contains("no such device or address"), "{complaint}");
    }
}

/// Only what the file system or the kernel does not allow is skipped.
#[test]
fn a_fifo_without_write_permission_for_its_place_is_an_error() {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !have("setpriv") {
        return;
    }
    let world = World::new();
    let (tree, target) = (world.local("served/tree"), world.local("target"));
    for directory in [&tree, &target] {
        fs::create_dir(directory).unwrap();
    }
    let mode = Mode::from_raw_mode(0o644);
    rustix::fs::mknodat(CWD, tree.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    set_mode(&target, 0o555);
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let mut command = Command::new(if is_root { "setpriv" } else { "env" });
    command.args(if is_root { &user[..] } else { &[] }).args([TOWLINE, "cp", "-r"]);
    let output = command.arg(world.url("dir/tree/.")).arg(&target).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert!(complaint.contains("/target/fifo: permission denied"), "{complaint}");
    set_mode(&target, 0o755);
}

/// As links do.
#[test]
fn fifos_replace_files_and_links_but_not_directories() {
    let world = World::new();
    let (source, target) = (world.local("source"), world.local("served/target"));
    for directory in [&source, &target, &target.join("directory")] {
        fs::create_dir(directory).unwrap();
    }
    let names = ["file", "link", "fifo", "directory"];
    for name in names {
        let mode = Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(CWD, source.join(name), FileType::Fifo, mode, 0).unwrap();
    }
    fs::write(target.join("file"), "old").unwrap();
    fs::write(target.join("other"), "other").unwrap();
    symlink("other", target.join("link")).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, target.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    let from = format!("{}/.", source.display());
    for _ in 0..2 {
        let complaint = bad(1, &["cp", "-a", &from, &world.url("dir/target")]);
        assert!(complaint.contains("/directory: is a directory and cannot be replaced by a fifo"));
        for name in &names[..3] {
            let found = fs::symlink_metadata(target.join(name)).unwrap();
            assert!(found.file_type().is_fifo() && found.mode() & 0o777 == 0o644, "{name}");
        }
        assert_eq!(fs::read(target.join("other")).unwrap(), b"other");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 5, "nothing else");
    }
}

#[test]
fn a_copy_whose_attributes_cannot_be_set_does_not_stay() {
    if !have("python3") {
        return;
    }
    let world = World::new();
    let (socket, served) = (world.local("refusing"), world.local("served"));
    let mut server = forbidding(libc::SYS_utimensat)
        .args([TOWLINE, "serve", "--dir", &format!("e={}", served.display())])
        .args(["--listen", &format!("unix://{}", socket.display())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server listens", || UnixStream::connect(&socket).is_ok());
    let source = world.local("source");
    let copied = [10, 20_000, 2 << 20].map(|size| {
        fs::write(&source, noise(size, 3)).unwrap();
        let target = format!("towline+unix:///e/{size}?socket={}", socket.display());
        run(&["cp", "--preserve=times", source.to_str().unwrap(), &target])
    });
    server.kill().unwrap();
    server.wait().unwrap();
    for output in copied {
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains("operation not permitted"), "{complaint}");
    }
    assert!(names(&served).is_empty());
}

#[test]
fn a_file_to_which_standard_output_goes_is_not_replaced() {
    let world = World::new();
    // Like `/dev/stdout`, which a test must not put at risk.
    let (link, out) = (world.local("link"), world.local("out"));
    symlink("/proc/self/fd/1", &link).unwrap();
    let script = "\"$0\" cp \"$1\" \"$2\" && rm \"$3\" && \"$0\" cp \"$1\" \"$2\" && printf end";
    for (length, appends) in [(10, true), (20 << 20, false)] {
        let data = noise(length, 7);
        fs::write(world.local("served/source"), &data).unwrap();
        fs::write(&out, "before").unwrap();
        let mut opened = fs::OpenOptions::new();
        let mut file = opened.read(true).write(true).append(appends).open(&out).unwrap();
        let status = Command::new("sh")
            .args(["-c", script, TOWLINE, &world.url("dir/source")])
            .args([&link, &out])
            .stdout(file.try_clone().unwrap())
            .status()
            .unwrap();
        assert!(status.success() && fs::symlink_metadata(&link).unwrap().is_symlink());
        let mut written = Vec::new();
        file.seek(std::io::SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut written).unwrap();
        let before = if appends { &b"before"[..] } else { b"" };
        assert!(written == [before, &data, &data, b"end"].concat(), "{length}: {}", written.len());
    }
    let link = world.local("other");
    symlink("/proc/self/fd/3", &link).unwrap();
    let script = "exec 3>\"$3\" && rm \"$3\" && \"$0\" cp \"$1\" \"$2\"";
    let output = Command::new("sh")
        .args(["-c", script, TOWLINE, &world.url("dir/source")])
        .args([&link, &out])
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("/other: no such file or directory"), "{complaint}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

/// The size of a file that the kernel generates when it is read means nothing.
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

/// Files in `/sys` have the size of a page, but hold few bytes.
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
    assert!(complaint.contains("its size is unknown"), "{complaint}");
    // So is a file of unknown size, and one that consists only of a hole.
    text(&["sum", "/proc/version"]);
    let hole = world.local("hole");
    fs::File::create(&hole).unwrap().set_len(100_000).unwrap();
    good(&["cp", hole.to_str().unwrap(), &copy]);
    assert_eq!(good(&["cat", &copy]), vec![0; 100_000]);
}

/// As from some FUSE file systems, where one read yields only a part of what is there.
#[test]
fn files_that_are_read_in_short_pieces_are_copied_whole() {
    let world = World::new();
    let (mounted, socket) = (world.local("mounted"), world.local("short"));
    fs::create_dir(&mounted).unwrap();
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/short_reads.py");
    let mut file_system =
        Command::new("python3").arg(program).arg(&mounted).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 8];
    if file_system.stdout.take().unwrap().read_exact(&mut said).is_err() {
        file_system.wait().unwrap();
        return eprintln!("SKIPPED: no FUSE file system can be mounted here");
    }
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--dir", &format!("e={}", mounted.display())])
        .args(["--listen", &format!("unix://{}", socket.display())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server listens", || UnixStream::connect(&socket).is_ok());
    let copy = world.local("copy");
    let url = format!("towline+unix:///e/f?socket={}", socket.display());
    let output = run(&["cp", "--verify", &url, copy.to_str().unwrap()]);
    let (copied, expected) = (fs::read(&copy), fs::read(mounted.join("f")));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(Command::new("umount").arg("-l").arg(&mounted).status().unwrap().success());
    file_system.kill().unwrap();
    file_system.wait().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(expected.as_ref().unwrap().len(), 200_000);
    assert!(copied.unwrap() == expected.unwrap());
}

/// Like any other files in a tree, wherever the links lead.
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
    let output = run(&["cp", "-p", "--progress", source, &target]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.starts_with("1 files, 4.9K bytes in ") && told.ends_with("/s)\n"), "{told}");
    // What is not copied again makes no rate.
    let output = run(&["cp", "--resume", "--progress", source, &target]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.starts_with("1 files, 0 bytes in "), "{told}");
    assert!(told.ends_with(" s (0/s), 4.9K were there already\n"), "{told}");
}

/// Thread stacks of this size make every start of a thread fail, as a limit on memory or threads does.
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

/// At this depth no path can name a file: the system accepts 4095 bytes.
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
        // Not every file system of a test machine supports them.
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

/// As with cp(1), no file appears where a link leads that leads nowhere.
#[test]
fn links_that_lead_nowhere_are_not_written_through() {
    let world = World::new();
    let link = world.local("link");
    symlink("none", &link).unwrap();
    let local = link.display().to_string();
    for export in ["dir", "mem"] {
        let link = world.url(&format!("{export}/link"));
        good(&["ln", "-s", "none", &link]);
        for (source, target) in [("/proc/version", &link), (world.url("dir/some").as_str(), &local)]
        {
            fs::write(world.local("served/some"), "some").unwrap();
            let complaint = bad(1, &["cp", source, target]);
            let told =
                format!("{target}: no such file or directory; it is a dangling symbolic link");
            assert!(complaint.contains(&told), "{complaint}");
        }
        assert!(!text(&["ls", &world.url(export)]).contains("none"), "{export}");
    }
    assert!(!world.local("none").exists());
}
