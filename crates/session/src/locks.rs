//! Byte-range and whole-file locks of all sessions of a server.
//!
//! Families of locks do not see each other, as on Linux, except that process locks and open-file locks
//! conflict with one another ("Open file description locks", fcntl(2)).

mod clients;
mod had;
mod lost;

use crate::held::HeldLocks;
use clients::Clients;
use had::HadLocks;
use lost::LostLocks;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use towline_wire::Errno;
pub use towline_wire::ranges::Range;
use towline_wire::request::lock;

/// The holder or requester of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Owner of the session's table of files ([`crate::files::Files::owner`]): the session or its family, which
    /// has the same number after a restart of the server.
    pub session: u64,
    /// Process number for process locks, handle for other locks.
    pub id: u64,
    /// True for process locks, so that a process and a handle with the same number differ.
    pub process: bool,
}

/// A request that waits for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The requester of the lock.
    pub owner: Owner,
    /// Session of the waiting request.
    pub session: u64,
    /// The range and kind of the lock.
    pub range: Range,
    /// Slot of the waiting request.
    pub slot: u16,
    /// Sequence number of that request.
    pub sequence: u32,
    /// The lock outlives the server.
    pub is_kept: bool,
    /// The requester had the lock before a restart, and has not looked what others have changed since.
    pub is_again: bool,
}

/// Where the answer to a waiting request would go.
pub trait Peer: Send + Sync {
    /// False once the connection is gone. A lock is not granted if its requester would not learn of it.
    fn is_there(&self) -> bool;
}

/// Identity of a file, and whether this is about `flock` locks.
pub type FileKey = (u64, u64, bool);

#[derive(Default)]
struct FileLocks {
    held: Vec<(Owner, Range)>,
    /// The session or family that has locked something after all others have locked or unlocked anything.
    latest: Option<u64>,
    waiting: Vec<(Waiter, Arc<dyn Peer>)>,
}

/// Most processes that one session may speak for.
const PROCESSES_MAX: usize = 1024;

/// Stands for the sessions that spoke for a process before a restart, or before its family was missed again. The process
/// may have locked something through one, and return only with another one, in which it waits for a lock.
const MISSED: u64 = 0;

/// Most ranges of one file that a session or family may have locked. Every lock request for that file
/// looks at each of them. At the limit, a session cannot unlock the middle of a range either, which makes
/// two of one.
const RANGES_MAX: usize = 16 * 1024;

/// All locks of a server.
#[derive(Default)]
pub struct Locks {
    files: HashMap<FileKey, FileLocks>,
    /// Sessions that speak for a process. Its locks end with the last of them. A process of a family
    /// that executes a program continues in another session.
    processes: HashMap<Owner, Vec<u64>>,
    /// Where locks are kept for the time after a restart.
    kept: Option<HeldLocks>,
    /// Sessions and families that had locks before the restart and are not back yet, and when they were first
    /// missed, in seconds.
    awaited: HashMap<u64, u32>,
    past: Past,
}

/// What tells an owner that comes back whether others have had its locks.
#[derive(Default)]
struct Past {
    clients: Clients,
    /// What others may have locked since it was released although its owner may come back.
    lost: LostLocks,
    had: HadLocks,
}

/// Requests that no longer wait because locks were released.
#[derive(Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Released {
    /// They have their locks, and have to be answered.
    pub granted: Vec<Waiter>,
    /// Their owners are gone. They have to be run again, which tells them if their file is closed.
    pub orphaned: Vec<Waiter>,
}

/// Outcome of [`Locks::lock`].
#[derive(Debug, PartialEq, Eq)]
pub enum Locked {
    /// Done; these waiters have their locks now and have to be answered.
    Done(Vec<Waiter>),
    /// The request waits.
    Waiting,
}

impl Locks {
    /// Creates the table of a server that keeps locks, with those that were held before it was restarted.
    #[must_use]
    pub fn keeping(kept: HeldLocks) -> Self {
        let mut locks = Self::default();
        locks.past.had = HadLocks::since(kept.was_complete);
        for (file, owner, range) in kept.all() {
            locks.past.had.note_held(file, owner, &range);
            range.apply(owner, &mut locks.files.entry(file).or_default().held);
            if owner.process {
                locks.processes.insert(owner, vec![MISSED]);
            }
        }
        locks.awaited = kept.owners();
        locks.kept = Some(kept);
        locks
    }

