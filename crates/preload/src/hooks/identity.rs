//! Changes of user and group: requests are then made on behalf of the new ones. The run's files are opened
//! to a new user, since the kernel checks who opens a placeholder.

use crate::guard::{checked, finish, inside, system_call};
use crate::table::real;
use crate::{remote, report, start};
use libc::{c_int, c_long, gid_t, uid_t};
use towline_instance::{
    KEEPER, MAPPINGS, NOTICES, PAGER, PLACEHOLDERS, PROGRAMS, RECORD, SERVER, SOCKETS, STATE,
    WORKING,
};

const NAME: &std::ffi::CStr = c"system.posix_acl_access";
/// Tags of the entries of an access control list, in the order that the kernel requires.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NOBODY: u32 = u32::MAX;

/// Opens the run's files to the user that this process is about to become.
fn admit(user: uid_t) {
    if start::state().is_none() || user == NOBODY {
        return;
    }
    let _ = inside(|| {
        // All the files exist after this.
        start::wait_for_servers();
        // The file of notices is otherwise created by the first process that has something to report.
        let _ = report::wake_keeper();
        let below = |part: &str| [start::directory(), b"/", part.as_bytes()].concat();
        let folders = ["", PLACEHOLDERS, WORKING, MAPPINGS, PROGRAMS, SOCKETS].map(below);
        let files = [KEEPER, PAGER, STATE, SERVER, RECORD].map(below);
        let notices = below(&[PLACEHOLDERS, "/", NOTICES].concat());
        let with = |permissions| move |path: Vec<u8>| (path, permissions);
        let files = files.into_iter().chain([notices]).map(with(6));
        // Without a descriptor for the turn, others that change their users now may undo this.
        let _turn = Turn::take();
        for (path, permissions) in folders.into_iter().map(with(7)).chain(files) {
            // If this fails, opening a file fails later and reports it.
            let _ = permit(&[&path[..], b"\0"].concat(), user, permissions);
        }
        if let Some(config) = start::config() {
            let _ = permit(&[&config.library[..], b"\0"].concat(), user, 5);
        }
        // The folders above, where not everybody may pass.
        let directory = start::directory();
        for end in (1..directory.len()).filter(|end| directory[*end] == b'/') {
            let path = [&directory[..end], b"\0"].concat();
            // SAFETY: all zero is a valid `stat`.
            let mut found: libc::stat = unsafe { std::mem::zeroed() };
            let (at, to) = (path.as_ptr() as usize, &raw mut found as usize);
            let arguments = [libc::AT_FDCWD as usize, at, to, 0, 0, 0];
            // SAFETY: the path ends with a zero byte; the structure outlives the call.
            let known = unsafe { checked(libc::SYS_newfstatat, arguments) }.is_ok();
            if known && found.st_mode & 1 == 0 {
                let _ = permit(&path, user, 1);
            }
        }
        Ok(())
    });
}

/// The turn to open files to a user, among all runs of this user, which share some of the files: a list is read and written as
/// a whole.
struct Turn(usize);

