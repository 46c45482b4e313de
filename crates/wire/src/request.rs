//! Operations of a client; the body of a request holds one to sixteen of them, in order.
//!
//! `base` is the handle of an open directory, or of any open file if the path is empty.
//! [`CURRENT`] stands for the file that the last `Attach` or `Open` of the same compound opened.
//! Flags, modes and error numbers are those of Linux on x86-64. Names are bytes.

mod compound;
mod effects;
mod flags;

use crate::attr::Timestamp;
use crate::codec::messages;
pub use compound::*;
pub use flags::*;

/// Handle of the file that was opened last in the same compound.
pub const CURRENT: u64 = u64::MAX;

/// Position of the caller's umask (nine bits) in the `mode` of a new file. The server applies the umask,
/// because it has no effect in directories with a default access control list.
pub const UMASK_SHIFT: u32 = 16;

/// Returns the type and permission bits of a new file, without the bits of the umask.
#[must_use]
pub const fn masked(mode: u32) -> u32 {
    mode & 0xffff & !(mode >> UMASK_SHIFT & 0o777)
}

messages! {
    /// One operation of a compound.
    pub enum Request<'a> {
        /// Opens the root of an export, or a directory in it as the root: no path then leads out of
        /// that directory, not even through `..` or symbolic links.
        1 Attach {
            /// Name of the export; or for a directory, that name, a slash and the path from its root.
            name: &'a [u8],
        }
        /// `openat(2)`; the result contains the attributes.
        2 Open {
            /// Directory.
            base: u64,
            /// `O_*` of Linux on x86-64.
            flags: u32,
            /// Permission bits for a new file, and the umask ([`UMASK_SHIFT`]).
            mode: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `close(2)`.
        3 Close {
            /// Open file.
            handle: u64,
        }
        /// `fstatat(2)`.
        4 Stat {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `chmod`, `chown`, `truncate` and `utimensat` in one.
        5 SetAttr {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// Which fields to set: bits of [`valid`].
            valid: u32,
            /// Permission bits.
            mode: u32,
            /// Owner.
            uid: u32,
            /// Group.
            gid: u32,
            /// Length.
            size: u64,
            /// Access time.
            accessed: Timestamp,
            /// Modification time.
            modified: Timestamp,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `pread(2)`; the reply's payload and data messages hold the bytes. At most one in a compound.
        6 Read {
            /// Open file.
            handle: u64,
            /// First byte.
            offset: u64,
            /// Most bytes to read.
            length: u32,
        }
        /// `pwrite(2)` of the request's payload or offered transfer. At most one in a compound.
        7 Write {
            /// Open file.
            handle: u64,
            /// First byte.
            offset: u64,
            /// Length in bytes: that of the payload or of the offer.
            length: u32,
            /// Bits of [`write_flag`].
            flags: u32,
        }
        /// Lists a directory; the reply's payload holds the entries as in [`crate::entry`].
        8 ReadDir {
            /// Open directory.
            handle: u64,
            /// Where to start: zero, or the cookie of the last entry seen.
            cookie: u64,
            /// Most bytes of entries.
            length: u32,
            /// Bits of [`listed`].
            attributes: u8,
        }
        /// `mkdirat(2)`.
        9 MakeDir {
            /// Directory.
            base: u64,
            /// Permission bits, and the umask ([`UMASK_SHIFT`]).
            mode: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `mknodat(2)`.
        10 MakeNode {
            /// Directory.
            base: u64,
            /// Type and permission bits, and the umask ([`UMASK_SHIFT`]).
            mode: u32,
            /// Device number.
            rdev: u64,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `symlinkat(2)`.
        11 Symlink {
            /// Directory.
            base: u64,
            /// Path of the new link.
            path: &'a [u8],
            /// Path that the link points to.
            target: &'a [u8],
        }
        /// `readlinkat(2)`.
        12 ReadLink {
            /// Directory.
            base: u64,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `linkat(2)`.
        13 Link {
            /// Directory of the source, or the open file with an empty path.
            base: u64,
            /// [`FOLLOW`] or zero.
            flags: u32,
            /// Source.
            path: &'a [u8],
            /// Directory of the new name.
            new_base: u64,
            /// New name.
            new_path: &'a [u8],
        }
        /// `unlinkat(2)`.
        14 Unlink {
            /// Directory.
            base: u64,
            /// [`DIRECTORY`] or zero.
            flags: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `renameat2(2)`.
        15 Rename {
            /// Directory of the old name.
            base: u64,
            /// Bits of [`rename_flag`].
            flags: u32,
            /// Old name.
            path: &'a [u8],
            /// Directory of the new name.
            new_base: u64,
            /// New name.
            new_path: &'a [u8],
        }
        /// `fstatfs(2)`.
        16 StatFs {
            /// Any open file.
            handle: u64,
        }
        /// `fsync(2)`, `fdatasync(2)` or `syncfs(2)`.
        17 Sync {
            /// Open file.
            handle: u64,
            /// One of [`sync_kind`].
            kind: u32,
        }
        /// `fallocate(2)`.
        18 Allocate {
            /// Open file.
            handle: u64,
            /// `FALLOC_FL_*` of Linux.
            mode: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u64,
        }
        /// `lseek(2)` for data and holes.
        19 Seek {
            /// Open file.
            handle: u64,
            /// Where to start.
            offset: u64,
            /// One of [`whence`].
            whence: u32,
        }
        /// `copy_file_range(2)` inside the server.
        20 CopyRange {
            /// Source, an open file.
            handle: u64,
            /// Offset in the source.
            offset: u64,
            /// Target, an open file.
            new_handle: u64,
            /// Offset in the target.
            new_offset: u64,
            /// Most bytes to copy.
            length: u64,
        }
        /// `getxattr(2)`; the value is in the result.
        21 GetXattr {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// Path from `base`.
            path: &'a [u8],
            /// Attribute.
            name: &'a [u8],
        }
        /// `setxattr(2)`.
        22 SetXattr {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// `XATTR_CREATE` (1), `XATTR_REPLACE` (2) or zero.
            how: u32,
            /// Path from `base`.
            path: &'a [u8],
            /// Attribute.
            name: &'a [u8],
            /// Value.
            value: &'a [u8],
        }
        /// `listxattr(2)`: names, each ended by a zero byte.
        23 ListXattr {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// `removexattr(2)`.
        24 RemoveXattr {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// [`NO_FOLLOW`] or zero.
            flags: u32,
            /// Path from `base`.
            path: &'a [u8],
            /// Attribute.
            name: &'a [u8],
        }
        /// `fcntl` locks and `flock(2)`. The server answers a waiting request when it grants the lock.
        25 Lock {
            /// Open file.
            handle: u64,
            /// Identifies the process for [`lock::PROCESS`]; else ignored.
            owner: u64,
            /// Family.
            family: u8,
            /// Shared, exclusive or unlock.
            kind: u8,
            /// [`lock::TRY`], [`lock::WAIT`] or [`lock::AGAIN`].
            wait: u8,
            /// First byte.
            start: u64,
            /// Length in bytes; zero: to the end, wherever that is.
            length: u64,
        }
        /// `fcntl` F_GETLK: asks which lock would conflict.
        26 TestLock {
            /// Open file.
            handle: u64,
            /// As in `Lock`.
            owner: u64,
            /// As in `Lock`.
            family: u8,
            /// As in `Lock`.
            kind: u8,
            /// First byte.
            start: u64,
            /// Length in bytes; zero: to the end.
            length: u64,
        }
        /// `faccessat(2)`.
        27 Access {
            /// Directory, or the file itself with an empty path.
            base: u64,
            /// `R_OK` (4), `W_OK` (2), `X_OK` (1), or zero for existence.
            mode: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
        /// Asks for the names of the exports, each ended by a zero byte, or the server's counters as JSON.
        /// The reply's payload holds them.
        28 Inquire {
            /// Zero: exports. One: statistics.
            what: u32,
        }
        /// After a restart of the server, opens a file again under the handle it had before. Neither
        /// creates nor truncates it. Fails with `ESTALE` if it is not the same file.
        29 Reclaim {
            /// Handle that the file had.
            handle: u64,
            /// `O_*` flags that the file was opened with.
            flags: u32,
            /// [`crate::Attr::identity`] that the file had.
            inode: u64,
            /// Export of the file, as named by [`Request::Attach`].
            export: &'a [u8],
            /// Path from the attached root.
            path: &'a [u8],
        }
        /// After a restart of a server that remembers the session: the client has finished opening and
        /// locking its files again. Comes before any request that was under way.
        30 Reclaimed {}
        /// Asks for name and description of disks, each ended by a zero byte: as many as fit. The
        /// result is empty after the last disk.
        31 DiskList {
            /// Number of disks to skip, because the client knows them already.
            skip: u32,
        }
        /// Opens a disk under a number that the client chooses, a different one for each disk. A disk may
        /// be opened again under its number.
        32 DiskOpen {
            /// Number of the disk.
            disk: u32,
            /// Name of the disk.
            name: &'a [u8],
        }
        /// Closes a disk.
        33 DiskClose {
            /// Number of the disk.
            disk: u32,
        }
        /// Asks for the current properties of a disk.
        34 DiskInfo {
            /// Number of the disk.
            disk: u32,
        }
        /// Reads a whole range; its fragments arrive in any order.
        35 DiskRead {
            /// Number of the disk.
            disk: u32,
            /// [`crate::disk::disk_flag::CHECKSUMS`] or zero.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u32,
        }
        /// Writes all of the request's payload or offered transfer.
        36 DiskWrite {
            /// Number of the disk.
            disk: u32,
            /// Bits of [`crate::disk::disk_flag`]: `DURABLE`, `CHECKSUMS`.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes: that of the payload or of the offer.
            length: u32,
            /// Checksums of all the data if the flags say so; else empty.
            checksums: &'a [u8],
        }
        /// Brings all writes of any client that were answered before to stable storage.
        37 DiskFlush {
            /// Number of the disk.
            disk: u32,
        }
        /// Makes a range read as zeroes.
        38 DiskZero {
            /// Number of the disk.
            disk: u32,
            /// Bits of [`crate::disk::disk_flag`]: `DURABLE`, `ALLOCATE`, `FAST`.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u64,
        }
        /// Says that the contents of a range are no longer needed.
        39 DiskTrim {
            /// Number of the disk.
            disk: u32,
            /// [`crate::disk::disk_flag::DURABLE`] or zero.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u64,
        }
        /// Asks for extents from the start of a range, at least one. Adjacent extents differ in their flags.
        40 DiskStatus {
            /// Number of the disk.
            disk: u32,
            /// One of [`crate::disk::extent_kind`].
            kind: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u64,
            /// Most extents to return; [`crate::disk::EXTENTS_MAX`] also applies.
            most: u32,
        }
        /// Brings a range into the server's memory, if it has a cache.
        41 DiskCache {
            /// Number of the disk.
            disk: u32,
            /// First byte.
            offset: u64,
            /// Length in bytes.
            length: u64,
        }
        /// Changes the size of a disk; zero takes over the size that its back end has.
        42 DiskResize {
            /// Number of the disk.
            disk: u32,
            /// New size in bytes.
            size: u64,
        }
        /// Asks for the current path of an open file, from the root of its export and without links.
        43 PathOf {
            /// Directory; any other file keeps the name by which it was opened.
            handle: u64,
        }
        /// Releases the locks of a process of the session or family that has ended, after everything is carried
        /// out that it has sent in sessions of its own ([`crate::Hello::process`]). It is the only operation of
        /// its compound.
        44 ProcessEnded {
            /// As in `Lock`.
            owner: u64,
        }
        /// Watches an open file until it is closed, as `inotify_add_watch(2)` does with `IN_MASK_ADD`. The
        /// server reports the events to the client of the session or family that asks for `Events`. The
        /// result is the number of the first event that no client has seen.
        45 Watch {
            /// Open file or directory, also one opened with `O_PATH`.
            handle: u64,
            /// Bits of [`crate::event::ALL`].
            mask: u32,
        }
        /// Waits for events of watched files; the reply's payload holds them as in [`crate::event`]. Only
        /// one such request of a session or family waits: a new one ends the one before, which gets an
        /// empty reply. It is the only operation of its compound.
        46 Events {
            /// `next` of the last reply: the server forgets the events before it. Zero if the client has no
            /// number yet, from a reply or from `Watch`; the server then answers at once.
            seen: u64,
        }
        /// Writes parts of a file from the request's payload, in the order of the list, as far as they lie
        /// within the file, which does not grow. Counts as the compound's `Write`; its data is not offered.
        /// If it fails, some parts may have been written.
        47 WriteParts {
            /// Open file.
            handle: u64,
            /// [`crate::parts::Part`]s; together they are as long as the payload.
            parts: &'a [u8],
        }
        /// Says whether an open file is closed at the end of this session although its family goes on. At first
        /// no file is. So nothing is left of what was opened for a process that has ended before it took it.
        48 Bind {
            /// Open file.
            handle: u64,
            /// Nonzero: it is closed then. Zero: not, whichever session has said so.
            bound: u8,
        }
        /// Says which process has got a session of the family that began without one: its requests come before
        /// a `ProcessEnded` that follows in the session of this request. Fails with `EBUSY` if the session is
        /// another process's.
        49 HandOver {
            /// Number of the session.
            session: u64,
            /// Its secret.
            secret: u64,
            /// The process, by its number as an owner of locks; not zero.
            process: u64,
        }
        /// `openat(2)`, `pread(2)` from the start and `close(2)` in one: reads a file of which nothing else is
        /// wanted. Counts as the compound's `Read`, and is answered like it.
        50 ReadPath {
            /// Directory.
            base: u64,
            /// `O_*` of Linux on x86-64. `EINVAL` with any that can change something ([`open_flag::alters`]).
            flags: u32,
            /// Most bytes to read.
            length: u32,
            /// Path from `base`.
            path: &'a [u8],
        }
    }
}
