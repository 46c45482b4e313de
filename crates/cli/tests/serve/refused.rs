//! What a server refuses to start with, and how it says so.

use crate::Serving;
use crate::support::{TOWLINE, bad, text};
use std::fs;
use std::process::{Command, Stdio};
use tempfile::TempDir;

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
        (&["--mem", "a/b=2M"], "export \"a/b\": the name is empty or contains a slash"),
        (&["--mem", "..=2M"], "export \"..\": in a URL this name is a step"),
        (&["--mem", "n=0"], "\"0\" is nothing; expected at least 1 byte"),
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
