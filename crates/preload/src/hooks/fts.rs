//! `fts` for remote trees, as libc's own opens directories internally.
//!
//! The library handles a stream as a whole if one of its roots is remote, or if libc would leave a remote
//! working directory, which it also does internally. It never changes the working directory: access paths
//! are relative to where the walk began, even without `FTS_NOCHDIR`. Structures are those of `<fts.h>`,
//! semantics those of its manual page.

mod entries;

use super::directories::{closedir, opendir, readdir};
use super::leads_to_us;
use super::status::{lstat, stat};
use crate::guard::{errno, inside, set_errno};
use crate::table::real;
use crate::working;
use entries::*;
pub(crate) use entries::{Compare, Entry, Stream};
use libc::{c_char, c_int, c_ushort, c_void};
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Addresses of the library's own streams.
static STREAMS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns true if the program has streams of remote trees.
pub(super) fn has_streams() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

fn is_ours(stream: *mut Stream) -> bool {
    has_streams()
        && inside(|| {
            let streams = STREAMS.lock().map_err(|_| libc::EIO)?;
            Ok(streams.contains(&(stream as usize)))
        })
        .unwrap_or(false)
}

/// Sets the path of the stream: keeps its first `keep` bytes and appends `rest`. Returns false if it is too
/// long.
unsafe fn set_path(stream: *mut Stream, keep: usize, rest: &[u8]) -> bool {
    if keep + rest.len() > PATH_MAX {
        return false;
    }
    // SAFETY: the buffer holds PATH_MAX bytes and a zero byte.
    unsafe {
        let to = (*stream).path.cast::<u8>().add(keep);
        std::ptr::copy_nonoverlapping(rest.as_ptr(), to, rest.len());
        *to.add(rest.len()) = 0;
    }
    true
}

/// Returns where the names of entries of this directory begin in the path, after a slash.
unsafe fn begin_of_names(stream: *mut Stream, directory: *mut Entry) -> usize {
    // SAFETY: the path of a directory that is being walked is in the buffer.
    unsafe {
        let length = usize::from((*directory).path_length);
        let ends = length > 0 && *(*stream).path.add(length - 1) == b'/' as c_char;
        if ends { length } else { length + 1 }
    }
}

/// Sets the stream's path to that of an entry below a root. Returns false if it is too long.
unsafe fn enter_path(stream: *mut Stream, entry: *mut Entry) -> bool {
    // SAFETY: the entry and its parent belong to the stream.
    unsafe {
        let begin = begin_of_names(stream, (*entry).parent);
        set_path(stream, begin - 1, b"/") && set_path(stream, begin, name_of(entry))
    }
}

/// Gets the attributes of an entry whose path is the stream's, and returns its `fts_info`.
unsafe fn look(stream: *mut Stream, entry: *mut Entry, follow: bool) -> u16 {
    // SAFETY: the entry and its parents belong to the stream.
    unsafe {
        let status = (*entry).status;
        let path = (*entry).access_path;
        let before = errno();
        let follows = follow || (*stream).options & LOGICAL != 0;
        let found = if follows { stat(path, status) } else { lstat(path, status) };
        if found != 0 {
            let error = errno();
            if follows && lstat(path, status) == 0 {
                set_errno(before);
                return info::DANGLING;
            }
            (*entry).errno = error;
            *status = std::mem::zeroed();
            return info::NO_STATUS;
        }
        match (*status).st_mode & libc::S_IFMT {
            libc::S_IFDIR => {
                (*entry).device = (*status).st_dev;
                (*entry).inode = (*status).st_ino;
                (*entry).links = (*status).st_nlink;
                if matches!(name_of(entry), b"." | b"..") {
                    return info::DOT;
                }
                let mut above = (*entry).parent;
                while !above.is_null() && (*above).level >= ROOT {
                    if ((*above).inode, (*above).device) == ((*entry).inode, (*entry).device) {
                        (*entry).cycle = above;
                        return info::CYCLE;
                    }
                    above = (*above).parent;
                }
                info::DIRECTORY
            }
            libc::S_IFLNK => info::LINK,
            libc::S_IFREG => info::FILE,
            _ => info::DEFAULT,
        }
    }
}

/// Gets the attributes of an entry again, following its link.
unsafe fn look_behind(stream: *mut Stream, entry: *mut Entry) {
    // SAFETY: the entry belongs to the stream.
    unsafe {
        (*entry).errno = 0;
        (*entry).info = look(stream, entry, true);
        if (*entry).info == info::DIRECTORY {
            (*entry).flags |= LINK_FOLLOWED;
        }
    }
}

