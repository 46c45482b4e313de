//! Open files: their data, locks and space. Operations on names are in `names.rs`.

use crate::Error;
use crate::client::Client;
use crate::convert::{attributes, check, done, flag, number, unexpected, write_flags, wrote};
use crate::core::{Core, Outcome};
use crate::disks::Closing;
use crate::operation::Operation;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use towline_wire::parts::{Part, fit_together};
use towline_wire::request::lock::{TRY, WAIT};
use towline_wire::request::{CURRENT, open_flag, write_flag};
use towline_wire::{Attr, Errno, Reply, Request, StatFs};

/// An open file or directory. Dropping it closes it without waiting for the server's answer.
pub struct File {
    pub(crate) core: Arc<Core>,
    pub(crate) handle: u64,
    pub(crate) attr: Attr,
    /// Flags of its write requests: [`write_flag::APPEND`] if it was opened with `O_APPEND`.
    pub(crate) write_flags: u32,
}

/// An open file and the bytes at its start; `None` if they cannot be read, as with a directory.
pub type Begun = (File, Option<Vec<u8>>);

impl File {
    pub(crate) fn opened(
        core: &Arc<Core>,
        reply: Reply<'_>,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
    ) -> Result<Self, Error> {
        let Reply::Opened { handle, attr } = reply else { return Err(unexpected()) };
        core.remember(handle, base, export, flags, attr.identity());
        Ok(Self { core: core.clone(), handle, attr, write_flags: write_flags(flags) })
    }

    /// Sends a request of one operation. `convert` runs with the state locked and must not use the
    /// core.
    pub(crate) fn one<T>(
        &self,
        request: Request<'_>,
        convert: impl FnOnce(Reply<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.core.ask(&[request], &[], &mut [], |outcome| convert(outcome.single()?))
    }

    /// Its attributes at the time of opening.
    #[must_use]
    pub fn attr(&self) -> &Attr {
        &self.attr
    }

    /// Its handle in the protocol.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Stands for a file that another session of the family opened at `path` from the root of
    /// `export` (named as for [`Client::attach`]) with these `flags`; `inode` is its
    /// [`Attr::identity`]. Sends nothing. Calls fail with `EBADF` if no such file is open.
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

    /// Returns the handle and leaves the file open on the server, for any holder of the handle to
    /// use.
    #[must_use]
    pub fn into_handle(mut self) -> u64 {
        std::mem::replace(&mut self.handle, CURRENT)
    }

    /// `openat(2)`: one round trip, however deep the path. Here and below, `mode` is that of a new
    /// file: permission bits, optionally with a umask ([`towline_wire::request::UMASK_SHIFT`]),
    /// which the server applies.
    ///
    /// # Errors
    /// As the system call; `EXDEV` if a link or `..` leads out of the export.
    pub fn open(&self, path: &[u8], flags: u32, mode: u32) -> Result<Self, Error> {
        let request = Request::Open { base: self.handle, flags, mode, path: check(path)? };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        Self::opened(&self.core, outcome.single()?, Some((self.handle, path)), b"", flags)
    }

    /// Another handle of the file, as `dup(2)` makes another descriptor: it may do what this one may. `flags` are those with
    /// which the file is opened again after a restart of the server.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn again(&self, flags: u32) -> Result<Self, Error> {
        let request =
            Request::Open { base: self.handle, flags: open_flag::AGAIN, mode: 0, path: b"" };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        Self::opened(&self.core, outcome.single()?, Some((self.handle, b"")), b"", flags)
    }

