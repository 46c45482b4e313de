//! Files that grow and shrink while they are served.

use crate::client::{Form, WRITE, WRITE_ZEROES};
use crate::{World, long, pattern, wait_until};
use std::sync::Arc;
use towline_server::{CacheMode, DiskKind, OwnStore};
use towline_store::BlockStore;
use towline_store::block::{FileDisk, MemoryDisk, StripeDisk};

const MIB: u64 = 1 << 20;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const MODES: [CacheMode; 3] = [CacheMode::Cached, CacheMode::Direct, CacheMode::ReadDirect];
const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];

fn file(length: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(length).unwrap();
    file
}

#[test]
fn when_a_file_grew_all_of_it_can_be_had() {
    for mode in MODES {
        let file = file(MIB);
        let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
        let mut early = world.client(Form::Structured);
        assert_eq!(early.size, MIB);
        // A size that is not a multiple of the block is rounded down where blocks count.
        file.as_file().set_len(3 * MIB + 100).unwrap();
        let mut late = world.client(Form::Structured);
        let whole = 3 * MIB + if mode == CacheMode::Direct { 0 } else { 100 };
        assert_eq!(late.size, whole, "{mode:?}");
        let data = pattern(1, 1 << 20, 4);
        assert_eq!(late.write(0, 2 * MIB, &data), 0);
        assert!(late.read(2 * MIB, MIB).unwrap() == data);
        // Clients that were told a smaller size can use it too, but nothing beyond its end.
        assert!(early.read(2 * MIB, MIB).unwrap() == data);
        assert_eq!(early.read(whole - 512, 1024), Err(EINVAL), "{mode:?}");
        assert_eq!(early.write(0, 0, &data), 0);
        assert!(early.read(0, MIB).unwrap() == data);
    }
}

#[test]
fn a_stripe_grows_with_its_members() {
    let files = [file(MIB), file(MIB)];
    let paths = files.iter().map(|file| file.path().to_owned()).collect();
    let world = World::with(DiskKind::Stripe(64 << 10, paths, CacheMode::Cached), |_| {});
    let mut early = world.client(Form::Structured);
    let data = pattern(0, 2 << 20, 8);
    assert_eq!(early.write(0, 0, &data), 0);
    files[0].as_file().set_len(2 * MIB).unwrap();
    assert_eq!(world.client(Form::Simple).size, 2 * MIB, "as long as the shortest allows");
    files[1].as_file().set_len(2 * MIB).unwrap();
    let mut late = world.client(Form::Simple);
    assert_eq!(late.size, 4 * MIB);
    assert!(late.read(0, 2 * MIB).unwrap() == data, "what was there stays in its place");
    assert_eq!(late.write(0, 2 * MIB, &data), 0);
    assert!(late.read(2 * MIB, 2 * MIB).unwrap() == data);
}

/// Beyond the new end everything fails: no zeroes pass for data, and no write makes the file long again.
#[test]
fn beyond_the_end_of_a_file_that_shrank_everything_fails() {
    for mode in MODES {
        for form in FORMS {
            let file = file(4 * MIB);
            let data = pattern(0, 4 << 20, 3);
            std::fs::write(file.path(), &data).unwrap();
            let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
            let mut client = world.client(form);
            assert!(client.read(0, 4 * MIB).unwrap() == data);
            file.as_file().set_len(MIB).unwrap();
            let what = format!("{mode:?} {form:?}");
            assert_eq!(client.read(2 * MIB, 4096), Err(EIO), "{what}");
            assert_eq!(client.read(2 * MIB, MIB), Err(EIO), "{what}");
            for length in [8192, 128 << 10, MIB] {
                // Nobody is hung up on for what was known before the first byte of the answer.
                assert_eq!(client.read(MIB - 4096, length), Err(EIO), "{what}, {length} across");
            }
            for length in [4096, 1 << 20] {
                assert_eq!(client.write(0, 2 * MIB, &data[..length]), EIO, "{what}, {length}");
                assert_eq!(client.write(1, 3 * MIB, &data[..length]), EIO, "{what}, durable");
                assert_eq!(client.write(0, MIB - 4096, &data[..2 * length]), EIO, "{what}, across");
            }
            client.request(WRITE_ZEROES, 0, 1, 2 * MIB, 4096);
            assert_eq!(client.outcome().unwrap(), EIO, "{what}, zeroes");
            let bytes = client.request_bytes(WRITE, 0, 1, 0, 4096, &data[..4096]);
            client.send(&bytes);
            assert_eq!(client.outcome().unwrap(), 0, "{what}: the rest can be used");
            assert_eq!(file.as_file().metadata().unwrap().len(), MIB, "{what}: it stays short");
            assert!(client.read(0, MIB).unwrap() == data[..MIB as usize]);
            assert_eq!(world.client(form).size, MIB, "{what}: new clients see it");
            // When the file is long again, its end is truly empty.
            file.as_file().set_len(4 * MIB).unwrap();
            assert!(client.read(2 * MIB, MIB).unwrap().iter().all(|byte| *byte == 0), "{what}");
            assert_eq!(client.write(0, 2 * MIB, &data[..1 << 20]), 0, "{what}");
        }
    }
}

