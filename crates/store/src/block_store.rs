//! The trait of everything that is exported as a disk.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{Aggregate, SharedMemory};

/// What a disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes.
    pub size: u64,
    /// Smallest unit of requests, a power of two.
    pub block_minimum: u32,
    /// Unit that is served best, a power of two.
    pub block_preferred: u32,
    /// Seeks cost time.
    pub rotational: bool,
    /// The back end cannot be written.
    pub read_only: bool,
}

/// How a disk is dealt out to members that work at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes on one member before the next one's turn; not zero.
    pub chunk: u64,
    /// Members that hold data of neighbouring chunks; at least one.
    pub members: u32,
    /// How far the first byte of the disk lies behind the beginning of a chunk.
    pub shift: u64,
}

impl Layout {
    /// Where the chunk that holds this byte ends.
    #[must_use]
    pub fn chunk_end(&self, offset: u64) -> u64 {
        offset + self.chunk - (offset + self.shift) % self.chunk
    }
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes; not zero.
    pub length: u64,
    /// No space is allocated.
    pub hole: bool,
    /// Reads as zeroes.
    pub zero: bool,
}

/// Outcome of something that was tried without waiting.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // the caller has to handle each
pub enum Now {
    /// Done, or failed for good.
    Done(io::Result<()>),
    /// It would wait: do it the other way.
    WouldBlock,
}

/// A part of a disk that lies in one piece on one file or device.
#[derive(Clone, Debug)]
pub struct Place {
    /// The file; opened with `O_DIRECT` if the disk's mode says so.
    pub file: Arc<OwnedFd>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, at most as many as asked for.
    pub length: u64,
    /// The file goes around the page cache.
    pub direct: bool,
}

/// What a [`Place`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, clippy::exhaustive_enums)]
pub enum Direction {
    Read,
    Write,
}

/// How zeroes are to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroHow {
    /// Space has to stay or become allocated.
    pub allocate: bool,
    /// Fail with `EOPNOTSUPP` rather than write zeroes one by one.
    pub fast: bool,
}

/// What of a disk outlives the object that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // back ends make it
pub struct Continuity {
    /// Names the bytes: another number stands for other bytes.
    pub identity: u64,
    /// Another number: writes may be lost that were done and not flushed under this one.
    pub epoch: u64,
}

/// A disk. Ranges are inside [`Geometry::size`] and on its smallest units: callers check.
///
/// The defaults are those of a back end that can do nothing without waiting and has no file. Calls may wait for a device unless their documentation says otherwise. Nothing is promised
/// about the order of writes between two flushes. Overlapping requests at the same time may mix.
pub trait BlockStore: Send + Sync + std::fmt::Debug {
    /// What the disk is like; its size as of the last [`BlockStore::refresh`]. Does not wait.
    fn geometry(&self) -> Geometry;

    /// Looks how large the disk is now, since a file or a device may have grown or shrunk. Does not
    /// wait for the device. Fronts call it when a client asks for the size, and before they write:
    /// a write beyond the end of a file that became shorter would make it long again, with zeroes
    /// where there were bytes.
    ///
    /// # Errors
    /// What the kernel says.
    fn refresh(&self) -> io::Result<u64> {
        Ok(self.geometry().size)
    }

    /// As [`BlockStore::refresh`], but may wait: for disks that [may hang](BlockStore::may_hang).
    ///
    /// # Errors
    /// What the kernel says.
    fn look(&self) -> io::Result<u64> {
        self.refresh()
    }

    /// True: calls that may wait for a device may wait without end. Then threads of the disk's own make them, and the
    /// memory that these hold meanwhile is bounded.
    fn may_hang(&self) -> bool {
        false
    }

    /// The members it is made of, if there are several.
    fn layout(&self) -> Option<Layout> {
        None
    }

    /// What outlives this object. `None`: its bytes end with it.
    fn continuity(&self) -> Option<Continuity> {
        None
    }

    /// Fills `target` if that needs no waiting.
    fn read_now(&self, _offset: u64, _target: &mut [u8]) -> Now {
        Now::WouldBlock
    }

