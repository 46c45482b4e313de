//! `towline cp` that is killed or interrupted, or resumes what an earlier copy left.
#![allow(clippy::unwrap_used)]

mod support;

use rustix::fs::XattrFlags;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Running, TOWLINE, World, bad, good, have, names, noise, run, set_mode, wait_until};

#[test]
fn a_killed_copy_leaves_no_half_file_and_goes_on() {
    let world = World::new();
    let source = world.local("source");
    let data = noise(200 << 20, 3);
    fs::write(&source, &data).unwrap();
    let (target, served) = (world.url("dir/target"), world.local("served"));
    let part = served.join(".target.towline-part");
    let mut copy = Command::new(TOWLINE).arg("cp").arg(&source).arg(&target).spawn().unwrap();
    let started = Instant::now();
    while fs::metadata(&part).map_or(0, |m| m.len()) < 90 << 20
        && copy.try_wait().unwrap().is_none()
    {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing is copied");
        std::thread::sleep(Duration::from_millis(1));
    }
    copy.kill().unwrap();
    let ended = copy.wait().unwrap();
    if !ended.success() {
        assert_eq!(names(&served), [".target.towline-part"], "no file, only its part");
        let inode = fs::metadata(&part).unwrap().ino();
        let mut value = [0; 100];
        let noted = rustix::fs::lgetxattr(&part, "user.towline.part", &mut value).is_ok();
        good(&["cp", "--resume", source.to_str().unwrap(), &target]);
        let same = fs::metadata(served.join("target")).unwrap().ino() == inode;
        assert_eq!(same, noted, "the part is continued if it says what it is");
    }
    assert_eq!(names(&served), ["target"]);
    assert!(fs::read(served.join("target")).unwrap() == data, "contents differ");
    let left = rustix::fs::lgetxattr(served.join("target"), "user.towline.part", &mut [0; 100]);
    assert!(left.is_err(), "the note is gone");
}

