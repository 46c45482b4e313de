//! Compounds alone: on a store in memory, and on a directory with a state.

mod closing;
mod copying;

use super::{Compound, Context, Step};
use crate::Session;
use crate::files::{Files, Opened, SharedFiles, Table, Terms};
use crate::locks::Owner;
use crate::simulation::{One, caller};
use crate::state::{Journal, STATE_BYTES, State};
use rustix::fs::{FallocateFlags, MemfdFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_store::directory::DirectoryStore;
use towline_store::memory::MemoryStore;
use towline_store::{FREED_BYTES_MAX, FileStore, OpenHow};
use towline_wire::limits::OPEN_FILES_MAX;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, DIRECTORY, encode_compound, lock, open_flag, valid};
use towline_wire::{Attr, Errno, Reply, Request, Timestamp};

const READ_WRITE: u32 = 2;
const BOOT: [u8; 16] = [7; 16];

/// A session with one export.
pub(super) struct World {
    export: One,
    files: SharedFiles,
    /// Owners whose locks were to be released.
    released: Vec<Owner>,
    pub(super) root: u64,
}

/// What came of a request.
pub(super) struct Outcome {
    results: Vec<u8>,
    undecided: bool,
}

impl Outcome {
    pub(super) fn failed(&self) -> Option<Errno> {
        match parse_results(&self.results).unwrap().last() {
            Some(Reply::Failed { errno }) => Some(Errno(*errno)),
            Some(_) => None,
            None => panic!("no result at all"),
        }
    }

    fn handle(&self) -> u64 {
        match parse_results(&self.results).unwrap().last() {
            Some(Reply::Opened { handle, .. }) => *handle,
            other => panic!("nothing was opened: {other:?}"),
        }
    }
}

impl World {
    pub(super) fn new(store: Arc<dyn FileStore>, read_only: bool) -> Self {
        let export = One(store, Terms { read_only, account: 0 });
        let files = Arc::new(Files::new(1, 1).into());
        let mut world = Self { export, files, released: Vec::new(), root: 0 };
        world.root = world.ask(&[Request::Attach { name: b"x" }]).handle();
        world
    }

    fn in_memory() -> Self {
        Self::new(MemoryStore::new("m", 64 << 20).unwrap(), false)
    }

