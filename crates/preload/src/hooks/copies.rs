//! Hooks that copy between descriptors: `sendfile`, `copy_file_range`, `splice`.

use super::io::{CALL_BYTES_MAX, lseek, pread, pwrite, read, write};
use super::maps;
use crate::ahead::FAR;
use crate::descriptors::{self, Open};
use crate::guard::{checked, errno, finish, ours, set_errno};
use crate::table::real;
use crate::{limits, remote};
use libc::{c_int, c_uint, off64_t, size_t, ssize_t};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes moved at once between a remote file and something else, and at most into a far one.
const PIECE_BYTES: RangeInclusive<usize> = 256 * 1024..=8 * 1024 * 1024;
/// How much faster bytes have to move in pieces four times as long for these to be kept.
const BETTER: f64 = 1.3;
/// Bytes that the server copies before handlers of signals may run.
const PART_BYTES: usize = 64 * 1024 * 1024;
/// Most bytes that one `splice` moves: what a pipe holds by default.
const SPLICE_BYTES: usize = 64 * 1024;

/// How many bytes of a copy to move at a time. A write of many bytes hardly takes longer than one of few if the
/// server is far, but others would wait longer for it if the network is slow.
struct Pace {
    bytes: usize,
    /// Bytes per second in pieces of a fourth of the length.
    before: f64,
    is_settled: bool,
}

impl Pace {
    fn new(to: c_int) -> Self {
        let is_settled = descriptors::find(to).is_none();
        Self { bytes: *PIECE_BYTES.start(), before: 0.0, is_settled }
    }

    /// Notes how long it took to move a piece.
    fn moved(&mut self, bytes: usize, time: Duration) {
        if self.is_settled || bytes < self.bytes {
            return;
        }
        let now = bytes as f64 / time.as_secs_f64();
        if time > FAR && now > BETTER * self.before {
            self.before = now;
            self.is_settled = self.bytes == *PIECE_BYTES.end();
            self.bytes = (4 * self.bytes).min(*PIECE_BYTES.end());
        } else {
            self.bytes = (self.bytes / 4).max(*PIECE_BYTES.start());
            self.is_settled = true;
        }
    }
}

/// Returns the offset that the caller keeps; `None` if a copy uses the file's own.
unsafe fn place_of(at: *mut off64_t) -> Option<off64_t> {
    // SAFETY: the program passes null or an offset.
    unsafe { at.as_ref() }.copied()
}

unsafe fn advance(at: *mut off64_t, by: usize) {
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
fn offset(open: Open, given: Option<off64_t>) -> Result<u64, i32> {
    u64::try_from(given.unwrap_or_else(|| remote::offset(open))).map_err(|_| libc::EINVAL)
}

/// Moves an open file's own offset, or the caller's.
unsafe fn advance_file(open: Open, at: *mut off64_t, by: usize) {
    if !at.is_null() {
        // SAFETY: the program passes an offset.
        unsafe { advance(at, by) };
        return;
    }
    while let Ok(lock) = remote::lock_offset(open) {
        let from = open.entry.offset();
        // Otherwise this process was stopped, and others have gone on.
        if open.entry.set_offset(&lock, from, from.saturating_add(by as i64)) {
            return;
        }
    }
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

/// Copies through this process, reading and writing in turns; stops where the source ends. A write ends before
/// the next one begins: others see a file that grows, and what is left of it if this process is killed, without
/// holes.
unsafe fn copy_in_turns(
    (from, kind): (c_int, u32),
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let mut pace = Pace::new(to);
    // Some file systems read less than there is. But a pipe would wait for more, and a server be asked again.
    let goes_on = kind != libc::S_IFIFO && descriptors::find(from).is_none();
    let mut buffer = Vec::new();
    let mut done = 0usize;
    while done < count {
        buffer.resize(pace.bytes.min(count - done), 0);
        let (length, begin) = (buffer.len(), Instant::now());
        let room = &mut buffer[..];
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
        pace.moved(moved, begin.elapsed());
        if put < got || (got < length as isize && !goes_on) {
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
        let in_turns = || copy_in_turns((from, libc::S_IFREG), at, to, to_at, count);
        match (descriptors::find(from), descriptors::find(to)) {
            (Some(source), Some(target))
                if at.is_null() && std::ptr::eq(source.entry, target.entry) =>
            {
                ours(|| copy_onto_itself(source, count))
            }
            // With a limit of the file's length, the kernel looks first whether there is anything to copy.
            (Some(source), Some(target))
                if is_for_server(source, target) && limits::file_bytes().is_none() =>
            {
                let part = |count| ours(|| copy_by_server(source, at, target, to_at, count));
                match in_parts(count, part) {
                    // As between parts of an export, or for bytes that overlap.
                    -1 if matches!(errno(), libc::EXDEV | libc::EINVAL | libc::EOPNOTSUPP) => {
                        in_turns()
                    }
                    copied => copied,
                }
            }
            _ => in_turns(),
        }
    }
}

/// `sendfile` from and to the offset that both have: nothing changes but this offset.
fn copy_onto_itself(open: Open, count: size_t) -> Result<isize, i32> {
    let left = remote::stat(open)?.size.saturating_sub(offset(open, None)?);
    let copied = count.min(usize::try_from(left).unwrap_or(usize::MAX));
    // SAFETY: there is no offset of the program.
    unsafe { advance_file(open, std::ptr::null_mut(), copied) };
    Ok(copied as isize)
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
    // SAFETY: the program passes valid arguments.
    unsafe {
        match (source, target) {
            (Some(source), Some(target)) if is_for_server(source, target) => {
                ours(|| copy_by_server(source, from_at, target, to_at, count))
            }
            _ => copy_in_turns((from, libc::S_IFREG), from_at, to, to_at, count),
        }
    }
}

/// Returns true if the server is to copy: not into a file of which this run has shared mappings, which have to
/// show what was copied.
fn is_for_server(source: Open, target: Open) -> bool {
    mount(source) == mount(target)
        && (maps::which(source) == maps::which(target) || !maps::has_shared(target))
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
    let _ = maps::write_back_file(source);
    let copied = maps::changing(target, || {
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
            Ok(()) => {
                copy_in_turns((from, libc::S_IFIFO), from_at, to, to_at, count.min(SPLICE_BYTES))
            }
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
