//! A thread that turns memory full of data into huge pages, one after the other.
//!
//! A small random request mostly touches data that is in no CPU cache, nor are the page table
//! entries for it. In a virtual machine, translating an address takes up to 24 memory accesses with
//! 4 KiB pages, but most of them hit a cache with 2 MiB pages. The kernel makes no huge pages here
//! by itself unless the machine is set up for it, and the first write to a 2 MiB block must not
//! allocate all of it. So the thread asks for a huge page once a block is full. That allocates new
//! memory and copies, which takes about a millisecond. Freeing pages of a huge page splits it
//! again. A client that frees page after page does not keep a CPU busy, since a block becomes huge
//! again only after a pause.

use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use towline_mem::{HUGE_BYTES, SharedMemory};
use towline_reactor::processor;

/// Pause after a block that became huge before, or could not: these take at most a tenth of a CPU.
const AGAIN: Duration = Duration::from_millis(10);
/// How often to try a block that cannot become huge, with the same pauses.
const TRIES: u32 = 5;

/// Pages per word of bits.
const WORD_PAGES: u64 = 64;
/// Words of bits per huge page.
const WORDS: usize = HUGE_BYTES / 4096 / WORD_PAGES as usize;

/// Tells the thread of one memory which blocks became full.
#[derive(Debug)]
pub(super) struct Settling {
    memory: Weak<SharedMemory>,
    written: Weak<SharedMemory>,
    /// `None`: the thread could not start. It ends when this sender is dropped, or if the kernel
    /// makes no huge pages.
    full: OnceLock<Option<Sender<usize>>>,
    /// Blocks sent to the thread that it has not started on: each is queued only once.
    queued: Arc<Mutex<HashSet<usize>>>,
}

impl Settling {
    /// Creates the state for memory of which no block is full; there is no thread yet. `written`
    /// has one bit for each page of 4 KiB.
    pub(super) fn of(memory: &Arc<SharedMemory>, written: &Arc<SharedMemory>) -> Self {
        let (memory, written) = (Arc::downgrade(memory), Arc::downgrade(written));
        Self { memory, written, full: OnceLock::new(), queued: Arc::default() }
    }

    /// Checks whether the block of `page` is full. Call it when the last of the 64 pages of a word
    /// is written.
    pub(super) fn look(&self, written: &SharedMemory, page: u64) {
        let block = (page / WORD_PAGES) as usize / WORDS;
        fence(Ordering::SeqCst); // of two threads that write the last pages, one sees both
        if !is_full(written, block) {
            return;
        }
        let start = || {
            let (sender, receiver) = channel();
            let (memory, written) = (self.memory.clone(), self.written.clone());
            let queued = self.queued.clone();
            let body = move || settle(&receiver, &queued, &memory, &written);
            // Without a thread, pages stay small.
            let thread = processor::spawn("towline-settle", body);
            thread.is_ok().then_some(sender)
        };
        if let Some(full) = self.full.get_or_init(start)
            && self.queued.lock().insert(block)
        {
            let _ = full.send(block); // the thread may have ended
        }
    }
}

/// Returns true if all pages of a block hold data; false also for a block cut off by the end of the
/// memory.
fn is_full(written: &SharedMemory, block: usize) -> bool {
    let words = block * WORDS..(block + 1) * WORDS;
    words.end * 8 <= written.len()
        && words
            .into_iter()
            .all(|word| written.word64(word * 8).load(Ordering::Acquire) == u64::MAX)
}

fn settle(
    full: &Receiver<usize>,
    queued: &Mutex<HashSet<usize>>,
    memory: &Weak<SharedMemory>,
    written: &Weak<SharedMemory>,
) {
    let mut made = HashSet::new();
    for block in full {
        queued.lock().remove(&block);
        match try_often(block, memory, written) {
            Some(Ok(())) if made.insert(block) => (),
            Some(Err(error)) if error.raw_os_error() == Some(libc::EINVAL) && made.is_empty() => {
                return; // this kernel cannot make any
            }
            Some(_) => std::thread::sleep(AGAIN),
            None => (),
        }
    }
}

/// Tries to make a block a huge page. `None`: it is no longer full, or the memory is gone.
fn try_often(
    block: usize,
    memory: &Weak<SharedMemory>,
    written: &Weak<SharedMemory>,
) -> Option<io::Result<()>> {
    let mut tries = 0;
    loop {
        // Not held during the pauses, so that the memory can be dropped then.
        let (memory, written) = (memory.upgrade()?, written.upgrade()?);
        // A block cut off by the end of the memory stays as it is.
        if (block + 1) * HUGE_BYTES > memory.len() || !is_full(&written, block) {
            return None;
        }
        // If a page of the block is freed at this moment, it keeps memory until it is written and
        // freed once more.
        let made = memory.make_huge(block * HUGE_BYTES);
        tries += 1;
        // The failure may be temporary, for example while pages of the block are being sent.
        if made.is_ok() || tries == TRIES {
            return Some(made);
        }
        drop((memory, written));
        std::thread::sleep(AGAIN);
    }
}
