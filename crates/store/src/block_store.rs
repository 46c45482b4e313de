//! The trait of everything that is exported as a disk.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{Aggregate, SharedMemory};

/// Properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub size: u64,
    /// Smallest unit of requests, a power of two.
    pub block_minimum: u32,
    /// Unit of requests that performs best, a power of two.
    pub block_preferred: u32,
    /// Whether seeks cost time.
    pub rotational: bool,
    /// Whether the back end is read-only.
    pub read_only: bool,
}

/// How a disk is striped over members that work in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes on one member before the next member's turn; not zero.
    pub chunk: u64,
    /// Number of members that hold data of neighbouring chunks; at least one.
    pub members: u32,
    /// Distance of the disk's first byte from the beginning of a chunk.
    pub shift: u64,
}

impl Layout {
    /// Returns the end of the chunk that contains the byte at `offset`.
    #[must_use]
    pub fn chunk_end(&self, offset: u64) -> u64 {
        offset + self.chunk - (offset + self.shift) % self.chunk
    }
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; not zero.
    pub length: u64,
    /// Whether no space is allocated.
    pub hole: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
}

/// Outcome of an operation that was tried without waiting.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // callers must handle each variant
pub enum Now {
    /// Done, or failed for good.
    Done(io::Result<()>),
    /// It would wait: use the blocking call instead.
    WouldBlock,
}

/// A contiguous part of a disk on one file or device.
#[derive(Clone, Debug)]
pub struct Place {
    /// The file; opened with `O_DIRECT` if the disk's cache mode requires that.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Length in bytes, at most what was requested.
    pub length: u64,
    /// Whether the file bypasses the page cache.
    pub direct: bool,
}

/// What a [`Place`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, clippy::exhaustive_enums)]
pub enum Direction {
    Read,
    Write,
}

/// How to write zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroHow {
    /// Space must stay or become allocated.
    pub allocate: bool,
    /// Fail with `EOPNOTSUPP` rather than write the zeros byte by byte.
    pub fast: bool,
}

/// Which properties of a disk outlive the object that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // back ends construct it
pub struct Continuity {
    /// Identifies the contents: another number means other contents.
    pub identity: u64,
    /// Another number means that writes completed but not flushed under this one may be lost.
    pub epoch: u64,
}

/// A disk. Callers make sure that ranges are inside [`Geometry::size`] and aligned to the smallest
/// unit.
///
/// The default methods suit a back end that always waits and has no file. Calls may wait for a
/// device unless their documentation says otherwise. The order of writes between two flushes is
/// unspecified. The bytes of overlapping concurrent requests may mix.
pub trait BlockStore: Send + Sync + std::fmt::Debug {
    /// Returns the disk's properties; the size is as of the last [`BlockStore::refresh`]. Does not
    /// wait.
    fn geometry(&self) -> Geometry;

    /// Determines the current size, since a file or device may have grown or shrunk. Does not wait
    /// for the device. Front ends call it when a client asks for the size, and before they write: a
    /// write beyond the end of a truncated file would extend it again, with zeros where data was.
    ///
    /// # Errors
    /// Errors of the kernel.
    fn refresh(&self) -> io::Result<u64> {
        Ok(self.geometry().size)
    }

    /// Like [`BlockStore::refresh`], but may wait: for disks that [may hang](BlockStore::may_hang).
    ///
    /// # Errors
    /// Errors of the kernel.
    fn look(&self) -> io::Result<u64> {
        self.refresh()
    }

    /// Returns true if calls that may wait for a device may wait forever. Separate threads of the
    /// disk then make these calls, and the memory that they hold meanwhile is bounded.
    fn may_hang(&self) -> bool {
        false
    }

    /// Returns how the disk is striped, if it has several members.
    fn layout(&self) -> Option<Layout> {
        None
    }

    /// Returns what outlives this object. `None`: its contents are lost with it.
    fn continuity(&self) -> Option<Continuity> {
        None
    }

    /// Fills `target` if that needs no waiting.
    fn read_now(&self, _offset: u64, _target: &mut [u8]) -> Now {
        Now::WouldBlock
    }

    /// Appends a range to `out` if that needs no waiting. Otherwise, and on errors, `out` stays as
    /// it was.
    fn append_now(&self, offset: u64, length: usize, out: &mut Vec<u8>) -> Now {
        let before = out.len();
        out.resize(before + length, 0);
        let now = self.read_now(offset, &mut out[before..]);
        if !matches!(now, Now::Done(Ok(()))) {
            out.truncate(before);
        }
        now
    }

