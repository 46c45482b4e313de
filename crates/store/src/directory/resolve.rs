//! Resolves paths to files, never out of the export.

use super::attributes::{errno, identity_of, stat_file, stat_name};
use super::identity::{Acting, ServerIdentity};
use super::known::Known;
use super::open_file::DirectoryFile;
use super::residency::Residency;
use crate::trim_slashes;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, Statx};
use rustix::io::Errno as Code;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use towline_wire::Errno;
use towline_wire::attr::TYPE_DIRECTORY;
use towline_wire::limits::PATH_BYTES_MAX;

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
/// Attempts at a resolution that collides with renames elsewhere in the file system.
const COLLISIONS_MAX: usize = 100;
/// Flags to open a reference to a directory.
pub(super) const PARENT: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// State shared by all open files of a store.
#[derive(Debug)]
pub(super) struct Tree {
    /// The root of the export, a reference (`O_PATH`).
    pub(super) root: Arc<OwnedFd>,
    /// Device and inode of the root.
    pub(super) root_identity: (u64, u64),
    /// Device of the whole export; this tree may be a directory in it.
    pub(super) device: u64,
    /// Whether files on that device have a time of change with each change of their contents.
    pub(super) tells_changes: bool,
    /// The identity that the server runs as.
    pub(super) server: Arc<ServerIdentity>,
    /// Whether all changes fail.
    pub(super) read_only: bool,
    /// Known directories.
    pub(super) known: Known,
    /// Whether reads can avoid waiting.
    pub(super) residency: Residency,
    /// Type of a file system in the tree that asks another machine or process, so that calls may
    /// wait forever. Once set it stays. Shared with the stores of directories in this one.
    pub(super) foreign: Arc<OnceLock<String>>,
}

/// A descriptor for one call.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// The descriptor of an open file.
    Base(&'a DirectoryFile),
    /// A reference (`O_PATH`) opened for this call.
    Opened(OwnedFd),
    /// A known directory.
    Known(Arc<OwnedFd>),
}

impl AsFd for Found<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Base(file) => file.fd.as_fd(),
            Self::Opened(fd) => fd.as_fd(),
            Self::Known(fd) => fd.as_fd(),
        }
    }
}

/// A name in an open directory.
#[derive(Debug)]
pub(super) struct Place<'a> {
    /// The directory.
    pub(super) directory: Found<'a>,
    /// The last component, with the slashes at the end of the path. It may be `.` or `..`, which
    /// system calls that create or remove a name reject.
    pub(super) name: &'a [u8],
}

impl Place<'_> {
    /// Returns the attributes of what has this name now, without following a link.
    pub(super) fn stat(&self) -> Result<Statx, Errno> {
        // With a slash at the end, the kernel would follow a symbolic link, perhaps out of the
        // export.
        stat_name(&self.directory, trim_slashes(self.name))
    }
}

