//! The bytes of one file: which pages it has, and in which blocks they are.

use super::arena::{Arena, BLOCK_BYTES, Block, block_pages, page_bytes};
use super::blocks::Blocks;
use std::sync::Arc;
use towline_mem::{Aggregate, Segment, zeros};
use towline_wire::Errno;

/// Reads of at least this length may be sent without copying; shorter ones are always copied.
const LEND_BYTES_MIN: u64 = 32 * 1024;

/// Bytes that [`Data::expect`] prefetches: enough for the CPU to continue by itself.
const EXPECTED_BYTES: usize = 512;

/// The pages of one block of a file, as masks of at most sixteen bits.
#[derive(Clone, Default)]
struct Slot {
    /// The block with the pages of `data`; present exactly if there are any.
    block: Option<Arc<Block>>,
    /// Pages with data. All others read as zeros, whatever the block contains.
    data: u16,
    /// Pages charged to the file: those with data, and those allocated ahead.
    charged: u16,
}

/// The pages of one file.
///
/// Bytes beyond the end of the file in its pages are zero, so that the file can grow over them.
pub(super) struct Data {
    arena: Arc<Arena>,
    slots: Blocks<Slot>,
    pages: u64,
}

/// Pages cut off a file. Dropping them frees the memory, which takes a while: do so without locks.
pub(super) struct Cut(#[allow(dead_code)] Blocks<Slot>);

/// The bytes of a range as they were at one moment.
pub(super) struct Snapshot {
    offset: u64,
    length: u64,
    slots: Vec<(u64, Slot)>,
}

/// Returns the mask of the pages `first..end`.
fn mask(first: u64, end: u64) -> u16 {
    debug_assert!(end <= block_pages(), "a block has {} pages", block_pages());
    let below = |page: u64| ((1u32 << page) - 1) as u16;
    if first >= end { 0 } else { below(end) & !below(first) }
}

/// Returns the mask of the pages that a byte range of the block touches.
fn mask_of(start: usize, end: usize) -> u16 {
    mask(start as u64 / page_bytes(), (end as u64).div_ceil(page_bytes()))
}

/// Returns the runs of ones in a mask as byte ranges `(start, end)` of the block.
fn runs(mut mask: u16) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let first = mask.trailing_zeros();
        let end = first + (mask >> first).trailing_ones();
        mask &= !(self::mask(u64::from(first), u64::from(end)));
        let page = page_bytes() as usize;
        Some((first as usize * page, end as usize * page))
    })
}

/// Splits `start..end` by block: returns each block's index and the range within it.
fn parts(start: u64, end: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    (start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)).map(move |index| {
        let base = index * BLOCK_BYTES;
        (index, start.max(base) - base, end.min(base + BLOCK_BYTES) - base)
    })
}

impl Slot {
    fn bytes_charged(&self) -> u64 {
        u64::from(self.charged.count_ones()) * page_bytes()
    }

    /// Makes sure that the block may be written. A new block gets copies of the pages in `keep`.
    fn make_writable(&mut self, arena: &Arc<Arena>, keep: u16) -> Result<&mut Block, Errno> {
        let writable = self.block.as_mut().is_some_and(Block::is_writable);
        if !writable {
            let mut new = arena.block()?;
            if let (Some(block), Some(old)) = (Arc::get_mut(&mut new), &self.block) {
                for (start, end) in runs(self.data & keep) {
                    block.copy(old, start, end, mask_of(start, end));
                }
            }
            self.block = Some(new);
        }
        // It has no other holder: that was checked, or it is new.
        self.block.as_mut().and_then(Arc::get_mut).ok_or(Errno::EIO)
    }

    /// Writes zeros over the parts of `from..to` that are in pages of `data`.
    fn zero(&mut self, arena: &Arc<Arena>, from: u64, to: u64, keep: u16) -> Result<(), Errno> {
        let touched = self.data & mask(from / page_bytes(), to.div_ceil(page_bytes()));
        if touched == 0 || from == to {
            return Ok(());
        }
        let block = self.make_writable(arena, keep)?;
        for (run_start, run_end) in runs(touched) {
            let (first, end) = (run_start.max(from as usize), run_end.min(to as usize));
            block.write(first, &zeros()[..end - first], mask_of(first, end));
        }
        Ok(())
    }
}

