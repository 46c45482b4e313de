//! Reading and writing.

use crate::descriptors::{self, Open};
use crate::guard::{finish, inside, ours};
use crate::remote;
use crate::table::real;
use libc::{c_int, c_uint, c_void, iovec, off64_t, size_t, ssize_t};
use towline_client::SetAttr;
use towline_wire::request::sync_kind;

/// Bytes moved at once between a remote file and something else.
const PIECE_BYTES: usize = 256 * 1024;
/// Most bytes that one `splice` moves: what a pipe holds by default.
const SPLICE_BYTES: usize = 64 * 1024;
/// Most bytes of one call, as on Linux.
const CALL_BYTES_MAX: usize = 0x7fff_f000;

/// Memory that the program lends, cut to what one call may move.
///
/// # Safety
/// `count` bytes at `at` may be written.
pub(crate) unsafe fn target<'a>(at: *mut c_void, count: size_t) -> Result<&'a mut [u8], i32> {
    match (at.is_null(), count) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(libc::EFAULT),
        // SAFETY: as the caller says.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), count.min(CALL_BYTES_MAX)) }),
    }
}

/// [`target`] to be read from.
///
/// # Safety
/// `count` bytes at `at` may be read.
pub(crate) unsafe fn source<'a>(at: *const c_void, count: size_t) -> Result<&'a [u8], i32> {
    // SAFETY: as the caller says; nothing is written through it.
    unsafe { target(at.cast_mut(), count) }.map(|bytes| &*bytes)
}

pub(crate) unsafe fn read(fd: c_int, to: *mut c_void, count: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::read(fd, to, count) },
        Some(open) => ours(|| {
            // SAFETY: as the program says.
            Ok(remote::read(open, unsafe { target(to, count) }?)? as isize)
        }),
    }
}

pub(crate) unsafe fn read_chk(fd: c_int, to: *mut c_void, count: size_t, room: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::__read_chk(fd, to, count, room) },
        // SAFETY: as the program says.
        Some(_) => unsafe { read(fd, to, count.min(room)) },
    }
}

pub(crate) unsafe fn write(fd: c_int, data: *const c_void, count: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::write(fd, data, count) },
        Some(open) => ours(|| {
            // SAFETY: as the program says.
            Ok(remote::write(open, unsafe { source(data, count) }?)? as isize)
        }),
    }
}

pub(crate) unsafe fn pread(fd: c_int, to: *mut c_void, count: size_t, at: off64_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::pread(fd, to, count, at) },
        Some(open) => ours(|| {
            // SAFETY: as the program says.
            Ok(remote::read_at(open, unsafe { target(to, count) }?, at)? as isize)
        }),
    }
}

pub(crate) unsafe fn pread_chk(
    fd: c_int,
    to: *mut c_void,
    count: size_t,
    at: off64_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: as the program says.
    unsafe { pread(fd, to, count.min(room), at) }
}

pub(crate) unsafe fn pwrite(fd: c_int, data: *const c_void, count: size_t, at: off64_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::pwrite(fd, data, count, at) },
        Some(open) => ours(|| {
            // SAFETY: as the program says.
            Ok(remote::write_at(open, unsafe { source(data, count) }?, at)?.0 as isize)
        }),
    }
}

/// The parts of a vector.
unsafe fn parts<'a>(parts: *const iovec, count: c_int) -> Result<&'a [iovec], i32> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: as the program says.
        Ok(count @ 1..=1024) if !parts.is_null() => {
            // SAFETY: as the program says.
            Ok(unsafe { std::slice::from_raw_parts(parts, count) })
        }
        _ => Err(libc::EINVAL),
    }
}

