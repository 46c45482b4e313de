//! The program's exit status.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::os::unix::net::UnixListener;
use std::process::Command;

#[test]
fn an_export_that_cannot_be_opened_does_not_keep_the_rules() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let uri = format!("nbd+unix:///?socket={}", path.display());
    let mut program = Command::new(env!("CARGO_BIN_EXE_nbd-conformance"));
    let done = program.args(["--only", "chunk", &uri]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
}
