//! The locks that clients hold, in the state file. A server that was killed and started again holds them for
//! their owners, who may not even know of the restart: a program that has locked a file and sleeps asks for
//! nothing.
//!
//! Each locked range of an owner takes one place of 64 bytes, little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | 1 if the place is used; written last |
//! | 4 | 4 | CRC-32C of all that follows up to the last field |
//! | 8 | 16 | device and inode number of the file |
//! | 24 | 16 | session (or family) and process or handle of the owner |
//! | 40 | 16 | first and last byte |
//! | 56 | 3 | kind; 1 for a `flock` lock; 1 for the lock of a process |
//! | 59 | 1 | zero |
//! | 60 | 4 | when the owner was first missed after a restart, in seconds, moved on by the time in which no server ran; 0 while it is there |
//!
//! A change is not atomic: new ranges are written before old ones are removed. A server killed in between
//! finds too much rather than too little, until the client sends its request again.

use crate::locks::{FileKey, Owner, Range};
use crate::state::{LOCKS_AT, LOCKS_ROOM_AT, RAN_AT, State, UNKEPT_AT};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_wire::request::lock;

/// Most ranges that can be kept; further ones are locked, but not kept.
pub(crate) const LOCKS_MAX: usize = 1 << 20;
/// Size of a place in bytes.
pub(crate) const LOCK_BYTES: usize = 64;
/// Offset of the last field, which changes by itself.
const MISSED_AT: usize = 60;
/// Number of places for which room on the disk is taken at once.
const STEP: usize = 1024;

/// The places of all locked ranges in the state of a server.
pub struct HeldLocks {
    state: Arc<State>,
    places: HashMap<(FileKey, Owner), Vec<(u32, Range)>>,
    free: Vec<u32>,
    /// Number of places that the disk has room for.
    room: usize,
    /// There was no room for the last range that was locked.
    is_full: bool,
    /// There was a server before, and all that was locked when it ended was kept.
    pub(crate) was_complete: bool,
}

fn place_at(place: u32) -> usize {
    LOCKS_AT + place as usize * LOCK_BYTES
}

impl HeldLocks {
    /// Reads what was locked when the server ended. All owners are missed from `now` on, in seconds that no
    /// restart sets back, unless they were missed before: a server that is killed again and again does not
    /// hold locks for ever. The time in which no server ran does not count, since nobody could come back.
    #[must_use]
    pub fn load(state: Arc<State>, now: u32) -> Self {
        let room = u32::from_le(state.memory.word32(LOCKS_ROOM_AT).load(Ordering::Relaxed));
        let room = (room as usize).min(LOCKS_MAX);
        let ran = u32::from_le(state.memory.word32(RAN_AT).load(Ordering::Relaxed));
        let unkept = state.memory.word32(UNKEPT_AT).swap(0, Ordering::Relaxed);
        let mut held = Self {
            state,
            places: HashMap::new(),
            free: Vec::new(),
            room,
            is_full: false,
            was_complete: ran != 0 && unkept == 0,
        };
        // A copy of the file may have holes where the disk has no room any more.
        if room > 0 && held.state.memory.allocate(LOCKS_AT, room * LOCK_BYTES).is_err() {
            (held.room, held.was_complete) = (0, false);
        }
        let down = now.saturating_sub(ran);
        for place in (0..held.room as u32).rev() {
            match held.read(place) {
                Some((file, owner, range)) => {
                    let missed = held.missed(place);
                    let since = match u32::from_le(missed.load(Ordering::Relaxed)) {
                        0 => now,
                        before => before.saturating_add(down).min(now),
                    };
                    missed.store(since.max(1).to_le(), Ordering::Relaxed);
                    held.places.entry((file, owner)).or_default().push((place, range));
                }
                None => held.free.push(place),
            }
        }
        held.note_running(now);
        held
    }

    /// Notes that the server runs at this time.
    pub(crate) fn note_running(&self, now: u32) {
        self.state.memory.word32(RAN_AT).store(now.to_le(), Ordering::Relaxed);
    }

    /// Returns all ranges that are locked.
    pub fn all(&self) -> impl Iterator<Item = (FileKey, Owner, Range)> {
        self.places.iter().flat_map(|(&(file, owner), places)| {
            places.iter().map(move |&(_, range)| (file, owner, range))
        })
    }

    fn missed(&self, place: u32) -> &AtomicU32 {
        self.state.memory.word32(place_at(place) + MISSED_AT)
    }

