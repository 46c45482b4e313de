//! A process that has no descriptors left. Alone in its program, since the limit applies to all
//! threads.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Process, pattern};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;
use towline_client::{Client, Options};

#[test]
#[ignore = "not a test: the server of the other one"]
fn child_server() {
    common::child_server();
}

#[test]
fn who_has_no_descriptor_for_what_is_lent_is_sent_it() {
    let directory = TempDir::new().unwrap();
    let server = Process::start(directory.path());
    let client = Client::connect(&server.transports()[2], Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    let data = pattern(1 << 20, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 0, 0).unwrap();
    let before = getrlimit(Resource::Nofile);
    let next = std::fs::File::open("/dev/null").unwrap();
    let next = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(next), ..before }).unwrap();
    let mut read = vec![0; data.len()];
    let count = file.read_at(&mut read, 0);
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!(count.unwrap(), data.len());
    assert!(read == data);
}
