//! System calls, and what the compiler takes for granted of a C library.

use core::arch::asm;

/// Numbers of those that are used.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
mod numbers {
    pub(crate) const READ: usize = 0;
    pub(crate) const WRITE: usize = 1;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const PWRITE: usize = 18;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const EXECVE: usize = 59;
    pub(crate) const FLOCK: usize = 73;
    pub(crate) const FTRUNCATE: usize = 77;
    pub(crate) const GETEUID: usize = 107;
    pub(crate) const GETEGID: usize = 108;
    pub(crate) const SETSID: usize = 112;
    pub(crate) const STATFS: usize = 137;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const FGETXATTR: usize = 193;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const MKDIRAT: usize = 258;
    pub(crate) const FSTATAT: usize = 262;
    pub(crate) const UNLINKAT: usize = 263;
    pub(crate) const FACCESSAT: usize = 269;
    pub(crate) const PPOLL: usize = 271;
    pub(crate) const GETRANDOM: usize = 318;
    pub(crate) const PIDFD_OPEN: usize = 434;
}
/// As above.
#[cfg(target_arch = "aarch64")]
#[rustfmt::skip]
mod numbers {
    pub(crate) const FGETXATTR: usize = 10;
    pub(crate) const FLOCK: usize = 32;
    pub(crate) const MKDIRAT: usize = 34;
    pub(crate) const UNLINKAT: usize = 35;
    pub(crate) const STATFS: usize = 43;
    pub(crate) const FTRUNCATE: usize = 46;
    pub(crate) const FACCESSAT: usize = 48;
    pub(crate) const OPENAT: usize = 56;
    pub(crate) const CLOSE: usize = 57;
    pub(crate) const READ: usize = 63;
    pub(crate) const WRITE: usize = 64;
    pub(crate) const PWRITE: usize = 68;
    pub(crate) const PPOLL: usize = 73;
    pub(crate) const FSTATAT: usize = 79;
    pub(crate) const EXIT_GROUP: usize = 94;
    pub(crate) const CLOCK_GETTIME: usize = 113;
    pub(crate) const RT_SIGPROCMASK: usize = 135;
    pub(crate) const SETSID: usize = 157;
    pub(crate) const PRCTL: usize = 167;
    pub(crate) const GETPID: usize = 172;
    pub(crate) const GETEUID: usize = 175;
    pub(crate) const GETEGID: usize = 177;
    pub(crate) const CLONE: usize = 220;
    pub(crate) const EXECVE: usize = 221;
    pub(crate) const MMAP: usize = 222;
    pub(crate) const GETRANDOM: usize = 278;
    pub(crate) const PIDFD_OPEN: usize = 434;
}
pub(crate) use numbers::*;

/// The working directory, for calls that want a directory's descriptor.
pub(crate) const HERE: usize = -100isize as usize;
/// Flag of `open`.
pub(crate) const CLOEXEC: usize = 0o2000000;

/// A system call; what it gives, `None` when it fails.
///
/// # Safety
/// As the call says.
pub(crate) unsafe fn call<const COUNT: usize>(
    number: usize,
    arguments: [usize; COUNT],
) -> Option<usize> {
    let at = |place: usize| arguments.get(place).copied().unwrap_or(0);
    let result: isize;
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel changes this register and no others, and memory as the caller says.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") at(0) as isize => result,
            in("x1") at(1), in("x2") at(2), in("x3") at(3), in("x4") at(4), in("x5") at(5),
            options(nostack),
        );
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel changes these two registers and no others, and memory as the caller says.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") at(0), in("rsi") at(1), in("rdx") at(2),
            in("r10") at(3), in("r8") at(4), in("r9") at(5),
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    usize::try_from(result).ok()
}

fn number(of: usize) -> u32 {
    // SAFETY: calls without arguments that cannot fail.
    unsafe { call(of, []) }.unwrap_or(0) as u32
}

/// The number of this process.
pub(crate) fn process() -> u32 {
    number(GETPID)
}

/// Effective user and group.
pub(crate) fn user() -> (u32, u32) {
    (number(GETEUID), number(GETEGID))
}

/// Ends the process.
pub(crate) fn exit(status: usize) -> ! {
    loop {
        // SAFETY: does not come back.
        unsafe { call(EXIT_GROUP, [status]) };
    }
}

/// Writes to standard error.
pub(crate) fn complain(text: &[u8]) {
    // SAFETY: as long as said.
    unsafe { call(WRITE, [2, text.as_ptr() as usize, text.len()]) };
}

/// Opens a file, whose name ends with a zero byte, for reading.
pub(crate) fn open(path: &[u8]) -> Option<usize> {
    // SAFETY: the name ends with a zero byte, as the caller says.
    unsafe { call(OPENAT, [HERE, path.as_ptr() as usize, CLOEXEC]) }
}

/// For standard input, output and error whether it is closed.
pub(crate) fn missing_streams() -> [bool; 3] {
    const INVALID: u64 = 0x20;
    // A descriptor, and behind it what is asked and what is answered.
    let mut streams = [0u64, 1, 2];
    let at_once = [0u64; 2];
    let how = [streams.as_mut_ptr() as usize, streams.len(), at_once.as_ptr() as usize, 0];
    // SAFETY: so many of eight bytes, and a structure of two words.
    unsafe { call(PPOLL, how) };
    streams.map(|stream| stream >> 48 & INVALID != 0)
}

/// Takes the places of standard streams that are closed, so that nothing else comes there and is taken for one: by what can
/// be neither read nor written, is everywhere, and is closed again when another program is executed.
pub(crate) fn fill_missing_streams() {
    for _ in missing_streams().into_iter().filter(|is_missing| *is_missing) {
        // The lowest number that is free is taken, so it is the next of them.
        open(b"/\0");
    }
}

/// Closes a descriptor.
pub(crate) fn close(fd: usize) {
    // SAFETY: a descriptor of ours that is not used again.
    unsafe { call(CLOSE, [fd]) };
}

/// Reads the beginning of a file.
pub(crate) fn read(fd: usize, to: &mut [u8]) -> Option<&[u8]> {
    // SAFETY: as long as said.
    let count = unsafe { call(READ, [fd, to.as_mut_ptr() as usize, to.len()]) }?;
    to.get(..count)
}

// What the compiler makes calls of. Short pieces only, so the simplest way.

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in C.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in C. Instructions of its own, of which no call of `memcpy` can be made.
    unsafe {
        asm!("1: cbz {count}, 2f", "ldrb {byte:w}, [{from}], #1", "strb {byte:w}, [{to}], #1",
            "sub {count}, {count}, #1", "b 1b", "2:",
            count = inout(reg) count => _, to = inout(reg) to => _, from = inout(reg) from => _,
            byte = out(reg) _, options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, count: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in C.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") value as u8,
            options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("1: cbz {count}, 2f", "strb {value:w}, [{to}], #1", "sub {count}, {count}, #1", "b 1b",
            "2:", count = inout(reg) count => _, to = inout(reg) to => _, value = in(reg) value,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    let mut at = 0;
    while at < count {
        // SAFETY: as in C.
        let (a, b) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
        at += 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    // SAFETY: as in C.
    unsafe { memcmp(one, other, count) }
}

/// The unwinder's, which the language's core library names. Nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
