//! What can happen to an export under the server: files that shrink or vanish while they are read,
//! a full file system or an exhausted quota, names that may not be read or changed. The client gets
//! the same errno as locally, nothing that was written is lost, and the session goes on.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where
#![allow(unsafe_code)] // quotactl, which no crate wraps

mod common;

use common::{CREATE, EXCLUSIVE, TRUNCATE, eventually, pattern, setup, skipped};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;
use towline_client::{Client, Errno, File, Options, SetAttr, Transport};
use towline_net::address::Address;
use towline_server::{Config, EngineWish, Export, ExportKind, Server};
use towline_wire::request::sync_kind;

/// `O_RDWR`.
const WRITE: u32 = 2;

fn connect(transport: &Transport) -> Client {
    Client::connect(transport, Options::default()).unwrap()
}

#[track_caller]
fn errno<T>(result: Result<T, towline_client::Error>) -> Errno {
    result.err().expect("it was allowed").errno()
}

#[test]
fn a_file_that_was_read_whole_is_closed_before_anything_else_is_done() {
    let setup = setup(EngineWish::Automatic);
    let name = "is closed";
    for transport in &setup.transports {
        let client = connect(transport);
        let root = client.attach(b"dir").unwrap();
        root.write_path(name.as_bytes(), CREATE, 0o600, &pattern(5000, 1)).unwrap();
        for _ in 0..10 {
            let mut bytes = [0; 5000];
            assert_eq!(root.read_path(name.as_bytes(), 0, &mut bytes).unwrap(), 5000);
            root.stat_path(b"", true).unwrap();
            assert!(!is_open(name), "over {transport:?}");
        }
    }
}

/// True if the server, which runs in this process, has a file of this name open.
fn is_open(name: &str) -> bool {
    std::fs::read_dir("/proc/self/fd").unwrap().any(|entry| {
        let target = entry.ok().and_then(|entry| entry.path().read_link().ok());
        target.is_some_and(|target| target.ends_with(name))
    })
}

/// The request stops where it fails, and comes to its last operation, the close, no more.
#[test]
fn a_file_that_could_not_be_read_or_written_is_closed() {
    let setup = setup(EngineWish::Automatic);
    let name = "is closed all the same";
    for transport in &setup.transports {
        let client = connect(transport);
        let root = client.attach(b"dir").unwrap();
        root.write_path(name.as_bytes(), CREATE, 0o600, b"x").unwrap();
        let closed = |what: &str| {
            eventually(&format!("{what} over {transport:?}"), || {
                client.progress();
                client.is_idle() && !is_open(name)
            });
        };
        for _ in 0..3 {
            let (name, read_only, write_only) = (name.as_bytes(), 0, 1);
            assert_eq!(errno(root.read_path(name, write_only, &mut [0; 9])), Errno::EBADF);
            closed("read");
            assert_eq!(errno(root.write_path(name, read_only, 0, b"y")), Errno::EBADF);
            closed("written");
            let starts = || root.start_read_path(name, write_only, 9).unwrap();
            assert_eq!(errno(starts().wait()), Errno::EBADF);
            closed("read later");
            drop(starts());
            closed("given up");
        }
    }
}

