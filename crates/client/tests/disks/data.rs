//! What is written is read back, in every way.

use crate::common::{Random, counter, eventually, pattern, seed};
use crate::setup::{Disks, KINDS, Model, SIZE, disks, start};
use std::collections::HashSet;
use std::io::{IoSlice, IoSliceMut};
use tempfile::TempDir;
use towline_client::{Client, Errno, ExtentKind, Group, Options, Transport, ZeroHow, extent_flag};
use towline_server::{DiskExport, DiskKind};

const STEPS: usize = 30;

fn clients(disks: &Disks) -> Vec<Client> {
    let connect = |transport| Client::connect(transport, Options::default()).unwrap();
    disks.transports.iter().map(connect).collect()
}

#[test]
fn every_kind_of_disk_reads_what_was_written_over_every_transport() {
    let (disks, mut random) = (disks(), Random::new(seed()));
    for client in clients(&disks) {
        for kind in KINDS {
            let checked = random.below(2) == 0;
            let disk = client.disk(kind.as_bytes()).unwrap().with_checksums(checked);
            assert_eq!(disk.size(), SIZE as u64);
            disk.zero(0, SIZE as u64, ZeroHow::default()).unwrap();
            let mut model = Model::new();
            let what = format!("{kind} over {:?}, checksums {checked}", client.link_kind());
            for _ in 0..STEPS {
                model.step(&disk, &mut random, &what);
            }
            let mut all = vec![0; SIZE];
            disk.read_at(&mut all, 0).unwrap();
            assert!(all == model.bytes, "{what}: at the end");
        }
    }
}

#[test]
fn many_outstanding_complete_in_a_group_in_any_order() {
    const BLOCK: usize = 96 << 10;
    let disks = disks();
    for client in clients(&disks) {
        let disk = client.disk(b"delay").unwrap();
        let mut group = Group::new();
        let count = SIZE / BLOCK;
        for number in 0..count {
            let data = pattern(BLOCK, number as u8);
            let written = disk.start_write_at(data, (number * BLOCK) as u64, false).unwrap();
            group.add(written, number as u64);
        }
        let mut seen = HashSet::new();
        while let Some((tag, written)) = group.wait_any() {
            assert_eq!(written.unwrap().len(), BLOCK);
            assert!(seen.insert(tag));
        }
        assert_eq!(seen.len(), count);
        // Reads, with a flush among them.
        group.add(disk.start_flush().unwrap(), u64::MAX);
        for number in 0..count {
            let read = disk.start_read_at(vec![0; BLOCK], (number * BLOCK) as u64).unwrap();
            group.add(read, number as u64);
        }
        while let Some((tag, read)) = group.wait_any() {
            let read = read.unwrap();
            if tag != u64::MAX {
                assert!(read == pattern(BLOCK, tag as u8), "block {tag}");
            }
        }
    }
}

#[test]
fn fragments_of_a_large_read_need_no_more_memory_than_fragments() {
    let disks = disks();
    let client = disks.client();
    let disk = client.disk(b"cached").unwrap();
    let data = pattern(SIZE, 9);
    disk.write_at(&data, 0).unwrap();
    let before = counter(&client, "bytes_sent_file");
    let mut found = vec![0; SIZE];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found == data);
    // What is in the page cache is sent from there.
    let sent = counter(&client, "bytes_sent_file") - before;
    assert!(sent >= SIZE as u64 / 2, "only {sent} bytes by sendfile");
}

#[test]
fn overlapping_changes_are_done_in_the_order_they_were_asked_for() {
    let disks = disks();
    for client in clients(&disks) {
        let disk = client.disk(b"delay").unwrap();
        for round in 0..10u8 {
            let first = disk.start_write_at(vec![1; 200_000], 0, false).unwrap();
            let second = disk.start_write_at(vec![round + 2; 100_000], 50_000, false).unwrap();
            second.wait().unwrap();
            first.wait().unwrap();
            let mut found = vec![0; 200_000];
            disk.read_at(&mut found, 0).unwrap();
            let middle = 50_000..150_000;
            assert!(found[middle.clone()].iter().all(|byte| *byte == round + 2), "{round}");
            assert!(found[..middle.start].iter().all(|byte| *byte == 1), "{round}");
        }
    }
}

