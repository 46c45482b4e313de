//! Sockets with remote names. A node of their kind is made there, and the kernel's socket is bound in the
//! run's directory, under the number of that node. So only programs of the same run meet.

use super::by_path;
use crate::guard::{Failed, checked, finish};
use crate::place::At;
use crate::table::real;
use crate::{common, start};
use libc::{c_char, c_int, c_void, size_t, socklen_t, ssize_t};
use std::cell::Cell;
use std::ffi::{CStr, CString};
use towline_instance::SOCKETS;

/// Offset of the name in an address.
const NAME_AT: usize = 2;

/// Returns the path in an address; `None` for all but named Unix sockets.
pub(super) unsafe fn path_of(address: *const c_void, length: socklen_t) -> Option<CString> {
    let length = (length as usize).min(size_of::<libc::sockaddr_un>());
    if address.is_null() || length <= NAME_AT || start::mounts().is_empty() {
        return None;
    }
    // SAFETY: the program passes an address of at least this length.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) };
    let name = &bytes[NAME_AT..];
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let unix = u16::from_ne_bytes([bytes[0], bytes[1]]) == libc::AF_UNIX as u16;
    CString::new(&name[..end]).ok().filter(|name| unix && !name.is_empty())
}

/// Returns the path of the kernel's socket for a node.
fn path_of_stand_in(mount: usize, inode: u64) -> Vec<u8> {
    [start::directory(), format!("/{SOCKETS}/{mount}-{inode}").as_bytes()].concat()
}

/// An address and its length.
type Address = (libc::sockaddr_un, socklen_t);

/// Returns the address of the kernel's socket for a node.
fn stand_in(mount: usize, inode: u64) -> Result<Address, i32> {
    address_of(&path_of_stand_in(mount, inode))
}

/// Returns the address with this path.
fn address_of(path: &[u8]) -> Result<Address, i32> {
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    if path.len() >= address.sun_path.len() {
        return Err(libc::ENAMETOOLONG);
    }
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = *from as c_char;
    }
    Ok((address, (NAME_AT + path.len() + 1) as socklen_t))
}

/// Makes a call with a local address: the program's own, or that of the path to which links lead from
/// there.
unsafe fn locally<T: Failed>(
    own: &CStr,
    path: *const c_char,
    (address, length): (*const c_void, socklen_t),
    call: impl Fn(*const c_void, socklen_t) -> T,
) -> T {
    if path == own.as_ptr() {
        return call(address, length);
    }
    // SAFETY: `by_path` passes a string.
    match address_of(unsafe { CStr::from_ptr(path) }.to_bytes()) {
        Ok((address, length)) => call((&raw const address).cast(), length),
        Err(error) => finish(Err(error)),
    }
}

pub(crate) unsafe fn bind(fd: c_int, address: *const c_void, length: socklen_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    let Some(path) = (unsafe { path_of(address, length) }) else {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::bind(fd, address, length) };
    };
    let local = |_, name| {
        // SAFETY: the address is the program's or a local one; `by_path` passes a string.
        unsafe {
            locally(&path, name, (address, length), |address, length| {
                real::bind(fd, address, length)
            })
        }
    };
    let remote = |at: &At| {
        let mode = libc::S_IFSOCK | start::with_umask(0o777);
        let made = at.with(|base, path| base.make_node(path, mode, 0)).map_err(|e| match e {
            libc::EEXIST => libc::EADDRINUSE,
            other => other,
        })?;
        let (address, length) = stand_in(at.mount, made.identity())?;
        // Left by a removed node with the same number.
        let old = [libc::AT_FDCWD as usize, address.sun_path.as_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the path ends with a zero byte.
        let _ = unsafe { checked(libc::SYS_unlinkat, old) };
        // SAFETY: the address is a valid local one.
        let result = unsafe { real::bind(fd, (&raw const address).cast(), length) };
        if result != 0 {
            let error = crate::guard::errno();
            let _ = at.with(|base, path| base.unlink(path, false));
            return Err(error);
        }
        note_name(&address, path.to_bytes());
        // The remote node decides who may connect.
        common::open_to_all(&[&path_of_stand_in(at.mount, made.identity())[..], b"\0"].concat())?;
        Ok(0)
    };
    // SAFETY: the path is a string.
    unsafe { by_path(libc::AT_FDCWD, path.as_ptr(), false, local, remote) }
}

