//! Hooks for reading and writing by descriptor, and for the offset, length and storage of files.

use super::{maps, shared};
use crate::descriptors::{self, Open};
use crate::guard::{self, Failed, inside, ours};
use crate::table::real;
use crate::{behind, fresh, limits, place, remote};
use libc::{c_int, c_uint, c_void, iovec, off64_t, size_t, ssize_t};
use std::sync::atomic::Ordering;
use towline_client::{Errno, File, SetAttr};
use towline_wire::request::sync_kind;

/// Most bytes that one call moves, as on Linux.
pub(crate) const CALL_BYTES_MAX: usize = 0x7fff_f000;
/// Parts of a vector, all at least as long, are each read into by a request of their own.
const OWN_READ_BYTES: usize = 64 * 1024;

/// Returns the program's memory, cut to what one call may move.
///
/// # Safety
/// `count` bytes at `at` may be written.
pub(crate) unsafe fn target<'a>(at: *mut c_void, count: size_t) -> Result<&'a mut [u8], i32> {
    match (!place::is_address(at.cast()), count) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(libc::EFAULT),
        // SAFETY: guaranteed by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), count.min(CALL_BYTES_MAX)) }),
    }
}

/// [`target`] for reading from the memory.
///
/// # Safety
/// `count` bytes at `at` may be read.
pub(crate) unsafe fn source<'a>(at: *const c_void, count: size_t) -> Result<&'a [u8], i32> {
    // SAFETY: guaranteed by the caller; nothing is written through the result.
    unsafe { target(at.cast_mut(), count) }.map(|bytes| &*bytes)
}

/// Runs the local or remote form of a call on a descriptor. Runs it again if it fails with `EBADF` because
/// another thread has replaced the descriptor meanwhile (`dup2`): for the kernel, too, a call uses either
/// the old or the new file.
fn on<T: Failed + PartialEq>(
    fd: c_int,
    local: impl Fn() -> T,
    remote: impl Fn(Open) -> Result<T, i32>,
) -> T {
    let mut found = descriptors::find(fd);
    loop {
        let result = match found {
            None => local(),
            Some(open) => ours(|| remote(open)),
        };
        if result != T::FAILED || guard::errno() != libc::EBADF {
            return result;
        }
        let before = std::mem::replace(&mut found, descriptors::find(fd));
        if before.map(|open| open.handle) == found.map(|open| open.handle) {
            return result;
        }
    }
}

pub(crate) unsafe fn read(fd: c_int, to: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::read(fd, to, count) },
        |open| {
            // SAFETY: the program passes valid arguments.
            Ok(remote::read(open, unsafe { target(to, count) }?)? as isize)
        },
    )
}

pub(crate) unsafe fn read_chk(fd: c_int, to: *mut c_void, count: size_t, room: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::__read_chk(fd, to, count, room) },
        // SAFETY: the program passes valid arguments.
        Some(_) => unsafe { read(fd, to, count.min(room)) },
    }
}

pub(crate) unsafe fn write(fd: c_int, data: *const c_void, count: size_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::write(fd, data, count) },
        |open| {
            // SAFETY: the program passes valid arguments.
            Ok(remote::write(open, unsafe { source(data, count) }?)? as isize)
        },
    )
}

pub(crate) unsafe fn pread(fd: c_int, to: *mut c_void, count: size_t, at: off64_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::pread(fd, to, count, at) },
        |open| {
            // SAFETY: the program passes valid arguments.
            Ok(remote::read_at(open, unsafe { target(to, count) }?, at)? as isize)
        },
    )
}

pub(crate) unsafe fn pread_chk(
    fd: c_int,
    to: *mut c_void,
    count: size_t,
    at: off64_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe { pread(fd, to, count.min(room), at) }
}

pub(crate) unsafe fn pwrite(fd: c_int, data: *const c_void, count: size_t, at: off64_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::pwrite(fd, data, count, at) },
        |open| {
            // SAFETY: the program passes valid arguments.
            Ok(remote::write_at(open, unsafe { source(data, count) }?, at)?.0 as isize)
        },
    )
}

