//! Finds file systems in a tree that may hang because they ask another machine (NFS) or another
//! process (FUSE).
//!
//! A call on such a file system may wait forever. [`LOCAL`] lists the ones that need only this
//! kernel and its devices; all others are assumed to hang.

use super::resolve::proc_path;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

/// File systems on local devices, in memory, and of the kernel itself, by their names in
/// `proc_pid_mountinfo(5)`.
const LOCAL: &[&str] = &[
    // On devices.
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "bcachefs",
    "zfs",
    "jfs",
    "nilfs2",
    "reiserfs",
    "udf",
    "iso9660",
    "squashfs",
    "erofs",
    "vfat",
    "msdos",
    "exfat",
    "ntfs3",
    // In memory, and on top of others.
    "tmpfs",
    "ramfs",
    "rootfs",
    "devtmpfs",
    "hugetlbfs",
    "overlay",
    // Of the kernel.
    "proc",
    "sysfs",
    "devpts",
    "cgroup",
    "cgroup2",
    "mqueue",
    "debugfs",
    "tracefs",
    "securityfs",
    "configfs",
    "pstore",
    "bpf",
    "efivarfs",
    "binfmt_misc",
    "fusectl",
    "rpc_pipefs",
    "nfsd",
    "nsfs",
    "selinuxfs",
];

/// Returns the type of a foreign file system that holds this file or directory, or is mounted below
/// it.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn foreign(file: &OwnedFd) -> io::Result<Option<String>> {
    let path = std::fs::read_link(proc_path(file))?;
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(foreign_in(&table, path.as_os_str().as_bytes()))
}

fn foreign_in(table: &[u8], path: &[u8]) -> Option<String> {
    let mounts = table.split(|byte| *byte == b'\n').filter_map(parse);
    let mut holder: Option<(Vec<u8>, String)> = None;
    let mut below = None;
    for (point, kind) in mounts {
        // If there are two on one mount point, the later one is visible.
        if is_within(path, &point) && holder.as_ref().is_none_or(|(h, _)| h.len() <= point.len()) {
            holder = Some((point, kind));
        } else if point != path && is_within(&point, path) && !LOCAL.contains(&kind.as_str()) {
            below = Some(kind);
        }
    }
    let on = holder.map(|(_, kind)| kind).filter(|kind| !LOCAL.contains(&kind.as_str()));
    on.or(below)
}

/// Returns true if `path` is `directory` or below it.
fn is_within(path: &[u8], directory: &[u8]) -> bool {
    let directory = directory.strip_suffix(b"/").unwrap_or(directory);
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Returns the mount point and file system type of a line of `proc_pid_mountinfo(5)`.
fn parse(line: &[u8]) -> Option<(Vec<u8>, String)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = unescape(fields.nth(4)?);
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some((point, String::from_utf8_lossy(kind).into_owned()))
}

/// Decodes blanks, line ends and backslashes, which are written as a backslash and three octal
/// digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let code = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
        22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        23 22 0:21 / /proc rw shared:5 - proc proc rw\n\
        30 22 0:40 / /srv/a\\040b rw shared:7 master:2 - nfs4 host:/a rw,hard\n\
        31 22 0:41 / /srv/deep/er rw - fuse.sshfs host: rw\n\
        32 22 0:42 / /mnt rw - cifs //host/share rw\n\
        33 22 254:1 / /mnt rw - xfs /dev/vdb rw\n\
        34 22 0:43 / /new rw - neverheardof none rw\n";

    #[test]
    fn what_a_directory_is_on_and_what_is_mounted_below_it_counts() {
        let found = |path: &str| foreign_in(TABLE, path.as_bytes());
        assert_eq!(found("/home"), None);
        assert_eq!(found("/srv/a b").as_deref(), Some("nfs4"));
        assert_eq!(found("/srv/a b/c").as_deref(), Some("nfs4"));
        assert_eq!(found("/srv/a bc"), None, "another name that begins so");
        assert_eq!(found("/srv/deep").as_deref(), Some("fuse.sshfs"), "below it");
        assert_eq!(found("/srv/deep/e"), None);
        assert_eq!(found("/mnt/x"), None, "hidden by what was mounted later");
        assert_eq!(found("/new").as_deref(), Some("neverheardof"));
        assert!(found("/").is_some());
    }

    #[test]
    fn directories_of_this_machine_are_found_in_its_table() {
        let directory = rustix::fs::open(
            "/proc",
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        assert_eq!(foreign(&directory).unwrap(), None);
    }
}
