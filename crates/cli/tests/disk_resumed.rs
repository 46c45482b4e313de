//! `towline disk copy --resume` after source or target were changed between interrupted runs.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{Running, TOWLINE, have, wait_until};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 48 * MIB;

/// A file without zero bytes, served as the disk `slow`, and a place for copies of it.
struct Place {
    directory: TempDir,
    _server: Running,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("source"), vec![1; SIZE as usize]).unwrap();
        let disk = format!("slow={}:bandwidth=12M", path("source").display());
        let listen = format!("unix://{}", path("socket").display());
        let mut command = Command::new(TOWLINE);
        command.args(["serve", "--disk", &disk, "--listen", &listen]).stderr(Stdio::null());
        let server = Running(command.spawn().unwrap());
        wait_until("the server listens", || UnixStream::connect(path("socket")).is_ok());
        Self { directory, _server: server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn copy(&self, resume: bool) -> Command {
        let mut command = Command::new(TOWLINE);
        self.arguments(&mut command, resume);
        command
    }

    fn arguments(&self, command: &mut Command, resume: bool) {
        let slow = format!("towline+unix:///slow?socket={}", self.path("socket").display());
        command.args(["disk", "copy", "--json", "--quiet"]).args(resume.then_some("--resume"));
        command.arg(slow).arg(self.path("target")).env("XDG_STATE_HOME", self.path("state"));
    }

    /// Lets a copy run until a condition holds, and kills it.
    fn killed(&self, mut command: Command, what: &str, mut is_so: impl FnMut() -> bool) {
        let mut copy = Running(command.stdout(Stdio::null()).spawn().unwrap());
        wait_until(what, || is_so() || copy.0.try_wait().unwrap().is_some());
        assert!(copy.0.try_wait().unwrap().is_none(), "it was too fast to be killed");
    }

    /// Returns the lines of the journal: first the one that identifies the copy, then one for each piece.
    fn noted(&self) -> Vec<Value> {
        let journals = fs::read_dir(self.path("state/towline/copies")).into_iter().flatten();
        let text: String =
            journals.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
        text.lines().map_while(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Resumes the copy to its end, after which target and source must be the same.
    fn finished(&self) -> Value {
        let done = self.copy(true).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let same = fs::read(self.path("source")).unwrap() == fs::read(self.path("target")).unwrap();
        assert!(same, "the copy differs from its source");
        serde_json::from_slice(&done.stdout).unwrap()
    }
}

fn fill(file: &Path, offset: u64, byte: u8) {
    let file = File::options().write(true).open(file).unwrap();
    file.write_all_at(&vec![byte; MIB as usize], offset).unwrap();
}

fn holds(file: &Path, offset: u64, byte: u8) -> bool {
    let mut found = [0];
    File::open(file).unwrap().read_exact_at(&mut found, offset + MIB / 2).unwrap();
    found == [byte]
}

/// An interrupted run copied an intermediate state of the source, and ended before it recorded that.
#[test]
fn a_source_that_is_what_it_was_again() {
    let place = Place::new();
    let (source, target) = (place.path("source"), place.path("target"));
    place.killed(place.copy(false), "something is noted", || place.noted().len() > 4);
    let noted = place.noted();
    // A different copy thread overwrites each of these, and none has recorded its piece when the copy is
    // killed.
    let pieces: Vec<_> =
        noted[1..4].iter().map(|piece| piece["offset"].as_u64().unwrap()).collect();
    let bytes = [0, 2, 3];
    for (offset, byte) in pieces.iter().zip(bytes) {
        fill(&source, *offset, byte);
    }
    place.killed(place.copy(true), "the target holds what changed", || {
        pieces.iter().zip(bytes).all(|(offset, byte)| holds(&target, *offset, byte))
    });
    for offset in &pieces {
        fill(&source, *offset, 1);
    }
    let done = place.finished();
    assert!(done["from_earlier"].as_u64().unwrap() >= MIB, "{done}");
}

#[test]
fn what_was_there_is_told_apart_from_what_was_copied() {
    let place = Place::new();
    place.killed(place.copy(false), "something is noted", || place.noted().len() > 12);
    let mut copy = Command::new(TOWLINE);
    let slow = format!("towline+unix:///slow?socket={}", place.path("socket").display());
    copy.args(["disk", "copy", "--json", "--progress", "--resume"]).arg(slow);
    copy.arg(place.path("target")).env("XDG_STATE_HOME", place.path("state"));
    let done = copy.output().unwrap();
    let told = String::from_utf8(done.stderr).unwrap();
    let counts: Value = serde_json::from_slice(&done.stdout).unwrap();
    let already = counts["from_earlier"].as_u64().unwrap() / MIB;
    let copied = SIZE / MIB - already;
    let summary = told.lines().last().unwrap();
    assert!(already >= 10 && summary.starts_with(&format!("{copied}M bytes in ")), "{told}");
    assert!(summary.ends_with(&format!(", {already}M were there already")), "{told}");
}

/// A hole is not read, since the extents report it.
#[test]
fn a_hole_that_is_filled_again() {
    let place = Place::new();
    let (source, target) = (place.path("source"), place.path("target"));
    place.killed(place.copy(false), "something is noted", || place.noted().len() > 4);
    let offset = place.noted()[1]["offset"].as_u64().unwrap();
    let file = File::options().write(true).open(&source).unwrap();
    let how = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, how, offset, MIB).unwrap();
    place.killed(place.copy(true), "the target has the hole", || holds(&target, offset, 0));
    fill(&source, offset, 1);
    place.finished();
}

/// A new copy is killed after it has overwritten what an earlier one noted.
#[test]
fn a_target_that_was_overwritten() {
    let place = Place::new();
    let (source, target) = (place.path("source"), place.path("target"));
    place.killed(place.copy(false), "something is noted", || place.noted().len() > 4);
    let offset = place.noted()[1]["offset"].as_u64().unwrap();
    fill(&source, offset, 2);
    place.killed(place.copy(false), "the target holds what changed", || holds(&target, offset, 2));
    fill(&source, offset, 1);
    assert!(fs::metadata(&target).unwrap().len() > SIZE, "it looks like a whole copy");
    place.finished();
}

/// The server of the target is away for a while.
#[test]
fn a_target_that_cannot_be_reached_costs_no_progress() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("source"), vec![1; SIZE as usize]).unwrap();
    File::create(path("target")).unwrap().set_len(SIZE).unwrap();
    let disk = format!("slow={}:bandwidth=12M", path("target").display());
    let listen = format!("unix://{}", path("socket").display());
    let serve = || {
        let _ = fs::remove_file(path("socket"));
        let mut command = Command::new(TOWLINE);
        command.args(["serve", "--disk", &disk, "--listen", &listen]).stderr(Stdio::null());
        let server = Running(command.spawn().unwrap());
        wait_until("the server listens", || UnixStream::connect(path("socket")).is_ok());
        server
    };
    let copy = |resume: bool| {
        let mut command = Command::new(TOWLINE);
        command.args(["disk", "copy", "--json", "--quiet"]).args(resume.then_some("--resume"));
        command.arg(path("source"));
        command.arg(format!("towline+unix:///slow?socket={}", path("socket").display()));
        command.env("XDG_STATE_HOME", path("state"));
        command
    };
    let noted = || {
        let journals = fs::read_dir(path("state/towline/copies")).into_iter().flatten();
        let text = |file: std::io::Result<fs::DirEntry>| fs::read_to_string(file.unwrap().path());
        journals.map(|file| text(file).unwrap().lines().count()).sum::<usize>()
    };
    let server = serve();
    let first = Running(copy(false).stdout(Stdio::null()).spawn().unwrap());
    wait_until("something is noted", || noted() > 4);
    drop(first);
    let before = noted();
    drop(server);
    for resume in [true, false] {
        let failed = copy(resume).output().unwrap();
        assert!(!failed.status.success(), "nobody serves the target");
        assert_eq!(noted(), before, "what was noted stays");
    }
    let _server = serve();
    let done = copy(true).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let done: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(done["from_earlier"].as_u64().unwrap() >= MIB, "{done}");
    assert!(fs::read(path("source")).unwrap() == fs::read(path("target")).unwrap());
}