/// Returns the path in an address, with everything after it. `c_char` is signed on some machines.
fn path_in(address: &libc::sockaddr_un) -> [u8; 108] {
    address.sun_path.map(|letter| letter.to_ne_bytes()[0])
}

/// Returns the path, with a zero byte at its end, of the link that holds the program's name for a stand-in.
fn note_of(address: &libc::sockaddr_un) -> Vec<u8> {
    let path = path_in(address);
    let end = path.iter().position(|letter| *letter == 0).unwrap_or(path.len());
    [&path[..end], b".name\0"].concat()
}

/// Notes the name by which the program has bound a stand-in, for [`getsockname`].
fn note_name(address: &libc::sockaddr_un, name: &[u8]) {
    let (note, target) = (note_of(address), [name, b"\0"].concat());
    let at = libc::AT_FDCWD as usize;
    // SAFETY: both end with zero bytes. If this fails, the program gets the name of the stand-in.
    unsafe {
        let _ = checked(libc::SYS_unlinkat, [at, note.as_ptr() as usize, 0, 0, 0, 0]);
        let call = [target.as_ptr() as usize, at, note.as_ptr() as usize, 0, 0, 0];
        let _ = checked(libc::SYS_symlinkat, call);
    }
}

/// Returns the program's name for the stand-in with this address; `None` for any other address.
fn name_of(address: &libc::sockaddr_un) -> Option<Address> {
    let path = path_in(address);
    let folder = [start::directory(), b"/", SOCKETS.as_bytes(), b"/"].concat();
    let is_stand_in = address.sun_family == libc::AF_UNIX as u16 && path.starts_with(&folder);
    let name = is_stand_in.then(|| crate::descriptors::link_of(&note_of(address))).flatten()?;
    address_of(&name).ok()
}

/// Copies an address to the program, as far as there is room, and returns its full length.
unsafe fn put((told, count): Address, address: *mut c_void, room: socklen_t) -> socklen_t {
    let room = room.min(count) as usize;
    // SAFETY: the address has at least `count` bytes; the caller guarantees `room` bytes at the target.
    unsafe {
        let bytes = std::slice::from_raw_parts((&raw const told).cast(), room);
        super::copy_out(bytes, address.cast(), room);
    }
    count
}

/// Gets the name of a socket or of its peer with `call`, and replaces that of a stand-in.
unsafe fn named(
    address: *mut c_void,
    length: *mut socklen_t,
    call: impl Fn(*mut c_void, *mut socklen_t) -> c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments; the structure is a local one, and may be all zero.
    unsafe {
        if start::mounts().is_empty() || address.is_null() || length.is_null() {
            return call(address, length);
        }
        let mut own: libc::sockaddr_un = std::mem::zeroed();
        let mut count = size_of_val(&own) as socklen_t;
        let known = call((&raw mut own).cast(), &raw mut count);
        let Some(name) = (known == 0).then(|| name_of(&own)).flatten() else {
            return call(address, length);
        };
        *length = put(name, address, *length);
        0
    }
}

/// Returns the program's own name for the socket: some programs remove the node by it.
pub(crate) unsafe fn getsockname(fd: c_int, address: *mut c_void, length: *mut socklen_t) -> c_int {
    // SAFETY: the places are the program's or local ones.
    unsafe { named(address, length, |address, length| real::getsockname(fd, address, length)) }
}

pub(crate) unsafe fn getpeername(fd: c_int, address: *mut c_void, length: *mut socklen_t) -> c_int {
    // SAFETY: the places are the program's or local ones.
    unsafe { named(address, length, |address, length| real::getpeername(fd, address, length)) }
}

/// Replaces the name of a stand-in by the program's own name, after a call has written an address of
/// `count` bytes where there was `room`. Returns the new length. A name that was cut short stays.
pub(super) unsafe fn told(address: *mut c_void, room: socklen_t, count: socklen_t) -> socklen_t {
    // SAFETY: all zero is a valid address; the call has written `count` bytes.
    unsafe {
        let mut own: libc::sockaddr_un = std::mem::zeroed();
        if address.is_null() || count > room || count as usize > size_of_val(&own) {
            return count;
        }
        std::ptr::copy_nonoverlapping(address.cast(), (&raw mut own).cast::<u8>(), count as usize);
        name_of(&own).map_or(count, |name| put(name, address, room))
    }
}

