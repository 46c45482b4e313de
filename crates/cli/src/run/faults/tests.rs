#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use super::*;
use rustix::fs::flock;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// A remote file that takes whatever is written.
struct Taking;

impl memory::Remote for Taking {
    type Error = io::Error;

    fn size(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until somebody waits for the turn of this file.
fn wait_for_a_waiter(file: &File) {
    let inode = format!(":{} ", file.metadata().unwrap().ino());
    let waits = |line: &str| line.contains("-> OFDLCK") && line.contains(&inode);
    let end = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
        assert!(Instant::now() < end, "nobody waits for the turn");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Otherwise the two would wait for each other: for the turn, and for the lock.
#[test]
fn a_process_that_begins_to_map_a_file_does_not_meet_the_pager_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    let process = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    process.set_len(memory::PAGES_AT + page_bytes() as u64).unwrap();
    let pager = Memory::open(path).unwrap();
    pager.put(memory::KEEPS_AT, &[1]).unwrap();
    std::thread::scope(|scope| {
        let turn = Turn::take(process.as_fd()).unwrap();
        let written = scope.spawn(|| pager.write_back(&Taking));
        wait_for_a_waiter(&process);
        let is_first = flock(&process, FlockOperation::NonBlockingLockExclusive).is_ok();
        drop(turn);
        written.join().unwrap().unwrap();
        assert!(is_first, "the pager is taken for a process that maps the file");
    });
}
