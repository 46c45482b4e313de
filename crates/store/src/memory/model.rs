//! Compares a memory store with a real directory under random operations.

use super::tests::{Fixture, fixture};
use crate::{FileStore, OpenFile, OpenHow, ReadOutcome, SetAttr, XattrAction};
use proptest::prelude::*;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags,
    renameat_with,
};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_wire::request::open_flag;
use towline_wire::request::rename_flag::WHITEOUT;
use towline_wire::{Attr, Errno};

/// Number of files that can be open at once.
const FILES: usize = 4;

/// One operation. `usize` values are open files.
#[derive(Clone, Debug)]
enum Op {
    Open(usize, String, u32),
    Close(usize),
    Write(usize, u64, usize, u8),
    Read(usize, u64, usize),
    Resize(usize, u64),
    Allocate(usize, u32, u64, u64),
    Seek(usize, u64, bool),
    Copy(usize, u64, usize, u64, u64),
    Stat(String, bool),
    Access(String, u32),
    Mkdir(String),
    Node(String),
    Symlink(String, String),
    ReadLink(String),
    Link(String, String, bool),
    Unlink(String, bool),
    Rename(String, String, u32),
    Chmod(String, u32),
    SetXattr(String, String, usize, u32),
    GetXattr(String, String),
}

/// The outcome on one side, in a form to compare.
#[derive(PartialEq, Debug)]
enum Said {
    Nothing,
    Number(u64),
    Bytes(Vec<u8>),
    /// Mode, links and size.
    Attr(u32, u32, u64),
}

type Outcome = Result<Said, Errno>;

struct Real {
    root: OwnedFd,
    tmpfs: bool,
    /// It is a tmpfs, and holes are compared.
    exact: bool,
    /// It has whiteouts.
    whiteouts: bool,
    _temporary: tempfile::TempDir,
}

struct Pair {
    memory: Fixture,
    real: Real,
    files: [Option<(Arc<dyn OpenFile>, OwnedFd)>; FILES],
}

fn path() -> impl Strategy<Value = String> {
    let component = prop_oneof![
        8 => prop::sample::select(vec!["a", "b", "c", "d"]),
        1 => prop::sample::select(vec![".", ".."]),
    ];
    (prop::collection::vec(component, 1..4), prop::bool::weighted(0.1)).prop_map(
        |(parts, slash)| {
            let mut path = parts.join("/");
            if slash {
                path.push('/');
            }
            path
        },
    )
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..9000, 0u64..300_000, (0u64..80).prop_map(|page| page * 4096)]
}

fn open_flags() -> impl Strategy<Value = u32> {
    let extra = [
        libc::O_CREAT,
        libc::O_EXCL,
        libc::O_TRUNC,
        libc::O_APPEND,
        libc::O_DIRECTORY,
        libc::O_NOFOLLOW,
        libc::O_PATH,
    ];
    let access = prop::sample::select(vec![0, 1, 2, 2, 2]);
    let bits = prop::sample::subsequence(extra.to_vec(), 0..3);
    (access, bits, prop::bool::weighted(0.7)).prop_map(|(access, bits, create)| {
        let extra = if create { libc::O_CREAT } else { 0 };
        bits.into_iter().fold(access | extra, |flags, bit| flags | bit) as u32
    })
}

