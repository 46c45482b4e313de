//! Disks with limits on what each client may ask for per second.

use crate::common::proxy::Proxy;
use crate::common::{no_faster, pattern, seed};
use crate::setup::{Disks, start};
use std::sync::atomic::Ordering;
use std::time::Instant;
use tempfile::TempDir;
use towline_client::{Client, Disk, Group, Options, Transport};
use towline_server::{DiskExport, DiskKind, RateLimit};

const MIB: usize = 1 << 20;

fn limited(operations: u64, bytes: u64) -> Disks {
    let mut slow = DiskExport::new("slow", DiskKind::Memory(8 * MIB as u64));
    slow.limit = RateLimit { operations, bytes };
    start(
        TempDir::new().unwrap(),
        vec![slow, DiskExport::new("free", DiskKind::Memory(8 * MIB as u64))],
    )
}

fn open(transport: &Transport) -> Disk {
    Client::connect(transport, Options::default()).unwrap().disk(b"slow").unwrap()
}

#[test]
fn requests_are_limited_over_all_sessions_of_a_client() {
    for transport in &limited(100, 0).transports {
        let disks = [open(transport), open(transport)];
        let start = Instant::now();
        // A group belongs to one session.
        let mut groups = [Group::new(), Group::new()];
        for (disk, group) in disks.iter().zip(&mut groups) {
            for number in 0..10 {
                group.add(disk.start_read_at(vec![1; 512], number * 512).unwrap(), number);
                group.add(disk.start_flush().unwrap(), 100 + number);
            }
        }
        for group in &mut groups {
            while let Some((tag, done)) = group.wait_any() {
                assert_eq!(done.unwrap().len(), if tag < 100 { 512 } else { 0 });
            }
        }
        no_faster(start, 40.0, 100.0);
    }
}

#[test]
fn bytes_are_limited_both_ways() {
    for transport in &limited(0, 10 * MIB as u64).transports {
        let disk = open(transport);
        let start = Instant::now();
        // A granted write, an inline write, and a single read longer than the limit allows at once.
        let data = pattern(MIB, 3);
        disk.write_at(&data, 0).unwrap();
        disk.write_at(&data[..4096], MIB as u64).unwrap();
        let mut back = vec![0; 2 * MIB];
        disk.read_at(&mut back, 0).unwrap();
        assert!(back[..MIB] == data && back[MIB..MIB + 4096] == data[..4096]);
        disk.read_at(&mut back[..4096], 0).unwrap();
        no_faster(start, 3.0, 10.0);
    }
}

#[test]
fn others_are_not_held_up() {
    let disks = limited(2, 0);
    for transport in &disks.transports {
        let client = Client::connect(transport, Options::default()).unwrap();
        let (slow, free) = (client.disk(b"slow").unwrap(), client.disk(b"free").unwrap());
        let data = pattern(4096, 5);
        let mut group = Group::new();
        let start = Instant::now();
        for number in 0..3 {
            group.add(slow.start_write_at(data.clone(), number * 4096, false).unwrap(), number);
        }
        // Another disk of the same session is not held up with it.
        for _ in 0..100 {
            free.write_at(&data, 0).unwrap();
        }
        let others = start.elapsed();
        while let Some((_, done)) = group.wait_any() {
            done.unwrap();
        }
        no_faster(start, 2.0, 2.0);
        assert!(others < start.elapsed());
    }
}

/// Under the limit, requests would wait for a week; they are overtaken by those that need not wait.
#[test]
fn another_limit_holds_at_once_for_those_who_are_connected() {
    for place in 0..limited(0, 0).transports.len() {
        let disks = limited(0, 0);
        let client = Client::connect(&disks.transports[place], Options::default()).unwrap();
        let (slow, free) = (client.disk(b"slow").unwrap(), client.disk(b"free").unwrap());
        let limit = |bytes| {
            let mut slow = DiskExport::new("slow", DiskKind::Memory(8 * MIB as u64));
            slow.limit = RateLimit { operations: 0, bytes };
            let free = DiskExport::new("free", DiskKind::Memory(8 * MIB as u64));
            disks.server.as_ref().unwrap().replace(&[], &[slow, free]).unwrap();
        };
        slow.write_at(&pattern(MIB, 1), 0).unwrap();
        for _ in 0..2 {
            limit(1);
            // Accepted at once, and then owed.
            slow.write_at(&pattern(MIB, 2), 0).unwrap();
            let mut group = Group::new();
            group.add(slow.start_read_at(vec![0; 4096], 0).unwrap(), 1);
            group.add(free.start_read_at(vec![0; 4096], 0).unwrap(), 2);
            assert_eq!(group.wait_any().map(|(tag, done)| (tag, done.is_ok())), Some((2, true)));
            limit(0);
            let (tag, read) = group.wait_any().unwrap();
            assert!(tag == 1 && read.unwrap() == pattern(MIB, 2)[..4096]);
        }
    }
}

#[test]
fn what_waits_survives_lost_lanes() {
    let disks = limited(100, 0);
    let proxy = Proxy::start(disks.port(), seed(), 30_000);
    let disk = open(&Transport::Tcp("127.0.0.1".into(), proxy.port));
    let mut group = Group::new();
    for round in 0..200 {
        for number in 0..16_u8 {
            let (data, offset) = (pattern(512, number + round), u64::from(number) * 512);
            group.add(disk.start_write_at(data, offset, false).unwrap(), 0);
        }
        while let Some((_, done)) = group.wait_any() {
            done.unwrap();
        }
        let mut back = vec![0; 16 * 512];
        disk.read_at(&mut back, 0).unwrap();
        let expected: Vec<u8> = (0..16_u8).flat_map(|n| pattern(512, n + round)).collect();
        assert!(back == expected, "round {round}");
        if proxy.cuts.load(Ordering::Relaxed) >= 5 {
            return;
        }
    }
    panic!("the proxy does not cut");
}