    /// Returns how many bytes from `offset`, at most `length`, are a hole; 0 if none are or the
    /// back end cannot tell. Looks at metadata at most.
    fn hole_now(&self, _offset: u64, _length: u64) -> u64 {
        0
    }

    /// Returns a reference to the first bytes of a range if they are in memory: as many as are, at
    /// least one page. Writes may change them until they are sent, just as they may change any
    /// overlapping read. Does not wait.
    fn lend(&self, _offset: u64, _length: u64) -> Option<Aggregate> {
        None
    }

    /// Returns the memory that holds the bytes of a range, if other processes may read them there.
    /// Calls `tell` for each run in order with its place in that memory (`None`: the run is zeros
    /// and has no place) and its length. Writes that overlap such a read change the bytes, as for
    /// any read. Does not wait.
    fn in_place(
        &self,
        _offset: u64,
        _length: u64,
        _tell: &mut dyn FnMut(Option<u64>, u64),
    ) -> Option<&Arc<SharedMemory>> {
        None
    }

    /// Returns the memory that the bytes of a range may be received into instead of being written,
    /// and the offset in it. Other threads may read and write there meanwhile, as with overlapping
    /// writes. Ask again before each part that arrives, because the disk may have shrunk. After
    /// each part call [`BlockStore::landed`]. `None`: use a write. Does not wait.
    fn landing(&self, _offset: u64, _length: u64) -> Option<(&SharedMemory, usize)> {
        None
    }

    /// Marks `length` bytes as written, after they were received where [`BlockStore::landing`]
    /// said.
    fn landed(&self, _offset: u64, _length: u64) {}

    /// Writes if that needs no waiting. With `durable`, it completes only when the data is on
    /// stable storage.
    fn write_now(&self, _offset: u64, _data: &[u8], _durable: bool) -> Now {
        Now::WouldBlock
    }

    /// Returns where the first bytes of a range are stored, for reading or writing them without
    /// this trait. `None`: there is no such place; use [`BlockStore::read`] and
    /// [`BlockStore::write`]. Does not wait.
    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    /// Fills `target`.
    ///
    /// # Errors
    /// Errors of the device; `EIO` if the file is shorter than the disk.
    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()>;

    /// Writes `data`. With `durable`, returns only when it is on stable storage.
    ///
    /// # Errors
    /// Errors of the device.
    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()>;

    /// Puts all completed writes on stable storage.
    ///
    /// # Errors
    /// Errors of the device. The state of all these writes is then unknown.
    fn flush(&self) -> io::Result<()>;

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// Errors of the device; `EOPNOTSUPP` if `how.fast` is set and there is no fast way.
    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()>;

    /// Tells the disk that the contents of a range are no longer needed. It may do nothing.
    ///
    /// # Errors
    /// Errors of the device.
    fn trim(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Reads a range into memory, if there is a cache.
    ///
    /// # Errors
    /// Errors of the device.
    fn cache(&self, offset: u64, length: u64) -> io::Result<()>;

    /// For a store that simulates a slow device: returns when it will be done with a request for
    /// `bytes` bytes made now, and the store to use then, which does not wait.
    fn later(&self, _bytes: u64) -> Option<(Instant, Arc<dyn BlockStore>)> {
        None
    }

    /// Waits until a range is in memory, so that [`BlockStore::lend`] finds it, if there is a
    /// cache.
    ///
    /// # Errors
    /// Errors of the device.
    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.cache(offset, length)
    }

    /// Calls `tell` for each extent of a range, in order, until it returns false. Neighbours may be
    /// of the same kind.
    ///
    /// # Errors
    /// Errors of the device.
    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()>;

    /// Returns whether [`BlockStore::resize`] is supported.
    fn resizes(&self) -> bool {
        false
    }

    /// Returns true if writes beyond the end, which callers avoid, would make the disk longer.
    fn writes_extend(&self) -> bool {
        false
    }

    /// Returns the size in bytes beyond which [`BlockStore::resize`] fails with `EFBIG`, as far as
    /// known beforehand.
    fn size_max(&self) -> u64 {
        u64::MAX
    }

    /// Sets the size of the disk to `size` bytes, not zero. Added bytes read as zeros. Callers do
    /// this one at a time.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if unsupported; `EINVAL` for zero or a size that is not in whole blocks (on a
    /// disk of several members: stripes); `EFBIG` for a size beyond what the disk can grow to;
    /// errors of the device.
    fn resize(&self, _size: u64) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}
