//! The open files of a session, by handle.

use crate::watches::{EventQueue, Watches};
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_store::{FileStore, OpenFile, Watch};
use towline_wire::Errno;
use towline_wire::limits::OPEN_FILES_MAX;

/// How a compound accesses the open files.
pub enum Table<'a> {
    /// Locked while the compound runs, by a thread that must not wait.
    Held(&'a mut Files),
    /// Locked only for moments, by a thread that may wait; other requests use the same files meanwhile.
    Shared(&'a SharedFiles),
}

impl Table<'_> {
    /// True when calls that may take long can be made on this thread.
    pub(crate) fn may_wait(&self) -> bool {
        matches!(self, Self::Shared(_))
    }

    /// Finds the file with this handle; see [`Files::find`].
    pub(crate) fn find(&self, handle: u64) -> Result<Found<'_>, Errno> {
        match self {
            Self::Held(files) => files.find(handle).map(Cow::Borrowed),
            Self::Shared(files) => files.lock().find(handle).cloned().map(Cow::Owned),
        }
    }

    /// Calls `act` with the files.
    pub(crate) fn with<T>(&mut self, act: impl FnOnce(&mut Files) -> T) -> T {
        match self {
            Self::Held(files) => act(files),
            Self::Shared(files) => act(&mut files.lock()),
        }
    }

    /// See [`Files::owner`].
    pub(crate) fn owner(&self) -> u64 {
        match self {
            Self::Held(files) => files.owner,
            Self::Shared(files) => files.lock().owner,
        }
    }
}

/// An open file of a [`Table`]. If the table is held, borrowing the file saves counting a reference.
pub(crate) type Found<'a> = Cow<'a, Opened>;

/// Open files of one session, or of all sessions of a family.
pub type SharedFiles = Arc<Mutex<Files>>;

/// How an export is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // servers set both for each export
pub struct Terms {
    /// All changes are refused.
    pub read_only: bool,
    /// Number under which the server measures what each client requests; zero: not measured.
    pub account: u32,
}

/// What all users of an open file with locks share: the table and requests under way. The locks last until
/// the last user has let go of the file, as in the kernel.
#[derive(Default)]
pub struct Hold(Mutex<Option<Release>>);

/// Releases the locks of a file, from any thread.
type Release = Box<dyn FnOnce() + Send>;

impl Hold {
    /// Lets go of a file that is closed. `release` is called when all others have done so, too.
    pub fn let_go(self: Arc<Self>, release: Release) {
        *self.0.lock() = Some(release);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(release) = self.0.get_mut().take() {
            release();
        }
    }
}

/// Keeps open files for the next server, in case this one is killed. Files are kept by their handle and a secret of the
/// owner of their table.
pub trait Keep: Send + Sync {
    /// Tells it to ask this table some time later for [`Files::opened`]; returns false if it keeps no more files.
    fn wake(&self) -> bool;

    /// Lets go of files that are closed.
    fn let_go(&self, owner: u64, handles: Vec<u64>);

    /// Returns a file of the store with this root that the previous server had open. It is kept further.
    fn take(&self, owner: u64, handle: u64, root: (u64, u64)) -> Option<OwnedFd>;
}

/// A file to keep.
#[non_exhaustive]
pub struct ToKeep {
    /// Its handle.
    pub handle: u64,
    /// Identity of the root of its store.
    pub root: (u64, u64),
    /// The file.
    pub file: Arc<dyn OpenFile>,
}

/// An open file and the store it belongs to.
#[derive(Clone)]
pub struct Opened {
    /// Its watches, which end before it is closed.
    pub(crate) watches: Watches,
    /// Store of the export in which it was opened.
    pub store: Arc<dyn FileStore>,
    /// The file.
    pub file: Arc<dyn OpenFile>,
    /// How its export is served.
    pub terms: Terms,
    /// The `O_*` flags with which it was opened.
    pub flags: u32,
    /// Set once a lock was requested for it, or if it was open before a restart and may have locks.
    pub hold: Option<Arc<Hold>>,
    /// It is kept for the next server.
    pub(crate) is_kept: bool,
}

impl Opened {
    /// Creates the entry of a file that was just opened.
    #[must_use]
    pub fn new(
        store: Arc<dyn FileStore>,
        file: Arc<dyn OpenFile>,
        terms: Terms,
        flags: u32,
    ) -> Self {
        Self { watches: Watches::default(), store, file, terms, flags, hold: None, is_kept: false }
    }
}

