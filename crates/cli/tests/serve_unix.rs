//! `towline serve` on Unix sockets: started again right after it was killed, and in a PID namespace of its own.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use support::{TOWLINE, have};
use tempfile::TempDir;

/// A server, killed when this is dropped.
struct Server(Child);

impl Server {
    /// Starts it. Returns what it says if that is not that it listens.
    fn start(command: &mut Command) -> Result<Self, String> {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
        let this = Self(child);
        if said.contains("listening on") { Ok(this) } else { Err(said) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The kernel closes the sockets of its event loops only some time after the process is gone.
#[test]
fn a_server_starts_right_after_it_was_killed() {
    let place = TempDir::new().unwrap();
    let address = format!("unix://{}/socket", place.path().display());
    for round in 0..20 {
        let mut command = Command::new(TOWLINE);
        command.args(["serve", "--mem", "m=1M", "--listen", &address]);
        let started = Server::start(&mut command);
        assert!(started.is_ok(), "round {round}: {:?}", started.err());
    }
}

/// A process that the server cannot see has no number for it, but still a user, whatever it claims to be.
#[test]
fn a_client_outside_of_the_server_s_namespace_is_its_own_user() {
    if !rustix::process::geteuid().is_root() || !have("unshare") || !have("setpriv") {
        println!("SKIPPED: needs root, unshare and setpriv");
        return;
    }
    let place = TempDir::new().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (data, socket) = (place.path().join("data"), place.path().join("socket"));
    fs::create_dir(&data).unwrap();
    fs::write(data.join("secret"), "of root").unwrap();
    fs::set_permissions(data.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    // In a user namespace of its own, a client is root, and says so.
    let claims = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "unshare", "-U", "-r"];
    let claim = |program: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(claims).args(program).stdin(Stdio::null()).output().unwrap()
    };
    if claim(&["id", "-u"]).stdout != b"0\n" {
        println!("SKIPPED: users may not have namespaces of their own here");
        return;
    }
    let export = format!("d={}", data.display());
    let address = format!("unix://{}", socket.display());
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child", TOWLINE, "serve"]);
    command.args(["--identity", "--no-root-squash", "--dir", &export, "--listen", &address]);
    let server = Server::start(&mut command);
    let _server = match server {
        Ok(server) => server,
        Err(said) if said.contains("unshare") => return println!("SKIPPED: {said}"),
        Err(said) => panic!("{said}"),
    };
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o777)).unwrap();
    let url = format!("towline+unix:///d/secret?socket={}", socket.display());
    let read = claim(&[TOWLINE, "cat", &url]);
    let said = String::from_utf8_lossy(&read.stderr);
    assert!(read.stdout.is_empty() && said.contains("permission denied"), "{said}");
    // Root itself is whom it claims to be.
    assert_eq!(support::text(&["cat", &url]), "of root");
}