/// Small files are finished; the part of a large one is reported.
#[test]
fn an_interrupted_copy_says_what_it_leaves() {
    use rustix::process::{Pid, Signal, kill_process};
    use std::os::unix::process::ExitStatusExt;
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served/target"));
    fs::create_dir(&source).unwrap();
    let data = noise(1 << 20, 3).repeat(150);
    fs::write(source.join("large"), &data).unwrap();
    for number in 0..500 {
        fs::write(source.join(format!("small{number}")), &data[..20_000 + number]).unwrap();
    }
    let process = |number: u32| Pid::from_raw(number as i32).unwrap();
    let server = process(world.server_id());
    let part = served.join(".large.towline-part");
    let (tree, target) = (source.to_str().unwrap(), world.url("dir/target"));
    // Sends these signals one by one to a copy in progress. Returns its complaint.
    let interrupted = |signals: &[Signal], server_answers: bool| {
        let mut copy = Command::new(TOWLINE);
        copy.args(["cp", "-r", "--resume", &format!("{tree}/."), &target]).stderr(Stdio::piped());
        let mut copy = copy.spawn().unwrap();
        wait_until("some of it is copied", || {
            assert!(copy.try_wait().unwrap().is_none(), "faster than the test");
            fs::metadata(&part).map_or(0, |m| m.len()) > 10 << 20
        });
        kill_process(server, Signal::STOP).unwrap();
        for signal in signals {
            kill_process(process(copy.id()), *signal).unwrap();
            std::thread::sleep(Duration::from_millis(500));
        }
        if server_answers {
            kill_process(server, Signal::CONT).unwrap();
        }
        let output = copy.wait_with_output().unwrap();
        kill_process(server, Signal::CONT).unwrap();
        assert_eq!(output.status.signal(), signals.last().map(|signal| signal.as_raw()));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = interrupted(&[Signal::TERM], true);
    assert!(said.contains("towline: cp: interrupted\n"), "{said}");
    let left = names(&served).into_iter().filter(|name| name.starts_with('.'));
    let left: Vec<String> = left.collect();
    if said.contains("are kept in") {
        assert_eq!(left, [".large.towline-part"], "{said}");
    } else {
        assert!(said.contains("the incomplete copy was removed") && left.is_empty(), "{said}");
    }
    // With a server that does not answer.
    let _ = fs::remove_file(&part);
    let said = interrupted(&[Signal::INT, Signal::TERM], false);
    assert!(said.contains("stopped: partial copies may remain"), "{said}");
    good(&["cp", "-r", "--resume", &format!("{tree}/."), &target]);
    assert_eq!(names(&served), names(&source));
    assert!(fs::read(served.join("large")).unwrap() == data, "contents differ");
}

/// If a server received a request but did not answer, nobody knows whether it was carried out.
#[test]
fn files_that_are_there_stay_when_the_server_is_started_anew() {
    use rustix::process::{Pid, Signal, kill_process};
    let mut world = World::new();
    let (tree, served) = (world.local("tree"), world.local("served/tree"));
    for (directory, text) in [(&tree, "new"), (&served, "old")] {
        fs::create_dir(directory).unwrap();
        for number in 0..2000 {
            fs::write(directory.join(format!("{number}")), text).unwrap();
        }
    }
    let mut copy = Command::new(TOWLINE);
    copy.args(["cp", "-r", &format!("{}/.", tree.display()), &world.url("dir/tree")]);
    let mut copy = copy.stderr(Stdio::null()).spawn().unwrap();
    for round in 1..6 {
        let replaced = || {
            (0..2000).filter(|n| fs::read(served.join(format!("{n}"))).is_ok_and(|f| f == b"new"))
        };
        wait_until("some of it is copied", || {
            replaced().count() > 250 * round || copy.try_wait().unwrap().is_some()
        });
        assert!(copy.try_wait().unwrap().is_none(), "faster than the test");
        kill_process(Pid::from_raw(world.server_id() as i32).unwrap(), Signal::STOP).unwrap();
        // Requests are not answered from now on.
        std::thread::sleep(Duration::from_millis(100));
        world.restart();
    }
    copy.wait().unwrap();
    let missing = (0..2000).filter(|n| !served.join(format!("{n}")).exists()).count();
    assert_eq!(missing, 0, "files were removed");
}

/// In a directory without write permission, the next run has work to do, too.
#[test]
fn closed_directories_are_gone_on_with() {
    let world = World::new();
    let (tree, target) = (world.local("served/tree"), world.local("target"));
    fs::create_dir_all(tree.join("closed")).unwrap();
    let copy = || {
        // Root must need permission, too.
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-dac_override", TOWLINE]);
        if !rustix::process::geteuid().is_root() {
            command = Command::new(TOWLINE);
        }
        command.args(["cp", "-r", "--resume", &world.url("dir/tree/.")]).arg(&target);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::metadata(target.join("closed")).unwrap().mode() & 0o7777, 0o555);
    };
    for name in ["one", "two"] {
        set_mode(&tree.join("closed"), 0o755);
        fs::write(tree.join("closed").join(name), name).unwrap();
        set_mode(&tree.join("closed"), 0o555);
        copy();
        assert_eq!(fs::read(target.join("closed").join(name)).unwrap(), name.as_bytes());
    }
    for directory in [tree, target] {
        set_mode(&directory.join("closed"), 0o755);
    }
}

/// Each copy has its own parts of small files, which no other copy resumes.
#[test]
fn resume_removes_what_killed_copies_left() {
    let world = World::new();
    let (tree, served) = (world.local("tree"), world.local("served/tree"));
    for directory in [&tree, &served] {
        fs::create_dir(directory).unwrap();
        fs::write(directory.join(".kept.12345678a.towline-part"), b"of a file that is not copied")
            .unwrap();
    }
    fs::write(tree.join("file"), noise(100_000, 3)).unwrap();
    fs::write(tree.join(".file.000000000.towline-part"), b"somebody's file").unwrap();
    fs::write(served.join(".file.12345678a.towline-part"), b"half").unwrap();
    fs::write(served.join(".other.12345678a.towline-part"), b"of another copy").unwrap();
    good(&["cp", "-r", "--resume", &format!("{}/.", tree.display()), &world.url("dir/tree")]);
    let found = [
        ".file.000000000.towline-part",
        ".kept.12345678a.towline-part",
        ".other.12345678a.towline-part",
        "file",
    ];
    assert_eq!(names(&served), found);
}

