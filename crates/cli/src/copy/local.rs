//! A path on this machine, with the operations that a copy needs.

use super::closing::close;
use super::end::{DANGLING, FileSystem, Listed, Status};
use super::handle::Handle;
use crate::remote::{join, last_name, parent};
use crate::report::{Failure, Outcome};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Statx, StatxFlags, StatxTimestamp, Timespec,
    Timestamps, Uid, XattrFlags,
};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;
use towline_client::{Attr, SetAttr, Timestamp};
use towline_wire::limits::XATTR_BYTES_MAX;

/// Longer paths are shortened by opening the directory that they lead to: the kernel takes at most 4095
/// bytes, and trees may be deeper.
const PATH_BYTES_REBASE: usize = 2048;

/// A path relative to an open directory, or to the working directory.
#[derive(Clone)]
pub(crate) struct Local {
    base: Option<Arc<OwnedFd>>,
    path: Vec<u8>,
    full: Vec<u8>,
}

impl Local {
    /// Makes a path from an argument.
    pub(crate) fn new(path: &OsStr) -> Self {
        Self { base: None, path: path.as_bytes().to_vec(), full: path.as_bytes().to_vec() }
    }

    /// Returns the path as the user would write it. It may be too long for the kernel.
    pub(super) fn full(&self) -> &[u8] {
        &self.full
    }

