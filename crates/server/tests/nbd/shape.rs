//! Properties that an export sets instead of its back end: blocks, depth, and which disk is the default.

use crate::World;
use crate::client::{Client, FLUSH, Form, READ, WRITE};
use crate::stores::Gated;
use std::sync::Arc;
use towline_server::{Config, DiskExport, DiskKind, OwnStore, Server, Shape};

const MIB: u64 = 1 << 20;
const EINVAL: u32 = 22;

fn shaped(kind: DiskKind, shape: Shape) -> World {
    World::with(kind, |config| config.disks[0].shape = shape)
}

#[test]
fn the_smallest_block_is_what_the_export_says() {
    let shape = Shape { block: 8192, preferred: 65536, depth: 0 };
    let world = shaped(DiskKind::Memory(MIB), shape);
    let mut client = world.client(Form::Structured);
    assert_eq!(client.read(0, 4096), Err(EINVAL));
    assert_eq!(client.read(4096, 8192), Err(EINVAL));
    assert_eq!(client.write(0, 0, &[1; 4096]), EINVAL);
    assert_eq!(client.write(0, 8192, &[2; 8192]), 0);
    assert!(client.read(8192, 8192).unwrap() == [2; 8192]);
}

#[test]
fn blocks_that_do_not_fit_the_disk_are_refused() {
    for (block, says) in [(8192, "not a multiple"), (1000, "power of two")] {
        let mut disk = DiskExport::new("odd", DiskKind::Memory(MIB + 512));
        disk.shape.block = block;
        let config = Config { disks: vec![disk], ..Config::default() };
        let error = Server::start(&config).err().unwrap().to_string();
        assert!(error.contains("odd") && error.contains(says), "{error}");
    }
}

#[test]
fn names_that_nobody_could_ask_for_are_refused() {
    for name in ["", "a\0b", &"a".repeat(5000)] {
        let disk = DiskExport::new(name, DiskKind::Memory(MIB));
        let config = Config { disks: vec![disk], ..Config::default() };
        let error = Server::start(&config).err().unwrap().to_string();
        assert!(error.contains("\": the name is empty, longer than"), "{error}");
    }
}

#[test]
fn of_one_connection_only_so_many_requests_are_under_way() {
    let gated = Gated::new(MIB);
    gated.close((0..8).map(|at| at * 65536));
    let kind = DiskKind::Own(OwnStore(gated.clone() as Arc<_>));
    let world = shaped(kind, Shape { depth: 2, ..Shape::default() });
    let (mut one, mut other) = (world.client(Form::Structured), world.client(Form::Structured));
    for at in 0..6 {
        one.request(READ, 0, at, at * 65536, 4096);
    }
    crate::wait_until("two requests wait", || gated.waiting() == 2);
    // Another connection is not held up, and shows that the server has seen the earlier requests.
    other.request(READ, 0, 7, 7 * 65536, 4096);
    crate::wait_until("three requests wait", || gated.waiting() == 3);
    let mut third = world.client(Form::Structured);
    assert_eq!(third.flush(), 0);
    assert_eq!(gated.waiting(), 3);
    gated.open_all();
    for _ in 0..6 {
        one.chunks().unwrap();
    }
    other.chunks().unwrap();
    one.request(FLUSH, 0, 9, 0, 0);
    one.chunks().unwrap();
}

/// A write that waits for memory is itself one of the requests under way.
#[test]
fn a_write_waits_for_memory_whatever_the_depth() {
    let gated = Gated::new(2 * MIB);
    gated.close((0..8).map(|at| at * MIB / 4));
    let kind = DiskKind::Own(OwnStore(gated.clone() as Arc<_>));
    let world = World::with(kind, |config| {
        config.disks[0].shape.depth = 1;
        config.buffer_limit = MIB;
        config.cores = 1;
    });
    let (mut one, mut other) = (world.client(Form::Structured), world.client(Form::Structured));
    let write = one.request_bytes(WRITE, 0, 1, 0, MIB, &vec![1; MIB as usize]);
    one.send(&write);
    crate::wait_until("all buffers are in use", || gated.waiting() == 8);
    let write = other.request_bytes(WRITE, 0, 2, MIB, 96 * 1024, &[2; 96 * 1024]);
    other.send(&write);
    // Another connection shows that the server has seen the write.
    assert_eq!(world.client(Form::Structured).flush(), 0);
    gated.open_all();
    assert_eq!((one.outcome().unwrap(), other.outcome().unwrap()), (0, 0));
}

#[test]
fn the_default_disk_is_the_one_that_says_so() {
    let world = World::with(DiskKind::Memory(MIB), |config| {
        let mut second = DiskExport::new("second", DiskKind::Memory(2 * MIB));
        second.is_default = true;
        config.disks.push(second);
    });
    assert_eq!(Client::connect_to(world.socket(), Form::Simple, "").size, 2 * MIB);
    assert_eq!(Client::connect_to(world.socket(), Form::Simple, "disk").size, MIB);
    let twice = ["a", "b"].map(|name| {
        let mut disk = DiskExport::new(name, DiskKind::Memory(MIB));
        disk.is_default = true;
        disk
    });
    let config = Config { disks: twice.to_vec(), ..Config::default() };
    let error = Server::start(&config).err().unwrap().to_string();
    assert!(error.contains("\"b\"") && error.contains("default"), "{error}");
}
