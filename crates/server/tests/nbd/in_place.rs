//! Long writes to a memory disk, which are received straight into it.

use crate::client::{FLUSH, Form, TRIM, WRITE};
use crate::{World, pattern, wait_until};
use std::sync::Arc;
use towline_server::{DiskKind, OwnStore};
use towline_store::BlockStore;
use towline_store::block::MemoryDisk;

const MIB: u64 = 1 << 20;
const EIO: u32 = 5;
const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];

/// Starts a server with such a disk, and returns both.
fn world(size: u64) -> (World, Arc<MemoryDisk>) {
    let disk = MemoryDisk::new("disk", size).unwrap();
    let store: Arc<dyn BlockStore> = disk.clone();
    (World::with(DiskKind::Own(OwnStore(store)), |_| {}), disk)
}

fn bytes_of(disk: &MemoryDisk) -> Vec<u8> {
    let mut bytes = vec![0; disk.geometry().size as usize];
    disk.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn payload_is_received_into_the_disk() {
    for form in FORMS {
        let (world, disk) = world(16 * MIB);
        let mut client = world.client(form);
        // Several writes in one piece, not aligned, with a short one in between.
        let parts =
            [(4097, 3 << 20), (8 * MIB - 100, 200), (5 * MIB + 1, 64 << 10), (9 * MIB, 5 << 20)];
        let mut sent = Vec::new();
        let mut expected = vec![0; 16 << 20];
        for (cookie, (offset, length)) in (1..).zip(parts) {
            let data = pattern(offset, length, 3);
            sent.extend(client.request_bytes(WRITE, 0, cookie, offset, length as u64, &data));
            expected[offset as usize..offset as usize + length].copy_from_slice(&data);
        }
        sent.extend(client.request_bytes(FLUSH, 0, 9, 0, 0, &[]));
        let mut sender = client.socket.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || std::io::Write::write_all(&mut sender, &sent).unwrap());
            for _ in 0..=parts.len() {
                assert_eq!(client.outcome().unwrap(), 0);
            }
        });
        assert!(bytes_of(&disk) == expected, "{form:?}");
        // Data that arrived together with headers was copied: at most one receive's length for each of the
        // first writes.
        let placed = world.counter("bytes_received_placed");
        let in_place = world.counter("disk_bytes_written_in_place");
        let staged = world.counter("disk_bytes_written_staged");
        let all: usize = parts.iter().map(|(_, length)| length).sum();
        assert_eq!(in_place + staged, all as u64);
        assert!(staged <= 200 + (64 << 10), "{form:?}: {staged} of {all} bytes in a buffer");
        assert!(placed >= all as u64 - (384 << 10), "{form:?}: {placed} of {all} bytes placed");
        assert_eq!(world.counter("buffer_bytes_peak"), 0, "{form:?}: no buffer was taken");
    }
}

#[test]
fn a_stream_of_long_writes_is_not_copied() {
    for form in FORMS {
        let (world, disk) = world(MIB);
        let mut client = world.client(form);
        let data = pattern(0, 64 << 10, 8);
        for number in 0..64 {
            assert_eq!(client.write(0, number % 16 * 65536, &data), 0);
        }
        // The first write arrived in one piece with its header; no byte of the others is copied.
        assert!(world.counter("disk_bytes_written_staged") <= 64 << 10);
        assert!(world.counter("bytes_received_placed") >= 63 << 16);
        assert!(bytes_of(&disk).chunks(65536).all(|chunk| chunk == data));
    }
}

#[test]
fn a_client_that_vanishes_in_the_middle_changes_nothing_beyond_its_range() {
    let (world, disk) = world(4 * MIB);
    let before = pattern(0, 4 << 20, 1);
    disk.write(0, &before, false).unwrap();
    let new = pattern(0, 1 << 20, 2);
    for number in 0..60 {
        let mut client = world.client(FORMS[number % 3]);
        let bytes = client.request_bytes(WRITE, 0, 1, MIB, MIB, &new);
        // Ends at any byte of the payload.
        client.send(&bytes[..40 + number * 17_000]);
        drop(client);
    }
    wait_until("all connections are gone", || world.counter("lanes") == 0);
    let found = bytes_of(&disk);
    assert!(found[..1 << 20] == before[..1 << 20] && found[2 << 20..] == before[2 << 20..]);
    let range = 1 << 20..2 << 20;
    let legal = range.clone().all(|at| found[at] == before[at] || found[at] == new[at - (1 << 20)]);
    assert!(legal, "each byte is the old or the new one");
    assert!(found[range.start] == new[0], "some of it came");
    // The server continues.
    let mut client = world.client(Form::Structured);
    assert_eq!(client.write(0, MIB, &new), 0);
    assert!(client.read(MIB, MIB).unwrap() == new);
}