fn op() -> impl Strategy<Value = Op> {
    let file = || 0..FILES;
    let mode = prop::sample::select(vec![0u32, 1, 3, 16, 17]);
    let name =
        || prop::sample::select(vec!["user.a", "user.b", "user.", "odd"]).prop_map(String::from);
    prop_oneof![
        8 => (file(), path(), open_flags()).prop_map(|(f, p, flags)| Op::Open(f, p, flags)),
        1 => file().prop_map(Op::Close),
        8 => (file(), offset(), 0usize..200_000, 1u8..).prop_map(|(f, o, l, b)| Op::Write(f, o, l, b)),
        6 => (file(), offset(), 0usize..200_000).prop_map(|(f, o, l)| Op::Read(f, o, l)),
        3 => (file(), offset()).prop_map(|(f, o)| Op::Resize(f, o)),
        4 => (file(), mode, offset(), offset()).prop_map(|(f, m, o, l)| Op::Allocate(f, m, o, l)),
        4 => (file(), offset(), any::<bool>()).prop_map(|(f, o, d)| Op::Seek(f, o, d)),
        3 => (file(), offset(), file(), offset(), offset())
            .prop_map(|(f, o, t, p, l)| Op::Copy(f, o, t, p, l)),
        3 => (path(), any::<bool>()).prop_map(|(p, follow)| Op::Stat(p, follow)),
        1 => (path(), 0u32..8).prop_map(|(p, mode)| Op::Access(p, mode)),
        6 => path().prop_map(Op::Mkdir),
        2 => path().prop_map(Op::Node),
        3 => (path(), path()).prop_map(|(target, p)| Op::Symlink(target, p)),
        1 => path().prop_map(Op::ReadLink),
        3 => (path(), path(), any::<bool>()).prop_map(|(a, b, follow)| Op::Link(a, b, follow)),
        4 => (path(), any::<bool>()).prop_map(|(p, directory)| Op::Unlink(p, directory)),
        8 => (path(), path(), 0u32..8).prop_map(|(a, b, flags)| Op::Rename(a, b, flags)),
        2 => (path(), 0u32..0o10000).prop_map(|(p, mode)| Op::Chmod(p, mode)),
        2 => (path(), name(), 0usize..100, 0u32..4).prop_map(|(p, n, l, how)| Op::SetXattr(p, n, l, how)),
        1 => (path(), name()).prop_map(|(p, n)| Op::GetXattr(p, n)),
    ]
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error() as u16)
}

/// The sizes of directories are not comparable.
fn said_attr(mode: u32, links: u32, size: u64) -> Said {
    let directory = mode & libc::S_IFMT == libc::S_IFDIR;
    Said::Attr(mode, links, if directory { 0 } else { size })
}

/// Returns whether renames in a directory can leave whiteouts, which not all file systems have.
pub(super) fn has_whiteouts(directory: &std::path::Path) -> bool {
    let [old, new] = ["old", "new"].map(|name| directory.join(name));
    std::fs::write(&old, "").unwrap();
    let flags = RenameFlags::WHITEOUT;
    let has = renameat_with(CWD, &old, CWD, &new, flags).is_ok();
    std::fs::remove_file(&old).unwrap();
    let _ = std::fs::remove_file(&new);
    has
}

