//! The net behind the symbols: traps system calls that a program makes without libc.
//!
//! Linux's Syscall User Dispatch turns each system call of a thread into `SIGSYS`, except those from one
//! range of addresses. That range is the code of libc, whose symbols we replace already. The handler
//! answers a remote call by the function that replaces libc's (`hooks/numbers.rs`) and makes all others
//! itself. Our own calls pass because `guard.rs` sets the thread's selector around them.
//!
//! A process is armed when it learns of something remote: by an argument or an environment variable that
//! names a prefix, an inherited working directory or descriptor, or the first file it opens. Other
//! processes pay nothing. An armed process pays some 50 ns for each libc call and some 3 us for each
//! trapped one. Forks, libc threads and new programs are armed anew, since none of them inherits the
//! setting from the kernel. Threads that a program created before it was armed are armed at their first
//! remote call; threads that it creates without libc never are.
//!
//! The kernel kills a process whose call is trapped while `SIGSYS` is blocked: so that signal is kept out
//! of all masks (`masks.rs`), and its handler stays ours (`chained.rs`).

#[cfg(target_arch = "x86_64")]
pub(crate) mod chained;
#[cfg(target_arch = "x86_64")]
pub(crate) mod handler;
#[cfg(target_arch = "x86_64")]
pub(crate) mod stack;

pub(crate) mod masks;
pub(crate) mod threads;

#[cfg(target_arch = "x86_64")]
use crate::guard::checked;
use crate::guard::{self, inside};
use crate::{report, start};
#[cfg(target_arch = "x86_64")]
use std::ffi::c_void;
use std::ffi::{CStr, c_char};
#[cfg(target_arch = "x86_64")]
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use towline_instance::mentions;
use towline_instance::notes::Note;

#[cfg(target_arch = "x86_64")]
pub(crate) use chained::{sigaction_of_program, signal_of_program};

/// The trap does not exist on this machine: all signals belong to the program.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn sigaction_of_program(
    _: i32,
    _: *const libc::sigaction,
    _: *mut libc::sigaction,
) -> Option<i32> {
    None
}

/// As [`sigaction_of_program`].
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn signal_of_program(_: i32, _: usize) -> Option<usize> {
    None
}

/// Values of `STATE`: what is known of the trap in this process.
const UNTRIED: u8 = 0;
const ARMED: u8 = 1;
const MISSING: u8 = 2;
static STATE: AtomicU8 = AtomicU8::new(UNTRIED);

/// Maximum number of bytes of arguments and environment that are searched.
const LOOKED_AT_MAX: usize = 256 * 1024;

/// Returns true if system calls of other programs can be trapped.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_there() -> bool {
    match STATE.load(Ordering::Relaxed) {
        ARMED => true,
        MISSING => false,
        // Must not be tried in an armed thread: it would disarm the thread.
        _ => towline_instance::has_trap(),
    }
}

/// Returns true if system calls of this process may be trapped.
#[inline]
pub(crate) fn is_armed() -> bool {
    STATE.load(Ordering::Relaxed) == ARMED
}

/// Arms this thread, and with the first one the process. Has no effect if the kernel lacks the trap;
/// everything else works as before.
pub(crate) fn arm() {
    // All calls of a guest are trapped from its start.
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return;
    }
    if !guard::is_armed() && STATE.load(Ordering::Relaxed) != MISSING {
        let _ = inside(|| {
            arm_now();
            Ok(())
        });
    }
}

/// Arms the single thread of a forked child if its parent was armed.
pub(crate) fn arm_child() {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return crate::guest::in_child();
    }
    guard::set_armed(false);
    if is_armed() {
        arm();
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn arm_now() {
    STATE.store(MISSING, Ordering::Relaxed);
    report::record_with(|| Note::Untrapped { program: report::program() });
}

#[cfg(target_arch = "x86_64")]
fn arm_now() {
    crate::between::end();
    const ON: usize = 1;
    let missing = || {
        STATE.store(MISSING, Ordering::Relaxed);
        report::record_with(|| Note::Untrapped { program: report::program() });
    };
    let Some(libc) = libc_code() else { return missing() };
    let is_first = STATE.load(Ordering::Relaxed) == UNTRIED;
    if is_first && !handler::install() {
        return missing();
    }
    masks::let_in();
    let selector = guard::selector() as usize;
    let arguments =
        [masks::PR_SET_SYSCALL_USER_DISPATCH, ON, libc.start, libc.end - libc.start, selector, 0];
    // SAFETY: the selector lives as long as the thread.
    match unsafe { checked(libc::SYS_prctl, arguments) } {
        Ok(_) => {
            STATE.store(ARMED, Ordering::Relaxed);
            guard::set_armed(true);
            if is_first {
                report::record_with(|| Note::Armed { program: report::program() });
            }
        }
        // The kernel lacks the trap. The handler does no harm: nothing raises its signal.
        Err(_) if is_first => missing(),
        Err(_) => {}
    }
}

/// Notes that `guest` traps the calls of this process.
#[cfg(target_arch = "x86_64")]
pub(crate) fn hosts_a_guest() {
    crate::between::end();
    STATE.store(ARMED, Ordering::Relaxed);
    report::record_with(|| Note::Armed { program: report::program() });
}

/// Returns the range of libc's code.
#[cfg(target_arch = "x86_64")]
fn libc_code() -> Option<Range<usize>> {
    struct Search {
        /// An address in it.
        known: usize,
        found: Option<Range<usize>>,
    }
    unsafe extern "C" fn look(
        object: *mut libc::dl_phdr_info,
        _: libc::size_t,
        search: *mut c_void,
    ) -> i32 {
        // SAFETY: the linker passes a loaded object with its program headers; the search is ours.
        unsafe {
            let search = &mut *search.cast::<Search>();
            let object = &*object;
            let headers =
                std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum));
            let code = |header: &libc::Elf64_Phdr| {
                let from = object.dlpi_addr as usize + header.p_vaddr as usize;
                let is_code = header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0;
                is_code.then_some(from..from + header.p_memsz as usize)
            };
            search.found = headers.iter().filter_map(code).find(|c| c.contains(&search.known));
            i32::from(search.found.is_some())
        }
    }
    let mut search = Search { known: crate::table::real::address_of_sigaction(), found: None };
    // SAFETY: the callback accesses only what it is passed.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// Returns true if one of the strings names a prefix, or if they are too long to be searched.
///
/// # Safety
/// Each list is null, or a null-terminated list of strings.
pub(crate) unsafe fn is_mentioned(lists: [*const *const c_char; 2]) -> bool {
    let mut left = LOOKED_AT_MAX;
    for mut list in lists.into_iter().filter(|list| !list.is_null()) {
        // SAFETY: as the caller says.
        while let Some(text) = unsafe { (*list).as_ref() } {
            // SAFETY: a string of the list.
            let text = unsafe { CStr::from_ptr(text) }.to_bytes();
            left = left.saturating_sub(text.len());
            if left == 0 || start::mounts().iter().any(|m| mentions(text, &m.mount.prefix)) {
                return true;
            }
            // SAFETY: not the end of the list yet.
            list = unsafe { list.add(1) };
        }
    }
    false
}
