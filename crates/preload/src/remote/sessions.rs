//! Connections of this process.
//!
//! A process connects on demand, with one session per server in the run's family. The child of a fork
//! leaves its parent's sessions alone and opens its own.

use super::{HAS_PROCESS_LOCKS, drop_process_locks, flags, number};
use crate::descriptors::{self, Open, Own};
use crate::start::{self, Target};
use crate::{ahead, behind, cache, closing, fresh, guard, known, own, process, walk};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};
use towline_client::{Client, Connection, Error, File, Options, Transport};
use towline_instance::{MOUNTS_MAX, Root};
use towline_wire::request::open_flag;

/// Number of requests before a process switches to shared memory: most children of a script send fewer, for
/// which the setup would not pay (benches/README.md).
const REQUESTS_FAR: u64 = 24;

struct Session {
    process: u32,
    client: Client,
}

/// Error numbers that mean that the server is away. A connection that ends before the answer has no error
/// number of its own.
const AWAY: [i32; 5] = [libc::ECONNREFUSED, libc::ECONNRESET, libc::ENOENT, libc::EPIPE, libc::EIO];

/// Sessions by mount; mounts of one server share a client. A session is leaked when a fork makes it the
/// parent's, as another thread may have been using it.
static SESSIONS: [AtomicPtr<Session>; MOUNTS_MAX] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOUNTS_MAX];
static CONNECTING: Mutex<()> = Mutex::new(());

/// Returns the session for a mount, and connects if there is none. All requests of this process begin here,
/// after what the run has written behind.
pub(crate) fn client(mount: usize) -> Result<&'static Client, i32> {
    crate::report::touch();
    behind::asks();
    behind::settle(mount)?;
    connected_client(mount)
}

/// [`client`] before it is known what is asked for.
pub(crate) fn connected_client(mount: usize) -> Result<&'static Client, i32> {
    let place = SESSIONS.get(mount).ok_or(libc::EIO)?;
    let process = process::id();
    // SAFETY: null or a leaked box.
    let found = unsafe { place.load(Ordering::Acquire).as_ref() };
    match found.filter(|session| session.process == process) {
        Some(session) => Ok(&session.client),
        None => connect(mount, process),
    }
}

#[cold]
fn connect(mount: usize, process: u32) -> Result<&'static Client, i32> {
    let _lock = CONNECTING.lock().map_err(|_| libc::EIO)?;
    // SAFETY: null or a leaked box.
    let at = |place: usize| unsafe { SESSIONS[place].load(Ordering::Acquire).as_ref() };
    let current = |place: usize| at(place).filter(|session| session.process == process);
    if let Some(session) = current(mount) {
        return Ok(&session.client);
    }
    let targets = start::mounts();
    let target = targets.get(mount).ok_or(libc::EIO)?;
    let root = target.root()?;
    let transport = &target.url().ok_or(libc::EIO)?.transport;
    let is_same = |other: &usize| start::server(*other) == start::server(mount);
    let client = match (0..targets.len()).filter(is_same).find_map(current) {
        Some(session) => session.client.clone(),
        None => {
            std::panic::set_hook(Box::new(|_| {}));
            crate::vfork::meets();
            connected(mount, transport)?
        }
    };
    let (user, group) = identity();
    client.act_as(user, group);
    know(&client, mount, target, root);
    // The server has restarted since. It opens the run's files again as they are reclaimed.
    if client.boot_epoch() != root.epoch {
        guard::masked(|| client.reclaim()).map_err(number)?;
    }
    let session = Box::leak(Box::new(Session { process, client }));
    SESSIONS[mount].store(session, Ordering::Release);
    Ok(&session.client)
}

/// Returns the user and group with which this thread accesses files: the effective ones, unless
/// `setfsuid(2)` was called since they were set.
fn identity() -> (u32, u32) {
    const NONE: [usize; 6] = [u32::MAX as usize, 0, 0, 0, 0, 0];
    // SAFETY: plain system calls, which change nothing for a number that is no valid user.
    unsafe {
        let user = guard::system_call(libc::SYS_setfsuid, NONE) as u32;
        (user, guard::system_call(libc::SYS_setfsgid, NONE) as u32)
    }
}

