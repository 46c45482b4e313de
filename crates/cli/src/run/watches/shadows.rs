//! What stands for watched remote files: local ones, to which is done what is done to the remote ones, so that the kernel tells
//! whoever watches them.
//!
//! A watched directory has as its *shadow* an empty directory with an entry for each name: an empty file, or an empty directory. Anything
//! else that is watched has an empty file. A shadow's name is a number, which is another one after the file was moved.
//!
//! What is told of a local file depends on how it is changed: `utimensat(2)` of the time of modification alone tells `IN_MODIFY`, of the time
//! of access alone `IN_ACCESS`, without opening anything; `chmod(2)` tells `IN_ATTRIB` though the mode stays. Entries are never hard
//! links of each other: a rename over another name of the same file does nothing, and tells nothing.

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
use towline_wire::event;

/// What has to be heard of a directory so that its shadow stays true.
pub(super) const OF_DIRECTORIES: u32 = event::CREATE
    | event::DELETE
    | event::MOVED_FROM
    | event::MOVED_TO
    | event::DELETE_SELF
    | event::MOVE_SELF;
/// The same of anything else.
pub(super) const OF_FILES: u32 = event::DELETE_SELF | event::MOVE_SELF;
/// Both ways in which a file is closed.
const CLOSE: u32 = event::CLOSE_WRITE | event::CLOSE_NOWRITE;

/// Which file: number of the mount, and identity in its export.
pub(super) type Which = (u32, u64);

/// A name of a directory, and whether it is one of a directory.
pub(super) type Entry = (Vec<u8>, bool);

/// How more may be told that the same call has done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    /// Not.
    No,
    /// Perhaps.
    Perhaps,
    /// Certainly.
    Certainly,
}

/// What came of repeating.
#[derive(Default)]
pub(super) struct Repeated {
    /// Handles of files that are gone.
    pub(super) ended: Vec<u64>,
    /// What happened to names that the shadow has not: either they are gone, or it was not told all.
    pub(super) missing: Vec<Happening>,
}

/// The shadows of one server's files.
pub(super) struct Shadows {
    folder: OwnedFd,
    /// Directory beside them for what comes from where nobody watches, or goes there; so it is moved, as far as anybody is told.
    aside: String,
    /// The last number in use, by the shadows of any server.
    numbers: Arc<AtomicU64>,
    by_handle: HashMap<u64, Shadow>,
    handles: HashMap<Which, u64>,
    /// What happened to files whose shadows are not filled yet.
    waiting: HashMap<u64, Vec<Happening>>,
    /// The run is over: nothing may be made where all is being removed.
    is_over: bool,
}

/// One of them.
#[derive(Clone, Copy)]
pub(super) struct Shadow {
    pub(super) number: u64,
    pub(super) which: Which,
    pub(super) is_directory: bool,
    /// What the server was asked for.
    pub(super) mask: u32,
}

impl Shadow {
    fn path(&self, name: &[u8]) -> Vec<u8> {
        let number = self.number.to_string();
        if name.is_empty() { number.into() } else { [number.as_bytes(), b"/", name].concat() }
    }

    /// Whoever of the run may watch the file may watch its shadow.
    fn mode(&self) -> Mode {
        Mode::from_raw_mode(if self.is_directory { 0o755 } else { 0o644 })
    }
}

