//! The ends of sessions, processes and open files. Locks protect what was asked for under them, so they are
//! released only when all of that is carried out.

use crate::core::Core;
use crate::grants::Served;
use crate::lanes::seconds;
use crate::mailbox::Mail;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use towline_session::Session;
use towline_session::files::Hold;
use towline_session::locks::Owner;
use towline_wire::Hello;
use towline_wire::limits::FAMILY_LEASE_SECONDS;

/// How long the lane of a process that has ended may take to deliver what the process has sent.
const LANE_TIME: Duration = Duration::from_secs(FAMILY_LEASE_SECONDS);

/// How long a client that comes back waits for the end of its last session, at most: a file system may hang.
const END_TIME: Duration = Duration::from_secs(3);

/// The locks of a process that has ended. Each session of the process that is not done has a copy of the reference;
/// whoever lets go of the last one releases the locks.
pub(crate) struct ProcessLocks {
    owner: Owner,
    /// Session, slot and sequence number of the request that reports the end of the process.
    request: (u64, u16, u32),
}

/// A session of a process that has ended.
pub(crate) struct Orphan {
    session: u64,
    since: Instant,
    /// Its lane did not end by itself in time.
    was_cut: bool,
    locks: Arc<ProcessLocks>,
}

impl Core {
    /// Releases the locks of a process that has ended, once its sessions are done, on whatever cores they live.
    pub(crate) fn end_process(&self, owner: Owner, request: (u64, u16, u32)) {
        let Some(served) = self.sessions.get(request.0) else { return };
        let sessions = self.shared.families.sessions_of(owner.id, &served.session.files);
        let locks = Arc::new(ProcessLocks { owner, request });
        for session in sessions {
            let mail = Mail::Orphan { session, locks: locks.clone() };
            self.shared.mailboxes[self.shared.home(session)].send(mail);
        }
        self.let_go(locks);
    }

    fn let_go(&self, locks: Arc<ProcessLocks>) {
        let Some(ProcessLocks { owner, request }) = Arc::into_inner(locks) else { return };
        self.shared.release_locks(owner);
        let (session, slot, sequence) = request;
        let mail = Mail::LocksReleased { session, slot, sequence };
        self.shared.mailboxes[self.shared.home(session)].send(mail);
    }

    /// Keeps the locks of a process that has ended until this session of it is done.
    pub(crate) fn orphan(&mut self, session: u64, locks: Arc<ProcessLocks>) {
        let since = Instant::now();
        self.orphans.push(Orphan { session, since, was_cut: false, locks });
    }

    /// Lets go of the locks of processes whose sessions are done, and ends sessions that can end now.
    pub(crate) fn finish_ending(&mut self) {
        for mut orphan in std::mem::take(&mut self.orphans) {
            match self.is_done(&mut orphan) {
                true => self.let_go(orphan.locks),
                false => self.orphans.push(orphan),
            }
        }
        let before = self.ending.len();
        for session in std::mem::take(&mut self.ending) {
            if !self.try_end(session) {
                self.ending.push(session);
            }
        }
        if self.ending.len() < before {
            self.greet_returning();
        }
        // In case a lane does not end by itself.
        self.ticking |= !self.orphans.is_empty();
    }

    /// Returns true if all that the process has sent in this session is carried out. A lane that is read to its
    /// end delivers no more. One that stays open is cut: over a network, what was sent may still be on its way. If
    /// the process is there after all, it returns on the next lane and sends again what was not answered.
    fn is_done(&mut self, orphan: &mut Orphan) -> bool {
        let lane = self.sessions.get(orphan.session).and_then(|served| served.lane);
        if let Some(lane) = lane.filter(|_| !orphan.was_cut) {
            if orphan.since.elapsed() < LANE_TIME {
                return false;
            }
            orphan.was_cut = true;
            self.close_lane(lane as usize, &io::ErrorKind::TimedOut.into());
        }
        !self.sessions.get(orphan.session).is_some_and(|served| served.is_at_work())
    }