impl Data {
    /// Creates the data of an empty file.
    pub(super) fn new(arena: Arc<Arena>) -> Self {
        Self { arena, slots: Blocks::default(), pages: 0 }
    }

    /// Prefetches the first bytes of the file, and the structures that lead there, for a read that
    /// is likely to follow.
    pub(super) fn expect(&self) {
        if let Some(Slot { block: Some(block), .. }) = self.slots.get(0) {
            self.arena.memory().expect_reads(block.start(), EXPECTED_BYTES);
        }
    }

    /// Returns the number of pages charged to the file.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns references to the bytes of a range, which must be within the file.
    pub(super) fn read(&self, offset: u64, length: u64) -> Aggregate {
        let lend = length >= LEND_BYTES_MIN;
        let end = offset + length;
        let mut aggregate = Aggregate::new();
        let mut position = offset;
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        let mut add = |index: u64, slot: &Slot| {
            let Some(block) = &slot.block else { return };
            let base = index * BLOCK_BYTES;
            for (start, stop) in runs(slot.data) {
                let (first, stop) = ((base + start as u64).max(offset), base + stop as u64);
                let stop = stop.min(end);
                if first >= stop {
                    continue;
                }
                append_zeros(&mut aggregate, first - position);
                let inside = block.start() as u64 + (first - base);
                aggregate.append(block.segment(lend), inside, stop - first);
                position = stop;
            }
        };
        if last == first + 1 {
            // Most reads touch one block, and finding it this way takes half the time.
            self.slots.get(first).into_iter().for_each(|slot| add(first, slot));
        } else {
            self.slots.range(first..last).for_each(|(index, slot)| add(index, slot));
        }
        append_zeros(&mut aggregate, end - position);
        aggregate
    }

