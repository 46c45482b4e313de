//! Keeps what a server has to know about its sessions after it was killed, in a mapped file.
//!
//! The file is written by storing to memory, without system calls. Stored bytes are in the file even if
//! the process is killed a moment later. They are lost only with the machine's memory; after that
//! nothing in the file is trusted ([`State::open`] compares the boots of the machine). No seal prevents
//! the shortening of a file on a disk, which ends the server by `SIGBUS`. Writing with system calls
//! instead would cost one for each record.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 4096 | magic, version, sizes, boot of the machine; the exports and their roots |
//! | 4096 | capacity x 64 | sessions: number, secret, epoch of the server that began it, checksum; then live, away |
//! | then | capacity x 80 KiB | for each slot of a session two records in turn, see [`crate::record`] |
//! | then | 64 MiB | locks that clients hold, see [`crate::held`] |
//!
//! *away* is for how many seconds servers have run since the client was last there.
//!
//! A record overwrites the older of its slot's two records. If it is torn, its checksum shows that, and
//! the other record counts.

use crate::held::{LOCK_BYTES, LOCKS_MAX};
use crate::record::{GENERATION_AT, Intent, Place, RECORD_BYTES, Record};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use towline_mem::SharedMemory;
use towline_wire::limits::SLOTS_MAX;

/// "1TWSTATE" as little-endian bytes.
const MAGIC: u64 = 0x4554_4154_5357_5431;
/// Changes with every change of this layout, so that no build misreads the file of another.
const VERSION: u32 = 7;
/// Most sessions that can be kept; further ones are served, but not kept.
pub const SESSIONS_MAX: usize = 4096;

const HEAD_BYTES: usize = 4096;
const HEAD_WORDS_END: usize = 40;
const EXPORTS_AT: usize = 64;
const EXPORT_BYTES: usize = 24;
const EXPORTS_MAX: usize = (HEAD_BYTES - EXPORTS_AT - 8) / EXPORT_BYTES;
const ENTRY_BYTES: usize = 64;
/// Offset in an entry of the seconds for which servers have run without the client.
const AWAY_AT: usize = 28;
const SLOT_BYTES: usize = 2 * RECORD_BYTES;
const AREA_BYTES: usize = SLOTS_MAX * SLOT_BYTES;
const AREAS_AT: usize = HEAD_BYTES + SESSIONS_MAX * ENTRY_BYTES;
/// Offset of the locks.
pub(crate) const LOCKS_AT: usize = AREAS_AT + SESSIONS_MAX * AREA_BYTES;
/// Offset of a word in the head: for how many locks there is room on the disk.
pub(crate) const LOCKS_ROOM_AT: usize = HEAD_WORDS_END;
/// Offset of a word in the head: when a server last ran that held locks for owners that were away, in seconds.
pub(crate) const RAN_AT: usize = LOCKS_ROOM_AT + 4;
/// Offset of a word in the head: 1 if there was no room for a session or a lock.
pub(crate) const UNKEPT_AT: usize = RAN_AT + 4;
/// Size of the file in bytes. It is sparse: a session takes 80 KiB of the disk when it begins.
pub const STATE_BYTES: usize = LOCKS_AT + LOCKS_MAX * LOCK_BYTES;

/// Locks that serialize operations on one name, or appends to one file; the same number again for stores
/// that may hang.
const STRIPES: usize = 256;

/// Identifies a boot of this machine.
pub type Boot = [u8; 16];

/// Why the contents of a file cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub enum Unusable {
    /// It is empty.
    Empty,
    /// It was written before the machine was rebooted.
    OtherBoot,
    /// It has holes, like a sparse copy, and the disk has no room for what has to be written there.
    NoRoom,
    /// It is not in the format of this version.
    Damaged(&'static str),
}

/// The state of a server, in a mapped file.
pub struct State {
    pub(crate) memory: SharedMemory,
    epoch: u32,
    stripes: Box<[Mutex<()>]>,
    table: Mutex<Table>,
    unresolved: Mutex<Vec<Unresolved>>,
    any_unresolved: AtomicBool,
}

#[derive(Default)]
struct Table {
    free: Vec<u32>,
    /// Entries of sessions, by session number.
    entries: HashMap<u64, u32>,
    /// Sessions from before the restart whose clients have not come back yet.
    unclaimed: HashMap<u64, Unclaimed>,
    /// There was no room for the last session that began.
    full: bool,
}

struct Unclaimed {
    secret: u64,
    recorded: u64,
    /// Seconds for which earlier servers have waited for the client.
    away: u32,
}

