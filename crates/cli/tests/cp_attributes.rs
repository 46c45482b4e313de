//! How `cp` preserves modes, attributes and access control lists.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};
use support::{TOWLINE, World, forbidding, good, have, names, noise, set_mode, text};

const LARGE: usize = 20 << 20;

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

/// As on file systems without extended attributes, or without room for a long one.
#[test]
fn an_attribute_that_the_target_cannot_hold_is_all_that_is_missing() {
    if !have("python3") {
        return;
    }
    let world = World::new();
    let (tree, target) = (world.local("served/tree"), world.local("target"));
    fs::create_dir_all(tree.join("sub")).unwrap();
    for (name, length) in [("small", 7), ("sub/large", LARGE)] {
        fs::write(tree.join(name), noise(length, 5)).unwrap();
        set_mode(&tree.join(name), 0o640);
    }
    for name in ["small", "sub/large", "sub"] {
        let (path, flags) = (tree.join(name), XattrFlags::empty());
        if rustix::fs::lsetxattr(path, "user.note", b"lost", flags).is_err() {
            return eprintln!("SKIPPED: no extended attributes here");
        }
    }
    set_mode(&tree.join("sub"), 0o750);
    let long_ago = Duration::from_secs(1_000_000);
    for name in ["small", "sub/large", "sub"] {
        let file = fs::File::open(tree.join(name)).unwrap();
        file.set_modified(UNIX_EPOCH + long_ago).unwrap();
    }
    let mut copy = forbidding(libc::SYS_lsetxattr);
    copy.args([TOWLINE, "cp", "-a", &world.url("dir/tree")]).arg(&target);
    let output = copy.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for name in ["small", "sub/large", "sub"] {
        let missing = "operation not permitted; extended attribute user.note was not copied";
        assert!(said.contains(&format!("/tree/{name}: {missing}\n")), "{said}");
        let [from, to] = [&tree, &target].map(|place| fs::metadata(place.join(name)).unwrap());
        assert_eq!((to.mode(), to.mtime()), (from.mode(), 1_000_000), "{name}");
        assert!(to.is_dir() || fs::read(target.join(name)).unwrap().len() as u64 == from.len());
    }
    assert_eq!(said.lines().count(), 3, "{said}");
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

/// Returns an access control list that lets a named user write, but not the group.
fn access_list() -> Vec<u8> {
    // Version 2: tag, permissions and, for named users, the user: `acl(5)`, `linux/posix_acl_xattr.h`.
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

/// Returns a list with these rights of the owner, the group, a named user and everybody, in this order.
fn list_with([owner, group, named, mask, others]: [Option<u16>; 5]) -> Vec<u8> {
    let mut list = 2u32.to_le_bytes().to_vec();
    let entries =
        [(1u16, owner, u32::MAX), (2, named, 1234), (4, group, u32::MAX), (16, mask, u32::MAX)];
    for (tag, permissions, id) in entries.into_iter().chain([(32, others, u32::MAX)]) {
        if let Some(permissions) = permissions {
            list.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()));
            list.extend_from_slice(&id.to_le_bytes());
        }
    }
    list
}

/// Whatever their size: large ones are complete before anybody else gets rights.
#[test]
fn new_files_have_no_more_rights_than_their_directory_hands_down() {
    let world = World::new();
    let source = world.local("served/source");
    fs::create_dir(&source).unwrap();
    for (name, size) in [("small", 10), ("middle", 200_000), ("large", 5 << 20)] {
        fs::write(source.join(name), noise(size, 3)).unwrap();
    }
    fs::File::create(source.join("hole")).unwrap().set_len(300_000).unwrap();
    let lists = [
        [Some(7), Some(0), None, None, Some(0)],
        [Some(7), Some(5), Some(7), Some(1), Some(4)],
        [Some(6), Some(0), Some(7), Some(7), Some(0)],
    ];
    for (number, list) in lists.map(list_with).into_iter().enumerate() {
        for (mode, side) in [(0o644, "served"), (0o666, "here")] {
            let directory = world.local(&format!("{side}/{number}"));
            fs::create_dir_all(&directory).unwrap();
            if rustix::fs::lsetxattr(&directory, DEFAULT_LIST, &list, XattrFlags::empty()).is_err()
            {
                return eprintln!("SKIPPED: no access control lists here");
            }
            let local = source.display().to_string();
            let (from, target) = match side {
                "served" => (local.clone(), world.url(&format!("dir/{number}"))),
                _ => (world.url("dir/source"), directory.display().to_string()),
            };
            for name in names(&source) {
                set_mode(&source.join(&name), mode);
            }
            let plain = directory.join("plain");
            let script = format!("umask 022; cp {local}/small {}; ", plain.display());
            let script = script + &format!("exec {TOWLINE} cp -r '{from}/.' '{target}'");
            let done = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let told =
                |path: &Path| (fs::metadata(path).unwrap().mode(), list_of(path, ACCESS_LIST));
            // The kernel leaves the umask out, we do not (`towline-cp(1)`).
            let like = directory.join(if mode == 0o644 { "plain" } else { "small" });
            for name in names(&source) {
                let found = told(&directory.join(&name));
                assert_eq!(found, told(&like), "{list:?} {side} {name}");
            }
        }
    }
}

