//! Tests of the directory back end against the file system of the temporary directory.

mod confinement;
mod data;
mod names;
mod rights;

use super::DirectoryStore;
use crate::{
    Caller, FREED_BYTES_MAX, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, Remains, SetAttr,
    Source, XattrAction,
};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use towline_wire::{Attr, Errno, Timestamp};

const RDWR: u32 = 2;
const WRONLY: u32 = 1;
const CREAT: u32 = 0o100;
const EXCL: u32 = 0o200;
const TRUNC: u32 = 0o1000;
const NONBLOCK: u32 = 0o4000;
const DIRECT: u32 = 0o40_000;
const DIRECTORY: u32 = 0o200_000;
const NOFOLLOW: u32 = 0o400_000;
const PATH: u32 = 0o10_000_000;
const TMPFILE: u32 = 0o20_200_000;

/// A store with the root `export`, and `outside/secret` beside it.
struct Fixture {
    temporary: TempDir,
    store: Arc<DirectoryStore>,
    root: Arc<dyn OpenFile>,
    caller: Caller,
}

impl Fixture {
    fn new() -> Self {
        Self::with(false, |_| {})
    }

    fn with(read_only: bool, prepare: impl Fn(&PathBuf)) -> Self {
        rustix::process::umask(rustix::fs::Mode::empty());
        let temporary = TempDir::new().unwrap();
        fs::set_permissions(temporary.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(temporary.path().join("outside")).unwrap();
        fs::write(temporary.path().join("outside/secret"), "secret").unwrap();
        let root = temporary.path().join("export");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        prepare(&root);
        let store = DirectoryStore::new(&root, read_only).unwrap();
        let root = store.root().unwrap();
        let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
        Self { temporary, store, root, caller }
    }

    fn local(&self, path: &str) -> PathBuf {
        self.temporary.path().join("export").join(path)
    }

    fn open_at(
        &self,
        base: &Arc<dyn OpenFile>,
        path: &[u8],
        flags: u32,
    ) -> Result<Arc<dyn OpenFile>, Errno> {
        let how = OpenHow { flags, mode: 0o644 };
        self.store.open(&self.caller, (&**base, path), how).map(|(file, _)| file)
    }

    fn open(&self, path: &[u8], flags: u32) -> Result<Arc<dyn OpenFile>, Errno> {
        self.open_at(&self.root, path, flags)
    }

    fn fails(&self, path: &[u8], flags: u32) -> Errno {
        self.open(path, flags).err().expect("opening succeeded")
    }

    fn stat(&self, path: &[u8], follow: bool) -> Result<Attr, Errno> {
        self.store.stat(&self.caller, (&*self.root, path), follow)
    }

    fn at<'a>(&'a self, path: &'a [u8]) -> (&'a dyn OpenFile, &'a [u8]) {
        (&*self.root, path)
    }

    fn user(uid: u32, groups: &[u32]) -> Caller {
        Caller { uid, gid: uid, groups: groups.into(), enforce: true }
    }
}

fn read(file: &Arc<dyn OpenFile>, offset: u64, length: usize) -> Vec<u8> {
    let outcome = match file.read(offset, length, false).unwrap() {
        ReadOutcome::WouldBlock => file.read(offset, length, true).unwrap(),
        ready => ready,
    };
    match outcome {
        ReadOutcome::Ready(bytes) => bytes.to_vec().unwrap(),
        ReadOutcome::WouldBlock => panic!("a waiting read would wait"),
    }
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED {test}: needs root");
    }
    root
}

/// Cookie, inode, type, name and attributes, as listed.
type Seen = (u64, u64, u8, Vec<u8>, Option<Attr>);

#[derive(Default)]
struct Names {
    seen: Vec<Seen>,
    room: usize,
    xattrs: bool,
}

impl Listing for Names {
    fn wants_xattrs(&self) -> bool {
        self.xattrs
    }

    fn entry(
        &mut self,
        cookie: u64,
        inode: u64,
        kind: u8,
        name: &[u8],
        attr: Option<Attr>,
    ) -> bool {
        if self.seen.len() == self.room {
            return false;
        }
        self.seen.push((cookie, inode, kind, name.to_vec(), attr));
        true
    }
}
