//! A bounded pool of equal buffers: what limits the memory of a server, however many clients.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Hands out buffers of one size, never more than a fixed number at once. Memory is allocated
/// when first needed and reused, last in first out, so that it stays in the cache.
#[derive(Debug)]
pub struct Pool {
    buffer_bytes: usize,
    buffers_max: usize,
    state: Mutex<State>,
    usage: Arc<Usage>,
}

/// Bytes of the buffers of one or several pools that are out, and the most that were at once.
#[derive(Debug, Default)]
struct Usage {
    now: AtomicU64,
    most: AtomicU64,
}

/// Alignment of every buffer, so that devices can be read and written around the page cache.
const ALIGNMENT: usize = 4096;

/// An allocation, where its aligned part begins, and its number; by default none.
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

/// Leave to use a buffer of a [`Pool`]; goes back when dropped. Its memory is taken when it is first needed: the one that was
/// given back last, which is in the cache, however many others are reserved and still wait.
#[derive(Debug)]
pub struct Reserved(PoolBuffer);

/// A buffer of a [`Pool`]; goes back when dropped.
#[derive(Debug)]
pub struct PoolBuffer {
    memory: Memory,
    pool: Arc<Pool>,
    /// Where its bytes are counted, besides.
    account: Option<Arc<AtomicU64>>,
}

impl Pool {
    /// A pool of at most `buffers_max` buffers of `buffer_bytes` bytes each.
    #[must_use]
    pub fn new(buffer_bytes: usize, buffers_max: usize) -> Arc<Self> {
        let (state, usage) = (Mutex::default(), Arc::default());
        Arc::new(Self { buffer_bytes, buffers_max, state, usage })
    }

    /// Another pool, whose bytes are counted together with those of this one.
    #[must_use]
    pub fn beside(&self, buffer_bytes: usize, buffers_max: usize) -> Arc<Self> {
        let (state, usage) = (Mutex::default(), self.usage.clone());
        Arc::new(Self { buffer_bytes, buffers_max, state, usage })
    }

    /// A buffer, or `None` when all are out.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<PoolBuffer> {
        let mut state = self.state();
        self.count_out(&mut state)?;
        let free = state.free.pop();
        drop(state);
        let memory = free.unwrap_or_else(|| Memory::new(self.buffer_bytes));
        Some(PoolBuffer { memory, pool: self.clone(), account: None })
    }

    /// Leave to use a buffer later, which counts as one that is out; `None` when all are out.
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

    /// Bytes of each buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Bytes of all buffers that it may hand out.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer_bytes as u64 * self.buffers_max as u64
    }

    /// Bytes of the buffers that are out now, of this pool and those beside it, and the most that
    /// were out at once.
    #[must_use]
    pub fn bytes_in_use(&self) -> (u64, u64) {
        (self.usage.now.load(Ordering::Relaxed), self.usage.most.load(Ordering::Relaxed))
    }

    /// True when [`Pool::take`] would give nothing.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.in_use().0 >= self.buffers_max
    }

    /// True while more than a quarter of the buffers are not out.
    #[must_use]
    pub fn is_plentiful(&self) -> bool {
        self.in_use().0 < self.buffers_max - self.buffers_max.div_ceil(4)
    }

    /// Buffers out now, and the most that were out at once.
    #[must_use]
    pub fn in_use(&self) -> (usize, usize) {
        let state = self.state();
        (state.out, state.out_max)
    }
}

impl Memory {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + ALIGNMENT];
        // A vector that never grows never moves.
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { bytes, start, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    fn is_there(&self) -> bool {
        !self.bytes.is_empty()
    }
}

impl Reserved {
    /// The buffer, whose memory is taken now.
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

    /// A number that no other memory of this process has or will have: what a registration of the
    /// memory with a device or a ring is kept under. The memory goes only with its pool.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.memory.number
    }

    /// Counts the buffer's bytes in an account until it is given back.
    #[must_use]
    pub fn charged_to(mut self, account: &Arc<AtomicU64>) -> Self {
        account.fetch_add(self.pool.buffer_bytes as u64, Ordering::Relaxed);
        if let Some(before) = self.account.replace(account.clone()) {
            before.fetch_sub(self.pool.buffer_bytes as u64, Ordering::Relaxed);
        }
        self
    }

    /// The whole buffer, aligned to 4096 bytes; contents are what the last user left.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes[self.range()]
    }

    /// The whole buffer, to fill.
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
        // One after the other, they use the same memory.
        let numbers: Vec<_> = all
            .drain(..2)
            .map(|mut reserved| {
                reserved.buffer().bytes_mut().fill(7);
                assert!(reserved.buffer().bytes().iter().all(|byte| *byte == 7));
                reserved.buffer().number()
            })
            .collect();
        assert_eq!(numbers[0], numbers[1]);
        // One that was never used leaves nothing behind.
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
