//! What operations do: whether they change anything, what they are about, and whether they may be repeated.

use super::{Request, open_flag, write_flag, xattr_how};

impl Request<'_> {
    /// True when executing it twice differs from executing it once, so that its result has to be
    /// remembered for replay.
    #[must_use]
    pub fn modifies(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Attach { .. } | Self::Close { .. } | Self::Reclaim { .. } => {
                true
            }
            Self::SetAttr { .. } | Self::MakeDir { .. } | Self::MakeNode { .. } => true,
            Self::Symlink { .. }
            | Self::Link { .. }
            | Self::Unlink { .. }
            | Self::Rename { .. } => true,
            Self::Write { .. } | Self::Allocate { .. } | Self::CopyRange { .. } => true,
            Self::SetXattr { .. } | Self::RemoveXattr { .. } | Self::Lock { .. } => true,
            Self::ProcessEnded { .. } => true,
            Self::Stat { .. }
            | Self::Read { .. }
            | Self::ReadDir { .. }
            | Self::ReadLink { .. } => false,
            Self::StatFs { .. } | Self::Sync { .. } | Self::Seek { .. } | Self::GetXattr { .. } => {
                false
            }
            Self::ListXattr { .. } | Self::TestLock { .. } | Self::Access { .. } => false,
            Self::Inquire { .. } | Self::Reclaimed {} | Self::PathOf { .. } => false,
            // Who watches a file twice is told once, and events are told again until they were seen.
            Self::Watch { .. } | Self::Events { .. } => false,
            Self::DiskWrite { .. } | Self::DiskZero { .. } | Self::DiskTrim { .. } => true,
            Self::DiskFlush { .. } | Self::DiskResize { .. } => true,
            Self::DiskList { .. }
            | Self::DiskOpen { .. }
            | Self::DiskClose { .. }
            | Self::DiskInfo { .. } => false,
            Self::DiskRead { .. } | Self::DiskStatus { .. } | Self::DiskCache { .. } => false,
        }
    }

    /// True when it can change what others see of files or their names, or waits for others (a
    /// lock), so that what was known before is not to be relied on any more.
    #[must_use]
    pub fn alters(&self) -> bool {
        match self {
            Self::Open { flags, .. } => open_flag::alters(*flags),
            Self::Attach { .. } | Self::Close { .. } | Self::Reclaim { .. } => false,
            other => other.modifies(),
        }
    }

    /// True when it may be sent again to a restarted server that remembers nothing, because doing
    /// it twice ends like doing it once.
    #[must_use]
    pub fn repeatable(&self) -> bool {
        match self {
            Self::Open { flags, .. } => !open_flag::creates_exclusively(*flags),
            Self::Write { flags, .. } => flags & write_flag::APPEND == 0,
            Self::Close { .. }
            | Self::Attach { .. }
            | Self::Reclaim { .. }
            | Self::SetAttr { .. } => true,
            Self::Allocate { .. } | Self::CopyRange { .. } | Self::Lock { .. } => true,
            Self::ProcessEnded { .. } => true,
            Self::SetXattr { how, .. } => *how != xattr_how::CREATE,
            disk if disk.disk().is_some() => true,
            other => !other.modifies(),
        }
    }

    /// The open files it names; zero stands for none.
    #[must_use]
    pub fn handles(&self) -> [u64; 2] {
        match *self {
            Self::Open { base, .. } | Self::Stat { base, .. } | Self::SetAttr { base, .. } => {
                [base, 0]
            }
            Self::MakeDir { base, .. }
            | Self::MakeNode { base, .. }
            | Self::Symlink { base, .. } => [base, 0],
            Self::ReadLink { base, .. } | Self::Unlink { base, .. } | Self::Access { base, .. } => {
                [base, 0]
            }
            Self::GetXattr { base, .. } | Self::SetXattr { base, .. } => [base, 0],
            Self::ListXattr { base, .. } | Self::RemoveXattr { base, .. } => [base, 0],
            Self::Link { base, new_base, .. } | Self::Rename { base, new_base, .. } => {
                [base, new_base]
            }
            Self::CopyRange { handle, new_handle, .. } => [handle, new_handle],
            Self::Close { handle } | Self::Read { handle, .. } | Self::Write { handle, .. } => {
                [handle, 0]
            }
            Self::ReadDir { handle, .. } | Self::StatFs { handle } | Self::Sync { handle, .. } => {
                [handle, 0]
            }
            Self::Allocate { handle, .. } | Self::Seek { handle, .. } | Self::PathOf { handle } => {
                [handle, 0]
            }
            Self::Lock { handle, .. } | Self::TestLock { handle, .. } => [handle, 0],
            Self::Watch { handle, .. } => [handle, 0],
            Self::Attach { .. } | Self::Inquire { .. } => [0, 0],
            Self::Reclaim { .. } | Self::Reclaimed {} | Self::Events { .. } => [0, 0],
            // Disks have numbers of their own.
            _ => [0, 0],
        }
    }

    /// The number of the disk that it is about.
    #[must_use]
    pub fn disk(&self) -> Option<u32> {
        match *self {
            Self::DiskOpen { disk, .. } | Self::DiskClose { disk } | Self::DiskInfo { disk } => {
                Some(disk)
            }
            Self::DiskRead { disk, .. } | Self::DiskWrite { disk, .. } => Some(disk),
            Self::DiskFlush { disk } | Self::DiskZero { disk, .. } => Some(disk),
            Self::DiskTrim { disk, .. } | Self::DiskStatus { disk, .. } => Some(disk),
            Self::DiskCache { disk, .. } | Self::DiskResize { disk, .. } => Some(disk),
            _ => None,
        }
    }

    /// The bytes of a disk that it changes.
    #[must_use]
    pub fn disk_change(&self) -> Option<(u32, std::ops::Range<u64>)> {
        let (disk, offset, length) = match *self {
            Self::DiskWrite { disk, offset, length, .. } => (disk, offset, length.into()),
            Self::DiskZero { disk, offset, length, .. }
            | Self::DiskTrim { disk, offset, length, .. } => (disk, offset, length),
            // What is cut off is gone, and comes back as zeroes.
            Self::DiskResize { disk, size } => (disk, size, u64::MAX),
            _ => return None,
        };
        Some((disk, offset..offset.saturating_add(length)))
    }

    /// True for a tag that begins a request about disks.
    #[must_use]
    pub fn is_disk_tag(tag: u8) -> bool {
        (31..=42).contains(&tag)
    }
}
