//! Starts and stops a server.

use crate::config::{CORE_BUFFER_BYTES_MIN, CORES_MAX, Config, DiskExport, EngineWish, Export};
use crate::core::{Core, Homes, Protocol, Shared};
use crate::disks::{Disks, NextDisks};
use crate::exports::{Exports, NextExports};
use crate::failure::{Failure, work_of_core};
use crate::families::Families;
use crate::kept::{Keeping, Kept};
use crate::lanes::{random, seconds};
use crate::mailbox::{Mail, Mailbox};
use crate::pools::Pools;
use crate::state_directory::StateDirectory;
use crate::stats::Statistics;
use crate::watch::Watch;
use parking_lot::{Mutex, RwLock};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_block::{Failures, Limits};
use towline_mem::Pool;
use towline_net::Link;
use towline_net::address::{Address, Listener};
use towline_reactor::{Engine, Reactor};
use towline_session::held::HeldLocks;
use towline_session::locks::Locks;
use towline_store::directory::make_no_ring;
use towline_wire::hello::local_socket_name;
use towline_wire::limits::FRAGMENT_BYTES_MAX;

/// Size of the buffers for short fragments, and for small requests to disks that have to wait for a device.
const SMALL_BYTES: usize = 32 * 1024;
/// How long all cores may take to end. A core that makes progress ends within 5 seconds.
const STOP: Duration = Duration::from_secs(10);
/// Limit for the bytes of one connection under way from a disk to the network.
const OWNER_BYTES_MAX: u64 = 1 << 20;

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    statistics: Arc<Statistics>,
    addresses: Vec<Address>,
    nbd_addresses: Vec<Address>,
    threads: Vec<JoinHandle<()>>,
    watch: Option<Watch>,
    engine: Engine,
    /// See [`Server::no_ring`].
    no_ring: Option<io::Error>,
    keeping: Option<Keeping>,
    /// Held so that no other server uses the directory.
    _directory: Option<StateDirectory>,
}

/// Why a server did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// An export cannot be served.
    Export(io::Error),
    /// An address cannot be listened on.
    Listen(Address, io::Error),
    /// An address is reachable from other machines, and nothing protects it.
    Insecure(Address),
    /// The event loop asked for is not available.
    Engine(io::Error),
    /// The state directory cannot be used.
    State(PathBuf, String),
    /// There is no `/proc`, through which open files are opened again.
    NoProc(io::Error),
    /// A thread cannot be started.
    Threads(io::Error),
    /// The machine refused something else.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Export(error) => write!(f, "{error}"),
            Self::Listen(address, error) => write!(f, "address {address}: cannot listen: {error}"),
            Self::Insecure(address) => write!(
                f,
                "address {address}: reachable from other machines, and nothing is encrypted or \
                 authenticated yet; listen on loopback or a Unix socket, or say --insecure if \
                 everyone on that network may read and write the exports"
            ),
            Self::Engine(error) => {
                let why = refusal(error);
                write!(f, "event loop: io_uring is not available: {why}; try --engine epoll")
            }
            Self::State(directory, what) => {
                write!(f, "state directory {}: {what}", directory.display())
            }
            Self::NoProc(error) => write!(
                f,
                "{PROC}: {error}; the proc file system has to be mounted at /proc, as open files \
                 are opened again through it"
            ),
            Self::Threads(error) => write!(
                f,
                "cannot create a thread: {error}; has the limit of processes been reached (ulimit -u, \
                 pids.max), or memory short?"
            ),
            Self::System(error) => write!(f, "cannot start: {error}"),
        }
    }
}

/// Explains the error of making a ring.
fn refusal(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::OutOfMemory => format!(
            "{error}; without privileges rings count as locked memory (ulimit -l), some 100 KiB for each thread"
        ),
        _ => error.to_string(),
    }
}

/// Where a process finds its open files.
const PROC: &str = "/proc/self/fd";

impl std::error::Error for StartError {}

