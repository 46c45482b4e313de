//! Does a core's work that waits for a device: on its ring, or on a thread that may block.

use crate::guarded::guarded;
use crate::mailbox::{Mail, Mailbox};
use crate::offload::Job;
use crate::pools::Pools;
use rustix::io::{Errno, ReadWriteFlags};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Call, Disk, Driver, Status, Work};
use towline_mem::PoolBuffer;
use towline_reactor::{Reactor, Transfer, processor};
use towline_store::{Direction, Place};

/// Work that is due at a certain time; ordered so that the earliest comes first.
pub(crate) struct Late {
    pub(crate) at: Instant,
    pub(crate) token: u64,
    pub(crate) call: Call,
}

impl Ord for Late {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap returns the greatest.
        (other.at, other.token).cmp(&(self.at, self.token))
    }
}

impl PartialOrd for Late {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Late {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Late {}

type Asked = Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>;

pub(crate) struct CoreDriver<'a> {
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) late: &'a mut BinaryHeap<Late>,
    pub(crate) pools: &'a Pools,
    pub(crate) mailbox: &'a Mailbox,
}

impl CoreDriver<'_> {
    fn on_thread(&self, disk: &Arc<Disk>, work: impl FnOnce() -> Mail + Send + 'static) {
        let reply_to = self.mailbox.clone();
        let work = || Some(work());
        self.pools.disks.of(disk).run(Job { work: Box::new(work), reply_to, low: false });
    }
}

impl Driver for CoreDriver<'_> {
    fn begin(&mut self, token: u64, disk: &Arc<Disk>, work: Work) {
        match work {
            Work::Transfer { place, buffer, direction, durable } => {
                let write = direction == Direction::Write;
                let range = 0..place.length as usize;
                let Place { file, offset, .. } = place;
                let transfer = Transfer { file, offset, buffer, range, write, durable };
                // If the ring is full or broken, a thread does it.
                if let Err(mut transfer) = self.reactor.submit(token, transfer) {
                    self.on_thread(disk, move || {
                        let result = move_bytes(&mut transfer);
                        Mail::Transferred { token, result, buffer: transfer.buffer }
                    });
                }
            }
            Work::Call(call) => self.on_thread(disk, move || {
                let (result, buffer): (io::Result<usize>, PoolBuffer) = call();
                Mail::Transferred { token, result, buffer }
            }),
            Work::At(at, call) => self.late.push(Late { at, token, call }),
            Work::Ask(call) => self.on_thread(disk, move || answer(token, call)),
        }
    }
}

/// Makes a call that waits for other requests of its disk on a thread of its own: the disk's threads, and where none
/// can be created the core, have to end those.
pub(crate) struct Apart<'a>(pub(crate) CoreDriver<'a>);

impl Driver for Apart<'_> {
    fn begin(&mut self, token: u64, disk: &Arc<Disk>, work: Work) {
        let Work::Ask(call) = work else { return self.0.begin(token, disk, work) };
        let mailbox = self.0.mailbox.clone();
        if let Err(error) =
            processor::spawn("towline-apart", move || mailbox.send(answer(token, call)))
        {
            self.0.mailbox.send(Mail::Answered { token, result: Err(error) });
        }
    }
}

fn answer(token: u64, call: Asked) -> Mail {
    let result = guarded(call).unwrap_or_else(|| Err(Errno::IO.into()));
    Mail::Answered { token, result }
}

/// Does one read or write on this thread; it may move fewer bytes.
fn move_bytes(transfer: &mut Transfer) -> io::Result<usize> {
    loop {
        let moved = if transfer.write {
            let flags =
                if transfer.durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
            let part = &[IoSlice::new(transfer.part())];
            rustix::io::pwritev2(&*transfer.file, part, transfer.offset, flags)
        } else {
            let target = &mut transfer.buffer.bytes_mut()[transfer.range.clone()];
            rustix::io::pread(&*transfer.file, target, transfer.offset)
        };
        match moved {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;
    use towline_store::block::MemoryDisk;

    /// Otherwise a disk that becomes shorter, which waits for its writes, could wait forever where no more threads
    /// can be created.
    #[test]
    fn what_waits_for_other_requests_takes_none_of_their_threads() {
        let disk = Arc::new(Disk::new("", "", MemoryDisk::new("disk", 4096).unwrap(), false));
        let (mut reactor, mut late) = (Reactor::new(None).unwrap(), BinaryHeap::new());
        let (pools, mailbox) = (Pools::new(1), Mailbox::new().unwrap());
        let mut driver =
            CoreDriver { reactor: &mut reactor, late: &mut late, pools: &pools, mailbox: &mailbox };
        let (let_go, held) = channel::<()>();
        let held = Arc::new(parking_lot::Mutex::new(held));
        let threads = crate::offload::THREADS_MAX as u64;
        for token in 0..threads {
            let held = held.clone();
            let wait = move || held.lock().recv().map_or(Ok(Vec::new()), |()| Ok(Vec::new()));
            driver.begin(token, &disk, Work::Ask(Box::new(wait)));
        }
        let begun = Instant::now();
        Apart(driver).begin(threads, &disk, Work::Ask(Box::new(|| Ok(Vec::new()))));
        let answered = loop {
            if let [Mail::Answered { token, .. }] = mailbox.take()[..] {
                break token;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "it waits for the others");
            std::thread::yield_now();
        };
        assert_eq!(answered, threads);
        drop(let_go);
    }
}
