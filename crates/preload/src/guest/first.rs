//! What a program finds when it begins: arguments, environment and what the kernel tells it, as the
//! kernel would leave them on its stack.

use super::image::Image;
use crate::guard::checked;
use libc::c_char;

type Strings = *const *const c_char;

/// Longest stack; the shell's usual limit.
const STACK_BYTES_MAX: usize = 8 << 20;
const STACK_BYTES_MIN: usize = 256 << 10;
const PAGE: usize = 4096;
/// Bounds of kernel's restartable sequences, of which this thread has one already.
const RESTARTABLE: [usize; 2] = [27, 28];

/// What a program gets.
pub(super) struct Given {
    /// Its arguments, and null.
    pub(super) arguments: Strings,
    /// Its environment, and null.
    pub(super) environment: Strings,
    /// What the kernel told this process, up to a pair that begins with zero.
    pub(super) auxiliary: *const [usize; 2],
}

/// The strings of a list that ends with null.
///
/// # Safety
/// It is one.
unsafe fn all(mut list: Strings) -> Vec<usize> {
    let mut found = Vec::new();
    // SAFETY: as the caller says.
    unsafe {
        while !(*list).is_null() {
            found.push(*list as usize);
            list = list.add(1);
        }
    }
    found
}

/// Makes a stack for a program of this path, which ends with a zero byte, and gives where it begins.
///
/// # Safety
/// What is given is as the kernel gave it.
pub(super) unsafe fn stack(
    given: &Given,
    path: &'static [u8],
    program: &Image,
    linker: Option<&Image>,
) -> Result<usize, i32> {
    // SAFETY: as the caller says.
    let (arguments, environment) = unsafe { (all(given.arguments), all(given.environment)) };
    let mut auxiliary = Vec::new();
    let mut pair = given.auxiliary;
    // SAFETY: as the caller says.
    unsafe {
        while (*pair)[0] != libc::AT_NULL as usize {
            auxiliary.push(*pair);
            pair = pair.add(1);
        }
    }
    auxiliary.retain(|[kind, _]| !RESTARTABLE.contains(kind));
    let is = [
        (libc::AT_PHDR, program.headers),
        (libc::AT_PHNUM, program.count),
        (libc::AT_BASE, linker.map_or(0, |linker| linker.base)),
        (libc::AT_ENTRY, program.entry),
        (libc::AT_EXECFN, path.as_ptr() as usize),
    ];
    for [kind, value] in &mut auxiliary {
        if let Some((_, is)) = is.iter().find(|(one, _)| *one as usize == *kind) {
            *value = *is;
        }
    }
    let mut words = vec![arguments.len()];
    words.extend(arguments);
    words.push(0);
    words.extend(environment);
    words.push(0);
    words.extend(auxiliary.into_iter().flatten());
    words.extend([libc::AT_NULL as usize, 0]);
    let top = memory()?;
    let at = (top - size_of_val(&words[..])) & !15;
    // SAFETY: in new memory, which is longer than what a program may be given.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), at as *mut usize, words.len()) };
    Ok(at)
}

/// The upper end of a new stack.
fn memory() -> Result<usize, i32> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let get = [libc::RLIMIT_STACK as usize, &raw mut limit as usize, 0, 0, 0, 0];
    // SAFETY: the structure outlives the call.
    unsafe { checked(libc::SYS_getrlimit, get) }?;
    let bytes = (limit.rlim_cur as usize).clamp(STACK_BYTES_MIN, STACK_BYTES_MAX) & !(PAGE - 1);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let call = [0, bytes + PAGE, access as usize, flags as usize, usize::MAX, 0];
    // SAFETY: new memory, and its lowest page as the end of the stack.
    unsafe {
        let from = checked(libc::SYS_mmap, call)?;
        checked(libc::SYS_mprotect, [from, PAGE, libc::PROT_NONE as usize, 0, 0, 0])?;
        Ok(from + PAGE + bytes)
    }
}
