//! Hooks that return attributes of files and file systems.

use super::{by_path, files::named_descriptor, itself, only, or_working};
use crate::descriptors::{self, Open};
use crate::guard::ours;
use crate::table::real;
use crate::{known, remote, start, written};
use libc::{c_char, c_int, c_long, c_uint, stat64, statfs64, statvfs64};
use std::sync::atomic::Ordering;
use towline_wire::request::open_flag;
use towline_wire::{Attr, StatFs, Timestamp};

/// The file system type that `statfs` returns: CIFS. Programs know it as remote. They poll its files
/// instead of watching them, and those that walk trees (`find`, `du`, `chmod -R`) take names in the order
/// of the listing. On other file systems they sort long directories by inode, and what came with the
/// listing is of no use. (They do not sort on NFS either, but some programs, such as cargo, take no locks
/// there.)
const KIND: i64 = 0xff53_4d42;

/// Flags that `fstatat` and `statx` know.
const STAT_FLAGS: c_int = libc::AT_SYMLINK_NOFOLLOW
    | libc::AT_NO_AUTOMOUNT
    | libc::AT_EMPTY_PATH
    | libc::AT_STATX_FORCE_SYNC
    | libc::AT_STATX_DONT_SYNC;

fn device(mount: usize, attr: &Attr) -> u64 {
    let device = start::mounts().get(mount).map_or(0, |target| target.mount.device);
    // The minor numbers of mounts fit into a byte.
    let file_system = u32::from(attr.file_system()) << 8;
    libc::makedev(libc::major(device), libc::minor(device) | file_system)
}

/// Returns how many bytes of a file programs should read or write at once (`st_blksize`), as each call may
/// be a round trip. Python uses all of it, stdio at most 8 KiB, twice what it uses for local files.
fn preferred_bytes(attr: &Attr) -> u32 {
    const FILE_BYTES: u32 = 64 * 1024;
    if attr.is_file() { attr.block_bytes.max(FILE_BYTES) } else { attr.block_bytes }
}

/// Fills in attributes as `stat` returns them.
fn fill(attr: &Attr, mount: usize, to: *mut stat64) -> Result<c_int, i32> {
    // SAFETY: the program passes null or a structure.
    let Some(to) = (unsafe { to.as_mut() }) else { return Err(libc::EFAULT) };
    // SAFETY: all zero is a valid `stat`.
    *to = unsafe { std::mem::zeroed() };
    to.st_dev = device(mount, attr);
    to.st_ino = attr.inode;
    to.st_nlink = attr.links as _;
    to.st_mode = attr.mode;
    to.st_uid = attr.uid;
    to.st_gid = attr.gid;
    to.st_rdev = attr.rdev;
    to.st_size = attr.size as i64;
    to.st_blksize = preferred_bytes(attr) as _;
    to.st_blocks = attr.blocks as i64;
    (to.st_atime, to.st_atime_nsec) = (attr.accessed.seconds, i64::from(attr.accessed.nanoseconds));
    (to.st_mtime, to.st_mtime_nsec) = (attr.modified.seconds, i64::from(attr.modified.nanoseconds));
    (to.st_ctime, to.st_ctime_nsec) = (attr.changed.seconds, i64::from(attr.changed.nanoseconds));
    Ok(0)
}

fn stat_open(open: Open, to: *mut stat64) -> c_int {
    ours(|| fill(&remote::stat(open)?, open.entry.mount.load(Ordering::Relaxed) as usize, to))
}

pub(crate) unsafe fn stat(path: *const c_char, to: *mut stat64) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fstatat(libc::AT_FDCWD, path, to, 0) }
}

pub(crate) unsafe fn lstat(path: *const c_char, to: *mut stat64) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fstatat(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
}

pub(crate) unsafe fn fstat(fd: c_int, to: *mut stat64) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::fstat(fd, to) },
        Some(open) => stat_open(open, to),
    }
}

