//! Hooks that open, close and duplicate descriptors, and make temporary files.

use super::{by_path, fifos, maps, shared};
use crate::changed::Change;
use crate::descriptors::{self, New, Open};
use crate::guard::{self, finish, inside, is_inside, ours};
use crate::known::{self, Asked};
use crate::opened::{self, First, Opened};
use crate::place::{self, At, Last};
use crate::table::real;
use crate::walk::{self, Found, How};
use crate::{behind, cache, fresh, own, pool, remote, start, waits, written};
use libc::{c_char, c_int, c_uint, c_ulong, mode_t};
use std::ffi::CStr;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_client::{Attr, File};
use towline_wire::attr::attr_flag;
use towline_wire::request::{open_flag, sync_kind};

/// What the server sends along with opening a file, in the same round trip.
enum Comes {
    Data,
    Listing,
    Nothing,
}

impl Comes {
    /// Returns what a program most likely wants next from a file that it opens with these flags.
    fn with(flags: c_int) -> Self {
        const OTHERWISE: c_int =
            libc::O_ACCMODE | libc::O_PATH | libc::O_CREAT | libc::O_TRUNC | libc::O_DIRECT;
        const UNNAMED: c_int = libc::O_TMPFILE & !libc::O_DIRECTORY;
        if flags & (OTHERWISE | UNNAMED) != 0 {
            Self::Nothing
        } else if flags & libc::O_DIRECTORY != 0 {
            Self::Listing
        } else if opened::reads_what_it_opens() {
            Self::Data
        } else {
            Self::Nothing
        }
    }
}

/// Opens a remote path.
pub(crate) fn open_remote(at: &At, flags: c_int, mode: mode_t) -> Result<c_int, i32> {
    let sent = open_flag::of_this_machine(flags & !libc::O_CLOEXEC);
    // An open that creates or truncates a file must not fail afterwards for lack of a descriptor.
    let alters = open_flag::alters(sent);
    let early = alters.then(|| descriptors::reserve(flags)).transpose()?;
    let change = Change::begin(at.mount);
    let Asked { when, changes } = Asked::now();
    let what = Comes::with(flags);
    let (mut data, mut listing) = (None, None);
    // Such an open follows no link, so it is the file's own name.
    let creates = alters && flags & libc::O_CREAT != 0;
    let mut is_named = creates && flags & (libc::O_EXCL | libc::O_NOFOLLOW) != 0;
    let found = if matches!(what, Comes::Listing) { walk::open(at, sent) } else { None };
    let asked = |base: &File, path: &[u8]| {
        let file = match what {
            Comes::Data => {
                let mut memory = First::memory();
                let (file, count) = base.open_reading(path, sent, 0, &mut memory)?;
                data = count.map(|count| First::new(memory, count));
                file
            }
            Comes::Listing => {
                let attributes = walk::listings_have_attributes(at.mount);
                let (file, entries) = base.open_listing(path, sent, attributes)?;
                listing = entries;
                file
            }
            Comes::Nothing => {
                let mode = start::with_umask(mode);
                if creates && !is_named && known::is_far(at.mount) {
                    let (file, is_it) = base.open_named(path, sent, mode)?;
                    is_named = is_it;
                    file
                } else {
                    base.open(path, sent, mode)?
                }
            }
        };
        let attr = *file.attr();
        Ok((file.into_handle(), attr))
    };
    let found = match found {
        Some(found) => found,
        None => {
            let failed = |error| if alters { change.failed(error) } else { error };
            let open = || at.with(asked).map_err(failed);
            let (handle, attr) =
                if flags & libc::O_TRUNC != 0 { truncating(at, flags, open)? } else { open()? };
            if alters {
                change.opened(at, flags, &attr, is_named);
            }
            // The changes made by the open itself do not invalidate what came with it.
            let changes = changes + if alters { 2 } else { 0 };
            let (arrived, how) = (Instant::now(), How::Asked);
            known::took(at.mount, arrived.duration_since(when));
            Found { handle, attr, listing, when, changes, arrived, how }
        }
    };
    let (mount, handle) = (at.mount, found.handle);
    let reserved = match early.map_or_else(|| descriptors::reserve(flags), Ok) {
        Ok(reserved) => reserved,
        Err(error) => {
            remote::client(mount)?.close_handle(handle);
            return Err(error);
        }
    };
    if matches!(what, Comes::Listing) {
        walk::opened(at, sent, &found);
    }
    let Found { attr, listing, when, changes, arrived, how, .. } = found;
    let end = None;
    cache::opened(mount, handle, flags, &attr, Asked { when: arrived, changes });
    opened::keep(at, Opened { mount, handle, when, arrived, changes, attr, data, listing, end });
    let path = place::tidy(&at.below());
    let new = New {
        mount: at.mount,
        handle,
        inode: attr.identity(),
        mode: attr.mode,
        settles: attr.flags & attr_flag::SETTLES != 0,
        flags,
        path: &path,
    };
    let fd = descriptors::make(&new, reserved);
    if let Some(open) = descriptors::find(fd) {
        written::opened(open, &attr, arrived, changes);
        if how == How::Again {
            // The client has forgotten it.
            remote::adopted(open);
        }
        if open_flag::creates_exclusively(sent) {
            fresh::created(open, &attr);
        }
    }
    crate::stdio::take_over();
    crate::trap::arm();
    Ok(fd)
}

