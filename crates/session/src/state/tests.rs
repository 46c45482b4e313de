use super::*;
use crate::record::tests::{intent, record};
use rustix::fs::MemfdFlags;
use std::os::fd::OwnedFd;

const BOOT: Boot = [3; 16];

pub(crate) fn file() -> OwnedFd {
    let file = rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, STATE_BYTES as u64).unwrap();
    file
}

fn map(file: &OwnedFd) -> SharedMemory {
    SharedMemory::of_file(file.try_clone().unwrap(), STATE_BYTES).unwrap()
}

pub(crate) fn create(file: &OwnedFd) -> Arc<State> {
    Arc::new(State::create(map(file), &BOOT, 1).unwrap())
}

pub(crate) fn open(file: &OwnedFd) -> Arc<State> {
    Arc::new(State::open(map(file), &BOOT, 2).unwrap())
}

fn write(journal: &Journal, slot: u16, sequence: u32, intent: Option<Intent>) {
    let mut record = Record { sequence, ..record(0, intent) };
    let results = record.results.clone();
    journal.write(slot, &mut record, &results);
}

#[test]
fn sessions_and_records_are_there_again() {
    let file = file();
    let state = create(&file);
    let journal = state.begin(5, 50).unwrap();
    state.begin(6, 60).unwrap();
    state.begin(7, 70).unwrap();
    state.end(6);
    for sequence in 1..=5 {
        write(&journal, 0, sequence, None);
        write(&journal, 63, sequence, Some(intent()));
    }
    drop((journal, state));

    let state = open(&file);
    let mut found = state.unclaimed();
    found.sort_unstable();
    assert_eq!((found, state.last_session()), (vec![5, 7], 7));
    assert!(state.claim(5, 51).is_none(), "claimed with a wrong secret");
    assert!(state.claim(6, 60).is_none(), "a session that ended is back");
    let kept = state.claim(5, 50).unwrap();
    assert_eq!(kept.recorded, 1 | 1 << 63);
    for (slot, intent) in [(0, None), (63, Some(intent()))] {
        let found = kept.journal.newest(slot).unwrap();
        assert_eq!((found.sequence, found.secret, found.intent), (5, 50, intent));
    }
    assert!(kept.journal.newest(1).is_none());
    assert!(state.claim(5, 50).is_none(), "claimed twice");
}

#[test]
fn of_a_slot_the_newest_whole_record_counts() {
    let file = file();
    let state = create(&file);
    let journal = state.begin(5, 50).unwrap();
    write(&journal, 2, 1, None);
    write(&journal, 2, 2, None);
    let newest = [0, 1]
        .into_iter()
        .find(|which| state.read(journal.entry, 50, 2, *which).unwrap().sequence == 2)
        .unwrap();
    // The last bytes of the newest one were not written.
    state.memory.copy_in(State::record_at(journal.entry, 2, newest) + 121, &[9; 4]);
    drop((journal, state));

    let state = open(&file);
    let Kept { journal, .. } = state.claim(5, 50).unwrap();
    assert_eq!(journal.newest(2).unwrap().sequence, 1);
    // The next record overwrites the torn one, not the last complete one.
    write(&journal, 2, 3, None);
    let found = [0, 1].map(|which| state.read(journal.entry, 50, 2, which).unwrap().sequence);
    assert_eq!((found[newest], found[1 - newest]), (3, 1));
}

#[test]
fn a_session_does_not_see_records_of_the_one_before_it() {
    let file = file();
    let state = create(&file);
    let journal = state.begin(5, 50).unwrap();
    write(&journal, 0, 1, Some(intent()));
    let entry = journal.entry;
    state.end(5);
    let journal = state.begin(6, 60).unwrap();
    assert_eq!(journal.entry, entry, "the place was taken again");
    assert!(journal.newest(0).is_none());
    write(&journal, 0, 1, None);
    assert_eq!(journal.newest(0).unwrap().secret, 60);
}

#[test]
fn a_session_does_not_see_records_of_one_with_its_number() {
    let file = file();
    let state = create(&file);
    let journal = state.begin(5, 50).unwrap();
    write(&journal, 3, 1, Some(intent()));
    let entry = journal.entry;
    state.end(5);
    drop((journal, state));
    // No session is left, so the next server numbers sessions from the beginning.
    let state = open(&file);
    assert_eq!(state.last_session(), 0);
    let journal = state.begin(5, 51).unwrap();
    assert_eq!(journal.entry, entry, "the place was taken again");
    assert!(journal.newest(3).is_none());
    drop((journal, state));
    let state = open(&file);
    let kept = state.claim(5, 51).unwrap();
    assert_eq!(kept.recorded, 0);
    kept.journal.settle(0, &intent().places[0], |_| panic!("nothing was under way"));
}

#[test]
fn generations_wrap() {
    assert!(newer(1, 0) && newer(0, u32::MAX) && !newer(u32::MAX, 0) && !newer(4, 4));
}

