//! `towline serve` as administrators use it: service managers, configuration files, signals, Prometheus.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use support::{TOWLINE, World, bad, good, noise, text};
use tempfile::TempDir;

/// How long a server may take to do as told, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Serving {
    child: Child,
    complaints: BufReader<ChildStderr>,
    /// Dropping it ends the thread that limits the server's time.
    _watched: mpsc::Sender<()>,
}

impl Serving {
    fn new(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let complaints = BufReader::new(child.stderr.take().unwrap());
        let pid = rustix::process::Pid::from_child(&child);
        let (watched, end) = mpsc::channel::<()>();
        // A reader that waits too long sees the end of the server's output.
        std::thread::spawn(move || {
            if end.recv_timeout(2 * PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        });
        Self { child, complaints, _watched: watched }
    }

    /// Reads its standard error up to a line with these words, and returns that line.
    fn says(&mut self, words: &str) -> String {
        let mut said = String::new();
        loop {
            let begin = said.len();
            let more = self.complaints.read_line(&mut said).unwrap() > 0;
            assert!(more, "it never said \"{words}\", only: {said}");
            if said[begin..].contains(words) {
                return said.split_off(begin);
            }
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Ends it as a service manager does. Returns the rest of its output.
    fn end(mut self) -> String {
        self.signal(rustix::process::Signal::TERM);
        let mut rest = String::new();
        self.complaints.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
        rest
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command that serves on this socket as a service manager starts it, and with these arguments.
fn managed(listener: TcpListener, arguments: &[&str]) -> Command {
    // Only the process itself knows its number.
    let script = "export LISTEN_PID=$$; exec \"$0\" serve \"$@\" 3<&0 </dev/null";
    let mut command = Command::new("sh");
    command.args(["-c", script, TOWLINE]).args(arguments);
    command.env("LISTEN_FDS", "1").stdin(Stdio::from(OwnedFd::from(listener)));
    command
}

#[test]
fn a_service_manager_gives_the_socket_and_is_told_what_happens() {
    let directory = TempDir::new().unwrap();
    let told = directory.path().join("told");
    let manager = UnixDatagram::bind(&told).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let message = || {
        let mut bytes = [0; 200];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("towline://{}/", listener.local_addr().unwrap());
    let server = Serving::new(managed(listener, &["--mem", "m=1M"]).env("NOTIFY_SOCKET", &told));
    assert_eq!(message(), "READY=1\n");
    assert_eq!(text(&["ls", &url]), "m\n");
    server.signal(rustix::process::Signal::HUP);
    // Without the time, `Type=notify-reload` considers the server dead.
    let reloading = message();
    let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap();
    assert!(time.trim_end().parse::<u64>().unwrap() > 0);
    assert_eq!(message(), "READY=1\n");
    let rest = server.end();
    assert_eq!(message(), "STOPPING=1\n");
    assert!(rest.contains("shutting down"), "{rest}");
}

/// The socket of a service manager takes the place of addresses for the same protocol only.
#[test]
fn a_service_managers_socket_and_addresses_are_served_together() {
    let directory = TempDir::new().unwrap();
    let address = format!("unix://{}/socket", directory.path().display());
    let of_socket = |kind: &str, path: &str| {
        format!("{kind}+unix:///{path}?socket={}/socket", directory.path().display())
    };
    let start = |arguments: &[&str]| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let managed_at = listener.local_addr().unwrap();
        (Serving::new(&mut managed(listener, arguments)), managed_at)
    };
    let (server, at) = start(&["--disk", "d=mem:1M"]);
    assert_eq!(text(&["ls", &format!("towline://{at}")]), "d\tdisk, memory\n");
    server.end();

    let (mut server, at) = start(&["--disk", "d=mem:1M", "--nbd", &address]);
    server.says("listening for NBD on unix://");
    assert!(text(&["disk", "info", &of_socket("nbd", "d")]).contains("size: 1048576 "));
    assert_eq!(text(&["ls", &format!("towline://{at}")]), "d\tdisk, memory\n");
    server.end();

    let both = ["--disk", "d=mem:1M", "--mem", "m=1M", "--nbd", "-", "--listen", &address];
    let (mut server, at) = start(&both);
    server.says("listening on unix://");
    assert!(text(&["disk", "info", &format!("nbd://{at}/d")]).contains("size: 1048576 "));
    assert_eq!(text(&["ls", &of_socket("towline", "")]), "m\nd\tdisk, memory\n");
    server.end();

    // Nobody could reach the files, and no other socket than the manager's is opened unless told so.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let output = managed(listener, &both[..6]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("--nbd -: the sockets"), "{complaint}");
}

/// Nor for known directories: their inotify queues are checked through a ring only where rings are allowed.
#[test]
fn a_server_on_epoll_makes_no_ring() {
    let directory = TempDir::new().unwrap();
    let (served, socket) = (directory.path().join("served"), directory.path().join("socket"));
    fs::create_dir_all(served.join("a/b")).unwrap();
    fs::write(served.join("a/b/file"), "text").unwrap();
    let mut server = Serving::new(
        Command::new(TOWLINE)
            .args(["serve", "--engine", "epoll", "--cores", "1", "--listen"])
            .arg(format!("unix://{}", socket.display()))
            .arg("--dir")
            .arg(format!("d={}", served.display()))
            .stdin(Stdio::null()),
    );
    let said = server.says("listening on unix://");
    assert!(said.ends_with(" (epoll, 1 core)\n"), "{said}");
    let url = |path: &str| format!("towline+unix:///d/{path}?socket={}", socket.display());
    let opened = || {
        let all = fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap();
        all.flatten().filter_map(|fd| fs::read_link(fd.path()).ok()).collect::<Vec<_>>()
    };
    let of = |kind: &str| opened().iter().filter(|to| to.ends_with(kind)).count();
    for _ in 0..3 {
        assert_eq!(text(&["cat", &url("a/b/file"), &url("a/b/file")]), "texttext");
        assert_eq!(text(&["ls", &url("a/b")]), "file\n");
    }
    assert!(of("anon_inode:inotify") > 0, "no directory is known: {:?}", opened());
    assert_eq!(of("anon_inode:[io_uring]"), 0, "{:?}", opened());
}

#[test]
fn a_configuration_file_is_read_and_read_again() {
    let directory = TempDir::new().unwrap();
    let (file, socket) = (directory.path().join("towline.toml"), directory.path().join("socket"));
    let served = directory.path().join("served");
    fs::create_dir(&served).unwrap();
    let head = format!("listen = [\"unix://{}\"]\nbuffer-limit = \"256M\"\n", socket.display());
    let data = format!("[export.data]\ndir = \"{}\"\nread-only = true\n", served.display());
    let more = "[export.more]\nmem = \"1M\"\n";
    fs::write(&file, format!("{head}{data}")).unwrap();
    let mut server = Serving::new(
        Command::new(TOWLINE)
            .args(["serve", "--mem", "flag=1M", "--config"])
            .arg(&file)
            .stdin(Stdio::null()),
    );
    server.says("listening on unix://");
    let url = |path: &str| format!("towline+unix:///{path}?socket={}", socket.display());
    assert_eq!(text(&["ls", &url("")]), "data\nflag\n");
    assert!(bad(1, &["mkdir", &url("data/d")]).contains("ead-only"));

    fs::write(&file, format!("{head}{data}{more}")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    server.says("read the configuration again");
    assert_eq!(text(&["ls", &url("")]), "data\nflag\nmore\n");
    good(&["mkdir", &url("more/kept")]);

    // After a mistake, everything stays as it was. Without one, memory exports keep their contents.
    fs::write(&file, format!("{head}{data}{more}nonsense = 1\n")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    let said = server.says("keeping the old configuration");
    assert!(said.contains("towline.toml: line 8, column 1: unknown field `nonsense`"), "{said}");
    let new = "[export.new]\nmem = \"1M\"\n[export.vm]\ndisk = \"/nowhere\"\n";
    fs::write(&file, format!("{head}{new}")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    server.says("keeping the old configuration: disk \"vm\"");
    assert_eq!(text(&["ls", &url("")]), "data\nflag\nmore\n");
    fs::write(&file, format!("{head}cores = 200\n{data}{more}")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    server.says("its other changes need a new start");
    fs::write(&file, format!("{head}{more}")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    let said = server.says("read the configuration again");
    assert!(!said.contains("new start"), "{said}");
    assert_eq!(text(&["ls", &url("")]), "flag\nmore\n");
    assert_eq!(text(&["ls", &url("more")]), "kept\n");

    // They keep them also when the size changes. A size that is too large is a mistake.
    let kibibytes = |path: &str| text(&["df", &url(path)]).lines().nth(1).unwrap().to_owned();
    for (size, shown) in [("3M", "3072 "), ("512K", "512 "), ("1M", "1024 ")] {
        fs::write(&file, format!("{head}[export.more]\nmem = \"{size}\"\n")).unwrap();
        server.signal(rustix::process::Signal::HUP);
        server.says("read the configuration again");
        assert_eq!(text(&["ls", &url("more")]), "kept\n");
        assert!(kibibytes("more").trim_start().starts_with(shown), "{}", kibibytes("more"));
    }
    fs::write(&file, format!("{head}[export.more]\nmem = \"100G\"\n")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    server.says("its memory can grow to at most");
    assert!(kibibytes("more").trim_start().starts_with("1024 "), "{}", kibibytes("more"));
    server.end();
}

/// Returns a server that listens on a socket and has this configuration.
fn configured(file: &Path, socket: &Path) -> Serving {
    let listen = format!("unix://{}", socket.display());
    let mut command = Command::new(TOWLINE);
    command.args(["serve", "--listen", &listen, "--config"]).arg(file).stdin(Stdio::null());
    let mut server = Serving::new(&mut command);
    server.says("listening on unix://");
    server
}

/// A pipe stands for a file system that hangs.
#[test]
fn a_server_that_waits_for_its_configuration_can_be_stopped() {
    let directory = TempDir::new().unwrap();
    let [file, pipe, socket] = ["towline.toml", "pipe", "socket"].map(|n| directory.path().join(n));
    fs::write(&file, "[export.m]\nmem = \"1M\"\n").unwrap();
    let server = configured(&file, &socket);
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::rename(&pipe, &file).unwrap();
    server.signal(rustix::process::Signal::HUP);
    // Opening it waits for a reader, and the server waits for what is written.
    let _writes = fs::File::options().write(true).open(&file).unwrap();
    assert_eq!(text(&["ls", &format!("towline+unix:///?socket={}", socket.display())]), "m\n");
    server.end();
}

#[test]
fn directories_that_were_replaced_are_opened_again() {
    let directory = TempDir::new().unwrap();
    let (served, socket) = (directory.path().join("served"), directory.path().join("socket"));
    let (gone, file) = (directory.path().join("gone"), directory.path().join("towline.toml"));
    fs::create_dir(&served).unwrap();
    let configure = |limit| {
        let export = format!("[export.d]\ndir = \"{}\"\niops = {limit}\n", served.display());
        fs::write(&file, export).unwrap();
    };
    configure(1000);
    let mut server = configured(&file, &socket);
    let url = |path: &str| format!("towline+unix:///{path}?socket={}", socket.display());
    good(&["mkdir", &url("d/old")]);
    fs::rename(&served, &gone).unwrap();
    let again = |server: &mut Serving| {
        server.signal(rustix::process::Signal::HUP);
        server.says("read the configuration again");
    };
    // There is no directory at the path: the open one is kept, also with other options.
    for limit in [1000, 100] {
        configure(limit);
        server.signal(rustix::process::Signal::HUP);
        let said = server.says("the one that was opened before");
        assert!(said.contains("export \"d\": directory "), "{said}");
        assert!(said.contains("No such file"), "{said}");
        server.says("read the configuration again");
        assert_eq!(text(&["ls", &url("d")]), "old\n");
    }
    fs::create_dir_all(served.join("new")).unwrap();
    assert_eq!(text(&["ls", &url("d")]), "old\n");
    again(&mut server);
    assert_eq!(text(&["ls", &url("d")]), "new\n");
    server.end();
}

#[test]
fn disks_whose_file_is_gone_or_another_are_told() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("image"), [1; 4096]).unwrap();
    let mut server = Serving::new(
        Command::new(TOWLINE)
            .args(["serve", "--disk", &format!("d={}", path("image")), "--listen"])
            .arg(format!("unix://{}", path("socket")))
            .stdin(Stdio::null()),
    );
    server.says("listening on unix://");
    let url = format!("towline+unix:///d?socket={}", path("socket"));
    let holds = |byte: u8| {
        good(&["disk", "copy", &url, &path("back")]);
        assert_eq!(fs::read(path("back")).unwrap(), [byte; 4096]);
        fs::remove_file(path("back")).unwrap();
    };
    fs::rename(path("image"), path("gone")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    let said = server.says("serving what was opened before");
    assert!(said.contains(&format!("disk \"d\": {}: No such file", path("image"))), "{said}");
    server.says("read the configuration again");
    holds(1);
    fs::write(path("image"), [2; 4096]).unwrap();
    holds(1);
    server.signal(rustix::process::Signal::HUP);
    let said = server.says("New clients get it");
    assert!(
        said.contains(&format!("disk \"d\": another file is at {} now", path("image"))),
        "{said}"
    );
    server.says("read the configuration again");
    holds(2);
    server.end();
}

#[test]
fn a_disk_with_other_options_is_the_same_disk() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("image"), vec![0; 1 << 20]).unwrap();
    fs::write(path("data"), vec![7; 1 << 16]).unwrap();
    let configure = |option: &str| {
        let image = path("image");
        let disks = format!(
            "[export.f]\ndisk = \"{image}{option}\"\n[export.m]\ndisk = \"mem:64K{option}\"\n"
        );
        fs::write(
            path("towline.toml"),
            format!("listen = [\"unix://{}\"]\n{disks}", path("socket")),
        )
        .unwrap();
    };
    configure("");
    let mut server = Serving::new(
        Command::new(TOWLINE)
            .args(["serve", "--config", &path("towline.toml")])
            .stdin(Stdio::null()),
    );
    server.says("listening on unix://");
    let url = |disk: &str| format!("towline+unix:///{disk}?socket={}", path("socket"));
    for disk in ["f", "m"] {
        good(&["disk", "copy", &path("data"), &url(disk)]);
    }
    let before = ["f", "m"].map(|disk| text(&["disk", "map", "--written", &url(disk)]));
    assert!(before[0].contains("65536 written") && before[0].contains("unchanged"), "{before:?}");
    configure(":iops=100000");
    server.signal(rustix::process::Signal::HUP);
    server.says("read the configuration again");
    assert_eq!(before, ["f", "m"].map(|disk| text(&["disk", "map", "--written", &url(disk)])));
    good(&["disk", "copy", &url("m"), &path("back")]);
    assert!(fs::read(path("back")).unwrap() == [7; 1 << 16]);
    server.end();
}

/// Starts a server that must refuse to start. Returns its complaint.
fn refused(arguments: &[&str]) -> String {
    refused_with(1, arguments)
}

/// As [`refused`], with this exit status.
fn refused_with(status: i32, arguments: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args(["60", TOWLINE, "serve", "--mem", "m=1M"]).args(arguments);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {complaint}");
    complaint
}

#[test]
fn nobody_else_is_served_unless_told_so() {
    for address in ["tcp://0.0.0.0:0", "tcp://[::]:0"] {
        let complaint = refused(&["--listen", address]);
        assert!(complaint.contains("--insecure"), "{complaint}");
    }
    let complaint = refused(&["--listen", "tcp://127.0.0.1:0", "--metrics", "0.0.0.0:0"]);
    assert!(complaint.contains("--insecure"), "{complaint}");
    let open = ["serve", "--mem", "m=1M", "--listen", "tcp://0.0.0.0:0", "--insecure"];
    let mut server = Serving::new(Command::new(TOWLINE).args(open).stdin(Stdio::null()));
    server.says("listening on tcp://0.0.0.0:");
    server.end();
}

#[test]
fn what_cannot_be_is_refused_with_words() {
    let place = TempDir::new().unwrap();
    let socket = format!("unix://{}", place.path().join("socket").display());
    fs::write(place.path().join("image"), [0; 4096]).unwrap();
    std::os::unix::fs::symlink("image", place.path().join("link")).unwrap();
    let image = |what: &str| what.replace('@', place.path().to_str().unwrap());
    for (arguments, words) in [
        (&["--disk", "d=/dev/null"][..], "d\": /dev/null: neither a file nor a block device\n"),
        (&["--disk", &image("d=stripe:1K:@/image,@/link")], "link: a member twice"),
        (
            &["--disk", &image("d=stripe:8K:@/image")],
            "a member of 4096 bytes is smaller than a chunk of 8192",
        ),
        (&["--disk", &image("d=@/image:block=8K")], "is not a multiple of that"),
    ] {
        let complaint = refused(&[&["--listen", &socket], arguments].concat());
        assert!(complaint.contains(words), "{complaint}");
    }
    // What is wrong whatever this machine has is wrong usage.
    for (arguments, words) in [
        (&["--cores", "0"][..], "--cores 0: expected a number from 1"),
        (&["--cores", "257"], "--cores 257: expected"),
        (&["--cores", "3", "--buffer-limit", "1535K"], "3 cores need at least 1536K"),
        (&["--fragment", "1K"], "--fragment 1024: expected"),
        (&["--no-root-squash"], "--no-root-squash: needs --identity"),
        (&["--listen", &socket], "socket: given twice"),
        (&["--disk", "d=mem:1M", "--nbd", &socket], "socket: given twice"),
        (&["--nbd", "127.0.0.1:0"], "--nbd: there is no disk to serve"),
        (&["--disk", "m=mem:1M"], "export \"m\": the name is used twice"),
        (&["--disk", "d=mem:1M", "--disk", "d=mem:2M"], "export \"d\": the name is used twice"),
        (&["--mem", "m=2M"], "export \"m\": the name is used twice"),
        (&["--disk", &image("=@/image")], "no name before \"=\""),
        (&["--dir", &image("=@")], "no name before \"=\""),
        (&["--disk", "d=mem:1M:depth=1025"], "depth=1025: expected 1 to 1024"),
        (&["--disk", "d=mem:1M:block=3"], "block=3: expected a power of two"),
        (&["--disk", "d=mem:1M:preferred=100"], "preferred=100: expected a power of two"),
    ] {
        let complaint = refused_with(2, &[&["--listen", &socket], arguments].concat());
        assert!(complaint.contains(words), "{complaint}");
    }
    let nothing = Command::new(TOWLINE).arg("serve").output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("nothing to export"));
    // A key of the configuration file is named as such.
    let file = image("@/towline.toml");
    for (wrong, words) in [
        ("cores = 0", "towline.toml: cores 0: expected a number from 1"),
        ("fragment = \"1M\"", "towline.toml: fragment 1048576: expected 4K to 256K"),
        ("cores = 3\nbuffer-limit = \"1535K\"", "towline.toml: buffer-limit 1571840: too little"),
        ("no-root-squash = true", "towline.toml: no-root-squash: needs --identity"),
        ("nbd = [\"127.0.0.1:0\"]", "towline.toml: nbd: there is no disk to serve"),
        ("[export.d]\ndisk = \"mem:1M:block=3\"", "block=3: expected a power of two"),
        ("[export.m]\ndisk = \"mem:1M\"", "export \"m\": the name is used twice"),
    ] {
        fs::write(&file, wrong).unwrap();
        let complaint = refused(&["--listen", &socket, "--config", &file]);
        assert!(complaint.contains(words), "{complaint}");
    }
    for wrong in ["nbd = [\"localhost\"]", "metrics = \"localhost\""] {
        fs::write(&file, format!("{wrong}\n[export.d]\ndisk = \"mem:1M\"\n")).unwrap();
        let complaint = refused(&["--listen", &socket, "--config", &file]);
        assert!(complaint.contains("towline.toml: address \"localhost\": "), "{complaint}");
    }
    let script = "ulimit -v 400000; exec \"$0\" serve --mem large=2G --listen \"$1\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", script, TOWLINE, &socket]).stdin(Stdio::null());
    let complaint = String::from_utf8(limited.output().unwrap().stderr).unwrap();
    let words = "export \"large\": a file system of 2147483648 bytes in memory: ";
    assert!(complaint.contains(words), "{complaint}");
    let long = format!("unix:///{}", "x".repeat(200));
    let complaint = refused(&["--listen", &long]);
    assert!(complaint.contains("at most 107 bytes"), "{complaint}");
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced_by_one() {
    let place = TempDir::new().unwrap();
    let path = place.path().join("notes");
    std::fs::write(&path, "kept").unwrap();
    let address = format!("unix://{}", path.display());
    let complaint = refused(&["--listen", &address]);
    assert!(complaint.contains("is not a socket"), "{complaint}");
    assert_eq!(std::fs::read(&path).unwrap(), b"kept");
    // The socket that a killed server has left behind is replaced.
    std::fs::remove_file(&path).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let serve = ["serve", "--mem", "m=1M", "--listen", &address];
    let mut server = Serving::new(Command::new(TOWLINE).args(serve).stdin(Stdio::null()));
    server.says("listening on unix://");
    let complaint = refused(&["--listen", &address]);
    assert!(complaint.contains("another server listens there"), "{complaint}");
    server.end();
}

#[test]
fn disks_need_an_address_of_either_kind() {
    let place = TempDir::new().unwrap();
    let socket = place.path().join("socket");
    let listen = format!("unix://{}", socket.display());
    let arguments = ["serve", "--disk", "d=mem:1M", "--listen", &listen];
    let mut server = Serving::new(Command::new(TOWLINE).args(arguments).stdin(Stdio::null()));
    server.says("listening on unix://");
    let url = format!("towline+unix:///d?socket={}", socket.display());
    let info: serde_json::Value =
        serde_json::from_str(&text(&["disk", "info", "--json", &url])).unwrap();
    assert_eq!(info["size"], 1 << 20, "{info}");
    server.end();
    let mut alone = Command::new("timeout");
    alone.args(["60", TOWLINE, "serve", "--disk", "d=mem:1M"]).stdin(Stdio::null());
    let output = alone.output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("--nbd") && complaint.contains("--listen"), "{complaint}");
    assert_eq!(output.status.code(), Some(2));
}

/// `towline ls` of a server lists both, so they are easily mistaken for each other.
#[test]
fn a_disk_used_for_files_is_told_as_such_and_the_other_way_round() {
    let place = TempDir::new().unwrap();
    let socket = place.path().join("socket");
    let listen = format!("unix://{}", socket.display());
    let arguments = ["serve", "--disk", "d=mem:1M", "--mem", "m=1M", "--listen", &listen];
    let mut server = Serving::new(Command::new(TOWLINE).args(arguments).stdin(Stdio::null()));
    server.says("listening on unix://");
    let url = |name: &str| format!("towline+unix:///{name}?socket={}", socket.display());
    for command in [&["ls", &url("d")][..], &["cp", TOWLINE, &url("d/x")], &["df", &url("d")]] {
        let complaint = bad(1, command);
        assert!(complaint.contains("\"d\" is a disk and has no files"), "{complaint}");
    }
    let complaint = bad(125, &["run", "--at", &format!("/r={}", url("d")), "--", "ls", "/r"]);
    assert!(complaint.contains("\"d\" is a disk and has no files"), "{complaint}");
    let complaint = bad(1, &["disk", "info", &url("m")]);
    assert!(complaint.contains("the server has files by this name, not a disk"), "{complaint}");
    server.end();
}

#[test]
fn prometheus_is_answered() {
    let arguments = ["serve", "--mem", "m=1M", "--listen", "tcp://127.0.0.1:0"];
    let mut server = Serving::new(
        Command::new(TOWLINE)
            .args(arguments)
            .args(["--metrics", "localhost:0"])
            .stdin(Stdio::null()),
    );
    let line = server.says("/metrics");
    let (_, rest) = line.split_once("http://").expect("an address");
    let (address, _) = rest.split_once('/').unwrap();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // Clients that send nothing, or never finish, keep no others waiting.
    let silent: Vec<_> = (0..300)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
            stream
        })
        .collect();
    let page = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    drop(silent);
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    let (_, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(body.lines().any(|line| line == "towline_sessions 0"), "{body}");
    for line in body.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("towline_") && value.parse::<f64>().is_ok(), "{line}");
    }
    assert!(ask("GET /metrics?module=x HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
    assert!(ask("GET /metricsx HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
    assert!(ask("\r\n\r\n").starts_with("HTTP/1.1 405 "));
    server.end();
}

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
    support::wait_until("the server listens", || {
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
        support::wait_until("it ends", || {
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
