//! The memory of a store: one memfd divided into blocks, and the accounting of its use.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_mem::{Segment, SharedMemory};
use towline_wire::Errno;

/// Size of a block, the unit of addresses in the arena.
pub(super) const BLOCK_BYTES: u64 = 64 * 1024;
/// Maximum pages per block: the bits of a mask of pages.
const BLOCK_PAGES_MAX: u64 = u16::BITS as u64;

/// Address space per byte of the limit: each one-page file takes a block of up to sixteen pages.
const ADDRESS_RATIO: u64 = BLOCK_PAGES_MAX;
/// Additional blocks, for copies made while readers still hold the original.
const SPARE_BLOCKS: u64 = 4096;
/// Maximum memory per byte of the limit, besides the additional blocks: what files have, and as much again that
/// only readers still hold.
const RESIDENT_RATIO: u64 = 2;
/// Maximum number of blocks that clients may read in place at once, a part of the additional ones.
const LENT_BLOCKS_MAX: u64 = SPARE_BLOCKS / 2;
/// Maximum address space of an arena: an eighth of what a process has.
const ADDRESS_BYTES_MAX: u64 = 1 << 44;
/// Maximum number of free blocks that keep their pages for quick reuse.
const WARM_BLOCKS_MAX: u64 = 256;
/// Writes of at least this length go through the descriptor, at 5 GB/s. The mapping reaches 12 GB/s
/// for pages that are mapped, but 1.5 GB/s for others, as most are that only the network reads.
const SYSCALL_BYTES_MIN: usize = 16 * 1024;

const _: () = assert!(ADDRESS_BYTES_MAX / BLOCK_BYTES <= u32::MAX as u64);

/// Returns the size of a page, the unit in which memory is allocated and charged. It is from 4 to
/// 64 KiB and divides the size of a block.
#[inline]
pub(super) fn page_bytes() -> u64 {
    // A constant where possible: every read and write divides by it.
    if cfg!(target_arch = "x86_64") { 4096 } else { towline_mem::page_bytes() as u64 }
}

/// Returns the number of pages per block.
#[inline]
pub(super) fn block_pages() -> u64 {
    BLOCK_BYTES / page_bytes()
}

/// Returns the mask of all pages of a block.
fn all_pages() -> u16 {
    u16::MAX >> (BLOCK_PAGES_MAX - block_pages())
}

/// Hands out blocks and counts the memory in use against the limit.
///
/// The contents of a new block are undefined: its user must write each page completely before it
/// can be read.
pub(super) struct Arena {
    memory: Arc<SharedMemory>,
    limit: AtomicU64,
    /// The maximum that the limit can be raised to.
    limit_max: u64,
    used: AtomicU64,
    /// Pages that have memory, whoever holds their blocks.
    resident: AtomicU64,
    inodes: AtomicU64,
    warm_max: usize,
    free: Mutex<Free>,
}

/// Free blocks. Those in `warm` still have pages, those in `cold` have none, and those from `next`
/// on were never used. `warm_out` is the number of blocks in use that were warm before: they may
/// have pages that are charged to no file, so they count together with `warm` against its maximum.
struct Free {
    warm: Vec<u32>,
    warm_out: usize,
    cold: Vec<u32>,
    next: u32,
    end: u32,
}

/// A block; returns to the arena when dropped.
pub(super) struct Block {
    arena: Arc<Arena>,
    index: u32,
    /// Pages written since the block was punched, or all if it was warm. The others read as zeros.
    present: u16,
    /// Whether it was warm when handed out.
    warm: bool,
    /// Set when the network may hold references to its pages, through which a later change would be
    /// seen. They must not be written again, even after every reader is done.
    lent: AtomicBool,
}

