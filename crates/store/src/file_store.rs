//! The traits of a tree of files.

use crate::{Watch, Witness};
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_wire::{Attr, Errno, StatFs, Timestamp};

/// On whose behalf an operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Further groups.
    pub groups: Arc<[u32]>,
    /// True when the server shall act as this user; false: as the user who runs the server, and
    /// then permission checks of the memory store are those of a single owner who may do all.
    pub enforce: bool,
}

/// How to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenHow {
    /// `O_*` of Linux; `O_CLOEXEC`, `O_NONBLOCK` and unknown bits are ignored, and so is `O_APPEND`,
    /// as each write says whether it appends.
    pub flags: u32,
    /// Permission bits of a new file, and the client's umask ([`towline_wire::request::UMASK_SHIFT`]).
    pub mode: u32,
}

/// Attributes to change; `None` leaves one as it is.
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

/// What [`OpenFile::read`] found.
#[derive(Debug)]
pub enum ReadOutcome {
    /// The bytes: fewer than asked only at the end of the file, none at or behind it.
    Ready(Aggregate),
    /// The read would wait for a device: read again with `wait` on a thread that may block.
    WouldBlock,
}

/// Receives directory entries.
pub trait Listing {
    /// Whether attributes shall say which files have no extended ones, where that costs something
    /// to find out (`attr_flag::NO_XATTRS`).
    fn wants_xattrs(&self) -> bool {
        false
    }

    /// Takes one entry; `attr` is present when attributes were asked for and could be had.
    /// Returns false when there is no room for it: the listing then ends before this entry.
    fn entry(
        &mut self,
        cookie: u64,
        inode: u64,
        file_type: u8,
        name: &[u8],
        attr: Option<Attr>,
    ) -> bool;
}

