//! The store: its tree, and operations on paths.

use super::access::check;
use super::arena::{Arena, page_bytes};
use super::file::MemoryFile;
use super::inode::{Content, INODE_BYTES, Inode, dismantle};
use super::names::{COOKIE_PARENT, Name};
use super::open::Opened;
use super::walk::Walk;
use super::watches::Watches;
use crate::{
    Caller, FileStore, OpenFile, OpenHow, PathRead, ReadOutcome, Remains, SetAttr, Source,
    XattrAction,
};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use towline_wire::attr::TYPE_DIRECTORY;
use towline_wire::event;
use towline_wire::limits::NAME_BYTES_MAX;
use towline_wire::request::open_flag;
use towline_wire::{Attr, Errno, StatFs};

/// Inode number of the root directory.
pub(super) const ROOT_NUMBER: u64 = 1;

/// Maximum bytes that one request copies between files; the client requests the rest again.
const COPY_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// The number of the last store created in this process.
static STORES: AtomicU64 = AtomicU64::new(0);

/// A file system in the memory of this process, which is gone when the process ends.
///
/// It behaves like a local Linux file system with `relatime`, down to error numbers. Callers with
/// [`Caller::enforce`] are checked against permission bits, sticky directories, and the rules that
/// most distributions set as `protected_symlinks` and `protected_hardlinks`; other callers may do
/// everything. Opening a FIFO, socket or device without `O_PATH` fails with `ENXIO`: they belong to
/// the client's machine.
///
/// No call waits for a device. Calls from several threads run in parallel; those that change the
/// same directory, or the data of the same file, wait for each other.
pub struct MemoryStore {
    tree: Arc<Tree>,
    /// Stores of directories in this one that are in use.
    parts: Mutex<Vec<Weak<Self>>>,
}

/// State shared by a store and its open files.
pub(super) struct Tree {
    whole: Arc<Whole>,
    root: Arc<Inode>,
}

/// State shared by all stores of one memory file system.
pub(super) struct Whole {
    /// Number of the file system.
    pub(super) id: u64,
    /// The memory for data, and the accounting of its use.
    pub(super) arena: Arc<Arena>,
    /// Held by renames between directories: no other thread changes the parent of a directory
    /// meanwhile.
    pub(super) topology: Mutex<()>,
    /// The watches.
    pub(super) watches: Watches,
    root: Arc<Inode>,
    number_last: AtomicU64,
}

impl std::ops::Deref for Tree {
    type Target = Whole;

    fn deref(&self) -> &Whole {
        &self.whole
    }
}

impl MemoryStore {
    /// Creates a store with an empty root directory, whose mode is 0777 and sticky, like that of
    /// `/tmp`.
    ///
    /// `/proc` shows `name` as the name of the memory. `limit_bytes` limits the memory that the
    /// store takes: pages for data (4 KiB on x86-64), and a little for each inode, name and
    /// extended attribute. Memory is allocated when data is written. When data is removed, up to 16
    /// MiB but at most an eighth of the limit stay for reuse. Clients may borrow up to an eighth of
    /// the limit, at most 128 MiB, to read it in place; borrowed memory stays until they are done,
    /// even if its file is gone.
    ///
    /// # Errors
    /// Errors of `memfd_create(2)` and `mmap(2)`; `ENOSPC` for a limit too small for the root.
    pub fn new(name: &str, limit_bytes: u64) -> std::io::Result<Arc<Self>> {
        let arena = Arena::new(name, limit_bytes)?;
        let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
        let (uid, gid) = super::access::owner(&caller);
        let birth = super::inode::Birth {
            mode: TYPE_DIRECTORY | 0o1777,
            uid,
            gid,
            rdev: 0,
            content: Content::directory(Weak::new()),
        };
        let root = Inode::new(&arena, ROOT_NUMBER, birth)?;
        let id = STORES.fetch_add(1, Ordering::Relaxed) + 1;
        let number_last = AtomicU64::new(ROOT_NUMBER);
        let (topology, watches) = (Mutex::default(), Watches::default());
        let root_too = root.clone();
        let whole = Arc::new(Whole { id, arena, topology, watches, root: root_too, number_last });
        Ok(Self::of(Tree { whole, root }))
    }

