//! Translates the flags of `open(2)` from the protocol to this machine.

use super::system::mode_for_new;
use crate::OpenHow;
use rustix::fs::{Mode, OFlags};
use towline_wire::Errno;

/// Translated flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opening {
    /// Flags for `openat2(2)`.
    pub(super) flags: OFlags,
    /// Mode for `openat2(2)`: zero unless a file may be created.
    pub(super) mode: Mode,
    /// Open for reading.
    pub(super) readable: bool,
    /// Open for writing.
    pub(super) writable: bool,
}

const ACCESS_MASK: u32 = 3;
const WRITE_ONLY: u32 = 1;
const READ_WRITE: u32 = 2;

/// The flags that are passed on. Their values are those of x86-64, which the protocol uses.
/// `O_APPEND` is missing because each write says whether it appends.
const PASSED: [(u32, OFlags); 10] = [
    (0o100, OFlags::CREATE),
    (0o200, OFlags::EXCL),
    (0o1000, OFlags::TRUNC),
    (0o10_000, OFlags::DSYNC),
    (0o4_010_000, OFlags::SYNC),
    (0o40_000, OFlags::DIRECT),
    (0o200_000, OFlags::DIRECTORY),
    (0o400_000, OFlags::NOFOLLOW),
    (0o1_000_000, OFlags::NOATIME),
    (0o20_200_000, OFlags::TMPFILE),
];
pub(super) const PATH_ONLY: u32 = 0o10_000_000;

impl Opening {
    /// Translates the flags.
    ///
    /// # Errors
    /// `EINVAL` for the access mode 3, which allows neither reading nor writing.
    pub(super) fn of(how: OpenHow) -> Result<Self, Errno> {
        let mut flags = OFlags::CLOEXEC;
        for (bits, flag) in PASSED {
            if how.flags & bits == bits {
                flags |= flag;
            }
        }
        if how.flags & PATH_ONLY != 0 {
            // As on Linux, all other flags are ignored; `openat2` would refuse them.
            flags &= OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            flags |= OFlags::PATH;
            return Ok(Self { flags, mode: Mode::empty(), readable: false, writable: false });
        }
        // Never wait for the other end of a FIFO, never make a terminal the controlling one.
        flags |= OFlags::NONBLOCK | OFlags::NOCTTY;
        let (readable, writable) = match how.flags & ACCESS_MASK {
            0 => (true, false),
            WRITE_ONLY => (false, true),
            READ_WRITE => (true, true),
            _ => return Err(Errno::EINVAL),
        };
        flags |= match (readable, writable) {
            (true, true) => OFlags::RDWR,
            (_, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        let creates = flags.contains(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
        let mode = if creates { mode_for_new(how.mode) } else { Mode::empty() };
        Ok(Self { flags, mode, readable, writable })
    }

    /// Returns true if only a reference (`O_PATH`) is opened.
    pub(super) fn is_path_only(&self) -> bool {
        self.flags.contains(OFlags::PATH)
    }

    /// Returns true if opening changes nothing, and reads then copy what is in memory.
    pub(super) fn only_reads(&self) -> bool {
        let others = OFlags::CREATE.union(OFlags::TRUNC).union(OFlags::DIRECT);
        self.readable && !self.writable && !self.flags.intersects(others)
    }

    /// Returns true if opening changes an existing file, allows changing it, or creates a file
    /// without a name.
    pub(super) fn changes(&self) -> bool {
        self.writable
            || self.flags.intersects(OFlags::TRUNC)
            || self.flags.contains(OFlags::TMPFILE)
    }
}
