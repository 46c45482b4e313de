//! A disk that is a file or a block device.
//!
//! It has two descriptors for the same file: one through the page cache, and one that bypasses it
//! (`O_DIRECT`). Aligned requests bypass the cache if the mode says so; all others go through it,
//! and the kernel keeps both views coherent.

use super::continuity;
use crate::block_store::{
    BlockStore, Continuity, Direction, Extent, Geometry, Layout, Now, Place, ZeroHow,
};
use crate::directory::system;
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_mem::{ALIGNMENT, Aggregate, Segment, aligned_zeroes, page_bytes};

/// Shorter reads are copied, which costs less than referring to pages.
const LEND_BYTES_MIN: u64 = 32 * 1024;
/// Holes are looked for only in ranges at least this long.
const HOLE_BYTES_MIN: u64 = 64 * 1024;
/// Longer writes are not tried without waiting.
const WRITE_NOW_BYTES_MAX: usize = 64 * 1024;
/// A write into the page cache that takes this long was held up by the device.
const HELD_UP: Duration = Duration::from_millis(2);
/// How long other threads then do the writes.
const HELD_UP_PAUSE: Duration = Duration::from_millis(200);

/// `TMPFS_MAGIC` of `statfs(2)`.
const TMPFS: i64 = 0x0102_1994;

/// Which requests go through the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // the three that the papers compare
pub enum CacheMode {
    /// All requests.
    #[default]
    Cached,
    /// None. Requests must be aligned to the blocks of the device: a part of a block would need the
    /// page cache, which the kernel does not keep coherent with direct writes in flight.
    Direct,
    /// Writes, and reads that are not aligned to 4096 bytes.
    ReadDirect,
}

/// A file or block device as a disk.
#[derive(Debug)]
pub struct FileDisk {
    cached: Arc<OwnedFd>,
    direct: Option<Arc<OwnedFd>>,
    /// Used only for flushes: the kernel reports data that it could not write once per descriptor,
    /// and a durable write through another descriptor may already have consumed that report.
    flushed: OwnedFd,
    mode: CacheMode,
    /// The size in it is not used.
    geometry: Geometry,
    size: AtomicU64,
    is_device: bool,
    layout: Option<Layout>,
    continuity: Continuity,
    /// Whether the file system supports `RWF_NOWAIT`.
    tells_residency: AtomicBool,
    /// Whether the file system reports which space is allocated.
    tells_space: AtomicBool,
    /// Whether the file is in memory (tmpfs).
    in_memory: bool,
    started: Instant,
    /// Milliseconds since `started` until which writes are not tried without waiting.
    held_up_until: AtomicU64,
}