/// An operation that was in progress when the server was killed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Unresolved {
    entry: u32,
    slot: u16,
    intent: Intent,
}

/// A session's part of the state. Clones share it.
#[derive(Clone)]
pub struct Journal {
    state: Arc<State>,
    entry: u32,
    secret: u64,
}

/// A session from before a restart of the server.
pub struct Kept {
    /// Where it is recorded.
    pub journal: Journal,
    /// A bit for each slot with a record.
    pub recorded: u64,
}

/// What was found out about an operation that may or may not have been done.
pub(crate) enum Verdict {
    /// It was done; these results follow the recorded ones.
    Done(Vec<u8>),
    /// It was not done.
    NotDone,
    /// For an append: it has begun or is done, and its range is reserved.
    Reserved,
}

fn entry_at(entry: u32) -> usize {
    HEAD_BYTES + entry as usize * ENTRY_BYTES
}

fn area_at(entry: u32) -> usize {
    AREAS_AT + entry as usize * AREA_BYTES
}

fn head(boot: &Boot) -> [u8; HEAD_WORDS_END] {
    let mut head = [0; HEAD_WORDS_END];
    head[..8].copy_from_slice(&MAGIC.to_le_bytes());
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&(SESSIONS_MAX as u32).to_le_bytes());
    head[16..20].copy_from_slice(&(SLOTS_MAX as u32).to_le_bytes());
    head[20..24].copy_from_slice(&(RECORD_BYTES as u32).to_le_bytes());
    head[24..40].copy_from_slice(boot);
    head
}

impl State {
    fn new(memory: SharedMemory, epoch: u32) -> Self {
        Self {
            memory,
            epoch,
            stripes: (0..2 * STRIPES).map(|_| Mutex::new(())).collect(),
            table: Mutex::default(),
            unresolved: Mutex::default(),
            any_unresolved: AtomicBool::new(false),
        }
    }

    /// Starts with empty memory, which is all zero, on a server with boot epoch `epoch`.
    ///
    /// # Errors
    /// `ENOSPC` when the disk has no room for it.
    ///
    /// # Panics
    /// When the memory is shorter than [`STATE_BYTES`].
    pub fn create(memory: SharedMemory, boot: &Boot, epoch: u32) -> io::Result<Self> {
        memory.allocate(0, AREAS_AT)?;
        memory.copy_in(0, &head(boot));
        let state = Self::new(memory, epoch);
        state.table.lock().free = (0..SESSIONS_MAX as u32).rev().collect();
        Ok(state)
    }

    /// Continues with the state that a previous server wrote.
    ///
    /// # Errors
    /// The contents cannot be used; the memory is unchanged.
    ///
    /// # Panics
    /// When the memory is shorter than [`STATE_BYTES`].
    pub fn open(memory: SharedMemory, boot: &Boot, epoch: u32) -> Result<Self, Unusable> {
        let mut found = [0; HEAD_WORDS_END];
        memory.copy_out(0, &mut found);
        let wanted = head(boot);
        if found == [0; HEAD_WORDS_END] {
            return Err(Unusable::Empty);
        }
        if found[..8] != wanted[..8] {
            return Err(Unusable::Damaged("it does not start like a state file"));
        }
        if found[8..24] != wanted[8..24] {
            return Err(Unusable::Damaged("it was written by another version of the server"));
        }
        if found != wanted {
            return Err(Unusable::OtherBoot);
        }
        if memory.allocate(0, AREAS_AT).is_err() {
            return Err(Unusable::NoRoom);
        }
        let state = Self::new(memory, epoch);
        state.load();
        Ok(state)
    }

    /// Reads all sessions, and which of their requests were in progress.
    fn load(&self) {
        let mut table = self.table.lock();
        let mut unresolved = self.unresolved.lock();
        for entry in (0..SESSIONS_MAX as u32).rev() {
            let Some((session, secret)) = self.read_entry(entry) else {
                table.free.push(entry);
                continue;
            };
            let has_room = self.memory.allocate(area_at(entry), AREA_BYTES).is_ok();
            if !has_room || table.entries.contains_key(&session) {
                // The server does not write such entries: there is no room for the records, or the
                // session has another entry, of which either is as good as the other.
                self.memory.copy_in(entry_at(entry), &[0; ENTRY_BYTES]);
                table.free.push(entry);
                continue;
            }
            let mut recorded = 0;
            for slot in 0..SLOTS_MAX as u16 {
                self.clear_torn(entry, secret, slot);
                let Some(record) = self.newest(entry, secret, slot) else { continue };
                recorded |= 1 << slot;
                if let Some(intent) = record.intent {
                    unresolved.push(Unresolved { entry, slot, intent });
                }
            }
            table.entries.insert(session, entry);
            let away = u32::from_le(self.away(entry).load(Ordering::Relaxed));
            table.unclaimed.insert(session, Unclaimed { secret, recorded, away });
        }
        self.any_unresolved.store(!unresolved.is_empty(), Ordering::Relaxed);
    }