/// Called when the process has become another user or group.
pub(crate) fn identity_changed() {
    fresh::settle_all();
    behind::identity_changed();
    walk::end();
    known::forget();
    let (user, group) = identity();
    let process = process::id();
    for place in &SESSIONS {
        // SAFETY: null or a leaked box.
        if let Some(session) = unsafe { place.load(Ordering::Acquire).as_ref() }
            && session.process == process
        {
            let connected_as = session.client.connected_as();
            if connected_as != 0 && connected_as != user {
                // A local server lets only root's connections act for another user. The old session stays,
                // as it holds this process's locks.
                place.store(std::ptr::null_mut(), Ordering::Release);
                continue;
            }
            session.client.act_as(user, group);
        }
    }
}

/// Opens a session for one request that waits for long. It uses a socket, as only sockets can be polled
/// together with signals.
pub(crate) fn waiter(mount: usize) -> Result<Client, i32> {
    let target = start::mounts().get(mount).ok_or(libc::EIO)?;
    let transport = match &target.url().ok_or(libc::EIO)?.transport {
        Transport::Shm(path) => Transport::Unix(path.clone()),
        Transport::Nearest(host, port) => Transport::Tcp(host.clone(), *port),
        other => other.clone(),
    };
    let client = connected(mount, &transport)?;
    let (user, group) = identity();
    client.act_as(user, group);
    Ok(client)
}