#[test]
fn extents_tell_holes_and_what_was_written() {
    let disks = disks();
    let client = disks.client();
    for kind in ["memory", "cached"] {
        let disk = client.disk(kind.as_bytes()).unwrap();
        disk.write_at(&vec![7; 128 << 10], 1 << 20).unwrap();
        let size = disk.size();
        let (mut at, mut data) = (0, Vec::new());
        while at < size {
            let extents = disk.extents(at, size - at, ExtentKind::Allocation).unwrap();
            for extent in extents {
                if extent.flags & extent_flag::HOLE == 0 {
                    data.push((at, extent.length));
                }
                at += extent.length;
            }
        }
        assert_eq!(at, size, "{kind}");
        assert_eq!(data, [(1 << 20, 128 << 10)], "{kind}");
        let written = disk.extents(0, size, ExtentKind::Written).unwrap();
        let written: Vec<_> = written.iter().map(|e| (e.length, e.flags)).collect();
        assert_eq!(written, [(1 << 20, 0), (128 << 10, 1), (size - (9 << 17), 0)], "{kind}");
        disk.trim(1 << 20, 128 << 10).unwrap();
        disk.cache(0, size).unwrap();
        let extents = disk.extents(0, size, ExtentKind::Allocation).unwrap();
        assert!(extents.iter().all(|e| e.flags == 3), "{kind}: {extents:?}");
    }
}

#[test]
fn more_disks_are_listed_than_fit_into_an_answer() {
    let name = |number: usize| format!("{number:0>200}");
    let export = |number| DiskExport::new(&name(number), DiskKind::Memory(4096));
    let disks = start(TempDir::new().unwrap(), (0..500).map(export).collect());
    let listed = disks.client().disks().unwrap();
    let expected = (0..500).map(|number| (name(number), "memory".to_owned()));
    assert!(listed == expected.collect::<Vec<_>>(), "{} of 500", listed.len());
}

#[test]
fn what_cannot_be_done_says_why() {
    let disks = disks();
    let client = disks.client();
    let names: Vec<String> = client.disks().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["memory", "cached", "stripe", "delay", "read-only"]);
    assert_eq!(client.disk(b"none").err().unwrap().errno(), Errno::ENOENT);
    let disk = client.disk(b"").unwrap();
    let size = disk.size();
    let errno = |result: Result<(), towline_client::Error>| result.unwrap_err().errno();
    assert_eq!(errno(disk.read_at(&mut [0; 2], size - 1)), Errno::EINVAL);
    assert_eq!(errno(disk.read_at(&mut [0; 2], u64::MAX)), Errno::EINVAL);
    assert_eq!(errno(disk.write_at(&[0; 2], size - 1)), Errno::ENOSPC);
    assert_eq!(errno(disk.write_at(&vec![0; 1 << 20], size - 1)), Errno::ENOSPC);
    assert_eq!(errno(disk.zero(1, u64::MAX, ZeroHow::default())), Errno::EINVAL);
    assert_eq!(errno(disk.trim(0, size + 1)), Errno::ENOSPC);
    assert_eq!(disk.extents(0, 0, ExtentKind::Allocation).unwrap_err().errno(), Errno::EINVAL);
    disk.read_at(&mut [], size).unwrap();
    disk.write_at(&[], size).unwrap();
    let guarded = client.disk(b"read-only").unwrap();
    assert!(guarded.info().read_only);
    assert_eq!(errno(guarded.write_at(&[0; 512], 0)), Errno::EROFS);
    assert_eq!(errno(guarded.trim(0, 512)), Errno::EROFS);
    // The session goes on.
    guarded.flush().unwrap();
    guarded.read_at(&mut [0; 512], 0).unwrap();
}

#[test]
fn files_and_disks_share_a_session_and_closed_disks_are_closed() {
    let disks = disks();
    let client = disks.client();
    for _ in 0..3 * towline_wire::disk::DISKS_MAX {
        drop(client.disk(b"memory").unwrap());
    }
    let open: Vec<_> =
        (0..towline_wire::disk::DISKS_MAX).map(|_| client.disk(b"memory").unwrap()).collect();
    assert_eq!(client.disk(b"memory").err().unwrap().errno(), Errno::EMFILE);
    drop(open);
    client.disk(b"memory").unwrap().write_at(&[1], 0).unwrap();
}

