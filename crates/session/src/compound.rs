//! Execution of one request: its operations in order, until one fails or has to wait.

mod append;
mod locking;
mod names;
mod once;
mod operations;
mod watching;
mod writing;

use crate::Exports;
use crate::files::{Found, Opened, Table};
use crate::locks::{FileKey, Owner, Range, Waiter};
use crate::watches::EventQueue;
use once::Pen;
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_store::{Caller, FileStore};
use towline_wire::codec::{Field, Reader};
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::request::{CURRENT, Operations};
use towline_wire::{Attr, Errno, ProtocolError, Reply, Request};
use writing::Writing;

/// Memory of a request, and of its results, that is kept for the next one.
const KEPT_BYTES: usize = 4096;

/// Work for a thread that may block.
pub type Blocking = Box<dyn FnOnce() -> BlockingResult + Send>;

/// What such work yields: a result and, of a read, the bytes.
pub struct BlockingResult {
    result: Result<Value, Errno>,
}

impl BlockingResult {
    /// Of work that panicked.
    #[must_use]
    pub fn broken() -> Self {
        Self { result: Err(Errno::EIO) }
    }
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
    /// It is finished: [`Compound::reply`].
    Finished,
    /// All bytes of the offered transfer, each fragment by [`Compound::write_fragment`].
    NeedsData,
    /// Its next operation may wait without end for this store: run on, on a thread that may.
    Elsewhere(Arc<dyn FileStore>),
    /// Run this, which waits for this store, on a thread that may block, then [`Compound::unblocked`]. It
    /// yields up to so many bytes that take memory until they are sent.
    Block(Arc<dyn FileStore>, Blocking, u64),
    /// The lock of this waiter; the driver owns the lock table. Then [`Compound::locked`].
    Lock(FileKey, Waiter, bool),
    /// Look whether a lock is in the way, then [`Compound::tested`].
    TestLock(FileKey, Owner, Range),
    /// Release the locks of this open file or process, then run again.
    ReleaseLocks(Owner),
    /// The client has opened and locked again all that it wants to, then run again.
    Reclaimed,
    /// Something to tell in this queue, for a request with this turn: [`EventQueue::wait`], then run again.
    Events(Arc<EventQueue>, u64),
}

/// What a compound runs against.
pub struct Context<'a> {
    /// Open files of its session.
    pub files: Table<'a>,
    /// Exports of the server.
    pub exports: &'a dyn Exports,
    /// On whose behalf.
    pub caller: &'a Caller,
    /// Session number.
    pub session: u64,
}

/// A request being executed. Its memory can be used again for another one.
#[derive(Default)]
pub struct Compound {
    body: Vec<u8>,
    /// Payload that came with the request.
    payload: Vec<u8>,
    /// Bytes offered but not sent with the request.
    offered: u64,
    /// The operation that comes next.
    index: usize,
    /// Where it begins in the body, and where it ends if it was looked at.
    at: usize,
    after: usize,
    results: Vec<u8>,
    data: Aggregate,
    data_of_file: bool,
    current: Option<u64>,
    modifies: bool,
    /// It stores what was written: of what cannot be stored the kernel tells once.
    syncs: bool,
    failed: bool,
    write: Option<Box<Writing>>,
    slot: u16,
    sequence: u32,
    /// Operations it consists of.
    operations: usize,
    /// Files that it opened and did not close.
    left_open: usize,
    /// Records what it does, where the session is kept.
    pen: Option<Box<Pen>>,
    /// It failed because nobody can know whether it was done.
    undecided: bool,
    /// Store that its next operation needs a thread for that may wait.
    elsewhere: Option<Arc<dyn FileStore>>,
    /// Most bytes that it reads.
    reads: u64,
    /// The file that it closed last, if that could only be read: its descriptor is still open.
    closed: Option<Opened>,
    /// Its turn among those that ask for events, while it does.
    turn: Option<u64>,
}

impl Compound {
    /// A request as received. `offered` bytes of its write will come in data messages.
    ///
    /// # Errors
    /// As [`Compound::begin`].
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

    /// As [`Compound::new`], in one that is new or was [cleared](Compound::clear). Yields the operation, where it is the only one,
    /// for [`Compound::run`].
    ///
    /// # Errors
    /// The body is no legal sequence of operations, or its write and the bytes do not match.
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
        let mut waits = false;
        for request in Operations::of(body) {
            let request = *last.insert(request?);
            operations += 1;
            modifies |= request.modifies();
            syncs |= matches!(request, Request::Sync { .. });
            let transfer = match request {
                Request::Write { length, .. } => written.replace(length),
                Request::Read { length, .. } | Request::ReadDir { length, .. } => {
                    read.replace(length)
                }
                Request::Inquire { .. } => read.replace(0),
                _ => None,
            };
            if transfer.is_some() {
                return wrong("more than one transfer in a request");
            }
            waits |= matches!(request, Request::Events { .. });
        }
        if operations == 0 {
            return wrong("request without operations");
        }
        if waits && operations > 1 {
            return wrong("events asked for together with others");
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
        (self.offered, self.reads) = (offered, read.unwrap_or(0).into());
        Ok(last.filter(|_| operations == 1))
    }

