//! Copies of disks that are killed, lose their server or their target, or run out of space, and go on.

use crate::support::{Running, wait_until};
use crate::{MIB, Place, allocated, same};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

#[test]
fn a_copy_that_was_killed_goes_on() {
    let place = Place::new();
    let size = 48 * MIB;
    let served = place.full("served", size);
    let _server = place.serve(&[format!("slow={served}:bandwidth=12M"), format!("img={served}")]);
    let target = place.path("target");
    let from = place.nbd("slow");
    let start = || {
        let command = place.command(&["copy", &from, &target]).spawn().unwrap();
        let mut child = Running(command);
        wait_until("something is noted", || {
            place.noted() > 4 || child.0.try_wait().unwrap().is_some()
        });
        assert!(child.0.try_wait().unwrap().is_none(), "it was too fast to be killed");
        child
    };
    let running = start();
    let busy = place.disk(&["copy", &from, &target]).unwrap_err();
    assert!(busy.contains("another copy between"), "{busy}");
    // A copy of another disk to this target is refused, too, and takes away nothing that this one needs.
    let another = place.full("another", MIB);
    let busy = place.disk(&["copy", &another, &target]).unwrap_err();
    assert!(busy.contains("copied to, as a disk"), "{busy}");
    drop(running);
    // Not even its length is that of a whole copy.
    assert!(std::fs::metadata(&target).unwrap().len() > size);
    // A copied piece changes unnoticed. NBD cannot report that, but the checksums reveal it.
    let mut journals = std::fs::read_dir(place.path("state/towline/copies")).unwrap();
    let journal = std::fs::read_to_string(journals.next().unwrap().unwrap().path()).unwrap();
    let piece: Value = serde_json::from_str(journal.lines().nth(1).unwrap()).unwrap();
    let changed = File::options().write(true).open(&served).unwrap();
    changed.write_all_at(b"changed", piece["offset"].as_u64().unwrap() + 5000).unwrap();
    let done = place.copy(&["--resume", "--verify", &from, &target]);
    let earlier = done["from_earlier"].as_u64().unwrap();
    assert!((MIB..size).contains(&earlier), "{done}");
    assert_eq!(done["copied_again"], MIB, "{done}");
    assert!(same(&served, &target));
    assert_eq!(place.noted(), 0);
    // There is nothing to resume after another disk was copied to the same target.
    drop(start());
    let other = place.path("other");
    std::fs::write(&other, vec![7; size as usize]).unwrap();
    place.copy(&[&other, &target]);
    let done = place.copy(&["--resume", &from, &target]);
    assert_eq!(done["from_earlier"], 0, "{done}");
    assert!(same(&served, &target));
}

#[test]
fn a_copy_that_a_signal_ends_says_what_it_leaves() {
    use rustix::process::{Pid, Signal, kill_process};
    let place = Place::new();
    let served = place.full("served", 48 * MIB);
    let _server = place.serve(&[format!("slow={served}:bandwidth=12M")]);
    for (target, advice) in [(place.path("target"), true), ("-".to_owned(), false)] {
        let mut command = place.command(&["copy", "--progress", &place.nbd("slow"), &target]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = Running(command.spawn().unwrap());
        let mut said = child.0.stderr.take().unwrap();
        // The first line of the progress.
        said.read_exact(&mut [0]).unwrap();
        kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
        let mut complaint = String::new();
        said.read_to_string(&mut complaint).unwrap();
        let status = child.0.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGINT), "{complaint}");
        let told = format!("towline: disk: {target}: interrupted; the copy is not complete");
        assert!(complaint.contains(&told), "{complaint}");
        assert_eq!(complaint.contains("repeat with --resume to continue"), advice, "{complaint}");
    }
}

#[test]
fn a_local_source_that_changed_is_copied_anew() {
    let place = Place::new();
    let source = place.full("source", 32 * MIB);
    File::create(place.path("served")).unwrap().set_len(32 * MIB).unwrap();
    let slow = format!("slow={}:bandwidth=8M", place.path("served"));
    let _server = place.serve(&[slow]);
    let to = place.nbd("slow");
    for changes in [false, true] {
        let mut child = Running(place.command(&["copy", &source, &to]).spawn().unwrap());
        wait_until("something is noted", || {
            place.noted() > 4 || child.0.try_wait().unwrap().is_some()
        });
        assert!(child.0.try_wait().unwrap().is_none(), "it was too fast to be killed");
        drop(child);
        if changes {
            File::options().append(true).open(&source).unwrap().set_len(31 * MIB).unwrap();
        }
        let again = place.command(&["copy", "--resume", "--json", &source, &to]).output().unwrap();
        let said = String::from_utf8_lossy(&again.stderr);
        assert!(again.status.success(), "{said}");
        assert_eq!(said.contains("the source has changed since"), changes, "{said}");
        let done: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!(done["from_earlier"] == 0, changes, "{done}");
        let (there, here) = (std::fs::read(place.path("served")), std::fs::read(&source).unwrap());
        assert!(there.unwrap()[..here.len()] == here);
    }
}

