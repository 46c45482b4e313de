//! Execution of one request: its operations in order, until one fails or has to wait.

mod append;
mod names;
mod once;
mod writing;

use crate::Exports;
use crate::files::{Files, Opened};
use crate::locks::{FileKey, Owner, Range, Waiter};
use names::{Change, Outcome};
use once::Pen;
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, XattrAction,
};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_MASK, TYPE_SYMLINK};
use towline_wire::codec::Field;
use towline_wire::entry::Entry;
use towline_wire::limits::{LISTING_BYTES_MAX, TRANSFER_BYTES_MAX};
use towline_wire::request::{
    CURRENT, DIRECTORY, FOLLOW, NO_FOLLOW, listed, lock, open_flag, parse_compound, sync_kind,
    valid, xattr_how,
};
use towline_wire::{Attr, Errno, ProtocolError, Reply, Request};
use writing::Writing;

const O_DIRECT: u32 = 0o40_000;

/// Work for a thread that may block.
pub type Blocking = Box<dyn FnOnce() -> BlockingResult + Send>;

/// What such work yields: a result and, of a read, the bytes.
pub struct BlockingResult {
    result: Result<Value, Errno>,
}

enum Value {
    Done,
    Number(u64),
    Read(Aggregate),
    Wrote(usize, u64),
    /// Nobody can know whether it was done before the server was killed.
    Undecided,
}

/// What a compound needs before it can go on.
pub enum Step {
    /// It is finished: [`Compound::into_reply`].
    Finished,
    /// All bytes of the offered transfer, each fragment by [`Compound::write_fragment`].
    NeedsData,
    /// Run this on a thread that may block, then [`Compound::unblocked`]. It yields up to so many
    /// bytes that take memory until they are sent.
    Block(Blocking, u64),
    /// The lock of this waiter; the driver owns the lock table. Then [`Compound::locked`].
    Lock(FileKey, Waiter, bool),
    /// Look whether a lock is in the way, then [`Compound::tested`].
    TestLock(FileKey, Owner, Range),
    /// Release the locks of this open file, then run again.
    ReleaseLocks(Owner),
    /// The client has opened and locked again all that it wants to, then run again.
    Reclaimed,
}

/// What a compound runs against.
pub struct Context<'a> {
    /// Open files of its session.
    pub files: &'a mut Files,
    /// Exports of the server.
    pub exports: &'a dyn Exports,
    /// On whose behalf.
    pub caller: &'a Caller,
    /// Session number.
    pub session: u64,
}

/// A request being executed.
pub struct Compound {
    body: Vec<u8>,
    /// Payload that came with the request.
    payload: Vec<u8>,
    /// Bytes offered but not sent with the request.
    offered: u64,
    index: usize,
    results: Vec<u8>,
    data: Aggregate,
    data_of_file: bool,
    current: Option<u64>,
    modifies: bool,
    failed: bool,
    write: Option<Writing>,
    slot: u16,
    sequence: u32,
    /// Operations it consists of.
    operations: usize,
    /// Files that it opened and did not close.
    left_open: usize,
    /// Records what it does, where the session is kept.
    pen: Option<Pen>,
    /// It failed because nobody can know whether it was done before the server was killed.
    undecided: bool,
}

impl Compound {
    /// A request as received. `offered` bytes of its write will come in data messages.
    ///
    /// # Errors
    /// The body is no legal sequence of operations, or its write and the bytes do not match.
    pub fn new(
        slot: u16,
        sequence: u32,
        body: &[u8],
        payload: &[u8],
        offered: u64,
    ) -> Result<Self, ProtocolError> {
        let requests = parse_compound(body)?;
        let wrong = |what| Err(ProtocolError { what, at: 0 });
        let writes: Vec<u32> = requests
            .iter()
            .filter_map(|r| match r {
                Request::Write { length, .. } => Some(*length),
                _ => None,
            })
            .collect();
        let reads = requests
            .iter()
            .filter(|r| {
                matches!(
                    r,
                    Request::Read { .. } | Request::ReadDir { .. } | Request::Inquire { .. }
                )
            })
            .count();
        if writes.len() > 1 || reads > 1 {
            return wrong("more than one transfer in a request");
        }
        let length = u64::from(writes.first().copied().unwrap_or(0));
        if length > TRANSFER_BYTES_MAX as u64 {
            return wrong("write longer than the limit");
        }
        if (offered > 0 && !payload.is_empty()) || length != offered + payload.len() as u64 {
            return wrong("write does not match the bytes sent or offered");
        }
        let modifies = requests.iter().any(Request::modifies);
        Ok(Self {
            body: body.to_vec(),
            payload: payload.to_vec(),
            offered,
            index: 0,
            results: Vec::with_capacity(256),
            data: Aggregate::new(),
            data_of_file: false,
            current: None,
            modifies,
            failed: false,
            write: None,
            slot,
            sequence,
            operations: requests.len(),
            left_open: 0,
            pen: None,
            undecided: false,
        })
    }

