//! Connections that are lost again while what was open is opened again.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Process, Raw, message};
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use tempfile::TempDir;
use towline_client::{Client, Lock, Options, Transport};
use towline_wire::request::lock;

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

/// Forwards connections, and cuts the second one when so many messages came from the server.
fn cutter(target: u16, messages: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut number = 0;
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else {
                continue; // the server is not there yet
            };
            number += 1;
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let limit = if number == 2 { messages } else { usize::MAX };
            std::thread::spawn(move || {
                let (mut from, mut to) = (Raw(far), near);
                for _ in 0..limit {
                    let Some((header, rest)) = from.receive() else { break };
                    let (body, payload) = rest.split_at(header.body_bytes as usize);
                    if to.write_all(&message(header, body, payload)).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
                let _ = from.0.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn locks_are_had_again_though_the_lane_is_lost_meanwhile() {
    // What the server says: the welcome, and answers to: open the root, open the file, lock it, open another one.
    for messages in 1..6 {
        let directory = TempDir::new().unwrap();
        let mut server = Process::start(directory.path());
        let port = cutter(server.port, messages);
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        let file = root.open(b"file", CREATE, 0o600).unwrap();
        let other = root.open(b"other", CREATE, 0o600).unwrap();
        let exclusive =
            Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
        file.lock(&exclusive, false).unwrap();
        server.kill();
        server.restart();
        other.stat().unwrap();
        let attr = file.stat();
        assert!(attr.is_ok(), "after {messages} messages: {}", attr.unwrap_err());
    }
}