    /// Writes `bytes`. Writes fewer if space runs out, and fails with `ENOSPC` if it cannot write
    /// any.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let mut rest = bytes;
        if bytes.is_empty() {
            return Ok(0);
        }
        for (index, from, to) in parts(offset, offset + bytes.len() as u64) {
            let slot = self.slots.at(index);
            let granted = grant(slot, &self.arena, from, to);
            let (part, behind) = rest.split_at((granted - from) as usize);
            let filled = fill(slot, &self.arena, from as usize, part);
            match filled {
                Ok(pages) => {
                    self.pages += pages;
                    rest = behind;
                }
                Err(_) => self.arena.release(count_new(slot, from, granted) * page_bytes()),
            }
            if slot.charged == 0 {
                self.slots.remove(index);
            }
            if filled.is_err() || granted < to {
                break;
            }
        }
        let done = bytes.len() - rest.len();
        if done == 0 { Err(Errno::ENOSPC) } else { Ok(done) }
    }

    /// Cuts off everything from `size` on.
    pub(super) fn truncate(&mut self, size: u64) -> Result<Cut, Errno> {
        let next = size.div_ceil(BLOCK_BYTES);
        self.clear(size, next * BLOCK_BYTES, false)?;
        let cut = self.slots.split_off(next);
        let bytes: u64 = cut.range(0..u64::MAX).map(|(_, slot)| slot.bytes_charged()).sum();
        self.pages -= bytes / page_bytes();
        self.arena.release(bytes);
        Ok(Cut(cut))
    }

    /// Makes a range read as zeros. Its whole pages are freed, or with `keep` stay charged.
    pub(super) fn clear(&mut self, start: u64, end: u64, keep: bool) -> Result<(), Errno> {
        if start >= end {
            return Ok(());
        }
        let mut empty = Vec::new();
        for (index, slot) in self.slots.range_mut(start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)) {
            let base = index * BLOCK_BYTES;
            let (from, to) = (start.max(base) - base, end.min(base + BLOCK_BYTES) - base);
            let whole = mask(from.div_ceil(page_bytes()), to / page_bytes());
            let head_end = to.min(from.next_multiple_of(page_bytes()));
            let tail_start = from.max(to / page_bytes() * page_bytes()).max(head_end);
            slot.zero(&self.arena, from, head_end, !whole)?;
            slot.zero(&self.arena, tail_start, to, !whole)?;
            let gone = slot.data & whole;
            slot.data &= !whole;
            if slot.data == 0 {
                slot.block = None;
            } else if let Some(block) = &mut slot.block {
                for (first, stop) in runs(gone) {
                    Block::punch(block, first, stop - first, mask_of(first, stop));
                }
            }
            if !keep {
                let pages = u64::from((slot.charged & whole).count_ones());
                slot.charged &= !whole;
                self.pages -= pages;
                self.arena.release(pages * page_bytes());
                if slot.charged == 0 {
                    empty.push(index);
                }
            }
        }
        for index in empty {
            self.slots.remove(index);
        }
        Ok(())
    }

    /// Charges all pages of a range, so that a write there cannot fail, or charges none and fails
    /// with `ENOSPC`.
    pub(super) fn reserve(&mut self, start: u64, end: u64) -> Result<(), Errno> {
        let wanted = end.div_ceil(page_bytes()) - start / page_bytes();
        let within = self.slots.range(start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES));
        let had: u64 = within
            .map(|(index, slot)| {
                let base = index * BLOCK_BYTES;
                let from = start.max(base) - base;
                let to = end.min(base + BLOCK_BYTES) - base;
                let pages = mask(from / page_bytes(), to.div_ceil(page_bytes()));
                u64::from((slot.charged & pages).count_ones())
            })
            .sum();
        let missing = wanted - had;
        self.arena.charge(missing.checked_mul(page_bytes()).ok_or(Errno::ENOSPC)?)?;
        for (index, from, to) in parts(start, end) {
            let pages = mask(from / page_bytes(), to.div_ceil(page_bytes()));
            self.slots.at(index).charged |= pages;
        }
        self.pages += missing;
        Ok(())
    }

    /// Returns the first byte of data at or beyond `offset`, if there is any.
    pub(super) fn next_data(&self, offset: u64) -> Option<u64> {
        let first = offset / BLOCK_BYTES;
        self.slots.range(first..u64::MAX).find_map(|(index, slot)| {
            let page = if index == first { offset % BLOCK_BYTES / page_bytes() } else { 0 };
            let pages = slot.data & mask(page, block_pages());
            let start = index * BLOCK_BYTES + u64::from(pages.trailing_zeros()) * page_bytes();
            (pages != 0).then(|| start.max(offset))
        })
    }

    /// Returns the first byte of a hole at or beyond `offset`.
    pub(super) fn next_hole(&self, offset: u64) -> u64 {
        let mut expected = offset / BLOCK_BYTES;
        for (index, slot) in self.slots.range(expected..u64::MAX) {
            if index != expected {
                break;
            }
            let base = index * BLOCK_BYTES;
            let page = offset.saturating_sub(base) / page_bytes();
            let holes = !slot.data & mask(page, block_pages());
            if holes != 0 {
                return offset.max(base + u64::from(holes.trailing_zeros()) * page_bytes());
            }
            expected += 1;
        }
        offset.max(expected * BLOCK_BYTES)
    }

    /// Keeps the current bytes of a range without copying them.
    pub(super) fn snapshot(&self, offset: u64, length: u64) -> Snapshot {
        let range = offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES);
        let slots = self.slots.range(range).map(|(index, slot)| (index, slot.clone()));
        Snapshot { offset, length, slots: slots.collect() }
    }

    /// Writes the bytes of a snapshot to `target`, and its holes as holes. Whole blocks that land
    /// on block boundaries are shared until either side changes them. When space runs out, behaves
    /// like [`Data::write`].
    pub(super) fn put(&mut self, snapshot: &Snapshot, target: u64) -> Result<u64, Errno> {
        let (start, end) = (snapshot.offset, snapshot.offset + snapshot.length);
        let mut position = start;
        for (index, slot) in &snapshot.slots {
            let base = index * BLOCK_BYTES;
            let Some(block) = &slot.block else { continue };
            let whole = base >= start && base + BLOCK_BYTES <= end;
            if whole && (target + (base - start)).is_multiple_of(BLOCK_BYTES) {
                self.clear(target + (position - start), target + (base - start), false)?;
                position = base;
                if !self.share((target + (base - start)) / BLOCK_BYTES, slot) {
                    return stopped(position - start);
                }
                position = base + BLOCK_BYTES;
                continue;
            }
            for (first, stop) in runs(slot.data) {
                let first = (base + first as u64).max(start);
                let stop = (base + stop as u64).min(end);
                if first >= stop {
                    continue;
                }
                self.clear(target + (position - start), target + (first - start), false)?;
                let mut bytes = vec![0; (stop - first) as usize];
                let from = block.start() + (first - base) as usize;
                self.arena.memory().copy_out(from, &mut bytes);
                let done = self.write(target + (first - start), &bytes).unwrap_or(0) as u64;
                position = first + done;
                if position < stop {
                    return stopped(position - start);
                }
            }
        }
        self.clear(target + (position - start), target + snapshot.length, false)?;
        Ok(snapshot.length)
    }

    /// Replaces a block by one that another file has, too. Returns false if there is no space for
    /// it.
    fn share(&mut self, index: u64, source: &Slot) -> bool {
        let old = self.slots.get(index).map_or(0, |slot| u64::from(slot.charged.count_ones()));
        let new = u64::from(source.data.count_ones());
        if new > old && self.arena.charge((new - old) * page_bytes()).is_err() {
            return false;
        }
        self.arena.release(old.saturating_sub(new) * page_bytes());
        self.pages = self.pages + new - old;
        let shared = Slot { charged: source.data, ..source.clone() };
        *self.slots.at(index) = shared;
        true
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        self.arena.release(self.pages * page_bytes());
    }
}