/// Starts a server for the served directory on the socket `socket`, traced by strace with these arguments. `None` if
/// strace may not trace here.
fn traced_server(world: &World, socket: &Path, arguments: &[&str]) -> Option<Running> {
    let mut server = Command::new("strace");
    server.args(["-D", "-f", "-o", "/dev/null"]).args(arguments).args([TOWLINE, "serve", "--dir"]);
    server.arg(format!("e={}", world.local("served").display()));
    server.args(["--listen", &format!("unix://{}", socket.display())]).stderr(Stdio::null());
    let mut server = Running(server.spawn().unwrap());
    let mut ended = false;
    wait_until("the server listens", || {
        ended = server.0.try_wait().unwrap().is_some();
        ended || UnixStream::connect(socket).is_ok()
    });
    if ended {
        eprintln!("SKIPPED: strace may not trace here");
    }
    (!ended).then_some(server)
}

/// The request that creates a file has its data, too, but the server is killed before it writes that.
#[test]
fn a_killed_server_leaves_no_empty_file() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served"));
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "small").unwrap();
    let socket = world.local("killed");
    let arguments = ["-e", "trace=pwrite64", "-e", "inject=pwrite64:signal=SIGKILL"];
    let Some(mut server) = traced_server(&world, &socket, &arguments) else { return };
    let from = format!("{}/.", source.display());
    let url = format!("towline+unix:///e?socket={}", socket.display());
    let copy = Command::new(TOWLINE).args(["cp", "-r", &from, &url]).spawn().unwrap();
    let copy = Running(copy);
    wait_until("the server is killed", || server.0.try_wait().unwrap().is_some());
    drop(copy);
    let left = names(&served);
    assert!(left.len() == 1 && left[0].starts_with(".file."), "{left:?}");
    good(&["cp", "-r", "--resume", &from, &world.url("dir")]);
    assert_eq!(names(&served), ["file"]);
}

/// A part that cannot get its name, because there is a file, costs more than a look.
#[test]
fn where_files_are_replaced_few_parts_are_made_in_vain() {
    const FILES: usize = 20;
    if !have("strace") {
        return;
    }
    let world = World::new();
    let (source, trace) = (world.local("source"), world.local("trace"));
    for directory in [&source, &world.local("served")] {
        fs::create_dir_all(directory).unwrap();
        for number in 0..FILES {
            fs::write(directory.join(number.to_string()), directory.to_str().unwrap()).unwrap();
        }
    }
    let socket = world.local("traced");
    let arguments = ["-o", trace.to_str().unwrap(), "-e", "trace=renameat2"];
    let Some(server) = traced_server(&world, &socket, &arguments) else { return };
    let url = format!("towline+unix:///e?socket={}", socket.display());
    good(&["cp", "-rj1", &format!("{}/.", source.display()), &url]);
    drop(server);
    let calls = fs::read_to_string(&trace).unwrap();
    assert_eq!(calls.matches("EEXIST").count(), 1, "{calls}");
    for number in 0..FILES {
        let copied = fs::read_to_string(world.local("served").join(number.to_string())).unwrap();
        assert_eq!(copied, source.to_str().unwrap());
    }
}

