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

    fn write(&self, _: &[(u64, &[u8])]) -> io::Result<()> {
        Ok(())
    }

    fn write_together(&self, _: &[(u64, &[u8])]) -> io::Result<()> {
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

/// Touching a page must not end a program because another page cannot be read.
#[test]
fn a_page_is_read_although_its_neighbours_cannot_be() {
    let page = page_bytes();
    let read = |unreadable: usize, pages: usize, touched: usize| {
        let mut to = vec![0; 4 * page];
        let file = |to: &mut [u8], at: u64| {
            let at = at as usize;
            // The server reads up to what cannot be read, and fails there.
            let end = if at <= unreadable * page { unreadable.min(pages) } else { pages } * page;
            match to.len().min(end.saturating_sub(at)) {
                0 if at == unreadable * page && unreadable < pages => {
                    Err(io::Error::from_raw_os_error(libc::EIO))
                }
                count => {
                    to[..count].fill((at / page) as u8 + 1);
                    Ok(count)
                }
            }
        };
        let read = read_around(&mut to, touched * page, file).map_err(|e| e.raw_os_error())?;
        Ok((read.start / page..read.end / page, to[touched * page]))
    };
    assert_eq!(read(9, 4, 2), Ok((0..4, 1)), "in one piece");
    assert_eq!(read(9, 3, 2), Ok((0..3, 1)), "up to the end of the file");
    for unreadable in [0, 1, 3] {
        assert_eq!(read(unreadable, 4, 2), Ok((2..3, 3)), "without page {unreadable}");
    }
    assert_eq!(read(2, 4, 2), Err(Some(libc::EIO)));
}
