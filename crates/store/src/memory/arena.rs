//! The memory of a store: one memfd in blocks, and the account of what is used.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_mem::{Segment, SharedMemory};
use towline_wire::Errno;

/// Bytes of a block, the unit of addresses in the arena.
pub(super) const BLOCK_BYTES: u64 = 64 * 1024;
/// Most pages of a block, as many as a mask of pages has bits.
const BLOCK_PAGES_MAX: u64 = u16::BITS as u64;

/// Addresses for each byte of the limit: a file of one page has a block of up to sixteen.
const ADDRESS_RATIO: u64 = BLOCK_PAGES_MAX;
/// Blocks beyond the ratio: for copies made while readers still hold the original.
const SPARE_BLOCKS: u64 = 4096;
/// Most blocks that clients may read in place at once, a part of the spare ones.
const LENT_BLOCKS_MAX: u64 = SPARE_BLOCKS / 2;
/// Most addresses of an arena; an eighth of what a process has.
const ADDRESS_BYTES_MAX: u64 = 1 << 44;
/// Most free blocks that keep their pages for quick reuse.
const WARM_BLOCKS_MAX: u64 = 256;
/// Writes of this length go through the descriptor: 5 GB/s, where the mapping does 12 GB/s for pages
/// that are in it, but 1.5 GB/s for those that are not, as most are that only the network reads.
const SYSCALL_BYTES_MIN: usize = 16 * 1024;

const _: () = assert!(ADDRESS_BYTES_MAX / BLOCK_BYTES <= u32::MAX as u64);

/// Bytes of a page, the unit in which memory is taken and charged. From 4 to 64 KiB, a whole part of a block.
#[inline]
pub(super) fn page_bytes() -> u64 {
    // Known beforehand where that can be: it divides in each read and write.
    if cfg!(target_arch = "x86_64") { 4096 } else { towline_mem::page_bytes() as u64 }
}

/// Pages of a block.
#[inline]
pub(super) fn block_pages() -> u64 {
    BLOCK_BYTES / page_bytes()
}

/// Hands out blocks and counts what is used against the limit.
///
/// What is in a block when it is handed out is undefined: whoever takes one writes each page
/// entirely before anyone may read it.
pub(super) struct Arena {
    memory: Arc<SharedMemory>,
    limit: AtomicU64,
    /// What the limit may be raised to.
    limit_max: u64,
    used: AtomicU64,
    inodes: AtomicU64,
    warm_max: usize,
    free: Mutex<Free>,
}

/// Blocks that nobody has. Those of `warm` still have pages, those of `cold` have none, and those
/// from `next` on were never used. `warm_out` blocks are in use that were warm before: they may have
/// pages that nobody pays for, and so count with `warm` against its limit.
struct Free {
    warm: Vec<u32>,
    warm_out: usize,
    cold: Vec<u32>,
    next: u32,
    end: u32,
}

/// One block; goes back to the arena when dropped.
pub(super) struct Block {
    arena: Arc<Arena>,
    index: u32,
    /// Pages that were written since the block was punched; the others read as zeros.
    present: u16,
    /// It was warm when it was handed out.
    warm: bool,
    /// Set when its pages may be in the hands of the network, where a later change of them would
    /// be seen: they must not be written any more, even after every reader is done.
    lent: AtomicBool,
}

impl Arena {
    /// Memory for `limit` bytes.
    pub(super) fn new(name: &str, limit: u64) -> std::io::Result<Arc<Self>> {
        let wanted = limit.saturating_mul(ADDRESS_RATIO).saturating_add(SPARE_BLOCKS * BLOCK_BYTES);
        let length = wanted.min(ADDRESS_BYTES_MAX) / BLOCK_BYTES * BLOCK_BYTES;
        let end = (length / BLOCK_BYTES) as u32;
        let length = usize::try_from(length).map_err(std::io::Error::other)?;
        // What is lent stays when its file is cut or written, and is not charged any more then.
        let lent_max = (limit / 8).min(LENT_BLOCKS_MAX * BLOCK_BYTES);
        let memory = SharedMemory::create_lendable(name, length, BLOCK_BYTES, lent_max)?;
        Ok(Arc::new(Self {
            memory: Arc::new(memory),
            limit: AtomicU64::new(limit),
            limit_max: limit.max(u64::from(end) * BLOCK_BYTES / 2),
            used: AtomicU64::new(0),
            inodes: AtomicU64::new(0),
            warm_max: WARM_BLOCKS_MAX.min(limit / BLOCK_BYTES / 8) as usize,
            free: Mutex::new(Free {
                warm: Vec::new(),
                warm_out: 0,
                cold: Vec::new(),
                next: 0,
                end,
            }),
        }))
    }

