//! File attributes: from `statx(2)` to the form of the protocol.

use super::resolve::Tree;
use crate::FREED_BYTES_MAX;
use rustix::fs::{AtFlags, Statx, StatxFlags, StatxTimestamp};
use std::os::fd::AsFd;
use towline_wire::attr::{FILE_SYSTEM_SHIFT, QUIET_SECONDS, attr_flag};
use towline_wire::{Attr, Errno, Timestamp};

/// The fields requested from `statx(2)`.
///
/// The kernel does not show its change cookie (`STATX_CHANGE_COOKIE`) to user space, so the change
/// number is derived from the time of the last change. Since Linux 6.13 this time is fine enough to
/// differ after any change that follows a query.
const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Converts the error of a system call.
pub(super) fn errno(error: rustix::io::Errno) -> Errno {
    // Linux error numbers end at 4095.
    Errno(u16::try_from(error.raw_os_error()).unwrap_or(Errno::EIO.0))
}

/// Returns the attributes of an open file of any kind.
pub(super) fn stat_file(file: impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, WANTED).map_err(errno)
}

/// Returns the attributes of a name without following a link. `name` must be a single component.
pub(super) fn stat_name(directory: impl AsFd, name: &[u8]) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(directory, name, flags, WANTED).map_err(errno)
}

/// Returns the attributes of a listed name, as known to this machine without asking another one.
pub(super) fn stat_listed(directory: impl AsFd, name: &std::ffi::CStr) -> Option<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(directory, name, flags, WANTED).ok()
}

/// Returns device and inode number.
pub(super) fn identity_of(stat: &Statx) -> (u64, u64) {
    (rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)
}

/// Returns true if freeing all that a file occupies takes long.
pub(super) fn frees_much(stat: &Statx) -> bool {
    stat.stx_blocks > FREED_BYTES_MAX / 512
}

/// Returns the number that distinguishes a file system in an export from that of its root.
fn file_system(device: u64, root: u64) -> u16 {
    if device == root {
        return 0;
    }
    // Subvolumes and file systems without a device differ in the low bits of the minor number,
    // disks also in the major number.
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    match (minor as u16) ^ (major as u16).rotate_left(8) {
        0 => u16::MAX,
        number => number,
    }
}

impl Tree {
    /// Like [`stat_name`], in the form of the protocol.
    pub(super) fn attr_of_name(&self, directory: impl AsFd, name: &[u8]) -> Result<Attr, Errno> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        // Not through `stat_name`, which would copy the result twice.
        match rustix::fs::statx(directory, name, flags, WANTED) {
            Ok(stat) => Ok(self.attr_of(&stat)),
            Err(error) => Err(errno(error)),
        }
    }

    /// Converts attributes to the form of the protocol.
    pub(super) fn attr_of(&self, stat: &Statx) -> Attr {
        let file_system = file_system(identity_of(stat).0, self.device);
        let is_told = self.tells_changes && file_system == 0;
        let quiet = if is_told && is_quiet(stat) { attr_flag::QUIET } else { 0 };
        let settles = if self.foreign.get().is_some() { attr_flag::SETTLES } else { 0 };
        let flags = u32::from(file_system) << FILE_SYSTEM_SHIFT | quiet | settles;
        Attr { flags, ..attr_of(stat) }
    }
}

/// File systems on which each change of a file sets its time of change to the kernel's time, and on which a file keeps
/// its inode number (`f_type`, `statfs(2)`). Elsewhere the time is that of the contents and can be set (vfat, exFAT),
/// or comes with an image, which another one may replace whose files have the same times, lengths and inode numbers
/// (squashfs, EROFS, ISO 9660; so also overlays); or contents change without it (stores to mapped pages on tmpfs, the
/// kernel's own files, other machines).
const TELL_CHANGES: [u32; 6] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
];

/// Returns true if files of the file system of `root` have times by which all changes can be told ([`TELL_CHANGES`]).
pub(super) fn tells_changes(root: impl AsFd) -> Result<bool, Errno> {
    let kind = rustix::fs::fstatfs(root).map_err(errno)?.f_type as u32;
    Ok(TELL_CHANGES.contains(&kind))
}

/// Returns true if the last change is long ago, by the clock from which the kernel takes the times of files.
fn is_quiet(stat: &Statx) -> bool {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    now.tv_sec.saturating_sub(stat.stx_ctime.tv_sec) > QUIET_SECONDS
}

fn attr_of(stat: &Statx) -> Attr {
    let changed = timestamp(stat.stx_ctime);
    let created = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    Attr {
        inode: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        change: (changed.seconds as u64)
            .wrapping_mul(1_000_000_000)
            .wrapping_add(u64::from(changed.nanoseconds)),
        rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        mode: u32::from(stat.stx_mode),
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        block_bytes: stat.stx_blksize,
        flags: 0,
        accessed: timestamp(stat.stx_atime),
        modified: timestamp(stat.stx_mtime),
        changed,
        created: if created { timestamp(stat.stx_btime) } else { Timestamp::default() },
    }
}

fn timestamp(time: StatxTimestamp) -> Timestamp {
    Timestamp::new(time.tv_sec, time.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_file_is_quiet_a_minute_after_its_last_change() {
        let file = tempfile::tempfile().unwrap();
        let mut stat = stat_file(&file).unwrap();
        assert!(!is_quiet(&stat));
        stat.stx_ctime.tv_sec -= QUIET_SECONDS - 5;
        assert!(!is_quiet(&stat));
        stat.stx_ctime.tv_sec -= 7;
        assert!(is_quiet(&stat));
        // A clock that was set back.
        stat.stx_ctime.tv_sec = i64::MAX;
        assert!(!is_quiet(&stat));
        stat.stx_ctime.tv_sec = i64::MIN;
        assert!(is_quiet(&stat));
    }

    /// What the kernel's own file systems, and those of images, say does not stand for the contents.
    #[test]
    fn files_are_quiet_only_where_their_time_of_change_tells_changes() {
        use crate::directory::DirectoryStore;
        use crate::{Caller, FileStore};
        let quiet = |root: &str, name: &[u8]| {
            let store = DirectoryStore::new(std::path::Path::new(root), false).unwrap();
            let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
            let attr = store.stat(&caller, (&*store.root().unwrap(), name), true).unwrap();
            attr.flags & attr_flag::QUIET != 0
        };
        assert!(!quiet("/proc", b""));
        assert!(!quiet("/", b"proc"), "on another file system than the export");
        let here = env!("CARGO_MANIFEST_DIR");
        let old = stat_name(rustix::fs::CWD, format!("{here}/Cargo.toml").as_bytes()).unwrap();
        let root = rustix::fs::open(here, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty());
        assert_eq!(
            quiet(here, b"Cargo.toml"),
            is_quiet(&old) && tells_changes(root.unwrap()).unwrap()
        );
    }
}
