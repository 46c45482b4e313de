//! Fuzzes the reader of state files of a killed server, with arbitrary sessions and records.
//!
//! The input is a list of items to put into the file, each after a byte with its kind: a session (entry,
//! 20 bytes), a record (entry, slot, which of the two, two bytes with its length, its bytes), a lock (place,
//! 56 bytes) or a byte anywhere in the first 64 KiB (two bytes with the offset, the byte). Checksums of
//! sessions, records and locks are corrected, because a fuzzer would not find them.
#![no_main]

use std::collections::HashSet;
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_session::fuzzing::{Image, record, seal};
use towline_session::held::HeldLocks;
use towline_session::locks::Locks;
use towline_session::state::{SESSIONS_MAX, STATE_BYTES, State};
use towline_wire::limits::SLOTS_MAX;

const BOOT: [u8; 16] = [7; 16];
const ENTRIES_AT: usize = 4096;
const ENTRY_BYTES: usize = 64;
const AREAS_AT: usize = ENTRIES_AT + SESSIONS_MAX * ENTRY_BYTES;
const RECORD_BYTES: usize = size_of::<Image>();
const LOCKS_AT: usize = AREAS_AT + SESSIONS_MAX * SLOTS_MAX * 2 * RECORD_BYTES;
const LOCK_BYTES: usize = 64;
/// Where the file says for how many locks it has room, and what a server writes there first.
const LOCKS_ROOM: (usize, u32) = (40, 1024);

/// Number of entries in use: few, so that sessions and records often share one.
const ENTRIES: usize = 4;

fn session(memory: &SharedMemory, entry: usize, fields: &[u8; 20]) {
    let mut bytes = [0; 28];
    bytes[..20].copy_from_slice(fields);
    bytes[20..24].copy_from_slice(&crc32c::crc32c(fields).to_le_bytes());
    bytes[24] = 1;
    memory.copy_in(ENTRIES_AT + entry * ENTRY_BYTES, &bytes);
}

/// Puts the first item of `data` into the file and returns the rest of `data`.
fn put<'a>(memory: &SharedMemory, data: &'a [u8]) -> Option<&'a [u8]> {
    match data.split_first()? {
        (0, rest) => {
            let ([entry], rest) = rest.split_first_chunk()?;
            let (fields, rest) = rest.split_first_chunk()?;
            session(memory, usize::from(*entry) % ENTRIES, fields);
            Some(rest)
        }
        (1, rest) => {
            let ([entry, slot, which, low, high], rest) = rest.split_first_chunk()?;
            let length = usize::from(u16::from_le_bytes([*low, *high])).min(RECORD_BYTES);
            let (bytes, rest) = rest.split_at_checked(length)?;
            let mut image = [0; RECORD_BYTES];
            image[..length].copy_from_slice(bytes);
            seal(&mut image);
            record(&image);
            let number =
                (usize::from(*entry) % ENTRIES * SLOTS_MAX + usize::from(*slot) % SLOTS_MAX) * 2
                    + usize::from(*which) % 2;
            memory.copy_in(AREAS_AT + number * RECORD_BYTES, &image);
            Some(rest)
        }
        (2, rest) => {
            let ([place], rest) = rest.split_first_chunk()?;
            let (fields, rest) = rest.split_first_chunk::<56>()?;
            let mut bytes = [0; LOCK_BYTES];
            bytes[0] = 1;
            bytes[4..8].copy_from_slice(&crc32c::crc32c(&fields[..52]).to_le_bytes());
            bytes[8..].copy_from_slice(fields);
            memory.copy_in(LOCKS_AT + usize::from(*place) * LOCK_BYTES, &bytes);
            memory.copy_in(LOCKS_ROOM.0, &LOCKS_ROOM.1.to_le_bytes());
            Some(rest)
        }
        (_, rest) => {
            let ([low, high, value], rest) = rest.split_first_chunk()?;
            memory.copy_in(u16::from_le_bytes([*low, *high]).into(), &[*value]);
            Some(rest)
        }
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let memory = SharedMemory::create("fuzz", STATE_BYTES).expect("a memory file");
    let view = || {
        let fd = memory.fd().try_clone_to_owned().expect("a descriptor");
        SharedMemory::open(fd, STATE_BYTES, true).expect("a mapping")
    };
    drop(State::create(view(), &BOOT, 1).expect("room"));
    let mut rest = data;
    while let Some(behind) = put(&memory, rest) {
        rest = behind;
    }
    let Ok(state) = State::open(view(), &BOOT, 2) else { return };
    let state = Arc::new(state);
    for session in state.unclaimed() {
        assert!(session <= state.last_session());
        // The secret comes from the input, so it may be zero.
        let _ = state.claim(session, 0).map(|kept| kept.recorded);
    }
    state.note_exports(&[(b"a", (1, 2)), (b"b", (3, 4))]);
    assert!(state.note_exports(&[(b"a", (1, 2))]).is_empty());
    assert!(state.begin(u64::MAX, 5).is_some());
    state.end(u64::MAX);
    let mut locks = Locks::keeping(HeldLocks::load(state.clone(), 1));
    locks.returned(1);
    locks.leave(1, Some(1), false);
    // The server accepts the file that it has rewritten itself.
    let held = |state| {
        let held = HeldLocks::load(state, 1);
        held.all().map(|(file, owner, range)| (file, owner, range)).collect::<HashSet<_>>()
    };
    let known = held(state.clone());
    assert!(known.iter().all(|(_, owner, _)| owner.session != 1));
    drop((state, locks));
    let again = Arc::new(State::open(view(), &BOOT, 3).expect("what this server wrote itself"));
    assert!(held(again.clone()) == known);
    Locks::keeping(HeldLocks::load(again.clone(), 1)).end_awaited(u32::MAX);
    assert!(held(again).is_empty());
});
