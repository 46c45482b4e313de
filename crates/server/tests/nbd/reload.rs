//! Disks whose options change while they are served.

use crate::client::Form;
use crate::{World, pattern};
use std::os::unix::fs::FileExt;
use towline_server::{CacheMode, DataPath, DiskExport, DiskKind};

const MIB: u64 = 1 << 20;
const EINVAL: u32 = 22;
const EPERM: u32 = 1;

#[test]
fn what_is_in_memory_stays_with_other_options() {
    let world = World::with(DiskKind::Memory(MIB), |_| {});
    let mut early = world.client(Form::Structured);
    let data = pattern(0, 1 << 20, 3);
    assert_eq!(early.write(0, 0, &data), 0);
    let mut export = world.disks[0].clone();
    let mut change = |change: fn(&mut DiskExport)| {
        change(&mut export);
        world.server.replace(&[], std::slice::from_ref(&export))
    };
    change(|export| export.limit.operations = 1_000_000).unwrap();
    assert!(world.client(Form::Simple).read(0, MIB).unwrap() == data);
    change(|export| export.shape.block = 4096).unwrap();
    assert_eq!(world.client(Form::Structured).read(512, 512), Err(EINVAL), "options hold");
    change(|export| export.shape.block = 0).unwrap();
    change(|export| export.delivery.path = DataPath::Staged).unwrap();

    // The contents also stay when the disk becomes longer; it does not become shorter by itself.
    change(|export| export.kind = DiskKind::Memory(2 * MIB)).unwrap();
    let mut late = world.client(Form::Extended);
    assert_eq!(late.size, 2 * MIB);
    assert!(late.read(0, MIB).unwrap() == data);
    assert_eq!(late.write(0, MIB, &data), 0);
    let refused = change(|export| export.kind = DiskKind::Memory(MIB)).unwrap_err();
    assert!(refused.to_string().contains("it has 2097152 bytes"), "{refused}");
    let refused = change(|export| export.kind = DiskKind::Memory(20 * MIB)).unwrap_err();
    assert!(refused.to_string().contains("16777216 bytes at most, not 20971520"), "{refused}");

    change(|export| (export.kind, export.read_only) = (DiskKind::Memory(2 * MIB), true)).unwrap();
    let mut last = world.client(Form::Structured);
    assert!(last.read(MIB, MIB).unwrap() == data);
    assert_eq!(last.write(0, 0, &data), EPERM);
    change(|export| export.read_only = false).unwrap();
    assert_eq!(world.client(Form::Structured).write(0, 0, &data), 0);
    // Clients that connected earlier see the same bytes.
    assert!(early.read(MIB, MIB).unwrap() == data);
}

/// If several disks are to become longer, either all do or none.
#[test]
fn one_disk_that_cannot_become_longer_keeps_all_as_they_were() {
    let world = World::with(DiskKind::Memory(MIB), |_| {});
    let first = world.disks[0].clone();
    let memory = |name: &str, size| {
        let kind = DiskKind::Memory(size);
        DiskExport { name: name.to_owned(), kind, is_default: false, ..first.clone() }
    };
    let disks = |sizes: [u64; 2]| {
        let kind = DiskKind::Memory(sizes[0]);
        [DiskExport { kind, ..first.clone() }, memory("second", sizes[1])]
    };
    world.server.replace(&[], &disks([MIB, MIB])).unwrap();
    let refused = world.server.replace(&[], &disks([2 * MIB, 20 * MIB])).unwrap_err();
    assert!(refused.to_string().contains("disk \"second\""), "{refused}");
    assert_eq!(world.client(Form::Structured).size, MIB);
    world.server.replace(&[], &disks([2 * MIB, 16 * MIB])).unwrap();
    assert_eq!(world.client(Form::Structured).size, 2 * MIB);
}

#[test]
fn the_way_to_a_file_may_change() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(MIB).unwrap();
    let world = World::with(DiskKind::File(file.path().into(), CacheMode::Cached), |_| {});
    let mut early = world.client(Form::Structured);
    let mut export = world.disks[0].clone();
    for (number, mode) in
        [CacheMode::Direct, CacheMode::ReadDirect, CacheMode::Cached].iter().enumerate()
    {
        export.kind = DiskKind::File(file.path().into(), *mode);
        world.server.replace(&[], std::slice::from_ref(&export)).unwrap();
        let data = pattern(0, 64 << 10, number as u64);
        assert_eq!(world.client(Form::Structured).write(0, 0, &data), 0);
        assert!(early.read(0, 64 << 10).unwrap() == data, "{mode:?}");
    }
    // A disk that was read-only is opened again for writing.
    for read_only in [true, false, true] {
        export.read_only = read_only;
        world.server.replace(&[], std::slice::from_ref(&export)).unwrap();
        let outcome = world.client(Form::Structured).write(0, 0, &[5; 512]);
        assert_eq!(outcome == 0, !read_only);
    }
    let mut there = [0; 512];
    file.as_file().read_exact_at(&mut there, 0).unwrap();
    assert_eq!(there, [5; 512]);
}

#[test]
fn another_file_at_the_path_is_opened() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| directory.path().join(name);
    for (number, name) in ["file", "one", "two", "new"].iter().enumerate() {
        std::fs::write(path(name), vec![number as u8; MIB as usize]).unwrap();
    }
    let file = DiskKind::File(path("file"), CacheMode::Cached);
    let stripe = DiskKind::Stripe(MIB, vec![path("one"), path("two")], CacheMode::Cached);
    for (kind, replaced, at) in [(file, "file", 0), (stripe, "two", MIB)] {
        let world = World::with(kind, |_| {});
        let before = world.client(Form::Structured).read(at, 512).unwrap();
        let again = || world.server.replace(&[], &world.disks).unwrap();
        let mut early = world.client(Form::Structured);
        // A removed file is served as long as no other file is in its place.
        std::fs::remove_file(path(replaced)).unwrap();
        again();
        assert_eq!(world.client(Form::Structured).read(at, 512), Ok(before.clone()));
        std::fs::copy(path("new"), path(replaced)).unwrap();
        again();
        assert_eq!(world.client(Form::Structured).read(at, 512), Ok(vec![3; 512]), "{replaced}");
        assert_eq!(early.read(at, 512), Ok(before), "who was there keeps what it has");
    }
}
