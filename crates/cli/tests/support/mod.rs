//! A server and a directory for files, for tests that run the program as users do.
#![allow(dead_code)] // each test program uses only a part

pub(crate) mod compare;
pub(crate) mod far;

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The program under test.
pub(crate) const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");

/// A process that is killed at the end of the test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a condition holds. A test that waits too long, even for a busy machine, fails.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A directory, and a server for `served` in it (export `dir`, and read-only as `ro`) and for the memory
/// exports `mem` (256 MiB) and `small` (4 MiB).
pub(crate) struct World {
    pub(crate) path: PathBuf,
    server: Child,
    tcp: String,
}

impl World {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("towline-test-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(path.join("served")).unwrap();
        let (server, tcp) = serve(&path, "127.0.0.1:0");
        Self { tcp, path, server }
    }

    /// Kills the server and waits for its end.
    pub(crate) fn stop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    /// Stops the server if it still runs, and starts a new one at the same addresses.
    pub(crate) fn restart(&mut self) {
        self.stop();
        // The previous server's socket.
        fs::remove_file(self.path.join("socket")).unwrap();
        (self.server, self.tcp) = serve(&self.path, &self.tcp);
    }

    /// The server's process number.
    pub(crate) fn server_id(&self) -> u32 {
        self.server.id()
    }

    /// Returns a local path.
    pub(crate) fn local(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The server's TCP address.
    pub(crate) fn address(&self) -> &str {
        &self.tcp
    }

    /// Returns a URL that connects by TCP and moves to shared memory.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("towline://{}/{path}", self.tcp)
    }

    /// Returns a URL over a transport: `tcp`, `unix`, `shm`, or `auto` for that of [`World::url`].
    pub(crate) fn through(&self, transport: &str, path: &str) -> String {
        match transport {
            "auto" => self.url(path),
            "tcp" => format!("towline+tcp://{}/{path}", self.tcp),
            other => {
                let socket = self.path.join("socket");
                format!("towline+{other}:///{path}?socket={}", socket.display())
            }
        }
    }
}

/// Starts a server. Returns it with its TCP address.
fn serve(path: &Path, tcp: &str) -> (Child, String) {
    let shown = path.to_str().unwrap();
    let mut server = Command::new(TOWLINE)
        .args(["serve", "--dir", &format!("dir={shown}/served")])
        .args(["--dir", &format!("ro={shown}/served:ro"), "--mem", "mem=256M"])
        .args(["--mem", "small=4M", "--listen", &format!("tcp://{tcp}")])
        .args(["--listen", &format!("unix://{shown}/socket")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let tcp = listening(&mut server, drop);
    (server, tcp)
}

/// Waits until a server, whose standard error is a pipe, listens on a Unix socket. Returns its TCP address.
/// Its later output goes to `later`.
pub(crate) fn listening(
    server: &mut Child,
    later: impl FnMut(io::Result<String>) + Send + 'static,
) -> String {
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let mut tcp = None;
    for line in lines.by_ref().map(Result::unwrap) {
        let at = line.split("tcp://").nth(1).and_then(|rest| rest.split(' ').next());
        tcp = tcp.or(at.map(str::to_owned));
        if line.contains("unix://") {
            break;
        }
    }
    std::thread::spawn(move || lines.for_each(later));
    tcp.expect("an address")
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop();
        let removed = fs::remove_dir_all(&self.path);
        // A second panic would end all tests.
        assert!(std::thread::panicking() || removed.is_ok(), "{removed:?}");
    }
}

/// Runs the program.
pub(crate) fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    Command::new(TOWLINE).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs the program, which must succeed and print no complaint. Returns its output.
pub(crate) fn good<S: AsRef<OsStr> + std::fmt::Debug>(arguments: &[S]) -> Vec<u8> {
    let output = run(arguments);
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && complaint.is_empty(), "{arguments:?}: {complaint}");
    output.stdout
}

/// Like [`good`], with text as output.
pub(crate) fn text<S: AsRef<OsStr> + std::fmt::Debug>(arguments: &[S]) -> String {
    String::from_utf8(good(arguments)).unwrap()
}

/// Runs the program, which must fail with this status. Returns its complaint.
pub(crate) fn bad<S: AsRef<OsStr> + std::fmt::Debug>(status: i32, arguments: &[S]) -> String {
    let output = run(arguments);
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {complaint}");
    complaint
}

/// Returns a command that runs the program in its arguments with a filter that makes one system call fail
/// with `EPERM`, as containers' filters do. Needs `python3`.
pub(crate) fn forbidding(call: libc::c_long) -> Command {
    let script = "
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *one) for one in code), 32)
filter = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4, ctypes.addressof(code)), 16)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
";
    let mut command = Command::new("python3");
    command.args(["-c", script, &call.to_string()]);
    command
}

/// Returns pseudo-random bytes.
pub(crate) fn noise(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Returns the sorted names in a directory.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    names
}

/// Returns whether a program is installed, in `PATH` or the directories for administrators. If not, prints
/// that the test is skipped.
pub(crate) fn have(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut directories = path.split(':').chain(["/usr/sbin", "/sbin"]);
    let found = directories.any(|directory| Path::new(directory).join(program).exists());
    if !found {
        eprintln!("SKIPPED: {program} is not installed (tests/run installs it)");
    }
    found
}

/// Returns whether large mappings are read when they are touched, which ordinary users can rarely have. If not, prints
/// that the test is skipped.
pub(crate) fn maps_on_demand() -> bool {
    let found = text(&["doctor"]);
    let line = found.lines().find(|line| line.contains("userfaultfd")).unwrap();
    let usable = line.starts_with("ok");
    if !usable {
        println!("SKIPPED: {line}");
    }
    usable
}

/// Runs a script under `run` on the served directory.
pub(crate) fn under_run(world: &World, script: &str) -> Output {
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    Command::new(TOWLINE)
        .args(["run", "--at", &at, "--", "sh", "-c", script])
        .env("AT", world.local("at"))
        .env("HERE", &world.path)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Finds the keeper of a run: the process that has a pidfd of process `program`, which became the program.
pub(crate) fn keeper(program: u32) -> Option<String> {
    let line = format!("Pid:\t{program}\n");
    let sees = |process: &Path| {
        let mut all = fs::read_dir(process.join("fdinfo")).into_iter().flatten().flatten();
        all.any(|fd| fs::read_to_string(fd.path()).is_ok_and(|info| info.contains(&line)))
    };
    let mut processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let found = processes.find(|process| sees(process))?;
    Some(found.file_name()?.to_str()?.to_owned())
}
