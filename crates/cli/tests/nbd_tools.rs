//! Common NBD clients against `towline serve`: the tools of libnbd and qemu, and fio.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use support::{TOWLINE, have};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

/// A server with an image of 32 MiB as `cached` and `direct`, with data in the 4 MiB from 8 MiB on, and with
/// a disk in memory and a stripe.
struct World {
    server: Child,
    directory: TempDir,
    tcp: String,
    data: Vec<u8>,
}

impl World {
    fn new() -> Self {
        // Not in memory: files there may not support O_DIRECT.
        let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut data = vec![0; 32 * MIB];
        for (at, byte) in data[8 * MIB..12 * MIB].iter_mut().enumerate() {
            *byte = (at * 31 + at / 4096) as u8 | 1;
        }
        write_sparse(&path("image"), &data);
        for member in ["one", "two", "three"] {
            fs::File::create(path(member)).unwrap().set_len(8 * MIB as u64).unwrap();
        }
        let shown = directory.path().to_str().unwrap();
        let mut server = Command::new(TOWLINE)
            .arg("serve")
            .args(["--disk", &format!("cached={shown}/image")])
            .args(["--disk", &format!("direct={shown}/image:direct")])
            .args(["--disk", &format!("ro={shown}/image:ro"), "--disk", "mem=mem:64M"])
            .args([
                "--disk",
                &format!("stripe=stripe:64K:{shown}/one,{shown}/two,{shown}/three:direct"),
            ])
            .args(["--nbd", "127.0.0.1:0", "--nbd", &format!("unix://{shown}/socket")])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let tcp = support::listening(&mut server, |line| eprintln!("{}", line.unwrap()));
        Self { server, tcp, directory, data }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn tcp(&self, disk: &str) -> String {
        format!("nbd://{}/{disk}", self.tcp)
    }

    fn unix(&self, disk: &str) -> String {
        format!("nbd+unix:///{disk}?socket={}", self.shown("socket"))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

fn write_sparse(path: &Path, data: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::create(path).unwrap();
    file.set_len(data.len() as u64).unwrap();
    for (at, part) in data.chunks(MIB).enumerate() {
        if part.iter().any(|byte| *byte != 0) {
            file.write_all_at(part, (at * MIB) as u64).unwrap();
        }
    }
}

/// Runs a program, which must succeed. Returns its output.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout")
        .args(["60", program])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {printed}{complaint}");
    printed
}

#[test]
fn libnbd_tools() {
    if !have("nbdinfo") || !have("nbdcopy") {
        return;
    }
    let world = World::new();
    let listed = run("nbdinfo", &["--list", &world.tcp("")]);
    for name in ["cached", "direct", "ro", "mem", "stripe"] {
        assert!(listed.contains(&format!("export=\"{name}\"")), "{listed}");
    }
    assert_eq!(run("nbdinfo", &["--size", &world.unix("mem")]).trim(), (64 * MIB).to_string());
    run("nbdinfo", &["--is", "read-only", &world.tcp("ro")]);
    let map = run("nbdinfo", &["--map", "--json", &world.unix("cached")]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let holes: Vec<(u64, u64, u64)> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|e| ["offset", "length", "type"].map(|key| e[key].as_u64().unwrap()).into())
        .collect();
    let mib = MIB as u64;
    assert_eq!(holes, [(0, 8 * mib, 3), (8 * mib, 4 * mib, 0), (12 * mib, 20 * mib, 3)]);
    for (number, url) in [world.tcp("cached"), world.unix("direct")].iter().enumerate() {
        let copy = world.shown(&format!("copy{number}"));
        run("nbdcopy", &[url, &copy]);
        assert!(fs::read(&copy).unwrap() == world.data, "copy of {url}");
    }
    for disk in [world.unix("mem"), world.tcp("stripe")] {
        let image = world.shown("small");
        write_sparse(image.as_ref(), &world.data[..24 * MIB]);
        run("nbdcopy", &["--flush", &image, &disk]);
        let back = world.shown("back");
        run("nbdcopy", &[&disk, &back]);
        assert!(fs::read(&back).unwrap()[..24 * MIB] == world.data[..24 * MIB], "{disk}");
        fs::remove_file(back).unwrap();
    }
}

#[test]
fn a_service_manager_may_hold_the_socket_and_a_client_may_be_standard_input() {
    if !have("nbdinfo") || !have("nbdcopy") {
        return;
    }
    let world = World::new();
    let disk = format!("img={}", world.shown("image"));
    let serve = ["[", TOWLINE, "serve", "--disk", &disk, "--nbd", "-", "]"];
    let size = run("nbdinfo", &[&["--size", "--"][..], &serve].concat());
    assert_eq!(size.trim(), (32 * MIB).to_string());
    let copy = world.shown("activated");
    run("nbdcopy", &[&["--"][..], &serve, &[&copy]].concat());
    assert!(fs::read(&copy).unwrap() == world.data);

    // As inetd starts a server, and over two pipes.
    let mut child = Command::new(TOWLINE)
        .args(["serve", "--disk", &disk, "--nbd", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    use std::io::{Read, Write};
    let mut greeting = [0; 18];
    output.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    input.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x02\0\0\0\0").unwrap();
    let mut acknowledged = Vec::new();
    output.read_to_end(&mut acknowledged).unwrap();
    assert_eq!(acknowledged.len(), 20, "an ACK, then the end");
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn qemu_tools() {
    if !have("qemu-img") || !have("qemu-io") {
        return;
    }
    let world = World::new();
    let image = world.shown("image");
    for disk in [world.tcp("cached"), world.unix("direct"), world.tcp("ro")] {
        let same = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &image, &disk]);
        assert!(same.contains("identical"), "{disk}: {same}");
    }
    let mem = world.unix("mem");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &image, &mem]);
    let map = run(
        "qemu-img",
        &["map", "--output=json", &format!("nbd:unix:{}:exportname=mem", world.shown("socket"))],
    );
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let data: u64 = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["data"].as_bool().unwrap())
        .map(|extent| extent["length"].as_u64().unwrap())
        .sum();
    assert_eq!(data, 4 * MIB as u64, "a sparse copy stays sparse");
    let refused = Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 512", &world.tcp("ro")])
        .output()
        .unwrap();
    assert!(!refused.status.success(), "a read-only disk is not written");
    assert!(fs::read(&image).unwrap() == world.data);
}