    /// Returns when the owners of locks were first missed, by session or family.
    pub(crate) fn owners(&self) -> HashMap<u64, u32> {
        let mut owners = HashMap::new();
        for ((_, owner), places) in &self.places {
            for (place, _) in places {
                let missed = u32::from_le(self.missed(*place).load(Ordering::Relaxed));
                let first = owners.entry(owner.session).or_insert(missed);
                *first = missed.min(*first);
            }
        }
        owners
    }

    /// Notes since when a session or family is missed; 0: it is back.
    pub(crate) fn missed_since(&self, session: u64, since: u32) {
        for ((_, owner), places) in &self.places {
            for (place, _) in places.iter().filter(|_| owner.session == session) {
                self.missed(*place).store(since.to_le(), Ordering::Relaxed);
            }
        }
    }

    /// Notes the ranges of a file that an owner has locked.
    pub(crate) fn set(&mut self, file: FileKey, owner: Owner, ranges: HashSet<Range>) {
        let mut places = self.places.remove(&(file, owner)).unwrap_or_default();
        let mut gone: Vec<_> =
            places.extract_if(.., |(_, range)| !ranges.contains(range)).collect();
        let known: HashSet<Range> = places.iter().map(|(_, range)| *range).collect();
        for range in ranges.difference(&known) {
            // Without room, better too little for a moment than from now on.
            let Some(place) = self.place().or_else(|| Some(self.clear_place(gone.pop()?.0))) else {
                self.state.note_unkept();
                continue;
            };
            self.write(place, file, owner, range);
            places.push((place, *range));
        }
        for (place, _) in gone {
            let place = self.clear_place(place);
            self.free.push(place);
        }
        if !places.is_empty() {
            self.places.insert((file, owner), places);
        }
    }

    /// Notes that an owner has nothing locked of a file.
    pub(crate) fn clear(&mut self, file: FileKey, owner: Owner) {
        if self.places.contains_key(&(file, owner)) {
            self.set(file, owner, HashSet::new());
        }
    }

