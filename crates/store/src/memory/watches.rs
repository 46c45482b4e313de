//! Reports events of watched files, as `inotify(7)` does on a `tmpfs`.
//!
//! As long as nothing in the file system is watched, an operation only checks a flag. The lock of
//! the watches is taken last, after all others. Witnesses are called under it, so that the events
//! of one directory or file are reported in order. No witness is dropped under it: a witness may
//! own watches and open files.
//!
//! Events of a file are also reported to the watchers of its directory. The kernel knows by which
//! name each file was opened. Here an open file only knows the directory of that name, and a
//! watched directory has a table of its files. So if a file has several names in one directory, any
//! of them may be reported. If a file with several names was opened by one that has since moved to
//! another directory, none is. Nor is the name of a file that is still open but was removed before
//! its directory was watched.
//!
//! A file is gone when it has lost its last name, even if it is still open, as [`Witness`] requires
//! of all stores.

use super::inode::Inode;
use super::names::{COOKIE_PARENT, Name};
use super::store::Tree;
use crate::{Watch, Witness};
use foldhash::fast::RandomState;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use towline_wire::event;

/// Minimum number of removed files in one directory before checking which of them are still open.
const OPEN_MIN: usize = 64;

/// The cookie of the next move, in any store. Those of the kernel count up from zero, and one
/// client may get both.
static COOKIE: AtomicU32 = AtomicU32::new(1 << 31);

/// Number of seats in all stores of this process. If nothing is watched, checking it is all that a
/// read or write costs, without an access to the state of the file system.
static SEATS: Seats = Seats(AtomicUsize::new(0));

/// Aligned so that its cache line holds nothing else.
#[repr(align(64))]
struct Seats(AtomicUsize);

/// The watches of one file system.
#[derive(Default)]
pub(super) struct Watches {
    any: AtomicBool,
    scene: Mutex<Scene>,
}

#[derive(Default)]
struct Scene {
    /// Watched inodes by number.
    watched: HashMap<u64, Watched, RandomState>,
    /// The next seat's number.
    next: u64,
}

/// A watched inode.
#[derive(Default)]
pub(super) struct Watched {
    seats: Vec<Seat>,
    /// Names in it by inode number, for a directory.
    names: HashMap<u64, Names, RandomState>,
    /// Removed files of a directory that were still open.
    removed: Vec<(u64, Weak<Inode>)>,
    /// Maximum number of these before checking which of them are still open.
    removed_max: usize,
}

/// The names of one inode in one directory.
type Names = SmallVec<[Name; 1]>;

/// One watcher of an inode.
struct Seat {
    number: u64,
    mask: u32,
    witness: Arc<dyn Witness>,
}

/// Keeps a seat until dropped.
struct Place {
    tree: Arc<Tree>,
    inode: u64,
    number: u64,
}

/// One end of a rename.
#[derive(Clone, Copy)]
pub(super) struct End<'a> {
    pub(super) directory: &'a Inode,
    pub(super) name: &'a [u8],
}

impl Watches {
    /// Returns true if anything is watched.
    #[inline]
    fn any(&self) -> bool {
        SEATS.0.load(Ordering::Relaxed) != 0 && self.any.load(Ordering::Relaxed)
    }

    /// Reports an event of a file that was opened or found by a name in the directory with the
    /// number `by`.
    #[inline]
    pub(super) fn happened(&self, inode: &Inode, by: u64, mask: u32) {
        if self.any() {
            self.tell(inode, by, mask);
        }
    }

    #[cold]
    fn tell(&self, inode: &Inode, by: u64, mask: u32) {
        let (links, above) = (inode.attr().links, inode.above());
        let mask = mask | directory_bit(inode);
        let scene = self.scene.lock();
        if let Some((directory, name)) = scene.name_of(inode, links, by, above) {
            directory.tell(mask, 0, name);
        }
        scene.tell(inode.number, mask, 0, b"");
    }

    /// Reports a new name. The caller holds the lock of the directory's names.
    pub(super) fn created(&self, at: End<'_>, inode: &Inode) {
        if !self.any() {
            return;
        }
        let mut scene = self.scene.lock();
        scene.learn(at, inode);
        scene.tell(at.directory.number, event::CREATE | directory_bit(inode), 0, at.name);
    }

    /// Reports another name of a file, under the same lock as [`Watches::created`].
    pub(super) fn linked(&self, at: End<'_>, inode: &Inode) {
        if self.any() {
            self.scene.lock().tell(inode.number, event::ATTRIB, 0, b"");
            self.created(at, inode);
        }
    }

