//! The server is killed while programs use it. A new one takes over, and nothing is lost.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{TOWLINE, noise};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-restart-test";
/// How long anything may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const FILES: usize = 600;

/// A folder that is removed when dropped.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server that is killed when dropped.
struct Server(Child);

impl Server {
    fn start(place: &Path) -> Self {
        let shown = place.to_str().unwrap();
        // The socket of the server that was killed.
        let _ = fs::remove_file(place.join("socket"));
        let mut child = Command::new(TOWLINE)
            .args(["serve", "--dir", &format!("d={shown}/served")])
            .args(["--listen", &format!("unix://{shown}/socket")])
            .args(["--state", &format!("{shown}/state")])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("unix://")), "the server does not listen");
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn count(directory: &Path) -> usize {
    let output = Command::new("find").arg(directory).args(["-type", "f"]).output().unwrap();
    output.stdout.iter().filter(|b| **b == b'\n').count()
}

/// Describes a directory: names, types, modes, owners, times to the second (tar keeps no more) and checksums
/// of all files.
fn described(directory: &Path) -> String {
    let script = "find . -printf '%p %y %m %U %G %s %l ' -type d -printf '\\n' -o -printf '%TY%Tj%TH%TM\\n' | sort
        find . -type f | sort | xargs cksum";
    let output = Command::new("sh").args(["-c", script]).current_dir(directory).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn tar_goes_on_when_the_server_is_killed_and_comes_back() {
    let place = std::env::temp_dir().join(format!("towline-restart-{}", std::process::id()));
    let place = Place(place);
    for name in ["served/part/out", "state", "tree"] {
        fs::create_dir_all(place.0.join(name)).unwrap();
    }
    for number in 0..FILES {
        let folder = place.0.join(format!("tree/{}", number % 17));
        fs::create_dir_all(&folder).unwrap();
        // Some are too long to be sent with one request.
        let length = if number % 10 == 0 { 300_000 } else { 100 + number * 7 };
        fs::write(folder.join(format!("f{number}")), noise(length, number as u32)).unwrap();
    }
    let archive = place.0.join("archive.tar");
    let mut pack = Command::new("tar");
    pack.arg("-C").arg(&place.0).arg("-cf").arg(&archive).arg("tree");
    if pack.status().is_err() {
        println!("SKIPPED: tar is not installed");
        return;
    }
    let mut server = Server::start(&place.0);
    let url = format!("towline+unix:///d/part?socket={}/socket", place.0.display());
    let mut tar = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "tar", "-xf"])
        .arg(&archive)
        .args(["-C", &format!("{PREFIX}/out")])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    let mut kills = 0;
    let status = loop {
        if let Some(status) = tar.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            tar.kill().unwrap();
            panic!("tar does not end: {} of {FILES} files", count(&place.0.join("served")));
        }
        if kills < 2 && count(&place.0.join("served")) > FILES * (kills + 1) / 4 {
            server.0.kill().unwrap();
            server.0.wait().unwrap();
            server = Server::start(&place.0);
            kills += 1;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let said = std::io::read_to_string(tar.stderr.take().unwrap()).unwrap();
    assert!(status.success() && said.is_empty(), "{status}: {said}");
    assert!(kills > 0, "tar was faster than the test: no server was killed");
    assert_eq!(described(&place.0.join("served/part/out/tree")), described(&place.0.join("tree")));
}

/// Runs a script in a remote directory that has a file `one` and is `$SERVED` on the server's machine. When it has printed `ready` and waits for a line,
/// the server is killed; the script goes on while the server is away. Returns what it prints from then on.
fn across_a_restart(name: &str, script: &str) -> String {
    let place = std::env::temp_dir().join(format!("towline-{name}-{}", std::process::id()));
    let place = Place(place);
    for name in ["served", "state"] {
        fs::create_dir_all(place.0.join(name)).unwrap();
    }
    fs::write(place.0.join("served/one"), "one\n").unwrap();
    let server = Server::start(&place.0);
    let url = format!("towline+unix:///d?socket={}/socket", place.0.display());
    let mut shell = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "sh", "-c"])
        .arg(format!("cd {PREFIX} && {script}"))
        .env("SERVED", place.0.join("served"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().as_deref(), Some("ready"));
    drop(server);
    shell.stdin.take().unwrap().write_all(b"\n").unwrap();
    // Long enough to find no server; with less, the test is easier to pass.
    std::thread::sleep(Duration::from_millis(300));
    let _server = Server::start(&place.0);
    let rest: Vec<String> = lines.collect();
    let said = std::io::read_to_string(shell.stderr.take().unwrap()).unwrap();
    let status = shell.wait().unwrap();
    assert_eq!(said, "", "{status}");
    rest.join(" ")
}

/// A program started by another makes its own connections, which it cannot while the server is away.
#[test]
fn programs_that_begin_while_the_server_is_away_wait_for_it() {
    // Descriptor 5 is open in programs that have not used it before.
    let script = "exec 5<one; echo ready; read go; cat one; cat <&5; cat one <&5";
    assert_eq!(across_a_restart("away", script), "one one one");
}