    /// [`File::open`] that also tells, in the same round trip, whether the path leads there without a link at its end:
    /// whether its last name is that of the file. False if that is not known.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_named(&self, path: &[u8], flags: u32, mode: u32) -> Result<(Self, bool), Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            Request::Stat { base: self.handle, flags: flag(false), path },
        ];
        let outcome = self.core.call(&requests, &[], &mut [])?;
        let mut replies = outcome.replies()?.into_iter();
        let file = Self::first_opened(&self.core, &mut replies, (self.handle, path), flags)?;
        let is_it = |named: &Attr| named.identity() == file.attr.identity();
        let is_named = matches!(replies.next(), Some(Reply::Attributes { attr }) if is_it(&attr));
        Ok((file, is_named))
    }

    /// [`File::open`] that also reads the start of the file into `target`, in the same round trip.
    /// Returns the number of bytes read, which is smaller than `target` only at the end of the
    /// file, or `None` if they cannot be read, as with a directory; the file is open all the same.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_reading(
        &self,
        path: &[u8],
        flags: u32,
        mode: u32,
        target: &mut [u8],
    ) -> Result<(Self, Option<usize>), Error> {
        let requests = self.open_reading_requests(path, flags, mode, target.len())?;
        let outcome = self.core.call(&requests, &[], target)?;
        opened_reading(&self.core, (self.handle, path), flags, &outcome)
    }

    /// [`File::open_reading`] of an existing file, completed later; yields the file and the bytes. If the
    /// operation is dropped, the file is closed once it is open.
    ///
    /// # Errors
    /// If it cannot be started. The operation fails with `ESTALE` if the server was restarted since.
    pub fn start_open_reading(
        &self,
        path: &[u8],
        flags: u32,
        length: usize,
    ) -> Result<Operation<Begun>, Error> {
        let requests = self.open_reading_requests(path, flags, 0, length)?;
        let (core, epoch) = (self.core.clone(), self.core.boot_epoch());
        let (base, below) = (self.handle, path.to_vec());
        self.core.start(&requests, Vec::new(), vec![0; length], move |outcome, mut bytes| {
            // Nobody knew yet of the file, so it was not reopened.
            if core.boot_epoch() != epoch {
                return Err(Errno::ESTALE.into());
            }
            let (file, read) = opened_reading(&core, (base, &below), flags, outcome)?;
            bytes.truncate(read.unwrap_or(0));
            Ok((file, read.map(|_| bytes)))
        })
    }

    fn open_reading_requests<'a>(
        &self,
        path: &'a [u8],
        flags: u32,
        mode: u32,
        length: usize,
    ) -> Result<[Request<'a>; 2], Error> {
        Ok([
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            Request::Read { handle: CURRENT, offset: 0, length: length as u32 },
        ])
    }

    /// The file opened by the first operation of a compound.
    pub(crate) fn first_opened<'a>(
        core: &Arc<Core>,
        replies: &mut impl Iterator<Item = Reply<'a>>,
        base: (u64, &[u8]),
        flags: u32,
    ) -> Result<Self, Error> {
        match replies.next() {
            Some(Reply::Failed { errno }) => Err(Errno(errno).into()),
            Some(reply) => Self::opened(core, reply, Some(base), b"", flags),
            None => Err(unexpected()),
        }
    }

    /// Opens a file with these flags of `open(2)`, reads from its start (at most 8 MiB) and closes
    /// it, in one round trip. Returns the number of bytes read.
    ///
    /// # Errors
    /// As `open` and `read`.
    pub fn read_path(&self, path: &[u8], flags: u32, target: &mut [u8]) -> Result<usize, Error> {
        let request = self.read_path_request(path, flags, target.len())?;
        self.core.ask(&[request], &[], target, |outcome| {
            outcome.last()?;
            Ok(outcome.payload)
        })
    }

    /// [`File::read_path`], completed later; yields the bytes.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_read_path(
        &self,
        path: &[u8],
        flags: u32,
        length: usize,
    ) -> Result<Operation<Vec<u8>>, Error> {
        let request = self.read_path_request(path, flags, length)?;
        self.core.start(&[request], Vec::new(), vec![0; length], |outcome, mut bytes| {
            outcome.last()?;
            bytes.truncate(outcome.payload);
            Ok(bytes)
        })
    }

    fn read_path_request<'a>(
        &self,
        path: &'a [u8],
        flags: u32,
        length: usize,
    ) -> Result<Request<'a>, Error> {
        let (base, length) = (self.handle, length as u32);
        Ok(Request::ReadPath { base, flags, length, path: check(path)? })
    }

    /// Opens or creates a file and closes it, completed later.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_create(&self, path: &[u8], flags: u32, mode: u32) -> Result<Operation<()>, Error> {
        let requests = [
            Request::Open { base: self.handle, flags, mode, path: check(path)? },
            Request::Close { handle: CURRENT },
        ];
        self.core.start(&requests, Vec::new(), Vec::new(), |outcome, _| outcome.last().map(|_| ()))
    }

    /// `fstat(2)`.
    ///
    /// # Errors
    /// As the system call.
    pub fn stat(&self) -> Result<Attr, Error> {
        self.one(Request::Stat { base: self.handle, flags: 0, path: b"" }, attributes)
    }

    /// `pread(2)` of any length; more than 8 MiB take several requests. Returns fewer bytes than
    /// asked for only at the end of the file or when a later request fails.
    ///
    /// # Errors
    /// As the system call.
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> Result<usize, Error> {
        self.core.read(self.handle, target, offset)
    }

    /// `preadv(2)`: [`File::read_at`] into several buffers, one after the other. All of them take one request, up to 8 MiB.
    ///
    /// # Errors
    /// As the system call.
    pub fn read_vectored_at(
        &self,
        targets: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> Result<usize, Error> {
        self.core.read_vectored(self.handle, targets, offset)
    }

    /// [`File::read_at`] of at most 8 MiB, completed later; yields the number of bytes read and the
    /// buffer.
    ///
    /// # Errors
    /// If it cannot be started.
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

    /// `pwrite(2)` of any length. Returns the number of bytes written, which is smaller only if
    /// space runs out or a later request fails. A file opened with `O_APPEND` is written at its
    /// end, whatever the offset; more than 8 MiB are then several appends.
    ///
    /// # Errors
    /// As the system call; [`Error::Unknown`] also if a part has been written.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<usize, Error> {
        self.core.write(self.handle, data, offset, self.write_flags)
    }

    /// `pwritev(2)`: [`File::write_at`] of several buffers, one after the other. All of them are one request, up to 8 MiB.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn write_vectored_at(&self, sources: &[IoSlice<'_>], offset: u64) -> Result<usize, Error> {
        self.core.write_vectored(self.handle, sources, offset, self.write_flags)
    }

    /// Calls [`File::write_at`] until everything is written.
    ///
    /// # Errors
    /// As the system call, even if part of the data has been written.
    pub fn write_all_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        let mut done = 0;
        while done < data.len() {
            // If a write stops early, the next one reports why.
            match self.write_at(&data[done..], offset + done as u64)? {
                0 => return Err(Errno::ENOSPC.into()),
                written => done += written,
            }
        }
        Ok(())
    }

    /// Writes parts (offset and bytes) in this order with one request, as far as they lie within the file,
    /// which does not grow.
    ///
    /// # Errors
    /// As `pwrite(2)`; some parts may have been written. `EMSGSIZE` unless the parts
    /// [`fit_together`].
    pub fn write_parts(&self, parts: &[(u64, &[u8])]) -> Result<(), Error> {
        if !fit_together(parts.iter().map(|(_, data)| data.len())) {
            return Err(Errno::EMSGSIZE.into());
        }
        let (mut list, mut all) = (Vec::new(), Vec::new());
        for (offset, data) in parts {
            Part { offset: *offset, length: data.len() as u32 }.encode(&mut list);
            all.extend_from_slice(data);
        }
        let request = Request::WriteParts { handle: self.handle, parts: &list };
        self.core.ask(&[request], &all, &mut [], |outcome| {
            let (written, _) = wrote(outcome.single()?, all.len())?;
            if written < all.len() { Err(unexpected()) } else { Ok(()) }
        })
    }

    /// [`File::write_at`] of at most 8 MiB, completed later; yields the number of bytes written and
    /// the buffer.
    ///
    /// # Errors
    /// If it cannot be started.
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
        self.core.start(&[request], data, Vec::new(), |outcome, data| {
            let (written, _) = wrote(outcome.single()?, data.len())?;
            Ok((written, data))
        })
    }

    /// Writes at the current end of the file. Returns the number of bytes written and the offset
    /// where they begin. At most 8 MiB, so that the data stays in one piece.
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
        self.core.ask(&[request], data, &mut [], |outcome| wrote(outcome.single()?, data.len()))
    }

    /// [`File::append`], completed later; yields the number of bytes written, the offset where they begin, and the
    /// buffer. Appends under way at once are made in any order.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_append(&self, data: Vec<u8>) -> Result<Operation<(usize, u64, Vec<u8>)>, Error> {
        let request = Request::Write {
            handle: self.handle,
            offset: 0,
            length: data.len() as u32,
            flags: write_flag::APPEND,
        };
        self.core.start(&[request], data, Vec::new(), |outcome, data| {
            let (written, at) = wrote(outcome.single()?, data.len())?;
            Ok((written, at, data))
        })
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

    /// `fsync(2)` and related calls: one of [`towline_wire::request::sync_kind`].
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

    /// `lseek(2)` with `SEEK_DATA` (3) or `SEEK_HOLE` (4).
    ///
    /// # Errors
    /// `ENXIO` if there is none.
    pub fn seek(&self, offset: u64, whence: u32) -> Result<u64, Error> {
        self.one(Request::Seek { handle: self.handle, offset, whence }, number)
    }

    /// `copy_file_range(2)` inside the server; returns the number of bytes copied.
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
        if to.write_flags & write_flag::APPEND != 0 {
            return Err(Errno::EBADF.into()); // it can only be written at its end
        }
        let request = Request::CopyRange {
            handle: self.handle,
            offset,
            new_handle: to.handle,
            new_offset: to_offset,
            length,
        };
        let copied = self.one(request, number)?;
        if copied > length { Err(unexpected()) } else { Ok(copied) }
    }

    /// `fcntl` locks and `flock(2)`; see [`towline_wire::request::lock`] for families and kinds.
    ///
    /// # Errors
    /// `EAGAIN` if another owner has the lock and `wait` is false, `EDEADLK`, `ENOLCK`.
    pub fn lock(&self, lock: &Lock, wait: bool) -> Result<(), Error> {
        self.one(self.lock_request(lock, if wait { WAIT } else { TRY }), done)
    }

    /// [`File::lock`] that does not wait. Returns false if no other client or family has locked or
    /// unlocked anything of the file since the last lock of this one: if all change the file only
    /// under locks, what was known of it before still holds.
    ///
    /// # Errors
    /// As `lock`.
    pub fn try_lock(&self, lock: &Lock) -> Result<bool, Error> {
        let lane = self.core.lane();
        let others = self.one(self.lock_request(lock, TRY), |reply| match reply {
            Reply::Locked { others } => Ok(others != 0),
            _ => Err(unexpected()),
        })?;
        // The answer to a request that was sent again may be the one that was given before.
        Ok(others || self.core.lane() != lane)
    }

    /// [`File::lock`] that waits, completed later; [`Operation::cancel`] gives up waiting.
    ///
    /// # Errors
    /// As `lock`.
    pub fn start_lock(&self, lock: &Lock) -> Result<Operation<()>, Error> {
        let convert = |outcome: &Outcome, _: Vec<u8>| done(outcome.single()?);
        self.core.start(&[self.lock_request(lock, WAIT)], Vec::new(), Vec::new(), convert)
    }

    fn lock_request(&self, lock: &Lock, wait: u8) -> Request<'static> {
        let Lock { family, kind, owner, start, length } = *lock;
        Request::Lock { handle: self.handle, owner, family, kind, wait, start, length }
    }

    /// `fcntl` `F_GETLK`: returns the conflicting lock, if there is one.
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

    /// Closes the file and reports errors; dropping it does the same silently, without waiting.
    /// Both take place after the requests under way that need the file, other than lock requests.
    /// This call waits until those requests are answered.
    ///
    /// # Errors
    /// As `close(2)`.
    pub fn close(mut self) -> Result<(), Error> {
        // CURRENT is no file's handle: it tells `drop` that there is nothing left to close.
        let handle = std::mem::replace(&mut self.handle, CURRENT);
        self.one(Request::Close { handle }, done)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.handle != CURRENT {
            self.core.close_later(Closing::File(self.handle));
        }
    }
}

/// A byte-range or whole-file lock; see [`towline_wire::request::lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Owner kind: process, open file or `flock`.
    pub family: u8,
    /// Shared, exclusive or unlock.
    pub kind: u8,
    /// Names the process, for locks of the process family.
    pub owner: u64,
    /// First byte.
    pub start: u64,
    /// Length in bytes; zero: to the end.
    pub length: u64,
}

/// The file that a compound opened below `base` and read from, and the number of bytes read, if it could be read.
fn opened_reading(
    core: &Arc<Core>,
    base: (u64, &[u8]),
    flags: u32,
    outcome: &Outcome,
) -> Result<(File, Option<usize>), Error> {
    let mut replies = outcome.replies()?.into_iter();
    let file = File::first_opened(core, &mut replies, base, flags)?;
    let whole =
        matches!(replies.next(), Some(Reply::Read { errno: 0, .. })) && outcome.failed.is_none();
    Ok((file, whole.then_some(outcome.payload)))
}
