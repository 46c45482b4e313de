//! The structures and constants of `<fts.h>`, and the memory of entries.

use crate::guard::inside;
use libc::{c_char, c_int, c_long, c_short, c_ushort, c_void, nlink_t, stat64};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::null_mut;

/// Orders entries.
pub(crate) type Compare = unsafe extern "C" fn(*const *const Entry, *const *const Entry) -> c_int;

/// `FTS`.
#[repr(C)]
pub(crate) struct Stream {
    pub(super) current: *mut Entry,
    /// The list that `fts_children` returned.
    pub(super) children: *mut Entry,
    pub(super) array: *mut *mut Entry,
    pub(super) device: u64,
    pub(super) path: *mut c_char,
    pub(super) root: c_int,
    pub(super) path_length: c_int,
    pub(super) items: c_int,
    pub(super) compare: Option<Compare>,
    pub(super) options: c_int,
}

/// `FTSENT`; its name follows.
#[repr(C)]
pub(crate) struct Entry {
    pub(super) cycle: *mut Self,
    pub(super) parent: *mut Self,
    pub(super) next: *mut Self,
    pub(super) number: c_long,
    pub(super) pointer: *mut c_void,
    pub(super) access_path: *mut c_char,
    pub(super) path: *mut c_char,
    pub(super) errno: c_int,
    pub(super) link: c_int,
    pub(super) path_length: c_ushort,
    pub(super) name_length: c_ushort,
    pub(super) inode: u64,
    pub(super) device: u64,
    pub(super) links: nlink_t,
    pub(super) level: c_short,
    pub(super) info: c_ushort,
    pub(super) flags: c_ushort,
    pub(super) instruction: c_ushort,
    pub(super) status: *mut stat64,
    pub(super) name: [c_char; 1],
}

/// An entry as allocated: the program sees `entry`, and the name that begins at its end.
#[repr(C)]
struct Whole {
    status: stat64,
    /// Room for the name, in bytes.
    room: usize,
    entry: Entry,
}

pub(super) const COMMAND_LINE_FOLLOW: c_int = 0x01;
pub(super) const LOGICAL: c_int = 0x02;
pub(super) const NO_CHANGE: c_int = 0x04;
pub(super) const NO_STATUS: c_int = 0x08;
pub(super) const PHYSICAL: c_int = 0x10;
pub(super) const SEE_DOT: c_int = 0x20;
pub(super) const ONE_DEVICE: c_int = 0x40;
pub(super) const OPTIONS: c_int = 0xff;
pub(super) const NAME_ONLY: c_int = 0x100;
pub(super) const STOP: c_int = 0x200;

/// Values of `fts_info`.
pub(super) mod info {
    pub(in super::super) const DIRECTORY: u16 = 1;
    pub(in super::super) const CYCLE: u16 = 2;
    pub(in super::super) const DEFAULT: u16 = 3;
    pub(in super::super) const UNREADABLE: u16 = 4;
    pub(in super::super) const DOT: u16 = 5;
    pub(in super::super) const DIRECTORY_AFTER: u16 = 6;
    pub(in super::super) const ERROR: u16 = 7;
    pub(in super::super) const FILE: u16 = 8;
    pub(in super::super) const INIT: u16 = 9;
    pub(in super::super) const NO_STATUS: u16 = 10;
    pub(in super::super) const NO_STATUS_ASKED: u16 = 11;
    pub(in super::super) const LINK: u16 = 12;
    pub(in super::super) const DANGLING: u16 = 13;
}

/// Values of `fts_instr`.
pub(super) const AGAIN: u16 = 1;
pub(super) const FOLLOW: u16 = 2;
pub(super) const NOTHING: u16 = 3;
pub(super) const SKIP: u16 = 4;
pub(super) const LINK_FOLLOWED: u16 = 2;

pub(super) const ROOT_PARENT: c_short = -1;
pub(super) const ROOT: c_short = 0;
/// Longest path of an entry: its length has 16 bits.
pub(super) const PATH_MAX: usize = 65535;

fn layout(name_length: usize) -> Layout {
    // At most 64 KiB and a structure: no overflow.
    Layout::from_size_align(size_of::<Whole>() + name_length, align_of::<Whole>())
        .unwrap_or(Layout::new::<Whole>())
}

/// Makes an entry with the path of the stream; returns null if there is no memory.
pub(super) unsafe fn new_entry(stream: *mut Stream, name: &[u8], level: c_short) -> *mut Entry {
    let length = name.len().min(PATH_MAX);
    // SAFETY: the layout is not empty, and has room for the name and the zero byte after it.
    unsafe {
        let whole = inside(|| Ok(alloc_zeroed(layout(length)))).unwrap_or(null_mut());
        let whole = whole.cast::<Whole>();
        if whole.is_null() {
            return null_mut();
        }
        (*whole).room = length;
        let entry = &raw mut (*whole).entry;
        (*entry).path = (*stream).path;
        (*entry).access_path = (*stream).path;
        (*entry).name_length = length as c_ushort;
        (*entry).level = level;
        (*entry).instruction = NOTHING;
        (*entry).status = &raw mut (*whole).status;
        let to = (&raw mut (*entry).name).cast::<u8>();
        std::ptr::copy_nonoverlapping(name.as_ptr(), to, length);
        entry
    }
}

pub(super) unsafe fn free(entry: *mut Entry) {
    // SAFETY: `new_entry` made it, and nothing uses it any more.
    unsafe {
        let whole = entry.byte_sub(std::mem::offset_of!(Whole, entry)).cast::<Whole>();
        let _ = inside(|| {
            dealloc(whole.cast(), layout((*whole).room));
            Ok(())
        });
    }
}

pub(super) unsafe fn free_list(mut entry: *mut Entry) {
    // SAFETY: nothing uses the entries of the list any more.
    unsafe {
        while !entry.is_null() {
            let next = (*entry).next;
            free(entry);
            entry = next;
        }
    }
}

pub(super) unsafe fn name_of<'a>(entry: *const Entry) -> &'a [u8] {
    // SAFETY: the name has this length, and lives as long as the entry.
    unsafe {
        let name = (&raw const (*entry).name).cast::<u8>();
        std::slice::from_raw_parts(name, usize::from((*entry).name_length))
    }
}
