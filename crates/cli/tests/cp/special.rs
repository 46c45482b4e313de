//! Sources and targets that are no ordinary files: devices, FIFOs, files without a size, standard output.

use crate::support::{TOWLINE, World, bad, good, noise, run, text, wait_until};
use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn devices_and_pipes_are_read_and_written_in_place() {
    let world = World::new();
    let source = world.local("source");
    fs::write(&source, noise(3 << 20, 5)).unwrap();
    good(&["cp", source.to_str().unwrap(), &world.url("mem/source")]);
    good(&["cp", &world.url("mem/source"), "/dev/null"]);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    let out = good(&["cp", &world.url("mem/source"), "/dev/stdout"]);
    assert!(out == noise(3 << 20, 5));
    // A closed stream is replaced by a directory: nothing may be created in it.
    let script = "exec \"$0\" cp \"$1\" /dev/stdout >&-";
    let closed =
        Command::new("sh").args(["-c", script, TOWLINE, &world.url("mem/source")]).output();
    let complaint = String::from_utf8(closed.unwrap().stderr).unwrap();
    assert!(complaint.contains("/dev/stdout: bad file descriptor"), "{complaint}");
    let target = world.url("mem/piped");
    let mut copy = Command::new(TOWLINE)
        .args(["cp", "/dev/stdin", &target])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    copy.stdin.take().unwrap().write_all(b"through a pipe").unwrap();
    assert!(copy.wait().unwrap().success());
    assert_eq!(text(&["cat", &target]), "through a pipe");
    // What cannot be read twice is not said to be compared.
    let none = world.url("mem/none");
    for (from, to) in [("/dev/stdin", none.as_str()), (target.as_str(), "/dev/stdout")] {
        let complaint = bad(1, &["cp", "--verify", from, to]);
        assert!(complaint.contains("--verify cannot compare"), "{complaint}");
    }
    bad(1, &["stat", &none]);
    // Servers open neither; nobody waits.
    let (fifo, place) = (world.url("dir/fifo"), world.local("served/fifo"));
    rustix::fs::mknodat(CWD, &place, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (from, to) in [(fifo.as_str(), "/dev/null"), (source.to_str().unwrap(), fifo.as_str())] {
        let complaint = bad(1, &["cp", from, to]);
        assert!(complaint.contains("no such device or address"), "{complaint}");
    }
}

/// As links do.
#[test]
fn fifos_replace_files_and_links_but_not_directories() {
    let world = World::new();
    let (source, target) = (world.local("source"), world.local("served/target"));
    for directory in [&source, &target, &target.join("directory")] {
        fs::create_dir(directory).unwrap();
    }
    let names = ["file", "link", "fifo", "directory"];
    for name in names {
        let mode = Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(CWD, source.join(name), FileType::Fifo, mode, 0).unwrap();
    }
    fs::write(target.join("file"), "old").unwrap();
    fs::write(target.join("other"), "other").unwrap();
    symlink("other", target.join("link")).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, target.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    let from = format!("{}/.", source.display());
    for _ in 0..2 {
        let complaint = bad(1, &["cp", "-a", &from, &world.url("dir/target")]);
        assert!(complaint.contains("/directory: is a directory and cannot be replaced by a fifo"));
        for name in &names[..3] {
            let found = fs::symlink_metadata(target.join(name)).unwrap();
            assert!(found.file_type().is_fifo() && found.mode() & 0o777 == 0o644, "{name}");
        }
        assert_eq!(fs::read(target.join("other")).unwrap(), b"other");
        assert_eq!(fs::read_dir(&target).unwrap().count(), 5, "nothing else");
    }
}

#[test]
fn a_file_to_which_standard_output_goes_is_not_replaced() {
    let world = World::new();
    // Like `/dev/stdout`, which a test must not put at risk.
    let (link, out) = (world.local("link"), world.local("out"));
    symlink("/proc/self/fd/1", &link).unwrap();
    let script = "\"$0\" cp \"$1\" \"$2\" && rm \"$3\" && \"$0\" cp \"$1\" \"$2\" && printf end";
    for (length, appends) in [(10, true), (20 << 20, false)] {
        let data = noise(length, 7);
        fs::write(world.local("served/source"), &data).unwrap();
        fs::write(&out, "before").unwrap();
        let mut opened = fs::OpenOptions::new();
        let mut file = opened.read(true).write(true).append(appends).open(&out).unwrap();
        let status = Command::new("sh")
            .args(["-c", script, TOWLINE, &world.url("dir/source")])
            .args([&link, &out])
            .stdout(file.try_clone().unwrap())
            .status()
            .unwrap();
        assert!(status.success() && fs::symlink_metadata(&link).unwrap().is_symlink());
        let mut written = Vec::new();
        file.seek(std::io::SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut written).unwrap();
        let before = if appends { &b"before"[..] } else { b"" };
        assert!(written == [before, &data, &data, b"end"].concat(), "{length}: {}", written.len());
    }
    let link = world.local("other");
    symlink("/proc/self/fd/3", &link).unwrap();
    let script = "exec 3>\"$3\" && rm \"$3\" && \"$0\" cp \"$1\" \"$2\"";
    let output = Command::new("sh")
        .args(["-c", script, TOWLINE, &world.url("dir/source")])
        .args([&link, &out])
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("/other: no such file or directory"), "{complaint}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

/// The size of a file that the kernel generates when it is read means nothing.
#[test]
fn files_whose_size_says_nothing_are_copied_to_their_end() {
    let world = World::new();
    let target = world.local("copy");
    for name in ["version", "kallsyms"] {
        let Ok(expected) = fs::read(Path::new("/proc").join(name)) else {
            println!("SKIPPED /proc/{name}: it cannot be read");
            continue;
        };
        good(&["cp", &format!("/proc/{name}"), &world.url("dir/copy")]);
        good(&["cp", &world.url("dir/copy"), target.to_str().unwrap()]);
        assert_eq!(fs::metadata(&target).unwrap().len(), expected.len() as u64, "{name}");
        assert!(fs::read(&target).unwrap() == expected, "{name}");
    }
}

/// Files in `/sys` have the size of a page, but hold few bytes.
#[test]
fn files_that_end_before_their_size_are_copied_and_summed() {
    let source = Path::new("/sys/kernel/mm/transparent_hugepage");
    let read = |name: &str| fs::read(source.join(name));
    let Ok(expected) = read("enabled") else {
        return println!("SKIPPED files of /sys: there are none");
    };
    assert!(fs::metadata(source.join("enabled")).unwrap().len() > expected.len() as u64);
    let world = World::new();
    let (copy, file) = (world.url("dir/copy"), source.join("enabled"));
    let file = file.to_str().unwrap();
    good(&["cp", file, &copy]);
    assert_eq!(good(&["cat", &copy]), expected);
    let crc = |name: &str| text(&["sum", name]).split_once("  ").unwrap().0.to_owned();
    assert_eq!(crc(file).split(' ').next(), crc(&copy).split(' ').next());
    let complaint = bad(1, &["cp", "--verify", file, &world.url("dir/verified")]);
    assert!(complaint.contains("its size is unknown"), "{complaint}");
    // So is a file of unknown size, and one that consists only of a hole.
    text(&["sum", "/proc/version"]);
    let hole = world.local("hole");
    fs::File::create(&hole).unwrap().set_len(100_000).unwrap();
    good(&["cp", hole.to_str().unwrap(), &copy]);
    assert_eq!(good(&["cat", &copy]), vec![0; 100_000]);
}

/// As from some FUSE file systems, where one read yields only a part of what is there.
#[test]
fn files_that_are_read_in_short_pieces_are_copied_whole() {
    let world = World::new();
    let (mounted, socket) = (world.local("mounted"), world.local("short"));
    fs::create_dir(&mounted).unwrap();
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/short_reads.py");
    let mut file_system =
        Command::new("python3").arg(program).arg(&mounted).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 8];
    if file_system.stdout.take().unwrap().read_exact(&mut said).is_err() {
        file_system.wait().unwrap();
        return eprintln!("SKIPPED: no FUSE file system can be mounted here");
    }
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--dir", &format!("e={}", mounted.display())])
        .args(["--listen", &format!("unix://{}", socket.display())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server listens", || UnixStream::connect(&socket).is_ok());
    let copy = world.local("copy");
    let url = format!("towline+unix:///e/f?socket={}", socket.display());
    let output = run(&["cp", "--verify", &url, copy.to_str().unwrap()]);
    let (copied, expected) = (fs::read(&copy), fs::read(mounted.join("f")));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(Command::new("umount").arg("-l").arg(&mounted).status().unwrap().success());
    file_system.kill().unwrap();
    file_system.wait().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(expected.as_ref().unwrap().len(), 200_000);
    assert!(copied.unwrap() == expected.unwrap());
}

/// Like any other files in a tree, wherever the links lead.
#[test]
fn links_are_replaced_by_files_whose_size_says_nothing() {
    let source = Path::new("/proc/sys/kernel/keys/maxkeys");
    let Ok(expected) = fs::read(source) else {
        return println!("SKIPPED {source:?}: it cannot be read");
    };
    let world = World::new();
    let (tree, place) = (world.url("dir/tree"), world.url("dir/tree/keys/maxkeys"));
    good(&["mkdir", "-p", &world.url("dir/tree/keys")]);
    good(&["ln", "-s", ".", &place]);
    good(&["cp", "-r", source.parent().unwrap().to_str().unwrap(), &tree]);
    assert_eq!(text(&["cat", &place]).as_bytes(), expected);
}
