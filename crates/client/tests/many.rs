//! Many operations of one client at once, of different kinds: none keeps another one waiting.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Process, eventually, setup};
use std::future::Future;
use std::io::IoSliceMut;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Errno, Error, Group, Lock, Operation, Options};
use towline_server::EngineWish;
use towline_wire::limits::SLOTS_MAX;
use towline_wire::request::lock;

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

fn whole(kind: u8) -> Lock {
    Lock { family: lock::OPEN_FILE, kind, owner: 0, start: 0, length: 0 }
}

/// A thread that waits for a lock receives for all, and nothing arrives until others have done
/// something.
#[test]
fn vectors_are_sent_while_another_thread_receives() {
    let directory = TempDir::new().unwrap();
    let server = Process::start(directory.path());
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let other = Client::connect(&server.tcp(), Options::default()).unwrap();
    let held = other.attach(b"mem").unwrap().open(b"file", CREATE, 0o600).unwrap();
    held.lock(&whole(lock::EXCLUSIVE), false).unwrap();
    let file = client.attach(b"mem").unwrap().open(b"file", CREATE, 0o600).unwrap();
    let disk = client.disk(b"memory").unwrap();
    let waits = std::thread::spawn(move || file.lock(&whole(lock::EXCLUSIVE), true));
    std::thread::sleep(Duration::from_millis(300));
    let reads = std::thread::spawn(move || {
        let (mut one, mut two) = ([1; 4096], [1; 4096]);
        disk.read_vectored_at(&mut [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)], 0)
    });
    eventually("the requests of a vector were not sent", || reads.is_finished());
    reads.join().unwrap().unwrap();
    held.lock(&whole(lock::UNLOCK), false).unwrap();
    waits.join().unwrap().unwrap();
}

/// The server remembers nothing, so nobody knows whether these took effect.
#[test]
fn operations_that_failed_give_their_slots_to_later_ones() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    server.stop();
    let begin = |number: usize| root.start_unlink(format!("{number}").as_bytes()).unwrap();
    let unlinks: Vec<_> = (0..SLOTS_MAX - 1).map(begin).collect();
    server.kill();
    server.restart();
    let more = std::thread::spawn(move || root.start_stat_path(b".", true).unwrap().wait());
    eventually("it waits for ever for a slot", || more.is_finished());
    assert!(more.join().unwrap().unwrap().is_directory());
    for unlink in unlinks {
        assert_eq!(unlink.wait(), Err(Error::Unknown));
    }
}

/// The client tries to reach the server for as long as the options say, not once more for each
/// waiting future.
#[test]
fn futures_of_a_session_that_ended_are_told_at_once() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(1);
    let client = Client::connect(&server.tcp(), options).unwrap();
    let root = client.attach(b"dir").unwrap();
    server.stop();
    let stats: Vec<_> = (0..20).map(|_| root.start_stat_path(b".", true).unwrap()).collect();
    server.kill();
    let start = Instant::now();
    let context = &mut Context::from_waker(Waker::noop());
    for mut stat in stats {
        loop {
            match Pin::new(&mut stat).poll(context) {
                Poll::Ready(result) => break drop(result.unwrap_err()),
                Poll::Pending => std::thread::yield_now(),
            }
        }
    }
    client.progress();
    let took = start.elapsed();
    assert!(took < Duration::from_secs(8), "tried for {took:?}");
}

/// No call waits for a single request by itself.
#[test]
fn files_are_closed_though_only_groups_and_futures_are_waited_for() {
    let setup = setup(EngineWish::Automatic);
    let (client, other) = (setup.client(), setup.client());
    let theirs = other.attach(b"mem").unwrap().open(b"file", CREATE, 0o600).unwrap();
    let root = client.attach(b"mem").unwrap();
    let stat = || root.start_stat_path(b"file", true).unwrap();
    for grouped in [true, false] {
        let file = root.open(b"file", CREATE, 0o600).unwrap();
        file.lock(&whole(lock::EXCLUSIVE), false).unwrap();
        let mut stats: Vec<Operation<_>> = (0..SLOTS_MAX - 1).map(|_| stat()).collect();
        drop(file); // while no slot is free
        if grouped {
            let mut group = Group::new();
            for (tag, stat) in stats.drain(..).enumerate() {
                group.add(stat, tag as u64);
            }
            while let Some((_, attr)) = group.wait_any() {
                attr.unwrap();
            }
        }
        let context = &mut Context::from_waker(Waker::noop());
        for mut stat in stats {
            while Pin::new(&mut stat).poll(context).is_pending() {
                client.progress();
            }
        }
        eventually("the file stays open, and locked", || {
            match theirs.lock(&whole(lock::EXCLUSIVE), false) {
                Err(error) => {
                    assert_eq!(error.errno(), Errno::EAGAIN);
                    false
                }
                Ok(()) => true,
            }
        });
        theirs.lock(&whole(lock::UNLOCK), false).unwrap();
    }
}

/// An event loop that waits for the descriptor as documented.
#[test]
fn long_writes_make_progress_in_an_event_loop() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports[..2] {
        let client = Client::connect(transport, Options::default()).unwrap();
        let file = client.attach(b"mem").unwrap().open(b"long", CREATE, 0o600).unwrap();
        let context = &mut Context::from_waker(Waker::noop());
        let fd = client.fd().unwrap();
        let start = Instant::now();
        for _ in 0..4 {
            let mut write = file.start_write_at(vec![1; 8 << 20], 0).unwrap();
            while Pin::new(&mut write).poll(context).is_pending() {
                assert!(start.elapsed() < Duration::from_secs(60), "{transport:?}: no progress");
                let room = if client.waits_to_send() { PollFlags::OUT } else { PollFlags::empty() };
                let flags = PollFlags::IN | room;
                let mut watched = [PollFd::new(&fd, flags)];
                let limit = Timespec { tv_sec: 5, tv_nsec: 0 };
                let ready = poll(&mut watched, Some(&limit)).unwrap();
                assert!(ready > 0, "{transport:?}: nothing to wait for comes");
                client.progress();
            }
        }
    }
}

/// Operations do not need the file or disk that they were started with.
#[test]
fn files_and_disks_are_let_go_while_operations_are_under_way() {
    let directory = TempDir::new().unwrap();
    std::fs::File::create(directory.path().join("disk")).unwrap().set_len(16 << 20).unwrap();
    let mut server = Process::start(directory.path());
    for restarts in [false, true] {
        for transport in server.transports() {
            for length in [512, 8192, 1 << 20, 4 << 20] {
                let what = format!("{transport:?}, {length} bytes, restarted: {restarts}");
                let client = Client::connect(&transport, Options::default()).unwrap();
                let root = client.attach(b"dir").unwrap();
                let file = root.open(b"file", CREATE, 0o600).unwrap();
                let disk = client.disk(b"file").unwrap();
                let data = vec![length as u8; length];
                if restarts {
                    server.stop();
                }
                let written = file.start_write_at(data.clone(), 0).unwrap();
                let stored = disk.start_write_at(data, 0, false).unwrap();
                drop((file, disk));
                if restarts {
                    server.kill();
                    server.restart();
                }
                let written = written.wait().map(|(count, _)| count);
                assert_eq!(written, Ok(length), "{what}");
                assert!(stored.wait().is_ok(), "{what}");
            }
        }
    }
}