    fn base(&self) -> BorrowedFd<'_> {
        self.base.as_ref().map_or(CWD, |base| base.as_fd())
    }

    /// Returns a path for system calls that take no directory descriptor.
    fn whole(&self) -> OsString {
        let Some(base) = &self.base else { return OsString::from_vec(self.path.clone()) };
        let directory = format!("/proc/self/fd/{}", base.as_raw_fd());
        OsString::from_vec(join(directory.as_bytes(), &self.path))
    }

    /// Returns the path of a name in this directory.
    pub(super) fn child(&self, name: &[u8]) -> Self {
        let (path, full) = (join(&self.path, name), join(&self.full, name));
        Self { base: self.base.clone(), path, full }
    }

    /// Returns the path of another name in the directory that holds this one.
    pub(super) fn sibling(&self, name: &[u8]) -> Self {
        let replace = |path: &[u8]| [parent(path), name].concat();
        Self { base: self.base.clone(), path: replace(&self.path), full: replace(&self.full) }
    }

    /// Returns the same directory with a short path, which leaves room for names below it.
    pub(super) fn shortened(self, follow: bool) -> Outcome<Self> {
        if self.path.len() < PATH_BYTES_REBASE {
            return Ok(self);
        }
        let base = self.open_directory(OFlags::PATH, follow)?;
        Ok(Self { base: Some(Arc::new(base)), path: b".".to_vec(), ..self })
    }

    /// Returns the same path, but short, which leaves room for longer names in the directory that holds it.
    pub(super) fn parent_shortened(self) -> Outcome<Self> {
        let directory = parent(&self.path);
        if directory.len() < PATH_BYTES_REBASE {
            return Ok(self);
        }
        let path = self.path[directory.len()..].to_vec();
        let directory = Self { path: directory.to_vec(), ..self.clone() };
        let base = directory.open_directory(OFlags::PATH, true)?;
        Ok(Self { base: Some(Arc::new(base)), path, ..self })
    }

    /// Returns the attributes.
    pub(super) fn status(&self, follow: bool) -> Outcome<Status> {
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = rustix::fs::statx(self.base(), &self.path, flags, StatxFlags::BASIC_STATS)?;
        Ok(status_of(&stat, follow))
    }

    /// Lists this directory. Leaves out entries that are removed meanwhile, and those that cannot be looked at,
    /// for which it calls `failed`.
    pub(super) fn list(
        &self,
        follow: bool,
        mut failed: impl FnMut(Failure),
    ) -> Outcome<Vec<Listed>> {
        // Not `read_from`, which opens `.`: what may be listed may not always be entered.
        let mut directory = Dir::new(self.open_directory(OFlags::RDONLY, follow)?)?;
        let mut listed = Vec::new();
        while let Some(entry) = directory.read() {
            let entry = entry?;
            let name = entry.file_name();
            if [b".".as_slice(), b".."].contains(&name.to_bytes()) {
                continue;
            }
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            match rustix::fs::statx(directory.fd()?, name, flags, StatxFlags::BASIC_STATS) {
                Ok(stat) => {
                    let name = name.to_bytes().to_vec();
                    listed.push(Listed { name, status: status_of(&stat, false) });
                }
                Err(rustix::io::Errno::NOENT) => (),
                Err(error) => failed(Failure::from(error).about(self.child(name.to_bytes()))),
            }
        }
        Ok(listed)
    }

    fn open_with(&self, flags: OFlags, mode: u32) -> Outcome<OwnedFd> {
        let (flags, mode) = (flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode));
        Ok(rustix::fs::openat(self.base(), &self.path, flags, mode)?)
    }

    fn open_directory(&self, mut flags: OFlags, follow: bool) -> Outcome<OwnedFd> {
        flags.set(OFlags::NOFOLLOW, !follow);
        self.open_with(flags | OFlags::DIRECTORY, 0)
    }

    /// Opens for reading.
    pub(super) fn open(&self) -> Outcome<Handle> {
        Ok(Handle::Local(File::from(self.open_with(OFlags::RDONLY, 0)?)))
    }

    /// Opens a regular file for reading. Does not wait if it is something else, such as a fifo.
    pub(super) fn open_regular(&self, follow: bool) -> Outcome<Handle> {
        let mut flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        flags.set(OFlags::NOFOLLOW, !follow);
        Ok(Handle::Local(File::from(self.open_with(flags, 0)?)))
    }

    /// Opens an existing fifo or device for writing, or returns the [`Local::stream`].
    pub(super) fn open_write(&self) -> Outcome<Handle> {
        let fd = self.stream().map_or_else(|| self.open_with(OFlags::WRONLY, 0), Ok)?;
        Ok(Handle::Local(File::from(fd)))
    }

    /// Returns standard output or standard error, if this is a link to the regular file to which that goes
    /// (`/dev/stdout`). Other programs write to it, too, and it may have no name: so it is neither replaced nor
    /// opened anew.
    pub(super) fn stream(&self) -> Option<OwnedFd> {
        let there = self.status(true).ok().filter(|there| there.attr.is_file())?;
        if !self.status(false).ok()?.attr.is_symlink() {
            return None;
        }
        let is_it = |stream: BorrowedFd<'_>| {
            status_of_file(stream).is_ok_and(|status| status.identity() == there.identity())
        };
        let (out, error) = (std::io::stdout(), std::io::stderr());
        let stream = [out.as_fd(), error.as_fd()].into_iter().find(|stream| is_it(*stream));
        stream?.try_clone_to_owned().ok()
    }

    /// Creates a file, which must not exist, with all its bytes.
    pub(super) fn write_new(&self, mode: u32, data: &[u8]) -> Outcome<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mut file = File::from(self.open_with(flags, mode)?);
        file.write_all(data)?;
        Ok(close(file)?)
    }

    /// Creates a file, which must not exist, and opens it for reading and writing.
    pub(super) fn create(&self, mode: u32) -> Outcome<Handle> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        Ok(Handle::Local(File::from(self.open_with(flags, mode)?)))
    }

    /// Opens a part for reading and writing, unless it belongs to another user.
    pub(super) fn open_part(&self) -> Outcome<Handle> {
        let file = self.open_with(OFlags::RDWR | OFlags::NOFOLLOW, 0)?;
        if status_of_file(&file)?.attr.uid != rustix::process::geteuid().as_raw() {
            return Err(Failure::new("belongs to another user"));
        }
        Ok(Handle::Local(File::from(file)))
    }

    /// Makes a directory.
    pub(super) fn make_directory(&self, mode: u32) -> Outcome<()> {
        Ok(rustix::fs::mkdirat(self.base(), &self.path, Mode::from_raw_mode(mode))?)
    }

    /// Makes a symbolic link here that points to `target`.
    pub(super) fn symlink(&self, target: &[u8]) -> Outcome<()> {
        Ok(rustix::fs::symlinkat(target, self.base(), &self.path)?)
    }

    /// Returns the text of a symbolic link.
    pub(super) fn read_link(&self) -> Outcome<Vec<u8>> {
        Ok(rustix::fs::readlinkat(self.base(), &self.path, Vec::new())?.into_bytes())
    }

    /// Makes a fifo, socket or device.
    pub(super) fn make_node(&self, mode: u32, rdev: u64) -> Outcome<()> {
        let (kind, mode) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode & 0o7777));
        Ok(rustix::fs::mknodat(self.base(), &self.path, kind, mode, rdev)?)
    }

    /// Gives this file another name.
    pub(super) fn link(&self, new: &Self) -> Outcome<()> {
        let flags = AtFlags::empty();
        Ok(rustix::fs::linkat(self.base(), &self.path, new.base(), &new.path, flags)?)
    }

    /// Renames over what is there.
    pub(super) fn rename(&self, new: &Self) -> Outcome<()> {
        Ok(rustix::fs::renameat(self.base(), &self.path, new.base(), &new.path)?)
    }

    /// Removes a file.
    pub(super) fn unlink(&self) -> Outcome<()> {
        Ok(rustix::fs::unlinkat(self.base(), &self.path, AtFlags::empty())?)
    }

    /// Sets attributes. Does not follow a symbolic link, and fails to set its mode, which a link does not have.
    pub(super) fn set_attr(&self, set: &SetAttr) -> Outcome<()> {
        let (base, path) = (self.base(), self.path.as_slice());
        if set.uid.is_some() || set.gid.is_some() {
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            rustix::fs::chownat(base, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        // After the owner: a change of owner clears the set-user-ID bits.
        if let Some(mode) = set.mode {
            // Not by its path, where somebody may have put a link: only new kernels set a mode without following it.
            let file = self.open_with(OFlags::PATH | OFlags::NOFOLLOW, 0)?;
            let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::chmod(opened, Mode::from_raw_mode(mode))?;
        }
        if let Some((accessed, modified)) = set.times {
            let time = |t: Timestamp| Timespec { tv_sec: t.seconds, tv_nsec: t.nanoseconds.into() };
            let times =
                Timestamps { last_access: time(accessed), last_modification: time(modified) };
            rustix::fs::utimensat(base, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// Lists the names of the extended attributes. Follows a symbolic link.
    pub(super) fn xattrs(&self) -> Outcome<Vec<Vec<u8>>> {
        let mut names = vec![0; XATTR_BYTES_MAX];
        let length = rustix::fs::listxattr(self.whole(), &mut names)?;
        names.truncate(length);
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// Reads an extended attribute. Follows a symbolic link.
    pub(super) fn xattr(&self, name: &[u8]) -> Outcome<Vec<u8>> {
        let mut value = vec![0; XATTR_BYTES_MAX];
        let length = rustix::fs::getxattr(self.whole(), OsStr::from_bytes(name), &mut value)?;
        value.truncate(length);
        Ok(value)
    }

    /// Sets an extended attribute. Does not follow a symbolic link.
    pub(super) fn set_xattr(&self, name: &[u8], value: &[u8]) -> Outcome<()> {
        let (name, flags) = (OsStr::from_bytes(name), XattrFlags::empty());
        Ok(rustix::fs::lsetxattr(self.whole(), name, value, flags)?)
    }

    /// Returns where a symbolic link named as a target leads; other paths as they are.
    pub(super) fn resolved(self) -> Outcome<Self> {
        match self.status(false) {
            _ if self.stream().is_some() => Ok(self),
            Ok(status) if status.attr.is_symlink() => match std::fs::canonicalize(self.whole()) {
                Ok(target) => Ok(Self::new(target.as_os_str())),
                // `/dev/stdout` and the like may lead to something without a path, which is written to. A file that
                // was removed is not: the copy would replace the link.
                Err(_) if self.status(true).is_ok_and(|there| !there.attr.is_file()) => Ok(self),
                Err(error) => Err(Failure::from(error).with(DANGLING)),
            },
            _ => Ok(self),
        }
    }

    /// Returns the last name of the path: empty, `.` or `..` if the path ends so.
    pub(super) fn name(&self) -> &[u8] {
        last_name(&self.full)
    }
}

impl fmt::Display for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::text::escaped(&self.full))
    }
}

/// Returns the attributes of an open file.
pub(super) fn status_of_file(file: impl AsFd) -> Outcome<Status> {
    let flags = AtFlags::EMPTY_PATH;
    Ok(status_of(&rustix::fs::statx(file, c"", flags, StatxFlags::BASIC_STATS)?, false))
}

/// Converts attributes to those of the protocol.
fn status_of(stat: &Statx, is_followed: bool) -> Status {
    let time = |time: StatxTimestamp| Timestamp::new(time.tv_sec, time.tv_nsec);
    let attr = Attr {
        inode: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        mode: stat.stx_mode.into(),
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        accessed: time(stat.stx_atime),
        modified: time(stat.stx_mtime),
        changed: time(stat.stx_ctime),
        ..Attr::default()
    };
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Status { attr, file_system: FileSystem::Local(device), is_followed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    /// In a directory that everyone may write, somebody may put a link in the place of a part.
    #[test]
    fn the_mode_of_what_a_link_leads_to_is_not_set() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        std::fs::write(&file, "other").unwrap();
        symlink("file", &link).unwrap();
        let mode = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
        Local::new(file.as_os_str()).set_attr(&mode(0o640)).unwrap();
        assert!(Local::new(link.as_os_str()).set_attr(&mode(0o666)).is_err());
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
    }
}