/// Returns a list of a file, empty if it has none.
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
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: the list of a directory that only root can enter then");
    }
    let files = ["small", "middle", "large", "fifo", "."];
    let files = &files[..if is_root { 5 } else { 4 }];
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
    // Where there are no access control lists, the group keeps its permissions and does not get those of
    // others.
    for what in ["-p", "-a"] {
        let target = world.url(&format!("mem/small{what}"));
        good(&["cp", what, &world.url("dir/tree/small"), &target]);
        assert!(text(&["stat", &target]).contains("(0640/"), "{what}");
    }
}

/// They are rights, which only `--preserve=mode` keeps.
#[test]
fn access_control_lists_are_no_extended_attributes_to_keep() {
    let world = World::new();
    let (tree, target) = (world.local("tree"), world.local("served/tree"));
    fs::create_dir(&tree).unwrap();
    // With a mask without rights, as `chmod g=` leaves it.
    let mut masked = access_list();
    masked[4 + 3 * 8 + 2] = 0;
    for size in [10, 100_000, 5 << 20] {
        let file = tree.join(size.to_string());
        fs::write(&file, noise(size, 3)).unwrap();
        set_mode(&file, 0o600);
        let flags = XattrFlags::empty();
        let _ = rustix::fs::lsetxattr(&file, "user.note", b"kept", flags);
        if rustix::fs::lsetxattr(&file, ACCESS_LIST, &access_list(), flags).is_err() {
            return eprintln!("SKIPPED: no access control lists here");
        }
    }
    rustix::fs::lsetxattr(&tree, DEFAULT_LIST, &access_list(), XattrFlags::empty()).unwrap();
    let (from, to) = (tree.display().to_string(), world.url("dir/tree"));
    good(&["cp", "-r", "--preserve=xattr", &from, &to]);
    for (_, mode, access, default) in rights(&target) {
        assert!(access.is_empty() && default.is_empty() && mode & 0o022 == 0, "{mode:o}");
    }
    assert_eq!(list_of(&target.join("10"), "user.note"), list_of(&tree.join("10"), "user.note"));
    fs::remove_dir_all(&target).unwrap();
    for name in names(&tree) {
        rustix::fs::lsetxattr(tree.join(name), ACCESS_LIST, &masked, XattrFlags::empty()).unwrap();
    }
    for option in ["-p", "-a"] {
        good(&["cp", "-r", option, &from, &to]);
        assert_eq!(rights(&target), rights(&tree), "{option}");
        fs::remove_dir_all(&target).unwrap();
    }
}

/// The group bits in the mode of a file with an access control list limit the permissions of everyone it
/// names.
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

/// Mode and both access control lists of everything in a tree.
fn rights(top: &Path) -> Vec<(PathBuf, u32, Vec<u8>, Vec<u8>)> {
    let (mut found, mut left) = (Vec::new(), vec![top.to_owned()]);
    while let Some(path) = left.pop() {
        let status = fs::symlink_metadata(&path).unwrap();
        if status.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let lists = [ACCESS_LIST, DEFAULT_LIST].map(|name| list_of(&path, name));
        let [access, default] = lists;
        let name = path.strip_prefix(top).unwrap().to_owned();
        found.push((name, status.mode(), access, default));
    }
    found.sort();
    found
}