    fn ask(&mut self, requests: &[Request<'_>]) -> Outcome {
        self.ask_with(requests, &[])
    }

    pub(super) fn ask_with(&mut self, requests: &[Request<'_>], payload: &[u8]) -> Outcome {
        let mut compound =
            Compound::new(0, 1, &encode_compound(requests), payload, 0).expect("it is legal");
        self.finish(&mut compound)
    }

    fn finish(&mut self, compound: &mut Compound) -> Outcome {
        let (files, caller) = (self.files.clone(), caller());
        let mut may_wait = false;
        loop {
            let mut held = (!may_wait).then(|| files.lock());
            let files = held.as_mut().map_or(Table::Shared(&files), |files| Table::Held(files));
            let mut context = Context { files, exports: &self.export, caller: &caller, session: 1 };
            match compound.run(None, &mut context) {
                Step::Finished => break,
                Step::Elsewhere(_) => may_wait = true,
                Step::Block(_, work, _) => compound.unblocked(work()),
                Step::Lock(..) => compound.locked(Ok(true)),
                Step::ReleaseLocks(owner, _) => self.released.push(owner),
                _ => panic!("none asked for"),
            }
        }
        let undecided = compound.is_undecided();
        let (results, ..) = compound.reply();
        Outcome { results: std::mem::take(results), undecided }
    }

    fn open(&mut self, path: &[u8], flags: u32) -> Outcome {
        self.ask(&[Request::Open { base: self.root, flags, mode: 0o644, path }])
    }
}

/// Makes a file five bytes long.
fn resize(base: u64, path: &[u8]) -> Request<'_> {
    Request::SetAttr {
        base,
        flags: 0,
        valid: valid::SIZE,
        mode: 0,
        uid: 0,
        gid: 0,
        size: 5,
        accessed: Timestamp::default(),
        modified: Timestamp::default(),
        path,
    }
}

/// As locally, where the descriptor is found before the file.
#[test]
fn nothing_is_created_or_shortened_without_room_for_an_open_file() {
    let mut world = World::in_memory();
    let file = world.open(b"old", READ_WRITE | open_flag::CREATE).handle();
    assert_eq!(world.ask(&[resize(file, b"")]).failed(), None);
    let known = world.files.lock().find(file).unwrap().clone();
    {
        let mut files = world.files.lock();
        while files.len() < OPEN_FILES_MAX {
            let Opened { store, file, terms, flags, .. } = known.clone();
            files.insert(Opened::new(store, file, terms, flags)).unwrap();
        }
    }
    let (create, exclusive) = (open_flag::CREATE, open_flag::CREATE | open_flag::EXCLUSIVE);
    for (path, flags) in [
        (&b"new"[..], READ_WRITE | create),
        (b"new", READ_WRITE | exclusive),
        (b"old", READ_WRITE | open_flag::TRUNCATE),
    ] {
        assert_eq!(world.open(path, flags).failed(), Some(Errno::EMFILE));
    }
    let stat = |path| Request::Stat { base: world.root, flags: 0, path };
    let (new, old) = ([stat(b"new")], [stat(b"old")]);
    assert_eq!(world.ask(&new).failed(), Some(Errno::ENOENT));
    let kept = world.ask(&old);
    match parse_results(&kept.results).unwrap()[..] {
        [Reply::Attributes { attr }] => assert_eq!(attr.size, 5),
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_open_already_is_reclaimed_and_closed_in_one_request() {
    let mut world = World::in_memory();
    let file = world.open(b"f", READ_WRITE | open_flag::CREATE).handle();
    let inode = world.files.lock().find(file).unwrap().file.stat().unwrap().identity();
    let again =
        Request::Reclaim { handle: file, flags: READ_WRITE, inode, export: b"x", path: b"f" };
    assert_eq!(world.ask(&[again, Request::Close { handle: CURRENT }]).failed(), None);
    assert_eq!(world.files.lock().len(), 1, "only the root is open");
}

/// As when the members of a family come back after a restart, to a store that may hang: threads of that
/// store open the file for them.
#[test]
fn what_several_threads_reclaim_at_once_all_have() {
    let mut world = World::in_memory();
    let file = world.open(b"f", READ_WRITE | open_flag::CREATE).handle();
    let inode = world.files.lock().find(file).unwrap().file.stat().unwrap().identity();
    let reclaim = |handle| {
        let again = Request::Reclaim { handle, flags: READ_WRITE, inode, export: b"x", path: b"f" };
        let body = encode_compound(&[again]);
        let mut compound = Compound::new(0, 1, &body, &[], 0).unwrap();
        let (files, caller) = (Table::Shared(&world.files), caller());
        let mut context = Context { files, exports: &world.export, caller: &caller, session: 1 };
        let step = compound.run(None, &mut context);
        assert!(matches!(step, Step::Finished));
        let results = std::mem::take(compound.reply().0);
        assert_eq!(Outcome { results, undecided: false }.failed(), None, "{handle:x}");
    };
    let all = || (0..20_000).for_each(|number| reclaim(7 << 32 | number));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(all);
        }
    });
}

