//! Operations on names: attributes, directories, links, extended attributes.

use crate::Error;
use crate::File;
use crate::convert::{attributes, bytes, check, check_text, check_xattr, done, flag, unexpected};
use crate::core::Outcome;
use crate::operation::Operation;
use towline_wire::entry::Entries;
use towline_wire::limits::{PATH_BYTES_MAX, XATTR_BYTES_MAX};
use towline_wire::request::{CURRENT, DIRECTORY, FOLLOW, listed, valid};
use towline_wire::{Attr, Errno, Reply, Request, Timestamp};

/// Bytes of entries requested at once: some 800 entries with attributes.
pub(crate) const LIST_BYTES: usize = 128 * 1024;

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirEntry {
    /// Where a listing continues after this entry.
    pub cookie: u64,
    /// Inode number.
    pub inode: u64,
    /// `DT_*`.
    pub file_type: u8,
    /// Name.
    pub name: Vec<u8>,
    /// Attributes, if asked for and available.
    pub attr: Option<Attr>,
}

/// Some entries of a directory, and whether they are the last.
pub type Batch = (Vec<DirEntry>, bool);

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length.
    pub size: Option<u64>,
    /// Access and modification time.
    pub times: Option<(Timestamp, Timestamp)>,
}

impl File {
    /// `fstatat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn stat_path(&self, path: &[u8], follow: bool) -> Result<Attr, Error> {
        self.one(
            Request::Stat { base: self.handle, flags: flag(follow), path: check(path)? },
            attributes,
        )
    }

    /// `lstat(2)` and `stat(2)` of one path, in one round trip.
    ///
    /// # Errors
    /// As `lstat(2)`; the inner errors are those of `stat(2)`.
    pub fn stat_both(&self, path: &[u8]) -> Result<(Attr, Result<Attr, Error>), Error> {
        let followed = Request::Stat { base: self.handle, flags: flag(true), path };
        self.stat_and(path, followed, attributes)
    }

    /// `lstat(2)` and `readlink(2)` of one path, in one round trip.
    ///
    /// # Errors
    /// As `lstat(2)`; the inner errors are those of `readlink(2)`.
    pub fn stat_link(&self, path: &[u8]) -> Result<(Attr, Result<Vec<u8>, Error>), Error> {
        self.stat_and(path, Request::ReadLink { base: self.handle, path }, bytes)
    }

    /// `lstat(2)`, and then something else.
    fn stat_and<T>(
        &self,
        path: &[u8],
        other: Request<'_>,
        convert: impl FnOnce(Reply<'_>) -> Result<T, Error>,
    ) -> Result<(Attr, Result<T, Error>), Error> {
        let itself = Request::Stat { base: self.handle, flags: flag(false), path: check(path)? };
        let outcome = self.core.call(&[itself, other], &[], &mut [])?;
        let mut replies = outcome.replies()?.into_iter();
        let mut next = || match replies.next() {
            Some(Reply::Failed { errno }) => Err(Errno(errno).into()),
            reply => reply.ok_or_else(unexpected),
        };
        let attr = attributes(next()?)?;
        Ok((attr, next().and_then(convert)))
    }

    /// [`File::stat_path`], completed later.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_stat_path(&self, path: &[u8], follow: bool) -> Result<Operation<Attr>, Error> {
        let request = Request::Stat { base: self.handle, flags: flag(follow), path: check(path)? };
        self.core
            .start(&[request], Vec::new(), Vec::new(), |outcome, _| attributes(outcome.single()?))
    }

    fn listing(&self, handle: u64, cookie: u64, attributes: bool) -> Request<'static> {
        let attributes = match (attributes, self.core.tells_xattrs()) {
            (false, _) => 0,
            (true, false) => listed::ATTRIBUTES,
            (true, true) => listed::ATTRIBUTES | listed::XATTRS,
        };
        Request::ReadDir { handle, cookie, length: LIST_BYTES as u32, attributes }
    }

    /// Returns a batch of entries from `cookie` on (zero: the start), and whether it is the last.
    ///
    /// # Errors
    /// As `getdents64(2)`.
    pub fn list(&self, cookie: u64, attributes: bool) -> Result<Batch, Error> {
        let request = [self.listing(self.handle, cookie, attributes)];
        let mut listing = self.core.listings.take();
        let outcome = self.core.call(&request, &[], &mut listing);
        let found = outcome.and_then(|outcome| entries(&outcome, &listing));
        self.core.listings.give_back(listing);
        found
    }

    /// Returns all entries of the directory except `.` and `..`.
    ///
    /// # Errors
    /// As `getdents64(2)`.
    pub fn list_all(&self, attributes: bool) -> Result<Vec<DirEntry>, Error> {
        self.list_rest(self.list(0, attributes)?, attributes)
    }

    /// Completes a batch from the start of the directory, without `.` and `..`.
    ///
    /// # Errors
    /// As `getdents64(2)`.
    pub fn list_rest(&self, first: Batch, attributes: bool) -> Result<Vec<DirEntry>, Error> {
        let (mut all, mut end) = first;
        while !end {
            let cookie = all.last().map_or(0, |entry| entry.cookie);
            let (more, last) = self.list(cookie, attributes)?;
            all.extend(more);
            end = last;
        }
        all.retain(|entry| entry.name != b"." && entry.name != b"..");
        Ok(all)
    }

    /// [`File::open`] of a directory that also returns its first entries (some 800 with attributes)
    /// and whether there are no more, in the same round trip. `None` if they cannot be listed.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_listing(
        &self,
        path: &[u8],
        flags: u32,
        attributes: bool,
    ) -> Result<(Self, Option<Batch>), Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode: 0, path: check(path)? },
            self.listing(CURRENT, 0, attributes),
        ];
        let mut listing = self.core.listings.take();
        let outcome = self.core.call(&requests, &[], &mut listing);
        let found = outcome.and_then(|outcome| {
            let mut replies = outcome.replies()?.into_iter();
            let file = Self::first_opened(&self.core, &mut replies, (self.handle, path), flags)?;
            Ok((file, entries(&outcome, &listing).ok()))
        });
        self.core.listings.give_back(listing);
        found
    }

    /// [`File::open_listing`], completed later. Until [`File::keep`] is called, the directory is closed at the
    /// end of this session, also if the session's family goes on.
    ///
    /// # Errors
    /// If it cannot be started. The operation fails with `ESTALE` if the server was restarted since.
    pub fn start_open_listing(
        &self,
        path: &[u8],
        flags: u32,
        attributes: bool,
    ) -> Result<Operation<(Self, Option<Batch>)>, Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode: 0, path: check(path)? },
            Request::Bind { handle: CURRENT, bound: 1 },
            self.listing(CURRENT, 0, attributes),
        ];
        let (core, epoch) = (self.core.clone(), self.core.boot_epoch());
        let (base, below) = (self.handle, path.to_vec());
        let listing = self.core.listings.take();
        self.core.start(&requests, Vec::new(), listing, move |outcome, listing| {
            // Nobody knew yet of the directory, so it was not reopened.
            let found = if core.boot_epoch() == epoch {
                let mut replies = outcome.replies()?.into_iter();
                Self::first_opened(&core, &mut replies, (base, &below), flags)
                    .map(|file| (file, entries(outcome, &listing).ok()))
            } else {
                Err(Errno::ESTALE.into())
            };
            core.listings.give_back(listing);
            found
        })
    }

    /// Lets an open directory of [`File::start_open_listing`] outlive this session, as any other file of a
    /// family does. Does not wait for the answer.
    ///
    /// # Errors
    /// If it cannot be sent.
    pub fn keep(&self) -> Result<(), Error> {
        let request = Request::Bind { handle: self.handle, bound: 0 };
        self.core.start(&[request], Vec::new(), Vec::new(), |_, _| Ok(())).map(drop)
    }

    /// [`File::open`] of a directory and [`File::list_all`], in one round trip if the first batch has all
    /// entries.
    ///
    /// # Errors
    /// As `open` and `getdents64(2)`.
    pub fn open_list_all(
        &self,
        path: &[u8],
        flags: u32,
        attributes: bool,
    ) -> Result<(Self, Vec<DirEntry>), Error> {
        let (directory, first) = self.open_listing(path, flags, attributes)?;
        let first = first.map_or_else(|| directory.list(0, attributes), Ok)?;
        let all = directory.list_rest(first, attributes)?;
        Ok((directory, all))
    }

    /// Opens a directory, lists it from `cookie` on (zero: the start) and closes it, in one round
    /// trip. Returns its attributes, at most 128 KiB of entries, and whether there are no more.
    ///
    /// # Errors
    /// As `open` and `getdents64(2)`.
    pub fn list_path(
        &self,
        path: &[u8],
        cookie: u64,
        attributes: bool,
    ) -> Result<(Attr, Batch), Error> {
        let requests = self.list_path_requests(path, 0, cookie, attributes)?;
        let mut listing = self.core.listings.take();
        let outcome = self.core.call(&requests, &[], &mut listing);
        let found = outcome.and_then(|outcome| {
            let batch = entries(&outcome, &listing)?;
            match outcome.replies()?.first() {
                Some(Reply::Opened { attr, .. }) => Ok((*attr, batch)),
                _ => Err(unexpected()),
            }
        });
        self.core.listings.give_back(listing);
        found
    }

    fn list_path_requests<'a>(
        &self,
        path: &'a [u8],
        flags: u32,
        cookie: u64,
        attributes: bool,
    ) -> Result<[Request<'a>; 3], Error> {
        let flags = flags | 0o200_000; // O_DIRECTORY
        Ok([
            Request::Open { base: self.handle, flags, mode: 0, path: check(path)? },
            self.listing(CURRENT, cookie, attributes),
            Request::Close { handle: CURRENT },
        ])
    }

    /// Opens a directory with these flags, lists and closes it, completed later. Yields at most
    /// 128 KiB of entries, and whether there are no more; [`File::list_rest`] has the others.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_list_path(
        &self,
        path: &[u8],
        flags: u32,
        attributes: bool,
    ) -> Result<Operation<Batch>, Error> {
        let requests = self.list_path_requests(path, flags, 0, attributes)?;
        let core = self.core.clone();
        let listing = self.core.listings.take();
        self.core.start(&requests, Vec::new(), listing, move |outcome, listing| {
            let found = entries(outcome, &listing);
            core.listings.give_back(listing);
            found
        })
    }

    /// `fchmodat`, `fchownat`, `utimensat` and `truncate` in one; what is `None` stays unchanged.
    /// An empty path means this open file.
    ///
    /// # Errors
    /// As the system calls.
    pub fn set_attr(&self, path: &[u8], follow: bool, set: &SetAttr) -> Result<Attr, Error> {
        self.one(set_attr_request(self.handle, path, follow, set)?, attributes)
    }

    /// [`File::set_attr`] for this open file, completed later.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_set_attr(&self, set: &SetAttr) -> Result<Operation<Attr>, Error> {
        let request = set_attr_request(self.handle, b"", true, set)?;
        self.core
            .start(&[request], Vec::new(), Vec::new(), |outcome, _| attributes(outcome.single()?))
    }

    /// `mkdirat(2)`; `mode` as for [`File::open`].
    ///
    /// # Errors
    /// As the system call.
    pub fn make_directory(&self, path: &[u8], mode: u32) -> Result<Attr, Error> {
        self.one(Request::MakeDir { base: self.handle, mode, path: check(path)? }, attributes)
    }

    /// `mknodat(2)`; `mode` as for [`File::open`], with the file type.
    ///
    /// # Errors
    /// As the system call.
    pub fn make_node(&self, path: &[u8], mode: u32, rdev: u64) -> Result<Attr, Error> {
        self.one(
            Request::MakeNode { base: self.handle, mode, rdev, path: check(path)? },
            attributes,
        )
    }

    /// `symlinkat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn symlink(&self, path: &[u8], target: &[u8]) -> Result<Attr, Error> {
        let target = check_text(target, PATH_BYTES_MAX, Errno::ENAMETOOLONG)?;
        self.one(Request::Symlink { base: self.handle, path: check(path)?, target }, attributes)
    }

    /// `readlinkat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Error> {
        self.one(Request::ReadLink { base: self.handle, path: check(path)? }, bytes)
    }

    /// Returns the path that currently leads to this open file, from the root of its export and
    /// without links; `.` for the root. Anything but a directory keeps the name that it was opened
    /// by, followed by ` (deleted)` once that is removed, as in `/proc/self/fd`.
    ///
    /// # Errors
    /// `ENOTDIR` for files of exports that do not know it (`mem`), `ENOENT` for a removed
    /// directory, `EXDEV` for what is no longer below that root.
    pub fn path(&self) -> Result<Vec<u8>, Error> {
        self.one(Request::PathOf { handle: self.handle }, bytes)
    }

    /// The checks of `chdir(2)` in one round trip: returns the [`File::path`] of a directory that
    /// the caller may enter.
    ///
    /// # Errors
    /// As the system call; the inner errors are those of [`File::path`].
    pub fn path_to_enter(&self, path: &[u8]) -> Result<Result<Vec<u8>, Error>, Error> {
        const FLAGS: u32 = 0o10_200_000; // O_PATH | O_DIRECTORY
        let requests = [
            Request::Open { base: self.handle, flags: FLAGS, mode: 0, path: check(path)? },
            Request::Access { base: CURRENT, mode: 1, path: b"" },
            Request::PathOf { handle: CURRENT },
        ];
        let outcome = self.core.call(&requests, &[], &mut [])?;
        let mut replies = outcome.replies()?.into_iter();
        let _open = Self::first_opened(&self.core, &mut replies, (self.handle, path), FLAGS)?;
        let mut next = || match replies.next() {
            Some(Reply::Failed { errno }) => Err(Errno(errno).into()),
            reply => reply.ok_or_else(unexpected),
        };
        next()?;
        Ok(next().and_then(bytes))
    }

    /// Returns the [`File::path`] of what a path leads to, in one round trip.
    ///
    /// # Errors
    /// As the system call and `File::path`.
    pub fn path_behind(&self, path: &[u8]) -> Result<Vec<u8>, Error> {
        const FLAGS: u32 = 0o10_000_000; // O_PATH
        let requests = [
            Request::Open { base: self.handle, flags: FLAGS, mode: 0, path: check(path)? },
            Request::PathOf { handle: CURRENT },
            Request::Close { handle: CURRENT },
        ];
        let outcome = self.core.call(&requests, &[], &mut [])?;
        let mut replies = outcome.replies()?.into_iter().skip(1);
        match replies.next() {
            Some(path @ Reply::Bytes { .. }) => bytes(path),
            _ => Err(outcome.last().err().unwrap_or_else(unexpected)),
        }
    }

    /// `linkat(2)`; with an empty path links this open file.
    ///
    /// # Errors
    /// As the system call.
    pub fn link(
        &self,
        path: &[u8],
        follow: bool,
        new_base: &Self,
        new_path: &[u8],
    ) -> Result<Attr, Error> {
        let flags = if follow { FOLLOW } else { 0 };
        let (new_base, new_path) = (new_base.handle, check(new_path)?);
        self.one(
            Request::Link { base: self.handle, flags, path: check(path)?, new_base, new_path },
            attributes,
        )
    }

    /// `unlinkat(2)`; `directory` as with `AT_REMOVEDIR`.
    ///
    /// # Errors
    /// As the system call.
    pub fn unlink(&self, path: &[u8], directory: bool) -> Result<(), Error> {
        let flags = if directory { DIRECTORY } else { 0 };
        self.one(Request::Unlink { base: self.handle, flags, path: check(path)? }, done)
    }

    /// [`File::unlink`] of anything but a directory, completed later.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_unlink(&self, path: &[u8]) -> Result<Operation<()>, Error> {
        let request = Request::Unlink { base: self.handle, flags: 0, path: check(path)? };
        self.core
            .start(&[request], Vec::new(), Vec::new(), |outcome, _| outcome.single().map(|_| ()))
    }

    /// `renameat2(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn rename(
        &self,
        path: &[u8],
        new_base: &Self,
        new_path: &[u8],
        flags: u32,
    ) -> Result<(), Error> {
        let (new_base, new_path) = (new_base.handle, check(new_path)?);
        self.one(
            Request::Rename { base: self.handle, flags, path: check(path)?, new_base, new_path },
            done,
        )
    }

    /// `faccessat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn access(&self, path: &[u8], mode: u32) -> Result<(), Error> {
        self.one(Request::Access { base: self.handle, mode, path: check(path)? }, done)
    }

    /// `getxattr(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Result<Vec<u8>, Error> {
        let (path, name) = (check(path)?, check_xattr(name)?);
        self.one(Request::GetXattr { base: self.handle, flags: flag(follow), path, name }, bytes)
    }

    /// `setxattr(2)`; `how` has its flags.
    ///
    /// # Errors
    /// As the system call.
    pub fn set_xattr(
        &self,
        path: &[u8],
        follow: bool,
        name: &[u8],
        value: &[u8],
        how: u32,
    ) -> Result<(), Error> {
        let (path, name) = (check(path)?, check_xattr(name)?);
        if value.len() > XATTR_BYTES_MAX {
            return Err(Errno::E2BIG.into()); // it would not fit into a message
        }
        let (base, flags) = (self.handle, flag(follow));
        let request = Request::SetXattr { base, flags, how, path, name, value };
        self.one(request, done)
    }

    /// `listxattr(2)`: the names.
    ///
    /// # Errors
    /// As the system call.
    pub fn list_xattrs(&self, path: &[u8], follow: bool) -> Result<Vec<Vec<u8>>, Error> {
        let request =
            Request::ListXattr { base: self.handle, flags: flag(follow), path: check(path)? };
        let names = self.one(request, bytes)?;
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// `removexattr(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn remove_xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Result<(), Error> {
        let (path, name) = (check(path)?, check_xattr(name)?);
        self.one(Request::RemoveXattr { base: self.handle, flags: flag(follow), path, name }, done)
    }
}