impl Server {
    /// Starts serving; returns when clients can connect.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: &Config) -> Result<Self, StartError> {
        Self::start_on(config, Vec::new(), Vec::new())
    }

    /// Starts serving also on sockets that already listen (from a service manager): Towline's protocol on
    /// `listeners`, NBD on `nbd`. If there are neither sockets nor addresses, the server serves only the
    /// connections from [`Server::serve_nbd`].
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_on(
        config: &Config,
        mut listeners: Vec<Listener>,
        mut nbd: Vec<Listener>,
    ) -> Result<Self, StartError> {
        let bind = |address: &Address| {
            Listener::bind(address).map_err(|e| StartError::Listen(address.clone(), e))
        };
        for address in &config.listen {
            listeners.push(bind(address)?);
        }
        for address in &config.nbd {
            nbd.push(bind(address)?);
        }
        std::fs::metadata(PROC).map_err(StartError::NoProc)?;
        let ours = listeners.into_iter().map(|listener| (listener, Protocol::Towline));
        let nbd = nbd.into_iter().map(|listener| (listener, Protocol::Nbd));
        let mut listeners: Vec<_> = ours.chain(nbd).collect();
        let (mut addresses, mut nbd_addresses) = (Vec::new(), Vec::new());
        for (listener, protocol) in &listeners {
            let address = listener.address().map_err(StartError::System)?;
            if !address.is_local() && !config.insecure {
                return Err(StartError::Insecure(address));
            }
            match protocol {
                Protocol::Towline => addresses.push(address),
                Protocol::Nbd => nbd_addresses.push(address),
            }
        }
        let local_socket = add_local_socket(&mut listeners);
        let cores = config.cores.clamp(1, CORES_MAX);
        let statistics = Statistics::new(cores);
        let exports =
            Exports::new(&config.exports, statistics.clone()).map_err(StartError::Export)?;
        let boot_epoch = boot_epoch();
        let directory = match &config.state {
            Some(path) => {
                let opened = StateDirectory::open(path, boot_epoch);
                Some(opened.map_err(|what| StartError::State(path.clone(), what))?)
            }
            None => None,
        };
        let failures = directory.as_ref().map(|d| d.failed_disks.clone() as Arc<dyn Failures>);
        let fragment = config.fragment_bytes.clamp(4096, FRAGMENT_BYTES_MAX as u64);
        let fragment = fragment.next_multiple_of(4096);
        let disks = Disks::new(&config.disks, fragment, failures).map_err(StartError::Export)?;
        let disks = Arc::new(disks);
        // Fails only if it is already set, which it is not.
        let _ = statistics.disks.set(disks.clone());
        let state = directory.as_ref().map(|directory| directory.state.clone());
        let mut first_session = 1;
        if let Some(state) = &state {
            exports.note(state);
            first_session = state.last_session() / cores as u64 + 1;
        }
        let locks = state
            .clone()
            .map(|state| Locks::keeping(HeldLocks::load(state, seconds())))
            .unwrap_or_default();
        let (kept, keeping) = match &config.state {
            Some(path) if !config.holder.is_empty() => Kept::start(path, &config.holder)
                .inspect_err(|error| {
                    log::warn!(
                        "open files without a name will be lost when the server is killed: there can be no \
                         process that holds them: {error}"
                    );
                })
                .ok()
                .unzip(),
            _ => (None, None),
        };
        let mailboxes: Result<Vec<Mailbox>, _> = (0..cores).map(|_| Mailbox::new()).collect();
        let shared = Arc::new(Shared {
            exports,
            disks,
            nbd_handshake: config.nbd_handshake,
            spin: config.spin,
            locks: Mutex::new(locks),
            started: Instant::now(),
            lock_grace: config.lock_grace,
            mailboxes: mailboxes.map_err(StartError::System)?,
            pools: Pools::new(cores),
            boot_epoch,
            local_socket,
            next_core: AtomicUsize::new(0),
            next_session: AtomicU64::new(first_session),
            homes: Homes::default(),
            stays: Arc::default(),
            families: Families::new(boot_epoch),
            listings: Arc::default(),
            identity: config.identity,
            squash_root: !config.no_root_squash,
            state,
            kept,
            failure: Failure::default(),
            cores: statistics.cores.clone(),
            listeners: RwLock::new(listeners),
        });
        let share = config.buffer_limit / cores as u64;
        let buffers = share.max(CORE_BUFFER_BYTES_MIN) / FRAGMENT_BYTES_MAX as u64;
        let mut server = Self {
            shared: shared.clone(),
            statistics: statistics.clone(),
            addresses,
            nbd_addresses,
            threads: Vec::new(),
            watch: None,
            engine: Engine::Uring,
            no_ring: None,
            keeping,
            _directory: directory,
        };
        for index in 0..cores {
            let pool = Pool::new(FRAGMENT_BYTES_MAX, buffers as usize);
            statistics.pools.lock().push(pool.clone());
            // Disks have as much again for fragments, and an eighth more in small buffers.
            let small = ((share / 8) / SMALL_BYTES as u64).max(16);
            let fragments = Pool::new(fragment as usize, (share / fragment).max(2) as usize);
            statistics.pools.lock().push(fragments.clone());
            let limits = Limits {
                small: fragments.beside(SMALL_BYTES, small as usize),
                fragments,
                owner_bytes_max: OWNER_BYTES_MAX,
            };
            let (shared, core_statistics) = (shared.clone(), statistics.cores[index].clone());
            let wish = match config.engine {
                EngineWish::Automatic => None,
                EngineWish::Uring => Some(Engine::Uring),
                EngineWish::Epoll => Some(Engine::Epoll),
            };
            let (started, outcome) = std::sync::mpsc::channel();
            let body = move || {
                // A ring belongs to the thread that created it.
                let mut reactor = match Reactor::new(wish) {
                    Ok(reactor) => reactor,
                    Err(error) => return drop(started.send(Err(StartError::Engine(error)))),
                };
                let (engine, refused) = (reactor.engine(), reactor.take_refusal());
                if engine != Engine::Uring {
                    make_no_ring();
                }
                match Core::new(index, shared.clone(), core_statistics, reactor, pool, limits) {
                    Ok(core) => {
                        // Fails only if the start was given up.
                        let _ = started.send(Ok((engine, refused)));
                        work_of_core(&shared, index, || core.run());
                    }
                    Err(error) => drop(started.send(Err(StartError::System(error)))),
                }
            };
            let name = format!("towline-core{index}");
            let thread =
                std::thread::Builder::new().name(name).spawn(body).map_err(StartError::Threads)?;
            server.threads.push(thread);
            let gone = || Err(StartError::System(io::ErrorKind::Other.into()));
            let (engine, refused) = outcome.recv().unwrap_or_else(|_| gone())?;
            // A limit may have left rings to the first cores only.
            if engine != Engine::Uring {
                server.engine = engine;
            }
            server.no_ring = server.no_ring.take().or(refused);
        }
        server.watch = Some(Watch::start(shared)?);
        *statistics.engine.lock() = match server.engine {
            Engine::Uring => "io_uring",
            _ => "epoll",
        };
        Ok(server)
    }

    /// Returns the addresses on which the server listens, with the ports that the kernel chose.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns the addresses on which the server listens for NBD clients.
    #[must_use]
    pub fn nbd_addresses(&self) -> &[Address] {
        &self.nbd_addresses
    }

    /// Serves one NBD client that is already connected. Nothing ever comes from the channel: it ends with the
    /// connection.
    #[must_use]
    pub fn serve_nbd(&self, link: Link) -> std::sync::mpsc::Receiver<()> {
        let (over, gone) = std::sync::mpsc::channel();
        self.shared.mailboxes[0].send(Mail::NbdLane(Arc::new(link), Some(over)));
        gone
    }

    /// Calls `tell` with an explanation when the server fails because of a bug in it, or at once if it has
    /// already failed. All its connections then end within 5 seconds, and it accepts no more: drop it and
    /// start a new one.
    pub fn when_failed(&self, tell: impl FnOnce(&str) + Send + 'static) {
        self.shared.failure.watch(Box::new(tell));
    }

    /// Returns the event loop in use: `io_uring` or `epoll`.
    #[must_use]
    pub fn engine(&self) -> &'static str {
        *self.statistics.engine.lock()
    }

    /// Returns why the server uses epoll, although it was to use io_uring where that is available.
    #[must_use]
    pub fn no_ring(&self) -> Option<String> {
        self.no_ring.as_ref().map(refusal)
    }

    /// Replaces the exports and disks. Unchanged ones keep their contents, open files and connections. Disks
    /// with a failed flush can be changed again. Clients that have opened one that goes or changes keep it as
    /// it was, except for limits: these apply at once to all clients of an export or disk of that name.
    ///
    /// # Errors
    /// One of them cannot be served; then nothing has changed.
    pub fn replace(&self, exports: &[Export], disks: &[DiskExport]) -> io::Result<()> {
        replace(&self.shared, exports, disks)
    }

    /// Returns a function that does as [`Server::replace`], for a thread of its own: file systems may take as long
    /// as they like to open exports and disks.
    pub fn replacing(
        &self,
    ) -> impl Fn(&[Export], &[DiskExport]) -> io::Result<()> + Send + 'static {
        let shared = self.shared.clone();
        move |exports, disks| replace(&shared, exports, disks)
    }

    /// Returns counters and stage times as JSON.
    #[must_use]
    pub fn statistics_json(&self) -> String {
        self.statistics.to_json()
    }

    /// Returns a function that renders counters and stage times in the text format of Prometheus.
    pub fn prometheus(&self) -> impl Fn() -> String + Send + 'static {
        let statistics = self.statistics.clone();
        move || statistics.to_prometheus()
    }

    /// Stops the server: accepts no new connections, notifies clients, and finishes requests under way, for
    /// at most 5 seconds.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        if let Some(keeping) = &mut self.keeping {
            keeping.end();
        }
        self.shared.tell_to_end();
        let begun = Instant::now();
        for (index, thread) in self.threads.drain(..).enumerate() {
            while !thread.is_finished() && begun.elapsed() < STOP {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                log::error!("core {index} still waits for a device and is left behind");
                continue;
            }
            if thread.join().is_err() {
                log::error!("a thread of the server had failed before it was stopped");
            }
        }
        // A thread that waits for a file system may outlive the server, and its process, with all that is shared.
        // The next server needs the devices, which are claimed, and the memory.
        self.shared.exports.replace(NextExports::default());
        self.shared.disks.replace(NextDisks::default());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn replace(shared: &Shared, exports: &[Export], disks: &[DiskExport]) -> io::Result<()> {
    let exports = shared.exports.prepare(exports)?;
    let disks = shared.disks.prepare(disks)?;
    shared.exports.replace(exports);
    shared.disks.replace(disks);
    // Requests may wait for limits that no longer exist, and users have other groups.
    for mailbox in &shared.mailboxes {
        mailbox.send(Mail::Reconfigured);
    }
    if let Some(state) = &shared.state {
        shared.exports.note(state);
    }
    Ok(())
}

/// Adds a socket to which clients on this machine move, if the server listens on TCP. Returns its number, or
/// zero.
fn add_local_socket(listeners: &mut Vec<(Listener, Protocol)>) -> u64 {
    let ours_on_tcp = |(listener, protocol): &(Listener, Protocol)| {
        matches!(listener, Listener::Tcp(..)) && *protocol == Protocol::Towline
    };
    if !listeners.iter().any(ours_on_tcp) {
        return 0;
    }
    let number = random() | 1;
    match Listener::bind(&Address::Abstract(local_socket_name(number))) {
        Ok(listener) => {
            listeners.push((listener, Protocol::Towline));
            number
        }
        Err(error) => {
            log::warn!("clients on this machine stay on TCP, without a local socket: {error}");
            0
        }
    }
}

/// Returns a number that differs between two starts of a server, whatever the clock says.
fn boot_epoch() -> u32 {
    random() as u32 | 1
}