#[test]
fn parts_of_another_version_are_not_continued() {
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served"));
    fs::write(&source, noise(5 << 20, 3)).unwrap();
    let part = served.join(".target.towline-part");
    fs::write(&part, b"something else").unwrap();
    let stamp = format!("{} 0.0 14", 5 << 20);
    let _ =
        rustix::fs::lsetxattr(&part, "user.towline.part", stamp.as_bytes(), XattrFlags::empty());
    good(&["cp", "--resume", source.to_str().unwrap(), &world.url("dir/target")]);
    assert!(fs::read(served.join("target")).unwrap() == fs::read(&source).unwrap());
    assert_eq!(names(&served), ["target"]);
}

/// Makes a part that says that it is complete so far. Returns false where files have no extended attributes.
fn make_part(part: &Path, source: &Path, start: &[u8]) -> bool {
    fs::write(part, start).unwrap();
    let status = fs::metadata(source).unwrap();
    let (size, done) = (status.len(), start.len());
    let stamp = format!("{size} {}.{:09} {done}", status.mtime(), status.mtime_nsec());
    let (name, flags) = ("user.towline.part", XattrFlags::empty());
    let noted = rustix::fs::lsetxattr(part, name, stamp.as_bytes(), flags).is_ok();
    if !noted {
        eprintln!("SKIPPED: no extended attributes here, so nothing is continued");
    }
    noted
}

#[test]
fn parts_of_this_version_are_continued() {
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served"));
    let mut data = noise(5 << 20, 3);
    fs::write(&source, &data).unwrap();
    let part = served.join(".target.towline-part");
    // Bytes that were copied before are not checked again.
    data[..3 << 20].fill(7);
    if !make_part(&part, &source, &data[..3 << 20]) {
        return;
    }
    let inode = fs::metadata(&part).unwrap().ino();
    let target = world.url("dir/target");
    let copy = run(&["cp", "--resume", "--progress", source.to_str().unwrap(), &target]);
    let told = String::from_utf8(copy.stderr).unwrap();
    assert!(told.starts_with("1 files, 2.0M bytes in "), "{told}");
    assert!(told.ends_with(", 3.0M were there already\n"), "{told}");
    assert!(fs::read(served.join("target")).unwrap() == data);
    assert_eq!(fs::metadata(served.join("target")).unwrap().ino(), inode);
}

#[test]
fn verify_finds_what_an_earlier_copy_got_wrong() {
    let world = World::new();
    let (near, far) = (world.local("near"), world.local("served"));
    let data = noise(5 << 20, 3);
    fs::create_dir(&near).unwrap();
    for directory in [&near, &far] {
        fs::write(directory.join("source"), &data).unwrap();
    }
    let mut start = data[..3 << 20].to_vec();
    start[2_000_000] ^= 1;
    let [here, there] = ["source", "target"].map(|name| near.join(name).display().to_string());
    let urls = [world.url("dir/source"), world.url("dir/target")];
    for (source, target, from, to) in [
        (&here, &urls[1], &near, &far),
        (&urls[0], &there, &far, &near),
        (&urls[0], &urls[1], &far, &far),
    ] {
        if !make_part(&to.join(".target.towline-part"), &from.join("source"), &start) {
            return;
        }
        let complaint = bad(1, &["cp", "--resume", "--verify", source, target]);
        let told =
            format!("{target}: differs from the source at byte 2000000 after the copy; removed");
        assert!(complaint.contains(&told), "{complaint}");
        assert_eq!(names(to), ["source"], "{target}");
    }
}

/// The server is told that it has written the file, and has not.
#[test]
fn verify_finds_a_small_file_that_was_not_written() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    let (source, socket) = (world.local("source"), world.local("traced"));
    fs::write(&source, "small").unwrap();
    let arguments = ["-e", "trace=pwrite64", "-e", "inject=pwrite64:retval=5"];
    let Some(_server) = traced_server(&world, &socket, &arguments) else { return };
    let url = format!("towline+unix:///e/target?socket={}", socket.display());
    let complaint = bad(1, &["cp", "--verify", source.to_str().unwrap(), &url]);
    assert!(complaint.contains(": differs from the source after the copy; removed"), "{complaint}");
    assert_eq!(names(&world.local("served")), [""; 0]);
}