/// `fstat` for libc's streams, which look at the kind, the length and the preferred bytes only.
pub(crate) unsafe fn stat_stream(fd: c_int, to: *mut stat64) -> c_int {
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: libc passes valid arguments.
        return unsafe { fstat(fd, to) };
    };
    ours(|| {
        let mode = open.entry.mode.load(Ordering::Relaxed);
        let attr = match written::size(open) {
            Some(size) => Attr { mode, size, ..Attr::default() },
            None => remote::stat(open)?,
        };
        fill(&attr, open.entry.mount.load(Ordering::Relaxed) as usize, to)
    })
}

/// Returns the open remote file that a call names by its descriptor alone, or by a name of the descriptor.
unsafe fn open_itself(at: c_int, path: *const c_char, flags: c_int) -> Option<Open> {
    // SAFETY: the program passes valid arguments.
    if let Some(open) = unsafe { itself(at, path, flags) } {
        return Some(open);
    }
    // SAFETY: the program passes valid arguments.
    if flags & libc::AT_SYMLINK_NOFOLLOW == 0 && start::state().is_some() {
        // SAFETY: the program passes valid arguments.
        return unsafe { named_descriptor(path) };
    }
    None
}

pub(crate) unsafe fn fstatat(
    at: c_int,
    path: *const c_char,
    to: *mut stat64,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { fstatat_by(at, path, to, flags, |at, path| real::fstatat(at, path, to, flags)) }
}

/// `fstatat`, with the function for local files as `local`. This must be the function that was called:
/// another library that takes these functions over may answer one form with another.
unsafe fn fstatat_by(
    at: c_int,
    path: *const c_char,
    to: *mut stat64,
    flags: c_int,
    local: impl Fn(c_int, *const c_char) -> c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let path = or_working(at, path, flags);
        if let Some(open) = open_itself(at, path, flags) {
            return stat_open(open, to);
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        let remote = |at: &crate::place::At| {
            only(STAT_FLAGS, flags)?;
            fill(&known::stat(at, follow)?, at.mount, to)
        };
        by_path(at, path, follow, local, remote)
    }
}

pub(crate) unsafe fn xstat(version: c_int, path: *const c_char, to: *mut stat64) -> c_int {
    // SAFETY: the program passes valid arguments; a path other than the program's is absolute.
    unsafe {
        let local = |_, path| real::__xstat(version, path, to);
        fstatat_by(libc::AT_FDCWD, path, to, 0, local)
    }
}

pub(crate) unsafe fn lxstat(version: c_int, path: *const c_char, to: *mut stat64) -> c_int {
    // SAFETY: the program passes valid arguments; a path other than the program's is absolute.
    unsafe {
        let local = |_, path| real::__lxstat(version, path, to);
        fstatat_by(libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW, local)
    }
}

pub(crate) unsafe fn fxstat(version: c_int, fd: c_int, to: *mut stat64) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::__fxstat(version, fd, to) },
        Some(open) => stat_open(open, to),
    }
}

pub(crate) unsafe fn fxstatat(
    version: c_int,
    at: c_int,
    path: *const c_char,
    to: *mut stat64,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let local = |at, path| real::__fxstatat(version, at, path, to, flags);
        fstatat_by(at, path, to, flags, local)
    }
}

