//! Connections of this process, and the operations on remote files that several hooks need.
//!
//! A process connects on demand, with one session per server in the run's family. The child of a fork
//! leaves its parent's sessions alone and opens its own.

use crate::changed::Change;
use crate::descriptors::{self, Open, Own};
use crate::hooks::lost;
use crate::start::{self, Target};
use crate::{
    ahead, behind, cache, closing, fresh, guard, known, limits, opened, own, process, walk, written,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::{Duration, Instant};
use towline_client::{Client, Connection, Error, File, Lock, Options, Transport};
use towline_instance::{Locked, MOUNTS_MAX, Root, Taken};
use towline_wire::Attr;
use towline_wire::request::{lock, open_flag};

/// Maximum number of bytes that one append carries as a unit.
const APPEND_BYTES_MAX: usize = 8 << 20;

/// Number of requests before a process switches to shared memory: most children of a script send fewer, for
/// which the setup would not pay (benches/README.md).
const REQUESTS_FAR: u64 = 24;

struct Session {
    process: u32,
    /// The user that made the connection.
    user: u32,
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
/// Set once this process has taken a record lock of its own, which any close of the file releases.
static HAS_PROCESS_LOCKS: AtomicBool = AtomicBool::new(false);

/// Converts an error to an error number for C.
pub(crate) fn number(error: Error) -> i32 {
    i32::from(error.errno().0)
}

/// Returns the session for a mount, and connects if there is none. All requests of this process begin here,
/// after what the run has written behind.
pub(crate) fn client(mount: usize) -> Result<&'static Client, i32> {
    crate::report::touch();
    behind::asks();
    behind::settle(mount)?;
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
    let session = Box::leak(Box::new(Session { process, user, client }));
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
            if session.user != 0 && session.user != user {
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
    options.process = lock_owner();
    options.hide = |fd| own::hide(fd, Own::Connection).map_err(std::io::Error::from_raw_os_error);
    options.changes = start::state().map(towline_instance::State::changes);
    options.place_of = place_of;
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
    session(mount).filter(|session| session.process == process::id()).map(|session| session.user)
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

/// Calls `work` with the file of a handle.
pub(crate) fn with_handle<T>(
    mount: usize,
    handle: u64,
    work: impl FnOnce(&File) -> Result<T, Error>,
) -> Result<T, i32> {
    work_with(mount, handle, 0, work)
}

fn work_with<T>(
    mount: usize,
    handle: u64,
    flags: u32,
    work: impl FnOnce(&File) -> Result<T, Error>,
) -> Result<T, i32> {
    let client = client(mount)?;
    walk::tidy();
    let closes = closing::close_left(mount, client);
    let result = client.with_handle(handle, flags, work).map_err(number);
    if matches!(result, Err(libc::ESTALE)) {
        lost::suspect();
    }
    if closes {
        // In case `work` sent nothing.
        client.flush();
    }
    result
}

/// Calls `work` with a remote open file.
pub(crate) fn with<T>(open: Open, work: impl FnOnce(&File) -> Result<T, Error>) -> Result<T, i32> {
    let entry = open.entry;
    let mount = entry.mount.load(Ordering::Relaxed) as usize;
    work_with(mount, open.handle, open_flag::of_this_machine(flags(open)), work)
}

/// Closes a file that only this process has open; does not wait for the answer.
pub(crate) fn close(open: Open) {
    let Open { entry, handle, .. } = open;
    let mount = entry.mount.load(Ordering::Relaxed) as usize;
    opened::closed(mount, handle);
    written::closed(open);
    // `close` has reported the result before; other ways to lose a descriptor report nothing.
    let _ = fresh::closing(open);
    let Ok(client) = client(mount) else { return };
    if closing::leave(open, client) || !entry.change(Taken::Open, Taken::Closed) {
        return;
    }
    client.close_handle(handle);
    // Otherwise the keeper frees the entry after it has seen the placeholder close: an entry reused before
    // that would look closed.
    if let Some(state) = start::state().filter(|state| !state.is_kept()) {
        state.give_back(open.number);
    }
}

fn flags(open: Open) -> i32 {
    open.entry.flags.load(Ordering::Relaxed) as i32
}

/// Returns the attributes for `fstat`.
pub(crate) fn stat(open: Open) -> Result<Attr, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    match opened::attr(mount, open.handle) {
        Some(attr) => Ok(attr),
        None => with(open, File::stat),
    }
}

/// Returns the size of a file.
fn size(open: Open) -> Result<u64, i32> {
    written::size(open).map_or_else(|| stat(open).map(|attr| attr.size), Ok)
}

/// Takes the lock of a file's offset.
///
/// # Errors
/// `EBADF` if another thread has closed the file, so that the offset belongs to another file.
pub(crate) fn lock_offset(open: Open) -> Result<Locked<'static>, i32> {
    let lock = open.entry.lock(process::id());
    if open.is_there() { Ok(lock) } else { Err(libc::EBADF) }
}

/// Returns the shared offset of a file, which is known once everything is appended.
pub(crate) fn offset(open: Open) -> i64 {
    behind::settle_position(open);
    open.entry.offset.load(Ordering::Relaxed)
}

/// `read`: at the shared offset, which advances.
pub(crate) fn read(open: Open, target: &mut [u8]) -> Result<usize, i32> {
    let _lock = lock_offset(open)?;
    let offset = offset(open);
    let count = read_at(open, target, offset)?;
    open.entry.offset.store(offset + count as i64, Ordering::Relaxed);
    Ok(count)
}

/// Fails with `EBADF` if a file is not open for reading.
pub(crate) fn check_readable(open: Open) -> Result<(), i32> {
    let is_write_only = flags(open) & (libc::O_ACCMODE | libc::O_PATH) & !libc::O_RDWR != 0;
    if is_write_only { Err(libc::EBADF) } else { Ok(()) }
}

/// `pread`.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: i64) -> Result<usize, i32> {
    let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    check_readable(open)?;
    if open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFDIR {
        return Err(libc::EISDIR);
    }
    if let Some(count) = written::read(open, target, offset) {
        return Ok(count);
    }
    let _ = crate::hooks::maps::write_back_part(open, offset, target.len());
    opened::read_at(open, target, offset)
}

