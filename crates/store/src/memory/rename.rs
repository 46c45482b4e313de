//! Renames files.

use super::access::{WRITE, check, check_names, check_removal, inherit};
use super::create::{bury, unlinked};
use super::inode::{Birth, Content, Inode};
use super::names::{Names, name_cost};
use super::store::Tree;
use super::walk::{Component, Last, Name};
use super::watches::End;
use crate::{Caller, Source};
use parking_lot::RwLockWriteGuard;
use std::sync::Arc;
use towline_wire::Errno;
use towline_wire::attr::TYPE_CHARACTER;
use towline_wire::request::rename_flag::{self, EXCHANGE, NO_REPLACE, WHITEOUT};

/// The names of both directories, which may be the same one.
struct Locked<'a> {
    from: RwLockWriteGuard<'a, Names>,
    to: Option<RwLockWriteGuard<'a, Names>>,
}

/// The inodes at both ends of a rename.
struct Ends {
    source: Arc<Inode>,
    target: Option<Arc<Inode>>,
}

impl Locked<'_> {
    fn to(&mut self) -> &mut Names {
        self.to.as_deref_mut().unwrap_or(&mut self.from)
    }
}

impl Tree {
    /// `renameat2(2)`.
    pub(super) fn rename(
        &self,
        caller: &Caller,
        at: Source<'_>,
        to: Source<'_>,
        flags: u32,
    ) -> Result<(), Errno> {
        if !rename_flag::are_legal(flags) {
            return Err(Errno::EINVAL);
        }
        let from = self.walk(caller, at)?.last()?;
        let to = self.walk(caller, to)?.last()?;
        let Component::Name(old) = &from.component else { return Err(Errno::EBUSY) };
        let Component::Name(new) = &to.component else {
            return Err(if flags & NO_REPLACE != 0 { Errno::EEXIST } else { Errno::EBUSY });
        };
        new.checked()?;
        let same = Arc::ptr_eq(&from.directory, &to.directory);
        let topology = (!same).then(|| self.topology.lock());
        let (trap, mut locked) = lock(&from, &to, same)?;
        let ends = find(&mut locked, old, new)?;
        check_ends(&from, &to, &ends, trap.as_ref(), flags)?;
        let Ends { source, target } = ends;
        if target.as_ref().is_some_and(|target| Arc::ptr_eq(target, &source)) {
            return Ok(());
        }
        check_permissions(caller, &from, &to, &source, target.as_ref(), flags)?;
        let left = match flags & WHITEOUT {
            0 => None,
            _ => Some(self.whiteout(caller, &from.directory)?),
        };
        let freed = if left.is_some() { 0 } else { name_cost(old) };
        let old_end = End { directory: &from.directory, name: old };
        let new_end = End { directory: &to.directory, name: new };
        match target {
            Some(target) if flags & EXCHANGE != 0 => {
                locked.from.insert(old, target.clone());
                locked.to().insert(new, source.clone());
                moved(&target, &to, &from);
                moved(&source, &from, &to);
                // Neither is replaced, so no watch ends.
                self.watches.moved(old_end, new_end, &source, None);
                self.watches.moved(new_end, old_end, &target, None);
            }
            Some(target) => {
                bury(&target)?;
                leave(&mut locked.from, old, left.as_ref());
                locked.to().insert(new, source.clone());
                self.arena.release(freed);
                to.directory.change(|attr, _| attr.links -= u32::from(target.is_directory()));
                moved(&source, &from, &to);
                unlinked(&target);
                let ended = self.watches.moved(old_end, new_end, &source, Some(&target));
                left.iter().for_each(|left| self.watches.left(old_end, left));
                drop((locked, topology));
                // Drops without locks what may be the end of a large file or of a witness.
                drop((target, ended));
            }
            None => {
                let cost = name_cost(new);
                self.arena.charge(cost.saturating_sub(freed))?;
                self.arena.release(freed.saturating_sub(cost));
                leave(&mut locked.from, old, left.as_ref());
                locked.to().insert(new, source.clone());
                moved(&source, &from, &to);
                self.watches.moved(old_end, new_end, &source, None);
                left.iter().for_each(|left| self.watches.left(old_end, left));
            }
        }
        Ok(())
    }

    /// Creates what [`WHITEOUT`] leaves at the old name. As with `mknod(2)`, whoever may create names may create it,
    /// since it gives no access to a device.
    fn whiteout(&self, caller: &Caller, directory: &Inode) -> Result<Arc<Inode>, Errno> {
        let (uid, gid, mode) = inherit(caller, directory, TYPE_CHARACTER);
        let birth = Birth { mode, uid, gid, rdev: 0, content: Content::Node };
        let inode = Inode::new(&self.arena, self.number(), birth)?;
        inode.set_above(directory);
        Ok(inode)
    }
}