#[test]
fn vectors_are_read_and_written_in_place_whatever_their_lengths() {
    let (disks, mut random) = (disks(), Random::new(seed()));
    for client in clients(&disks) {
        for (kind, checked) in [("memory", false), ("cached", true), ("delay", false)] {
            let disk = client.disk(kind.as_bytes()).unwrap().with_checksums(checked);
            // More than may be under way together, with empty, inline and granted ones among them.
            let lengths: Vec<usize> =
                (0..40).map(|_| [0, 1, 512, 4096, 100_000][random.below(5) as usize]).collect();
            let parts: Vec<Vec<u8>> =
                lengths.iter().map(|length| pattern(*length, random.next() as u8)).collect();
            let slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let offset = random.below(1000);
            disk.write_vectored_at(&slices, offset, kind == "cached").unwrap();
            let mut whole = vec![0; parts.concat().len()];
            disk.read_at(&mut whole, offset).unwrap();
            assert!(whole == parts.concat(), "{kind}: written");
            let mut back: Vec<Vec<u8>> = lengths.iter().rev().map(|l| vec![9; *l]).collect();
            let mut targets: Vec<_> = back.iter_mut().map(|part| IoSliceMut::new(part)).collect();
            disk.read_vectored_at(&mut targets, offset).unwrap();
            assert!(back.concat() == whole, "{kind}: read");
        }
        // One part is beyond the end: the failure is reported, and nothing stays under way.
        let disk = client.disk(b"memory").unwrap();
        let (mut one, mut two) = ([1; 4096], [1; 8192]);
        let mut targets = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        let failed = disk.read_vectored_at(&mut targets, SIZE as u64 - 4096).unwrap_err();
        assert_eq!(failed.errno(), Errno::EINVAL);
        let sources = [IoSlice::new(&one), IoSlice::new(&two)];
        let failed = disk.write_vectored_at(&sources, SIZE as u64 - 4096, false).unwrap_err();
        assert_eq!(failed.errno(), Errno::ENOSPC);
        disk.read_at(&mut two, 0).unwrap();
    }
}

#[test]
fn a_call_may_be_longer_than_a_request() {
    let size = 20 << 20;
    let disks = start(
        TempDir::new().unwrap(),
        vec![DiskExport::new("long", DiskKind::Memory(size as u64 + 4096))],
    );
    for client in clients(&disks) {
        let disk = client.disk(b"long").unwrap();
        let data = pattern(size, 77);
        disk.write_at(&data, 4096).unwrap();
        let mut back = vec![0; size];
        disk.read_at(&mut back, 4096).unwrap();
        assert!(back == data);
    }
}

/// The receiving thread copies their bytes once, into the disk's own memory; only data that is
/// checked before it is written needs a buffer.
#[test]
fn long_writes_to_memory_disks_land_in_place() {
    let disks = disks();
    for (transport, client) in disks.transports.iter().zip(clients(&disks)) {
        let moved = || {
            ["in_place", "staged"].map(|way| counter(&client, &format!("disk_bytes_written_{way}")))
        };
        let disk = client.disk(b"memory").unwrap();
        let data = pattern(1_000_001, 23);
        let before = moved();
        disk.write_at(&data, 4097).unwrap();
        let after = moved();
        let what = format!("over {transport:?}");
        assert_eq!([after[0] - before[0], after[1] - before[1]], [data.len() as u64, 0], "{what}");
        let mut back = vec![0; data.len() + 2];
        disk.read_at(&mut back, 4096).unwrap();
        assert!(back[1..=data.len()] == data, "{what}");
        assert_eq!((back[0], back[data.len() + 1]), (0, 0), "{what}");
        let checked = client.disk(b"memory").unwrap().with_checksums(true);
        checked.write_at(&data, 4097).unwrap();
        assert_eq!(moved()[0], after[0], "{what}: with checksums");
        disk.zero(0, SIZE as u64, ZeroHow::default()).unwrap();
    }
}

