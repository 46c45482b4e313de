//! `towline disk copy` from other NBD servers: sparse sources stay sparse, and their holes are not read.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// Ranges with data: the first byte and the length.
const DATA: [(u64, u64); 3] = [(0, MIB), (20 * MIB + 4096, 2 * MIB), (SIZE - 4096, 4096)];

/// A process that is killed at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn exists(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    if found.is_err() {
        println!("SKIPPED: {program} is not installed");
    }
    found.is_ok()
}

fn sparse(path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    for (offset, length) in DATA {
        let data: Vec<u8> = (0..length).map(|at| (at % 251) as u8 + 1).collect();
        file.write_all_at(&data, offset).unwrap();
    }
}

/// Returns true if a server listens there. Does not try to connect: some of the servers serve only one
/// connection. A socket has its name before it listens, which the kernel shows as a flag.
fn listens(socket: &Path) -> bool {
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = format!(" {}", socket.display());
    all.lines().any(|line| line.ends_with(&path) && line.contains(" 00010000 "))
}

fn start(program: &str, arguments: &[&str], socket: &Path) -> Running {
    let mut command = Command::new(program);
    let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let mut running = Running(child.spawn().unwrap());
    let end = Instant::now() + Duration::from_secs(60);
    while !listens(socket) {
        assert!(Instant::now() < end, "{program} does not listen after a minute");
        assert!(running.0.try_wait().unwrap().is_none(), "{program} ended");
        std::thread::sleep(Duration::from_millis(10));
    }
    running
}