    /// Clears what is not a record of this session, so that all generations can be trusted.
    fn clear_torn(&self, entry: u32, secret: u64, slot: u16) {
        for which in [0, 1] {
            if self.read(entry, secret, slot, which).is_none() {
                self.memory.copy_in(Self::record_at(entry, slot, which), &[0; 8]);
            }
        }
    }

    fn away(&self, entry: u32) -> &AtomicU32 {
        self.memory.word32(entry_at(entry) + AWAY_AT)
    }

    /// Returns an entry's session number and secret; `None` if the entry is not in use.
    fn read_entry(&self, entry: u32) -> Option<(u64, u64)> {
        let mut bytes = [0; 28];
        self.memory.copy_out(entry_at(entry), &mut bytes);
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let live = word(24) == 1 && word(20) == crc32c::crc32c(&bytes[..20]) && long(0) != 0;
        live.then(|| (long(0), long(8)))
    }

    /// Keeps a new session; `None` when there is no room for it.
    pub fn begin(self: &Arc<Self>, session: u64, secret: u64) -> Option<Journal> {
        let no_room = |table: &mut Table, why: &dyn fmt::Display| {
            self.note_unkept();
            // Clients come and go, so warn only once until there is room again.
            if !std::mem::replace(&mut table.full, true) {
                log::warn!("no room for the state of new sessions, which will not survive: {why}");
            }
        };
        let mut table = self.table.lock();
        let Some(entry) = table.free.pop() else {
            no_room(&mut table, &format_args!("there are {SESSIONS_MAX}"));
            return None;
        };
        drop(table);
        if let Err(error) = self.memory.allocate(area_at(entry), AREA_BYTES) {
            let mut table = self.table.lock();
            table.free.push(entry);
            no_room(&mut table, &error);
            return None;
        }
        let mut bytes = [0; AWAY_AT + 4];
        bytes[..8].copy_from_slice(&session.to_le_bytes());
        bytes[8..16].copy_from_slice(&secret.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.epoch.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..20]);
        bytes[20..24].copy_from_slice(&crc.to_le_bytes());
        self.memory.copy_in(entry_at(entry), &bytes);
        self.memory.word32(entry_at(entry) + 24).store(1, Ordering::Release);
        let mut table = self.table.lock();
        table.entries.insert(session, entry);
        table.full = false;
        drop(table);
        Some(Journal { state: self.clone(), entry, secret })
    }

    /// Notes that there was no room for something.
    pub(crate) fn note_unkept(&self) {
        self.memory.word32(UNKEPT_AT).store(1u32.to_le(), Ordering::Relaxed);
    }

    /// Returns a session from before the restart whose client has come back.
    pub fn claim(self: &Arc<Self>, session: u64, secret: u64) -> Option<Kept> {
        let mut table = self.table.lock();
        if table.unclaimed.get(&session)?.secret != secret {
            return None;
        }
        let Unclaimed { recorded, .. } = table.unclaimed.remove(&session)?;
        let entry = *table.entries.get(&session)?;
        self.away(entry).store(0, Ordering::Relaxed);
        Some(Kept { journal: Journal { state: self.clone(), entry, secret }, recorded })
    }

    /// Forgets a session.
    pub fn end(&self, session: u64) {
        let mut table = self.table.lock();
        table.unclaimed.remove(&session);
        self.forget(&mut table, session);
    }

    /// Forgets the sessions from before the restart whose clients have been away for `limit` seconds, the last
    /// `running` of them while this server ran. The time of servers that were killed before counts, but not the
    /// time without a server. A client that comes back at this moment either keeps its session or finds it
    /// unknown. Returns the numbers and secrets of the forgotten sessions.
    pub fn end_unclaimed(&self, running: u32, limit: u32) -> Vec<(u64, u64)> {
        let mut table = self.table.lock();
        let mut ended = Vec::new();
        for (session, unclaimed) in &table.unclaimed {
            let away = unclaimed.away.saturating_add(running);
            if away >= limit {
                ended.push((*session, unclaimed.secret));
            } else if let Some(entry) = table.entries.get(session) {
                self.away(*entry).store(away.to_le(), Ordering::Relaxed);
            }
        }
        for (session, _) in &ended {
            table.unclaimed.remove(session);
            self.forget(&mut table, *session);
        }
        ended
    }

    fn forget(&self, table: &mut Table, session: u64) {
        let Some(entry) = table.entries.remove(&session) else { return };
        self.unresolved.lock().retain(|u| u.entry != entry);
        self.memory.word32(entry_at(entry) + 24).store(0, Ordering::Release);
        table.free.push(entry);
    }

    /// True while clients from before the restart may come back.
    #[must_use]
    pub fn has_unclaimed(&self) -> bool {
        !self.table.lock().unclaimed.is_empty()
    }

    /// Returns the sessions from before the restart whose clients have not come back yet.
    #[must_use]
    pub fn unclaimed(&self) -> Vec<u64> {
        self.table.lock().unclaimed.keys().copied().collect()
    }

    /// Returns the highest number of a kept session; 0 if there is none.
    #[must_use]
    pub fn last_session(&self) -> u64 {
        self.table.lock().entries.keys().copied().max().unwrap_or(0)
    }

    /// Notes the exports: name, and device and inode number of the root. Returns the names that stood
    /// for another root before.
    pub fn note_exports<'a>(&self, exports: &[(&'a [u8], (u64, u64))]) -> Vec<&'a [u8]> {
        let mut old = [0; HEAD_BYTES - EXPORTS_AT];
        self.memory.copy_out(EXPORTS_AT, &mut old);
        let count = u32::from_le_bytes(std::array::from_fn(|i| old[4 + i])) as usize;
        let end = 8 + count.min(EXPORTS_MAX) * EXPORT_BYTES;
        let crc = u32::from_le_bytes(std::array::from_fn(|i| old[i]));
        let rows = if crc == crc32c::crc32c(&old[4..end]) { &old[8..end] } else { &[] };
        let mut new = Vec::with_capacity(old.len());
        new.extend_from_slice(&(exports.len().min(EXPORTS_MAX) as u32).to_le_bytes());
        let mut moved = Vec::new();
        for (name, root) in exports.iter().take(EXPORTS_MAX) {
            let row: [u64; 3] = [Place::named((0, 0), &[name]).name, root.0, root.1];
            let row: Vec<u8> = row.iter().flat_map(|word| word.to_le_bytes()).collect();
            let before = rows.chunks_exact(EXPORT_BYTES).find(|old| old[..8] == row[..8]);
            if before.is_some_and(|old| old != row) {
                moved.push(*name);
            }
            new.extend_from_slice(&row);
        }
        let crc = crc32c::crc32c(&new);
        self.memory.copy_in(EXPORTS_AT + 4, &new);
        self.memory.copy_in(EXPORTS_AT, &crc.to_le_bytes());
        moved
    }

    fn record_at(entry: u32, slot: u16, which: usize) -> usize {
        area_at(entry) + usize::from(slot) * SLOT_BYTES + which * RECORD_BYTES
    }

    fn read(&self, entry: u32, secret: u64, slot: u16, which: usize) -> Option<Record> {
        let mut bytes = [0; RECORD_BYTES];
        self.memory.copy_out(Self::record_at(entry, slot, which), &mut bytes);
        Record::parse(&bytes).filter(|record| record.secret == secret)
    }

    /// Returns the current record of a slot.
    fn newest(&self, entry: u32, secret: u64, slot: u16) -> Option<Record> {
        let records = [0, 1].map(|which| self.read(entry, secret, slot, which));
        match records {
            [Some(a), Some(b)] => Some(if newer(a.generation, b.generation) { a } else { b }),
            [a, b] => a.or(b),
        }
    }

    /// Writes a record over the slot's other record, which is older or empty.
    fn write(&self, entry: u32, slot: u16, record: &mut Record, results: &[u8]) {
        let generation = |which| {
            let at = Self::record_at(entry, slot, which) + GENERATION_AT;
            u32::from_le(self.memory.word32(at).load(Ordering::Relaxed))
        };
        let (a, b) = (generation(0), generation(1));
        let (newest, target) = if newer(a, b) { (a, 1) } else { (b, 0) };
        record.generation = newest.wrapping_add(1);
        let (bytes, length) = record.image(results);
        let at = Self::record_at(entry, slot, target);
        #[cfg(test)]
        if crate::simulation::fragile::burns() {
            self.memory.copy_in(at, &bytes[..length / 2]);
            crate::simulation::fragile::die();
        }
        self.memory.copy_in(at, &bytes[..length]);
    }

    /// Keeps other operations away from these places. Stores that may hang have locks of their own, so
    /// that operations of other stores do not wait for them.
    pub(crate) fn guard(
        &self,
        places: &[Place],
        may_hang: bool,
    ) -> [Option<MutexGuard<'_, ()>>; 2] {
        let stripe = |place: &Place| {
            let mixed = (place.inode.0 ^ place.inode.1.rotate_left(32) ^ place.name)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 56) as usize % STRIPES + if may_hang { STRIPES } else { 0 }
        };
        match places {
            [] => [None, None],
            [one] => [Some(self.stripes[stripe(one)].lock()), None],
            [a, b, ..] => {
                let (a, b) = (stripe(a), stripe(b));
                let first = self.stripes[a.min(b)].lock();
                let second = (a != b).then(|| self.stripes[a.max(b)].lock());
                [Some(first), second]
            }
        }
    }

    /// Settles what was in progress in a place, except for the request of `own` (entry and slot), which
    /// settles its own.
    fn settle(
        &self,
        own: (u32, u16),
        place: &Place,
        mut look: impl FnMut(&Intent) -> Option<Verdict>,
    ) {
        if !self.any_unresolved.load(Ordering::Relaxed) {
            return;
        }
        let concerned: Vec<Unresolved> = {
            let unresolved = self.unresolved.lock();
            let here =
                |u: &&Unresolved| (u.entry, u.slot) != own && u.intent.places().contains(place);
            unresolved.iter().filter(here).copied().collect()
        };
        for concerned in concerned {
            // Looking may take long, and others need the list. The guard keeps others from settling this
            // place.
            let Some(verdict) = look(&concerned.intent) else { continue };
            let mut unresolved = self.unresolved.lock();
            let before = unresolved.len();
            unresolved.retain(|u| *u != concerned);
            if unresolved.len() < before {
                self.note_verdict(&concerned, verdict);
            }
            self.any_unresolved.store(!unresolved.is_empty(), Ordering::Relaxed);
        }
    }

    /// Records what was found out about an operation.
    fn note_verdict(&self, unresolved: &Unresolved, verdict: Verdict) {
        let &Unresolved { entry, slot, intent } = unresolved;
        let Some((_, secret)) = self.read_entry(entry) else { return };
        let Some(mut record) = self.newest(entry, secret, slot) else { return };
        if record.intent != Some(intent) {
            return;
        }
        let mut results = std::mem::take(&mut record.results);
        record.intent = None;
        match verdict {
            Verdict::Done(more) => {
                results.extend_from_slice(&more);
                record.index += 1;
            }
            Verdict::NotDone => {}
            Verdict::Reserved => record.intent = Some(Intent { reserved: true, ..intent }),
        }
        self.write(entry, slot, &mut record, &results);
    }
}