impl Arena {
    /// Creates an arena with a limit of `limit` bytes.
    pub(super) fn new(name: &str, limit: u64) -> std::io::Result<Arc<Self>> {
        let wanted = limit.saturating_mul(ADDRESS_RATIO).saturating_add(SPARE_BLOCKS * BLOCK_BYTES);
        let length = wanted.min(ADDRESS_BYTES_MAX) / BLOCK_BYTES * BLOCK_BYTES;
        let end = (length / BLOCK_BYTES) as u32;
        let length = usize::try_from(length).map_err(std::io::Error::other)?;
        // Lent blocks stay when their file is truncated or written, and are then no longer charged.
        let lent_max = (limit / 8).min(LENT_BLOCKS_MAX * BLOCK_BYTES);
        let memory = SharedMemory::create_lendable(name, length, BLOCK_BYTES, lent_max)?;
        Ok(Arc::new(Self {
            memory: Arc::new(memory),
            limit: AtomicU64::new(limit),
            limit_max: limit.max(u64::from(end) * BLOCK_BYTES / 2),
            used: AtomicU64::new(0),
            resident: AtomicU64::new(0),
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

    /// Returns the memory that contains all blocks.
    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Returns the limit, the bytes in use, and the number of inodes.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        let limit = self.limit();
        (limit, used.min(limit), self.inodes.load(Ordering::Relaxed))
    }

    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the maximum limit: half of the address space, most of which is for blocks that are
    /// not full.
    pub(super) fn limit_max(&self) -> u64 {
        self.limit_max
    }

    /// Sets the limit, up to [`Arena::limit_max`]. Memory in use beyond it stays.
    pub(super) fn set_limit(&self, limit: u64) {
        self.limit.store(limit.min(self.limit_max), Ordering::Relaxed);
    }

    /// Returns true if readers hold more than the additional blocks: of files that were changed or removed
    /// meanwhile.
    pub(super) fn is_overfull(&self) -> bool {
        self.resident_bytes() > self.limit().saturating_add(SPARE_BLOCKS * BLOCK_BYTES)
    }

    /// Returns the bytes that have memory.
    pub(super) fn resident_bytes(&self) -> u64 {
        self.resident.load(Ordering::Relaxed) * page_bytes()
    }

    /// Changes which pages of a block have memory.
    fn note_resident(&self, present: &mut u16, change: impl FnOnce(u16) -> u16) {
        let before = present.count_ones();
        *present = change(*present);
        // Wraps where there are fewer than before.
        let more = u64::from(present.count_ones()).wrapping_sub(u64::from(before));
        self.resident.fetch_add(more, Ordering::Relaxed);
    }

    /// Counts a new inode, or one that is gone.
    pub(super) fn count_inode(&self, born: bool) {
        if born {
            self.inodes.fetch_add(1, Ordering::Relaxed);
        } else {
            self.inodes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Charges all of `bytes`, or nothing and fails with `ENOSPC`.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), Errno> {
        // More may be in use than the limit, since it can be lowered.
        if bytes == 0 {
            return Ok(());
        }
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit());
        let result = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        result.map(|_| ()).map_err(|_| Errno::ENOSPC)
    }

    /// Charges up to `count` pages. Returns how many.
    pub(super) fn charge_pages(&self, count: u64) -> u64 {
        if count == 0 {
            return 0;
        }
        let mut granted = 0;
        let add = |used: u64| {
            // The limit may change at any time: it is read once for what is charged and returned.
            granted = (self.limit().saturating_sub(used) / page_bytes()).min(count);
            Some(used + granted * page_bytes())
        };
        let result = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        result.map_or(0, |_| granted)
    }

    /// Undoes a charge.
    pub(super) fn release(&self, bytes: u64) {
        if bytes != 0 {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Returns a block with undefined contents, or `ENOSPC` if the address space is used up, or readers hold
    /// too much of what is in no file any more.
    pub(super) fn block(self: &Arc<Self>) -> Result<Arc<Block>, Errno> {
        let most = self.limit().saturating_mul(RESIDENT_RATIO);
        if self.resident_bytes() > most.saturating_add(SPARE_BLOCKS * BLOCK_BYTES) {
            return Err(Errno::ENOSPC);
        }
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
        let present = if warm { all_pages() } else { 0 };
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
    /// Returns its offset in the memory.
    pub(super) fn start(&self) -> usize {
        self.index as usize * BLOCK_BYTES as usize
    }

    /// Returns the pages that may hold something other than zeros.
    pub(super) fn present(&self) -> u16 {
        self.present
    }

    /// Writes bytes to the pages of the mask. The range must be inside the block.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8], pages: u16) {
        let start = self.start() + offset;
        // Through the mapping, each unmapped page takes a fault, and a missing page is first filled
        // with zeros. A system call handles all of them at once.
        let absent = pages & !self.present != 0;
        let through_mapping = !absent && bytes.len() < SYSCALL_BYTES_MIN;
        if through_mapping || !write_at(&self.arena.memory, start, bytes) {
            self.arena.memory.copy_in(start, bytes);
        }
        if absent {
            self.arena.note_resident(&mut self.present, |present| present | pages);
        }
    }

    /// Copies the pages of the mask from another block to the same place in this one.
    pub(super) fn copy(&mut self, from: &Self, start: usize, end: usize, pages: u16) {
        let mut bytes = vec![0; end - start];
        self.arena.memory.copy_out(from.start() + start, &mut bytes);
        self.write(start, &bytes, pages);
    }

    /// Returns a segment that keeps the block; with `lend`, it may be sent without copying.
    pub(super) fn segment(self: &Arc<Self>, lend: bool) -> Segment {
        if lend {
            self.lent.store(true, Ordering::Relaxed);
        }
        Segment::Shared(self.arena.memory.clone(), Some(self.clone()))
    }

    /// Returns true if the block may be written: it has no other holder and its pages were never
    /// lent.
    pub(super) fn is_writable(this: &mut Arc<Self>) -> bool {
        Arc::get_mut(this).is_some_and(|block| !*block.lent.get_mut())
    }

    /// Frees the pages of the mask, a run at `offset`, unless the block has another holder.
    pub(super) fn punch(this: &mut Arc<Self>, offset: usize, length: usize, pages: u16) {
        // The pages no longer belong to any file, so a failure only wastes memory.
        if let Some(block) = Arc::get_mut(this)
            && block.arena.memory.punch(block.start() + offset, length).is_ok()
        {
            block.arena.note_resident(&mut block.present, |present| present & !pages);
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
            // Before others can take it.
            self.arena.note_resident(&mut self.present, |_| all_pages());
            free.warm.push(self.index);
            return;
        }
        drop(free);
        // A block that cannot be punched is never reused: the network may still send its pages.
        if self.arena.memory.punch(self.start(), BLOCK_BYTES as usize).is_ok() {
            self.arena.note_resident(&mut self.present, |_| 0);
            self.arena.free.lock().cold.push(self.index);
        }
    }
}

/// Writes through the descriptor. Returns false on failure, after which the contents are undefined.
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
