//! `towline serve` as administrators use it: service managers, configuration files, signals, Prometheus.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod lacking;
mod refused;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use support::{TOWLINE, bad, forbidding, good, have, noise, text};
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

/// Returns a command that serves on this socket as a service manager starts it, and with these arguments. Its
/// standard output would be a second socket.
fn managed(listener: TcpListener, arguments: &[&str]) -> Command {
    // Only the process itself knows its number.
    let script = "export LISTEN_PID=$$; exec \"$0\" serve \"$@\" 3<&0 4>&1 </dev/null >/dev/null";
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

/// One of the addresses is taken, so that opening it would fail.
#[test]
fn a_service_managers_sockets_are_used_instead_of_addresses() {
    let directory = TempDir::new().unwrap();
    let [path, other] = ["socket", "other"].map(|name| directory.path().join(name));
    let unix = UnixListener::bind(&path).unwrap();
    let [given, taken] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let at = given.local_addr().unwrap();
    let left_out =
        [format!("tcp://{}", taken.local_addr().unwrap()), format!("unix://{}", other.display())];
    let [first, second] = &left_out;
    let mut command = managed(given, &["--mem", "m=1M", "--listen", first, "--listen", second]);
    command.env("LISTEN_FDS", "2").stdout(Stdio::from(OwnedFd::from(unix)));
    let mut server = Serving::new(&mut command);
    let said = server.says("not listening on ");
    let addresses = left_out.join(", ");
    assert!(said.contains(&format!(" {addresses}: the sockets of the service manager ")), "{said}");
    server.says(&format!("listening on tcp://{at} "));
    server.says(&format!("listening on unix://{} ", path.display()));
    for url in
        [format!("towline+tcp://{at}/"), format!("towline+unix:///?socket={}", path.display())]
    {
        assert_eq!(text(&["ls", &url]), "m\n");
    }
    assert!(!other.exists());
    server.end();
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
fn where_rings_are_forbidden_the_server_uses_epoll_and_says_so() {
    if !have("python3") {
        return;
    }
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
        let directory = TempDir::new().unwrap();
        let socket = directory.path().join("socket");
        let serve = |more: &[&str]| {
            let mut command = forbidding(call);
            command.args([TOWLINE, "serve", "--mem", "m=1M", "--listen"]);
            command.arg(format!("unix://{}", socket.display())).args(more).stdin(Stdio::null());
            command
        };
        let refused = serve(&["--engine", "uring"]).output().unwrap();
        let complaint = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{complaint}");
        assert!(complaint.contains("io_uring is not available: Operation not"), "{complaint}");
        let mut server = Serving::new(&mut serve(&[]));
        let said = server.says("listening on unix://");
        assert!(said.contains(" (epoll, "), "{said}");
        server.says("io_uring is not available here; using epoll");
        assert_eq!(text(&["ls", &format!("towline+unix:///?socket={}", socket.display())]), "m\n");
        server.end();
    }
}

/// As for ordinary users, whose rings count as locked memory.
#[test]
fn a_lack_of_locked_memory_for_rings_is_told() {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !have("setpriv") {
        return;
    }
    let unprivileged = if is_root { "setpriv --bounding-set=-ipc_lock" } else { "" };
    let script = format!("ulimit -l 0; exec {unprivileged} \"$@\"");
    let serve = |more: &[&str]| {
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", TOWLINE, "serve", "--mem", "m=1M"]).stdin(Stdio::null());
        command.args(["--listen", "tcp://127.0.0.1:0"]).args(more);
        command
    };
    let mut server = Serving::new(&mut serve(&[]));
    if server.says("listening on tcp://").contains(" (io_uring, ") {
        println!("SKIPPED: this kernel does not count rings as locked memory");
        server.end();
        return;
    }
    let said = server.says("io_uring is not available here; using epoll");
    assert!(said.contains("annot allocate memory") && said.contains("ulimit -l"), "{said}");
    server.end();
    let refused = serve(&["--engine", "uring"]).output().unwrap();
    let complaint = String::from_utf8_lossy(&refused.stderr);
    assert!(complaint.contains("ulimit -l"), "{complaint}");
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

/// No server remembers anything for the next one. Files of this size are made with one request, whose data
/// follows, and the limit sees to it that many are under way whenever the server is told to stop.
#[test]
fn a_copy_goes_on_with_the_server_after_the_one_that_was_stopped() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["tree", "served"] {
        fs::create_dir(path(name)).unwrap();
    }
    for number in 0..400u32 {
        fs::write(path("tree").join(number.to_string()), noise(100_000, 2 * number)).unwrap();
    }
    let [listen, export] = [("unix", "socket"), ("served", "served")].map(|(kind, name)| {
        let path = path(name).display().to_string();
        if kind == "unix" { format!("unix://{path}") } else { format!("d={path}:bandwidth=20M") }
    });
    let start = || {
        let mut command = Command::new(TOWLINE);
        command.args(["serve", "--dir", &export, "--listen", &listen]).stdin(Stdio::null());
        let mut server = Serving::new(&mut command);
        server.says("listening on unix://");
        server
    };
    let mut server = start();
    let url = format!("towline+unix:///d/tree?socket={}", path("socket").display());
    let copy = Command::new(TOWLINE)
        .args(["cp", "-r"])
        .args([path("tree").to_str().unwrap(), &url])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(300));
        server.end();
        server = start();
    }
    let output = copy.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for number in 0..400u32 {
        let arrived = fs::read(path("served").join("tree").join(number.to_string()));
        assert!(arrived.unwrap() == noise(100_000, 2 * number), "{number}");
    }
    server.end();
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
