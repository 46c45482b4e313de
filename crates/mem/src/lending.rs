//! Lends memory of a store to clients on this machine, which read it in place.

use crate::Guard;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A descriptor for reading the memory, and the count of bytes on loan.
#[derive(Debug)]
pub struct Lending {
    readable: OwnedFd,
    block_bytes: u64,
    lent_max: u64,
    lent: AtomicU64,
}

impl Lending {
    pub(crate) fn new(memory: &OwnedFd, block_bytes: u64, lent_max: u64) -> io::Result<Self> {
        // A memfd starts with mode 0777, so anyone with a read-only descriptor could reopen it for writing.
        rustix::fs::fchmod(memory, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let readable = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { readable, block_bytes, lent_max, lent: AtomicU64::new(0) })
    }

    /// Returns the memory as a read-only descriptor, for clients to map.
    #[must_use]
    pub fn readable(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    /// Returns the number of bytes that these guards keep.
    #[must_use]
    pub fn bytes_of(&self, guards: &[Guard]) -> u64 {
        self.block_bytes * guards.len() as u64
    }

    /// Returns the number of bytes on loan.
    #[must_use]
    pub fn lent(&self) -> u64 {
        self.lent.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let add = |lent: u64| lent.checked_add(bytes).filter(|sum| *sum <= self.lent_max);
        self.lent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }
}

/// Ranges of a memory that do not change as long as the loan lives.
pub struct Loan {
    memory: Arc<crate::SharedMemory>,
    bytes: u64,
    _guards: Vec<Guard>,
}

impl Loan {
    /// Lends what the guards keep. Returns `None` if the memory is not lendable, or if this would exceed
    /// the limit on bytes lent at once.
    #[must_use]
    pub fn new(memory: &Arc<crate::SharedMemory>, guards: Vec<Guard>) -> Option<Self> {
        let lending = memory.lending()?;
        let bytes = lending.bytes_of(&guards);
        lending.take(bytes).then(|| Self { memory: memory.clone(), bytes, _guards: guards })
    }

    /// Returns the number of bytes kept: whole blocks, so perhaps more than were lent.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(lending) = self.memory.lending() {
            lending.lent.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedMemory;

    const BLOCK: u64 = 4096;

    fn memory() -> Arc<SharedMemory> {
        Arc::new(SharedMemory::create_lendable("test", 1 << 16, BLOCK, 3 * BLOCK).unwrap())
    }

    fn guards(count: usize) -> Vec<Guard> {
        (0..count).map(|_| Arc::new(()) as Guard).collect()
    }

    #[test]
    fn no_more_is_lent_than_may_be_and_all_comes_back() {
        let memory = memory();
        let lending = memory.lending().unwrap();
        let first = Loan::new(&memory, guards(2)).unwrap();
        assert!(Loan::new(&memory, guards(2)).is_none());
        let second = Loan::new(&memory, guards(1)).unwrap();
        assert_eq!((first.bytes(), second.bytes(), lending.lent()), (8192, 4096, 12288));
        drop(first);
        drop(Loan::new(&memory, guards(2)).unwrap());
        drop(second);
        assert_eq!(lending.lent(), 0);
        let plain = Arc::new(SharedMemory::create("test", 4096).unwrap());
        assert!(Loan::new(&plain, Vec::new()).is_none());
    }

    #[test]
    fn a_borrower_can_read_what_it_was_given_but_not_write_it() {
        let memory = memory();
        memory.copy_in(5000, b"seen");
        let given = memory.lending().unwrap().readable().try_clone_to_owned().unwrap();
        let again = given.try_clone().unwrap();
        let mapped = SharedMemory::open(given, memory.len(), false).unwrap();
        let mut back = [0; 4];
        mapped.copy_out(5000, &mut back);
        assert_eq!(&back, b"seen");
        memory.copy_in(5000, b"more");
        mapped.copy_out(5000, &mut back);
        assert_eq!(&back, b"more");
        assert!(rustix::io::pwrite(&again, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&again, 0).is_err());
        assert!(SharedMemory::open(again, memory.len(), true).is_err(), "mapped to be written");
        assert!(
            SharedMemory::open(mapped.fd().try_clone_to_owned().unwrap(), 1 << 17, false).is_err()
        );
    }
}
