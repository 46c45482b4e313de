//! What takes one round trip: one message each way, however it travels. Counts messages, not time.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{Random, counter_in};
use towline_client::{Client, Options};
use towline_server::EngineWish;

const CALLS: u64 = 500;
const PAGE: usize = 4096;
/// Pages of the file that is read at random.
const PAGES: u64 = 256;

/// Returns the requests and replies that the server counts for all calls.
fn counted(client: &Client, mut call: impl FnMut()) -> [u64; 2] {
    let seen = || {
        let statistics = client.statistics().unwrap();
        ["messages_received", "messages_sent"].map(|name| counter_in(&statistics, name))
    };
    let before = seen();
    (0..CALLS).for_each(|_| call());
    let after = seen();
    // Without the request for the second statistics and the reply with the first ones.
    [0, 1].map(|way| after[way] - before[way] - 1)
}

fn check(client: &Client, export: &[u8], what: &str) {
    let top = client.attach(export).unwrap();
    let expected = [CALLS; 2];
    let contents = common::pattern(PAGE * PAGES as usize, 1);
    top.write_path(b"large", common::CREATE, 0o600, &contents).unwrap();
    let mut random = Random::new(1);
    let names = (0..CALLS).map(|number| format!("file{number}").into_bytes()).collect::<Vec<_>>();
    for name in &names {
        top.write_path(name, common::CREATE, 0o600, &contents[..PAGE]).unwrap();
    }

    let mut next = names.iter();
    let stat = || assert_eq!(top.stat_path(next.next().unwrap(), true).unwrap().size, 4096);
    assert_eq!(counted(client, stat), expected, "{what}: stat");

    let mut page = [0; PAGE];
    let mut next = names.iter();
    let whole = || {
        assert_eq!(top.read_path(next.next().unwrap(), 0, &mut page).unwrap(), PAGE);
        assert_eq!(page, contents[..PAGE]);
    };
    assert_eq!(counted(client, whole), expected, "{what}: open, read and close");

    let file = top.open(b"large", 0, 0).unwrap();
    let read = || {
        let offset = random.below(PAGES) as usize * PAGE;
        assert_eq!(file.read_at(&mut page, offset as u64).unwrap(), PAGE);
        assert_eq!(page, contents[offset..offset + PAGE]);
    };
    assert_eq!(counted(client, read), expected, "{what}: a read at random");
}

/// Keeps this thread on one processor. The client tells the server when it has another one, by a message that
/// has no reply.
fn stay_here() {
    let mut here = rustix::thread::CpuSet::new();
    here.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &here).unwrap();
}

#[test]
fn small_requests_take_one_round_trip() {
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = common::setup(engine);
        let check_all = || {
            stay_here();
            for transport in &setup.transports {
                let client = Client::connect(transport, Options::default()).unwrap();
                for export in [&b"dir"[..], b"mem"] {
                    let what = format!("{} over {transport:?}", export.escape_ascii());
                    check(&client, export, &what);
                }
            }
        };
        // In a thread of its own, so that those of the next server are free.
        std::thread::scope(|scope| scope.spawn(check_all).join()).unwrap();
    }
}
