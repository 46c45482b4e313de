//! Traits for trees of files.

use crate::{Watch, Witness};
use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_wire::{Attr, Errno, StatFs, Timestamp};

/// The user on whose behalf an operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User ID.
    pub uid: u32,
    /// Primary group ID.
    pub gid: u32,
    /// Supplementary group IDs.
    pub groups: Arc<[u32]>,
    /// True: the server acts as this user. False: it acts as the user that it runs as, and the
    /// memory store lets the caller do everything.
    pub enforce: bool,
}

/// How to open a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenHow {
    /// `O_*` flags of Linux. `O_CLOEXEC`, `O_NONBLOCK` and unknown bits are ignored. So is
    /// `O_APPEND`: each write says whether it appends.
    pub flags: u32,
    /// Permission bits of a new file, and the client's umask
    /// ([`towline_wire::request::UMASK_SHIFT`]).
    pub mode: u32,
}

/// Attributes to change. `None` leaves an attribute as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length.
    pub size: Option<u64>,
    /// Access and modification time; each may be [`Timestamp::NOW`] or [`Timestamp::OMIT`].
    pub times: Option<(Timestamp, Timestamp)>,
}

/// The result of [`OpenFile::read`].
#[derive(Debug)]
pub enum ReadOutcome {
    /// The bytes read: fewer than requested only at the end of the file, and none at or beyond it.
    Ready(Aggregate),
    /// The read would wait for a device. Repeat it with `wait` set, on a thread that may block.
    WouldBlock,
}

/// The result of [`FileStore::read_path`].
pub enum PathRead {
    /// The bytes read, as in [`ReadOutcome::Ready`], and what was opened for it, if it has to be closed.
    Ready(Aggregate, Option<Closing>),
    /// The read would wait for a device. Repeat it with this open file, on a thread that may block.
    WouldBlock(Arc<dyn OpenFile>),
}

impl PathRead {
    /// Reads from the start of a file that was opened for it.
    pub(crate) fn of(file: Arc<dyn OpenFile>, length: usize) -> Result<Self, Errno> {
        Ok(match file.read(0, length, false)? {
            ReadOutcome::Ready(data) => Self::Ready(data, Some(Closing::File(file))),
            ReadOutcome::WouldBlock => Self::WouldBlock(file),
        })
    }
}

/// What was opened only to be read. Dropping it closes it, which takes as long as a small request.
pub enum Closing {
    /// The file, opened as [`FileStore::open`] does.
    File(Arc<dyn OpenFile>),
    /// The file, of which nothing but this is known.
    Descriptor(OwnedFd),
}

/// Receives directory entries.
pub trait Listing {
    /// Returns whether attributes should say which files have no extended attributes
    /// (`attr_flag::NO_XATTRS`), even where finding out is expensive.
    fn wants_xattrs(&self) -> bool {
        false
    }

    /// Takes one entry. `attr` is present if attributes were requested and could be read. Returns
    /// false if there is no room for the entry; the listing then ends before it.
    fn entry(
        &mut self,
        cookie: u64,
        inode: u64,
        file_type: u8,
        name: &[u8],
        attr: Option<Attr>,
    ) -> bool;
}

