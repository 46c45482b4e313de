//! Loads a program into memory, as the kernel would.

use crate::guard::checked;
use libc::{Elf64_Ehdr, Elf64_Phdr, c_int};
use std::mem::zeroed;

const PAGE: usize = 4096;
/// Maximum size of the program headers that Linux accepts, in bytes.
const HEADERS_BYTES_MAX: usize = 64 * 1024;
const PATH_BYTES_MAX: usize = libc::PATH_MAX as usize;

/// A loaded program.
pub(super) struct Image {
    /// Difference between its addresses and those in its headers.
    pub(super) base: usize,
    /// Its entry point.
    pub(super) entry: usize,
    /// Address of its program headers.
    pub(super) headers: usize,
    /// Number of program headers.
    pub(super) count: usize,
    /// The absolute path of its file.
    pub(super) path: Option<Vec<u8>>,
    /// Path of the dynamic linker that it names; in a valid file it ends with a zero byte.
    pub(super) linker: Option<Vec<u8>>,
}

/// An open file, closed when dropped.
struct File(usize);

impl File {
    fn open(path: &[u8]) -> Result<Self, i32> {
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let call = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0, 0, 0];
        // SAFETY: the path ends with a zero byte.
        unsafe { checked(libc::SYS_openat, call) }.map(Self)
    }

    /// Fills `to`; fails with `ENOEXEC` if the file ends before.
    fn read(&self, to: &mut [u8], at: u64) -> Result<(), i32> {
        let call = [self.0, to.as_mut_ptr() as usize, to.len(), at as usize, 0, 0];
        // SAFETY: the buffer is as long as said.
        match unsafe { checked(libc::SYS_pread64, call) }? {
            all if all == to.len() => Ok(()),
            _ => Err(libc::ENOEXEC),
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: our own descriptor.
        let _ = unsafe { checked(libc::SYS_close, [self.0, 0, 0, 0, 0, 0]) };
    }
}

fn map(
    at: usize,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: usize,
    from: u64,
) -> Result<usize, i32> {
    let call = [at, bytes, access as usize, flags as usize, file, from as usize];
    // SAFETY: at the caller's address, or one that the kernel chooses.
    unsafe { checked(libc::SYS_mmap, call) }
}

fn up(address: usize) -> usize {
    address.next_multiple_of(PAGE)
}

fn down(address: usize) -> usize {
    address & !(PAGE - 1)
}