    /// Appends a range to `out` if that needs no waiting; if it is not done, `out` is as it was.
    fn append_now(&self, offset: u64, length: usize, out: &mut Vec<u8>) -> Now {
        let before = out.len();
        out.resize(before + length, 0);
        let now = self.read_now(offset, &mut out[before..]);
        if !matches!(now, Now::Done(Ok(()))) {
            out.truncate(before);
        }
        now
    }

    /// How many bytes from `offset`, at most `length`, are a hole;
    /// 0 when there is none or the back end cannot tell. Looks at metadata at most.
    fn hole_now(&self, _offset: u64, _length: u64) -> u64 {
        0
    }

    /// The first bytes of a range by reference, if they are in memory: as many as are, at least
    /// one page. They may be changed by writes until they are sent, as any read may that
    /// overlaps a write. Does not wait.
    fn lend(&self, _offset: u64, _length: u64) -> Option<Aggregate> {
        None
    }

    /// The memory in which the bytes of a range stand, if others may read them there: `tell` gets
    /// each run in order, where it is in that memory (`None`: nowhere, it is zeroes), and its length.
    /// They are changed by writes that overlap a read, as for any read. Does not wait.
    fn in_place(
        &self,
        _offset: u64,
        _length: u64,
        _tell: &mut dyn FnMut(Option<u64>, u64),
    ) -> Option<&Arc<SharedMemory>> {
        None
    }

    /// The memory that the bytes of a range may be received into, in place of a write, and where in it they belong.
    /// Others may read and write there meanwhile, as with writes that overlap. Ask anew before each part that comes:
    /// the disk may have become shorter. After each part tell [`BlockStore::landed`]. `None`: write it. Does not wait.
    fn landing(&self, _offset: u64, _length: u64) -> Option<(&SharedMemory, usize)> {
        None
    }

    /// So many bytes were received to where [`BlockStore::landing`] said: they are written.
    fn landed(&self, _offset: u64, _length: u64) {}

    /// Writes if that needs no waiting; with `durable` not before it is on stable storage.
    fn write_now(&self, _offset: u64, _data: &[u8], _durable: bool) -> Now {
        Now::WouldBlock
    }

    /// Where the first bytes of a range lie, for reading or writing them without this trait.
    /// `None`: there is no such place, use [`BlockStore::read`] and [`BlockStore::write`]. Does
    /// not wait.
    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    /// Fills `target`.
    ///
    /// # Errors
    /// What the device says; `EIO` when the file became shorter than the disk.
    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()>;

    /// Writes; with `durable` not done before it is on stable storage.
    ///
    /// # Errors
    /// What the device says.
    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()>;

    /// All writes that were done before are on stable storage.
    ///
    /// # Errors
    /// What the device says; then nothing is known about any of them.
    fn flush(&self) -> io::Result<()>;

    /// A range reads as zeroes afterwards.
    ///
    /// # Errors
    /// What the device says; `EOPNOTSUPP` when it was to be fast and cannot be.
    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()>;

    /// The contents of a range are no longer needed. It may do nothing.
    ///
    /// # Errors
    /// What the device says.
    fn trim(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Brings a range into memory, if there is a cache.
    ///
    /// # Errors
    /// What the device says.
    fn cache(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Of a store that only pretends to take time, for measurements: when it is done with so many bytes that are
    /// asked for now, and whom to ask for them then, which does not wait.
    fn later(&self, _bytes: u64) -> Option<(Instant, Arc<dyn BlockStore>)> {
        None
    }

    /// Waits until a range is in memory, so that [`BlockStore::lend`] finds it, if there is a cache.
    ///
    /// # Errors
    /// What the device says.
    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.cache(offset, length)
    }

    /// Tells the extents of a range, in order, until `tell` says false; neighbours may be alike.
    ///
    /// # Errors
    /// What the device says.
    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()>;

    /// [`BlockStore::resize`] can be.
    fn resizes(&self) -> bool {
        false
    }

    /// Bytes beyond which [`BlockStore::resize`] fails with `EFBIG`, as far as that is known beforehand.
    fn size_max(&self) -> u64 {
        u64::MAX
    }

    /// Makes the disk so many bytes long, not zero. What is added reads as zeroes. Callers do so one at a time.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where that cannot be; `EINVAL` for a length that is not in whole blocks (of a disk of several
    /// members: stripes), or none; `EFBIG` for one that it cannot grow to; what the device says.
    fn resize(&self, _size: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}