/// The same for a file in memory, whose pages are not checked before they are promised: no connection is
/// ended.
#[test]
fn beyond_the_end_of_a_file_in_memory_that_shrank_everything_fails() {
    let memory = std::path::Path::new("/dev/shm");
    if !memory.is_dir() {
        return eprintln!("SKIPPED: no memory file system at /dev/shm");
    }
    for form in FORMS {
        let file = tempfile::NamedTempFile::new_in(memory).unwrap();
        let data = pattern(0, 4 << 20, 3);
        std::fs::write(file.path(), &data).unwrap();
        let world = World::with(DiskKind::File(file.path().into(), CacheMode::Cached), |_| {});
        let mut client = world.client(form);
        file.as_file().set_len(MIB).unwrap();
        for length in [4096, 64 << 10, MIB] {
            assert_eq!(client.read(2 * MIB, length), Err(EIO), "{form:?}, {length}");
            assert_eq!(
                client.read(MIB - 4096, length),
                if length == 4096 {
                    Ok(data[MIB as usize - 4096..][..4096].to_vec())
                } else {
                    Err(EIO)
                }
            );
        }
        assert!(client.read(0, MIB).unwrap() == data[..MIB as usize], "{form:?}");
    }
}

/// Memory and stripes are resized while clients of all forms use them. Clients that were told another size
/// use what there is, and get `EIO` for what is gone.
#[test]
fn memory_and_stripes_are_resized_under_their_clients() {
    let files = [file(2 * MIB), file(2 * MIB)];
    let open = |file: &tempfile::NamedTempFile| -> Arc<dyn BlockStore> {
        FileDisk::open(file.path(), CacheMode::Cached, false).unwrap()
    };
    let stripe = StripeDisk::new(files.iter().map(open).collect(), 64 << 10).unwrap();
    let stores: [Arc<dyn BlockStore>; 2] = [MemoryDisk::new("test", 4 * MIB).unwrap(), stripe];
    for store in stores {
        let world = World::with(DiskKind::Own(OwnStore(store.clone())), |_| {});
        let data = pattern(0, 4 << 20, 3);
        for form in FORMS {
            let what = format!("{store:?} {form:?}");
            let mut client = world.client(form);
            assert_eq!(client.size, 4 * MIB, "{what}");
            assert_eq!(client.write(0, 0, &data), 0, "{what}");
            store.resize(MIB).unwrap();
            for length in [4096, MIB] {
                assert_eq!(client.read(2 * MIB, length), Err(EIO), "{what} {length}");
                let bytes = &data[..length as usize];
                assert_eq!(client.write(0, 2 * MIB, bytes), EIO, "{what} {length}");
                assert_eq!(client.write(1, MIB - 2048, bytes), EIO, "{what} {length}, across");
            }
            client.request(WRITE_ZEROES, 0, 1, 2 * MIB, 4096);
            assert_eq!(client.outcome().unwrap(), EIO, "{what}, zeroes");
            assert!(client.read(0, MIB).unwrap() == data[..MIB as usize], "{what}");
            assert_eq!(world.client(form).size, MIB, "{what}");
            store.resize(8 * MIB).unwrap();
            assert!(client.read(MIB, MIB).unwrap().iter().all(|b| *b == 0), "{what}");
            assert_eq!(client.write(0, 7 * MIB, &data[..1 << 20]), 0, "{what}");
            let mut late = world.client(form);
            assert_eq!(late.size, 8 * MIB, "{what}");
            assert!(late.read(7 * MIB, MIB).unwrap() == data[..1 << 20], "{what}");
            store.resize(4 * MIB).unwrap();
        }
    }
}

/// A file becomes shorter and longer at random while it is read. Data in replies is right, or zeroes that
/// were there after the file grew again; and the server survives.
#[test]
fn a_file_that_never_keeps_its_size() {
    for mode in [CacheMode::Cached, CacheMode::Direct] {
        let file = file(4 * MIB);
        let data = pattern(0, 4 << 20, 3);
        std::fs::write(file.path(), &data).unwrap();
        let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
        let stop = std::sync::atomic::AtomicBool::new(false);
        use std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    file.as_file().set_len(MIB).unwrap();
                    std::thread::yield_now();
                    std::fs::write(file.path(), &data).unwrap();
                }
            });
            let readers = FORMS.map(|form| {
                let (world, data) = (&world, &data);
                scope.spawn(move || {
                    let mut client = world.client(form);
                    for round in 0..if long() { 200 } else { 8 } {
                        let offset = round % 4 * MIB;
                        match client.try_read(offset, MIB) {
                            Ok(Ok(bytes)) => {
                                let right = &data[offset as usize..][..MIB as usize];
                                let wrong = bytes.iter().zip(right).any(|(b, r)| b != r && *b != 0);
                                assert!(!wrong, "{mode:?} {form:?}: bytes that never stood there");
                            }
                            Ok(Err(EIO)) => {}
                            // The client connected while the file was short.
                            Ok(Err(EINVAL)) if client.size < offset + MIB => {
                                client = world.client(form);
                            }
                            Ok(Err(error)) => panic!("{mode:?} {form:?}: error {error}"),
                            // Behind the header of a simple reply the server can only hang up.
                            Err(_) if form == Form::Simple => client = world.client(form),
                            Err(error) => panic!("{mode:?} {form:?}: {error}"),
                        }
                    }
                })
            });
            let outcomes = readers.map(std::thread::ScopedJoinHandle::join);
            // Before anything that may panic, since the scope waits for the other thread.
            stop.store(true, Relaxed);
            outcomes.into_iter().for_each(Result::unwrap);
        });
        std::fs::write(file.path(), &data).unwrap();
        assert!(world.client(Form::Structured).read(0, 4 * MIB).unwrap() == data);
        wait_until("all memory is back", || world.counter("buffer_bytes_in_use") == 0);
    }
}
