//! A disk in memory: one memfd, mapped, whose pages are taken when first written.
//!
//! A bit for each page tells whether it holds data. So holes are known without a system call, and
//! reading one takes no memory. The bit is set after the bytes were written and cleared before
//! the page is given back, so that whatever overlaps, a page without its bit is all zeroes.

use crate::block_store::{BlockStore, Extent, Geometry, Now, ZeroHow};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use towline_mem::{Aggregate, Segment, SharedMemory};

const PAGE: u64 = 4096;
/// Shorter reads are copied: that costs less than referring to them.
const LEND_BYTES_MIN: u64 = 32 * 1024;

/// A disk in memory, gone when the server ends.
#[derive(Debug)]
pub struct MemoryDisk {
    memory: Arc<SharedMemory>,
    written: Box<[AtomicU64]>,
    size: u64,
}

impl MemoryDisk {
    /// A disk of `size` bytes, all zero.
    ///
    /// # Errors
    /// `EINVAL` for no bytes; what `memfd_create(2)` or `mmap(2)` say.
    pub fn new(name: &str, size: u64) -> io::Result<Arc<Self>> {
        let length = usize::try_from(size).ok().filter(|length| *length > 0);
        let length = length.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let memory = Arc::new(SharedMemory::create_lendable(name, length, PAGE, 0)?);
        let words = size.div_ceil(PAGE).div_ceil(64) as usize;
        let written = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(Arc::new(Self { memory, written, size }))
    }

    fn is_written(&self, page: u64) -> bool {
        self.written[(page / 64) as usize].load(Ordering::Acquire) & (1 << (page % 64)) != 0
    }

    fn set_written(&self, offset: u64, length: u64) {
        for page in offset / PAGE..(offset + length).div_ceil(PAGE) {
            if !self.is_written(page) {
                self.written[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Release);
            }
        }
    }

    /// Bytes from `offset`, at most `length`, that are alike, and whether they hold data.
    fn run(&self, offset: u64, length: u64) -> (u64, bool) {
        let end = offset + length;
        let first = self.is_written(offset / PAGE);
        let mut at = (offset / PAGE + 1) * PAGE;
        while at < end {
            let (word, bit) = (at / PAGE / 64, at / PAGE % 64);
            let bits = self.written[word as usize].load(Ordering::Acquire) >> bit;
            let alike = if first { bits.trailing_ones() } else { bits.trailing_zeros() };
            let alike = u64::from(alike).min(64 - bit);
            at += alike * PAGE;
            if bit + alike < 64 {
                break;
            }
        }
        (at.min(end) - offset, first)
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
        for page in first / PAGE..last / PAGE {
            self.written[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Ordering::AcqRel);
        }
        self.memory.punch(first as usize, (last - first) as usize)?;
        self.zero_partly(last, offset + length - last)
    }

    /// Zeroes less than two pages, unless they are holes already.
    fn zero_partly(&self, offset: u64, length: u64) -> io::Result<()> {
        // Less than two pages, so that these two are all it touches.
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
            size: self.size,
            block_minimum: 1,
            block_preferred: PAGE as u32,
            rotational: false,
            read_only: false,
        }
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
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
        Now::Done(Ok(()))
    }

    fn hole_now(&self, offset: u64, length: u64) -> u64 {
        match self.run(offset, length) {
            (length, false) => length,
            _ => 0,
        }
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        let (length, holds_data) = self.run(offset, length);
        if !holds_data || length < LEND_BYTES_MIN {
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
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let (length, holds_data) = self.run(at, end - at);
            tell(Some(at).filter(|_| holds_data), length);
            at += length;
        }
        Some(&self.memory)
    }

    fn write_now(&self, offset: u64, data: &[u8], _durable: bool) -> Now {
        self.copy_in(offset, data);
        Now::Done(Ok(()))
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.read_now(offset, target);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], _durable: bool) -> io::Result<()> {
        self.copy_in(offset, data);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        if how.allocate {
            if how.fast {
                return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
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

    fn extents(
        &self,
        mut offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
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
