//! Values of request fields: flag bits, kinds, families.

/// In [`super::Request::Stat`] and other operations with `flags`: do not follow a final symbolic link.
pub const NO_FOLLOW: u32 = 1;
/// In [`super::Request::Unlink`]: remove a directory.
pub const DIRECTORY: u32 = 2;
/// In [`super::Request::Link`]: follow a final symbolic link in the source path.
pub const FOLLOW: u32 = 4;

/// Bits of [`super::Request::Open`]'s flags that Towline itself interprets: `O_*` of Linux on x86-64.
pub mod open_flag {
    /// `O_CREAT`.
    pub const CREATE: u32 = 0o100;
    /// `O_EXCL`.
    pub const EXCLUSIVE: u32 = 0o200;
    /// `O_TRUNC`.
    pub const TRUNCATE: u32 = 0o1000;
    /// `O_APPEND`.
    pub const APPEND: u32 = 0o2000;
    /// `O_DSYNC`.
    pub const DATA_SYNC: u32 = 0o10000;
    /// `O_DIRECT`.
    pub const DIRECT: u32 = 0o40000;
    /// `O_DIRECTORY`.
    pub const DIRECTORY: u32 = 0o200_000;
    /// `O_NOFOLLOW`.
    pub const NO_FOLLOW: u32 = 0o400_000;
    /// `O_NOATIME`.
    pub const NO_ACCESS_TIME: u32 = 0o1_000_000;
    /// The bit of `O_SYNC` besides [`DATA_SYNC`].
    pub const FULL_SYNC: u32 = 0o4_000_000;
    /// `O_PATH`.
    pub const PATH: u32 = 0o10_000_000;
    /// The bit of `O_TMPFILE` besides [`DIRECTORY`].
    pub const TEMPORARY: u32 = 0o20_000_000;
    /// Not of Linux. With an empty path: the open file gets one more handle, which may do what the first one may, whatever
    /// the caller may do with the file. All other flags are ignored.
    pub const AGAIN: u32 = 1 << 31;

    /// Flags with another value on this machine: the machine's value, and the protocol's.
    #[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
    const MOVED: &[(u32, u32)] = &[
        (0o40_000, DIRECTORY),
        (0o100_000, NO_FOLLOW),
        (0o200_000, DIRECT),
        (0o400_000, 0o100_000), // `O_LARGEFILE`
    ];
    #[cfg(not(any(target_arch = "aarch64", target_arch = "arm")))]
    const MOVED: &[(u32, u32)] = &[];

    /// Converts flags of `open(2)` on this machine to those of the protocol, without [`AGAIN`]: `open(2)` ignores that bit.
    #[must_use]
    pub const fn of_this_machine(flags: i32) -> u32 {
        let flags = flags as u32 & !AGAIN;
        let (mut left, mut moved, mut number) = (flags, 0, 0);
        while number < MOVED.len() {
            let (here, there) = MOVED[number];
            left &= !here;
            moved |= if flags & here != 0 { there } else { 0 };
            number += 1;
        }
        left | moved
    }

    /// Returns true if opening either creates a file or fails.
    #[must_use]
    pub fn creates_exclusively(flags: u32) -> bool {
        flags & (CREATE | EXCLUSIVE) == CREATE | EXCLUSIVE && flags & PATH == 0
    }

    /// Returns true if opening can create or truncate a file.
    #[must_use]
    pub fn alters(flags: u32) -> bool {
        flags & (CREATE | TRUNCATE) != 0 && flags & PATH == 0
    }

    /// Returns the flags for opening the same file again without creating or truncating it.
    #[must_use]
    pub fn without_changes(flags: u32) -> u32 {
        flags & !(CREATE | EXCLUSIVE | TRUNCATE)
    }
}

/// Flags of [`super::Request::Rename`].
pub mod rename_flag {
    /// `RENAME_NOREPLACE`: fails if the new name exists.
    pub const NO_REPLACE: u32 = 1;
    /// `RENAME_EXCHANGE`: exchanges the two files.
    pub const EXCHANGE: u32 = 2;
    /// `RENAME_WHITEOUT`: leaves a character device with the number zero at the old name.
    pub const WHITEOUT: u32 = 4;

