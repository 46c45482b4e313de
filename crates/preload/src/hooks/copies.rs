//! Hooks that copy between descriptors: `sendfile`, `copy_file_range`, `splice`.

use super::io::{CALL_BYTES_MAX, lseek, pread, pwrite, read, write};
use super::uploads::copy_to_remote;
use crate::descriptors::{self, Open};
use crate::guard::{checked, errno, finish, ours, set_errno};
use crate::table::real;
use crate::{limits, remote};
use libc::{c_int, c_uint, off64_t, size_t, ssize_t};
use std::sync::atomic::Ordering;

/// Bytes moved at once between a remote file and something else.
const PIECE_BYTES: usize = 256 * 1024;
/// Bytes of a file that are copied before handlers of signals may run; servers copy as many at once.
const PART_BYTES: usize = 64 * 1024 * 1024;
/// Most bytes that one `splice` moves: what a pipe holds by default.
const SPLICE_BYTES: usize = 64 * 1024;

/// Returns the offset that the caller keeps; `None` if a copy uses the file's own.
pub(super) unsafe fn place_of(at: *mut off64_t) -> Option<off64_t> {
    // SAFETY: the program passes null or an offset.
    unsafe { at.as_ref() }.copied()
}

pub(super) unsafe fn advance(at: *mut off64_t, by: usize) {
    // SAFETY: the program passes null or an offset.
    if let Some(at) = unsafe { at.as_mut() } {
        *at += by as i64;
    }
}

/// What a copy may use a descriptor for.
struct End {
    reads: bool,
    writes: bool,
    appends: bool,
    /// File type, one of `S_IFMT`.
    kind: u32,
}

impl End {
    /// Fails with `EBADF` for an invalid descriptor, or one that only names a file.
    fn of(fd: c_int) -> Result<Self, i32> {
        let (flags, mode) = match descriptors::find(fd) {
            Some(Open { entry, .. }) => {
                (entry.flags.load(Ordering::Relaxed) as c_int, entry.mode.load(Ordering::Relaxed))
            }
            None => {
                // SAFETY: all zero is a valid `stat`.
                let mut status: libc::stat = unsafe { std::mem::zeroed() };
                let to = &raw mut status as usize;
                // SAFETY: the structure outlives the call.
                let flags = unsafe {
                    checked(libc::SYS_fstat, [fd as usize, to, 0, 0, 0, 0])?;
                    checked(libc::SYS_fcntl, [fd as usize, libc::F_GETFL as usize, 0, 0, 0, 0])?
                };
                (flags as c_int, status.st_mode)
            }
        };
        if flags & libc::O_PATH != 0 {
            return Err(libc::EBADF);
        }
        let access = flags & libc::O_ACCMODE;
        Ok(Self {
            reads: access == libc::O_RDONLY || access == libc::O_RDWR,
            writes: access == libc::O_WRONLY || access == libc::O_RDWR,
            appends: flags & libc::O_APPEND != 0,
            kind: mode & libc::S_IFMT,
        })
    }
}

/// Returns where a copy reads or writes an open file.
pub(super) fn offset(open: Open, given: Option<off64_t>) -> Result<u64, i32> {
    let own = || open.entry.offset.load(Ordering::Relaxed);
    u64::try_from(given.unwrap_or_else(own)).map_err(|_| libc::EINVAL)
}

/// Moves an open file's own offset, or the caller's.
pub(super) unsafe fn advance_file(open: Open, at: *mut off64_t, by: usize) {
    if !at.is_null() {
        // SAFETY: the program passes an offset.
        unsafe { advance(at, by) };
    } else if let Ok(_lock) = remote::lock_offset(open) {
        open.entry.offset.fetch_add(by as i64, Ordering::Relaxed);
    }
}