/// An operation on the extended attributes of a file.
#[derive(Clone, Copy, Debug)]
pub enum XattrAction<'a> {
    /// Returns the value of the named attribute.
    Get(&'a [u8]),
    /// Returns the names, each terminated by a zero byte.
    List,
    /// Sets the named attribute to a value. Flags: `XATTR_CREATE` 1, `XATTR_REPLACE` 2, or zero.
    Set(&'a [u8], &'a [u8], u32),
    /// Removes the named attribute.
    Remove(&'a [u8]),
}

/// Freeing more than this much of a file takes long: the pages in memory are freed at some 2 GiB/s.
pub const FREED_BYTES_MAX: u64 = 16 << 20;

/// What is left of a file whose last name is gone. Dropping it frees what the file occupied, unless somebody
/// has it open.
pub type Remains = Box<dyn Any + Send>;

/// An open directory of the same store and a path that starts there. An empty path names the open
/// file itself, whatever its type.
pub type Source<'a> = (&'a dyn OpenFile, &'a [u8]);

/// Returns a path without the slashes at its end.
#[must_use]
pub fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

/// A tree of files.
///
/// Paths are bytes. They are resolved below the root of the store, whatever `..` and symbolic links
/// they contain: a path that would leave the store fails with `EXDEV`.
///
/// Calls that create a name return the attributes of what they created. If another process removes
/// it at once, these are all zero.
pub trait FileStore: Send + Sync {
    /// Opens the root directory as with `O_PATH | O_DIRECTORY`, so it need not be readable.
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno>;

    /// Returns a store of its own for the directory at `path` (from the root) and everything below
    /// it: the same files, but a path that would leave the directory fails with `EXDEV`. Calls for
    /// the same directory return the same store as long as someone holds it.
    ///
    /// # Errors
    /// As `openat(2)` with `O_PATH` and `O_DIRECTORY`.
    fn below(&self, caller: &Caller, path: &[u8]) -> Result<Arc<dyn FileStore>, Errno>;

    /// Returns the store of whose files these are a part ([`FileStore::below`]); `None` if this is it.
    fn whole(&self) -> Option<Arc<dyn FileStore>> {
        None
    }

    /// `openat(2)`: opens or creates a file, and also returns its attributes.
    fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno>;

    /// Opens a file with these flags, as [`FileStore::open`], and reads from its start, as [`OpenFile::read`]
    /// without waiting. Nothing else can be known of it, which saves finding that out.
    fn read_path(
        &self,
        caller: &Caller,
        at: Source<'_>,
        flags: u32,
        length: usize,
    ) -> Result<PathRead, Errno> {
        let (file, _) = self.open(caller, at, OpenHow { flags, mode: 0 })?;
        PathRead::of(file, length)
    }

    /// Takes over a file of this store that another server had opened as `how` says, and also returns its
    /// attributes.
    ///
    /// # Errors
    /// `ESTALE` if it was opened otherwise, or if the store has no such files.
    fn adopt(
        &self,
        caller: &Caller,
        fd: OwnedFd,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let _ = (caller, fd, how);
        Err(Errno::ESTALE)
    }

    /// `fstatat(2)`.
    fn stat(&self, caller: &Caller, at: Source<'_>, follow: bool) -> Result<Attr, Errno>;

    /// Changes attributes and returns the new ones.
    fn set_attr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno>;

    /// `faccessat(2)` with the caller's effective identity.
    fn access(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<(), Errno>;

    /// `mkdirat(2)`.
    fn make_directory(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<Attr, Errno>;

    /// `mknodat(2)`. `mode` has the type and permission bits.
    fn make_node(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno>;

    /// `symlinkat(2)`.
    fn symlink(&self, caller: &Caller, at: Source<'_>, target: &[u8]) -> Result<Attr, Errno>;

    /// `readlinkat(2)`.
    fn read_link(&self, caller: &Caller, at: Source<'_>) -> Result<Vec<u8>, Errno>;

    /// `linkat(2)`. With an empty source path, links the open file, even one opened with
    /// `O_TMPFILE`.
    fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno>;

    /// `unlinkat(2)`. `directory` stands for `AT_REMOVEDIR`. Returns what is left of the file if dropping that
    /// takes long.
    fn unlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        directory: bool,
    ) -> Result<Option<Remains>, Errno>;

    /// `renameat2(2)`; flags as [`towline_wire::request::rename_flag`]. Returns what is left of the file that was
    /// replaced if dropping that takes long.
    fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<Option<Remains>, Errno>;

    /// `getxattr(2)` and related calls. Returns the value or the names, and nothing for changes.
    fn xattr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno>;

    /// `copy_file_range(2)` between two open files of this store. Returns the number of bytes
    /// copied.
    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno>;

    /// `fstatfs(2)` of an open file: other file systems may be mounted below the root.
    fn stat_fs(&self, file: &dyn OpenFile) -> Result<StatFs, Errno>;

    /// `syncfs(2)` of an open file.
    fn sync(&self, file: &dyn OpenFile) -> Result<(), Errno>;

    /// Returns true if a call on this store may wait for a device, so that `sync`, waiting reads, and what frees
    /// more than [`FREED_BYTES_MAX`] belong on threads that may block.
    fn may_block(&self) -> bool;

    /// Returns true if any call on this store, or dropping one of its files, may wait forever
    /// because it asks another machine or another process. All of these then belong on threads that
    /// may block, and reads never refer to pages of files.
    fn may_hang(&self) -> bool {
        false
    }

    /// Checks whether [`FileStore::may_hang`] has become true because of a mount, and if so returns
    /// the type of the file system responsible. Call it after anything was mounted or unmounted.
    fn look_at_mounts(&self) -> Option<String> {
        None
    }

    /// Returns true if the files survive when the server is killed and restarted.
    fn survives_restart(&self) -> bool;
}

/// An open file, directory or `O_PATH` handle. Access is checked at open: reading a file that is
/// not open for reading, or writing one that is not open for writing, fails with `EBADF`.
pub trait OpenFile: Send + Sync + Any {
    /// Lets stores find their own type again.
    fn as_any(&self) -> &dyn Any;

    /// `fstat(2)`.
    fn stat(&self) -> Result<Attr, Errno>;

    /// Reads bytes at `offset`, without copying where the store can. If `wait` is false, the call
    /// does not wait for a device.
    fn read(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno>;

    /// Writes all of `data` at `offset`, or at the end with `append` (atomic with respect to other
    /// appends). Returns the number of bytes written and the offset of the first one. It writes
    /// fewer than all only if space runs out part-way.
    fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<(usize, u64), Errno>;

    /// Lists a directory from `cookie` on (zero: from the start). Returns true if it reached the
    /// end.
    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno>;

    /// `fdatasync(2)`, or `fsync(2)` with `full`.
    fn sync(&self, full: bool) -> Result<(), Errno>;

    /// Returns what `close(2)` would report. Some file systems, such as NFS and many of FUSE, say only then that
    /// they could not store what was written. Attributes of their files have
    /// [`SETTLES`](towline_wire::attr::attr_flag::SETTLES). The file stays open.
    fn settle(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// `fallocate(2)` with the modes zero, `KEEP_SIZE` 1, `PUNCH_HOLE|KEEP_SIZE` 3 and `ZERO_RANGE`
    /// 16 (also with `KEEP_SIZE`). Others fail with `EOPNOTSUPP`.
    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno>;

    /// `lseek(2)` with `SEEK_DATA` 3 or `SEEK_HOLE` 4.
    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno>;

    /// Returns the current path of this open file from the root of its store, without links; `.`
    /// for the root itself. Anything but a directory keeps the name that it was opened by, followed
    /// by ` (deleted)` once that name is removed, as in `/proc/self/fd`. `ENOTDIR` if the store
    /// does not know the path, `ENOENT` for a directory that was removed, `EXDEV` for a file that
    /// has left the store.
    fn path(&self) -> Result<Vec<u8>, Errno>;

    /// Reports to `witness` what happens from now on to this file, or to the entries of this
    /// directory. `mask` has the bits of [`towline_wire::event`] to report; `DELETE_SELF` and
    /// `IGNORED` are always reported. Works for files opened with `O_PATH`, too.
    ///
    /// A file that has already lost its last name is not reported: check its number of links after
    /// this call. Events from a moment before may be reported. The store checks whether the caller
    /// may read the file, as `inotify_add_watch(2)` requires, only as far as it knows who opened
    /// it; `memory` does not.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the store cannot report changes, `ENOSPC` if the user has reached the limit
    /// of watches.
    fn watch(&self, mask: u32, witness: Arc<dyn Witness>) -> Result<Box<dyn Watch>, Errno> {
        let _ = (mask, witness);
        Err(Errno::EOPNOTSUPP)
    }

    /// Returns the descriptor by which [`FileStore::adopt`] makes another server go on with this file, if the
    /// store can do that.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Identifies the inode: two open files of a store are the same file if these values are equal.
    fn identity(&self) -> (u64, u64);
}
