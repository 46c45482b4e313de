//! Sockets that have remote names: a node of their kind is made there, and the kernel's socket is
//! bound in the run's directory, under the number of that node. So only programs of one run meet.

use super::by_path;
use crate::guard::{finish, inside};
use crate::place::At;
use crate::table::real;
use crate::{common, start};
use libc::{c_char, c_int, c_void, socklen_t};
use std::ffi::CString;
use towline_instance::SOCKETS;

/// Where the name begins in an address.
const NAME_AT: usize = 2;

/// The path in an address; `None` for all but named Unix sockets.
unsafe fn path_of(address: *const c_void, length: socklen_t) -> Option<CString> {
    let length = (length as usize).min(size_of::<libc::sockaddr_un>());
    if address.is_null() || length <= NAME_AT || start::mounts().is_empty() {
        return None;
    }
    // SAFETY: as long as the program says.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) };
    let name = &bytes[NAME_AT..];
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let unix = u16::from_ne_bytes([bytes[0], bytes[1]]) == libc::AF_UNIX as u16;
    CString::new(&name[..end]).ok().filter(|name| unix && !name.is_empty())
}

/// Where the kernel's socket is that stands for a node.
fn path_of_stand_in(mount: usize, inode: u64) -> Vec<u8> {
    [start::directory(), format!("/{SOCKETS}/{mount}-{inode}").as_bytes()].concat()
}

/// The address of the kernel's socket that stands for a node.
fn stand_in(mount: usize, inode: u64) -> Result<(libc::sockaddr_un, socklen_t), i32> {
    let path = path_of_stand_in(mount, inode);
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    if path.len() >= address.sun_path.len() {
        return Err(libc::ENAMETOOLONG);
    }
    for (to, from) in address.sun_path.iter_mut().zip(&path) {
        *to = *from as c_char;
    }
    Ok((address, (NAME_AT + path.len() + 1) as socklen_t))
}

pub(crate) unsafe fn bind(fd: c_int, address: *const c_void, length: socklen_t) -> c_int {
    // SAFETY: as the program says.
    let Some(path) = (unsafe { path_of(address, length) }) else {
        // SAFETY: as the program says.
        return unsafe { real::bind(fd, address, length) };
    };
    // SAFETY: as the program says.
    let local = |_, _| unsafe { real::bind(fd, address, length) };
    let remote = |at: &At| {
        let mode = libc::S_IFSOCK | start::with_umask(0o777);
        let made = at.with(|base, path| base.make_node(path, mode, 0)).map_err(|e| match e {
            libc::EEXIST => libc::EADDRINUSE,
            other => other,
        })?;
        let (address, length) = stand_in(at.mount, made.inode)?;
        // Of a node of this number that was removed.
        let old = [libc::AT_FDCWD as usize, address.sun_path.as_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the path ends with a zero byte.
        let _ = unsafe { crate::guard::checked(libc::SYS_unlinkat, old) };
        // SAFETY: a valid address.
        let result = unsafe { real::bind(fd, (&raw const address).cast(), length) };
        if result != 0 {
            let error = crate::guard::errno();
            let _ = at.with(|base, path| base.unlink(path, false));
            return Err(error);
        }
        // Who may connect is said by the remote node.
        common::open_to_all(&[&path_of_stand_in(at.mount, made.inode)[..], b"\0"].concat())?;
        Ok(0)
    };
    // SAFETY: the path is a string.
    unsafe { by_path(libc::AT_FDCWD, path.as_ptr(), false, local, remote) }
}

pub(crate) unsafe fn connect(fd: c_int, address: *const c_void, length: socklen_t) -> c_int {
    // SAFETY: as the program says.
    let Some(path) = (unsafe { path_of(address, length) }) else {
        // SAFETY: as the program says.
        return unsafe { real::connect(fd, address, length) };
    };
    // SAFETY: as the program says.
    let local = |_, _| unsafe { real::connect(fd, address, length) };
    let remote = |at: &At| {
        let attr = at.with(|base, path| {
            base.access(path, libc::W_OK as u32)?;
            base.stat_path(path, true)
        })?;
        if attr.mode & libc::S_IFMT != libc::S_IFSOCK {
            return Err(libc::ECONNREFUSED);
        }
        stand_in(at.mount, attr.inode)
    };
    // Not inside of our own code: it may wait for long.
    // SAFETY: the path is a string.
    let found = unsafe { crate::place::find(libc::AT_FDCWD, path.as_ptr()) };
    let Some(found) = found else { return local(0, path.as_ptr()) };
    let (address, length) = match inside(|| remote(&found)) {
        Ok(place) => place,
        Err(error) => return finish(Err(error)),
    };
    // SAFETY: a valid address.
    match unsafe { real::connect(fd, (&raw const address).cast(), length) } {
        // A node without a socket in this run.
        -1 if crate::guard::errno() == libc::ENOENT => finish(Err(libc::ECONNREFUSED)),
        result => result,
    }
}