/// `write`: at the shared offset, which advances, or at the end with `O_APPEND`.
pub(crate) fn write(open: Open, data: &[u8]) -> Result<usize, i32> {
    let _lock = lock_offset(open)?;
    let offset =
        u64::try_from(open.entry.offset.load(Ordering::Relaxed)).map_err(|_| libc::EINVAL)?;
    let appends = flags(open) & libc::O_APPEND != 0;
    let data = prepare(open, data, offset, appends)?;
    if data.is_empty() {
        return Ok(0);
    }
    if appends && let Some(count) = behind::write(open, data, None) {
        return Ok(count);
    }
    let (count, offset) = put(open, data, offset, appends)?;
    open.entry.offset.store(offset + count as i64, Ordering::Relaxed);
    Ok(count)
}

/// `pwrite`; also returns the offset of the data, which `O_APPEND` determines as on Linux.
pub(crate) fn write_at(open: Open, data: &[u8], offset: i64) -> Result<(usize, i64), i32> {
    let at = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    let appends = flags(open) & libc::O_APPEND != 0;
    put(open, prepare(open, data, at, appends)?, at, appends)
}

/// Appends to a file that may not be open with `O_APPEND`; if `moves`, its offset moves behind the data.
pub(crate) fn append(open: Open, data: &[u8], moves: bool) -> Result<usize, i32> {
    let _lock = moves.then(|| lock_offset(open)).transpose()?;
    let offset = offset(open) as u64;
    let (count, at) = put(open, prepare(open, data, offset, true)?, offset, true)?;
    if moves {
        open.entry.offset.store(at + count as i64, Ordering::Relaxed);
    }
    Ok(count)
}

/// Fails with `EBADF` if a file is not open for writing.
pub(crate) fn check_writable(open: Open) -> Result<(), i32> {
    let flags = flags(open);
    if flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
        return Err(libc::EBADF);
    }
    Ok(())
}

/// Reads a byte of each page of what a program writes. If the program has no such memory, it ends here, as
/// where the data is copied: a socket to which it is sent would fail, and be taken for a lost connection.
fn touch(data: &[u8]) {
    for byte in data.iter().step_by(towline_mem::page_bytes()).chain(data.last()) {
        // SAFETY: the program passes memory that can be read.
        unsafe { std::ptr::from_ref(byte).read_volatile() };
    }
}

/// Checks that a file can be written, and returns how much of the data.
fn prepare(open: Open, data: &[u8], at: u64, appends: bool) -> Result<&[u8], i32> {
    check_writable(open)?;
    behind::check(open)?;
    if data.is_empty() {
        return Ok(data);
    }
    touch(data);
    let data = match limits::file_bytes() {
        None => data,
        Some(limit) => {
            let from = if appends { with(open, File::stat)?.size } else { at };
            &data[..limits::room(limit, from, data.len())?]
        }
    };
    Ok(if appends { &data[..data.len().min(APPEND_BYTES_MAX)] } else { data })
}