/// The shell does not rename the files itself.
#[test]
fn open_files_that_were_renamed_stay_usable_after_a_restart() {
    let script = "mkdir old && exec 5>>old/log 6>>old/other && mv old/log old/log.1 && mv old new && \
        echo ready; read go; echo five >&5; echo six >&6; cat new/log.1 new/other";
    assert_eq!(across_a_restart("renamed", script), "five six");
}

#[test]
fn who_waits_for_a_lock_still_gets_it_after_a_restart() {
    // Waits for long enough to be waiting when the server is killed; with less, the test is easier to pass.
    let script = "exec 5<one 6<one; flock 5; { flock 6; echo got it; } & sleep 1; \
        echo ready; read go; flock -u 5; wait";
    assert_eq!(across_a_restart("waits", script), "got it");
}

/// The server never hears of the close from the process itself.
#[test]
fn a_lock_ends_with_a_process_that_was_killed_while_it_closed_the_file() {
    let script = r#"exec python3 -c '
import fcntl, os, signal, time
has, may = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    fd = os.open("one", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(has[1], b"x")
    os.read(may[0], 1)
    os.close(fd)
    signal.pause()
os.read(has[0], 1)
print("ready", flush=True)
input()
os.write(may[1], b"x")
time.sleep(0.1)
os.kill(child, signal.SIGKILL)
os.wait()
signal.alarm(60)
fcntl.flock(os.open("one", os.O_RDWR), fcntl.LOCK_EX)
print("got it")'"#;
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: python3 is not installed");
        return;
    }
    assert_eq!(across_a_restart("closing", script), "got it");
}

/// The server has kept them open, which it does a moment after they are opened; with less sleep, the test is easier to
/// pass.
#[test]
fn watched_files_that_lose_their_names_while_the_server_is_away_are_told_as_deleted() {
    let script = r#"mkdir dir; exec python3 -c '
import ctypes, os, signal, struct, time
libc = ctypes.CDLL(None)
queue = libc.inotify_init1(0)
watched = {libc.inotify_add_watch(queue, name.encode(), 0x400): name for name in ["one", "dir"]}
time.sleep(1)
print("ready", flush=True)
input()
os.unlink(os.environ["SERVED"] + "/one")
os.rmdir(os.environ["SERVED"] + "/dir")
signal.alarm(60)
gone = []
while len(gone) < 2:
    events = os.read(queue, 4096)
    while events:
        watch, mask, _, length = struct.unpack_from("iIII", events)
        events = events[16 + length:]
        if mask & 0x400:
            gone.append(watched[watch])
print(*sorted(gone))'"#;
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: python3 is not installed");
        return;
    }
    assert_eq!(across_a_restart("gone", script), "dir one");
}

