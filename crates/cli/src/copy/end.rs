//! One side of a copy: a local path or a remote place, with the operations that a copy needs.

use super::handle::Handle;
use super::local::Local;
use crate::remote::{Place, Remotes, flag};
use crate::report::{Failure, Outcome};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use towline_client::{Attr, Batch, DirEntry, Errno, Error, Operation, SetAttr, Timestamp, Url};

/// The most symbolic links followed to find the real place of a target.
const LINKS_MAX: u32 = 40;

/// Explains why a link that leads nowhere is not written through: `cp` does not either.
pub(super) const DANGLING: &str = "it is a dangling symbolic link; remove it first";

/// A path on this machine or on a server.
#[derive(Clone)]
pub(crate) enum End {
    /// On this machine.
    Local(Local),
    /// On a server.
    Remote(Place),
}

/// Attributes, with the file system to tell apart files of the same inode number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    /// Attributes.
    pub(crate) attr: Attr,
    /// Identifies the file together with the inode number.
    pub(crate) file_system: FileSystem,
    /// Symbolic links were followed, and are followed when the file is opened.
    pub(crate) is_followed: bool,
}

/// A file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FileSystem {
    /// Of this machine: its device number.
    Local(u64),
    /// A file system in an export.
    Remote {
        /// [`Place::device`].
        export: u64,
        /// [`Attr::file_system`].
        number: u16,
    },
}

impl FileSystem {
    /// Returns the file system of a file in this place's export.
    fn remote(place: &Place, attr: &Attr) -> Self {
        Self::Remote { export: place.device(), number: attr.file_system() }
    }

    /// Returns true if both are named from the same side, so that two file systems have different names.
    fn is_seen_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Remote { export: one, .. }, Self::Remote { export: two, .. }) => one == two,
            (one, two) => matches!((one, two), (Self::Local(_), Self::Local(_))),
        }
    }
}

impl Status {
    fn remote(place: &Place, attr: Attr, is_followed: bool) -> Self {
        Self { attr, file_system: FileSystem::remote(place, &attr), is_followed }
    }

    /// Returns true if both are the same file, even if it is reached in two ways (a local path and a URL, or two
    /// exports). Then inode number, mode and change time decide: no two files are assumed to share them.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        if self.is_seen_with(other) || self.attr.changed == Timestamp::default() {
            return self.identity() == other.identity();
        }
        self.seen() == other.seen()
    }

    /// Returns true if [`Status::identity`] tells the two apart.
    pub(super) fn is_seen_with(&self, other: &Self) -> bool {
        self.file_system.is_seen_with(&other.file_system)
    }

    /// Identifies the file among the files of this machine and of servers.
    pub(super) fn identity(&self) -> (FileSystem, u64) {
        (self.file_system, self.attr.inode)
    }

    /// Returns what both sides see alike of a file that nobody changes.
    pub(super) fn seen(&self) -> (u64, u32, Timestamp) {
        (self.attr.inode, self.attr.mode, self.attr.changed)
    }
}

/// An entry of a directory.
pub(crate) struct Listed {
    /// Name.
    pub(crate) name: Vec<u8>,
    /// Status, without following links.
    pub(crate) status: Status,
}

/// A read of the start of a remote file that was started ahead.
pub(crate) struct Reading {
    operation: Operation<Vec<u8>>,
    follow: bool,
}

impl Reading {
    /// Returns what [`End::read_start`] does.
    pub(crate) fn wait(self) -> Outcome<Vec<u8>> {
        self.operation.wait().map_err(|error| about_link(self.follow, error.into()))
    }
}

/// A listing of a remote directory that was started ahead.
pub(crate) struct Listing {
    place: Place,
    follow: bool,
    operation: Operation<Batch>,
}

impl Listing {
    fn start(place: &Place, follow: bool) -> Outcome<Self> {
        let operation = place.base.start_list_path(place.path(), no_follow(follow), true)?;
        Ok(Self { place: place.clone(), follow, operation })
    }

