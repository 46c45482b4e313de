//! Random sequences of file operations, done by plain system calls on a directory of this machine
//! and by clients of a server, over each transport on each back end: answers, error numbers and the
//! final trees must be the same.
//!
//! A failure prints the seed (`TOWLINE_SEED` repeats the run) and the shortest sequence found that
//! still fails. `TOWLINE_LONG=1` runs sixty times as many, `TOWLINE_LONG=10` six hundred times.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod calls;
#[path = "../common/mod.rs"]
mod common;
mod local;
mod op;
mod remote;
mod said;
mod tree;

use common::Random;
use local::Local;
use op::{At, Op};
use remote::Remote;
use rustix::fs::OFlags;
use said::Said;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use towline_client::{Errno, Transport};
use towline_server::EngineWish;
use towline_wire::request::{lock, rename_flag};

/// Number of operations in one sequence.
const OPS: usize = 400;
/// Number of sequences in one test.
const SEQUENCES: u64 = 3;
/// The same in a long run of length 1: takes some minutes on two processors.
const SEQUENCES_LONG: u64 = 180;
/// Most runs in search of a shorter sequence.
const SHRINKING_RUNS: usize = 300;

/// An operation and the client that does it, unless an open file decides which one.
#[derive(Clone, Debug)]
struct Step {
    client: usize,
    op: Op,
}

/// Both sides.
struct World {
    remote: Remote,
    /// Stands for the root of the export on the local side.
    root: TempDir,
    memory: bool,
    /// The local side is a `tmpfs`, which has holes exactly where `mem` has them.
    tmpfs: bool,
    /// Whether the local side has extended attributes, files without a name, and whiteouts.
    xattrs: bool,
    temporary: bool,
    whiteouts: bool,
    trees: u32,
    /// Number of operations compared, and why others were not.
    compared: u64,
    skipped: BTreeMap<&'static str, u64>,
}