    /// Returns the maximum limit in bytes: some eight times the first limit, since the address
    /// space stays the same.
    #[must_use]
    pub fn limit_max(&self) -> u64 {
        self.tree.arena.limit_max()
    }

    /// Sets the limit to `bytes`, at most [`MemoryStore::limit_max`]. Nothing is lost: memory in
    /// use beyond a lower limit stays, and no more is allocated until there is room.
    pub fn set_limit(&self, bytes: u64) {
        self.tree.arena.set_limit(bytes);
    }

    /// Returns true if what has been read and not yet sent keeps much more memory than the limit allows: its
    /// files were changed or removed meanwhile. Past twice the limit and 256 MiB, writes fail with `ENOSPC`.
    #[must_use]
    pub fn is_overfull(&self) -> bool {
        self.tree.arena.is_overfull()
    }

    fn of(tree: Tree) -> Arc<Self> {
        Arc::new(Self { tree: Arc::new(tree), parts: Mutex::default() })
    }

    #[cfg(test)]
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }
}

impl Whole {
    /// Returns a number for a new inode.
    pub(super) fn number(&self) -> u64 {
        self.number_last.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Tree {
    /// Returns the number of the root, which paths do not leave.
    pub(super) fn root_number(&self) -> u64 {
        self.root.number
    }

    /// Returns the open file that a path starts at; `EXDEV` if it belongs to another store.
    pub(super) fn base<'a>(&self, at: &Source<'a>) -> Result<&'a MemoryFile, Errno> {
        let file = at.0.as_any().downcast_ref::<MemoryFile>().ok_or(Errno::EXDEV)?;
        if std::ptr::eq(file.tree(), self) { Ok(file) } else { Err(Errno::EXDEV) }
    }

    /// Returns the path from the root to a directory.
    pub(super) fn path_of(&self, directory: &Arc<Inode>) -> Result<Vec<u8>, Errno> {
        let _stays = self.topology.lock();
        let mut names: Vec<Name> = Vec::new();
        let mut node = directory.clone();
        while node.number != self.root_number() {
            if node.number == ROOT_NUMBER {
                return Err(Errno::EXDEV);
            }
            let parent = node.parent().ok_or(Errno::ENOENT)?;
            let held = parent.directory()?.names.read();
            let mut all = held.after(COOKIE_PARENT).map(|(_, entry)| entry);
            let found = all.find(|entry| Arc::ptr_eq(&entry.inode, &node)).ok_or(Errno::ENOENT)?;
            names.push(found.name.clone());
            drop(all);
            drop(held);
            node = parent;
        }
        let names: Vec<&[u8]> = names.iter().rev().map(|name| &**name).collect();
        Ok(if names.is_empty() { b".".to_vec() } else { names.join(&b'/') })
    }

    /// Starts walking a path.
    pub(super) fn walk<'a>(&self, caller: &'a Caller, at: Source<'a>) -> Result<Walk<'a>, Errno> {
        Walk::new(caller, self.base(&at)?.inode().clone(), at.1, self.root_number())
    }

    /// Returns the inode that a path leads to.
    pub(super) fn find(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
    ) -> Result<Arc<Inode>, Errno> {
        self.find_by(caller, at, follow).map(|(inode, _)| inode)
    }

    /// Like [`Tree::find`], and also returns the number of the directory with the name that it is
    /// found by.
    pub(super) fn find_by(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
    ) -> Result<(Arc<Inode>, u64), Errno> {
        if at.1.is_empty() {
            let base = self.base(&at)?;
            return Ok((base.inode().clone(), base.by()));
        }
        self.walk(caller, at)?.finish_by(follow)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        dismantle(self.root.clone());
    }
}

