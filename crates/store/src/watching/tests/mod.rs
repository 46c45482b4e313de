//! Tests of watches on every store.

/// Runs each case on each store.
macro_rules! over_stores {
    ($($case:ident),* $(,)?) => {
        mod directory {
            $(#[test] fn $case() { super::$case(&super::Stage::directory()) })*
        }

        mod memory {
            $(#[test] fn $case() { super::$case(&super::Stage::memory()) })*
        }
    };
}

mod cases;
mod details;
mod model;
mod record;

use crate::directory::DirectoryStore;
use crate::memory::MemoryStore;
use crate::{Caller, FileStore, OpenFile, OpenHow, SetAttr, Watch};
use record::Record;
use std::sync::Arc;
use tempfile::TempDir;
use towline_wire::Errno;
use towline_wire::request::open_flag::{self, of_this_machine};

const O_PATH: u32 = open_flag::PATH;
const O_DIRECTORY: u32 = open_flag::DIRECTORY;
const O_NOFOLLOW: u32 = open_flag::NO_FOLLOW;

/// A store to watch, and the caller that watches.
struct Stage {
    store: Arc<dyn FileStore>,
    root: Arc<dyn OpenFile>,
    caller: Caller,
    _temporary: Option<TempDir>,
}

impl Stage {
    fn of(store: Arc<dyn FileStore>, temporary: Option<TempDir>) -> Self {
        let root = store.root().unwrap();
        let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
        Self { store, root, caller, _temporary: temporary }
    }

    /// Creates a store of a directory of the local file system.
    fn directory() -> Self {
        rustix::process::umask(rustix::fs::Mode::empty());
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path().join("root");
        std::fs::create_dir(&root).unwrap();
        Self::of(DirectoryStore::new(&root, false).unwrap(), Some(temporary))
    }

    fn memory() -> Self {
        Self::of(MemoryStore::new("test", 64 << 20).unwrap(), None)
    }

    fn at<'a>(&'a self, path: &'a str) -> (&'a dyn OpenFile, &'a [u8]) {
        (&*self.root, path.as_bytes())
    }

    fn open(&self, path: &str, flags: u32) -> Result<Arc<dyn OpenFile>, Errno> {
        let how = OpenHow { flags, mode: 0o644 };
        self.store.open(&self.caller, self.at(path), how).map(|(file, _)| file)
    }

    /// Opens a reference, which is enough to watch.
    fn refer(&self, path: &str) -> Arc<dyn OpenFile> {
        self.open(path, O_PATH | O_NOFOLLOW).unwrap()
    }

    fn create(&self, path: &str) -> Arc<dyn OpenFile> {
        self.open(path, of_this_machine(libc::O_CREAT | libc::O_RDWR)).unwrap()
    }

    fn mkdir(&self, path: &str) {
        self.store.make_directory(&self.caller, self.at(path), 0o755).unwrap();
    }

    fn symlink(&self, target: &str, path: &str) {
        self.store.symlink(&self.caller, self.at(path), target.as_bytes()).unwrap();
    }

    fn link(&self, old: &str, new: &str) {
        self.store.link(&self.caller, self.at(old), false, self.at(new)).unwrap();
    }

    fn unlink(&self, path: &str) {
        self.store.unlink(&self.caller, self.at(path), false).unwrap();
    }

    fn rmdir(&self, path: &str) {
        self.store.unlink(&self.caller, self.at(path), true).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        self.store.rename(&self.caller, self.at(from), self.at(to), 0).unwrap();
    }

    fn chmod(&self, path: &str, mode: u32) {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.store.set_attr(&self.caller, self.at(path), true, &set).unwrap();
    }

    /// Watches the file that a path leads to; the watch has the only handle.
    fn watch(&self, path: &str, mask: u32) -> (Arc<Record>, Watching) {
        let record = Record::new();
        let watching = self.watch_by(path, mask, &record);
        (record, watching)
    }

    fn watch_by(&self, path: &str, mask: u32, record: &Arc<Record>) -> Watching {
        let file = if path.is_empty() { self.root.clone() } else { self.refer(path) };
        let watch = file.watch(mask, record.clone()).unwrap();
        Watching { _watch: watch, _file: file }
    }

    /// Waits until all earlier events have been reported to all witnesses.
    fn settle(&self) {
        let record = Record::new();
        let watch = self.root.watch(towline_wire::event::DELETE, record.clone()).unwrap();
        self.symlink("nowhere", "settled");
        self.unlink("settled");
        record.wait_for(|seen| seen.iter().any(|one| one.name == b"settled"));
        drop(watch);
    }
}

/// A watch with its handle.
struct Watching {
    _watch: Box<dyn Watch>,
    _file: Arc<dyn OpenFile>,
}
