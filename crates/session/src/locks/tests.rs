use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

mod restarts;

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
        is_kept: true,
        is_again: false,
    }
}

#[test]
fn ranges_split_and_conflict() {
    let mut locks = Locks::default();
    assert_eq!(
        locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 0, 100), None),
        Ok(Locked::Done(vec![]))
    );
    assert_eq!(locks.lock(FILE, waiter(1, lock::UNLOCK, 40, 10), None), Ok(Locked::Done(vec![])));
    assert_eq!(locks.lock(FILE, waiter(2, lock::SHARED, 40, 10), None), Ok(Locked::Done(vec![])));
    assert_eq!(locks.lock(FILE, waiter(2, lock::SHARED, 39, 1), None), Err(Errno::EAGAIN));
    assert_eq!(locks.lock(FILE, waiter(2, lock::SHARED, 50, 0), None), Err(Errno::EAGAIN));
    let (_, range) =
        locks.test(1, FILE, owner(2), &Range::new(lock::SHARED, 60, 1).unwrap()).unwrap().unwrap();
    assert_eq!((range.start, range.length()), (50, 50));
}

#[test]
fn a_session_cannot_lock_ranges_without_end() {
    let mut locks = Locks::default();
    let range = |place| Range::new(lock::SHARED, 2 * place, 1).unwrap();
    let held = (0..RANGES_MAX as u64).map(|place| (owner(1), range(place))).collect();
    locks.files.insert(FILE, FileLocks { held, ..FileLocks::default() });
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
    locks.files.insert(FILE, FileLocks { held, ..FileLocks::default() });
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
    assert_eq!(locks.lock(FILE, waiter(2, lock::EXCLUSIVE, 0, 10), here()), Ok(Locked::Waiting));
    assert_eq!(locks.lock(FILE, waiter(1, lock::EXCLUSIVE, 20, 1), here()), Err(Errno::EDEADLK));
    let granted = locks.release(owner(1)).granted;
    assert_eq!(granted, vec![waiter(2, lock::EXCLUSIVE, 0, 10)]);
    assert_eq!(locks.lock(FILE, waiter(3, lock::SHARED, 5, 1), here()), Ok(Locked::Waiting));
    assert!(locks.cancel(1, 3, 1));
    assert_eq!(locks.release(owner(2)), Released::default());
    assert!(locks.files.is_empty());
}

#[test]
fn two_owners_that_convert_their_locks_do_not_wait_for_each_other() {
    let mut locks = Locks::default();
    let file = (1, 2, true);
    let by = |id, kind| Waiter {
        owner: Owner { session: 1, id, process: false },
        ..waiter(id, kind, 0, 0)
    };
    for id in [1, 2] {
        assert_eq!(locks.lock(file, by(id, lock::SHARED), None), Ok(Locked::Done(vec![])));
    }
    let (one, other) = (by(1, lock::EXCLUSIVE), by(2, lock::EXCLUSIVE));
    assert_eq!(locks.give_up_converted(file, &one), vec![]);
    assert_eq!(locks.lock(file, one, here()), Ok(Locked::Waiting));
    assert_eq!(locks.give_up_converted(file, &other), vec![], "nothing is in the way");
    assert_eq!(locks.lock(file, other, here()), Ok(Locked::Done(vec![])));
    assert_eq!(locks.release(other.owner).granted, vec![one]);
    // Two threads use one open file: one waits, the other takes a shared lock.
    locks.lock(file, by(1, lock::SHARED), None).unwrap();
    locks.lock(file, by(2, lock::SHARED), None).unwrap();
    locks.give_up_converted(file, &other);
    assert_eq!(locks.lock(file, other, here()), Ok(Locked::Waiting));
    locks.lock(file, by(2, lock::SHARED), None).unwrap();
    assert_eq!(locks.give_up_converted(file, &one), vec![other]);
    assert_eq!(locks.lock(file, one, None), Err(Errno::EAGAIN));
}