    /// Returns true while sessions or families that had locks before a restart are not back.
    #[must_use]
    pub fn awaits(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Notes that a session or family that may have had locks before a restart is back.
    pub fn returned(&mut self, owner: u64) {
        if self.awaited.remove(&owner).is_some()
            && let Some(kept) = &self.kept
        {
            kept.missed_since(owner, 0);
        }
    }

    /// Notes that the server runs at this time, in seconds as for [`HeldLocks::load`], while it waits for owners.
    pub fn note_running(&self, now: u32) {
        if let Some(kept) = &self.kept {
            kept.note_running(now);
        }
    }

    /// Releases the locks of all sessions and families that were missed for the first time before `since`, in
    /// seconds as for [`HeldLocks::load`], and are not back. Returns the waiters that got their locks.
    pub fn end_awaited(&mut self, since: u32) -> Vec<Waiter> {
        let ended = self.awaited.extract_if(|_, missed| *missed < since);
        let awaited: HashSet<u64> = ended.map(|(owner, _)| owner).collect();
        if !awaited.is_empty() {
            log::warn!("{} clients with locks did not return in time", awaited.len());
        }
        self.processes.retain(|owner, _| !awaited.contains(&owner.session));
        self.remember_lost(|owner| awaited.contains(&owner.session));
        // Nobody waits as one of these owners without being back.
        self.release_all(|owner| awaited.contains(&owner.session)).granted
    }

    /// Sets or releases a lock. With `peer`, waits for a lock that is held by another owner. A request
    /// that already waits, and is made again, waits only once.
    ///
    /// # Errors
    /// `EAGAIN` when the lock is held by another owner and `peer` is `None`, or when it is asked for
    /// [again](Waiter::is_again) and others have had it since its owner lost it; `EDEADLK` when waiting
    /// would never end; `ENOLCK` when the session speaks for too many processes, or has locked too many
    /// ranges of the file.
    pub fn lock(
        &mut self,
        file: FileKey,
        waiter: Waiter,
        peer: Option<Arc<dyn Peer>>,
    ) -> Result<Locked, Errno> {
        self.speaks_for(waiter.session, waiter.owner)?;
        let locks = self.files.entry(file).or_default();
        let unlocks = waiter.range.kind == lock::UNLOCK;
        if locks.held.len() >= RANGES_MAX
            && locks.held_by(waiter.owner.session) >= RANGES_MAX
            && (!unlocks || locks.is_within_one(waiter.owner, &waiter.range))
        {
            return Err(Errno::ENOLCK);
        }
        if unlocks {
            waiter.range.apply(waiter.owner, &mut locks.held);
            locks.note(waiter.owner);
            let granted = locks.grant(file, &mut self.past);
            self.keep(file, granted.iter().chain([&waiter]));
            self.tidy(file);
            return Ok(Locked::Done(granted));
        }
        if locks.conflict(waiter.owner, &waiter.range).is_none() {
            if waiter.is_again && !locks.holds(&waiter) && self.past.was_taken(file, &waiter) {
                self.tidy(file);
                return Err(Errno::EAGAIN);
            }
            self.past.note_held(file, &waiter);
            waiter.range.apply(waiter.owner, &mut locks.held);
            match waiter.is_again {
                true => locks.note(waiter.owner),
                false => locks.latest = Some(waiter.owner.session),
            }
            // Downgrading an exclusive lock to a shared one can let others in.
            let granted = locks.grant(file, &mut self.past);
            self.keep(file, granted.iter().chain([&waiter]));
            return Ok(Locked::Done(granted));
        }
        let Some(peer) = peer else {
            self.tidy(file);
            return Err(Errno::EAGAIN);
        };
        if waiter.owner.process && self.would_deadlock(file, &waiter) {
            return Err(Errno::EDEADLK);
        }
        let waiting = &mut self.files.entry(file).or_default().waiting;
        waiting.retain(|(other, _)| *other != waiter);
        waiting.push((waiter, peer));
        Ok(Locked::Waiting)
    }

    /// Returns true if other sessions or families than that of `owner` may have locked or unlocked something of
    /// the file since its last lock.
    #[must_use]
    pub fn is_new_to(&self, file: FileKey, owner: Owner) -> bool {
        self.files.get(&file).is_none_or(|locks| locks.latest != Some(owner.session))
    }

    /// Gives up the `flock` lock that a request would convert, if another owner's lock is in the way. The kernel
    /// does so, too: two owners that each hold a shared lock and want an exclusive one would wait for each other.
    /// Returns the waiters that got their locks.
    pub fn give_up_converted(&mut self, file: FileKey, waiter: &Waiter) -> Vec<Waiter> {
        let Some(locks) = self.files.get_mut(&file).filter(|_| file.2) else { return Vec::new() };
        if locks.conflict(waiter.owner, &waiter.range).is_none() {
            return Vec::new();
        }
        Range { kind: lock::UNLOCK, ..waiter.range }.apply(waiter.owner, &mut locks.held);
        locks.note(waiter.owner);
        let granted = locks.grant(file, &mut self.past);
        self.keep(file, granted.iter().chain([waiter]));
        granted
    }

    /// Returns the first lock that conflicts with this one. From then on `session` speaks for the
    /// process that asks.
    ///
    /// # Errors
    /// `ENOLCK` when the session speaks for too many processes.
    pub fn test(
        &mut self,
        session: u64,
        file: FileKey,
        owner: Owner,
        range: &Range,
    ) -> Result<Option<(Owner, Range)>, Errno> {
        self.speaks_for(session, owner)?;
        Ok(self.files.get(&file).and_then(|locks| locks.conflict(owner, range)))
    }

    /// Notes that a session speaks for the process that owns a lock.
    fn speaks_for(&mut self, session: u64, owner: Owner) -> Result<(), Errno> {
        if !owner.process || self.processes.get(&owner).is_some_and(|s| s.contains(&session)) {
            return Ok(());
        }
        if self.processes.values().filter(|s| s.contains(&session)).count() >= PROCESSES_MAX {
            return Err(Errno::ENOLCK);
        }
        self.processes.entry(owner).or_default().push(session);
        Ok(())
    }

    /// Ends a session: its requests stop waiting, and the locks of open files and processes whose owner is
    /// `files` are released. Unless the ends of processes are reported ([`Locks::release`]), the locks of
    /// those for which no other session speaks are released, too. Returns the waiters that got their locks.
    pub fn leave(&mut self, session: u64, files: Option<u64>, are_reported: bool) -> Vec<Waiter> {
        let mut ended = Vec::new();
        self.processes.retain(|owner, sessions| {
            sessions.retain(|other| *other != session);
            if sessions.is_empty() && !are_reported {
                ended.push(*owner);
            }
            !sessions.is_empty()
        });
        if let Some(gone) = files {
            self.returned(gone);
            self.processes.retain(|owner, _| owner.session != gone);
            self.remember_lost(|owner| owner.session == gone);
        }
        self.withdraw(session);
        // No requests of other sessions are orphaned: those would speak for the processes, or belong to
        // the family.
        self.release_all(|owner| ended.contains(owner) || Some(owner.session) == files).granted
    }

    /// Ends the last session of a family that is there, while others may still come back after a restart, as of
    /// now, in seconds as for [`HeldLocks::load`]: the family keeps its locks for them, and is missed again.
    pub fn step_out(&mut self, session: u64, family: u64, now: u32) {
        self.withdraw(session);
        let is_its = |owner: &Owner| owner.session == family;
        let has = |locks: &FileLocks| locks.held.iter().any(|(owner, _)| is_its(owner));
        if !self.files.values().any(has) {
            return self.processes.retain(|owner, _| !is_its(owner));
        }
        for (_, sessions) in self.processes.iter_mut().filter(|(owner, _)| is_its(owner)) {
            *sessions = vec![MISSED];
        }
        self.awaited.insert(family, now);
        if let Some(kept) = &self.kept {
            kept.missed_since(family, now);
        }
    }

    /// Remembers the locks of owners that are about to lose them and may come back.
    fn remember_lost(&mut self, loses: impl Fn(&Owner) -> bool) {
        for (file, locks) in &self.files {
            for (owner, range) in locks.held.iter().filter(|(owner, _)| loses(owner)) {
                self.past.remember_lost(*file, *owner, *range);
            }
        }
    }

    /// Notes that a session without a family begins, with the secret of the one that its client has lost.
    pub fn session_begins(&mut self, session: u64, secret: u64, lost: Option<u64>) {
        self.past.clients.begin(session, secret, lost);
    }

    /// Notes that a session without a family has ended, and left: its client may come back with another one.
    pub fn session_ended(&mut self, session: u64, secret: u64) {
        self.past.clients.end(session, secret);
    }

    /// Stops the waiting of a session that lost its lane, because it cannot be told when its requests
    /// get their locks. The client sends the requests again, and they wait again then.
    pub fn withdraw(&mut self, session: u64) {
        self.files.retain(|_, locks| {
            locks.waiting.retain(|(waiter, _)| waiter.session != session);
            !locks.held.is_empty() || !locks.waiting.is_empty()
        });
    }

    /// Releases all locks of an open file that is closed, or of a process that has ended; its requests stop
    /// waiting. No session speaks for the process any more.
    pub fn release(&mut self, owner: Owner) -> Released {
        self.processes.remove(&owner);
        self.past.forget(owner);
        self.release_all(|other| *other == owner)
    }

    /// Releases all locks of the owners for which `gone` is true; their requests stop waiting.
    fn release_all(&mut self, gone: impl Fn(&Owner) -> bool) -> Released {
        let mut released = Released::default();
        let mut files = std::mem::take(&mut self.files);
        files.retain(|file, locks| {
            let ended = locks.held.extract_if(.., |(owner, _)| gone(owner));
            let ended: Vec<Owner> = ended.map(|(owner, _)| owner).collect();
            let orphaned = locks.waiting.extract_if(.., |(waiter, _)| gone(&waiter.owner));
            released.orphaned.extend(orphaned.map(|(waiter, _)| waiter));
            if !ended.is_empty() {
                ended.iter().for_each(|owner| locks.note(*owner));
                let granted = locks.grant(*file, &mut self.past);
                if let Some(kept) = &mut self.kept {
                    ended.iter().for_each(|owner| kept.clear(*file, *owner));
                    granted.iter().for_each(|waiter| locks.keep(kept, *file, waiter));
                }
                released.granted.extend(granted);
            }
            !locks.held.is_empty() || !locks.waiting.is_empty()
        });
        self.files = files;
        released
    }

    /// Keeps what these requesters have locked of a file now.
    fn keep<'a>(&mut self, file: FileKey, changed: impl Iterator<Item = &'a Waiter>) {
        if let (Some(kept), Some(locks)) = (&mut self.kept, self.files.get(&file)) {
            changed.for_each(|waiter| locks.keep(kept, file, waiter));
        }
    }