/// Reads into the parts, at an offset or at the shared one. Several parts are one read.
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
    // SAFETY: as the program says.
    let parts = unsafe { parts(vector, count) }?;
    if let [part] = parts {
        // SAFETY: as the program says.
        return Ok(get(unsafe { target(part.iov_base, part.iov_len) }?)? as isize);
    }
    let total: usize = parts.iter().map(|part| part.iov_len).sum();
    let mut all = vec![0; total.min(CALL_BYTES_MAX)];
    let count = get(&mut all)?;
    let mut rest = &all[..count];
    for part in parts {
        let (now, later) = rest.split_at(part.iov_len.min(rest.len()));
        // SAFETY: as the program says.
        unsafe { target(part.iov_base, now.len()) }?.copy_from_slice(now);
        rest = later;
    }
    Ok(count as isize)
}

/// Writes the parts, at an offset or at the shared one. Several parts are one write.
unsafe fn gather(
    open: Open,
    vector: *const iovec,
    count: c_int,
    at: Option<i64>,
) -> Result<isize, i32> {
    let put = |data: &[u8]| match at {
        Some(at) => remote::write_at(open, data, at).map(|(count, _)| count),
        None => remote::write(open, data),
    };
    // SAFETY: as the program says.
    let parts = unsafe { parts(vector, count) }?;
    if let [part] = parts {
        // SAFETY: as the program says.
        return Ok(put(unsafe { source(part.iov_base, part.iov_len) }?)? as isize);
    }
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.iov_len).sum());
    for part in parts {
        // SAFETY: as the program says.
        all.extend_from_slice(unsafe { source(part.iov_base, part.iov_len) }?);
    }
    Ok(put(&all)? as isize)
}

pub(crate) unsafe fn readv(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::readv(fd, vector, count) },
        // SAFETY: as the program says.
        Some(open) => ours(|| unsafe { scatter(open, vector, count, None) }),
    }
}

pub(crate) unsafe fn writev(fd: c_int, vector: *const iovec, count: c_int) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::writev(fd, vector, count) },
        // SAFETY: as the program says.
        Some(open) => ours(|| unsafe { gather(open, vector, count, None) }),
    }
}

pub(crate) unsafe fn preadv(fd: c_int, vector: *const iovec, count: c_int, at: off64_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::preadv(fd, vector, count, at) },
        // SAFETY: as the program says.
        Some(open) => ours(|| unsafe { scatter(open, vector, count, Some(at)) }),
    }
}

pub(crate) unsafe fn pwritev(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::pwritev(fd, vector, count, at) },
        // SAFETY: as the program says.
        Some(open) => ours(|| unsafe { gather(open, vector, count, Some(at)) }),
    }
}

pub(crate) unsafe fn preadv2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::preadv2(fd, vector, count, at, flags) },
        // SAFETY: as the program says.
        Some(open) => ours(|| unsafe { scatter(open, vector, count, (at != -1).then_some(at)) }),
    }
}

pub(crate) unsafe fn pwritev2(
    fd: c_int,
    vector: *const iovec,
    count: c_int,
    at: off64_t,
    flags: c_int,
) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::pwritev2(fd, vector, count, at, flags) },
        // RWF_APPEND and RWF_NOWAIT are promises that could not be kept.
        Some(_) if flags & !(libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC) != 0 => {
            finish(Err(libc::EOPNOTSUPP))
        }
        Some(open) => ours(|| {
            // SAFETY: as the program says.
            let count = unsafe { gather(open, vector, count, (at != -1).then_some(at)) }?;
            if flags & (libc::RWF_DSYNC | libc::RWF_SYNC) != 0 {
                remote::with(open, |file| file.sync(sync_kind::DATA))?;
            }
            Ok(count)
        }),
    }
}

pub(crate) unsafe fn lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::lseek(fd, offset, whence) },
        Some(open) => ours(|| remote::seek(open, offset, whence)),
    }
}

pub(crate) unsafe fn ftruncate(fd: c_int, length: off64_t) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::ftruncate(fd, length) },
        Some(open) => ours(|| {
            let size = u64::try_from(length).map_err(|_| libc::EINVAL)?;
            let flags = open.entry.flags.load(std::sync::atomic::Ordering::Relaxed) as c_int;
            if flags & libc::O_PATH != 0 {
                return Err(libc::EBADF);
            }
            if flags & libc::O_ACCMODE == libc::O_RDONLY {
                return Err(libc::EINVAL);
            }
            let set = SetAttr { size: Some(size), ..SetAttr::default() };
            remote::with(open, |file| file.set_attr(b"", true, &set)).map(|_| 0)
        }),
    }
}