impl FileDisk {
    /// Opens a file or block device. A block device opened for writing is claimed, so that nothing
    /// else mounts it meanwhile.
    ///
    /// # Errors
    /// The file cannot be opened in this mode, is empty although the mode needs direct access, or
    /// is neither a file nor a block device (`EINVAL`); a device has no bytes.
    pub fn open(path: &Path, mode: CacheMode, read_only: bool) -> io::Result<Arc<Self>> {
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
        let kind = FileType::from_raw_mode(rustix::fs::stat(path)?.st_mode);
        let claim = match kind {
            FileType::BlockDevice if !read_only => OFlags::EXCL,
            FileType::BlockDevice | FileType::RegularFile => OFlags::empty(),
            _ => return Err(Errno::INVAL.into()),
        };
        let cached = rustix::fs::open(path, access | claim, Mode::empty())?;
        if kind == FileType::RegularFile {
            // A sign for programs that would truncate the file: `towline disk copy` checks it. Not
            // every file system has locks.
            let _ = rustix::fs::flock(&cached, FlockOperation::NonBlockingLockShared);
        }
        // Reopens the same file, whatever the path names by now.
        use std::os::fd::AsRawFd;
        let same = format!("/proc/self/fd/{}", cached.as_raw_fd());
        let again = |flags| rustix::fs::open(&same, access | flags, Mode::empty());
        let direct = match mode {
            CacheMode::Cached => None,
            CacheMode::Direct | CacheMode::ReadDirect => Some(Arc::new(again(OFlags::DIRECT)?)),
        };
        let flushed = again(OFlags::empty())?;
        let size = rustix::fs::seek(&cached, SeekFrom::End(0))?;
        // A device without a medium, or an empty file, on which direct access cannot be tried.
        // Without direct access, an empty file may grow.
        if size == 0 && (kind == FileType::BlockDevice || direct.is_some()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                match kind {
                    FileType::BlockDevice => "it has no bytes",
                    _ => "it is empty; give it a size with truncate(1), or use :cached",
                },
            ));
        }
        let block_minimum = match &direct {
            Some(direct) if mode == CacheMode::Direct => direct_unit(direct, size)?,
            _ => 1,
        };
        let geometry = Geometry {
            size,
            block_minimum,
            block_preferred: 4096,
            rotational: kind == FileType::BlockDevice && is_rotational(&cached),
            read_only,
        };
        let layout = match kind {
            FileType::BlockDevice => layout_of(&cached),
            _ => None,
        };
        let continuity = continuity::of_file(path, &cached)?;
        Ok(Arc::new(Self {
            direct,
            flushed,
            mode,
            geometry,
            size: AtomicU64::new(size),
            is_device: kind == FileType::BlockDevice,
            layout,
            continuity,
            tells_residency: AtomicBool::new(true),
            tells_space: AtomicBool::new(true),
            in_memory: rustix::fs::fstatfs(&cached)?.f_type == TMPFS,
            started: Instant::now(),
            held_up_until: AtomicU64::new(0),
            cached: Arc::new(cached),
        }))
    }

    /// Returns the type of the file's file system, for example `nfs4`, if it asks another machine
    /// or another process. Even calls that should not wait may then wait forever.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn foreign(&self) -> io::Result<Option<String>> {
        crate::directory::mounts::foreign(&self.cached)
    }

    /// Returns the descriptor that bypasses the cache, if requests in this direction do.
    fn around(&self, direction: Direction) -> Option<&Arc<OwnedFd>> {
        match (self.mode, direction) {
            (CacheMode::Direct, _) | (CacheMode::ReadDirect, Direction::Read) => {
                self.direct.as_ref()
            }
            _ => None,
        }
    }

    /// Returns the unit of requests that bypass the cache.
    fn unit(&self) -> u64 {
        match self.mode {
            CacheMode::Direct => self.geometry.block_minimum.into(),
            _ => ALIGNMENT as u64,
        }
    }

    /// Returns the descriptor for a transfer from or to `bytes`: the one that bypasses the cache
    /// where the mode says so and the alignment allows it.
    fn way(&self, direction: Direction, offset: u64, bytes: &[u8]) -> &OwnedFd {
        let alignment = offset | bytes.as_ptr().addr() as u64 | bytes.len() as u64;
        match self.around(direction) {
            Some(direct) if alignment.is_multiple_of(self.unit()) => direct,
            _ => &self.cached,
        }
    }

    fn is_held_up(&self) -> bool {
        let until = self.held_up_until.load(Ordering::Relaxed);
        until != 0 && (self.started.elapsed().as_millis() as u64) < until
    }

    /// Returns whether every page of a range is in the page cache.
    fn is_resident(&self, offset: u64, length: u64) -> bool {
        if self.in_memory {
            return true;
        }
        let page = page_bytes() as u64;
        let wanted = (offset + length).div_ceil(page) - offset / page;
        match system::cached_pages(&*self.cached, offset, length) {
            Ok(pages) => pages >= wanted,
            // Without that call, the first and last page have to stand for those in between.
            Err(_) if self.tells_residency.load(Ordering::Relaxed) => {
                self.probe(offset) && self.probe(offset + length - 1)
            }
            Err(_) => false,
        }
    }

    /// Checks that the file extends to `end` where `is_resident` has not: a file in memory may have
    /// become shorter.
    fn reaches(&self, end: u64) -> bool {
        !self.in_memory || rustix::fs::fstat(&*self.cached).is_ok_and(|s| s.st_size as u64 >= end)
    }

    fn probe(&self, offset: u64) -> bool {
        matches!(self.read_now(offset, &mut [0]), Now::Done(Ok(())))
    }

    fn fallocate(&self, flags: FallocateFlags, offset: u64, length: u64) -> Result<(), Errno> {
        let flags = flags | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&*self.cached, flags, offset, length) {
                Err(Errno::INTR) => {}
                other => return other,
            }
        }
    }

    /// Reports a range that holds no data, split into holes and allocated space. Returns false once
    /// `tell` does.
    fn tell_zeroes(
        &self,
        mut range: std::ops::Range<u64>,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<bool> {
        while !range.is_empty() {
            let parts = match self.tells_space.load(Ordering::Relaxed) {
                true => super::fiemap::allocated(&*self.cached, &range),
                false => Ok(Vec::new()),
            };
            let parts = match parts {
                Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS) => {
                    self.tells_space.store(false, Ordering::Relaxed);
                    Vec::new()
                }
                parts => parts?,
            };
            let none = parts.is_empty();
            for part in parts {
                let hole = part.start.saturating_sub(range.start);
                if hole > 0 && !tell(Extent { length: hole, hole: true, zero: true }) {
                    return Ok(false);
                }
                let length = part.end - part.start;
                if !tell(Extent { length, hole: false, zero: true }) {
                    return Ok(false);
                }
                range.start = part.end;
            }
            if none {
                let length = range.end - range.start;
                return Ok(tell(Extent { length, hole: true, zero: true }));
            }
        }
        Ok(true)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        let most = length.min(1 << 20) as usize;
        let (zeroes, start) = aligned_zeroes(most);
        let mut done = 0;
        while done < length {
            let count = (length - done).min(most as u64) as usize;
            self.write(offset + done, &zeroes[start..start + count], false)?;
            done += count as u64;
        }
        Ok(())
    }
}

