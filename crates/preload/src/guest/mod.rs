//! Hosts programs that the library cannot be preloaded into, since they have a libc of their own or none:
//! static ones, most of those written in Go, those for musl.
//!
//! The kernel does not execute such a *guest*. It executes the dynamic linker with this library as the
//! linker's program ([`towline_instance::program::LINKER`]). The library starts at [`begin`], loads the
//! guest into memory (`image.rs`), gives it a stack as the kernel would (`first.rs`) and jumps to it. All
//! the guest's system calls are trapped: remote ones are answered like those of other programs by the
//! functions that replace libc's (`hooks/numbers.rs`), and the rest are made in the guest's own context
//! (`calls.rs`). Each costs about a microsecond, so a program is hosted only if its arguments, environment,
//! working directory or inherited descriptors involve something remote.
//!
//! Differences from a program that the kernel executes: `/proc/self/exe` leads to the linker (but the guest
//! itself is told its own path), a `vfork` is a fork, and `brk` ends after 16 GiB (a libc then continues
//! with mappings).

pub(crate) mod calls;
mod deliver;
mod first;
mod frame;
mod heap;
mod image;
mod switch;
mod threads;

use crate::guard::{self, checked, inside, system_call};
use crate::hooks::numbers::Arguments;
use crate::trap::chained::{self, KernelAction};
use crate::trap::{self, masks};
use crate::{mirror, start};
use libc::{c_char, c_long, ucontext_t};
use std::arch::global_asm;
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use switch::Thread;

/// Path of the guest's program, with a zero byte; null in processes without a guest.
static PROGRAM: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static PROGRAM_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The program's absolute path, if it could be determined.
static PATH: OnceLock<Vec<u8>> = OnceLock::new();

/// Returns true in a process that hosts a guest.
#[inline]
pub(crate) fn is_here() -> bool {
    !PROGRAM.load(Ordering::Relaxed).is_null()
}

/// Returns the path of the guest's program, with a zero byte.
fn program() -> &'static [u8] {
    let at = PROGRAM.load(Ordering::Acquire);
    if at.is_null() {
        return b"\0";
    }
    // SAFETY: an argument of this process, which never changes.
    unsafe { std::slice::from_raw_parts(at, PROGRAM_BYTES.load(Ordering::Relaxed)) }
}

/// Returns the path that the guest is known by.
pub(crate) fn name() -> Vec<u8> {
    let given = CStr::from_bytes_until_nul(program()).unwrap_or_default().to_bytes();
    let path = PATH.get().map_or(given, Vec::as_slice);
    inside(|| mirror::original(path).ok_or(libc::ENOENT)).unwrap_or_else(|_| path.to_vec())
}

/// Returns true for a call that reads the link in `/proc` to the executed program.
unsafe fn asks_own_name(number: c_long, arguments: Arguments) -> bool {
    let at = match number {
        libc::SYS_readlink => 0,
        libc::SYS_readlinkat => 1,
        _ => return false,
    };
    // SAFETY: as the guest says.
    unsafe { is_own_name(arguments[at] as *const c_char) }
}

/// Replaces the path of the executed program in `/proc` by that of the guest's; returns false for other
/// paths.
unsafe fn own_name(number: c_long, arguments: &mut Arguments) -> bool {
    let at = match number {
        libc::SYS_open | libc::SYS_stat | libc::SYS_execve | libc::SYS_access => 0,
        libc::SYS_openat | libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_execveat => 1,
        _ => return false,
    };
    // SAFETY: as the guest says.
    let is_own = unsafe { is_own_name(arguments[at] as *const c_char) };
    if is_own {
        arguments[at] = program().as_ptr() as usize;
    }
    is_own
}

/// Returns true for the path in `/proc` of the program that this process executes.
///
/// # Safety
/// `path` is null or a string.
pub(crate) unsafe fn is_own_name(path: *const c_char) -> bool {
    const PROC: &[u8] = b"/proc/";
    if !is_here() || !crate::place::is_address(path) {
        return false;
    }
    // SAFETY: as the caller says.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let Some(whose) = path.strip_prefix(PROC).and_then(|path| path.strip_suffix(b"/exe")) else {
        return false;
    };
    whose == b"self"
        || whose == b"thread-self"
        || std::str::from_utf8(whose).is_ok_and(|id| id.parse() == Ok(crate::process::id()))
}

/// Returns true if guests can be hosted.
pub(crate) fn is_possible() -> bool {
    towline_instance::has_thread_registers() && trap::is_there()
}

/// Enables the trap in the child of a fork, as in its parent.
pub(crate) fn in_child() {
    // SAFETY: the process hosts a guest and is in a trapped call.
    let thread = unsafe { Thread::current() };
    thread.is_first = true;
    // Only the parent's thread, of which this is a copy, must clear that word.
    thread.clears = null_mut();
    let _ = thread.dispatches();
}

global_asm!(
    // The dynamic linker jumps here, with arguments, environment and auxiliary vector on the stack.
    ".pushsection .text.towline_host, \"ax\", @progbits",
    ".hidden towline_host",
    ".globl towline_host",
    "towline_host:",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "ud2",
    ".popsection",
    begin = sym begin,
);

unsafe extern "C" {
    fn towline_host();
}