/// A directory for both sides: in memory or on the disk.
fn place(tmpfs: bool) -> PathBuf {
    let memory = Path::new("/dev/shm");
    if tmpfs && memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

impl World {
    fn new(transports: &[Transport], memory: bool, place: &Path) -> Self {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let root = TempDir::new_in(place).unwrap();
        rustix::fs::chmod(root.path(), rustix::fs::Mode::from_raw_mode(0o1777)).unwrap();
        let tmpfs = rustix::fs::statfs(root.path()).unwrap().f_type as u64 == TMPFS_MAGIC;
        let set = rustix::fs::XattrFlags::empty();
        let xattrs = rustix::fs::setxattr(root.path(), "user.x", b"", set).is_ok();
        let _ = rustix::fs::removexattr(root.path(), "user.x");
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let temporary = rustix::fs::open(root.path(), flags, mode).is_ok();
        let whiteouts = common::has_whiteouts(root.path());
        for (has, what) in [
            (xattrs, "extended attributes"),
            (temporary, "O_TMPFILE"),
            (whiteouts, "RENAME_WHITEOUT"),
        ] {
            if !has {
                common::skipped(&format!("{what}: {} has none to compare with", place.display()));
            }
        }
        Self {
            remote: Remote::new(transports, if memory { "mem" } else { "dir" }),
            root,
            memory,
            tmpfs,
            xattrs,
            temporary,
            whiteouts,
            trees: 0,
            compared: 0,
            skipped: BTreeMap::new(),
        }
    }

    /// Runs a sequence on fresh trees.
    fn run(&mut self, steps: &[Step]) -> Result<(), String> {
        self.trees += 1;
        // Deep enough that `..` rarely leads to something that outlives this run.
        let tree = format!("t{}", self.trees);
        let top = format!("{tree}/u/v/top");
        let path = self.root.path().join(&tree);
        let mut made = PathBuf::new();
        for name in top.split('/') {
            made.push(name);
            let mode = rustix::fs::Mode::from_raw_mode(0o755);
            rustix::fs::mkdir(self.root.path().join(&made), mode).unwrap();
            self.remote.make_directory(made.to_str().unwrap());
        }
        self.remote.begin(&top);
        let mut local = Local::new(self.root.path(), &top, !self.memory);
        let mut result = Ok(());
        for (number, step) in steps.iter().enumerate() {
            result = self.step(&mut local, step).map_err(|e| format!("step {number}: {e}"));
            if result.is_err() {
                break;
            }
        }
        if result.is_ok() {
            result = tree::compare(&path, &self.remote.open(&tree));
        }
        drop(local);
        self.remote.end(&tree);
        std::fs::remove_dir_all(&path).unwrap();
        result
    }

    fn step(&mut self, local: &mut Local, step: &Step) -> Result<(), String> {
        let op = &step.op;
        let slots = op.slots();
        if slots.iter().any(|slot| local.slot(*slot).is_none()) {
            return Ok(());
        }
        let Ok(owner) = self.remote.owner(&slots) else { return Ok(()) };
        if let Some(reason) = self.incomparable(local, op) {
            *self.skipped.entry(reason).or_default() += 1;
            return Ok(());
        }
        let escapes = op.paths().iter().any(|at| local.escapes(at, follows(op)));
        let theirs = if escapes { Err(Errno::EXDEV) } else { local.apply(op) };
        let ours = self.remote.apply(owner.unwrap_or(step.client), op);
        self.compared += 1;
        if escapes {
            // With two paths, the two sides may meet different errors first.
            return ours.map_or(Ok(()), |said| Err(format!("{op:?} leads out, but: {said:?}")));
        }
        let of_both = |said: Said| match said {
            Said::Space([.., name]) if self.memory => Said::Space([0, 0, 0, name]),
            said => said,
        };
        let (ours, theirs) = (ours.map(of_both), theirs.map(of_both));
        if ours != theirs && !(ours.is_err() && theirs.is_err() && has_two_errors(local, op)) {
            return Err(format!("{op:?}\n  ours:   {ours:?}\n  theirs: {theirs:?}"));
        }
        Ok(())
    }

    /// Why an operation cannot be compared: known differences between file systems, or from the
    /// system calls.
    fn incomparable(&self, local: &Local, op: &Op) -> Option<&'static str> {
        let path_only = |slot: usize| local.flags(slot).contains(OFlags::PATH);
        let removed = |at: &At| {
            let gone = |slot| local.stat_slot(slot).links == 0;
            at.base.is_some_and(gone) && at.climbs()
        };
        if op.paths().into_iter().any(removed) {
            return Some("`..` of a removed directory is not looked for");
        }
        let exact = self.memory && self.tmpfs;
        let temporary = libc::O_TMPFILE as u32;
        match op {
            Op::SetXattr(..) | Op::GetXattr(..) | Op::ListXattrs(..) | Op::RemoveXattr(..)
                if self.memory && !self.xattrs =>
            {
                Some("no extended attributes to compare with")
            }
            Op::Open(_, _, flags, _)
                if flags & temporary == temporary && self.memory && !self.temporary =>
            {
                Some("no O_TMPFILE to compare with")
            }
            Op::Rename(_, _, flags)
                if flags & rename_flag::WHITEOUT != 0 && self.memory && !self.whiteouts =>
            {
                Some("no whiteouts to compare with")
            }
            // tmpfs makes one; ext4 says EPERM.
            Op::Open(_, At { base: Some(slot), .. }, flags, _)
                if flags & temporary == temporary
                    && self.memory
                    && local.stat_slot(*slot).links == 0 =>
            {
                Some("file systems differ in whether O_TMPFILE goes into a removed directory")
            }
            Op::Truncate(At { base: Some(slot), path }, _)
            | Op::Chmod(At { base: Some(slot), path }, _)
            | Op::SetXattr(At { base: Some(slot), path }, ..)
            | Op::GetXattr(At { base: Some(slot), path }, ..)
            | Op::ListXattrs(At { base: Some(slot), path }, ..)
            | Op::RemoveXattr(At { base: Some(slot), path }, ..)
                if path.is_empty() && path_only(*slot) =>
            {
                Some("more can be done with O_PATH than a local one allows")
            }
            Op::Lock(_, lock::PROCESS, ..) | Op::TestLock(_, lock::PROCESS, ..)
                if self.remote.clients() > 1 =>
            {
                Some("several clients are several processes")
            }
            Op::Allocate(_, 8 | 32, ..) if !self.tmpfs => {
                Some("ranges are neither collapsed nor inserted")
            }
            Op::Allocate(_, mode, ..) if exact && mode & 16 != 0 => {
                Some("tmpfs cannot zero a range")
            }
            Op::Allocate(_, 0 | 1, ..) if exact => {
                Some("tmpfs shows pages allocated ahead as data")
            }
            // ext4 ends at 16 TiB.
            Op::Copy(_, _, _, to, _)
                if op.goes_beyond() || (self.memory && !self.tmpfs && *to >= 1 << 44) =>
            {
                Some("file systems differ in where a copy of nothing may lead")
            }
            Op::Copy(..) if exact => Some("copies of tmpfs have no holes"),
            // Space that is only allocated counts as data, too, while pages of it are in memory.
            Op::Seek(..) if !self.tmpfs => Some("holes are where the file system leaves them"),
            Op::Write(slot, ..)
                if op.goes_beyond() && local.flags(*slot).contains(OFlags::APPEND) =>
            {
                Some("an append does not look at the offset")
            }
            Op::Seek(slot, ..) if !local.stat_slot(*slot).is_file() => {
                Some("some file systems find data in directories")
            }
            _ => None,
        }
    }
}