/// Opens a file by `open`, which makes it empty.
fn truncating(
    at: &At,
    flags: c_int,
    open: impl FnOnce() -> Result<(u64, Attr), i32>,
) -> Result<(u64, Attr), i32> {
    let which = |attr: &Attr| (at.mount, attr.identity());
    let before = || {
        let attr = at.with(|base, path| base.stat_path(path, flags & libc::O_NOFOLLOW == 0));
        // If it cannot be found, opening it tells why.
        Ok(attr.ok().map(|attr| which(&attr)))
    };
    let call = || open().map(|(handle, attr)| (which(&attr), (handle, attr)));
    let read = |(handle, _): &(u64, Attr), to: &mut [u8], from| {
        remote::with_handle(at.mount, *handle, |file| shared::read_from(file, to, from))
    };
    // However long it was, everything goes.
    maps::resizing(0, before, || Ok(0), call, read)
}

/// Returns the remote file whose descriptor this path names, such as `/dev/fd/N`, `/proc/self/fd/N` or
/// `/dev/stdin`.
pub(crate) unsafe fn named_descriptor(path: *const c_char) -> Option<Open> {
    // SAFETY: the program passes valid arguments.
    let at = unsafe { place::through_descriptor(path, true) }?;
    at.directory.filter(|_| at.path.is_empty())
}

pub(crate) unsafe fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { openat(libc::AT_FDCWD, path, flags, mode) }
}

pub(crate) unsafe fn openat(at: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        const NEW: c_int = libc::O_CREAT | libc::O_EXCL;
        // With `O_PATH`, nothing is created.
        let ignored = if flags & libc::O_PATH == 0 { 0 } else { NEW };
        let last = match flags & (libc::O_NOFOLLOW | NEW) & !ignored {
            0 | libc::O_EXCL => Last::Followed,
            libc::O_CREAT => Last::ToCreate,
            _ => Last::Stays,
        };
        // The name of a descriptor: its file is opened once more, with an offset of its own.
        let again = place::through_descriptor(path, last != Last::Stays);
        if let Some(at) = again.filter(|at| at.path.is_empty()) {
            return ours(|| open_remote(&at, flags & !NEW, mode));
        }
        let local = |at, path| {
            let fd = real::openat(at, path, flags, mode);
            descriptors::forget(fd);
            fd
        };
        let fd = by_path(at, path, last, local, |at| open_remote(at, flags, mode));
        if fd < 0 && guard::errno() == libc::ENXIO && start::state().is_some() {
            return fifos::open(at, path, flags);
        }
        fd
    }
}

pub(crate) unsafe fn open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { openat(libc::AT_FDCWD, path, flags, 0) }
}

pub(crate) unsafe fn openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { openat(at, path, flags, 0) }
}

pub(crate) unsafe fn creat(path: *const c_char, mode: mode_t) -> c_int {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    // SAFETY: the program passes valid arguments.
    unsafe { openat(libc::AT_FDCWD, path, flags, mode) }
}

pub(crate) unsafe fn close(fd: c_int) -> c_int {
    if descriptors::own_at(fd).is_some() {
        if !is_inside() {
            return finish(Err(libc::EBADF));
        }
        descriptors::forget(fd);
    }
    if descriptors::find(fd).is_some() {
        super::maps::closing(fd);
        let settled = inside(|| match descriptors::last_of(fd) {
            Some(open) => {
                pool::closing(open, fd);
                behind::closing(open).and(fresh::closing(open)).and_then(|()| stored(open))
            }
            None => Ok(()),
        });
        descriptors::forget(fd);
        if settled.is_err() {
            // SAFETY: the program passes valid arguments. As with the kernel, an error does not keep the
            // descriptor open.
            unsafe { real::close(fd) };
            return finish(settled.map(|()| 0));
        }
    } else {
        descriptors::forget(fd);
    }
    // SAFETY: the program passes valid arguments.
    unsafe { real::close(fd) }
}

/// Reports what the file system could not store, if it tells only when a file is closed.
fn stored(open: Open) -> Result<(), i32> {
    match open.entry.settles.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ if remote::check_writable(open).is_err() => Ok(()),
        _ => remote::with(open, |file| file.sync(sync_kind::SETTLE)),
    }
}

