//! Inodes: a file of any type, with its attributes and contents.

use super::arena::{Arena, BLOCK_BYTES, page_bytes};
use super::data::{Cut, Data};
use super::names::{Entry, Names};
use parking_lot::{Mutex, RwLock};
use rustix::time::ClockId;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_MASK};
use towline_wire::{Attr, Errno, Timestamp};

/// Charge for an inode without its data: about the size of its structures.
pub(super) const INODE_BYTES: u64 = 512;
/// The set-user-id bit of a mode.
pub(super) const SET_UID: u32 = 0o4000;
/// The set-group-id bit of a mode.
pub(super) const SET_GID: u32 = 0o2000;
/// The sticky bit of a mode.
pub(super) const STICKY: u32 = 0o1000;

const DAY_SECONDS: i64 = 24 * 60 * 60;
/// The size that a directory reports.
const DIRECTORY_BYTES: u64 = 4096;

/// Extended attributes by name.
pub(super) type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// A file of any type.
pub(super) struct Inode {
    /// Unique in the store, and never reused.
    pub(super) number: u64,
    /// The type bits of the mode, which never change.
    pub(super) file_type: u32,
    /// Its contents, by type.
    pub(super) content: Content,
    /// Extended attributes; most files have none.
    pub(super) xattrs: Mutex<Option<Box<Xattrs>>>,
    attr: RwLock<Attr>,
    /// Number of the directory that it was created in or last moved to; zero for none.
    above: AtomicU64,
    /// True for a file of `O_TMPFILE` without `O_EXCL`, which may be linked although it has no
    /// name.
    linkable: AtomicBool,
    arena: Arc<Arena>,
    charged: u64,
}

/// The contents of a file.
pub(super) enum Content {
    /// A regular file.
    File(RwLock<Data>),
    /// A directory.
    Directory(Directory),
    /// A symbolic link, with its target.
    Symlink(Box<[u8]>),
    /// FIFOs, sockets and devices.
    Node,
}

/// The names in a directory, and where its `..` leads.
pub(super) struct Directory {
    /// Its entries.
    pub(super) names: RwLock<Names>,
    /// The parent directory; empty for the root.
    pub(super) parent: Mutex<Weak<Inode>>,
}

/// The initial properties of an inode.
pub(super) struct Birth {
    /// Type and permission bits.
    pub(super) mode: u32,
    /// Owner.
    pub(super) uid: u32,
    /// Group.
    pub(super) gid: u32,
    /// Device number.
    pub(super) rdev: u64,
    /// Its contents.
    pub(super) content: Content,
}

/// Returns the current time.
pub(super) fn now() -> Timestamp {
    let time = rustix::time::clock_gettime(ClockId::Realtime);
    Timestamp::new(time.tv_sec, time.tv_nsec as u32)
}

impl Content {
    /// Creates the contents of an empty directory in `parent`.
    pub(super) fn directory(parent: Weak<Inode>) -> Self {
        Self::Directory(Directory { names: RwLock::default(), parent: Mutex::new(parent) })
    }

    /// Creates the contents of an empty regular file.
    pub(super) fn file(arena: &Arc<Arena>) -> Self {
        Self::File(RwLock::new(Data::new(arena.clone())))
    }
}

impl Inode {
    /// Creates an inode, with the link count that it has once it gets its first name; fails with
    /// `ENOSPC`.
    pub(super) fn new(arena: &Arc<Arena>, number: u64, birth: Birth) -> Result<Arc<Self>, Errno> {
        let (links, size, extra) = match &birth.content {
            Content::Directory(_) => (2, DIRECTORY_BYTES, 0),
            Content::Symlink(target) => (1, target.len() as u64, target.len() as u64),
            _ => (1, 0, 0),
        };
        let charged = INODE_BYTES + extra;
        arena.charge(charged)?;
        arena.count_inode(true);
        let time = now();
        let attr = Attr {
            inode: number,
            size,
            change: 1,
            rdev: birth.rdev,
            mode: birth.mode,
            links,
            uid: birth.uid,
            gid: birth.gid,
            block_bytes: BLOCK_BYTES as u32,
            accessed: time,
            modified: time,
            changed: time,
            created: time,
            ..Attr::default()
        };
        Ok(Arc::new(Self {
            number,
            file_type: birth.mode & TYPE_MASK,
            content: birth.content,
            xattrs: Mutex::new(None),
            attr: RwLock::new(attr),
            above: AtomicU64::new(0),
            linkable: AtomicBool::new(false),
            arena: arena.clone(),
            charged,
        }))
    }

    /// Returns the attributes.
    pub(super) fn attr(&self) -> Attr {
        *self.attr.read()
    }

    /// Changes attributes, and updates the change time and counter.
    pub(super) fn change<T>(&self, with: impl FnOnce(&mut Attr, Timestamp) -> T) -> T {
        let Ok(result) = self.try_change(|attr, time| Ok::<T, Infallible>(with(attr, time)));
        result
    }

    /// Like [`Inode::change`], unless `with` fails: then it must not have changed anything.
    pub(super) fn try_change<T, E>(
        &self,
        with: impl FnOnce(&mut Attr, Timestamp) -> Result<T, E>,
    ) -> Result<T, E> {
        let time = now();
        let mut attr = self.attr.write();
        let result = with(&mut attr, time)?;
        attr.changed = time;
        attr.change += 1;
        Ok(result)
    }

