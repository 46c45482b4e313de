//! A client's identity: what belongs to it and outlives its connections.

use crate::files::{Files, SharedFiles, Terms};
use crate::slots::Slots;
use crate::state::{Journal, Kept};
use std::sync::Arc;
use towline_store::FileStore;

/// A session.
pub struct Session {
    /// Number that names it.
    pub id: u64,
    /// What a lane has to know to join it.
    pub secret: u64,
    /// Its requests.
    pub slots: Slots,
    /// True when it belongs to a family.
    pub family: bool,
    /// Its open files, which it may share with other sessions.
    pub files: SharedFiles,
    /// Where it is kept for a restart of the server.
    pub journal: Option<Journal>,
    /// Bit for each slot with a record from before a restart that was not asked for yet.
    recorded: u64,
    /// The client has still to open and lock again what it had before the restart.
    pub reclaiming: bool,
}

impl Session {
    /// A new session, on a server whose start `epoch` names.
    #[must_use]
    pub fn new(id: u64, secret: u64, epoch: u32) -> Self {
        Self {
            id,
            secret,
            slots: Slots::default(),
            family: false,
            files: Arc::new(Files::new(id, epoch).into()),
            journal: None,
            recorded: 0,
            reclaiming: false,
        }
    }

    /// A session that was there before the server started again.
    #[must_use]
    pub fn kept(id: u64, secret: u64, epoch: u32, kept: Kept) -> Self {
        let Kept { journal, recorded } = kept;
        let journal = Some(journal);
        Self { journal, recorded, reclaiming: true, ..Self::new(id, secret, epoch) }
    }

    /// Its client begins anew to open and lock what it had. What it has again already, stays: to ask
    /// for it once more changes nothing.
    pub fn restart_reclaiming(&mut self) {
        self.slots = Slots::default();
    }

    /// True when there may be a record from before a restart of this slot's request; once.
    pub fn take_recorded(&mut self, slot: u16) -> bool {
        let bit = 1u64.checked_shl(slot.into()).unwrap_or(0);
        let recorded = self.recorded & bit != 0;
        self.recorded &= !bit;
        recorded
    }
}

/// What a server exports, by name.
pub trait Exports {
    /// The store behind a name, and how it is served.
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)>;
    /// As `find`, for what a client had open before the server started again: not when the name
    /// stands for something else now, or for a store that began anew.
    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)>;
    /// All names, each ended by a zero byte.
    fn names(&self) -> Vec<u8>;
    /// Counters as JSON.
    fn statistics(&self) -> Vec<u8>;
}
