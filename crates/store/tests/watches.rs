//! Tests of directory store watches that need a process of their own, since all watches of a
//! process share one queue.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use parking_lot::{Condvar, Mutex};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_store::directory::DirectoryStore;
use towline_store::{Caller, FileStore, OpenFile, OpenHow, Witness};
use towline_wire::event::{ACCESS, ALL, ATTRIB, CREATE, DELETE, IGNORED, MODIFY};
use towline_wire::request::open_flag;
use towline_wire::{Attr, Errno};

/// More time than any event takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A witness that waits at each event until it may go on, which no real witness may do.
#[derive(Default)]
struct Slow {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    may_go_on: bool,
    seen: Vec<u32>,
    losses: u32,
}

impl Slow {
    fn wait_for(&self, condition: impl Fn(&State) -> bool) {
        let mut state = self.state.lock();
        while !condition(&state) {
            assert!(!self.changed.wait_for(&mut state, PATIENCE).timed_out());
        }
    }
}

impl Witness for Slow {
    fn saw(&self, mask: u32, _: u32, _: &[u8]) {
        let mut state = self.state.lock();
        state.seen.push(mask);
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.may_go_on);
    }

    fn lost(&self) {
        self.state.lock().losses += 1;
        self.changed.notify_all();
    }
}

fn open(
    store: &DirectoryStore,
    caller: &Caller,
    path: &str,
    flags: u32,
) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
    let root = store.root().unwrap();
    store.open(caller, (&*root, path.as_bytes()), OpenHow { flags, mode: 0o644 })
}

fn user(uid: u32, enforce: bool) -> Caller {
    Caller { uid, gid: uid, groups: Arc::new([]), enforce }
}

/// Causes more events than the kernel's queue can hold.
fn overflow(slow: &Slow, change: impl Fn()) {
    let length = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let length: u32 = length.trim().parse().unwrap();
    change();
    slow.wait_for(|state| !state.seen.is_empty());
    (0..length).for_each(|_| change());
}

#[test]
fn what_was_lost_is_told_to_all() {
    let temporary = tempfile::tempdir().unwrap();
    let store = DirectoryStore::new(temporary.path(), false).unwrap();
    for name in ["a", "b", "gone"] {
        std::fs::write(temporary.path().join(name), "x").unwrap();
    }
    let caller = user(0, false);
    let slow: Arc<Slow> = Arc::default();
    let other: Arc<Slow> = Arc::default();
    other.state.lock().may_go_on = true;
    let files = ["a", "b"].map(|name| open(&store, &caller, name, 1).unwrap().0);
    let _watches = files.each_ref().map(|file| file.watch(MODIFY, slow.clone()).unwrap());
    let gone = open(&store, &caller, "gone", open_flag::PATH).unwrap().0;
    let _watch = gone.watch(ALL, other.clone()).unwrap();
    overflow(&slow, || {
        files.iter().for_each(|file| assert_eq!(file.write(0, b"y", false), Ok((1, 0))));
    });
    std::fs::remove_file(temporary.path().join("gone")).unwrap();
    slow.state.lock().may_go_on = true;
    slow.changed.notify_all();
    slow.wait_for(|state| state.losses == 2);
    // Its removal was among the lost events.
    other.wait_for(|state| state.losses == 1 && state.seen.contains(&IGNORED));
    // The watch continues as before.
    slow.state.lock().seen.clear();
    files[0].write(0, b"z", false).unwrap();
    slow.wait_for(|state| state.seen.contains(&MODIFY));
}

#[test]
fn who_may_not_read_may_not_watch() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED who_may_not_read_may_not_watch: needs root");
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let allow = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    allow(temporary.path(), 0o755);
    let path = temporary.path().join("f");
    std::fs::write(&path, "x").unwrap();
    allow(&path, 0o600);
    let store = DirectoryStore::new(temporary.path(), false).unwrap();
    let watch = |caller: &Caller| {
        let (file, _) = open(&store, caller, "f", open_flag::PATH).unwrap();
        file.watch(MODIFY, Arc::<Slow>::default()).map(drop)
    };
    assert_eq!(watch(&user(1234, true)), Err(Errno::EACCES));
    assert_eq!(watch(&user(1234, false)), Ok(()));
    allow(&path, 0o604);
    assert_eq!(watch(&user(1234, true)), Ok(()));
}

/// Returns the events that the kernel watches on an inode for this process.
fn kernel_mask(inode: u64) -> Option<u32> {
    let infos = std::fs::read_dir("/proc/self/fdinfo").unwrap();
    // Another test may close a descriptor meanwhile.
    let infos = infos.filter_map(|info| std::fs::read_to_string(info.ok()?.path()).ok());
    let text: String = infos.collect();
    let this = format!(" ino:{inode:x} ");
    let line = text.lines().find(|line| line.starts_with("inotify") && line.contains(&this))?;
    let mask = line.split_once(" mask:")?.1.split(' ').next()?;
    u32::from_str_radix(mask, 16).ok()
}

fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_kernel_watches_no_more_than_somebody_wants() {
    let temporary = tempfile::tempdir().unwrap();
    let path = |name: &str| temporary.path().join(name);
    let inode = |name: &str| std::fs::metadata(path(name)).unwrap().ino();
    std::fs::write(path("f"), "x").unwrap();
    ["a", "a/d", "b"].iter().for_each(|name| std::fs::create_dir(path(name)).unwrap());
    let store = DirectoryStore::new(temporary.path(), false).unwrap();
    let witness: Arc<Slow> = Arc::default();
    witness.state.lock().may_go_on = true;
    let watch = |name: &str, mask| {
        let (file, _) = open(&store, &user(0, false), name, open_flag::PATH).unwrap();
        file.watch(mask, witness.clone()).unwrap()
    };
    let f = inode("f");
    let one = watch("f", MODIFY);
    let other = watch("f", ALL);
    assert_eq!(kernel_mask(f).unwrap() & ALL, ALL);
    drop(other);
    assert_eq!(kernel_mask(f).unwrap() & ALL, MODIFY | ATTRIB);
    drop(one);
    assert_eq!(kernel_mask(f), None);

    let (a, b, d) = (inode("a"), inode("b"), inode("a/d"));
    let directory = watch("a/d", CREATE);
    let above = watch("a", ACCESS);
    assert_eq!(kernel_mask(a).unwrap() & (ACCESS | DELETE), ACCESS | DELETE);
    drop(above);
    assert_eq!(kernel_mask(a).unwrap() & (ACCESS | DELETE), DELETE);
    std::fs::rename(path("a/d"), path("b/d")).unwrap();
    wait_until(|| kernel_mask(a).is_none() && kernel_mask(b).is_some());
    std::fs::remove_dir(path("b/d")).unwrap();
    wait_until(|| kernel_mask(b).is_none() && kernel_mask(d).is_none());
    drop(directory);
}