/// Sorts a list in the program's order.
unsafe fn sorted(stream: *mut Stream, list: *mut Entry) -> *mut Entry {
    type Plain = unsafe extern "C" fn(*const c_void, *const c_void) -> c_int;
    // SAFETY: the list holds entries; the program's function takes the addresses of two elements.
    unsafe {
        let Some(compare) = (*stream).compare else { return list };
        let taken = inside(|| {
            let mut entries = Vec::new();
            let mut entry = list;
            while !entry.is_null() {
                entries.push(entry);
                entry = (*entry).next;
            }
            Ok(entries)
        });
        let Ok(mut entries) = taken else { return list };
        let compare = std::mem::transmute::<Compare, Plain>(compare);
        let bytes = size_of::<*mut Entry>();
        libc::qsort(entries.as_mut_ptr().cast(), entries.len(), bytes, Some(compare));
        let mut next = null_mut();
        for entry in entries.iter().rev().copied() {
            (*entry).next = next;
            next = entry;
        }
        let _ = inside(|| {
            drop(entries);
            Ok(())
        });
        next
    }
}

/// Lists the current directory. Returns null if it is empty or cannot be listed; if it is being walked, its
/// `fts_info` then tells which.
unsafe fn list(stream: *mut Stream, is_walked: bool) -> *mut Entry {
    // SAFETY: the stream is open, and its current entry is a directory whose path is the stream's.
    unsafe {
        let directory = (*stream).current;
        let length = usize::from((*directory).path_length);
        let open = opendir((*directory).access_path);
        if open.is_null() {
            if is_walked {
                (*directory).info = info::UNREADABLE;
                (*directory).errno = errno();
            }
            return null_mut();
        }
        let begin = begin_of_names(stream, directory);
        let (mut first, mut last): (*mut Entry, *mut Entry) = (null_mut(), null_mut());
        let failed = loop {
            set_errno(0);
            let found = readdir(open);
            if found.is_null() {
                break errno();
            }
            let name = CStr::from_ptr((*found).d_name.as_ptr()).to_bytes();
            if matches!(name, b"." | b"..") && (*stream).options & SEE_DOT == 0 {
                continue;
            }
            let entry = new_entry(stream, name, (*directory).level + 1);
            if entry.is_null() {
                break libc::ENOMEM;
            }
            (*entry).parent = directory;
            (*entry).path_length = (begin + name.len()).min(PATH_MAX) as c_ushort;
            let is_directory = matches!((*found).d_type, libc::DT_DIR | libc::DT_UNKNOWN);
            // As in libc, a walk that follows links gets all attributes: only they tell what is behind one.
            let can_do_without = NO_STATUS | PHYSICAL;
            let wants = (*stream).options & can_do_without != can_do_without || is_directory;
            if !set_path(stream, begin - 1, b"/") || !set_path(stream, begin, name) {
                free(entry);
                break libc::ENAMETOOLONG;
            }
            (*entry).info = if (*stream).options & NAME_ONLY != 0 || !wants {
                info::NO_STATUS_ASKED
            } else {
                look(stream, entry, false)
            };
            if last.is_null() {
                first = entry;
            } else {
                (*last).next = entry;
            }
            last = entry;
        };
        closedir(open);
        set_path(stream, length, b"");
        if failed != 0 {
            free_list(first);
            (*directory).info = info::ERROR;
            (*directory).errno = failed;
            if !is_walked {
                (*stream).options |= STOP;
            }
            set_errno(failed);
            return null_mut();
        }
        if first.is_null() && is_walked {
            (*directory).info = info::DIRECTORY_AFTER;
        }
        sorted(stream, first)
    }
}

