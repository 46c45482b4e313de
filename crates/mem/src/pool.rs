//! A bounded pool of equal buffers, which limits a server's memory for any number of clients.

use crate::aligned_zeroes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Hands out buffers of one size, never more than a fixed number at once. Memory is allocated when first
/// needed and reused last in, first out, so that it stays in the cache.
#[derive(Debug)]
pub struct Pool {
    buffer_bytes: usize,
    buffers_max: usize,
    state: Mutex<State>,
    usage: Arc<Usage>,
}

/// Bytes of the buffers in use, of one or several pools, and their highest number so far.
#[derive(Debug, Default)]
struct Usage {
    now: AtomicU64,
    most: AtomicU64,
}

/// An allocation, the offset of its aligned part, and its number. The default is no allocation.
#[derive(Debug, Default)]
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    number: u64,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Memory>,
    out: usize,
    out_max: usize,
}

/// Permission to use one buffer of a [`Pool`], returned when dropped. Takes its memory only when first
/// used: the buffer returned last, which is in the cache, however many other reservations still wait.
#[derive(Debug)]
pub struct Reserved(PoolBuffer);

/// A buffer of a [`Pool`], returned when dropped.
#[derive(Debug)]
pub struct PoolBuffer {
    memory: Memory,
    pool: Arc<Pool>,
    /// An additional counter that includes this buffer's bytes.
    account: Option<Arc<AtomicU64>>,
}

impl Pool {
    /// Creates a pool of at most `buffers_max` buffers of `buffer_bytes` bytes each.
    #[must_use]
    pub fn new(buffer_bytes: usize, buffers_max: usize) -> Arc<Self> {
        let (state, usage) = (Mutex::default(), Arc::default());
        Arc::new(Self { buffer_bytes, buffers_max, state, usage })
    }

    /// Creates another pool whose bytes are counted together with those of this one.
    #[must_use]
    pub fn beside(&self, buffer_bytes: usize, buffers_max: usize) -> Arc<Self> {
        let (state, usage) = (Mutex::default(), self.usage.clone());
        Arc::new(Self { buffer_bytes, buffers_max, state, usage })
    }

    /// Takes a buffer; `None` if all are in use.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<PoolBuffer> {
        let mut state = self.state();
        self.count_out(&mut state)?;
        let free = state.free.pop();
        drop(state);
        let memory = free.unwrap_or_else(|| Memory::new(self.buffer_bytes));
        Some(PoolBuffer { memory, pool: self.clone(), account: None })
    }

    /// Reserves a buffer for later, which counts as in use; `None` if all are in use.
    #[must_use]
    pub fn reserve(self: &Arc<Self>) -> Option<Reserved> {
        self.count_out(&mut self.state())?;
        let memory = Memory::default();
        Some(Reserved(PoolBuffer { memory, pool: self.clone(), account: None }))
    }

    fn count_out(&self, state: &mut State) -> Option<()> {
        if state.out == self.buffers_max {
            return None;
        }
        state.out += 1;
        state.out_max = state.out_max.max(state.out);
        let bytes = self.buffer_bytes as u64;
        let now = self.usage.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.usage.most.fetch_max(now, Ordering::Relaxed);
        Some(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the size of each buffer in bytes.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Returns the size of all buffers that the pool may hand out, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer_bytes as u64 * self.buffers_max as u64
    }

    /// Returns the bytes in use now, in this pool and those created with [`Pool::beside`], and the most
    /// that were in use at once.
    #[must_use]
    pub fn bytes_in_use(&self) -> (u64, u64) {
        (self.usage.now.load(Ordering::Relaxed), self.usage.most.load(Ordering::Relaxed))
    }

    /// True when [`Pool::take`] would return `None`.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.in_use().0 >= self.buffers_max
    }

    /// True while more than a quarter of the buffers are available.
    #[must_use]
    pub fn is_plentiful(&self) -> bool {
        self.in_use().0 < self.buffers_max - self.buffers_max.div_ceil(4)
    }

    /// Returns the number of buffers in use, and the most that were in use at once.
    #[must_use]
    pub fn in_use(&self) -> (usize, usize) {
        let state = self.state();
        (state.out, state.out_max)
    }
}

