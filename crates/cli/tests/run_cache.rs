//! `towline run --cache`: what was read once is not read again, and only as long as it has not changed.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

#[path = "support/quiet.rs"]
mod quiet;
mod support;

use quiet::Quiet;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use support::{TOWLINE, noise};
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, Server};

/// A block of the cache.
const BLOCK: usize = 4096;

struct World {
    folder: tempfile::TempDir,
    store: Arc<Quiet>,
    server: Option<Server>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Quiet::default());
        let server = Some(store.serve(&folder.path().join("socket")));
        Self { folder, store, server }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// Returns a command that runs a script, with `$AT` for the remote directory.
    fn run(&self, size: &str, script: &str) -> Command {
        let socket = self.folder.path().join("socket");
        let at = format!("--at=/quiet=towline+unix:///q?socket={}", socket.display());
        let mut command = Command::new(TOWLINE);
        command.args(["run", &at, "--cache", size, "--cache-dir"]).arg(self.cache());
        command.args(["--report", "--", "sh", "-c", script]).env("AT", "/quiet");
        command
    }

    fn output(&self, script: &str) -> Output {
        let output = self.run("1G", script).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Reads a file as a whole in a run of its own.
    fn reads(&self, name: &str, contents: &[u8]) {
        let output = self.output(&format!("dd if=$AT/{name} bs=100k status=none"));
        assert!(output.stdout == contents, "{name}: {} bytes", output.stdout.len());
    }

    /// Returns true if a file is read from the cache. On a busy machine, the bytes that come with opening may be too old
    /// when they are used, and what belongs to the same read is then read from the server once more.
    fn is_kept(&self, name: &str, contents: &[u8]) -> bool {
        (0..20).any(|_| {
            self.store.read();
            self.reads(name, contents);
            self.store.read() <= 2 * FIRST
        })
    }

    fn cached(&self) -> Vec<PathBuf> {
        fs::read_dir(self.cache()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
    }
}

/// What comes with opening a file, which is not kept.
const FIRST: u64 = 16 << 10;

#[test]
fn what_was_read_is_not_read_again_by_later_runs() {
    let world = World::new();
    let contents = noise(1 << 20, 1);
    world.store.put("f", &contents);
    world.reads("f", &contents);
    assert!(world.store.read() >= contents.len() as u64);
    assert!(world.is_kept("f", &contents));
    // Other pieces, other offsets, and what is shorter than a block of the cache.
    let script = "dd if=$AT/f bs=1000 status=none | cksum; tail -c 70001 $AT/f | cksum; cksum < $AT/f; \
                  tail -c 70001 $AT/f | cksum";
    let (all, end) = (&contents[..], &contents[contents.len() - 70001..]);
    let sums = String::from_utf8(world.output(script).stdout).unwrap();
    let sums: Vec<&str> = sums.lines().collect();
    assert_eq!(sums, [all, end, all, end].map(cksum));
    // Files that are not longer than what comes with opening are not kept.
    world.store.put("short", &contents[..FIRST as usize]);
    world.reads("short", &contents[..FIRST as usize]);
    assert_eq!(world.cached().len(), 1);
}

fn cksum(data: &[u8]) -> String {
    let mut child =
        Command::new("cksum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), data).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

/// Also what is read page by page, as the program touches it.
#[test]
fn mapped_files_are_kept() {
    let contents = noise(1 << 20, 1);
    mapped_is_kept(&contents);
}

/// Of short files all is read when the mapping is made.
#[test]
fn short_mapped_files_are_kept() {
    let contents = noise(200_000, 1);
    mapped_is_kept(&contents);
}

fn mapped_is_kept(contents: &[u8]) {
    if !support::have("python3") {
        return;
    }
    let world = World::new();
    world.store.put("f", contents);
    let script = "python3 -c 'import mmap, sys; file = open(sys.argv[1], \"rb\"); \
                  sys.stdout.buffer.write(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:])' $AT/f";
    let read = || {
        let output = world.output(script);
        assert!(output.stdout == contents, "{} bytes", output.stdout.len());
        world.store.read()
    };
    assert!(read() >= contents.len() as u64);
    // As in `is_kept`.
    assert!((0..20).any(|_| read() <= 2 * FIRST));
}

/// A file that has just been changed may be changing.
#[test]
fn what_was_changed_lately_is_not_kept() {
    let mut world = World::new();
    let served = world.folder.path().join("served");
    fs::create_dir(&served).unwrap();
    let contents = noise(1 << 20, 1);
    fs::write(served.join("f"), &contents).unwrap();
    if let Some(server) = world.server.take() {
        server.stop();
    }
    let listen = vec![Address::Unix(world.folder.path().join("socket"))];
    let exports = vec![Export::new("q", ExportKind::Directory(served))];
    let config = Config { exports, listen, cores: 1, ..Config::default() };
    world.server = Some(Server::start(&config).unwrap());
    world.reads("f", &contents);
    assert_eq!(world.cached(), [] as [PathBuf; 0]);
}

#[test]
fn what_has_changed_is_read_again() {
    let world = World::new();
    for seed in 0..3 {
        let contents = noise(300_000, seed);
        world.store.put("f", &contents);
        world.reads("f", &contents);
        world.reads("f", &contents);
    }
    let shorter = noise(100_000, 9);
    world.store.put("f", &shorter);
    world.reads("f", &shorter);
}

/// A program that has a file open sees changes as soon as without a cache.
#[test]
fn changes_of_an_open_file_are_seen() {
    let world = World::new();
    let (before, after) = (noise(4 << 20, 1), noise(4 << 20, 2));
    world.store.put("f", &before);
    world.reads("f", &before);
    let mut command = world.run("1G", "dd if=$AT/f bs=64k status=none");
    let mut reader = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut output = reader.stdout.take().unwrap();
    let mut read = vec![0; 64 << 10];
    output.read_exact(&mut read).unwrap();
    assert!(read == before[..64 << 10]);
    world.store.put("f", &after);
    // As long as an answer may be used.
    std::thread::sleep(Duration::from_millis(150));
    output.read_to_end(&mut read).unwrap();
    reader.wait().unwrap();
    // The program may have read on before the change, as far as the pipe takes it.
    let known = 512 << 10;
    assert_eq!(read.len(), before.len());
    assert!(read[known..] == after[known..], "old contents were read from the cache");
}

#[test]
fn damage_in_the_cache_is_not_read() {
    let world = World::new();
    let contents = noise(500_000, 1);
    world.store.put("f", &contents);
    world.reads("f", &contents);
    let [path] = &world.cached()[..] else { panic!() };
    let file = fs::File::options().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    for at in (0..length).step_by(BLOCK * 3 + 5) {
        file.write_all_at(&[0x55; 7], at).unwrap();
    }
    world.reads("f", &contents);
    file.set_len(length / 2).unwrap();
    world.reads("f", &contents);
    assert!(world.is_kept("f", &contents), "it was not put right");
}

#[test]
fn the_cache_keeps_its_limit() {
    let world = World::new();
    for name in ["a", "b", "c", "d"] {
        world.store.put(name, &noise(1 << 20, 7));
    }
    let script = "cat $AT/a $AT/b $AT/c $AT/d | wc -c";
    let output = world.run("2M", script).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "4194304\n");
    support::wait_until("what is too much is removed", || {
        let bytes = |path: PathBuf| fs::metadata(path).map_or(0, |about| about.blocks() * 512);
        world.cached().into_iter().map(bytes).sum::<u64>() <= 2 << 20
    });
    assert!(!world.cached().is_empty());
}

/// As without a cache, where the end of a file is not remembered.
#[test]
fn what_was_appended_is_seen_at_once() {
    if !support::have("python3") {
        return;
    }
    let world = World::new();
    let (before, after) = (noise(200_000, 1), noise(200_100, 1));
    world.store.put("f", &before);
    world.reads("f", &before);
    let script = "exec python3 -c 'import os, sys; \
                  file = os.open(sys.argv[1], os.O_RDONLY); os.pread(file, 100_000, 100_000); \
                  print(flush=True); sys.stdin.readline(); \
                  sys.stdout.buffer.write(os.pread(file, 1000, 200_000))' $AT/f";
    let mut command = world.run("1G", script);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut reader = command.spawn().unwrap();
    let mut output = reader.stdout.take().unwrap();
    output.read_exact(&mut [0]).unwrap();
    world.store.put("f", &after);
    std::io::Write::write_all(&mut reader.stdin.take().unwrap(), b"\n").unwrap();
    let mut read = Vec::new();
    output.read_to_end(&mut read).unwrap();
    assert!(read == after[200_000..], "{} bytes", read.len());
    assert!(reader.wait().unwrap().success());
}

/// The limits of a program are for what it does itself.
#[test]
fn programs_keep_their_limits() {
    let world = World::new();
    let contents = noise(300_000, 1);
    world.store.put("f", &contents);
    let output = world.output("ulimit -f 100; dd if=$AT/f bs=100k status=none");
    assert!(output.stdout == contents, "{} bytes", output.stdout.len());
    if !support::have("python3") {
        return;
    }
    let script = "ulimit -n 64; exec python3 -c 'import os, sys; \
                  files = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(50)]; \
                  print(sum(len(os.pread(file, 50_000, 100_000)) for file in files for _ in range(2)))' $AT/f";
    let output = world.output(script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "5000000\n");
}

/// Also when a program asks for them later.
#[test]
fn direct_reads_ask_the_server() {
    if !support::have("python3") {
        return;
    }
    let world = World::new();
    let contents = noise(1 << 20, 1);
    world.store.put("f", &contents);
    world.reads("f", &contents);
    world.store.read();
    let script = "exec python3 -c 'import fcntl, mmap, os, sys; \
                  file = os.open(sys.argv[1], os.O_RDONLY); to = mmap.mmap(-1, 512 << 10); \
                  fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT); \
                  os.preadv(file, [to], 512 << 10); sys.stdout.buffer.write(to[:])' $AT/f";
    let output = world.output(script);
    assert!(output.stdout == contents[512 << 10..], "{} bytes", output.stdout.len());
    assert!(world.store.read() >= 512 << 10, "it came from the cache");
}

/// More files than the cache keeps open.
#[test]
fn many_open_files_are_kept() {
    if !support::have("python3") {
        return;
    }
    let world = World::new();
    let contents = noise(20 * 40 * 1024, 1);
    world.store.put("f", &contents);
    let script = "exec python3 -c 'import os, sys; \
                  files = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(20)]; \
                  [sys.stdout.buffer.write(os.pread(file, 40 << 10, place * 40 << 10)) \
                  for place, file in enumerate(files)]; \
                  [os.close(file) for file in files]' $AT/f";
    for round in 0..2 {
        let output = world.output(script);
        assert!(output.stdout == contents, "{} bytes", output.stdout.len());
        let read = world.store.read();
        assert!(round == 0 || read <= 20 * FIRST, "{read} bytes were read again");
    }
}

#[test]
fn the_directory_of_the_cache_may_be_removed() {
    let world = World::new();
    let contents = noise(300_000, 1);
    world.store.put("f", &contents);
    let script = format!("cat $AT/f > /dev/null; rm -r {}; cat $AT/f", world.cache().display());
    let output = world.output(&script);
    assert!(output.stdout == contents, "{} bytes", output.stdout.len());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!told.contains("WARN"), "{told}");
}

#[test]
fn the_report_tells_what_came_from_the_cache() {
    let world = World::new();
    let contents = noise(1 << 20, 1);
    world.store.put("f", &contents);
    let told = |output: Output| {
        let text = String::from_utf8(output.stderr).unwrap();
        let line = text.lines().find(|line| line.contains("from the cache")).unwrap().to_owned();
        let numbers = line.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
        let numbers: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
        <[u64; 2]>::try_from(numbers).unwrap()
    };
    let script = "dd if=$AT/f of=/dev/null bs=1M status=none";
    let first = told(world.output(script));
    assert!(first[0] == 0 && first[1] >= contents.len() as u64 - 2 * FIRST, "{first:?}");
    // As in `is_kept`.
    let is_second =
        |[read, stored]: [u64; 2]| read >= contents.len() as u64 - 2 * FIRST && stored == 0;
    assert!((0..20).any(|_| is_second(told(world.output(script)))));
}

#[test]
fn a_directory_that_others_may_write_is_refused() {
    let world = World::new();
    fs::create_dir(world.cache()).unwrap();
    fs::set_permissions(world.cache(), fs::Permissions::from_mode(0o777)).unwrap();
    let output = world.run("1G", "true").output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{told}");
    assert!(told.contains("no one else may write"), "{told}");
    let arguments = ["run", "--at=/d=towline://h/x", "--cache-dir=/d", "--", "true"];
    let output = Command::new(TOWLINE).args(arguments.map(OsStr::new)).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
