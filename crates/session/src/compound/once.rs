//! Exactly-once execution, even if the server is killed in the middle of a compound: what a compound
//! does is recorded, and recorded operations are not done again.

use super::{Compound, Context, Step};
use crate::files::Opened;
use crate::record::{Intent, Kind, Record};
use crate::state::Journal;
use std::sync::Arc;
use towline_store::{Caller, FileStore, OpenHow, SetAttr};
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, Operations, open_flag};
use towline_wire::{Errno, Reply, Request};

/// Records what a request does.
pub(super) struct Pen {
    pub(super) journal: Journal,
    /// The record to write next.
    draft: Record,
    /// The request closes a file that it has not opened.
    closes: bool,
    /// Something was changed that survives a restart of the server.
    changes: bool,
    /// Progress at the last write: operations done, and whether one failed.
    written: Option<(usize, bool)>,
    /// What a previous server recorded for this request.
    known: Option<Arc<Record>>,
}

/// Records what one operation is about to do, possibly from a thread that may block.
pub(super) struct Draft {
    pub(super) journal: Journal,
    pub(super) slot: u16,
    record: Record,
    /// The operation may have been in progress when the server was killed.
    pub(super) pending: bool,
}

impl Draft {
    pub(super) fn intend(&mut self, intent: Intent) {
        self.record.intent = Some(intent);
        let results = std::mem::take(&mut self.record.results);
        self.journal.write(self.slot, &mut self.record, &results);
        self.record.results = results;
    }
}

/// The state of an operation that may have been in progress when the server was killed.
pub(super) enum Before {
    /// It was not in progress, or had not begun.
    NotBegun,
    /// It was about to do this.
    Intended(Intent),
    /// Another client's request found out that it was done; the record has its result.
    Settled(Arc<Record>),
}

/// The caller for lookups by the server itself.
pub(super) fn server() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false }
}

impl Compound {
    /// Starts to record this request in its session's part of the server's state. With `recorded`, there
    /// may be a record from before a restart. Returns true if the record is complete and the reply is
    /// ready.
    #[must_use]
    pub fn keep(&mut self, journal: &Journal, recorded: bool) -> bool {
        if !self.modifies() && !recorded {
            return false;
        }
        let body_crc = crc32c::crc32c(&self.body);
        let known = if recorded { journal.newest(self.slot) } else { None };
        let known = known.filter(|r| r.sequence == self.sequence && r.body_crc == body_crc);
        if known.as_ref().is_none_or(|record| record.intent.is_none()) && recorded {
            journal.recall(self.slot);
        }
        let answered = known.as_ref().filter(|record| record.complete && !record.lost);
        if let Some(record) = answered {
            self.results.clone_from(&record.results);
            self.index = self.operations;
            return true;
        }
        if !self.modifies() {
            return false;
        }
        let draft = Record {
            generation: 0,
            secret: 0,
            sequence: self.sequence,
            body_crc,
            index: 0,
            complete: false,
            lost: false,
            intent: None,
            results: Vec::new(),
        };
        let closes =
            |request| matches!(request, Ok(Request::Close { handle }) if handle != CURRENT);
        let closes = Operations::of(&self.body).any(closes);
        let changes = known.is_some();
        let known = known.map(Arc::new);
        let journal = journal.clone();
        self.pen = Some(Box::new(Pen { journal, draft, closes, changes, written: None, known }));
        false
    }

    /// Notes that something in this store is about to be changed.
    pub(super) fn changes(&mut self, store: &dyn FileStore) {
        if let Some(pen) = &mut self.pen
            && store.survives_restart()
        {
            pen.changes = true;
        }
    }

    /// Records what was done so far.
    pub(super) fn record(&mut self) {
        let Some(pen) = self.pen.as_mut().filter(|pen| pen.changes) else { return };
        let now = (self.index, self.failed);
        if pen.written == Some(now) {
            return;
        }
        let over = self.failed || self.index == self.operations;
        pen.draft.index = self.index as u8;
        // Whoever repeats it after a restart has the files open again that it has closed.
        let leaves_files = self.left_open > 0 || pen.closes;
        pen.draft.complete = over && !leaves_files && self.data.is_empty();
        pen.draft.intent = None;
        pen.journal.write(self.slot, &mut pen.draft, &self.results);
        pen.written = Some(now);
    }

    /// Records what the next operation is about to do.
    pub(super) fn intend(&mut self, intent: Intent) {
        let Some(pen) = &mut self.pen else { return };
        pen.draft.index = self.index as u8;
        pen.draft.complete = false;
        pen.draft.intent = Some(intent);
        pen.journal.write(self.slot, &mut pen.draft, &self.results);
    }

    /// Returns a draft for an operation that is executed on another thread.
    pub(super) fn draft(&self) -> Option<Draft> {
        let pen = self.pen.as_ref()?;
        let record = Record {
            index: self.index as u8,
            complete: false,
            results: self.results.clone(),
            ..pen.draft.clone()
        };
        let pending = self.is_pending();
        Some(Draft { journal: pen.journal.clone(), slot: self.slot, record, pending })
    }

    /// True when the next operation was about to be done when the server was killed.
    pub(super) fn is_pending(&self) -> bool {
        let known = self.pen.as_ref().and_then(|pen| pen.known.as_ref());
        known.is_some_and(|r| usize::from(r.index) == self.index && r.intent.is_some())
    }