/// Returns the parts of a vector, with the errors of the kernel.
unsafe fn parts<'a>(parts: *const iovec, count: c_int) -> Result<&'a [iovec], i32> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: the program passes valid arguments.
        Ok(count @ 1..=1024) if !parts.is_null() => {
            // SAFETY: the program passes valid arguments.
            let parts = unsafe { std::slice::from_raw_parts(parts, count) };
            let total = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.iov_len));
            match total {
                Some(total) if isize::try_from(total).is_ok() => Ok(parts),
                _ => Err(libc::EINVAL),
            }
        }
        Ok(1..=1024) => Err(libc::EFAULT),
        _ => Err(libc::EINVAL),
    }
}

/// Reads into the parts, at `at` or at the file's own offset. Several parts are filled by one read, unless each of them is
/// so long that another request costs less than copying them.
unsafe fn scatter(
    open: Open,
    vector: *const iovec,
    count: c_int,
    at: Option<i64>,
) -> Result<isize, i32> {
    let get = |room: &mut [u8]| match at {
        Some(at) => remote::read_at(open, room, at),
        None => remote::read(open, room),
    };
    // SAFETY: the program passes valid arguments.
    let parts = unsafe { parts(vector, count) }?;
    let total: usize = parts.iter().map(|part| part.iov_len).sum();
    if total == 0 {
        // This is not an error for a directory either.
        let is_wrong = at.is_some_and(|at| at < 0);
        return if is_wrong { Err(libc::EINVAL) } else { remote::check_readable(open).map(|()| 0) };
    }
    if let [part] = parts {
        // SAFETY: the program passes valid arguments.
        return Ok(get(unsafe { target(part.iov_base, part.iov_len) }?)? as isize);
    }
    if let Some(at) = at
        && parts.iter().all(|part| part.iov_len >= OWN_READ_BYTES)
    {
        let mut done = 0;
        for part in parts {
            let length = part.iov_len.min(CALL_BYTES_MAX - done);
            // SAFETY: the program passes valid arguments.
            let room = unsafe { target(part.iov_base, length) };
            let from = at.saturating_add(done as i64);
            let count = match room.and_then(|room| remote::read_at(open, room, from)) {
                Err(error) if done == 0 => return Err(error),
                read => read.unwrap_or(0),
            };
            done += count;
            if count < part.iov_len {
                break;
            }
        }
        return Ok(done as isize);
    }
    let mut all = vec![0; total.min(CALL_BYTES_MAX)];
    let count = get(&mut all)?;
    let mut rest = &all[..count];
    for part in parts {
        let (now, later) = rest.split_at(part.iov_len.min(rest.len()));
        // SAFETY: the program passes valid arguments.
        unsafe { target(part.iov_base, now.len()) }?.copy_from_slice(now);
        rest = later;
    }
    Ok(count as isize)
}

/// Returns a function that writes at `at`, or at the file's own offset.
fn at_offset(open: Open, at: Option<i64>) -> impl Fn(&[u8]) -> Result<usize, i32> {
    move |data| match at {
        Some(at) => remote::write_at(open, data, at).map(|(count, _)| count),
        None => remote::write(open, data),
    }
}

/// Writes the parts with `put`. Several parts make one write.
unsafe fn gather(
    vector: *const iovec,
    count: c_int,
    put: impl Fn(&[u8]) -> Result<usize, i32>,
) -> Result<isize, i32> {
    // SAFETY: the program passes valid arguments.
    let parts = unsafe { parts(vector, count) }?;
    if let [part] = parts {
        // SAFETY: the program passes valid arguments.
        return Ok(put(unsafe { source(part.iov_base, part.iov_len) }?)? as isize);
    }
    let total: usize = parts.iter().map(|part| part.iov_len).sum();
    let mut left = total.min(CALL_BYTES_MAX);
    let mut all = Vec::new();
    all.try_reserve_exact(left).map_err(|_| libc::ENOMEM)?;
    for part in parts {
        let length = part.iov_len.min(left);
        left -= length;
        // SAFETY: the program passes valid arguments.
        all.extend_from_slice(unsafe { source(part.iov_base, length) }?);
    }
    Ok(put(&all)? as isize)
}

pub(crate) unsafe fn readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::readv(fd, vector, count) },
        |open| unsafe { scatter(open, vector, count, None) },
    )
}