#[test]
fn what_cannot_be_used_is_told_apart() {
    let file = file();
    assert_eq!(State::open(map(&file), &BOOT, 1).err(), Some(Unusable::Empty));
    drop(create(&file));
    assert_eq!(State::open(map(&file), &[4; 16], 1).err(), Some(Unusable::OtherBoot));
    let memory = map(&file);
    for at in [8, 12, 16, 20, 0] {
        memory.copy_in(at, b"?");
        let found = State::open(map(&file), &BOOT, 1).err();
        assert!(matches!(found, Some(Unusable::Damaged(_))), "byte {at}: {found:?}");
    }
}

#[test]
fn damaged_sessions_are_left_out() {
    let file = file();
    let state = create(&file);
    let entries = [5, 6, 7].map(|session| state.begin(session, session).unwrap().entry);
    // A number that does not match its checksum, and a session that is there twice.
    state.memory.copy_in(entry_at(entries[0]), b"?");
    let mut copy = [0; ENTRY_BYTES];
    state.memory.copy_out(entry_at(entries[1]), &mut copy);
    state.memory.copy_in(entry_at(entries[2]), &copy);
    drop(state);
    let state = open(&file);
    assert_eq!(state.unclaimed(), [6]);
    for session in 10..(10 + SESSIONS_MAX as u64 - 1) {
        // One is in use, all others are free.
        let mut table = state.table.lock();
        let entry = table.free.pop().unwrap();
        table.entries.insert(session, entry);
    }
    assert!(state.begin(9, 9).is_none());
}

#[test]
fn no_bytes_are_too_strange() {
    let file = file();
    let state = create(&file);
    let journals = [5, 6, 7].map(|session| state.begin(session, session).unwrap());
    let memory = map(&file);
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for journal in &journals {
        for slot in 0..SLOTS_MAX as u16 {
            write(journal, slot, 1, Some(intent()));
            let at = State::record_at(journal.entry, slot, 0);
            for _ in 0..next() % 40 {
                memory.copy_in(at + next() as usize % SLOT_BYTES, &[next() as u8]);
            }
        }
    }
    drop((journals, state));
    for _ in 0..200 {
        let at = EXPORTS_AT + next() as usize % (HEAD_BYTES - EXPORTS_AT);
        memory.copy_in(at, &[next() as u8]);
    }
    let state = open(&file);
    state.note_exports(&[(b"a", (1, 2))]);
    for session in state.unclaimed() {
        let Kept { journal, .. } = state.claim(session, session).unwrap();
        for slot in 0..SLOTS_MAX as u16 {
            journal.recall(slot);
            write(&journal, slot, 2, None);
            assert_eq!(journal.newest(slot).unwrap().sequence, 2);
        }
    }
}

/// Otherwise they would fill the state of a server that is killed again and again.
#[test]
fn who_is_away_while_several_servers_run_is_forgotten() {
    let file = file();
    let state = create(&file);
    state.begin(5, 50).unwrap();
    state.begin(6, 60).unwrap();
    drop(state);
    for _ in 0..2 {
        let state = open(&file);
        state.end_unclaimed(10, 90);
        state.end_unclaimed(40, 90);
        assert!(state.claim(6, 60).is_some());
        assert_eq!(state.unclaimed(), [5]);
    }
    let state = open(&file);
    state.end_unclaimed(9, 90);
    assert_eq!(state.unclaimed().len(), 2);
    state.end_unclaimed(10, 90);
    assert_eq!(state.unclaimed(), [6]);
    // A session that begins in the place of another one has never been away.
    state.begin(7, 70).unwrap();
    drop(state);
    let state = open(&file);
    state.end_unclaimed(89, 90);
    assert!(state.claim(7, 70).is_some());
}

#[test]
fn exports_that_moved_are_named() {
    let file = file();
    let state = create(&file);
    assert!(state.note_exports(&[(b"a", (1, 2)), (b"b", (1, 3))]).is_empty());
    drop(state);
    let state = open(&file);
    let moved = state.note_exports(&[(b"b", (1, 4)), (b"a", (1, 2)), (b"c", (9, 9))]);
    assert_eq!(moved, [b"b"]);
    assert!(state.note_exports(&[(b"b", (1, 4))]).is_empty());
}

#[test]
fn a_change_of_a_place_settles_what_was_under_way_there() {
    let file = file();
    let state = create(&file);
    let journal = state.begin(5, 50).unwrap();
    write(&journal, 0, 1, Some(intent()));
    drop((journal, state));
    let state = open(&file);
    let other = state.begin(6, 60).unwrap();
    other.settle(0, &Place::named((8, 8), &[b"elsewhere"]), |_| panic!("another place"));
    let mut done = Vec::new();
    towline_wire::codec::Field::encode(&towline_wire::Reply::Done {}, &mut done);
    other.settle(0, &intent().places[1], |found| {
        assert_eq!(*found, intent());
        Some(Verdict::Done(done.clone()))
    });
    other.settle(0, &intent().places[0], |_| panic!("settled already"));
    let Kept { journal, .. } = state.claim(5, 50).unwrap();
    let found = journal.recall(0).unwrap();
    assert_eq!((found.index, found.intent, found.results()), (3, None, 3));
}