fn fill_statx(attr: &Attr, mount: usize, to: *mut libc::statx) -> Result<c_int, i32> {
    // SAFETY: the program passes null or a structure.
    let Some(to) = (unsafe { to.as_mut() }) else { return Err(libc::EFAULT) };
    // SAFETY: all zero is a valid `statx`.
    *to = unsafe { std::mem::zeroed() };
    let time = |from: Timestamp| {
        // SAFETY: all zero is valid.
        let mut time: libc::statx_timestamp = unsafe { std::mem::zeroed() };
        (time.tv_sec, time.tv_nsec) = (from.seconds, from.nanoseconds);
        time
    };
    to.stx_mask = libc::STATX_BASIC_STATS;
    if attr.created != Timestamp::default() {
        to.stx_mask |= libc::STATX_BTIME;
        to.stx_btime = time(attr.created);
    }
    to.stx_blksize = preferred_bytes(attr);
    to.stx_nlink = attr.links;
    (to.stx_uid, to.stx_gid) = (attr.uid, attr.gid);
    to.stx_mode = attr.mode as u16;
    to.stx_ino = attr.inode;
    to.stx_size = attr.size;
    to.stx_blocks = attr.blocks;
    to.stx_atime = time(attr.accessed);
    to.stx_mtime = time(attr.modified);
    to.stx_ctime = time(attr.changed);
    let device = device(mount, attr);
    (to.stx_rdev_major, to.stx_rdev_minor) = (libc::major(attr.rdev), libc::minor(attr.rdev));
    (to.stx_dev_major, to.stx_dev_minor) = (libc::major(device), libc::minor(device));
    Ok(0)
}

pub(crate) unsafe fn statx(
    at: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    to: *mut libc::statx,
) -> c_int {
    const BOTH: c_int = libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
    // `STATX__RESERVED`.
    const RESERVED: c_uint = 1 << 31;
    // SAFETY: the program passes valid arguments.
    unsafe {
        if flags & BOTH == BOTH || mask & RESERVED != 0 {
            // The kernel refuses this for any path.
            return real::statx(at, path, flags, mask, to);
        }
        let path = or_working(at, path, flags);
        if let Some(open) = open_itself(at, path, flags) {
            // Whether the kernel looks at other flags of a descriptor depends on its version.
            if flags & !STAT_FLAGS != 0 && real::statx(at, path, flags, mask, to) != 0 {
                return -1;
            }
            let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
            return ours(|| fill_statx(&remote::stat(open)?, mount, to));
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        by_path(
            at,
            path,
            follow,
            |at, path| real::statx(at, path, flags, mask, to),
            |at| {
                only(STAT_FLAGS, flags)?;
                fill_statx(&known::stat(at, follow)?, at.mount, to)
            },
        )
    }
}

pub(crate) unsafe fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { faccessat(libc::AT_FDCWD, path, mode, 0) }
}

pub(crate) unsafe fn euidaccess(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { faccessat(libc::AT_FDCWD, path, mode, libc::AT_EACCESS) }
}

pub(crate) unsafe fn faccessat(at: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
    const KNOWN: c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the program passes valid arguments.
    unsafe {
        if flags & !KNOWN != 0 {
            // Unknown flags are refused for any path.
            return real::faccessat(at, path, mode, flags);
        }
        let path = or_working(at, path, flags);
        if let Some(open) = open_itself(at, path, flags) {
            return ours(|| remote::with(open, |f| f.access(b"", mode as u32)).map(|()| 0));
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        by_path(
            at,
            path,
            follow,
            |at, path| real::faccessat(at, path, mode, flags),
            |at| known::access(at, mode as u32, follow).map(|()| 0),
        )
    }
}

fn fill_statfs(from: &StatFs, to: *mut statfs64) -> Result<c_int, i32> {
    // SAFETY: the program passes null or a structure.
    let Some(to) = (unsafe { to.as_mut() }) else { return Err(libc::EFAULT) };
    // SAFETY: all zero is a valid `statfs`.
    *to = unsafe { std::mem::zeroed() };
    to.f_type = KIND as _;
    (to.f_bsize, to.f_frsize) = (from.block_bytes as _, from.block_bytes as _);
    to.f_blocks = from.blocks;
    to.f_bfree = from.blocks_free;
    to.f_bavail = from.blocks_available;
    to.f_files = from.files;
    to.f_ffree = from.files_free;
    to.f_namelen = from.name_bytes_max as _;
    Ok(0)
}

fn fill_statvfs(from: &StatFs, to: *mut statvfs64) -> Result<c_int, i32> {
    // SAFETY: the program passes null or a structure.
    let Some(to) = (unsafe { to.as_mut() }) else { return Err(libc::EFAULT) };
    // SAFETY: all zero is a valid `statvfs`.
    *to = unsafe { std::mem::zeroed() };
    (to.f_bsize, to.f_frsize) = (from.block_bytes as _, from.block_bytes as _);
    to.f_blocks = from.blocks as _;
    to.f_bfree = from.blocks_free as _;
    to.f_bavail = from.blocks_available as _;
    to.f_files = from.files as _;
    (to.f_ffree, to.f_favail) = (from.files_free as _, from.files_free as _);
    to.f_fsid = from.id as _;
    to.f_namemax = from.name_bytes_max as _;
    Ok(0)
}

/// Returns the size and free space of the file system of a path.
fn space(at: &crate::place::At) -> Result<StatFs, i32> {
    at.with(|base, path| base.open(path, open_flag::PATH, 0)?.stat_fs())
}

pub(crate) unsafe fn statfs(path: *const c_char, to: *mut statfs64) -> c_int {
    // SAFETY: the program passes valid arguments.
    let local = |_, path| unsafe { real::statfs(path, to) };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(libc::AT_FDCWD, path, true, local, |at| fill_statfs(&space(at)?, to)) }
}