/// Table of open files. A handle consists of an index and a generation, so that the handle of a closed
/// file never refers to another one.
pub struct Files {
    /// Owner of the open files' locks: a session or a family.
    pub owner: u64,
    /// Number of the session that the table was created for.
    session: u64,
    /// The first generation of its handles.
    epoch: u32,
    /// The queue for events of these files, created on first use.
    events: Option<Arc<EventQueue>>,
    entries: Vec<(u32, Option<Opened>)>,
    free: Vec<u32>,
    /// Files with handles from before a restart. Their indexes may be in use in `entries`, as the
    /// members of a family come back one after the other.
    reclaimed: HashMap<u64, Opened>,
    open: usize,
    /// Keeps files that stay open for a while.
    keep: Option<(Arc<dyn Keep>, u64)>,
    /// Handles of files that were opened since [`Files::opened`] was called.
    opened: Vec<u64>,
    /// Files that are closed at the end of a session, by handle: the session.
    bound: HashMap<u64, u64>,
}

/// Returns the index and the generation of a handle.
const fn parts(handle: u64) -> (usize, u32) {
    ((handle & 0xffff_ffff) as usize, (handle >> 32) as u32)
}

/// Largest generation; zero is none.
const GENERATION_MAX: u32 = 0x7fff_ffff;

/// Returns the generation after this one. Generations begin anew after the largest.
const fn following(generation: u32) -> u32 {
    if generation >= GENERATION_MAX { 1 } else { generation + 1 }
}

/// Returns the later of two epochs ([`Files::epoch`]), as long as fewer than half of all lie between them.
#[must_use]
pub const fn later_epoch(one: u32, other: u32) -> u32 {
    let is_later = one.wrapping_sub(other) & GENERATION_MAX < GENERATION_MAX / 2;
    if is_later { one } else { other }
}

impl Files {
    /// Creates an empty table for a session, which owns its locks. Generations start at `epoch`, which differs
    /// between two runs of a server and is beyond those of all tables that have ended
    /// ([`Files::next_epoch`]): a handle that was lost with its table does not refer to a file opened
    /// afterwards.
    #[must_use]
    pub fn new(session: u64, epoch: u32) -> Self {
        Self {
            owner: session,
            session,
            epoch: (epoch & GENERATION_MAX).max(1),
            events: None,
            entries: Vec::new(),
            free: Vec::new(),
            reclaimed: HashMap::new(),
            open: 0,
            keep: None,
            opened: Vec::new(),
            bound: HashMap::new(),
        }
    }

    /// Has its files kept from now on, for the `owner` with this secret; returns false if they are already.
    pub fn be_kept(&mut self, keep: &Arc<dyn Keep>, owner: u64) -> bool {
        let is_new = self.keep.is_none();
        self.keep.get_or_insert_with(|| (keep.clone(), owner));
        is_new
    }

    /// Returns the secret of the owner and the files to keep that were opened since the last call. They are taken
    /// for kept.
    pub fn opened(&mut self) -> (u64, Vec<ToKeep>) {
        let mut opened = Vec::new();
        for handle in std::mem::take(&mut self.opened) {
            // Most are closed again. The root of an export is found again without this.
            if let Ok(found) = self.find_mut(handle)
                && !found.store.may_hang()
                && let Ok(root) = found.store.root()
                && root.identity() != found.file.identity()
            {
                found.is_kept = true;
                opened.push(ToKeep { handle, root: root.identity(), file: found.file.clone() });
            }
        }
        (self.keep.as_ref().map_or(0, |(_, owner)| *owner), opened)
    }

    /// Returns the file with this handle that the previous server had open in this store.
    pub(crate) fn take_kept(&self, handle: u64, store: &dyn FileStore) -> Option<OwnedFd> {
        let (keep, owner) = self.keep.as_ref()?;
        keep.take(*owner, handle, store.root().ok()?.identity())
    }

    /// Lets go of a kept file that could not be used.
    pub(crate) fn give_up_kept(&self, handle: u64) {
        if let Some((keep, owner)) = &self.keep {
            keep.let_go(*owner, vec![handle]);
        }
    }

    /// Notes that a file is opened, if it can be kept and is not yet.
    fn note_opened(&mut self, handle: u64, opened: &Opened) {
        let can_be_kept = || !opened.is_kept && opened.file.descriptor().is_some();
        if let Some((keep, _)) = &self.keep
            && can_be_kept()
            && keep.wake()
        {
            self.opened.push(handle);
        }
    }