    /// Gives up a waiting request. Returns true if it was waiting.
    pub fn cancel(&mut self, session: u64, slot: u16, sequence: u32) -> bool {
        let mut found = false;
        for locks in self.files.values_mut() {
            let before = locks.waiting.len();
            let is_it = |w: &Waiter| (w.session, w.slot, w.sequence) == (session, slot, sequence);
            locks.waiting.retain(|(waiter, _)| !is_it(waiter));
            found |= locks.waiting.len() != before;
        }
        found
    }

    fn tidy(&mut self, file: FileKey) {
        if self.files.get(&file).is_some_and(|l| l.held.is_empty() && l.waiting.is_empty()) {
            self.files.remove(&file);
        }
    }

    /// Checks whether the holders that block `waiter` wait, directly or indirectly, for its owner.
    fn would_deadlock(&self, file: FileKey, waiter: &Waiter) -> bool {
        let mut seen: Vec<Owner> = Vec::new();
        let mut next: Vec<Owner> =
            self.files.get(&file).map_or(Vec::new(), |l| l.blockers(waiter.owner, &waiter.range));
        while let Some(owner) = next.pop() {
            if owner == waiter.owner {
                return true;
            }
            if seen.contains(&owner) {
                continue;
            }
            seen.push(owner);
            for locks in self.files.values() {
                for (waiting, _) in
                    locks.waiting.iter().filter(|(w, p)| w.owner == owner && p.is_there())
                {
                    next.extend(locks.blockers(waiting.owner, &waiting.range));
                }
            }
        }
        false
    }
}

