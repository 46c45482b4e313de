//! The permission rules of Linux.

use super::inode::{Inode, SET_GID, STICKY};
use crate::Caller;
use std::sync::LazyLock;
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_MASK};
use towline_wire::{Attr, Errno};

/// Permission to read.
pub(super) const READ: u32 = 4;
/// Permission to write.
pub(super) const WRITE: u32 = 2;
/// Permission to execute, or to look up names in a directory.
pub(super) const EXECUTE: u32 = 1;

/// User and group of the server, which own the new files of callers without `enforce`.
static SERVER: LazyLock<(u32, u32)> =
    LazyLock::new(|| (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()));

/// Returns true if the caller may do everything.
pub(super) fn may_all(caller: &Caller) -> bool {
    !caller.enforce || caller.uid == 0
}

/// Returns true if a write leaves set-id bits alone: for root, whether that is the caller or the
/// server that a caller without `enforce` acts as.
pub(super) fn keeps_set_id(caller: &Caller) -> bool {
    let uid = if caller.enforce { caller.uid } else { SERVER.0 };
    uid == 0
}

/// Returns user and group for files that the caller creates.
pub(super) fn owner(caller: &Caller) -> (u32, u32) {
    if caller.enforce { (caller.uid, caller.gid) } else { *SERVER }
}

/// Returns true if the caller is in the group.
pub(super) fn in_group(caller: &Caller, gid: u32) -> bool {
    caller.gid == gid || caller.groups.contains(&gid)
}

/// Returns true if the caller owns the file or has the owner's rights.
pub(super) fn owns(caller: &Caller, attr: &Attr) -> bool {
    may_all(caller) || caller.uid == attr.uid
}

/// Checks permission bits; fails with `EACCES`.
pub(super) fn check_attr(caller: &Caller, attr: &Attr, wanted: u32) -> Result<(), Errno> {
    let allowed = if may_all(caller) {
        let executable = attr.is_directory() || attr.mode & 0o111 != 0;
        READ | WRITE | if executable { EXECUTE } else { 0 }
    } else if caller.uid == attr.uid {
        attr.mode >> 6
    } else if in_group(caller, attr.gid) {
        attr.mode >> 3
    } else {
        attr.mode
    };
    if wanted & !allowed & 7 == 0 { Ok(()) } else { Err(Errno::EACCES) }
}

/// Checks permission bits of a file; fails with `EACCES`.
pub(super) fn check(caller: &Caller, inode: &Inode, wanted: u32) -> Result<(), Errno> {
    // This runs on every step of every path, so it takes no lock if permission cannot be denied.
    if may_all(caller) && (wanted & EXECUTE == 0 || inode.is_directory()) {
        return Ok(());
    }
    check_attr(caller, &inode.attr(), wanted)
}

/// Checks that names of a directory may be changed; fails with `EACCES`.
pub(super) fn check_names(caller: &Caller, directory: &Inode) -> Result<(), Errno> {
    check(caller, directory, WRITE | EXECUTE)
}

/// Checks that `victim` may be removed from `directory`: the names may be changed, the sticky bit
/// allows it, and `victim` is a directory exactly if `as_directory` says so.
pub(super) fn check_removal(
    caller: &Caller,
    directory: &Inode,
    victim: &Inode,
    as_directory: bool,
) -> Result<(), Errno> {
    check_names(caller, directory)?;
    if !may_all(caller) {
        let attr = directory.attr();
        let owner = caller.uid == attr.uid || caller.uid == victim.attr().uid;
        if attr.mode & STICKY != 0 && !owner {
            return Err(Errno::EPERM);
        }
    }
    match (as_directory, victim.is_directory()) {
        (true, false) => Err(Errno::ENOTDIR),
        (false, true) => Err(Errno::EISDIR),
        _ => Ok(()),
    }
}

/// Checks that a symbolic link at the end of a path may be followed: not one that another user
/// planted in a world-writable sticky directory (`protected_symlinks`).
pub(super) fn check_follow(caller: &Caller, directory: &Inode, link: &Inode) -> Result<(), Errno> {
    if !caller.enforce {
        return Ok(());
    }
    let attr = directory.attr();
    let open_to_all = attr.mode & STICKY != 0 && attr.mode & 0o002 != 0;
    let link_uid = link.attr().uid;
    if open_to_all && link_uid != caller.uid && link_uid != attr.uid {
        return Err(Errno::EACCES);
    }
    Ok(())
}

/// Checks that the caller may link the file: if it is not the owner, the file must be readable and
/// writable for it and carry no privilege (`protected_hardlinks`).
pub(super) fn check_link(caller: &Caller, attr: &Attr) -> Result<(), Errno> {
    if owns(caller, attr) {
        return Ok(());
    }
    let harmless = attr.is_file() && super::inode::without_set_id(attr.mode) == attr.mode;
    if harmless && check_attr(caller, attr, READ | WRITE).is_ok() {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// Returns owner, group and mode of a new file in `directory`. A directory with the set-group-id
/// bit passes on its group.
pub(super) fn inherit(caller: &Caller, directory: &Inode, mode: u32) -> (u32, u32, u32) {
    let (uid, gid) = owner(caller);
    let parent = directory.attr();
    if parent.mode & SET_GID == 0 {
        return (uid, gid, mode);
    }
    let strange = !may_all(caller) && !in_group(caller, parent.gid);
    let mode = match mode & TYPE_MASK {
        TYPE_DIRECTORY => mode | SET_GID,
        TYPE_FILE if strange && mode & 0o010 != 0 => mode & !SET_GID,
        _ => mode,
    };
    (uid, parent.gid, mode)
}
