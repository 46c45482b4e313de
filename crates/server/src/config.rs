//! The settings of a server.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use towline_block::{Delivery, RateLimit, Shape};
use towline_net::address::Address;
use towline_store::block::CacheMode;
use towline_store::{BlockStore, FileStore};
use towline_wire::limits::{
    CLIENT_STALL_SECONDS, FRAGMENT_BYTES_MAX, LOCK_GRACE_SECONDS, NAME_BYTES_MAX,
};

/// Maximum number of cores.
pub const CORES_MAX: usize = 256;

/// Minimum size of a core's buffers, in bytes, whatever [`Config::buffer_limit`] says.
pub const CORE_BUFFER_BYTES_MIN: u64 = 2 * FRAGMENT_BYTES_MAX as u64;

/// A server's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What to export.
    pub exports: Vec<Export>,
    /// Disks to export. NBD's default disk, with the empty name, is the first one marked as default, or else
    /// the first one.
    pub disks: Vec<DiskExport>,
    /// Where to listen.
    pub listen: Vec<Address>,
    /// Where to listen for NBD clients.
    pub nbd: Vec<Address>,
    /// Threads that serve, each with an event loop, up to [`CORES_MAX`].
    pub cores: usize,
    /// Bytes of all buffers for data in transit, whatever the number of clients. Disks have as much again and
    /// an eighth more.
    pub buffer_limit: u64,
    /// Longest fragment of a read from a disk, from 4096 bytes to 256 KiB.
    pub fragment_bytes: u64,
    /// Event loop to use.
    pub engine: EngineWish,
    /// How long a core spins before it sleeps, if spinning has paid recently; zero: it sleeps at once.
    pub spin: Duration,
    /// Act as the user that a client names, not as the user who runs the server.
    pub identity: bool,
    /// With `identity`: let a client's uid 0 act as uid 0.
    pub no_root_squash: bool,
    /// Listen beyond loopback although nothing is encrypted or authenticated yet.
    pub insecure: bool,
    /// Directory in which sessions are kept, so that they survive when the server is killed.
    pub state: Option<PathBuf>,
    /// With `state`: the command that starts a process which calls [`crate::hold_files`] with its last argument,
    /// so that open files survive whatever becomes of their names. Empty: there is none, and files are opened
    /// again by their paths.
    pub holder: Vec<OsString>,
    /// Time that an NBD client has to choose its disk.
    pub nbd_handshake: Duration,
    /// With `state`: how long, after a start, the locks of clients that are not back yet are held for them.
    pub lock_grace: Duration,
}

/// Which event loop a server uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineWish {
    /// io_uring, or epoll where io_uring is forbidden.
    #[default]
    Automatic,
    /// io_uring; the server does not start without it.
    Uring,
    /// epoll.
    Epoll,
}

/// One export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Name in URLs, see [`Export::check_name`].
    pub name: String,
    /// What is exported.
    pub kind: ExportKind,
    /// Refuse all changes.
    pub read_only: bool,
    /// Limit for each client.
    pub limit: RateLimit,
}

impl Export {
    /// Creates an export without options.
    #[must_use]
    pub fn new(name: &str, kind: ExportKind) -> Self {
        Self { name: name.to_owned(), kind, read_only: false, limit: RateLimit::default() }
    }

    /// Checks that a path can begin with the name.
    ///
    /// # Errors
    /// Says why not.
    pub fn check_name(&self) -> Result<(), String> {
        let name = &self.name;
        if name.is_empty() || name.contains(['/', '\0']) {
            return Err("the name is empty or contains a slash".to_owned());
        }
        if name == "." || name == ".." {
            return Err("in a URL this name is a step to another directory".to_owned());
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(format!("the name is longer than {NAME_BYTES_MAX} bytes"));
        }
        Ok(())
    }
}

/// What an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportKind {
    /// A directory of this machine.
    Directory(PathBuf),
    /// A file system in memory, of at most this many bytes.
    Memory(u64),
    /// A back end provided by the caller.
    Own(OwnStore<dyn FileStore>),
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskExport {
    /// The disk's name; not empty.
    pub name: String,
    /// What is exported.
    pub kind: DiskKind,
    /// Refuse all changes.
    pub read_only: bool,
    /// How reads are delivered.
    pub delivery: Delivery,
    /// Limit for each client.
    pub limit: RateLimit,
    /// Blocks and queue depth that override those of the back end.
    pub shape: Shape,
    /// This disk also has the empty name.
    pub is_default: bool,
}

impl DiskExport {
    /// Creates a disk without options.
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
    /// Memory of this many bytes.
    Memory(u64),
    /// Stripes of this many bytes over files or block devices.
    Stripe(u64, Vec<PathBuf>, CacheMode),
    /// Memory of this many bytes that simulates a device with a latency and a bandwidth (bytes per second; 0:
    /// unlimited). For experiments.
    Delay(u64, Duration, u64),
    /// A back end provided by the caller.
    Own(OwnStore<dyn BlockStore>),
}

/// A back end provided by the caller; equal only to itself.
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
            // The time that it takes to wake a client in a virtual machine.
            spin: Duration::from_micros(100),
            identity: false,
            no_root_squash: false,
            insecure: false,
            state: None,
            holder: Vec::new(),
            nbd_handshake: Duration::from_secs(CLIENT_STALL_SECONDS),
            lock_grace: Duration::from_secs(LOCK_GRACE_SECONDS),
        }
    }
}
