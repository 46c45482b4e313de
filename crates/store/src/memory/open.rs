//! Opens files, and creates regular ones.

use super::access::{READ, WRITE, check, check_names, inherit, keeps_set_id, owns};
use super::inode::{Birth, Content, Inode};
use super::names::name_cost;
use super::store::Tree;
use super::walk::{Component, Last};
use super::watches::End;
use crate::{Caller, OpenHow, Source};
use std::sync::Arc;
use towline_wire::Errno;
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_SYMLINK};
use towline_wire::request::masked;
use towline_wire::request::open_flag::{
    self, CREATE, DIRECTORY, EXCLUSIVE, NO_FOLLOW, TEMPORARY, TRUNCATE,
};

/// The access mode: the two lowest bits of the flags.
pub(super) const ACCESS_MODE: u32 = libc::O_ACCMODE as u32;
/// The flag for a reference that neither reads nor writes.
pub(super) const PATH: u32 = open_flag::PATH;
/// The flag that leaves the access time alone.
pub(super) const NO_ACCESS_TIME: u32 = open_flag::NO_ACCESS_TIME;

/// Permission bits of a mode.
pub(super) const MODE_BITS: u32 = 0o7777;

/// A file that was opened.
pub(super) struct Opened {
    /// The file.
    pub(super) inode: Arc<Inode>,
    /// The flags that are in effect.
    pub(super) flags: u32,
    /// Number of the directory with the name that it was opened by; zero for none.
    pub(super) by: u64,
    /// Whether an existing file was truncated.
    pub(super) truncated: bool,
}

impl Opened {
    /// Wraps a file that was found or created in the directory with the number `by`.
    pub(super) fn new(inode: Arc<Inode>, flags: u32, by: u64) -> Self {
        Self { inode, flags, by, truncated: false }
    }
}

/// Returns the permissions that `flags` need.
fn wanted(flags: u32) -> u32 {
    let by_mode = [READ, WRITE, READ | WRITE, READ | WRITE][(flags & ACCESS_MODE) as usize];
    by_mode | if flags & TRUNCATE != 0 { WRITE } else { 0 }
}

/// Returns the flags without those that are meaningless with `O_PATH`; fails with `EINVAL` for
/// contradictions.
fn checked_flags(flags: u32) -> Result<u32, Errno> {
    if flags & PATH != 0 {
        return Ok(flags & (PATH | DIRECTORY | NO_FOLLOW));
    }
    if flags & TEMPORARY != 0 {
        let sane = flags & DIRECTORY != 0 && flags & CREATE == 0 && wanted(flags) & WRITE != 0;
        return if sane { Ok(flags) } else { Err(Errno::EINVAL) };
    }
    if flags & (CREATE | DIRECTORY) == CREATE | DIRECTORY {
        return Err(Errno::EINVAL);
    }
    Ok(flags)
}

impl Tree {
    /// `openat(2)`.
    pub(super) fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<Opened, Errno> {
        let flags = checked_flags(how.flags)?;
        if flags & TEMPORARY != 0 {
            let directory = self.find(caller, at, flags & NO_FOLLOW == 0)?;
            let inode = self.create_temporary(caller, &directory, how.mode, flags)?;
            return Ok(Opened::new(inode, flags, 0));
        }
        if at.1.is_empty() {
            let base = self.base(&at)?;
            let opened = Opened::new(base.inode().clone(), flags, base.by());
            return self.open_found(caller, opened);
        }
        let mut walk = self.walk(caller, at)?;
        loop {
            let last = walk.last()?;
            let named = matches!(last.component, Component::Name(_));
            if flags & CREATE != 0 && named && last.slashes {
                return Err(Errno::EISDIR);
            }
            let inode = loop {
                match last.find() {
                    Err(Errno::ENOENT) if flags & CREATE != 0 && named => {
                        if let Some(inode) = self.create(caller, &last, how.mode)? {
                            return Ok(Opened::new(inode, flags, last.directory.number));
                        }
                        // Another thread was faster: the name exists now, or did for a moment.
                    }
                    found => break found?,
                }
            };
            let exclusive = flags & (CREATE | EXCLUSIVE) == CREATE | EXCLUSIVE;
            let stay = !last.slashes && (flags & NO_FOLLOW != 0 || exclusive);
            if inode.target().is_some() && !stay {
                walk.follow(&last, inode)?;
                continue;
            }
            if last.slashes && !inode.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            let opened = Opened::new(inode, flags, last.directory.number);
            return self.open_found(caller, opened);
        }
    }

