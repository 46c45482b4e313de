//! `towline serve --identity`: clients act with the groups of their processes, or of the user database, which may answer
//! late.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{AddressFamily, SendFlags, SocketType, bind, connect, send, socket};
use rustix::process::{Pid, Resource, Rlimit, Signal, Uid, getrlimit, kill_process, prlimit};
use rustix::thread::set_thread_res_uid;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use support::{TOWLINE, have};
use tempfile::TempDir;
use towline_wire::hello::{MAGIC, VERSION};
use towline_wire::limits::HEADER_BYTES;
use towline_wire::request::{CURRENT, encode_compound, lock};
use towline_wire::{Header, Hello, Kind, Request};

const USER: &str = "54321";
const GROUP: u32 = 777;

/// A server with a directory in which each file is for the members of one group only.
struct Served {
    place: TempDir,
    server: Child,
    port: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Served {
    /// Starts a server by a command that begins with `prefix`.
    fn start(place: TempDir, prefix: &[&str], options: &[&str]) -> Self {
        let path = |name: &str| place.path().join(name);
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(path("data")).unwrap();
        for (name, group) in [("group", GROUP), ("root", 0)] {
            let file = path("data").join(name);
            fs::write(&file, name).unwrap();
            chown(&file, Some(0), Some(group)).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        }
        let export = format!("d={}", path("data").display());
        let socket = format!("unix://{}", path("socket").display());
        let words =
            [prefix, &[TOWLINE, "serve", "--identity", "--cores", "1", "--dir", &export][..]];
        let words = [words.concat(), vec!["--listen", &socket, "--listen", "tcp://127.0.0.1:0"]];
        let words = [words.concat(), options.to_vec()].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("LD_LIBRARY_PATH", place.path()).env("SLOW", path("slow"));
        let mut server = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(server.stderr.take().unwrap()).lines().map_while(Result::ok);
        let address = said.find(|line| line.contains("listening on tcp://")).unwrap();
        let port =
            address.rsplit(':').next().and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        fs::set_permissions(path("socket"), fs::Permissions::from_mode(0o777)).unwrap();
        // Whatever it says later has room in the pipe.
        std::mem::forget(said);
        Self { place, server, port }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn url(&self, scheme: &str, file: &str) -> String {
        match scheme {
            "tcp" => format!("towline+tcp://127.0.0.1:{}/d/{file}", self.port),
            _ => format!("towline+{scheme}:///d/{file}?socket={}", self.path("socket").display()),
        }
    }

    /// A command that reads a file as the user, whose process has these groups.
    fn reads(&self, scheme: &str, file: &str, groups: &str) -> Command {
        let mut command = Command::new("setpriv");
        let groups = if groups.is_empty() {
            "--clear-groups".to_owned()
        } else {
            format!("--groups={groups}")
        };
        command.args(["--reuid", USER, "--regid", USER, &groups, TOWLINE, "cat"]);
        command.arg(self.url(scheme, file)).stdin(Stdio::null());
        command
    }

    fn read(&self, scheme: &str, file: &str, groups: &str) -> bool {
        let Output { status, stdout, stderr } = self.reads(scheme, file, groups).output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        match status.success() {
            true => assert_eq!(stdout, file.as_bytes()),
            false => assert!(said.contains("permission denied"), "{said}"),
        }
        status.success()
    }
}

fn is_possible(programs: &[&str]) -> bool {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can act as others");
        return false;
    }
    programs.iter().all(|program| have(program))
}

/// A process of a `towline run` that ends while its request waits, and a request for a lock that is given up.
fn give_up_as_user(port: &str) {
    // Only this thread is the user: sockets belong to who makes them.
    let user = Uid::from_raw(USER.parse().unwrap());
    set_thread_res_uid(user, user, user).unwrap();
    let message = |kind, body: &[u8]| {
        let mut header = Header::new(kind, 0, 1);
        header.body_bytes = body.len() as u32;
        [&header.to_bytes()[..], body].concat()
    };
    let receive = |stream: &mut TcpStream| {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head).unwrap();
        let header = Header::parse(&head).unwrap();
        stream.read_exact(&mut vec![0; header.body_bytes as usize]).unwrap();
        header.kind
    };
    let attach = Request::Attach { name: b"d" };
    let (family, kind) = (lock::FLOCK, lock::EXCLUSIVE);
    let lock = Request::Lock { handle: 1, owner: 0, family, kind, wait: 1, start: 0, length: 0 };
    for (family, request) in [(99, attach), (0, lock)] {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut body = Vec::new();
        let hello = Hello { magic: MAGIC, version: VERSION, client: 1, family, ..Hello::default() };
        hello.encode(&mut body);
        stream.write_all(&message(Kind::Hello, &body)).unwrap();
        assert_eq!(receive(&mut stream), Kind::Welcome);
        let body = encode_compound(&[request]);
        stream.write_all(&message(Kind::Request, &body)).unwrap();
        if family == 0 {
            stream.write_all(&message(Kind::Cancel, &[])).unwrap();
            assert_eq!(receive(&mut stream), Kind::Reply);
        }
    }
}