/// Over shared memory they are copied from the ring to their place, wherever the ring ends. Over
/// sockets, and if they have to wait or to be checked, they are received first.
#[test]
fn short_writes_to_memory_disks_land_in_place_over_shared_memory() {
    const WRITES: usize = 400;
    let mut limited = DiskExport::new("limited", DiskKind::Memory(SIZE as u64));
    limited.limit.bytes = 400 << 20;
    let free = DiskExport::new("memory", DiskKind::Memory(SIZE as u64));
    let disks = start(TempDir::new().unwrap(), vec![free, limited]);
    for (transport, client) in disks.transports.iter().zip(clients(&disks)) {
        let is_shared = matches!(transport, Transport::Shm(_));
        for (name, checked) in [(&b"memory"[..], false), (b"memory", true), (b"limited", false)] {
            let what = format!("{name:?} over {transport:?}, checked: {checked}");
            let disk = client.disk(name).unwrap().with_checksums(checked);
            let mut random = Random::new(seed());
            let (mut model, mut group) = (vec![0; SIZE], Group::new());
            let (mut bytes, mut free) = (0, 32);
            let before = counter(&client, "disk_bytes_written_in_place");
            for write in 0..WRITES {
                if free == 0 {
                    let (_, done) = group.wait_any().unwrap();
                    done.unwrap();
                    free += 1;
                }
                let length = 1024 + random.below(15 * 1024) as usize;
                let offset = random.below((SIZE - length) as u64) as usize;
                let data = pattern(length, write as u8);
                model[offset..offset + length].copy_from_slice(&data);
                bytes += length as u64;
                group.add(disk.start_write_at(data, offset as u64, write % 9 == 0).unwrap(), 0);
                free -= 1;
            }
            while let Some((_, done)) = group.wait_any() {
                done.unwrap();
            }
            let moved = counter(&client, "disk_bytes_written_in_place") - before;
            match (is_shared && !checked, name) {
                // Messages that had only partly arrived are received with what followed; others
                // wait for their turn.
                (true, b"memory") => assert!(moved > bytes / 2, "{what}: {moved} of {bytes}"),
                (true, _) => assert!(moved <= bytes, "{what}"),
                _ => assert_eq!(moved, 0, "{what}"),
            }
            let mut found = vec![1; SIZE];
            disk.read_at(&mut found, 0).unwrap();
            let wrong = (0..SIZE).find(|at| found[*at] != model[*at]);
            assert_eq!(wrong, None, "{what}");
            disk.zero(0, SIZE as u64, ZeroHow::default()).unwrap();
        }
    }
}

#[test]
fn memory_disks_are_read_in_place_over_shared_memory() {
    let mut limited = DiskExport::new("limited", DiskKind::Memory(SIZE as u64));
    limited.limit.bytes = 1 << 40;
    let free = DiskExport::new("memory", DiskKind::Memory(SIZE as u64));
    let disks = start(TempDir::new().unwrap(), vec![free, limited]);
    for (transport, client) in disks.transports.iter().zip(clients(&disks)) {
        let lent = || counter(&client, "replies_lent");
        let is_shared = matches!(transport, Transport::Shm(_));
        let disk = client.disk(b"memory").unwrap();
        disk.zero(0, SIZE as u64, ZeroHow::default()).unwrap();
        let data = pattern(3 * 4096 + 5, 17);
        disk.write_at(&data, 8191).unwrap();
        // From a hole into data and out of it again: short and long reads, completed now or later.
        let mut expected = vec![0; 100_000];
        expected[191..191 + data.len()].copy_from_slice(&data);
        let before = lent();
        let mut found = vec![1; expected.len()];
        disk.read_at(&mut found, 8000).unwrap();
        assert!(found == expected, "over {transport:?}");
        let later = disk.start_read_at(vec![1; 300], 8100).unwrap();
        assert!(later.wait().unwrap() == expected[100..400]);
        let mut hole = [1; 4096];
        disk.read_at(&mut hole, 1 << 20).unwrap();
        assert_eq!(hole, [0; 4096]);
        assert_eq!(lent() - before, if is_shared { 3 } else { 0 }, "over {transport:?}");
        // A read does not return what is written after it; the next one does.
        let read = disk.start_read_at(vec![1; 300], 8100).unwrap().wait().unwrap();
        disk.write_at(&[9; 300], 8100).unwrap();
        assert!(read == expected[100..400]);
        disk.read_at(&mut found[..300], 8100).unwrap();
        assert_eq!(found[..300], [9; 300]);
        // The memory is handed over once, whatever is read; for checksums and limits the bytes have
        // to be sent.
        let before = lent();
        let checked = client.disk(b"memory").unwrap().with_checksums(true);
        checked.read_at(&mut found[..300], 8100).unwrap();
        assert_eq!(found[..300], [9; 300]);
        client.disk(b"limited").unwrap().read_at(&mut found, 0).unwrap();
        assert!(found == vec![0; found.len()]);
        assert_eq!(lent(), before, "over {transport:?}");
        assert_eq!(counter(&client, "bytes_on_loan"), 0);
    }
}

/// Reading a hole takes no memory over, so the memory of the next disk is the first one.
#[test]
fn a_hole_of_one_disk_is_read_in_place_before_data_of_another() {
    let export = |name| DiskExport::new(name, DiskKind::Memory(SIZE as u64));
    let disks = start(TempDir::new().unwrap(), vec![export("empty"), export("full")]);
    for client in clients(&disks) {
        let (empty, full) = (client.disk(b"empty").unwrap(), client.disk(b"full").unwrap());
        full.write_at(&[7; 4096], 0).unwrap();
        let mut found = [1; 4096];
        empty.read_at(&mut found, 0).unwrap();
        assert_eq!(found, [0; 4096]);
        full.read_at(&mut found, 0).unwrap();
        assert_eq!(found, [7; 4096]);
    }
}