/// What `mount -o ro` allows is allowed, and what is missing is missing.
#[test]
fn a_read_only_export_is_like_a_read_only_mount() {
    let store = MemoryStore::new("m", 1 << 20).unwrap();
    let top = store.root().unwrap();
    let how = OpenHow { flags: READ_WRITE | open_flag::CREATE, mode: 0o644 };
    store.open(&caller(), (&*top, b"f"), how).unwrap();
    store.make_directory(&caller(), (&*top, b"d"), 0o755).unwrap();
    store.symlink(&caller(), (&*top, b"s"), b"f").unwrap();
    store.make_node(&caller(), (&*top, b"pipe"), 0o010_644, 0).unwrap();
    let mut world = World::new(store, true);
    let (create, exclusive) = (open_flag::CREATE, open_flag::EXCLUSIVE);
    for (path, flags, failed) in [
        (&b"f"[..], create, None),
        (b"f", READ_WRITE | open_flag::PATH, None),
        (b"f", READ_WRITE, Some(Errno::EROFS)),
        (b"f", READ_WRITE | create, Some(Errno::EROFS)),
        (b"f", open_flag::TRUNCATE, Some(Errno::EROFS)),
        (b"f", create | exclusive, Some(Errno::EEXIST)),
        (b"new", create, Some(Errno::EROFS)),
        (b"new", create | exclusive, Some(Errno::EROFS)),
        (b"new", READ_WRITE, Some(Errno::ENOENT)),
        (b"new/", create, Some(Errno::EISDIR)),
        (b"f/", create, Some(Errno::EISDIR)),
        (b"missing/new", create, Some(Errno::ENOENT)),
        (b"f/new", READ_WRITE | create, Some(Errno::ENOTDIR)),
        (b"d", READ_WRITE, Some(Errno::EISDIR)),
        (b"d", open_flag::TRUNCATE, Some(Errno::EISDIR)),
        (b"d", create, Some(Errno::EISDIR)),
        (b"d", create | exclusive, Some(Errno::EEXIST)),
        (b"f", READ_WRITE | open_flag::DIRECTORY, Some(Errno::ENOTDIR)),
        (b"s", READ_WRITE, Some(Errno::EROFS)),
        (b"s", READ_WRITE | open_flag::NO_FOLLOW, Some(Errno::ELOOP)),
        (b"s", create | open_flag::NO_FOLLOW, Some(Errno::ELOOP)),
        // The client opens pipes itself.
        (b"pipe", READ_WRITE, Some(Errno::ENXIO)),
        (b"pipe", create, Some(Errno::ENXIO)),
        (b"pipe", open_flag::TRUNCATE, Some(Errno::ENXIO)),
        (b"pipe", READ_WRITE | create | exclusive, Some(Errno::EEXIST)),
        (b"pipe", READ_WRITE | open_flag::DIRECTORY, Some(Errno::ENOTDIR)),
        (b"d", open_flag::TEMPORARY | open_flag::DIRECTORY | READ_WRITE, Some(Errno::EROFS)),
    ] {
        let name = String::from_utf8_lossy(path);
        assert_eq!(world.open(path, flags).failed(), failed, "{name}, {flags:o}");
    }
    let root = world.root;
    let access = |path| Request::Access { base: root, mode: 2, path };
    assert_eq!(world.ask(&[access(b"f")]).failed(), Some(Errno::EROFS));
    assert_eq!(world.ask(&[access(b"new")]).failed(), Some(Errno::ENOENT));
    assert_eq!(world.ask(&[access(b"pipe")]).failed(), None);
    assert_eq!(world.ask(&[resize(root, b"f")]).failed(), Some(Errno::EROFS));
    assert_eq!(world.ask(&[resize(root, b"new")]).failed(), Some(Errno::ENOENT));
    let forget = |path| Request::RemoveXattr { base: root, flags: 0, path, name: b"user.a" };
    assert_eq!(world.ask(&[forget(b"f")]).failed(), Some(Errno::EROFS));
    assert_eq!(world.ask(&[forget(b"new")]).failed(), Some(Errno::ENOENT));
}