/// Loads a program or its dynamic linker. The path ends with a zero byte.
///
/// # Errors
/// `ENOEXEC` if it is not a program for this machine; `EEXIST` if its addresses are in use; those of the
/// file.
pub(super) fn load(path: &[u8]) -> Result<Image, i32> {
    let file = File::open(path)?;
    // SAFETY: all zero is a valid header.
    let mut head: Elf64_Ehdr = unsafe { zeroed() };
    // SAFETY: plain numbers, which may have any value.
    file.read(unsafe { bytes_of(std::slice::from_mut(&mut head)) }, 0)?;
    let movable = match head.e_type {
        libc::ET_EXEC => false,
        libc::ET_DYN => true,
        _ => return Err(libc::ENOEXEC),
    };
    let bytes = usize::from(head.e_phnum) * size_of::<Elf64_Phdr>();
    if head.e_ident[..5] != *b"\x7fELF\x02"
        || head.e_machine != libc::EM_X86_64
        || usize::from(head.e_phentsize) != size_of::<Elf64_Phdr>()
        || bytes > HEADERS_BYTES_MAX
    {
        return Err(libc::ENOEXEC);
    }
    // SAFETY: all zero is a valid header.
    let mut parts: Vec<Elf64_Phdr> = vec![unsafe { zeroed() }; usize::from(head.e_phnum)];
    // SAFETY: plain numbers, which may have any value.
    file.read(unsafe { bytes_of(&mut parts) }, head.e_phoff)?;
    let loads = || parts.iter().filter(|part| part.p_type == libc::PT_LOAD && part.p_memsz > 0);
    let first = loads().map(|part| part.p_vaddr as usize).min().ok_or(libc::ENOEXEC)?;
    let end = |part: &Elf64_Phdr| part.p_vaddr.checked_add(part.p_memsz).filter(|e| *e < 1 << 47);
    let mut last = 0;
    for part in loads() {
        last = last.max(end(part).ok_or(libc::ENOEXEC)? as usize);
    }
    let (first, span) = (down(first), up(last) - down(first));
    let align = loads().map(|part| part.p_align as usize).max().unwrap_or(PAGE).max(PAGE);
    let base = if movable {
        reserve(span, align)?.wrapping_sub(first)
    } else {
        let flags = libc::MAP_FIXED_NOREPLACE | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        map(first, span, libc::PROT_NONE, flags | libc::MAP_NORESERVE, usize::MAX, 0)?;
        0
    };
    let mut headers = 0;
    for part in loads() {
        place(&file, part, base)?;
        let within = head.e_phoff.checked_sub(part.p_offset);
        if let Some(within) = within.filter(|within| *within < part.p_filesz) {
            headers = base.wrapping_add((part.p_vaddr + within) as usize);
        }
    }
    let linker = parts.iter().find(|part| part.p_type == libc::PT_INTERP);
    let linker = linker.map(|part| {
        let length = usize::try_from(part.p_filesz).unwrap_or(usize::MAX);
        if length > PATH_BYTES_MAX {
            return Err(libc::ENOEXEC);
        }
        let mut name = vec![0; length];
        file.read(&mut name, part.p_offset)?;
        // The kernel executes no such program, and the linker is opened by this name.
        if name.last() != Some(&0) {
            return Err(libc::ENOEXEC);
        }
        Ok(name)
    });
    Ok(Image {
        base,
        entry: base.wrapping_add(head.e_entry as usize),
        headers,
        count: parts.len(),
        path: crate::descriptors::target_of(file.0 as i32),
        linker: linker.transpose()?,
    })
}

/// # Safety
/// Any bytes are valid for `T`.
unsafe fn bytes_of<T>(of: &mut [T]) -> &mut [u8] {
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts_mut(of.as_mut_ptr().cast(), size_of_val(of)) }
}

/// Reserves addresses for `span` bytes.
fn reserve(span: usize, align: usize) -> Result<usize, i32> {
    if !align.is_power_of_two() {
        return Err(libc::ENOEXEC);
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let bytes = span.checked_add(align).ok_or(libc::ENOEXEC)?;
    let found = map(0, bytes, libc::PROT_NONE, flags, usize::MAX, 0)?;
    Ok(found.next_multiple_of(align))
}

/// Maps a segment.
fn place(file: &File, part: &Elf64_Phdr, base: usize) -> Result<(), i32> {
    let bit = |flag, access| if part.p_flags & flag != 0 { access } else { 0 };
    let access = bit(libc::PF_R, libc::PROT_READ)
        | bit(libc::PF_W, libc::PROT_WRITE)
        | bit(libc::PF_X, libc::PROT_EXEC);
    let at = base.wrapping_add(part.p_vaddr as usize);
    let offset = part.p_offset as usize;
    if at % PAGE != offset % PAGE || part.p_filesz > part.p_memsz {
        return Err(libc::ENOEXEC);
    }
    let (of_file, all) = (at + part.p_filesz as usize, at + part.p_memsz as usize);
    let fixed = libc::MAP_FIXED | libc::MAP_PRIVATE;
    if part.p_filesz > 0 {
        let from = (offset - at % PAGE) as u64;
        map(down(at), up(of_file) - down(at), access, fixed, file.0, from)?;
        // The rest of the last page holds another part of the file. Clear all of it, as the kernel does:
        // glibc's linker takes its first memory from there.
        if all > of_file && part.p_flags & libc::PF_W != 0 {
            let rest = up(of_file) - of_file;
            // SAFETY: in the page that was just mapped writable.
            unsafe { (of_file as *mut u8).write_bytes(0, rest) };
        }
    }
    let from = if part.p_filesz > 0 { up(of_file) } else { down(at) };
    if up(all) > from {
        map(from, up(all) - from, access, fixed | libc::MAP_ANONYMOUS, usize::MAX, 0)?;
    }
    Ok(())
}
