//! The identity and epoch of a disk, which outlive the server: which contents it has, and since
//! when no completed writes can have been lost.

use crate::block_store::Continuity;
use std::ffi::OsStr;
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

/// Returns the continuity of a file or device at `path`. `inode` is that of a file, and zero for a
/// device, whose node is recreated when the machine boots. Completed writes are in the hands of the
/// kernel, so a crash of the machine loses them, but not one of the server.
pub(super) fn of_file(path: &Path, inode: u64) -> Continuity {
    let whole = std::fs::canonicalize(path);
    let whole = whole.as_deref().map_or(path.as_os_str(), |path| OsStr::new(path));
    let identity = hash(&[whole.as_bytes(), &inode.to_le_bytes()]);
    // Without a boot ID, every start of the server counts as a reboot.
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id")
        .unwrap_or_else(|_| format!("{:?}", std::time::SystemTime::now()).into_bytes());
    Continuity { identity, epoch: hash(&[&boot]) }
}

/// Returns the continuity of a disk made of others; `None` if the contents of one of them end with
/// the server.
pub(super) fn of_members(members: &[Option<Continuity>]) -> Option<Continuity> {
    let each: Option<Vec<Continuity>> = members.iter().copied().collect();
    let each = each?;
    let bytes = |of: fn(&Continuity) -> u64| -> Vec<u8> {
        each.iter().flat_map(|member| of(member).to_le_bytes()).collect()
    };
    Some(Continuity {
        identity: hash(&[&bytes(|member| member.identity)]),
        epoch: hash(&[&bytes(|member| member.epoch)]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same_file_is_the_same_disk() {
        let file = Path::new("/etc/hostname");
        assert_eq!(of_file(file, 7), of_file(Path::new("/etc/../etc/hostname"), 7));
        assert_ne!(of_file(file, 7).identity, of_file(file, 8).identity);
        assert_eq!(of_file(file, 7).epoch, of_file(Path::new("/dev/null"), 0).epoch);
        assert!(of_members(&[Some(of_file(file, 7)), None]).is_none());
    }
}