/// Copies a regular file, or a device with blocks, through this process; stops at the first short piece.
unsafe fn copy(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let is_regular =
        |open: &Open| open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFREG;
    let Some(target) = descriptors::find(to).filter(is_regular) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { copy_in_turns(from, from_at, to, to_at, count) };
    };
    let part = |count| {
        // SAFETY: the program passes valid arguments.
        ours(|| unsafe { copy_to_remote(from, from_at, target, to_at, count) })
    };
    in_parts(count, part)
}

/// Copies bytes with as many calls of `part` as it takes; stops at the first short one.
fn in_parts(count: size_t, part: impl Fn(size_t) -> ssize_t) -> ssize_t {
    let mut done = 0;
    while done < count {
        let wanted = PART_BYTES.min(count - done);
        let copied = part(wanted);
        done += copied.max(0) as usize;
        if copied < wanted as isize {
            return if done > 0 { done as isize } else { copied };
        }
    }
    done as isize
}

/// Copies through this process, reading and writing in turns; stops at the first short piece.
unsafe fn copy_in_turns(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let mut buffer = vec![0u8; PIECE_BYTES.min(count.max(1))];
    let mut done = 0usize;
    while done < count {
        let room = &mut buffer[..PIECE_BYTES.min(count - done)];
        let length = room.len();
        // SAFETY: the buffer holds `length` bytes; the program passes descriptors and offsets.
        let got = unsafe {
            match place_of(from_at) {
                Some(at) => pread(from, room.as_mut_ptr().cast(), length, at),
                None => read(from, room.as_mut_ptr().cast(), length),
            }
        };
        if got <= 0 {
            return if done > 0 { done as isize } else { got };
        }
        // SAFETY: the buffer holds `got` bytes; the program passes descriptors and offsets.
        let put = unsafe {
            match place_of(to_at) {
                Some(at) => pwrite(to, room.as_ptr().cast(), got as usize, at),
                None => write(to, room.as_ptr().cast(), got as usize),
            }
        };
        let moved = put.max(0) as usize;
        if (moved as isize) < got && place_of_is_own(from_at) {
            // The next read must return again what could not be written. A pipe does not take it back.
            let errno = errno();
            // SAFETY: the call takes no addresses.
            unsafe { lseek(from, moved as i64 - got as i64, libc::SEEK_CUR) };
            set_errno(errno);
        }
        // SAFETY: the program passes null or offsets.
        unsafe {
            advance(from_at, moved);
            advance(to_at, moved);
        }
        done += moved;
        if put < got || got < length as isize {
            return if done > 0 { done as isize } else { put };
        }
    }
    done as isize
}

fn place_of_is_own(at: *mut off64_t) -> bool {
    at.is_null()
}

/// Checks the arguments of a `sendfile`, in the kernel's order.
unsafe fn check_sendfile(
    to: c_int,
    from: c_int,
    at: *mut off64_t,
    count: size_t,
) -> Result<(), i32> {
    let source = End::of(from)?;
    if !source.reads {
        return Err(libc::EBADF);
    }
    // SAFETY: the program passes null or an offset.
    if unsafe { place_of(at) }.is_some_and(|at| at < 0) {
        return Err(libc::EINVAL);
    }
    let target = End::of(to)?;
    if !target.writes {
        return Err(libc::EBADF);
    }
    // If nothing is copied, the type of the source does not matter.
    let is_plain = count == 0 || matches!(source.kind, libc::S_IFREG | libc::S_IFBLK);
    if (target.appends && target.kind != libc::S_IFIFO) || !is_plain {
        return Err(libc::EINVAL);
    }
    Ok(())
}

