//! Programs that our library cannot be preloaded into, since they bring a libc of their own or none:
//! static ones, most of those written in Go, those for musl.
//!
//! Such a *guest* is not executed by the kernel. What is executed is the dynamic linker, with this
//! library as its program ([`towline_instance::program::hosted`]): that begins at [`begin`], brings
//! the guest into memory (`image.rs`), gives it a stack as the kernel would (`first.rs`) and jumps to
//! it. All its system calls are trapped: who has to do with something remote is answered as the
//! functions of libc are for other programs (`hooks/numbers.rs`), all others go on to the kernel from
//! the guest's own place (`calls.rs`). Each costs about a microsecond, so a guest is hosted only where
//! something remote is in sight: its arguments, its environment, its working directory or what it
//! inherits tell.
//!
//! What differs from a program that the kernel executes: `/proc/self/exe` leads to the linker (not for
//! the guest itself, which is told its own), a `vfork` is a fork, and `brk` ends after 16 GiB (then a
//! libc goes on with mappings).

mod calls;
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

/// The guest's program, with a zero byte; null in processes that host none.
static PROGRAM: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static PROGRAM_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Its absolute path, where it could be found out.
static PATH: OnceLock<Vec<u8>> = OnceLock::new();

/// True in a process that hosts a guest.
#[inline]
pub(crate) fn is_here() -> bool {
    !PROGRAM.load(Ordering::Relaxed).is_null()
}

/// The guest's program, with a zero byte.
fn program() -> &'static [u8] {
    let at = PROGRAM.load(Ordering::Acquire);
    if at.is_null() {
        return b"\0";
    }
    // SAFETY: an argument of this process, which is never changed.
    unsafe { std::slice::from_raw_parts(at, PROGRAM_BYTES.load(Ordering::Relaxed)) }
}

/// The path that the guest is known by.
pub(crate) fn name() -> Vec<u8> {
    let given = CStr::from_bytes_until_nul(program()).unwrap_or_default().to_bytes();
    let path = PATH.get().map_or(given, Vec::as_slice);
    inside(|| mirror::original(path).ok_or(libc::ENOENT)).unwrap_or_else(|_| path.to_vec())
}

/// True for a call that asks what `/proc` says is executed.
unsafe fn asks_own_name(number: c_long, arguments: Arguments) -> bool {
    let at = match number {
        libc::SYS_readlink => 0,
        libc::SYS_readlinkat => 1,
        _ => return false,
    };
    // SAFETY: as the guest says.
    unsafe { is_own_name(arguments[at] as *const c_char) }
}

/// Puts the guest's program in place of what `/proc` says is executed; false for another path.
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

/// True for the name in `/proc` of what this process executes.
///
/// # Safety
/// A path or null.
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

/// True where guests can be hosted.
pub(crate) fn is_possible() -> bool {
    towline_instance::has_thread_registers() && trap::is_there()
}

/// The child of a fork is trapped like its parent.
pub(crate) fn in_child() {
    // SAFETY: in a process that hosts a guest, in a trapped call.
    let thread = unsafe { Thread::current() };
    thread.is_first = true;
    // A thread of the parent that this is a copy of was the one to tell somebody.
    thread.clears = null_mut();
    let _ = thread.dispatches();
}

global_asm!(
    // The dynamic linker jumps here, with arguments, environment and the rest on the stack.
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

/// Notes the guest, in a process that is to host one.
///
/// # Safety
/// The arguments of this process.
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

/// The library, the guest's program, and its name.
const ARGUMENTS_MIN: i32 = 3;

/// Exit status where a guest cannot begin, as of a program that cannot be executed.
const STATUS_NOT_EXECUTABLE: usize = 126;

/// Our `main`: arguments are this library, the guest's program, and the guest's arguments.
unsafe extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the stack is as the kernel made it, less what the linker took.
    unsafe {
        let count = *stack;
        let arguments = stack.add(1).cast::<*const c_char>();
        let environment = arguments.add(count + 1);
        if count < ARGUMENTS_MIN as usize {
            fail(b"this library", "is to be preloaded by \"towline run\"", 0);
        }
        if start::state().is_none() {
            // A linker that leaves this to its program.
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
        // Once more for each variable that was taken out (`start`): no kind of what follows is zero.
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

/// The first thread, and the registers that it begins with.
unsafe fn prepare(given: &first::Given, path: &'static [u8]) -> Result<(Thread, ucontext_t), i32> {
    /// Segments of user code and data, as Linux has them.
    const SEGMENTS: i64 = 0x33 | 0x2b << 48;
    /// Interrupts are let in, and the bit that is always set.
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

/// Makes our handler that of `SIGSYS`.
fn install() -> Result<(), i32> {
    const SA_RESTORER: u64 = 0x0400_0000;
    let flags = (libc::SA_SIGINFO | libc::SA_ONSTACK) as u64 | SA_RESTORER;
    // It never returns by the restorer, which the kernel wants to have.
    let new = KernelAction {
        handler: switch::handler(),
        flags,
        restorer: switch::handler(),
        mask: u64::MAX,
    };
    let mut old = KernelAction::default();
    let places = [&raw const new as usize, &raw mut old as usize];
    let call = [libc::SIGSYS as usize, places[0], places[1], masks::SET_BYTES, 0, 0];
    // SAFETY: both outlive the call; the handler is for what is trapped from now on.
    unsafe { checked(libc::SYS_rt_sigaction, call) }?;
    chained::exchange(KernelAction { restorer: 0, ..old });
    trap::hosts_a_guest();
    Ok(())
}

/// Says what is wrong, and ends.
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
