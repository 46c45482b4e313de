#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use super::*;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::fs;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use tempfile::TempDir;

/// An event of the kernel: watch, mask, whether it is half of a move, and name.
type Told = (i32, u32, bool, Vec<u8>);

/// An inotify queue.
struct Queue(OwnedFd);

impl Queue {
    fn new() -> Self {
        Self(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap())
    }

    fn watch(&self, path: &Path) -> i32 {
        inotify::add_watch(&self.0, path, WatchFlags::ALL_EVENTS).unwrap()
    }

    /// Returns all events in it, as a server would send them.
    fn happenings(&self) -> Vec<Happening> {
        let mut buffer = [const { MaybeUninit::uninit() }; 4096];
        let mut reader = inotify::Reader::new(&self.0, &mut buffer);
        std::iter::from_fn(|| reader.next().ok().map(|event| happening(&event))).collect()
    }

    fn told(&self) -> Vec<Told> {
        let told = |one: Happening| (one.handle as i32, one.mask, one.cookie != 0, one.name);
        self.happenings().into_iter().map(told).collect()
    }
}

fn happening(event: &inotify::Event<'_>) -> Happening {
    Happening {
        handle: event.wd() as u64,
        mask: event.events().bits(),
        cookie: event.cookie(),
        name: event.file_name().map_or(Vec::new(), |name| name.to_bytes().to_vec()),
    }
}

/// Shadows of two watched directories.
struct Scene {
    folder: TempDir,
    shadows: Shadows,
    queue: Queue,
}

const ALL: u32 = event::ALL;

fn of(happenings: &[(u64, u32, u32, &str)]) -> Vec<Happening> {
    let of = |&(handle, mask, cookie, name): &(u64, u32, u32, &str)| {
        let name = name.as_bytes().to_vec();
        Happening { handle, mask, cookie, name }
    };
    happenings.iter().map(of).collect()
}

impl Scene {
    /// Creates the scene with these entries in the first directory. Handles are the numbers of the watches: 1
    /// and 2.
    fn new(entries: &[(&str, bool)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let mut scene = Self {
            shadows: Shadows::new(&path, Arc::default()).unwrap(),
            folder,
            queue: Queue::new(),
        };
        for handle in [1, 2] {
            let entries = if handle == 1 { entries } else { &[] };
            let entries =
                entries.iter().map(|(name, is)| (name.as_bytes().to_vec(), *is)).collect();
            scene.begin(handle, entries, ALL);
            assert_eq!(scene.queue.watch(&scene.path(handle)), handle as i32);
        }
        scene
    }

    fn begin(&mut self, handle: u64, entries: Vec<Entry>, mask: u32) {
        let shadow = self.shadows.make((0, handle), true, mask).unwrap();
        assert_eq!(self.shadows.fill(&shadow, entries, 0).unwrap(), []);
        assert!(self.shadows.keep(handle, shadow));
    }

    fn path(&self, handle: u64) -> PathBuf {
        self.folder.path().join("w").join(self.shadows.at(handle).unwrap().number.to_string())
    }

    /// Repeats these events, and returns those that the kernel reports.
    fn told(&mut self, happenings: &[(u64, u32, u32, &str)]) -> Vec<Told> {
        self.shadows.repeat(&of(happenings));
        self.queue.told()
    }

    /// Repeats these events, and checks that the kernel reports the same.
    fn same(&mut self, happenings: &[(u64, u32, u32, &str)]) {
        let expected: Vec<Told> = happenings
            .iter()
            .map(|(handle, mask, cookie, name)| {
                (*handle as i32, *mask, *cookie != 0, name.as_bytes().to_vec())
            })
            .collect();
        assert_eq!(self.told(happenings), expected);
    }

    fn names(&self, handle: u64) -> Vec<(String, bool)> {
        let named = |entry: fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), entry.file_type().unwrap().is_dir())
        };
        let mut names: Vec<_> =
            fs::read_dir(self.path(handle)).unwrap().map(|entry| named(entry.unwrap())).collect();
        names.sort();
        // Discard the events of this listing.
        self.queue.told();
        names
    }
}

const FROM: u32 = event::MOVED_FROM;
const TO: u32 = event::MOVED_TO;
const DIRECTORY: u32 = event::ISDIR;