    /// Reports that a name was removed, after its inode was updated. The caller holds the lock of
    /// the directory's names. Returns a watch that ended, to be dropped without that lock.
    pub(super) fn removed(&self, at: End<'_>, victim: &Arc<Inode>) -> Option<Watched> {
        if !self.any() {
            return None;
        }
        let directory = directory_bit(victim);
        let links = victim.attr().links;
        let mut scene = self.scene.lock();
        if directory == 0 {
            scene.tell(victim.number, event::ATTRIB, 0, b"");
        }
        let ended = scene.end(victim, links);
        scene.unlearn(at, victim, links);
        scene.tell(at.directory.number, event::DELETE | directory, 0, at.name);
        ended
    }

    /// Reports that `source` was renamed and has replaced `target`, like [`Watches::removed`].
    pub(super) fn moved(
        &self,
        from: End<'_>,
        to: End<'_>,
        source: &Arc<Inode>,
        target: Option<&Arc<Inode>>,
    ) -> Option<Watched> {
        if !self.any() {
            return None;
        }
        let target = target.map(|target| (target, target.attr().links));
        let directory = directory_bit(source);
        let cookie = COOKIE.fetch_add(1, Ordering::Relaxed) | 1 << 31;
        let mut scene = self.scene.lock();
        scene.tell(from.directory.number, event::MOVED_FROM | directory, cookie, from.name);
        scene.tell(to.directory.number, event::MOVED_TO | directory, cookie, to.name);
        scene.forget(from, source.number);
        let ended = target.and_then(|(target, links)| {
            scene.tell(target.number, event::ATTRIB | directory_bit(target), 0, b"");
            scene.unlearn(to, target, links);
            scene.end(target, links)
        });
        scene.learn(to, source);
        scene.tell(source.number, event::MOVE_SELF, 0, b"");
        ended
    }

    /// Notes what a rename has left at the old name, which is not reported. The caller holds the lock of the
    /// directory's names.
    pub(super) fn left(&self, at: End<'_>, inode: &Inode) {
        if self.any() {
            self.scene.lock().learn(at, inode);
        }
    }

    /// Adds a seat to an inode. Returns its number.
    fn seat(&self, inode: &Inode, mask: u32, witness: Arc<dyn Witness>) -> u64 {
        // Locked until threads that change the names see that they are watched.
        let names = inode.directory().ok().map(|directory| directory.names.read());
        let mut scene = self.scene.lock();
        SEATS.0.fetch_add(1, Ordering::Relaxed);
        self.any.store(true, Ordering::Relaxed);
        let number = scene.next;
        scene.next += 1;
        let watched = scene.watched.entry(inode.number).or_insert_with(|| {
            let mut watched = Watched::default();
            for (_, entry) in names.iter().flat_map(|names| names.after(COOKIE_PARENT)) {
                watched.names.entry(entry.inode.number).or_default().push(entry.name.clone());
            }
            watched
        });
        watched.seats.push(Seat { number, mask, witness });
        number
    }

    /// Removes a seat. The returned seat must not be dropped under any lock.
    fn leave(&self, inode: u64, number: u64) -> Option<Seat> {
        SEATS.0.fetch_sub(1, Ordering::Relaxed);
        let mut scene = self.scene.lock();
        // Absent if the watch has ended.
        let seat = scene.watched.get_mut(&inode).and_then(|watched| {
            let at = watched.seats.iter().position(|seat| seat.number == number)?;
            Some(watched.seats.swap_remove(at))
        });
        if scene.watched.get(&inode).is_some_and(|watched| watched.seats.is_empty()) {
            scene.watched.remove(&inode);
        }
        self.any.store(!scene.watched.is_empty(), Ordering::Relaxed);
        seat
    }
}

impl Scene {
    fn tell(&self, inode: u64, mask: u32, cookie: u32, name: &[u8]) {
        if let Some(watched) = self.watched.get(&inode) {
            watched.tell(mask, cookie, name);
        }
    }

    /// Returns the watched directory with the name that a file was opened by, and that name.
    fn name_of(&self, inode: &Inode, links: u32, by: u64, above: u64) -> Option<(&Watched, &[u8])> {
        let find = |directory| {
            let watched = self.watched.get(&directory)?;
            let name: &[u8] = watched.names.get(&inode.number)?.first()?;
            Some((watched, name))
        };
        // If the file is not where it was, it was moved.
        let has_moved = || links <= 1 || inode.is_directory() || self.watched.contains_key(&by);
        find(by).or_else(|| find(above).filter(|_| has_moved()))
    }

    /// Adds a name.
    fn learn(&mut self, at: End<'_>, inode: &Inode) {
        if let Some(watched) = self.watched.get_mut(&at.directory.number) {
            watched.names.entry(inode.number).or_default().push(Name::from_slice(at.name));
        }
    }