pub(crate) unsafe fn open(
    roots: *const *mut c_char,
    options: c_int,
    compare: Option<Compare>,
) -> *mut Stream {
    // SAFETY: the program passes a list of strings that ends with null.
    unsafe {
        let mut at = roots;
        let leaves = options & NO_CHANGE == 0 && working::is_remote();
        let mut is_remote = false;
        while !(*at).is_null() {
            is_remote |= leaves || leads_to_us(libc::AT_FDCWD, *at, true);
            at = at.add(1);
        }
        if !is_remote {
            return real::fts_open(roots, options, compare);
        }
        if options & !OPTIONS != 0 {
            set_errno(libc::EINVAL);
            return null_mut();
        }
        let made = inside(|| {
            let path = Box::into_raw(vec![0u8; PATH_MAX + 1].into_boxed_slice());
            let stream = Box::into_raw(Box::new(std::mem::zeroed::<Stream>()));
            (*stream).path = path.cast();
            Ok(stream)
        });
        let Ok(stream) = made else { return null_mut() };
        (*stream).options = options;
        (*stream).compare = compare;
        (*stream).root = -1;
        match roots_of(stream, roots) {
            Ok(()) => {
                let noted = inside(|| {
                    STREAMS.lock().map_err(|_| libc::EIO)?.push(stream as usize);
                    Ok(())
                });
                if noted.is_ok() {
                    COUNT.fetch_add(1, Ordering::Release);
                    return stream;
                }
                // Not with `close`, which takes a stream that is not in the list for libc's.
                release(stream);
                set_errno(libc::EIO);
            }
            Err(error) => {
                release(stream);
                set_errno(error);
            }
        }
        null_mut()
    }
}

/// Makes the entries of the roots, and the one before them with which the walk begins.
unsafe fn roots_of(stream: *mut Stream, roots: *const *mut c_char) -> Result<(), i32> {
    // SAFETY: the program passes a list of strings that ends with null.
    unsafe {
        let parent = new_entry(stream, b"", ROOT_PARENT);
        (*stream).current = new_entry(stream, b"", ROOT);
        if parent.is_null() || (*stream).current.is_null() {
            return Err(libc::ENOMEM);
        }
        (*(*stream).current).info = info::INIT;
        (*(*stream).current).parent = parent;
        let (mut at, mut last) = (roots, null_mut::<Entry>());
        while !(*at).is_null() {
            let name = CStr::from_ptr(*at).to_bytes();
            if name.is_empty() {
                return Err(libc::ENOENT);
            }
            if !set_path(stream, 0, name) {
                return Err(libc::ENAMETOOLONG);
            }
            let entry = new_entry(stream, name, ROOT);
            if entry.is_null() {
                return Err(libc::ENOMEM);
            }
            (*entry).parent = parent;
            (*entry).path_length = name.len() as c_ushort;
            (*entry).info = look(stream, entry, (*stream).options & COMMAND_LINE_FOLLOW != 0);
            if (*entry).info == info::DOT {
                (*entry).info = info::DIRECTORY;
            }
            if last.is_null() {
                (*(*stream).current).next = entry;
            } else {
                (*last).next = entry;
            }
            last = entry;
            at = at.add(1);
        }
        let first = (*(*stream).current).next;
        (*(*stream).current).next = sorted(stream, first);
        Ok(())
    }
}

pub(crate) unsafe fn read(stream: *mut Stream) -> *mut Entry {
    if !is_ours(stream) {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fts_read(stream) };
    }
    // SAFETY: the stream is the library's own, and the program uses it from one thread at a time.
    unsafe {
        let current = (*stream).current;
        if current.is_null() || (*stream).options & STOP != 0 {
            return null_mut();
        }
        let instruction = std::mem::replace(&mut (*current).instruction, NOTHING);
        if instruction == AGAIN {
            (*current).errno = 0;
            (*current).info = look(stream, current, false);
            return current;
        }
        let is_link = matches!((*current).info, info::LINK | info::DANGLING);
        if instruction == FOLLOW && is_link {
            look_behind(stream, current);
            return current;
        }
        if (*current).info == info::DIRECTORY {
            let elsewhere =
                (*stream).options & ONE_DEVICE != 0 && (*current).device != (*stream).device;
            if instruction == SKIP || elsewhere {
                free_list(std::mem::replace(&mut (*stream).children, null_mut()));
                (*current).info = info::DIRECTORY_AFTER;
                return current;
            }
            let mut below = std::mem::replace(&mut (*stream).children, null_mut());
            if (*stream).options & NAME_ONLY != 0 {
                (*stream).options &= !NAME_ONLY;
                free_list(std::mem::replace(&mut below, null_mut()));
            }
            if below.is_null() {
                below = list(stream, true);
            }
            return if below.is_null() { current } else { arrive(stream, below) };
        }
        leave(stream, current)
    }
}