/// A copy has the rights of its source, or of what it replaces, not those that its directory hands down: as with `cp`.
#[test]
fn lists_that_a_directory_hands_down_do_not_stay() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root can enter a directory with this list");
    }
    let world = World::new();
    let list = access_list();
    let make_source = |tree: &Path| {
        fs::create_dir_all(tree.join("sub/empty")).unwrap();
        for (name, size) in [("small", 10), ("middle", 100_000), ("sub/large", 5 << 20)] {
            fs::write(tree.join(name), noise(size, 3)).unwrap();
        }
        set_mode(&tree.join("small"), 0o640);
        let mode = Mode::from_raw_mode(0o620);
        rustix::fs::mknodat(CWD, tree.join("sub/fifo"), FileType::Fifo, mode, 0).unwrap();
        set_mode(&tree.join("sub/fifo"), 0o620);
        set_mode(tree, 0o750);
    };
    // Holds a list that is handed down, files and directories that have it, and a file without one.
    let make_target = |target: &Path| {
        fs::create_dir_all(target).unwrap();
        fs::write(target.join("small"), "old").unwrap();
        set_mode(&target.join("small"), 0o604);
        for which in [ACCESS_LIST, DEFAULT_LIST] {
            if rustix::fs::lsetxattr(target, which, &list, XattrFlags::empty()).is_err() {
                return false;
            }
        }
        fs::create_dir(target.join("sub")).unwrap();
        fs::write(target.join("middle"), "old").unwrap();
        true
    };
    let sources = [world.local("tree"), world.local("served/tree")];
    sources.iter().for_each(|tree| make_source(tree));
    let urls = [world.url("dir/tree"), world.url("dir/target")];
    let path = |name: &str| world.local(name).display().to_string();
    let ways = [
        (path("tree"), urls[1].clone(), world.local("served/target")),
        (urls[0].clone(), path("target"), world.local("target")),
    ];
    for (options, inside) in [
        (&["-rp"][..], "/."),
        (&["-rp"], ""),
        (&["-a"], "/."),
        (&["-rp", "--resume"], "/."),
        (&["--preserve=mode"], "/small"),
        (&[], "/small"),
    ] {
        let expected = world.local("expected");
        if !make_target(&expected) {
            return eprintln!("SKIPPED: no access control lists here");
        }
        let of_cp = options.iter().filter(|option| **option != "--resume");
        let cp = Command::new("cp").args(of_cp).arg(path("tree") + inside).arg(&expected).status();
        assert!(cp.unwrap().success());
        // The cp of coreutils 9.7 leaves the lists on a fifo, which nobody replaces and which has none at its source.
        let fifo = expected.join(if inside.is_empty() { "tree/sub/fifo" } else { "sub/fifo" });
        if fifo.exists() && !list_of(&fifo, ACCESS_LIST).is_empty() {
            println!("SKIPPED {options:?} {inside}: the cp of this machine lets lists stay");
            fs::remove_dir_all(&expected).unwrap();
            continue;
        }
        for (source, url, target) in &ways {
            assert!(make_target(target));
            let source = source.clone() + inside;
            good(&[&["cp"], options, &[source.as_str(), url.as_str()]].concat());
            assert_eq!(rights(target), rights(&expected), "{options:?} {inside} to {url}");
            fs::remove_dir_all(target).unwrap();
        }
        fs::remove_dir_all(expected).unwrap();
    }
}

/// Copies files of user 4321 and group 4322 with an option, as another user, with a command that runs the program.
/// Returns the owners and modes of a small and a large copy.
fn copied_by(command: &[&str], option: &str) -> Option<Vec<(u32, u32, u32)>> {
    if !rustix::process::geteuid().is_root() || !have(command[0]) {
        println!("SKIPPED: only root can give files away and become another user");
        return None;
    }
    let world = World::new();
    let own = world.local("own");
    fs::create_dir(&own).unwrap();
    set_mode(&own, 0o777);
    let owners = [7, LARGE].map(|length| {
        let source = world.local("served/source");
        fs::write(&source, noise(length, 5)).unwrap();
        chown(&source, Some(4321), Some(4322)).unwrap();
        set_mode(&source, 0o6755);
        let output = Command::new(command[0])
            .args(&command[1..])
            .args([TOWLINE, "cp", option, &world.url("dir/source")])
            .arg(&own)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let copy = fs::metadata(own.join("source")).unwrap();
        fs::remove_file(own.join("source")).unwrap();
        (copy.uid(), copy.gid(), copy.mode() & 0o7777)
    });
    Some(owners.to_vec())
}

/// Until it has its owner, a copy would be a set-user-ID file of who copies.
#[test]
fn set_user_id_bits_come_after_the_owner() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    let (source, trace) = (world.local("served/source"), world.local("trace"));
    fs::write(&source, "data").unwrap();
    set_mode(&source, 0o4755);
    for what in ["mode,owner", "owner", "mode", "times"] {
        let target = world.local(what);
        let copied = Command::new("strace")
            .args(["-f", "-e", "trace=openat", "-o"])
            .args([trace.as_os_str(), TOWLINE.as_ref(), "cp".as_ref()])
            .args([format!("--preserve={what}"), world.url("dir/source")])
            .arg(&target)
            .output()
            .unwrap();
        if !copied.status.success() {
            return eprintln!("SKIPPED: strace may not trace here");
        }
        let kept = what.contains("mode");
        let trace = fs::read_to_string(&trace).unwrap();
        let created = trace.lines().find(|line| line.contains("towline-part")).unwrap();
        assert_eq!(created.contains(", 0600"), kept, "{what}: {created}");
        let mode = fs::metadata(target).unwrap().mode() & 0o7000;
        assert_eq!(mode, if kept { 0o4000 } else { 0 }, "{what}");
    }
}

#[test]
fn the_group_is_kept_where_the_user_cannot_be() {
    for option in ["-p", "-a"] {
        let user = ["setpriv", "--reuid=65534", "--regid=65534", "--groups=65534,4322"];
        if let Some(owners) = copied_by(&user, option) {
            assert_eq!(owners, [(65534, 4322, 0o755); 2]);
        }
        let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
        if let Some(owners) = copied_by(&user, option) {
            assert_eq!(owners, [(65534, 65534, 0o755); 2]);
        }
    }
}

#[test]
fn an_owner_that_a_container_does_not_know_is_left_out() {
    // Its root is root outside; it knows nobody else.
    for option in ["-p", "-a"] {
        if let Some(owners) = copied_by(&["unshare", "-Ur"], option) {
            assert_eq!(owners, [(0, 0, 0o755); 2]);
        }
    }
}