#[test]
fn a_file_that_shrinks_under_its_readers_gives_no_wrong_bytes() {
    const LENGTH: usize = 3 << 20;
    const ROUNDS: u64 = 60;
    const OFFSET: usize = 1 << 20;
    /// Where the file ends for a moment: before the read, at its start, and inside it.
    const ENDS: [u64; 4] = [0, 1 << 20, (1 << 20) + 70_001, (3 << 20) / 2];
    let setup = setup(EngineWish::Automatic);
    let path = setup.data.join("shrinks");
    let whole = pattern(LENGTH, 3);
    std::fs::write(&path, &whole).unwrap();
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for transport in &setup.transports {
            let (whole, rounds) = (&whole, &rounds);
            readers.push(scope.spawn(move || {
                let (mut short, mut reads) = (0, 0_u32);
                let client = connect(transport);
                let file = client.attach(b"dir").unwrap().open(b"shrinks", 0, 0).unwrap();
                // Its last MiB comes with the reply, the rest before.
                let mut target = vec![0xff; 2 << 20];
                while rounds.load(Ordering::Relaxed) < ROUNDS || reads < 20 {
                    reads += 1;
                    assert!(reads < 1_000_000, "the file does not change any more");
                    // Never an error: whoever reads a local file gets what it has by then.
                    let count = file.read_at(&mut target, OFFSET as u64).unwrap();
                    short += usize::from(count < target.len());
                    // The kernel clears a page beyond the new end before it frees it.
                    let same = target[..count]
                        .iter()
                        .zip(&whole[OFFSET..])
                        .all(|(found, wanted)| found == wanted || *found == 0);
                    assert!(same, "bytes that never were in the file");
                }
                eprintln!("{transport:?}: {reads} reads, {short} short");
                (client, file)
            }));
        }
        let local = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        while readers.iter().any(|reader| !reader.is_finished()) {
            let round = rounds.fetch_add(1, Ordering::Relaxed);
            local.set_len(ENDS[(round % ENDS.len() as u64) as usize]).unwrap();
            local.write_all_at(&whole, 0).unwrap();
        }
        // The file has its first contents again, and the sessions go on.
        let mut target = vec![0xff; 1 << 20];
        for reader in readers {
            let (_client, file) = reader.join().unwrap();
            assert_eq!(file.read_at(&mut target, 5).unwrap(), target.len());
            assert!(target[..] == whole[5..][..target.len()]);
        }
    });
}

#[test]
fn what_vanishes_is_gone_by_name_and_stays_for_those_who_have_it_open() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let client = connect(transport);
        let root = client.attach(b"dir").unwrap();
        let local = |name: &str| setup.data.join(name);
        std::fs::write(local("file"), b"before").unwrap();
        std::fs::create_dir(local("folder")).unwrap();
        std::fs::write(local("folder/inside"), b"x").unwrap();
        let file = root.open(b"file", WRITE, 0).unwrap();
        let folder = root.open(b"folder", 0, 0).unwrap();

        // Both are removed on the server's machine.
        std::fs::remove_file(local("file")).unwrap();
        std::fs::remove_dir_all(local("folder")).unwrap();
        let mut bytes = [0; 10];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 6);
        assert_eq!(file.write_at(b"more", 6).unwrap(), 4);
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 10);
        assert_eq!(&bytes, b"beforemore");
        let attr = file.stat().unwrap();
        assert_eq!((attr.links, attr.size), (0, 10));
        assert_eq!(errno(root.stat_path(b"file", true)), Errno::ENOENT);
        assert_eq!(errno(root.read_path(b"file", 0, &mut bytes)), Errno::ENOENT);
        assert_eq!(errno(root.unlink(b"file", false)), Errno::ENOENT);
        assert_eq!(errno(root.stat_path(b"folder/inside", true)), Errno::ENOENT);
        assert_eq!(errno(folder.write_path(b"new", CREATE, 0o600, b"")), Errno::ENOENT);
        assert_eq!(folder.stat().unwrap().links, 0);
        // As for a local program, a directory removed while open has no entries or fails with
        // ENOENT, depending on the file system.
        match folder.list_all(true) {
            Ok(entries) => assert!(entries.iter().all(|e| e.name == b"." || e.name == b"..")),
            Err(error) => assert_eq!(error.errno(), Errno::ENOENT),
        }

        // Another file takes the name: open handles keep the old file, and the name means the new
        // one.
        std::fs::write(local("next"), b"after").unwrap();
        std::fs::rename(local("next"), local("file")).unwrap();
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 10);
        assert_eq!(root.read_path(b"file", 0, &mut bytes).unwrap(), 5);
        assert_eq!(&bytes[..5], b"after");

        // A file takes the place of a directory, and the other way round.
        std::fs::create_dir(local("deep")).unwrap();
        root.write_path(b"deep/file", CREATE, 0o600, b"y").unwrap();
        std::fs::remove_dir_all(local("deep")).unwrap();
        std::fs::write(local("deep"), b"").unwrap();
        assert_eq!(errno(root.read_path(b"deep/file", 0, &mut bytes)), Errno::ENOTDIR);
        std::fs::remove_file(local("deep")).unwrap();
        std::fs::remove_file(local("file")).unwrap();
    }
}

