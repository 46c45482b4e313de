//! What a server is told to do.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use towline_block::{Delivery, RateLimit, Shape};
use towline_net::address::Address;
use towline_store::block::CacheMode;
use towline_store::{BlockStore, FileStore};
use towline_wire::limits::{CLIENT_STALL_SECONDS, FRAGMENT_BYTES_MAX, LOCK_GRACE_SECONDS};

/// Most threads that serve.
pub const CORES_MAX: usize = 256;

/// Bytes of buffers that each core has at least, whatever [`Config::buffer_limit`] says.
pub const CORE_BUFFER_BYTES_MIN: u64 = 2 * FRAGMENT_BYTES_MAX as u64;

/// A server's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What to export.
    pub exports: Vec<Export>,
    /// Disks to export. One is the default of NBD, with the empty name: the first that says so, else the first.
    pub disks: Vec<DiskExport>,
    /// Where to listen.
    pub listen: Vec<Address>,
    /// Where to listen for NBD clients.
    pub nbd: Vec<Address>,
    /// Threads that serve, each with its own event loop, up to [`CORES_MAX`].
    pub cores: usize,
    /// Bytes of all buffers for data on its way, whatever the number of clients.
    pub buffer_limit: u64,
    /// Longest fragment of a disk's read, from 4096 bytes up to 256 KiB.
    pub fragment_bytes: u64,
    /// Event loop to use.
    pub engine: EngineWish,
    /// How long a core looks for more before it sleeps, where that was not in vain lately; zero:
    /// it sleeps at once.
    pub spin: Duration,
    /// Act as the user that a client names, not as the user who runs the server.
    pub identity: bool,
    /// With `identity`: let uid 0 of clients be uid 0 here.
    pub no_root_squash: bool,
    /// Listen beyond loopback although nothing is encrypted or authenticated yet.
    pub insecure: bool,
    /// Directory where sessions are kept, so that they go on after the server was killed.
    pub state: Option<PathBuf>,
    /// How long a client of NBD may take to choose its disk.
    pub nbd_handshake: Duration,
    /// With `state`: how long after a start new locks wait for clients that had locks before.
    pub lock_grace: Duration,
}

/// Which event loop a server uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineWish {
    /// io_uring, or epoll where it is forbidden.
    #[default]
    Automatic,
    /// io_uring or no start.
    Uring,
    /// epoll.
    Epoll,
}

/// One export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Name in URLs; no slash, not empty.
    pub name: String,
    /// What it is.
    pub kind: ExportKind,
    /// Refuse all changes.
    pub read_only: bool,
    /// How much each client may ask of it.
    pub limit: RateLimit,
}

impl Export {
    /// An export without options.
    #[must_use]
    pub fn new(name: &str, kind: ExportKind) -> Self {
        Self { name: name.to_owned(), kind, read_only: false, limit: RateLimit::default() }
    }
}

/// What an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportKind {
    /// A directory of this machine.
    Directory(PathBuf),
    /// A file system in memory, of at most so many bytes.
    Memory(u64),
    /// A back end of the caller's own.
    Own(OwnStore<dyn FileStore>),
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskExport {
    /// Its name; not empty.
    pub name: String,
    /// What it is.
    pub kind: DiskKind,
    /// Refuse all changes.
    pub read_only: bool,
    /// How its reads are delivered.
    pub delivery: Delivery,
    /// How much each client may ask of it.
    pub limit: RateLimit,
    /// What clients are told in place of what the back end says.
    pub shape: Shape,
    /// It is the one with the empty name, too.
    pub is_default: bool,
}

impl DiskExport {
    /// A disk without options.
    #[must_use]
    pub fn new(name: &str, kind: DiskKind) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            read_only: false,
            delivery: Delivery::default(),
            limit: RateLimit::default(),
            shape: Shape::default(),
            is_default: false,
        }
    }
}

/// What a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskKind {
    /// A file or block device.
    File(PathBuf, CacheMode),
    /// Memory, of so many bytes.
    Memory(u64),
    /// Stripes of so many bytes over files or block devices.
    Stripe(u64, Vec<PathBuf>, CacheMode),
    /// Memory of so many bytes that behaves like a device with a latency and a bandwidth (bytes a
    /// second, 0: unlimited). For experiments.
    Delay(u64, Duration, u64),
    /// A back end of the caller's own.
    Own(OwnStore<dyn BlockStore>),
}

/// A back end of the caller's own; equal only to itself.
pub struct OwnStore<T: ?Sized>(pub Arc<T>);

impl<T: ?Sized> Clone for OwnStore<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: ?Sized> fmt::Debug for OwnStore<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnStore").field(&Arc::as_ptr(&self.0)).finish()
    }
}

impl<T: ?Sized> PartialEq for OwnStore<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T: ?Sized> Eq for OwnStore<T> {}

impl Default for Config {
    fn default() -> Self {
        Self {
            exports: Vec::new(),
            disks: Vec::new(),
            listen: Vec::new(),
            nbd: Vec::new(),
            cores: std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX),
            buffer_limit: 256 << 20,
            fragment_bytes: 128 << 10,
            engine: EngineWish::Automatic,
            // As long as a client takes that has to be woken in a virtual machine.
            spin: Duration::from_micros(100),
            identity: false,
            no_root_squash: false,
            insecure: false,
            state: None,
            nbd_handshake: Duration::from_secs(CLIENT_STALL_SECONDS),
            lock_grace: Duration::from_secs(LOCK_GRACE_SECONDS),
        }
    }
}