#[test]
fn what_happened_is_told_as_it_was() {
    let mut scene = Scene::new(&[("old", false), ("dir", true)]);
    scene.same(&[(1, event::CREATE, 0, "f"), (1, event::CREATE | DIRECTORY, 0, "d")]);
    for mask in [event::MODIFY, event::ATTRIB, event::ACCESS] {
        scene.same(&[(1, mask, 0, "f")]);
        scene.same(&[(1, mask | DIRECTORY, 0, "d"), (1, mask, 0, "old")]);
        scene.same(&[(1, mask | DIRECTORY, 0, "")]);
    }
    scene.same(&[(1, FROM, 7, "f"), (1, TO, 7, "g")]);
    scene.same(&[(1, FROM, 8, "g"), (2, TO, 8, "g")]);
    scene.same(&[(2, FROM, 9, "g")]);
    scene.same(&[(2, TO, 10, "h")]);
    // Over another file, with events in both directories.
    scene.same(&[(2, FROM, 11, "h"), (1, TO, 11, "old")]);
    scene.same(&[(1, FROM | DIRECTORY, 12, "d"), (1, TO | DIRECTORY, 12, "dir")]);
    scene.same(&[(1, TO, 13, "old"), (1, TO | DIRECTORY, 14, "dir")]);
    let exchanged = [
        (1, FROM, 15, "old"),
        (1, TO, 15, "dir"),
        (1, FROM | DIRECTORY, 16, "dir"),
        (1, TO | DIRECTORY, 16, "old"),
    ];
    scene.same(&exchanged);
    assert_eq!(scene.names(1), [("dir".to_owned(), false), ("old".to_owned(), true)]);
    scene.same(&[(1, event::DELETE, 0, "dir"), (1, event::DELETE | DIRECTORY, 0, "old")]);
    scene.same(&[(1, event::MOVE_SELF, 0, "")]);
    scene.same(&[(1, event::CREATE, 0, "after"), (1, event::DELETE, 0, "after")]);
    let ends = scene.told(&[(1, event::DELETE_SELF, 0, ""), (1, event::IGNORED, 0, "")]);
    assert_eq!(
        ends.iter().map(|told| told.1).collect::<Vec<_>>(),
        [event::DELETE_SELF, event::IGNORED]
    );
    assert!(scene.shadows.at(1).is_none() && scene.shadows.find((0, 1)).is_none());
}

#[test]
fn opening_is_told_with_closing_unless_nobody_hears_of_that() {
    let mut scene = Scene::new(&[("f", false), ("d", true)]);
    let opened = |by, close, name: &str| {
        [
            (1, event::OPEN | by, false, name.as_bytes().to_vec()),
            (1, close | by, false, name.as_bytes().to_vec()),
        ]
    };
    assert_eq!(scene.told(&[(1, event::OPEN, 0, "f")]), []);
    for close in [event::CLOSE_WRITE, event::CLOSE_NOWRITE] {
        assert_eq!(scene.told(&[(1, close, 0, "f")]), opened(0, close, "f"));
    }
    let close = event::CLOSE_NOWRITE;
    assert_eq!(scene.told(&[(1, close | DIRECTORY, 0, "d")]), opened(DIRECTORY, close, "d"));
    scene.begin(3, vec![(b"f".to_vec(), false)], event::OPEN);
    let path = scene.path(3);
    let watch = inotify::add_watch(&scene.queue.0, &path, WatchFlags::OPEN).unwrap();
    let told = scene.told(&[(3, event::OPEN, 0, "f"), (3, event::ACCESS, 0, "f")]);
    assert_eq!(told, [(watch, event::OPEN, false, b"f".to_vec())]);
}

#[test]
fn files_have_shadows_too() {
    let mut scene = Scene::new(&[]);
    let shadow = scene.shadows.make((0, 5), false, ALL).unwrap();
    assert_eq!(scene.shadows.fill(&shadow, Vec::new(), 0).unwrap(), []);
    assert!(scene.shadows.keep(5, shadow));
    assert_eq!(scene.queue.watch(&scene.path(5)), 3);
    for mask in [event::MODIFY, event::ATTRIB, event::ACCESS, event::MOVE_SELF] {
        assert_eq!(scene.told(&[(5, mask, 0, "")]), [(3, mask, false, Vec::new())]);
    }
    // The loss of the last name is reported once.
    let told = scene.told(&[(5, event::ATTRIB, 0, ""), (5, event::DELETE_SELF, 0, "")]);
    let masks: Vec<u32> = told.iter().map(|told| told.1).collect();
    assert_eq!(masks, [event::ATTRIB, event::DELETE_SELF, event::IGNORED]);
}