impl FileStore for MemoryStore {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        let flags = open_flag::PATH | open_flag::DIRECTORY;
        let root = self.tree.root.clone();
        Ok(Arc::new(MemoryFile::new(self.tree.clone(), Opened::new(root, flags, 0), true)))
    }

    fn below(&self, caller: &Caller, path: &[u8]) -> Result<Arc<dyn FileStore>, Errno> {
        let from = self.tree.root.clone();
        let root = Walk::new(caller, from, path, self.tree.root_number())?.finish(true)?;
        root.directory()?;
        let mut parts = self.parts.lock();
        parts.retain(|part| part.strong_count() > 0);
        let known = parts.iter().filter_map(Weak::upgrade);
        let found = known.into_iter().find(|part| part.tree.root_number() == root.number);
        let part = found.unwrap_or_else(|| {
            let part = Self::of(Tree { whole: self.tree.whole.clone(), root });
            parts.push(Arc::downgrade(&part));
            part
        });
        Ok(part)
    }

    fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let opened = self.tree.open(caller, at, how)?;
        let attr = opened.inode.attr();
        let privileged = super::access::keeps_set_id(caller);
        Ok((Arc::new(MemoryFile::new(self.tree.clone(), opened, privileged)), attr))
    }

    fn read_path(
        &self,
        caller: &Caller,
        at: Source<'_>,
        flags: u32,
        length: usize,
    ) -> Result<PathRead, Errno> {
        let opened = self.tree.open(caller, at, OpenHow { flags, mode: 0 })?;
        match MemoryFile::new(self.tree.clone(), opened, false).read(0, length, false)? {
            ReadOutcome::Ready(data) => Ok(PathRead::Ready(data, None)),
            ReadOutcome::WouldBlock => Err(Errno::EAGAIN),
        }
    }

    fn stat(&self, caller: &Caller, at: Source<'_>, follow: bool) -> Result<Attr, Errno> {
        Ok(self.tree.find(caller, at, follow)?.attr())
    }

    fn set_attr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno> {
        self.tree.set_attr(caller, at, follow, set)
    }

    fn access(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<(), Errno> {
        if mode & !7 != 0 {
            return Err(Errno::EINVAL);
        }
        let inode = self.tree.find(caller, at, true)?;
        if mode == 0 { Ok(()) } else { check(caller, &inode, mode) }
    }

    fn make_directory(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<Attr, Errno> {
        self.tree.make_directory(caller, at, mode)
    }

    fn make_node(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno> {
        self.tree.make_node(caller, at, mode, rdev)
    }

    fn symlink(&self, caller: &Caller, at: Source<'_>, target: &[u8]) -> Result<Attr, Errno> {
        self.tree.symlink(caller, at, target)
    }

    fn read_link(&self, caller: &Caller, at: Source<'_>) -> Result<Vec<u8>, Errno> {
        // readlinkat(2) has different errors for an open file that is no link and for a path to
        // one.
        let other = if at.1.is_empty() { Errno::ENOENT } else { Errno::EINVAL };
        let inode = self.tree.find(caller, at, false)?;
        let target = inode.target().ok_or(other)?;
        inode.accessed();
        Ok(target.to_vec())
    }

    fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno> {
        self.tree.link(caller, at, follow, to)
    }

    fn unlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        directory: bool,
    ) -> Result<Option<Remains>, Errno> {
        self.tree.unlink(caller, at, directory).map(|()| None)
    }

    fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<Option<Remains>, Errno> {
        self.tree.rename(caller, at, to, flags).map(|()| None)
    }

    fn xattr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        let (inode, by) = self.tree.find_by(caller, at, follow)?;
        let done = super::xattr::xattr(&self.tree.arena, caller, &inode, action)?;
        if matches!(action, XattrAction::Set(..) | XattrAction::Remove(_)) {
            self.tree.watches.happened(&inode, by, event::ATTRIB);
        }
        Ok(done)
    }

    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        let from = self.tree.base(&(from, b""))?;
        let to = self.tree.base(&(to, b""))?;
        to.copy_from(to_offset, from, offset, length.min(COPY_BYTES_MAX))
    }

    fn stat_fs(&self, _: &dyn OpenFile) -> Result<StatFs, Errno> {
        let (limit, used, inodes) = self.tree.arena.usage();
        let free = limit - used;
        Ok(StatFs {
            block_bytes: page_bytes(),
            blocks: limit / page_bytes(),
            blocks_free: free / page_bytes(),
            blocks_available: free / page_bytes(),
            files: inodes + free / INODE_BYTES,
            files_free: free / INODE_BYTES,
            name_bytes_max: NAME_BYTES_MAX as u64,
            id: self.tree.id,
        })
    }

    fn sync(&self, _: &dyn OpenFile) -> Result<(), Errno> {
        Ok(())
    }

    fn may_block(&self) -> bool {
        false
    }

    fn survives_restart(&self) -> bool {
        false
    }
}