#[test]
fn an_export_that_vanishes_and_comes_back_is_found_again() {
    let setup = setup(EngineWish::Automatic);
    let aside = setup.data.with_extension("aside");
    std::fs::write(setup.data.join("file"), b"old").unwrap();
    let client = setup.client();
    let root = client.attach(b"dir").unwrap();
    let mut bytes = [0; 10];
    // The server holds the directory itself, not its name: once moved away, it is still the export.
    std::fs::rename(&setup.data, &aside).unwrap();
    assert_eq!(root.read_path(b"file", 0, &mut bytes).unwrap(), 3);
    assert_eq!(setup.client().attach(b"dir").unwrap().list_all(false).unwrap().len(), 1);
    // Once removed, it has no names and takes none.
    std::fs::remove_dir_all(&aside).unwrap();
    assert_eq!(errno(root.read_path(b"file", 0, &mut bytes)), Errno::ENOENT);
    assert_eq!(errno(root.write_path(b"new", CREATE, 0o600, b"")), Errno::ENOENT);
    // The other exports are served as before.
    client.attach(b"mem").unwrap().write_path(b"file", CREATE, 0o600, b"fine").unwrap();
}

/// Checks that every call that would change something fails with `wanted`.
fn refuses_every_change(root: &File, wanted: Errno) {
    let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    let results = [
        ("create", errno(root.open(b"new", CREATE, 0o600))),
        ("create alone", errno(root.open(b"new", CREATE | EXCLUSIVE, 0o600))),
        ("truncating open", errno(root.open(b"file", WRITE | TRUNCATE, 0))),
        ("open for writing", errno(root.open(b"file", WRITE, 0))),
        ("write", errno(root.write_path(b"file", WRITE, 0, b"x"))),
        ("long write", errno(root.write_path(b"file", WRITE, 0, &[1; 1 << 20]))),
        ("mkdir", errno(root.make_directory(b"newdir", 0o700))),
        ("mknod", errno(root.make_node(b"pipe", 0o010_600, 0))),
        ("symlink", errno(root.symlink(b"sym", b"file"))),
        ("link", errno(root.link(b"file", false, root, b"second"))),
        ("rename", errno(root.rename(b"file", root, b"moved", 0))),
        ("unlink", errno(root.unlink(b"file", false))),
        ("rmdir", errno(root.unlink(b"folder", true))),
        ("chmod", errno(root.set_attr(b"file", true, &set))),
        ("truncate", errno(root.set_attr(b"file", true, &cut))),
        ("setxattr", errno(root.set_xattr(b"file", true, b"user.a", b"v", 0))),
    ];
    for (what, found) in results {
        assert_eq!(found, wanted, "{what}");
    }
}

#[test]
fn a_read_only_export_refuses_every_change() {
    let setup = setup(EngineWish::Automatic);
    std::fs::write(setup.data.join("file"), b"kept").unwrap();
    std::fs::create_dir(setup.data.join("folder")).unwrap();
    setup.client().attach(b"dir").unwrap().make_node(b"fifo", 0o010_666, 0).unwrap();
    for transport in &setup.transports {
        let client = connect(transport);
        let root = client.attach(b"ro").unwrap();
        refuses_every_change(&root, Errno::EROFS);
        // As on a read-only mount, other errors come first: `mkdir -p` relies on that.
        assert_eq!(errno(root.make_directory(b"folder", 0o700)), Errno::EEXIST);
        assert_eq!(errno(root.make_directory(b"missing/newdir", 0o700)), Errno::ENOENT);
        assert_eq!(errno(root.symlink(b"file", b"x")), Errno::EEXIST);
        assert_eq!(errno(root.link(b"file", false, &root, b"file")), Errno::EEXIST);
        assert_eq!(errno(root.open(b"folder", WRITE, 0)), Errno::EISDIR);
        assert_eq!(errno(root.open(b"missing/new", CREATE, 0o600)), Errno::ENOENT);
        let mut bytes = [0; 10];
        assert_eq!(root.read_path(b"file", 0, &mut bytes).unwrap(), 4);
        assert_eq!(&bytes[..4], b"kept");
        assert_eq!(errno(root.access(b"file", 2)), Errno::EROFS);
        root.access(b"file", 4).unwrap();
        let mut names: Vec<_> =
            root.list_all(false).unwrap().into_iter().map(|entry| entry.name).collect();
        names.sort();
        assert_eq!(names, [&b"fifo"[..], b"file", b"folder"]);
        // Writing to a pipe does not change the export; the server leaves opening it to the client.
        root.access(b"fifo", 2).unwrap();
        assert_eq!(errno(root.open(b"fifo", WRITE, 0)), Errno::ENXIO);
        // Nor through another export of the same directory, which is writable.
        let writable = client.attach(b"dir").unwrap();
        // As between a writable and a read-only mount of one file system.
        assert_eq!(errno(writable.rename(b"file", &root, b"moved", 0)), Errno::EXDEV);
        assert_eq!(errno(root.rename(b"file", &writable, b"moved", 0)), Errno::EXDEV);
        assert_eq!(errno(writable.link(b"file", false, &root, b"second")), Errno::EROFS);
        assert_eq!(errno(root.link(b"file", false, &writable, b"second")), Errno::EXDEV);
        let (from, to) = (writable.open(b"file", 0, 0).unwrap(), root.open(b"file", 0, 0).unwrap());
        assert_eq!(errno(from.copy_range(0, &to, 10, 1)), Errno::EROFS);
    }
}

