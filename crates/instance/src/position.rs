//! The offset of an open file, in one word with who may move it, so that a process that was stopped while it had the lock
//! changes nothing when it goes on, at whatever instruction it was.

use crate::lock::Locked;
use portable_atomic::{AtomicU128, Ordering};

/// Longest write whose place is kept; no call writes more (`write(2)`).
const BYTES_MAX: u64 = (1 << 31) - 1;
/// Bit of [`Now::state`]: somebody is writing at the offset. Then the bits below it are the number of bytes, and the low half
/// is that of the word of the writer's lock.
const WRITING: u64 = 1 << 63;

/// The value of the word.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Now {
    offset: i64,
    /// The word of the lock of who may move the offset, or [`WRITING`].
    state: u64,
}

impl Now {
    fn of(word: u128) -> Self {
        Self { offset: word as i64, state: (word >> 64) as u64 }
    }

    fn word(self) -> u128 {
        u128::from(self.state) << 64 | u128::from(self.offset as u64)
    }

    /// Returns the offset behind what is being written.
    fn end(self) -> i64 {
        let bytes = if self.state & WRITING == 0 { 0 } else { self.state >> 32 & BYTES_MAX };
        self.offset.saturating_add(bytes as i64)
    }
}

/// Returns the state while the holder of a lock writes so many bytes.
fn writing(locked: &Locked<'_>, bytes: u64) -> u64 {
    WRITING | bytes.min(BYTES_MAX) << 32 | locked.word() & u64::from(u32::MAX)
}

/// The offset of an open file in shared memory; all zero: at the beginning.
#[repr(transparent)]
pub(crate) struct Position(AtomicU128);

impl Position {
    /// Returns true if the processor can change the word in one step, as all processes of the run must.
    pub(crate) fn works_here() -> bool {
        AtomicU128::is_lock_free()
    }

    fn now(&self) -> Now {
        Now::of(self.0.load(Ordering::SeqCst))
    }

    fn change(&self, from: Now, to: Now) -> bool {
        let (from, to) = (from.word(), to.word());
        self.0.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn offset(&self) -> i64 {
        self.now().offset
    }

    /// Sets the offset, whoever has the lock: that process goes on from here.
    pub(crate) fn set(&self, offset: i64) {
        self.0.store(Now { offset, state: 0 }.word(), Ordering::SeqCst);
    }

    /// Lets only the new holder of the lock move the offset, which goes behind what its previous holder has begun to write.
    pub(crate) fn claim(&self, locked: &Locked<'_>) {
        loop {
            let now = self.now();
            // Otherwise who has taken the lock over may have claimed it before.
            if !locked.is_held()
                || self.change(now, Now { offset: now.end(), state: locked.word() })
            {
                return;
            }
        }
    }

    /// Moves the offset if it is still the holder's.
    pub(crate) fn move_on(&self, locked: &Locked<'_>, from: i64, to: i64) -> bool {
        let state = locked.word();
        self.change(Now { offset: from, state }, Now { offset: to, state })
    }

    /// Announces a write at the offset, if it is still the holder's.
    pub(crate) fn begin(&self, locked: &Locked<'_>, from: i64, bytes: u64) -> bool {
        let [before, after] = [locked.word(), writing(locked, bytes)];
        self.change(Now { offset: from, state: before }, Now { offset: from, state: after })
    }

    /// Moves the offset behind what was written, unless somebody has moved it since it was announced.
    pub(crate) fn end(&self, locked: &Locked<'_>, from: i64, bytes: u64, to: i64) {
        let [before, after] = [writing(locked, bytes), locked.word()];
        let _ = self.change(Now { offset: from, state: before }, Now { offset: to, state: after });
    }
}