/// Each line is what Linux says on a read-only tmpfs.
#[test]
fn names_of_a_read_only_export_are_like_those_of_a_read_only_mount() {
    let store = MemoryStore::new("m", 1 << 20).unwrap();
    let top = store.root().unwrap();
    let how = OpenHow { flags: READ_WRITE | open_flag::CREATE, mode: 0o644 };
    store.open(&caller(), (&*top, b"f"), how).unwrap();
    store.make_directory(&caller(), (&*top, b"d"), 0o755).unwrap();
    store.symlink(&caller(), (&*top, b"dangling"), b"gone").unwrap();
    let mut world = World::new(store, true);
    let base = world.root;
    // Path, `mkdir`, whatever else creates a name, whatever removes or replaces one.
    for (path, made, created, removed) in [
        (&b"d"[..], Errno::EEXIST, Errno::EEXIST, Errno::EROFS),
        (b"f", Errno::EEXIST, Errno::EEXIST, Errno::EROFS),
        (b"dangling", Errno::EEXIST, Errno::EEXIST, Errno::EROFS),
        (b"f/", Errno::EEXIST, Errno::EEXIST, Errno::EROFS),
        (b"new", Errno::EROFS, Errno::EROFS, Errno::EROFS),
        (b"new/", Errno::EROFS, Errno::ENOENT, Errno::EROFS),
        (b"missing/new", Errno::ENOENT, Errno::ENOENT, Errno::ENOENT),
        (b"f/new", Errno::ENOTDIR, Errno::ENOTDIR, Errno::ENOTDIR),
    ] {
        let (mode, new_base, flags) = (0o755, base, 0);
        for (request, failed) in [
            (Request::MakeDir { base, mode, path }, made),
            (Request::MakeNode { base, mode, rdev: 0, path }, created),
            (Request::Symlink { base, path, target: b"x" }, created),
            (Request::Link { base, flags, path: b"f", new_base, new_path: path }, created),
            (Request::Unlink { base, flags, path }, removed),
            (Request::Rename { base, flags, path: b"f", new_base, new_path: path }, removed),
            (Request::Rename { base, flags, path, new_base, new_path: b"new" }, removed),
        ] {
            assert_eq!(world.ask(&[request]).failed(), Some(failed), "{request:?}");
        }
    }
    // Path, `unlink`, `rmdir`, `rename` from it or to it, and to it if nothing may be replaced.
    for (path, unlinked, removed, renamed, kept) in [
        (&b"."[..], Errno::EISDIR, Errno::EINVAL, Errno::EBUSY, Errno::EEXIST),
        (b"./", Errno::EISDIR, Errno::EINVAL, Errno::EBUSY, Errno::EEXIST),
        (b"..", Errno::EISDIR, Errno::ENOTEMPTY, Errno::EBUSY, Errno::EEXIST),
        (b"d/..", Errno::EISDIR, Errno::ENOTEMPTY, Errno::EBUSY, Errno::EEXIST),
        (b"missing/..", Errno::ENOENT, Errno::ENOENT, Errno::ENOENT, Errno::ENOENT),
        (b"f/.", Errno::ENOTDIR, Errno::ENOTDIR, Errno::ENOTDIR, Errno::ENOTDIR),
        (b"", Errno::ENOENT, Errno::ENOENT, Errno::ENOENT, Errno::ENOENT),
        (b"f", Errno::EROFS, Errno::EROFS, Errno::EROFS, Errno::EROFS),
    ] {
        let (new_base, flags) = (base, 0);
        for (request, failed) in [
            (Request::Unlink { base, flags, path }, unlinked),
            (Request::Unlink { base, flags: DIRECTORY, path }, removed),
            (Request::Rename { base, flags, path, new_base, new_path: b"new" }, renamed),
            (Request::Rename { base, flags, path: b"f", new_base, new_path: path }, renamed),
            (Request::Rename { base, flags: 1, path: b"f", new_base, new_path: path }, kept),
        ] {
            assert_eq!(world.ask(&[request]).failed(), Some(failed), "{request:?}");
        }
    }
    let missing =
        Request::Link { base, flags: 0, path: b"missing", new_base: base, new_path: b"f" };
    assert_eq!(world.ask(&[missing]).failed(), Some(Errno::ENOENT));
}

/// The state of a server that can be killed.
struct Memory(OwnedFd);

impl Memory {
    fn new() -> (Self, Arc<State>) {
        let file = rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, STATE_BYTES as u64).unwrap();
        let this = Self(file);
        let state = State::create(this.map(), &BOOT, 1).unwrap();
        (this, Arc::new(state))
    }

    fn map(&self) -> SharedMemory {
        SharedMemory::of_file(self.0.try_clone().unwrap(), STATE_BYTES).unwrap()
    }

    /// The session with number 5 after the server was killed.
    fn restarted(&self) -> Session {
        let state = Arc::new(State::open(self.map(), &BOOT, 2).unwrap());
        let kept = state.claim(5, 50).unwrap();
        Session::kept(5, 50, 2, kept)
    }
}

