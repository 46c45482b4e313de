//! Executes one request: its operations in order, until one fails or has to wait.

mod append;
mod locking;
mod names;
mod once;
mod operations;
mod parts;
mod reading;
mod watching;
mod writing;

use crate::Exports;
use crate::files::{Found, Hold, Opened, Table};
use crate::locks::{FileKey, Owner, Range, Waiter};
use crate::watches::EventQueue;
use once::Pen;
use reading::only_opens;
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_store::{Caller, Closing, FREED_BYTES_MAX, FileStore};
use towline_wire::codec::{Field, Reader};
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::parts::bytes_of;
use towline_wire::request::{CURRENT, Operations, is_repeatable};
use towline_wire::{Attr, Errno, ProtocolError, Reply, Request};
use writing::Writing;

/// Capacity of a request's and its results' buffers that is kept for the next request.
const KEPT_BYTES: usize = 4096;

/// Work for a thread that may block.
pub type Blocking = Box<dyn FnOnce() -> BlockingResult + Send>;

/// The outcome of blocking work: a result and, for a read, the bytes.
pub struct BlockingResult {
    result: Result<Value, Errno>,
}

impl BlockingResult {
    /// The outcome of work that panicked.
    #[must_use]
    pub fn broken() -> Self {
        Self { result: Err(Errno::EIO) }
    }
}

enum Value {
    Done,
    Number(u64),
    Read(Aggregate),
    /// Entries of a directory, and whether they are the last.
    Listed(Vec<u8>, bool),
    Wrote(usize, u64),
    /// What is left of a file was dropped; the operation has its result already.
    Freed,
    /// It is unknown whether the operation was done before the server was killed.
    Undecided,
}

/// What a compound needs before it can continue.
pub enum Step {
    /// Nothing: it is finished, and [`Compound::reply`] has the results.
    Finished,
    /// All bytes of the offered transfer; pass each fragment to [`Compound::write_fragment`].
    NeedsData,
    /// A thread that may wait, because the next operation may wait without limit for this store:
    /// continue to run there.
    Elsewhere(Arc<dyn FileStore>),
    /// Work that waits for this store: run it on a thread that may block, then call
    /// [`Compound::unblocked`]. The number is the most bytes of its result that occupy memory until they
    /// are sent.
    Block(Arc<dyn FileStore>, Blocking, u64),
    /// A listing of a directory of this store, which another thread makes: run it there, then call
    /// [`Compound::unblocked`]. Only after [`Compound::share`].
    Share(Arc<dyn FileStore>, Blocking),
    /// A lock for this waiter, from the driver's lock table; then call [`Compound::locked`]. The bool
    /// says whether to wait for it.
    Lock(FileKey, Waiter, bool),
    /// A test whether another lock conflicts; then call [`Compound::tested`].
    TestLock(FileKey, Owner, Range),
    /// Release the locks of this open file, which is closed, once nobody holds it any more; without waiting for
    /// that, run again.
    ReleaseLocks(Owner, Option<Arc<Hold>>),
    /// Release the locks of this process once all that it has sent is carried out; then call
    /// [`Compound::process_ended`].
    EndProcess(Owner),
    /// Note that a session of the family, with this number and secret, belongs to this process from now on; then
    /// call [`Compound::handed_over`].
    HandOver(u64, u64, u64),
    /// Note that the client has reopened and relocked everything it wants, then run again.
    Reclaimed,
    /// Events in this queue, for a request with this turn: call [`EventQueue::wait`], then run again.
    Events(Arc<EventQueue>, u64),
}

/// A file that a compound has closed. Dropping it closes the descriptor.
pub enum Closed {
    /// By its handle.
    Handle(Opened),
    /// After the read for which it was opened.
    Read(Closing),
}

/// The environment in which a compound runs.
pub struct Context<'a> {
    /// Open files of the session.
    pub files: Table<'a>,
    /// Exports of the server.
    pub exports: &'a dyn Exports,
    /// The user on whose behalf it runs.
    pub caller: &'a Caller,
    /// Session number.
    pub session: u64,
}