/// Finds the smallest unit in which a file can be read directly, by trying: not every kernel
/// reports it.
fn direct_unit(direct: &OwnedFd, size: u64) -> io::Result<u32> {
    let (mut buffer, start) = aligned_zeroes(ALIGNMENT);
    let mut reads = |unit: usize| {
        let target = &mut buffer[start..start + unit];
        rustix::io::pread(direct, target, 0).is_ok_and(|count| count == unit)
    };
    let unit = [512, 4096].into_iter().find(|unit| reads(*unit as usize));
    unit.filter(|unit| size.is_multiple_of(u64::from(*unit))).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "its size is not a multiple of the block size that direct access needs; use :cached",
        )
    })
}

fn layout_of(device: &OwnedFd) -> Option<Layout> {
    let device = rustix::fs::fstat(device).ok()?.st_rdev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    super::members::layout(Path::new("/sys"), major, minor)
}

fn is_rotational(device: &OwnedFd) -> bool {
    let Ok(stat) = rustix::fs::fstat(device) else { return false };
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    // A partition has no queue of its own.
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/rotational");
        std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "1")
    })
}

impl BlockStore for FileDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::Relaxed), ..self.geometry }
    }

    fn refresh(&self) -> io::Result<u64> {
        let before = self.size.load(Ordering::Relaxed);
        let size = match self.is_device {
            true => rustix::fs::seek(&*self.cached, SeekFrom::End(0))?,
            false => rustix::fs::fstat(&*self.cached)?.st_size as u64,
        };
        let size = size - size % u64::from(self.geometry.block_minimum);
        if size != before {
            // Unless somebody has resized it since, and knows better.
            let _ = self.size.compare_exchange(before, size, Ordering::Release, Ordering::Relaxed);
        }
        Ok(size)
    }

    fn resizes(&self) -> bool {
        // A device is resized where it is configured; `refresh` sees the new size.
        !self.is_device
    }

    fn writes_extend(&self) -> bool {
        !self.is_device
    }

    fn resize(&self, size: u64) -> io::Result<()> {
        if self.is_device {
            return Err(Errno::OPNOTSUPP.into());
        }
        if size == 0 || !size.is_multiple_of(self.geometry.block_minimum.into()) {
            return Err(Errno::INVAL.into());
        }
        rustix::fs::ftruncate(&*self.cached, size)?;
        self.refresh().map(|_| ())
    }

    fn layout(&self) -> Option<Layout> {
        self.layout
    }

    fn continuity(&self) -> Option<Continuity> {
        Some(self.continuity)
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
        if self.around(Direction::Read).is_some() {
            return Now::WouldBlock;
        }
        if self.in_memory || !self.tells_residency.load(Ordering::Relaxed) {
            return match self.is_resident(offset, target.len() as u64) {
                true => Now::Done(self.read(offset, target)),
                false => Now::WouldBlock,
            };
        }
        let mut done = 0;
        while done < target.len() {
            let part = &mut [IoSliceMut::new(&mut target[done..])];
            let flags = ReadWriteFlags::NOWAIT;
            match rustix::io::preadv2(&*self.cached, part, offset + done as u64, flags) {
                Ok(0) => return Now::Done(Err(Errno::IO.into())),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Now::WouldBlock,
                // Some file systems do not support it, and system call filters of containers may
                // not allow it.
                Err(Errno::OPNOTSUPP | Errno::PERM | Errno::NOSYS) => {
                    self.tells_residency.store(false, Ordering::Relaxed);
                    return Now::WouldBlock;
                }
                Err(error) => return Now::Done(Err(error.into())),
            }
        }
        Now::Done(Ok(()))
    }

    fn hole_now(&self, offset: u64, length: u64) -> u64 {
        // A shorter hole is not worth a system call.
        if length < HOLE_BYTES_MIN {
            return 0;
        }
        match rustix::fs::seek(&*self.cached, SeekFrom::Data(offset)) {
            Ok(data) => data.saturating_sub(offset).min(length),
            // A hole up to the end, unless the file became shorter than the disk.
            Err(Errno::NXIO) => match rustix::fs::fstat(&*self.cached) {
                Ok(stat) if stat.st_size as u64 >= offset + length => length,
                _ => 0,
            },
            Err(_) => 0,
        }
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        if length < LEND_BYTES_MIN
            || self.around(Direction::Read).is_some()
            || !self.is_resident(offset, length)
            || !self.reaches(offset + length)
        {
            return None;
        }
        let mut aggregate = Aggregate::new();
        aggregate.append(Segment::File(self.cached.clone()), offset, length);
        Some(aggregate)
    }

    fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        // Whole pages only: a part of a page may have to be read first. A file system that cannot
        // promise not to wait (ext4) rarely does for so little; once it did, other threads do the
        // writes for a while.
        let whole_pages = (offset | data.len() as u64).is_multiple_of(page_bytes() as u64);
        if self.in_memory {
            return Now::Done(self.write(offset, data, false));
        }
        if durable
            || !whole_pages
            || data.len() > WRITE_NOW_BYTES_MAX
            || self.around(Direction::Write).is_some()
            || self.is_held_up()
        {
            return Now::WouldBlock;
        }
        let start = Instant::now();
        let result = self.write(offset, data, false);
        if start.elapsed() >= HELD_UP {
            let until = self.started.elapsed() + HELD_UP_PAUSE;
            self.held_up_until.store(until.as_millis() as u64, Ordering::Relaxed);
        }
        Now::Done(result)
    }

    fn locate(&self, offset: u64, length: u64, direction: Direction) -> Option<Place> {
        let cached =
            |length| Some(Place { file: self.cached.clone(), offset, length, direct: false });
        let Some(direct) = self.around(direction) else { return cached(length) };
        let unit = self.unit();
        let beyond = offset % unit;
        let aligned = length - length % unit;
        if beyond == 0 && aligned > 0 {
            Some(Place { file: direct.clone(), offset, length: aligned, direct: true })
        } else if beyond == 0 {
            cached(length)
        } else {
            cached(length.min(unit - beyond))
        }
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let file = self.way(Direction::Read, offset, target);
        let mut done = 0;
        while done < target.len() {
            match rustix::io::pread(file, &mut target[done..], offset + done as u64) {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        let flags = if durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let file = self.way(Direction::Write, offset, data);
        let mut done = 0;
        while done < data.len() {
            let part = &[IoSlice::new(&data[done..])];
            match rustix::io::pwritev2(file, part, offset + done as u64, flags) {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.flushed)?)
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        // Beyond the end of a file the kernel would report success.
        if offset + length > self.refresh()? {
            return Err(Errno::IO.into());
        }
        if how.allocate && self.in_memory {
            // tmpfs keeps the space of zeros, but cannot tell it from a hole.
            if how.fast {
                return Err(Errno::OPNOTSUPP.into());
            }
            return self.write_zeroes(offset, length);
        }
        // For a zeroed range of a device that has no command for it, the kernel writes zeroes.
        let may_be_slow = how.fast && self.is_device;
        let ways = [
            (!how.allocate).then_some(FallocateFlags::PUNCH_HOLE),
            (!may_be_slow).then_some(FallocateFlags::ZERO_RANGE),
        ];
        for way in ways.into_iter().flatten() {
            match self.fallocate(way, offset, length) {
                Err(Errno::OPNOTSUPP | Errno::INVAL) => {}
                other => return Ok(other?),
            }
        }
        if how.fast {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.write_zeroes(offset, length)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.fallocate(FallocateFlags::PUNCH_HOLE, offset, length) {
            Err(Errno::OPNOTSUPP | Errno::INVAL) => Ok(()),
            other => Ok(other?),
        }
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        let length = std::num::NonZeroU64::new(length);
        let advice = rustix::fs::Advice::WillNeed;
        Ok(rustix::fs::fadvise(&*self.cached, offset, length, advice)?)
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        super::populate::bring_in(&self.cached, offset, length)
    }

    fn extents(
        &self,
        mut offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        // Nothing lies beyond the end of a truncated file, not even a hole.
        let end = (offset + length).min(self.refresh()?);
        if length > 0 && offset >= end {
            return Err(Errno::IO.into());
        }
        while offset < end {
            let data = match rustix::fs::seek(&*self.cached, SeekFrom::Data(offset)) {
                Ok(data) => data.min(end),
                // No data up to the end of the file.
                Err(Errno::NXIO) => end,
                Err(Errno::INVAL) => offset,
                Err(error) => return Err(error.into()),
            };
            if data > offset && !self.tell_zeroes(offset..data, tell)? {
                return Ok(());
            }
            if data == end {
                return Ok(());
            }
            let hole = match rustix::fs::seek(&*self.cached, SeekFrom::Hole(data)) {
                Ok(hole) => hole,
                Err(Errno::INVAL | Errno::NXIO) => end,
                Err(error) => return Err(error.into()),
            };
            // Data that was freed meanwhile still counts as one page of data: each extent begins
            // where the one before it ends, and a file that keeps changing cannot keep this loop
            // going forever.
            let next_page = (data / ALIGNMENT as u64 + 1) * ALIGNMENT as u64;
            let hole = if hole > data { hole } else { next_page }.min(end);
            if !tell(Extent { length: hole - data, hole: false, zero: false }) {
                return Ok(());
            }
            offset = hole;
        }
        Ok(())
    }
}
