//! One file, exported through the page cache and around it, used in both ways at once.

use crate::common::{Random, seed};
use crate::setup::start;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use towline_client::{Client, Disk, Options};
use towline_server::{CacheMode, DiskExport, DiskKind};

const BLOCK: usize = 4096;
const THREADS: u64 = 4;
const BLOCKS: u64 = 1024;
const ROUNDS: u64 = 300;

/// The bytes of a block after its owner's write of this number.
fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK / 8)
}

/// Each thread owns every fourth block, so that its neighbours are always written by others, also
/// in the other mode. What it was told is written it must read, in either way.
fn own(ways: &[Disk; 2], thread: u64, random: &mut Random) -> Result<(), String> {
    let mut known = vec![0; (BLOCKS / THREADS) as usize];
    for round in 1..=ROUNDS {
        let place = random.below(BLOCKS / THREADS);
        let offset = (place * THREADS + thread) * BLOCK as u64;
        let (writes, reads) = (random.below(2) as usize, random.below(2) as usize);
        let what = format!("block at {offset}, round {round}, written {writes}, read {reads}");
        let failed = |error| format!("{what}: {error}");
        if random.below(3) > 0 {
            let number = round << 8 | thread;
            ways[writes].write_at(&content(number), offset).map_err(failed)?;
            known[place as usize] = number;
        }
        let mut found = vec![1; BLOCK];
        ways[reads].read_at(&mut found, offset).map_err(failed)?;
        if found != content(known[place as usize]) {
            return Err(format!("{what}: {:?}", &found[..16]));
        }
        if round % 50 == 0 {
            ways[writes].flush().map_err(failed)?;
        }
    }
    for (place, number) in known.iter().enumerate() {
        let offset = (place as u64 * THREADS + thread) * BLOCK as u64;
        for way in ways {
            let mut found = vec![1; BLOCK];
            way.read_at(&mut found, offset).map_err(|error| error.to_string())?;
            if found != content(*number) {
                return Err(format!("at the end: block at {offset}: {:?}", &found[..16]));
            }
        }
    }
    Ok(())
}

#[test]
fn page_cache_and_direct_access_agree() {
    // Not on a file system in memory, which has no page cache to bypass.
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("image");
    File::create(&path).unwrap().set_len(BLOCKS * BLOCK as u64).unwrap();
    let kind = |mode| DiskKind::File(path.clone(), mode);
    let modes = [("cached", CacheMode::Cached), ("direct", CacheMode::Direct)];
    if towline_store::block::FileDisk::open(&path, CacheMode::Direct, true).is_err() {
        eprintln!("SKIPPED: page_cache_and_direct_access_agree: no O_DIRECT here");
        return;
    }
    let disks =
        start(directory, modes.map(|(name, mode)| DiskExport::new(name, kind(mode))).to_vec());
    let open = |name: &[u8]| {
        let client = Client::connect(&disks.transports[1], Options::default()).unwrap();
        client.disk(name).unwrap()
    };
    let over = AtomicBool::new(false);
    let mut random = Random::new(seed());
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        // A reader of the whole file through the page cache keeps bringing it in.
        let reader = scope.spawn(|| {
            let disk = open(b"cached");
            let mut all = vec![0; 64 * BLOCK];
            while !over.load(Ordering::Relaxed) {
                for offset in (0..BLOCKS * BLOCK as u64).step_by(64 * BLOCK) {
                    disk.read_at(&mut all, offset).unwrap();
                }
            }
        });
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let ways = [open(b"cached"), open(b"direct")];
                let mut random = Random::new(random.next());
                scope.spawn(move || own(&ways, thread, &mut random))
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        results
    });
    for result in results {
        result.unwrap();
    }
}