    /// Takes a place; `None` if there is no room for it.
    fn place(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            self.grow();
        }
        let place = self.free.pop();
        self.is_full = place.is_none();
        place
    }

    fn clear_place(&self, place: u32) -> u32 {
        self.state.memory.word32(place_at(place)).store(0, Ordering::Release);
        place
    }

    fn grow(&mut self) {
        // Clients come and go, so warn only once until there is room again.
        let warn = |why: &dyn fmt::Display| {
            if !self.is_full {
                log::warn!("no room for the state of new locks, which will not survive: {why}");
            }
        };
        if self.room >= LOCKS_MAX {
            return warn(&format_args!("there are {LOCKS_MAX}"));
        }
        let memory = &self.state.memory;
        if let Err(error) = memory.allocate(place_at(self.room as u32), STEP * LOCK_BYTES) {
            return warn(&error);
        }
        let room = self.room + STEP;
        memory.word32(LOCKS_ROOM_AT).store((room as u32).to_le(), Ordering::Release);
        self.free.extend((self.room as u32..room as u32).rev());
        self.room = room;
    }

    fn write(&self, place: u32, file: FileKey, owner: Owner, range: &Range) {
        let mut bytes = [0; LOCK_BYTES];
        let (device, inode, is_flock) = file;
        let words = [device, inode, owner.session, owner.id, range.start, range.last];
        for (at, word) in (8..).step_by(8).zip(words) {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[56..59].copy_from_slice(&[range.kind, u8::from(is_flock), u8::from(owner.process)]);
        let crc = crc32c::crc32c(&bytes[8..MISSED_AT]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        self.state.memory.copy_in(place_at(place) + 4, &bytes[4..]);
        self.state.memory.word32(place_at(place)).store(1u32.to_le(), Ordering::Release);
    }

    fn read(&self, place: u32) -> Option<(FileKey, Owner, Range)> {
        let mut bytes = [0; LOCK_BYTES];
        self.state.memory.copy_out(place_at(place), &mut bytes);
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if word(0) != 1 || word(4) != crc32c::crc32c(&bytes[8..MISSED_AT]) {
            return None;
        }
        let (kind, start, last) = (bytes[56], long(40), long(48));
        let is_whole = matches!(kind, lock::SHARED | lock::EXCLUSIVE) && start <= last;
        let owner = Owner { session: long(24), id: long(32), process: bytes[58] != 0 };
        is_whole.then_some((
            (long(8), long(16), bytes[57] != 0),
            owner,
            Range { kind, start, last },
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::{create, file, open};
    use proptest::prelude::*;

    const FILE: FileKey = (3, 4, false);

    fn owner(id: u64) -> Owner {
        Owner { session: 1 << 63 | 5, id, process: id.is_multiple_of(2) }
    }

    fn range(kind: u8, start: u64, last: u64) -> Range {
        Range { kind, start, last }
    }

    /// Everything held, in order.
    fn all(held: &HeldLocks) -> Vec<(FileKey, u64, bool, u64, u64, u8)> {
        let mut all: Vec<_> = held
            .all()
            .map(|(file, owner, r)| (file, owner.id, owner.process, r.start, r.last, r.kind))
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn what_was_locked_is_locked_again() {
        let file = file();
        let mut held = HeldLocks::load(create(&file), 1);
        let ranges = |count| (0..count).map(|n| range(lock::SHARED, 2 * n, 2 * n)).collect();
        let whole = range(lock::EXCLUSIVE, 0, u64::MAX);
        held.set(FILE, owner(1), ranges(STEP as u64 + 9));
        held.set(FILE, owner(2), ranges(3));
        held.set((3, 4, true), owner(2), HashSet::from([whole]));
        held.set((3, 5, false), owner(4), HashSet::from([whole]));
        held.set(FILE, owner(1), HashSet::from([range(lock::SHARED, 2, 2), whole]));
        held.clear((3, 5, false), owner(4));
        held.clear((3, 5, false), owner(6));
        let before = all(&held);
        assert_eq!(before.len(), 2 + 3 + 1);
        drop(held);
        let mut held = HeldLocks::load(open(&file), 1);
        assert_eq!(all(&held), before);
        assert_eq!(held.room, 2 * STEP, "one step for the most ranges, and another one");
        // All other places are free again.
        held.set(FILE, owner(8), ranges(2 * STEP as u64 - 6));
        assert_eq!((held.room, held.free.len()), (2 * STEP, 0));
    }

    #[test]
    fn what_takes_the_place_of_another_lock_needs_no_room() {
        let file = file();
        let mut held = HeldLocks::load(create(&file), 1);
        let (shared, exclusive) = (range(lock::SHARED, 0, 9), range(lock::EXCLUSIVE, 0, 9));
        held.set(FILE, owner(1), HashSet::from([shared]));
        (held.room, held.free) = (LOCKS_MAX, Vec::new());
        held.set(FILE, owner(1), HashSet::from([exclusive]));
        drop(held);
        let mut held = HeldLocks::load(open(&file), 1);
        assert!(held.was_complete);
        assert_eq!(all(&held), [(FILE, 1, false, 0, 9, lock::EXCLUSIVE)]);
        (held.room, held.free) = (LOCKS_MAX, Vec::new());
        held.set(FILE, owner(2), HashSet::from([shared]));
        drop(held);
        let held = HeldLocks::load(open(&file), 1);
        assert_eq!((all(&held).len(), held.was_complete), (1, false), "the other one had no room");
    }

    #[test]
    fn a_change_that_was_cut_short_loses_nothing() {
        let file = file();
        let mut held = HeldLocks::load(create(&file), 1);
        let (old, new) = (range(lock::EXCLUSIVE, 0, 9), range(lock::SHARED, 0, 9));
        held.set(FILE, owner(1), HashSet::from([old]));
        // Killed after the new range was written.
        let place = held.place().unwrap();
        held.write(place, FILE, owner(1), &new);
        drop(held);
        let mut held = HeldLocks::load(open(&file), 1);
        assert_eq!(all(&held).len(), 2);
        held.set(FILE, owner(1), HashSet::from([new]));
        assert_eq!(all(&held).len(), 1);
        // Killed while a place was written.
        let place = held.place().unwrap();
        held.write(place, FILE, owner(3), &new);
        held.state.memory.copy_in(place_at(place) + 40, &[1]);
        drop(held);
        assert_eq!(all(&HeldLocks::load(open(&file), 1)).len(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), LOCK_BYTES), good: bool) {
            let mut bytes = bytes;
            if good {
                // With a correct checksum, so that the checks after it are reached.
                let crc = crc32c::crc32c(&bytes[8..MISSED_AT]);
                bytes[..8].copy_from_slice(&[&1u32.to_le_bytes()[..], &crc.to_le_bytes()].concat());
            }
            let file = file();
            let mut held = HeldLocks::load(create(&file), 1);
            let place = held.place().unwrap();
            held.state.memory.copy_in(place_at(place), &bytes);
            drop(held);
            let held = HeldLocks::load(open(&file), 1);
            for (_, _, range) in held.all() {
                prop_assert!(range.start <= range.last && range.kind != lock::UNLOCK);
            }
        }
    }
}