impl Tree {
    /// Fails with `EROFS` if the export is read-only.
    pub(super) fn check_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::EROFS) } else { Ok(()) }
    }

    /// Returns the directory that holds the last component of `path`, if it is known, and that
    /// component. Only for the server's own identity: there is no check whether another user may
    /// search the directories above.
    pub(super) fn known<'a>(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &'a [u8],
    ) -> Option<(Arc<OwnedFd>, &'a [u8])> {
        if acting.is_some() || base.identity != self.root_identity {
            return None;
        }
        let slash = path.iter().rposition(|byte| *byte == b'/')?;
        let name = &path[slash + 1..];
        if !is_plain(name) {
            return None;
        }
        self.known.find(self, &path[..slash]).map(|directory| (directory, name))
    }

    /// Opens `path` from `base` if it is in a known directory, which is on the same device as the root. `None`:
    /// it may be elsewhere.
    pub(super) fn open_known(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Option<Result<OwnedFd, Errno>> {
        let (directory, name) = self.known(acting, base, path)?;
        match open_name(directory.as_fd(), name, flags, mode) {
            // A symbolic link leads out of the directory, but perhaps not out of the export; or
            // the directory was removed.
            Err(Code::XDEV | Code::NOENT) => None,
            result => Some(result.map_err(errno)),
        }
    }

    /// Opens `path` from `base`, beneath the root.
    pub(super) fn open(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        if let Some(result) = self.open_known(acting, base, path, flags, mode) {
            return result;
        }
        if path.starts_with(b"/") {
            return Err(Errno::EXDEV);
        }
        let is_root = base.identity == self.root_identity;
        // From anything but a directory, the kernel refuses all paths, and bad flags before that.
        let goes_up = base.kind == TYPE_DIRECTORY && (path == b".." || path.starts_with(b"../"));
        if is_root || !goes_up {
            match open_beneath(base.fd.as_fd(), path, flags, mode) {
                Err(Code::XDEV) if !is_root => {}
                result => return result.map_err(errno),
            }
        }
        // The path leaves the base, but perhaps not the export. The base's path is only a hint
        // where to look: if a rename comes between, another file of the export is found, as could
        // have happened with `..` itself.
        let path = match self.path_from_root(base) {
            Err(Errno::ENOENT) if goes_up => [&self.path_above_removed(base)?, &path[2..]].concat(),
            from_root => [&from_root?, &b"/"[..], path].concat(),
        };
        if path.len() > PATH_BYTES_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        open_beneath(self.root.as_fd(), &path, flags, mode).map_err(errno)
    }

    /// Finds the file that `path` names, or the base itself if the path is empty.
    pub(super) fn find<'a>(
        &self,
        acting: Option<&Acting<'_>>,
        base: &'a DirectoryFile,
        path: &[u8],
        follow: bool,
    ) -> Result<Found<'a>, Errno> {
        if path.is_empty() {
            return Ok(Found::Base(base));
        }
        let mut flags = OFlags::PATH | OFlags::CLOEXEC;
        if !follow {
            flags |= OFlags::NOFOLLOW;
        }
        self.open(acting, base, path, flags, Mode::empty()).map(Found::Opened)
    }

    /// Finds the directory and last component of `path`.
    pub(super) fn place<'a>(
        &self,
        acting: Option<&Acting<'_>>,
        base: &'a DirectoryFile,
        path: &'a [u8],
    ) -> Result<Place<'a>, Errno> {
        if path.is_empty() {
            return Err(Errno::ENOENT);
        }
        if path.starts_with(b"/") {
            return Err(Errno::EXDEV);
        }
        let Some(slash) = trim_slashes(path).iter().rposition(|byte| *byte == b'/') else {
            // Operations on two names report errors of either directory first.
            if base.kind != TYPE_DIRECTORY {
                return Err(Errno::ENOTDIR);
            }
            return Ok(Place { directory: Found::Base(base), name: path });
        };
        if let Some((directory, name)) = self.known(acting, base, path)
            && has_place(&directory)?
        {
            return Ok(Place { directory: Found::Known(directory), name });
        }
        let directory = self.open(acting, base, &path[..slash], PARENT, Mode::empty())?;
        Ok(Place { directory: Found::Opened(directory), name: &path[slash + 1..] })
    }

    /// Returns the current path of the directory `base` from the root.
    pub(super) fn path_from_root(&self, base: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        let path = self.below_root(&path_of(&base.fd)?)?;
        // The path of a removed directory names nothing, or something else.
        let found = open_beneath(self.root.as_fd(), &path, PARENT, Mode::empty()).map_err(errno)?;
        if identity_of(&stat_file(&found)?) != base.identity {
            return Err(Errno::ENOENT);
        }
        Ok(path)
    }

    /// Returns the path of any other file from the root: the name it was opened by, as `/proc`
    /// shows it.
    pub(super) fn name_from_root(&self, file: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        self.below_root(&path_of(&file.fd)?)
    }

    /// Returns the path from the root to the parent of a removed directory, where `..` in it still
    /// leads.
    fn path_above_removed(&self, base: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        let place = path_of(&base.fd)?;
        let place = place.strip_suffix(b" (deleted)").ok_or(Errno::ENOENT)?;
        let cut = place.iter().rposition(|byte| *byte == b'/').ok_or(Errno::ENOENT)?;
        self.below_root(&place[..cut.max(1)])
    }

    /// Converts `place`, an absolute path of the server, to a path from the root.
    fn below_root(&self, place: &[u8]) -> Result<Vec<u8>, Errno> {
        let root = path_of(&self.root)?;
        match place.strip_prefix(trim_slashes(&root)) {
            Some(b"" | b"/") => Ok(b".".to_vec()),
            Some([b'/', rest @ ..]) => Ok(rest.to_vec()),
            _ => Err(Errno::EXDEV),
        }
    }
}

/// Returns false if a known directory was removed: no event reports that, and it then stays empty.
pub(super) fn has_place(directory: &OwnedFd) -> Result<bool, Errno> {
    Ok(stat_file(directory)?.stx_nlink > 0)
}

/// Returns true for a single component that needs no resolution: no slash, and neither `.` nor
/// `..`.
pub(super) fn is_name(path: &[u8]) -> bool {
    !path.contains(&b'/') && is_plain(path)
}

/// Checks the same for a name without slashes.
fn is_plain(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..")
}

/// Returns the path under `/proc` that leads straight to an open file.
pub(super) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

fn path_of(fd: impl AsFd) -> Result<Vec<u8>, Errno> {
    let path = rustix::fs::readlinkat(CWD, proc_path(fd), Vec::new()).map_err(errno)?;
    Ok(path.into_bytes())
}

/// Opens a name for which [`is_name`] holds. If it is no symbolic link it cannot lead out, and the
/// kernel need not check that, which would take a fifth of the time.
fn open_name(
    directory: BorrowedFd<'_>,
    name: &[u8],
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Code> {
    // With these flags a link that is not followed is opened, or fails with another error than
    // `ELOOP`.
    if !flags.intersects(OFlags::PATH.union(OFlags::DIRECTORY)) {
        match rustix::fs::openat(directory, name, flags | OFlags::NOFOLLOW, mode) {
            Err(Code::LOOP | Code::INTR) => {}
            result => return result,
        }
    }
    open_beneath(directory, name, flags, mode)
}

fn open_beneath(
    base: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Code> {
    let mut result = rustix::fs::openat2(base, path, flags, mode, BENEATH);
    for _ in 1..COLLISIONS_MAX {
        if !matches!(result, Err(Code::AGAIN | Code::INTR)) {
            break;
        }
        result = rustix::fs::openat2(base, path, flags, mode, BENEATH);
    }
    result
}
