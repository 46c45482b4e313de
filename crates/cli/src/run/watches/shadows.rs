//! Local files that stand for watched remote files. Every change of a remote file is repeated on its local
//! one, so that the kernel reports it to watchers.
//!
//! The *shadow* of a watched directory is a directory with an entry for each name: an empty file or an empty
//! directory. The shadow of anything else is an empty file. A shadow's name is a number, which changes
//! whenever the file is moved.
//!
//! The event that the kernel reports depends on how a local file is changed: `utimensat(2)` reports
//! `IN_MODIFY` if it sets only the modification time, and `IN_ACCESS` if it sets only the access time,
//! without opening anything; `chmod(2)` reports `IN_ATTRIB` even if the mode stays the same. Entries are
//! never hard links of each other: a rename over another name of the same file would do nothing and report
//! nothing.

use super::names::{Differences, Names};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
    chmodat, mkdirat, mknodat, openat, renameat, renameat_with, statat, unlinkat, utimensat,
};
use rustix::io::{Errno, Result};
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use towline_client::Happening;
use towline_instance::watches::Listed;
use towline_wire::event;

/// Events of a directory that its shadow needs to stay true.
pub(super) const OF_DIRECTORIES: u32 = event::CREATE
    | event::DELETE
    | event::MOVED_FROM
    | event::MOVED_TO
    | event::DELETE_SELF
    | event::MOVE_SELF;
/// The same for anything else.
pub(super) const OF_FILES: u32 = event::DELETE_SELF | event::MOVE_SELF;
/// Events after which a name exists, and those after which it does not.
pub(super) const COMES: u32 = event::CREATE | event::MOVED_TO;
pub(super) const GOES: u32 = event::DELETE | event::MOVED_FROM;
/// Both events for closing a file.
const CLOSE: u32 = event::CLOSE_WRITE | event::CLOSE_NOWRITE;

/// Identifies a file: the number of its mount, and its identity in the export.
pub(super) type Which = (u32, u64);

/// A name in a directory, and whether it names a directory.
pub(super) type Entry = (Vec<u8>, bool);

/// Whether more events of the same call may follow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    /// No more events.
    No,
    /// There may be more.
    Perhaps,
    /// There are certainly more.
    Certainly,
}

/// The result of repeating events.
#[derive(Default)]
pub(super) struct Repeated {
    /// Handles of files that are gone.
    pub(super) ended: Vec<u64>,
    /// Events on names that the shadow lacks: either they are gone, or an event was not reported.
    pub(super) missing: Vec<Happening>,
}

/// The shadows of one server's files.
pub(super) struct Shadows {
    folder: OwnedFd,
    /// Name of a directory beside the shadows. Entries move to and from it that the remote file system moves
    /// to or from where nobody watches, so that watchers see a move.
    aside: String,
    /// The next number, shared by the shadows of all servers.
    numbers: Arc<AtomicU64>,
    by_handle: HashMap<u64, Shadow>,
    handles: HashMap<Which, u64>,
    /// What programs know of the names in directories.
    names: HashMap<Which, Names>,
    /// Events on files whose shadows are not filled yet.
    waiting: HashMap<u64, Vec<Happening>>,
    /// The run is over: nothing may be created in folders that are being removed.
    is_over: bool,
}

/// The shadow of one file.
#[derive(Clone, Copy)]
pub(super) struct Shadow {
    pub(super) number: u64,
    pub(super) which: Which,
    pub(super) is_directory: bool,
    /// The events requested from the server.
    pub(super) mask: u32,
}

impl Shadow {
    fn path(&self, name: &[u8]) -> Vec<u8> {
        let number = self.number.to_string();
        if name.is_empty() { number.into() } else { [number.as_bytes(), b"/", name].concat() }
    }

    /// The mode of the shadow. Every user in the run who may watch the file may watch its shadow.
    fn mode(&self) -> Mode {
        Mode::from_raw_mode(if self.is_directory { 0o755 } else { 0o644 })
    }
}

