//! `towline cp` as users run it: everything arrives, and no file is ever half copied.
#![allow(clippy::unwrap_used)]

mod failures;
mod special;
#[path = "../support/mod.rs"]
mod support;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr;
use support::{Running, TOWLINE, World, bad, good, listening, names, noise, run, set_mode, text};

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

/// Sets the time of the last change, and an earlier one for the last access.
fn set_times(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = |tv_sec| Timespec { tv_sec, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time(seconds - 1000), last_modification: time(seconds) };
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

/// Describes everything in a tree that `cp -a` keeps, but for access times, which this may change.
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
    let transports = ["auto", "tcp", "unix", "shm"];
    for (transport, other) in transports.into_iter().zip(["tcp", "unix", "shm", "auto"]) {
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
fn access_times_are_kept() {
    let world = World::new();
    let tree = world.local("tree");
    fs::create_dir_all(tree.join("sub/empty")).unwrap();
    for (name, size) in [("small", 10), ("sub/middle", 100_000), ("sub/large", 5 << 20)] {
        fs::write(tree.join(name), noise(size, 3)).unwrap();
    }
    symlink("small", tree.join("link")).unwrap();
    let names = [".", "small", "link", "sub", "sub/empty", "sub/middle", "sub/large"];
    // To look at a file does not change its times, unlike to read it.
    let accessed = |top: &Path| {
        names.map(|name| {
            let status = fs::symlink_metadata(top.join(name)).unwrap();
            (name, status.atime(), status.atime_nsec())
        })
    };
    for (option, export) in [("-rp", "dir"), ("-a", "dir"), ("-a", "mem")] {
        for (index, name) in names.iter().enumerate() {
            set_times(&tree.join(name), 1_000_000_000 + index as i64, 123_456_789);
        }
        let expected = accessed(&tree);
        let (url, back) = (world.url(&format!("{export}/there")), world.local("back"));
        good(&["cp", option, tree.to_str().unwrap(), &url]);
        if export == "dir" {
            assert_eq!(accessed(&world.local("served/there")), expected, "{option}");
        }
        good(&["cp", option, &url, back.to_str().unwrap()]);
        assert_eq!(accessed(&back), expected, "{option} from {export}");
        good(&["rm", "-r", &url]);
        fs::remove_dir_all(back).unwrap();
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

/// Only some file systems have something to say before a file is closed.
#[test]
fn a_file_system_of_this_machine_is_not_asked_what_it_could_not_store() {
    let world = World::new();
    fs::write(world.local("large"), vec![1; 2 << 20]).unwrap();
    good(&["cp", &world.local("large").display().to_string(), &world.url("dir/copy")]);
    let told: serde_json::Value =
        serde_json::from_str(&text(&["stats", "--json", &world.url("")])).unwrap();
    assert_eq!(told["operations"]["Rename"].as_u64().unwrap_or(0), 2, "{told}");
    assert_eq!(told["operations"]["Sync"].as_u64().unwrap_or(0), 0, "{told}");
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

/// Returns what a command writes to its standard error if that is a terminal.
#[allow(unsafe_code)]
fn on_a_terminal(arguments: &[&str]) -> String {
    let size = libc::winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut near, mut far) = (0, 0);
    // SAFETY: the structures live through the call, which fills in the two descriptors.
    let made = unsafe {
        libc::openpty(&raw mut near, &raw mut far, ptr::null_mut(), ptr::null(), &raw const size)
    };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: they were just made, and nothing else owns them.
    let [near, far] = [near, far].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let mut command = Command::new(TOWLINE);
    command.args(arguments).env("TERM", "xterm").stdin(Stdio::null()).stderr(far);
    let mut running = command.spawn().unwrap();
    drop(command); // with its end of the terminal
    let (mut told, mut near, mut buffer) = (Vec::new(), fs::File::from(near), [0; 4096]);
    // Fails once nobody has the other end any more.
    while let Ok(count) = near.read(&mut buffer) {
        told.extend_from_slice(&buffer[..count]);
    }
    assert!(running.wait().unwrap().success(), "{}", String::from_utf8_lossy(&told));
    String::from_utf8(told).unwrap()
}

/// A server that makes copies last more than two seconds, and a tree to copy: 40 files, together of 10 MiB, in a
/// directory, which counts as a file.
fn slow_copies(world: &World) -> (Running, String, String) {
    let source = world.local("source");
    fs::create_dir(&source).unwrap();
    for number in 0..40 {
        fs::write(source.join(number.to_string()), noise(256 << 10, number)).unwrap();
    }
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--mem", "slow=100M:bandwidth=4M", "--listen", "tcp://127.0.0.1:0"])
        .args(["--listen", &format!("unix://{}", world.local("slow").display())])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let address = listening(&mut server, drop);
    let (source, target) = (source.display().to_string(), format!("towline://{address}/slow/"));
    (Running(server), source, target)
}

#[test]
fn progress_is_shown_on_a_terminal() {
    let world = World::new();
    let (_server, source, target) = slow_copies(&world);
    let told = on_a_terminal(&["cp", "-r", &source, &(target.clone() + "a")]);
    let is_whole = |line: &str| {
        let parts = line.split_once(" [").and_then(|(bytes, rest)| {
            let (bar, rest) = rest.split_once("] ")?;
            let (rate, rest) = rest.split_once(", ")?;
            let (left, files) = rest.split_once(" left, ")?;
            Some((bytes, bar, rate, left, files.split_once("/41 files")?.0))
        });
        parts.is_some_and(|(bytes, bar, rate, left, files)| {
            bytes.ends_with("iB/10.00 MiB")
                && bar.contains('=')
                && rate.ends_with("iB/s")
                && left.strip_suffix('s').is_some_and(|seconds| seconds.parse::<u32>().is_ok())
                && files.parse::<u32>().is_ok_and(|files| files > 0)
        })
    };
    // Each time, the line is erased and written again.
    assert!(told.split("\x1b[2K").any(is_whole), "{told:?}");
    assert_eq!(on_a_terminal(&["cp", "-rq", &source, &(target + "b")]), "");
}

#[test]
fn a_line_a_second_is_told_where_there_is_no_terminal() {
    let world = World::new();
    let (_server, source, target) = slow_copies(&world);
    let output = run(&["cp", "-r", "--progress", &source, &(target.clone() + "a")]);
    let told = String::from_utf8(output.stderr).unwrap();
    // The total grows while the tree is searched.
    let is_whole = |line: &str| {
        let [files, bytes, rate, left] = line.split(", ").collect::<Vec<_>>()[..] else {
            return false;
        };
        let is_bytes = bytes.ends_with("/10M bytes");
        files.ends_with("/41 files")
            && is_bytes
            && rate.ends_with("/s")
            && left.ends_with(" s left")
    };
    assert!(told.lines().any(is_whole), "{told}");
    assert!(told.lines().next_back().unwrap().starts_with("41 files, 10M bytes in "), "{told}");
    // Unless it is asked for, there is none.
    let output = run(&["cp", "-r", &source, &(target + "b")]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
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
