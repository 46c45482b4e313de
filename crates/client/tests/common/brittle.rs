//! A faulty back end, and peers of a server that uses it.

use super::{Raw, hello_message, request};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use towline_mem::{Aggregate, Segment};
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, OwnStore};
use towline_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, Remains, SetAttr, Source, Watch,
    Witness, XattrAction,
};
use towline_wire::reply::parse_results;
use towline_wire::request::open_flag;
use towline_wire::{Attr, Errno, Hello, Reply, Request, StatFs, Welcome};

/// A directory in which every name is a file. Calls on `sound` work, all others panic.
#[derive(Default)]
pub(crate) struct Brittle {
    /// All calls are made by threads that may wait.
    pub(crate) may_hang: bool,
    pub(crate) witnesses: Witnesses,
    pub(crate) gate: Arc<Gate>,
}

/// Who asks for `stuck`, writes to it or syncs it waits as long as this is locked.
#[derive(Default)]
pub(crate) struct Gate {
    pub(crate) lock: Mutex<()>,
    pub(crate) knocks: AtomicUsize,
    /// Called by everyone who passes.
    pub(crate) bell: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Gate {
    fn pass(&self) {
        self.knocks.fetch_add(1, Ordering::Relaxed);
        drop(self.lock.lock().unwrap());
        if let Some(bell) = &*self.bell.lock().unwrap() {
            bell();
        }
    }
}

/// The watchers of a file.
pub(crate) type Witnesses = Arc<Mutex<Vec<Arc<dyn Witness>>>>;

struct Watching;

impl Watch for Watching {}

struct Node {
    sound: bool,
    witnesses: Witnesses,
    /// Closing it panics, outside any request.
    clings: bool,
    /// It promises contents that cannot be sent.
    torn: bool,
    /// What was written could not be stored, which is reported once.
    unstored: AtomicBool,
    /// In the way of those who ask for its attributes, write to it or sync it.
    gate: Option<Arc<Gate>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        careful(!self.clings);
    }
}

fn attr() -> Attr {
    Attr { inode: 1, mode: 0o100_644, size: 7, ..Attr::default() }
}

fn large() -> Attr {
    Attr { size: 1 << 30, blocks: 1 << 21, ..attr() }
}

fn careful(sound: bool) {
    assert!(sound, "a mistake");
}

impl Brittle {
    /// What is left of `large`.
    fn remains(&self, path: &[u8]) -> Option<Remains> {
        struct Large(Arc<Gate>);

        impl Drop for Large {
            fn drop(&mut self) {
                self.0.pass();
            }
        }

        (path == b"large").then(|| Box::new(Large(self.gate.clone())) as Remains)
    }
}

