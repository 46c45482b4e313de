//! Round trips through shared memory: the limit for `towline+shm`.
//!
//! Each side copies its message into the memory and increments its count. The other side waits for the new
//! count, spinning or asleep on a futex, and copies the message out.

use super::raw_args::{Args, Kind};
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_mem::SharedMemory;

// Offsets in the memory. Each count has its own cache line.
const REQUESTS: usize = 0;
const REPLIES: usize = 128;
const MESSAGES: usize = 4096;

/// Returns the bytes of memory that the counts and messages need.
pub(super) fn bytes(args: &Args) -> usize {
    MESSAGES + args.request_bytes() + args.bytes()
}

/// One end of the exchange.
pub(super) struct End {
    memory: SharedMemory,
    sleeps: bool,
    /// Number of round trips so far, as stored in the counts.
    count: u32,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl End {
    /// Creates an end over memory of [`bytes`] bytes.
    pub(super) fn new(args: &Args, memory: SharedMemory) -> Self {
        Self {
            memory,
            sleeps: args.kind == Kind::Futex,
            count: 0,
            request: vec![1; args.request_bytes()],
            reply: vec![2; args.bytes()],
        }
    }

    fn raise(&self, word: &AtomicU32) {
        word.store(self.count, Ordering::Release);
        if self.sleeps {
            // Without a waiter, this wakes nobody, which is fine.
            let _ = futex::wake(word, futex::Flags::empty(), 1);
        }
    }

    fn await_count(&self, word: &AtomicU32) {
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen == self.count {
                return;
            }
            if self.sleeps {
                // The wait may end by a wake-up, a signal or at once because the count has changed; the loop
                // checks the count.
                let _ = futex::wait(word, futex::Flags::empty(), seen, None);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Sends a request and receives its reply.
    pub(super) fn ask(&mut self) {
        self.count = self.count.wrapping_add(1);
        self.memory.copy_in(MESSAGES, &self.request);
        self.raise(self.memory.word32(REQUESTS));
        self.await_count(self.memory.word32(REPLIES));
        self.memory.copy_out(MESSAGES + self.request.len(), &mut self.reply);
    }

    /// Receives a request and replies.
    pub(super) fn answer(&mut self) {
        self.count = self.count.wrapping_add(1);
        self.await_count(self.memory.word32(REQUESTS));
        self.memory.copy_out(MESSAGES, &mut self.request);
        self.memory.copy_in(MESSAGES + self.request.len(), &self.reply);
        self.raise(self.memory.word32(REPLIES));
    }
}
