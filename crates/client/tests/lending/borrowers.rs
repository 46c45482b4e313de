//! Borrowers that send arbitrary messages: what they can hold, and what they cannot do.

use super::common::{CREATE, counter, eventually, pattern, setup_with};
use super::raw::Raw;
use super::{KIB, MIB, connect, set_size};
use towline_mem::SharedMemory;
use towline_server::EngineWish;
use towline_wire::Request;
use towline_wire::limits::LENT_BYTES_MAX;

#[test]
fn what_is_lent_stays_until_it_is_given_back() {
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let data = pattern(MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 2, 0).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let lent = raw.read(1, handle, 0, MIB).expect("not lent");
    // Overwrites, punches, shortens and removes the file, and uses its space again.
    file.write_at(&pattern(300_000, 2), 1000).unwrap();
    assert!(raw.bytes(&lent) == data, "after a write");
    file.allocate(3, 500_000, 200_000).unwrap();
    assert!(raw.bytes(&lent) == data, "after a hole was punched");
    set_size(&file, 10);
    root.unlink(b"f", false).unwrap();
    root.write_path(b"g", CREATE, 0o600, &pattern(8 * MIB, 3)).unwrap();
    assert!(raw.bytes(&lent) == data, "after it was removed");
    assert!(raw.shm().loans_hold());
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    raw.release(1, raw.sequences[1]);
    eventually("what is released comes back", || counter(&client, "bytes_on_loan") == 0);
    // The next request of a slot gives back what its last reply lent.
    let handle = raw.open(b"g");
    assert!(raw.read(2, handle, 0, 128 * KIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 128 * KIB as u64);
    assert!(raw.read(2, handle, 0, 64 * KIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 64 * KIB as u64);
    let Raw { socket, link, memories, .. } = raw;
    drop((socket, link));
    eventually("a client that is gone gives back", || counter(&client, "bytes_on_loan") == 0);
    drop(memories);
}

#[test]
fn the_memory_cannot_be_written_by_a_borrower() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let root = connect(&setup.transports[1]).attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, &pattern(MIB, 1)).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    assert!(raw.read(1, handle, 0, MIB).is_some());
    let memory = &raw.memories[0];
    let descriptor = || memory.fd().try_clone_to_owned().unwrap();
    assert!(rustix::io::pwrite(memory.fd(), b"x", 0).is_err());
    assert!(rustix::fs::ftruncate(memory.fd(), 0).is_err());
    assert!(SharedMemory::open(descriptor(), memory.len(), true).is_err());
    assert!(memory.punch(0, 4096).is_err());
}

#[test]
fn forged_releases_have_no_effect() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let data = pattern(MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let lent = raw.read(1, handle, 0, MIB).unwrap();
    let sequence = raw.sequences[1];
    for (slot, sequence) in
        [(1, sequence + 1), (1, sequence.wrapping_sub(1)), (2, sequence), (63, 0), (0, u32::MAX)]
    {
        raw.release(slot, sequence);
    }
    raw.request(3, Request::Stat { base: handle, flags: 0, path: b"" });
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    // A client cannot give back another client's loan, and giving a loan back twice counts once.
    let mut second = Raw::connect(&setup, 0, 0);
    let other = second.open(b"f");
    second.release(1, sequence);
    assert!(second.read(1, other, 0, MIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 2 * MIB as u64);
    for _ in 0..3 {
        second.release(1, second.sequences[1]);
    }
    second.request(3, Request::Stat { base: other, flags: 0, path: b"" });
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    assert!(raw.bytes(&lent) == data);
    assert_eq!(counter(&client, "protocol_errors"), 0);
}

#[test]
fn a_new_lane_of_the_session_ends_the_loans_of_the_old_one() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, &pattern(MIB, 1)).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    assert!(raw.read(1, handle, 0, MIB).is_some());
    assert!(raw.shm().loans_hold());
    let next = Raw::connect(&setup, raw.welcome.session, raw.welcome.secret);
    assert_eq!(next.welcome.resumed, 1);
    assert!(!raw.shm().loans_hold(), "ended without a word");
    assert_eq!(counter(&client, "bytes_on_loan"), 0);
}

#[test]
fn who_never_gives_back_gets_little_and_costs_no_space() {
    let limit = 16 * MIB as u64;
    let setup = setup_with(EngineWish::Automatic, limit);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let free = || root.stat_fs().unwrap().blocks_free;
    let empty = free();
    let length = 14 * MIB;
    let data = pattern(length, 1);
    let file = root.open(b"f", CREATE, 0o600).unwrap();
    assert_eq!(file.write_at(&data, 0).unwrap(), length);
    let used = free();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let mut lent = Vec::new();
    for slot in 1..60u16 {
        let offset = (usize::from(slot) * 200 * KIB) as u64;
        if let Some(extents) = raw.read(slot, handle, offset, 200 * KIB) {
            lent.push((offset as usize, extents));
        }
    }
    let on_loan = counter(&client, "bytes_on_loan");
    assert!(on_loan > 0 && on_loan <= (limit / 8).min(LENT_BYTES_MAX), "{on_loan} bytes on loan");
    assert!(!lent.is_empty() && lent.len() < 59, "{} reads lent", lent.len());
    assert!(counter(&client, "loans_exhausted") > 0);
    assert_eq!(free(), used, "lending charges nothing");
    // The whole file can be overwritten and its space freed, as if nothing were lent.
    assert_eq!(file.write_at(&pattern(length, 2), 0).unwrap(), length);
    set_size(&file, 0);
    let inode = 1;
    assert!(empty - free() <= inode, "cut, so free");
    assert_eq!(file.write_at(&pattern(length, 3), 0).unwrap(), length);
    assert_eq!(free(), used);
    let more = file.write_at(&pattern(4 * MIB, 4), length as u64);
    assert!(more.is_err() || more.unwrap() < 4 * MIB, "beyond the limit of the export");
    for (offset, extents) in &lent {
        assert!(raw.bytes(extents) == data[*offset..offset + 200 * KIB], "at {offset}");
    }
    // Once all slots have been used for something else, everything is back and can be lent again.
    for slot in 1..60 {
        raw.request(slot, Request::Stat { base: handle, flags: 0, path: b"" });
    }
    assert_eq!(counter(&client, "bytes_on_loan"), 0);
    assert!(raw.read(1, handle, 0, MIB).is_some());
}