impl Real {
    fn new(holes: bool) -> Self {
        let shm = std::path::Path::new("/dev/shm");
        let place = if holes && shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let temporary = tempfile::tempdir_in(place).unwrap();
        let inner = temporary.path().join("root");
        std::fs::create_dir(&inner).unwrap();
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&inner, flags, Mode::empty()).unwrap();
        rustix::fs::fchmod(&root, Mode::from_raw_mode(0o1777)).unwrap();
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let tmpfs = rustix::fs::fstatfs(&root).unwrap().f_type as u64 == TMPFS_MAGIC;
        let whiteouts = has_whiteouts(&inner);
        Self { root, tmpfs, exact: holes && tmpfs, whiteouts, _temporary: temporary }
    }

    /// Returns a path for the calls for extended attributes, which cannot start at a directory.
    fn path(&self, path: &str) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/self/fd/{}/{path}", self.root.as_raw_fd())
    }

    fn apply(
        &self,
        files: &[Option<(Arc<dyn OpenFile>, OwnedFd)>],
        op: &Op,
    ) -> Result<Said, rustix::io::Errno> {
        use rustix::fs;
        let fd = |at: &usize| &files[*at].as_ref().unwrap().1;
        let root = &self.root;
        let done = |()| Said::Nothing;
        let follow_flag =
            |follow: bool| if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        Ok(match op {
            Op::Open(..) | Op::Close(_) => unreachable!("treated by the caller"),
            Op::Write(f, o, l, b) => {
                Said::Number(rustix::io::pwrite(fd(f), &vec![*b; *l], *o)? as u64)
            }
            Op::Read(f, o, l) => {
                let mut bytes = vec![0; *l];
                let count = rustix::io::pread(fd(f), &mut bytes, *o)?;
                bytes.truncate(count);
                Said::Bytes(bytes)
            }
            Op::Resize(f, size) => done(fs::ftruncate(fd(f), *size)?),
            Op::Allocate(f, mode, o, l) => {
                done(fs::fallocate(fd(f), FallocateFlags::from_bits_retain(*mode), *o, *l)?)
            }
            Op::Seek(f, o, data) => {
                let from = if *data { SeekFrom::Data(*o) } else { SeekFrom::Hole(*o) };
                Said::Number(fs::seek(fd(f), from)?)
            }
            Op::Copy(f, o, t, p, l) => {
                let (mut o, mut p) = (*o, *p);
                let length = *l as usize;
                Said::Number(
                    fs::copy_file_range(fd(f), Some(&mut o), fd(t), Some(&mut p), length)? as u64
                )
            }
            Op::Stat(path, follow) => {
                let stat = fs::statat(root, path, follow_flag(*follow))?;
                said_attr(stat.st_mode, stat.st_nlink as _, stat.st_size as u64)
            }
            Op::Access(path, mode) => {
                let access = fs::Access::from_bits_retain(*mode);
                done(fs::accessat(root, path, access, AtFlags::empty())?)
            }
            Op::Mkdir(path) => done(fs::mkdirat(root, path, Mode::from_raw_mode(0o755))?),
            Op::Node(path) => {
                done(fs::mknodat(root, path, FileType::Fifo, Mode::from_raw_mode(0o644), 0)?)
            }
            Op::Symlink(target, path) => done(fs::symlinkat(target, root, path)?),
            Op::ReadLink(path) => Said::Bytes(fs::readlinkat(root, path, Vec::new())?.into_bytes()),
            Op::Link(old, new, follow) => {
                let flags = if *follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                done(fs::linkat(root, old, root, new, flags)?)
            }
            Op::Unlink(path, directory) => {
                let flags = if *directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                done(fs::unlinkat(root, path, flags)?)
            }
            Op::Rename(old, new, flags) => {
                let flags = RenameFlags::from_bits_retain(*flags);
                done(fs::renameat_with(root, old, root, new, flags)?)
            }
            Op::Chmod(path, mode) => {
                done(fs::chmodat(root, path, Mode::from_raw_mode(*mode), AtFlags::empty())?)
            }
            Op::SetXattr(path, name, length, flags) => {
                let (value, flags) = (vec![1; *length], XattrFlags::from_bits_retain(*flags));
                done(fs::lsetxattr(self.path(path), name, &value, flags)?)
            }
            Op::GetXattr(path, name) => {
                let mut value = vec![0; 65536];
                let count = fs::lgetxattr(self.path(path), name, &mut value)?;
                value.truncate(count);
                Said::Bytes(value)
            }
        })
    }
}

/// Returns whether a file was opened with `O_APPEND`, which the caller of a store has to handle.
fn appends(files: &[Option<(Arc<dyn OpenFile>, OwnedFd)>], at: usize) -> bool {
    let fd = &files[at].as_ref().unwrap().1;
    rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::APPEND)
}