/// Makes a call that also returns the address of the peer.
unsafe fn telling<T: Failed + PartialEq>(
    address: *mut c_void,
    length: *mut socklen_t,
    call: impl FnOnce() -> T,
) -> T {
    if start::mounts().is_empty() || address.is_null() || length.is_null() {
        return call();
    }
    // SAFETY: the program passes valid arguments.
    unsafe {
        let room = length.read();
        let result = call();
        if result != T::FAILED {
            *length = told(address, room, *length);
        }
        result
    }
}

pub(crate) unsafe fn accept(fd: c_int, address: *mut c_void, length: *mut socklen_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { telling(address, length, || real::accept(fd, address, length)) }
}

pub(crate) unsafe fn accept4(
    fd: c_int,
    address: *mut c_void,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { telling(address, length, || real::accept4(fd, address, length, flags)) }
}

pub(crate) unsafe fn recvfrom(
    fd: c_int,
    data: *mut c_void,
    count: size_t,
    flags: c_int,
    address: *mut c_void,
    length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe { telling(address, length, || real::recvfrom(fd, data, count, flags, address, length)) }
}

/// The form of [`recvfrom`] for programs that libc checks: it aborts them if `room` is less than `count`.
pub(crate) unsafe fn recvfrom_chk(
    fd: c_int,
    data: *mut c_void,
    count: size_t,
    room: size_t,
    flags: c_int,
    address: *mut c_void,
    length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program passes valid arguments.
    unsafe {
        telling(address, length, || {
            real::__recvfrom_chk(fd, data, count, room, flags, address, length)
        })
    }
}

/// Returns the address of the kernel's socket for a remote node.
fn behind(at: &At) -> Result<Address, i32> {
    let attr = at.with(|base, path| {
        base.access(path, libc::W_OK as u32)?;
        base.stat_path(path, true)
    })?;
    if attr.mode & libc::S_IFMT != libc::S_IFSOCK {
        return Err(libc::ECONNREFUSED);
    }
    stand_in(at.mount, attr.identity())
}

/// Makes a call to an address; for a remote name, to the kernel's socket that stands for it.
pub(super) unsafe fn to<T: Failed + PartialEq + Default>(
    address: *const c_void,
    length: socklen_t,
    call: impl Fn(*const c_void, socklen_t) -> T,
) -> T {
    // SAFETY: the program passes valid arguments.
    let Some(path) = (unsafe { path_of(address, length) }) else { return call(address, length) };
    let found = Cell::new(None);
    let local = |_, name| {
        // SAFETY: `by_path` passes a string.
        unsafe { locally(&path, name, (address, length), &call) }
    };
    let remote = |at: &At| {
        found.set(Some(behind(at)?));
        Ok(T::default())
    };
    // SAFETY: the path is a string.
    let done = unsafe { by_path(libc::AT_FDCWD, path.as_ptr(), true, local, remote) };
    // Outside the library's own code, as it may wait for long.
    let Some((address, length)) = found.take() else { return done };
    let result = call((&raw const address).cast(), length);
    if result == T::FAILED && crate::guard::errno() == libc::ENOENT {
        // The node has no socket in this run.
        return finish(Err(libc::ECONNREFUSED));
    }
    result
}

pub(crate) unsafe fn connect(fd: c_int, address: *const c_void, length: socklen_t) -> c_int {
    // SAFETY: the address is the program's or a local one.
    unsafe { to(address, length, |address, length| real::connect(fd, address, length)) }
}

pub(crate) unsafe fn sendto(
    fd: c_int,
    data: *const c_void,
    count: size_t,
    flags: c_int,
    address: *const c_void,
    length: socklen_t,
) -> ssize_t {
    // SAFETY: the address is the program's or a local one.
    unsafe {
        to(address, length, |address, length| real::sendto(fd, data, count, flags, address, length))
    }
}

/// Returns true for an address with a remote name.
pub(super) unsafe fn is_remote(address: usize, length: usize) -> bool {
    // SAFETY: the program passes a valid address; the path is a string.
    unsafe {
        path_of(address as *const c_void, length as socklen_t)
            .is_some_and(|path| crate::place::find(libc::AT_FDCWD, path.as_ptr()).is_some())
    }
}
