//! Threads that may block, of their own for each store and each disk: one that hangs keeps its own threads, and
//! nobody else's.

use crate::offload::Offload;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use towline_block::Disk;
use towline_store::FileStore;

/// All of them.
#[derive(Default)]
pub(crate) struct Pools {
    pub(crate) files: PoolsOf<dyn FileStore>,
    pub(crate) disks: PoolsOf<Disk>,
}

/// Those of one kind of store.
pub(crate) struct PoolsOf<T: ?Sized>(Mutex<Vec<(Weak<T>, Offload)>>);

impl<T: ?Sized> Default for PoolsOf<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: ?Sized> PoolsOf<T> {
    /// The threads of this store.
    pub(crate) fn of(&self, store: &Arc<T>) -> Offload {
        let mut pools = self.0.lock();
        // What is known has not been made anew at the same place, as long as it is referred to.
        let same = |known: &Weak<T>| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(store));
        if let Some((_, pool)) = pools.iter().find(|(known, _)| same(known)) {
            return pool.clone();
        }
        pools.retain(|(known, _)| known.strong_count() > 0);
        let pool = Offload::default();
        pools.push((Arc::downgrade(store), pool.clone()));
        pool
    }
}
