//! `towline disk` as users run it.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod interrupted;
#[path = "../support/mod.rs"]
mod support;

use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use support::{Running, TOWLINE, forbidding, have, wait_until};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Creates a file of this length with some data and holes.
    fn sparse(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        file.set_len(size).unwrap();
        let mut number = 1_u32;
        let mut data: Vec<u8> = Vec::new();
        for _ in 0..3 << 19 {
            number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            data.push((number >> 24) as u8);
        }
        file.write_all_at(&data, MIB).unwrap();
        file.write_all_at(&data[..4096], size / 2 + 4096).unwrap();
        file.write_all_at(&[1], size - 1).unwrap();
        path
    }

    /// Creates a file of this length without holes.
    fn full(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        let block: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8).collect();
        let mut file = File::create(&path).unwrap();
        for number in 0..size / MIB {
            file.write_all(&(number + 1).to_le_bytes()).unwrap();
            file.write_all(&block[8..]).unwrap();
        }
        path
    }

    fn serve(&self, disks: &[String]) -> Running {
        self.serve_by(Command::new(TOWLINE), disks)
    }

    fn serve_by(&self, mut command: Command, disks: &[String]) -> Running {
        let (socket, nbd) = (self.path("socket"), self.path("nbd"));
        for old in [&socket, &nbd] {
            let _ = std::fs::remove_file(old);
        }
        command.arg("serve");
        for disk in disks {
            command.args(["--disk", disk]);
        }
        command.args(["--listen", &format!("unix://{socket}"), "--nbd", &format!("unix://{nbd}")]);
        let log = File::create(self.path("log")).unwrap();
        let server = Running(command.stderr(log).spawn().unwrap());
        wait_until("the server listens", || {
            let connects = |path: &str| std::os::unix::net::UnixStream::connect(path).is_ok();
            connects(&socket) && connects(&nbd)
        });
        server
    }

    fn url(&self, name: &str) -> String {
        format!("towline+unix:///{name}?socket={}", self.path("socket"))
    }

    fn nbd(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.path("nbd"))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(TOWLINE);
        command.arg("disk").args(arguments).env("XDG_STATE_HOME", self.path("state"));
        command
    }

    fn disk(&self, arguments: &[&str]) -> Result<String, String> {
        let Output { status, stdout, stderr } = self.command(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        if status.success() { Ok(text(stdout)) } else { Err(text(stderr)) }
    }

    fn copy(&self, arguments: &[&str]) -> Value {
        let said = self.disk(&[&["copy", "--json"], arguments].concat());
        serde_json::from_str(&said.unwrap_or_else(|error| panic!("{arguments:?}: {error}")))
            .unwrap()
    }

    /// Returns the number of lines in all journals.
    fn noted(&self) -> usize {
        let Ok(journals) = std::fs::read_dir(self.path("state/towline/copies")) else { return 0 };
        let lines =
            |path: &Path| std::fs::read_to_string(path).map_or(0, |text| text.lines().count());
        journals.map(|entry| lines(&entry.unwrap().path())).sum()
    }
}

fn same(one: &str, other: &str) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

