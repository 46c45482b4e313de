//! Change notification for remote files. The kernel reports nothing about them, so `inotify` watches a
//! local *shadow* of each file, and the keeper repeats on it what happens to the file (`cli/run/watches`).
//! The descriptor and the events read from it are the kernel's own. `fanotify_mark` finds no remote file,
//! and `name_to_handle_at` does not support any.

use super::directories::Batch;
use super::{by_path, itself, or_working};
use crate::descriptors::Open;
use crate::guard::finish;
use crate::place::{self, At};
use crate::table::real;
use crate::{guard, holder, remote, start};
use libc::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;
use towline_client::File;
use towline_instance::SHADOWS;
use towline_instance::watches::{Ask, Listed, Opened, UNKNOWN};
use towline_wire::request::open_flag;

/// Attempts to watch a file's shadow: a file that is moved in between gets a shadow with another number.
const TRIES: usize = 16;

pub(crate) unsafe fn inotify_add_watch(fd: c_int, path: *const c_char, mask: u32) -> c_int {
    let follow = mask & libc::IN_DONT_FOLLOW == 0;
    // SAFETY: the program passes valid arguments.
    let local = |_, path| unsafe { real::inotify_add_watch(fd, path, mask) };
    let remote = |at: &At| watch(fd, at, mask);
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(libc::AT_FDCWD, path, follow, local, remote) }
}

fn watch(fd: c_int, at: &At, mask: u32) -> Result<c_int, i32> {
    let add = |path: &[u8]| {
        // SAFETY: the path ends with a zero byte.
        let watch = unsafe { real::inotify_add_watch(fd, path.as_ptr().cast(), mask) };
        if watch < 0 { Err(guard::errno()) } else { Ok(watch) }
    };
    // The kernel reports a wrong descriptor or mask before it looks at the path.
    match add(b"\0") {
        Err(libc::ENOENT) => {}
        other => return other,
    }
    for _ in 0..TRIES {
        let number = shadow_of(at, mask)?;
        let path = [start::directory(), format!("/{SHADOWS}/{number}\0").as_bytes()].concat();
        match add(&path) {
            Err(libc::ENOENT) => {}
            other => return other,
        }
    }
    Err(libc::ENOENT)
}

/// Returns the number of a file's shadow. As with the kernel, the file must be readable.
fn shadow_of(at: &At, mask: u32) -> Result<u64, i32> {
    let flag = |bit: u32, flag: c_int| if mask & bit != 0 { flag } else { 0 };
    let flags = libc::O_PATH
        | flag(libc::IN_ONLYDIR, libc::O_DIRECTORY)
        | flag(libc::IN_DONT_FOLLOW, libc::O_NOFOLLOW);
    at.with(|base, path| {
        let file = base.open(path, open_flag::of_this_machine(flags), 0)?;
        file.access(b"", libc::R_OK as u32)?;
        let ask = Ask {
            mount: at.mount as u32,
            mask: mask & libc::IN_ALL_EVENTS,
            identity: file.attr().identity(),
            opened: None,
        };
        Ok(match holder::ask(&ask) {
            Err(UNKNOWN) => holder::ask(&Ask { opened: Some(open(at, file)?), ..ask }),
            known => known,
        })
    })?
}

/// Opens a file for the keeper to watch, and leaves the handle to the keeper.
fn open(at: &At, file: File) -> Result<Opened, towline_client::Error> {
    let is_directory = file.attr().mode & libc::S_IFMT == libc::S_IFDIR;
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
    let file = match is_directory {
        true => file.open(b".", open_flag::of_this_machine(flags), 0)?,
        false => file,
    };
    let handle = file.into_handle();
    if let Ok(client) = remote::client(at.mount) {
        client.forget_handle(handle);
    }
    Ok(Opened { handle, is_directory, path: place::tidy(&at.below()) })
}

/// Tells the keeper which names a program is about to learn of, if the directory is watched: a watcher may
/// combine them with the events, of which some may get lost.
pub(super) fn listed(open: Open, cookie: u64, batch: &Batch) {
    let identity = open.entry.inode.load(Ordering::Relaxed);
    if !start::state().is_some_and(|state| state.may_be_watched(identity)) {
        return;
    }
    let names = batch.entries.iter().filter(|entry| !matches!(&entry.name[..], b"." | b".."));
    let _ = holder::tell_listed(&Listed {
        mount: open.entry.mount.load(Ordering::Relaxed),
        identity,
        handle: open.handle,
        changes: batch.changes,
        begins: cookie == 0,
        ends: batch.end,
        names: names.map(|entry| (entry.name.clone(), entry.file_type == libc::DT_DIR)).collect(),
    });
}

/// Fails with `error` if the remote file exists. The kernel must not see these paths: for one relative to a
/// remote working directory it would use the stand-in. A link that leads out of the export gives `EXDEV`,
/// which [`by_path`] follows.
fn refused(at: &At, follow: bool, error: c_int) -> Result<c_int, i32> {
    at.with(|base, path| base.stat_path(path, follow))?;
    Err(error)
}

pub(crate) unsafe fn fanotify_mark(
    fd: c_int,
    flags: c_uint,
    mask: u64,
    at: c_int,
    path: *const c_char,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    if unsafe { itself(at, path, libc::AT_EMPTY_PATH) }.is_some() {
        return finish(Err(libc::ENOENT));
    }
    let follow = flags & libc::FAN_MARK_DONT_FOLLOW == 0;
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::fanotify_mark(fd, flags, mask, at, path) };
    let remote = |at: &At| refused(at, follow, libc::ENOENT);
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, follow, local, remote) }
}

pub(crate) unsafe fn name_to_handle_at(
    at: c_int,
    path: *const c_char,
    handle: *mut c_void,
    mount: *mut c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    let path = unsafe { or_working(at, path, flags) };
    // SAFETY: the program passes valid arguments.
    if unsafe { itself(at, path, flags) }.is_some() {
        return finish(Err(libc::EOPNOTSUPP));
    }
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    // SAFETY: the program passes valid arguments.
    let local = |at, path| unsafe { real::name_to_handle_at(at, path, handle, mount, flags) };
    let remote = |at: &At| refused(at, follow, libc::EOPNOTSUPP);
    // SAFETY: the program passes valid arguments.
    unsafe { by_path(at, path, follow, local, remote) }
}
