//! Sessions and open files: one method for each operation of the protocol.

use crate::core::{Core, Outcome};
use crate::operation::Operation;
use crate::{Error, Transport};
use std::sync::Arc;
use std::time::Duration;
use towline_wire::entry::Entries;
use towline_wire::limits::{LISTING_BYTES_MAX, NAME_BYTES_MAX, PATH_BYTES_MAX, RECONNECT_SECONDS};
use towline_wire::request::{CURRENT, DIRECTORY, FOLLOW, NO_FOLLOW, open_flag, valid, write_flag};
use towline_wire::{Attr, Errno, Reply, Request, StatFs, Timestamp};

/// Bytes of entries asked for at once: some 800 with attributes. The buffer is cleared each time, so
/// that more would cost small directories dearly.
const LIST_BYTES: usize = 128 * 1024;

/// How a client behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How long a lost connection is tried to be replaced before operations fail.
    pub reconnect: Duration,
    /// How long to look for an answer in shared memory before sleeping, in microseconds.
    pub spin_us: u32,
    /// A random number that names a family of sessions: whoever knows it shares their open files,
    /// see [`File::from_handle`]. Zero: none.
    pub family: u64,
    /// Sockets get no smaller descriptor than this.
    pub descriptor_min: i32,
    /// How many operations that were started may wait to be sent until somebody waits for an
    /// answer, so that many leave by one system call. For programs that keep a pipeline full: half
    /// of its depth is a good number. Zero: each is sent at once.
    pub coalesce: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reconnect: Duration::from_secs(RECONNECT_SECONDS),
            spin_us: 20,
            family: 0,
            descriptor_min: 0,
            coalesce: 0,
        }
    }
}

/// A session with one server. Cloning shares it.
#[derive(Clone)]
pub struct Client {
    pub(crate) core: Arc<Core>,
}

/// An open file or directory. Dropping it closes it with the next request.
pub struct File {
    core: Arc<Core>,
    handle: u64,
    attr: Attr,
    /// What its writes say: [`write_flag::APPEND`] when it was opened with `O_APPEND`.
    write_flags: u32,
}

/// One name of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirEntry {
    /// Where the listing goes on after it.
    pub cookie: u64,
    /// Inode number.
    pub inode: u64,
    /// `DT_*`.
    pub file_type: u8,
    /// Name.
    pub name: Vec<u8>,
    /// Attributes, if asked for and to be had.
    pub attr: Option<Attr>,
}

fn attributes(reply: Reply<'_>) -> Result<Attr, Error> {
    match reply {
        Reply::Attributes { attr } => Ok(attr),
        _ => Err(unexpected()),
    }
}

fn number(reply: Reply<'_>) -> Result<u64, Error> {
    match reply {
        Reply::Number { value } => Ok(value),
        _ => Err(unexpected()),
    }
}

fn bytes(reply: Reply<'_>) -> Result<Vec<u8>, Error> {
    match reply {
        Reply::Bytes { value } => Ok(value.to_vec()),
        _ => Err(unexpected()),
    }
}

fn done(_: Reply<'_>) -> Result<(), Error> {
    Ok(())
}

fn unexpected() -> Error {
    towline_wire::ProtocolError { what: "result of another kind than asked for", at: 0 }.into()
}

fn flag(follow: bool) -> u32 {
    if follow { 0 } else { NO_FOLLOW }
}

/// What the writes of a file say that is opened with these flags.
fn write_flags(open_flags: u32) -> u32 {
    if open_flags & open_flag::APPEND != 0 { write_flag::APPEND } else { 0 }
}

/// Fails as a local call would for a path no kernel would take.
fn check(path: &[u8]) -> Result<&[u8], Error> {
    if path.contains(&0) {
        return Err(Errno::EINVAL.into());
    }
    if path.len() > PATH_BYTES_MAX
        || path.split(|b| *b == b'/').any(|name| name.len() > NAME_BYTES_MAX)
    {
        return Err(Errno::ENAMETOOLONG.into());
    }
    Ok(path)
}

impl Client {
    /// Connects and begins a session.
    ///
    /// # Errors
    /// [`Error::Connection`] says where and why.
    pub fn connect(transport: &Transport, options: Options) -> Result<Self, Error> {
        Ok(Self { core: Core::connect(transport, options)? })
    }