/// A request being executed. Its buffers can be reused for another request.
#[derive(Default)]
pub struct Compound {
    body: Vec<u8>,
    /// Payload that came with the request.
    payload: Vec<u8>,
    /// Bytes offered instead of sent with the request.
    offered: u64,
    /// Index of the next operation.
    index: usize,
    /// Where the next operation begins in the body, and where it ends once it was decoded.
    at: usize,
    after: usize,
    results: Vec<u8>,
    data: Aggregate,
    data_of_file: bool,
    /// Pages of files are copied when they are read.
    copies: bool,
    current: Option<u64>,
    modifies: bool,
    /// It contains a sync, whose reply has to be remembered: the kernel reports a failed write-back only
    /// once.
    syncs: bool,
    failed: bool,
    write: Option<Box<Writing>>,
    slot: u16,
    sequence: u32,
    /// Number of operations.
    operations: usize,
    /// Files that it opened and did not close.
    left_open: usize,
    /// Records what it does, if the session is kept.
    pen: Option<Box<Pen>>,
    /// It failed because it is unknown whether an operation was done.
    undecided: bool,
    /// Store for which the next operation needs a thread that may wait.
    elsewhere: Option<Arc<dyn FileStore>>,
    /// Most bytes that it reads.
    reads: u64,
    /// It lists a directory.
    lists: bool,
    /// Another thread makes the listing, if its store may block.
    shares: bool,
    /// The file that it closed last, if that was open for reading only. Its descriptor is still open.
    closed: Option<Closed>,
    /// Its turn in the event queue, while it asks for events.
    turn: Option<u64>,
}

impl Compound {
    /// Creates a compound for a request. `offered` bytes of its write will follow in data messages.
    ///
    /// # Errors
    /// See [`Compound::begin`].
    pub fn new(
        slot: u16,
        sequence: u32,
        body: &[u8],
        payload: &[u8],
        offered: u64,
    ) -> Result<Self, ProtocolError> {
        let mut compound = Self::default();
        compound.begin(slot, sequence, body, payload, offered)?;
        Ok(compound)
    }