/// The request of [`File::set_attr`].
pub(crate) fn set_attr_request<'a>(
    base: u64,
    path: &'a [u8],
    follow: bool,
    set: &SetAttr,
) -> Result<Request<'a>, Error> {
    let bit = |present: bool, bit: u32| if present { bit } else { 0 };
    let (accessed, modified) = set.times.unwrap_or((Timestamp::OMIT, Timestamp::OMIT));
    Ok(Request::SetAttr {
        base,
        flags: flag(follow),
        valid: bit(set.mode.is_some(), valid::MODE)
            | bit(set.uid.is_some(), valid::UID)
            | bit(set.gid.is_some(), valid::GID)
            | bit(set.size.is_some(), valid::SIZE)
            | bit(set.times.is_some(), valid::TIMES),
        mode: set.mode.unwrap_or(0),
        uid: set.uid.unwrap_or(0),
        gid: set.gid.unwrap_or(0),
        size: set.size.unwrap_or(0),
        accessed,
        modified,
        path: check(path)?,
    })
}

fn entries(outcome: &Outcome, listing: &[u8]) -> Result<Batch, Error> {
    outcome.last()?;
    let end = outcome.replies()?.iter().find_map(|reply| match reply {
        Reply::Listed { end, .. } => Some(*end != 0),
        _ => None,
    });
    let mut found = Vec::with_capacity(outcome.payload / 160);
    for entry in Entries::new(&listing[..outcome.payload]) {
        let entry = entry?;
        found.push(DirEntry {
            cookie: entry.cookie,
            inode: entry.inode,
            file_type: entry.file_type,
            name: entry.name.to_vec(),
            attr: entry.attr,
        });
    }
    Ok((found, end.ok_or_else(unexpected)?))
}