/// Makes the old name that of what is left there, or removes it.
fn leave(names: &mut Names, old: &[u8], left: Option<&Arc<Inode>>) {
    match left {
        Some(left) => drop(names.insert(old, left.clone())),
        None => drop(names.remove(old)),
    }
}

/// Locks the names of both directories, an ancestor first. If one is an ancestor of the other, also
/// returns its child on the way to the other: this child must not be an end of the rename.
fn lock<'a>(
    from: &'a Last<'a>,
    to: &'a Last<'a>,
    same: bool,
) -> Result<(Option<Arc<Inode>>, Locked<'a>), Errno> {
    if same {
        return Ok((None, Locked { from: from.lock_names()?, to: None }));
    }
    if let Some(trap) = child_towards(&to.directory, &from.directory) {
        let to = Some(to.lock_names()?);
        return Ok((Some(trap), Locked { from: from.lock_names()?, to }));
    }
    let trap = child_towards(&from.directory, &to.directory);
    let from = from.lock_names()?;
    Ok((trap, Locked { from, to: Some(to.lock_names()?) }))
}

/// Returns the child of `ancestor` that leads to `descendant`, or is `descendant` itself.
fn child_towards(ancestor: &Arc<Inode>, descendant: &Arc<Inode>) -> Option<Arc<Inode>> {
    let mut node = descendant.clone();
    while let Some(parent) = node.parent() {
        if Arc::ptr_eq(&parent, ancestor) {
            return Some(node);
        }
        node = parent;
    }
    None
}

fn find(locked: &mut Locked<'_>, old: &Name<'_>, new: &Name<'_>) -> Result<Ends, Errno> {
    let source = locked.from.find(old).cloned().ok_or(Errno::ENOENT)?;
    Ok(Ends { source, target: locked.to().find(new).cloned() })
}

/// Checks everything that does not depend on the caller, in the order of Linux.
fn check_ends(
    from: &Last<'_>,
    to: &Last<'_>,
    ends: &Ends,
    trap: Option<&Arc<Inode>>,
    flags: u32,
) -> Result<(), Errno> {
    let exchange = flags & EXCHANGE != 0;
    let Ends { source, target } = ends;
    match target {
        Some(_) if flags & NO_REPLACE != 0 => return Err(Errno::EEXIST),
        None if exchange => return Err(Errno::ENOENT),
        Some(target) if exchange && to.slashes && !target.is_directory() => {
            return Err(Errno::ENOTDIR);
        }
        _ => {}
    }
    if !source.is_directory() && (from.slashes || !exchange && to.slashes) {
        return Err(Errno::ENOTDIR);
    }
    let is_trap = |inode: &Arc<Inode>| trap.is_some_and(|trap| Arc::ptr_eq(trap, inode));
    if is_trap(source) {
        return Err(Errno::EINVAL);
    }
    if target.as_ref().is_some_and(is_trap) {
        return Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
    }
    Ok(())
}

fn check_permissions(
    caller: &Caller,
    from: &Last<'_>,
    to: &Last<'_>,
    source: &Arc<Inode>,
    target: Option<&Arc<Inode>>,
    flags: u32,
) -> Result<(), Errno> {
    let exchange = flags & EXCHANGE != 0;
    check_removal(caller, &from.directory, source, source.is_directory())?;
    match target {
        None => check_names(caller, &to.directory)?,
        Some(target) => {
            let directory = if exchange { target.is_directory() } else { source.is_directory() };
            check_removal(caller, &to.directory, target, directory)?;
        }
    }
    // Moving a directory changes its `..`.
    if !Arc::ptr_eq(&from.directory, &to.directory) {
        if source.is_directory() {
            check(caller, source, WRITE)?;
        }
        if let Some(target) = target.filter(|target| exchange && target.is_directory()) {
            check(caller, target, WRITE)?;
        }
    }
    Ok(())
}

/// Records that `inode` moved from one directory to another, or got another name.
fn moved(inode: &Arc<Inode>, from: &Last<'_>, to: &Last<'_>) {
    inode.change(|_, _| ());
    inode.set_above(&to.directory);
    let crossing = !Arc::ptr_eq(&from.directory, &to.directory);
    let links = u32::from(crossing && inode.is_directory());
    from.directory.modify(|attr| attr.links -= links);
    to.directory.modify(|attr| attr.links += links);
    if let Ok(directory) = inode.directory() {
        *directory.parent.lock() = Arc::downgrade(&to.directory);
    }
}
