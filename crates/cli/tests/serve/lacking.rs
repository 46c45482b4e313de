//! Servers that lack descriptors, room, terminals: what can be done is done, the rest ends with an error.

use crate::Serving;
use crate::support::{TOWLINE, World, bad, good, noise, text};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// With many clients at once on a server with few descriptors, each is served or gets an error. Clients being
/// served do not hold on to resources while they wait for more.
#[test]
fn clients_of_a_server_without_descriptors_come_to_an_end() {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("file"), vec![1; 4 << 20]).unwrap();
    let script = "ulimit -n 64; exec \"$0\" serve --dir \"$1\" --listen tcp://127.0.0.1:0";
    let export = format!("d={}", directory.path().display());
    let mut server = Serving::new(
        Command::new("sh").args(["-c", script, TOWLINE, &export]).stdin(Stdio::null()),
    );
    let line = server.says("listening on tcp://");
    let address = line.split("tcp://").nth(1).unwrap().split(' ').next().unwrap();
    let url = format!("towline://{address}/d/file");
    let began = std::time::Instant::now();
    let clients: Vec<Child> = (0..80)
        .map(|_| {
            let mut command = Command::new("timeout");
            command.args(["90", TOWLINE, "cp", &url, "/dev/null"]).stderr(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let mut served = 0;
    for client in clients {
        let output = client.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let told = output.status.code() == Some(1) && said.contains("too many open files");
        assert!(output.status.success() || told, "{:?}: {said}", output.status);
        served += usize::from(output.status.success());
    }
    assert!(served > 0);
    // Each core logs this at most once a minute.
    let told = server.end().matches("cannot accept connections").count() as u64;
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    assert!(told <= cores * (1 + began.elapsed().as_secs() / 60), "told {told} times");
}

/// A server and a command continue when nothing can be printed, because the disk with their log is full.
#[test]
fn where_nothing_can_be_told_all_goes_on() {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--mem", "m=1M", "--listen"])
        .arg(format!("unix://{}", socket.display()))
        .stdin(Stdio::null())
        .stderr(full())
        .spawn()
        .unwrap();
    let at = |path: &str| format!("towline+unix:///{path}?socket={}", socket.display());
    crate::support::wait_until("the server listens", || {
        assert_eq!(server.try_wait().unwrap(), None, "the server ended");
        socket.exists()
    });
    good(&["mkdir", &at("m/a")]);
    let mut command = Command::new(TOWLINE);
    command.args(["mkdir", &at("m/a"), &at("m/b")]).stderr(full());
    assert_eq!(command.status().unwrap().code(), Some(1), "a is there");
    assert_eq!(text(&["ls", &at("m")]), "a\nb\n");
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
}

/// A client that has no descriptors for shared memory works without it.
#[test]
fn clients_without_descriptors_come_to_an_end() {
    let world = World::new();
    fs::write(world.local("served/file"), b"contents").unwrap();
    let mut served = 0;
    for (limit, transport) in (4..12).flat_map(|n| ["tcp", "shm"].map(|transport| (n, transport))) {
        let script = "ulimit -n $2; exec timeout 50 \"$0\" cat \"$1\"";
        let url = world.through(transport, "dir/file");
        let output = Command::new("sh")
            .args(["-c", script, TOWLINE, &url, &limit.to_string()])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let told = output.status.code() == Some(1) && said.contains("oo many open files");
        let good = output.status.success() && output.stdout == b"contents";
        assert!(good || told, "{limit} {transport}: {:?}: {said}", output.status);
        served += usize::from(good);
    }
    assert!(served > 0);
}

/// Names are bytes, and a stack of 64 KiB (`ulimit -s`) is enough for the server and all commands.
#[test]
fn a_directory_of_any_name_is_served_on_a_short_stack() {
    let directory = TempDir::new().unwrap();
    let name = OsStr::from_bytes(b"\xff\\:\xc3");
    let (served, socket) = (directory.path().join(name), directory.path().join("socket"));
    fs::create_dir(&served).unwrap();
    fs::write(served.join("file"), noise(200_000, 1)).unwrap();
    let short = |arguments: &[&OsStr]| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -s 64; exec \"$0\" \"$@\"", TOWLINE]).args(arguments);
        command.stdin(Stdio::null());
        command
    };
    let escaped = b"d=".iter().chain(served.as_os_str().as_bytes()).flat_map(|byte| match byte {
        b'\\' | b':' => vec![b'\\', *byte],
        byte => vec![*byte],
    });
    let export = OsString::from_vec(escaped.collect());
    let listen = format!("unix://{}", socket.display());
    let mut server = Serving::new(&mut short(&[
        "serve".as_ref(),
        "--dir".as_ref(),
        &export,
        "--listen".as_ref(),
        listen.as_ref(),
    ]));
    server.says("listening on unix://");
    let url = |path: &str| format!("towline+unix:///{path}?socket={}", socket.display());
    let done = |arguments: &[&str]| {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        let output = short(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {}, {said}", output.status);
        output.stdout
    };
    assert_eq!(done(&["ls", &url("d")]), b"file\n");
    assert_eq!(done(&["cat", &url("d/file")]), noise(200_000, 1));
    done(&["cp", &url("d/file"), directory.path().join("back").to_str().unwrap()]);
    assert_eq!(fs::read(directory.path().join("back")).unwrap(), noise(200_000, 1));
    for arguments in [&["stat", &url("d/file")][..], &["sum", &url("d/file")], &["df", &url("d")]] {
        assert!(!done(arguments).is_empty());
    }
    done(&["mkdir", &url("d/new")]);
    done(&["mv", &url("d/file"), &url("d/new/file")]);
    done(&["cp", "-r", &url("d/new"), &url("d/copy")]);
    done(&["rm", "-r", &url("d/copy"), &url("d/new")]);
    done(&["--help"]);
    done(&["bench", "limits", "--help"]);
    done(&["doctor"]);
    // Errors end with the usual status.
    let status = short(&["ls".as_ref()]).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(2));
    assert_eq!(fs::read_dir(&served).unwrap().count(), 0);
    server.end();
}