impl World {
    /// Asks in a session that is kept.
    fn ask_kept(
        &mut self,
        journal: &Journal,
        recorded: bool,
        sequence: u32,
        requests: &[Request<'_>],
    ) -> Outcome {
        let body = encode_compound(requests);
        let mut compound = Compound::new(0, sequence, &body, &[], 0).expect("it is legal");
        let _ = compound.keep(journal, recorded);
        self.finish(&mut compound)
    }
}

#[test]
fn errors_of_names_are_the_same_with_and_without_a_state() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), b"").unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let root = world.root;
    let (_memory, state) = Memory::new();
    let journal = state.begin(5, 50).unwrap();
    let link =
        |path, new_path| Request::Link { base: root, flags: 0, path, new_base: root, new_path };
    let rename =
        |path, new_path| Request::Rename { base: root, flags: 0, path, new_base: root, new_path };
    let make = |path| Request::MakeDir { base: root, mode: 0o755, path };
    let requests: [Request<'_>; 10] = [
        make(b"file/"),
        make(b"file//"),
        make(b"missing/new"),
        Request::MakeNode { base: root, mode: 0o100_644, rdev: 0, path: b"file/" },
        Request::Symlink { base: root, path: b"file/", target: b"x" },
        link(b"file", b"file/"),
        link(b"missing", b"file/new"),
        Request::Unlink { base: root, flags: 0, path: b"file/" },
        rename(b"file", b"new/"),
        rename(b"file/", b"new"),
    ];
    for (number, request) in requests.into_iter().enumerate() {
        let without = world.ask(&[request]).failed();
        let with = world.ask_kept(&journal, false, number as u32 + 1, &[request]).failed();
        assert!(without.is_some(), "{request:?}");
        assert_eq!(with, without, "{request:?}");
    }
}

/// The client has the file open again when it repeats the request.
#[test]
fn a_file_that_a_recorded_request_closed_is_closed_again() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("name")).unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let (name, path, made) = (b"name", b"name/f", b"name/d");
    let (memory, state) = Memory::new();
    let journal = state.begin(5, 50).unwrap();
    let open = |world: &mut World| world.open(path, READ_WRITE | open_flag::CREATE).handle();
    let before = open(&mut world);
    let inode = world.files.lock().find(before).unwrap().file.stat().unwrap().identity();
    let requests = [
        Request::MakeDir { base: world.root, mode: 0o700, path: name },
        Request::Close { handle: before },
    ];
    // The first operation fails, so that nothing is recorded as done.
    assert_eq!(world.ask_kept(&journal, false, 1, &requests).failed(), Some(Errno::EEXIST));
    let requests = [
        Request::MakeDir { base: world.root, mode: 0o700, path: made },
        Request::Close { handle: before },
    ];
    assert_eq!(world.ask_kept(&journal, false, 2, &requests).failed(), None);
    drop((journal, state));

    let mut session = memory.restarted();
    let again = Request::Reclaim { handle: before, flags: READ_WRITE, inode, export: b"x", path };
    let retaken = Request::Lock {
        handle: before,
        owner: 0,
        family: lock::FLOCK,
        kind: lock::EXCLUSIVE,
        wait: 0,
        start: 0,
        length: 0,
    };
    assert_eq!(world.ask(&[again, retaken]).failed(), None);
    let recorded = session.take_recorded(0);
    let journal = session.journal.clone().unwrap();
    assert_eq!(world.ask_kept(&journal, recorded, 2, &requests).failed(), None);
    assert!(world.files.lock().find(before).is_err(), "nobody would close it any more");
    let released: Vec<_> = world.released.iter().map(|owner| owner.id).collect();
    assert_eq!(released, [before], "its locks are released");
}