/// Events of one call may come in more than one answer.
#[test]
fn halves_of_moves_are_waited_for() {
    let scene = Scene::new(&[("file", false), ("other", false), ("dir", true)]);
    let (from, to) = ((1, FROM, 1, "file"), |name| (1, TO, 1, name));
    let waits = |happenings: &[(u64, u32, u32, &str)]| scene.shadows.may_go_on(&of(happenings));
    assert!(waits(&[from]) == More::Perhaps);
    assert!(waits(&[from, to("new")]) == More::No);
    // Replaced or exchanged: the other half of the exchange may follow.
    assert!(waits(&[from, to("other")]) == More::Perhaps);
    assert!(waits(&[from, to("dir")]) == More::Certainly);
    let back = (1, FROM | DIRECTORY, 2, "dir");
    assert!(waits(&[from, to("dir"), back]) == More::Perhaps);
    assert!(waits(&[from, to("dir"), back, (1, TO | DIRECTORY, 2, "file")]) == More::No);
    // An entry from before this answer is gone.
    assert!(waits(&[(1, event::DELETE | DIRECTORY, 0, "dir"), from, to("dir")]) == More::No);
    assert!(waits(&[(1, event::CREATE, 0, "new"), from, to("new")]) == More::Perhaps);
    assert!(waits(&[from, to("new"), (1, event::MODIFY, 0, "new")]) == More::No);
}

/// The server is then asked whether the name exists.
#[test]
fn what_happens_to_a_name_that_is_missing_is_noted() {
    let mut scene = Scene::new(&[("there", false)]);
    let happened = [(1, event::MODIFY, 0, "there"), (1, event::ATTRIB, 0, "missing")];
    let more = (1, event::MODIFY, 0, "missing");
    let repeated = scene.shadows.repeat(&of(&[&happened[..], &[more]].concat()));
    assert_eq!(repeated.missing, of(&[happened[1], more]));
    scene.queue.told();
    repeated.missing.iter().for_each(|missing| scene.shadows.restore(missing));
    let masks: Vec<u32> = scene.queue.told().iter().map(|told| told.1).collect();
    assert_eq!(masks, [event::CREATE, event::ATTRIB, event::MODIFY]);
    scene.same(&[(1, event::ATTRIB, 0, "missing")]);
}

/// The result is the same however many of the events the listing reflects already.
#[test]
fn what_happens_while_a_shadow_is_filled_is_done_before_anybody_watches() {
    let happened = [
        (event::DELETE, 0, "removed"),
        (event::CREATE, 0, "made"),
        (event::CREATE, 0, "short-lived"),
        (event::DELETE, 0, "short-lived"),
        (FROM, 1, "moved"),
        (TO, 1, "came"),
        (event::DELETE, 0, "file"),
        (event::CREATE | DIRECTORY, 0, "file"),
    ];
    let before = [("removed", false), ("moved", false), ("file", false)];
    let after = [("came", false), ("file", true), ("made", false)];
    for listing in
        [&before[..], &after[..], &[("moved", false), ("came", false), ("file", true)], &[]]
    {
        let mut scene = Scene::new(&[]);
        let shadow = scene.shadows.make((0, 3), true, ALL).unwrap();
        scene.shadows.wait_for(3);
        scene.shadows.repeat(&of(&happened.map(|(mask, cookie, name)| (3, mask, cookie, name))));
        let listing = listing.iter().map(|(name, is)| (name.as_bytes().to_vec(), *is)).collect();
        scene.shadows.fill(&shadow, listing, 0).unwrap();
        assert!(scene.shadows.keep(3, shadow));
        assert_eq!(scene.names(3), after.map(|(name, is)| (name.to_owned(), is)));
    }
    let mut scene = Scene::new(&[]);
    let shadow = scene.shadows.make((0, 3), true, ALL).unwrap();
    scene.shadows.wait_for(3);
    scene.told(&[(3, event::DELETE_SELF, 0, ""), (3, event::IGNORED, 0, "")]);
    assert!(!scene.shadows.keep(3, shadow), "it is gone");
}