/// A server whose clients act as themselves, except that root acts as `nobody`.
fn squashing(data: &Path) -> (Server, Client) {
    let config = Config {
        exports: vec![Export::new("dir", ExportKind::Directory(data.to_owned()))],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap()],
        identity: true,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let client = connect(&Transport::Tcp(address.ip().to_string(), address.port()));
    (server, client)
}

fn is_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(&format!("{what}: only root can do that"));
    }
    root
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn what_a_user_may_not_do_locally_it_may_not_do_here() {
    if !is_root("permissions of another user") {
        return;
    }
    let directory = TempDir::new().unwrap();
    let local = |name: &str| directory.path().join(name);
    mode(directory.path(), 0o755);
    std::fs::write(local("file"), b"readable").unwrap();
    mode(&local("file"), 0o644);
    std::fs::write(local("secret"), b"not").unwrap();
    mode(&local("secret"), 0o600);
    for (name, bits) in [("closed", 0o700), ("open", 0o777), ("folder", 0o755)] {
        std::fs::create_dir(local(name)).unwrap();
        mode(&local(name), bits);
    }
    std::fs::write(local("closed/inside"), b"not").unwrap();
    let (_server, client) = squashing(directory.path());
    let root = client.attach(b"dir").unwrap();
    let mut bytes = [0; 10];
    assert_eq!(root.read_path(b"file", 0, &mut bytes).unwrap(), 8);
    assert_eq!(errno(root.read_path(b"secret", 0, &mut bytes)), Errno::EACCES);
    assert_eq!(errno(root.open(b"secret", WRITE, 0)), Errno::EACCES);
    assert_eq!(errno(root.stat_path(b"closed/inside", true)), Errno::EACCES);
    assert_eq!(errno(root.open(b"closed", 0, 0).and_then(|f| f.list_all(true))), Errno::EACCES);
    assert_eq!(errno(root.access(b"secret", 4)), Errno::EACCES);
    for (what, found) in [
        ("create", errno(root.open(b"new", CREATE, 0o600))),
        ("write", errno(root.write_path(b"file", WRITE, 0, b"x"))),
        ("mkdir", errno(root.make_directory(b"newdir", 0o700))),
        ("symlink", errno(root.symlink(b"sym", b"file"))),
        ("rename", errno(root.rename(b"file", &root, b"moved", 0))),
        ("unlink", errno(root.unlink(b"file", false))),
        ("rmdir", errno(root.unlink(b"folder", true))),
    ] {
        assert_eq!(found, Errno::EACCES, "{what}");
    }
    let set = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    assert_eq!(errno(root.set_attr(b"file", true, &set)), Errno::EPERM);
    // Where everybody may write, a file belongs to its creator.
    root.write_path(b"open/mine", CREATE, 0o600, b"mine").unwrap();
    let attr = root.stat_path(b"open/mine", true).unwrap();
    assert_eq!((attr.uid, attr.gid), (65534, 65534));
    root.unlink(b"open/mine", false).unwrap();
}

/// Locked while a program is started: until its process executes it, that has a copy of every descriptor of
/// this process, the server's among them, so that the space of a file removed and closed here is not free.
static STARTING: Mutex<()> = Mutex::new(());