fn disk(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(TOWLINE);
    command.arg("disk").args(arguments).env("XDG_STATE_HOME", directory);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Copies from the server behind `socket` and compares with what it serves.
fn copied(directory: &Path, socket: &Path, what: &str) {
    let url = format!("nbd+unix:///?socket={}", socket.display());
    let target = directory.join("copy");
    let done = disk(directory, &["copy", "--json", &url, target.to_str().unwrap()]);
    let done: Value = serde_json::from_str(&done).unwrap();
    assert_eq!(done["bytes"], SIZE, "{what}: {done}");
    assert!(done["data"].as_u64().unwrap() <= 6 * MIB, "{what}: {done}");
    let same = std::fs::read(&target).unwrap() == std::fs::read(directory.join("image")).unwrap();
    assert!(same, "{what}: the copy differs");
    let taken = std::fs::metadata(&target).unwrap().blocks() * 512;
    assert!(taken < 8 * MIB, "{what}: {taken} bytes are allocated");
    std::fs::remove_file(&target).unwrap();
}

/// This `qemu-nbd` serves one connection and ends, so the connection that reads must also ask for extents.
#[test]
fn images_of_qemu_nbd_stay_sparse() {
    if !exists("qemu-nbd") || !exists("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    sparse(&image);
    let qcow = directory.path().join("qcow");
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2"]).arg(&image).arg(&qcow);
    assert!(convert.status().unwrap().success());
    for (format, path) in [("raw", &image), ("qcow2", &qcow)] {
        let socket = directory.path().join(format);
        let (at, path) = (socket.to_str().unwrap(), path.to_str().unwrap());
        let mut server = start("qemu-nbd", &["-r", "-f", format, "-k", at, path], &socket);
        copied(directory.path(), &socket, format);
        let end = Instant::now() + Duration::from_secs(60);
        while server.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "qemu-nbd did not see its only client leave");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The server's own log shows what was read.
#[test]
fn holes_of_nbdkit_are_not_read() {
    if !exists("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (image, log) = (directory.path().join("image"), directory.path().join("log"));
    sparse(&image);
    let socket = directory.path().join("socket");
    let file = format!("file={}", image.display());
    let log_to = format!("logfile={}", log.display());
    let at = socket.to_str().unwrap();
    let arguments = ["-f", "-r", "-U", at, "--filter=log", "file", &file, &log_to];
    let server = start("nbdkit", &arguments, &socket);
    copied(directory.path(), &socket, "nbdkit");
    let map = disk(directory.path(), &["map", "--json", &format!("nbd+unix:///?socket={at}")]);
    assert!(map.contains(r#""type":"hole""#) && map.contains(r#""type":"data""#), "{map}");
    drop(server);
    let said = std::fs::read_to_string(&log).unwrap();
    let number = |line: &str, name: &str| -> Option<u64> {
        let value = line.split(name).nth(1)?.split([' ', ')']).next()?;
        u64::from_str_radix(value.trim_start_matches("0x"), 16).ok()
    };
    let mut read = 0;
    for line in said.lines().filter(|line| line.contains(" Read ") && line.contains("count=")) {
        let (offset, count) = (number(line, "offset=").unwrap(), number(line, "count=").unwrap());
        let near = DATA.iter().any(|(at, length)| {
            offset < (at + length).next_multiple_of(MIB) && offset + count > at / MIB * MIB
        });
        assert!(near, "a hole was read: {line}");
        read += count;
    }
    assert!(read > 0 && read <= 6 * MIB, "{read} bytes were read:\n{said}");
}

/// Without structured replies, a server cannot report holes: everything is read, and zeros are detected.
#[test]
fn servers_that_know_no_extents_are_copied_from() {
    if !exists("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    sparse(&image);
    let socket = directory.path().join("socket");
    let file = format!("file={}", image.display());
    let at = socket.to_str().unwrap();
    let _server = start("nbdkit", &["-f", "-r", "--no-sr", "-U", at, "file", &file], &socket);
    copied(directory.path(), &socket, "nbdkit without structured replies");
}

/// Nothing tells that a server of others serves the very target.
#[test]
fn what_is_copied_onto_itself_stays() {
    if !exists("nbdkit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("image"), directory.path().join("socket"));
    sparse(&image);
    File::options().write(true).open(&image).unwrap().set_len(SIZE + 1).unwrap();
    let before = std::fs::read(&image).unwrap();
    let file = format!("file={}", image.display());
    let at = socket.to_str().unwrap();
    let _server = start("nbdkit", &["-f", "-U", at, "file", &file], &socket);
    let (url, image) = (format!("nbd+unix:///?socket={at}"), image.to_str().unwrap());
    for (from, to) in [(&*url, image), (image, &*url)] {
        disk(directory.path(), &["copy", "--verify", from, to]);
        assert!(std::fs::read(image).unwrap() == before, "{from} to {to}");
    }
}

/// Copying the disk in an image onto the image would destroy both.
#[test]
fn images_that_qemu_has_open_are_not_written() {
    if !exists("qemu-nbd") || !exists("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("qcow"), directory.path().join("socket"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M");
    assert!(create.status().unwrap().success());
    let before = std::fs::read(&image).unwrap();
    let (at, image) = (socket.to_str().unwrap(), image.to_str().unwrap());
    let arguments = ["-t", "-e", "8", "-f", "qcow2", "-k", at, image];
    let _server = start("qemu-nbd", &arguments, &socket);
    let url = format!("nbd+unix:///?socket={at}");
    for resume in [None, Some("--resume")] {
        let mut command = Command::new(TOWLINE);
        command.args(["disk", "copy"]).args(resume).args([&*url, image]);
        let output = command.env("XDG_STATE_HOME", directory.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("another program has locked it"), "{said}");
    }
    assert!(std::fs::read(image).unwrap() == before);
}

/// A disk of length zero is served, shown and copied like any other. Other tools serve one, too.
#[test]
fn a_disk_without_bytes_is_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (image, copy, socket, native) = (at("image"), at("copy"), at("socket"), at("native"));
    File::create(&image).unwrap();
    let arguments = [
        format!("--disk=d={}", image.display()),
        format!("--nbd=unix://{}", socket.display()),
        format!("--listen=unix://{}", native.display()),
    ];
    let arguments: Vec<&str> =
        ["serve"].into_iter().chain(arguments.iter().map(|s| &**s)).collect();
    let _server = start(TOWLINE, &arguments, &native);
    while !listens(&socket) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let nbd = format!("nbd+unix:///d?socket={}", socket.display());
    let ours = format!("towline+unix:///d?socket={}", native.display());
    let source = at("source");
    File::create(&source).unwrap();
    let (source, copy) = (source.to_str().unwrap(), copy.to_str().unwrap());
    for url in [&nbd, &ours] {
        assert!(disk(directory.path(), &["info", url]).contains("size: 0"), "{url}");
        assert_eq!(disk(directory.path(), &["map", url]), "");
        for (from, to) in [(&**url, copy), (source, url), (source, copy)] {
            disk(directory.path(), &["copy", "--verify", from, to]);
        }
        assert_eq!(std::fs::metadata(copy).unwrap().len(), 0);
        std::fs::remove_file(copy).unwrap();
    }
    for (same, said) in [(&["0"][..], "0 -> 0"), (&["-0"], "0 -> 0"), (&[], "0")] {
        let done = disk(directory.path(), &[&["resize", &*ours], same].concat());
        assert_eq!(done, format!("{said} bytes\n"));
    }
    disk(directory.path(), &["resize", &ours, "1M"]);
    assert!(disk(directory.path(), &["info", &nbd]).contains("size: 1048576"));
}