impl FileStore for Brittle {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        let unstored = AtomicBool::new(false);
        let witnesses = self.witnesses.clone();
        let (sound, clings, torn, gate) = (true, false, false, None);
        Ok(Arc::new(Node { sound, witnesses, clings, torn, unstored, gate }))
    }

    fn below(&self, _: &Caller, _: &[u8]) -> Result<Arc<dyn FileStore>, Errno> {
        Err(Errno::ENOSYS)
    }

    fn open(
        &self,
        _: &Caller,
        (_, path): Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let is_large = path == b"large";
        if is_large && how.flags & open_flag::TRUNCATE != 0 {
            self.gate.pass();
        }
        let torn = path == b"torn";
        let unstored = AtomicBool::new(path == b"unstored");
        let gate = (path == b"stuck").then(|| self.gate.clone());
        let sound = torn || is_large || gate.is_some() || path == b"sound" || path == b"unstored";
        let (witnesses, clings) = (self.witnesses.clone(), path == b"clinging");
        Ok((Arc::new(Node { sound, witnesses, clings, torn, unstored, gate }), attr()))
    }

    fn stat(&self, _: &Caller, (_, path): Source<'_>, _: bool) -> Result<Attr, Errno> {
        if path == b"stuck" {
            self.gate.pass();
            return Ok(attr());
        }
        if path == b"large" {
            return Ok(large());
        }
        careful(path == b"sound");
        Ok(attr())
    }

    fn set_attr(
        &self,
        _: &Caller,
        (_, path): Source<'_>,
        _: bool,
        _: &SetAttr,
    ) -> Result<Attr, Errno> {
        if path == b"large" {
            self.gate.pass();
        }
        Ok(attr())
    }

    fn access(&self, _: &Caller, _: Source<'_>, _: u32) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    fn make_directory(&self, _: &Caller, (_, path): Source<'_>, _: u32) -> Result<Attr, Errno> {
        careful(path == b"sound");
        Ok(attr())
    }

    fn make_node(&self, _: &Caller, _: Source<'_>, _: u32, _: u64) -> Result<Attr, Errno> {
        Err(Errno::ENOSYS)
    }

    fn symlink(&self, _: &Caller, _: Source<'_>, _: &[u8]) -> Result<Attr, Errno> {
        Err(Errno::ENOSYS)
    }

    fn read_link(&self, _: &Caller, _: Source<'_>) -> Result<Vec<u8>, Errno> {
        Err(Errno::ENOSYS)
    }

    fn link(&self, _: &Caller, _: Source<'_>, _: bool, _: Source<'_>) -> Result<Attr, Errno> {
        Err(Errno::ENOSYS)
    }

    fn unlink(&self, _: &Caller, (_, path): Source<'_>, _: bool) -> Result<Option<Remains>, Errno> {
        Ok(self.remains(path))
    }

    fn rename(
        &self,
        _: &Caller,
        _: Source<'_>,
        (_, path): Source<'_>,
        _: u32,
    ) -> Result<Option<Remains>, Errno> {
        Ok(self.remains(path))
    }

    fn xattr(
        &self,
        _: &Caller,
        _: Source<'_>,
        _: bool,
        _: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        Err(Errno::ENOSYS)
    }

    fn copy_range(
        &self,
        _: &dyn OpenFile,
        _: u64,
        _: &dyn OpenFile,
        _: u64,
        _: u64,
    ) -> Result<u64, Errno> {
        Err(Errno::ENOSYS)
    }

    fn stat_fs(&self, _: &dyn OpenFile) -> Result<StatFs, Errno> {
        Err(Errno::ENOSYS)
    }

    fn sync(&self, _: &dyn OpenFile) -> Result<(), Errno> {
        Ok(())
    }

    fn may_block(&self) -> bool {
        true
    }

    fn may_hang(&self) -> bool {
        self.may_hang
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
        self.gate.iter().for_each(|gate| gate.pass());
        Ok(attr())
    }

    fn read(&self, _: u64, _: usize, wait: bool) -> Result<ReadOutcome, Errno> {
        if !wait {
            return Ok(ReadOutcome::WouldBlock);
        }
        careful(self.sound);
        if self.torn {
            let unreadable = std::fs::File::open("/").map_err(|error| Errno::of(&error))?;
            let mut pages = Aggregate::new();
            pages.append(Segment::File(Arc::new(unreadable.into())), 0, 7);
            return Ok(ReadOutcome::Ready(pages));
        }
        Ok(ReadOutcome::Ready(Aggregate::from_vec(b"content".to_vec())))
    }

    fn write(&self, offset: u64, data: &[u8], _: bool) -> Result<(usize, u64), Errno> {
        careful(self.sound);
        self.gate.iter().for_each(|gate| gate.pass());
        Ok((data.len(), offset))
    }

    fn read_directory(&self, _: u64, _: bool, _: &mut dyn Listing) -> Result<bool, Errno> {
        Err(Errno::ENOTDIR)
    }

    fn sync(&self, _: bool) -> Result<(), Errno> {
        careful(self.sound);
        self.gate.iter().for_each(|gate| gate.pass());
        if self.unstored.swap(false, Ordering::Relaxed) { Err(Errno::EIO) } else { Ok(()) }
    }

    fn settle(&self) -> Result<(), Errno> {
        if self.unstored.swap(false, Ordering::Relaxed) { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    fn allocate(&self, _: u32, _: u64, _: u64) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    fn seek(&self, _: u64, _: u32) -> Result<u64, Errno> {
        Err(Errno::EINVAL)
    }

    fn watch(&self, _: u32, witness: Arc<dyn Witness>) -> Result<Box<dyn Watch>, Errno> {
        careful(self.sound);
        self.witnesses.lock().unwrap().push(witness);
        Ok(Box::new(Watching))
    }

    fn path(&self) -> Result<Vec<u8>, Errno> {
        Err(Errno::ENOTDIR)
    }

    fn identity(&self) -> (u64, u64) {
        (1, 1)
    }
}

pub(crate) fn config(may_hang: bool, listen: Address, cores: usize) -> Config {
    config_of(Brittle { may_hang, ..Brittle::default() }, listen, cores)
}

pub(crate) fn config_of(store: Brittle, listen: Address, cores: usize) -> Config {
    let store = OwnStore(Arc::new(store) as Arc<dyn FileStore>);
    let export = Export::new("b", ExportKind::Own(store));
    Config { exports: vec![export], listen: vec![listen], cores, ..Config::default() }
}

/// A peer of a server with two cores that says hello like this, and whose session lives on core `core`.
pub(crate) fn peer_on(core: u64, port: u16, hello: &Hello) -> Raw {
    greeted_on(core, port, hello).0
}

/// As [`peer_on`], with the server's answer.
pub(crate) fn greeted_on(core: u64, port: u16, hello: &Hello) -> (Raw, Welcome) {
    loop {
        let mut peer = Raw::connect(port);
        peer.send(&hello_message(hello));
        let (_, body) = peer.receive().unwrap();
        let welcome = Welcome::parse(&body).unwrap();
        // Connections are distributed to the cores in turn.
        if welcome.session % 2 == core {
            return (peer, welcome);
        }
    }
}

/// Sends a request and returns the error of its last operation, or what that opened.
pub(crate) fn ask(peer: &mut Raw, sequence: u32, requests: &[Request<'_>]) -> Result<u64, Errno> {
    peer.send(&request(0, sequence, requests, 0));
    answer(peer)
}

pub(crate) fn answer(peer: &mut Raw) -> Result<u64, Errno> {
    let (_, body) = peer.receive().unwrap();
    match parse_results(&body).unwrap().last() {
        Some(Reply::Opened { handle, .. }) => Ok(*handle),
        Some(Reply::Failed { errno }) => Err(Errno(*errno)),
        _ => Ok(0),
    }
}
