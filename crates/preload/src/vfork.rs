//! `vfork` with the kernel's semantics: until the child executes a program or ends, it uses the parent's
//! memory, and the parent waits.
//!
//! The child's calls come to us like any others and change what we know of *this process*: its descriptors,
//! handlers, working directory, connections. So the parent restores all of it when it continues: this
//! library's variables (a few kilobytes, besides large tables), those of the thread, and what was allocated
//! from our allocator meanwhile. The child starts like a child of `fork`, without connections of its own,
//! and neither changes nor frees the parent's allocated memory. So it does not matter how it ends, even if
//! it is killed within our code.
//!
//! This requires a single-threaded process, as other threads would see the child's changes. If there are
//! more threads or mappings of remote files, or if many children have used a server (a connection has
//! mappings that are never unmapped), `vfork` is a `fork` after which the parent waits. The same applies to
//! system calls without libc, whose child would return through the frames of our handler.

use crate::guard::{self, checked, inside, mask};
use crate::{
    ALLOCATOR, demand, descriptors, hooks, known, opened, process, remote, start, stdio, working,
    written,
};
use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::{copy_nonoverlapping, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// Maximum number of bytes of this library's variables, and of a thread's.
const VARIABLES_MAX: usize = 24 * 1024;
const OF_THREAD_MAX: usize = 1024;
/// Maximum number of children that connect to a server in this memory. Their mappings, at most a few MiB
/// each, are never unmapped.
const MET_MAX: u32 = 16;
/// Maximum number of ranges that the variables are in.
const PARTS_MAX: usize = 5;

/// The state that the parent restores. Lies in memory that starts as zeros.
struct Kept {
    /// Ranges of the variables: around the large tables.
    variables: [Range<usize>; PARTS_MAX],
    /// Range of the only thread's variables.
    of_thread: Range<usize>,
    bytes: [u8; VARIABLES_MAX],
    bytes_of_thread: [u8; OF_THREAD_MAX],
    descriptors: descriptors::Kept,
    process: Option<u32>,
    /// Signals that were blocked.
    blocked: u64,
    /// Mounts whose URLs were not parsed yet.
    urls: u64,
}

/// Allocated for the first child.
static KEPT: AtomicPtr<Kept> = AtomicPtr::new(null_mut());
/// Whether this process is a child of `vfork`.
static IS_CHILD: AtomicBool = AtomicBool::new(false);
/// Whether the child has connected to a server.
static HAS_MET: AtomicBool = AtomicBool::new(false);
/// Number of children that have.
static MET: AtomicU32 = AtomicU32::new(0);
/// Whether children are forked.
static FORKS: AtomicBool = AtomicBool::new(false);

/// `vfork`. A register holds the return address while the child uses the stack that it was on.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn vfork() {
    naked_asm!(
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "test al, al",
        "jz {fork}",
        "pop rdx",
        "mov eax, {number}",
        "syscall",
        "push rdx",
        "sub rsp, 8",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "call {goes_on}",
        "add rsp, 8",
        "ret",
        "2:",
        "call {in_child}",
        "xor eax, eax",
        "add rsp, 8",
        "ret",
        begin = sym begin,
        fork = sym hooks::exec::fork_and_wait,
        number = const libc::SYS_vfork,
        goes_on = sym goes_on,
        in_child = sym in_child,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn vfork() {
    naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {begin}",
        "ldp x29, x30, [sp], #16",
        "tbnz w0, #0, 1f",
        "b {fork}",
        "1:",
        "mov x0, {flags}",
        "mov x1, xzr",
        "mov x2, xzr",
        "mov x3, xzr",
        "mov x4, xzr",
        "mov x8, {number}",
        "svc 0",
        "stp x29, x30, [sp, #-16]!",
        "cbz x0, 2f",
        "bl {goes_on}",
        "ldp x29, x30, [sp], #16",
        "ret",
        "2:",
        "bl {in_child}",
        "mov x0, xzr",
        "ldp x29, x30, [sp], #16",
        "ret",
        begin = sym begin,
        fork = sym hooks::exec::fork_and_wait,
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        number = const libc::SYS_clone,
        goes_on = sym goes_on,
        in_child = sym in_child,
    )
}

/// `vfork` under its other name.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn __vfork() {
    naked_asm!("jmp {vfork}", vfork = sym vfork)
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn __vfork() {
    naked_asm!("b {vfork}", vfork = sym vfork)
}

/// Saves all that the parent must restore; returns false if the child may not use this memory.
extern "C" fn begin() -> bool {
    if FORKS.load(Ordering::Relaxed)
        || IS_CHILD.load(Ordering::Relaxed)
        || start::state().is_none()
        || guard::is_inside()
        || hooks::has_remote_memory()
        || !has_one_thread()
    {
        return false;
    }
    crate::table::look_up_for_children();
    descriptors::share();
    let Ok(kept) = inside(|| kept().ok_or(libc::ENOMEM)) else {
        FORKS.store(true, Ordering::Relaxed);
        return false;
    };
    let handled = guard::handled_signals().all;
    // SAFETY: `kept` made it with enough room; no other thread runs.
    unsafe {
        let kept = &mut *kept;
        kept.blocked = if handled == 0 { 0 } else { mask(libc::SIG_BLOCK, handled) };
        kept.urls = start::urls_unknown();
        kept.process = process::known();
        descriptors::keep(&mut kept.descriptors);
        let mut at = kept.bytes.as_mut_ptr();
        for part in &kept.variables {
            copy_nonoverlapping(part.start as *const u8, at, part.len());
            at = at.add(part.len());
        }
        let from = kept.of_thread.start as *const u8;
        copy_nonoverlapping(from, kept.bytes_of_thread.as_mut_ptr(), kept.of_thread.len());
    }
    // This thread's next system call is the one in the assembly code above.
    guard::net_up();
    true
}

/// Prepares the child before the program continues in it.
extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
    process::changed(None);
    ALLOCATOR.set_aside();
    known::leave_to_parent();
    opened::leave_to_parent();
    written::leave_to_parent();
    working::leave_to_parent();
    demand::disown();
    remote::disown();
    crate::trap::arm_child();
    // SAFETY: there since `begin`.
    let blocked = unsafe { (*KEPT.load(Ordering::Relaxed)).blocked };
    if guard::handled_signals().all != 0 {
        mask(libc::SIG_SETMASK, crate::trap::masks::without(blocked));
    }
}