/// Somebody may have put it there to read the data.
#[test]
fn parts_of_other_users_are_not_continued() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can give a part away");
    }
    let world = World::new();
    let (source, served) = (world.local("served/source"), world.local("served"));
    let data = noise(5 << 20, 3);
    fs::write(&source, &data).unwrap();
    let places =
        [(&source, world.url("dir/target"), served), (&source, String::new(), world.local("here"))];
    for (from, url, directory) in places {
        fs::create_dir_all(&directory).unwrap();
        let part = directory.join(".target.towline-part");
        if !make_part(&part, from, &data[..1 << 20]) {
            return;
        }
        chown(&part, Some(54321), None).unwrap();
        let theirs = fs::File::open(&part).unwrap();
        let here = directory.join("target");
        match url.is_empty() {
            true => good(&["cp", "--resume", &world.url("dir/source"), here.to_str().unwrap()]),
            false => good(&["cp", "--resume", from.to_str().unwrap(), &url]),
        };
        assert!(fs::read(&here).unwrap() == data);
        assert_eq!(theirs.metadata().unwrap().len(), 1 << 20, "nothing was written to it");
        assert_eq!(fs::metadata(&here).unwrap().uid(), 0);
    }
}

#[test]
fn what_cannot_be_removed_is_not_in_the_way_of_a_part() {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !have("setpriv") {
        return;
    }
    let world = World::new();
    fs::write(world.local("served/source"), noise(2 << 20, 3)).unwrap();
    let sticky = world.local("sticky");
    fs::create_dir(&sticky).unwrap();
    set_mode(&sticky, 0o1777);
    fs::create_dir(sticky.join(".one.towline-part")).unwrap();
    fs::write(sticky.join(".two.towline-part"), "of another user").unwrap();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    for name in ["one", "two"] {
        let mut copy = Command::new(if is_root { "setpriv" } else { "env" });
        copy.args(if is_root { &user[..] } else { &[] }).args([TOWLINE, "cp", "--resume"]);
        copy.arg(world.url("dir/source")).arg(sticky.join(name));
        let output = copy.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(sticky.join(".one.towline-part").exists());
    let other = sticky.join(".two.towline-part");
    assert_eq!(other.exists(), is_root, "our own can be removed");
    assert!(names(&sticky).contains(&"two".to_owned()));
}

/// What is there of it could not be continued.
#[test]
fn the_part_of_a_source_that_became_shorter_is_removed() {
    use rustix::process::{Pid, Signal, kill_process};
    let world = World::new();
    let (source, served) = (world.local("source"), world.local("served"));
    fs::write(&source, noise(1 << 20, 3).repeat(150)).unwrap();
    let server = Pid::from_raw(world.server_id() as i32).unwrap();
    let part = served.join(".target.towline-part");
    let mut copy = Command::new(TOWLINE);
    copy.arg("cp").arg(&source).arg(world.url("dir/target")).stderr(Stdio::piped());
    let mut copy = copy.spawn().unwrap();
    wait_until("some of it is copied", || {
        assert!(copy.try_wait().unwrap().is_none(), "faster than the test");
        fs::metadata(&part).map_or(0, |m| m.len()) > 10 << 20
    });
    kill_process(server, Signal::STOP).unwrap();
    fs::File::options().write(true).open(&source).unwrap().set_len(1 << 20).unwrap();
    kill_process(server, Signal::CONT).unwrap();
    let output = copy.wait_with_output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(complaint.contains("the source became shorter"), "{complaint}");
    assert!(complaint.ends_with("; the incomplete copy was removed\n"), "{complaint}");
    assert_eq!(names(&served), [""; 0]);
}

/// The kernel reports only once that it could not write something: that a second attempt succeeds says nothing.
#[test]
fn what_could_not_be_made_durable_is_not_gone_on_with() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    fs::write(world.local("served/source"), noise(1 << 20, 3).repeat(96)).unwrap();
    let socket = world.local("slow");
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--dir", &format!("e={}:bandwidth=12M", world.local("served").display())])
        .args(["--listen", &format!("unix://{}", socket.display())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server listens", || UnixStream::connect(&socket).is_ok());
    // On one thread, since strace counts the calls of each for itself.
    let copied = Command::new("strace")
        .args(["-f", "-o", "/dev/null", "-e", "trace=clone,clone3,fdatasync"])
        .args(["-e", "inject=clone,clone3:error=EAGAIN"])
        .args(["-e", "inject=fdatasync:error=EIO:when=1", TOWLINE, "cp"])
        .arg(format!("towline+unix:///e/source?socket={}", socket.display()))
        .arg(world.local("target"))
        .output()
        .unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    if copied.status.success() {
        return eprintln!("SKIPPED: strace may not trace here");
    }
    let said = String::from_utf8_lossy(&copied.stderr);
    assert!(said.contains("input/output error; the incomplete copy was removed"), "{said}");
    assert!(!world.local(".target.towline-part").exists());
}

/// Another copy may replace the part when it is complete and about to get its name.
#[test]
fn the_part_of_another_copy_does_not_get_the_name_of_the_file() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    fs::write(world.local("served/source"), noise(2 << 20, 3)).unwrap();
    let (target, trace) = (world.local("target"), world.local("trace"));
    let part = world.local(".target.towline-part");
    let mut copy = Command::new("strace")
        .args(["-f", "-e", "trace=renameat,renameat2", "-o"])
        .args([trace.as_os_str(), "-e".as_ref()])
        .args(["inject=renameat,renameat2:delay_enter=2000000:when=1", TOWLINE, "cp"])
        .arg(world.url("dir/source"))
        .arg(&target)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ended = false;
    wait_until("the part is renamed", || {
        ended = copy.try_wait().unwrap().is_some();
        ended || fs::read_to_string(&trace).is_ok_and(|trace| trace.contains("renameat"))
    });
    if ended {
        return eprintln!("SKIPPED: strace may not trace here");
    }
    fs::remove_file(&part).unwrap();
    fs::write(&part, "incomplete").unwrap();
    let output = copy.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("another copy of this file started meanwhile"), "{said}");
    assert!(!target.exists());
    assert_eq!(fs::read_to_string(&part).unwrap(), "incomplete", "the other copy goes on with it");
}