#[test]
fn a_file_that_a_repeated_request_leaves_open_stays_open() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let (memory, state) = Memory::new();
    let journal = state.begin(5, 50).unwrap();
    let flags = READ_WRITE | open_flag::CREATE;
    let open = |path| Request::Open { base: world.root, flags, mode: 0o600, path };
    let requests = [open(b"stays"), open(b"closed"), Request::Close { handle: CURRENT }];
    assert_eq!(world.ask_kept(&journal, false, 1, &requests).failed(), None);
    drop((journal, state));

    let mut session = memory.restarted();
    let recorded = session.take_recorded(0);
    let journal = session.journal.clone().unwrap();
    let again = world.ask_kept(&journal, recorded, 1, &requests);
    let results = parse_results(&again.results).unwrap();
    let Reply::Opened { handle, .. } = results[0] else { panic!("{results:?}") };
    assert!(world.files.lock().find(handle).is_ok());
}

#[test]
fn results_that_were_too_long_to_keep_are_not_made_up() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let (memory, state) = Memory::new();
    let journal = state.begin(5, 50).unwrap();
    let names: Vec<[u8; 1]> = (b'a'..=b'j').map(|name| [name]).collect();
    let requests: Vec<_> =
        names.iter().map(|path| Request::MakeDir { base: world.root, mode: 0o700, path }).collect();
    let first = world.ask_kept(&journal, false, 1, &requests);
    assert_eq!(first.failed(), None);
    assert!(first.results.len() > towline_wire::limits::REPLAY_BYTES_MAX);
    drop((journal, state));

    let mut session = memory.restarted();
    let recorded = session.take_recorded(0);
    let journal = session.journal.clone().unwrap();
    let again = world.ask_kept(&journal, recorded, 1, &requests);
    assert!(again.undecided);
    assert_eq!(again.failed(), Some(Errno::EIO));
}

/// What each step of a request was: `'b'` for work of another thread, `'e'` for the request itself, which then
/// runs there as far as it gets. Before each, `look` is called.
fn steps(
    world: &mut World,
    journal: Option<&Journal>,
    sequence: u32,
    requests: &[Request<'_>],
    mut look: impl FnMut(),
) -> (String, Outcome) {
    let mut compound =
        Compound::new(0, sequence, &encode_compound(requests), &[], 0).expect("it is legal");
    if let Some(journal) = journal {
        assert!(!compound.keep(journal, false));
    }
    let (files, caller, mut steps) = (world.files.clone(), caller(), String::new());
    loop {
        let mut held = files.lock();
        let table = Table::Held(&mut held);
        let exports = &world.export;
        let mut context = Context { files: table, exports, caller: &caller, session: 1 };
        let step = compound.run(None, &mut context);
        drop(held);
        let files = Table::Shared(&files);
        let mut context = Context { files, exports, caller: &caller, session: 1 };
        match step {
            Step::Finished => break,
            Step::Block(_, work, _) => {
                look();
                steps.push('b');
                compound.unblocked(work());
            }
            Step::Elsewhere(_) => {
                look();
                steps.push('e');
                while let Step::Block(_, work, _) = compound.run(None, &mut context) {
                    compound.unblocked(work());
                }
            }
            _ => panic!("none asked for"),
        }
    }
    let undecided = compound.is_undecided();
    let (results, ..) = compound.reply();
    (steps, Outcome { results: std::mem::take(results), undecided })
}

/// Names go at once and pages on another thread, which also shortens files.
#[test]
fn much_is_freed_by_threads_that_may_block() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let (_memory, state) = Memory::new();
    let journal = state.begin(5, 50).unwrap();
    let base = world.root;
    let at = |name: &str| directory.path().join(name);
    let (small, large) = (4096, FREED_BYTES_MAX + 4096);
    let (path, flags, mode) = (&b"f"[..], 0, 0o644);
    let rename =
        |flags| Request::Rename { base, flags, path: b"g", new_base: base, new_path: path };
    let open = |flags| Request::Open { base, flags: READ_WRITE | flags, mode, path };
    let Request::SetAttr { valid, uid, gid, accessed, modified, .. } = resize(base, path) else {
        panic!()
    };
    let set = |valid, size| Request::SetAttr {
        base,
        flags,
        valid,
        mode,
        uid,
        gid,
        size,
        accessed,
        modified,
        path,
    };
    let shorten = |size| set(valid, size);
    let unlink = Request::Unlink { base, flags, path };
    let create = open_flag::CREATE;
    let truncate = open(open_flag::TRUNCATE | create);
    // How large the file is, what is done to it, by which steps, and its size before the first of them.
    let cases = [
        (small, unlink, "", None),
        (large, unlink, "b", None),
        (large, rename(0), "b", Some(1)),
        (large, rename(2), "", None),
        (small, shorten(0), "", None),
        (large, shorten(0), "e", Some(large)),
        (large, shorten(large - 4096), "", None),
        (large, shorten(large * 2), "", None),
        (large, set(valid::MODE, 0), "", None),
        (small, truncate, "", None),
        (large, truncate, "e", Some(large)),
        (large, open(create), "", None),
    ];
    for (number, (bytes, request, expected, size)) in cases.into_iter().enumerate() {
        for journal in [None, Some(&journal)] {
            let file = std::fs::File::create(at("f")).unwrap();
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).unwrap();
            drop(file);
            std::fs::write(at("g"), b"g").unwrap();
            let sequence = number as u32 + 1;
            let stat = Request::Stat { base, flags, path: b"" };
            let look = || {
                let found = std::fs::metadata(at("f")).ok().map(|found| found.len());
                assert_eq!(found, size, "{request:?}");
            };
            let (steps, outcome) = steps(&mut world, journal, sequence, &[request, stat], look);
            assert_eq!(steps, expected, "{request:?}");
            assert_eq!(outcome.failed(), None, "{request:?}");
            let results = parse_results(&outcome.results).unwrap();
            assert!(matches!(results[..], [_, Reply::Attributes { .. }]), "{results:?}");
        }
    }
}