/// Goes on with a connection that the keeper has made for this process, or connects to a server that was there when
/// the run began. If it is away, retries for as long as after a lost connection. Signals are handled between the
/// attempts.
fn connected(mount: usize, transport: &Transport) -> Result<Client, i32> {
    if let Some(client) = guard::masked(|| handed_over(mount, transport)) {
        return Ok(client);
    }
    let mut pause = Duration::from_millis(5);
    let began = Instant::now();
    loop {
        let asked = Instant::now();
        match guard::masked(|| Client::connect(transport, options())) {
            Ok(client) => {
                // One trip to connect, and one for the greeting.
                known::took(mount, asked.elapsed() / 2);
                return Ok(client);
            }
            // There is no server, or it is just ending. Any other error is not due to a restart.
            Err(Error::Connection { errno, .. })
                if AWAY.contains(&i32::from(errno.0)) && began.elapsed() < options().reconnect => {}
            Err(error) => return Err(number(error)),
        }
        towline_net::pause(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Returns a client over a connection of the keeper's. Its peer takes it for one of the keeper's user.
fn handed_over(mount: usize, transport: &Transport) -> Option<Client> {
    if identity().0 != rustix::process::geteuid().as_raw() {
        return None;
    }
    let (bytes, socket) = crate::holder::connection(start::server(mount))?;
    Client::over(Connection::from_parts(transport, &bytes, socket)?, options()).ok()
}

fn options() -> Options {
    let mut options = Options::default();
    options.nearer_after = REQUESTS_FAR;
    options.tell_xattrs = known::wants_xattrs;
    options.family = start::config().map_or(0, |config| config.family);
    options.process = process::identity();
    options.hide = |fd| own::hide(fd, Own::Connection).map_err(std::io::Error::from_raw_os_error);
    options.changes = start::state().map(towline_instance::State::changes);
    options.place_of = place_of;
    options.connects_as = || identity().0;
    options
}

/// Returns the export and the path of an open file, which programs of the run may have renamed.
fn place_of(handle: u64) -> Option<(Vec<u8>, Vec<u8>)> {
    let (_, open) = descriptors::all(0, u32::MAX).find(|(_, open)| open.handle == handle)?;
    let target = start::mounts().get(open.entry.mount.load(Ordering::Relaxed) as usize)?;
    Some((target.url()?.root(), open.entry.path()))
}

/// Tells a new client which files the process has open, so that it can reclaim them after a restart of the
/// server.
fn know(client: &Client, mount: usize, target: &Target, root: Root) {
    let Some(url) = target.url() else { return };
    const FLAGS: u32 = open_flag::PATH | open_flag::DIRECTORY;
    let _ =
        File::from_handle(client, root.handle, &url.root(), b"", FLAGS, root.inode).into_handle();
    for (_, open) in descriptors::all(0, u32::MAX) {
        if open.entry.mount.load(Ordering::Relaxed) as usize == mount {
            remember(client, open, target);
        }
    }
}

fn remember(client: &Client, open: Open, target: &Target) {
    let Open { entry, .. } = open;
    let Some(url) = target.url() else { return };
    let flags = open_flag::of_this_machine(flags(open));
    let (handle, inode) = (open.handle, entry.inode.load(Ordering::Relaxed));
    let file = File::from_handle(client, handle, &url.root(), &entry.path(), flags, inode);
    let _ = file.into_handle();
}

/// Registers a descriptor that came from another process.
pub(crate) fn adopted(open: Open) {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    if let (Some(client), Some(target)) = (met(mount), start::mounts().get(mount)) {
        remember(client, open, target);
    }
}

/// Returns the session for a mount if this process has one.
fn session(mount: usize) -> Option<&'static Session> {
    // SAFETY: null or a leaked box.
    SESSIONS.get(mount).and_then(|s| unsafe { s.load(Ordering::Acquire).as_ref() })
}

fn met(mount: usize) -> Option<&'static Client> {
    session(mount).map(|session| &session.client)
}

/// Returns the user that has connected to the server of a mount, if this process has.
pub(crate) fn user(mount: usize) -> Option<u32> {
    session(mount)
        .filter(|session| session.process == process::id())
        .map(|session| session.client.connected_as())
}

/// Returns true if this process knows that an open file was lost in a restart of the server.
pub(crate) fn is_lost(mount: usize, handle: u64) -> bool {
    met(mount).is_some_and(|client| client.is_lost(handle))
}

/// Drops the parent's sessions in the child of a fork.
pub(crate) fn disown() {
    let_go();
    own::close_all();
}

/// Forgets sessions and anchors; the caller closes their descriptors next.
pub(crate) fn let_go() {
    for session in &SESSIONS {
        session.store(std::ptr::null_mut(), Ordering::Release);
    }
    HAS_PROCESS_LOCKS.store(false, Ordering::Relaxed);
    ahead::leave_to_parent();
    cache::leave_to_parent();
    walk::leave_to_parent();
    closing::disown();
    fresh::disown();
    crate::pool::disown();
}

/// Returns true if this process has a session.
pub(crate) fn is_connected() -> bool {
    SESSIONS.iter().any(|session| !session.load(Ordering::Acquire).is_null())
}

/// Ends the sessions; a later call opens new ones.
pub(crate) fn goodbye() {
    fresh::settle_all();
    behind::settle_all();
    walk::end();
    // Nobody waits for a goodbye, but a process that waited for the end of this one may want its locks.
    if HAS_PROCESS_LOCKS.load(Ordering::Relaxed) {
        for (_, open) in descriptors::all(0, u32::MAX) {
            let client = met(open.entry.mount.load(Ordering::Relaxed) as usize);
            let handle = open.handle;
            if client.is_some_and(|client| client.has_locked(handle)) {
                drop_process_locks(open);
            }
        }
    }
    let mut ended: Vec<*mut Session> = Vec::new();
    let process = process::id();
    for (mount, place) in SESSIONS.iter().enumerate() {
        let session = place.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: null or a leaked box.
        if let Some(known) = unsafe { session.as_ref() }
            && known.process == process
        {
            closing::close_left(mount, &known.client);
            if !ended.contains(&session) {
                ended.push(session);
            }
        }
    }
    for session in ended {
        // SAFETY: never freed, and not null, as checked above.
        if let Some(session) = unsafe { session.as_ref() } {
            session.client.clone().close();
        }
    }
}
