//! Properties of operations: whether they change anything, which files and disks they name, and
//! whether they may be repeated.

use super::{Request, open_flag, write_flag, xattr_how};

impl Request<'_> {
    /// Returns true if executing the operation twice may differ from executing it once, so that the server
    /// has to remember the result for replay.
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
            Self::Write { .. } | Self::WriteParts { .. } => true,
            Self::Allocate { .. } | Self::CopyRange { .. } => true,
            Self::SetXattr { .. } | Self::RemoveXattr { .. } | Self::Lock { .. } => true,
            Self::ProcessEnded { .. } => true,
            Self::Stat { .. }
            | Self::Read { .. }
            | Self::ReadDir { .. }
            | Self::ReadPath { .. }
            | Self::ReadLink { .. } => false,
            Self::StatFs { .. } | Self::Sync { .. } | Self::Seek { .. } | Self::GetXattr { .. } => {
                false
            }
            Self::ListXattr { .. } | Self::TestLock { .. } | Self::Access { .. } => false,
            Self::Inquire { .. } | Self::Reclaimed {} | Self::PathOf { .. } => false,
            // A file watched twice reports each event once, and events are sent again until the
            // client has seen them.
            Self::Watch { .. } | Self::Events { .. } | Self::Bind { .. } => false,
            Self::HandOver { .. } => false,
            Self::DiskWrite { .. } | Self::DiskZero { .. } | Self::DiskTrim { .. } => true,
            Self::DiskFlush { .. } | Self::DiskResize { .. } => true,
            Self::DiskList { .. }
            | Self::DiskOpen { .. }
            | Self::DiskClose { .. }
            | Self::DiskInfo { .. } => false,
            Self::DiskRead { .. } | Self::DiskStatus { .. } | Self::DiskCache { .. } => false,
        }
    }

    /// Returns true if the operation can change what others see of files or their names, or waits for others
    /// (a lock), so that earlier knowledge of files may be stale afterwards.
    #[must_use]
    pub fn alters(&self) -> bool {
        match self {
            Self::Open { flags, .. } => open_flag::alters(*flags),
            Self::Attach { .. } | Self::Close { .. } | Self::Reclaim { .. } => false,
            other => other.modifies(),
        }
    }

    /// Returns true if the client may send the operation again to a restarted server that remembers nothing,
    /// because executing it twice has the same result as once.
    #[must_use]
    pub fn repeatable(&self) -> bool {
        match self {
            Self::Open { flags, .. } => !open_flag::creates_exclusively(*flags),
            Self::Write { flags, .. } => flags & write_flag::APPEND == 0,
            Self::WriteParts { .. }
            | Self::Close { .. }
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

    /// Returns true if the operation may wait for what other clients do.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(self, Self::Lock { .. } | Self::Events { .. } | Self::ProcessEnded { .. })
    }

    /// Returns the open files that the operation names; zero stands for none.
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
            Self::ReadPath { base, .. } => [base, 0],
            Self::ListXattr { base, .. } | Self::RemoveXattr { base, .. } => [base, 0],
            Self::Link { base, new_base, .. } | Self::Rename { base, new_base, .. } => {
                [base, new_base]
            }
            Self::CopyRange { handle, new_handle, .. } => [handle, new_handle],
            Self::Close { handle } | Self::Read { handle, .. } | Self::Write { handle, .. } => {
                [handle, 0]
            }
            Self::WriteParts { handle, .. } => [handle, 0],
            Self::ReadDir { handle, .. } | Self::StatFs { handle } | Self::Sync { handle, .. } => {
                [handle, 0]
            }
            Self::Allocate { handle, .. } | Self::Seek { handle, .. } | Self::PathOf { handle } => {
                [handle, 0]
            }
            Self::Lock { handle, .. } | Self::TestLock { handle, .. } => [handle, 0],
            Self::Watch { handle, .. } | Self::Bind { handle, .. } => [handle, 0],
            Self::Attach { .. } | Self::Inquire { .. } => [0, 0],
            Self::Reclaim { .. } | Self::Reclaimed {} | Self::Events { .. } => [0, 0],
            // Disks have their own numbers.
            _ => [0, 0],
        }
    }

    /// Returns the number of the disk that the operation names.
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

    /// Returns the number of a disk and the bytes of it that the operation changes.
    #[must_use]
    pub fn disk_change(&self) -> Option<(u32, std::ops::Range<u64>)> {
        let (disk, offset, length) = match *self {
            Self::DiskWrite { disk, offset, length, .. } => (disk, offset, length.into()),
            Self::DiskZero { disk, offset, length, .. }
            | Self::DiskTrim { disk, offset, length, .. } => (disk, offset, length),
            // Bytes cut off are lost, and read as zeroes if the disk grows again.
            Self::DiskResize { disk, size } => (disk, size, u64::MAX),
            _ => return None,
        };
        Some((disk, offset..offset.saturating_add(length)))
    }

    /// Returns true for the tag of a disk request.
    #[must_use]
    pub fn is_disk_tag(tag: u8) -> bool {
        (31..=42).contains(&tag)
    }
}