impl Turn {
    /// Waits for the turn.
    fn take() -> Result<Self, i32> {
        let folder = [start::directory(), b"/..\0"].concat();
        let flags = (libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) as usize;
        let arguments = [libc::AT_FDCWD as usize, folder.as_ptr() as usize, flags, 0, 0, 0];
        // SAFETY: the path ends with a zero byte.
        let turn = Self(unsafe { checked(libc::SYS_openat, arguments) }?);
        let arguments = [turn.0, libc::LOCK_EX as usize, 0, 0, 0, 0];
        loop {
            // SAFETY: the descriptor is our own.
            match unsafe { checked(libc::SYS_flock, arguments) } {
                Err(libc::EINTR) => {}
                done => return done.map(|_| turn),
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A child that another thread has forked meanwhile may have a copy of the descriptor.
        let unlock = [self.0, libc::LOCK_UN as usize, 0, 0, 0, 0];
        // SAFETY: the descriptor is our own, and nobody uses it any more.
        unsafe {
            system_call(libc::SYS_flock, unlock);
            system_call(libc::SYS_close, [self.0, 0, 0, 0, 0, 0]);
        }
    }
}

/// Opens a file or folder to a user. Only the holder of the [`Turn`] may.
fn permit(path: &[u8], user: uid_t, permissions: u16) -> Result<(), i32> {
    let (path, name) = (path.as_ptr() as usize, NAME.as_ptr() as usize);
    // SAFETY: both strings end with zero bytes; each target has the length passed to the call.
    let known = |list: &mut [u8]| unsafe {
        checked(libc::SYS_getxattr, [path, name, list.as_mut_ptr() as usize, list.len(), 0, 0])
    };
    let mut list = vec![0; known(&mut []).unwrap_or(0)];
    let known = known(&mut list).unwrap_or(0);
    let mut entries: Vec<(u16, u16, u32)> = list[..known]
        .get(4..)
        .unwrap_or_default()
        .chunks_exact(8)
        .map(|entry| {
            let half = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
            (half(0), half(2), u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]))
        })
        .collect();
    if entries.is_empty() {
        // The owner keeps the permissions with which these files and folders are made.
        let own = if permissions & 1 == 0 { 6 } else { 7 };
        entries = vec![(OWNER, own, NOBODY), (GROUP, 0, NOBODY), (OTHER, 0, NOBODY)];
    }
    if entries.iter().any(|(tag, _, id)| *tag == USER && *id == user) {
        return Ok(());
    }
    entries.retain(|(tag, _, _)| *tag != MASK);
    entries.push((USER, permissions, user));
    let mask = entries.iter().filter(|(tag, ..)| *tag == USER).fold(0, |all, entry| all | entry.1);
    entries.push((MASK, mask, NOBODY));
    entries.sort_unstable_by_key(|(tag, _, id)| (*tag, *id));
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    let arguments = [path, name, bytes.as_ptr() as usize, bytes.len(), 0, 0];
    // SAFETY: both strings end with zero bytes; the value has the length passed to the call.
    unsafe { checked(libc::SYS_setxattr, arguments) }.map(drop)
}

fn changed(result: c_int) -> c_int {
    if result == 0 && start::state().is_some() {
        let _ = inside(|| {
            remote::identity_changed();
            Ok(())
        });
    }
    result
}

pub(crate) unsafe fn setuid(user: uid_t) -> c_int {
    admit(user);
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setuid(user) })
}

pub(crate) unsafe fn seteuid(user: uid_t) -> c_int {
    admit(user);
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::seteuid(user) })
}

pub(crate) unsafe fn setreuid(user: uid_t, effective: uid_t) -> c_int {
    admit(effective);
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setreuid(user, effective) })
}

pub(crate) unsafe fn setresuid(user: uid_t, effective: uid_t, saved: uid_t) -> c_int {
    admit(effective);
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setresuid(user, effective, saved) })
}

/// Makes one of these calls for a program that made it without libc. `user` is the new effective user, or
/// [`NOBODY`].
pub(crate) unsafe fn by_call(number: c_long, user: usize, [a, b, c]: [usize; 3]) -> c_long {
    admit(user as uid_t);
    // SAFETY: the program passes valid arguments.
    let done = unsafe { checked(number, [a, b, c, 0, 0, 0]) };
    if done.is_ok() {
        changed(0);
    }
    finish(done.map(|before| before as c_long))
}

/// Sets the user for file access alone. This user, like the group of [`setfsgid`], belongs to a thread, but
/// requests of all threads use the one set last.
pub(crate) unsafe fn setfsuid(user: uid_t) -> c_int {
    admit(user);
    // SAFETY: the program passes valid arguments.
    let before = unsafe { real::setfsuid(user) };
    changed(0);
    before
}

pub(crate) unsafe fn setfsgid(group: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    let before = unsafe { real::setfsgid(group) };
    changed(0);
    before
}

pub(crate) unsafe fn setgid(group: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setgid(group) })
}

pub(crate) unsafe fn setegid(group: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setegid(group) })
}

pub(crate) unsafe fn setregid(group: gid_t, effective: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setregid(group, effective) })
}

pub(crate) unsafe fn setresgid(group: gid_t, effective: gid_t, saved: gid_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    changed(unsafe { real::setresgid(group, effective, saved) })
}
