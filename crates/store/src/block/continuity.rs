//! The identity and epoch of a disk, which outlive the server: which contents it has, and since
//! when no completed writes can have been lost.

use super::members;
use crate::block_store::Continuity;
use rustix::fs::{AtFlags, FileType, StatxFlags};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// FNV-1a, 64 bits: the same in every build.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        for byte in part.iter().chain(&[0]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

/// Returns the continuity of a file or block device that was opened at `path`. Completed writes are
/// in the hands of the kernel, so a crash of the machine loses them, but not one of the server.
///
/// # Errors
/// Errors of `statx(2)`.
pub(super) fn of_file(path: &Path, file: &OwnedFd) -> io::Result<Continuity> {
    let whole = std::fs::canonicalize(path);
    let whole = whole.as_deref().map_or(path.as_os_str(), |path| OsStr::new(path));
    let identity = hash(&[whole.as_bytes(), &what_is_there(file)?]);
    // Without a boot ID, every start of the server counts as a reboot.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id")
        .unwrap_or_else(|_| format!("{:?}", std::time::SystemTime::now()).into_bytes());
    Ok(Continuity { identity, epoch: hash(&[&boot]) })
}

/// Returns what tells a file or device from another one that takes its place, and stays the same
/// when the machine boots.
fn what_is_there(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?;
    if FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice {
        // Its node is made anew at each boot.
        let (major, minor) = (found.stx_rdev_major, found.stx_rdev_minor);
        return Ok(members::unique_id(Path::new("/sys"), major, minor).unwrap_or_default());
    }
    let mut what = found.stx_ino.to_le_bytes().to_vec();
    // File systems give the inode number of a removed file to the next one.
    if StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME) {
        what.extend_from_slice(&found.stx_btime.tv_sec.to_le_bytes());
        what.extend_from_slice(&found.stx_btime.tv_nsec.to_le_bytes());
    }
    Ok(what)
}

/// Returns the continuity of a disk that has `chunk` bytes of each member in turn; `None` if the
/// contents of one of them end with the server.
pub(super) fn of_members(members: &[Option<Continuity>], chunk: u64) -> Option<Continuity> {
    let each: Option<Vec<Continuity>> = members.iter().copied().collect();
    let each = each?;
    let bytes = |of: fn(&Continuity) -> u64| -> Vec<u8> {
        each.iter().flat_map(|member| of(member).to_le_bytes()).collect()
    };
    Some(Continuity {
        identity: hash(&[&bytes(|member| member.identity), &chunk.to_le_bytes()]),
        epoch: hash(&[&bytes(|member| member.epoch)]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::time::Duration;

    fn of(path: &Path) -> Continuity {
        of_file(path, &File::open(path).unwrap().into()).unwrap()
    }

    #[test]
    fn what_is_the_same_file_is_the_same_disk() {
        let file = Path::new("/etc/hostname");
        assert_eq!(of(file), of(Path::new("/etc/../etc/hostname")));
        assert_eq!(of(file).epoch, of(Path::new("/etc/passwd")).epoch);
        assert_ne!(of(file).identity, of(Path::new("/etc/passwd")).identity);
        assert!(of_members(&[Some(of(file)), None], 4096).is_none());
    }

    #[test]
    fn a_file_that_takes_the_place_of_another_is_another_disk() {
        use std::os::unix::fs::MetadataExt;
        // Not on tmpfs, which does not use inode numbers again.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = directory.path().join("disk");
        let inode = || std::fs::metadata(&path).unwrap().ino();
        for _ in 0..50 {
            std::fs::write(&path, "before").unwrap();
            let (before, its) = (of(&path), inode());
            std::fs::write(&path, "after").unwrap();
            assert_eq!(of(&path), before, "the same file");
            std::fs::remove_file(&path).unwrap();
            // Longer than a tick of the clock that files get their times from.
            std::thread::sleep(Duration::from_millis(20));
            std::fs::write(&path, "after").unwrap();
            assert_ne!(of(&path).identity, before.identity);
            // Another program may have taken the number in between.
            if inode() == its {
                return;
            }
        }
        println!("SKIPPED: the file system does not use inode numbers again");
    }

    #[test]
    fn members_in_another_way_are_another_disk() {
        let [one, other] = ["/etc/hostname", "/etc/passwd"].map(|path| Some(of(Path::new(path))));
        let stripe = of_members(&[one, other], 4096).unwrap();
        for way in [of_members(&[one, other], 8192), of_members(&[other, one], 4096)] {
            assert_ne!(way.unwrap().identity, stripe.identity);
        }
    }
}