#[test]
fn a_listing_goes_to_another_thread_if_it_may_and_its_store_may_block() {
    let directory = tempfile::tempdir().unwrap();
    let stores: [(Arc<dyn FileStore>, bool); 2] = [
        (DirectoryStore::new(directory.path(), false).unwrap(), true),
        (MemoryStore::new("m", 64 << 20).unwrap(), false),
    ];
    for (store, may_block) in stores {
        let mut world = World::new(store, false);
        world.open(b"a file", open_flag::CREATE | READ_WRITE);
        let list = Request::ReadDir { handle: world.root, cookie: 0, length: 4096, attributes: 0 };
        let no_room = Request::ReadDir { handle: world.root, cookie: 0, length: 1, attributes: 0 };
        for request in [list, no_room] {
            let mut both = [false, true].map(|shares| {
                let mut compound =
                    Compound::new(0, 1, &encode_compound(&[request]), &[], 0).unwrap();
                assert!(compound.lists());
                if shares {
                    compound.share();
                }
                let (files, caller) = (world.files.clone(), caller());
                let mut files = files.lock();
                let files = Table::Held(&mut files);
                let exports = &world.export;
                let mut context = Context { files, exports, caller: &caller, session: 1 };
                match compound.run(None, &mut context) {
                    Step::Share(_, work) if shares && may_block => compound.unblocked(work()),
                    Step::Finished if !(shares && may_block) => return compound,
                    _ => panic!("made by the wrong thread"),
                }
                assert!(matches!(compound.run(None, &mut context), Step::Finished));
                compound
            });
            let [own, others] = both.each_mut().map(|compound| {
                let (results, data, modifies, is_of_file) = compound.reply();
                (results.clone(), data.to_vec().unwrap(), modifies, is_of_file)
            });
            assert_eq!(own, others);
        }
    }
}

#[test]
fn what_is_freed_is_what_lies_beyond_the_new_end() {
    let freed = |size, blocks, new| super::freed(&Attr { size, blocks, ..Attr::default() }, new);
    // The size, the blocks of 512 bytes, the new size.
    assert_eq!(freed(8192, 16, 0), 8192);
    assert_eq!(freed(8192, 16, 4096), 4096);
    assert_eq!(freed(8192, 16, 8192), 0);
    assert_eq!(freed(8192, 16, u64::MAX), 0);
    assert_eq!(freed(1 << 40, 16, 4096), 8192, "it has holes");
    assert_eq!(freed(0, 16, 0), 8192, "allocated beyond the end");
    assert_eq!(freed(0, 16, 1), 0);
    assert_eq!(freed(u64::MAX, u64::MAX, 0), u64::MAX);
}
