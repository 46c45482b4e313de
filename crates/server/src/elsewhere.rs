//! Requests to stores that may hang. Threads of the store that may block carry them out, so that only clients
//! of this file system wait for it. They also write long data to files of any store whose writes wait for a
//! device (`O_DIRECT`, `O_SYNC`), and carry out what frees much of a file.
//!
//! The request itself goes to the thread and returns by mail. While it is away, its session keeps only the
//! busy slot. Files open in the store are closed by its threads, too.

use crate::core::{Core, Shared, elapsed_ns};
use crate::grants::{Grant, Running, Served};
use crate::guarded::guarded;
use crate::mailbox::Mail;
use crate::offload::Job;
use std::sync::Arc;
use std::time::Instant;
use towline_session::files::{SharedFiles, Table};
use towline_session::{Context, Step};
use towline_store::FileStore;

type Store = Arc<dyn FileStore>;

/// Data for these stores may take one part in this many of a core's buffers: half of them.
pub(crate) const SHARE_OF_BUFFERS: u64 = 2;

/// What the thread is to do for a request.
pub(crate) enum Task {
    /// Run its operations, from the next one on.
    Run,
    /// Write these fragments.
    Write(Vec<Grant>),
}

/// The result of a task.
pub(crate) enum Outcome {
    /// The request ran up to this step.
    Stopped(Step),
    /// The fragments are written; true: one was the last.
    Wrote(bool),
}

/// A part of a request on its way to a thread of the store.
pub(crate) struct Errand {
    session: u64,
    slot: u16,
    running: Box<Running>,
    store: Store,
    task: Task,
}

/// The same part on its way back.
pub(crate) struct Return {
    session: u64,
    slot: u16,
    running: Box<Running>,
    store: Store,
    outcome: Outcome,
    /// Nanoseconds that the work took.
    took: u64,
}

impl Errand {
    fn carry_out(self, shared: &Shared, files: &SharedFiles) -> Return {
        let Self { session, slot, mut running, store, task } = self;
        let start = Instant::now();
        let Running { compound, caller, .. } = &mut *running;
        let outcome = guarded(|| match task {
            Task::Write(landed) => Outcome::Wrote(landed.into_iter().any(|mut grant| {
                compound.write_fragment(&grant.buffer.buffer().bytes()[..grant.length])
            })),
            Task::Run => {
                let files = Table::Shared(files);
                let mut context = Context { files, exports: &shared.exports, caller, session };
                loop {
                    match compound.run(None, &mut context) {
                        Step::Block(_, work, _) => compound.unblocked(work()),
                        step => break Outcome::Stopped(step),
                    }
                }
            }
        });
        let outcome = outcome.unwrap_or_else(|| {
            running.compound.broken();
            Outcome::Stopped(Step::Finished)
        });
        Return { session, slot, running, store, outcome, took: elapsed_ns(start) }
    }
}

impl Core {
    /// Hands a request to a thread of this store, to write what has landed, once nothing more is on its way.
    pub(crate) fn write_elsewhere(
        &mut self,
        session: u64,
        slot: u16,
        mut running: Box<Running>,
        store: Store,
    ) {
        if running.grants.is_empty() {
            // Clients get no advance grants for stores that may hang.
            running.fetched = !store.may_hang();
            let landed = std::mem::take(&mut running.landed);
            self.send_elsewhere(session, slot, running, store, Task::Write(landed));
        } else if let Some(served) = self.sessions.get_mut(session) {
            served.running[usize::from(slot)] = Some(running);
        }
    }

    /// Hands a request to a thread of this store.
    pub(crate) fn send_elsewhere(
        &mut self,
        session: u64,
        slot: u16,
        mut running: Box<Running>,
        store: Store,
        task: Task,
    ) {
        running.expected = running.compound.reads();
        let expected = running.expected;
        self.expect(session, |lane| lane.expected += expected);
        let Some(served) = self.sessions.get_mut(session) else { return };
        let errand = Errand { session, slot, running, store, task };
        // Requests of a `towline run` are carried out in the order in which they are sent, since its
        // processes do not wait for each answer. Other clients wait where order matters to them.
        let is_same = |away: &Store| Arc::ptr_eq(away, &errand.store);
        let in_order = served.session.family && errand.store.may_hang();
        if in_order && served.away.iter().any(is_same) {
            served.waiting.push_back(errand);
            return;
        }
        self.dispatch(errand);
    }

    fn dispatch(&mut self, errand: Errand) {
        let Some(served) = self.sessions.get_mut(errand.session) else { return };
        served.away.push(errand.store.clone());
        let (files, low) = (served.session.files.clone(), served.is_low);
        let shared = self.shared.clone();
        let pool = self.shared.pools.of_files(&errand.store);
        let work = move || Some(Mail::Returned(errand.carry_out(&shared, &files)));
        pool.run(Job { work: Box::new(work), reply_to: self.mailbox.clone(), low });
    }

    /// Continues a request that has returned.
    pub(crate) fn returned(&mut self, back: Return) {
        let Return { session, slot, mut running, store, outcome, took } = back;
        running.stages.storage += took;
        running.stages.disk += took;
        if running.data_since.is_some() {
            running.stages.overlapped += took;
        }
        self.forget_expected(session, &mut running);
        let Some(served) = self.sessions.get_mut(session) else { return };
        let is_same = |away: &Store| Arc::ptr_eq(away, &store);
        if let Some(place) = served.away.iter().position(is_same) {
            served.away.swap_remove(place);
        }
        if let Some(next) = served.waiting.iter().position(|errand| is_same(&errand.store))
            && let Some(next) = served.waiting.remove(next)
        {
            self.dispatch(next);
        }
        match outcome {
            Outcome::Stopped(step) => {
                let now = Instant::now();
                if let Some(running) = self.follow(session, slot, running, step, now) {
                    self.drive(session, slot, running, now);
                }
            }
            Outcome::Wrote(last) => self.wrote(session, slot, running, last),
        }
    }

    /// Closes what an ended or abandoned session has open in stores that may hang.
    pub(crate) fn close_elsewhere(&mut self, served: &mut Served, files: Option<&SharedFiles>) {
        let waiting = served.waiting.drain(..).map(|errand| errand.running);
        let running = served.running.iter_mut().filter_map(|running| {
            running.take_if(|running| running.compound.writes_elsewhere().is_some())
        });
        for running in running.chain(waiting) {
            if let Some(store) = running.compound.writes_elsewhere().cloned() {
                self.drop_elsewhere(&store, running);
            }
        }
        for opened in files.map_or_else(Vec::new, |files| files.lock().take_hanging()) {
            let store = opened.store.clone();
            self.drop_elsewhere(&store, opened);
        }
    }

    pub(crate) fn drop_elsewhere(&self, store: &Store, what: impl Send + 'static) {
        let work = Box::new(move || {
            guarded(|| drop(what));
            None
        });
        let job = Job { work, reply_to: self.mailbox.clone(), low: false };
        self.shared.pools.of_files(store).run(job);
    }
}