/// Returns true if two owners cannot have these locks together.
fn exclude(one: &Range, other: &Range) -> bool {
    one.overlaps(other) && [one, other].iter().any(|range| range.kind == lock::EXCLUSIVE)
}

impl Past {
    /// Remembers a lock that ends although its owner may come back.
    fn remember_lost(&mut self, file: FileKey, owner: Owner, range: Range) {
        self.lost.remember(file, self.clients.at_first(owner), range);
    }

    /// Notes that this requester has its lock from now on.
    fn note_held(&mut self, file: FileKey, waiter: &Waiter) {
        let owner = self.clients.at_first(waiter.owner);
        self.lost.note_held(file, owner, &waiter.range);
        self.had.note_held(file, owner, &waiter.range);
    }

    /// Returns true if others may have had the lock since this requester had it.
    fn was_taken(&self, file: FileKey, waiter: &Waiter) -> bool {
        let (owner, range) = (self.clients.at_first(waiter.owner), &waiter.range);
        let taken = self.lost.was_taken(file, owner, range);
        taken.unwrap_or_else(|| self.had.others_may_have_had(file, owner, range))
    }

    /// Forgets an owner that does not come back.
    fn forget(&mut self, owner: Owner) {
        self.lost.forget(self.clients.at_first(owner));
    }
}