fn starting() -> MutexGuard<'static, ()> {
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program without input.
fn output(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let guard = starting();
    let child = command.spawn()?;
    drop(guard);
    child.wait_with_output()
}

/// A mounted file system, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    /// Returns `None`, and reports it, if nothing can be mounted (as in most containers).
    fn new(what: &str, at: &Path, arguments: &[&str]) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        match output(Command::new("mount").args(arguments).arg(at)) {
            Ok(output) if output.status.success() => Some(Self(at.to_owned())),
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr);
                skipped(&format!("{what}: {}", why.lines().next().unwrap_or_default()));
                None
            }
            Err(error) => {
                skipped(&format!("{what}: mount: {error}"));
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = output(Command::new("umount").arg("-l").arg(&self.0));
    }
}

/// Writes until there is no more room; returns the number of bytes written.
fn fill(root: &File, name: &[u8], step: usize, wanted: Errno) -> u64 {
    let file = root.open(name, CREATE, 0o600).unwrap();
    let bytes = pattern(step, 6);
    let mut written = 0;
    loop {
        match file.write_at(&bytes, written) {
            Ok(0) => panic!("a write of nothing"),
            Ok(count) => written += count as u64,
            Err(error) => {
                assert_eq!(error.errno(), wanted);
                break;
            }
        }
        assert!(written < 64 << 20, "no limit was met");
    }
    // Everything reported as written is there.
    assert_eq!(file.stat().unwrap().size, written);
    let mut back = vec![0; step];
    for start in (0..written).step_by(step) {
        let count = file.read_at(&mut back, start).unwrap();
        assert_eq!(count as u64, (written - start).min(step as u64));
        assert!(back[..count] == bytes[..count], "at {start}");
    }
    file.close().unwrap();
    written
}

#[test]
fn a_full_disk_says_so_and_loses_nothing() {
    if !is_root("a full disk") {
        return;
    }
    let directory = TempDir::new().unwrap();
    let place = directory.path().join("mounted");
    let options = ["-t", "tmpfs", "-o", "size=6m,nr_inodes=40,mode=777", "tmpfs"];
    let Some(mounted) = Mounted::new("a full disk", &place, &options) else { return };
    let (server, client) = squashing(&mounted.0);
    let root = client.attach(b"dir").unwrap();
    root.write_path(b"kept", CREATE, 0o600, &pattern(1 << 20, 1)).unwrap();
    let guard = starting();
    // Inline writes, and writes in fragments.
    for step in [10_000, 3_000_000] {
        let written = fill(&root, b"full", step, Errno::ENOSPC);
        assert!(written > 4 << 20, "{written} bytes in 5 MiB");
        assert_eq!(root.stat_fs().unwrap().blocks_free, 0);
        let more = root.open(b"more", CREATE, 0o600).unwrap();
        assert_eq!(errno(more.allocate(0, 0, 2 << 20)), Errno::ENOSPC);
        assert_eq!(errno(more.append(&[1; 100_000])), Errno::ENOSPC);
        // A name takes no page here, so a file can still be made and removed.
        root.unlink(b"more", false).unwrap();
        root.unlink(b"full", false).unwrap();
    }
    drop(guard);
    // Without free inodes there are no new names, but old files grow.
    let mut made = 0;
    let full = loop {
        match root.open(format!("f{made}").as_bytes(), CREATE | EXCLUSIVE, 0o600) {
            Ok(file) => file.close().unwrap(),
            Err(error) => break error.errno(),
        }
        made += 1;
        assert!(made < 100, "no limit was met");
    };
    assert_eq!(full, Errno::ENOSPC);
    assert_eq!(errno(root.make_directory(b"newdir", 0o700)), Errno::ENOSPC);
    root.write_path(b"f0", WRITE, 0, b"some").unwrap();
    let mut back = vec![0; 1 << 20];
    assert_eq!(root.read_path(b"kept", 0, &mut back).unwrap(), 1 << 20);
    assert!(back == pattern(1 << 20, 1), "what was there before is damaged");
    drop(root);
    client.close();
    server.stop();
}