pub(crate) unsafe fn sendfile(to: c_int, from: c_int, at: *mut off64_t, count: size_t) -> ssize_t {
    if descriptors::find(from).is_none() && descriptors::find(to).is_none() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::sendfile(to, from, at, count) };
    }
    let (count, to_at) = (count.min(CALL_BYTES_MAX), std::ptr::null_mut());
    // SAFETY: the program passes valid arguments.
    unsafe {
        if let Err(error) = check_sendfile(to, from, at, count) {
            return finish(Err(error));
        }
        match (descriptors::find(from), descriptors::find(to)) {
            (Some(source), Some(target)) if mount(source) == mount(target) => {
                let part = |count| ours(|| copy_by_server(source, at, target, to_at, count));
                match in_parts(count, part) {
                    // As between parts of an export, or for bytes that overlap.
                    -1 if matches!(errno(), libc::EXDEV | libc::EINVAL | libc::EOPNOTSUPP) => {
                        copy_in_turns(from, at, to, to_at, count)
                    }
                    copied => copied,
                }
            }
            _ => copy(from, at, to, to_at, count),
        }
    }
}

/// Checks the descriptors of a `copy_file_range`, in the kernel's order.
fn check_range(from: c_int, to: c_int, flags: c_uint) -> Result<(), i32> {
    let (source, target) = (End::of(from)?, End::of(to)?);
    if flags != 0 {
        return Err(libc::EINVAL);
    }
    let kinds = [source.kind, target.kind];
    if kinds.contains(&libc::S_IFDIR) {
        return Err(libc::EISDIR);
    }
    if kinds != [libc::S_IFREG; 2] {
        return Err(libc::EINVAL);
    }
    if !source.reads || !target.writes || target.appends {
        return Err(libc::EBADF);
    }
    Ok(())
}

pub(crate) unsafe fn copy_file_range(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    let (source, target) = (descriptors::find(from), descriptors::find(to));
    if source.is_none() && target.is_none() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::copy_file_range(from, from_at, to, to_at, count, flags) };
    }
    if let Err(error) = check_range(from, to, flags) {
        return finish(Err(error));
    }
    let count = count.min(CALL_BYTES_MAX);
    match (source, target) {
        (Some(source), Some(target)) if mount(source) == mount(target) => {
            // SAFETY: the program passes valid arguments.
            ours(|| unsafe { copy_by_server(source, from_at, target, to_at, count) })
        }
        // SAFETY: the program passes valid arguments.
        _ => unsafe { copy(from, from_at, to, to_at, count) },
    }
}

fn mount(open: Open) -> u32 {
    open.entry.mount.load(Ordering::Relaxed)
}

/// Lets the server copy between two of its files.
unsafe fn copy_by_server(
    source: Open,
    from_at: *mut off64_t,
    target: Open,
    to_at: *mut off64_t,
    count: size_t,
) -> Result<isize, i32> {
    // SAFETY: the program passes null or offsets.
    let (r, w) = unsafe { (offset(source, place_of(from_at))?, offset(target, place_of(to_at))?) };
    let count = match limits::file_bytes() {
        None => count,
        Some(limit) => limits::room(limit, w, count)?,
    };
    let handle = target.handle;
    let client = remote::client(mount(source) as usize)?;
    let _ = super::maps::write_back_file(source);
    let copied = super::maps::changing(target, || {
        remote::with(source, |source| {
            client.with_handle(handle, 0, |target| source.copy_range(r, target, w, count as u64))
        })
    })? as usize;
    // SAFETY: the program passes null or offsets.
    unsafe {
        advance_file(source, from_at, copied);
        advance_file(target, to_at, copied);
    }
    Ok(copied as isize)
}

