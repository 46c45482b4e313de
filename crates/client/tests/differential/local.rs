//! The reference side: plain system calls on a directory of this machine.

use crate::calls;
use crate::common::pattern;
use crate::op::{At, Op, SLOTS, Time};
use crate::said::{Outcome, Said, Shown};
use rustix::fs::{
    self, AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags,
    ResolveFlags, SeekFrom, Timespec, Timestamps, XattrFlags,
};
use rustix::io::{Errno as Code, IoSlice, ReadWriteFlags};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use towline_client::Errno;
use towline_wire::request::{lock, sync_kind};

type Answer = Result<Said, Code>;

/// A tree, and files open in it.
pub(crate) struct Local {
    /// Stands for the root of the export.
    root: OwnedFd,
    top: OwnedFd,
    slots: [Option<OwnedFd>; SLOTS],
    /// Whether to pass `O_DIRECT` to the file system.
    direct: bool,
}

/// The error number of a failed call.
fn errno(code: Code) -> Errno {
    Errno(code.raw_os_error() as u16)
}

fn directory(path: &Path) -> OwnedFd {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    fs::open(path, flags, Mode::empty()).unwrap()
}

fn done((): ()) -> Said {
    Said::Nothing
}

fn follow_flag(follow: bool) -> AtFlags {
    if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW }
}

fn timespec(time: Time) -> Timespec {
    match time {
        Time::Now => Timespec { tv_sec: 0, tv_nsec: fs::UTIME_NOW },
        Time::Omit => Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT },
        Time::Past(seconds, nanoseconds) => {
            Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() }
        }
    }
}

fn mode(bits: u32) -> Mode {
    Mode::from_raw_mode(bits & 0o7777)
}

fn read_at(fd: impl AsFd, offset: u64, length: usize) -> Answer {
    let mut bytes = vec![0; length];
    let count = rustix::io::pread(fd, &mut bytes, offset)?;
    bytes.truncate(count);
    Ok(Said::Bytes(bytes))
}

impl Local {
    /// A tree at `root/top`, where `root` stands for the root of the export.
    pub(crate) fn new(root: &Path, top: &str, direct: bool) -> Self {
        let top = directory(&root.join(top));
        Self { root: directory(root), top, slots: Default::default(), direct }
    }

    pub(crate) fn slot(&self, slot: usize) -> Option<BorrowedFd<'_>> {
        self.slots[slot].as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn close(&mut self, slot: usize) {
        self.slots[slot] = None;
    }

    /// Flags of an open file, as `fcntl(2)` returns them.
    pub(crate) fn flags(&self, slot: usize) -> OFlags {
        fs::fcntl_getfl(self.slot(slot).unwrap()).unwrap()
    }

    /// How a slot is open: 0 for reading, 1 for writing, 2 for both.
    pub(crate) fn access(&self, slot: usize) -> u32 {
        self.flags(slot).bits() & 3
    }

    pub(crate) fn stat_slot(&self, slot: usize) -> Shown {
        Shown::of_stat(&fs::fstat(self.slot(slot).unwrap()).unwrap())
    }

