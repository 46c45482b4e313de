//! A disk as it is exported.

use crate::Changes;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_store::{BlockStore, Geometry};

/// An exported disk: its back end, and what all connections have to know of each other.
#[derive(Debug)]
pub struct Disk {
    /// Name of the export.
    pub name: String,
    /// For humans.
    pub description: String,
    /// Where the bytes are.
    pub store: Arc<dyn BlockStore>,
    /// Refuse changes, whatever the back end could.
    pub read_only: bool,
    /// What changed since the server began to serve it.
    pub changes: Changes,
    failed: AtomicBool,
}

impl Disk {
    /// Exports a back end.
    #[must_use]
    pub fn new(name: &str, description: &str, store: Arc<dyn BlockStore>, read_only: bool) -> Self {
        let geometry = store.geometry();
        Self {
            name: name.to_owned(),
            description: description.to_owned(),
            store,
            read_only: read_only || geometry.read_only,
            changes: Changes::new(geometry.size),
            failed: AtomicBool::new(false),
        }
    }

    /// What it is like.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.store.geometry()
    }

    /// A flush failed: the kernel has dropped what it could not write, so that nobody knows what
    /// is on the disk. All changes are refused until an operator has looked.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Remembers a failure to make data durable.
    pub fn note_durability(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result
            && !self.failed.swap(true, Ordering::AcqRel)
        {
            self.log_failure(error);
        }
        result
    }

    fn log_failure(&self, error: &io::Error) {
        // The engine has no logger of its own; standard error is where servers complain.
        eprintln!(
            "towline: disk \"{}\": a flush failed ({error}): what was written before may be lost; \
             serving it read-only until the server is told to read its configuration again (HUP) \
             or restarted",
            self.name
        );
    }

    /// An operator has looked: changes are allowed again.
    pub fn forgive(&self) {
        self.failed.store(false, Ordering::Release);
    }

    /// Makes all that was written before durable.
    ///
    /// # Errors
    /// What the device says; `EIO` for ever after, until [`Disk::forgive`].
    pub fn flush(&self) -> io::Result<()> {
        if self.has_failed() {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.note_durability(self.store.flush())
    }
}