    /// Returns the previous server's record if it has the result of the next operation.
    pub(super) fn recalled(&self) -> Option<Arc<Record>> {
        let known = self.pen.as_ref()?.known.as_ref()?;
        let results = if known.lost { usize::from(known.index) } else { known.results() };
        (self.index < results).then(|| known.clone())
    }

    /// Repeats an operation that was already done: does nothing except for open files. `rest` are the operations after
    /// it.
    pub(super) fn repeat(
        &mut self,
        request: &Request<'_>,
        rest: &[u8],
        known: &Record,
        context: &mut Context<'_>,
    ) -> Result<Option<Step>, Errno> {
        if known.lost {
            if request.repeatable() {
                return self.execute(request, context);
            }
            self.undecided = true;
            return Err(Errno::EIO);
        }
        let replies = parse_results(&known.results).map_err(|_| Errno::EIO)?;
        let reply = replies.get(self.index).ok_or(Errno::EIO)?;
        match (*request, reply) {
            (Request::Close { handle }, reply) => {
                let outcome = match *reply {
                    Reply::Failed { errno } => Err(Errno(errno)),
                    _ => Ok(()),
                };
                return self.close(context, handle, Some(outcome));
            }
            (_, Reply::Failed { errno }) => return Err(Errno(*errno)),
            // Nothing was done to a file without a name: any other will do.
            (Request::Open { flags, .. }, _)
                if flags & open_flag::TEMPORARY != 0 && replies.len() == self.index + 1 =>
            {
                return self.execute(request, context);
            }
            // It may have another name by now.
            (Request::Open { .. }, reply) if closes(rest, replies.len() - self.index - 1) => {
                self.current = None;
                self.result(reply);
            }
            (Request::Open { base, flags, path, .. }, Reply::Opened { attr, .. }) => {
                let at = self.at(context, base)?.into_owned();
                self.open_again(context, at, path, flags, attr.identity())?;
            }
            (request, _) if is_done_again(&request) => return self.execute(&request, context),
            (_, reply) => self.result(reply),
        }
        Ok(None)
    }

    /// Opens a file again that was opened before the restart, without creating or truncating it.
    pub(super) fn open_again(
        &mut self,
        context: &mut Context<'_>,
        at: Opened,
        path: &[u8],
        flags: u32,
        inode: u64,
    ) -> Result<(), Errno> {
        if flags & open_flag::TEMPORARY != 0 {
            return Err(Errno::ESTALE);
        }
        let caller = context.caller;
        let Opened { store, file: base, terms, .. } = at;
        let how = OpenHow { flags: open_flag::without_changes(flags), mode: 0 };
        let source = (&*base, path);
        let (file, attr) = match store.open(caller, source, how) {
            // The creator of a file may open it once, whatever its permissions.
            Err(Errno::EACCES) if open_flag::creates_exclusively(flags) => {
                let mode = store.stat(caller, source, false)?.mode & 0o7777;
                let set = |mode| SetAttr { mode: Some(mode), ..SetAttr::default() };
                store.set_attr(caller, source, false, &set(mode | 0o600))?;
                let opened = store.open(caller, source, how);
                store.set_attr(caller, source, false, &set(mode))?;
                opened?
            }
            Err(Errno::ENOENT) => return Err(Errno::ESTALE),
            result => result?,
        };
        if attr.identity() != inode {
            return Err(Errno::ESTALE);
        }
        self.opened(context, Opened::new(store, file, terms, flags), None, attr)
    }

    /// Returns what became of the next operation before the restart. The caller has to guard its places.
    pub(super) fn before(&self) -> Before {
        match &self.pen {
            Some(pen) if self.is_pending() => {
                before(&pen.journal, self.slot, self.sequence, self.index)
            }
            _ => Before::NotBegun,
        }
    }
}

/// True for operations on what does not outlive the server, and those whose data is not recorded.
fn is_done_again(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Attach { .. }
            | Request::Reclaim { .. }
            | Request::Reclaimed {}
            | Request::Open { .. }
            | Request::Close { .. }
            | Request::Read { .. }
            | Request::ReadDir { .. }
            | Request::ReadPath { .. }
            | Request::Inquire { .. }
            | Request::Lock { .. }
            | Request::TestLock { .. }
    )
}

/// True if the first `done` of these operations, which follow an open, close the file and do nothing again before.
fn closes(operations: &[u8], done: usize) -> bool {
    let mut done = Operations::of(operations).take(done).map_while(Result::ok);
    matches!(done.find(is_done_again), Some(Request::Close { handle: CURRENT }))
}

/// Returns what became of an operation that was in progress when the server was killed. The caller has
/// to guard its places.
pub(super) fn before(journal: &Journal, slot: u16, sequence: u32, index: usize) -> Before {
    match journal.recall(slot).filter(|record| record.sequence == sequence) {
        Some(record) if usize::from(record.index) > index => Before::Settled(Arc::new(record)),
        Some(Record { intent: Some(intent), .. }) => Before::Intended(intent),
        _ => Before::NotBegun,
    }
}

impl Draft {
    /// Like [`Compound::before`].
    pub(super) fn before(&self) -> Before {
        if !self.pending {
            return Before::NotBegun;
        }
        before(&self.journal, self.slot, self.record.sequence, usize::from(self.record.index))
    }

    /// Records an append to a file of `size` bytes.
    pub(super) fn intend_append(&mut self, place: crate::record::Place, size: u64, length: u64) {
        self.intend(Intent {
            kind: Kind::Append,
            reserved: false,
            places: [place, crate::record::Place::default()],
            before: [0; 2],
            offset: size,
            length,
        });
    }
}
