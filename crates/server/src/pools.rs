//! A pool of threads that may block for each store and each disk. A store that hangs occupies only its own
//! threads.

use crate::offload::Offload;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use towline_block::Disk;
use towline_store::FileStore;

/// All pools.
#[derive(Default)]
pub(crate) struct Pools {
    pub(crate) files: PoolsOf<dyn FileStore>,
    pub(crate) disks: PoolsOf<Disk>,
}

/// The pools for one kind of store.
pub(crate) struct PoolsOf<T: ?Sized>(Mutex<Vec<(Weak<T>, Offload)>>);

impl<T: ?Sized> Default for PoolsOf<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: ?Sized> PoolsOf<T> {
    /// Returns the pool of this store.
    pub(crate) fn of(&self, store: &Arc<T>) -> Offload {
        let mut pools = self.0.lock();
        // The weak reference keeps the allocation, so its address cannot belong to another store.
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