/// Leaves a finished entry and goes on to the next one.
unsafe fn leave(stream: *mut Stream, mut current: *mut Entry) -> *mut Entry {
    // SAFETY: the entry is the current one of a stream of the library.
    unsafe {
        loop {
            let done = current;
            current = (*done).next;
            if current.is_null() {
                current = (*done).parent;
                free(done);
                (*stream).current = current;
                if (*current).level == ROOT_PARENT {
                    free(current);
                    (*stream).current = null_mut();
                    set_errno(0);
                    return null_mut();
                }
                set_path(stream, usize::from((*current).path_length), b"");
                let failed = (*current).errno != 0;
                (*current).info = if failed { info::ERROR } else { info::DIRECTORY_AFTER };
                return current;
            }
            free(done);
            (*stream).current = current;
            if (*current).level == ROOT {
                begin_root(stream, current);
                return current;
            }
            if (*current).instruction != SKIP {
                arrive(stream, current);
                if std::mem::replace(&mut (*current).instruction, NOTHING) == FOLLOW {
                    look_behind(stream, current);
                }
                return current;
            }
        }
    }
}

/// Goes to an entry below a root. As in libc, an instruction for the first entry of a directory is carried
/// out when the stream is read next.
unsafe fn arrive(stream: *mut Stream, entry: *mut Entry) -> *mut Entry {
    // SAFETY: the entry belongs to a stream of the library, and its parent is the directory being walked.
    unsafe {
        (*stream).current = entry;
        // The path fitted when the directory was listed.
        let _ = enter_path(stream, entry);
        entry
    }
}

/// Goes to a root: its path becomes the stream's, and its name is cut to the last part of the path.
unsafe fn begin_root(stream: *mut Stream, entry: *mut Entry) {
    // SAFETY: the entry belongs to a stream of the library, and its name is the whole path.
    unsafe {
        let name = name_of(entry);
        set_path(stream, 0, name);
        (*entry).path_length = name.len() as c_ushort;
        let slash = name.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
        if slash > 0 && name.len() > 1 {
            let rest = name.len() - slash;
            let to = (&raw mut (*entry).name).cast::<u8>();
            // Includes the zero byte.
            std::ptr::copy(to.add(slash), to, rest + 1);
            (*entry).name_length = rest as c_ushort;
        }
        (*stream).device = (*entry).device;
    }
}

pub(crate) unsafe fn children(stream: *mut Stream, options: c_int) -> *mut Entry {
    if !is_ours(stream) {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fts_children(stream, options) };
    }
    if options != 0 && options != NAME_ONLY {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    set_errno(0);
    // SAFETY: the stream is the library's own, and the program uses it from one thread at a time.
    unsafe {
        let current = (*stream).current;
        if current.is_null() || (*stream).options & STOP != 0 {
            return null_mut();
        }
        if (*current).info == info::INIT {
            return (*current).next;
        }
        if (*current).info != info::DIRECTORY {
            return null_mut();
        }
        free_list(std::mem::replace(&mut (*stream).children, null_mut()));
        (*stream).options = (*stream).options & !NAME_ONLY | options;
        (*stream).children = list(stream, false);
        (*stream).children
    }
}

pub(crate) unsafe fn set(stream: *mut Stream, entry: *mut Entry, instruction: c_int) -> c_int {
    if !is_ours(stream) {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fts_set(stream, entry, instruction) };
    }
    if !(0..=c_int::from(SKIP)).contains(&instruction) {
        set_errno(libc::EINVAL);
        return 1;
    }
    // SAFETY: the program passes an entry of this stream, which is the library's own.
    unsafe { (*entry).instruction = instruction as u16 };
    0
}

pub(crate) unsafe fn close(stream: *mut Stream) -> c_int {
    if !is_ours(stream) {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::fts_close(stream) };
    }
    let _ = inside(|| {
        STREAMS.lock().map_err(|_| libc::EIO)?.retain(|one| *one != stream as usize);
        Ok(())
    });
    COUNT.fetch_sub(1, Ordering::Release);
    // SAFETY: the stream is the library's own, and the program no longer uses it.
    unsafe { release(stream) };
    0
}

unsafe fn release(stream: *mut Stream) {
    // SAFETY: nothing uses the stream any more; all entries of the walk hang on the current one and its
    // parents.
    unsafe {
        free_list((*stream).children);
        let mut entry = (*stream).current;
        while !entry.is_null() {
            let parent = (*entry).parent;
            free_list(entry);
            entry = parent;
        }
        let _ = inside(|| {
            let path = (*stream).path.cast::<u8>();
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(path, PATH_MAX + 1)));
            drop(Box::from_raw(stream));
            Ok(())
        });
    }
}
