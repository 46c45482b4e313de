//! Fragments leave when they land, and replies in the order that clients need.

use crate::client::{Chunk, Client, DF, Form, READ, WRITE};
use crate::stores::Gated;
use crate::{World, pattern, wait_until};
use std::sync::Arc;
use towline_server::{DiskKind, OwnStore};

const QUARTER: u64 = 256 * 1024;

/// Starts a server that reads in fragments of 256 KiB.
fn quarters(disk: Arc<Gated>) -> World {
    let kind = DiskKind::Own(OwnStore(disk));
    World::with(kind, |config| config.fragment_bytes = QUARTER)
}

#[test]
fn chunks_leave_in_the_order_in_which_they_land() {
    for form in [Form::Structured, Form::Extended] {
        let disk = Gated::new(1 << 20);
        let data = pattern(0, 1 << 20, 1);
        disk.fill(&data);
        disk.close((0..4).map(|quarter| quarter * QUARTER));
        let world = quarters(disk.clone());
        let mut client = world.client(form);
        client.request(READ, 0, 9, 0, 1 << 20);
        wait_until("all fragments are asked for together", || disk.waiting() >= 4);
        for quarter in [2, 0, 3, 1] {
            disk.open(quarter * QUARTER);
            let (cookie, chunk, done) = client.chunk().unwrap();
            let at = quarter * QUARTER;
            let bytes = data[at as usize..][..QUARTER as usize].to_vec();
            assert!(cookie == 9 && chunk == Chunk::Data(at, bytes), "quarter {quarter}");
            assert_eq!(done, quarter == 1, "only the last one ends the reply");
        }
    }
}

#[test]
fn who_needs_order_gets_it() {
    let disk = Gated::new(1 << 20);
    let data = pattern(0, 1 << 20, 1);
    disk.fill(&data);
    disk.close((0..4).map(|quarter| quarter * QUARTER));
    let world = quarters(disk.clone());
    let mut client = world.client(Form::Simple);
    client.request(READ, 0, 9, 0, 1 << 20);
    wait_until("all fragments are asked for together", || disk.waiting() >= 4);
    for quarter in [2, 0, 3, 1] {
        disk.open(quarter * QUARTER);
    }
    assert_eq!(client.simple().unwrap(), (0, 9));
    assert!(client.bytes(1 << 20).unwrap() == data);
    // In one piece.
    let mut client = world.client(Form::Structured);
    client.request(READ, DF, 9, 0, QUARTER);
    let bytes = data[..QUARTER as usize].to_vec();
    assert!(client.chunks().unwrap() == [Chunk::Data(0, bytes)]);
    client.request(READ, DF, 9, 0, 1 << 20);
    const EOVERFLOW: u32 = 75;
    assert_eq!(client.chunks().unwrap(), [Chunk::Error(EOVERFLOW, None)]);
}

/// The protocol allows no server that has DF to refuse it for so little.
#[test]
fn a_server_of_short_fragments_does_not_offer_to_send_reads_whole() {
    const SEND_DF: u16 = 1 << 7;
    let disk = Gated::new(1 << 20);
    for (fragment, has) in [(16 << 10, false), (64 << 10, true)] {
        let kind = DiskKind::Own(OwnStore(disk.clone()));
        let world = World::with(kind, |config| config.fragment_bytes = fragment);
        let mut client = world.client(Form::Structured);
        assert_eq!(client.flags & SEND_DF != 0, has);
        client.request(READ, DF, 9, 0, 64 << 10);
        let chunks = client.chunks().unwrap();
        const EINVAL: u32 = 22;
        match has {
            true => assert!(matches!(chunks[..], [Chunk::Data(0, _)])),
            false => assert_eq!(chunks, [Chunk::Error(EINVAL, None)]),
        }
    }
}

