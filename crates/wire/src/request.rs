//! Operations that a client asks for; a request's body is one to sixteen of them, in order.
//!
//! `base` is the handle of an open directory (or, with an empty path, of any open file);
//! [`CURRENT`] stands for what the last `Attach` or `Open` of the same compound opened. Flags,
//! modes and error numbers are those of Linux on x86-64. Names are bytes.

mod compound;
mod effects;
mod flags;

use crate::attr::Timestamp;
use crate::codec::messages;
pub use compound::*;
pub use flags::*;

/// Handle that stands for the file opened last in the same compound.
pub const CURRENT: u64 = u64::MAX;

/// How far left of the permission bits of something new the umask of its maker stands (nine bits). What the umask takes away is
/// taken by the server, since it does not count in directories that hand down an access control list.
pub const UMASK_SHIFT: u32 = 16;

/// The type and permission bits of something new, without what the umask takes away.
#[must_use]
pub const fn masked(mode: u32) -> u32 {
    mode & 0xffff & !(mode >> UMASK_SHIFT & 0o777)
}

messages! {
    /// One operation of a compound.
    pub enum Request<'a> {
        /// Opens the root of an export, or a directory in it as the root: no path then leads out of that
        /// directory, whatever `..` and symbolic links it has.
        1 Attach {
            /// Name of the export; with a slash and a path from its root behind it, that directory.
            name: &'a [u8],
        }
        /// `openat(2)`; the result carries the attributes.
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
        /// `pread(2)`; the bytes are the payload. At most one in a compound.
        6 Read {
            /// Open file.
            handle: u64,
            /// From here.
            offset: u64,
            /// At most so many bytes.
            length: u32,
        }
        /// `pwrite(2)` of the request's payload or offered transfer. At most one in a compound.
        7 Write {
            /// Open file.
            handle: u64,
            /// To here.
            offset: u64,
            /// So many bytes: those of the payload or of the offer.
            length: u32,
            /// Bits of [`write_flag`].
            flags: u32,
        }
        /// Directory entries with attributes; the payload holds them as [`crate::entry`] says.
        8 ReadDir {
            /// Open directory.
            handle: u64,
            /// Where to go on: zero, or the cookie of the last entry seen.
            cookie: u64,
            /// At most so many bytes of entries.
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
            /// What it points to.
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
            /// `RENAME_*` of Linux.
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
        /// `fsync(2)` and its kin.
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
            /// From here.
            offset: u64,
            /// So many bytes.
            length: u64,
        }
        /// `lseek(2)` for data and holes.
        19 Seek {
            /// Open file.
            handle: u64,
            /// From here.
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
            /// At most so many bytes.
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
        /// `fcntl` locks and `flock(2)`. A waiting request is answered when the lock is granted.
        25 Lock {
            /// Open file.
            handle: u64,
            /// Names the process for [`lock::PROCESS`]; else ignored.
            owner: u64,
            /// Family.
            family: u8,
            /// Shared, exclusive or unlock.
            kind: u8,
            /// One: wait until it can be granted.
            wait: u8,
            /// First byte.
            start: u64,
            /// Bytes; zero: to the end, however far.
            length: u64,
        }
        /// `fcntl` F_GETLK: which lock would be in the way.
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
            /// Bytes; zero: to the end.
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
        /// Names of the exports, each ended by a zero byte; or, with `what` one, the server's
        /// counters as JSON. The payload carries them.
        28 Inquire {
            /// Zero: exports. One: statistics.
            what: u32,
        }
        /// Opens again, after a restart of the server, the file that was open before, under the
        /// same handle. No creation or truncation; `ESTALE` unless it is the same file.
        29 Reclaim {
            /// Handle it had.
            handle: u64,
            /// `O_*` it was opened with.
            flags: u32,
            /// [`crate::Attr::identity`] it had.
            inode: u64,
            /// Export it is in, as [`Request::Attach`] named it.
            export: &'a [u8],
            /// Path from the root that was attached.
            path: &'a [u8],
        }
        /// After a restart of a server that remembered the session: all is opened and locked again
        /// that shall be. Comes before any request that was under way.
        30 Reclaimed {}
        /// Name and description of disks, each ended by a zero byte: as many as fit, none behind the last.
        31 DiskList {
            /// How many to leave out, which were told before.
            skip: u32,
        }
        /// Opens a disk under a number that the client chooses, each number for one disk only. The
        /// same disk may be opened again under its number.
        32 DiskOpen {
            /// Number.
            disk: u32,
            /// Name.
            name: &'a [u8],
        }
        /// Closes a disk.
        33 DiskClose {
            /// Number.
            disk: u32,
        }
        /// What a disk is like now.
        34 DiskInfo {
            /// Number.
            disk: u32,
        }
        /// Reads all of a range; its fragments come in any order.
        35 DiskRead {
            /// Number.
            disk: u32,
            /// [`crate::disk::disk_flag::CHECKSUMS`] or zero.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Bytes.
            length: u32,
        }
        /// Writes all of the request's payload or offered transfer.
        36 DiskWrite {
            /// Number.
            disk: u32,
            /// Bits of [`crate::disk::disk_flag`]: `DURABLE`, `CHECKSUMS`.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Bytes: those of the payload or of the offer.
            length: u32,
            /// Of all the data, if the flags say so; else empty.
            checksums: &'a [u8],
        }
        /// What was written before, by anybody who was told so, is on stable storage.
        37 DiskFlush {
            /// Number.
            disk: u32,
        }
        /// A range reads as zeroes afterwards.
        38 DiskZero {
            /// Number.
            disk: u32,
            /// Bits of [`crate::disk::disk_flag`]: `DURABLE`, `ALLOCATE`, `FAST`.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Bytes.
            length: u64,
        }
        /// The contents of a range are no longer needed.
        39 DiskTrim {
            /// Number.
            disk: u32,
            /// [`crate::disk::disk_flag::DURABLE`] or zero.
            flags: u32,
            /// First byte.
            offset: u64,
            /// Bytes.
            length: u64,
        }
        /// Extents of the first bytes of a range, at least one; neighbours differ.
        40 DiskStatus {
            /// Number.
            disk: u32,
            /// One of [`crate::disk::extent_kind`].
            kind: u32,
            /// First byte.
            offset: u64,
            /// Bytes.
            length: u64,
            /// At most so many, and at most [`crate::disk::EXTENTS_MAX`].
            most: u32,
        }
        /// Brings a range into the server's memory, if it has a cache.
        41 DiskCache {
            /// Number.
            disk: u32,
            /// First byte.
            offset: u64,
            /// Bytes.
            length: u64,
        }
        /// Makes a disk so many bytes long; zero: as long as what is behind it has become.
        42 DiskResize {
            /// Number.
            disk: u32,
            /// Bytes.
            size: u64,
        }
        /// The path that leads to an open file now, from the root of its export and without links.
        43 PathOf {
            /// Directory, or anything else, which keeps the name that it was opened by.
            handle: u64,
        }
        /// A process of the session, or of its family, has ended: its locks are given back.
        44 ProcessEnded {
            /// As in `Lock`.
            owner: u64,
        }
        /// Watches an open file as `inotify_add_watch(2)` does with `IN_MASK_ADD`, until it is closed. What happens is told to whoever of the
        /// session, or of its family, asks for `Events`. The result is the number of the first event that nobody was told of and has seen.
        45 Watch {
            /// Open file or directory, also of `O_PATH`.
            handle: u64,
            /// Bits of [`crate::event`] up to `ALL`.
            mask: u32,
        }
        /// What has happened to watched files; the payload holds it as [`crate::event`] says. Answered when something has. Only one such
        /// request of a session or a family waits: the one before is answered with nothing. Stands alone in its compound.
        46 Events {
            /// `next` of the last answer: what was told up to there is forgotten. Zero of who has no number yet, neither from an answer nor
            /// from `Watch`, and is answered at once with what there is.
            seen: u64,
        }
    }
}