fn allocated(path: &str) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn disks_are_shown_mapped_copied_and_resized() {
    let place = Place::new();
    let size = 24 * MIB;
    File::create(place.path("served")).unwrap().set_len(size).unwrap();
    let _server = place.serve(&[
        format!("img={}", place.path("served")),
        "scratch=mem:24M".into(),
        "small=mem:8M".into(),
    ]);
    let (img, scratch) = (place.url("img"), place.url("scratch"));

    for (disk, more) in
        [(place.url("small"), &["--write"][..]), (place.nbd("small"), &["--random"])]
    {
        let given = ["bench", "--secs", "0.05", "--depth", "4", &disk];
        let said = place.disk(&[&given[..], more].concat()).unwrap();
        assert!(said.contains(" per second, ") && said.contains("us (median)"), "{said}");
        let said = place.disk(&[&given[..], more, &["--json"]].concat()).unwrap();
        let found: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(found["bytes"], found["ops"].as_u64().unwrap() * 4096, "{found}");
    }
    assert!(place.disk(&["bench", &place.path("served")]).unwrap_err().contains("local"));

    let all = place.disk(&["info", &place.url("")]).unwrap();
    assert!(all.contains("img:\n  size: 25165824 (24M)") && all.contains("scratch:"), "{all}");
    assert!(all.contains("(cached)") && all.contains("read only: no"), "{all}");
    let listed = Command::new(TOWLINE).args(["ls", &place.url("")]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.starts_with("img\tdisk, /") && listed.contains("\nscratch\tdisk, memory\n"));
    let nbd = place.disk(&["info", "--json", &place.nbd("img")]).unwrap();
    let nbd: Value = serde_json::from_str(&nbd).unwrap();
    assert!(nbd["size"] == size && nbd["can_multi_conn"] == true, "{nbd}");

    // A sparse file goes through every kind of end and back: the bytes are the same, and it is still sparse.
    let local = place.sparse("local", size);
    let shm = img.replace("+unix", "+shm");
    for (from, to) in [
        (&local, &img),
        (&shm, &scratch),
        (&place.nbd("scratch"), &place.path("by-nbd")),
        (&local, &place.nbd("scratch")),
        (&scratch, &place.path("back")),
        (&local, &place.path("plain")),
    ] {
        let done = place.copy(&["--verify", from, to]);
        assert!(done["bytes"] == size && done["verified"] == true, "{from} to {to}: {done}");
        assert!(done["data"].as_u64().unwrap() <= 6 * MIB, "{from} to {to}: {done}");
    }
    for copy in ["served", "by-nbd", "back", "plain"] {
        assert!(same(&local, &place.path(copy)), "{copy} differs");
        let taken = allocated(&place.path(copy));
        assert!(taken < 4 * MIB, "{taken} bytes are allocated for the sparse {copy}");
    }
    // Old data is gone where the source has holes.
    let full = place.full("full", size);
    place.copy(&[&full, &img]);
    assert!(same(&full, &place.path("served")) && allocated(&place.path("served")) >= size);
    place.copy(&["--verify", &local, &img]);
    assert!(same(&local, &place.path("served")) && allocated(&place.path("served")) < 4 * MIB);

    let map = place.disk(&["map", "--json", &scratch]).unwrap();
    assert!(map.starts_with(r#"{"length":1048576,"offset":0,"type":"hole"}"#), "{map}");
    assert!(map.contains(r#""length":1572864,"offset":1048576,"type":"data""#), "{map}");
    let map = place.disk(&["map", "--totals", &local]).unwrap();
    assert!(map.contains("data") && map.contains("hole"), "{map}");
    let written = place.disk(&["map", "--written", &img]).unwrap();
    assert!(written.contains("written"), "{written}");

    let refused = place.disk(&["resize", &img, "8M"]).unwrap_err();
    assert!(refused.contains("--shrink"), "{refused}");
    assert_eq!(place.disk(&["resize", &img, "+8M"]).unwrap(), "25165824 -> 33554432 bytes\n");
    assert_eq!(std::fs::metadata(place.path("served")).unwrap().len(), 32 * MIB);
    let small = place.disk(&["copy", &img, &scratch]).unwrap_err();
    assert!(small.contains("25165824 bytes are not enough for 33554432"), "{small}");
    let shrunk = place.disk(&["resize", "--shrink", &img, "-16M"]).unwrap();
    assert_eq!(shrunk, "33554432 -> 16777216 bytes\n");
    // Another process has made it longer.
    File::options().write(true).open(place.path("served")).unwrap().set_len(size).unwrap();
    assert_eq!(place.disk(&["resize", &img]).unwrap(), "25165824 bytes\n");
    assert_eq!(place.noted(), 0, "nothing is left to be gone on with");

    assert_eq!(place.disk(&["resize", &scratch, "+8M"]).unwrap(), "25165824 -> 33554432 bytes\n");
    let map = place.disk(&["map", "--totals", "--json", &scratch]).unwrap();
    assert!(map.contains("hole"), "{map}");
    assert_eq!(
        place.disk(&["resize", "--shrink", &scratch, "1M"]).unwrap(),
        "33554432 -> 1048576 bytes\n"
    );
    let nbd = place.disk(&["info", "--json", &place.nbd("scratch")]).unwrap();
    assert!(nbd.contains(r#""size":1048576"#), "{nbd}");
}

/// A container's filter may forbid asking what is in memory.
#[test]
fn a_disk_is_read_without_preadv2() {
    if !have("python3") {
        return;
    }
    let place = Place::new();
    let image = place.sparse("image", 8 * MIB);
    let mut command = forbidding(libc::SYS_preadv2);
    command.arg(TOWLINE);
    let _server = place.serve_by(command, &[format!("d={image}")]);
    for (number, source) in [place.url("d"), place.nbd("d")].iter().enumerate() {
        let target = place.path(&format!("copy{number}"));
        place.copy(&[source, &target]);
        assert!(same(&image, &target), "{source}");
    }
}

#[test]
fn what_cannot_be_copied_is_refused_with_a_reason() {
    let place = Place::new();
    let local = place.sparse("local", 8 * MIB);
    let (one, two) = (place.sparse("one", 2 * MIB), place.sparse("two", 2 * MIB));
    let pair = format!("pair=stripe:64K:{one},{two}");
    let disks = [format!("img={local}"), "ro=mem:8M:ro".into(), "a=mem:4M".into(), pair];
    let _server = place.serve(&disks);
    let (img, nbd) = (place.url("img"), place.nbd("a"));
    let fifo = place.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let missing = place.path("missing");
    let hard = place.path("hard");
    std::fs::hard_link(&local, &hard).unwrap();
    let before = std::fs::read(&local).unwrap();
    for (arguments, expected) in [
        (&["copy", &local, &local][..], "the same disk"),
        (&["copy", "--resume", &missing, &local], "no such file"),
        (&["copy", "--resume", &two, &local], "served, or copied to, as a disk"),
        (&["copy", &img, &img], "the same disk"),
        (&["copy", &nbd, &nbd], "the same disk"),
        // The file behind the server's disk, which would be emptied first.
        (&["copy", &img, &local], "the same disk"),
        (&["copy", "--resume", &img, &local], "the same disk"),
        (&["copy", &img, &hard], "it is served"),
        (&["copy", &place.nbd("img"), &local], "it is served"),
        (&["copy", &local, &img], "the same disk"),
        (&["copy", &local, &place.url("ro")], "read-only"),
        (&["copy", &local, &place.url("none")], "disk info"),
        (&["copy", &local, &nbd], "not enough"),
        (&["copy", &missing, &nbd], "missing"),
        (&["copy", &fifo, &nbd], "standard input"),
        (&["copy", "--resume", "-", &nbd], "--resume"),
        (&["copy", "--verify", &img, "-"], "standard output"),
        (&["copy", "nbds://h/x", &local], "TLS"),
        (&["map", &place.url("none")], "no such disk"),
        (&["resize", &place.nbd("a"), "1M"], "NBD"),
        (&["resize", &place.url("a"), "1X"], "1X"),
        (&["resize", "--shrink", &place.url("a"), "-4M"], "no disk"),
        (&["resize", "--shrink", &place.url("a"), "-5M"], "no disk"),
        (&["resize", "--shrink", &place.url("a"), "0"], "no disk can be made empty"),
        (&["resize", &place.url("a"), "18446744073709551615"], "no disk can have that size"),
        (&["resize", &place.url("a"), "65M"], "16 times"),
        (&["resize", &place.url("ro"), "16M"], "read-only"),
        (&["resize", &place.url("pair"), "+100K"], "number of members"),
        (&["info", &place.url("none")], "no such disk"),
        (&["bench", &place.url("none")], "no such disk"),
        // The server would take its first disk.
        (&["copy", &img, &place.url("")], "no disk is named"),
        (&["map", &place.url("")], "no disk is named"),
        (&["resize", &place.url(""), "16M"], "no disk is named"),
        (&["bench", "--write", &place.url("")], "no disk is named"),
        (&["bench", &place.url("img/x")], "no path"),
    ] {
        let error = place.disk(arguments).unwrap_err();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
    assert!(std::fs::read(&local).unwrap() == before);
    // What is wrong whatever there is.
    let a = place.url("a");
    for arguments in [
        &["copy", "--resume", "-", &nbd][..],
        &["copy", "--verify", &img, "-"],
        &["copy", "--json", &img, "-"],
        &["bench", "--depth", "0", &a],
        &["bench", "--clients", "0", &nbd],
        &["bench", "--secs", "0", &a],
        &["bench", "--size", "16M", &a],
    ] {
        let output = place.command(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    }
    // An end that cannot be reached is named once.
    let nowhere = format!("nbd+unix:///a?socket={missing}");
    let none = place.url("none");
    for arguments in [
        &["info", &nowhere][..],
        &["bench", &nowhere],
        &["copy", &local, &nowhere],
        &["bench", &none],
    ] {
        let error = place.disk(arguments).unwrap_err();
        let named = arguments[arguments.len() - 1];
        assert_eq!(error.matches(named).count(), 1, "{error}");
        assert!(!error.contains(&local), "{error}");
    }
    // The stream is longer than the disk.
    let mut child = Running(
        place
            .command(&["copy", "-", &nbd])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    // The program stops reading when it has seen enough.
    let _ = child.0.stdin.take().unwrap().write_all(&vec![7; 6 << 20]);
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!child.0.wait().unwrap().success() && said.contains("not enough"), "{said}");
}

/// `/dev/nvme0n1` on two machines is not one disk.
#[test]
fn disks_of_two_machines_are_not_the_same() {
    let place = Place::new();
    let mut servers = Vec::new();
    std::fs::create_dir(place.path("mount")).unwrap();
    for name in ["one", "two"] {
        // The same path and inode, but another boot.
        let script = "
cat /proc/sys/kernel/random/uuid >$1.boot
mount --bind $1.boot /proc/sys/kernel/random/boot_id && mount -t tmpfs none mount || exit 1
echo $1 >mount/disk
truncate -s 1M mount/disk
exec $0 serve --disk vm=mount/disk --listen unix://$PWD/$1";
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script, TOWLINE, name]).current_dir(place.0.path());
        servers.push(Running(command.spawn().unwrap()));
    }
    let url = |name: &str| format!("towline+unix:///vm?socket={}", place.path(name));
    for (server, name) in servers.iter_mut().zip(["one", "two"]) {
        wait_until("a server listens", || {
            server.0.try_wait().unwrap().is_some() || Path::new(&place.path(name)).exists()
        });
        if server.0.try_wait().unwrap().is_some() {
            return eprintln!("SKIPPED: disks_of_two_machines_are_not_the_same (needs root)");
        }
    }
    place.copy(&[&url("one"), &url("two")]);
    let (one, two) = (place.path("from-one"), place.path("from-two"));
    place.copy(&[&url("one"), &one]);
    place.copy(&[&url("two"), &two]);
    assert!(same(&one, &two) && std::fs::read(&one).unwrap().starts_with(b"one"));
}

#[test]
fn streams_come_and_go_in_order() {
    let place = Place::new();
    let local = place.sparse("local", 20 * MIB + 4096);
    let _server = place.serve(&[format!("img={local}:ro"), "a=mem:24M".into()]);
    let out = File::create(place.path("out")).unwrap();
    let done = place.command(&["copy", &place.url("img"), "-"]).stdout(out).status().unwrap();
    assert!(done.success() && same(&local, &place.path("out")));
    // From a pipe into a file that grows, and into a disk that is longer.
    for target in [place.path("in"), place.url("a")] {
        let mut child = Running(
            place
                .command(&["copy", "--verify", "-", &target])
                .stdin(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let mut input = child.0.stdin.take().unwrap();
        input.write_all(&std::fs::read(&local).unwrap()).unwrap();
        drop(input);
        assert!(child.0.wait().unwrap().success());
    }
    assert!(same(&local, &place.path("in")) && allocated(&place.path("in")) < 4 * MIB);
    place.copy(&[&place.url("a"), &place.path("a")]);
    let copied = std::fs::read(place.path("a")).unwrap();
    assert!(copied[..20 << 20] == std::fs::read(&local).unwrap()[..20 << 20]);
    assert!(copied.len() == 24 << 20);
}

/// A local file keeps its inode, and nothing of what it held.
#[test]
fn a_file_that_exists_is_replaced() {
    let place = Place::new();
    let source = place.sparse("source", 8 * MIB + 100);
    let target = place.path("target");
    let empty = place.path("empty");
    File::create(&empty).unwrap();
    for length in [0, 3 * MIB + 5, 8 * MIB + 100, 20 * MIB] {
        std::fs::write(&target, vec![7; length as usize]).unwrap();
        let inode = std::fs::metadata(&target).unwrap().ino();
        place.copy(&["--verify", &source, &target]);
        assert!(same(&source, &target), "{length}");
        assert!(allocated(&target) < 4 * MIB, "{length}: {} are allocated", allocated(&target));
        assert_eq!(std::fs::metadata(&target).unwrap().ino(), inode);
        std::fs::write(&target, vec![7; length as usize]).unwrap();
        let stdin = File::open(&source).unwrap();
        let done = place.command(&["copy", "-", &target]).stdin(stdin).status().unwrap();
        assert!(done.success() && same(&source, &target), "{length}");
        place.copy(&[&empty, &target]);
        assert!(same(&empty, &target));
    }
}

#[test]
fn the_path_of_a_local_disk_may_be_any_bytes() {
    let place = Place::new();
    let path = |name: &[u8]| place.0.path().join(OsStr::from_bytes(name));
    let (one, other) = (path(b"\xff"), path(b"\xfe"));
    std::fs::rename(place.sparse("local", 20 * MIB), &one).unwrap();
    let done = |arguments: &[&OsStr]| {
        let output = place.command(&[]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    for command in ["info", "map"] {
        assert!(!done(&[command.as_ref(), one.as_ref()]).is_empty());
    }
    done(&["copy".as_ref(), "--verify".as_ref(), one.as_ref(), other.as_ref()]);
    assert!(std::fs::read(&one).unwrap() == std::fs::read(&other).unwrap());
}
