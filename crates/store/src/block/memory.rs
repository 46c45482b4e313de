//! A disk in memory: one mapped memfd whose pages are allocated on first write.
//!
//! One bit per page records whether it holds data. So holes are found without a system call, and
//! reading one allocates no memory. The bit is set after the bytes are written, and cleared before
//! the page is freed, so that a page without its bit reads as zeros, whatever operations overlap.
//!
//! The memfd is longer than the disk, so that the disk can grow: unused parts take no memory. Its
//! length never changes, so a process that maps it can read without checking the size.
//!
//! Where all pages of a 2 MiB block hold data, they become one huge page ([`Settling`]).

use super::settle::Settling;
use crate::block_store::{BlockStore, Extent, Geometry, Now, ZeroHow};
use rustix::fs::SeekFrom;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use towline_mem::{Aggregate, Segment, SharedMemory};

const PAGE: u64 = 4096;
/// Shorter reads are copied, which costs less than referring to pages.
const LEND_BYTES_MIN: u64 = 32 * 1024;

/// Bytes of the disk whose bits are in one page.
const BITS_SPAN: u64 = PAGE * 8 * PAGE;

/// How many times its initial size a disk can grow to.
const GROWTH: u64 = 16;

/// A disk in memory, which is gone when the server ends.
#[derive(Debug)]
pub struct MemoryDisk {
    memory: Arc<SharedMemory>,
    /// One bit for each page of `memory`; in memory of its own, most of which is never touched.
    pub(super) written: Arc<SharedMemory>,
    size: AtomicU64,
    settling: Settling,
}

fn failed<T>(errno: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(errno))
}

impl MemoryDisk {
    /// Creates a disk of `size` bytes, all zero, that can grow to 16 times that size, or not at all
    /// if there is not enough address space.
    ///
    /// # Errors
    /// `EINVAL` for a size of zero; errors of `memfd_create(2)` and `mmap(2)`.
    pub fn new(name: &str, size: u64) -> io::Result<Arc<Self>> {
        if size == 0 {
            return failed(libc::EINVAL);
        }
        let (memory, written) =
            Self::map(name, size.saturating_mul(GROWTH)).or_else(|_| Self::map(name, size))?;
        let (memory, written) = (Arc::new(memory), Arc::new(written));
        let settling = Settling::of(&memory, &written);
        Ok(Arc::new(Self { memory, written, size: AtomicU64::new(size), settling }))
    }

    /// Maps memory for `bytes` bytes, and for their bits.
    fn map(name: &str, bytes: u64) -> io::Result<(SharedMemory, SharedMemory)> {
        let Ok(length) = usize::try_from(bytes) else { return failed(libc::EFBIG) };
        let memory = SharedMemory::create_lendable(name, length, PAGE, 0)?;
        let words = bytes.div_ceil(PAGE).div_ceil(64) as usize;
        Ok((memory, SharedMemory::create("written", words * 8)?))
    }

    /// Returns the word with the bit of `page`: the bits of 64 pages.
    fn word(&self, page: u64) -> &AtomicU64 {
        self.written.word64((page / 64) as usize * 8)
    }

    fn is_written(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Acquire) & (1 << (page % 64)) != 0
    }

    fn set_written(&self, offset: u64, length: u64) {
        for page in offset / PAGE..(offset + length).div_ceil(PAGE) {
            if !self.is_written(page) {
                let bit = 1 << (page % 64);
                if self.word(page).fetch_or(bit, Ordering::Release) | bit == u64::MAX {
                    self.settling.look(&self.written, page);
                }
            }
        }
    }

    /// Fails with `EIO` if the range is not inside the disk: it may have shrunk since the caller
    /// checked.
    fn inside(&self, offset: u64, length: u64) -> io::Result<()> {
        match offset + length > self.size.load(Ordering::Acquire) {
            true => failed(libc::EIO),
            false => Ok(()),
        }
    }

    /// Returns how many bytes from `offset`, at most `length`, are of one kind, and whether they
    /// hold data.
    fn run(&self, offset: u64, length: u64) -> (u64, bool) {
        let end = offset + length;
        let first = self.is_written(offset / PAGE);
        let mut at = (offset / PAGE + 1) * PAGE;
        while at < end {
            if !first && at.is_multiple_of(BITS_SPAN) {
                at = self.next_bits(at, end);
                if at == end {
                    break;
                }
            }
            let bit = at / PAGE % 64;
            let bits = self.word(at / PAGE).load(Ordering::Acquire) >> bit;
            let alike = if first { bits.trailing_ones() } else { bits.trailing_zeros() };
            let alike = u64::from(alike).min(64 - bit);
            at += alike * PAGE;
            if bit + alike < 64 {
                break;
            }
        }
        (at.min(end) - offset, first)
    }

    /// Returns where the bits of the next page that has any begin, from `at` on but at most `end`. Looking at
    /// bits that were never set would take time, and allocate memory for them.
    fn next_bits(&self, at: u64, end: u64) -> u64 {
        match rustix::fs::seek(self.written.fd(), SeekFrom::Data(at / BITS_SPAN * PAGE)) {
            Ok(found) => (found / PAGE * BITS_SPAN).clamp(at, end),
            Err(rustix::io::Errno::NXIO) => end,
            Err(_) => at,
        }
    }

    fn copy_in(&self, offset: u64, data: &[u8]) {
        self.memory.copy_in(offset as usize, data);
        self.set_written(offset, data.len() as u64);
    }

    fn copy_zeroes(&self, offset: u64, length: u64) {
        const ZEROES: [u8; PAGE as usize] = [0; PAGE as usize];
        let mut at = offset;
        while at < offset + length {
            let count = (offset + length - at).min(PAGE);
            self.copy_in(at, &ZEROES[..count as usize]);
            at += count;
        }
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let (first, last) = (offset.next_multiple_of(PAGE), (offset + length) / PAGE * PAGE);
        if first >= last {
            return self.zero_partly(offset, length);
        }
        self.zero_partly(offset, first - offset)?;
        self.clear_written(first / PAGE..last / PAGE);
        self.memory.punch(first as usize, (last - first) as usize)?;
        self.zero_partly(last, offset + length - last)
    }

    fn clear_written(&self, pages: Range<u64>) {
        let mut page = pages.start;
        while page < pages.end {
            if (page * PAGE).is_multiple_of(BITS_SPAN) {
                page = self.next_bits(page * PAGE, pages.end * PAGE) / PAGE;
                if page == pages.end {
                    break;
                }
            }
            // All pages of the range in one word. A word without any of their bits is not written:
            // that would allocate memory for bits that were never set.
            let count = (64 - page % 64).min(pages.end - page);
            let bits = (u64::MAX >> (64 - count)) << (page % 64);
            let word = self.word(page);
            if word.load(Ordering::Acquire) & bits != 0 {
                word.fetch_and(!bits, Ordering::AcqRel);
            }
            page += count;
        }
    }

    /// Zeros a range of less than two pages, unless they are holes already.
    fn zero_partly(&self, offset: u64, length: u64) -> io::Result<()> {
        // A range of less than two pages touches at most these two.
        let touched = [offset / PAGE, (offset + length).saturating_sub(1) / PAGE];
        if length > 0 && touched.iter().any(|page| self.is_written(*page)) {
            self.copy_zeroes(offset, length);
        }
        Ok(())
    }
}