pub(crate) unsafe fn statvfs(path: *const c_char, to: *mut statvfs64) -> c_int {
    // SAFETY: the program passes valid arguments.
    let local = |_, path| unsafe { real::statvfs(path, to) };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(libc::AT_FDCWD, path, true, local, |at| fill_statvfs(&space(at)?, to)) }
}

pub(crate) unsafe fn fstatfs(fd: c_int, to: *mut statfs64) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::fstatfs(fd, to) },
        Some(open) => ours(|| fill_statfs(&remote::with(open, towline_client::File::stat_fs)?, to)),
    }
}

pub(crate) unsafe fn fstatvfs(fd: c_int, to: *mut statvfs64) -> c_int {
    match descriptors::find(fd) {
        // SAFETY: the program passes valid arguments.
        None => unsafe { real::fstatvfs(fd, to) },
        Some(open) => {
            ours(|| fill_statvfs(&remote::with(open, towline_client::File::stat_fs)?, to))
        }
    }
}

pub(crate) unsafe fn pathconf(path: *const c_char, name: c_int) -> c_long {
    // The limits are those of any Linux file system.
    let like = c"/".as_ptr();
    // SAFETY: the program passes valid arguments.
    let local = |_, path| unsafe { real::pathconf(path, name) };
    let remote = |at: &crate::place::At| {
        at.with(|base, path| base.stat_path(path, true))?;
        // SAFETY: a constant path.
        Ok(unsafe { real::pathconf(like, name) })
    };
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(libc::AT_FDCWD, path, true, local, remote) }
}

pub(crate) unsafe fn fpathconf(fd: c_int, name: c_int) -> c_long {
    // SAFETY: the program passes valid arguments; the other path is a constant.
    unsafe {
        match descriptors::find(fd) {
            Some(_) => real::pathconf(c"/".as_ptr(), name),
            None => real::fpathconf(fd, name),
        }
    }
}

/// Done here because libc's own looks at the file internally.
pub(crate) unsafe fn ftok(path: *const c_char, project: c_int) -> c_int {
    // SAFETY: all zero is a valid `stat`; the program passes valid arguments.
    unsafe {
        let mut status: libc::stat64 = std::mem::zeroed();
        if stat(path, &raw mut status) != 0 {
            return -1;
        }
        let (inode, device) = (status.st_ino as c_int & 0xffff, status.st_dev as c_int & 0xff);
        (project & 0xff) << 24 | device << 16 | inode
    }
}
