//! Byte-range and whole-file locks of all sessions of a server.
//!
//! Families of locks do not see each other, as on Linux, except that process locks and open-file locks
//! conflict with one another ("Open file description locks", fcntl(2)).

use std::collections::HashMap;
use std::sync::Arc;
use towline_wire::Errno;
pub use towline_wire::ranges::Range;
use towline_wire::request::lock;

/// The holder or requester of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Owner of the session's table of files ([`crate::files::Files::owner`]): the session or its family.
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
    waiting: Vec<(Waiter, Arc<dyn Peer>)>,
}

/// Most processes that one session may speak for.
const PROCESSES_MAX: usize = 1024;

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
    /// Sets or releases a lock. With `peer`, waits for a lock that is held by another owner. A request
    /// that already waits, and is made again, waits only once.
    ///
    /// # Errors
    /// `EAGAIN` when the lock is held by another owner and `peer` is `None`; `EDEADLK` when waiting
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
            let granted = locks.grant();
            self.tidy(file);
            return Ok(Locked::Done(granted));
        }
        if locks.conflict(waiter.owner, &waiter.range).is_none() {
            waiter.range.apply(waiter.owner, &mut locks.held);
            // Downgrading an exclusive lock to a shared one can let others in.
            return Ok(Locked::Done(locks.grant()));
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

    /// Ends a session: its requests stop waiting, and the locks of processes for which no other session
    /// speaks, and of open files whose owner is `files`, are released. Returns the waiters that got
    /// their locks.
    pub fn leave(&mut self, session: u64, files: Option<u64>) -> Vec<Waiter> {
        let mut ended = Vec::new();
        self.processes.retain(|owner, sessions| {
            sessions.retain(|other| *other != session);
            if sessions.is_empty() {
                ended.push(*owner);
            }
            !sessions.is_empty()
        });
        self.withdraw(session);
        // No requests of other sessions are orphaned: those would speak for the processes, or belong to
        // the family.
        self.release_all(|owner| ended.contains(owner) || Some(owner.session) == files).granted
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
        self.release_all(|other| *other == owner)
    }

    /// Releases all locks of the owners for which `gone` is true; their requests stop waiting.
    fn release_all(&mut self, gone: impl Fn(&Owner) -> bool) -> Released {
        let mut released = Released::default();
        self.files.retain(|_, locks| {
            let before = locks.held.len();
            locks.held.retain(|(owner, _)| !gone(owner));
            let orphaned = locks.waiting.extract_if(.., |(waiter, _)| gone(&waiter.owner));
            released.orphaned.extend(orphaned.map(|(waiter, _)| waiter));
            if locks.held.len() != before {
                released.granted.extend(locks.grant());
            }
            !locks.held.is_empty() || !locks.waiting.is_empty()
        });
        released
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

impl FileLocks {
    /// Returns the first held lock that conflicts with this one.
    fn conflict(&self, owner: Owner, range: &Range) -> Option<(Owner, Range)> {
        let exclusive = |r: &Range| r.kind == lock::EXCLUSIVE;
        self.held
            .iter()
            .find(|(other, held)| {
                *other != owner && held.overlaps(range) && (exclusive(held) || exclusive(range))
            })
            .copied()
    }

    /// Returns the owners of all held locks that conflict with this one.
    fn blockers(&self, owner: Owner, range: &Range) -> Vec<Owner> {
        let exclusive = |r: &Range| r.kind == lock::EXCLUSIVE;
        let in_the_way = |(other, held): &&(Owner, Range)| {
            *other != owner && held.overlaps(range) && (exclusive(held) || exclusive(range))
        };
        self.held.iter().filter(in_the_way).map(|(other, _)| *other).collect()
    }

    /// Returns true if a range that this owner holds begins before this one and ends after it.
    fn is_within_one(&self, owner: Owner, range: &Range) -> bool {
        let around = |held: &Range| held.start < range.start && range.last < held.last;
        self.held.iter().any(|(other, held)| *other == owner && around(held))
    }

    /// Returns the number of ranges that the owners of a session or family hold.
    fn held_by(&self, session: u64) -> usize {
        self.held.iter().filter(|(owner, _)| owner.session == session).count()
    }

    /// Grants waiting requests their locks, first come first served, and returns them. Drops requests
    /// whose connection is gone.
    fn grant(&mut self) -> Vec<Waiter> {
        let mut granted = Vec::new();
        let mut still = Vec::new();
        for (waiter, peer) in std::mem::take(&mut self.waiting) {
            if self.conflict(waiter.owner, &waiter.range).is_some() {
                still.push((waiter, peer));
            } else if peer.is_there() {
                waiter.range.apply(waiter.owner, &mut self.held);
                granted.push(waiter);
            }
        }
        self.waiting = still;
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct End(AtomicBool);

    impl Peer for End {
        fn is_there(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn here() -> Option<Arc<dyn Peer>> {
        Some(Arc::new(End(true.into())))
    }

    const FILE: FileKey = (1, 2, false);

    fn owner(id: u64) -> Owner {
        Owner { session: 1, id, process: true }
    }

    fn waiter(id: u64, kind: u8, start: u64, length: u64) -> Waiter {
        Waiter {
            session: 1,
            owner: owner(id),
            range: Range::new(kind, start, length).unwrap(),
            slot: id as u16,
            sequence: 1,
        }
    }

    #[test]
    fn ranges_split_and_conflict() {
        let mut locks = Locks::default();
        assert_eq!(
            locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 0, 100), None),
            Ok(Locked::Done(vec![]))
        );
        assert_eq!(
            locks.lock(FILE, waiter(1, lock::UNLOCK, 40, 10), None),
            Ok(Locked::Done(vec![]))
        );
        assert_eq!(
            locks.lock(FILE, waiter(2, lock::SHARED, 40, 10), None),
            Ok(Locked::Done(vec![]))
        );
        assert_eq!(locks.lock(FILE, waiter(2, lock::SHARED, 39, 1), None), Err(Errno::EAGAIN));
        assert_eq!(locks.lock(FILE, waiter(2, lock::SHARED, 50, 0), None), Err(Errno::EAGAIN));
        let (_, range) = locks
            .test(1, FILE, owner(2), &Range::new(lock::SHARED, 60, 1).unwrap())
            .unwrap()
            .unwrap();
        assert_eq!((range.start, range.length()), (50, 50));
    }

    #[test]
    fn a_session_cannot_lock_ranges_without_end() {
        let mut locks = Locks::default();
        let range = |place| Range::new(lock::SHARED, 2 * place, 1).unwrap();
        let held = (0..RANGES_MAX as u64).map(|place| (owner(1), range(place))).collect();
        locks.files.insert(FILE, FileLocks { held, waiting: Vec::new() });
        let one_more = |id| waiter(id, lock::SHARED, 2 * RANGES_MAX as u64, 1);
        assert_eq!(locks.lock(FILE, one_more(1), here()), Err(Errno::ENOLCK));
        assert_eq!(locks.lock(FILE, one_more(2), here()), Err(Errno::ENOLCK), "of one family");
        let mut stranger = one_more(3);
        stranger.owner.session = 2;
        assert_eq!(locks.lock(FILE, stranger, None), Ok(Locked::Done(vec![])));
        locks.lock(FILE, waiter(1, lock::UNLOCK, 0, 10), None).unwrap();
        assert_eq!(locks.lock(FILE, one_more(1), None), Ok(Locked::Done(vec![])));
    }

    #[test]
    fn unlocking_does_not_make_ranges_without_end() {
        let mut locks = Locks::default();
        let range = |place| Range::new(lock::SHARED, 4 * place, 3).unwrap();
        let held = (0..RANGES_MAX as u64).map(|place| (owner(1), range(place))).collect();
        locks.files.insert(FILE, FileLocks { held, waiting: Vec::new() });
        let unlock = |start, length| waiter(1, lock::UNLOCK, start, length);
        assert_eq!(locks.lock(FILE, unlock(1, 1), None), Err(Errno::ENOLCK), "one more range");
        // The same number, or fewer.
        for (start, length) in [(3, 1), (4, 1), (8, 3), (0, 0)] {
            assert_eq!(locks.lock(FILE, unlock(start, length), None), Ok(Locked::Done(vec![])));
        }
        assert!(locks.files.is_empty());
    }

    #[test]
    fn a_process_that_has_ended_takes_no_room() {
        let mut locks = Locks::default();
        for id in 0..2 * PROCESSES_MAX as u64 {
            let taken = locks.lock(FILE, waiter(id, lock::EXCLUSIVE, 0, 10), None);
            assert_eq!(taken, Ok(Locked::Done(vec![])), "process {id}");
            assert_eq!(locks.release(owner(id)), Released::default());
        }
        assert!(locks.files.is_empty() && locks.processes.is_empty());
    }

    #[test]
    fn waiters_are_served_in_order_and_deadlocks_are_seen() {
        let mut locks = Locks::default();
        locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 0, 10), here()).unwrap();
        locks.lock(FILE, waiter(2, lock::EXCLUSIVE, 20, 10), here()).unwrap();
        assert_eq!(
            locks.lock(FILE, waiter(2, lock::EXCLUSIVE, 0, 10), here()),
            Ok(Locked::Waiting)
        );
        assert_eq!(
            locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 20, 1), here()),
            Err(Errno::EDEADLK)
        );
        let granted = locks.release(owner(1)).granted;
        assert_eq!(granted, vec![waiter(2, lock::EXCLUSIVE, 0, 10)]);
        assert_eq!(locks.lock(FILE, waiter(3, lock::SHARED, 5, 1), here()), Ok(Locked::Waiting));
        assert!(locks.cancel(1, 3, 1));
        assert_eq!(locks.release(owner(2)), Released::default());
        assert!(locks.files.is_empty());
    }

    #[test]
    fn a_process_keeps_its_locks_in_another_session() {
        let mut locks = Locks::default();
        let in_session = |session, id| Waiter { session, ..waiter(id, lock::EXCLUSIVE, 0, 10) };
        locks.lock(FILE, in_session(1, 7), None).unwrap();
        let range = Range::new(lock::EXCLUSIVE, 0, 1).unwrap();
        assert_eq!(locks.test(2, FILE, owner(7), &range), Ok(None), "its own lock");
        locks.leave(1, None);
        assert_eq!(locks.lock(FILE, in_session(3, 8), None), Err(Errno::EAGAIN));
        assert_eq!(locks.lock(FILE, in_session(3, 8), here()), Ok(Locked::Waiting));
        assert_eq!(locks.leave(2, None), vec![in_session(3, 8)], "nobody speaks for it any more");
        assert!(locks.leave(3, None).is_empty());
        assert!(locks.files.is_empty() && locks.processes.is_empty());
    }

    #[test]
    fn nobody_who_is_gone_gets_a_lock() {
        let mut locks = Locks::default();
        let gone = Arc::new(End(true.into()));
        let in_session = |session, id| Waiter { session, ..waiter(id, lock::EXCLUSIVE, 0, 10) };
        locks.lock(FILE, in_session(1, 1), None).unwrap();
        for (waiter, peer) in
            [(in_session(2, 2), here()), (in_session(3, 3), Some(gone.clone() as _))]
        {
            assert_eq!(locks.lock(FILE, waiter, peer), Ok(Locked::Waiting));
        }
        assert_eq!(locks.lock(FILE, in_session(4, 4), here()), Ok(Locked::Waiting));
        // One has no lane, which is known; for the other this shows only when it gets the lock.
        locks.withdraw(2);
        gone.0.store(false, Ordering::Relaxed);
        assert_eq!(locks.leave(1, None), vec![in_session(4, 4)]);
        // A request that comes back is made twice but waits once.
        for _ in 0..2 {
            assert_eq!(locks.lock(FILE, in_session(2, 2), here()), Ok(Locked::Waiting));
        }
        assert_eq!(locks.leave(4, None), vec![in_session(2, 2)]);
        assert!(locks.leave(2, None).is_empty());
        assert!(locks.leave(3, None).is_empty() && locks.files.is_empty());
    }

    #[test]
    fn who_is_gone_makes_no_deadlock() {
        let mut locks = Locks::default();
        let gone = Arc::new(End(true.into()));
        locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 0, 10), None).unwrap();
        locks.lock(FILE, waiter(2, lock::EXCLUSIVE, 20, 10), None).unwrap();
        let waits = waiter(2, lock::EXCLUSIVE, 0, 10);
        assert_eq!(locks.lock(FILE, waits, Some(gone.clone())), Ok(Locked::Waiting));
        gone.0.store(false, Ordering::Relaxed);
        let other = waiter(1, lock::EXCLUSIVE, 20, 1);
        assert_eq!(locks.lock(FILE, other, here()), Ok(Locked::Waiting));
    }

    #[test]
    fn a_session_cannot_speak_for_everybody() {
        let mut locks = Locks::default();
        let range = Range::new(lock::SHARED, 0, 1).unwrap();
        for id in 0..PROCESSES_MAX as u64 {
            locks.test(1, FILE, owner(id), &range).unwrap();
        }
        let more = owner(PROCESSES_MAX as u64);
        assert_eq!(locks.test(1, FILE, more, &range), Err(Errno::ENOLCK));
        assert_eq!(locks.test(2, FILE, more, &range), Ok(None));
    }
}