/// Writing beyond the limit on file sizes is an error that ends neither the server nor the client.
#[test]
fn the_limit_of_file_sizes_is_told() {
    let world = World::new();
    let large = world.local("large");
    fs::write(&large, noise(3 << 20, 1)).unwrap();
    fs::create_dir(world.local("limited")).unwrap();
    let limited = |arguments: &[&str]| {
        let mut command = Command::new("sh");
        // In units of 512 bytes, or 1024 in some shells; the limit lies within a piece.
        command.args(["-c", "ulimit -f 2148; exec \"$0\" \"$@\"", TOWLINE]).args(arguments);
        command.stdin(Stdio::null());
        command
    };
    let export = format!("dir={}", world.local("limited").display());
    let mut server =
        Serving::new(&mut limited(&["serve", "--dir", &export, "--listen", "tcp://127.0.0.1:0"]));
    let line = server.says("listening on tcp://");
    let address = line.split("tcp://").nth(1).unwrap().split(' ').next().unwrap();
    for _ in 0..2 {
        let target = format!("towline://{address}/dir/copy");
        let said = bad(1, &["cp", large.to_str().unwrap(), &target]);
        assert!(said.contains("file too large"), "{said}");
    }
    assert!(!world.local("limited/copy").exists());
    server.end();
    good(&["cp", large.to_str().unwrap(), &world.url("dir/large")]);
    let (back, url) = (world.local("back"), world.url("dir/large"));
    let output = limited(&["cp", &url, back.to_str().unwrap()]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("file too large"), "{said}");
    assert!(!back.exists());
}

/// A file of sessions that somebody shortens ends the server, which says what happened and where.
#[test]
fn a_state_that_was_shortened_is_told_at_the_end() {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let state = directory.path().join("state");
    let mut command = Command::new(TOWLINE);
    command.args(["serve", "--mem", "m=1M", "--listen", &format!("unix://{}", socket.display())]);
    let mut server = Serving::new(command.arg("--state").arg(&state).stdin(Stdio::null()));
    server.says("listening on unix://");
    let sessions = state.join("sessions");
    fs::OpenOptions::new().write(true).open(&sessions).unwrap().set_len(0).unwrap();
    let url = format!("towline+unix:///m/d?socket={}", socket.display());
    bad(1, &["mkdir", &url]);
    let mut said = String::new();
    server.complaints.read_to_string(&mut said).unwrap();
    let told = format!("{}: somebody shortened it", sessions.display());
    assert!(said.contains(&told), "{said}");
    assert_eq!(server.child.wait().unwrap().signal(), Some(libc::SIGBUS));
}

/// Such a client may be a program that never leaves, or stand at the other end of a network.
#[test]
fn a_server_for_standard_input_ends_when_told_so() {
    use rustix::process::{Pid, Signal, kill_process};
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Command::new(TOWLINE)
            .args(["serve", "--disk", "d=mem:1M", "--nbd", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        server.stdout.as_mut().unwrap().read_exact(&mut [0; 18]).unwrap();
        kill_process(Pid::from_child(&server), signal).unwrap();
        let mut status = None;
        crate::support::wait_until("it ends", || {
            status = server.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success());
    }
}

#[test]
fn standard_output_that_takes_nothing_ends_the_server() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--disk", "d=mem:1M", "--nbd", "-"])
        .stdin(Stdio::piped())
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Standard input stays open.
    let mut complaint = String::new();
    server.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(1), "{complaint}");
    assert!(complaint.contains("--nbd -: standard output: No space left"), "{complaint}");
}

#[test]
fn metrics_are_there_for_a_client_on_standard_input() {
    let arguments = ["serve", "--disk", "d=mem:1M", "--nbd", "-", "--metrics", "127.0.0.1:0"];
    let mut command = Command::new(TOWLINE);
    let mut server =
        Serving::new(command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()));
    server.says("metrics on http://127.0.0.1:");
    server.end();
}
