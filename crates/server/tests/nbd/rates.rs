//! Clients with a limited rate.

use crate::World;
use crate::client::{Client, DISCONNECT, FLUSH, Form, READ, WRITE};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_server::{DiskExport, DiskKind, OwnStore, RateLimit};
use towline_store::BlockStore;
use towline_store::block::MemoryDisk;

const MIB: u64 = 1 << 20;

fn limited(operations: u64, bytes: u64) -> World {
    World::with(DiskKind::Memory(8 * MIB), |config| {
        config.disks[0].limit = RateLimit { operations, bytes };
    })
}

/// Checks only that nobody gets more than the rate allows, which holds however slow the machine is. The first
/// tenth of a second is free.
fn no_faster(start: Instant, work: f64, rate: f64) {
    let least = Duration::from_secs_f64(work / rate) - Duration::from_millis(120);
    assert!(start.elapsed() >= least, "{:?} for what takes {least:?}", start.elapsed());
}

#[test]
fn requests_are_limited_over_all_connections_of_a_client() {
    let world = limited(100, 0);
    let mut clients = [Form::Simple, Form::Structured, Form::Extended].map(|f| world.client(f));
    let start = Instant::now();
    // Many at once, so that those that are not read yet wait.
    for client in &mut clients {
        for _ in 0..10 {
            client.request(FLUSH, 0, 1, 0, 0);
            client.request(READ, 0, 2, 0, 512);
        }
    }
    for client in &mut clients {
        for _ in 0..20 {
            take(client);
        }
    }
    no_faster(start, 60.0, 100.0);
}

/// Receives the next reply, to a flush or a read of a sector.
fn take(client: &mut Client) {
    if client.form == Form::Simple {
        let (error, cookie) = client.simple().unwrap();
        assert_eq!(error, 0);
        if cookie == 2 {
            client.bytes(512).unwrap();
        }
    } else {
        client.chunks().unwrap();
    }
}

#[test]
fn bytes_are_limited_both_ways() {
    let world = limited(0, 10 * MIB);
    let mut client = world.client(Form::Structured);
    let start = Instant::now();
    let data = vec![7; 1 << 20];
    for _ in 0..2 {
        assert_eq!(client.write(0, 0, &data), 0);
        assert!(client.read(0, MIB).unwrap() == data);
        assert_eq!(client.write(0, 0, &data[..4096]), 0);
    }
    // The last one was taken before it was paid for.
    no_faster(start, 4.0 - 0.1, 10.0);
    // A long request is taken in one piece, and the next one waits until it is paid for.
    let start = Instant::now();
    client.read(0, 4 * MIB).unwrap();
    client.read(0, 512).unwrap();
    no_faster(start, 4.0, 10.0);
}

/// Under the limit, the waiting request would wait for a week.
#[test]
fn another_limit_holds_at_once_for_those_who_are_connected() {
    let world = World::with(DiskKind::Memory(8 * MIB), |config| config.cores = 1);
    let limit = |bytes| {
        let mut disk = world.disks[0].clone();
        disk.limit = RateLimit { operations: 0, bytes };
        world.server.replace(&[], &[disk]).unwrap();
    };
    let mut client = world.client(Form::Simple);
    client.read(0, MIB).unwrap();
    for _ in 0..2 {
        limit(1);
        // Taken at once, and then owed.
        client.read(0, MIB).unwrap();
        let taken = world.counter("requests");
        client.request(READ, 0, 2, 0, 512);
        // After this, the core has had further turns.
        let other = world.client(Form::Simple);
        drop(other);
        assert_eq!(world.counter("requests"), taken);
        limit(0);
        take(&mut client);
    }
}

#[test]
fn others_are_not_held_up_by_a_client_that_asks_for_too_much() {
    let world = World::with(DiskKind::Memory(8 * MIB), |config| {
        let free = config.disks[0].clone();
        config.disks[0].limit = RateLimit { operations: 1, bytes: 0 };
        config.disks.push(towline_server::DiskExport { name: "free".into(), ..free });
        config.cores = 1;
    });
    let mut greedy = world.client(Form::Simple);
    for _ in 0..100 {
        greedy.request(READ, 0, 2, 0, 512);
    }
    let mut other = Client::connect_to(world.socket(), Form::Structured, "free");
    for _ in 0..200 {
        other.read(0, 4096).unwrap();
    }
    // The client is still waiting, and disappears without a trace.
    take(&mut greedy);
    drop(greedy);
    crate::wait_until("it is gone", || world.counter("lanes") == 1);
}

/// A disk with a limit of two requests a second, and the same disk without a limit as `free`.
fn limited_and_free() -> World {
    let store: Arc<dyn BlockStore> = MemoryDisk::new("disk", MIB).unwrap();
    World::with(DiskKind::Own(OwnStore(store)), |config| {
        config.disks.push(DiskExport { name: "free".into(), ..config.disks[0].clone() });
        config.disks[0].limit = RateLimit { operations: 2, bytes: 0 };
    })
}

/// Sends three writes, of which the last two have to wait, and receives the answer to the first.
fn write_too_much(client: &mut Client, data: &[u8]) {
    let write = client.request_bytes(WRITE, 0, 1, 0, data.len() as u64, data);
    for _ in 0..3 {
        client.send(&write);
    }
    assert_eq!(client.outcome().unwrap(), 0);
}

#[test]
fn what_waits_for_the_limit_of_a_killed_client_is_not_carried_out() {
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        // Received together, or still in the socket.
        for length in [512, 60_000] {
            let world = limited_and_free();
            let mut killed = world.client(form);
            write_too_much(&mut killed, &vec![1; length]);
            drop(killed);
            let mut other = Client::connect_to(world.socket(), form, "free");
            assert_eq!((other.write(0, 0, &[2; 512]), other.flush()), (0, 0));
            crate::wait_until("it is gone", || world.counter("lanes") == 1);
            assert_eq!(other.read(0, 512).unwrap(), [2; 512]);
        }
    }
}

#[test]
fn what_waits_for_the_limit_of_a_client_that_takes_its_leave_is_carried_out() {
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        for length in [512, 60_000] {
            let world = limited_and_free();
            let mut leaving = world.client(form);
            write_too_much(&mut leaving, &vec![1; length]);
            let mut other = Client::connect_to(world.socket(), form, "free");
            assert_eq!(other.write(0, 0, &[2; 512]), 0);
            leaving.request(DISCONNECT, 0, 0, 0, 0);
            leaving.socket.shutdown(Shutdown::Write).unwrap();
            for _ in 0..2 {
                assert_eq!(leaving.outcome().unwrap(), 0);
            }
            assert!(leaving.bytes(1).is_err(), "nothing follows");
            assert_eq!(other.read(0, 512).unwrap(), [1; 512]);
        }
    }
}