/// Writes what is [prepared](prepare). Also returns where it is.
fn put(open: Open, data: &[u8], at: u64, appends: bool) -> Result<(usize, i64), i32> {
    if data.is_empty() {
        return Ok((0, at as i64));
    }
    if !appends && let Some(count) = behind::write(open, data, Some(at)) {
        let more = match &data[count..] {
            [] => 0,
            // If the rest fails, the next write tells why.
            rest => wait(open, rest, at + count as u64, false).map_or(0, |(more, _)| more),
        };
        return Ok((count + more, at as i64));
    }
    wait(open, data, at, appends)
}

/// Writes, and waits for it.
fn wait(open: Open, data: &[u8], at: u64, appends: bool) -> Result<(usize, i64), i32> {
    let waited = behind::Waited::begin(open);
    let change = Change::begin(open.entry.mount.load(Ordering::Relaxed) as usize);
    let before = known::changes();
    let (count, at) = crate::hooks::maps::writing(open, data, at, appends, |data, at| {
        with(open, |file| {
            let (count, at) =
                if appends { file.append(data)? } else { (file.write_at(data, at)?, at) };
            Ok((count, at as i64))
        })
    })?;
    written::wrote(open, &data[..count], at as u64, before);
    change.written(open.entry.inode.load(Ordering::Relaxed));
    waited.end(open);
    Ok((count, at))
}

/// Returns true for a descriptor that only names a file (`O_PATH`).
pub(crate) fn is_path(open: Open) -> bool {
    flags(open) & libc::O_PATH != 0
}

/// `lseek`.
pub(crate) fn seek(open: Open, offset: i64, whence: i32) -> Result<i64, i32> {
    if is_path(open) {
        return Err(libc::EBADF);
    }
    let entry = open.entry;
    let _lock = lock_offset(open)?;
    let now = self::offset(open);
    let at = match whence {
        libc::SEEK_SET => Some(offset),
        libc::SEEK_CUR => now.checked_add(offset),
        libc::SEEK_END => (size(open)? as i64).checked_add(offset),
        libc::SEEK_DATA | libc::SEEK_HOLE => {
            let from = u64::try_from(offset).map_err(|_| libc::ENXIO)?;
            Some(with(open, |file| file.seek(from, whence as u32))? as i64)
        }
        _ => return Err(libc::EINVAL),
    };
    let at = at.ok_or(libc::EINVAL)?;
    if at < 0 {
        return Err(libc::EINVAL);
    }
    entry.offset.store(at, Ordering::Relaxed);
    Ok(at)
}

/// Notes that this process is about to take record locks, which any close of the file releases.
pub(crate) fn has_process_locks() {
    if !HAS_PROCESS_LOCKS.swap(true, Ordering::Relaxed)
        && start::state().is_some_and(towline_instance::State::is_kept)
    {
        let _ = guard::inside(crate::holder::tell);
    }
}

/// Returns true if this process may have record locks.
pub(crate) fn has_locks() -> bool {
    HAS_PROCESS_LOCKS.load(Ordering::Relaxed)
}

/// Releases this process's record locks on a file, as any close of it does.
pub(crate) fn drop_process_locks(open: Open) {
    if HAS_PROCESS_LOCKS.load(Ordering::Relaxed) {
        let owner = u64::from(process::id());
        let all = Lock { family: lock::PROCESS, kind: lock::UNLOCK, owner, start: 0, length: 0 };
        // The file may be open in a mode that does not permit locks.
        let _ = with(open, |file| file.lock(&all, false));
    }
}

/// Called when this process is about to lose its sessions but not its locks: to execute a program, or for a
/// number that the program wants (`own.rs`).
pub(crate) fn leave_locks() {
    fresh::settle_all();
    if HAS_PROCESS_LOCKS.load(Ordering::Relaxed)
        && let Some(state) = start::state()
    {
        // Without room the program does not know of its locks, which then last as long as the process.
        let _ = state.executes(process::id());
    }
}

/// Called after [`leave_locks`], which may have been in the program before: if this process has locks, a new
/// session must take them over before the previous one ends.
pub(crate) fn take_over_locks() {
    if start::state().is_none_or(|state| !state.executed(process::id)) {
        return;
    }
    HAS_PROCESS_LOCKS.store(true, Ordering::Relaxed);
    let (owner, kind) = (lock_owner(), lock::SHARED);
    let probe = Lock { family: lock::PROCESS, kind, owner, start: 0, length: 1 };
    for (_, open) in descriptors::all(0, u32::MAX) {
        if !is_path(open) {
            // A file on which this fails has no locks.
            let _ = with(open, |file| file.test_lock(&probe));
        }
    }
}

/// Returns this process's number as an owner of locks.
pub(crate) fn lock_owner() -> u64 {
    u64::from(process::id())
}