/// Simple replies never mix, whatever the order in which fragments land and whatever else is answered.
#[test]
fn simple_replies_do_not_mix() {
    let disk = Gated::new(4 << 20);
    let data = pattern(0, 4 << 20, 1);
    disk.fill(&data);
    let gates: Vec<u64> = (0..16).map(|gate| gate * QUARTER).collect();
    for seed in 0..20u64 {
        disk.close(gates.iter().copied());
        let world = quarters(disk.clone());
        let mut client = world.client(Form::Simple);
        let ranges = [(0u64, 2u64), (2, 3), (5, 1), (6, 6), (12, 1)];
        for (cookie, (from, count)) in ranges.iter().enumerate() {
            client.request(READ, 0, cookie as u64, from * QUARTER, count * QUARTER);
            // This one is refused at once.
            client.request(READ, 0, 100, 4 << 20, 512);
        }
        wait_until("the disk works", || disk.waiting() >= 4);
        let opener = std::thread::spawn({
            let (disk, mut gates) = (disk.clone(), gates.clone());
            move || {
                for step in 0..gates.len() {
                    let at = (seed as usize * 7 + step * 5) % gates.len();
                    disk.open(gates.swap_remove(at));
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
            }
        });
        for _ in 0..2 * ranges.len() {
            let (error, cookie) = client.simple().unwrap();
            assert_eq!(error != 0, cookie == 100);
            if cookie != 100 {
                let (from, count) = ranges[cookie as usize];
                let range = (from * QUARTER) as usize..((from + count) * QUARTER) as usize;
                assert!(client.bytes(range.len()).unwrap() == data[range], "reply {cookie}");
            }
        }
        opener.join().unwrap();
    }
}

/// A request that waits does not hold up others of the same connection.
#[test]
fn replies_overtake() {
    let disk = Gated::new(1 << 20);
    disk.close([0]);
    let world = World::new(disk.clone());
    let mut client = world.client(Form::Simple);
    client.request(READ, 0, 1, 0, 512);
    client.request(READ, 0, 2, QUARTER, 512);
    assert_eq!(client.simple().unwrap(), (0, 2));
    client.bytes(512).unwrap();
    disk.open(0);
    assert_eq!(client.simple().unwrap(), (0, 1));
}

/// Extents carry the id of their own context, in whatever order a payload names the contexts.
#[test]
fn metadata_contexts_may_be_named_in_any_order() {
    const BLOCK_STATUS: u16 = 7;
    let world = World::with(DiskKind::Memory(1 << 20), |_| {});
    let names = ["base:allocation", "qemu:dirty-bitmap:written"];
    let (mut client, ids) = Client::with_contexts(world.socket(), &names);
    for named in [[ids[0], ids[1]], [ids[1], ids[0]]] {
        let mut payload = (1u64 << 20).to_be_bytes().to_vec();
        payload.extend(named.iter().flat_map(|id| id.to_be_bytes()));
        let length = payload.len() as u64;
        let request = client.request_bytes(BLOCK_STATUS, 0, 1, 0, length, &payload);
        client.send(&request);
        let mut told: Vec<_> = (0..2)
            .map(|_| {
                // A header, the id, the number of extents, and one extent: its length and its flags.
                let chunk = client.bytes(32 + 4 + 4 + 16).unwrap();
                (chunk[32..36].to_vec(), chunk[48..].to_vec())
            })
            .collect();
        told.sort_unstable();
        // All of it is a hole, and nothing was written.
        let expected = [(ids[0], 3u64), (ids[1], 0)];
        let expected =
            expected.map(|(id, flags)| (id.to_be_bytes().into(), flags.to_be_bytes().into()));
        assert_eq!(told, expected, "named as {named:?}");
    }
}

/// If all answers left in one piece, client and server would take turns; if each left alone, system calls
/// would be most of the work.
#[test]
fn answers_to_small_requests_leave_in_portions() {
    const COUNT: u64 = 32;
    let world = World::with(DiskKind::Memory(1 << 20), |_| {});
    let mut client = world.client(Form::Simple);
    let data = pattern(0, 1 << 20, 5);
    assert_eq!(client.write(0, 0, &data), 0);
    for kind in [READ, WRITE] {
        let mut requests = Vec::new();
        for cookie in 0..COUNT {
            let at = cookie as usize * 4096;
            let payload = if kind == WRITE { &data[at..at + 4096] } else { &[] };
            requests.extend(client.request_bytes(kind, 0, cookie, at as u64, 4096, payload));
        }
        let before = world.counter("system_calls");
        client.send(&requests);
        for cookie in 0..COUNT {
            assert_eq!(client.simple().unwrap(), (0, cookie));
            if kind == READ {
                let at = cookie as usize * 4096;
                assert!(client.bytes(4096).unwrap() == data[at..at + 4096]);
            }
        }
        let calls = world.counter("system_calls") - before;
        // At least one call receives, and each 32 KiB takes a send. The number of receives depends on the
        // client.
        assert!((5..COUNT).contains(&calls), "{kind}: {calls} system calls");
    }
}
