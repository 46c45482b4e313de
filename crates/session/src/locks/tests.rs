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

/// A process of a family waits for locks in sessions of their own.
#[test]
fn a_process_keeps_its_locks_over_a_restart_while_it_waits() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let of = |session, id, start| {
        let owner = Owner { session: 1 << 63, ..owner(id) };
        Waiter { session, owner, ..waiter(id, lock::EXCLUSIVE, start, 10) }
    };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    locks.lock(FILE, of(1, 1, 0), None).unwrap();
    locks.lock(FILE, of(2, 2, 20), None).unwrap();
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    assert_eq!(locks.lock(FILE, of(3, 1, 20), here()), Ok(Locked::Waiting));
    assert!(locks.leave(3, None, false).is_empty());
    assert_eq!(locks.lock(FILE, of(4, 3, 0), None), Err(Errno::EAGAIN), "it has this from before");
    locks.leave(4, Some(1 << 63), false);
    assert!(locks.files.is_empty() && locks.processes.is_empty());
}

/// A server may be killed again and again before the time is over.
#[test]
fn locks_of_who_stays_away_end_although_the_server_is_restarted() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let of = |session, start| {
        let owner = Owner { session, ..owner(session) };
        Waiter { session, owner, ..waiter(session, lock::EXCLUSIVE, start, 10) }
    };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    for session in [1, 2] {
        locks.lock(FILE, of(session, 20 * session), None).unwrap();
    }
    drop(locks);
    for now in [10, 20, 30] {
        let mut locks = Locks::keeping(HeldLocks::load(open(&state), now));
        assert!(locks.end_awaited(10).is_empty() && locks.awaits());
        assert_eq!(locks.lock(FILE, of(3, 20), None), Err(Errno::EAGAIN));
        if now < 30 {
            locks.returned(2);
        }
        locks.note_running(now + 10);
    }
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 40));
    locks.end_awaited(20);
    assert_eq!(locks.lock(FILE, of(3, 20), None), Ok(Locked::Done(vec![])), "missed since 10");
    assert_eq!(locks.lock(FILE, of(3, 40), None), Err(Errno::EAGAIN), "missed since 30");
}

/// Nobody can come back meanwhile.
#[test]
fn the_time_without_a_server_does_not_count() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let lock = |session| Waiter { session, ..waiter(session, lock::EXCLUSIVE, 20 * session, 10) };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    locks.lock(FILE, lock(1), None).unwrap();
    drop(locks);
    // Missed for two seconds, and for none by a server that is killed at once.
    let locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    locks.note_running(12);
    drop(locks);
    drop(Locks::keeping(HeldLocks::load(open(&state), 60)));
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 100));
    locks.end_awaited(98);
    assert!(locks.awaits());
    locks.end_awaited(99);
    assert!(!locks.awaits());
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
fn locks_outlast_a_restart_until_their_owners_stay_away() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    let of = |session, id, kind, start| {
        let owner = Owner { session, ..owner(id) };
        Waiter { session, owner, ..waiter(id, kind, start, 10) }
    };
    locks.lock(FILE, of(1, 1, lock::EXCLUSIVE, 0), None).unwrap();
    locks.lock(FILE, of(2, 2, lock::EXCLUSIVE, 20), None).unwrap();
    let unkept = Waiter { is_kept: false, ..of(3, 3, lock::EXCLUSIVE, 40) };
    locks.lock(FILE, unkept, None).unwrap();
    locks.lock(FILE, of(4, 4, lock::EXCLUSIVE, 60), None).unwrap();
    assert_eq!(locks.lock(FILE, of(5, 5, lock::SHARED, 60), here()), Ok(Locked::Waiting));
    let granted = locks.release(of(4, 4, lock::EXCLUSIVE, 60).owner).granted;
    assert_eq!(granted, [of(5, 5, lock::SHARED, 60)], "this is kept, too");
    assert!(!locks.awaits());
    drop(locks);

    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    assert!(locks.awaits());
    let tries = |locks: &mut Locks| {
        [0, 20, 40, 60].map(|start| {
            let got = locks.lock(FILE, of(9, 9, lock::EXCLUSIVE, start), None);
            locks.lock(FILE, of(9, 9, lock::UNLOCK, start), None).unwrap();
            got.is_ok()
        })
    };
    assert_eq!(tries(&mut locks), [false, false, true, false]);
    locks.returned(1);
    locks.lock(FILE, of(1, 1, lock::EXCLUSIVE, 0), None).unwrap();
    assert!(locks.leave(2, Some(2), false).is_empty());
    assert_eq!(tries(&mut locks), [false, true, true, false]);
    locks.lock(FILE, of(9, 9, lock::EXCLUSIVE, 60), here()).unwrap();
    assert_eq!(locks.end_awaited(11), [of(9, 9, lock::EXCLUSIVE, 60)]);
    assert!(!locks.awaits());
    drop(locks);

    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    let kept = |locks: &Locks| {
        let held = &locks.files[&FILE].held;
        let mut kept: Vec<_> = held.iter().map(|(owner, range)| (owner.id, range.start)).collect();
        kept.sort_unstable();
        kept
    };
    assert_eq!(kept(&locks), [(1, 0), (9, 60)]);
    locks.end_awaited(11);
    assert!(locks.files.is_empty());
}