/// Returns whether generation `a` is newer than `b`; generations wrap.
fn newer(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) as i32 > 0
}

impl Journal {
    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// Called before the request of this slot changes `place`: finds out what became of other requests'
    /// operations that were in progress there when the server was killed, for the clients that will ask.
    pub(crate) fn settle(
        &self,
        slot: u16,
        place: &Place,
        look: impl FnMut(&Intent) -> Option<Verdict>,
    ) {
        self.state.settle((self.entry, slot), place, look);
    }

    /// Writes the record of a slot.
    pub(crate) fn write(&self, slot: u16, record: &mut Record, results: &[u8]) {
        record.secret = self.secret;
        self.state.write(self.entry, slot, record, results);
    }

    /// Returns the record of a slot.
    pub(crate) fn newest(&self, slot: u16) -> Option<Record> {
        self.state.newest(self.entry, self.secret, slot)
    }

    /// Takes over the record of a slot whose request was repeated; the request settles it from now on.
    /// Must be called while its places are guarded, if it has any.
    pub(crate) fn recall(&self, slot: u16) -> Option<Record> {
        let mut unresolved = self.state.unresolved.lock();
        unresolved.retain(|u| (u.entry, u.slot) != (self.entry, slot));
        self.state.any_unresolved.store(!unresolved.is_empty(), Ordering::Relaxed);
        self.state.newest(self.entry, self.secret, slot)
    }
}

#[cfg(test)]
pub(crate) mod tests;