impl FileLocks {
    /// Returns the first held lock that conflicts with this one.
    fn conflict(&self, owner: Owner, range: &Range) -> Option<(Owner, Range)> {
        self.held.iter().find(|(other, held)| *other != owner && exclude(held, range)).copied()
    }

    /// Returns the owners of all held locks that conflict with this one.
    fn blockers(&self, owner: Owner, range: &Range) -> Vec<Owner> {
        let in_the_way = |(other, held): &&(Owner, Range)| *other != owner && exclude(held, range);
        self.held.iter().filter(in_the_way).map(|(other, _)| *other).collect()
    }

    /// Notes that this owner has unlocked something, or has a lock in a session that may only have waited for
    /// it.
    fn note(&mut self, owner: Owner) {
        self.latest = self.latest.filter(|latest| *latest == owner.session);
    }

    /// Keeps what this requester has locked now.
    fn keep(&self, kept: &mut HeldLocks, file: FileKey, waiter: &Waiter) {
        if waiter.is_kept {
            let own = self.held.iter().filter(|(owner, _)| *owner == waiter.owner);
            kept.set(file, waiter.owner, own.map(|(_, range)| *range).collect());
        }
    }

    /// Returns true if a range that this owner holds begins before this one and ends after it.
    fn is_within_one(&self, owner: Owner, range: &Range) -> bool {
        let around = |held: &Range| held.start < range.start && range.last < held.last;
        self.held.iter().any(|(other, held)| *other == owner && around(held))
    }

    /// Returns true if this requester has its lock already.
    fn holds(&self, waiter: &Waiter) -> bool {
        let is_its = |(owner, held): &(Owner, Range)| {
            *owner == waiter.owner
                && held.kind == waiter.range.kind
                && held.start <= waiter.range.start
                && waiter.range.last <= held.last
        };
        self.held.iter().any(is_its)
    }

    /// Returns the number of ranges that the owners of a session or family hold.
    fn held_by(&self, session: u64) -> usize {
        self.held.iter().filter(|(owner, _)| owner.session == session).count()
    }

    /// Grants waiting requests their locks, first come first served, and returns them. Drops requests
    /// whose connection is gone.
    fn grant(&mut self, file: FileKey, past: &mut Past) -> Vec<Waiter> {
        let mut granted = Vec::new();
        let mut still = Vec::new();
        for (waiter, peer) in std::mem::take(&mut self.waiting) {
            if self.conflict(waiter.owner, &waiter.range).is_some() {
                still.push((waiter, peer));
            } else if peer.is_there() {
                waiter.range.apply(waiter.owner, &mut self.held);
                past.note_held(file, &waiter);
                self.note(waiter.owner);
                granted.push(waiter);
            }
        }
        self.waiting = still;
        granted
    }
}

#[cfg(test)]
mod tests;
