//! The operations of a copy on files of this machine.

use super::end::{Listed, Status};
use super::handle::Handle;
use crate::report::{Failure, Outcome};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use std::ffi::OsStr;
use std::fs::{self, Metadata, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use towline_client::{Attr, SetAttr, Timestamp};
use towline_wire::limits::XATTR_BYTES_MAX;

/// Attributes.
pub(super) fn status(path: &Path, follow: bool) -> Outcome<Status> {
    Ok(status_of(&if follow { fs::metadata(path)? } else { fs::symlink_metadata(path)? }))
}

/// Attributes as the protocol has them.
pub(super) fn status_of(metadata: &Metadata) -> Status {
    // The kernel keeps nanoseconds below a billion, so they fit.
    let time = |seconds, nanoseconds: i64| Timestamp::new(seconds, nanoseconds as u32);
    let attr = Attr {
        inode: metadata.ino(),
        size: metadata.size(),
        blocks: metadata.blocks(),
        rdev: metadata.rdev(),
        mode: metadata.mode(),
        // More than four billion links exist nowhere.
        links: u32::try_from(metadata.nlink()).unwrap_or(u32::MAX),
        uid: metadata.uid(),
        gid: metadata.gid(),
        accessed: time(metadata.atime(), metadata.atime_nsec()),
        modified: time(metadata.mtime(), metadata.mtime_nsec()),
        changed: time(metadata.ctime(), metadata.ctime_nsec()),
        ..Attr::default()
    };
    Status { attr, device: (false, metadata.dev()) }
}

/// All names of a directory; those that vanish meanwhile are left out.
pub(super) fn list(path: &Path) -> Outcome<Vec<Listed>> {
    let mut listed = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        match entry.metadata() {
            Ok(metadata) => listed
                .push(Listed { name: entry.file_name().into_vec(), status: status_of(&metadata) }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (),
            Err(error) => {
                let path = crate::text::escaped(entry.path().as_os_str().as_bytes());
                return Err(Failure::from(error).about(path));
            }
        }
    }
    Ok(listed)
}

/// Creates a file, which must not exist, with all its bytes.
pub(super) fn write_new(path: &Path, mode: u32, data: &[u8]) -> Outcome<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    Ok(file.write_all(data)?)
}

/// Creates a file, which must not exist, and opens it for reading and writing.
pub(super) fn create(path: &Path, mode: u32) -> Outcome<Handle> {
    let mut options = OpenOptions::new();
    Ok(Handle::Local(options.read(true).write(true).create_new(true).mode(mode).open(path)?))
}

/// Opens a part for reading and writing.
pub(super) fn open_part(path: &Path) -> Outcome<Handle> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        // In a directory that all may write somebody may have put it there to see the data.
        return Err(Failure::new("belongs to another user"));
    }
    Ok(Handle::Local(file))
}

/// Makes a directory.
pub(super) fn make_directory(path: &Path, mode: u32) -> Outcome<()> {
    Ok(fs::DirBuilder::new().mode(mode).create(path)?)
}

/// Makes a fifo, socket or device.
pub(super) fn make_node(path: &Path, mode: u32, rdev: u64) -> Outcome<()> {
    let kind = FileType::from_raw_mode(mode);
    Ok(rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(mode & 0o7777), rdev)?)
}

/// Sets attributes, of a link itself where it is one.
pub(super) fn set_attr(path: &Path, set: &SetAttr) -> Outcome<()> {
    if set.uid.is_some() || set.gid.is_some() {
        let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
        rustix::fs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    // After the owner: changing the owner takes set-user-ID bits away.
    if let Some(mode) = set.mode {
        rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
    }
    if let Some((accessed, modified)) = set.times {
        let time = |t: Timestamp| Timespec { tv_sec: t.seconds, tv_nsec: t.nanoseconds.into() };
        let times = Timestamps { last_access: time(accessed), last_modification: time(modified) };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// Names of the extended attributes.
pub(super) fn xattrs(path: &Path) -> Outcome<Vec<Vec<u8>>> {
    let mut names = vec![0; XATTR_BYTES_MAX];
    let length = rustix::fs::llistxattr(path, &mut names)?;
    names.truncate(length);
    Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
}

/// Value of an extended attribute.
pub(super) fn xattr(path: &Path, name: &[u8]) -> Outcome<Vec<u8>> {
    let mut value = vec![0; XATTR_BYTES_MAX];
    let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value)?;
    value.truncate(length);
    Ok(value)
}

/// Sets an extended attribute.
pub(super) fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> Outcome<()> {
    Ok(rustix::fs::lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty())?)
}

/// Where a symbolic link leads; other paths as they are.
pub(super) fn resolve(path: &Path) -> Outcome<PathBuf> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => match fs::canonicalize(path) {
            Ok(target) => Ok(target),
            // `/dev/stdout` and its kin lead to things without a path, which are written to.
            Err(_) if fs::metadata(path).is_ok() => Ok(path.to_owned()),
            Err(error) => Err(Failure::from(error).with("it is a dangling symbolic link")),
        },
        _ => Ok(path.to_owned()),
    }
}