    /// Opens the root directory of an export.
    ///
    /// # Errors
    /// `ENOENT` when there is no such export, `EACCES` when it is not for this user.
    pub fn attach(&self, export: &[u8]) -> Result<File, Error> {
        let outcome = self.core.call(&[Request::Attach { name: export }], &[], &mut [])?;
        File::opened(&self.core, outcome.single()?, None, export, 0)
    }

    /// Names of the server's exports.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn exports(&self) -> Result<Vec<Vec<u8>>, Error> {
        let names = self.inquire(0)?;
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// The server's counters and stage times, as JSON.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn statistics(&self) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&self.inquire(1)?).into_owned())
    }

    fn inquire(&self, what: u32) -> Result<Vec<u8>, Error> {
        let mut answer = vec![0; LISTING_BYTES_MAX];
        let outcome = self.core.call(&[Request::Inquire { what }], &[], &mut answer)?;
        outcome.single()?;
        answer.truncate(outcome.payload);
        Ok(answer)
    }

    /// What its lane runs over at present.
    #[must_use]
    pub fn link_kind(&self) -> towline_net::LinkKind {
        self.core.link().kind()
    }

    /// Where the time of this client's requests went so far.
    #[must_use]
    pub fn times(&self) -> crate::Times {
        self.core.times()
    }

    /// Receives what has come, without waiting, and completes what it completes. For programs that
    /// wait for [`Client::fd`] in an event loop of their own.
    pub fn progress(&self) {
        self.core.progress();
    }

    /// A duplicate of the descriptor that becomes readable when something has come. Over shared
    /// memory it only tells that the server is gone; use [`Operation::wait`] there. It changes
    /// when a lost connection is replaced.
    ///
    /// # Errors
    /// `EMFILE` when there are no descriptors left.
    pub fn fd(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        let link = self.core.link();
        let fd = link.fd().ok_or(std::io::ErrorKind::Unsupported)?;
        fd.try_clone_to_owned()
    }

    /// Runs `work` with an open file of this family whose handle is known, and the `flags` it was
    /// opened with; it stays open.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn with_handle<T>(
        &self,
        handle: u64,
        flags: u32,
        work: impl FnOnce(&File) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (core, attr) = (self.core.clone(), Attr::default());
        let file = File { core, handle, attr, write_flags: write_flags(flags) };
        let result = work(&file);
        let _ = file.into_handle();
        result
    }

    /// Closes an open file of this family, without waiting for the answer.
    pub fn close_handle(&self, handle: u64) {
        self.core.close_later(handle);
    }

    /// Tells the server that the session is over, so that it keeps nothing for it.
    pub fn close(self) {
        self.core.close();
    }
}

impl File {
    fn opened(
        core: &Arc<Core>,
        reply: Reply<'_>,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
    ) -> Result<Self, Error> {
        let Reply::Opened { handle, attr } = reply else { return Err(unexpected()) };
        core.remember(handle, base, export, flags, attr.inode);
        Ok(Self { core: core.clone(), handle, attr, write_flags: write_flags(flags) })
    }

    fn one<T>(
        &self,
        request: Request<'_>,
        convert: impl FnOnce(Reply<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let outcome = self.core.call(&[request], &[], &mut [])?;
        convert(outcome.single()?)
    }

    /// Attributes when it was opened.
    #[must_use]
    pub fn attr(&self) -> &Attr {
        &self.attr
    }

    /// Handle in the protocol.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// A file that another session of the family opened, at `path` from the root of `export`, with
    /// these `flags` and this inode. Nothing is sent; using it fails with `EBADF` when it is not open.
    #[must_use]
    pub fn from_handle(
        client: &Client,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
    ) -> Self {
        let core = client.core.clone();
        core.remember_path(handle, export, path, flags, inode);
        let attr = Attr { inode, ..Attr::default() };
        Self { core, handle, attr, write_flags: write_flags(flags) }
    }

    /// Leaves it open on the server; whoever has the handle can go on with it.
    #[must_use]
    pub fn into_handle(mut self) -> u64 {
        std::mem::replace(&mut self.handle, CURRENT)
    }

    /// `openat(2)`: one round trip, whatever the depth of the path.
    ///
    /// # Errors
    /// As the system call; `EXDEV` where a link or `..` leads out of the export.
    pub fn open(&self, path: &[u8], flags: u32, mode: u32) -> Result<Self, Error> {
        let request = Request::Open { base: self.handle, flags, mode, path: check(path)? };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        Self::opened(&self.core, outcome.single()?, Some((self.handle, path)), b"", flags)
    }

    /// Opens, reads from the start (at most 8 MiB) and closes, in one round trip; returns the bytes
    /// read.
    ///
    /// # Errors
    /// As `open` and `read`.
    pub fn read_path(&self, path: &[u8], target: &mut [u8]) -> Result<usize, Error> {
        let requests = self.read_path_requests(path, target.len())?;
        let outcome = self.core.call(&requests, &[], target)?;
        outcome.last()?;
        Ok(outcome.payload)
    }

    /// [`File::read_path`], completed later; yields the bytes.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_read_path(&self, path: &[u8], length: usize) -> Result<Operation<Vec<u8>>, Error> {
        let requests = self.read_path_requests(path, length)?;
        self.core.start(&requests, Vec::new(), vec![0; length], |outcome, mut bytes| {
            outcome.last()?;
            bytes.truncate(outcome.payload);
            Ok(bytes)
        })
    }