    /// Like [`Inode::change`], for a change of the contents.
    pub(super) fn modify(&self, with: impl FnOnce(&mut Attr)) {
        self.change(|attr, time| {
            attr.modified = time;
            with(attr);
        });
    }

    /// Records an access, as rarely as `relatime` does.
    pub(super) fn accessed(&self) {
        let attr = self.attr.read();
        let accessed = attr.accessed;
        // To see whether a day has passed, the coarse clock is enough and costs a fraction.
        let seconds = || rustix::time::clock_gettime(ClockId::RealtimeCoarse).tv_sec;
        let stale = accessed <= attr.modified
            || accessed <= attr.changed
            || seconds() - accessed.seconds >= DAY_SECONDS;
        drop(attr);
        if stale {
            self.attr.write().accessed = now();
        }
    }

    /// Returns true for a directory.
    pub(super) fn is_directory(&self) -> bool {
        self.file_type == TYPE_DIRECTORY
    }

    /// Returns its directory contents, or `ENOTDIR`.
    pub(super) fn directory(&self) -> Result<&Directory, Errno> {
        match &self.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// Returns the data of a regular file; `EISDIR` or `EINVAL` for others.
    pub(super) fn data(&self) -> Result<&RwLock<Data>, Errno> {
        match &self.content {
            Content::File(data) => Ok(data),
            Content::Directory(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Returns the target of a symbolic link.
    pub(super) fn target(&self) -> Option<&[u8]> {
        match &self.content {
            Content::Symlink(target) => Some(target),
            _ => None,
        }
    }

    /// Returns the type as `readdir(3)` reports it.
    pub(super) fn entry_type(&self) -> u8 {
        // DT_* are the type bits of a mode, shifted.
        (self.file_type >> 12) as u8
    }

    /// Returns the directory that `..` of this one names, if it still exists.
    pub(super) fn parent(&self) -> Option<Arc<Self>> {
        self.directory().ok()?.parent.lock().upgrade()
    }

    /// Returns the number of the directory that it was created in or last moved to, which is one of
    /// those that may have a name of it; zero for none.
    pub(super) fn above(&self) -> u64 {
        self.above.load(Ordering::Relaxed)
    }

    /// Records that it was created in a directory, or moved there.
    pub(super) fn set_above(&self, directory: &Self) {
        self.above.store(directory.number, Ordering::Relaxed);
    }

    /// Returns true for a file that may be linked although it has no links (`O_TMPFILE`). For all
    /// others, zero links means removed.
    pub(super) fn is_linkable(&self) -> bool {
        self.linkable.load(Ordering::Relaxed)
    }

    /// Sets whether a file without links may get one.
    pub(super) fn set_linkable(&self, linkable: bool) {
        self.linkable.store(linkable, Ordering::Relaxed);
    }

    /// Truncates or extends a regular file. `privileged` keeps the set-id bits.
    pub(super) fn truncate(&self, size: u64, privileged: bool) -> Result<Cut, Errno> {
        if size > i64::MAX as u64 {
            return Err(Errno::EINVAL);
        }
        let mut data = self.data()?.write();
        let cut = data.truncate(size)?;
        self.data_changed(&data, Some(size), privileged);
        Ok(cut)
    }

    /// Records a change of data, and the new size if it changed. The caller holds the lock of the
    /// data.
    pub(super) fn data_changed(&self, data: &Data, size: Option<u64>, privileged: bool) {
        self.modify(|attr| {
            attr.size = size.unwrap_or(attr.size);
            attr.blocks = data.pages() * (page_bytes() / 512);
            if !privileged {
                attr.mode = without_set_id(attr.mode);
            }
        });
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        self.arena.count_inode(false);
        let xattrs = self.xattrs.get_mut().as_ref().map_or(0, |all| xattr_bytes(all));
        self.arena.release(self.charged + xattrs);
    }
}

/// Returns the mode without set-id bits, as after a write by an unprivileged user: the group bit
/// means set-group-id only if the group may execute.
pub(super) fn without_set_id(mode: u32) -> u32 {
    if mode & TYPE_MASK == TYPE_DIRECTORY || mode & (SET_UID | SET_GID) == 0 {
        return mode;
    }
    let group = if mode & 0o010 != 0 { SET_GID } else { 0 };
    mode & !(SET_UID | group)
}

/// Returns the charge for extended attributes.
pub(super) fn xattr_bytes(xattrs: &Xattrs) -> u64 {
    xattrs.iter().map(|(name, value)| xattr_cost(name, value)).sum()
}

/// Returns the charge for one extended attribute.
pub(super) fn xattr_cost(name: &[u8], value: &[u8]) -> u64 {
    (64 + name.len() + value.len()) as u64
}

/// Empties a tree of directories one by one: dropping it as a whole would recurse to its full
/// depth.
pub(super) fn dismantle(root: Arc<Inode>) {
    let mut pending = vec![root];
    while let Some(inode) = pending.pop() {
        let Ok(directory) = inode.directory() else { continue };
        let names = std::mem::take(&mut *directory.names.write());
        let children = names.into_entries().map(|Entry { inode, .. }| inode);
        pending.extend(children.filter(|child| child.is_directory()));
    }
}
