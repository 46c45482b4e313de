//! A memory store that survives when the server is killed. The server can be killed before and after
//! each of its changes, and in the middle of an append.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
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

pub(super) struct Fragile(pub(super) Arc<MemoryStore>);

struct FragileFile(Arc<dyn OpenFile>);

fn fragile(file: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
    Arc::new(FragileFile(file))
}

impl FileStore for Fragile {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        self.0.root().map(fragile)
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
        let (file, attr) = around(|| self.0.open(caller, at, how))?;
        Ok((fragile(file), attr))
    }

    fn stat(&self, caller: &Caller, at: Source<'_>, follow: bool) -> Result<Attr, Errno> {
        self.0.stat(caller, at, follow)
    }

    fn set_attr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno> {
        around(|| self.0.set_attr(caller, at, follow, set))
    }

    fn access(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<(), Errno> {
        self.0.access(caller, at, mode)
    }

    fn make_directory(&self, caller: &Caller, at: Source<'_>, mode: u32) -> Result<Attr, Errno> {
        around(|| self.0.make_directory(caller, at, mode))
    }

    fn make_node(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno> {
        around(|| self.0.make_node(caller, at, mode, rdev))
    }

    fn symlink(&self, caller: &Caller, at: Source<'_>, target: &[u8]) -> Result<Attr, Errno> {
        around(|| self.0.symlink(caller, at, target))
    }

    fn read_link(&self, caller: &Caller, at: Source<'_>) -> Result<Vec<u8>, Errno> {
        self.0.read_link(caller, at)
    }

    fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno> {
        around(|| self.0.link(caller, at, follow, to))
    }

    fn unlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        directory: bool,
    ) -> Result<Option<Remains>, Errno> {
        around(|| self.0.unlink(caller, at, directory))
    }

    fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<Option<Remains>, Errno> {
        around(|| self.0.rename(caller, at, to, flags))
    }

    fn xattr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        around(|| self.0.xattr(caller, at, follow, action))
    }

    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        around(|| self.0.copy_range(from, offset, to, to_offset, length))
    }

    fn stat_fs(&self, file: &dyn OpenFile) -> Result<StatFs, Errno> {
        self.0.stat_fs(file)
    }

    fn sync(&self, file: &dyn OpenFile) -> Result<(), Errno> {
        self.0.sync(file)
    }

    fn may_block(&self) -> bool {
        false
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

impl OpenFile for FragileFile {
    /// Returns the inner file, because the memory store looks for its own type.
    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }

    fn stat(&self) -> Result<Attr, Errno> {
        self.0.stat()
    }

    fn read(&self, offset: u64, length: usize, wait: bool) -> Result<ReadOutcome, Errno> {
        self.0.read(offset, length, wait)
    }

    fn write(&self, offset: u64, data: &[u8], append: bool) -> Result<(usize, u64), Errno> {
        place();
        if burns() {
            // A kill can end a system call after part of its data was written.
            let _ = self.0.write(offset, &data[..data.len() / 2], append);
            die();
        }
        let result = self.0.write(offset, data, append);
        place();
        result
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        self.0.path()
    }

    fn read_directory(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno> {
        self.0.read_directory(cookie, attributes, listing)
    }

    fn sync(&self, full: bool) -> Result<(), Errno> {
        self.0.sync(full)
    }

    fn allocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        around(|| self.0.allocate(mode, offset, length))
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64, Errno> {
        self.0.seek(offset, whence)
    }

    fn identity(&self) -> (u64, u64) {
        self.0.identity()
    }
}
