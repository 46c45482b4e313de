//! Fragments leave when they land.

use crate::client::{Chunk, DF, Form, READ};
use crate::stores::Gated;
use crate::{World, pattern, wait_until};
use std::sync::Arc;
use towline_server::{DiskKind, OwnStore};

const QUARTER: u64 = 256 * 1024;

/// A server that reads in fragments of 256 KiB.
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
        wait_until("all fragments are asked for together", || disk.waiting() == 4);
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
    for (form, flags) in [(Form::Simple, 0), (Form::Structured, DF)] {
        disk.close((0..4).map(|quarter| quarter * QUARTER));
        let world = quarters(disk.clone());
        let mut client = world.client(form);
        client.request(READ, flags, 9, 0, 1 << 20);
        wait_until("all fragments are asked for together", || disk.waiting() == 4);
        for quarter in [2, 0, 3, 1] {
            disk.open(quarter * QUARTER);
        }
        if form == Form::Simple {
            assert_eq!(client.simple().unwrap(), (0, 9));
            assert!(client.bytes(1 << 20).unwrap() == data);
        } else {
            assert!(client.chunks().unwrap() == [Chunk::Data(0, data.clone()), Chunk::End]);
        }
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
