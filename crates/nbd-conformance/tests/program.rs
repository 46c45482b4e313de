//! The program's exit status.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use nbd_conformance::wire::*;
use tempfile::TempDir;

/// Runs the program. Returns its exit status and what it printed.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_nbd-conformance"));
    let done = program.args(arguments).output().unwrap();
    let printed = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8_lossy(&printed).into_owned())
}

/// Gives each client to `serve`, for as long as the test lasts. Returns the server's URI, which is good until the
/// directory is dropped.
fn server(serve: impl Fn(UnixStream) -> io::Result<()> + Send + 'static) -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let _ = serve(client);
        }
    });
    let uri = format!("nbd+unix:///?socket={}", path.display());
    (directory, uri)
}

/// Answers every option with this error.
fn refuse(mut client: UnixStream, error: u32) -> io::Result<()> {
    client.write_all(&GREETING_MAGIC.to_be_bytes())?;
    client.write_all(&OPTION_MAGIC.to_be_bytes())?;
    client.write_all(&FLAG_FIXED_NEWSTYLE.to_be_bytes())?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        client.read_exact(&mut header)?;
        let (option, length) = header[8..].split_at(4);
        let length = u32::from_be_bytes(length.try_into().unwrap());
        io::copy(&mut (&client).take(length.into()), &mut io::sink())?;
        let reply = [&OPTION_REPLY_MAGIC.to_be_bytes(), option, &error.to_be_bytes(), &[0; 4]];
        client.write_all(&reply.concat())?;
    }
}

#[test]
fn an_export_that_cannot_be_opened_does_not_keep_the_rules() {
    let (_directory, uri) = server(|_| Ok(()));
    let (status, said) = run(&["--only", "chunk", &uri]);
    assert_eq!(status, Some(2), "{said}");
}

#[test]
fn an_export_that_the_server_does_not_have_breaks_no_rule() {
    for (error, name) in [(REP_ERR_UNKNOWN, "ERR_UNKNOWN"), (REP_ERR_POLICY, "ERR_POLICY")] {
        let (_directory, uri) = server(move |client| refuse(client, error));
        let (status, said) = run(&["--timeout", "1", &uri]);
        assert_eq!(status, Some(2), "{said}");
        let wanted = format!("nbd-conformance: export \"\": GO: export refused: {name}\n");
        assert_eq!(said, wanted);
    }
}

#[test]
fn a_server_that_wants_tls_first_is_tried() {
    let (_directory, uri) = server(|client| refuse(client, REP_ERR_TLS_REQD));
    let (_, said) = run(&["--only", "option.error-text", &uri]);
    assert!(said.starts_with("PASS MUST   option.error-text"), "{said}");
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