/// Limits the user `nobody` to `blocks` blocks of 1 KiB on the file system of a device.
fn limit_blocks(device: &str, blocks: u64) -> std::io::Result<()> {
    const USER: libc::c_int = 0;
    const NOBODY: libc::c_int = 65534;
    /// `QIF_BLIMITS`.
    const LIMITS_OF_BLOCKS: u32 = 1;
    let device = std::ffi::CString::new(device).unwrap();
    // SAFETY: the structure holds numbers only.
    let mut limits: libc::dqblk = unsafe { std::mem::zeroed() };
    limits.dqb_bhardlimit = blocks;
    limits.dqb_valid = LIMITS_OF_BLOCKS;
    // SAFETY: the device is a string, and the limits are a structure of the kind that this command
    // reads.
    let done = unsafe {
        libc::quotactl(
            libc::QCMD(libc::Q_SETQUOTA, USER),
            device.as_ptr(),
            NOBODY,
            std::ptr::from_mut(&mut limits).cast(),
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Runs a program; returns false if it does not exist or fails.
fn run(program: &str, arguments: &[&str]) -> bool {
    output(Command::new(program).args(arguments)).is_ok_and(|output| output.status.success())
}

/// A file system on which `nobody` may use 4 MiB: ext4 with a quota for that user.
fn with_quota_of_user(image: &Path, place: &Path) -> Option<Mounted> {
    const WHAT: &str = "the quota of a user on ext4";
    let text = image.to_str().unwrap();
    if !run("mkfs.ext4", &["-q", "-O", "quota", "-E", "quotatype=usrquota", text]) {
        skipped(&format!("{WHAT}: no mkfs.ext4 that knows quotas"));
        return None;
    }
    let mounted = Mounted::new(WHAT, place, &["-o", "loop,usrquota", text])?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let found = mounts.lines().find(|line| line.split(' ').nth(1) == place.to_str());
    let device = found.and_then(|line| line.split(' ').next()).unwrap();
    if let Err(error) = limit_blocks(device, 4096) {
        skipped(&format!("{WHAT}: this kernel keeps none: {error}"));
        return None;
    }
    Some(mounted)
}

/// A file system on which all users together may use 4 MiB: btrfs with a limit on its subvolume.
fn with_quota_of_tree(image: &Path, place: &Path) -> Option<Mounted> {
    const WHAT: &str = "the quota of a subvolume on btrfs";
    let text = image.to_str().unwrap();
    if !run("mkfs.btrfs", &["-q", "-f", text]) {
        skipped(&format!("{WHAT}: no mkfs.btrfs (apt-get install btrfs-progs)"));
        return None;
    }
    let mounted = Mounted::new(WHAT, place, &["-o", "loop", text])?;
    let at = place.to_str().unwrap();
    if !run("btrfs", &["quota", "enable", at])
        || !run("btrfs", &["qgroup", "limit", "4M", "0/5", at])
    {
        skipped(&format!("{WHAT}: this kernel keeps none"));
        return None;
    }
    Some(mounted)
}

#[test]
fn a_quota_that_is_used_up_says_so_and_loses_nothing() {
    if !is_root("a used up quota") {
        return;
    }
    for prepare in [with_quota_of_user, with_quota_of_tree] {
        let directory = TempDir::new().unwrap();
        let (image, place) = (directory.path().join("image"), directory.path().join("mounted"));
        std::fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
        let Some(mounted) = prepare(&image, &place) else { continue };
        mode(&mounted.0, 0o777);
        let (server, client) = squashing(&mounted.0);
        let root = client.attach(b"dir").unwrap();
        root.write_path(b"kept", CREATE, 0o600, &pattern(1 << 20, 1)).unwrap();
        let guard = starting();
        for step in [10_000, 2_000_000] {
            let written = fill(&root, b"full", step, Errno::EDQUOT);
            assert!((1 << 20..=3 << 20).contains(&written), "{written} bytes in 3 MiB");
            root.unlink(b"full", false).unwrap();
            // Some file systems release freed space only now.
            root.sync(sync_kind::FILE_SYSTEM).unwrap();
        }
        root.write_path(b"again", CREATE, 0o600, &pattern(1 << 20, 2)).unwrap();
        drop(guard);
        let mut back = vec![0; 1 << 20];
        assert_eq!(root.read_path(b"kept", 0, &mut back).unwrap(), 1 << 20);
        assert!(back == pattern(1 << 20, 1), "what was there before is damaged");
        drop(root);
        client.close();
        server.stop();
    }
}