fn apply_to_memory(
    f: &Fixture,
    files: &[Option<(Arc<dyn OpenFile>, OwnedFd)>],
    op: &Op,
) -> Outcome {
    let (store, caller) = (&f.store, &f.caller);
    let file = |at: &usize| &*files[*at].as_ref().unwrap().0;
    let at =
        |path: &'_ String| -> (&dyn OpenFile, Vec<u8>) { (&*f.root, path.clone().into_bytes()) };
    let done = |_: Attr| Said::Nothing;
    let attr_of = |attr: Attr| said_attr(attr.mode, attr.links, attr.size);
    macro_rules! at {
        ($path:expr) => {{ (at($path).0, $path.as_bytes()) }};
    }
    Ok(match op {
        Op::Open(..) | Op::Close(_) => unreachable!("treated by the caller"),
        Op::Write(f, o, l, b) => {
            Said::Number(file(f).write(*o, &vec![*b; *l], appends(files, *f))?.0 as u64)
        }
        Op::Read(f, o, l) => match file(f).read(*o, *l, true)? {
            ReadOutcome::Ready(bytes) => Said::Bytes(bytes.to_vec().unwrap()),
            ReadOutcome::WouldBlock => panic!("a memory store never waits"),
        },
        Op::Resize(f, size) => {
            let set = SetAttr { size: Some(*size), ..SetAttr::default() };
            done(store.set_attr(caller, (file(f), b""), true, &set)?)
        }
        Op::Allocate(f, mode, o, l) => {
            file(f).allocate(*mode, *o, *l)?;
            Said::Nothing
        }
        Op::Seek(f, o, data) => Said::Number(file(f).seek(*o, if *data { 3 } else { 4 })?),
        Op::Copy(f, o, t, p, l) => Said::Number(store.copy_range(file(f), *o, file(t), *p, *l)?),
        Op::Stat(path, follow) => attr_of(store.stat(caller, at!(path), *follow)?),
        Op::Access(path, mode) => {
            store.access(caller, at!(path), *mode)?;
            Said::Nothing
        }
        Op::Mkdir(path) => done(store.make_directory(caller, at!(path), 0o755)?),
        Op::Node(path) => done(store.make_node(caller, at!(path), 0o010_644, 0)?),
        Op::Symlink(target, path) => done(store.symlink(caller, at!(path), target.as_bytes())?),
        Op::ReadLink(path) => Said::Bytes(store.read_link(caller, at!(path))?),
        Op::Link(old, new, follow) => done(store.link(caller, at!(old), *follow, at!(new))?),
        Op::Unlink(path, directory) => {
            store.unlink(caller, at!(path), *directory)?;
            Said::Nothing
        }
        Op::Rename(old, new, flags) => {
            store.rename(caller, at!(old), at!(new), *flags)?;
            Said::Nothing
        }
        Op::Chmod(path, mode) => {
            let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
            done(store.set_attr(caller, at!(path), true, &set)?)
        }
        Op::SetXattr(path, name, length, flags) => {
            let action = XattrAction::Set(name.as_bytes(), &vec![1; *length], *flags);
            store.xattr(caller, at!(path), false, action)?;
            Said::Nothing
        }
        Op::GetXattr(path, name) => {
            Said::Bytes(store.xattr(caller, at!(path), false, XattrAction::Get(name.as_bytes()))?)
        }
    })
}

impl Pair {
    fn new(holes: bool) -> Self {
        Self { memory: fixture(64 << 20), real: Real::new(holes), files: Default::default() }
    }

    fn open(&mut self, at: usize, path: &str, flags: u32) {
        let f = &self.memory;
        let sent = open_flag::of_this_machine(flags as i32);
        let how = OpenHow { flags: sent, mode: 0o644 };
        let ours = f.store.open(&f.caller, (&*f.root, path.as_bytes()), how);
        if matches!(ours, Err(Errno::EXDEV | Errno::ENXIO)) {
            return;
        }
        // Even if the store is wrong, a FIFO must not make the test wait.
        let flags = OFlags::from_bits_retain(flags) | OFlags::NONBLOCK;
        let mode = Mode::from_raw_mode(0o644);
        let theirs = rustix::fs::openat(&self.real.root, path, flags, mode).map_err(errno);
        match (ours, theirs) {
            (Ok((file, _)), Ok(fd)) => self.files[at] = Some((file, fd)),
            (ours, theirs) => assert_eq!(ours.err(), theirs.err(), "opening {path}"),
        }
    }

    fn step(&mut self, op: &Op) {
        let used: Vec<usize> = match op {
            Op::Open(at, path, flags) => return self.open(*at, path, *flags),
            Op::Close(at) => {
                self.files[*at] = None;
                return;
            }
            Op::Write(f, ..) | Op::Read(f, ..) | Op::Resize(f, ..) => vec![*f],
            Op::Allocate(f, ..) | Op::Seek(f, ..) => vec![*f],
            Op::Copy(f, _, t, ..) => vec![*f, *t],
            _ => vec![],
        };
        if used.iter().any(|at| self.files[*at].is_none()) || self.is_skipped(op) {
            return;
        }
        let ours = apply_to_memory(&self.memory, &self.files, op);
        // A path that leads out of the tree changes nothing here, and must not change anything in
        // the real directory.
        if ours == Err(Errno::EXDEV) {
            return;
        }
        let theirs = self.real.apply(&self.files, op).map_err(errno);
        assert!(ours == theirs, "{op:?}: {} but {}", brief(&ours), brief(&theirs));
    }