/// Checks the arguments of a `splice`, in the kernel's order, before anything is taken out of a pipe.
unsafe fn check_splice(
    (from, from_at): (c_int, *mut off64_t),
    (to, to_at): (c_int, *mut off64_t),
    flags: c_uint,
) -> Result<(), i32> {
    const KNOWN: c_uint =
        libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
    if flags & !KNOWN != 0 {
        return Err(libc::EINVAL);
    }
    let (source, target) = (End::of(from)?, End::of(to)?);
    let [from_pipe, to_pipe] = [&source, &target].map(|end| end.kind == libc::S_IFIFO);
    if (from_pipe && !from_at.is_null()) || (to_pipe && !to_at.is_null()) {
        return Err(libc::ESPIPE);
    }
    if !source.reads || !target.writes {
        return Err(libc::EBADF);
    }
    // SAFETY: the program passes null or an offset.
    let is_before = |at| unsafe { place_of(at) }.is_some_and(|at| at < 0);
    let is_wrong = match (from_pipe, to_pipe) {
        (true, false) => target.appends || is_before(to_at),
        (false, true) => source.kind != libc::S_IFREG || is_before(from_at),
        _ => true,
    };
    if is_wrong { Err(libc::EINVAL) } else { Ok(()) }
}

pub(crate) unsafe fn splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    if descriptors::find(from).is_none() && descriptors::find(to).is_none() {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::splice(from, from_at, to, to_at, count, flags) };
    }
    if count == 0 {
        return 0;
    }
    // One side is a pipe. Only one piece is moved, as another one would wait for more in an empty pipe.
    // SAFETY: the program passes valid arguments.
    unsafe {
        match check_splice((from, from_at), (to, to_at), flags) {
            Err(error) => finish(Err(error)),
            Ok(()) if descriptors::find(from).is_some() => {
                into_pipe((from, from_at), to, count, flags)
            }
            Ok(()) if flags & libc::SPLICE_F_NONBLOCK != 0 && is_empty(from) => {
                finish(Err(libc::EAGAIN))
            }
            Ok(()) => copy_in_turns(from, from_at, to, to_at, count.min(SPLICE_BYTES)),
        }
    }
}

/// Returns true for a pipe from which nothing can be read at this moment, not even its end.
fn is_empty(pipe: c_int) -> bool {
    let mut list = [libc::pollfd { fd: pipe, events: libc::POLLIN, revents: 0 }];
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let call = [list.as_mut_ptr() as usize, 1, &raw const now as usize, 0, 0, 0];
    // SAFETY: the list and the time outlive the call.
    unsafe { checked(libc::SYS_ppoll, call) == Ok(0) }
}

/// Splices bytes of a remote file into a pipe, as many as there is room for. Only the kernel knows how
/// many, so it splices them from a file in memory.
unsafe fn into_pipe(
    (from, at): (c_int, *mut off64_t),
    to: c_int,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the program passes descriptors and offset; nothing else knows the descriptor of the memory.
    unsafe {
        let room = checked(libc::SYS_fcntl, [to as usize, libc::F_GETPIPE_SZ as usize, 0, 0, 0, 0]);
        let mut bytes = vec![0u8; count.min(room.unwrap_or(SPLICE_BYTES))];
        let begin = match place_of(at) {
            Some(at) => at,
            None => lseek(from, 0, libc::SEEK_CUR),
        };
        let got = pread(from, bytes.as_mut_ptr().cast(), bytes.len(), begin);
        if got <= 0 {
            return got;
        }
        let create = [c"splice".as_ptr() as usize, libc::MFD_CLOEXEC as usize, 0, 0, 0, 0];
        let memory = match checked(libc::SYS_memfd_create, create) {
            Ok(memory) => memory,
            Err(error) => return finish(Err(error)),
        };
        let put = [memory, bytes.as_ptr() as usize, got as usize, 0, 0, 0];
        let mut start = 0;
        let moved = match checked(libc::SYS_pwrite64, put) {
            Ok(put) => {
                real::splice(memory as c_int, &raw mut start, to, std::ptr::null_mut(), put, flags)
            }
            Err(error) => finish(Err(error)),
        };
        let errno = errno();
        let _ = checked(libc::SYS_close, [memory, 0, 0, 0, 0, 0]);
        if moved > 0 {
            match at.is_null() {
                true => drop(lseek(from, begin + moved as i64, libc::SEEK_SET)),
                false => advance(at, moved as usize),
            }
        }
        set_errno(errno);
        moved
    }
}
