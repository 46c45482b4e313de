//! Memory that is full becomes huge pages, one after the other, by a thread.
//!
//! What a small request touches is in no cache, most likely, and neither is what tells where its page is: in a virtual machine
//! that are up to 24 looks at memory for a page of 4 KiB, and most of them are in a cache for one of 2 MiB. The kernel makes none of its own
//! accord, unless the machine is set up so, and to write the first page of 2 MiB must not take all of them. So it is asked for each that has become
//! full. It takes new memory and copies, which takes about a millisecond. What is given back in it makes it small pages again; who does that
//! to page after page does not keep a processor busy, since each is made again only after a pause.

use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use towline_mem::{HUGE_BYTES, SharedMemory};

/// How long to wait after one that had been made before, or could not be: a tenth of a processor at most is spent on those.
const AGAIN: Duration = Duration::from_millis(10);
/// How often to try one that cannot be made, with the same pauses.
const TRIES: u32 = 5;

/// Pages whose bits are one word.
const WORD_PAGES: u64 = 64;
/// Words of the bits of a huge page.
const WORDS: usize = HUGE_BYTES / 4096 / WORD_PAGES as usize;

/// Tells the thread of one memory what has become full.
#[derive(Debug)]
pub(super) struct Settling {
    memory: Weak<SharedMemory>,
    written: Weak<SharedMemory>,
    /// `None`: there is no thread. It ends when this is gone, or when there can be no huge pages.
    full: OnceLock<Option<Sender<usize>>>,
    /// What the thread was told of and has not begun: nothing stands there twice.
    queued: Arc<Mutex<HashSet<usize>>>,
}

impl Settling {
    /// Nothing is full yet, and there is no thread. `written` has a bit for each page of 4 KiB.
    pub(super) fn of(memory: &Arc<SharedMemory>, written: &Arc<SharedMemory>) -> Self {
        let (memory, written) = (Arc::downgrade(memory), Arc::downgrade(written));
        Self { memory, written, full: OnceLock::new(), queued: Arc::default() }
    }

    /// 64 pages are written, this one among them: looks whether all around them are.
    pub(super) fn look(&self, written: &SharedMemory, page: u64) {
        let block = (page / WORD_PAGES) as usize / WORDS;
        fence(Ordering::SeqCst); // of two who write the last pages one sees both
        if !is_full(written, block) {
            return;
        }
        let start = || {
            let (sender, receiver) = channel();
            let (memory, written) = (self.memory.clone(), self.written.clone());
            let queued = self.queued.clone();
            let body = move || settle(&receiver, &queued, &memory, &written);
            // Without a thread pages stay as they are.
            let thread = std::thread::Builder::new().name("towline-settle".into()).spawn(body);
            thread.is_ok().then_some(sender)
        };
        if let Some(full) = self.full.get_or_init(start)
            && self.queued.lock().insert(block)
        {
            let _ = full.send(block); // the thread may have ended
        }
    }
}

/// True when all pages of a block hold data; false also for one that is cut off by the end of the memory.
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
                return; // this kernel makes none
            }
            Some(_) => std::thread::sleep(AGAIN),
            None => (),
        }
    }
}

/// Makes a block huge. `None`: it is not full any more, or the memory is gone.
fn try_often(
    block: usize,
    memory: &Weak<SharedMemory>,
    written: &Weak<SharedMemory>,
) -> Option<io::Result<()>> {
    let mut tries = 0;
    loop {
        // Not held during the pauses, in which all may end.
        let (memory, written) = (memory.upgrade()?, written.upgrade()?);
        // One that is cut off by the end of the memory stays as it is.
        if (block + 1) * HUGE_BYTES > memory.len() || !is_full(&written, block) {
            return None;
        }
        // A page of it that is given back in this moment takes memory until it is written and given back once more.
        let made = memory.make_huge(block * HUGE_BYTES);
        tries += 1;
        // Not now may be in a moment, as where pages of it are being sent.
        if made.is_ok() || tries == TRIES {
            return Some(made);
        }
        drop((memory, written));
        std::thread::sleep(AGAIN);
    }
}
