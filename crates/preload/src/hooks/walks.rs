//! `ftw` and `nftw` for remote trees, as libc's own open directories internally. With `FTW_CHDIR` also for
//! local ones, if the working directory is remote: libc's own leaves it internally.

use super::directories::{chdir, closedir, fchdir, opendir, readdir};
use super::status::{lstat, stat};
use super::{files, leads_to_us};
use crate::guard::{errno, finish, set_errno};
use crate::table::real;
use crate::{place, working};
use libc::{c_char, c_int, c_void, stat64};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

/// The program's function, called for each name: with three arguments (`ftw`) or four (`nftw`).
type Visit = unsafe extern "C" fn(*const c_char, *const stat64, c_int, *mut Position) -> c_int;

/// `struct FTW`.
#[repr(C)]
pub(crate) struct Position {
    base: c_int,
    level: c_int,
}

const FILE: c_int = 0;
const DIRECTORY: c_int = 1;
const UNREADABLE: c_int = 2;
const NO_STATUS: c_int = 3;
const LINK: c_int = 4;
const DIRECTORY_AFTER: c_int = 5;
const DANGLING: c_int = 6;

const PHYSICAL: c_int = 1;
const MOUNT: c_int = 2;
const CHANGE_DIRECTORY: c_int = 4;
const DEPTH_FIRST: c_int = 8;
const ACTIONS: c_int = 16;

const SKIP_SUBTREE: c_int = 2;
const SKIP_SIBLINGS: c_int = 3;

struct Walk {
    visit: Visit,
    flags: c_int,
    /// For `ftw`, which reports links that lead nowhere as names without status.
    is_old: bool,
    device: u64,
    /// Directories visited so far: if links are followed, each is visited once.
    visited: BTreeSet<(u64, u64)>,
}

impl Walk {
    /// Visits a name and everything below it. A result other than zero ends the walk.
    fn visit(&mut self, path: &CString, base: usize, level: c_int) -> c_int {
        let result = self.visit_one(path, base, level);
        if self.flags & ACTIONS != 0 && result == SKIP_SUBTREE { 0 } else { result }
    }

    fn visit_one(&mut self, path: &CString, base: usize, level: c_int) -> c_int {
        // SAFETY: all zero is a valid `stat`.
        let mut status: stat64 = unsafe { std::mem::zeroed() };
        let mut position = Position { base: base as c_int, level };
        let physical = self.flags & PHYSICAL != 0;
        // With `FTW_CHDIR`, the working directory is the one that holds the name.
        let name = if self.flags & CHANGE_DIRECTORY != 0 { base } else { 0 };
        // SAFETY: the name is the end of the string; the structure is a local one.
        let (name, found) = unsafe {
            let name = path.as_ptr().add(name);
            (
                name,
                if physical { lstat(name, &raw mut status) } else { stat(name, &raw mut status) },
            )
        };
        let kind = if found == 0 {
            match status.st_mode & libc::S_IFMT {
                libc::S_IFDIR => DIRECTORY,
                libc::S_IFLNK => LINK,
                _ => FILE,
            }
        } else if !matches!(errno(), libc::EACCES | libc::ENOENT) {
            return -1;
        } else {
            // SAFETY: the name is a string; the structure is a local one.
            let is_name = !physical && unsafe { lstat(name, &raw mut status) } == 0;
            let is_link = is_name && status.st_mode & libc::S_IFMT == libc::S_IFLNK;
            if is_link && !self.is_old { DANGLING } else { NO_STATUS }
        };
        if kind != NO_STATUS && self.flags & MOUNT != 0 && status.st_dev != self.device {
            return 0;
        }
        if kind != DIRECTORY {
            // SAFETY: the program passes the function; path, status and position outlive the call.
            return unsafe {
                (self.visit)(path.as_ptr(), &raw const status, kind, &raw mut position)
            };
        }
        let identity = (status.st_dev, status.st_ino);
        if !physical && !self.visited.insert(identity) {
            return 0;
        }
        self.directory(path, name, &status, &mut position)
    }

    fn directory(
        &mut self,
        path: &CString,
        name: *const c_char,
        status: &stat64,
        position: &mut Position,
    ) -> c_int {
        // SAFETY: the name is a string.
        let stream = unsafe { opendir(name) };
        if stream.is_null() {
            if errno() != libc::EACCES {
                return -1;
            }
            // SAFETY: the program passes the function; its arguments outlive the call.
            return unsafe { (self.visit)(path.as_ptr(), status, UNREADABLE, position) };
        }
        let mut result = 0;
        if self.flags & DEPTH_FIRST == 0 {
            // SAFETY: the program passes the function; its arguments outlive the call.
            result = unsafe { (self.visit)(path.as_ptr(), status, DIRECTORY, position) };
        }
        let mut names: Vec<CString> = Vec::new();
        loop {
            // SAFETY: `opendir` has returned the stream.
            let entry = unsafe { readdir(stream) };
            if entry.is_null() || result != 0 {
                break;
            }
            // SAFETY: the entry is valid until the next read, and its name ends with a zero byte.
            let entry = unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) };
            if !matches!(entry.to_bytes(), b"." | b"..") {
                names.push(entry.to_owned());
            }
        }
        // SAFETY: `opendir` has returned the stream, and nothing uses it any more.
        unsafe { closedir(stream) };
        if result != 0 {
            return result;
        }
        let changes = self.flags & CHANGE_DIRECTORY != 0;
        let Ok(back) = (if changes { Back::enter(name, self.flags) } else { Ok(Back::Stay) })
        else {
            return -1;
        };
        for name in names {
            let bytes = path.as_bytes();
            let slash: &[u8] = if bytes.ends_with(b"/") { b"" } else { b"/" };
            let base = bytes.len() + slash.len();
            let Ok(full) = CString::new([bytes, slash, name.as_bytes()].concat()) else { continue };
            result = self.visit(&full, base, position.level + 1);
            if result != 0 {
                break;
            }
        }
        if self.flags & ACTIONS != 0 && result == SKIP_SIBLINGS {
            result = 0;
        }
        if !back.go() && result == 0 {
            return -1;
        }
        if self.flags & DEPTH_FIRST != 0 && result == 0 {
            // SAFETY: the program passes the function; its arguments outlive the call.
            result = unsafe { (self.visit)(path.as_ptr(), status, DIRECTORY_AFTER, position) };
        }
        result
    }
}

