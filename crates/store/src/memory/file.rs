//! Open files.

use super::data::Data;
use super::inode::{Content, Inode};
use super::names::{COOKIE_PARENT, COOKIE_SELF};
use super::open::{ACCESS_MODE, NO_ACCESS_TIME, Opened, PATH};
use super::store::Tree;
use super::watches;
use crate::{Listing, OpenFile, ReadOutcome, Watch, Witness};
use parking_lot::RwLock;
use std::any::Any;
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_wire::attr::TYPE_FIFO;
use towline_wire::attr::attr_flag::NO_XATTRS;
use towline_wire::{Attr, Errno, event};

/// Maximum size of a file.
const SIZE_MAX: u64 = i64::MAX as u64;
const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE as u32;
const SEEK_DATA: u32 = libc::SEEK_DATA as u32;
const SEEK_HOLE: u32 = libc::SEEK_HOLE as u32;

/// An open file, directory or `O_PATH` handle of a [`MemoryStore`](super::MemoryStore).
pub(super) struct MemoryFile {
    // Dropped before the tree, so that the root is dropped as the last directory.
    inode: Arc<Inode>,
    tree: Arc<Tree>,
    flags: u32,
    /// Number of the directory with the name that it was opened by; zero for none.
    by: u64,
    /// Whether writes leave set-id bits alone.
    privileged: bool,
}

impl MemoryFile {
    /// Wraps a file that has just been opened.
    pub(super) fn new(tree: Arc<Tree>, opened: Opened, privileged: bool) -> Self {
        let Opened { inode, flags, by, truncated } = opened;
        let file = Self { inode, tree, flags, by, privileged };
        if !file.is_path() {
            file.happened(event::OPEN);
        }
        if truncated {
            file.happened(event::MODIFY);
        }
        file
    }

    /// Reports events to watchers.
    fn happened(&self, mask: u32) {
        self.tree.watches.happened(&self.inode, self.by, mask);
    }

    /// Returns the tree that it is in.
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Returns the open inode.
    pub(super) fn inode(&self) -> &Arc<Inode> {
        &self.inode
    }

    /// Returns the number of the directory with the name that it was opened by; zero for none.
    pub(super) fn by(&self) -> u64 {
        self.by
    }

    /// Returns true if it was opened with `O_PATH`.
    pub(super) fn is_path(&self) -> bool {
        self.flags & PATH != 0
    }

    /// Returns true if it was opened for writing.
    pub(super) fn is_writable(&self) -> bool {
        !self.is_path() && matches!(self.flags & ACCESS_MODE, 1 | 2)
    }

    fn is_readable(&self) -> bool {
        !self.is_path() && matches!(self.flags & ACCESS_MODE, 0 | 2)
    }

    fn data_to_write(&self) -> Result<&RwLock<Data>, Errno> {
        if self.is_writable() { self.inode.data() } else { Err(Errno::EBADF) }
    }

    fn data_to_read(&self) -> Result<&RwLock<Data>, Errno> {
        if self.is_readable() { self.inode.data() } else { Err(Errno::EBADF) }
    }

    fn accessed(&self) {
        if self.flags & NO_ACCESS_TIME == 0 {
            self.inode.accessed();
        }
    }

    /// `copy_file_range(2)` into this file.
    pub(super) fn copy_from(
        &self,
        target: u64,
        from: &Self,
        offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        // In the order of Linux.
        if from.is_path() || self.is_path() {
            return Err(Errno::EBADF);
        }
        let (source, data) = (from.inode.data()?, self.inode.data()?);
        if !from.is_readable() || !self.is_writable() {
            return Err(Errno::EBADF);
        }
        if offset > SIZE_MAX || target > SIZE_MAX {
            return Err(Errno::EINVAL);
        }
        // The source is locked only to get hold of its blocks: changes to it are made in copies.
        let locked = source.read();
        let length = length.min(from.inode.attr().size.saturating_sub(offset));
        if target == SIZE_MAX {
            return Err(Errno::EFBIG);
        }
        let length = length.min(SIZE_MAX - target);
        let overlap = offset < target + length && target < offset + length;
        if Arc::ptr_eq(&self.inode, &from.inode) && overlap {
            return Err(Errno::EINVAL);
        }
        let snapshot = locked.snapshot(offset, length);
        drop(locked);
        if length == 0 {
            return Ok(0);
        }
        let mut data = data.write();
        let count = data.put(&snapshot, target)?;
        let size = self.inode.attr().size.max(target + count);
        self.inode.data_changed(&data, Some(size), self.privileged);
        drop(data);
        from.accessed();
        from.happened(event::ACCESS);
        self.happened(event::MODIFY);
        Ok(count)
    }
}

impl OpenFile for MemoryFile {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn stat(&self) -> Result<Attr, Errno> {
        Ok(self.inode.attr())
    }

    fn read(&self, offset: u64, length: usize, _wait: bool) -> Result<ReadOutcome, Errno> {
        let data = self.data_to_read()?;
        if offset > SIZE_MAX || length as u64 > SIZE_MAX - offset {
            return Err(Errno::EINVAL);
        }
        let locked = data.read();
        let size = self.inode.attr().size;
        let length = (length as u64).min(size.saturating_sub(offset));
        let aggregate = if length == 0 { Aggregate::new() } else { locked.read(offset, length) };
        drop(locked);
        self.accessed();
        if length != 0 {
            self.happened(event::ACCESS);
        }
        Ok(ReadOutcome::Ready(aggregate))
    }