    /// Ends a session once its requests under way are carried out. Until then, its files stay open and locked.
    pub(crate) fn end_session(&mut self, id: u64) {
        let Some(served) = self.sessions.get_mut(id).filter(|served| !served.has_ended) else {
            return;
        };
        (served.has_ended, served.lane) = (true, None);
        if !served.session.family {
            // Its client may begin another one before this one is over.
            self.shared.families.end(&served.session.files.lock());
        }
        let disks = std::mem::take(&mut served.disks);
        self.end_disks(disks);
        self.withdraw_locks(id);
        self.waiting.forget(id);
        if !self.try_end(id) {
            self.ending.push(id);
        }
    }

    /// Removes a session that has ended, unless some of its requests are still being carried out.
    fn try_end(&mut self, id: u64) -> bool {
        if self.sessions.get(id).is_some_and(|served| served.is_at_work()) {
            return false;
        }
        let Some(mut served) = self.sessions.remove(id) else { return true };
        self.statistics.sessions.fetch_sub(1, Ordering::Relaxed);
        self.shared.homes.remove(id);
        let session = &served.session;
        // Until all is released, no new session of the family gets at the locks: it would lose what it takes again.
        let mut locks = self.shared.locks.lock();
        // The last session of a family releases the locks of its open files.
        let (files, are_reported) = self.shared.families.leave(session);
        let owner = files.as_ref().map(|files| files.lock().owner);
        let granted = match owner.filter(|_| session.family && self.awaits_others()) {
            Some(family) => {
                locks.step_out(id, family, seconds());
                Vec::new()
            }
            None => locks.leave(id, owner, are_reported),
        };
        if !session.family {
            locks.session_ended(id, session.secret);
        }
        drop(locks);
        // Not before: if the server is killed in between, the next one gives the number to another session, which must
        // find no locks under it.
        if let Some(state) = &self.shared.state {
            state.end(id);
        }
        self.shared.notify(granted);
        self.close_elsewhere(&mut served, files.as_ref());
        if files.is_none() {
            self.close_bound(&served.session);
        }
        true
    }

    /// Returns true if the client of a lane comes back from a session that is not over yet: what it had locked there
    /// is in its own way until then, and what it asks for could be overtaken. The lane is greeted later.
    pub(crate) fn is_early(&mut self, index: usize, hello: &Hello) -> bool {
        let is_its = |served: &Served| served.has_ended && served.session.secret == hello.secret;
        let is_ending = self.sessions.get(hello.session).is_some_and(is_its);
        let Some(lane) = self.lanes[index].as_mut().filter(|_| is_ending) else { return false };
        if lane.since.elapsed() >= END_TIME {
            return false;
        }
        lane.hello = Some(*hello);
        true
    }

    /// Greets the lanes that were early.
    pub(crate) fn greet_returning(&mut self) {
        for index in 0..self.lanes.len() {
            let lane = self.lanes[index].as_mut().filter(|lane| !lane.hung);
            if let Some(hello) = lane.and_then(|lane| lane.hello.take()) {
                self.greet(index, &hello);
            }
        }
    }

    /// Returns true if sessions from before a restart may still come back: those of a family do one by one.
    fn awaits_others(&self) -> bool {
        self.shared.state.as_ref().is_some_and(|state| state.has_unclaimed())
    }

    /// Closes the files of a family that were to be closed at the end of this session of it.
    fn close_bound(&self, session: &Session) {
        let (bound, owner) = {
            let mut files = session.files.lock();
            (files.take_bound(session.id), files.owner)
        };
        for (handle, mut opened) in bound {
            let hold = opened.hold.take();
            if opened.store.may_hang() {
                let store = opened.store.clone();
                self.drop_elsewhere(&store, opened);
            } else {
                drop(opened);
            }
            if hold.is_some() {
                self.release_closed(Owner { session: owner, id: handle, process: false }, hold);
            }
        }
    }

    /// Releases the locks of a closed file, once nobody holds it.
    pub(crate) fn release_closed(&self, owner: Owner, hold: Option<Arc<Hold>>) {
        let Some(hold) = hold else { return self.shared.release_locks(owner) };
        // Weak, because a request that holds the file may lie in a mailbox.
        let shared = Arc::downgrade(&self.shared);
        hold.let_go(Box::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.release_locks(owner);
            }
        }));
    }
}