/// Lost events are made up for: the differences of two listings are reported.
#[test]
fn differences_are_told() {
    let mut scene =
        Scene::new(&[("kept", false), ("gone", false), ("dir", true), ("other", false)]);
    let shadow = scene.shadows.at(1).unwrap();
    let listing = [("kept", false), ("new", false), ("dir", true), ("other", true)];
    let listing = listing.map(|(name, is)| (name.as_bytes().to_vec(), is)).to_vec();
    let same = scene.shadows.fill(&shadow, listing.clone(), 0).unwrap();
    assert_eq!(same, [listing[0].clone(), listing[2].clone()]);
    let told = scene.queue.told();
    let names = |mask: u32| {
        let mut names: Vec<_> =
            told.iter().filter(|told| told.1 == mask).map(|told| told.3.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(names(event::DELETE), [b"gone".to_vec(), b"other".to_vec()]);
    assert_eq!(names(event::CREATE), [b"new".to_vec()]);
    assert_eq!(names(event::CREATE | DIRECTORY), [b"other".to_vec()]);
}

fn files(names: &[&str]) -> Vec<Entry> {
    names.iter().map(|name| (name.as_bytes().to_vec(), false)).collect()
}

/// What a program finds in the first directory, asked for when there were so many changes.
fn found(changes: u64, names: &[&str]) -> Listed {
    let names = files(names);
    Listed { identity: 1, changes, begins: true, ends: true, names, ..Listed::default() }
}

/// If events are lost, programs may have found something else than what they were told.
#[test]
fn what_has_become_of_doubted_names_is_told_again() {
    let mut scene = Scene::new(&[("kept", false), ("anew", false), ("gone", false)]);
    let shadow = scene.shadows.at(1).unwrap();
    // What is found before the events come is explained by them.
    assert_eq!(scene.shadows.found(found(5, &["kept", "gone", "new"])), None);
    scene.same(&[(1, event::DELETE, 0, "anew"), (1, event::CREATE, 0, "anew")]);
    scene.same(&[(1, event::CREATE, 0, "new")]);
    let all = files(&["kept", "anew", "gone", "new"]);
    assert_eq!(scene.shadows.fill(&shadow, all.clone(), 6).unwrap(), all);
    assert_eq!(scene.queue.told(), []);
    let of = |told: &[Told], name: &str| -> Vec<u32> {
        told.iter().filter(|told| told.3 == name.as_bytes()).map(|told| told.1).collect()
    };
    let (created, deleted) = (event::CREATE, event::DELETE);
    // Nothing explains this.
    assert_eq!(scene.shadows.found(found(6, &["kept", "gone", "new", "short-lived"])), None);
    let now = files(&["kept", "anew", "new"]);
    let same = scene.shadows.fill(&shadow, now.clone(), 7).unwrap();
    assert_eq!(same, files(&["kept", "new"]));
    let told = scene.queue.told();
    assert_eq!(of(&told, "anew"), [deleted, created]);
    assert_eq!(of(&told, "gone"), [deleted]);
    assert_eq!(of(&told, "short-lived"), [created, deleted]);
    assert_eq!(told.len(), 5);
    // Once is enough.
    assert_eq!(scene.shadows.fill(&shadow, now.clone(), 8).unwrap(), now);
    // A program that had asked before learns of it later.
    assert_eq!(scene.shadows.found(found(7, &["kept", "anew", "new"])), None);
    assert_eq!(scene.shadows.found(found(7, &["kept", "short-lived"])), Some(1));
    assert_eq!(scene.queue.told(), []);
    scene.same(&[(1, event::DELETE, 0, "anew")]);
    scene.shadows.settle(1, files(&["kept", "new"])).unwrap();
    let told = scene.queue.told();
    assert_eq!(of(&told, "new"), [deleted, created]);
    assert_eq!(of(&told, "short-lived"), [created, deleted]);
    assert_eq!(told.len(), 4);
    assert_eq!(scene.names(1), [("kept".to_owned(), false), ("new".to_owned(), false)]);
}

/// Only at its end is it known which names a listing does not have.
#[test]
fn listings_in_parts_are_put_together() {
    let mut scene = Scene::new(&[("a", false), ("b", false), ("c", false)]);
    let shadow = scene.shadows.at(1).unwrap();
    let all = files(&["a", "b", "c"]);
    let mut part = |handle, names: &[&str], begins, ends| {
        let listed = Listed { handle, begins, ends, ..found(1, names) };
        assert_eq!(scene.shadows.found(listed), None);
    };
    part(1, &["a"], true, false);
    part(2, &["a"], true, false);
    part(1, &["c"], false, true);
    part(2, &["b"], false, false);
    part(2, &["c"], false, true);
    // Its beginning is not known.
    part(3, &["c"], false, true);
    let same = scene.shadows.fill(&shadow, all, 2).unwrap();
    assert_eq!(same, files(&["a", "c"]));
}

/// Impossible events are made possible: the program learns of everything that the server reported, and
/// perhaps more.
#[test]
fn a_shadow_that_is_not_true_becomes_so() {
    let mut scene = Scene::new(&[("f", false), ("d", true)]);
    let told = scene.told(&[(1, event::CREATE, 0, "f")]);
    assert_eq!(told.last().unwrap().1, event::CREATE);
    scene.told(&[(1, event::CREATE | DIRECTORY, 0, "f"), (1, event::CREATE, 0, "d")]);
    assert_eq!(scene.names(1), [("d".to_owned(), false), ("f".to_owned(), true)]);
    assert_eq!(scene.told(&[(1, event::DELETE, 0, "none"), (1, event::MODIFY, 0, "none")]), []);
    let told = scene.told(&[(1, FROM, 5, "none"), (1, TO, 5, "here")]);
    assert_eq!(told, [(1, TO, true, b"here".to_vec())]);
    // A file over a directory, and the other way round.
    scene.told(&[(1, FROM, 6, "here"), (1, TO, 6, "f")]);
    scene.told(&[(1, TO | DIRECTORY, 7, "d")]);
    assert_eq!(scene.names(1), [("d".to_owned(), true), ("f".to_owned(), false)]);
    assert_eq!(scene.told(&[(9, event::CREATE, 0, "of-nobody")]), []);
}

/// Changes real directories at random; their shadows report the same events as the kernel does.
#[test]
fn shadows_of_changing_directories_are_told_the_same() {
    for seed in 1..=40 {
        let real = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| real.path().join(name));
        let source = Queue::new();
        [&a, &b, &c].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        assert_eq!((source.watch(&a), source.watch(&b)), (1, 2));
        let mut scene = Scene::new(&[]);
        let mut state: u64 = seed;
        let mut draw = move |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut moved = None;
        for _ in 0..60 {
            for _ in 0..=draw(5) {
                let mut path = || [&a, &b, &c][draw(3)].join(["x", "y", "z"][draw(3)]);
                let (one, other) = (path(), path());
                if moved.take().is_some_and(|moved| moved == one || moved == other) {
                    // An entry that is moved on at once looks as if it had been exchanged.
                    continue;
                }
                // Calls that fail cause no events.
                let _ = match draw(8) {
                    0 => mknodat(CWD, &one, FileType::RegularFile, Mode::RWXU, 0),
                    1 => mkdirat(CWD, &one, Mode::RWXU),
                    2 => unlinkat(CWD, &one, AtFlags::empty()),
                    3 => unlinkat(CWD, &one, AtFlags::REMOVEDIR),
                    4 => chmodat(CWD, &one, Mode::RWXU, AtFlags::empty()),
                    5 => renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE),
                    _ => {
                        moved = Some(other.clone());
                        renameat(CWD, &one, CWD, &other)
                    }
                };
            }
            let happened = source.happenings();
            scene.shadows.repeat(&happened);
            let told = |one: Happening| (one.handle as i32, one.mask, one.cookie != 0, one.name);
            let expected: Vec<Told> = happened.into_iter().map(told).collect();
            assert_eq!(scene.queue.told(), expected, "seed {seed}");
        }
        for (handle, path) in [(1, &a), (2, &b)] {
            let mut names: Vec<_> = fs::read_dir(path)
                .unwrap()
                .flatten()
                .map(|entry| (entry.file_name().into_string().unwrap(), entry.path().is_dir()))
                .collect();
            names.sort();
            assert_eq!(scene.names(handle), names, "seed {seed}");
        }
    }
}