pub(crate) unsafe fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::writev(fd, vector, count) },
        |open| unsafe { gather(vector, count, at_offset(open, None)) },
    )
}

pub(crate) unsafe fn preadv(fd: c_int, vector: *const iovec, count: c_int, at: off64_t) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::preadv(fd, vector, count, at) },
        |open| unsafe { scatter(open, vector, count, Some(at)) },
    )
}

pub(crate) unsafe fn pwritev(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::pwritev(fd, vector, count, at) },
        |open| unsafe { gather(vector, count, at_offset(open, Some(at))) },
    )
}

pub(crate) unsafe fn preadv2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::preadv2(fd, vector, count, at, flags) },
        |open| {
            // Flags that apply to reads, or have no effect.
            const KNOWN: c_int = libc::RWF_HIPRI
                | libc::RWF_DSYNC
                | libc::RWF_SYNC
                | libc::RWF_NOWAIT
                | libc::RWF_APPEND;
            if flags & !KNOWN != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            // SAFETY: the program passes valid arguments.
            unsafe { scatter(open, vector, count, (at != -1).then_some(at)) }
        },
    )
}

pub(crate) unsafe fn pwritev2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::pwritev2(fd, vector, count, at, flags) },
        |open| {
            remote::check_writable(open)?;
            let at = (at != -1).then_some(at);
            // Not `RWF_NOWAIT`: the library cannot promise not to wait.
            const KNOWN: c_int =
                libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND;
            if flags & !KNOWN != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            let count = if flags & libc::RWF_APPEND != 0 {
                // SAFETY: the program passes valid arguments.
                unsafe { gather(vector, count, |data| remote::append(open, data, at.is_none())) }?
            } else {
                // SAFETY: the program passes valid arguments.
                unsafe { gather(vector, count, at_offset(open, at)) }?
            };
            if flags & (libc::RWF_DSYNC | libc::RWF_SYNC) != 0 {
                remote::with(open, |file| file.sync(sync_kind::DATA))?;
                behind::check(open)?;
            }
            Ok(count)
        },
    )
}

pub(crate) unsafe fn lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    // SAFETY: the program passes valid arguments.
    on(fd, || unsafe { real::lseek(fd, offset, whence) }, |open| remote::seek(open, offset, whence))
}

pub(crate) unsafe fn ftruncate(fd: c_int, length: off64_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::ftruncate(fd, length) },
        |open| {
            let size = u64::try_from(length).map_err(|_| libc::EINVAL)?;
            let flags = open.entry.flags.load(Ordering::Relaxed) as c_int;
            if flags & libc::O_PATH != 0 {
                return Err(libc::EBADF);
            }
            if flags & libc::O_ACCMODE == libc::O_RDONLY {
                return Err(libc::EINVAL);
            }
            let file = maps::which(open);
            let now = || remote::with(open, File::stat).map(|attr| attr.size);
            limits::check(size, now)?;
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            let call =
                || remote::with(open, |file| file.set_attr(b"", true, &set)).map(|_| (file, 0));
            let read = |_: &_, to: &mut [u8], at| shared::read(open, to, at);
            maps::resizing(size, || Ok(Some(file)), now, call, read)
        },
    )
}

fn sync(open: Open, kind: u32) -> Result<c_int, i32> {
    if remote::is_path(open) {
        return Err(libc::EBADF);
    }
    let written = maps::write_back_file(open);
    let synced = remote::with(open, |file| file.sync(kind)).map(|()| 0);
    behind::check(open).and(fresh::settle(open)).and(written).and(synced)
}

pub(crate) unsafe fn fsync(fd: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    on(fd, || unsafe { real::fsync(fd) }, |open| sync(open, sync_kind::FULL))
}

pub(crate) unsafe fn fdatasync(fd: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    on(fd, || unsafe { real::fdatasync(fd) }, |open| sync(open, sync_kind::DATA))
}

pub(crate) unsafe fn syncfs(fd: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    on(fd, || unsafe { real::syncfs(fd) }, |open| sync(open, sync_kind::FILE_SYSTEM))
}