    /// Skips what is known to differ between file systems, or from the trait.
    fn is_skipped(&self, op: &Op) -> bool {
        let path_only = |at: &usize| {
            let fd = &self.files[*at].as_ref().unwrap().1;
            rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::PATH)
        };
        let regular = |at: &usize| self.files[*at].as_ref().unwrap().0.stat().unwrap().is_file();
        match op {
            Op::Resize(at, _) => path_only(at),
            // tmpfs does not support ZERO_RANGE, and reports some pages allocated ahead as data.
            Op::Allocate(_, mode, ..) => {
                self.real.tmpfs && mode & 16 != 0 || self.real.exact && *mode != 3
            }
            Op::Seek(at, ..) => !self.real.exact || path_only(at) || !regular(at),
            // Copies made by tmpfs have no holes.
            Op::Copy(from, _, to, ..) => {
                let whole = regular(from) && regular(to);
                self.real.exact || !whole || appends(&self.files, *to)
            }
            Op::Rename(_, _, flags) => flags & WHITEOUT != 0 && !self.real.whiteouts,
            // The caller here may do everything, in a real directory only root.
            Op::Chmod(_, mode) => mode & 0o700 != 0o700 && !rustix::process::geteuid().is_root(),
            _ => false,
        }
    }

    fn compare(&self, path: &str) {
        let f = &self.memory;
        let names = |path: &str| -> BTreeSet<String> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let fd = rustix::fs::openat(&self.real.root, path, flags, Mode::empty()).unwrap();
            let entries = rustix::fs::Dir::read_from(&fd).unwrap();
            entries.map(|e| e.unwrap().file_name().to_str().unwrap().to_owned()).collect()
        };
        let theirs = names(path);
        assert_eq!(super::tests::names(f, path), theirs, "names in {path}");
        for name in theirs.iter().filter(|name| !matches!(name.as_str(), "." | "..")) {
            let child = format!("{path}/{name}");
            let stat = Op::Stat(child.clone(), false);
            let ours = apply_to_memory(f, &self.files, &stat);
            let theirs = self.real.apply(&self.files, &stat).map_err(errno);
            assert!(ours == theirs, "{child}: {ours:?} but {theirs:?}");
            let attr = f.store.stat(&f.caller, (&*f.root, child.as_bytes()), false).unwrap();
            if attr.is_directory() {
                self.compare(&child);
            } else if attr.is_file() {
                self.compare_file(&child, &attr);
            } else if attr.is_symlink() {
                let link = Op::ReadLink(child.clone());
                let ours = apply_to_memory(f, &self.files, &link);
                assert!(ours == self.real.apply(&self.files, &link).map_err(errno), "{child}");
            }
        }
    }

    fn compare_file(&self, path: &str, attr: &Attr) {
        let f = &self.memory;
        let how = OpenHow { flags: 0, mode: 0 };
        let file = f.store.open(&f.caller, (&*f.root, path.as_bytes()), how).unwrap().0;
        let fd = rustix::fs::openat(&self.real.root, path, OFlags::RDONLY, Mode::empty()).unwrap();
        if self.real.exact {
            let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks as u64;
            assert_eq!(attr.blocks, blocks, "space of {path}");
        }
        let files = [Some((file, fd))];
        let read = Op::Read(0, 0, attr.size as usize + 1);
        let ours = apply_to_memory(f, &files, &read);
        assert!(ours == self.real.apply(&files, &read).map_err(errno), "bytes of {path}");
    }
}

fn brief(outcome: &Outcome) -> String {
    match outcome {
        Ok(Said::Bytes(bytes)) => format!("{} bytes", bytes.len()),
        outcome => format!("{outcome:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_real_directory(holes: bool, ops in prop::collection::vec(op(), 1..120)) {
        let mut pair = Pair::new(holes);
        for op in &ops {
            pair.step(op);
        }
        pair.compare(".");
    }
}