    /// Opens an existing file.
    fn open_found(&self, caller: &Caller, mut opened: Opened) -> Result<Opened, Errno> {
        let (inode, flags) = (&opened.inode, opened.flags);
        if flags & CREATE != 0 {
            if flags & EXCLUSIVE != 0 {
                return Err(Errno::EEXIST);
            }
            if inode.is_directory() {
                return Err(Errno::EISDIR);
            }
        }
        if flags & DIRECTORY != 0 && !inode.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        if flags & PATH != 0 {
            return Ok(opened);
        }
        let wanted = wanted(flags);
        if wanted == READ
            && let Content::File(data) = &inode.content
            && let Some(data) = data.try_read()
        {
            data.expect();
        }
        match inode.file_type {
            TYPE_SYMLINK => return Err(Errno::ELOOP),
            TYPE_DIRECTORY if wanted & WRITE != 0 => return Err(Errno::EISDIR),
            _ => check(caller, inode, wanted)?,
        }
        if flags & NO_ACCESS_TIME != 0 && !owns(caller, &inode.attr()) {
            return Err(Errno::EPERM);
        }
        match inode.file_type {
            TYPE_DIRECTORY => Ok(opened),
            TYPE_FILE if flags & TRUNCATE != 0 => {
                drop(inode.truncate(0, keeps_set_id(caller))?);
                opened.truncated = true;
                Ok(opened)
            }
            TYPE_FILE => Ok(opened),
            _ => Err(Errno::ENXIO),
        }
    }

    /// Creates a regular file. Returns `None` if the name exists by now.
    fn create(
        &self,
        caller: &Caller,
        last: &Last<'_>,
        mode: u32,
    ) -> Result<Option<Arc<Inode>>, Errno> {
        let name = last.new_name()?;
        let mut names = last.lock_names()?;
        if names.find(name).is_some() {
            return Ok(None);
        }
        check_names(caller, &last.directory)?;
        self.arena.charge(name_cost(name))?;
        let birth = self.birth(caller, &last.directory, mode);
        let inode = Inode::new(&self.arena, self.number(), birth)
            .inspect_err(|_| self.arena.release(name_cost(name)))?;
        inode.set_above(&last.directory);
        names.insert(name, inode.clone());
        last.directory.modify(|_| ());
        self.watches.created(End { directory: &last.directory, name }, &inode);
        Ok(Some(inode))
    }

    fn birth(&self, caller: &Caller, directory: &Inode, mode: u32) -> Birth {
        let (uid, gid, mode) = inherit(caller, directory, TYPE_FILE | masked(mode) & MODE_BITS);
        Birth { mode, uid, gid, rdev: 0, content: Content::file(&self.arena) }
    }

    /// Creates a regular file without a name.
    fn create_temporary(
        &self,
        caller: &Caller,
        directory: &Inode,
        mode: u32,
        flags: u32,
    ) -> Result<Arc<Inode>, Errno> {
        let names = directory.directory()?.names.read();
        check_names(caller, directory)?;
        if names.is_dead() {
            return Err(Errno::ENOENT);
        }
        drop(names);
        let birth = self.birth(caller, directory, mode);
        let inode = Inode::new(&self.arena, self.number(), birth)?;
        inode.set_linkable(flags & EXCLUSIVE == 0);
        inode.change(|attr, _| attr.links = 0);
        Ok(inode)
    }
}