pub(crate) unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const UNSHARE: c_int = 2;
    const CLOEXEC: c_int = 4;
    // The kernel closes nothing if it refuses the arguments.
    if start::state().is_none() || first > last || flags & !(UNSHARE | CLOEXEC) != 0 {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::close_range(first, last, flags) };
    }
    if flags & CLOEXEC == 0 {
        for (fd, _) in descriptors::all(first, last) {
            descriptors::forget(fd);
        }
    }
    // Skips the library's own descriptors.
    for (first, last) in own::around(first, last) {
        // SAFETY: the program passes valid arguments.
        let result = unsafe { real::close_range(first, last, flags) };
        if result != 0 {
            return result;
        }
    }
    0
}

pub(crate) unsafe fn closefrom(first: c_int) {
    // SAFETY: the program passes valid arguments.
    unsafe { close_range(first.max(0) as u32, u32::MAX, 0) };
}

pub(crate) unsafe fn dup(fd: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { duplicate(fd, || real::dup(fd)) }
}

/// Runs a call that makes another descriptor for the file of `fd`.
fn duplicate(fd: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let is_remote = descriptors::find(fd).is_some();
    undisturbed(is_remote, || descriptors::duplicate(fd, call))
}

/// Runs a call that puts a duplicate of `from` in the place of `to`.
fn replace(from: c_int, to: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if !is_inside() && start::state().is_some() && own::may_have(to) {
        // No thread may use the library's descriptor there, or take the number anew, before the program has
        // it.
        return ours(|| {
            waits::alone(
                || descriptors::own_at(to).is_some(),
                || {
                    own::make_way(to);
                    let replaced = done(descriptors::replace(from, to, call));
                    remote::take_over_locks();
                    replaced
                },
            )
        });
    }
    let is_remote = descriptors::find(from).is_some() || descriptors::find(to).is_some();
    undisturbed(is_remote, || descriptors::replace(from, to, call))
}

/// Runs `work`. If something remote is involved, no fork by another thread and no signal handler comes
/// between the kernel's part and the library's.
fn undisturbed(is_remote: bool, work: impl FnOnce() -> c_int) -> c_int {
    if is_remote { ours(|| done(work())) } else { work() }
}

/// Converts the result of a libc function.
fn done(result: c_int) -> Result<c_int, i32> {
    if result < 0 { Err(guard::errno()) } else { Ok(result) }
}

pub(crate) unsafe fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if from == to {
            return real::dup2(from, to);
        }
        replace(from, to, || real::dup2(from, to))
    }
}

pub(crate) unsafe fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if from == to {
            return real::dup3(from, to, flags);
        }
        replace(from, to, || real::dup3(from, to, flags))
    }
}

pub(crate) unsafe fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // Programs ask which numbers are open, and then count them or let their children have them.
    if descriptors::own_at(fd).is_some() && !is_inside() {
        return finish(Err(libc::EBADF));
    }
    let Some(open) = descriptors::find(fd) else {
        // SAFETY: the program passes valid arguments.
        let result = unsafe { real::fcntl(fd, command, argument) };
        if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) && result >= 0 {
            descriptors::forget(result);
        }
        return result;
    };
    const CHANGEABLE: c_int = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
    let is_of_descriptor = matches!(
        command,
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_GETFL | libc::F_GETFD | libc::F_SETFD
    );
    if !is_of_descriptor && remote::is_path(open) {
        return finish(Err(libc::EBADF));
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: the program passes valid arguments.
            unsafe { duplicate(fd, || real::fcntl(fd, command, argument)) }
        }
        libc::F_GETFL => {
            let flags = open.entry.flags.load(Ordering::Relaxed) as c_int;
            const CREATION: c_int = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_NOCTTY;
            // libc's `O_LARGEFILE` is zero on 64-bit machines.
            const LARGE: c_int = if cfg!(target_arch = "aarch64") { 0o400_000 } else { 0o100_000 };
            const OF_PATHS: c_int = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
            if flags & libc::O_PATH == 0 { flags & !CREATION | LARGE } else { flags & OF_PATHS }
        }
        libc::F_SETFL => {
            ours(|| {
                // What is written meanwhile uses the old flags or the new ones.
                let _lock = remote::lock_offset(open)?;
                behind::settle_position(open);
                let old = open.entry.flags.load(Ordering::Relaxed);
                let new = old & !(CHANGEABLE as u32) | (argument as c_int & CHANGEABLE) as u32;
                open.entry.flags.store(new, Ordering::Relaxed);
                if old & libc::O_APPEND as u32 != 0 && open.entry.is_written() {
                    // Others may have appended if this process was stopped.
                    let _ = behind::settle(open.entry.mount.load(Ordering::Relaxed) as usize);
                }
                Ok(0)
            })
        }
        libc::F_SETLK
        | libc::F_SETLKW
        | libc::F_GETLK
        | libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW
        | libc::F_OFD_GETLK => {
            // SAFETY: the argument of these commands is the address of a `struct flock`.
            unsafe { super::locks::fcntl(open, command, argument as *mut libc::flock) }
        }
        libc::F_ADD_SEALS if remote::check_writable(open).is_err() => finish(Err(libc::EPERM)),
        // Only files without a name have seals.
        libc::F_SETLEASE | libc::F_NOTIFY | libc::F_ADD_SEALS | libc::F_GET_SEALS => {
            finish(Err(libc::EINVAL))
        }
        // SAFETY: the program passes valid arguments. The flag is that of the placeholder's descriptor.
        libc::F_GETFD | libc::F_SETFD => unsafe { real::fcntl(fd, command, argument) },
        _ => {
            // The command may leave its mark on the placeholder, which must then end with the file
            // (`pool.rs`).
            open.entry.shared.store(1, Ordering::Relaxed);
            // SAFETY: the program passes valid arguments.
            unsafe { real::fcntl(fd, command, argument) }
        }
    }
}

