//! Loads the dynamic linker, as the kernel does for programs that name one.

use crate::Beginning;
use crate::layout::LINKER;
use crate::system::{MMAP, call, close, open, read};
use crate::text::{HEADERS, Header, INTERPRETER, LOAD, elf};

const READABLE: usize = 1;
const WRITABLE: usize = 2;
const PRIVATE: usize = 2;
const FIXED: usize = 0x10;
const ANONYMOUS: usize = 0x20;

// Kinds of entries in the auxiliary vector.
const AT_PHDR: usize = 3;
const AT_PHNUM: usize = 5;
const AT_PAGESZ: usize = 6;
const AT_BASE: usize = 7;
const AT_ENTRY: usize = 9;

/// Bytes of the linker to examine; its program headers are among them.
const FIRST_BYTES: usize = 1024;
/// Maximum number of this program's program headers.
const HEADERS_MAX: usize = 32;
/// Room for that many and two more. Also an upper bound for the ELF header and program headers of the file,
/// which start at a multiple of it in memory.
const HEADERS_BYTES: usize = 4096;

/// The page size in bytes.
#[derive(Clone, Copy)]
struct Page(usize);

impl Page {
    fn down(self, address: usize) -> usize {
        address & !(self.0 - 1)
    }

    fn up(self, address: usize) -> usize {
        self.down(address + self.0 - 1)
    }
}

/// Maps new memory, filled with zeros.
pub(crate) fn memory(bytes: usize) -> Option<usize> {
    // SAFETY: this is a new mapping at an address that the kernel chooses.
    unsafe { call(MMAP, [0, bytes, READABLE | WRITABLE, PRIVATE | ANONYMOUS, usize::MAX, 0]) }
}

/// Loads the dynamic linker and passes this program to it. Returns the linker's entry point. `entry` is where
/// the program begins after that.
pub(crate) fn load(beginning: &Beginning, entry: usize) -> Option<usize> {
    let page = Page(known(beginning, AT_PAGESZ)?);
    let file = open(LINKER)?;
    let mut first = [0; FIRST_BYTES];
    let (start, loads) = elf(read(file, &mut first)?)?;
    let end = loads.filter(|part| part.kind == LOAD).map(|part| part.address + part.bytes).max()?;
    // SAFETY: the kernel chooses unused addresses.
    let base = unsafe { call(MMAP, [0, page.up(end), 0, PRIVATE | ANONYMOUS, usize::MAX, 0]) }?;
    for part in elf(&first)?.1.filter(|part| part.kind == LOAD) {
        // SAFETY: the part lies within the addresses reserved above.
        unsafe { map(file, base, &part, page) }?;
    }
    close(file);
    tell(beginning, base, entry)?;
    Some(base + start)
}

/// Maps a part of a file.
///
/// # Safety
/// The target addresses belong to the caller.
unsafe fn map(file: usize, base: usize, part: &Header, page: Page) -> Option<()> {
    // The permission bits of headers are in another order than those of `mmap`.
    let protection = (part.flags & 1) << 2 | (part.flags & 2) | (part.flags & 4) >> 2;
    let protection = protection as usize;
    let from = base + page.down(part.address);
    let (in_file, in_all) =
        (base + part.address + part.file_bytes, base + part.address + part.bytes);
    // SAFETY: the caller owns the addresses, and memory is mapped before it is written.
    unsafe {
        let offset = page.down(part.offset);
        let how = [from, page.up(in_file) - from, protection, PRIVATE | FIXED, file, offset];
        call(MMAP, how)?;
        if in_all > in_file {
            if protection & WRITABLE != 0 {
                core::ptr::write_bytes(in_file as *mut u8, 0, page.up(in_file) - in_file);
            }
            if page.up(in_all) > page.up(in_file) {
                let rest = [
                    page.up(in_file),
                    page.up(in_all) - page.up(in_file),
                    protection,
                    PRIVATE | FIXED | ANONYMOUS,
                    usize::MAX,
                    0,
                ];
                call(MMAP, rest)?;
            }
        }
    }
    Some(())
}

/// Returns the value of an entry of the auxiliary vector.
fn known(beginning: &Beginning, kind: usize) -> Option<usize> {
    let at = beginning.auxiliary(kind);
    // SAFETY: the pointer is null or points to a word of the vector, which is on this process's stack.
    unsafe { at.as_ref() }.copied()
}

/// Tells the linker what the kernel would have told it: where it is, and that this program requests it. For
/// that, the program gets a copy of its program headers with additional entries.
fn tell(beginning: &Beginning, base: usize, entry: usize) -> Option<()> {
    let set = |kind: usize, value: usize| {
        let at = beginning.auxiliary(kind);
        // SAFETY: the pointer is null or points to a word of the vector, which is on this process's stack.
        unsafe { at.as_mut() }.map(|word| *word = value)
    };
    let (old, count) = (known(beginning, AT_PHDR)?, known(beginning, AT_PHNUM)?);
    if count > HEADERS_MAX {
        return None;
    }
    // SAFETY: the kernel states that this many headers are there.
    let old_headers = unsafe { core::slice::from_raw_parts(old as *const Header, count) };
    let first = old_headers.iter().find(|part| part.kind == LOAD && part.offset == 0)?;
    // The program headers follow the ELF header, which is at the start of the first part.
    let bias = (old & !(HEADERS_BYTES - 1)) - first.address;
    let new = memory(HEADERS_BYTES)? as *mut Header;
    let place = |kind: u32, address: usize, bytes: usize| Header {
        kind,
        flags: 4,
        offset: 0,
        address: address.wrapping_sub(bias),
        physical: address.wrapping_sub(bias),
        file_bytes: bytes,
        bytes,
        align: 1,
    };
    let own = [
        place(HEADERS, new as usize, size_of::<Header>() * (count + 2)),
        place(INTERPRETER, LINKER.as_ptr() as usize, LINKER.len()),
    ];
    let mut number = 0;
    for header in own.iter().chain(old_headers.iter().filter(|part| part.kind != HEADERS)) {
        // SAFETY: there are at most two more than before, for which there is room.
        unsafe { new.add(number).write(*header) };
        number += 1;
    }
    set(AT_PHDR, new as usize)?;
    set(AT_PHNUM, number)?;
    set(AT_BASE, base)?;
    set(AT_ENTRY, entry)
}