#[test]
fn a_server_that_is_killed_in_the_middle_of_a_copy() {
    let place = Place::new();
    let size = 64 * MIB;
    let source = place.full("source", size);
    let served = place.path("served");
    File::create(&served).unwrap().set_len(size).unwrap();
    let disks = [format!("img={served}")];
    let server = place.serve(&disks);
    let img = place.url("img");
    // To the server: half of the data has arrived when the server goes.
    let mut child = Running(
        place.command(&["copy", "--verify", "-", &img]).stdin(Stdio::piped()).spawn().unwrap(),
    );
    let mut input = child.0.stdin.take().unwrap();
    let bytes = std::fs::read(&source).unwrap();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    input.write_all(first).unwrap();
    wait_until("half of it arrived", || allocated(&served) >= size / 4);
    drop(server);
    let server = place.serve(&disks);
    input.write_all(second).unwrap();
    drop(input);
    assert!(child.0.wait().unwrap().success());
    assert!(same(&source, &served));
    // From the server, over both protocols: the server is killed when some of the data has been read.
    let mut server = Some(server);
    for from in [img, place.nbd("img")] {
        let mut child =
            Running(place.command(&["copy", &from, "-"]).stdout(Stdio::piped()).spawn().unwrap());
        let mut output = child.0.stdout.take().unwrap();
        let mut back = vec![0; 1 << 20];
        output.read_exact(&mut back).unwrap();
        drop(server.take());
        server = Some(place.serve(&disks));
        output.read_to_end(&mut back).unwrap();
        assert!(child.0.wait().unwrap().success());
        assert!(back == bytes, "other bytes from {from}");
    }
    // A reader that stops reading is not an error.
    let mut command = place.command(&["copy", &place.url("img"), "-"]);
    let mut child = Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    child.0.stdout.take().unwrap().read_exact(&mut [0; 10]).unwrap();
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((child.0.wait().unwrap().code(), &*said), (Some(141), ""), "as of SIGPIPE");
    // An NBD server that comes back may have lost what it was given, so the copy fails.
    let mut child = Running(
        place
            .command(&["copy", "-", &place.nbd("img")])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut input = child.0.stdin.take().unwrap();
    input.write_all(first).unwrap();
    drop(server.take());
    let _server = place.serve(&disks);
    let _ = input.write_all(second);
    drop(input);
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!child.0.wait().unwrap().success(), "{said}");
    for part in ["img?socket", "ing at ", "lost the connection to the server of the target"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

fn mount(options: &str, at: &str) -> bool {
    let done = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none", at]).output();
    done.is_ok_and(|done| done.status.success())
}

#[test]
fn a_copy_needs_no_space_for_its_progress() {
    let place = Place::new();
    let state = place.path("state");
    std::fs::create_dir_all(&state).unwrap();
    if !mount("size=4k", &state) {
        eprintln!(
            "SKIPPED: a_copy_needs_no_space_for_its_progress: cannot mount a tmpfs (needs root)"
        );
        return;
    }
    std::fs::write(format!("{state}/filler"), vec![1; 4096]).unwrap();
    let (source, target) = (place.full("source", 4 * MIB), place.path("target"));
    let done = place.disk(&["copy", &source, &target]);
    assert!(Command::new("umount").arg(&state).status().unwrap().success());
    done.unwrap();
    assert!(same(&source, &target));
}

/// Its server comes back with another file of the same name, or with a stripe of another chunk.
#[test]
fn a_target_that_is_replaced_in_the_middle_of_a_copy() {
    let place = Place::new();
    let size = 48 * MIB;
    let source = place.full("source", size);
    let [one, other, img] = ["one", "other", "img"].map(|name| place.path(name));
    let stripe = |chunk: &str| format!("slow=stripe:{chunk}:{one},{other}");
    let file = || format!("slow={img}");
    let slow = place.url("slow");
    let empty = |path: &str, size| {
        let _ = std::fs::remove_file(path);
        File::create(path).unwrap().set_len(size).unwrap();
    };
    for (before, after) in [(file(), file()), (stripe("64K"), stripe("128K"))] {
        for member in [&one, &other] {
            empty(member, size / 2);
        }
        empty(&img, size);
        let server = place.serve(&[format!("{before}:bandwidth=12M")]);
        let mut command = place.command(&["copy", &source, &slow]);
        let mut child = Running(command.stderr(Stdio::piped()).spawn().unwrap());
        wait_until("something is noted", || {
            place.noted() > 4 || child.0.try_wait().unwrap().is_some()
        });
        drop(server);
        empty(&img, size);
        let _server = place.serve(&[after]);
        let mut said = String::new();
        child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!child.0.wait().unwrap().success(), "{before}");
        let done = place.copy(&["--resume", &source, &slow]);
        assert_eq!(done["from_earlier"], 0, "{before}: {done}");
        let back = place.path("back");
        place.copy(&[&slow, &back]);
        assert!(same(&source, &back), "{before}");
    }
}

#[test]
fn a_target_without_space() {
    let place = Place::new();
    let full = place.path("full");
    std::fs::create_dir(&full).unwrap();
    let mount = |options| mount(options, &full);
    if !mount("size=8m") {
        eprintln!("SKIPPED: a_target_without_space: cannot mount a tmpfs (needs root)");
        return;
    }
    let source = place.full("source", 16 * MIB);
    let target = format!("{full}/target");
    let failed = place.disk(&["copy", &source, &target]);
    let bigger = mount("remount,size=32m");
    let done = bigger.then(|| place.disk(&["copy", "--resume", "--json", &source, &target]));
    let whole = std::fs::read(&target);
    assert!(Command::new("umount").arg(&full).status().unwrap().success());
    let failed = failed.unwrap_err();
    assert!(failed.contains("no space left") && failed.contains("writing at"), "{failed}");
    assert!(failed.contains("--resume"), "{failed}");
    let done: Value = serde_json::from_str(&done.unwrap().unwrap()).unwrap();
    assert!(done["from_earlier"].as_u64().unwrap() >= MIB, "{done}");
    assert!(whole.unwrap() == std::fs::read(&source).unwrap());
}
