//! Builds the initial stack of a program: arguments, environment and auxiliary vector, as the kernel would
//! leave them.

use super::image::Image;
use crate::guard::checked;
use libc::c_char;

type Strings = *const *const c_char;

/// Maximum stack sizes, the first that addresses suffice for: pages that are not used take no memory. The
/// second is the usual limit of shells.
const STACK_BYTES_MAX: [usize; 2] = [1 << 30, 8 << 20];
const STACK_BYTES_MIN: usize = 256 << 10;
const PAGE: usize = 4096;
/// Auxiliary types of the kernel's restartable sequences, of which this thread has registered one already.
const RESTARTABLE: [usize; 2] = [27, 28];

/// The data that a program gets.
pub(super) struct Given {
    /// Its arguments, null-terminated.
    pub(super) arguments: Strings,
    /// Its environment, null-terminated.
    pub(super) environment: Strings,
    /// The auxiliary vector of this process, up to a pair that begins with zero.
    pub(super) auxiliary: *const [usize; 2],
}

/// Returns the strings of a null-terminated list.
///
/// # Safety
/// `list` is null-terminated.
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

/// Makes a stack for the program of this path, which ends with a zero byte; returns its initial stack
/// pointer.
///
/// # Safety
/// `given` is as the kernel made it.
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
    // SAFETY: within new memory, which is longer than what a program may be given.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), at as *mut usize, words.len()) };
    Ok(at)
}

/// Maps a new stack; returns its upper end.
fn memory() -> Result<usize, i32> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let get = [libc::RLIMIT_STACK as usize, &raw mut limit as usize, 0, 0, 0, 0];
    // SAFETY: the structure outlives the call.
    unsafe { checked(libc::SYS_getrlimit, get) }?;
    let bytes = |most| (limit.rlim_cur as usize).clamp(STACK_BYTES_MIN, most) & !(PAGE - 1);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let map = |bytes: usize| {
        let call = [0, bytes + PAGE, access as usize, flags as usize, usize::MAX, 0];
        // SAFETY: new memory.
        unsafe { checked(libc::SYS_mmap, call) }.map(|from| (from, bytes))
    };
    let [most, usual] = STACK_BYTES_MAX.map(bytes);
    let (from, bytes) = map(most).or_else(|_| map(usual))?;
    // SAFETY: the lowest page of new memory becomes the guard page.
    unsafe {
        checked(libc::SYS_mprotect, [from, PAGE, libc::PROT_NONE as usize, 0, 0, 0])?;
        Ok(from + PAGE + bytes)
    }
}