/// Programs that hold locks and send nothing do not notice that the server is another one.
#[test]
fn sleeping_programs_keep_their_locks_when_the_server_is_killed() {
    let place = std::env::temp_dir().join(format!("towline-asleep-{}", std::process::id()));
    let place = Place(place);
    for name in ["served", "state"] {
        fs::create_dir_all(place.0.join(name)).unwrap();
    }
    let server = Server::start(&place.0);
    let url = format!("towline+unix:///d?socket={}/socket", place.0.display());
    let python = |script: &str| {
        Command::new(TOWLINE)
            .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "python3", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let said = |child: &mut Child| {
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line
    };
    // The first lock is held by a descriptor whose process has ended, the last one by a process that is killed.
    let mut holder = python(&format!(
        "import fcntl, os, subprocess, sys\n\
         os.chdir({PREFIX:?})\n\
         a, b = open('a', 'w'), open('b', 'w')\n\
         subprocess.run(['flock', str(a.fileno())], pass_fds=[a.fileno()], check=True)\n\
         fcntl.lockf(b, fcntl.LOCK_EX)\n\
         if os.fork() == 0:\n\
         \x20   c = open('c', 'w'); fcntl.lockf(c, fcntl.LOCK_EX)\n\
         \x20   print(os.getpid(), flush=True)\n\
         \x20   while True: os.pause() if hasattr(os, 'pause') else __import__('signal').pause()\n\
         sys.stdin.read()\n"
    ));
    let process: i32 = said(&mut holder).trim().parse().unwrap();
    drop(server);
    let _server = Server::start(&place.0);
    let url = format!("towline+unix:///?socket={}/socket", place.0.display());
    let end = Instant::now() + PATIENCE;
    // The session that asks is the other one.
    while !sessions(&url).contains("\"sessions\":2,") {
        assert!(Instant::now() < end, "the run does not come back: {}", sessions(&url));
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut other = python(&format!(
        "import fcntl, os\n\
         os.chdir({PREFIX:?})\n\
         files = [open(name, 'w') for name in 'abc']\n\
         def taken(file, lock):\n\
         \x20   try: lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n\
         \x20   except BlockingIOError: return True\n\
         \x20   return False\n\
         locks = [fcntl.flock, fcntl.lockf, fcntl.lockf]\n\
         print([taken(*each) for each in zip(files, locks)], flush=True)\n\
         input()\n\
         fcntl.lockf(files[2], fcntl.LOCK_EX)\n\
         print([taken(*each) for each in zip(files[:2], locks)], flush=True)\n\
         input()\n\
         for file, lock in zip(files, locks): lock(file, fcntl.LOCK_EX)\n\
         print('all', flush=True)\n"
    ));
    assert_eq!(said(&mut other), "[True, True, True]\n");
    let killed = rustix::process::Pid::from_raw(process).unwrap();
    rustix::process::kill_process(killed, rustix::process::Signal::KILL).unwrap();
    other.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert_eq!(said(&mut other), "[True, True]\n", "of the program that lives");
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    other.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert_eq!(said(&mut other), "all\n");
    assert!(other.wait().unwrap().success());
}

/// The statistics of a server.
fn sessions(url: &str) -> String {
    let output = Command::new(TOWLINE).args(["stats", "--json", url]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the process that holds open files for the server of this place, if there is one, and the number of
/// files that it holds.
fn held(place: &Path) -> Option<(u32, usize)> {
    let wanted = format!("hold\0{}/state/files\0", place.display());
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_holder = |number: &u32| {
        let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).ends_with(&wanted)
    };
    let number = { numbers }.find(is_holder)?;
    let files = fs::read_dir(format!("/proc/{number}/fd")).into_iter().flatten().flatten();
    let targets = files.filter_map(|entry| fs::read_link(entry.path()).ok());
    let served = place.join("served");
    Some((number, targets.filter(|target| target.starts_with(&served)).count()))
}

fn wait_until_held(place: &Path, what: &str, holds: impl Fn(Option<(u32, usize)>) -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds(held(place)) {
        assert!(Instant::now() < end, "{what}: {:?}", held(place));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Of files: without a name from the beginning, removed, replaced, renamed by others; of directories: renamed by
/// others.
#[test]
fn open_files_outlive_their_server_whatever_becomes_of_their_names() {
    let place = std::env::temp_dir().join(format!("towline-kept-{}", std::process::id()));
    let place = Place(place);
    for name in ["served/dir", "state"] {
        fs::create_dir_all(place.0.join(name)).unwrap();
    }
    let server = Server::start(&place.0);
    let script = format!(
        "import os, tempfile\n\
         os.chdir({PREFIX:?})\n\
         def made(file, text):\n\
         \x20   file.write(text); file.flush()\n\
         \x20   return file\n\
         files = [made(tempfile.TemporaryFile(dir='.'), b'none')]\n\
         files += [made(open(name, 'w+b'), name.encode()) for name in ('removed', 'replaced', 'renamed')]\n\
         os.unlink('removed')\n\
         os.close(os.open('new', os.O_CREAT)); os.rename('new', 'replaced')\n\
         folder = os.open('dir', os.O_RDONLY)\n\
         for _ in range(3):\n\
         \x20   print('ready', flush=True)\n\
         \x20   input()\n\
         \x20   for file in files:\n\
         \x20       file.seek(0); print(file.read().decode(), end=' ')\n\
         \x20       file.seek(0, 2); file.write(b'+'); file.flush()\n\
         \x20   print(os.stat('in', dir_fd=folder).st_size, flush=True)\n\
         for file in files: file.close()\n\
         os.close(folder)\n\
         print('closed', flush=True)\n\
         input()\n"
    );
    let url = format!("towline+unix:///d?socket={}/socket", place.0.display());
    let mut program = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "python3", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(program.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut tells = program.stdin.take().unwrap();
    assert_eq!(said.next().as_deref(), Some("ready"));
    wait_until_held(&place.0, "all are held", |held| held.is_some_and(|(_, files)| files >= 5));
    let served = |name: &str| place.0.join("served").join(name);
    fs::rename(served("renamed"), served("elsewhere")).unwrap();
    fs::rename(served("dir"), served("other")).unwrap();
    fs::write(served("other/in"), "12").unwrap();
    let mut server = Some(server);
    for round in 0..3 {
        // The last time it is told to end.
        let Some(mut old) = server.take() else { panic!() };
        if round == 2 {
            Command::new("kill").arg(old.0.id().to_string()).status().unwrap();
            old.0.wait().unwrap();
        }
        drop(old);
        server = Some(Server::start(&place.0));
        tells.write_all(b"\n").unwrap();
        let more = "+".repeat(round);
        let wanted = format!("none{more} removed{more} replaced{more} renamed{more} 2");
        assert_eq!(said.next(), Some(wanted));
        let next = if round == 2 { "closed" } else { "ready" };
        assert_eq!(said.next().as_deref(), Some(next));
    }
    assert_eq!(fs::read(served("elsewhere")).unwrap(), b"renamed+++");
    // What is closed is let go of: its space is free again.
    wait_until_held(&place.0, "what is closed", |held| held.is_some_and(|(_, files)| files == 0));
    tells.write_all(b"\n").unwrap();
    assert!(program.wait().unwrap().success());
    drop(server);
    wait_until_held(&place.0, "the holder ends", |held| held.is_none());
}
