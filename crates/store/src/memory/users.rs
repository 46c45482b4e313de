//! Compares what several users may do in a memory store with what the kernel lets them do in a
//! directory, under random operations. Needs root.
//!
//! It leaves out set-group-id bits of files that their group may not execute: they mean nothing.

use super::MemoryStore;
use super::model::has_whiteouts;
use crate::directory::DirectoryStore;
use crate::{Caller, FileStore, OpenFile, OpenHow, SetAttr, Source, XattrAction};
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use towline_wire::request::open_flag::of_this_machine;
use towline_wire::request::rename_flag::WHITEOUT;
use towline_wire::{Attr, Errno, Timestamp};

/// One operation of a user.
#[derive(Clone, Debug)]
enum Op {
    Open(String, i32, u32),
    Write(usize),
    Resize(usize),
    Allocate(usize),
    Stat(String, bool),
    Access(String, u32),
    Mkdir(String, u32),
    Node(String, u32),
    Symlink(String, String),
    Link(String, String, bool),
    Unlink(String, bool),
    Rename(String, String, u32),
    Set(String, bool, SetAttr),
    SetXattr(String, &'static str),
    GetXattr(String, &'static str),
    RemoveXattr(String, &'static str),
}

/// Number of files that can be open at once.
const FILES: usize = 3;

/// A store under test.
struct Side {
    store: Arc<dyn FileStore>,
    root: Arc<dyn OpenFile>,
    /// The files opened last, in turn.
    files: [Option<Arc<dyn OpenFile>>; FILES],
    next: usize,
}

/// Which operations can be compared here.
struct Comparable {
    symlinks: bool,
    links: bool,
    creating: bool,
    xattrs: bool,
    whiteouts: bool,
}

static COMPARABLE: LazyLock<Comparable> = LazyLock::new(|| {
    let is_set = |name: &str| {
        let value = std::fs::read_to_string(format!("/proc/sys/fs/protected_{name}"));
        value.is_ok_and(|value| value.trim() != "0")
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    Comparable {
        // The memory store always has these protections, and never those of files and FIFOs.
        symlinks: is_set("symlinks"),
        links: is_set("hardlinks"),
        creating: !is_set("regular") && !is_set("fifos"),
        xattrs: rustix::fs::fsetxattr(&file, "user.a", b"", flags).is_ok(),
        whiteouts: has_whiteouts(tempfile::tempdir().unwrap().path()),
    }
});

fn is_comparable(op: &Op) -> bool {
    match op {
        Op::Symlink(..) => COMPARABLE.symlinks,
        Op::Link(..) => COMPARABLE.links,
        Op::Open(_, flags, _) => {
            flags & (libc::O_CREAT | libc::O_EXCL) != libc::O_CREAT || COMPARABLE.creating
        }
        Op::SetXattr(..) | Op::GetXattr(..) | Op::RemoveXattr(..) => COMPARABLE.xattrs,
        Op::Rename(_, _, flags) => flags & WHITEOUT == 0 || COMPARABLE.whiteouts,
        _ => true,
    }
}

/// Mode, links, owner, group and size.
fn said(attr: &Attr) -> String {
    let size = if attr.is_directory() { 0 } else { attr.size };
    format!("{:o} {} {} {} {size}", attr.mode, attr.links, attr.uid, attr.gid)
}

impl Side {
    fn new(store: Arc<dyn FileStore>) -> Self {
        let root = store.root().unwrap();
        let admin = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: true };
        let set = SetAttr { mode: Some(0o1777), ..SetAttr::default() };
        store.set_attr(&admin, (&*root, b""), true, &set).unwrap();
        Self { store, root, files: Default::default(), next: 0 }
    }

    fn file(&self, at: usize) -> Result<&dyn OpenFile, Errno> {
        self.files[at].as_deref().ok_or(Errno::EBADF)
    }

    fn apply(&mut self, caller: &Caller, op: &Op) -> Result<String, Errno> {
        let (store, root) = (self.store.clone(), self.root.clone());
        fn from<'a>(root: &'a dyn OpenFile, path: &'a str) -> Source<'a> {
            (root, path.as_bytes())
        }
        let at = |path| from(&*root, path);
        let done = |()| String::new();
        Ok(match op {
            Op::Open(path, flags, mode) => {
                let how = OpenHow { flags: of_this_machine(*flags), mode: *mode };
                let (file, attr) = store.open(caller, at(path), how)?;
                self.files[self.next % FILES] = Some(file);
                self.next += 1;
                said(&attr)
            }
            Op::Write(file) => {
                self.file(*file)?.write(0, b"text", false)?;
                said(&self.file(*file)?.stat()?)
            }
            Op::Resize(file) => {
                let set = SetAttr { size: Some(3), ..SetAttr::default() };
                said(&store.set_attr(caller, (self.file(*file)?, b""), true, &set)?)
            }
            Op::Allocate(file) => {
                self.file(*file)?.allocate(0, 0, 8)?;
                said(&self.file(*file)?.stat()?)
            }
            Op::Stat(path, follow) => said(&store.stat(caller, at(path), *follow)?),
            Op::Access(path, mode) => done(store.access(caller, at(path), *mode)?),
            Op::Mkdir(path, mode) => said(&store.make_directory(caller, at(path), *mode)?),
            Op::Node(path, mode) => said(&store.make_node(caller, at(path), *mode, 0)?),
            Op::Symlink(path, target) => {
                said(&store.symlink(caller, at(path), target.as_bytes())?)
            }
            Op::Link(from, to, follow) => said(&store.link(caller, at(from), *follow, at(to))?),
            Op::Unlink(path, directory) => {
                store.unlink(caller, at(path), *directory)?;
                String::new()
            }
            Op::Rename(from, to, flags) => {
                store.rename(caller, at(from), at(to), *flags)?;
                String::new()
            }
            Op::Set(path, follow, set) => said(&store.set_attr(caller, at(path), *follow, set)?),
            Op::SetXattr(path, name) => {
                let action = XattrAction::Set(name.as_bytes(), b"1", 0);
                store.xattr(caller, at(path), false, action)?;
                String::new()
            }
            Op::GetXattr(path, name) => {
                let value = store.xattr(caller, at(path), false, XattrAction::Get(name.as_bytes()));
                String::from_utf8(value?).unwrap()
            }
            Op::RemoveXattr(path, name) => {
                store.xattr(caller, at(path), false, XattrAction::Remove(name.as_bytes()))?;
                String::new()
            }
        })
    }
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..3)
        .prop_map(|parts| parts.join("/"))
}

fn caller() -> impl Strategy<Value = Caller> {
    let user = |uid, gid, groups: &[u32]| Caller { uid, gid, groups: groups.into(), enforce: true };
    prop::sample::select(vec![
        user(0, 0, &[]),
        user(1000, 100, &[200]),
        user(2000, 200, &[]),
        user(3000, 300, &[100]),
    ])
}

fn mode() -> impl Strategy<Value = u32> {
    let bits = prop::sample::select(vec![
        0o777u32, 0o755, 0o700, 0o770, 0o666, 0o644, 0o600, 0o060, 0o070, 0o007, 0o111,
    ]);
    (bits, prop::bool::weighted(0.3), 0u32..8).prop_map(|(bits, special, high)| {
        bits | if special && bits & 0o010 != 0 { high << 9 } else { 0 }
    })
}

fn set() -> impl Strategy<Value = SetAttr> {
    let none = SetAttr::default();
    let id = || prop::sample::select(vec![u32::MAX, 0, 1000, 2000, 3000, 100, 200, 300]);
    let time = || prop::sample::select(vec![Timestamp::NOW, Timestamp::OMIT, Timestamp::new(5, 6)]);
    prop_oneof![
        4 => mode().prop_map(move |mode| SetAttr { mode: Some(mode), ..none }),
        2 => id().prop_map(move |uid| SetAttr { uid: Some(uid), ..none }),
        2 => id().prop_map(move |gid| SetAttr { gid: Some(gid), ..none }),
        2 => (id(), id()).prop_map(move |(u, g)| SetAttr { uid: Some(u), gid: Some(g), ..none }),
        2 => (time(), time()).prop_map(move |times| SetAttr { times: Some(times), ..none }),
        1 => (0u64..9).prop_map(move |size| SetAttr { size: Some(size), ..none }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let flags = prop::sample::select(vec![
        libc::O_RDONLY,
        libc::O_RDWR,
        libc::O_WRONLY,
        libc::O_CREAT | libc::O_RDWR,
        libc::O_CREAT | libc::O_EXCL | libc::O_RDWR,
        libc::O_RDONLY | libc::O_TRUNC,
        libc::O_CREAT | libc::O_RDWR | libc::O_TRUNC,
        libc::O_RDONLY | libc::O_NOATIME,
        libc::O_RDONLY | libc::O_DIRECTORY,
        libc::O_PATH,
    ]);
    let name = || prop::sample::select(vec!["user.a", "trusted.a", "security.a", "user.", "odd"]);
    let node = prop::sample::select(vec![0o010_000u32, 0o100_000]);
    prop_oneof![
        10 => (path(), flags, mode()).prop_map(|(p, f, m)| Op::Open(p, f, m)),
        3 => (0..FILES).prop_map(Op::Write),
        1 => (0..FILES).prop_map(Op::Resize),
        1 => (0..FILES).prop_map(Op::Allocate),
        2 => (path(), any::<bool>()).prop_map(|(p, f)| Op::Stat(p, f)),
        2 => (path(), 0u32..8).prop_map(|(p, m)| Op::Access(p, m)),
        6 => (path(), mode()).prop_map(|(p, m)| Op::Mkdir(p, m)),
        2 => (path(), node, mode()).prop_map(|(p, n, m)| Op::Node(p, n | m)),
        2 => (path(), path()).prop_map(|(p, t)| Op::Symlink(p, t)),
        3 => (path(), path(), any::<bool>()).prop_map(|(a, b, f)| Op::Link(a, b, f)),
        3 => (path(), any::<bool>()).prop_map(|(p, d)| Op::Unlink(p, d)),
        5 => (path(), path(), 0u32..6).prop_map(|(a, b, f)| Op::Rename(a, b, f)),
        8 => (path(), any::<bool>(), set()).prop_map(|(p, f, s)| Op::Set(p, f, s)),
        1 => (path(), name()).prop_map(|(p, n)| Op::SetXattr(p, n)),
        1 => (path(), name()).prop_map(|(p, n)| Op::GetXattr(p, n)),
        1 => (path(), name()).prop_map(|(p, n)| Op::RemoveXattr(p, n)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn users_may_do_what_they_may_do_in_a_directory(
        ops in prop::collection::vec((caller(), op()), 1..60)
    ) {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED what users may do: needs root");
            return Ok(());
        }
        let temporary = tempfile::tempdir().unwrap();
        let open_to_all = |path: &Path| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        open_to_all(temporary.path());
        let root = temporary.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mut real = Side::new(DirectoryStore::new(&root, false).unwrap());
        let mut ours = Side::new(MemoryStore::new("test", 1 << 20).unwrap());
        for (caller, op) in ops.iter().filter(|(_, op)| is_comparable(op)) {
            let (mut expected, found) = (real.apply(caller, op), ours.apply(caller, op));
            // Of two paths that are both wrong, either may be reported.
            if matches!(op, Op::Link(..) | Op::Rename(..)) && found.is_err() {
                expected = expected.or(found.clone());
            }
            prop_assert_eq!(&expected, &found, "{} {:?}", caller.uid, op);
        }
    }
}