impl BlockStore for MemoryDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size.load(Ordering::Acquire),
            block_minimum: 1,
            block_preferred: PAGE as u32,
            rotational: false,
            read_only: false,
        }
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
        Now::Done(self.read(offset, target))
    }

    fn append_now(&self, offset: u64, length: usize, out: &mut Vec<u8>) -> Now {
        if let Err(error) = self.inside(offset, length as u64) {
            return Now::Done(Err(error));
        }
        let end = out.len() + length;
        while out.len() < end {
            let left = end - out.len();
            let at = offset + (length - left) as u64;
            let (count, holds_data) = self.run(at, left as u64);
            if holds_data {
                self.memory.append_to(at as usize, count as usize, out);
            } else {
                out.resize(out.len() + count as usize, 0);
            }
        }
        Now::Done(Ok(()))
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.inside(offset, target.len() as u64)?;
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            let (length, holds_data) = self.run(at, (target.len() - done) as u64);
            let part = &mut target[done..done + length as usize];
            if holds_data {
                self.memory.copy_out(at as usize, part);
            } else {
                part.fill(0);
            }
            done += length as usize;
        }
        Ok(())
    }

    fn hole_now(&self, offset: u64, length: u64) -> u64 {
        match self.run(offset, length) {
            (length, false) if self.inside(offset, length).is_ok() => length,
            _ => 0,
        }
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        let (length, holds_data) = self.run(offset, length);
        if !holds_data || length < LEND_BYTES_MIN || self.inside(offset, length).is_err() {
            return None;
        }
        let mut aggregate = Aggregate::new();
        aggregate.append(Segment::Shared(self.memory.clone(), None), offset, length);
        Some(aggregate)
    }

    fn in_place(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Option<u64>, u64),
    ) -> Option<&Arc<SharedMemory>> {
        self.inside(offset, length).ok()?;
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let (length, holds_data) = self.run(at, end - at);
            tell(Some(at).filter(|_| holds_data), length);
            at += length;
        }
        Some(&self.memory)
    }

    fn landing(&self, offset: u64, length: u64) -> Option<(&SharedMemory, usize)> {
        self.inside(offset, length).ok()?;
        Some((&self.memory, offset as usize))
    }

    fn landed(&self, offset: u64, length: u64) {
        self.set_written(offset, length);
    }

    fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        Now::Done(self.write(offset, data, durable))
    }

    fn write(&self, offset: u64, data: &[u8], _durable: bool) -> io::Result<()> {
        self.inside(offset, data.len() as u64)?;
        self.copy_in(offset, data);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.inside(offset, length)?;
        if how.allocate {
            if how.fast {
                return failed(libc::EOPNOTSUPP);
            }
            self.copy_zeroes(offset, length);
            return Ok(());
        }
        self.punch(offset, length)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.punch(offset, length)
    }

    fn cache(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn resizes(&self) -> bool {
        true
    }

    fn size_max(&self) -> u64 {
        self.memory.len() as u64
    }

    fn resize(&self, size: u64) -> io::Result<()> {
        if size == 0 {
            return failed(libc::EINVAL);
        }
        if size > self.size_max() {
            return failed(libc::EFBIG);
        }
        let before = self.size.load(Ordering::Acquire);
        if size < before {
            self.size.store(size, Ordering::Release);
        }
        // Frees the pages beyond the end. This happens again before the disk grows, in case a write
        // checked the size before the disk shrank and stored its bytes after.
        let (from, to) = (size.min(before), size.max(before));
        if from < to {
            self.punch(from, to - from)?;
        }
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    fn extents(
        &self,
        mut offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.inside(offset, length)?;
        let end = offset + length;
        while offset < end {
            let (length, holds_data) = self.run(offset, end - offset);
            if !tell(Extent { length, hole: !holds_data, zero: !holds_data }) {
                break;
            }
            offset += length;
        }
        Ok(())
    }
}
