//! Hooks that change attributes of files, and the umask.

use super::{by_path, itself, maps, or_working, shared};
use crate::changed::Change;
use crate::descriptors::{self, Open};
use crate::guard::ours;
use crate::table::real;
use crate::{fresh, limits, remote, start};
use libc::{c_char, c_int, gid_t, mode_t, off64_t, timespec, timeval, uid_t, utimbuf};
use std::sync::atomic::Ordering;
use towline_client::{Attr, SetAttr};
use towline_wire::Timestamp;

/// Sets attributes of a remote path, or has libc do it for a local one.
unsafe fn set(
    at: c_int,
    path: *const c_char,
    follow: bool,
    set: SetAttr,
    local: impl Fn(c_int, *const c_char) -> c_int,
) -> c_int {
    let remote = |at: &crate::place::At| {
        let change = || {
            let change = Change::begin(at.mount);
            let attr = at.with(|base, path| base.set_attr(path, follow, &set));
            let attr = attr.map_err(|error| change.failed(error))?;
            change.set(&attr);
            Ok(attr)
        };
        let Some(size) = set.size else { return change().map(|_| 0) };
        let look = || at.with(|base, path| base.stat_path(path, follow));
        let now = || look().map(|attr| attr.size);
        let which = |attr: Attr| (at.mount, attr.identity());
        limits::check(size, now)?;
        let call = || change().map(|attr| (which(attr), 0));
        let read = |_: &_, to: &mut [u8], from| {
            let flags = libc::O_RDONLY as u32;
            at.with(|base, path| shared::read_from(&base.open(path, flags, 0)?, to, from))
        };
        maps::resizing(size, || look().map(which).map(Some), now, call, read)
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, follow, local, remote) }
}

/// Sets attributes of a remote open file; returns `None` for a local one.
fn set_open(fd: c_int, set: &SetAttr) -> Option<c_int> {
    let open = descriptors::find(fd)?;
    Some(ours(|| {
        if remote::is_path(open) {
            return Err(libc::EBADF);
        }
        if fresh::send(open, set) {
            return Ok(0);
        }
        change_open(open, set)
    }))
}

fn set_itself(open: Open, set: &SetAttr) -> c_int {
    ours(|| change_open(open, set))
}

fn change_open(open: Open, set: &SetAttr) -> Result<c_int, i32> {
    let change = Change::begin(open.entry.mount.load(Ordering::Relaxed) as usize);
    let attr = remote::with(open, |file| file.set_attr(b"", true, set));
    change.set(&attr.map_err(|error| change.failed(error))?);
    Ok(0)
}

fn mode_of(mode: mode_t) -> SetAttr {
    SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() }
}

fn owner_of(uid: uid_t, gid: gid_t) -> SetAttr {
    let known = |id: u32| (id != u32::MAX).then_some(id);
    SetAttr { uid: known(uid), gid: known(gid), ..SetAttr::default() }
}

fn times_of(times: Option<[timespec; 2]>) -> SetAttr {
    let one = |time: timespec| match time.tv_nsec {
        libc::UTIME_NOW => Timestamp::NOW,
        libc::UTIME_OMIT => Timestamp::OMIT,
        // The server refuses what is no number of nanoseconds.
        other => Timestamp::new(time.tv_sec, u32::try_from(other).unwrap_or(u32::MAX)),
    };
    let times = times.map_or((Timestamp::NOW, Timestamp::NOW), |[a, m]| (one(a), one(m)));
    SetAttr { times: Some(times), ..SetAttr::default() }
}

unsafe fn pair<T: Copy>(times: *const T) -> Option<[T; 2]> {
    // SAFETY: the program passes null or two values.
    (!times.is_null()).then(|| unsafe { [*times, *times.add(1)] })
}

/// Converts microseconds to nanoseconds; what is no number of microseconds to no number of nanoseconds.
unsafe fn finer(times: *const timeval) -> Option<[timespec; 2]> {
    // SAFETY: the program passes valid arguments.
    let times = unsafe { pair(times) }?;
    let nanoseconds = |count| if (0..1_000_000).contains(&count) { count * 1000 } else { -1 };
    Some(times.map(|time| timespec { tv_sec: time.tv_sec, tv_nsec: nanoseconds(time.tv_usec) }))
}

pub(crate) unsafe fn truncate(path: *const c_char, length: off64_t) -> c_int {
    if length < 0 {
        return crate::guard::finish(Err(libc::EINVAL));
    }
    let size = SetAttr { size: Some(length as u64), ..SetAttr::default() };
    // SAFETY: the program passes valid arguments.
    unsafe { set(libc::AT_FDCWD, path, true, size, |_, path| real::truncate(path, length)) }
}

pub(crate) unsafe fn chmod(path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fchmodat(libc::AT_FDCWD, path, mode, 0) }
}

