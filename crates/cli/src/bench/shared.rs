//! Round trips through shared memory: the limit of what `towline+shm` can reach.
//!
//! Each side copies its message into the memory and raises its count; the other side waits for
//! that count, spinning or asleep on a futex, and copies the message out.

use super::raw::{Args, Kind};
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_mem::SharedMemory;

// Offsets; the counts have their own cache lines.
const REQUESTS: usize = 0;
const REPLIES: usize = 128;
const MESSAGES: usize = 4096;

/// Bytes of memory that the messages need.
pub(super) fn bytes(args: &Args) -> usize {
    MESSAGES + args.request + args.reply
}

/// One end of the exchange.
pub(super) struct End {
    memory: SharedMemory,
    sleeps: bool,
    /// Round trips so far, as the counts in the memory go.
    count: u32,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl End {
    /// An end over memory of [`bytes`].
    pub(super) fn new(args: &Args, memory: SharedMemory) -> Self {
        Self {
            memory,
            sleeps: args.kind == Kind::Futex,
            count: 0,
            request: vec![1; args.request],
            reply: vec![2; args.reply],
        }
    }

    fn raise(&self, word: &AtomicU32) {
        word.store(self.count, Ordering::Release);
        if self.sleeps {
            // Without a waiter it wakes nobody, which is no error.
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
                // Whether woken, interrupted or too late: the count decides.
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
