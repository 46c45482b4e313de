//! Compares the events of a directory store and a memory store under random operations: the same
//! ones in the same order.
//!
//! It leaves out what the directory store does and a file system would not: it lists a directory
//! with several calls, and checks whether an opened file is a FIFO. It also leaves out events of files with several names: the kernel knows
//! by which one each was opened. The kernel merges equal events in a row; so does this test.

use super::record::Seen;
use super::{Stage, Watching};
use crate::{OpenFile, OpenHow, SetAttr, Witness, XattrAction};
use parking_lot::Mutex;
use proptest::prelude::*;
use std::sync::Arc;
use towline_wire::event::{ACCESS, ALL, ISDIR};
use towline_wire::request::open_flag::of_this_machine;
use towline_wire::{Errno, Timestamp};

/// Number of files that can be open at once.
const FILES: usize = 3;

/// One operation. `usize` values are open files.
#[derive(Clone, Debug)]
enum Op {
    Watch(String),
    Leave(usize),
    Open(usize, String, i32),
    Reopen(usize, usize),
    Close(usize),
    Write(usize, usize),
    Read(usize, u64),
    Resize(usize, u64),
    Allocate(usize, u32),
    Copy(usize, usize),
    Mkdir(String),
    Node(String),
    Symlink(String),
    Unlink(String, bool),
    Rename(String, String, u32),
    Change(String, SetAttr),
    SetXattr(String),
    RemoveXattr(String),
}

/// All events of one side: number of the watch, and event.
type Log = Arc<Mutex<Vec<(usize, Seen)>>>;

/// Logs the events of one watch.
struct Clerk(Log, usize);

impl Witness for Clerk {
    fn saw(&self, mask: u32, cookie: u32, name: &[u8]) {
        self.0.lock().push((self.1, Seen { mask, cookie, name: name.to_vec() }));
    }

    fn lost(&self) {
        panic!("something was lost");
    }
}

/// A store under test.
struct Side {
    stage: Stage,
    log: Log,
    /// Watches with the identity of the watched file.
    watches: Vec<((u64, u64), Option<Watching>)>,
    files: [Option<Arc<dyn OpenFile>>; FILES],
}

impl Side {
    fn new(stage: Stage) -> Self {
        let mut side =
            Self { stage, log: Log::default(), watches: Vec::new(), files: Default::default() };
        side.stage.mkdir("a");
        side.stage.mkdir("b");
        side.stage.mkdir("a/c");
        side.stage.chmod("a", 0o777);
        drop(side.stage.create("a/f"));
        for path in ["", "a", "b"] {
            side.watch(path).unwrap();
        }
        side
    }

    /// Watches a file that is not watched yet.
    fn watch(&mut self, path: &str) -> Result<(), Errno> {
        // A memory store does not know the names of files that were removed before.
        let removed = |file: &Arc<dyn OpenFile>| file.stat().unwrap().links == 0;
        self.files.iter_mut().for_each(|file| drop(file.take_if(|file| removed(file))));
        // A new watch may get events from a moment before.
        self.stage.settle();
        let file = match path {
            "" => self.stage.root.clone(),
            path => self.stage.open(path, super::O_PATH | super::O_NOFOLLOW)?,
        };
        let identity = file.identity();
        let watches =
            |other: &&((u64, u64), Option<Watching>)| other.0 == identity && other.1.is_some();
        if !self.watches.iter().any(|other| watches(&other)) {
            let clerk = Clerk(self.log.clone(), self.watches.len());
            let watch = file.watch(ALL, Arc::new(clerk))?;
            self.watches.push((identity, Some(Watching { _watch: watch, _file: file })));
        }
        Ok(())
    }

    fn file(&self, at: usize) -> Result<&Arc<dyn OpenFile>, Errno> {
        self.files[at].as_ref().ok_or(Errno::EBADF)
    }

    fn apply(&mut self, op: &Op) -> Result<(), Errno> {
        let Stage { store, caller, .. } = &self.stage;
        match op {
            Op::Watch(path) => return self.watch(path),
            Op::Leave(at) => {
                // A watch that ends misses events from a moment before.
                self.stage.settle();
                let count = self.watches.len();
                self.watches[at % count].1 = None;
            }
            Op::Open(at, path, flags) => {
                self.files[*at] = None;
                self.files[*at] = Some(self.stage.open(path, of_this_machine(*flags))?);
            }
            Op::Reopen(at, from) => {
                let from = self.file(*from)?.clone();
                let how = OpenHow { flags: 0, mode: 0 };
                let opened = store.open(caller, (&*from, b""), how)?;
                self.files[*at] = Some(opened.0);
            }
            Op::Close(at) => self.files[*at] = None,
            Op::Write(at, length) => {
                self.file(*at)?.write(0, &vec![1; *length], false)?;
            }
            Op::Read(at, offset) => {
                self.file(*at)?.read(*offset, 100, true)?;
            }
            Op::Resize(at, size) => {
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                store.set_attr(caller, (&**self.file(*at)?, b""), true, &set)?;
            }
            Op::Allocate(at, mode) => self.file(*at)?.allocate(*mode, 10, 20)?,
            Op::Copy(from, to) => {
                store.copy_range(&**self.file(*from)?, 0, &**self.file(*to)?, 1000, 10)?;
            }
            Op::Mkdir(path) => {
                store.make_directory(caller, self.stage.at(path), 0o777)?;
            }
            Op::Node(path) => {
                store.make_node(caller, self.stage.at(path), 0o140_644, 0)?;
            }
            Op::Symlink(path) => {
                store.symlink(caller, self.stage.at(path), b"a/f")?;
            }
            Op::Unlink(path, directory) => {
                store.unlink(caller, self.stage.at(path), *directory)?;
            }
            Op::Rename(from, to, flags) => {
                store.rename(caller, self.stage.at(from), self.stage.at(to), *flags)?;
            }
            Op::Change(path, set) => {
                store.set_attr(caller, self.stage.at(path), true, set)?;
            }
            Op::SetXattr(path) => {
                let action = XattrAction::Set(b"user.x", b"1", 0);
                store.xattr(caller, self.stage.at(path), true, action)?;
            }
            Op::RemoveXattr(path) => {
                let action = XattrAction::Remove(b"user.x");
                store.xattr(caller, self.stage.at(path), true, action)?;
            }
        }
        Ok(())
    }