    /// Forgets the request, and keeps its memory.
    pub fn clear(&mut self) {
        // One by one: most have nothing to let go of, and this is done for each request.
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
        (*data_of_file, *modifies, *failed, *undecided) = (false, false, false, false);
        *syncs = false;
        (*write, *pen, *elsewhere, *closed, *turn) = (None, None, None, None, None);
    }

    /// True when its reply has to be remembered.
    #[must_use]
    pub fn modifies(&self) -> bool {
        self.modifies || self.syncs
    }

    /// Ends it with `EIO`, because carrying it out panicked: nobody knows what of it was done.
    pub fn broken(&mut self) {
        self.results.clear();
        self.data = Aggregate::new();
        self.write = None;
        self.elsewhere = None;
        self.turn = None;
        self.undecided = self.modifies;
        self.fail(Errno::EIO);
    }

    /// True when it failed because nobody can know whether it was done, before the server was killed or
    /// before it panicked.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.undecided
    }

    /// Most bytes that it reads, all in memory if its store may hang.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.min(TRANSFER_BYTES_MAX as u64)
    }

    /// A file that it has closed: its descriptor goes when this is dropped, which should be after the answer was sent, as it
    /// takes as long as a small request, and before anything else is asked. Only of files that could just be read, whose closing
    /// nobody waits for.
    pub fn take_closed(&mut self) -> Option<Opened> {
        self.closed.take()
    }

    /// The file that it has opened and left open.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        self.current.filter(|_| self.left_open > 0)
    }

    /// Tag of its first operation, for statistics.
    #[must_use]
    pub fn first_tag(&self) -> u8 {
        self.body.first().copied().unwrap_or(0)
    }

    /// What the client gets: encoded results and data; whether the reply has to be remembered, and
    /// whether the data are a file's (which come in fragments, unlike listings).
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

    /// Executes operations until the compound is finished or has to wait. Of one that was just begun `only` is what
    /// [`Compound::begin`] has yielded.
    pub fn run(&mut self, only: Option<&Request<'_>>, context: &mut Context<'_>) -> Step {
        let body = std::mem::take(&mut self.body);
        let step = loop {
            let mut reader = Reader::new(&body).from(self.at);
            let is_over = self.failed || self.index == self.operations;
            // Looked through when it came; the same bytes parse again.
            let decoded =
                if is_over || only.is_some() { None } else { Request::decode(&mut reader).ok() };
            let Some(request) = only.filter(|_| !is_over).or(decoded.as_ref()) else {
                self.record();
                break Step::Finished;
            };
            self.after = if only.is_some() { body.len() } else { reader.at() };
            let step = match self.recalled() {
                Some(known) => self.repeat(request, &known, context),
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

    fn handle(&self, handle: u64) -> Result<u64, Errno> {
        if handle == CURRENT { self.current.ok_or(Errno::EBADF) } else { Ok(handle) }
    }

    fn at<'c>(&mut self, context: &'c Context<'_>, handle: u64) -> Result<Found<'c>, Errno> {
        let opened = context.files.find(self.handle(handle)?)?;
        self.reach(context, &opened.store)?;
        Ok(opened)
    }

    /// To be called before anything of a store is used: fails where that may wait without end and
    /// this thread must not. The operation has done nothing yet, and is begun anew elsewhere.
    fn reach(&mut self, context: &Context<'_>, store: &Arc<dyn FileStore>) -> Result<(), Errno> {
        if store.may_hang() && !context.files.may_wait() {
            self.elsewhere = Some(store.clone());
            return Err(Errno::EAGAIN);
        }
        Ok(())
    }

    fn writable_at(&mut self, context: &Context<'_>, handle: u64) -> Result<Opened, Errno> {
        let opened = self.at(context, handle)?.into_owned();
        if opened.terms.read_only {
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
                // Another session of the family may have been faster. Its flags say the same in other words: the
                // root of an export is attached by one and a path to others.
                let same = context
                    .files
                    .find(handle)
                    .is_ok_and(|known| known.file.identity() == opened.file.identity());
                if !same {
                    context.files.with(|files| files.insert_at(handle, opened))?;
                }
                handle
            }
            None => context.files.with(|files| files.insert(opened))?,
        };
        self.current = Some(handle);
        self.left_open += 1;
        self.result(&Reply::Opened { handle, attr });
        Ok(())
    }

    fn read(&mut self, data: Aggregate) {
        self.result(&Reply::Read { length: data.len() as u32, errno: 0 });
        self.data_of_file = true;
        self.data = data;
    }

    /// Runs work at once, or says that it has to run where it may block, since it waits for this store.
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
}

/// The store of an open file, if what takes long there is to be waited for elsewhere.
fn waiting_store(opened: &Opened) -> Option<Arc<dyn FileStore>> {
    opened.store.may_block().then(|| opened.store.clone())
}
