//! Disks on files that become shorter while they are written.
#![allow(clippy::unwrap_used)] // a test should say where it fails

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_block::{Disk, Driver, Engine, Limits, Output, Work};
use towline_mem::Pool;
use towline_store::block::{CacheMode, FileDisk, StripeDisk};
use towline_store::{BlockStore, Now, ZeroHow};

const SIZE: u64 = 1 << 20;
const FRAGMENT: usize = 128 * 1024;
const EIO: i32 = 5;
const EBUSY: i32 = 16;

/// Keeps all work.
#[derive(Default)]
struct Keeps(Vec<(u64, Work)>);

impl Driver for Keeps {
    fn begin(&mut self, token: u64, _: &Arc<Disk>, work: Work) {
        self.0.push((token, work));
    }
}

fn file(size: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(size).unwrap();
    file
}

fn open(file: &tempfile::NamedTempFile) -> Arc<dyn BlockStore> {
    FileDisk::open(file.path(), CacheMode::Cached, false).unwrap()
}

/// Returns true if a write is refused that would otherwise be done, or begin.
fn is_refused(now: Now) -> bool {
    match now {
        Now::Done(result) => result.is_err_and(|error| error.raw_os_error() == Some(EIO)),
        Now::WouldBlock => false,
    }
}

/// One that ended after the file became shorter would make it long again.
#[test]
fn a_file_becomes_shorter_when_the_writes_under_way_are_done() {
    let files = [file(SIZE), file(SIZE / 2), file(SIZE / 2)];
    let stripe = StripeDisk::new(files[1..].iter().map(open).collect(), FRAGMENT as u64).unwrap();
    let stores: [Arc<dyn BlockStore>; 2] = [open(&files[0]), stripe];
    let length = |file: &File| file.metadata().unwrap().len();
    for (store, files) in stores.into_iter().zip([&files[..1], &files[1..]]) {
        // In the last round the client vanishes.
        for (durable, stays) in [(false, true), (true, true), (false, false)] {
            store.resize(SIZE).unwrap();
            let disk = Arc::new(Disk::new("disk", "", store.clone(), false));
            let (fragments, small) = (Pool::new(FRAGMENT, 8), Pool::new(512, 4));
            let mut engine = Engine::new(Limits { fragments, small, owner_bytes_max: 1 << 20 });
            let owner = engine.add_owner();
            let mut driver = Keeps::default();
            let range = SIZE - FRAGMENT as u64..SIZE;
            let key = engine.write(owner, 0, &disk, range, durable, Instant::now()).unwrap();
            let (buffer, count) = engine.room(key).unwrap();
            engine.filled(key, buffer, count, &mut driver);
            let Some((token, Work::Transfer { place, buffer, .. })) = driver.0.pop() else {
                panic!("it goes through the ring")
            };
            let lengths = || files.iter().map(|file| length(file.as_file())).sum::<u64>();
            let resized = disk.clone();
            let shorter = std::thread::spawn(move || resized.resize(SIZE / 2));
            // Others are refused from now on, which is no failure of the disk.
            let begun = Instant::now();
            while !is_refused(disk.write_now(SIZE - 4096, &[1; 4096], durable)) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it is not refused");
                std::thread::yield_now();
            }
            assert!(!is_refused(disk.write_now(0, &[1; 4096], false)), "below the new end");
            let busy = disk.resize(SIZE / 4).unwrap_err();
            assert_eq!(busy.raw_os_error(), Some(EBUSY));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!shorter.is_finished() && lengths() == SIZE, "it waits");
            if !stays {
                engine.remove_owner(owner);
            }
            let file = File::from(place.file.try_clone().unwrap());
            file.write_all_at(&[1; FRAGMENT], place.offset).unwrap();
            engine.finished(token, Ok(FRAGMENT), buffer, &mut driver);
            shorter.join().unwrap().unwrap();
            if stays {
                let Some(Output::Done { result, .. }) = engine.next_output() else {
                    panic!("it is over")
                };
                result.unwrap();
            }
            assert!(is_refused(disk.write_now(SIZE - 4096, &[1; 4096], durable)));
            let zeroed = disk.zero(SIZE - 4096, 4096, ZeroHow::default()).unwrap_err();
            assert_eq!(zeroed.raw_os_error(), Some(EIO));
            assert_eq!(lengths(), SIZE / 2);
            assert!(!disk.has_failed());
            // What was written beyond the end is gone.
            disk.resize(SIZE).unwrap();
            let mut bytes = vec![1; FRAGMENT];
            store.read(SIZE - FRAGMENT as u64, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0));
        }
    }
}