fn sync(open: Open, kind: u32) -> c_int {
    ours(|| {
        super::maps::write_back_file(open);
        remote::with(open, |file| file.sync(kind)).map(|()| 0)
    })
}

pub(crate) unsafe fn fsync(fd: c_int) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::fsync(fd) },
        Some(open) => sync(open, sync_kind::FULL),
    }
}

pub(crate) unsafe fn fdatasync(fd: c_int) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::fdatasync(fd) },
        Some(open) => sync(open, sync_kind::DATA),
    }
}

pub(crate) unsafe fn syncfs(fd: c_int) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::syncfs(fd) },
        Some(open) => sync(open, sync_kind::FILE_SYSTEM),
    }
}

pub(crate) unsafe fn sync_file_range(
    fd: c_int,
    from: off64_t,
    count: off64_t,
    how: c_uint,
) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::sync_file_range(fd, from, count, how) },
        Some(open) => sync(open, sync_kind::DATA),
    }
}

fn allocate(open: Open, mode: c_int, from: off64_t, length: off64_t) -> Result<(), i32> {
    let from = u64::try_from(from).map_err(|_| libc::EINVAL)?;
    let length = u64::try_from(length).ok().filter(|length| *length > 0).ok_or(libc::EINVAL)?;
    remote::with(open, |file| file.allocate(mode as u32, from, length))
}

pub(crate) unsafe fn fallocate(fd: c_int, mode: c_int, from: off64_t, length: off64_t) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::fallocate(fd, mode, from, length) },
        Some(open) => ours(|| allocate(open, mode, from, length).map(|()| 0)),
    }
}

pub(crate) unsafe fn posix_fallocate(fd: c_int, from: off64_t, length: off64_t) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::posix_fallocate(fd, from, length) },
        // The error is the result here.
        Some(open) => inside(|| allocate(open, 0, from, length)).err().unwrap_or(0),
    }
}

pub(crate) unsafe fn posix_fadvise(
    fd: c_int,
    from: off64_t,
    length: off64_t,
    what: c_int,
) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::posix_fadvise(fd, from, length, what) },
        Some(_) => 0,
    }
}

pub(crate) unsafe fn readahead(fd: c_int, from: off64_t, count: size_t) -> ssize_t {
    match descriptors::find(fd) {
        // SAFETY: as the program says.
        None => unsafe { real::readahead(fd, from, count) },
        Some(_) => 0,
    }
}

/// Where a copy reads or writes: an offset that the caller keeps, or the file's own.
unsafe fn place_of(at: *mut off64_t) -> Option<off64_t> {
    // SAFETY: null or an offset, as the program says.
    unsafe { at.as_ref() }.copied()
}

unsafe fn advance(at: *mut off64_t, by: usize) {
    // SAFETY: null or an offset, as the program says.
    if let Some(at) = unsafe { at.as_mut() } {
        *at += by as i64;
    }
}

