//! Changes of the attributes and extended attributes of a file that was found.

use super::attributes::{errno, stat_file};
use super::open_file::DirectoryFile;
use super::resolve::{Found, Tree, proc_path};
use super::system;
use crate::{SetAttr, XattrAction};
use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, CWD, Mode, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno as Code;
use rustix::process::{Gid, Uid};
use std::os::fd::AsFd;
use towline_wire::limits::XATTR_BYTES_MAX;
use towline_wire::{Attr, Errno, Timestamp};

/// Size of the first buffer for a value or a list of names.
const XATTR_GUESS_BYTES: usize = 1024;

/// Changes length, owner, mode and times, in this order, since each may disturb those after it. If
/// one fails, the earlier changes remain.
pub(super) fn set_attributes(tree: &Tree, found: &Found<'_>, set: &SetAttr) -> Result<Attr, Errno> {
    if let Some(size) = set.size {
        set_size(found, size)?;
    }
    // To the system call, all ones mean "leave it".
    let uid = set.uid.filter(|uid| *uid != u32::MAX).map(Uid::from_raw);
    let gid = set.gid.filter(|gid| *gid != u32::MAX).map(Gid::from_raw);
    // Also if both are left as they are, since the call clears the set-id bits.
    if set.uid.is_some() || set.gid.is_some() {
        rustix::fs::chownat(found, c"", uid, gid, AtFlags::EMPTY_PATH).map_err(errno)?;
    }
    if let Some(mode) = set.mode {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        match open_for_data(found) {
            Some(file) => rustix::fs::fchmod(&file.fd, mode),
            None => rustix::fs::chmodat(CWD, proc_path(found), mode, AtFlags::empty()),
        }
        .map_err(errno)?;
    }
    if let Some((accessed, modified)) = set.times {
        let times =
            Timestamps { last_access: timespec(accessed), last_modification: timespec(modified) };
        rustix::fs::utimensat(found, c"", &times, AtFlags::EMPTY_PATH).map_err(errno)?;
    }
    stat_file(found).map(|stat| tree.attr_of(&stat))
}

fn set_size(found: &Found<'_>, size: u64) -> Result<(), Errno> {
    match open_for_data(found) {
        // Write access was checked when the file was opened.
        Some(file) => rustix::fs::ftruncate(&file.fd, size),
        // Not by opening it: whoever watches the file would be told of that.
        None => system::truncate(&proc_path(found), size),
    }
    .map_err(errno)
}

/// Performs one action on extended attributes.
pub(super) fn xattr(found: &Found<'_>, action: XattrAction<'_>) -> Result<Vec<u8>, Errno> {
    let file = open_for_data(found).map(|file| file.fd.as_fd());
    let path = if file.is_none() { proc_path(found) } else { String::new() };
    let path = path.as_str();
    match action {
        XattrAction::Get(name) => fill(|bytes| match file {
            Some(file) => rustix::fs::fgetxattr(file, name, spare_capacity(bytes)),
            None => rustix::fs::getxattr(path, name, spare_capacity(bytes)),
        }),
        XattrAction::List => fill(|bytes| match file {
            Some(file) => rustix::fs::flistxattr(file, spare_capacity(bytes)),
            None => rustix::fs::listxattr(path, spare_capacity(bytes)),
        }),
        XattrAction::Set(name, value, how) => {
            let how = XattrFlags::from_bits(how).ok_or(Errno::EINVAL)?;
            match file {
                Some(file) => rustix::fs::fsetxattr(file, name, value, how),
                None => rustix::fs::setxattr(path, name, value, how),
            }
            .map_err(errno)?;
            Ok(Vec::new())
        }
        XattrAction::Remove(name) => {
            match file {
                Some(file) => rustix::fs::fremovexattr(file, name),
                None => rustix::fs::removexattr(path, name),
            }
            .map_err(errno)?;
            Ok(Vec::new())
        }
    }
}

/// Calls `read` with a small buffer, and if that is too small, with one of the maximum size.
fn fill(read: impl Fn(&mut Vec<u8>) -> Result<usize, Code>) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::with_capacity(XATTR_GUESS_BYTES);
    match read(&mut bytes) {
        Err(Code::RANGE) => {}
        Err(error) => return Err(errno(error)),
        Ok(_) => return Ok(bytes),
    }
    let mut bytes = Vec::with_capacity(XATTR_BYTES_MAX);
    read(&mut bytes).map_err(errno)?;
    Ok(bytes)
}

/// Returns the open file if calls on descriptors accept it. Others are reached through `/proc`,
/// which leads to the very inode, even if it is a symbolic link.
fn open_for_data<'a>(found: &Found<'a>) -> Option<&'a DirectoryFile> {
    match found {
        Found::Base(file) if !file.path_only => Some(file),
        _ => None,
    }
}

fn timespec(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanoseconds) }
}
