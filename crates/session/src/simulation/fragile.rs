//! A memory store that survives when the server is killed. The server can be killed before and after
//! each of its changes, and in the middle of an append.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_store::memory::MemoryStore;
use towline_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, Remains, SetAttr, Source,
    XattrAction,
};
use towline_wire::{Attr, Errno, StatFs};

/// The panic payload with which a killed server unwinds.
pub(crate) struct Killed;

thread_local! {
    /// Kill points to pass until the server is killed.
    static FUSE: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Sets the number of kill points to pass until the server is killed; `None`: never.
pub(crate) fn light(places: Option<u32>) {
    FUSE.set(places);
}

/// True when the server has to be killed here.
pub(crate) fn burns() -> bool {
    let left = FUSE.get();
    FUSE.set(left.map(|left| left.saturating_sub(1)));
    left == Some(0)
}

/// Kills the server.
pub(crate) fn die() -> ! {
    light(None);
    std::panic::resume_unwind(Box::new(Killed))
}

fn place() {
    if burns() {
        die();
    }
}

/// Makes a change, with kill points before and after it.
fn around<T>(change: impl FnOnce() -> T) -> T {
    place();
    let result = change();
    place();
    result
}

pub(crate) struct Fragile {
    pub(crate) inner: Arc<MemoryStore>,
    /// It may hang. If true, whoever syncs or closes a file next is told that it could not be stored.
    pub(crate) unstored: Option<Arc<AtomicBool>>,
}

struct FragileFile {
    inner: Arc<dyn OpenFile>,
    unstored: Option<Arc<AtomicBool>>,
}

impl Fragile {
    fn fragile(&self, inner: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
        Arc::new(FragileFile { inner, unstored: self.unstored.clone() })
    }
}

impl FragileFile {
    fn is_stored(&self) -> Result<(), Errno> {
        let is_lost = |unstored: &Arc<AtomicBool>| unstored.swap(false, Ordering::Relaxed);
        if self.unstored.as_ref().is_some_and(is_lost) { Err(Errno::ENOSPC) } else { Ok(()) }
    }
}

impl FileStore for Fragile {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        self.inner.root().map(|file| self.fragile(file))
    }

    fn below(&self, _: &Caller, _: &[u8]) -> Result<Arc<dyn FileStore>, Errno> {
        unreachable!("clients of the simulation attach whole exports")
    }

    fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let (file, attr) = around(|| self.inner.open(caller, at, how))?;
        Ok((self.fragile(file), attr))
    }

    fn stat(&self, caller: &Caller, at: Source<'_>, follow: bool) -> Result<Attr, Errno> {
        self.inner.stat(caller, at, follow)
    }

    fn set_attr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno> {
        around(|| self.inner.set_attr(caller, at, follow, set))
    }

    fn access(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<(), Errno> {
        self.inner.access(caller, at, mode)
    }

    fn make_directory(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<Attr, Errno> {
        around(|| self.inner.make_directory(caller, at, mode))
    }

    fn make_node(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno> {
        around(|| self.inner.make_node(caller, at, mode, rdev))
    }

    fn symlink(&self, caller: &Caller, at: Source<'_>, target: &[u8]) -> Result<Attr, Errno> {
        around(|| self.inner.symlink(caller, at, target))
    }

    fn read_link(&self, caller: &Caller, at: Source<'_>) -> Result<Vec<u8>, Errno> {
        self.inner.read_link(caller, at)
    }

    fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno> {
        around(|| self.inner.link(caller, at, follow, to))
    }

    fn unlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        directory: bool,
    ) -> Result<Option<Remains>, Errno> {
        around(|| self.inner.unlink(caller, at, directory))
    }

    fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<Option<Remains>, Errno> {
        around(|| self.inner.rename(caller, at, to, flags))
    }

    fn xattr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        around(|| self.inner.xattr(caller, at, follow, action))
    }

    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        around(|| self.inner.copy_range(from, offset, to, to_offset, length))
    }

    fn stat_fs(&self, file: &dyn OpenFile) -> Result<StatFs, Errno> {
        self.inner.stat_fs(file)
    }

    fn sync(&self, file: &dyn OpenFile) -> Result<(), Errno> {
        self.inner.sync(file)
    }

    fn may_block(&self) -> bool {
        false
    }

    fn may_hang(&self) -> bool {
        self.unstored.is_some()
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

impl OpenFile for FragileFile {
    /// Returns the inner file, because the memory store looks for its own type.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn stat(&self) -> Result<Attr, Errno> {
        self.inner.stat()
    }

    fn read(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno> {
        self.inner.read(offset, length, wait)
    }

    fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<(usize, u64), Errno> {
        place();
        if burns() {
            // A kill can end a system call after part of its data was written.
            let _ = self.inner.write(offset, &data[..data.len() / 2], append);
            die();
        }
        let result = self.inner.write(offset, data, append);
        place();
        result
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        self.inner.path()
    }

    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno> {
        self.inner.read_directory(cookie, attributes, listing)
    }

    fn sync(&self, full: bool) -> Result<(), Errno> {
        self.is_stored().and_then(|()| self.inner.sync(full))
    }

    fn settle(&self) -> Result<(), Errno> {
        self.is_stored()
    }

    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        around(|| self.inner.allocate(mode, offset, length))
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno> {
        self.inner.seek(offset, whence)
    }

    fn identity(&self) -> (u64, u64) {
        self.inner.identity()
    }
}
