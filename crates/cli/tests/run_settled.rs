//! Some file systems say only when a file is closed that they could not store what was written to it.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

#[allow(dead_code)] // others use the rest
#[path = "support/quiet.rs"]
mod quiet;
mod support;

use quiet::{FULL, Quiet};
use std::process::Command;
use std::sync::Arc;
use support::TOWLINE;

#[test]
fn close_tells_a_program_what_could_not_be_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, store) = (folder.path().join("socket"), Arc::new(Quiet::default()));
    store.put(FULL, b"content");
    let server = store.serve(&socket);
    let at = format!("--at=/quiet=towline+unix:///q?socket={}", socket.display());
    let run = |arguments: &[&str]| {
        let output = Command::new(TOWLINE).args(["run", &at, "--"]).args(arguments).output();
        let output = output.unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let to = format!("of=/quiet/{FULL}");
    let (done, said) = run(&["dd", "if=/dev/zero", &to, "count=1", "conv=notrunc", "status=none"]);
    assert!(!done && said.contains("No space left on device"), "{said}");
    let (done, said) = run(&["cat", &format!("/quiet/{FULL}")]);
    assert!(done, "{said}");
    server.stop();
}