/// Notes the guest's program in a process that is to host one.
///
/// # Safety
/// These are the arguments of this process.
pub(crate) unsafe fn note(count: i32, arguments: *const *const c_char) {
    // SAFETY: a plain function.
    let entry = unsafe { libc::getauxval(libc::AT_ENTRY) } as usize;
    if count < ARGUMENTS_MIN || entry != towline_host as *const () as usize {
        return;
    }
    // SAFETY: as the caller says.
    let path = unsafe { CStr::from_ptr(*arguments.add(1)) }.to_bytes_with_nul();
    PROGRAM_BYTES.store(path.len(), Ordering::Relaxed);
    PROGRAM.store(path.as_ptr().cast_mut(), Ordering::Release);
}

/// This library, the guest's program, and the guest's name.
const ARGUMENTS_MIN: i32 = 3;

/// Exit status if a guest cannot start: that of a program that cannot be executed.
const STATUS_NOT_EXECUTABLE: usize = 126;

/// Our `main`: the arguments are this library, the guest's program, and the guest's arguments.
unsafe extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the stack is as the kernel made it, without what the linker removed.
    unsafe {
        let count = *stack;
        let arguments = stack.add(1).cast::<*const c_char>();
        let environment = arguments.add(count + 1);
        if count < ARGUMENTS_MIN as usize {
            fail(b"this library", "is to be preloaded by \"towline run\"", 0);
        }
        if start::state().is_none() {
            // Some linkers leave this to their program.
            start::start(count as i32, arguments, environment);
        }
        let path = program();
        if start::state().is_none() || guard::is_armed() {
            fail(path, "cannot be hosted by the dynamic linker of this machine", 0);
        }
        let arguments = arguments.add(2);
        let mut auxiliary = environment;
        while !(*auxiliary).is_null() {
            auxiliary = auxiliary.add(1);
        }
        // One more null per variable that `start` removed. The auxiliary vector contains no type zero
        // before its end.
        while (*auxiliary).is_null() {
            auxiliary = auxiliary.add(1);
        }
        let given = first::Given { arguments, environment, auxiliary: auxiliary.cast() };
        let failed = match inside(|| prepare(&given, path)) {
            Ok((mut thread, context)) => match thread.traps() {
                Ok(()) => {
                    thread.enter(&context);
                    0
                }
                Err(error) => error,
            },
            Err(error) => error,
        };
        fail(path, "cannot be hosted", failed)
    }
}

/// Loads the guest; returns its first thread and initial registers.
unsafe fn prepare(given: &first::Given, path: &'static [u8]) -> Result<(Thread, ucontext_t), i32> {
    /// Segments of user code and data on Linux.
    const SEGMENTS: i64 = 0x33 | 0x2b << 48;
    /// Interrupts enabled, and the bit that is always set.
    const FLAGS: i64 = 0x202;
    let program = image::load(path)?;
    if let Some(path) = &program.path {
        let _ = PATH.set(path.clone());
    }
    let linker = program.linker.as_deref().map(image::load).transpose()?;
    // SAFETY: as the caller says; all zero is a valid context.
    unsafe {
        let stack = first::stack(given, path, &program, linker.as_ref())?;
        let name = path.strip_suffix(b"\0").unwrap_or(path);
        let name = name.rsplit(|b| *b == b'/').next().unwrap_or_default();
        start::call(name, false);
        let blocked = guard::mask(libc::SIG_SETMASK, u64::MAX);
        install()?;
        let thread = Thread::new(0, true)?;
        let mut context: ucontext_t = std::mem::zeroed();
        let registers = &mut context.uc_mcontext.gregs;
        registers[libc::REG_RIP as usize] = linker.as_ref().unwrap_or(&program).entry as i64;
        registers[libc::REG_RSP as usize] = stack as i64;
        registers[libc::REG_CSGSFS as usize] = SEGMENTS;
        registers[libc::REG_EFL as usize] = FLAGS;
        (&raw mut context.uc_sigmask).cast::<u64>().write(masks::without_trap(blocked));
        context.uc_stack = thread.spare_stack();
        Ok((thread, context))
    }
}

/// Installs our handler for `SIGSYS`.
fn install() -> Result<(), i32> {
    const SA_RESTORER: u64 = 0x0400_0000;
    let flags = (libc::SA_SIGINFO | libc::SA_ONSTACK) as u64 | SA_RESTORER;
    // It never returns by the restorer, but the kernel requires one.
    let new = KernelAction {
        handler: switch::handler(),
        flags,
        restorer: switch::handler(),
        mask: u64::MAX,
    };
    let mut old = KernelAction::default();
    let places = [&raw const new as usize, &raw mut old as usize];
    let call = [libc::SIGSYS as usize, places[0], places[1], masks::SET_BYTES, 0, 0];
    // SAFETY: both outlive the call; the handler is meant for calls trapped from here on.
    unsafe { checked(libc::SYS_rt_sigaction, call) }?;
    chained::exchange(KernelAction { restorer: 0, ..old });
    trap::hosts_a_guest();
    Ok(())
}

/// Prints an error message and ends the process.
fn fail(path: &[u8], what: &str, error: i32) -> ! {
    let path = path.strip_suffix(b"\0").unwrap_or(path);
    let why = match error {
        0 => String::new(),
        error => format!(": {}", std::io::Error::from_raw_os_error(error)),
    };
    let text = format!("towline: run: {} {what}{why}\n", String::from_utf8_lossy(path));
    loop {
        // SAFETY: plain calls; the text outlives the first.
        unsafe {
            system_call(libc::SYS_write, [2, text.as_ptr() as usize, text.len(), 0, 0, 0]);
            system_call(libc::SYS_exit_group, [STATUS_NOT_EXECUTABLE, 0, 0, 0, 0, 0]);
        }
    }
}