/// All users of a disk can use what it grew by, and fail beyond what it shrank to, whoever changed
/// it.
#[test]
fn a_disk_that_changes_its_size_does_so_for_all_its_users() {
    let disks = disks();
    let size = SIZE as u64;
    let clients = clients(&disks);
    for kind in KINDS {
        let open: Vec<_> = clients.iter().map(|c| c.disk(kind.as_bytes()).unwrap()).collect();
        for (at, disk) in open.iter().enumerate() {
            let other = &open[(at + 1) % open.len()];
            let what = format!("{kind} over {:?}", clients[at].link_kind());
            let data = pattern(100_000, at as u8);
            other.write_at(&data, size - 100_000).unwrap();
            assert_eq!(disk.resize(2 * size).unwrap().size, 2 * size, "{what}");
            let mut found = vec![1; 200_000];
            other.read_at(&mut found, size - 100_000).unwrap();
            assert!(found[..100_000] == data && found[100_000..].iter().all(|b| *b == 0), "{what}");
            other.write_at(&data, 2 * size - 100_000).unwrap();
            assert_eq!(other.refresh().unwrap().size, 2 * size, "{what}");
            disk.read_at(&mut found[..100_000], 2 * size - 100_000).unwrap();
            assert!(found[..100_000] == data, "{what}");

            assert_eq!(disk.resize(size / 2).unwrap().size, size / 2, "{what}");
            for length in [512, 100_000] {
                let read = other.read_at(&mut found[..length], size / 2).unwrap_err();
                assert_eq!(read.errno(), Errno::EIO, "{what}");
                let write = other.write_at(&data[..length], size / 2 - 256).unwrap_err();
                assert_eq!(write.errno(), Errno::EIO, "{what}");
                // It never was as long as this.
                let read = other.read_at(&mut found[..length], 2 * size).unwrap_err();
                assert_eq!(read.errno(), Errno::EINVAL, "{what}");
                let write = other.write_at(&data[..length], 2 * size).unwrap_err();
                assert_eq!(write.errno(), Errno::ENOSPC, "{what}");
            }
            assert_eq!(other.refresh().unwrap().size, size / 2, "{what}");
            // What was cut off does not come back.
            disk.resize(size).unwrap();
            other.read_at(&mut found, size - 200_000).unwrap();
            assert!(found.iter().all(|byte| *byte == 0), "{what}");
        }
    }
    let refused = |kind: &[u8], size| clients[0].disk(kind).unwrap().resize(size).unwrap_err();
    assert_eq!(refused(b"memory", 16 * size + 1).errno(), Errno::EFBIG);
    assert_eq!(refused(b"stripe", size + 4096).errno(), Errno::EINVAL);
    assert_eq!(refused(b"read-only", 2 * size).errno(), Errno::EROFS);
}

/// The server is in this process, too, and has one mapping of its own.
#[test]
fn the_memory_of_a_closed_disk_is_given_up() {
    let name = "given-up";
    let disks =
        start(TempDir::new().unwrap(), vec![DiskExport::new(name, DiskKind::Memory(SIZE as u64))]);
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(name)).count()
    };
    let (_, client) = disks.transports.iter().zip(clients(&disks)).last().unwrap();
    let lent = || counter(&client, "replies_lent");
    let own = mappings();
    let data = pattern(100_000, 3);
    for _ in 0..3 {
        let disk = client.disk(name.as_bytes()).unwrap();
        let again = client.disk(name.as_bytes()).unwrap();
        disk.write_at(&data, 0).unwrap();
        let before = lent();
        let mut found = vec![0; data.len()];
        disk.read_at(&mut found, 0).unwrap();
        assert!(found == data);
        // Answered, perhaps, but not taken before the disk is closed.
        let late = again.start_read_at(vec![0; data.len()], 0).unwrap();
        drop(disk);
        let mut found = vec![0; data.len()];
        again.read_at(&mut found, 0).unwrap();
        assert!(found == data);
        assert_eq!(lent() - before, 3);
        assert!(mappings() > own, "the client has it");
        drop(again);
        assert!(late.wait().unwrap() == data);
        eventually("the client keeps the memory", || {
            client.disks().unwrap();
            mappings() == own
        });
    }
}