/// Who has been told of the changes of all others, and has not been away since.
#[test]
fn who_locks_learns_whether_others_did() {
    let mut locks = Locks::default();
    let of = |session, start| {
        let owner = Owner { session, ..owner(session) };
        Waiter { session, owner, ..waiter(session, lock::EXCLUSIVE, start, 10) }
    };
    let take = |locks: &mut Locks, waiter: Waiter| {
        let others = locks.is_new_to(FILE, waiter.owner);
        assert_eq!(locks.lock(FILE, waiter, None), Ok(Locked::Done(vec![])));
        others
    };
    let unlock = |locks: &mut Locks, mut waiter: Waiter| {
        waiter.range.kind = lock::UNLOCK;
        locks.lock(FILE, waiter, None).unwrap();
    };
    // It keeps the entry in the table.
    locks.lock(FILE, of(3, 100), None).unwrap();
    assert!(take(&mut locks, of(1, 0)));
    assert!(!take(&mut locks, of(1, 20)));
    unlock(&mut locks, of(1, 0));
    assert!(!take(&mut locks, of(1, 0)));
    assert!(take(&mut locks, of(2, 40)));
    assert!(take(&mut locks, of(1, 0)), "the other one locked something");
    // What the other one has changed is told when it unlocks, whatever happens then.
    unlock(&mut locks, of(2, 40));
    unlock(&mut locks, of(1, 0));
    assert!(take(&mut locks, of(1, 0)));
    locks.lock(FILE, of(2, 0), here()).unwrap();
    assert!(!take(&mut locks, of(1, 20)), "it waits");
    locks.release(of(1, 0).owner);
    assert!(take(&mut locks, of(2, 60)), "it has waited in another session");
    locks.release(of(3, 100).owner);
    assert!(take(&mut locks, of(2, 60)));
    locks.lock(FILE, Waiter { is_again: true, ..of(4, 80) }, None).unwrap();
    assert!(take(&mut locks, of(4, 80)));
    assert!(!take(&mut locks, of(4, 80)));
}

#[test]
fn a_process_keeps_its_locks_in_another_session() {
    let mut locks = Locks::default();
    let in_session = |session, id| Waiter { session, ..waiter(id, lock::EXCLUSIVE, 0, 10) };
    locks.lock(FILE, in_session(1, 7), None).unwrap();
    let range = Range::new(lock::EXCLUSIVE, 0, 1).unwrap();
    assert_eq!(locks.test(2, FILE, owner(7), &range), Ok(None), "its own lock");
    locks.leave(1, None, false);
    assert_eq!(locks.lock(FILE, in_session(3, 8), None), Err(Errno::EAGAIN));
    assert_eq!(locks.lock(FILE, in_session(3, 8), here()), Ok(Locked::Waiting));
    assert_eq!(
        locks.leave(2, None, false),
        vec![in_session(3, 8)],
        "nobody speaks for it any more"
    );
    assert!(locks.leave(3, None, false).is_empty());
    assert!(locks.files.is_empty() && locks.processes.is_empty());
}

