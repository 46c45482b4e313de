//! Answers of either side, in a form that can be compared.

use crate::op::Time;
use std::fmt;
use towline_client::{Attr, Errno};

/// An answer.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Said {
    Nothing,
    Number(u64),
    Bytes(Vec<u8>),
    Attr(Shown),
    /// Sorted: names and types of a directory, or names of extended attributes.
    Names(Vec<(Vec<u8>, u8)>),
    /// Block size, number of blocks, number of files, longest name.
    Space([u64; 4]),
    /// Whether a lock is in the way.
    Taken(bool),
}

/// An answer or an error number.
pub(crate) type Outcome = Result<Said, Errno>;

/// Attributes as far as two file systems agree on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) mode: u32,
    pub(crate) links: u32,
    /// Zero for directories, whose size depends on the file system.
    pub(crate) size: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u64,
    /// Only times that an operation has set: those of [`Time::Past`].
    pub(crate) modified: Option<(i64, u32)>,
    /// Only in the answer to the operation that has set it, since reading may change it.
    pub(crate) accessed: Option<(i64, u32)>,
}

/// Times before this one (in the year 2001) were set by an operation, later ones come from the
/// clock.
const CLOCK: i64 = 1_000_000_000;

impl Shown {
    pub(crate) fn of(attr: &Attr) -> Self {
        let modified = (attr.modified.seconds, attr.modified.nanoseconds);
        Self {
            mode: attr.mode,
            links: attr.links,
            size: if attr.is_directory() { 0 } else { attr.size },
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            modified: Some(modified).filter(|time| time.0 < CLOCK),
            accessed: None,
        }
    }

    pub(crate) fn of_stat(stat: &rustix::fs::Stat) -> Self {
        let modified = (stat.st_mtime, stat.st_mtime_nsec as u32);
        let directory = stat.st_mode & 0o170_000 == 0o040_000;
        Self {
            mode: stat.st_mode,
            links: stat.st_nlink as _,
            size: if directory { 0 } else { stat.st_size as u64 },
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev,
            modified: Some(modified).filter(|time| time.0 < CLOCK),
            accessed: None,
        }
    }
}

impl Shown {
    /// Adds the access time of a file for which an operation has just set it to `wanted`.
    pub(crate) fn accessed(self, wanted: Time, accessed: (i64, u32)) -> Self {
        Self { accessed: matches!(wanted, Time::Past(..)).then_some(accessed), ..self }
    }

    pub(crate) fn is_file(&self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }
}

impl Said {
    /// Names of extended attributes, without those that the system adds itself.
    pub(crate) fn of_xattrs(names: impl Iterator<Item = Vec<u8>>) -> Self {
        let users = names.filter(|name| name.starts_with(b"user."));
        let mut names: Vec<(Vec<u8>, u8)> = users.map(|name| (name, 0)).collect();
        names.sort_unstable();
        Self::Names(names)
    }
}

impl fmt::Debug for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("done"),
            Self::Number(number) => write!(f, "{number}"),
            // A sum that differs when the bytes do, instead of all of them.
            Self::Bytes(bytes) => {
                let sum = bytes.iter().fold(0u32, |s, b| s.rotate_left(3) ^ u32::from(*b));
                write!(f, "{} bytes (sum {sum:08x})", bytes.len())
            }
            Self::Attr(shown) => write!(f, "{shown:?}"),
            Self::Names(names) => f
                .debug_list()
                .entries(names.iter().map(|(name, kind)| (String::from_utf8_lossy(name), kind)))
                .finish(),
            Self::Space(space) => write!(f, "{space:?}"),
            Self::Taken(taken) => write!(f, "taken {taken}"),
        }
    }
}