fn stopped(done: u64) -> Result<u64, Errno> {
    if done == 0 { Err(Errno::ENOSPC) } else { Ok(done) }
}

fn append_zeros(aggregate: &mut Aggregate, mut count: u64) {
    while count != 0 {
        let part = count.min(BLOCK_BYTES);
        aggregate.append(Segment::Host(zeros().clone()), 0, part);
        count -= part;
    }
}

/// Returns the number of pages of `from..to` that are not charged yet.
fn count_new(slot: &Slot, from: u64, to: u64) -> u64 {
    let pages = mask(from / page_bytes(), to.div_ceil(page_bytes()));
    u64::from((pages & !slot.charged).count_ones())
}

/// Charges the pages that a write to `from..to` needs. Returns the end of the part that there is
/// space for.
fn grant(slot: &Slot, arena: &Arena, from: u64, to: u64) -> u64 {
    let needed = count_new(slot, from, to);
    let mut granted = arena.charge_pages(needed);
    if granted == needed {
        return to;
    }
    for page in from / page_bytes()..to.div_ceil(page_bytes()) {
        if slot.charged & mask(page, page + 1) == 0 {
            if granted == 0 {
                return from.max(page * page_bytes());
            }
            granted -= 1;
        }
    }
    to
}

/// Writes `bytes`, whose pages are already charged. Returns how many pages are new. On an error
/// nothing has changed.
fn fill(slot: &mut Slot, arena: &Arc<Arena>, from: usize, bytes: &[u8]) -> Result<u64, Errno> {
    if bytes.is_empty() {
        return Ok(0);
    }
    let page = page_bytes() as usize;
    let to = from + bytes.len();
    let (pages, data) = (mask_of(from, to), slot.data);
    let whole = mask(from.div_ceil(page) as u64, (to / page) as u64);
    let block = slot.make_writable(arena, !whole)?;
    // The rest of the first and last page may hold old data of another file, unless these pages
    // were never written.
    let stale = block.present() & !data;
    let (head, tail) = (mask_of(from, from + 1), mask_of(to - 1, to));
    if stale & head != 0 {
        let start = from / page * page;
        block.write(start, &zeros()[start..from], head);
    }
    if stale & tail != 0 {
        block.write(to, &zeros()[to..to.next_multiple_of(page)], tail);
    }
    block.write(from, bytes, pages);
    let added = u64::from((pages & !slot.charged).count_ones());
    slot.data |= pages;
    slot.charged |= pages;
    Ok(added)
}