#[test]
fn who_stays_away_after_a_restart_locks_again_what_nobody_else_has_locked() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    let of = |session, start, is_again| {
        let owner = Owner { session, ..owner(session) };
        Waiter { session, owner, is_again, ..waiter(1, lock::EXCLUSIVE, start, 10) }
    };
    for start in [0, 20] {
        locks.lock(FILE, of(1, start, false), None).unwrap();
    }
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    locks.lock(FILE, of(2, 20, false), here()).unwrap();
    assert_eq!(locks.end_awaited(11), [of(2, 20, false)]);
    assert!(locks.release(of(2, 20, false).owner).granted.is_empty());
    let again = [0, 20].map(|start| locks.lock(FILE, of(1, start, true), None));
    assert_eq!(again, [Ok(Locked::Done(vec![])), Err(Errno::EAGAIN)]);
}

#[test]
fn a_family_keeps_its_locks_for_those_who_are_not_back_yet() {
    use crate::state::tests::{create, file, open};
    let (state, family) = (file(), 1 << 63);
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    let of = |session, start, process| {
        let owner = Owner { process, ..Owner { session: family, ..owner(session) } };
        Waiter { session, owner, ..waiter(1, lock::EXCLUSIVE, start, 10) }
    };
    for (start, process) in [(0, false), (20, true)] {
        locks.lock(FILE, of(1, start, process), None).unwrap();
    }
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    locks.returned(family);
    assert!(!locks.awaits());
    locks.step_out(2, family, 15);
    assert!(locks.awaits() && locks.end_awaited(15).is_empty());
    assert_eq!(locks.files[&FILE].held.len(), 2);
    // They are missed since then, also by the next server.
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 20));
    assert!(locks.end_awaited(15).is_empty() && locks.awaits());
    assert!(locks.end_awaited(21).is_empty() && locks.files.is_empty());
}

/// It has locked after the restart, and lost its session before the others of its family were back.
#[test]
fn a_process_of_a_family_keeps_its_locks_while_the_others_are_awaited() {
    use crate::state::tests::{create, file, open};
    let (state, family) = (file(), 1 << 63);
    let of = |session, id, start| {
        let owner = Owner { session: family, ..owner(id) };
        Waiter { session, owner, ..waiter(id, lock::EXCLUSIVE, start, 10) }
    };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    locks.lock(FILE, of(1, 1, 0), None).unwrap();
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    locks.returned(family);
    locks.lock(FILE, of(2, 2, 20), None).unwrap();
    locks.step_out(2, family, 15);
    assert!(locks.leave(9, Some(9), false).is_empty(), "another client");
    locks.returned(family);
    assert!(locks.leave(3, None, false).is_empty(), "another process of the family");
    let held = |locks: &Locks| locks.files.get(&FILE).map_or(0, |locks| locks.held.len());
    assert_eq!(held(&locks), 2);
    for (id, start) in [(1, 0), (2, 20)] {
        let unlocks = Range { kind: lock::UNLOCK, ..of(4, id, start).range };
        locks.lock(FILE, Waiter { range: unlocks, ..of(4, id, start) }, None).unwrap();
    }
    locks.step_out(4, family, 16);
    assert!(locks.processes.is_empty() && !locks.awaits(), "it has no locks");
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

#[test]
fn what_others_held_at_a_restart_is_not_locked_again_by_who_was_away_before() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let of = |session, kind, is_again| Waiter {
        session,
        owner: Owner { session, ..owner(1) },
        is_again,
        ..waiter(1, kind, 0, 10)
    };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    locks.lock(FILE, of(1, lock::EXCLUSIVE, false), None).unwrap();
    locks.leave(1, Some(1), false);
    locks.lock(FILE, of(2, lock::EXCLUSIVE, false), None).unwrap();
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    locks.lock(FILE, of(2, lock::UNLOCK, false), None).unwrap();
    assert_eq!(locks.lock(FILE, of(1, lock::EXCLUSIVE, true), None), Err(Errno::EAGAIN));
    assert_eq!(locks.lock(FILE, of(2, lock::EXCLUSIVE, true), None), Ok(Locked::Done(vec![])));
}

/// All that was locked then is known, unless there was no room.
#[test]
fn what_was_lost_before_a_restart_is_not_locked_again() {
    use crate::state::tests::{create, file, open};
    let state = file();
    let of = |session, start, kind, is_again| Waiter {
        session,
        owner: Owner { session, ..owner(1) },
        is_again,
        ..waiter(1, kind, start, 10)
    };
    let (exclusive, shared) = (lock::EXCLUSIVE, lock::SHARED);
    let again = |locks: &mut Locks, session, start, kind| {
        locks.lock(FILE, of(session, start, kind, true), None).is_ok()
    };
    let mut locks = Locks::keeping(HeldLocks::load(create(&state), 1));
    assert!(again(&mut locks, 1, 0, exclusive), "nothing is known of before");
    locks.leave(1, Some(1), false);
    for kind in [exclusive, lock::UNLOCK] {
        locks.lock(FILE, of(2, 0, kind, false), None).unwrap();
    }
    locks.lock(FILE, of(3, 20, exclusive, false), None).unwrap();
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 10));
    assert!(!again(&mut locks, 1, 0, exclusive));
    assert!(again(&mut locks, 3, 20, shared), "it had more");
    locks.leave(3, Some(3), false);
    assert!(
        again(&mut locks, 3, 20, exclusive),
        "it has lost it since, and nobody else has had it"
    );
    // Its session is not kept, and neither are its locks.
    let unkept = Waiter { is_kept: false, ..of(4, 40, exclusive, false) };
    locks.lock(FILE, unkept, None).unwrap();
    drop(locks);
    open(&state).note_unkept();
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 20));
    assert!(again(&mut locks, 4, 40, exclusive));
    drop(locks);
    let mut locks = Locks::keeping(HeldLocks::load(open(&state), 30));
    assert!(!again(&mut locks, 5, 60, exclusive), "all that was locked was kept");
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