impl Shadows {
    /// In the folder of shadows of a run, which is made if it is not there.
    pub(super) fn new(folder: &Path, numbers: Arc<AtomicU64>) -> Result<Self> {
        match mkdirat(CWD, folder, Mode::RWXU) {
            Err(error) if error != Errno::EXIST => return Err(error),
            _ => {}
        }
        // The directory of the run lets in who may come.
        chmodat(CWD, folder, Mode::from_raw_mode(0o755), AtFlags::empty())?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, folder, flags, Mode::empty())?;
        let aside = format!("aside-{}", numbers.fetch_add(1, Ordering::Relaxed));
        mkdirat(&folder, aside.as_str(), Mode::RWXU)?;
        let (by_handle, handles, waiting) = Default::default();
        let is_over = false;
        Ok(Self { folder, aside, numbers, by_handle, handles, waiting, is_over })
    }

    /// Nobody watches any more, and nothing is repeated from now on.
    pub(super) fn end(&mut self) {
        self.by_handle.clear();
        self.is_over = true;
    }

    /// The shadow of a file, and the handle of that.
    pub(super) fn find(&self, which: Which) -> Option<(u64, Shadow)> {
        let handle = *self.handles.get(&which)?;
        Some((handle, *self.by_handle.get(&handle)?))
    }

    /// The shadow of the file with this handle.
    pub(super) fn at(&self, handle: u64) -> Option<Shadow> {
        self.by_handle.get(&handle).copied()
    }

    /// The handles of all files with shadows.
    pub(super) fn handles(&self) -> Vec<u64> {
        self.by_handle.keys().copied().collect()
    }

    /// Makes one without entries.
    pub(super) fn make(&self, which: Which, is_directory: bool, mask: u32) -> Result<Shadow> {
        let shadow = Shadow { number: self.number(), which, is_directory, mask };
        self.make_at(&shadow.path(b""), is_directory)?;
        let mode = chmodat(&self.folder, shadow.path(b""), shadow.mode(), AtFlags::empty());
        mode.inspect_err(|_| self.discard(&shadow))?;
        Ok(shadow)
    }

    /// What happens to this file from now on is to be [repeated](Self::repeat) once its shadow is [kept](Self::keep).
    pub(super) fn wait_for(&mut self, handle: u64) {
        self.waiting.insert(handle, Vec::new());
    }

    /// That will not be.
    pub(super) fn give_up(&mut self, handle: u64) {
        self.waiting.remove(&handle);
    }

    /// This shadow has been filled, and is kept true from now on. False: the file is gone already.
    pub(super) fn keep(&mut self, handle: u64, shadow: Shadow) -> bool {
        self.handles.insert(shadow.which, handle);
        self.by_handle.insert(handle, shadow);
        let missed = self.waiting.remove(&handle).unwrap_or_default();
        self.repeat(&missed).ended.is_empty()
    }

    /// Notes what the server was asked for besides.
    pub(super) fn widen(&mut self, handle: u64, mask: u32) {
        if let Some(shadow) = self.by_handle.get_mut(&handle) {
            shadow.mask |= mask;
        }
    }

    /// Removes a shadow: whoever watches it is told that the file is gone.
    pub(super) fn remove(&mut self, handle: u64) {
        let Some(shadow) = self.by_handle.remove(&handle) else { return };
        if self.handles.get(&shadow.which) == Some(&handle) {
            self.handles.remove(&shadow.which);
        }
        self.discard(&shadow);
    }

    /// Removes one with all that is in it.
    pub(super) fn discard(&self, shadow: &Shadow) {
        // Only if need be are they looked for, which would be told, too.
        if self.remove_at(&shadow.path(b""), shadow.is_directory).is_err() {
            for (name, is_directory) in self.entries(shadow).unwrap_or_default() {
                let _ = self.remove_at(&shadow.path(&name), is_directory);
            }
            let _ = self.remove_at(&shadow.path(b""), shadow.is_directory);
        }
    }

    /// Gives the shadow of a directory these entries, and no others. Those that were there already are given back.
    pub(super) fn fill(&self, shadow: &Shadow, listing: Vec<Entry>) -> Result<Vec<Entry>> {
        if !shadow.is_directory {
            return Ok(Vec::new());
        }
        let before: HashSet<Entry> = self.entries(shadow)?.into_iter().collect();
        let now: HashSet<&Entry> = listing.iter().collect();
        for (name, is_directory) in before.iter().filter(|entry| !now.contains(entry)) {
            let _ = self.remove_at(&shadow.path(name), *is_directory);
        }
        for (name, is_directory) in listing.iter().filter(|entry| !before.contains(*entry)) {
            self.make_at(&shadow.path(name), *is_directory)?;
        }
        Ok(listing.into_iter().filter(|entry| before.contains(entry)).collect())
    }

    /// Whether more has to be told before this is repeated: the first half of a move is not all of it, nor may be a move to a name that
    /// is there, which leaves in turn where two are exchanged. What is of another kind can only be exchanged.
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

    /// What has the name of this event before it happens, after all `before`: whether that is a directory, `None` for nothing.
    fn there(&self, happening: &Happening, before: &[Happening]) -> Option<bool> {
        const COMES: u32 = event::CREATE | event::MOVED_TO;
        const GOES: u32 = event::DELETE | event::MOVED_FROM;
        let changes =
            |one: &&Happening| is_same_name(one, happening) && one.mask & (COMES | GOES) != 0;
        match before.iter().rev().find(changes) {
            Some(last) => (last.mask & COMES != 0).then_some(last.mask & event::ISDIR != 0),
            None => self.is_directory(&self.at(happening.handle)?.path(&happening.name)),
        }
    }

    /// Gives a shadow a name that it should have, and repeats what happened to that.
    pub(super) fn restore(&self, happening: &Happening) {
        let Some(shadow) = self.at(happening.handle) else { return };
        let is_directory = happening.mask & event::ISDIR != 0;
        // It is there already if more than one thing happened to it.
        let _ = self.make_at(&shadow.path(&happening.name), is_directory);
        let _ = self.touch(&shadow, happening.mask, &happening.name);
    }

    /// Repeats what happened to watched files.
    pub(super) fn repeat(&mut self, happenings: &[Happening]) -> Repeated {
        let mut repeated = Repeated::default();
        // The second halves of moves whose first halves were repeated with them.
        let mut done = HashSet::new();
        for (at, happening) in happenings.iter().enumerate() {
            let Some(shadow) = self.by_handle.get(&happening.handle).copied() else {
                if let Some(waiting) = self.waiting.get_mut(&happening.handle) {
                    waiting.push(happening.clone());
                }
                continue;
            };
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
                self.make_anew(&shadow.path(name), is_directory);
            } else if mask & event::DELETE != 0 {
                // Where it is not there, that was told before.
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
                // That its last name is gone, which is told when the shadow loses its own.
            } else {
                let touched = self.touch(&shadow, mask, name);
                if touched == Err(Errno::NOENT) && !name.is_empty() {
                    repeated.missing.push(happening.clone());
                }
            }
        }
        repeated
    }

    /// Tells of what changes no name.
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
            // Nobody hears how it is closed here. Otherwise that is told together: it is not known yet how it will be closed.
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

    /// `None`: there is nothing.
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

    /// What is there was removed, and it was not told.
    fn make_anew(&self, path: &[u8], is_directory: bool) {
        if self.make_at(path, is_directory) == Err(Errno::EXIST) {
            let _ = self.remove_at(path, is_directory);
            let _ = self.make_at(path, is_directory);
        }
    }

    /// Removes what is there, even if it is of the other kind.
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
            // What is there is of another kind.
            let _ = self.remove_at(to, is_directory);
            let _ = put();
        }
    }

    /// Has each of two entries take the other's place, by one call, as it is told. False: they are not both there.
    fn exchange(&self, one: &[u8], other: &[u8]) -> bool {
        renameat_with(&self.folder, one, &self.folder, other, RenameFlags::EXCHANGE).is_ok()
    }

    fn move_away(&self, from: &[u8], is_directory: bool) {
        let aside = self.path_aside();
        if renameat(&self.folder, from, &self.folder, &aside).is_ok() {
            let _ = self.remove_at(&aside, is_directory);
        }
    }

    /// What comes from where nobody watches.
    fn come(&self, is_directory: bool) -> Vec<u8> {
        let aside = self.path_aside();
        // Where there is no room for it nothing more can be told.
        let _ = self.make_at(&aside, is_directory);
        aside
    }

    fn path_aside(&self) -> Vec<u8> {
        format!("{}/{}", self.aside, self.number()).into()
    }

    /// Gives a shadow another number.
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

/// Where the second half of a move is told: next to the first one, but for those of others who watch the same directories.
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

/// True when what follows the second half of a move is a move back: the two were exchanged. Had it been two moves the first of which
/// put something in the place of another file, there would be one entry too many now, which is removed when it is made.
fn is_undone(second: &Happening, rest: &[Happening], first: &Happening) -> bool {
    let [from, to, ..] = rest else { return false };
    from.mask & event::MOVED_FROM != 0
        && to.mask & event::MOVED_TO != 0
        && from.cookie == to.cookie
        && is_same_name(from, second)
        && is_same_name(to, first)
}

/// True when what stood where something came to goes next, to where nobody watches: the two were exchanged. Else as above.
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

/// True for the end of a watched file.
fn ends(happening: &Happening, handle: u64) -> bool {
    happening.handle == handle && happening.mask & event::DELETE_SELF != 0
}

#[cfg(test)]
mod tests;