impl Shadows {
    /// Keeps shadows in a run's folder for them, which is created if it does not exist.
    pub(super) fn new(folder: &Path, numbers: Arc<AtomicU64>) -> Result<Self> {
        match mkdirat(CWD, folder, Mode::RWXU) {
            Err(error) if error != Errno::EXIST => return Err(error),
            _ => {}
        }
        // Access is controlled by the directory of the run.
        chmodat(CWD, folder, Mode::from_raw_mode(0o755), AtFlags::empty())?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, folder, flags, Mode::empty())?;
        let aside = format!("aside-{}", numbers.fetch_add(1, Ordering::Relaxed));
        mkdirat(&folder, aside.as_str(), Mode::RWXU)?;
        let (by_handle, handles, names, waiting) = Default::default();
        let is_over = false;
        Ok(Self { folder, aside, numbers, by_handle, handles, names, waiting, is_over })
    }

    /// Ends all watches: nothing is repeated from now on.
    pub(super) fn end(&mut self) {
        self.by_handle.clear();
        self.is_over = true;
    }

    /// Returns the shadow of a file, and the file's handle.
    pub(super) fn find(&self, which: Which) -> Option<(u64, Shadow)> {
        let handle = *self.handles.get(&which)?;
        Some((handle, *self.by_handle.get(&handle)?))
    }

    /// Returns the shadow of the file with this handle.
    pub(super) fn at(&self, handle: u64) -> Option<Shadow> {
        self.by_handle.get(&handle).copied()
    }

    /// Returns the handles of all files with shadows.
    pub(super) fn handles(&self) -> Vec<u64> {
        self.by_handle.keys().copied().collect()
    }

    /// Creates a shadow without entries.
    pub(super) fn make(&mut self, which: Which, is_directory: bool, mask: u32) -> Result<Shadow> {
        let shadow = Shadow { number: self.number(), which, is_directory, mask };
        self.make_at(&shadow.path(b""), is_directory)?;
        let mode = chmodat(&self.folder, shadow.path(b""), shadow.mode(), AtFlags::empty());
        mode.inspect_err(|_| self.discard(&shadow))?;
        Ok(shadow)
    }

    /// Keeps events on this file from now on, to [repeat](Self::repeat) them once its shadow is
    /// [kept](Self::keep).
    pub(super) fn wait_for(&mut self, handle: u64) {
        self.waiting.insert(handle, Vec::new());
    }

    /// Discards the events that [`Self::wait_for`] has kept.
    pub(super) fn give_up(&mut self, handle: u64) {
        self.waiting.remove(&handle);
    }

    /// Adds a filled shadow, which follows its file from now on. Returns false if the file is gone already.
    pub(super) fn keep(&mut self, handle: u64, shadow: Shadow) -> bool {
        self.handles.insert(shadow.which, handle);
        self.by_handle.insert(handle, shadow);
        let missed = self.waiting.remove(&handle).unwrap_or_default();
        self.repeat(&missed).ended.is_empty()
    }

    /// Records that the server was asked for more events.
    pub(super) fn widen(&mut self, handle: u64, mask: u32) {
        if let Some(shadow) = self.by_handle.get_mut(&handle) {
            shadow.mask |= mask;
        }
    }

    /// Removes a shadow. Its watchers learn that the file is gone.
    pub(super) fn remove(&mut self, handle: u64) {
        let Some(shadow) = self.by_handle.remove(&handle) else { return };
        if self.handles.get(&shadow.which) == Some(&handle) {
            self.handles.remove(&shadow.which);
        }
        self.discard(&shadow);
    }

    /// Removes a shadow and everything in it.
    pub(super) fn discard(&mut self, shadow: &Shadow) {
        self.names.remove(&shadow.which);
        // List the entries only if necessary, since watchers would see that, too.
        if self.remove_at(&shadow.path(b""), shadow.is_directory).is_err() {
            for (name, is_directory) in self.entries(shadow).unwrap_or_default() {
                let _ = self.remove_at(&shadow.path(&name), is_directory);
            }
            let _ = self.remove_at(&shadow.path(b""), shadow.is_directory);
        }
    }

    /// Makes these the only entries of a directory's shadow. Returns those of which nobody has known or found
    /// otherwise. `changes` is the number of changes after the server was asked for them.
    pub(super) fn fill(
        &mut self,
        shadow: &Shadow,
        listing: Vec<Entry>,
        changes: u64,
    ) -> Result<Vec<Entry>> {
        if !shadow.is_directory {
            return Ok(Vec::new());
        }
        let names = self.names.entry(shadow.which).or_default();
        let differences = names.replace(listing, changes);
        self.tell(shadow, &differences)?;
        Ok(differences.same)
    }

    /// Notes what a program finds in a watched directory. Returns the directory's handle if the server has to be
    /// asked for its names, to [settle](Self::settle) doubts.
    pub(super) fn found(&mut self, listed: Listed) -> Option<u64> {
        let which = (listed.mount, listed.identity);
        let handle = *self.handles.get(&which)?;
        self.names.get_mut(&which)?.found(listed).then_some(handle)
    }

    /// Tells watchers again which of the doubted names there are.
    pub(super) fn settle(&mut self, handle: u64, listing: Vec<Entry>) -> Result<()> {
        let Some(shadow) = self.at(handle) else { return Ok(()) };
        let names = self.names.get_mut(&shadow.which);
        let differences = names.map(|names| names.settle(listing)).unwrap_or_default();
        self.tell(&shadow, &differences)
    }

    fn tell(&self, shadow: &Shadow, differences: &Differences) -> Result<()> {
        for (name, is_directory) in &differences.gone {
            let path = shadow.path(name);
            if self.remove_at(&path, *is_directory) == Err(Errno::NOENT) {
                // Only programs have found it.
                self.make_at(&path, *is_directory)?;
                let _ = self.remove_at(&path, *is_directory);
            }
        }
        for (name, is_directory) in &differences.new {
            self.make_anew(&shadow.path(name), *is_directory)?;
        }
        Ok(())
    }

    /// Returns whether to wait for more events before these are repeated. The first half of a move is
    /// incomplete. So may be a move to an existing name, which moves away in turn if the two are exchanged.
    /// If they are of different kinds, they can only have been exchanged.
    pub(super) fn may_go_on(&self, happenings: &[Happening]) -> More {
        let Some((last, before)) = happenings.split_last() else { return More::No };
        let is_directory = last.mask & event::ISDIR != 0;
        match last.mask {
            mask if mask & event::MOVED_FROM != 0 => More::Perhaps,
            mask if mask & event::MOVED_TO != 0 => match self.there(last, before) {
                None => More::No,
                Some(kind) if kind == is_directory => More::Perhaps,
                Some(_) => More::Certainly,
            },
            _ => More::No,
        }
    }

    /// Returns what has the name of this event just before it, after all events in `before`: true for a
    /// directory, false for anything else, `None` for nothing.
    fn there(&self, happening: &Happening, before: &[Happening]) -> Option<bool> {
        let changes =
            |one: &&Happening| is_same_name(one, happening) && one.mask & (COMES | GOES) != 0;
        match before.iter().rev().find(changes) {
            Some(last) => (last.mask & COMES != 0).then_some(last.mask & event::ISDIR != 0),
            None => self.is_directory(&self.at(happening.handle)?.path(&happening.name)),
        }
    }

    /// Adds a missing name to a shadow, and repeats an event on it.
    pub(super) fn restore(&mut self, happening: &Happening) {
        let Some(shadow) = self.at(happening.handle) else { return };
        let is_directory = happening.mask & event::ISDIR != 0;
        if let Some(names) = self.names.get_mut(&shadow.which) {
            names
                .happened(&Happening { mask: happening.mask | event::CREATE, ..happening.clone() });
        }
        // The name exists already if several events concern it.
        let _ = self.make_at(&shadow.path(&happening.name), is_directory);
        let _ = self.touch(&shadow, happening.mask, &happening.name);
    }

    /// Repeats events on the shadows of watched files.
    pub(super) fn repeat(&mut self, happenings: &[Happening]) -> Repeated {
        let mut repeated = Repeated::default();
        // Second halves of moves, which were repeated together with the first halves.
        let mut done = HashSet::new();
        for (at, happening) in happenings.iter().enumerate() {
            let Some(shadow) = self.by_handle.get(&happening.handle).copied() else {
                if let Some(waiting) = self.waiting.get_mut(&happening.handle) {
                    waiting.push(happening.clone());
                }
                continue;
            };
            if let Some(names) = self.names.get_mut(&shadow.which) {
                names.happened(happening);
            }
            if done.contains(&at) {
                continue;
            }
            let Happening { handle, mask, ref name, .. } = *happening;
            let is_directory = mask & event::ISDIR != 0;
            let rest = &happenings[at + 1..];
            if mask & (event::DELETE_SELF | event::IGNORED) != 0 {
                self.remove(handle);
                repeated.ended.push(handle);
            } else if mask & event::MOVE_SELF != 0 {
                self.move_to_next(handle);
            } else if mask & event::CREATE != 0 {
                // If there is no space for it, nothing more can be reported.
                let _ = self.make_anew(&shadow.path(name), is_directory);
            } else if mask & event::DELETE != 0 {
                // If the entry does not exist, its removal has been repeated before.
                let _ = self.remove_at(&shadow.path(name), is_directory);
            } else if mask & event::MOVED_FROM != 0 {
                let other = half_of(happening, rest, |n| !done.contains(&(at + 1 + n)));
                let to = other.and_then(|n| {
                    let to = self.by_handle.get(&rest[n].handle)?.path(&rest[n].name);
                    done.insert(at + 1 + n);
                    Some((n, to))
                });
                let from = shadow.path(name);
                match to {
                    Some((n, to)) if is_undone(&rest[n], &rest[n + 1..], happening) => {
                        if self.exchange(&from, &to) {
                            done.extend([at + n + 2, at + n + 3]);
                        } else {
                            self.rename(&from, &to, is_directory);
                        }
                    }
                    Some((_, to)) => self.rename(&from, &to, is_directory),
                    None => self.move_away(&from, is_directory),
                }
            } else if mask & event::MOVED_TO != 0 {
                let came = self.come(is_directory);
                let to = shadow.path(name);
                if gives_way(happening, rest) && self.exchange(&came, &to) {
                    let _ = self.remove_at(&came, is_directory);
                    done.insert(at + 1);
                } else {
                    self.put(&came, &to, is_directory);
                }
            } else if mask & event::ATTRIB != 0
                && rest.first().is_some_and(|next| ends(next, handle) && name.is_empty())
            {
                // This event says that the last name is gone, which the kernel reports when the shadow loses
                // its own.
            } else {
                let touched = self.touch(&shadow, mask, name);
                if touched == Err(Errno::NOENT) && !name.is_empty() {
                    repeated.missing.push(happening.clone());
                }
            }
        }
        repeated
    }

    /// Repeats an event that changes no name.
    pub(super) fn touch(&self, shadow: &Shadow, mask: u32, name: &[u8]) -> Result<()> {
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let path = shadow.path(name);
        let times = |last_access, last_modification| {
            let times = Timestamps { last_access, last_modification };
            utimensat(&self.folder, &path, &times, AtFlags::SYMLINK_NOFOLLOW)
        };
        let open = |flags| {
            let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            openat(&self.folder, &path, flags, Mode::empty()).map(drop)
        };
        if mask & event::MODIFY != 0 {
            times(OMIT, NOW)
        } else if mask & event::ACCESS != 0 {
            times(NOW, OMIT)
        } else if mask & event::ATTRIB != 0 {
            let mode = if name.is_empty() { shadow.mode() } else { Mode::RWXU };
            chmodat(&self.folder, &path, mode, AtFlags::empty())
        } else if mask & event::CLOSE_WRITE != 0 {
            open(OFlags::WRONLY)
        } else if mask & event::CLOSE_NOWRITE != 0 {
            open(OFlags::RDONLY)
        } else if mask & event::OPEN != 0 && shadow.mask & CLOSE == 0 {
            // Nobody watches for the close here. Otherwise, the open is repeated with the close, since only
            // then it is known how the file is closed.
            open(OFlags::RDONLY)
        } else {
            Ok(())
        }
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn entries(&self, shadow: &Shadow) -> Result<Vec<Entry>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(&self.folder, shadow.path(b""), flags, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::new(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let is_directory = match entry.file_type() {
                    FileType::Unknown => self.is_directory(&shadow.path(name)) == Some(true),
                    known => known == FileType::Directory,
                };
                entries.push((name.to_vec(), is_directory));
            }
        }
        Ok(entries)
    }

    /// Returns whether the path is a directory, or `None` if it does not exist.
    fn is_directory(&self, path: &[u8]) -> Option<bool> {
        let found = statat(&self.folder, path, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(FileType::from_raw_mode(found.st_mode) == FileType::Directory)
    }

    fn make_at(&self, path: &[u8], is_directory: bool) -> Result<()> {
        if self.is_over {
            Err(Errno::CANCELED)
        } else if is_directory {
            mkdirat(&self.folder, path, Mode::RWXU)
        } else {
            mknodat(&self.folder, path, FileType::RegularFile, Mode::RWXU, 0)
        }
    }

    /// Creates an entry. Anything with its name must have been removed without an event, so it is replaced.
    fn make_anew(&self, path: &[u8], is_directory: bool) -> Result<()> {
        match self.make_at(path, is_directory) {
            Err(Errno::EXIST) => {
                let _ = self.remove_at(path, is_directory);
                self.make_at(path, is_directory)
            }
            made => made,
        }
    }

    /// Removes an entry, even if it is of the other kind.
    fn remove_at(&self, path: &[u8], is_directory: bool) -> Result<()> {
        let remove = |is_directory| {
            let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            unlinkat(&self.folder, path, flags)
        };
        match remove(is_directory) {
            Err(Errno::ISDIR | Errno::NOTDIR) => remove(!is_directory),
            removed => removed,
        }
    }

    fn rename(&self, from: &[u8], to: &[u8], is_directory: bool) {
        if self.is_directory(from) == Some(is_directory) {
            self.put(from, to, is_directory);
        } else {
            let _ = self.remove_at(from, is_directory);
            self.put(&self.come(is_directory), to, is_directory);
        }
    }

    fn put(&self, from: &[u8], to: &[u8], is_directory: bool) {
        let put = || renameat(&self.folder, from, &self.folder, to);
        if let Err(Errno::ISDIR | Errno::NOTDIR | Errno::EXIST | Errno::NOTEMPTY) = put() {
            // The existing entry is of another kind.
            let _ = self.remove_at(to, is_directory);
            let _ = put();
        }
    }

    /// Exchanges two entries with one call, so that the same events are reported. Returns false unless both
    /// exist.
    fn exchange(&self, one: &[u8], other: &[u8]) -> bool {
        renameat_with(&self.folder, one, &self.folder, other, RenameFlags::EXCHANGE).is_ok()
    }

    fn move_away(&self, from: &[u8], is_directory: bool) {
        let aside = self.path_aside();
        if renameat(&self.folder, from, &self.folder, &aside).is_ok() {
            let _ = self.remove_at(&aside, is_directory);
        }
    }

    /// Creates an entry that stands for one moved from where nobody watches. Returns its path.
    fn come(&self, is_directory: bool) -> Vec<u8> {
        let aside = self.path_aside();
        // As above.
        let _ = self.make_at(&aside, is_directory);
        aside
    }

    fn path_aside(&self) -> Vec<u8> {
        format!("{}/{}", self.aside, self.number()).into()
    }

    /// Gives a shadow a new number.
    fn move_to_next(&mut self, handle: u64) {
        let next = self.number();
        let Some(shadow) = self.by_handle.get_mut(&handle) else { return };
        let before = shadow.path(b"");
        let moved = renameat(&self.folder, &before, &self.folder, next.to_string());
        if moved.is_ok() {
            shadow.number = next;
        }
    }
}