/// The part of a write that arrived is data like any other: a trim removes it for good.
#[test]
fn half_a_write_to_a_hole_does_not_come_back() {
    let (world, disk) = world(MIB);
    let mut client = world.client(Form::Structured);
    let bytes = client.request_bytes(WRITE, 0, 1, 1000, 100_000, &[7; 100_000]);
    client.send(&bytes[..70_000]);
    let mut other = world.client(Form::Structured);
    wait_until("half of it came", || other.read(60_000, 1).unwrap() == [7]);
    drop(client);
    wait_until("the client is gone", || world.counter("lanes") == 1);
    other.request(TRIM, 0, 2, 0, MIB);
    assert_eq!(other.outcome().unwrap(), 0);
    assert!(bytes_of(&disk).iter().all(|byte| *byte == 0));
    // Writes to pages that held a part of it.
    assert_eq!(other.write(0, 0, &[1; 100]), 0);
    assert_eq!(other.write(0, 68_000, &[1; 100]), 0);
    assert_eq!(bytes_of(&disk).iter().map(|byte| u64::from(*byte)).sum::<u64>(), 200);
}

#[test]
fn slow_clients_hold_up_nobody() {
    let (world, _disk) = world(8 * MIB);
    let mut slow: Vec<_> = (0..20).map(|number| world.client(FORMS[number % 3])).collect();
    let data = pattern(0, 1 << 20, 4);
    for client in &mut slow {
        let bytes = client.request_bytes(WRITE, 0, 1, 0, MIB, &data);
        client.send(&bytes[..500_000]);
    }
    let mut quick = world.client(Form::Extended);
    for number in 0..4 {
        assert_eq!(quick.write(0, 2 * MIB + number * MIB, &data), 0);
    }
    assert!(quick.read(3 * MIB, MIB).unwrap() == data);
    for client in &mut slow {
        let bytes = client.request_bytes(WRITE, 0, 1, 0, MIB, &data);
        client.send(&bytes[500_000..]);
        assert_eq!(client.outcome().unwrap(), 0);
    }
    assert!(quick.read(0, MIB).unwrap() == data);
}

#[test]
fn a_disk_that_becomes_shorter_in_the_middle_takes_no_more() {
    for form in FORMS {
        let disk = MemoryDisk::new("disk", 4 * MIB).unwrap();
        let store: Arc<dyn BlockStore> = disk.clone();
        let world = World::with(DiskKind::Own(OwnStore(store)), |config| config.cores = 1);
        let mut client = world.client(form);
        let data = pattern(0, 2 << 20, 5);
        let bytes = client.request_bytes(WRITE, 0, 1, 2 * MIB, 2 * MIB, &data);
        client.send(&bytes[..1 << 20]);
        // Observed by a client of the same core, which at that moment cannot be receiving into a place found
        // before the resize.
        let mut other = world.client(form);
        wait_until("some of it came", || other.read(2 * MIB + 900_000, 1).unwrap() != [0]);
        disk.resize(3 * MIB).unwrap();
        client.send(&bytes[1 << 20..]);
        assert_eq!(client.outcome().unwrap(), EIO, "{form:?}");
        disk.resize(4 * MIB).unwrap();
        let found = bytes_of(&disk);
        assert!(found[3 << 20..].iter().all(|byte| *byte == 0), "{form:?}");
        assert!(found[..2 << 20].iter().all(|byte| *byte == 0), "{form:?}");
        assert_eq!(client.write(0, 2 * MIB, &data), 0);
        assert!(client.read(2 * MIB, 2 * MIB).unwrap() == data);
    }
}