    /// Removes a name that is gone or names something else.
    fn forget(&mut self, at: End<'_>, number: u64) {
        if let Some(watched) = self.watched.get_mut(&at.directory.number) {
            watched.forget(at.name, number);
        }
    }

    /// Removes a name that a file lost. If it was the last one and the file is open, its events are
    /// still reported by that name.
    fn unlearn(&mut self, at: End<'_>, victim: &Arc<Inode>, links: u32) {
        let Some(watched) = self.watched.get_mut(&at.directory.number) else { return };
        // The caller has one reference.
        let is_open = Arc::strong_count(victim) > 1;
        if links == 0 && is_open {
            watched.keep(victim);
        } else {
            watched.forget(at.name, victim.number);
        }
    }

    /// Reports that a file is gone, if it has no links.
    fn end(&mut self, victim: &Inode, links: u32) -> Option<Watched> {
        let watched = (links == 0).then(|| self.watched.remove(&victim.number))??;
        for mask in [event::DELETE_SELF, event::IGNORED] {
            watched.seats.iter().for_each(|seat| seat.witness.saw(mask, 0, b""));
        }
        Some(watched)
    }
}

impl Watched {
    fn tell(&self, mask: u32, cookie: u32, name: &[u8]) {
        for seat in &self.seats {
            if seat.mask & mask & event::ALL != 0 {
                seat.witness.saw(mask, cookie, name);
            }
        }
    }

    fn forget(&mut self, name: &[u8], number: u64) {
        let Some(names) = self.names.get_mut(&number) else { return };
        names.retain(|one| **one != *name);
        if names.is_empty() {
            self.names.remove(&number);
        }
    }

    /// Keeps the name of a removed file as long as the file is open.
    fn keep(&mut self, file: &Arc<Inode>) {
        if self.removed.len() >= self.removed_max {
            let names = &mut self.names;
            self.removed.retain(|(number, file)| {
                let is_open = file.strong_count() > 0;
                if !is_open {
                    names.remove(number);
                }
                is_open
            });
            self.removed_max = OPEN_MIN.max(2 * self.removed.len());
        }
        self.removed.push((file.number, Arc::downgrade(file)));
    }
}

impl Watch for Place {}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.tree.watches.leave(self.inode, self.number));
    }
}

/// Watches an inode of a tree. Does not check whether the caller may read it.
pub(super) fn watch(
    tree: &Arc<Tree>,
    inode: &Inode,
    mask: u32,
    witness: Arc<dyn Witness>,
) -> Box<dyn Watch> {
    let number = tree.watches.seat(inode, mask, witness);
    Box::new(Place { tree: tree.clone(), inode: inode.number, number })
}

/// Returns `ISDIR` for a directory.
fn directory_bit(inode: &Inode) -> u32 {
    if inode.is_directory() { event::ISDIR } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Fixture, fixture};
    use super::*;
    use crate::{FileStore, OpenHow};
    use towline_wire::request::open_flag::CREATE;

    struct Deaf;

    impl Witness for Deaf {
        fn saw(&self, _: u32, _: u32, _: &[u8]) {}

        fn lost(&self) {}
    }

    fn watches(fixture: &Fixture) -> &Watches {
        &fixture.store.tree().watches
    }

    #[test]
    fn nothing_is_kept_when_nobody_watches_any_more() {
        let fixture = fixture(1 << 20);
        assert!(!watches(&fixture).any());
        let watch = || fixture.root.watch(event::ALL, Arc::new(Deaf)).unwrap();
        let (one, other) = (watch(), watch());
        drop(one);
        assert!(watches(&fixture).any());
        drop(other);
        assert!(!watches(&fixture).any());
        assert!(watches(&fixture).scene.lock().watched.is_empty());
    }

    #[test]
    fn files_that_were_removed_and_closed_are_forgotten() {
        let fixture = fixture(1 << 20);
        let _watch = fixture.root.watch(event::ALL, Arc::new(Deaf)).unwrap();
        let at = (&*fixture.root, &b"f"[..]);
        for _ in 0..10 * OPEN_MIN {
            let how = OpenHow { flags: CREATE | 2, mode: 0o644 };
            let opened = fixture.store.open(&fixture.caller, at, how).unwrap();
            fixture.store.unlink(&fixture.caller, at, false).unwrap();
            drop(opened);
        }
        let scene = watches(&fixture).scene.lock();
        let root = &scene.watched[&super::super::store::ROOT_NUMBER];
        assert!(root.names.len() <= OPEN_MIN && root.removed.len() <= OPEN_MIN);
    }
}