/// Restores the parent's state and returns the result of `vfork`.
extern "C" fn goes_on(result: isize) -> c_int {
    let has_met = HAS_MET.load(Ordering::Relaxed);
    let streams = stdio::exchanged();
    let left = ALLOCATOR.unused();
    // SAFETY: restores what `begin` saved to where it was; no other thread runs.
    let kept = unsafe {
        let kept = &*KEPT.load(Ordering::Relaxed);
        descriptors::put_back(&kept.descriptors);
        let mut at = kept.bytes.as_ptr();
        for part in &kept.variables {
            copy_nonoverlapping(at, part.start as *mut u8, part.len());
            at = at.add(part.len());
        }
        let to = kept.of_thread.start as *mut u8;
        copy_nonoverlapping(kept.bytes_of_thread.as_ptr(), to, kept.of_thread.len());
        ALLOCATOR.take_back(left);
        kept
    };
    process::changed(kept.process);
    start::forget_urls(kept.urls);
    stdio::stays_exchanged(streams);
    if has_met && MET.fetch_add(1, Ordering::Relaxed) + 1 == MET_MAX {
        FORKS.store(true, Ordering::Relaxed);
    }
    if guard::handled_signals().all != 0 {
        mask(libc::SIG_SETMASK, crate::trap::masks::without(kept.blocked));
    }
    if result < 0 {
        guard::set_errno(-result as i32);
        return -1;
    }
    result as c_int
}

/// Notes that a child of `fork` is not a child of `vfork`: it has its own memory.
pub(crate) fn forked() {
    IS_CHILD.store(false, Ordering::Relaxed);
}