    /// Returns what [`End::list`] does.
    pub(crate) fn wait(self, mut failed: impl FnMut(Failure)) -> Outcome<Vec<Listed>> {
        let Self { place, follow, operation } = self;
        let about = |error: Error| about_listed(follow, error.into());
        let (mut entries, end) = operation.wait().map_err(about)?;
        let is_dots = |entry: &DirEntry| entry.name == b"." || entry.name == b"..";
        let mut directory = None;
        if !end || entries.iter().any(|entry| entry.attr.is_none() && !is_dots(entry)) {
            let flags = flag::DIRECTORY | no_follow(follow);
            let open = place.base.open(place.path(), flags, 0).map_err(about)?;
            entries = open.list_rest((entries, end), true).map_err(about)?;
            directory = Some(open);
        }
        entries.retain(|entry| !is_dots(entry));
        let look = |name: &[u8]| match &directory {
            Some(open) => open.stat_path(name, false),
            None => Err(Errno::ENOENT.into()),
        };
        let mut listed = Vec::with_capacity(entries.len());
        for entry in entries {
            let attr = match entry.attr.map_or_else(|| look(&entry.name), Ok) {
                Ok(attr) => attr,
                // It was removed since it was listed.
                Err(error) if error.errno() == Errno::ENOENT => continue,
                Err(error) => {
                    failed(Failure::from(error).about(place.child(&entry.name)));
                    continue;
                }
            };
            listed.push(Listed { status: Status::remote(&place, attr, false), name: entry.name });
        }
        Ok(listed)
    }
}

impl End {
    /// Parses an argument. Text that looks like a Towline URL is remote.
    pub(crate) fn parse(remotes: &Remotes, argument: &OsStr) -> Outcome<Self> {
        match argument.to_str() {
            Some(text) if Url::looks_like(text) => {
                Ok(Self::Remote(remotes.place(text).map_err(|f| f.about(text))?))
            }
            _ => Ok(Self::Local(Local::new(argument))),
        }
    }