    /// Returns the events, with the cookies numbered.
    fn told(&self) -> Vec<(usize, Seen)> {
        self.stage.settle();
        let mut cookies = vec![0];
        let mut told = self.log.lock().clone();
        told.retain(|(_, seen)| seen.name != b"settled" && seen.mask != ACCESS | ISDIR);
        // The kernel ignores cookies when it merges events.
        told.dedup_by(|one, other| {
            (one.0, one.1.mask, &one.1.name) == (other.0, other.1.mask, &other.1.name)
        });
        for (_, seen) in &mut told {
            let known = cookies.iter().position(|cookie| *cookie == seen.cookie);
            let number = known.unwrap_or(cookies.len());
            if known.is_none() {
                cookies.push(seen.cookie);
            }
            seen.cookie = number as u32;
        }
        told
    }
}

fn path() -> impl Strategy<Value = String> {
    let directory = prop::sample::select(vec!["", "a/", "b/", "a/c/", "b/c/"]);
    let name = prop::sample::select(vec!["f", "g", "c", "s"]);
    (directory, name).prop_map(|(directory, name)| format!("{directory}{name}"))
}

fn change() -> impl Strategy<Value = SetAttr> {
    let none = SetAttr::default();
    let time = Timestamp::new(5, 6);
    prop::sample::select(vec![
        SetAttr { mode: Some(0o700), ..none },
        SetAttr { size: Some(70), ..none },
        SetAttr { size: Some(7), mode: Some(0o700), ..none },
        SetAttr { times: Some((Timestamp::NOW, Timestamp::NOW)), ..none },
        SetAttr { times: Some((time, Timestamp::OMIT)), ..none },
        SetAttr { times: Some((Timestamp::OMIT, time)), ..none },
        SetAttr { times: Some((Timestamp::OMIT, Timestamp::OMIT)), ..none },
        SetAttr { mode: Some(0o777), times: Some((time, time)), ..none },
        SetAttr { uid: Some(u32::MAX), gid: Some(u32::MAX), ..none },
    ])
}

fn op() -> impl Strategy<Value = Op> {
    let file = || 0..FILES;
    let flags = prop::sample::select(vec![
        libc::O_RDWR,
        libc::O_RDONLY,
        libc::O_CREAT | libc::O_RDWR,
        libc::O_CREAT | libc::O_RDWR | libc::O_TRUNC,
        libc::O_WRONLY | libc::O_TRUNC,
        libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY,
        libc::O_PATH,
        libc::O_DIRECTORY,
    ]);
    prop_oneof![
        4 => path().prop_map(Op::Watch),
        1 => (0usize..20).prop_map(Op::Leave),
        12 => (file(), path(), flags).prop_map(|(at, path, flags)| Op::Open(at, path, flags)),
        1 => (file(), file()).prop_map(|(at, from)| Op::Reopen(at, from)),
        2 => file().prop_map(Op::Close),
        3 => (file(), 0usize..10).prop_map(|(at, length)| Op::Write(at, length)),
        3 => (file(), 0u64..8).prop_map(|(at, offset)| Op::Read(at, offset)),
        2 => (file(), 0u64..100).prop_map(|(at, size)| Op::Resize(at, size)),
        2 => (file(), prop::sample::select(vec![0, 1, 3])).prop_map(|(at, mode)| Op::Allocate(at, mode)),
        2 => (file(), file()).prop_map(|(from, to)| Op::Copy(from, to)),
        4 => path().prop_map(Op::Mkdir),
        1 => path().prop_map(Op::Node),
        2 => path().prop_map(Op::Symlink),
        6 => (path(), any::<bool>()).prop_map(|(path, directory)| Op::Unlink(path, directory)),
        10 => (path(), path(), 0u32..3).prop_map(|(from, to, flags)| Op::Rename(from, to, flags)),
        3 => (path(), change()).prop_map(|(path, set)| Op::Change(path, set)),
        1 => path().prop_map(Op::SetXattr),
        1 => path().prop_map(Op::RemoveXattr),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_tell_the_same(ops in prop::collection::vec(op(), 1..60)) {
        let mut sides = [Side::new(Stage::directory()), Side::new(Stage::memory())];
        for op in &ops {
            let [real, ours] = sides.each_mut().map(|side| side.apply(op));
            // Other tests check that both return the same.
            prop_assert_eq!(real.is_ok(), ours.is_ok(), "{:?}: {:?} and {:?}", op, real, ours);
        }
        let [real, ours] = sides.each_ref().map(Side::told);
        let words = |told: &[(usize, Seen)]| -> Vec<String> {
            told.iter().map(|(at, seen)| format!("{at} {} {}", seen.words(), seen.cookie)).collect()
        };
        prop_assert_eq!(words(&real), words(&ours));
    }
}