/// qemu treats the context as a dirty bitmap: written blocks show as data.
#[test]
fn qemu_reads_what_was_written() {
    if !have("qemu-img") || !have("qemu-io") {
        return;
    }
    let world = World::new();
    let mem = world.unix("mem");
    run("qemu-io", &["-f", "raw", "-c", "write -P 5 1M 64k", "-c", "write -z 8M 128k", &mem]);
    let options = format!(
        "driver=nbd,export=mem,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:written",
        world.shown("socket")
    );
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &options]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let dirty: Vec<(u64, u64)> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| !extent["data"].as_bool().unwrap())
        .map(|extent| ["start", "length"].map(|key| extent[key].as_u64().unwrap()).into())
        .collect();
    assert_eq!(dirty, [(1 << 20, 65536), (8 << 20, 131_072)]);
}

#[test]
fn fio_verifies() {
    if !have("fio") {
        return;
    }
    let world = World::new();
    for disk in [world.unix("mem"), world.tcp("stripe")] {
        let job = world.shown("job");
        fs::write(
            &job,
            format!(
                "[global]\nioengine=nbd\nrw=randwrite\nbsrange=4k-1m\nverify=crc32c\nverify_state_save=0\nsize=24m\n\
                 iodepth=16\n[job]\nuri={disk}\n"
            ),
        )
        .unwrap();
        let printed = run("fio", &[&job]);
        assert!(printed.contains("err= 0"), "{disk}: {printed}");
    }
}
