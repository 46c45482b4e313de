//! What becomes of locks when a server with `--state` is killed and started again.

use super::*;
use crate::state::tests::{create, file, open};

/// A process of a family waits for locks in sessions of their own.
#[test]
fn a_process_keeps_its_locks_over_a_restart_while_it_waits() {
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

#[test]
fn locks_outlast_a_restart_until_their_owners_stay_away() {
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
fn what_others_held_at_a_restart_is_not_locked_again_by_who_was_away_before() {
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
