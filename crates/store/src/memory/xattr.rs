//! Extended attributes.

use super::access::{READ, WRITE, check, may_all, owns};
use super::arena::Arena;
use super::inode::{Inode, STICKY, Xattrs, xattr_cost};
use crate::{Caller, XattrAction};
use towline_wire::Errno;
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE};
use towline_wire::limits::XATTR_BYTES_MAX;

/// Longest name with its prefix (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;
/// Longest list of names (`XATTR_LIST_MAX`): it must fit into one reply.
const LIST_BYTES_MAX: usize = 65536;
/// Maximum charge for the extended attributes of one inode.
const INODE_BYTES_MAX: u64 = 1024 * 1024;

const CREATE: u32 = 1;
const REPLACE: u32 = 2;
const E2BIG: Errno = Errno(libc::E2BIG as u16);

/// Performs one action on the extended attributes of an inode.
pub(super) fn xattr(
    arena: &Arena,
    caller: &Caller,
    inode: &Inode,
    action: XattrAction<'_>,
) -> Result<Vec<u8>, Errno> {
    match action {
        XattrAction::Get(name) => {
            check_name(caller, inode, name, false)?;
            let xattrs = inode.xattrs.lock();
            let value = xattrs.as_ref().and_then(|all| all.get(name)).ok_or(Errno::ENODATA)?;
            Ok(value.to_vec())
        }
        XattrAction::List => {
            let xattrs = inode.xattrs.lock();
            let mut list = Vec::new();
            for name in xattrs.iter().flat_map(|all| all.keys()) {
                if may_all(caller) || !name.starts_with(b"trusted.") {
                    list.extend_from_slice(name);
                    list.push(0);
                }
            }
            Ok(list)
        }
        XattrAction::Set(name, value, flags) => {
            if flags & !(CREATE | REPLACE) != 0 {
                return Err(Errno::EINVAL);
            }
            if value.len() > XATTR_BYTES_MAX {
                return Err(E2BIG);
            }
            check_name(caller, inode, name, true)?;
            set(arena, inode, name, value, flags)?;
            Ok(Vec::new())
        }
        XattrAction::Remove(name) => {
            check_name(caller, inode, name, true)?;
            remove(arena, inode, name)?;
            Ok(Vec::new())
        }
    }
}

fn set(arena: &Arena, inode: &Inode, name: &[u8], value: &[u8], flags: u32) -> Result<(), Errno> {
    let mut xattrs = inode.xattrs.lock();
    let all: &mut Xattrs = xattrs.get_or_insert_default();
    let old = all.get(name).map(|value| xattr_cost(name, value));
    match old {
        Some(_) if flags & CREATE != 0 => return Err(Errno::EEXIST),
        None if flags & REPLACE != 0 => return Err(Errno::ENODATA),
        _ => {}
    }
    let new = xattr_cost(name, value);
    let total = super::inode::xattr_bytes(all) - old.unwrap_or(0) + new;
    let listed: usize = all.keys().map(|name| name.len() + 1).sum();
    let added = if old.is_none() { name.len() + 1 } else { 0 };
    if total > INODE_BYTES_MAX || listed + added > LIST_BYTES_MAX {
        return Err(Errno::ENOSPC);
    }
    arena.charge(new.saturating_sub(old.unwrap_or(0)))?;
    arena.release(old.unwrap_or(0).saturating_sub(new));
    all.insert(name.into(), value.into());
    inode.change(|_, _| ());
    Ok(())
}

fn remove(arena: &Arena, inode: &Inode, name: &[u8]) -> Result<(), Errno> {
    let mut xattrs = inode.xattrs.lock();
    let value = xattrs.as_mut().and_then(|all| all.remove(name)).ok_or(Errno::ENODATA)?;
    arena.release(xattr_cost(name, &value));
    inode.change(|_, _| ());
    Ok(())
}

/// Checks that the caller may read or change the attribute with this name.
fn check_name(caller: &Caller, inode: &Inode, name: &[u8], change: bool) -> Result<(), Errno> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(Errno::ERANGE);
    }
    // To a caller that may not know of an attribute, it does not exist.
    let refused = if change { Errno::EPERM } else { Errno::ENODATA };
    if let Some(rest) = name.strip_prefix(b"user.") {
        if !matches!(inode.file_type, TYPE_FILE | TYPE_DIRECTORY) {
            return Err(refused);
        }
        let attr = inode.attr();
        let sticky = attr.is_directory() && attr.mode & STICKY != 0;
        if change && sticky && !owns(caller, &attr) {
            return Err(Errno::EPERM);
        }
        check(caller, inode, if change { WRITE } else { READ })?;
        return not_bare(rest);
    }
    if let Some(rest) = name.strip_prefix(b"trusted.") {
        return if may_all(caller) { not_bare(rest) } else { Err(refused) };
    }
    if let Some(rest) = name.strip_prefix(b"security.") {
        return if may_all(caller) || !change { not_bare(rest) } else { Err(Errno::EPERM) };
    }
    if !name.starts_with(b"system.") {
        check(caller, inode, if change { WRITE } else { READ })?;
    }
    Err(Errno::EOPNOTSUPP)
}

/// Fails for a prefix without a name.
fn not_bare(rest: &[u8]) -> Result<(), Errno> {
    if rest.is_empty() { Err(Errno::EINVAL) } else { Ok(()) }
}