/// Copies through this process; stops at the first short piece.
unsafe fn copy(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
) -> ssize_t {
    let access = |fd| {
        descriptors::find(fd).map(|open: Open| {
            let flags = open.entry.flags.load(std::sync::atomic::Ordering::Relaxed) as c_int;
            if flags & libc::O_PATH != 0 { libc::O_ACCMODE } else { flags & libc::O_ACCMODE }
        })
    };
    // Before anything is read.
    if matches!(access(from), Some(libc::O_WRONLY | libc::O_ACCMODE))
        || matches!(access(to), Some(libc::O_RDONLY | libc::O_ACCMODE))
    {
        return finish(Err(libc::EBADF));
    }
    let mut buffer = vec![0u8; PIECE_BYTES.min(count.max(1))];
    let mut done = 0usize;
    while done < count {
        let room = &mut buffer[..PIECE_BYTES.min(count - done)];
        let length = room.len();
        // SAFETY: the buffer holds `length` bytes; descriptors and offsets are the program's.
        let got = unsafe {
            match place_of(from_at) {
                Some(at) => pread(from, room.as_mut_ptr().cast(), length, at),
                None => read(from, room.as_mut_ptr().cast(), length),
            }
        };
        if got <= 0 {
            return if done > 0 { done as isize } else { got };
        }
        // SAFETY: as above.
        let put = unsafe {
            match place_of(to_at) {
                Some(at) => pwrite(to, room.as_ptr().cast(), got as usize, at),
                None => write(to, room.as_ptr().cast(), got as usize),
            }
        };
        let moved = put.max(0) as usize;
        if (moved as isize) < got && place_of_is_own(from_at) {
            // What could not be written is to be read again.
            // SAFETY: the program's descriptor.
            unsafe { lseek(from, moved as i64 - got as i64, libc::SEEK_CUR) };
        }
        // SAFETY: the program's offsets.
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

pub(crate) unsafe fn sendfile(to: c_int, from: c_int, at: *mut off64_t, count: size_t) -> ssize_t {
    if descriptors::find(from).is_none() && descriptors::find(to).is_none() {
        // SAFETY: as the program says.
        return unsafe { real::sendfile(to, from, at, count) };
    }
    // SAFETY: as the program says.
    unsafe { copy(from, at, to, std::ptr::null_mut(), count.min(CALL_BYTES_MAX)) }
}

pub(crate) unsafe fn copy_file_range(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    let (Some(source), Some(target)) = (descriptors::find(from), descriptors::find(to)) else {
        return if descriptors::find(from).is_none() && descriptors::find(to).is_none() {
            // SAFETY: as the program says.
            unsafe { real::copy_file_range(from, from_at, to, to_at, count, flags) }
        } else {
            // SAFETY: as the program says.
            unsafe { copy(from, from_at, to, to_at, count.min(CALL_BYTES_MAX)) }
        };
    };
    let mounts = [source, target].map(|o| o.entry.mount.load(std::sync::atomic::Ordering::Relaxed));
    if mounts[0] != mounts[1] {
        // SAFETY: as the program says.
        return unsafe { copy(from, from_at, to, to_at, count.min(CALL_BYTES_MAX)) };
    }
    ours(|| {
        let offset = |open: Open, at: Option<i64>| {
            at.unwrap_or_else(|| open.entry.offset.load(std::sync::atomic::Ordering::Relaxed))
        };
        // SAFETY: as the program says.
        let (a, b) = unsafe { (place_of(from_at), place_of(to_at)) };
        let (read_at, write_at) = (offset(source, a), offset(target, b));
        let (Ok(r), Ok(w)) = (u64::try_from(read_at), u64::try_from(write_at)) else {
            return Err(libc::EINVAL);
        };
        let count = count.min(CALL_BYTES_MAX) as u64;
        let handle = target.entry.handle.load(std::sync::atomic::Ordering::Relaxed);
        let client = remote::client(mounts[0] as usize)?;
        let copied = remote::with(source, |source| {
            client.with_handle(handle, 0, |target| source.copy_range(r, target, w, count))
        })? as usize;
        for (open, own, pointer) in [(source, a.is_none(), from_at), (target, b.is_none(), to_at)] {
            if own {
                let offset = &open.entry.offset;
                offset.fetch_add(copied as i64, std::sync::atomic::Ordering::Relaxed);
            } else {
                // SAFETY: as the program says.
                unsafe { advance(pointer, copied) };
            }
        }
        Ok(copied as isize)
    })
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
        // SAFETY: as the program says.
        return unsafe { real::splice(from, from_at, to, to_at, count, flags) };
    }
    // One side is a pipe, which gives what it has: one piece, or an empty pipe would be waited for.
    // SAFETY: as the program says.
    unsafe { copy(from, from_at, to, to_at, count.min(SPLICE_BYTES)) }
}