    /// Returns true for a path on this machine.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Local(_))
    }

    /// Returns true if what is here is written to, not replaced: a fifo, a device, or `/dev/stdout` and the like.
    pub(crate) fn is_written_in_place(&self, there: &Status) -> bool {
        let is_special = !there.attr.is_file() && !there.attr.is_directory();
        is_special || matches!(self, Self::Local(local) if local.stream().is_some())
    }

    /// Returns the path of a name in this directory.
    pub(crate) fn child(&self, name: &[u8]) -> Self {
        match self {
            Self::Local(local) => Self::Local(local.child(name)),
            Self::Remote(place) => Self::Remote(place.child(name)),
        }
    }

    /// Returns the path of another name in the directory that holds this one.
    pub(crate) fn sibling(&self, name: &[u8]) -> Outcome<Self> {
        match self {
            Self::Local(local) => Ok(Self::Local(local.sibling(name))),
            Self::Remote(place) => Ok(Self::Remote(place.sibling(name).ok_or(Errno::EISDIR)?)),
        }
    }

    /// Returns the last name of the path: empty, `.` or `..` if the path ends so.
    pub(crate) fn name(&self) -> &[u8] {
        match self {
            Self::Local(local) => local.name(),
            Self::Remote(place) => place.name(),
        }
    }

    /// Returns true if the path ends in a slash, so that it must be a directory.
    pub(crate) fn must_be_directory(&self) -> bool {
        match self {
            Self::Local(local) => local.full().ends_with(b"/"),
            Self::Remote(place) => place.full().ends_with(b"/"),
        }
    }

    /// Returns the attributes.
    pub(crate) fn status(&self, follow: bool) -> Outcome<Status> {
        match self {
            Self::Local(local) => local.status(follow),
            Self::Remote(place) => {
                let attr = place.base.stat_path(place.path(), follow)?;
                Ok(Status::remote(place, attr, follow))
            }
        }
    }

    /// Returns the attributes, or `None` if there is no such file.
    pub(crate) fn status_if_any(&self, follow: bool) -> Outcome<Option<Status>> {
        match self.status(follow) {
            Ok(status) => Ok(Some(status)),
            Err(failure) if failure.is(Errno::ENOENT) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Lists this directory with the attributes of all entries. Calls `failed` for each entry that cannot be
    /// looked at, and leaves it out. A symbolic link that has replaced the directory since it was looked at is
    /// followed only if links were followed then ([`Status::is_followed`]).
    pub(crate) fn list(&self, follow: bool, failed: impl FnMut(Failure)) -> Outcome<Vec<Listed>> {
        match self {
            Self::Local(local) => {
                local.list(follow, failed).map_err(|failure| about_listed(follow, failure))
            }
            Self::Remote(place) => Listing::start(place, follow)?.wait(failed),
        }
    }

    /// Starts [`End::list`] of a remote directory. Returns `None` for a local one, and if it cannot be started
    /// now: it fails again when it is listed in its turn.
    pub(crate) fn start_list(&self, follow: bool) -> Option<Listing> {
        let Self::Remote(place) = self else { return None };
        Listing::start(place, follow).ok()
    }

    /// Returns the same directory with a short path, which leaves room for names below it. Follows links like
    /// [`End::list`].
    pub(crate) fn shortened(self, follow: bool) -> Outcome<Self> {
        match self {
            Self::Remote(place) => place.shortened(no_follow(follow)).map(Self::Remote),
            Self::Local(local) => local.shortened(follow).map(Self::Local),
        }
    }

    /// Returns the same place with a short path, which leaves room for longer names in the directory that holds it.
    pub(crate) fn parent_shortened(self) -> Outcome<Self> {
        match self {
            Self::Remote(place) => place.parent_shortened().map(Self::Remote),
            Self::Local(local) => local.parent_shortened().map(Self::Local),
        }
    }

    /// Returns the text of a symbolic link.
    pub(crate) fn read_link(&self) -> Outcome<Vec<u8>> {
        match self {
            Self::Local(local) => local.read_link(),
            Self::Remote(place) => Ok(place.base.read_link(place.path())?),
        }
    }

    /// Reads up to `length` bytes from the start of a regular file, opened like [`End::open_regular`]. A
    /// remote file takes one round trip.
    pub(crate) fn read_start(&self, follow: bool, length: usize) -> Outcome<Vec<u8>> {
        let mut data = vec![0; length];
        let read = match self {
            Self::Local(_) => self.open_regular(follow)?.read_at(&mut data, 0)?,
            Self::Remote(place) => place
                .base
                .read_path(place.path(), no_follow(follow), &mut data)
                .map_err(|error| about_link(follow, error.into()))?,
        };
        data.truncate(read);
        Ok(data)
    }

    /// Starts [`End::read_start`] of a remote file. Returns `None` for a local one, and if it cannot be started
    /// now: it fails again when it is read in its turn.
    pub(crate) fn start_read_start(&self, follow: bool, length: usize) -> Option<Reading> {
        let Self::Remote(place) = self else { return None };
        let operation = place.base.start_read_path(place.path(), no_follow(follow), length).ok()?;
        Some(Reading { operation, follow })
    }

    /// Creates a file, which must not exist, with all its bytes. A remote file takes one round trip.
    pub(crate) fn write_new(&self, mode: u32, data: &[u8]) -> Outcome<()> {
        match self {
            Self::Local(local) => local.write_new(mode, data),
            Self::Remote(place) => {
                let flags = flag::WRITE | flag::CREATE | flag::EXCLUSIVE;
                Ok(place.base.write_path(place.path(), flags, mode, data)?)
            }
        }
    }

    /// Makes this remote file, which must not exist, with all its bytes and these attributes. It has the name of `part`
    /// until it is complete, and may be left there after a failure. One round trip.
    pub(crate) fn write_through(
        &self,
        part: &Self,
        mode: u32,
        data: &[u8],
        set: &SetAttr,
    ) -> Outcome<()> {
        let (Self::Remote(place), Self::Remote(part)) = (self, part) else {
            return Err(Errno::EXDEV.into());
        };
        Ok(place.base.write_renamed((part.path(), place.path()), mode, data, set)?)
    }

    /// Opens for reading. Waits for the writer of a fifo.
    pub(crate) fn open(&self) -> Outcome<Handle> {
        match self {
            Self::Local(local) => local.open(),
            Self::Remote(place) => Ok(Handle::Remote(place.base.open(place.path(), 0, 0)?)),
        }
    }

    /// Opens for reading what was a regular file when it was looked at. If something has replaced it since,
    /// does not wait for it, and follows a link only if links were followed then ([`Status::is_followed`]).
    pub(crate) fn open_regular(&self, follow: bool) -> Outcome<Handle> {
        let opened = match self {
            Self::Local(local) => local.open_regular(follow),
            Self::Remote(place) => place
                .base
                .open(place.path(), no_follow(follow), 0)
                .map(Handle::Remote)
                .map_err(Failure::from),
        };
        let handle = opened.map_err(|failure| about_link(follow, failure))?;
        if !handle.opened()?.is_file() {
            return Err(Failure::new(
                "is no longer a regular file: it was replaced after it was listed",
            ));
        }
        Ok(handle)
    }

    /// Creates a file, which must not exist, and opens it for reading and writing.
    pub(crate) fn create(&self, mode: u32) -> Outcome<Handle> {
        match self {
            Self::Local(local) => local.create(mode),
            Self::Remote(place) => {
                let flags = flag::READ_WRITE | flag::CREATE | flag::EXCLUSIVE;
                Ok(Handle::Remote(place.base.open(place.path(), flags, mode)?))
            }
        }
    }

    /// Opens a part for reading and writing, unless it belongs to another user: where everyone may write, somebody may
    /// have put it there to read the data. Does not follow a symbolic link. On a server, `trial` is made and removed to
    /// learn who this user is there.
    pub(crate) fn open_part(&self, trial: &Self) -> Outcome<Handle> {
        let place = match self {
            Self::Local(local) => return local.open_part(),
            Self::Remote(place) => place,
        };
        let part = place.base.open(place.path(), flag::READ_WRITE | flag::NO_FOLLOW, 0)?;
        let user = trial.create(0o600)?.opened()?.uid;
        trial.unlink()?;
        match part.attr().uid == user {
            true => Ok(Handle::Remote(part)),
            false => Err(Failure::new("belongs to another user")),
        }
    }

    /// Opens an existing fifo or device for writing.
    pub(crate) fn open_write(&self) -> Outcome<Handle> {
        match self {
            Self::Local(local) => local.open_write(),
            Self::Remote(place) => {
                Ok(Handle::Remote(place.base.open(place.path(), flag::WRITE, 0)?))
            }
        }
    }

    /// Makes a directory.
    pub(crate) fn make_directory(&self, mode: u32) -> Outcome<()> {
        match self {
            Self::Local(local) => local.make_directory(mode),
            Self::Remote(place) => Ok(place.base.make_directory(place.path(), mode).map(drop)?),
        }
    }

    /// Makes a symbolic link here that points to `target`.
    pub(crate) fn symlink(&self, target: &[u8]) -> Outcome<()> {
        match self {
            Self::Local(local) => local.symlink(target),
            Self::Remote(place) => Ok(place.base.symlink(place.path(), target).map(drop)?),
        }
    }

    /// Makes a fifo, socket or device.
    pub(crate) fn make_node(&self, mode: u32, rdev: u64) -> Outcome<()> {
        match self {
            Self::Local(local) => local.make_node(mode, rdev),
            Self::Remote(place) => Ok(place.base.make_node(place.path(), mode, rdev).map(drop)?),
        }
    }

    /// Gives this file another name, on the same side.
    pub(crate) fn link(&self, new: &Self) -> Outcome<()> {
        match (self, new) {
            (Self::Local(local), Self::Local(new)) => local.link(new),
            (Self::Remote(place), Self::Remote(new)) => {
                Ok(place.base.link(place.path(), false, &new.base, new.path()).map(drop)?)
            }
            _ => Err(Errno::EXDEV.into()),
        }
    }

    /// Renames over what is there, on the same side.
    pub(crate) fn rename(&self, new: &Self) -> Outcome<()> {
        match (self, new) {
            (Self::Local(local), Self::Local(new)) => local.rename(new),
            (Self::Remote(place), Self::Remote(new)) => {
                Ok(place.base.rename(place.path(), &new.base, new.path(), 0)?)
            }
            _ => Err(Errno::EXDEV.into()),
        }
    }

    /// Removes a file.
    pub(crate) fn unlink(&self) -> Outcome<()> {
        match self {
            Self::Local(local) => local.unlink(),
            Self::Remote(place) => Ok(place.base.unlink(place.path(), false)?),
        }
    }

    /// Sets attributes. Does not follow a symbolic link.
    pub(crate) fn set_attr(&self, set: &SetAttr) -> Outcome<()> {
        match self {
            Self::Local(local) => local.set_attr(set),
            Self::Remote(place) => Ok(place.base.set_attr(place.path(), false, set).map(drop)?),
        }
    }

    /// Lists the names of the extended attributes. Follows a symbolic link.
    pub(crate) fn xattrs(&self) -> Outcome<Vec<Vec<u8>>> {
        match self {
            Self::Local(local) => local.xattrs(),
            Self::Remote(place) => Ok(place.base.list_xattrs(place.path(), true)?),
        }
    }

    /// Reads an extended attribute. Follows a symbolic link.
    pub(crate) fn xattr(&self, name: &[u8]) -> Outcome<Vec<u8>> {
        match self {
            Self::Local(local) => local.xattr(name),
            Self::Remote(place) => Ok(place.base.xattr(place.path(), true, name)?),
        }
    }

    /// Sets an extended attribute. Does not follow a symbolic link.
    pub(crate) fn set_xattr(&self, name: &[u8], value: &[u8]) -> Outcome<()> {
        match self {
            Self::Local(local) => local.set_xattr(name, value),
            Self::Remote(place) => Ok(place.base.set_xattr(place.path(), false, name, value, 0)?),
        }
    }

    /// Returns where a symbolic link named as a target leads, so that a copy does not replace the link; other
    /// paths as they are. `root` returns the root of the same export.
    pub(crate) fn resolved(self, root: impl Fn(&Place) -> Outcome<Place>) -> Outcome<Self> {
        let place = match self {
            Self::Local(local) => return local.resolved().map(Self::Local),
            Self::Remote(place) => place,
        };
        let root = root(&place)?;
        let mut path = place.full().to_vec();
        for links in 0..LINKS_MAX {
            let here = place.elsewhere(&root, path.clone());
            let target = match here.base.read_link(here.path()) {
                Ok(target) => target,
                Err(error) if error.errno() == Errno::ENOENT && links > 0 => {
                    return Err(Failure::from(error).with(DANGLING));
                }
                // No link, or nothing at all: this is the place.
                Err(error) if [Errno::EINVAL, Errno::ENOENT].contains(&error.errno()) => {
                    return Ok(Self::Remote(here));
                }
                Err(error) => return Err(error.into()),
            };
            if target.starts_with(b"/") {
                return Err(Failure::new(
                    "is a symbolic link with an absolute target; name the target instead",
                ));
            }
            let directory = Path::new(OsStr::from_bytes(&path));
            let directory = directory.parent().unwrap_or(Path::new(""));
            path = directory.join(OsStr::from_bytes(&target)).into_os_string().into_vec();
        }
        Err(Errno::ELOOP.into())
    }
}

fn no_follow(follow: bool) -> u32 {
    if follow { 0 } else { flag::NO_FOLLOW }
}

/// Explains `ELOOP` for a file that was no link when it was looked at.
fn about_link(follow: bool, failure: Failure) -> Failure {
    if !follow && failure.is(Errno::ELOOP) {
        return failure.with("it became a symbolic link after it was listed");
    }
    failure
}

/// Explains the failure to list what was a directory when it was looked at.
fn about_listed(follow: bool, failure: Failure) -> Failure {
    if follow || !(failure.is(Errno::ENOTDIR) || failure.is(Errno::ELOOP)) {
        return failure;
    }
    failure.with("it was replaced after it was listed")
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(local) => local.fmt(f),
            Self::Remote(place) => place.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode};

    /// Something that takes the place of a listed file neither holds up a copy nor leads it elsewhere.
    #[test]
    fn a_file_that_was_replaced_since_it_was_listed_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "listed").unwrap();
        std::fs::write(directory.path().join("secret"), "elsewhere").unwrap();
        let end = End::Local(Local::new(path.as_os_str()));
        let listed =
            End::Local(Local::new(directory.path().as_os_str())).list(false, drop).unwrap();
        assert!(listed.iter().all(|entry| !entry.status.is_followed));
        assert_eq!(end.read_start(false, 10).unwrap(), b"listed");

        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let failure = end.read_start(false, 10).unwrap_err().to_string();
        assert!(failure.contains("no longer a regular file"), "{failure}");

        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("secret", &path).unwrap();
        let failure = end.read_start(false, 10).unwrap_err().to_string();
        assert!(failure.contains("became a symbolic link"), "{failure}");
        assert!(end.status(true).unwrap().is_followed);
        assert_eq!(end.read_start(true, 9).unwrap(), b"elsewhere");
    }
}
