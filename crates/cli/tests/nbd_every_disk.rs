//! Common NBD clients on every kind of disk: cached, direct, read-direct, memory, stripe.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::{have, wait_until};
use tempfile::TempDir;

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const MIB: usize = 1 << 20;
const SIZE: usize = 32 * MIB;

/// Runs a program, which must succeed. Returns its output.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout")
        .args(["120", program])
        .args(arguments)
        .env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {printed}{complaint}");
    printed + &complaint
}

/// A server with an empty disk of each kind.
struct World {
    server: Child,
    directory: TempDir,
    tcp: String,
}

impl World {
    fn new() -> Self {
        // Not in memory: files there may not support O_DIRECT.
        let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let shown = directory.path().to_str().unwrap().to_owned();
        let file = |name: &str, size: usize| {
            fs::File::create(directory.path().join(name)).unwrap().set_len(size as u64).unwrap();
        };
        ["a", "b", "c"].iter().for_each(|name| file(name, SIZE));
        ["one", "two"].iter().for_each(|name| file(name, SIZE / 2));
        let disks = [
            format!("cached={shown}/a:cached"),
            format!("direct={shown}/b:direct"),
            format!("read-direct={shown}/c:read-direct"),
            "mem=mem:32M".to_owned(),
            format!("stripe=stripe:64K:{shown}/one,{shown}/two:direct"),
        ];
        let mut command = Command::new(TOWLINE);
        command.arg("serve").args(["--nbd", "127.0.0.1:0"]);
        command.args(["--nbd", &format!("unix://{shown}/socket")]);
        for disk in &disks {
            command.args(["--disk", disk]);
        }
        let mut server = command.stderr(Stdio::piped()).spawn().unwrap();
        let tcp = support::listening(&mut server, |line| eprintln!("{}", line.unwrap()));
        Self { server, directory, tcp }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Returns the URI of each disk, over TCP and the Unix socket in turn.
    fn uris(&self) -> Vec<String> {
        let unix = |disk: &str| format!("nbd+unix:///{disk}?socket={}", self.shown("socket"));
        let tcp = |disk: &str| format!("nbd://{}/{disk}", self.tcp);
        vec![tcp("cached"), unix("direct"), tcp("read-direct"), unix("mem"), tcp("stripe")]
    }

    /// Creates a file of `SIZE` bytes that partly holds data. Returns its path and contents.
    fn image(&self) -> (String, Vec<u8>) {
        let mut data = vec![0; SIZE];
        for range in [3 * MIB..5 * MIB, 9 * MIB + 4096..9 * MIB + 8192, 30 * MIB..SIZE] {
            for (at, byte) in data[range].iter_mut().enumerate() {
                *byte = (at * 31 + at / 4096) as u8 | 1;
            }
        }
        fs::write(self.path("image"), &data).unwrap();
        (self.shown("image"), data)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // It may have ended by itself, which the test has noticed.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn nbdcopy_and_nbdinfo() {
    if !have("nbdcopy") || !have("nbdinfo") {
        return;
    }
    let world = World::new();
    let (image, data) = world.image();
    for uri in world.uris() {
        assert_eq!(run("nbdinfo", &["--size", &uri]).trim(), SIZE.to_string());
        run("nbdcopy", &["--flush", &image, &uri]);
        run("nbdinfo", &["--map", &uri]);
        let back = world.shown("back");
        run("nbdcopy", &[&uri, &back]);
        assert!(fs::read(&back).unwrap() == data, "{uri}");
        fs::remove_file(back).unwrap();
    }
    // From one to the other.
    for pair in world.uris().windows(2) {
        run("nbdcopy", &["--allocated", &pair[0], &pair[1]]);
    }
}

#[test]
fn qemu_img() {
    if !have("qemu-img") {
        return;
    }
    let world = World::new();
    let (image, _) = world.image();
    for uri in world.uris() {
        run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &image, &uri]);
        let compared = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &uri]);
        assert!(compared.contains("identical"), "{uri}: {compared}");
        let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
        assert!(map.contains("\"start\": 0"), "{uri}: {map}");
        for write in [&[][..], &["-w"]] {
            let words =
                [&["bench", "-f", "raw", "-c", "200", "-d", "16", "-s", "64k"], write, &[&uri]];
            let printed = run("qemu-img", &words.concat());
            assert!(printed.contains("completed"), "{uri}: {printed}");
        }
    }
}