impl Memory {
    fn new(length: usize) -> Self {
        // The vector never grows, so its memory never moves.
        let (bytes, start) = aligned_zeroes(length);
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { bytes, start, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    fn is_there(&self) -> bool {
        !self.bytes.is_empty()
    }
}

impl Reserved {
    /// Returns the buffer; the first call takes its memory.
    pub fn buffer(&mut self) -> &mut PoolBuffer {
        let Self(buffer) = self;
        if !buffer.memory.is_there() {
            let free = buffer.pool.state().free.pop();
            buffer.memory = free.unwrap_or_else(|| Memory::new(buffer.pool.buffer_bytes));
        }
        buffer
    }

    /// As [`PoolBuffer::charged_to`].
    #[must_use]
    pub fn charged_to(self, account: &Arc<AtomicU64>) -> Self {
        Self(self.0.charged_to(account))
    }
}

impl PoolBuffer {
    fn range(&self) -> std::ops::Range<usize> {
        self.memory.start..self.memory.start + self.pool.buffer_bytes
    }

    /// Returns a number that no other memory of this process has or will have. Registrations of the
    /// memory with a device or a ring are kept under it. The memory is freed only with its pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.memory.number
    }

    /// Counts the buffer's bytes in `account` until the buffer is returned.
    #[must_use]
    pub fn charged_to(mut self, account: &Arc<AtomicU64>) -> Self {
        account.fetch_add(self.pool.buffer_bytes as u64, Ordering::Relaxed);
        if let Some(before) = self.account.replace(account.clone()) {
            before.fetch_sub(self.pool.buffer_bytes as u64, Ordering::Relaxed);
        }
        self
    }

    /// Returns the whole buffer, aligned to 4096 bytes, with the bytes that its last user left.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes[self.range()]
    }

    /// Returns the whole buffer, for writing.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.range();
        &mut self.memory.bytes[range]
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.fetch_sub(self.pool.buffer_bytes as u64, Ordering::Relaxed);
        }
        let mut state = self.pool.state();
        state.out -= 1;
        let bytes = self.pool.buffer_bytes as u64;
        self.pool.usage.now.fetch_sub(bytes, Ordering::Relaxed);
        if self.memory.is_there() {
            state.free.push(std::mem::take(&mut self.memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_counts_and_takes_memory_only_when_it_is_used() {
        let pool = Pool::new(4096, 3);
        let mut all: Vec<_> = (0..3).map(|_| pool.reserve().unwrap()).collect();
        assert!(pool.reserve().is_none() && pool.take().is_none() && !pool.is_plentiful());
        assert_eq!((pool.bytes_in_use(), pool.is_exhausted()), ((3 * 4096, 3 * 4096), true));
        assert_eq!(pool.state().free.len(), 0);
        // Used one after the other, they share the same memory.
        let numbers: Vec<_> = all
            .drain(..2)
            .map(|mut reserved| {
                reserved.buffer().bytes_mut().fill(7);
                assert!(reserved.buffer().bytes().iter().all(|byte| *byte == 7));
                reserved.buffer().number()
            })
            .collect();
        assert_eq!(numbers[0], numbers[1]);
        // A reservation that was never used returns no memory.
        drop(all);
        assert_eq!((pool.in_use(), pool.state().free.len()), ((0, 3), 1));
        assert!(pool.is_plentiful());
        let account = Arc::new(AtomicU64::new(0));
        let charged = pool.reserve().map(|reserved| reserved.charged_to(&account));
        assert_eq!(account.load(Ordering::Relaxed), 4096);
        drop(charged);
        assert_eq!(account.load(Ordering::Relaxed), 0);
    }
}
