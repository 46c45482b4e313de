//! A pool of threads that may block for each store, whatever parts of it clients use, and each disk. A store
//! that hangs occupies only its own threads.

use crate::offload::{Offload, THREADS_MAX};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use towline_block::Disk;
use towline_store::FileStore;

/// All pools.
pub(crate) struct Pools {
    files: PoolsOf<dyn FileStore>,
    listings: PoolsOf<dyn FileStore>,
    pub(crate) disks: PoolsOf<Disk>,
    /// For the user database.
    pub(crate) users: Offload,
}

/// Maximum number of threads that look up groups at once. A directory service that is down keeps all of them waiting,
/// and more would, too.
const USERS_THREADS_MAX: usize = 4;

impl Pools {
    /// Creates the pools of a server with so many cores. What keeps a thread busy all the time gets no more threads than
    /// there are other cores.
    pub(crate) fn new(cores: usize) -> Self {
        let listings = PoolsOf::new(cores.saturating_sub(1).clamp(1, THREADS_MAX));
        let (files, disks) = (PoolsOf::new(THREADS_MAX), PoolsOf::new(THREADS_MAX));
        Self { files, listings, disks, users: Offload::new(USERS_THREADS_MAX) }
    }

    /// Returns the pool of this store or of that whose part it is: clients cannot multiply the threads by using
    /// many directories.
    pub(crate) fn of_files(&self, store: &Arc<dyn FileStore>) -> Offload {
        self.files.of(store.whole().as_ref().unwrap_or(store))
    }

    /// The same for listings that help a core.
    pub(crate) fn of_listings(&self, store: &Arc<dyn FileStore>) -> Offload {
        self.listings.of(store.whole().as_ref().unwrap_or(store))
    }
}

/// The pools for one kind of store.
pub(crate) struct PoolsOf<T: ?Sized> {
    threads_max: usize,
    pools: Mutex<Vec<(Weak<T>, Offload)>>,
}

impl<T: ?Sized> PoolsOf<T> {
    fn new(threads_max: usize) -> Self {
        Self { threads_max, pools: Mutex::default() }
    }

    /// Returns the pool of this store.
    pub(crate) fn of(&self, store: &Arc<T>) -> Offload {
        let mut pools = self.pools.lock();
        // The weak reference keeps the allocation, so its address cannot belong to another store.
        let same = |known: &Weak<T>| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(store));
        if let Some((_, pool)) = pools.iter().find(|(known, _)| same(known)) {
            return pool.clone();
        }
        pools.retain(|(known, _)| known.strong_count() > 0);
        let pool = Offload::new(self.threads_max);
        pools.push((Arc::downgrade(store), pool.clone()));
        pool
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::own_caller;
    use towline_store::directory::DirectoryStore;

    #[test]
    fn parts_of_a_store_share_its_threads() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("a/b")).unwrap();
        let store = || DirectoryStore::new(directory.path(), false).unwrap() as Arc<dyn FileStore>;
        let (pools, whole, other) = (Pools::new(2), store(), store());
        let part = whole.below(&own_caller(), b"a").unwrap();
        let below = part.below(&own_caller(), b"b").unwrap();
        let pool = pools.of_files(&whole);
        assert!(pools.of_files(&part).is(&pool) && pools.of_files(&below).is(&pool));
        assert!(!pools.of_files(&other).is(&pool));
    }
}
