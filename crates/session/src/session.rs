//! A client's identity, and everything of it that outlives its connections.

use crate::files::{Files, SharedFiles, Terms};
use crate::slots::Slots;
use crate::state::{Journal, Kept};
use std::sync::Arc;
use towline_store::FileStore;

/// A session.
pub struct Session {
    /// Session number.
    pub id: u64,
    /// Secret that a lane has to know to join the session.
    pub secret: u64,
    /// Its slots.
    pub slots: Slots,
    /// True when it belongs to a family.
    pub family: bool,
    /// It reports the ends of its family's processes ([`towline_wire::hello::want::REPORTS_ENDS`]).
    pub reports_ends: bool,
    /// The process of the family whose requests it carries ([`towline_wire::Hello::process`]).
    pub process: u64,
    /// Its open files, which it may share with other sessions.
    pub files: SharedFiles,
    /// Its record for a restart of the server, if it is kept.
    pub journal: Option<Journal>,
    /// A bit for each slot with a record from before a restart that was not asked for yet.
    recorded: u64,
    /// The client still has to reopen and relock what it had before the restart.
    pub reclaiming: bool,
}

impl Session {
    /// Creates a session, whose table of open files begins at `epoch` ([`Files::new`]).
    #[must_use]
    pub fn new(id: u64, secret: u64, epoch: u32) -> Self {
        Self {
            id,
            secret,
            slots: Slots::default(),
            family: false,
            reports_ends: false,
            process: 0,
            files: Arc::new(Files::new(id, epoch).into()),
            journal: None,
            recorded: 0,
            reclaiming: false,
        }
    }

    /// Restores a session from before a restart of the server.
    #[must_use]
    pub fn kept(id: u64, secret: u64, epoch: u32, kept: Kept) -> Self {
        let Kept { journal, recorded } = kept;
        let journal = Some(journal);
        Self { journal, recorded, reclaiming: true, ..Self::new(id, secret, epoch) }
    }

    /// Starts over when the client reopens and relocks its files from the beginning. Files and locks
    /// that it already has again stay; requesting them once more changes nothing.
    pub fn restart_reclaiming(&mut self) {
        self.slots = Slots::default();
    }

    /// True when there may be a record from before a restart for this slot's request. True only once per
    /// slot.
    pub fn take_recorded(&mut self, slot: u16) -> bool {
        let bit = 1u64.checked_shl(slot.into()).unwrap_or(0);
        let recorded = self.recorded & bit != 0;
        self.recorded &= !bit;
        recorded
    }
}

/// What a server exports, by name.
pub trait Exports {
    /// Returns the store behind a name, and how it is served.
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)>;
    /// Like `find`, for what a client had open before the server restarted. Returns `None` if the name
    /// now stands for something else, or for a store that has started over.
    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)>;
    /// Returns all names, each terminated by a zero byte.
    fn names(&self) -> Vec<u8>;
    /// Returns the counters as JSON.
    fn statistics(&self) -> Vec<u8>;
}
