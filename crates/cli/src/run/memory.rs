//! The memory behind shared mappings (`instance::memory`) as the keeper uses it.

use super::source::Source;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use towline_instance::memory::{self, Access, Turn};
use towline_mem::page_bytes;

/// The local file with the memory that all processes of the run share for a remote file.
pub(super) struct Memory {
    path: PathBuf,
    file: File,
    /// Held by the thread that has the turn.
    mine: Mutex<()>,
}

impl Memory {
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(&path)?;
        Ok(Self { path, file, mine: Mutex::new(()) })
    }

    /// Waits until nobody else reads pages in or writes them back.
    ///
    /// # Errors
    /// `ESTALE` if the memory was taken away.
    pub(super) fn turn(&self) -> io::Result<(Turn<'_>, MutexGuard<'_, ()>)> {
        let turn = self.turn_in_any_case()?;
        match memory::is_set(self, memory::IS_LOST_AT)? {
            true => Err(io::Error::from_raw_os_error(libc::ESTALE)),
            false => Ok(turn),
        }
    }

    /// [`Memory::turn`], or `None` if the memory was taken away: whoever did that has told the user what is lost.
    fn turn_if_there(&self) -> io::Result<Option<(Turn<'_>, MutexGuard<'_, ()>)>> {
        match self.turn() {
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => Ok(None),
            turn => turn.map(Some),
        }
    }

    /// The turn belongs to the open file description, which threads share: it ends before the lock does.
    fn turn_in_any_case(&self) -> io::Result<(Turn<'_>, MutexGuard<'_, ()>)> {
        let mine = self.mine.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((Turn::take(self.file.as_fd())?, mine))
    }

    /// Takes the memory away and removes its name, see [`memory::lose`].
    pub(super) fn lose(&self) -> io::Result<Option<bool>> {
        let _turn = self.turn_in_any_case()?;
        let is_unwritten = memory::lose(self, self.pages()?)?;
        if self.file.metadata()?.nlink() > 0 {
            std::fs::remove_file(&self.path)?;
        }
        Ok(is_unwritten)
    }

    /// Returns the number of pages that the memory has room for.
    fn pages(&self) -> io::Result<usize> {
        let length = self.file.metadata()?.len().saturating_sub(memory::PAGES_AT);
        Ok((length / page_bytes() as u64) as usize)
    }

    /// Reads again by `source` what a killed process has changed of the remote file and not of the memory.
    pub(super) fn renew_interrupted(&self, source: &Source) -> io::Result<()> {
        let Some(_turn) = self.turn_if_there()? else { return Ok(()) };
        memory::renew_interrupted(
            self,
            || self.pages(),
            |to, at| {
                memory::read_up_to_end(to, |part, done| source.read_at(part, at as u64 + done))
            },
        )
    }

    /// Writes stored data back to the remote file, unless a process still maps the memory: such processes write
    /// back themselves. It does not leave that to them if nobody could do it later (`is_last`), or where programs
    /// lock the file: what a killed process has left comes before its lock goes.
    pub(super) fn write_back(
        &self,
        source: &impl memory::Remote<Error = io::Error>,
        is_last: bool,
    ) -> io::Result<()> {
        // First the turn, then the lock, as processes do that begin to map the file: they must not wait for
        // each other, nor take this for another process that maps it.
        let Some(_turn) = self.turn_if_there()? else { return Ok(()) };
        if !memory::is_set(self, memory::KEEPS_AT)? {
            return Ok(());
        }
        if !is_last && !memory::is_set(self, memory::IS_LOCKED_AT)? {
            // Open the file anew, because a lock belongs to an open file description. The lock ends before the
            // turn does.
            let alone = File::options().read(true).write(true).open(&self.path)?;
            if rustix::fs::flock(&alone, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Ok(());
            }
        }
        memory::write_back(self, source, 0..self.pages()?)
    }

    /// Records that pages have been filled with `data`. To be called in the same turn as filling them.
    pub(super) fn read_in(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if memory::is_set(self, memory::KEEPS_AT)? {
            let mut known = vec![0; data.len()];
            self.get(memory::ORIGINALS_AT + offset, &mut known)?;
            // Write only what differs, so that holes stay holes.
            for run in memory::changed(data, &known) {
                self.put(memory::ORIGINALS_AT + offset + run.start as u64, &data[run])?;
            }
        }
        self.put(offset / page_bytes() as u64, &vec![1; data.len() / page_bytes()])
    }
}

impl memory::Access for Memory {
    type Error = io::Error;

    fn get(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            match self.file.read_at(&mut to[done..], at + done as u64)? {
                0 => {
                    to[done..].fill(0);
                    break;
                }
                read => done += read,
            }
        }
        Ok(())
    }

    fn put(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a test that cannot go on should say where

    use super::*;
    use rustix::fs::flock;
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
            let written = scope.spawn(|| pager.write_back(&Taking, false));
            wait_for_a_waiter(&process);
            let is_first = flock(&process, FlockOperation::NonBlockingLockExclusive).is_ok();
            drop(turn);
            written.join().unwrap().unwrap();
            assert!(is_first, "the pager is taken for a process that maps the file");
        });
    }
}
