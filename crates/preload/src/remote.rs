//! Operations on remote files that several hooks need. The sessions through which they go are in
//! `remote/sessions.rs`.

mod sessions;

use crate::changed::Change;
use crate::descriptors::{self, Open};
use crate::hooks::lost;
use crate::start;
use crate::{behind, closing, fresh, guard, known, limits, opened, process, walk, written};
pub(crate) use sessions::{
    adopted, client, connected_client, disown, goodbye, identity_changed, is_connected, is_lost,
    let_go, user, waiter,
};
use std::sync::atomic::{AtomicBool, Ordering};
use towline_client::{Error, File, Lock};
use towline_instance::Locked;
use towline_wire::Attr;
use towline_wire::request::{lock, open_flag};

/// Maximum number of bytes that one append carries as a unit.
const APPEND_BYTES_MAX: usize = 8 << 20;

/// Set once this process has taken a record lock of its own, which any close of the file releases.
static HAS_PROCESS_LOCKS: AtomicBool = AtomicBool::new(false);

/// Converts an error to an error number for C.
pub(crate) fn number(error: Error) -> i32 {
    i32::from(error.errno().0)
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
    if closing::leave(open, client) || !closing::now(open, client) {
        return;
    }
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
    let lock = open.entry.lock(process::holder());
    if open.is_there() { Ok(lock) } else { Err(libc::EBADF) }
}

/// Returns the shared offset of a file, which is known once everything is appended.
pub(crate) fn offset(open: Open) -> i64 {
    behind::settle_position(open);
    open.entry.offset()
}

/// `read`: at the shared offset, which advances.
pub(crate) fn read(open: Open, target: &mut [u8]) -> Result<usize, i32> {
    loop {
        let lock = lock_offset(open)?;
        let offset = offset(open);
        let count = read_at(open, target, offset)?;
        // Otherwise this process was stopped, and others have gone on.
        if open.entry.set_offset(&lock, offset, offset + count as i64) {
            return Ok(count);
        }
    }
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
    loop {
        let lock = lock_offset(open)?;
        let from = open.entry.offset();
        let offset = u64::try_from(from).map_err(|_| libc::EINVAL)?;
        let appends = flags(open) & libc::O_APPEND != 0;
        let data = prepare(open, data, offset, appends)?;
        if data.is_empty() {
            return Ok(0);
        }
        if appends && let Some(count) = behind::write(open, data, None) {
            return Ok(count);
        }
        // Whoever comes after a killed process goes on behind this, so it must be on its way soon.
        connected_client(open.entry.mount.load(Ordering::Relaxed) as usize)?;
        // The server says where appended data is.
        if appends {
            let (count, at) = put(open, data, offset, true)?;
            // Otherwise others have gone on at the offset.
            let _ = open.entry.set_offset(&lock, from, at + count as i64);
            return Ok(count);
        }
        if open.entry.begin(&lock, from, data.len()) {
            let put = put(open, data, offset, false).map(|(count, _)| count);
            open.entry.end(&lock, from, data.len(), from + put.unwrap_or(0) as i64);
            return put;
        }
    }
}

/// `pwrite`; also returns the offset of the data, which `O_APPEND` determines as on Linux.
pub(crate) fn write_at(open: Open, data: &[u8], offset: i64) -> Result<(usize, i64), i32> {
    let at = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    let appends = flags(open) & libc::O_APPEND != 0;
    put(open, prepare(open, data, at, appends)?, at, appends)
}

/// Appends to a file that may not be open with `O_APPEND`; if `moves`, its offset moves behind the data.
pub(crate) fn append(open: Open, data: &[u8], moves: bool) -> Result<usize, i32> {
    let lock = moves.then(|| lock_offset(open)).transpose()?;
    let from = offset(open);
    let (count, at) = put(open, prepare(open, data, from as u64, true)?, from as u64, true)?;
    if let Some(lock) = lock {
        // Otherwise others have gone on at the offset.
        let _ = open.entry.set_offset(&lock, from, at + count as i64);
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
    loop {
        let lock = lock_offset(open)?;
        let now = self::offset(open);
        let at = sought(open, now, offset, whence)?;
        // Otherwise this process was stopped, and others have gone on.
        if open.entry.set_offset(&lock, now, at) {
            return Ok(at);
        }
    }
}

/// Returns the offset to which `lseek` leads from `now`.
fn sought(open: Open, now: i64, offset: i64, whence: i32) -> Result<i64, i32> {
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
    at.filter(|at| *at >= 0).ok_or(libc::EINVAL)
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
        let owner = process::identity();
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
        let _ = state.executes(process::identity());
    }
}

/// Called after [`leave_locks`], which may have been in the program before: if this process has locks, a new
/// session must take them over before the previous one ends.
pub(crate) fn take_over_locks() {
    if start::state().is_none_or(|state| !state.executed(process::identity)) {
        return;
    }
    HAS_PROCESS_LOCKS.store(true, Ordering::Relaxed);
    let (owner, kind) = (process::identity(), lock::SHARED);
    let probe = Lock { family: lock::PROCESS, kind, owner, start: 0, length: 1 };
    for (_, open) in descriptors::all(0, u32::MAX) {
        if !is_path(open) {
            // A file on which this fails has no locks.
            let _ = with(open, |file| file.test_lock(&probe));
        }
    }
}
