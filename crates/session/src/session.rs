//! A client's identity: what belongs to it and outlives its connections.

use crate::files::{Files, SharedFiles};
use crate::slots::Slots;
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
}

impl Session {
    /// A new session, on a server whose start `epoch` names.
    #[must_use]
    pub fn new(id: u64, secret: u64, epoch: u32) -> Self {
        let files = Files::new(id, epoch);
        Self { id, secret, slots: Slots::default(), family: false, files: Arc::new(files.into()) }
    }
}

/// What a server exports, by name.
pub trait Exports {
    /// The store behind a name, and whether it is served read-only.
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, bool)>;
    /// All names, each ended by a zero byte.
    fn names(&self) -> Vec<u8>;
    /// Counters as JSON.
    fn statistics(&self) -> Vec<u8>;
}