    /// True when its reply has to be remembered.
    #[must_use]
    pub fn modifies(&self) -> bool {
        self.modifies
    }

    /// True when it failed because nobody can know whether it was done before the server was killed.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.undecided
    }

    /// Tag of its first operation, for statistics.
    #[must_use]
    pub fn first_tag(&self) -> u8 {
        self.body.first().copied().unwrap_or(0)
    }

    /// What the client gets: encoded results and data; whether the reply has to be remembered, and
    /// whether the data are a file's (which come in fragments, unlike listings).
    #[must_use]
    pub fn into_reply(self) -> (Vec<u8>, Aggregate, bool, bool) {
        (self.results, self.data, self.modifies, self.data_of_file)
    }

    fn result(&mut self, reply: &Reply<'_>) {
        reply.encode(&mut self.results);
        self.index += 1;
    }

    fn fail(&mut self, errno: Errno) {
        Reply::Failed { errno: errno.0 }.encode(&mut self.results);
        self.failed = true;
    }

    /// Executes operations until the compound is finished or has to wait.
    pub fn run(&mut self, context: &mut Context<'_>) -> Step {
        let body = std::mem::take(&mut self.body);
        // Parsed once when it came; the same bytes parse again.
        let requests = parse_compound(&body).unwrap_or_default();
        let step = loop {
            let Some(request) = requests.get(self.index).filter(|_| !self.failed) else {
                self.record();
                break Step::Finished;
            };
            let step = match self.recalled() {
                Some(known) => self.repeat(request, &known, context),
                None => self.execute(request, context),
            };
            match step {
                Ok(None) => {}
                Ok(Some(step)) => break step,
                Err(errno) => self.fail(errno),
            }
        };
        drop(requests);
        self.body = body;
        step
    }

    fn handle(&self, handle: u64) -> Result<u64, Errno> {
        if handle == CURRENT { self.current.ok_or(Errno::EBADF) } else { Ok(handle) }
    }

    fn at(&self, context: &Context<'_>, handle: u64) -> Result<Opened, Errno> {
        context.files.find(self.handle(handle)?).cloned()
    }

    fn writable_at(&mut self, context: &Context<'_>, handle: u64) -> Result<Opened, Errno> {
        let opened = self.at(context, handle)?;
        if opened.read_only {
            return Err(Errno::EROFS);
        }
        self.changes(&*opened.store);
        Ok(opened)
    }

    /// Adds an open file to the session's and makes it the current one.
    fn opened(
        &mut self,
        context: &mut Context<'_>,
        opened: Opened,
        at: Option<u64>,
        attr: Attr,
    ) -> Result<(), Errno> {
        let handle = match at {
            Some(handle) => {
                // Another session of the family may have been faster.
                let same = context.files.find(handle).is_ok_and(|known| {
                    known.flags == opened.flags && known.file.identity() == opened.file.identity()
                });
                if !same {
                    context.files.insert_at(handle, opened)?;
                }
                handle
            }
            None => context.files.insert(opened)?,
        };
        self.current = Some(handle);
        self.left_open += 1;
        self.result(&Reply::Opened { handle, attr });
        Ok(())
    }

    #[allow(clippy::too_many_lines)] // one arm for each operation, each a few lines
    fn execute(
        &mut self,
        request: &Request<'_>,
        context: &mut Context<'_>,
    ) -> Result<Option<Step>, Errno> {
        let caller = context.caller;
        match *request {
            Request::Attach { name } => {
                let (store, read_only) = context.exports.find(name).ok_or(Errno::ENOENT)?;
                let (file, attr) = open_root(&*store, caller)?;
                self.opened(context, Opened { store, file, read_only, flags: 0 }, None, attr)?;
            }
            Request::Open { base, flags, mode, path } => {
                let at = self.at(context, base)?;
                refuse_changes(at.read_only, flags)?;
                let how = OpenHow { flags, mode };
                if open_flag::creates_exclusively(flags) {
                    let change = Change::open(at, path, flags);
                    return self.change(context, change, |store, (at, _)| {
                        let (file, attr) = store.open(caller, at, how)?;
                        Ok(Outcome::Opened(file, attr))
                    });
                }
                if flags & (open_flag::CREATE | open_flag::TRUNCATE) != 0 {
                    self.changes(&*at.store);
                }
                let Opened { store, file, read_only, .. } = at;
                let (file, attr) = store.open(caller, (&*file, path), how)?;
                self.opened(context, Opened { store, file, read_only, flags }, None, attr)?;
            }
            Request::Reclaim { handle, flags, inode, export, path } => {
                let (store, read_only) = context.exports.find_again(export).ok_or(Errno::ESTALE)?;
                let root = store.root()?;
                let flags = open_flag::without_changes(flags);
                let (file, attr) = if path.is_empty() {
                    open_root(&*store, caller)?
                } else {
                    store
                        .open(caller, (&*root, path), OpenHow { flags, mode: 0 })
                        .map_err(|_| Errno::ESTALE)?
                };
                if attr.inode != inode {
                    return Err(Errno::ESTALE);
                }
                self.opened(context, Opened { store, file, read_only, flags }, Some(handle), attr)?;
            }
            Request::Close { handle } => {
                let of_this = handle == CURRENT;
                let handle = self.handle(handle)?;
                context.files.remove(handle)?;
                self.left_open -= usize::from(of_this);
                self.result(&Reply::Done {});
                return Ok(Some(Step::ReleaseLocks(Owner {
                    session: context.files.owner,
                    id: handle,
                    process: false,
                })));
            }
            Request::Stat { base, flags, path } => {
                let opened = self.at(context, base)?;
                let attr =
                    opened.store.stat(caller, (&*opened.file, path), flags & NO_FOLLOW == 0)?;
                self.result(&Reply::Attributes { attr });
            }
            Request::SetAttr {
                base,
                flags,
                valid: set,
                mode,
                uid,
                gid,
                size,
                accessed,
                modified,
                path,
            } => {
                let opened = self.writable_at(context, base)?;
                let wanted = |bit| set & bit != 0;
                let set = SetAttr {
                    mode: wanted(valid::MODE).then_some(mode),
                    uid: wanted(valid::UID).then_some(uid),
                    gid: wanted(valid::GID).then_some(gid),
                    size: wanted(valid::SIZE).then_some(size),
                    times: wanted(valid::TIMES).then_some((accessed, modified)),
                };
                let attr = opened.store.set_attr(
                    caller,
                    (&*opened.file, path),
                    flags & NO_FOLLOW == 0,
                    &set,
                )?;
                self.result(&Reply::Attributes { attr });
            }
            Request::Read { handle, offset, length } => {
                let opened = self.at(context, handle)?;
                let length = length as usize;
                if length > TRANSFER_BYTES_MAX {
                    return Err(Errno::EINVAL);
                }
                match opened.file.read(offset, length, false)? {
                    ReadOutcome::Ready(data) => self.read(data),
                    ReadOutcome::WouldBlock => {
                        // Other reads refer to the page cache, or are small.
                        let copied = if opened.flags & O_DIRECT == 0 { 0 } else { length as u64 };
                        let work = Box::new(move || {
                            let result = match opened.file.read(offset, length, true) {
                                Ok(ReadOutcome::Ready(data)) => Ok(Value::Read(data)),
                                Ok(ReadOutcome::WouldBlock) => Err(Errno::EAGAIN),
                                Err(errno) => Err(errno),
                            };
                            BlockingResult { result }
                        });
                        return Ok(Some(Step::Block(work, copied)));
                    }
                }
            }
            Request::Write { handle, offset, length, flags } => {
                return self.begin_write(context, handle, offset, length, flags);
            }
            Request::ReadDir { handle, cookie, length, attributes } => {
                let opened = self.at(context, handle)?;
                let room = (length as usize).min(LISTING_BYTES_MAX);
                let bytes = Vec::with_capacity(room.min(32 * 1024));
                let with = |bit| attributes & bit != 0;
                let mut listing = Collect { bytes, room, xattrs: with(listed::XATTRS) };
                let attributes = with(listed::ATTRIBUTES);
                let end = opened.file.read_directory(cookie, attributes, &mut listing)?;
                if listing.bytes.is_empty() && !end {
                    return Err(Errno::EINVAL); // not even one entry fits, as getdents64(2) says
                }
                self.result(&Reply::Listed { end: end.into(), length: listing.bytes.len() as u32 });
                self.data = Aggregate::from_vec(listing.bytes);
            }
            Request::MakeDir { base, mode, path } => {
                let opened = self.writable_at(context, base)?;
                let change = Change::create(opened, path, TYPE_DIRECTORY);
                return self.change(context, change, |store, (at, _)| {
                    store.make_directory(caller, at, mode).map(Outcome::Attributes)
                });
            }
            Request::MakeNode { base, mode, rdev, path } => {
                let opened = self.writable_at(context, base)?;
                let kind = if mode & TYPE_MASK == 0 { TYPE_FILE } else { mode & TYPE_MASK };
                let change = Change::create(opened, path, kind);
                return self.change(context, change, |store, (at, _)| {
                    store.make_node(caller, at, mode, rdev).map(Outcome::Attributes)
                });
            }
            Request::Symlink { base, path, target } => {
                let opened = self.writable_at(context, base)?;
                let change = Change::create(opened, path, TYPE_SYMLINK);
                return self.change(context, change, |store, (at, _)| {
                    store.symlink(caller, at, target).map(Outcome::Attributes)
                });
            }
            Request::ReadLink { base, path } => {
                let opened = self.at(context, base)?;
                let value = opened.store.read_link(caller, (&*opened.file, path))?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::Link { base, flags, path, new_base, new_path } => {
                let from = self.writable_at(context, base)?;
                let to = self.writable_at(context, new_base)?;
                same_store(&from, &to)?;
                let follow = flags & FOLLOW != 0;
                let source = (from.file, path);
                let change = Change::link(to, new_path, (source.clone(), follow));
                return self.change(context, change, |store, (at, _)| {
                    let source = (&*source.0, path);
                    store.link(caller, source, follow, at).map(Outcome::Attributes)
                });
            }
            Request::Unlink { base, flags, path } => {
                let opened = self.writable_at(context, base)?;
                let change = Change::unlink(opened, path);
                return self.change(context, change, |store, (at, _)| {
                    store.unlink(caller, at, flags & DIRECTORY != 0).map(|()| Outcome::Done)
                });
            }
            Request::Rename { base, flags, path, new_base, new_path } => {
                let from = self.writable_at(context, base)?;
                let to = self.writable_at(context, new_base)?;
                same_store(&from, &to)?;
                let change = Change::rename((from, path), (to.file, new_path), flags);
                return self.change(context, change, |store, (at, to)| {
                    let to = to.ok_or(Errno::EINVAL)?;
                    store.rename(caller, at, to, flags).map(|()| Outcome::Done)
                });
            }
            Request::StatFs { handle } => {
                let statfs = self.at(context, handle)?.store.stat_fs()?;
                self.result(&Reply::FileSystem { statfs });
            }
            Request::Sync { handle, kind } => {
                let opened = self.at(context, handle)?;
                let may_block = opened.store.may_block();
                return Ok(self.blocking(may_block, move || match kind {
                    sync_kind::DATA => opened.file.sync(false).map(|()| Value::Done),
                    sync_kind::FULL => opened.file.sync(true).map(|()| Value::Done),
                    sync_kind::FILE_SYSTEM => opened.store.sync().map(|()| Value::Done),
                    _ => Err(Errno::EINVAL),
                }));
            }
            Request::Allocate { handle, mode, offset, length } => {
                let opened = self.writable_at(context, handle)?;
                let may_block = opened.store.may_block();
                return Ok(self.blocking(may_block, move || {
                    opened.file.allocate(mode, offset, length).map(|()| Value::Done)
                }));
            }
            Request::Seek { handle, offset, whence } => {
                let value = self.at(context, handle)?.file.seek(offset, whence)?;
                self.result(&Reply::Number { value });
            }
            Request::CopyRange { handle, offset, new_handle, new_offset, length } => {
                let from = self.at(context, handle)?;
                let to = self.writable_at(context, new_handle)?;
                same_store(&from, &to)?;
                if to.flags & open_flag::APPEND != 0 {
                    return Err(Errno::EBADF); // it cannot be written elsewhere than at its end
                }
                return Ok(self.blocking(true, move || {
                    from.store
                        .copy_range(&*from.file, offset, &*to.file, new_offset, length)
                        .map(Value::Number)
                }));
            }
            Request::GetXattr { base, flags, path, name } => {
                let opened = self.at(context, base)?;
                let value = opened.store.xattr(
                    caller,
                    (&*opened.file, path),
                    flags & NO_FOLLOW == 0,
                    XattrAction::Get(name),
                )?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::SetXattr { base, flags, how, path, name, value } => {
                let opened = self.writable_at(context, base)?;
                let follow = flags & NO_FOLLOW == 0;
                let action = XattrAction::Set(name, value, how);
                if how == xattr_how::CREATE {
                    return self.change_xattr(context, &opened, (path, follow), action);
                }
                opened.store.xattr(caller, (&*opened.file, path), follow, action)?;
                self.result(&Reply::Done {});
            }
            Request::ListXattr { base, flags, path } => {
                let opened = self.at(context, base)?;
                let value = opened.store.xattr(
                    caller,
                    (&*opened.file, path),
                    flags & NO_FOLLOW == 0,
                    XattrAction::List,
                )?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::RemoveXattr { base, flags, path, name } => {
                let opened = self.writable_at(context, base)?;
                let at = (path, flags & NO_FOLLOW == 0);
                return self.change_xattr(context, &opened, at, XattrAction::Remove(name));
            }
            Request::Lock { handle, owner, family, kind, wait, start, length } => {
                let (file, owner, range) =
                    self.lock_of(context, handle, owner, family, kind, start, length)?;
                let (session, slot, sequence) = (context.session, self.slot, self.sequence);
                let waiter = Waiter { owner, session, range, slot, sequence };
                self.may_lock(context, handle, family, kind)?;
                return Ok(Some(Step::Lock(file, waiter, wait != 0)));
            }
            Request::TestLock { handle, owner, family, kind, start, length } => {
                let (file, owner, range) =
                    self.lock_of(context, handle, owner, family, kind, start, length)?;
                return Ok(Some(Step::TestLock(file, owner, range)));
            }
            Request::Access { base, mode, path } => {
                let opened = self.at(context, base)?;
                if mode & 2 != 0 && opened.read_only {
                    return Err(Errno::EROFS);
                }
                opened.store.access(caller, (&*opened.file, path), mode)?;
                self.result(&Reply::Done {});
            }
            Request::Inquire { what } => {
                let answer = match what {
                    0 => context.exports.names(),
                    1 => context.exports.statistics(),
                    _ => return Err(Errno::EINVAL),
                };
                self.result(&Reply::Answer { length: answer.len() as u32 });
                self.data = Aggregate::from_vec(answer);
            }
            Request::Reclaimed {} => {
                self.result(&Reply::Done {});
                return Ok(Some(Step::Reclaimed));
            }
            _ => return Err(Errno::ENOSYS),
        }
        Ok(None)
    }

    fn read(&mut self, data: Aggregate) {
        self.result(&Reply::Read { length: data.len() as u32, errno: 0 });
        self.data_of_file = true;
        self.data = data;
    }

    /// Runs work at once, or says that it has to run where it may block.
    fn blocking(
        &mut self,
        may_block: bool,
        work: impl FnOnce() -> Result<Value, Errno> + Send + 'static,
    ) -> Option<Step> {
        if may_block {
            return Some(Step::Block(Box::new(move || BlockingResult { result: work() }), 0));
        }
        self.unblocked(BlockingResult { result: work() });
        None
    }

    /// Takes the result of blocking work; then run again.
    pub fn unblocked(&mut self, done: BlockingResult) {
        match done.result {
            Ok(Value::Done) => self.result(&Reply::Done {}),
            Ok(Value::Number(value)) => self.result(&Reply::Number { value }),
            Ok(Value::Read(data)) => self.read(data),
            Ok(Value::Wrote(length, offset)) => {
                self.result(&Reply::Wrote { length: length as u32, offset });
            }
            Ok(Value::Undecided) => {
                self.undecided = true;
                self.fail(Errno::EIO);
            }
            Err(errno) => self.fail(errno),
        }
    }

    /// Takes the outcome of a lock; then run again.
    pub fn locked(&mut self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.result(&Reply::Done {}),
            Err(errno) => self.fail(errno),
        }
    }

    /// Takes what [`Step::TestLock`] asked for; then run again. `family` owns the session's files:
    /// a process of another one is not named.
    pub fn tested(&mut self, family: u64, tested: Result<Option<(Owner, Range)>, Errno>) {
        let conflict = match tested {
            Ok(conflict) => conflict,
            Err(errno) => return self.fail(errno),
        };
        self.result(&match conflict {
            None => Reply::Conflict { kind: lock::UNLOCK, start: 0, length: 0, owner: 0 },
            Some((owner, range)) => {
                let known = owner.session == family && owner.process;
                let owner = if known { owner.id } else { 0 };
                Reply::Conflict {
                    kind: range.kind,
                    start: range.start,
                    length: range.length(),
                    owner,
                }
            }
        });
    }

    #[allow(clippy::too_many_arguments)] // the fields of one wire structure
    fn lock_of(
        &self,
        context: &Context<'_>,
        handle: u64,
        process: u64,
        family: u8,
        kind: u8,
        start: u64,
        length: u64,
    ) -> Result<(FileKey, Owner, Range), Errno> {
        let handle = self.handle(handle)?;
        let opened = context.files.find(handle)?;
        let (process, id, range) = match family {
            lock::PROCESS => (true, process, Range::new(kind, start, length)?),
            lock::OPEN_FILE => (false, handle, Range::new(kind, start, length)?),
            lock::FLOCK => (false, handle, Range::new(kind, 0, 0)?),
            _ => return Err(Errno::EINVAL),
        };
        if opened.flags & open_flag::PATH != 0 {
            return Err(Errno::EBADF);
        }
        let (device, inode) = opened.file.identity();
        Ok((
            (device, inode, family == lock::FLOCK),
            Owner { session: context.files.owner, id, process },
            range,
        ))
    }

    /// A range is locked by who may read it, or exclusively by who may write it, as by `fcntl(2)`.
    fn may_lock(
        &self,
        context: &Context<'_>,
        handle: u64,
        family: u8,
        kind: u8,
    ) -> Result<(), Errno> {
        let access = context.files.find(self.handle(handle)?)?.flags & 3;
        let refused = matches!((kind, access), (lock::SHARED, 1) | (lock::EXCLUSIVE, 0));
        if family != lock::FLOCK && refused { Err(Errno::EBADF) } else { Ok(()) }
    }
}

fn refuse_changes(read_only: bool, flags: u32) -> Result<(), Errno> {
    let writes = flags & 3 != 0 || flags & (open_flag::CREATE | open_flag::TRUNCATE) != 0;
    if read_only && writes && flags & open_flag::PATH == 0 { Err(Errno::EROFS) } else { Ok(()) }
}

/// The root of a store, open for listing where the caller may, else only to start paths from.
fn open_root(store: &dyn FileStore, caller: &Caller) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
    const DIRECTORY_ONLY: u32 = 0o200_000;
    let root = store.root()?;
    let how = OpenHow { flags: DIRECTORY_ONLY, mode: 0 };
    if let Ok(opened) = store.open(caller, (&*root, b"."), how) {
        return Ok(opened);
    }
    let attr = root.stat()?;
    Ok((root, attr))
}

fn same_store(a: &Opened, b: &Opened) -> Result<(), Errno> {
    if Arc::ptr_eq(&a.store, &b.store) { Ok(()) } else { Err(Errno::EXDEV) }
}

struct Collect {
    bytes: Vec<u8>,
    room: usize,
    xattrs: bool,
}

impl Listing for Collect {
    fn wants_xattrs(&self) -> bool {
        self.xattrs
    }

    fn entry(
        &mut self,
        cookie: u64,
        inode: u64,
        file_type: u8,
        name: &[u8],
        attr: Option<Attr>,
    ) -> bool {
        let entry = Entry { cookie, inode, file_type, name, attr };
        if self.bytes.len() + entry.encoded_bytes() > self.room {
            return false;
        }
        entry.encode(&mut self.bytes);
        true
    }
}