    /// Like [`Compound::new`], in a compound that is new or was [cleared](Compound::clear). If the
    /// request has only one operation, returns it for [`Compound::run`].
    ///
    /// # Errors
    /// The body is not a legal sequence of operations, or its write does not match the bytes sent or offered.
    pub fn begin<'b>(
        &mut self,
        slot: u16,
        sequence: u32,
        body: &'b [u8],
        payload: &[u8],
        offered: u64,
    ) -> Result<Option<Request<'b>>, ProtocolError> {
        debug_assert!(self.body.is_empty() && self.results.is_empty(), "another request's");
        let wrong = |what| Err(ProtocolError { what, at: 0 });
        let (mut operations, mut modifies, mut syncs) = (0, false, false);
        let (mut written, mut read, mut last) = (None, None, None);
        let (mut waits, mut lists) = (false, false);
        for request in Operations::of(body) {
            let request = *last.insert(request?);
            operations += 1;
            modifies |= request.modifies();
            syncs |= matches!(request, Request::Sync { .. });
            let transfer = match request {
                Request::Write { length, .. } => written.replace(length),
                Request::WriteParts { parts, .. } if offered == 0 => {
                    written.replace(bytes_of(parts)?)
                }
                Request::WriteParts { .. } => return wrong("write of parts whose data is offered"),
                Request::Read { length, .. }
                | Request::ReadPath { length, .. }
                | Request::ReadDir { length, .. } => read.replace(length),
                Request::Inquire { .. } => read.replace(0),
                _ => None,
            };
            if transfer.is_some() {
                return wrong("more than one transfer in a request");
            }
            waits |= matches!(request, Request::Events { .. } | Request::ProcessEnded { .. });
            lists |= matches!(request, Request::ReadDir { .. });
        }
        if operations == 0 {
            return wrong("request without operations");
        }
        if waits && operations > 1 {
            return wrong("an operation that has to be alone together with others");
        }
        let length = u64::from(written.unwrap_or(0));
        if length > TRANSFER_BYTES_MAX as u64 {
            return wrong("write longer than the limit");
        }
        if (offered > 0 && !payload.is_empty()) || length != offered + payload.len() as u64 {
            return wrong("write does not match the bytes sent or offered");
        }
        self.body.extend_from_slice(body);
        self.payload.extend_from_slice(payload);
        (self.slot, self.sequence) = (slot, sequence);
        (self.operations, self.modifies, self.syncs) = (operations, modifies, syncs);
        // It must not have to be sent again because pages that were promised cannot be sent.
        self.copies = read.is_some() && self.modifies() && (syncs || !only_opens(body));
        (self.offered, self.reads, self.lists) = (offered, read.unwrap_or(0).into(), lists);
        Ok(last.filter(|_| operations == 1))
    }

    /// Forgets the request but keeps the buffers.
    pub fn clear(&mut self) {
        // Field by field, because this is done for each request, and most have nothing to free.
        let Self {
            body,
            payload,
            offered,
            index,
            at,
            after,
            results,
            data,
            data_of_file,
            copies,
            current,
            modifies,
            syncs,
            failed,
            write,
            slot,
            sequence,
            operations,
            left_open,
            pen,
            undecided,
            elsewhere,
            reads,
            lists,
            shares,
            closed,
            turn,
        } = self;
        for memory in [body, payload, results] {
            memory.clear();
            memory.shrink_to(KEPT_BYTES);
        }
        if !data.is_empty() {
            *data = Aggregate::new();
        }
        (*index, *at, *after, *operations, *left_open) = (0, 0, 0, 0, 0);
        (*slot, *sequence, *offered, *reads, *current) = (0, 0, 0, 0, None);
        (*data_of_file, *copies, *modifies) = (false, false, false);
        (*failed, *undecided) = (false, false);
        (*syncs, *lists, *shares) = (false, false, false);
        (*write, *pen, *elsewhere, *closed, *turn) = (None, None, None, None, None);
    }

    /// True if it may be sent again to a server that remembers nothing.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        is_repeatable(&self.body)
    }

    /// True if it lists a directory.
    #[must_use]
    pub fn lists(&self) -> bool {
        self.lists
    }

    /// Asks for the listing to be made by another thread ([`Step::Share`]) if its store may block: it takes longer than
    /// handing it over.
    pub fn share(&mut self) {
        self.shares = true;
    }

    /// Has pages of files copied when they are read, instead of being referred to: then the reply tells how many bytes
    /// there were, although the file may become shorter before it is sent.
    pub fn copy(&mut self) {
        self.copies = true;
    }

    /// True when its reply has to be remembered.
    #[must_use]
    pub fn modifies(&self) -> bool {
        self.modifies || self.syncs
    }

    /// Ends the request with `EIO` because executing it panicked: it is unknown how much of it was done.
    pub fn broken(&mut self) {
        self.results.clear();
        self.data = Aggregate::new();
        self.write = None;
        self.elsewhere = None;
        self.turn = None;
        self.undecided = self.modifies;
        self.fail(Errno::EIO);
    }

    /// True when it failed because it is unknown whether an operation was done before the server was
    /// killed or the request panicked.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.undecided
    }

    /// Returns the most bytes that it reads, all of them in memory if its store may hang.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.min(TRANSFER_BYTES_MAX as u64)
    }

    /// Returns a file that it has closed. Dropping it closes the descriptor, which takes as long as a
    /// small request. So drop it after sending the reply, but before executing the next request. Only
    /// for files that were open for reading only; no one waits for them to be closed.
    pub fn take_closed(&mut self) -> Option<Closed> {
        self.closed.take()
    }

    /// Returns the handle of the file that it opened and left open.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        self.current.filter(|_| self.left_open > 0)
    }

    /// Returns the tag of the first operation, for statistics.
    #[must_use]
    pub fn first_tag(&self) -> u8 {
        self.body.first().copied().unwrap_or(0)
    }

    /// Returns the encoded results and the data; whether the reply has to be remembered; and whether the
    /// data is a file's (which several messages may carry, unlike a listing).
    #[must_use]
    pub fn reply(&mut self) -> (&mut Vec<u8>, &mut Aggregate, bool, bool) {
        let modifies = self.modifies();
        (&mut self.results, &mut self.data, modifies, self.data_of_file)
    }

    fn result(&mut self, reply: &Reply<'_>) {
        reply.encode(&mut self.results);
        self.index += 1;
        self.at = self.after;
    }

    fn fail(&mut self, errno: Errno) {
        Reply::Failed { errno: errno.0 }.encode(&mut self.results);
        self.failed = true;
    }

    /// Executes operations until the compound is finished or has to wait. For a compound that has just
    /// begun, `only` is what [`Compound::begin`] returned.
    pub fn run(&mut self, only: Option<&Request<'_>>, context: &mut Context<'_>) -> Step {
        let body = std::mem::take(&mut self.body);
        let step = loop {
            let mut reader = Reader::new(&body).from(self.at);
            let is_over = self.failed || self.index == self.operations;
            // The body was checked when it arrived; the same bytes parse again.
            let decoded =
                if is_over || only.is_some() { None } else { Request::decode(&mut reader).ok() };
            let Some(request) = only.filter(|_| !is_over).or(decoded.as_ref()) else {
                self.record();
                break Step::Finished;
            };
            self.after = if only.is_some() { body.len() } else { reader.at() };
            let step = match self.recalled() {
                Some(known) => self.repeat(request, &body[self.after..], &known, context),
                None => self.execute(request, context),
            };
            if let Some(store) = self.elsewhere.take() {
                break Step::Elsewhere(store);
            }
            match step {
                Ok(None) => {}
                Ok(Some(step)) => break step,
                Err(errno) => self.fail(errno),
            }
        };
        self.body = body;
        step
    }

    /// Replaces [`CURRENT`] by the handle of the current file.
    fn handle(&self, handle: u64) -> Result<u64, Errno> {
        if handle == CURRENT { self.current.ok_or(Errno::EBADF) } else { Ok(handle) }
    }

    /// Finds an open file, and makes sure that this thread may use its store.
    fn at<'c>(&mut self, context: &'c Context<'_>, handle: u64) -> Result<Found<'c>, Errno> {
        let opened = context.files.find(self.handle(handle)?)?;
        self.reach(context, &opened.store)?;
        Ok(opened)
    }

    /// Must be called before any use of a store. Fails if the store may wait without limit and this
    /// thread must not wait. The operation has not done anything yet, and is started again on another
    /// thread.
    fn reach(&mut self, context: &Context<'_>, store: &Arc<dyn FileStore>) -> Result<(), Errno> {
        if store.may_hang() && !context.files.may_wait() {
            self.elsewhere = Some(store.clone());
            return Err(Errno::EAGAIN);
        }
        Ok(())
    }

    /// Must be called before a file is shortened to `size`. Like [`Compound::reach`], fails if that frees much,
    /// during which this thread must not be missing.
    fn shorten(
        &mut self,
        context: &Context<'_>,
        opened: &Opened,
        (path, follow): (&[u8], bool),
        size: u64,
    ) -> Result<(), Errno> {
        let store = &opened.store;
        if context.files.may_wait() || !store.may_block() {
            return Ok(());
        }
        // The operation itself finds out what is wrong with its path.
        let found = store.stat(context.caller, (&*opened.file, path), follow);
        if found.is_ok_and(|attr| attr.is_file() && freed(&attr, size) > FREED_BYTES_MAX) {
            self.elsewhere = Some(store.clone());
            return Err(Errno::EAGAIN);
        }
        Ok(())
    }

    /// Finds an open file for a change; `EROFS` if its export is read-only.
    fn writable_at(&mut self, context: &Context<'_>, handle: u64) -> Result<Opened, Errno> {
        let opened = self.at(context, handle)?.into_owned();
        if opened.terms.read_only {
            return Err(Errno::EROFS);
        }
        self.changes(&*opened.store);
        Ok(opened)
    }

    /// Finds the start of a path to what is to be changed; `EROFS` if its export is read-only and the path
    /// leads to something.
    fn changeable_at(
        &mut self,
        context: &Context<'_>,
        base: u64,
        path: &[u8],
        follow: bool,
    ) -> Result<Opened, Errno> {
        let opened = self.at(context, base)?;
        if opened.terms.read_only {
            opened.store.stat(context.caller, (&*opened.file, path), follow)?;
        }
        self.writable_at(context, base)
    }

    /// Finds the start of a path to what is to be created; `EROFS` if its export is read-only and nothing
    /// else is wrong. As on a read-only mount, a program that creates what is there is told so.
    fn creatable_at(
        &mut self,
        context: &Context<'_>,
        base: u64,
        path: &[u8],
        is_directory: bool,
    ) -> Result<Opened, Errno> {
        let opened = self.at(context, base)?;
        if opened.terms.read_only {
            names::could_create(&opened, context.caller, path, is_directory)?;
        }
        self.writable_at(context, base)
    }

    /// On a read-only export, fails if the directory of a name that is to be removed or replaced is not
    /// there, and with `dots` if that name is `.` or `..`: as on a read-only mount, this comes before
    /// `EROFS`.
    fn check_name(
        &mut self,
        context: &Context<'_>,
        base: u64,
        path: &[u8],
        dots: Errno,
    ) -> Result<(), Errno> {
        let opened = self.at(context, base)?;
        if !opened.terms.read_only {
            return Ok(());
        }
        match names::locate(&*opened.store, context.caller, &opened.file, path)? {
            None if path.is_empty() => Err(Errno::ENOENT),
            None if !path.starts_with(b"/") => Err(dots),
            _ => Ok(()),
        }
    }

    /// Adds an open file to the session and makes it the current one.
    fn opened(
        &mut self,
        context: &mut Context<'_>,
        opened: Opened,
        at: Option<u64>,
        attr: Attr,
    ) -> Result<(), Errno> {
        let handle = match at {
            Some(handle) => {
                // Another session of the family may have been faster. The flags need not match: one
                // session attaches the root of an export, and a path leads others there.
                let inode = opened.file.identity();
                let spare = context.files.with(|files| match files.find(handle) {
                    Ok(known) if known.file.identity() == inode => Ok(Some(opened)),
                    _ => files.insert_at(handle, opened).map(|()| None),
                });
                // Not while the table is locked for it, since closing may take long.
                drop(spare?);
                handle
            }
            None => context.files.with(|files| files.insert(opened))?,
        };
        self.current = Some(handle);
        self.left_open += 1;
        self.result(&Reply::Opened { handle, attr });
        Ok(())
    }

    /// Runs work at once, or returns it as a step if it has to wait for a store.
    fn blocking(
        &mut self,
        waits_for: Option<Arc<dyn FileStore>>,
        work: impl FnOnce() -> Result<Value, Errno> + Send + 'static,
    ) -> Option<Step> {
        if let Some(store) = waits_for {
            let work = Box::new(move || BlockingResult { result: work() });
            return Some(Step::Block(store, work, 0));
        }
        self.unblocked(BlockingResult { result: work() });
        None
    }

    /// Takes the result of blocking work; run again afterwards.
    pub fn unblocked(&mut self, done: BlockingResult) {
        match done.result {
            Ok(Value::Done) => self.result(&Reply::Done {}),
            Ok(Value::Number(value)) => self.result(&Reply::Number { value }),
            Ok(Value::Read(data)) => self.has_read(data),
            Ok(Value::Listed(entries, end)) => {
                self.result(&Reply::Listed { end: end.into(), length: entries.len() as u32 });
                self.data = Aggregate::from_vec(entries);
            }
            Ok(Value::Wrote(length, offset)) => {
                self.result(&Reply::Wrote { length: length as u32, offset });
            }
            Ok(Value::Freed) => {}
            Ok(Value::Undecided) => {
                self.undecided = true;
                self.fail(Errno::EIO);
            }
            Err(errno) => self.fail(errno),
        }
    }
}

/// Returns how much of a file is freed when it gets this size: at most, if it has holes.
fn freed(attr: &Attr, size: u64) -> u64 {
    let occupied = attr.blocks.saturating_mul(512);
    // Space may be allocated beyond the end, too. It stays when the file grows.
    let end = if size > attr.size { size } else { attr.size.max(occupied) };
    occupied.min(end - size)
}

/// Returns the store of an open file if slow operations of that store belong on another thread.
fn waiting_store(opened: &Opened) -> Option<Arc<dyn FileStore>> {
    opened.store.may_block().then(|| opened.store.clone())
}

#[cfg(test)]
mod tests;