pub(crate) unsafe fn lchmod(path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fchmodat(libc::AT_FDCWD, path, mode, libc::AT_SYMLINK_NOFOLLOW) }
}

pub(crate) unsafe fn fchmod(fd: c_int, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    set_open(fd, &mode_of(mode)).unwrap_or_else(|| unsafe { real::fchmod(fd, mode) })
}

/// Flags that `fchmodat`, `fchownat` and `utimensat` know.
const KNOWN: c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;

pub(crate) unsafe fn fchmodat(at: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int {
    if flags & !KNOWN != 0 {
        // SAFETY: the program passes valid arguments. Unknown flags are refused for any path.
        return unsafe { real::fchmodat(at, path, mode, flags) };
    }
    // SAFETY: the program passes valid arguments.
    let path = unsafe { or_working(at, path, flags) };
    // SAFETY: the program passes valid arguments.
    if let Some(open) = unsafe { itself(at, path, flags) } {
        return set_itself(open, &mode_of(mode));
    }
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::fchmodat(at, path, mode, flags) };
    // SAFETY: the program passes valid arguments.
    unsafe { set(at, path, follow, mode_of(mode), local) }
}

pub(crate) unsafe fn chown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fchownat(libc::AT_FDCWD, path, uid, gid, 0) }
}

pub(crate) unsafe fn lchown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fchownat(libc::AT_FDCWD, path, uid, gid, libc::AT_SYMLINK_NOFOLLOW) }
}

pub(crate) unsafe fn fchown(fd: c_int, uid: uid_t, gid: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    set_open(fd, &owner_of(uid, gid)).unwrap_or_else(|| unsafe { real::fchown(fd, uid, gid) })
}

pub(crate) unsafe fn fchownat(
    at: c_int,
    path: *const c_char,
    uid: uid_t,
    gid: gid_t,
    flags: c_int,
) -> c_int {
    if flags & !KNOWN != 0 {
        // SAFETY: the program passes valid arguments. Unknown flags are refused for any path.
        return unsafe { real::fchownat(at, path, uid, gid, flags) };
    }
    // SAFETY: the program passes valid arguments.
    let path = unsafe { or_working(at, path, flags) };
    // SAFETY: the program passes valid arguments.
    if let Some(open) = unsafe { itself(at, path, flags) } {
        return set_itself(open, &owner_of(uid, gid));
    }
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::fchownat(at, path, uid, gid, flags) };
    // SAFETY: the program passes valid arguments.
    unsafe { set(at, path, follow, owner_of(uid, gid), local) }
}

pub(crate) unsafe fn utime(path: *const c_char, times: *const utimbuf) -> c_int {
    // SAFETY: the program passes null or a structure.
    let two = unsafe { times.as_ref() }.map(|times| {
        [times.actime, times.modtime].map(|seconds| timespec { tv_sec: seconds, tv_nsec: 0 })
    });
    // SAFETY: the program passes valid arguments.
    unsafe { set(libc::AT_FDCWD, path, true, times_of(two), |_, path| real::utime(path, times)) }
}

pub(crate) unsafe fn utimes(path: *const c_char, times: *const timeval) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let local = |_, path| real::utimes(path, times);
        set(libc::AT_FDCWD, path, true, times_of(finer(times)), local)
    }
}

pub(crate) unsafe fn lutimes(path: *const c_char, times: *const timeval) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let local = |_, path| real::lutimes(path, times);
        set(libc::AT_FDCWD, path, false, times_of(finer(times)), local)
    }
}

pub(crate) unsafe fn futimes(fd: c_int, times: *const timeval) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { set_open(fd, &times_of(finer(times))).unwrap_or_else(|| real::futimes(fd, times)) }
}

pub(crate) unsafe fn futimesat(at: c_int, path: *const c_char, times: *const timeval) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if path.is_null() {
            return futimes(at, times);
        }
        let local = |at, path| real::futimesat(at, path, times);
        set(at, path, true, times_of(finer(times)), local)
    }
}

pub(crate) unsafe fn utimensat(
    at: c_int,
    path: *const c_char,
    times: *const timespec,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if flags & !KNOWN != 0 {
            // Unknown flags are refused for any path.
            return real::utimensat(at, path, times, flags);
        }
        if path.is_null() {
            return futimens(at, times);
        }
        let path = or_working(at, path, flags);
        if let Some(open) = itself(at, path, flags) {
            return set_itself(open, &times_of(pair(times)));
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        let local = |at, path| real::utimensat(at, path, times, flags);
        set(at, path, follow, times_of(pair(times)), local)
    }
}

pub(crate) unsafe fn futimens(fd: c_int, times: *const timespec) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { set_open(fd, &times_of(pair(times))).unwrap_or_else(|| real::futimens(fd, times)) }
}

pub(crate) unsafe fn umask(mask: mode_t) -> mode_t {
    start::set_umask(mask);
    // SAFETY: the program passes valid arguments.
    unsafe { real::umask(mask) }
}
