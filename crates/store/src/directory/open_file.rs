//! Open files: reads without copying, writes, appends, space allocation.

use super::aligned::Aligned;
use super::attributes::{errno, identity_of, stat_file};
use super::copied::Copied;
use super::identity::Acting;
use super::open_flags::Opening;
use super::resolve::Tree;
use super::system;
use crate::{Caller, Listing, OpenFile, ReadOutcome, Watch, Witness};
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::fs::{Advice, FallocateFlags, OFlags, SeekFrom, Statx};
use rustix::io::{Errno as Code, IoSlice, ReadWriteFlags};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_mem::{Aggregate, Segment};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_MASK};
use towline_wire::request::whence;
use towline_wire::{Attr, Errno, limits};

/// Reads of at least this length refer to the pages of the file instead of copying them.
pub(super) const REFERENCE_BYTES_MIN: usize = 32 * 1024;
/// The page cache works in units of a multiple of this.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Buffer for reading pages into memory: small enough to stay in the CPU cache.
const SCRATCH_BYTES: usize = 64 * 1024;

/// An open file of a [`DirectoryStore`](super::DirectoryStore).
#[derive(Debug)]
pub(super) struct DirectoryFile {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) tree: Arc<Tree>,
    /// Device and inode number.
    pub(super) identity: (u64, u64),
    /// `S_IF*`.
    pub(super) kind: u32,
    pub(super) path_only: bool,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The caller that opened the file, if its rights are enforced.
    pub(super) caller: Option<Caller>,
    /// Held while the position of the descriptor matters: appends, seeks, listings.
    pub(super) position: Mutex<()>,
    /// Whether `O_DIRECT` is in effect. The first access to bytes of the file that are not aligned as the
    /// device needs ends it for good, rather than fail: a client need not know what that is.
    direct: AtomicBool,
}

impl DirectoryFile {
    /// Wraps a descriptor that was just opened as `opening` says.
    pub(super) fn new(
        tree: &Arc<Tree>,
        fd: Arc<OwnedFd>,
        opening: &Opening,
        stat: &Statx,
        caller: Option<&Caller>,
    ) -> Self {
        Self {
            fd,
            tree: tree.clone(),
            identity: identity_of(stat),
            kind: u32::from(stat.stx_mode) & TYPE_MASK,
            path_only: opening.is_path_only(),
            readable: opening.readable,
            writable: opening.writable,
            caller: caller.filter(|caller| caller.enforce).cloned(),
            position: Mutex::new(()),
            direct: AtomicBool::new(opening.flags.contains(OFlags::DIRECT)),
        }
    }

    /// Returns the number of the device that holds the file.
    fn device(&self) -> u64 {
        self.identity.0
    }

