//! A store whose files count as unchanged for long, unless a test changes them, and which counts what is read.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use towline_mem::Aggregate;
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, OwnStore, Server};
use towline_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, Remains, SetAttr, Source,
    XattrAction,
};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, attr_flag};
use towline_wire::{Attr, Errno, StatFs};

/// Number of changes, and contents.
type Contents = (u64, Arc<Vec<u8>>);

/// The name of a file that takes what is written to it, and says when it is closed that there was no space.
pub(crate) const FULL: &str = "full";

/// A directory of files that can only be read, but for [`FULL`].
#[derive(Default)]
pub(crate) struct Quiet {
    files: Mutex<BTreeMap<Vec<u8>, Contents>>,
    read: AtomicU64,
}

/// One of its files, or the directory.
struct Node {
    store: Arc<Quiet>,
    name: Option<Vec<u8>>,
}

/// The store as it is served.
struct Served(Arc<Quiet>);

impl Quiet {
    /// Serves it on a Unix socket, as the export `q`.
    pub(crate) fn serve(self: &Arc<Self>, socket: &Path) -> Server {
        let store = OwnStore(Arc::new(Served(Arc::clone(self))) as Arc<dyn FileStore>);
        let exports = vec![Export::new("q", ExportKind::Own(store))];
        let listen = vec![Address::Unix(socket.to_owned())];
        Server::start(&Config { exports, listen, cores: 1, ..Config::default() }).unwrap()
    }

    /// Makes or changes a file.
    pub(crate) fn put(&self, name: &str, contents: &[u8]) {
        let mut files = self.files.lock().unwrap();
        let file = files.entry(name.into()).or_default();
        *file = (file.0 + 1, Arc::new(contents.to_vec()));
    }

    /// Returns how many bytes have been read since the last question.
    pub(crate) fn read(&self) -> u64 {
        self.read.swap(0, Ordering::Relaxed)
    }

    fn attr(&self, name: Option<&[u8]>) -> Result<Attr, Errno> {
        let flags = attr_flag::QUIET;
        let Some(name) = name else {
            return Ok(Attr {
                inode: 1,
                mode: TYPE_DIRECTORY | 0o755,
                links: 2,
                flags,
                ..Attr::default()
            });
        };
        let files = self.files.lock().unwrap();
        let place = files.keys().position(|other| other == name).ok_or(Errno::ENOENT)?;
        let (change, contents) = &files[name];
        let flags = flags | if name == FULL.as_bytes() { attr_flag::SETTLES } else { 0 };
        Ok(Attr {
            inode: 2 + place as u64,
            size: contents.len() as u64,
            change: *change,
            mode: TYPE_FILE | 0o644,
            links: 1,
            flags,
            ..Attr::default()
        })
    }
}

impl Node {
    fn is_full(&self) -> bool {
        self.name.as_deref() == Some(FULL.as_bytes())
    }
}

impl Served {
    fn name<'a>(&self, (base, path): Source<'a>) -> Option<&'a [u8]> {
        let base = base.as_any().downcast_ref::<Node>().unwrap();
        match path {
            b"" => base.name.as_deref(),
            b"." => None,
            path => Some(path),
        }
    }
}

impl FileStore for Served {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        Ok(Arc::new(Node { store: Arc::clone(&self.0), name: None }))
    }

    fn below(&self, _: &Caller, _: &[u8]) -> Result<Arc<dyn FileStore>, Errno> {
        Err(Errno::ENOSYS)
    }

    fn open(
        &self,
        _: &Caller,
        at: Source<'_>,
        _: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let name = self.name(at);
        let attr = self.0.attr(name)?;
        Ok((Arc::new(Node { store: Arc::clone(&self.0), name: name.map(Vec::from) }), attr))
    }

    fn stat(&self, _: &Caller, at: Source<'_>, _: bool) -> Result<Attr, Errno> {
        self.0.attr(self.name(at))
    }

    fn set_attr(&self, _: &Caller, _: Source<'_>, _: bool, _: &SetAttr) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    fn access(&self, _: &Caller, _: Source<'_>, _: u32) -> Result<(), Errno> {
        Ok(())
    }

    fn make_directory(&self, _: &Caller, _: Source<'_>, _: u32) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    fn make_node(&self, _: &Caller, _: Source<'_>, _: u32, _: u64) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    fn symlink(&self, _: &Caller, _: Source<'_>, _: &[u8]) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    fn read_link(&self, _: &Caller, _: Source<'_>) -> Result<Vec<u8>, Errno> {
        Err(Errno::EINVAL)
    }

    fn link(&self, _: &Caller, _: Source<'_>, _: bool, _: Source<'_>) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    fn unlink(&self, _: &Caller, _: Source<'_>, _: bool) -> Result<Option<Remains>, Errno> {
        Err(Errno::EROFS)
    }

    fn rename(
        &self,
        _: &Caller,
        _: Source<'_>,
        _: Source<'_>,
        _: u32,
    ) -> Result<Option<Remains>, Errno> {
        Err(Errno::EROFS)
    }

    fn xattr(
        &self,
        _: &Caller,
        _: Source<'_>,
        _: bool,
        _: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn copy_range(
        &self,
        _: &dyn OpenFile,
        _: u64,
        _: &dyn OpenFile,
        _: u64,
        _: u64,
    ) -> Result<u64, Errno> {
        Err(Errno::EXDEV)
    }

    fn stat_fs(&self, _: &dyn OpenFile) -> Result<StatFs, Errno> {
        Err(Errno::ENOSYS)
    }

    fn sync(&self, _: &dyn OpenFile) -> Result<(), Errno> {
        Ok(())
    }

    fn may_block(&self) -> bool {
        false
    }

    fn survives_restart(&self) -> bool {
        false
    }
}

impl OpenFile for Node {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn stat(&self) -> Result<Attr, Errno> {
        self.store.attr(self.name.as_deref())
    }

    fn read(&self, offset: u64, length: usize, _: bool) -> Result<ReadOutcome, Errno> {
        let files = self.store.files.lock().unwrap();
        let contents = &files[self.name.as_deref().ok_or(Errno::EISDIR)?].1;
        let rest = &contents[contents.len().min(offset as usize)..];
        let part = rest[..rest.len().min(length)].to_vec();
        self.store.read.fetch_add(part.len() as u64, Ordering::Relaxed);
        Ok(ReadOutcome::Ready(Aggregate::from_vec(part)))
    }

    fn write(&self, offset: u64, data: &[u8], _: bool) -> Result<(usize, u64), Errno> {
        if self.is_full() { Ok((data.len(), offset)) } else { Err(Errno::EROFS) }
    }

    fn settle(&self) -> Result<(), Errno> {
        if self.is_full() { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    fn read_directory(&self, _: u64, _: bool, _: &mut dyn Listing) -> Result<bool, Errno> {
        Err(Errno::ENOTDIR)
    }

    fn sync(&self, _: bool) -> Result<(), Errno> {
        Ok(())
    }

    fn allocate(&self, _: u32, _: u64, _: u64) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn seek(&self, _: u64, _: u32) -> Result<u64, Errno> {
        Err(Errno::EINVAL)
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        Ok(self.name.clone().unwrap_or_default())
    }

    fn identity(&self) -> (u64, u64) {
        (1, self.stat().map_or(0, |attr| attr.inode))
    }
}