/// Another copy writes to the target in between, through a server that does not say which disk it is.
#[test]
fn a_target_that_was_overwritten_under_another_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let named = |scheme: &str, disk: &str, socket: &str| {
        format!("{scheme}+unix:///{disk}?socket={}", path(socket).display())
    };
    for (name, byte) in [("source", 1), ("other", 2)] {
        fs::write(path(name), vec![byte; SIZE as usize]).unwrap();
    }
    File::create(path("target")).unwrap().set_len(SIZE).unwrap();
    let mut command = Command::new(TOWLINE);
    command.arg("serve").stderr(Stdio::null());
    for disk in ["slow={}:bandwidth=12M", "fast={}"] {
        command.args(["--disk", &disk.replace("{}", path("target").to_str().unwrap())]);
    }
    command.args(["--listen", &format!("unix://{}", path("socket").display())]);
    command.args(["--nbd", &format!("unix://{}", path("nbd").display())]);
    let _server = Running(command.spawn().unwrap());
    for socket in ["socket", "nbd"] {
        wait_until("the server listens", || UnixStream::connect(path(socket)).is_ok());
    }
    let copy = |arguments: &[&str], from: &str, to: &str| {
        let mut command = Command::new(TOWLINE);
        command.args(["disk", "copy", "--json", "--quiet"]).args(arguments).arg(path(from));
        command.arg(to).env("XDG_STATE_HOME", path("state")).stdout(Stdio::piped());
        command
    };
    let slow = named("towline", "slow", "socket");
    let noted = || {
        let journals = fs::read_dir(path("state/towline/copies")).into_iter().flatten();
        let text = |file: std::io::Result<fs::DirEntry>| fs::read_to_string(file.unwrap().path());
        journals.map(|file| text(file).unwrap().lines().count()).sum::<usize>()
    };
    for overwritten in [named("nbd", "fast", "nbd"), named("towline", "fast", "socket")] {
        let first = Running(copy(&[], "source", &slow).spawn().unwrap());
        wait_until("something is noted", || noted() > 4);
        drop(first);
        assert!(copy(&[], "other", &overwritten).status().unwrap().success(), "{overwritten}");
        let done = copy(&["--resume"], "source", &slow).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let done: Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!(done["from_earlier"], 0, "{overwritten}: {done}");
        let same = fs::read(path("source")).unwrap() == fs::read(path("target")).unwrap();
        assert!(same, "{overwritten}: the copy differs from its source");
    }
}

/// The kernel reports only once that it could not write something.
#[test]
fn what_a_failed_flush_may_have_lost_is_not_noted() {
    if !have("strace") {
        return;
    }
    let place = Place::new();
    let mut command = Command::new("strace");
    let inject = "inject=fdatasync:error=EIO:when=1";
    command.args(["-f", "-o", "/dev/null", "-e", "trace=fdatasync", "-e", inject, TOWLINE]);
    place.arguments(&mut command, false);
    // strace counts the calls of each thread for itself.
    command.arg("--jobs=1");
    let ended = command.stdout(Stdio::null()).output().unwrap();
    if ended.status.success() {
        return eprintln!("SKIPPED: strace may not trace here");
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("flushing: "), "{said}");
    let noted = place.noted();
    assert!(noted.len() == 1, "{noted:?}");
    place.finished();
}