    /// Makes this thread act as the user who opened the file.
    pub(super) fn act_as_user(&self) -> Result<Option<Acting<'_>>, Errno> {
        self.tree.server.act_as_user(self.caller.as_ref())
    }

    /// Returns true if `O_DIRECT` may be in effect.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Acquire)
    }

    /// Drops `O_DIRECT` after an access failed with `EINVAL`, if it was in effect when the access
    /// began. Returns true if a retry makes sense.
    fn falls_back(&self, error: Code, was_direct: bool) -> bool {
        error == Code::INVAL && was_direct && self.leave_direct()
    }

    /// Drops `O_DIRECT`. Returns true if it is no longer in effect. Several threads may do this at
    /// once, after accesses that failed together.
    pub(super) fn leave_direct(&self) -> bool {
        if !self.is_direct() {
            return true;
        }
        let left = rustix::fs::fcntl_getfl(&self.fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(&self.fd, flags.difference(OFlags::DIRECT)))
            .is_ok();
        if left {
            // Not before: a thread that sees this expects that its access needs no alignment.
            self.direct.store(false, Ordering::Release);
        }
        left
    }

    /// Returns data to write as it has to lie in memory.
    fn aligned<'a>(&self, data: &'a [u8]) -> Aligned<'a> {
        if self.is_direct() { Aligned::of(data) } else { Aligned::as_it_is(data) }
    }

    /// A read that copies.
    fn copied(&self, offset: u64, length: usize) -> Copied<'_> {
        let (fd, device) = (&*self.fd, self.device());
        Copied { fd, device, residency: &self.tree.residency, direct: Some(self), offset, length }
    }

    fn read_large(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno> {
        let mut length = length as u64;
        let mut last = self.probe(offset + length - 1)?;
        if matches!(last, Probe::End | Probe::Unknown) {
            let size = stat_file(&self.fd)?.stx_size;
            if size <= offset {
                // Files that the kernel generates have no size but may have contents.
                return match size {
                    0 => self.copied(offset, length as usize).read(true),
                    _ => Ok(ReadOutcome::Ready(Aggregate::new())),
                };
            }
            length = length.min(size - offset);
            if length < REFERENCE_BYTES_MIN as u64 {
                return self.copied(offset, length as usize).read(wait);
            }
            if matches!(last, Probe::End) {
                last = self.probe(offset + length - 1)?;
            }
        }
        if matches!(last, Probe::Here | Probe::Unknown) && self.is_cached(offset, length)? {
            return Ok(ReadOutcome::Ready(self.reference(offset, length)));
        }
        if !wait {
            return Ok(ReadOutcome::WouldBlock);
        }
        let present = self.bring_in(offset, length)?;
        Ok(ReadOutcome::Ready(self.reference(offset, present)))
    }

    fn reference(&self, offset: u64, length: u64) -> Aggregate {
        let mut aggregate = Aggregate::new();
        aggregate.append(Segment::File(self.fd.clone()), offset, length);
        aggregate
    }

    /// Finds out whether one byte can be read without waiting. For the last byte of a range, this
    /// also tells whether the file is long enough and readahead has come this far.
    fn probe(&self, offset: u64) -> Result<Probe, Errno> {
        if !self.tree.residency.may_tell(self.device()) {
            return Ok(Probe::Unknown);
        }
        let mut byte = Vec::with_capacity(1);
        match system::read_resident(&self.fd, &mut byte, offset) {
            Ok(0) => Ok(Probe::End),
            Ok(_) => Ok(Probe::Here),
            Err(Code::AGAIN | Code::INTR) => Ok(Probe::Away),
            Err(Code::OPNOTSUPP | Code::PERM) => {
                self.tree.residency.cannot_tell(self.device());
                Ok(Probe::Unknown)
            }
            Err(error) => Err(errno(error)),
        }
    }

    /// Returns true if all pages of a range, whose last one was probed, are in the page cache.
    fn is_cached(&self, offset: u64, length: u64) -> Result<bool, Errno> {
        let page_bytes = towline_mem::page_bytes() as u64;
        let pages_wanted = (offset + length).div_ceil(page_bytes) - offset / page_bytes;
        match system::cached_pages(&self.fd, offset, length) {
            Ok(pages) => Ok(pages >= pages_wanted),
            // Without that call, the first page has to stand for those in between.
            Err(_) => Ok(matches!(self.probe(offset)?, Probe::Here)),
        }
    }

    /// Reads a range into the page cache. Returns how much of it exists.
    fn bring_in(&self, offset: u64, length: u64) -> Result<u64, Errno> {
        // Only a hint: the code below works without it.
        let _ = rustix::fs::fadvise(&self.fd, offset, NonZeroU64::new(length), Advice::WillNeed);
        let mut scratch = Vec::with_capacity(SCRATCH_BYTES);
        let mut present = 0;
        while present < length {
            scratch.clear();
            match rustix::io::pread(&self.fd, spare_capacity(&mut scratch), offset + present) {
                Ok(0) => break,
                Ok(count) => present += count as u64,
                Err(Code::INTR) => {}
                Err(error) => return Err(errno(error)),
            }
        }
        Ok(present.min(length))
    }

    pub(super) fn write_at(&self, offset: u64, data: &[u8]) -> Result<(usize, u64), Errno> {
        let data = &*self.aligned(data);
        let mut done = 0;
        loop {
            let direct = self.is_direct();
            match rustix::io::pwrite(&self.fd, &data[done..], offset + done as u64) {
                Ok(0) => return Ok((done, offset)),
                Ok(count) if done + count == data.len() => return Ok((data.len(), offset)),
                Ok(count) => done += count,
                Err(Code::INTR) => {}
                Err(error) if self.falls_back(error, direct) => {}
                Err(_) if done > 0 => return Ok((done, offset)),
                Err(error) => return Err(errno(error)),
            }
        }
    }

    /// Appends with one system call, so that other appends cannot come between. The file position
    /// that it leaves shows where the kernel put the bytes under its inode lock.
    fn write_at_end(&self, data: &[u8]) -> Result<(usize, u64), Errno> {
        const AT_POSITION: u64 = u64::MAX;
        if data.is_empty() {
            return Ok((0, stat_file(&self.fd)?.stx_size));
        }
        let data = self.aligned(data);
        let parts = [IoSlice::new(&data)];
        let _position = self.position.lock();
        loop {
            let direct = self.is_direct();
            match rustix::io::pwritev2(&self.fd, &parts, AT_POSITION, ReadWriteFlags::APPEND) {
                Ok(count) => {
                    let end = rustix::fs::tell(&self.fd).map_err(errno)?;
                    return Ok((count, end - count as u64));
                }
                Err(Code::INTR) => {}
                Err(error) if self.falls_back(error, direct) => {}
                Err(error) => return Err(errno(error)),
            }
        }
    }
}