#[test]
fn qemu_io() {
    if !have("qemu-io") {
        return;
    }
    let world = World::new();
    let script = [
        "write -P 0x55 1M 3M",
        "read -P 0x55 1M 3M",
        "write -z 2M 1M",
        "write -f -P 0x66 3000 5000",
        "flush",
        "read -P 0 2M 1M",
        "read -P 0x66 3000 5000",
        "discard 1M 1M",
        "read -P 0x55 3M 1M",
        "aio_write -P 1 5M 1M",
        "aio_write -P 2 6M 1M",
        "aio_write -P 3 7M 65536",
        "aio_flush",
        "read -P 1 5M 1M",
        "read -P 2 6M 1M",
        "read -P 3 7M 65536",
    ];
    for uri in world.uris() {
        let mut arguments = vec!["-f", "raw"];
        script.iter().for_each(|line| arguments.extend(["-c", line]));
        arguments.push(&uri);
        let printed = run("qemu-io", &arguments);
        assert!(!printed.contains("failed"), "{uri}: {printed}");
    }
}

#[test]
fn fio_verifies() {
    if !have("fio") {
        return;
    }
    let world = World::new();
    for uri in world.uris() {
        let job = world.shown("job");
        let text = "ioengine=nbd\nrw=randwrite\nbsrange=4k-512k\nverify=crc32c\nverify_state_save=0\n\
                    size=16m\niodepth=16\nfsync=20\n";
        fs::write(&job, format!("[job]\n{text}uri={uri}\n")).unwrap();
        let printed = run("fio", &[&job]);
        assert!(printed.contains("err= 0"), "{uri}: {printed}");
    }
}

/// libnbd's Python binding: asynchronous requests out of order, block status, zeroes, trim.
const PYTHON: &str = r#"
import nbd, sys
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_uri(sys.argv[1])
size, count, length = h.get_size(), 32, 65536
assert h.can_multi_conn() and h.can_fua() and h.can_zero() and h.can_fast_zero() and h.can_df()
def data(n): return bytes([n + 1]) * length
cookies = []
for n in range(count):
    cookies.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data(n))), n * length,
                                flags=nbd.CMD_FLAG_FUA if n % 3 == 0 else 0))
while cookies:
    h.poll(-1)
    cookies = [c for c in cookies if not h.aio_command_completed(c)]
h.flush()
buffers = [(n, nbd.Buffer(length)) for n in range(count)]
cookies = [h.aio_pread(b, n * length) for n, b in reversed(buffers)]
while cookies:
    h.poll(-1)
    cookies = [c for c in cookies if not h.aio_command_completed(c)]
for n, b in buffers:
    assert b.to_bytearray() == data(n), n