/// Both have written to one part, and the slower one did so after the other one had set the times.
#[test]
fn the_slower_of_two_copies_does_not_change_the_time() {
    if !have("strace") {
        return;
    }
    let world = World::new();
    let (source, target) = (world.local("served/source"), world.local("target"));
    let data = noise(5 << 20, 3);
    fs::write(&source, &data).unwrap();
    let part = world.local(".target.towline-part");
    if !make_part(&part, &source, &data[..1 << 20]) {
        return;
    }
    let (url, trace) = (world.url("dir/source"), world.local("trace"));
    let mut slower = Command::new("strace")
        .args(["-f", "-e", "trace=pwrite64", "-o"])
        .args([trace.as_os_str(), "-e".as_ref()])
        .args(["inject=pwrite64:delay_enter=3000000", TOWLINE, "cp", "--resume", &url])
        .arg(&target)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ended = false;
    wait_until("it is about to write", || {
        ended = slower.try_wait().unwrap().is_some();
        ended || fs::read_to_string(&trace).is_ok_and(|trace| trace.contains("pwrite64"))
    });
    if ended {
        return eprintln!("SKIPPED: strace may not trace here");
    }
    good(&["cp", "--resume", &url, target.to_str().unwrap()]);
    let output = slower.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [from, to] = [&source, &target].map(|file| fs::metadata(file).unwrap());
    let time = |file: &fs::Metadata| (file.mtime(), file.mtime_nsec());
    assert_eq!(time(&to), time(&from));
    assert!(fs::read(&target).unwrap() == data);
}