enum Probe {
    /// Can be read without waiting.
    Here,
    /// Reading would wait.
    Away,
    /// At or beyond the end of the file.
    End,
    /// The file system cannot tell.
    Unknown,
}

impl OpenFile for DirectoryFile {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn stat(&self) -> Result<Attr, Errno> {
        stat_file(&self.fd).map(|stat| self.tree.attr_of(&stat))
    }

    fn read(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno> {
        if !self.readable {
            return Err(Errno::EBADF);
        }
        if self.kind == TYPE_DIRECTORY {
            return Err(Errno::EISDIR);
        }
        let length = length.min(limits::TRANSFER_BYTES_MAX);
        // Linux offsets are signed.
        if offset.checked_add(length as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Errno::EINVAL);
        }
        if length == 0 {
            return Ok(ReadOutcome::Ready(Aggregate::new()));
        }
        if self.is_direct() || self.tree.foreign.get().is_some() {
            // Reads always wait for the device, and there are no pages to refer to, or none that
            // stay.
            return match wait {
                true => self.copied(offset, length).read(true),
                false => Ok(ReadOutcome::WouldBlock),
            };
        }
        if length < REFERENCE_BYTES_MIN {
            self.copied(offset, length).read(wait)
        } else {
            self.read_large(offset, length, wait)
        }
    }

    fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<(usize, u64), Errno> {
        if !self.writable {
            return Err(Errno::EBADF);
        }
        let _acting = self.act_as_user()?;
        if append {
            return self.write_at_end(data);
        }
        if offset.checked_add(data.len() as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Errno::EINVAL);
        }
        self.write_at(offset, data)
    }

    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno> {
        self.list(cookie, attributes, listing)
    }

    fn sync(&self, full: bool) -> Result<(), Errno> {
        let result = match full {
            true => rustix::fs::fsync(&self.fd),
            false => rustix::fs::fdatasync(&self.fd),
        };
        result.map_err(errno)
    }

    fn settle(&self) -> Result<(), Errno> {
        // The file system is asked with each descriptor that is closed.
        let duplicate = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(errno)?;
        system::close(duplicate).map_err(errno)
    }

    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        let flags = FallocateFlags::from_bits_retain(mode);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let zero = FallocateFlags::ZERO_RANGE;
        let known = [
            FallocateFlags::empty(),
            FallocateFlags::KEEP_SIZE,
            punch,
            zero,
            zero | FallocateFlags::KEEP_SIZE,
        ];
        if !known.contains(&flags) {
            return Err(Errno::EOPNOTSUPP);
        }
        if !self.writable {
            return Err(Errno::EBADF);
        }
        let _acting = self.act_as_user()?;
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.fd, flags, offset, length))
            .map_err(errno)
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno> {
        if self.kind != TYPE_FILE {
            return Err(if self.path_only { Errno::EBADF } else { Errno::EINVAL });
        }
        let target = match whence {
            whence::DATA => SeekFrom::Data(offset),
            whence::HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::EINVAL),
        };
        let _position = self.position.lock();
        rustix::fs::seek(&self.fd, target).map_err(errno)
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        match self.kind {
            TYPE_DIRECTORY => self.tree.path_from_root(self),
            _ => self.tree.name_from_root(self),
        }
    }

    fn watch(&self, mask: u32, witness: Arc<dyn Witness>) -> Result<Box<dyn Watch>, Errno> {
        self.watch_by_kernel(mask, &witness)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn identity(&self) -> (u64, u64) {
        self.identity
    }
}