const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
const TRIES: u32 = 1000;

/// Fills in the six X of a template until `make` does not fail with `EEXIST`. Returns `None` if there are
/// no prefixes; libc's own function then does the work. Local names are made here, too: links may lead
/// across the border.
unsafe fn temporary(path: *mut c_char, suffix: c_int, make: impl Fn() -> c_int) -> Option<c_int> {
    if start::mounts().is_empty() || !place::is_address(path) || is_inside() {
        return None;
    }
    // SAFETY: the address is valid, so the program passes a writable string.
    let length = unsafe { CStr::from_ptr(path) }.count_bytes();
    let begin = usize::try_from(suffix).ok().and_then(|suffix| length.checked_sub(6 + suffix));
    // SAFETY: the place is within the string.
    let room = begin.map(|begin| unsafe { path.add(begin) }.cast::<[u8; 6]>());
    // SAFETY: the place is within the string.
    let Some(room) = room.filter(|room| unsafe { **room } == *b"XXXXXX") else {
        return Some(finish(Err(libc::EINVAL)));
    };
    let before = guard::errno();
    for _ in 0..TRIES {
        let mut random = [0u8; 6];
        let arguments = [random.as_mut_ptr() as usize, 6, 0, 0, 0, 0];
        // SAFETY: the target has six bytes.
        if let Err(error) = unsafe { guard::checked(libc::SYS_getrandom, arguments) } {
            return Some(finish(Err(error)));
        }
        let letter = |byte| LETTERS[usize::from(byte) % LETTERS.len()];
        // SAFETY: the place is within the string, which the program lets this function change.
        unsafe { *room = random.map(letter) };
        let made = make();
        if made >= 0 {
            guard::set_errno(before);
        } else if guard::errno() == libc::EEXIST {
            continue;
        }
        return Some(made);
    }
    Some(finish(Err(libc::EEXIST)))
}

pub(crate) unsafe fn mkostemps(path: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    let all = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | flags & !libc::O_ACCMODE;
    // SAFETY: the program passes valid arguments.
    unsafe {
        match temporary(path, suffix, || open(path, all, 0o600)) {
            Some(fd) => fd,
            None => {
                let fd = real::mkostemps(path, suffix, flags);
                descriptors::forget(fd);
                fd
            }
        }
    }
}

pub(crate) unsafe fn mkstemp(path: *mut c_char) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mkostemps(path, 0, 0) }
}

pub(crate) unsafe fn mkostemp(path: *mut c_char, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mkostemps(path, 0, flags) }
}

pub(crate) unsafe fn mkstemps(path: *mut c_char, suffix: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { mkostemps(path, suffix, 0) }
}

/// Makes a name that was free when it was looked up.
pub(crate) unsafe fn mktemp(path: *mut c_char) -> *mut c_char {
    // SAFETY: the program passes a writable string; all zero is a valid `stat`.
    unsafe {
        let is_free = || {
            let mut status: libc::stat64 = std::mem::zeroed();
            if super::status::lstat(path, &raw mut status) == 0 {
                return finish(Err(libc::EEXIST));
            }
            if guard::errno() == libc::ENOENT { 0 } else { -1 }
        };
        match temporary(path, 0, is_free) {
            Some(0) => {}
            Some(_) => *path = 0,
            None => return real::mktemp(path),
        }
    }
    path
}

pub(crate) unsafe fn mkdtemp(path: *mut c_char) -> *mut c_char {
    // SAFETY: the program passes valid arguments.
    unsafe {
        match temporary(path, 0, || super::names::mkdir(path, 0o700)) {
            Some(0) => path,
            Some(_) => std::ptr::null_mut(),
            None => real::mkdtemp(path),
        }
    }
}