/// What to do with extended attributes.
#[derive(Clone, Copy, Debug)]
pub enum XattrAction<'a> {
    /// Value of the named one.
    Get(&'a [u8]),
    /// Names, each ended by a zero byte.
    List,
    /// Sets a value; flags: `XATTR_CREATE` 1, `XATTR_REPLACE` 2, or zero.
    Set(&'a [u8], &'a [u8], u32),
    /// Removes one.
    Remove(&'a [u8]),
}

/// Where a path starts: an open directory of the same store. With an empty path it names that
/// open file itself, of whatever type.
pub type Source<'a> = (&'a dyn OpenFile, &'a [u8]);

/// A tree of files.
///
/// Paths are bytes; they are resolved below the root of the store, whatever `..` and symbolic links
/// they contain: a path that would leave it fails with `EXDEV`.
pub trait FileStore: Send + Sync {
    /// Opens the root directory (as with `O_PATH | O_DIRECTORY`: it need not be readable).
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno>;

    /// The directory at `path` from the root, and what is below it, as a store of its own: the same
    /// files, but a path that would leave that directory fails with `EXDEV`. While somebody has such a
    /// store, whoever asks for the same directory gets the same one.
    ///
    /// # Errors
    /// As `openat(2)` with `O_PATH` and `O_DIRECTORY`.
    fn below(&self, caller: &Caller, path: &[u8]) -> Result<Arc<dyn FileStore>, Errno>;

    /// `openat(2)`: opens or creates, and tells the attributes of what was opened.
    fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno>;

    /// `fstatat(2)`.
    fn stat(&self, caller: &Caller, at: Source<'_>, follow: bool) -> Result<Attr, Errno>;

    /// Changes attributes and tells the new ones.
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

    /// `mknodat(2)`; `mode` has type and permission bits.
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

    /// `linkat(2)`; with an empty source path links the open file (also one of `O_TMPFILE`).
    fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno>;

    /// `unlinkat(2)`; `directory`: as with `AT_REMOVEDIR`.
    fn unlink(&self, caller: &Caller, at: Source<'_>, directory: bool) -> Result<(), Errno>;

    /// `renameat2(2)`; flags `RENAME_NOREPLACE` 1, `RENAME_EXCHANGE` 2.
    fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<(), Errno>;

    /// `getxattr(2)` and its kin; returns the value or the names, empty for changes.
    fn xattr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno>;

    /// `copy_file_range(2)` between two open files of this store; returns bytes copied.
    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno>;

    /// `statfs(2)`.
    fn stat_fs(&self) -> Result<StatFs, Errno>;

    /// `syncfs(2)`.
    fn sync(&self) -> Result<(), Errno>;

    /// True when a call on this store may wait for a device, so that `sync` and waiting reads
    /// belong on threads that may block.
    fn may_block(&self) -> bool;

    /// True when any call on this store, and dropping one of its files, may wait without end, since
    /// it asks another machine or another process. Then all of that belongs on threads that may
    /// block, and reads never refer to pages of files.
    fn may_hang(&self) -> bool {
        false
    }

    /// To be called when something was mounted or unmounted somewhere: looks whether
    /// [`FileStore::may_hang`] has become true by that, and tells because of which type of file
    /// system.
    fn look_at_mounts(&self) -> Option<String> {
        None
    }

    /// True when the files are still there after the server was killed and started again.
    fn survives_restart(&self) -> bool;
}

/// An open file, directory or `O_PATH` handle. Access is checked when it is opened: reading one
/// not open for reading, or writing one not open for writing, fails with `EBADF`.
pub trait OpenFile: Send + Sync + std::any::Any {
    /// For stores to find their own type again.
    fn as_any(&self) -> &dyn std::any::Any;

    /// `fstat(2)`.
    fn stat(&self) -> Result<Attr, Errno>;

    /// Bytes at `offset`, without copying where the store can. With `wait` false it must not wait
    /// for a device.
    fn read(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno>;

    /// Writes all of `data` at `offset`, or at the end with `append` (atomically with regard to
    /// other appends); returns the bytes written and where they begin. Fewer than all only when
    /// space ran out after some.
    fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<(usize, u64), Errno>;

    /// Lists a directory from `cookie` on (zero: from the start). True: the end was reached.
    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno>;

    /// `fdatasync(2)`, or `fsync(2)` with `full`.
    fn sync(&self, full: bool) -> Result<(), Errno>;

    /// `fallocate(2)`: modes zero, `KEEP_SIZE` 1, `PUNCH_HOLE|KEEP_SIZE` 3, `ZERO_RANGE` 16 (also
    /// with `KEEP_SIZE`); others `EOPNOTSUPP`.
    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno>;

    /// `lseek(2)` with `SEEK_DATA` 3 or `SEEK_HOLE` 4.
    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno>;

    /// The path that leads to this open file now, from the root of its store and without links; `.` for the
    /// root itself. Anything but a directory keeps the name that it was opened by, followed by ` (deleted)` when that was
    /// removed, as in `/proc/self/fd`; where a store does not know it `ENOTDIR`. `ENOENT` for a directory that was removed, `EXDEV`
    /// for what has left the store.
    fn path(&self) -> Result<Vec<u8>, Errno>;

    /// Has `witness` told what happens to this file, or to the entries of this directory, from now on: `mask` has bits of
    /// [`towline_wire::event`] that it wants to hear of; `DELETE_SELF` and `IGNORED` are told in any case. Works for what was opened with `O_PATH`, too.
    ///
    /// That a file has no name any more when this is called is not told: look at its number of links after that. What happened a
    /// moment before may be told. Whether the caller may read the file, which `inotify_add_watch(2)` asks for, is looked at as far as the store knows who opened it:
    /// `memory` does not.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the store cannot tell, `ENOSPC` where the user may watch no more.
    fn watch(&self, mask: u32, witness: Arc<dyn Witness>) -> Result<Box<dyn Watch>, Errno> {
        let _ = (mask, witness);
        Err(Errno::EOPNOTSUPP)
    }

    /// Names this inode: two open files of a store are the same file when these are equal.
    fn identity(&self) -> (u64, u64);
}
