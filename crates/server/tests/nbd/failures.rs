//! Errors of devices become errors of requests, as the protocol demands, and never wrong data.

use crate::client::{Chunk, DF, FLUSH, FUA, Form, READ, WRITE, WRITE_ZEROES};
use crate::stores::Gated;
use crate::{World, pattern, wait_until};
use towline_server::{CacheMode, DiskKind};

const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];
const MIB: u64 = 1 << 20;
const EPERM: u32 = 1;
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

#[test]
fn a_read_that_fails_in_its_midst() {
    let disk = Gated::new(4 * MIB);
    let data = pattern(0, 4 << 20, 1);
    disk.fill(&data);
    disk.fail(MIB / 2 + 5, 5);
    let world = World::new(disk);
    for form in [Form::Structured, Form::Extended] {
        let mut client = world.client(form);
        client.request(READ, 0, 1, 0, MIB);
        let mut told = false;
        for chunk in client.chunks().unwrap() {
            match chunk {
                Chunk::Data(at, bytes) => {
                    assert!(bytes == data[at as usize..][..bytes.len()], "data at {at}");
                }
                Chunk::Error(EIO, Some(at)) => {
                    assert!(at <= MIB / 2 + 5);
                    told = true;
                }
                Chunk::End => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(told, "{form:?}");
        client.request(READ, DF, 2, MIB / 2, 65536);
        assert!(matches!(client.chunks().unwrap()[0], Chunk::Error(EIO, Some(_))), "in one piece");
        assert_eq!(client.read(MIB, MIB).unwrap(), data[MIB as usize..][..MIB as usize]);
    }
    // Behind the header of a simple reply the server can only hang up.
    let mut client = world.client(Form::Simple);
    client.request(READ, 0, 1, 0, MIB);
    let outcome = client.simple().and_then(|(error, _)| {
        assert_eq!(error, 0);
        client.bytes(MIB as usize)
    });
    assert!(outcome.is_err(), "wrong data was passed off as right");
    // Before the header it can report the error.
    let mut client = world.client(Form::Simple);
    assert_eq!(client.read(MIB / 2, 4096), Err(EIO));
    assert_eq!(client.read(0, 4096).unwrap(), data[..4096]);
}

/// The header of a simple reply promises its data. What fails meanwhile is reported behind it.
#[test]
fn a_change_that_fails_does_not_interrupt_a_simple_reply() {
    const QUARTER: usize = 256 * 1024;
    let disk = Gated::new(4 * MIB);
    let data = pattern(0, 4 << 20, 1);
    disk.fill(&data);
    disk.fail(3 * MIB, 28);
    disk.close([QUARTER as u64]);
    let world = World::new(disk.clone());
    let mut client = world.client(Form::Simple);
    client.request(READ, 0, 1, 0, 2 * QUARTER as u64);
    assert_eq!(client.simple().unwrap(), (0, 1));
    assert!(client.bytes(QUARTER).unwrap() == data[..QUARTER]);
    let before = world.counter("requests");
    client.request(WRITE_ZEROES, 0, 2, 3 * MIB, 4096);
    wait_until("the change has failed", || world.counter("requests") > before);
    disk.open(QUARTER as u64);
    assert!(client.bytes(QUARTER).unwrap() == data[QUARTER..2 * QUARTER], "something in between");
    assert_eq!(client.simple().unwrap(), (ENOSPC, 2));
}

/// What a panicked thread held cannot be released, so all connections end and none hangs.
#[test]
fn a_read_that_panics_ends_the_server() {
    let disk = Gated::new(4 * MIB);
    disk.fail(0, 0);
    let world = World::new(disk);
    let (tell, told) = std::sync::mpsc::channel();
    world.server.when_failed(move |why| tell.send(why.to_owned()).unwrap());
    let (mut bystander, mut client) = (world.client(FORMS[1]), world.client(FORMS[1]));
    client.request(READ, 0, 1, 0, 4096);
    let why = told.recv().unwrap();
    assert!(why.contains("a disk request failed because of a bug in the server"), "{why}");
    assert!(client.chunk().is_err() && bystander.chunk().is_err(), "a connection is left");
}

#[test]
fn writes_that_fail() {
    for form in FORMS {
        let disk = Gated::new(4 * MIB);
        disk.fail(5000, 28);
        disk.fail(2 * MIB, 122);
        let world = World::new(disk);
        let mut client = world.client(form);
        assert_eq!(client.write(0, 4096, &[1; 4096]), ENOSPC);
        assert_eq!(client.write(0, 0, &vec![1; 1 << 20]), ENOSPC, "one fragment of several");
        assert_eq!(client.write(0, 2 * MIB, &[1; 512]), ENOSPC, "the quota");
        client.request(WRITE_ZEROES, 0, 1, 4096, 4096);
        assert_eq!(client.outcome().unwrap(), ENOSPC);
        assert_eq!(client.write(0, MIB, &[1; 4096]), 0, "the connection goes on");
    }
}

#[test]
fn a_flush_that_fails_stops_all_changes_until_an_operator_acts() {
    let disk = Gated::new(4 * MIB);
    let world = World::new(disk.clone());
    let (mut one, mut other) = (world.client(Form::Structured), world.client(Form::Simple));
    assert_eq!(one.write(0, 0, &[7; 512]), 0);
    disk.fail_flush(true);
    assert_eq!(one.flush(), EIO);
    disk.fail_flush(false);
    assert_eq!(one.flush(), EIO, "a second flush must not say that all is well");
    assert_eq!(other.write(0, 0, &[8; 512]), EPERM);
    assert_eq!(other.write(0, 0, &vec![8; 1 << 20]), EPERM, "and stays in step");
    other.request(WRITE_ZEROES, 0, 1, 0, 512);
    assert_eq!(other.outcome().unwrap(), EPERM);
    assert_eq!(other.read(0, 512).unwrap(), [7; 512], "reads go on");
    world.server.replace(&[], &world.disks).unwrap();
    assert_eq!(other.write(0, 0, &[8; 512]), 0);
    assert_eq!(one.flush(), 0);
}

/// The kernel reports lost data to one flush only.
#[test]
fn every_connection_is_told_once_of_changes_that_may_be_lost() {
    for form in FORMS {
        let disk = Gated::new(4 * MIB);
        let world = World::new(disk.clone());
        // A client may write over one connection and flush over another.
        let [mut writer, mut flusher, mut told] = [(); 3].map(|()| world.client(form));
        assert_eq!(writer.write(0, 0, &[7; 512]), 0);
        disk.fail_flush(true);
        assert_eq!(told.flush(), EIO);
        disk.fail_flush(false);
        assert_eq!(told.flush(), EIO);
        let mut late = world.client(form);
        world.server.replace(&[], &world.disks).unwrap();
        assert_eq!(writer.write(0, 0, &[8; 512]), 0);
        for client in [&mut writer, &mut flusher, &mut late] {
            assert_eq!(client.flush(), EIO, "{form:?}");
            assert_eq!(client.flush(), 0, "{form:?}");
        }
        assert_eq!(told.flush(), 0, "{form:?}");
        assert_eq!(world.client(form).flush(), 0, "{form:?}: it has come since");
    }
}

#[test]
fn a_change_under_way_when_the_disk_fails_may_be_lost_too() {
    let disk = Gated::new(4 * MIB);
    let world = World::new(disk.clone());
    let (mut writer, mut other) = (world.client(Form::Structured), world.client(Form::Simple));
    disk.close([MIB]);
    let write = writer.request_bytes(WRITE, 0, 1, MIB, 512, &[7; 512]);
    writer.send(&write);
    wait_until("the write is under way", || disk.waiting() == 1);
    disk.fail_flush(true);
    assert_eq!(other.flush(), EIO);
    disk.fail_flush(false);
    world.server.replace(&[], &world.disks).unwrap();
    assert_eq!(writer.flush(), EIO);
    disk.open(MIB);
    assert_eq!(writer.outcome().unwrap(), 0, "the write");
    assert_eq!(writer.flush(), EIO, "the write was answered after the first flush");
    assert_eq!(writer.flush(), 0);
}

#[test]
fn a_flush_that_waits_while_the_disk_fails_and_is_forgiven() {
    let disk = Gated::new(4 * MIB);
    disk.fail(MIB, 5);
    let world = World::new(disk.clone());
    let (mut writer, mut other) = (world.client(Form::Structured), world.client(Form::Simple));
    assert_eq!(writer.write(0, 0, &[7; 512]), 0);
    disk.close_flush();
    writer.request(FLUSH, 0, 2, 0, 0);
    wait_until("the flush waits", || disk.flushing() == 1);
    assert_eq!(other.write(FUA, MIB, &[8; 512]), EIO);
    world.server.replace(&[], &world.disks).unwrap();
    disk.open_flush();
    assert_eq!(writer.outcome().unwrap(), EIO);
}

/// It is unknown what such a flush has written. Clients that send the next flush do not wait forever.
#[test]
fn a_flush_that_panics_is_one_that_fails() {
    let disk = Gated::new(4 * MIB);
    let world = World::new(disk.clone());
    let mut client = world.client(Form::Structured);
    disk.let_next_flush_panic();
    assert_eq!(client.flush(), EIO);
    assert_eq!(client.flush(), EIO);
    assert_eq!(client.write(0, 0, &[8; 512]), EPERM);
    world.server.replace(&[], &world.disks).unwrap();
    assert_eq!(client.write(0, 0, &[8; 512]), 0);
    assert_eq!(client.flush(), 0);
}

#[test]
fn a_durable_write_that_fails_is_a_failed_flush() {
    let disk = Gated::new(4 * MIB);
    disk.fail(0, 5);
    let world = World::new(disk);
    let mut client = world.client(Form::Structured);
    assert_eq!(client.write(FUA, 0, &[1; 512]), EIO);
    assert_eq!(client.write(0, MIB, &[1; 512]), EPERM);
}

#[test]
fn a_durable_write_that_finds_no_room_fails_alone() {
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
        let disk = Gated::new(4 * MIB);
        disk.fail(0, errno);
        let world = World::new(disk);
        let mut client = world.client(Form::Structured);
        assert_eq!(client.write(FUA, 0, &[1; 512]), ENOSPC);
        assert_eq!(client.write(0, MIB, &[1; 512]), 0, "error {errno}");
        assert_eq!(client.flush(), 0);
    }
}

#[test]
fn a_file_that_shrinks_under_its_readers() {
    for mode in [CacheMode::Cached, CacheMode::Direct] {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let data = pattern(0, 4 << 20, 3);
        std::fs::write(file.path(), &data).unwrap();
        let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
        for form in FORMS {
            let mut client = world.client(form);
            assert!(client.read(0, 4 * MIB).unwrap() == data);
            file.as_file().set_len(MIB).unwrap();
            assert_eq!(client.read(2 * MIB, 4096), Err(EIO), "{form:?} {mode:?}");
            assert_eq!(client.read(2 * MIB, MIB), Err(EIO), "{form:?} {mode:?}");
            assert!(client.read(0, MIB).unwrap() == data[..MIB as usize]);
            std::fs::write(file.path(), &data).unwrap();
        }
    }
}