#[test]
fn nobody_who_is_gone_gets_a_lock() {
    let mut locks = Locks::default();
    let gone = Arc::new(End(true.into()));
    let in_session = |session, id| Waiter { session, ..waiter(id, lock::EXCLUSIVE, 0, 10) };
    locks.lock(FILE, in_session(1, 1), None).unwrap();
    for (waiter, peer) in [(in_session(2, 2), here()), (in_session(3, 3), Some(gone.clone() as _))]
    {
        assert_eq!(locks.lock(FILE, waiter, peer), Ok(Locked::Waiting));
    }
    assert_eq!(locks.lock(FILE, in_session(4, 4), here()), Ok(Locked::Waiting));
    // One has no lane, which is known; for the other this shows only when it gets the lock.
    locks.withdraw(2);
    gone.0.store(false, Ordering::Relaxed);
    assert_eq!(locks.leave(1, None, false), vec![in_session(4, 4)]);
    // A request that comes back is made twice but waits once.
    for _ in 0..2 {
        assert_eq!(locks.lock(FILE, in_session(2, 2), here()), Ok(Locked::Waiting));
    }
    assert_eq!(locks.leave(4, None, false), vec![in_session(2, 2)]);
    assert!(locks.leave(2, None, false).is_empty());
    assert!(locks.leave(3, None, false).is_empty() && locks.files.is_empty());
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

#[test]
fn a_family_locks_again_what_nobody_else_has_locked_in_between() {
    let mut locks = Locks::default();
    let family = 1 << 63;
    let of = |session, id, kind, start, is_again| Waiter {
        session,
        owner: Owner { session, ..owner(id) },
        is_again,
        ..waiter(id, kind, start, 10)
    };
    let lost = [(1, lock::EXCLUSIVE, 0), (2, lock::SHARED, 20), (3, lock::EXCLUSIVE, 40)];
    for (id, kind, start) in lost {
        locks.lock(FILE, of(family, id, kind, start, false), None).unwrap();
    }
    locks.lock(FILE, of(9, 1, lock::EXCLUSIVE, 5, false), here()).unwrap();
    let again = |locks: &mut Locks, id, kind, start| {
        locks.lock(FILE, of(family, id, kind, start, true), None).is_ok()
    };
    let granted = locks.leave(1, Some(family), false);
    assert_eq!(granted, [of(9, 1, lock::EXCLUSIVE, 5, false)]);
    for (kind, start) in [(lock::UNLOCK, 5), (lock::SHARED, 20), (lock::UNLOCK, 20)] {
        locks.lock(FILE, of(9, 1, kind, start, false), None).unwrap();
    }
    let again_all = |locks: &mut Locks| lost.map(|(id, kind, start)| again(locks, id, kind, start));
    assert_eq!(again_all(&mut locks), [false, true, true]);
    assert_eq!(again_all(&mut locks), [false, true, true], "asked again");
    // It knows now, and locks anew.
    locks.lock(FILE, of(family, 1, lock::EXCLUSIVE, 0, false), None).unwrap();
    assert_eq!(again_all(&mut locks), [true; 3]);
    locks.leave(1, Some(family), false);
    assert_eq!(again_all(&mut locks), [true; 3]);
    // Of who is known to have ended it is not remembered when it had what others have had, too.
    locks.leave(1, Some(family), false);
    for id in 1..4 {
        assert!(locks.release(Owner { session: family, ..owner(id) }).granted.is_empty());
    }
    assert_eq!(again_all(&mut locks), [false, true, true]);
}

#[test]
fn after_a_restart_nobody_locks_again_what_others_have_had_since() {
    let mut locks = Locks::default();
    let of = |session, kind, start, is_again| Waiter {
        session,
        owner: Owner { session, ..owner(1) },
        is_again,
        ..waiter(1, kind, start, 10)
    };
    let mut again = |session, start| {
        let waiter = of(session, lock::EXCLUSIVE, start, true);
        locks.lock(FILE, waiter, None).map(drop)
    };
    assert_eq!((again(1, 0), again(2, 20)), (Ok(()), Ok(())), "nobody has had it");
    assert_eq!(again(1, 0), Ok(()), "asked again");
    for (start, kind) in [(20, lock::UNLOCK), (40, lock::EXCLUSIVE), (40, lock::UNLOCK)] {
        locks.lock(FILE, of(2, kind, start, false), None).unwrap();
    }
    locks.lock(FILE, of(3, lock::EXCLUSIVE, 60, false), None).unwrap();
    assert_eq!(locks.lock(FILE, of(4, lock::EXCLUSIVE, 60, false), here()), Ok(Locked::Waiting));
    locks.lock(FILE, of(3, lock::UNLOCK, 60, false), None).unwrap();
    locks.lock(FILE, of(4, lock::UNLOCK, 60, false), None).unwrap();
    let refused = [20, 40, 60]
        .map(|start| locks.lock(FILE, of(1, lock::EXCLUSIVE, start, true), None).map(drop));
    assert_eq!(refused, [Err(Errno::EAGAIN); 3]);
    locks.lock(FILE, of(1, lock::EXCLUSIVE, 20, false), None).unwrap();
    let waiter = of(1, lock::EXCLUSIVE, 20, true);
    assert_eq!(locks.lock(FILE, waiter, None), Ok(Locked::Done(Vec::new())), "it has it");
}

/// More than are remembered.
#[test]
fn what_many_clients_lose_at_a_time_they_all_lock_again() {
    const CLIENTS: u64 = 1100;
    let mut locks = Locks::default();
    let lock = |locks: &mut Locks, session, file, is_again| {
        let owner = Owner { session, ..owner(1) };
        let waiter = Waiter { session, owner, is_again, ..waiter(1, lock::EXCLUSIVE, 0, 10) };
        locks.lock((1, file, false), waiter, None).is_ok()
    };
    let secret = |session| 1 << 63 | session;
    let lose = |locks: &mut Locks, session| {
        locks.leave(session, Some(session), false);
        locks.session_ended(session, secret(session));
    };
    for client in 1..=CLIENTS {
        locks.session_begins(client, secret(client), None);
        assert!(lock(&mut locks, client, client, false));
    }
    (1..=CLIENTS).for_each(|client| lose(&mut locks, client));
    assert!(lock(&mut locks, 10_000, 1, false));
    lose(&mut locks, 10_000);
    for (before, again) in [(0, 2000), (2000, 4000)] {
        for client in 1..=CLIENTS {
            let (lost, session) = (secret(before + client), again + client);
            locks.session_begins(session, secret(session), Some(lost));
            let is_taken = client == 1;
            assert_eq!(lock(&mut locks, session, client, true), !is_taken, "{client}");
        }
        (1..=CLIENTS).for_each(|client| lose(&mut locks, again + client));
    }
    // Back before the server noticed.
    let range = waiter(1, lock::SHARED, 0, 10).range;
    locks.session_begins(8000, secret(8000), None);
    assert!(lock(&mut locks, 8000, 8000, false));
    locks.session_begins(8001, secret(8001), Some(secret(8000)));
    lose(&mut locks, 8000);
    (1..=CLIENTS).for_each(|client| locks.past.remember_lost((9, 9, true), owner(client), range));
    assert!(lock(&mut locks, 8001, 8000, true));
}