    /// Notes that a file is closed. To be called for each one that was open.
    fn note_closed(&mut self, handle: u64, opened: &Opened) {
        self.open -= 1;
        self.bound.remove(&handle);
        if opened.is_kept {
            self.give_up_kept(handle);
        }
    }

    /// Tells this table from others that its owner has after it.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the epoch for a later table, whose handles differ from all that this one has given out.
    #[must_use]
    pub fn next_epoch(&self) -> u32 {
        let latest = self.entries.iter().map(|(generation, _)| *generation);
        following(latest.fold(self.epoch, |latest, other| later_epoch(other, latest)))
    }

    /// Returns the number of open files.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open
    }

    /// True when no file is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open == 0
    }

    /// Checks whether a file can be added.
    ///
    /// # Errors
    /// `EMFILE` at the limit of open files of a session.
    pub(crate) fn check_room(&self) -> Result<(), Errno> {
        if self.open >= OPEN_FILES_MAX { Err(Errno::EMFILE) } else { Ok(()) }
    }

    /// Adds a file and returns its handle.
    ///
    /// # Errors
    /// `EMFILE` at the limit of open files of a session.
    pub fn insert(&mut self, opened: Opened) -> Result<u64, Errno> {
        self.check_room()?;
        let (index, mut generation) = match self.free.pop() {
            Some(index) => (index, following(self.entries[index as usize].0)),
            None => {
                self.entries.push((0, None));
                (self.entries.len() as u32 - 1, self.epoch)
            }
        };
        let handle = |generation| u64::from(generation) << 32 | u64::from(index);
        while self.reclaimed.contains_key(&handle(generation)) {
            generation = following(generation);
        }
        let handle = handle(generation);
        self.note_opened(handle, &opened);
        self.entries[index as usize] = (generation, Some(opened));
        self.open += 1;
        Ok(handle)
    }

    /// Adds a file with the handle that it had before the server restarted.
    ///
    /// # Errors
    /// `EBADF` when the handle is impossible or in use, `EMFILE` at the limit.
    pub fn insert_at(&mut self, handle: u64, mut opened: Opened) -> Result<(), Errno> {
        let (index, generation) = parts(handle);
        let is_possible = index < OPEN_FILES_MAX && (1..=GENERATION_MAX).contains(&generation);
        if !is_possible || self.find(handle).is_ok() {
            return Err(Errno::EBADF);
        }
        self.check_room()?;
        // It may have locks from before.
        opened.hold.get_or_insert_default();
        self.note_opened(handle, &opened);
        self.reclaimed.insert(handle, opened);
        self.open += 1;
        Ok(())
    }

    /// Returns the file with this handle.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn find(&self, handle: u64) -> Result<&Opened, Errno> {
        let (index, generation) = parts(handle);
        match self.entries.get(index) {
            Some((found, Some(opened))) if *found == generation => Ok(opened),
            _ => self.reclaimed.get(&handle).ok_or(Errno::EBADF),
        }
    }

    fn find_mut(&mut self, handle: u64) -> Result<&mut Opened, Errno> {
        let (index, generation) = parts(handle);
        match self.entries.get_mut(index) {
            Some((found, Some(opened))) if *found == generation => Ok(opened),
            _ => self.reclaimed.get_mut(&handle).ok_or(Errno::EBADF),
        }
    }

    /// Notes that a lock is requested that belongs to an open file.
    ///
    /// # Errors
    /// `EBADF` when the file is closed.
    pub(crate) fn note_lock(&mut self, handle: u64) -> Result<(), Errno> {
        self.find_mut(handle)?.hold.get_or_insert_default();
        Ok(())
    }

    /// Notes whether a file is to be closed at the end of a session, and of no other one.
    ///
    /// # Errors
    /// `EBADF` when the file is closed.
    pub(crate) fn bind(&mut self, handle: u64, session: u64, is_bound: bool) -> Result<(), Errno> {
        self.find(handle)?;
        if is_bound {
            self.bound.insert(handle, session);
        } else {
            self.bound.remove(&handle);
        }
        Ok(())
    }

    /// Removes the files that are closed at the end of this session; returns them with their handles.
    pub fn take_bound(&mut self, session: u64) -> Vec<(u64, Opened)> {
        let of_it = self.bound.iter().filter(|(_, of)| **of == session);
        let handles: Vec<u64> = of_it.map(|(handle, _)| *handle).collect();
        handles.into_iter().filter_map(|handle| Some((handle, self.remove(handle).ok()?))).collect()
    }

    /// Returns the queue for events of these files.
    pub(crate) fn events(&mut self) -> Arc<EventQueue> {
        let Self { session, epoch, .. } = *self;
        self.events.get_or_insert_with(|| Arc::new(EventQueue::new(session, epoch))).clone()
    }

    /// Keeps a watch that reports the bits of `tells` with its file.
    ///
    /// # Errors
    /// `EBADF` when the file is closed.
    pub(crate) fn keep_watch(
        &mut self,
        handle: u64,
        tells: u32,
        watch: Box<dyn Watch>,
    ) -> Result<(), Errno> {
        self.find_mut(handle)?.watches.keep(tells, watch);
        Ok(())
    }

    /// Removes all files whose closing may wait without limit.
    pub fn take_hanging(&mut self) -> Vec<Opened> {
        let hangs = |opened: &Opened| opened.store.may_hang();
        let in_entry = |(index, (generation, opened)): (usize, &(u32, Option<Opened>))| {
            let hangs = opened.as_ref().is_some_and(hangs);
            hangs.then_some(u64::from(*generation) << 32 | index as u64)
        };
        let mut handles: Vec<u64> = self.entries.iter().enumerate().filter_map(in_entry).collect();
        let reclaimed = self.reclaimed.iter().filter(|(_, opened)| hangs(opened));
        handles.extend(reclaimed.map(|(handle, _)| *handle));
        handles.into_iter().filter_map(|handle| self.remove(handle).ok()).collect()
    }

    /// Removes the file with this handle.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn remove(&mut self, handle: u64) -> Result<Opened, Errno> {
        let opened = match self.reclaimed.remove(&handle) {
            Some(opened) => opened,
            None => {
                self.find(handle)?;
                let (index, _) = parts(handle);
                let opened = self.entries[index].1.take().ok_or(Errno::EBADF)?;
                self.free.push(index as u32);
                opened
            }
        };
        self.note_closed(handle, &opened);
        Ok(opened)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let Some((keep, owner)) = self.keep.take() else { return };
        let handle = |(index, (generation, opened)): (usize, &(u32, Option<Opened>))| {
            let is_kept = opened.as_ref().is_some_and(|opened| opened.is_kept);
            is_kept.then_some(u64::from(*generation) << 32 | index as u64)
        };
        let mut handles: Vec<u64> = self.entries.iter().enumerate().filter_map(handle).collect();
        let reclaimed = self.reclaimed.iter().filter(|(_, opened)| opened.is_kept);
        handles.extend(reclaimed.map(|(handle, _)| *handle));
        keep.let_go(owner, handles);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_store::memory::MemoryStore;

    fn opened() -> Opened {
        let store = MemoryStore::new("m", 1 << 20).expect("memory");
        let root = store.root().expect("it has a root");
        Opened::new(store, root, Terms::default(), 0)
    }

    /// The handles of a few files, of which some are closed.
    fn handles(files: &mut Files) -> Vec<u64> {
        let mut given = Vec::new();
        for _ in 0..5 {
            given.push(files.insert(opened()).expect("there is room"));
            let passing = files.insert(opened()).expect("there is room");
            files.remove(passing).expect("it is open");
            given.push(passing);
        }
        given
    }

    #[test]
    fn the_next_table_gives_out_other_handles() {
        // The generations of the last begin anew.
        for epoch in [0, 1, GENERATION_MAX - 1, GENERATION_MAX, u32::MAX - 2] {
            let mut files = Files::new(1, epoch);
            let mut given = handles(&mut files);
            assert_eq!(later_epoch(files.next_epoch(), files.epoch()), files.next_epoch());
            given.extend(handles(&mut Files::new(1, files.next_epoch())));
            let different: std::collections::HashSet<u64> = given.iter().copied().collect();
            assert_eq!(different.len(), given.len(), "epoch {epoch}");
            assert!(given.iter().all(|handle| (1..=GENERATION_MAX).contains(&parts(*handle).1)));
        }
        assert_ne!(Files::new(1, 7).next_epoch(), 7, "although no file was open");
    }

    #[test]
    fn a_reclaimed_handle_is_not_given_out_again() {
        let mut files = Files::new(1, 7);
        let given = handles(&mut Files::new(1, 7));
        given.iter().for_each(|handle| files.insert_at(*handle, opened()).expect("it is free"));
        assert!(handles(&mut files).iter().all(|handle| !given.contains(handle)));
    }
}
