//! Copies that fail: told where and why, leaving no half file, while the others are copied.

use crate::LARGE;
use crate::support::{
    TOWLINE, World, bad, forbidding, good, have, names, noise, run, set_mode, text, wait_until,
};
use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

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