    fn write(&self, offset: u64, bytes: &[u8], append: bool) -> Result<(usize, u64), Errno> {
        let mut data = self.data_to_write()?.write();
        let size = self.inode.attr().size;
        if !append && (offset > SIZE_MAX || bytes.len() as u64 > SIZE_MAX - offset) {
            return Err(Errno::EINVAL);
        }
        let start = if append { size } else { offset };
        if bytes.is_empty() {
            return Ok((0, start));
        }
        let room = SIZE_MAX - start;
        if room == 0 {
            return Err(Errno::EFBIG);
        }
        let fitting = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let count = data.write(start, &bytes[..fitting])?;
        let end = start + count as u64;
        self.inode.data_changed(&data, Some(size.max(end)), self.privileged);
        drop(data);
        self.happened(event::MODIFY);
        Ok((count, start))
    }

    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno> {
        if self.is_path() {
            return Err(Errno::EBADF);
        }
        let directory = self.inode.directory()?;
        self.accessed();
        let xattrs = listing.wants_xattrs();
        let mut list = |cookie, inode: &Inode, name: &[u8]| {
            let attr = attributes.then(|| {
                let none = xattrs && inode.xattrs.lock().as_ref().is_none_or(|all| all.is_empty());
                Attr { flags: if none { NO_XATTRS } else { 0 }, ..inode.attr() }
            });
            listing.entry(cookie, inode.number, inode.entry_type(), name, attr)
        };
        let names = directory.names.read();
        // A removed directory has no entries, not even `.` and `..`.
        if !names.is_dead() {
            self.happened(event::ACCESS);
            if cookie < COOKIE_SELF && !list(COOKIE_SELF, &self.inode, b".") {
                return Ok(false);
            }
            if cookie < COOKIE_PARENT {
                let root = self.inode.number == self.tree.root_number();
                let parent = self.inode.parent().filter(|_| !root);
                if !list(COOKIE_PARENT, parent.as_ref().unwrap_or(&self.inode), b"..") {
                    return Ok(false);
                }
            }
            for (cookie, entry) in names.after(cookie) {
                if !list(cookie, &entry.inode, &entry.name) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn sync(&self, _full: bool) -> Result<(), Errno> {
        if self.is_path() { Err(Errno::EBADF) } else { Ok(()) }
    }

    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        if self.is_path() {
            return Err(Errno::EBADF);
        }
        if offset > SIZE_MAX || length > SIZE_MAX || length == 0 {
            return Err(Errno::EINVAL);
        }
        let keep = mode & KEEP_SIZE != 0;
        match mode & !KEEP_SIZE {
            0 | ZERO_RANGE => {}
            PUNCH_HOLE if keep => {}
            _ => return Err(Errno::EOPNOTSUPP),
        }
        if !self.is_writable() {
            return Err(Errno::EBADF);
        }
        let data = match &self.inode.content {
            Content::File(data) => data,
            Content::Directory(_) => return Err(Errno::EISDIR),
            _ if self.inode.file_type == TYPE_FIFO => return Err(Errno::ESPIPE),
            _ => return Err(Errno::ENODEV),
        };
        if length > SIZE_MAX - offset {
            return Err(Errno::EFBIG);
        }
        let end = offset + length;
        let mut data = data.write();
        let size = self.inode.attr().size;
        match mode & !KEEP_SIZE {
            PUNCH_HOLE => data.clear(offset, end, false)?,
            ZERO_RANGE => {
                data.reserve(offset, end)?;
                data.clear(offset, end, true)?;
            }
            _ => data.reserve(offset, end)?,
        }
        let size = if keep { size } else { size.max(end) };
        self.inode.data_changed(&data, Some(size), self.privileged);
        drop(data);
        self.happened(event::MODIFY);
        Ok(())
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno> {
        if self.is_path() {
            return Err(Errno::EBADF);
        }
        if !matches!(whence, SEEK_DATA | SEEK_HOLE) {
            return Err(Errno::EINVAL);
        }
        let data = self.inode.data().map_err(|_| Errno::EINVAL)?.read();
        let size = self.inode.attr().size;
        if offset >= size {
            return Err(Errno::ENXIO);
        }
        if whence == SEEK_DATA {
            return data.next_data(offset).filter(|found| *found < size).ok_or(Errno::ENXIO);
        }
        Ok(data.next_hole(offset).min(size))
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        self.inode.directory()?;
        self.tree.path_of(&self.inode)
    }

    fn watch(&self, mask: u32, witness: Arc<dyn Witness>) -> Result<Box<dyn Watch>, Errno> {
        Ok(watches::watch(&self.tree, &self.inode, mask, witness))
    }

    fn identity(&self) -> (u64, u64) {
        (self.tree.id, self.inode.number)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if !self.is_path() {
            let how = if self.is_writable() { event::CLOSE_WRITE } else { event::CLOSE_NOWRITE };
            self.happened(how);
        }
    }
}