    fn base(&self, at: &At) -> BorrowedFd<'_> {
        at.base.map_or(self.top.as_fd(), |slot| self.slot(slot).unwrap())
    }

    /// A path for calls that take no directory to start at.
    fn proc(&self, at: &At) -> OsString {
        let mut path = OsString::from(format!("/proc/self/fd/{}/", self.base(at).as_raw_fd()));
        path.push(&at.path);
        path
    }

    /// True if a path leads out of the export, where the other side must refuse to go.
    pub(crate) fn escapes(&self, at: &At, follow: bool) -> bool {
        if at.path.is_empty() {
            return false;
        }
        let path_of = |fd: BorrowedFd<'_>| {
            let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
            fs::readlink(link, Vec::new()).unwrap().into_bytes()
        };
        let base = path_of(self.base(at));
        let base = base.strip_prefix(&path_of(self.root.as_fd())[..]);
        let base = base.expect("a base out of the tree");
        let path = [b"./", base, b"/", at.path.as_bytes()].concat();
        let path = At { base: None, path: OsString::from_vec(path) };
        let outside = |path: &OsStr, flags: OFlags| {
            let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
            let opened = fs::openat2(&self.root, path, flags, Mode::empty(), ResolveFlags::BENEATH);
            opened.is_err_and(|code| code == Code::XDEV)
        };
        let last = if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
        outside(path.split().0, OFlags::empty()) || outside(&path.path, last)
    }

    /// True if the directory of a path's last name exists.
    pub(crate) fn has_parent(&self, at: &At) -> bool {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        fs::openat(self.base(at), at.split().0, flags, Mode::empty()).is_ok()
    }

    /// Does one operation, whose slots are filled.
    pub(crate) fn apply(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Open(slot, at, flags, bits) => {
                let (fd, shown) = self.open(at, *flags, *bits).map_err(errno)?;
                self.slots[*slot] = Some(fd);
                Ok(Said::Attr(shown))
            }
            Op::Close(slot) => {
                self.close(*slot);
                Ok(Said::Nothing)
            }
            op => self.call(op).map_err(errno),
        }
    }

    fn open(&self, at: &At, flags: u32, bits: u32) -> Result<(OwnedFd, Shown), Code> {
        let mut flags = OFlags::from_bits_retain(flags);
        flags |= OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        flags.set(OFlags::DIRECT, flags.contains(OFlags::DIRECT) && self.direct);
        let fd = fs::openat(self.base(at), at.path.as_os_str(), flags, mode(bits))?;
        if flags.contains(OFlags::DIRECT) && !flags.contains(OFlags::PATH) {
            // The server takes care of the alignment of buffers that it requires.
            fs::fcntl_setfl(&fd, fs::fcntl_getfl(&fd)?.difference(OFlags::DIRECT))?;
        }
        let shown = Shown::of_stat(&fs::fstat(&fd)?);
        let data = matches!(
            FileType::from_raw_mode(shown.mode),
            FileType::RegularFile | FileType::Directory
        );
        // A server does not wait for the other end of a FIFO, and opens no devices.
        if data || flags.contains(OFlags::PATH) { Ok((fd, shown)) } else { Err(Code::NXIO) }
    }

    fn call(&self, op: &Op) -> Answer {
        let fd = |slot: &usize| self.slot(*slot).unwrap();
        Ok(match op {
            Op::Stat(at, follow) => Said::Attr(self.stat(at, *follow)?),
            Op::Access(at, wanted) => {
                let access = fs::Access::from_bits_retain(*wanted);
                let path = at.path.as_os_str();
                done(fs::accessat(self.base(at), path, access, AtFlags::EACCESS)?)
            }
            Op::MakeDirectory(at, bits) => {
                fs::mkdirat(self.base(at), at.path.as_os_str(), mode(*bits))?;
                Said::Attr(self.stat_made(at)?)
            }
            Op::MakeNode(at, bits) => {
                let kind = match bits & 0o170_000 {
                    0 => FileType::RegularFile,
                    kind => FileType::from_raw_mode(kind),
                };
                fs::mknodat(self.base(at), at.path.as_os_str(), kind, mode(*bits), 0)?;
                Said::Attr(self.stat_made(at)?)
            }
            Op::Symlink(at, target) => {
                fs::symlinkat(target.as_os_str(), self.base(at), at.path.as_os_str())?;
                Said::Attr(self.stat_made(at)?)
            }
            Op::ReadLink(at) => {
                let path = at.path.as_os_str();
                Said::Bytes(fs::readlinkat(self.base(at), path, Vec::new())?.into_bytes())
            }
            Op::Link(from, follow, to) => {
                let target = (self.base(to), to.path.as_os_str());
                if from.path.is_empty() {
                    let file = format!("/proc/self/fd/{}", self.base(from).as_raw_fd());
                    let flags = AtFlags::SYMLINK_FOLLOW;
                    fs::linkat(fs::CWD, file, target.0, target.1, flags)?;
                } else {
                    let flags = if *follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                    fs::linkat(self.base(from), from.path.as_os_str(), target.0, target.1, flags)?;
                }
                Said::Attr(self.stat_made(to)?)
            }
            Op::Unlink(at, directory) => {
                let flags = if *directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                fs::unlinkat(self.base(at), at.path.as_os_str(), flags).map(done)?
            }
            Op::Rename(from, to, flags) => done(fs::renameat_with(
                self.base(from),
                from.path.as_os_str(),
                self.base(to),
                to.path.as_os_str(),
                RenameFlags::from_bits_retain(*flags),
            )?),
            Op::Truncate(at, size) => {
                match at.path.as_bytes() {
                    b"" => fs::ftruncate(self.base(at), *size)?,
                    _ => calls::truncate(&self.proc(at), *size)?,
                }
                Said::Attr(self.stat(at, true)?)
            }
            Op::Chmod(at, bits) => {
                match at.path.as_bytes() {
                    b"" => fs::fchmod(self.base(at), mode(*bits))?,
                    path => fs::chmodat(self.base(at), path, mode(*bits), AtFlags::empty())?,
                }
                Said::Attr(self.stat(at, true)?)
            }
            Op::Chown(at, follow, uid, gid) => {
                let uid = Some(*uid).filter(|id| *id != u32::MAX).map(fs::Uid::from_raw);
                let gid = Some(*gid).filter(|id| *id != u32::MAX).map(fs::Gid::from_raw);
                let flags = follow_flag(*follow) | AtFlags::EMPTY_PATH;
                fs::chownat(self.base(at), at.path.as_os_str(), uid, gid, flags)?;
                Said::Attr(self.stat(at, *follow)?)
            }
            Op::Times(at, follow, accessed, modified) => {
                let times = Timestamps {
                    last_access: timespec(*accessed),
                    last_modification: timespec(*modified),
                };
                let flags = follow_flag(*follow) | AtFlags::EMPTY_PATH;
                fs::utimensat(self.base(at), at.path.as_os_str(), &times, flags)?;
                let stat = fs::statat(self.base(at), at.path.as_os_str(), flags)?;
                let is = (stat.st_atime, stat.st_atime_nsec as u32);
                Said::Attr(Shown::of_stat(&stat).accessed(*accessed, is))
            }
            Op::SetXattr(at, follow, name, length, how) => {
                let value = pattern(*length, 7);
                let how = XattrFlags::from_bits_retain(*how);
                match (at.path.as_bytes(), follow) {
                    (b"", _) => fs::fsetxattr(self.base(at), name.as_str(), &value, how),
                    (_, true) => fs::setxattr(self.proc(at), name.as_str(), &value, how),
                    (_, false) => fs::lsetxattr(self.proc(at), name.as_str(), &value, how),
                }
                .map(done)?
            }
            Op::GetXattr(at, follow, name) => {
                let mut value = vec![0; 65536];
                let count = match (at.path.as_bytes(), follow) {
                    (b"", _) => fs::fgetxattr(self.base(at), name.as_str(), &mut value)?,
                    (_, true) => fs::getxattr(self.proc(at), name.as_str(), &mut value)?,
                    (_, false) => fs::lgetxattr(self.proc(at), name.as_str(), &mut value)?,
                };
                value.truncate(count);
                Said::Bytes(value)
            }
            Op::ListXattrs(at, follow) => {
                let mut list = vec![0; 65536];
                let count = match (at.path.as_bytes(), follow) {
                    (b"", _) => fs::flistxattr(self.base(at), &mut list)?,
                    (_, true) => fs::listxattr(self.proc(at), &mut list)?,
                    (_, false) => fs::llistxattr(self.proc(at), &mut list)?,
                };
                let names = list[..count].split(|byte| *byte == 0).map(<[u8]>::to_vec);
                Said::of_xattrs(names)
            }
            Op::RemoveXattr(at, follow, name) => match (at.path.as_bytes(), follow) {
                (b"", _) => fs::fremovexattr(self.base(at), name.as_str()),
                (_, true) => fs::removexattr(self.proc(at), name.as_str()),
                (_, false) => fs::lremovexattr(self.proc(at), name.as_str()),
            }
            .map(done)?,
            Op::Open(..) | Op::Close(_) => unreachable!("treated by the caller"),
            Op::Write(f, offset, length, byte) => {
                let bytes = pattern(*length, *byte);
                Said::Number(rustix::io::pwrite(fd(f), &bytes, *offset)? as u64)
            }
            Op::Append(f, length, byte) => {
                let bytes = pattern(*length, *byte);
                let parts = [IoSlice::new(&bytes)];
                // At the position of the file, which only the flag turns into its end.
                let count = rustix::io::pwritev2(fd(f), &parts, u64::MAX, ReadWriteFlags::APPEND)?;
                Said::Number(count as u64)
            }
            Op::Read(f, offset, length) => read_at(fd(f), *offset, *length)?,
            Op::ReadPath(at, length) => {
                let (file, _) = self.open(at, 0, 0)?;
                read_at(file, 0, *length)?
            }
            Op::WritePath(at, flags, bits, length, byte) => {
                let (file, _) = self.open(at, *flags, *bits)?;
                rustix::io::pwrite(file, &pattern(*length, *byte), 0)?;
                Said::Nothing
            }
            Op::Allocate(f, mode, offset, length) => {
                let mode = FallocateFlags::from_bits_retain(*mode);
                done(fs::fallocate(fd(f), mode, *offset, *length)?)
            }
            Op::Seek(f, offset, whence) => {
                let from = match whence {
                    3 => SeekFrom::Data(*offset),
                    4 => SeekFrom::Hole(*offset),
                    _ => return Err(Code::INVAL),
                };
                Said::Number(fs::seek(fd(f), from)?)
            }
            Op::Copy(f, offset, t, to_offset, length) => {
                let (mut offset, mut to_offset) = (*offset, *to_offset);
                let length = *length as usize;
                let ends = (Some(&mut offset), Some(&mut to_offset));
                Said::Number(fs::copy_file_range(fd(f), ends.0, fd(t), ends.1, length)? as u64)
            }
            Op::List(f, _) => Said::Names(list(fd(f))?),
            Op::StatFs(f) => {
                let stat = fs::fstatvfs(fd(f))?;
                Said::Space([stat.f_frsize, stat.f_blocks, stat.f_files, stat.f_namemax])
            }
            Op::Sync(f, kind) => match *kind {
                sync_kind::DATA => fs::fdatasync(fd(f)),
                sync_kind::FULL => fs::fsync(fd(f)),
                _ => fs::syncfs(fd(f)),
            }
            .map(done)?,
            Op::Lock(f, lock::FLOCK, kind, ..) => {
                use FlockOperation::{
                    NonBlockingLockExclusive, NonBlockingLockShared, NonBlockingUnlock,
                };
                let kinds = [NonBlockingLockShared, NonBlockingLockExclusive, NonBlockingUnlock];
                done(fs::flock(fd(f), kinds[usize::from(*kind)])?)
            }
            Op::Lock(f, family, kind, start, length) => {
                done(calls::lock(fd(f), *family, *kind, *start, *length)?)
            }
            Op::TestLock(f, family, kind, start, length) => {
                Said::Taken(calls::test_lock(fd(f), *family, *kind, *start, *length)?)
            }
        })
    }

    /// Attributes of what a path names, or of the open file if it is empty.
    pub(crate) fn stat(&self, at: &At, follow: bool) -> Result<Shown, Code> {
        let flags = follow_flag(follow) | AtFlags::EMPTY_PATH;
        fs::statat(self.base(at), at.path.as_os_str(), flags).map(|stat| Shown::of_stat(&stat))
    }

    /// Attributes of a name that has just been made.
    fn stat_made(&self, at: &At) -> Result<Shown, Code> {
        let (parent, name) = at.split();
        let path = Path::new(parent).join(name);
        fs::statat(self.base(at), path, AtFlags::SYMLINK_NOFOLLOW).map(|s| Shown::of_stat(&s))
    }
}

/// Names and types, sorted.
fn list(directory: BorrowedFd<'_>) -> Result<Vec<(Vec<u8>, u8)>, Code> {
    fs::seek(directory, SeekFrom::Start(0))?;
    let mut buffer = [MaybeUninit::uninit(); 8192];
    let mut entries = fs::RawDir::new(directory, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Ok(entry) => entry,
            // A removed directory: the other side shows an empty one.
            Err(Code::NOENT) => break,
            Err(code) => return Err(code),
        };
        let kind = entry.file_type().as_raw_mode() >> 12;
        names.push((entry.file_name().to_bytes().to_vec(), kind as u8));
    }
    names.sort_unstable();
    Ok(names)
}