/// Notes that this process connects to a server.
pub(crate) fn meets() {
    HAS_MET.store(IS_CHILD.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Returns the memory for the saved state, allocated on first use; `None` if the variables cannot be
/// located.
fn kept() -> Option<*mut Kept> {
    let known = KEPT.load(Ordering::Relaxed);
    if !known.is_null() {
        // SAFETY: made below.
        let of_thread = unsafe { &(*known).of_thread };
        return of_thread.contains(&(guard::selector() as usize)).then_some(known);
    }
    let [variables, of_thread] = found()?;
    let length = |parts: &[Range<usize>]| parts.iter().map(Range::len).sum::<usize>();
    let (variables, of_thread) = (without_tables(variables), of_thread.first()?.clone());
    if length(&variables) > VARIABLES_MAX
        || variables.len() > PARTS_MAX
        || of_thread.len() > OF_THREAD_MAX
        || !of_thread.contains(&(guard::selector() as usize))
    {
        return None;
    }
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let arguments = [0, size_of::<Kept>(), access as usize, flags as usize, usize::MAX, 0];
    // SAFETY: new memory, all zero, which is valid for all of it.
    let new = unsafe { checked(libc::SYS_mmap, arguments) }.ok()? as *mut Kept;
    // SAFETY: not shared yet.
    let kept = unsafe { &mut *new };
    kept.of_thread = of_thread;
    for (place, part) in kept.variables.iter_mut().zip(variables) {
        *place = part;
    }
    KEPT.store(new, Ordering::Relaxed);
    Some(new)
}

/// Returns the ranges of this library's variables and of this thread's.
fn found() -> Option<[Vec<Range<usize>>; 2]> {
    unsafe extern "C" fn look(
        object: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the linker passes a loaded object with its program headers; the rest is ours.
        unsafe {
            let (found, object) = (&mut *found.cast::<[Vec<Range<usize>>; 2]>(), &*object);
            let headers =
                std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum));
            let of = |kind: u32| {
                headers.iter().filter(move |header| header.p_type == kind).map(|header| {
                    let from = object.dlpi_addr as usize + header.p_vaddr as usize;
                    (header.p_flags, from..from + header.p_memsz as usize)
                })
            };
            if !of(libc::PT_LOAD).any(|(_, part)| part.contains(&(&raw const KEPT as usize))) {
                return 0;
            }
            let written = of(libc::PT_LOAD).filter(|(flags, _)| flags & libc::PF_W != 0);
            found[0] = written.map(|(_, part)| part).collect();
            // Memory that the linker makes read-only after relocation.
            for (_, part) in of(libc::PT_GNU_RELRO) {
                found[0] = without(&found[0], &part);
            }
            let from = object.dlpi_tls_data as usize;
            found[1].extend(of(libc::PT_TLS).map(|(_, part)| from..from + part.len()));
        }
        1
    }
    let mut found = [Vec::new(), Vec::new()];
    // SAFETY: the callback accesses only what it is passed.
    let is_found = unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast()) } != 0;
    is_found.then_some(found)
}

/// Excludes the descriptor tables, which are saved separately.
fn without_tables(parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
    descriptors::tables().iter().fold(parts, |parts, table| without(&parts, table))
}

fn without(parts: &[Range<usize>], other: &Range<usize>) -> Vec<Range<usize>> {
    let cut = |part: &Range<usize>| {
        [part.start..other.start.min(part.end), other.end.max(part.start)..part.end]
    };
    parts.iter().flat_map(cut).filter(|part| !part.is_empty()).collect()
}

/// Returns true if libc knows of a single thread. Threads created without libc set `FORKS`.
pub(crate) fn has_one_thread() -> bool {
    static AT: AtomicPtr<c_char> = AtomicPtr::new(null_mut());
    let mut at = AT.load(Ordering::Relaxed);
    if at.is_null() {
        // SAFETY: a constant name; libc's variable lives as long as the process.
        at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()).cast() };
        if at.is_null() {
            // Older than glibc 2.32.
            FORKS.store(true, Ordering::Relaxed);
            return false;
        }
        AT.store(at, Ordering::Relaxed);
    }
    // SAFETY: a variable of one byte.
    unsafe { *at != 0 }
}

/// Notes that a thread was created without libc's knowledge.
pub(crate) fn has_own_threads() {
    FORKS.store(true, Ordering::Relaxed);
}