#[test]
fn a_process_acts_with_the_groups_that_it_has() {
    if !is_possible(&["setpriv"]) {
        return;
    }
    let served = Served::start(TempDir::new().unwrap(), &[], &[]);
    // More than the first question to the kernel has room for.
    let many = (1000..1100).map(|group| group.to_string()).collect::<Vec<_>>().join(",");
    for scheme in ["unix", "shm"] {
        assert!(served.read(scheme, "group", "777"));
        assert!(served.read(scheme, "group", &format!("{many},777")));
        assert!(!served.read(scheme, "group", ""));
        assert!(!served.read(scheme, "group", &many));
        assert!(!served.read(scheme, "root", "0,777"), "root's group is squashed");
    }
    // The kernel does not tell the groups of a TCP connection, and the user database has none.
    assert!(!served.read("tcp", "group", "777"));
    let served = Served::start(TempDir::new().unwrap(), &[], &["--no-root-squash"]);
    assert!(served.read("unix", "root", "0"));
}

/// Passes connections on to a server from this address, as another user. Returns the port to connect to.
fn pass_on(port: &str, from: SocketAddr) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own_port = listener.local_addr().unwrap().port().to_string();
    let server: SocketAddr = format!("127.0.0.1:{port}").parse().unwrap();
    std::thread::spawn(move || {
        let user = Uid::from_raw(54322);
        set_thread_res_uid(user, user, user).unwrap();
        for near in listener.incoming().map(Result::unwrap) {
            let far = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            bind(&far, &SocketAddr::new(from.ip(), 0)).unwrap();
            connect(&far, &server).unwrap();
            let far = TcpStream::from(far);
            for (mut from, mut to) in [(&near, &far), (&far, &near)]
                .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    own_port
}

/// Over TCP, who is on the server's machine is only itself, also from an address of this machine that is not
/// loopback's.
#[test]
fn an_address_of_the_machine_makes_nobody_another_user() {
    if !is_possible(&["setpriv"]) {
        return;
    }
    let found = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        // Sends nothing: the kernel chooses the address from which it would.
        socket.connect("198.51.100.1:9")?;
        socket.local_addr()
    });
    let Ok(own) = found else {
        return println!("SKIPPED: this machine has no address but loopback");
    };
    let mut served = Served::start(TempDir::new().unwrap(), &[], &[]);
    let file = served.path("data/own");
    fs::write(&file, "own").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    chown(&file, USER.parse().ok(), None).unwrap();
    assert!(served.read("tcp", "own", ""));
    for from in ["127.0.0.1:0".parse().unwrap(), own] {
        let port = pass_on(&served.port, from);
        let direct = std::mem::replace(&mut served.port, port);
        assert!(!served.read("tcp", "own", ""), "{from}");
        served.port = direct;
    }
}

/// A connection that is reset before the server has accepted it has ends no more, but what was sent can still be read.
#[test]
fn who_is_gone_before_the_server_comes_to_it_acts_as_nobody() {
    if !is_possible(&["setpriv"]) {
        return;
    }
    let served = Served::start(TempDir::new().unwrap(), &[], &[]);
    fs::set_permissions(served.path("data"), fs::Permissions::from_mode(0o777)).unwrap();
    // The server knows the user's groups from now on.
    assert!(!served.read("tcp", "group", ""));
    let pid = Pid::from_child(&served.server);
    kill_process(pid, Signal::STOP).unwrap();
    let port = served.port.clone();
    let begin = move || {
        let user = Uid::from_raw(54322);
        set_thread_res_uid(user, user, user).unwrap();
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let mut hello = Vec::new();
        Hello { magic: MAGIC, version: VERSION, client: 1, ..Hello::default() }.encode(&mut hello);
        let attach = Request::Attach { name: b"d" };
        let open = Request::Open { base: CURRENT, flags: 0o101, mode: 0o600, path: b"new" };
        for (kind, body) in
            [(Kind::Hello, hello), (Kind::Request, encode_compound(&[attach, open]))]
        {
            let mut header = Header::new(kind, 0, 1);
            header.body_bytes = body.len() as u32;
            if kind == Kind::Request {
                // As whom it would act.
                header.word_a = USER.parse().unwrap();
            }
            stream.write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
            if kind == Kind::Hello {
                // The server reads no further at once than to a byte out of band.
                send(&stream, b"!", SendFlags::OOB).unwrap();
            }
        }
        // Sends a reset when it is closed.
        set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    };
    std::thread::spawn(begin).join().unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    // Connections are served in the order in which they come.
    assert!(!served.read("tcp", "group", ""));
    if let Ok(made) = fs::metadata(served.path("data/new")) {
        assert_eq!(made.uid(), 65534);
    }
}