h.zero(length, 0)
h.zero(length, 2 * length, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.trim(length, 4 * length)
assert h.pread(length, 0) == bytes(length) == h.pread(length, 2 * length)
assert h.pread(length, length) == data(1)
seen = []
def chunk(buf, offset, status, error): seen.append((offset, len(buf)))
assert h.pread_structured(4 << 20, 0, chunk)[length:2 * length] == data(1)
assert sum(n for _, n in seen) == 4 << 20, seen
extents = []
h.block_status(size, 0, lambda context, offset, entries, error: extents.extend(entries))
assert 0 < sum(extents[::2]) <= size
try:
    h.set_strict_mode(0)
    h.pread(512, size)
    sys.exit("a read beyond the end")
except nbd.Error as error:
    assert error.errno == "EINVAL", error
h.shutdown()
"#;

#[test]
fn python_binding() {
    // The first python3 may be the user's own, without the distribution's packages.
    let has_it = |python: &&str| {
        let tried = Command::new(python).args(["-c", "import nbd"]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let Some(python) = ["python3", "/usr/bin/python3"].into_iter().find(has_it) else {
        eprintln!("SKIPPED: python3-libnbd is not installed (tests/run installs it)");
        return;
    };
    let world = World::new();
    fs::write(world.path("script"), PYTHON).unwrap();
    for uri in world.uris() {
        run(python, &[&world.shown("script"), &uri]);
    }
}

/// Creates a file system on each disk through FUSE (nbdfuse), fills, checks and reads it. With `fuse2fs` it
/// is also mounted, except on direct disks.
#[test]
fn a_file_system_on_each_disk() {
    let programs = ["nbdfuse", "fusermount3", "mke2fs", "e2fsck", "debugfs"];
    if !programs.iter().all(|program| have(program)) {
        return;
    }
    if fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        eprintln!("SKIPPED: /dev/fuse cannot be opened here");
        return;
    }
    let have_driver = have("fuse2fs");
    let world = World::new();
    let tree = world.path("tree");
    fs::create_dir_all(tree.join("deep/er")).unwrap();
    let content = |number: usize| vec![number as u8 + 1; number * 50_000 + 7];
    for number in 0..20 {
        fs::write(tree.join(format!("deep/er/{number}")), content(number)).unwrap();
    }
    for (at, uri) in world.uris().iter().enumerate() {
        // Direct disks accept only whole blocks. The driver also writes parts of its superblock of 1 KiB, and
        // nbdfuse passes them on.
        let mounts = have_driver && ![1, 4].contains(&at);
        let directory = world.path(&format!("fuse{at}"));
        fs::create_dir(&directory).unwrap();
        let file = directory.join("disk");
        let _front = Mounted::start("nbdfuse", &[file.to_str().unwrap(), uri], &directory);
        wait_until("nbdfuse has its file", || file.exists());
        let file = file.to_str().unwrap();
        run(
            "mke2fs",
            &["-q", "-F", "-t", "ext4", "-b", "4096", "-d", tree.to_str().unwrap(), file],
        );
        run("e2fsck", &["-f", "-n", file]);
        if mounts {
            let inside = world.path(&format!("mounted{at}"));
            fs::create_dir(&inside).unwrap();
            let words = ["-f", "-o", "rw", file, inside.to_str().unwrap()];
            let mounted = Mounted::start("fuse2fs", &words, &inside);
            wait_until("the file system is mounted", || inside.join("deep").exists());
            fs::write(inside.join("later"), content(90)).unwrap();
            fs::remove_file(inside.join("deep/er/3")).unwrap();
            assert!(fs::read(inside.join("deep/er/7")).unwrap() == content(7), "{uri}");
            drop(mounted);
            run("e2fsck", &["-f", "-n", file]);
        }
        let out = world.path(&format!("out{at}"));
        fs::create_dir(&out).unwrap();
        run("debugfs", &["-R", &format!("rdump / {}", out.display()), file]);
        for number in (0..20).filter(|number| !(mounts && *number == 3)) {
            let found = fs::read(out.join(format!("deep/er/{number}"))).unwrap();
            assert!(found == content(number), "{uri}: file {number}");
        }
        if mounts {
            assert!(fs::read(out.join("later")).unwrap() == content(90), "{uri}");
            assert!(!out.join("deep/er/3").exists(), "{uri}");
        }
    }
}

/// A FUSE file system in the foreground, which is unmounted and awaited when dropped.
struct Mounted {
    child: Child,
    point: PathBuf,
}

impl Mounted {
    fn start(program: &str, arguments: &[&str], point: &Path) -> Self {
        let child = Command::new(program)
            .args(arguments)
            .env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, point: point.to_owned() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("fusermount3")
            .arg("-u")
            .arg(&self.point)
            .status()
            .is_ok_and(|s| s.success());
        for _ in 0..if unmounted { 600 } else { 0 } {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        // Needed only after a failure that has been reported already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
