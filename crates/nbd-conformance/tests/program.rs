//! The program's exit status.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::os::unix::net::UnixListener;
use std::process::Command;

/// Runs the program. Returns its exit status and what it printed on standard error.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_nbd-conformance"));
    let done = program.args(arguments).output().unwrap();
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn an_export_that_cannot_be_opened_does_not_keep_the_rules() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let uri = format!("nbd+unix:///?socket={}", path.display());
    let (status, said) = run(&["--only", "chunk", &uri]);
    assert_eq!(status, Some(2), "{said}");
}

/// Runs one area of rules on a server that cannot be tried, and returns what is said about it.
fn cannot_try(command: &[&str]) -> String {
    let limited = ["--only", "abort", "--timeout", "2", "--"];
    let (status, said) = run(&[&limited, command].concat());
    assert_eq!(status, Some(2), "{command:?}: {said}");
    said
}

#[test]
fn a_server_that_does_not_start_is_told() {
    let said = cannot_try(&["false"]);
    assert!(said.contains("server ended (exit status: 1) before it greeted"), "{said}");
    let said = cannot_try(&["no-program-has-this-name"]);
    assert!(said.contains("server ended (exit status: 127) before it greeted"), "{said}");
}

#[test]
fn a_server_that_does_not_know_socket_activation_is_told() {
    let said = cannot_try(&["sleep", "60"]);
    assert!(said.contains("server does not greet on the socket passed to it"), "{said}");
}

#[test]
fn a_server_that_ends_with_its_first_client_is_told() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("SKIPPED: python3 is not installed");
        return;
    }
    let server = "import socket; socket.socket(fileno=3).accept()[0].send(b'N')";
    let said = cannot_try(&["python3", "-c", server]);
    assert!(said.contains("server ended (exit status: 0) before any rule was tried"), "{said}");
}
