//! `wordexp`. libc expands patterns internally and finds no remote names, so the patterns that it leaves
//! are expanded once more. This is not done if something is quoted, as it is unclear then what was meant as
//! a pattern, nor if the text has no pattern but a variable or a command put one in, as it was not meant as
//! one.

use super::{leads_to_us, trees};
use crate::table::real;
use crate::{descriptors, place, start};
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;

const APPEND: c_int = 1 << 1;
const NO_SPACE: c_int = 1;
/// Characters that make a word a pattern.
const PATTERN: &[u8] = b"*?[";

/// `wordexp_t`.
#[repr(C)]
pub(crate) struct Words {
    count: usize,
    words: *mut *mut c_char,
    offset: usize,
}

pub(crate) unsafe fn wordexp(text: *const c_char, to: *mut Words, flags: c_int) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if start::mounts().is_empty() || !place::is_address(text) {
            return real::wordexp(text, to, flags);
        }
        let letters = CStr::from_ptr(text).to_bytes();
        let has = |any: &[u8]| letters.iter().any(|letter| any.contains(letter));
        if has(b"(`") {
            descriptors::share(); // it runs commands
        }
        let has_pattern = has(PATTERN) && !has(b"'\"\\`(");
        let before = if flags & APPEND != 0 { (*to).count } else { 0 };
        match real::wordexp(text, to, flags) {
            0 if has_pattern => expand(&mut *to, before),
            result => result,
        }
    }
}

/// Replaces patterns with their matches.
unsafe fn expand(to: &mut Words, from: usize) -> c_int {
    // SAFETY: `wordexp` made the list: `offset` empty places, the words, and a null at the end, all in
    // libc's memory.
    unsafe {
        let at = |index: usize| to.words.add(to.offset + index);
        let mut all: Vec<*mut c_char> = (0..to.count).map(|index| *at(index)).collect();
        let mut index = from;
        while index < all.len() {
            let found = matches_of(all[index]);
            let count = found.as_ref().map_or(1, Vec::len);
            if let Some(found) = found {
                libc::free(all[index].cast());
                all.splice(index..=index, found);
            }
            index += count;
        }
        let bytes = (to.offset + all.len() + 1) * size_of::<*mut c_char>();
        let list = libc::realloc(to.words.cast::<c_void>(), bytes).cast::<*mut c_char>();
        if list.is_null() {
            return NO_SPACE;
        }
        std::ptr::copy_nonoverlapping(all.as_ptr(), list.add(to.offset), all.len());
        *list.add(to.offset + all.len()) = std::ptr::null_mut();
        (to.words, to.count) = (list, all.len());
        0
    }
}

/// Returns the matches of a word, in libc's memory; `None` if it is no remote pattern or nothing matches.
unsafe fn matches_of(word: *mut c_char) -> Option<Vec<*mut c_char>> {
    // SAFETY: `wordexp` made the word, which is a string.
    unsafe {
        let letters = CStr::from_ptr(word).to_bytes();
        if !letters.iter().any(|letter| PATTERN.contains(letter)) {
            return None;
        }
        if !leads_to_us(libc::AT_FDCWD, word, true) {
            return None;
        }
        let mut found: libc::glob64_t = std::mem::zeroed();
        let result = trees::glob(word, 0, std::ptr::null_mut(), &raw mut found);
        let copies = (0..found.gl_pathc).map(|index| libc::strdup(*found.gl_pathv.add(index)));
        let copies: Vec<_> = copies.filter(|copy| !copy.is_null()).collect();
        libc::globfree64(&raw mut found);
        (result == 0 && !copies.is_empty()).then_some(copies)
    }
}
