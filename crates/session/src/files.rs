//! The open files of a session, by handle.

use crate::watches::{EventQueue, Watches};
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::HashMap;
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
        Self { watches: Watches::default(), store, file, terms, flags }
    }
}

/// Table of open files. A handle consists of an index and a generation, so that the handle of a closed
/// file never refers to another one.
pub struct Files {
    /// Owner of the open files' locks: a session or a family.
    pub owner: u64,
    /// A lock was requested for one of these files, or one was open before a restart: closing one may have to
    /// release locks.
    pub(crate) has_locked: bool,
    /// Number of the session that the table was created for.
    session: u64,
    epoch: u32,
    /// The queue for events of these files, created on first use.
    events: Option<Arc<EventQueue>>,
    entries: Vec<(u32, Option<Opened>)>,
    free: Vec<u32>,
    /// Files with handles from before a restart. Their indexes may be in use in `entries`, as the
    /// members of a family come back one after the other.
    reclaimed: HashMap<u64, Opened>,
    open: usize,
}

/// Returns the index and the generation of a handle.
const fn parts(handle: u64) -> (usize, u32) {
    ((handle & 0xffff_ffff) as usize, (handle >> 32) as u32)
}

impl Files {
    /// Creates an empty table for a session, which owns its locks. `epoch` differs between two runs of a
    /// server. Generations start there, so that a handle lost in a restart does not refer to a file opened
    /// afterwards.
    #[must_use]
    pub fn new(session: u64, epoch: u32) -> Self {
        Self {
            owner: session,
            has_locked: false,
            session,
            epoch,
            events: None,
            entries: Vec::new(),
            free: Vec::new(),
            reclaimed: HashMap::new(),
            open: 0,
        }
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
        if let Some(index) = self.free.pop() {
            let (generation, entry) = &mut self.entries[index as usize];
            *generation = (generation.wrapping_add(1) & 0x7fff_ffff).max(1);
            *entry = Some(opened);
            self.open += 1;
            return Ok(u64::from(*generation) << 32 | u64::from(index));
        }
        let index = self.entries.len() as u64;
        let generation = (self.epoch & 0x7fff_ffff).max(1);
        self.entries.push((generation, Some(opened)));
        self.open += 1;
        Ok(u64::from(generation) << 32 | index)
    }

    /// Adds a file with the handle that it had before the server restarted.
    ///
    /// # Errors
    /// `EBADF` when the handle is impossible or in use, `EMFILE` at the limit.
    pub fn insert_at(&mut self, handle: u64, opened: Opened) -> Result<(), Errno> {
        let (index, generation) = parts(handle);
        let is_possible = index < OPEN_FILES_MAX && (1..=0x7fff_ffff).contains(&generation);
        if !is_possible || self.find(handle).is_ok() {
            return Err(Errno::EBADF);
        }
        self.check_room()?;
        self.reclaimed.insert(handle, opened);
        // It may have locks from before.
        self.has_locked = true;
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
        let (index, generation) = parts(handle);
        let opened = match self.entries.get_mut(index) {
            Some((found, Some(opened))) if *found == generation => opened,
            _ => self.reclaimed.get_mut(&handle).ok_or(Errno::EBADF)?,
        };
        opened.watches.keep(tells, watch);
        Ok(())
    }

    /// Removes all files whose closing may wait without limit.
    pub fn take_hanging(&mut self) -> Vec<Opened> {
        let hangs = |opened: &mut Opened| opened.store.may_hang();
        let mut taken: Vec<_> =
            self.entries.iter_mut().filter_map(|(_, entry)| entry.take_if(hangs)).collect();
        taken
            .extend(self.reclaimed.extract_if(|_, opened| hangs(opened)).map(|(_, opened)| opened));
        self.open -= taken.len();
        taken
    }

    /// Removes the file with this handle.
    ///
    /// # Errors
    /// `EBADF` when there is none.
    pub fn remove(&mut self, handle: u64) -> Result<Opened, Errno> {
        if let Some(opened) = self.reclaimed.remove(&handle) {
            self.open -= 1;
            return Ok(opened);
        }
        self.find(handle)?;
        let (index, _) = parts(handle);
        let opened = self.entries[index].1.take().ok_or(Errno::EBADF)?;
        self.free.push(index as u32);
        self.open -= 1;
        Ok(opened)
    }
}