    /// Returns true if `renameat2(2)` knows these flags and accepts them together.
    #[must_use]
    pub fn are_legal(flags: u32) -> bool {
        let known = flags & !(NO_REPLACE | EXCHANGE | WHITEOUT) == 0;
        known && (flags & EXCHANGE == 0 || flags == EXCHANGE)
    }
}

/// What a listing contains besides names.
pub mod listed {
    /// Attributes.
    pub const ATTRIBUTES: u8 = 1;
    /// With attributes: mark files without extended attributes ([`crate::attr::attr_flag::NO_XATTRS`]).
    pub const XATTRS: u8 = 2;
}

/// Values of `how` in [`super::Request::SetXattr`].
pub mod xattr_how {
    /// `XATTR_CREATE`: fails if the attribute exists.
    pub const CREATE: u32 = 1;
}

/// Bits of [`super::Request::SetAttr`]'s `valid`.
pub mod valid {
    /// Set `mode`.
    pub const MODE: u32 = 1;
    /// Set `uid`.
    pub const UID: u32 = 2;
    /// Set `gid`.
    pub const GID: u32 = 4;
    /// Set `size`.
    pub const SIZE: u32 = 8;
    /// Set `accessed` and `modified` (each may be `NOW` or `OMIT`).
    pub const TIMES: u32 = 16;
}

/// Flags of [`super::Request::Write`].
pub mod write_flag {
    /// Write at the end of the file and ignore the offset.
    pub const APPEND: u32 = 1;
    /// Data is on stable storage before the reply.
    pub const DATA_SYNC: u32 = 2;
    /// Fail with `ENOSPC`, and so end the compound, unless there is room for all of the data.
    pub const WHOLE: u32 = 4;
}

/// Kinds of [`super::Request::Sync`].
pub mod sync_kind {
    /// Data and the metadata needed to read it (`fdatasync`).
    pub const DATA: u32 = 0;
    /// Data and attributes (`fsync`).
    pub const FULL: u32 = 1;
    /// The whole file system (`syncfs`).
    pub const FILE_SYSTEM: u32 = 2;
    /// Nothing, but reports what closing the file would: some file systems say only then that they could not store
    /// what was written.
    pub const SETTLE: u32 = 3;
}

/// Values of `whence` in [`super::Request::Seek`].
pub mod whence {
    /// Next data (`SEEK_DATA`).
    pub const DATA: u32 = 3;
    /// Next hole (`SEEK_HOLE`).
    pub const HOLE: u32 = 4;
}

/// Lock families and kinds of [`super::Request::Lock`].
pub mod lock {
    /// Family: owned by the process (`fcntl` F_SETLK); released by any close of the file by its owner.
    pub const PROCESS: u8 = 0;
    /// Family: owned by the open file (F_OFD_SETLK).
    pub const OPEN_FILE: u8 = 1;
    /// Family: lock of the whole file, owned by the open file (`flock`).
    pub const FLOCK: u8 = 2;
    /// Kind: shared.
    pub const SHARED: u8 = 0;
    /// Kind: exclusive.
    pub const EXCLUSIVE: u8 = 1;
    /// Kind: release.
    pub const UNLOCK: u8 = 2;
    /// Do not wait for other owners.
    pub const TRY: u8 = 0;
    /// Wait until the lock can be granted.
    pub const WAIT: u8 = 1;
    /// As `TRY`, for a lock that was held before the server restarted.
    pub const AGAIN: u8 = 2;
}

#[cfg(test)]
mod tests {
    use super::open_flag;

    #[test]
    fn flags_of_this_machine_travel_as_those_of_x86_64() {
        let sent = open_flag::of_this_machine;
        // Access mode, O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_DSYNC, O_NOATIME, O_PATH.
        let alike = 0o11_013_302;
        assert_eq!(sent(alike), alike as u32);
        assert_eq!(sent(alike | i32::MIN), alike as u32);
        let moved = if cfg!(target_arch = "aarch64") {
            [0o40_000, 0o100_000, 0o200_000, 0o400_000]
        } else {
            [0o200_000, 0o400_000, 0o40_000, 0o100_000]
        };
        let flags = [open_flag::DIRECTORY, open_flag::NO_FOLLOW, open_flag::DIRECT, 0o100_000];
        for (here, there) in moved.into_iter().zip(flags) {
            assert_eq!(sent(here), there);
            assert_eq!(sent(here | alike), there | alike as u32);
        }
    }
}