/// True if an operation has two errors: which one is met first is unspecified.
fn has_two_errors(local: &Local, op: &Op) -> bool {
    match op {
        op if op.goes_beyond() => true,
        // What no file system does, to files that are open for reading, or of another type, or with no length.
        Op::Allocate(_, 8 | 32, ..) => true,
        Op::Allocate(slot, mode, ..) => *mode == 2 && local.access(*slot) == 0,
        // A directory is never open for writing.
        Op::Copy(from, _, to, ..) => {
            [from, to].iter().any(|slot| !local.stat_slot(**slot).is_file())
        }
        Op::SetXattr(_, _, name, ..) | Op::GetXattr(_, _, name) | Op::RemoveXattr(_, _, name) => {
            name.is_empty()
        }
        Op::Open(_, _, flags, _) => {
            let both = |bits: i32| flags & bits as u32 == bits as u32;
            let temporary = both(libc::O_TMPFILE) && (flags & 3 == 0 || both(libc::O_CREAT));
            both(libc::O_CREAT | libc::O_DIRECTORY) || temporary
        }
        Op::Link(from, follow, to) => local.stat(from, *follow).is_err() && !local.has_parent(to),
        Op::Rename(from, to, _) => !local.has_parent(from) && !local.has_parent(to),
        _ => false,
    }
}

/// True if an operation follows a symbolic link at the end of its path.
fn follows(op: &Op) -> bool {
    match op {
        Op::Open(_, _, flags, _) => {
            let exclusive = common::EXCLUSIVE | common::CREATE & !3;
            let path = libc::O_PATH as u32; // makes these flags meaningless
            (flags & exclusive != exclusive || flags & path != 0)
                && flags & libc::O_NOFOLLOW as u32 == 0
        }
        Op::WritePath(_, flags, ..) => flags & common::EXCLUSIVE == 0,
        Op::ReadPath(..) | Op::Truncate(..) | Op::Access(..) | Op::Chmod(..) => true,
        Op::Stat(_, follow) | Op::Link(_, follow, _) | Op::Chown(_, follow, ..) => *follow,
        Op::Times(_, follow, ..) | Op::SetXattr(_, follow, ..) => *follow,
        Op::GetXattr(_, follow, _) | Op::ListXattrs(_, follow) => *follow,
        Op::RemoveXattr(_, follow, _) => *follow,
        _ => false,
    }
}

/// Leaves out operations as long as the rest still fails. Returns the rest and how it fails.
fn shrink(world: &mut World, mut steps: Vec<Step>, mut failure: String) -> (Vec<Step>, String) {
    let mut runs = 0;
    let mut part = steps.len().div_ceil(2);
    while part > 0 && runs < SHRINKING_RUNS {
        let mut from = 0;
        while from < steps.len() && runs < SHRINKING_RUNS {
            let mut fewer = steps.clone();
            fewer.drain(from..(from + part).min(steps.len()));
            runs += 1;
            match world.run(&fewer) {
                Ok(()) => from += part,
                Err(error) => (steps, failure) = (fewer, error),
            }
        }
        part /= 2;
    }
    (steps, failure)
}

fn sequences() -> u64 {
    common::long().map_or(SEQUENCES, |length| length * SEQUENCES_LONG)
}

/// Runs sequences with clients over these transports, taking turns.
fn compare(engine: EngineWish, transports: &[usize]) {
    let root = rustix::process::geteuid().is_root();
    rustix::process::umask(rustix::fs::Mode::empty());
    let first = common::seed();
    for (memory, tmpfs) in [(false, true), (false, false), (true, true), (true, false)] {
        let place = place(tmpfs);
        let setup = common::setup_in(&place, engine, 256 << 20);
        let transports: Vec<Transport> =
            transports.iter().map(|index| setup.transports[*index].clone()).collect();
        rustix::fs::chmod(&setup.data, rustix::fs::Mode::from_raw_mode(0o1777)).unwrap();
        let mut world = World::new(&transports, memory, &place);
        for seed in first..first + sequences() {
            let mut random = Random::new(seed);
            let clients = world.remote.clients() as u64;
            let steps: Vec<Step> = (0..OPS)
                .map(|_| {
                    let client = random.below(clients) as usize;
                    Step { client, op: op::any_op(&mut random, root) }
                })
                .collect();
            if let Err(failure) = world.run(&steps) {
                let (steps, failure) = shrink(&mut world, steps, failure);
                let mut shown = String::new();
                for step in &steps {
                    shown += &format!("  {}: {:?}\n", step.client, step.op);
                }
                panic!("TOWLINE_SEED={seed}, memory {memory}, tmpfs {tmpfs}\n{shown}{failure}");
            }
        }
        eprintln!(
            "memory {memory}, tmpfs {}: {} operations compared; skipped: {:?}",
            world.tmpfs, world.compared, world.skipped
        );
    }
}

#[test]
fn over_tcp() {
    compare(EngineWish::Automatic, &[0]);
}

#[test]
fn over_a_unix_socket() {
    compare(EngineWish::Epoll, &[1]);
}

#[test]
fn over_shared_memory() {
    compare(EngineWish::Automatic, &[2]);
}

/// All clients see at once what one of them does.
#[test]
fn clients_over_all_transports_at_once() {
    compare(EngineWish::Automatic, &[0, 1, 2]);
}
