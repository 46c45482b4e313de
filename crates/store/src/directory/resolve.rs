//! Paths to files, never out of the export.

use super::attributes::{errno, identity_of, stat_file, stat_name};
use super::identity::{Acting, ServerIdentity};
use super::known::Known;
use super::open_file::DirectoryFile;
use super::residency::Residency;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, Statx};
use rustix::io::Errno as Code;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use towline_wire::Errno;
use towline_wire::attr::TYPE_DIRECTORY;
use towline_wire::limits::PATH_BYTES_MAX;

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
/// How often a resolution is tried that collided with renames elsewhere in the file system.
const COLLISIONS_MAX: usize = 100;
/// Opens a reference to a directory.
pub(super) const PARENT: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// What all open files of a store share.
#[derive(Debug)]
pub(super) struct Tree {
    /// The root of the export, a reference (`O_PATH`).
    pub(super) root: Arc<OwnedFd>,
    /// Device and inode of the root.
    pub(super) root_identity: (u64, u64),
    /// Device of the export, of which this may be a directory.
    pub(super) device: u64,
    /// Who runs the server.
    pub(super) server: Arc<ServerIdentity>,
    /// Nothing may be changed.
    pub(super) read_only: bool,
    /// Directories whose place is known.
    pub(super) known: Known,
    /// Whether reads can tell what they would wait for.
    pub(super) residency: Residency,
    /// Type of a file system in it that asks somebody else, so that calls may wait without end; once
    /// set it stays. Shared with the stores of directories in it.
    pub(super) foreign: Arc<OnceLock<String>>,
}

/// A descriptor that is either an open file's own or was opened for one call.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// That of an open file.
    Base(&'a DirectoryFile),
    /// Opened for this call, as a reference (`O_PATH`).
    Opened(OwnedFd),
    /// Known to be there.
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
    /// The last component, with slashes after it if the path ended so; may be `.` or `..`, which
    /// the system calls that take a new or removed name refuse.
    pub(super) name: &'a [u8],
}

impl Place<'_> {
    /// Attributes of what stands there now, links not followed.
    pub(super) fn stat(&self) -> Result<Statx, Errno> {
        // With a slash after it, a symbolic link would be followed, perhaps out of the export.
        stat_name(&self.directory, trim_slashes(self.name))
    }
}

impl Tree {
    /// `EROFS` when nothing may be changed.
    pub(super) fn check_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::EROFS) } else { Ok(()) }
    }

    /// The directory that holds the last component of `path`, if it is known to be at its place,
    /// and that component. Only for the server's own identity: nothing asks whether another one may
    /// go through the directories above.
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

    /// Opens `path` from `base`, beneath the root.
    pub(super) fn open(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, Errno> {
        if let Some((directory, name)) = self.known(acting, base, path) {
            match open_name(directory.as_fd(), name, flags, mode) {
                // A symbolic link that leads out of the directory, but perhaps not of the export;
                // or the directory was removed.
                Err(Code::XDEV | Code::NOENT) => {}
                result => return result.map_err(errno),
            }
        }
        if path.starts_with(b"/") {
            return Err(Errno::EXDEV);
        }
        let is_root = base.identity == self.root_identity;
        let goes_up = path == b".." || path.starts_with(b"../");
        if is_root || !goes_up {
            match open_beneath(base.fd.as_fd(), path, flags, mode) {
                Err(Code::XDEV) if !is_root => {}
                result => return result.map_err(errno),
            }
        }
        if base.kind != TYPE_DIRECTORY {
            return Err(Errno::ENOTDIR);
        }
        // It leaves the base, but perhaps not the export. What is found from there is only a hint where to
        // look: if a rename comes between, another file of the export is found, as could have happened
        // to `..` itself.
        let path = match self.path_from_root(base) {
            Err(Errno::ENOENT) if goes_up => [&self.path_above_removed(base)?, &path[2..]].concat(),
            from_root => [&from_root?, &b"/"[..], path].concat(),
        };
        if path.len() > PATH_BYTES_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        open_beneath(self.root.as_fd(), &path, flags, mode).map_err(errno)
    }

    /// The file that `path` names, or the base itself if it is empty.
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

    /// The directory and last component of `path`.
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
            // Of two names, what is wrong with the directory of either is told first.
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

    /// The path from the root to where the directory `base` is now.
    pub(super) fn path_from_root(&self, base: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        let path = self.below_root(&path_of(&base.fd)?)?;
        // A removed directory has a path that names nothing or something else.
        let found = open_beneath(self.root.as_fd(), &path, PARENT, Mode::empty()).map_err(errno)?;
        if identity_of(&stat_file(&found)?) != base.identity {
            return Err(Errno::ENOENT);
        }
        Ok(path)
    }

    /// The path from the root to the name that anything else was opened by, as `/proc` has it.
    pub(super) fn name_from_root(&self, file: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        self.below_root(&path_of(&file.fd)?)
    }

    /// The path from the root to where a directory was that has been removed, without its name: what `..` in
    /// it still leads to.
    fn path_above_removed(&self, base: &DirectoryFile) -> Result<Vec<u8>, Errno> {
        let place = path_of(&base.fd)?;
        let place = place.strip_suffix(b" (deleted)").ok_or(Errno::ENOENT)?;
        let cut = place.iter().rposition(|byte| *byte == b'/').ok_or(Errno::ENOENT)?;
        self.below_root(&place[..cut.max(1)])
    }

    /// What `place`, an absolute path of the server, is from the root.
    fn below_root(&self, place: &[u8]) -> Result<Vec<u8>, Errno> {
        let root = path_of(&self.root)?;
        match place.strip_prefix(trim_slashes(&root)) {
            Some(b"" | b"/") => Ok(b".".to_vec()),
            Some([b'/', rest @ ..]) => Ok(rest.to_vec()),
            _ => Err(Errno::EXDEV),
        }
    }
}

/// False when a known directory was removed: nobody is told of that, and then it is empty for ever.
pub(super) fn has_place(directory: &OwnedFd) -> Result<bool, Errno> {
    Ok(stat_file(directory)?.stx_nlink > 0)
}

/// True for one component that a system call can be given without any resolution: no slash, and
/// neither `.` nor `..`.
pub(super) fn is_name(path: &[u8]) -> bool {
    !path.contains(&b'/') && is_plain(path)
}

/// The same for what has no slash.
fn is_plain(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..")
}

/// The name under `/proc` that leads straight to an open file.
pub(super) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

fn path_of(fd: impl AsFd) -> Result<Vec<u8>, Errno> {
    let path = rustix::fs::readlinkat(CWD, proc_path(fd), Vec::new()).map_err(errno)?;
    Ok(path.into_bytes())
}

/// Opens a name for which [`is_name`] holds. Where it is no symbolic link nothing can lead out, and the kernel
/// need not look out for that, which takes it a fifth of the time.
fn open_name(
    directory: BorrowedFd<'_>,
    name: &[u8],
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Code> {
    // With these a link that is not followed is opened, or fails as something else than a link.
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

fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}
