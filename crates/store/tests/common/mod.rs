//! A store whose directories become known.

#![allow(dead_code, reason = "not every test program uses everything")]
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use towline_store::directory::{DirectoryStore, requests_arrived};
use towline_store::{Caller, FileStore};
use towline_wire::Errno;

pub(crate) fn caller() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false }
}

/// Returns the inode that a request for `path` finds, as a server would execute it.
pub(crate) fn look(store: &DirectoryStore, path: &str) -> Result<u64, Errno> {
    requests_arrived(Instant::now());
    let root = store.root()?;
    store.stat(&caller(), (&*root, path.as_bytes()), true).map(|attr| attr.inode)
}

/// Returns true if this process watches a directory, as it does each known one.
pub(crate) fn is_watched(directory: &Path) -> bool {
    let watch = format!(" ino:{:x} ", fs::metadata(directory).unwrap().ino());
    fs::read_dir("/proc/self/fdinfo")
        .unwrap()
        .any(|fd| fs::read_to_string(fd.unwrap().path()).is_ok_and(|info| info.contains(&watch)))
}