/// Whose a connection is has to be found out without a descriptor.
#[test]
fn who_gets_the_last_descriptor_is_itself() {
    if !is_possible(&["setpriv"]) {
        return;
    }
    let served = Served::start(TempDir::new().unwrap(), &[], &["--mem", "m=1M"]);
    let pid = Pid::from_child(&served.server);
    let own = PathBuf::from(format!("/proc/{pid}/fd"));
    let next = (0..).find(|number: &u64| !own.join(number.to_string()).is_symlink()).unwrap();
    let before = getrlimit(Resource::Nofile);
    let limit = Rlimit { current: Some(next + 1), ..before };
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let url = format!("towline+tcp://127.0.0.1:{}/m/new", served.port);
    let mut copy = Command::new("setpriv");
    copy.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
    copy.args([TOWLINE, "cp", "/dev/null", &url]);
    assert!(copy.status().unwrap().success());
    prlimit(Some(pid), Resource::Nofile, before).unwrap();
    let shown = Command::new(TOWLINE).args(["stat", &url]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains(&format!("Uid: ({USER}")), "{shown}");
}

#[test]
fn who_waits_for_a_directory_service_keeps_nobody_else_waiting() {
    if !is_possible(&["setpriv", "unshare", "cc", "mount"]) {
        return;
    }
    let place = TempDir::new().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/directory_service.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
    let library = place.path().join("libnss_towline.so.2");
    assert!(compiler.arg(&library).arg(source).status().unwrap().success());
    let services = place.path().join("nsswitch.conf");
    fs::write(&services, "passwd: files towline\ngroup: files towline\n").unwrap();
    let script = format!("mount --bind {} /etc/nsswitch.conf && exec \"$@\"", services.display());
    if !Path::new("/etc/nsswitch.conf").exists() {
        return println!("SKIPPED: there is no /etc/nsswitch.conf to replace");
    }
    let prefix = ["unshare", "--mount", "sh", "-c", &script, "sh"];
    let tried = Command::new("unshare").args(["--mount", "true"]).status().unwrap();
    if !tried.success() {
        return println!("SKIPPED: no mount namespaces here");
    }
    let slow = place.path().join("slow");
    fs::write(&slow, "").unwrap();
    let served = Served::start(place, &prefix, &[]);
    let mut waits = served.reads("tcp", "group", "").stdout(Stdio::piped()).spawn().unwrap();
    // Others are served, those of other users and of the same user whose groups the kernel tells.
    for _ in 0..3 {
        assert!(served.read("unix", "group", "777"));
        assert!(waits.try_wait().unwrap().is_none(), "it has not waited");
    }
    // Nor does the core wait, if what was asked for cannot wait itself.
    let port = served.port.clone();
    std::thread::spawn(move || give_up_as_user(&port)).join().unwrap();
    assert!(served.read("unix", "group", "777"));
    fs::remove_file(&slow).unwrap();
    let Output { status, stdout, .. } = waits.wait_with_output().unwrap();
    assert!(status.success() && stdout == b"group");
    // They are remembered.
    fs::write(&slow, "").unwrap();
    assert!(served.read("tcp", "group", ""));
    assert!(!served.read("tcp", "root", ""), "root's group is squashed");
    // The service's names are shown, too.
    fs::remove_file(&slow).unwrap();
    chown(served.path("data/group"), USER.parse().ok(), None).unwrap();
    let words = [TOWLINE, "ls", "-l", &served.url("unix", "group")];
    let mut list = Command::new(prefix[0]);
    list.args(&prefix[1..]).args(words).env("LD_LIBRARY_PATH", served.path(""));
    let listed = list.env_remove("SLOW").output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains(" remote "), "{listed:?}");
}