    fn read_path_requests<'a>(
        &self,
        path: &'a [u8],
        length: usize,
    ) -> Result<[Request<'a>; 3], Error> {
        Ok([
            Request::Open { base: self.handle, flags: 0, mode: 0, path: check(path)? },
            Request::Read { handle: CURRENT, offset: 0, length: length as u32 },
            Request::Close { handle: CURRENT },
        ])
    }

    /// Creates a file with all its bytes and closes it, in one round trip. `data` may be as long
    /// as [`towline_wire::limits::TRANSFER_BYTES_MAX`].
    ///
    /// # Errors
    /// As `open` and `write`; `ENOSPC` when not all of it could be written.
    pub fn write_path(&self, path: &[u8], flags: u32, mode: u32, data: &[u8]) -> Result<(), Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            Request::Write {
                handle: CURRENT,
                offset: 0,
                length: data.len() as u32,
                flags: write_flags(flags),
            },
            Request::Close { handle: CURRENT },
        ];
        let outcome = self.core.call(&requests, data, &mut [])?;
        outcome.last()?;
        match outcome.replies()?.get(1) {
            Some(Reply::Wrote { length, .. }) if *length as usize == data.len() => Ok(()),
            Some(Reply::Wrote { .. }) => Err(Errno::ENOSPC.into()),
            _ => Err(unexpected()),
        }
    }

    /// Creates (or opens) a file and closes it, completed later.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_create(&self, path: &[u8], flags: u32, mode: u32) -> Result<Operation<()>, Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            Request::Close { handle: CURRENT },
        ];
        self.core.start(&requests, Vec::new(), Vec::new(), |outcome, _| outcome.last().map(|_| ()))
    }

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

    /// [`File::stat_path`], completed later.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_stat_path(&self, path: &[u8], follow: bool) -> Result<Operation<Attr>, Error> {
        let request = Request::Stat { base: self.handle, flags: flag(follow), path: check(path)? };
        self.core
            .start(&[request], Vec::new(), Vec::new(), |outcome, _| attributes(outcome.single()?))
    }

    /// `fstat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn stat(&self) -> Result<Attr, Error> {
        self.one(Request::Stat { base: self.handle, flags: 0, path: b"" }, attributes)
    }

    /// `pread(2)`, of any length (more than 8 MiB are several requests). Fewer bytes than asked only
    /// at the end of the file.
    ///
    /// # Errors
    /// As the system call.
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> Result<usize, Error> {
        self.core.read(self.handle, target, offset)
    }

    /// [`File::read_at`] of at most 8 MiB, completed later; yields the bytes read and the buffer.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_read_at(
        &self,
        buffer: Vec<u8>,
        offset: u64,
    ) -> Result<Operation<(usize, Vec<u8>)>, Error> {
        let length = buffer.len() as u32;
        let request = Request::Read { handle: self.handle, offset, length };
        self.core.start(&[request], Vec::new(), buffer, |outcome, buffer| {
            outcome.single()?;
            Ok((outcome.payload, buffer))
        })
    }

    /// `pwrite(2)`, of any length; returns the bytes written, fewer only when space runs out. A file
    /// opened with `O_APPEND` is written at its end, whatever the offset; more than 8 MiB are then
    /// several appends.
    ///
    /// # Errors
    /// As the system call.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Error> {
        self.core.write(self.handle, data, offset, self.write_flags)
    }

    /// [`File::write_at`] of at most 8 MiB, completed later; yields the bytes written and the buffer.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_write_at(
        &self,
        data: Vec<u8>,
        offset: u64,
    ) -> Result<Operation<(usize, Vec<u8>)>, Error> {
        let request = Request::Write {
            handle: self.handle,
            offset,
            length: data.len() as u32,
            flags: self.write_flags,
        };
        self.core.start(&[request], data, Vec::new(), |outcome, data| match outcome.single()? {
            Reply::Wrote { length, .. } => Ok((length as usize, data)),
            _ => Err(unexpected()),
        })
    }

    /// Writes at the end of the file, wherever that is by then; returns bytes written and where
    /// they begin. At most 8 MiB, so that it stays one piece.
    ///
    /// # Errors
    /// As `write(2)` with `O_APPEND`.
    pub fn append(&self, data: &[u8]) -> Result<(usize, u64), Error> {
        let request = Request::Write {
            handle: self.handle,
            offset: 0,
            length: data.len() as u32,
            flags: write_flag::APPEND,
        };
        let outcome = self.core.call(&[request], data, &mut [])?;
        match outcome.single()? {
            Reply::Wrote { length, offset } => Ok((length as usize, offset)),
            _ => Err(unexpected()),
        }
    }

    /// One batch of entries from `cookie` on (zero: the start), and whether it was the last.
    ///
    /// # Errors
    /// As `getdents64(2)`.
    pub fn list(&self, cookie: u64, attributes: bool) -> Result<(Vec<DirEntry>, bool), Error> {
        let request = [Request::ReadDir {
            handle: self.handle,
            cookie,
            length: LIST_BYTES as u32,
            attributes: attributes.into(),
        }];
        let mut listing = vec![0; LIST_BYTES];
        let outcome = self.core.call(&request, &[], &mut listing)?;
        entries(&outcome, &listing)
    }

    /// All entries of the directory; `.` and `..` are left out.
    ///
    /// # Errors
    /// As `getdents64(2)`.
    pub fn list_all(&self, attributes: bool) -> Result<Vec<DirEntry>, Error> {
        let (mut all, mut end) = self.list(0, attributes)?;
        while !end {
            let cookie = all.last().map_or(0, |entry| entry.cookie);
            let (more, last) = self.list(cookie, attributes)?;
            all.extend(more);
            end = last;
        }
        all.retain(|entry| entry.name != b"." && entry.name != b"..");
        Ok(all)
    }

    /// Opens, lists and closes a directory, completed later: one round trip where the listing
    /// fits into 128 KiB. Yields the entries and whether there are no more.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_list_path(
        &self,
        path: &[u8],
        attributes: bool,
    ) -> Result<Operation<(Vec<DirEntry>, bool)>, Error> {
        let requests = [
            Request::Open { base: self.handle, flags: 0o200_000, mode: 0, path: check(path)? },
            Request::ReadDir {
                handle: CURRENT,
                cookie: 0,
                length: LIST_BYTES as u32,
                attributes: attributes.into(),
            },
            Request::Close { handle: CURRENT },
        ];
        self.core.start(&requests, Vec::new(), vec![0; LIST_BYTES], |outcome, listing| {
            outcome.last()?;
            entries(&outcome, &listing)
        })
    }

    /// `fchmodat`, `fchownat`, `utimensat`, `truncate` in one; `None` leaves a thing as it is. An
    /// empty path means this open file.
    ///
    /// # Errors
    /// As the system calls.
    pub fn set_attr(&self, path: &[u8], follow: bool, set: &SetAttr) -> Result<Attr, Error> {
        let bit = |present: bool, bit: u32| if present { bit } else { 0 };
        let (accessed, modified) = set.times.unwrap_or((Timestamp::OMIT, Timestamp::OMIT));
        let request = Request::SetAttr {
            base: self.handle,
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
        };
        self.one(request, attributes)
    }

    /// `mkdirat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn make_directory(&self, path: &[u8], mode: u32) -> Result<Attr, Error> {
        self.one(Request::MakeDir { base: self.handle, mode, path: check(path)? }, attributes)
    }

    /// `mknodat(2)`.
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
        self.one(Request::Symlink { base: self.handle, path: check(path)?, target }, attributes)
    }

    /// `readlinkat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Error> {
        self.one(Request::ReadLink { base: self.handle, path: check(path)? }, bytes)
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

    /// [`File::unlink`], completed later.
    ///
    /// # Errors
    /// When it cannot be started.
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

    /// `fstatfs(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn stat_fs(&self) -> Result<StatFs, Error> {
        self.one(Request::StatFs { handle: self.handle }, |reply| match reply {
            Reply::FileSystem { statfs } => Ok(statfs),
            _ => Err(unexpected()),
        })
    }

    /// `fsync(2)` and its kin: one of [`towline_wire::request::sync_kind`].
    ///
    /// # Errors
    /// As the system call.
    pub fn sync(&self, kind: u32) -> Result<(), Error> {
        self.one(Request::Sync { handle: self.handle, kind }, done)
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Error> {
        self.one(Request::Allocate { handle: self.handle, mode, offset, length }, done)
    }

    /// `lseek(2)` for data (3) and holes (4).
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    pub fn seek(&self, offset: u64, whence: u32) -> Result<u64, Error> {
        self.one(Request::Seek { handle: self.handle, offset, whence }, number)
    }

    /// `copy_file_range(2)` inside the server; returns bytes copied.
    ///
    /// # Errors
    /// As the system call; `EXDEV` between exports.
    pub fn copy_range(
        &self,
        offset: u64,
        to: &Self,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Error> {
        let request = Request::CopyRange {
            handle: self.handle,
            offset,
            new_handle: to.handle,
            new_offset: to_offset,
            length,
        };
        self.one(request, number)
    }

    /// `getxattr(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn xattr(&self, path: &[u8], follow: bool, name: &[u8]) -> Result<Vec<u8>, Error> {
        self.one(
            Request::GetXattr { base: self.handle, flags: flag(follow), path: check(path)?, name },
            bytes,
        )
    }

    /// `setxattr(2)`; `how` as its flags.
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
        let request = Request::SetXattr {
            base: self.handle,
            flags: flag(follow),
            how,
            path: check(path)?,
            name,
            value,
        };
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
        self.one(
            Request::RemoveXattr {
                base: self.handle,
                flags: flag(follow),
                path: check(path)?,
                name,
            },
            done,
        )
    }

    /// `fcntl` locks and `flock(2)`; see [`towline_wire::request::lock`] for families and kinds.
    ///
    /// # Errors
    /// `EAGAIN` when taken by another and `wait` is false, `EDEADLK`, `ENOLCK`.
    pub fn lock(&self, lock: &Lock, wait: bool) -> Result<(), Error> {
        let Lock { family, kind, owner, start, length } = *lock;
        let request = Request::Lock {
            handle: self.handle,
            owner,
            family,
            kind,
            wait: wait.into(),
            start,
            length,
        };
        self.one(request, done)?;
        self.core.remember_lock(self.handle, lock);
        Ok(())
    }

    /// `fcntl` F_GETLK: the lock in the way, if there is one.
    ///
    /// # Errors
    /// As the system call.
    pub fn test_lock(&self, lock: &Lock) -> Result<Option<Lock>, Error> {
        let Lock { family, kind, owner, start, length } = *lock;
        let request = Request::TestLock { handle: self.handle, owner, family, kind, start, length };
        self.one(request, |reply| match reply {
            Reply::Conflict { kind: towline_wire::request::lock::UNLOCK, .. } => Ok(None),
            Reply::Conflict { kind, start, length, owner } => {
                Ok(Some(Lock { family, kind, owner, start, length }))
            }
            _ => Err(unexpected()),
        })
    }

    /// Closes and tells whether that failed; dropping does the same silently and later.
    ///
    /// # Errors
    /// As `close(2)`.
    pub fn close(mut self) -> Result<(), Error> {
        // CURRENT is no file's handle: it tells `drop` that there is nothing left to close.
        let handle = std::mem::replace(&mut self.handle, CURRENT);
        self.core.forget(handle);
        self.one(Request::Close { handle }, done)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.handle != CURRENT {
            self.core.close_later(self.handle);
        }
    }
}

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

/// A byte-range or whole-file lock; see [`towline_wire::request::lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Process, open file or flock.
    pub family: u8,
    /// Shared, exclusive or unlock.
    pub kind: u8,
    /// Names the process, for the process family.
    pub owner: u64,
    /// First byte.
    pub start: u64,
    /// Bytes; zero: to the end.
    pub length: u64,
}

fn entries(outcome: &Outcome, listing: &[u8]) -> Result<(Vec<DirEntry>, bool), Error> {
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