    /// The memory that all blocks are in.
    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The limit, the bytes used of it, and the number of inodes.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        let limit = self.limit();
        (limit, used.min(limit), self.inodes.load(Ordering::Relaxed))
    }

    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// What the limit may be raised to: half of the addresses, most of which are for blocks that are
    /// not full.
    pub(super) fn limit_max(&self) -> u64 {
        self.limit_max
    }

    /// Makes this the limit, up to [`Arena::limit_max`]. What is used beyond it stays.
    pub(super) fn set_limit(&self, limit: u64) {
        self.limit.store(limit.min(self.limit_max), Ordering::Relaxed);
    }

    /// Counts inodes that exist now.
    pub(super) fn count_inode(&self, born: bool) {
        if born {
            self.inodes.fetch_add(1, Ordering::Relaxed);
        } else {
            self.inodes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Charges `bytes`, or nothing and `ENOSPC`.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), Errno> {
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit());
        let result = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        result.map(|_| ()).map_err(|_| Errno::ENOSPC)
    }

    /// Charges up to `count` pages and says how many.
    pub(super) fn charge_pages(&self, count: u64) -> u64 {
        if count == 0 {
            return 0;
        }
        let fitting = |used: u64| (self.limit().saturating_sub(used) / page_bytes()).min(count);
        let add = |used: u64| Some(used + fitting(used) * page_bytes());
        let result = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        result.map_or(0, fitting)
    }

    /// Takes a charge back.
    pub(super) fn release(&self, bytes: u64) {
        if bytes != 0 {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// A block with undefined contents, or `ENOSPC` when the addresses are used up.
    pub(super) fn block(self: &Arc<Self>) -> Result<Arc<Block>, Errno> {
        let mut free = self.free.lock();
        let (index, warm) = if let Some(index) = free.warm.pop() {
            free.warm_out += 1;
            (index, true)
        } else if let Some(index) = free.cold.pop() {
            (index, false)
        } else if free.next < free.end {
            free.next += 1;
            (free.next - 1, false)
        } else {
            return Err(Errno::ENOSPC);
        };
        drop(free);
        let present = if warm { u16::MAX } else { 0 };
        Ok(Arc::new(Block {
            arena: self.clone(),
            index,
            present,
            warm,
            lent: AtomicBool::new(false),
        }))
    }
}

impl Block {
    /// Where it begins in the memory.
    pub(super) fn start(&self) -> usize {
        self.index as usize * BLOCK_BYTES as usize
    }

    /// Pages that may hold something other than zeros.
    pub(super) fn present(&self) -> u16 {
        self.present
    }

    /// Writes bytes whose pages are those of the mask; the range must be inside the block.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8], pages: u16) {
        let start = self.start() + offset;
        // Through the mapping, each page that is not in it yet takes a fault, and one that is not
        // there at all is filled with zeros first. A system call takes all of them at once.
        let absent = pages & !self.present != 0;
        let through_mapping = !absent && bytes.len() < SYSCALL_BYTES_MIN;
        if through_mapping || !write_at(&self.arena.memory, start, bytes) {
            self.arena.memory.copy_in(start, bytes);
        }
        self.present |= pages;
    }

    /// Copies pages of the mask from another block to the same place of this one.
    pub(super) fn copy(&mut self, from: &Self, start: usize, end: usize, pages: u16) {
        let mut bytes = vec![0; end - start];
        self.arena.memory.copy_out(from.start() + start, &mut bytes);
        self.write(start, &bytes, pages);
    }

    /// A segment that keeps the block; with `lend`, one that may be sent without copying.
    pub(super) fn segment(self: &Arc<Self>, lend: bool) -> Segment {
        if lend {
            self.lent.store(true, Ordering::Relaxed);
        }
        Segment::Shared(self.arena.memory.clone(), Some(self.clone()))
    }

    /// True when nobody else holds the block and its pages were never lent: it may be written.
    pub(super) fn is_writable(this: &mut Arc<Self>) -> bool {
        Arc::get_mut(this).is_some_and(|block| !*block.lent.get_mut())
    }

    /// Gives the pages of the mask, a run at `offset`, back; not if somebody else holds the block.
    pub(super) fn punch(this: &mut Arc<Self>, offset: usize, length: usize, pages: u16) {
        // The pages are no longer part of any file, so that failing wastes memory only.
        if let Some(block) = Arc::get_mut(this)
            && block.arena.memory.punch(block.start() + offset, length).is_ok()
        {
            block.present &= !pages;
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut free = self.arena.free.lock();
        free.warm_out -= usize::from(self.warm);
        if self.present == 0 {
            free.cold.push(self.index);
            return;
        }
        if !*self.lent.get_mut() && free.warm.len() + free.warm_out < self.arena.warm_max {
            free.warm.push(self.index);
            return;
        }
        drop(free);
        // A block that cannot be punched stays out of use: the network may still send its pages.
        if self.arena.memory.punch(self.start(), BLOCK_BYTES as usize).is_ok() {
            self.arena.free.lock().cold.push(self.index);
        }
    }
}

/// Writes through the descriptor; false when that failed, and then anything may stand there.
fn write_at(memory: &SharedMemory, start: usize, mut bytes: &[u8]) -> bool {
    let mut position = start as u64;
    while !bytes.is_empty() {
        match rustix::io::pwrite(memory.fd(), bytes, position) {
            Ok(0) => return false,
            Ok(count) => {
                bytes = &bytes[count..];
                position += count as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}
