//! Attributes of files and of file systems, as fixed structures.

use crate::codec::{Field, ProtocolError, Reader};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A point in time; seconds may be negative (before 1970).
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Debug,
    Default,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[repr(C)]
pub struct Timestamp {
    /// Seconds since the epoch.
    pub seconds: i64,
    /// Nanoseconds, 0 to 999,999,999; other values only as [`Timestamp::NOW`] and [`Timestamp::OMIT`].
    pub nanoseconds: u32,
    /// Always zero.
    pub reserved: u32,
}

impl Timestamp {
    /// In a request that sets times: the server's current time (`UTIME_NOW`).
    pub const NOW: Self = Self { seconds: 0, nanoseconds: 0x3fff_ffff, reserved: 0 };
    /// In a request that sets times: leave this time unchanged (`UTIME_OMIT`).
    pub const OMIT: Self = Self { seconds: 0, nanoseconds: 0x3fff_fffe, reserved: 0 };

    /// Makes a time from its two parts.
    #[must_use]
    pub const fn new(seconds: i64, nanoseconds: u32) -> Self {
        Self { seconds, nanoseconds, reserved: 0 }
    }
}

/// Attributes of one file: those of `statx(2)`, and a change number.
///
/// 128 bytes on the wire, all fields little-endian, in the order given here.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Attr {
    /// Inode number, unique within the file system; see [`Attr::identity`].
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Space used, in units of 512 bytes.
    pub blocks: u64,
    /// A number that differs after any change of data or attributes.
    pub change: u64,
    /// Device number of a device node, as `makedev(3)` composes it.
    pub rdev: u64,
    /// File type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Number of hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Preferred I/O size in bytes.
    pub block_bytes: u32,
    /// Bits of [`attr_flag`], and [`Attr::file_system`] from bit [`FILE_SYSTEM_SHIFT`] up.
    pub flags: u32,
    /// Last access.
    pub accessed: Timestamp,
    /// Last change of data.
    pub modified: Timestamp,
    /// Last change of data or attributes.
    pub changed: Timestamp,
    /// Creation; all zero if the store does not know it.
    pub created: Timestamp,
}

/// Bits of [`Attr::flags`].
pub mod attr_flag {
    /// The file has no extended attributes. Set only in listings that ask for it; if clear, the file may
    /// or may not have some.
    pub const NO_XATTRS: u32 = 1;
    /// [`super::Attr::change`] stands for the contents: the last change was at least [`super::QUIET_SECONDS`]
    /// ago, on a file system that notes the time of each. If clear, the file may be changing.
    ///
    /// The kernel sets the time of a change when a write begins, and for stores to mapped pages only once until
    /// these are written back, half a minute later. So contents that were read shortly after a change may be
    /// older or newer than its number.
    pub const QUIET: u32 = 2;
    /// The file system may say only when the file is closed that it could not store what was written
    /// ([`crate::request::sync_kind::SETTLE`]).
    pub const SETTLES: u32 = 4;
}

/// See [`attr_flag::QUIET`].
pub const QUIET_SECONDS: i64 = 60;

/// Lowest bit of [`Attr::file_system`] in [`Attr::flags`].
pub const FILE_SYSTEM_SHIFT: u32 = 16;

/// Size of an encoded [`Attr`] in bytes.
pub const ATTR_BYTES: usize = size_of::<Attr>();
const _: () = assert!(ATTR_BYTES == 128);

/// The bits of a mode that hold the file type (`S_IFMT`).
pub const TYPE_MASK: u32 = 0o170_000;
/// A socket (`S_IFSOCK`).
pub const TYPE_SOCKET: u32 = 0o140_000;
/// A symbolic link (`S_IFLNK`).
pub const TYPE_SYMLINK: u32 = 0o120_000;
/// A regular file (`S_IFREG`).
pub const TYPE_FILE: u32 = 0o100_000;
/// A block device (`S_IFBLK`).
pub const TYPE_BLOCK: u32 = 0o060_000;
/// A directory (`S_IFDIR`).
pub const TYPE_DIRECTORY: u32 = 0o040_000;
/// A character device (`S_IFCHR`).
pub const TYPE_CHARACTER: u32 = 0o020_000;
/// A fifo (`S_IFIFO`).
pub const TYPE_FIFO: u32 = 0o010_000;

impl Attr {
    /// Returns the number of the file system in the export that holds the file. Zero is the file system of
    /// the root; others are mounted below it, or are subvolumes. The server derives the number from the
    /// device number.
    #[must_use]
    pub fn file_system(&self) -> u16 {
        (self.flags >> FILE_SYSTEM_SHIFT) as u16
    }

    /// Returns a number that is unique to the file within its export, made from the inode number, the file
    /// system, and the time of creation: a new file often gets the inode number of a removed one.
    #[must_use]
    pub fn identity(&self) -> u64 {
        const SECOND: u64 = 1_000_000_000;
        // 2^64 divided by the golden ratio: times that are close to each other become numbers that are not. Zero,
        // the time that is not known, stays zero.
        const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;
        let Timestamp { seconds, nanoseconds, .. } = self.created;
        let created = (seconds as u64).wrapping_mul(SECOND).wrapping_add(nanoseconds.into());
        // In practice inode numbers stay below 2^48.
        self.inode ^ u64::from(self.file_system()) << 48 ^ created.wrapping_mul(SCATTER)
    }

    /// Returns the file type bits of the mode.
    #[must_use]
    pub fn file_type(&self) -> u32 {
        self.mode & TYPE_MASK
    }

    /// Returns true for a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.file_type() == TYPE_DIRECTORY
    }

    /// Returns true for a regular file.
    #[must_use]
    pub fn is_file(&self) -> bool {
        self.file_type() == TYPE_FILE
    }

    /// Returns how many bytes of a regular file are data and not holes, as far as its blocks tell; elsewhere zero.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        if self.is_file() { self.size.min(self.blocks.saturating_mul(512)) } else { 0 }
    }

    /// Returns true for a regular file that may have holes.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.is_file() && self.data_bytes() < self.size
    }

    /// Returns true for a symbolic link.
    #[must_use]
    pub fn is_symlink(&self) -> bool {
        self.file_type() == TYPE_SYMLINK
    }
}

/// Space and number of files of an export, as in `statvfs(3)`.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct StatFs {
    /// Size of one block in bytes.
    pub block_bytes: u64,
    /// Total blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for unprivileged users.
    pub blocks_available: u64,
    /// Total inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_bytes_max: u64,
    /// Identity of the file system.
    pub id: u64,
}

macro_rules! struct_fields {
    ($($kind:ty),*) => {$(
        impl<'a> Field<'a> for $kind {
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(self.as_bytes());
            }

            fn decode(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
                let at = reader.error("structure cannot be read");
                Self::read_from_bytes(reader.take(size_of::<Self>())?).map_err(|_| at)
            }
        }
    )*};
}

struct_fields!(Timestamp, Attr, StatFs);

#[cfg(target_endian = "big")]
compile_error!("the structures of the wire are read in place and need a little-endian machine");