/// How a walk with `FTW_CHDIR` returns from a directory.
enum Back {
    /// It never entered it.
    Stay,
    /// By `..`.
    Up,
    /// By a descriptor of the directory that it came from, since `..` leads elsewhere behind a symbolic link.
    To(c_int),
}

impl Back {
    /// Makes `name` the working directory.
    fn enter(name: *const c_char, flags: c_int) -> Result<Self, ()> {
        let open = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a constant path.
        let here = (flags & PHYSICAL == 0).then(|| unsafe { files::open(c".".as_ptr(), open, 0) });
        let back = match here {
            Some(here @ 0..) => Self::To(here),
            // Out of descriptors in a deep tree.
            _ => Self::Up,
        };
        // SAFETY: a string.
        if unsafe { chdir(name) } != 0 {
            back.close();
            return Err(());
        }
        Ok(back)
    }

    /// Returns to it; false if it can no longer be reached.
    fn go(self) -> bool {
        // SAFETY: a constant path, a descriptor of ours.
        let gone = unsafe {
            match self {
                Self::Stay => 0,
                Self::Up => chdir(c"..".as_ptr()),
                Self::To(here) => fchdir(here),
            }
        };
        self.close();
        gone == 0
    }

    fn close(&self) {
        if let Self::To(here) = *self {
            let error = errno();
            // SAFETY: a descriptor of ours.
            unsafe { files::close(here) };
            set_errno(error);
        }
    }
}

unsafe fn walk(path: *const c_char, visit: Visit, flags: c_int, is_old: bool) -> c_int {
    // SAFETY: the address is valid, so the program passes a string.
    let mut text = unsafe { CStr::from_ptr(path) }.to_bytes().to_vec();
    while text.len() > 1 && text.ends_with(b"/") {
        text.pop();
    }
    let base = text.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
    let Ok(path) = CString::new(text) else { return finish(Err(libc::EINVAL)) };
    // SAFETY: all zero is a valid `stat`; the strings end with zero bytes.
    unsafe {
        let mut status: stat64 = std::mem::zeroed();
        if lstat(path.as_ptr(), &raw mut status) != 0 {
            return -1;
        }
        let mut walk =
            Walk { visit, flags, is_old, device: status.st_dev, visited: BTreeSet::new() };
        let mut whole = || match walk.visit(&path, base, 0) {
            SKIP_SIBLINGS if flags & ACTIONS != 0 => 0,
            result => result,
        };
        if flags & CHANGE_DIRECTORY == 0 {
            return whole();
        }
        let here = files::open(c".".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY, 0);
        if here < 0 {
            return -1;
        }
        let parent = CString::new(&path.as_bytes()[..base]).unwrap_or_default();
        let mut result = 0;
        if base > 0 {
            result = chdir(parent.as_ptr());
        }
        if result == 0 {
            result = whole();
        }
        let error = errno();
        fchdir(here);
        files::close(here);
        set_errno(error);
        result
    }
}

pub(crate) unsafe fn ftw(path: *const c_char, visit: *const c_void, room: c_int) -> c_int {
    // SAFETY: the program passes valid arguments; a function of three arguments ignores the fourth.
    unsafe {
        if !leads_to_us(libc::AT_FDCWD, path, true) {
            return real::ftw(path, visit, room);
        }
        walk(path, std::mem::transmute::<*const c_void, Visit>(visit), 0, true)
    }
}

pub(crate) unsafe fn nftw(
    path: *const c_char,
    visit: *const c_void,
    room: c_int,
    flags: c_int,
) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        let leaves = flags & CHANGE_DIRECTORY != 0 && working::is_remote();
        let is_ours = leads_to_us(libc::AT_FDCWD, path, true) || leaves && place::is_address(path);
        if !is_ours {
            return real::nftw(path, visit, room, flags);
        }
        const KNOWN: c_int = PHYSICAL | MOUNT | CHANGE_DIRECTORY | DEPTH_FIRST | ACTIONS;
        if flags & !KNOWN != 0 {
            return finish(Err(libc::EINVAL));
        }
        walk(path, std::mem::transmute::<*const c_void, Visit>(visit), flags, false)
    }
}