pub(crate) unsafe fn sync_file_range(
    fd: c_int,
    from: off64_t,
    count: off64_t,
    how: c_uint,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    on(
        fd,
        || unsafe { real::sync_file_range(fd, from, count, how) },
        |open| {
            const KNOWN: c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE
                | libc::SYNC_FILE_RANGE_WRITE
                | libc::SYNC_FILE_RANGE_WAIT_AFTER;
            let end = from.checked_add(count);
            if how & !KNOWN != 0 || from < 0 || end.is_none_or(|end| end < from) {
                return Err(libc::EINVAL);
            }
            sync(open, sync_kind::DATA)
        },
    )
}

fn allocate(open: Open, mode: c_int, from: off64_t, length: off64_t) -> Result<(), i32> {
    let from = u64::try_from(from).map_err(|_| libc::EINVAL)?;
    let length = u64::try_from(length).ok().filter(|length| *length > 0).ok_or(libc::EINVAL)?;
    if mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
        let end = from.saturating_add(length);
        limits::check(end, || remote::with(open, File::stat).map(|attr| attr.size))?;
    }
    let call = || remote::with(open, |file| file.allocate(mode as u32, from, length));
    match mode & !libc::FALLOC_FL_KEEP_SIZE {
        0 => call(),
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {
            maps::zeroing(open, from..from.saturating_add(length), call)
        }
        _ => maps::changing(open, call),
    }
}

pub(crate) unsafe fn fallocate(fd: c_int, mode: c_int, from: off64_t, length: off64_t) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::fallocate(fd, mode, from, length) },
        Some(open) => ours(|| allocate(open, mode, from, length).map(|()| 0)),
    }
}

pub(crate) unsafe fn posix_fallocate(fd: c_int, from: off64_t, length: off64_t) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::posix_fallocate(fd, from, length) },
        // This function returns the error number.
        Some(open) => inside(|| match allocate(open, 0, from, length) {
            Err(libc::EOPNOTSUPP) => fill(open, from as u64, length as u64),
            done => done,
        })
        .err()
        .unwrap_or(0),
    }
}

/// Allocates a part of a file whose file system cannot do that at once, as libc does: stores a zero byte
/// at the end of each block, unless there is another one.
fn fill(open: Open, from: u64, length: u64) -> Result<(), i32> {
    const BLOCK: usize = 4096;
    const PIECE: usize = 64 * BLOCK;
    const ZERO: [u8; 1] = [0];
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let end = from + length;
    let fill_piece = |file: &File, piece: std::ops::Range<u64>| {
        let mut present = vec![0; (piece.end - piece.start) as usize];
        file.read_at(&mut present, piece.start)?;
        let blocks = present.chunks(BLOCK).enumerate();
        let empty = blocks.filter(|(_, block)| block.last() == Some(&0));
        let started: Vec<_> = empty
            .map(|(number, block)| (number * BLOCK + block.len() - 1) as u64)
            .map(|at| file.start_write_at(ZERO.to_vec(), piece.start + at))
            .collect::<Result<_, _>>()?;
        for operation in started {
            if operation.wait()?.0 == 0 {
                return Err(Errno::ENOSPC.into());
            }
        }
        Ok(())
    };
    for start in (from..end).step_by(PIECE) {
        let piece = start..end.min(start + PIECE as u64);
        // Without the program's flags: with `O_APPEND`, the bytes would go elsewhere.
        remote::with_handle(mount, open.handle, |file| fill_piece(file, piece.clone()))?;
    }
    Ok(())
}

pub(crate) unsafe fn posix_fadvise(
    fd: c_int,
    from: off64_t,
    length: off64_t,
    what: c_int,
) -> c_int {
    const KNOWN: std::ops::RangeInclusive<c_int> =
        libc::POSIX_FADV_NORMAL..=libc::POSIX_FADV_NOREUSE;
    // This function returns the error number.
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::posix_fadvise(fd, from, length, what) },
        Some(open) if remote::is_path(open) => libc::EBADF,
        Some(_) if length < 0 || !KNOWN.contains(&what) => libc::EINVAL,
        Some(_) => 0,
    }
}

pub(crate) unsafe fn readahead(fd: c_int, from: off64_t, count: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::readahead(fd, from, count) },
        Some(open) => ours(|| {
            remote::check_readable(open)?;
            let kind = open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT;
            if kind == libc::S_IFREG { Ok(0) } else { Err(libc::EINVAL) }
        }),
    }
}
