//! The server is killed in the middle of `tar x`. A new one takes over, and nothing is lost.

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

/// A program started by another makes its own connections, which it cannot while the server is away.
#[test]
fn programs_that_begin_while_the_server_is_away_wait_for_it() {
    let place = std::env::temp_dir().join(format!("towline-away-{}", std::process::id()));
    let place = Place(place);
    for name in ["served", "state"] {
        fs::create_dir_all(place.0.join(name)).unwrap();
    }
    fs::write(place.0.join("served/one"), "one\n").unwrap();
    let server = Server::start(&place.0);
    let url = format!("towline+unix:///d?socket={}/socket", place.0.display());
    // Descriptor 5 is open in programs that have not used it before.
    let script = "exec 5<one; echo ready; read go; cat one; cat <&5; cat one <&5";
    let mut shell = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "sh", "-c"])
        .arg(format!("cd {PREFIX} && {script}"))
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
    assert_eq!((rest.join(" "), said.as_str()), ("one one one".to_owned(), ""), "{status}");
}
