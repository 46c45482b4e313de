//! A pool of threads that may block for each store, whatever parts of it clients use, and each disk. A store
//! that hangs occupies only its own threads.

use crate::offload::Offload;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use towline_block::Disk;
use towline_store::FileStore;

/// All pools.
#[derive(Default)]
pub(crate) struct Pools {
    files: PoolsOf<dyn FileStore>,
    pub(crate) disks: PoolsOf<Disk>,
}

impl Pools {
    /// Returns the pool of this store or of that whose part it is: clients cannot multiply the threads by using
    /// many directories.
    pub(crate) fn of_files(&self, store: &Arc<dyn FileStore>) -> Offload {
        self.files.of(store.whole().as_ref().unwrap_or(store))
    }
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
        let (pools, whole, other) = (Pools::default(), store(), store());
        let part = whole.below(&own_caller(), b"a").unwrap();
        let below = part.below(&own_caller(), b"b").unwrap();
        let pool = pools.of_files(&whole);
        assert!(pools.of_files(&part).is(&pool) && pools.of_files(&below).is(&pool));
        assert!(!pools.of_files(&other).is(&pool));
    }
}
