//! Creates and removes names: directories, nodes, links.

use super::access::{check_link, check_names, check_removal, inherit, may_all};
use super::inode::{Birth, Content, Inode};
use super::names::name_cost;
use super::open::MODE_BITS;
use super::store::Tree;
use super::walk::{Component, Last};
use super::watches::End;
use crate::{Caller, Source};
use std::sync::Arc;
use towline_wire::attr::{
    TYPE_BLOCK, TYPE_CHARACTER, TYPE_DIRECTORY, TYPE_FIFO, TYPE_FILE, TYPE_MASK, TYPE_SOCKET,
    TYPE_SYMLINK,
};
use towline_wire::limits::PATH_BYTES_MAX;
use towline_wire::request::masked;
use towline_wire::{Attr, Errno};

impl Tree {
    /// `mkdirat(2)`.
    pub(super) fn make_directory(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
    ) -> Result<Attr, Errno> {
        let last = self.walk(caller, at)?.last()?;
        let mode = TYPE_DIRECTORY | masked(mode) & 0o1777;
        let content = Content::directory(Arc::downgrade(&last.directory));
        self.add(caller, &last, mode, 0, content)
    }

    /// `mknodat(2)`.
    pub(super) fn make_node(
        &self,
        caller: &Caller,
        at: Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno> {
        let (file_type, content, rdev) = match mode & TYPE_MASK {
            0 | TYPE_FILE => (TYPE_FILE, Content::file(&self.arena), 0),
            TYPE_DIRECTORY => return Err(Errno::EPERM),
            node @ (TYPE_FIFO | TYPE_SOCKET) => (node, Content::Node, 0),
            node @ (TYPE_BLOCK | TYPE_CHARACTER) => (node, Content::Node, rdev),
            _ => return Err(Errno::EINVAL),
        };
        let last = self.walk(caller, at)?.last()?;
        // Character device zero is a whiteout, which gives no access to a device.
        let device = matches!(file_type, TYPE_BLOCK | TYPE_CHARACTER);
        let forbidden = device && !may_all(caller) && (file_type, rdev) != (TYPE_CHARACTER, 0);
        if forbidden && last.find().is_err() {
            check_names(caller, &last.directory)?;
            return Err(Errno::EPERM);
        }
        self.add(caller, &last, file_type | masked(mode) & MODE_BITS, rdev, content)
    }

    /// `symlinkat(2)`.
    pub(super) fn symlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        target: &[u8],
    ) -> Result<Attr, Errno> {
        if target.is_empty() {
            return Err(Errno::ENOENT);
        }
        if target.len() > PATH_BYTES_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        if target.contains(&0) {
            return Err(Errno::EINVAL);
        }
        let last = self.walk(caller, at)?.last()?;
        self.add(caller, &last, TYPE_SYMLINK | 0o777, 0, Content::Symlink(target.into()))
    }

    /// Creates an inode under a name that must not exist.
    fn add(
        &self,
        caller: &Caller,
        last: &Last<'_>,
        mode: u32,
        rdev: u64,
        content: Content,
    ) -> Result<Attr, Errno> {
        let directory = matches!(content, Content::Directory(_));
        let name = last.new_name()?;
        let mut names = last.lock_names()?;
        if names.find(name).is_some() {
            return Err(Errno::EEXIST);
        }
        if last.slashes && !directory {
            return Err(Errno::ENOENT);
        }
        check_names(caller, &last.directory)?;
        let (uid, gid, mode) = inherit(caller, &last.directory, mode);
        self.arena.charge(name_cost(name))?;
        let birth = Birth { mode, uid, gid, rdev, content };
        let inode = Inode::new(&self.arena, self.number(), birth)
            .inspect_err(|_| self.arena.release(name_cost(name)))?;
        let attr = inode.attr();
        inode.set_above(&last.directory);
        names.insert(name, inode.clone());
        last.directory.modify(|attr| attr.links += u32::from(directory));
        self.watches.created(End { directory: &last.directory, name }, &inode);
        Ok(attr)
    }

    /// `linkat(2)`.
    pub(super) fn link(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        to: Source<'_>,
    ) -> Result<Attr, Errno> {
        let inode = self.find(caller, at, follow)?;
        let last = self.walk(caller, to)?.last()?;
        let name = last.new_name()?;
        let mut names = last.lock_names()?;
        if names.find(name).is_some() {
            return Err(Errno::EEXIST);
        }
        if last.slashes {
            return Err(Errno::ENOENT);
        }
        if caller.enforce {
            check_link(caller, &inode.attr())?;
        }
        check_names(caller, &last.directory)?;
        if inode.is_directory() {
            return Err(Errno::EPERM);
        }
        self.arena.charge(name_cost(name))?;
        // Checking that it may still be linked and linking it must be one step: another thread may
        // remove the last other name at the same time.
        let linked = inode.try_change(|attr, _| match attr.links {
            0 if !inode.is_linkable() => Err(Errno::ENOENT),
            u32::MAX => Err(Errno::EMLINK),
            _ => {
                attr.links += 1;
                Ok(attr.links)
            }
        });
        let links = linked.inspect_err(|_| self.arena.release(name_cost(name)))?;
        if links == 1 {
            inode.set_above(&last.directory);
        }
        inode.set_linkable(false);
        names.insert(name, inode.clone());
        last.directory.modify(|_| ());
        self.watches.linked(End { directory: &last.directory, name }, &inode);
        Ok(inode.attr())
    }

    /// `unlinkat(2)`.
    pub(super) fn unlink(
        &self,
        caller: &Caller,
        at: Source<'_>,
        directory: bool,
    ) -> Result<(), Errno> {
        let last = self.walk(caller, at)?.last()?;
        let name = match &last.component {
            Component::Name(name) => name,
            _ if !directory => return Err(Errno::EISDIR),
            Component::Dot => return Err(Errno::EINVAL),
            // This includes the root's, whose `..` is outside: nothing is removed.
            Component::DotDot => return Err(Errno::ENOTEMPTY),
        };
        let mut names = last.lock_names()?;
        let victim = names.find(name).cloned().ok_or(Errno::ENOENT)?;
        if last.slashes && !directory {
            return Err(if victim.is_directory() { Errno::EISDIR } else { Errno::ENOTDIR });
        }
        check_removal(caller, &last.directory, &victim, directory)?;
        bury(&victim)?;
        names.remove(name);
        self.arena.release(name_cost(name));
        last.directory.modify(|attr| attr.links -= u32::from(directory));
        unlinked(&victim);
        let ended = self.watches.removed(End { directory: &last.directory, name }, &victim);
        drop(names);
        // Drops without locks what may be the end of a large file or of a witness.
        drop((victim, ended));
        Ok(())
    }
}

/// Marks a directory that is about to be removed, so that it gets no more names; fails with
/// `ENOTEMPTY`. Other types need no mark.
pub(super) fn bury(victim: &Inode) -> Result<(), Errno> {
    if let Content::Directory(directory) = &victim.content {
        let mut names = directory.names.write();
        if !names.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        names.bury();
    }
    Ok(())
}

/// Records that an inode lost a name. A directory had only one.
pub(super) fn unlinked(victim: &Inode) {
    victim.change(|attr, _| {
        attr.links = if victim.is_directory() { 0 } else { attr.links - 1 };
    });
}