/// Returns the index of a move's second half. It follows the first, apart from events for others who watch
/// the same directories.
fn half_of(
    first: &Happening,
    rest: &[Happening],
    is_free: impl Fn(usize) -> bool,
) -> Option<usize> {
    let is_half = |one: &Happening| one.mask & event::MOVED_TO != 0 && one.cookie == first.cookie;
    let halves = || (0..rest.len()).filter(|n| is_half(&rest[*n]) && is_free(*n));
    let same = halves().find(|n| rest[*n].handle == first.handle);
    same.or_else(|| halves().next())
}

/// Returns true if a move is followed by a move back, so that the two were exchanged. If they were in fact
/// two moves, the first of which replaced another file, there is one entry too many afterwards; it is removed
/// when it is created again.
fn is_undone(second: &Happening, rest: &[Happening], first: &Happening) -> bool {
    let [from, to, ..] = rest else { return false };
    from.mask & event::MOVED_FROM != 0
        && to.mask & event::MOVED_TO != 0
        && from.cookie == to.cookie
        && is_same_name(from, second)
        && is_same_name(to, first)
}

/// Returns true if the entry that `came` replaces next moves to where nobody watches, so that the two were
/// exchanged. As above if they were not.
fn gives_way(came: &Happening, rest: &[Happening]) -> bool {
    rest.first().is_some_and(|next| {
        next.mask & event::MOVED_FROM != 0
            && is_same_name(next, came)
            && half_of(next, &rest[1..], |_| true).is_none()
    })
}

fn is_same_name(one: &Happening, other: &Happening) -> bool {
    one.handle == other.handle && one.name == other.name
}

/// Returns true for the event that ends the watch of this file.
fn ends(happening: &Happening, handle: u64) -> bool {
    happening.handle == handle && happening.mask & event::DELETE_SELF != 0
}

#[cfg(test)]
mod tests;
