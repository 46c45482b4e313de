//! System calls, and the functions that the compiler expects from a C library.

use core::arch::asm;

/// Numbers of the system calls in use.
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
    pub(crate) const GETCWD: usize = 79;
    pub(crate) const UMASK: usize = 95;
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
    pub(crate) const PRLIMIT: usize = 302;
    pub(crate) const GETRANDOM: usize = 318;
    pub(crate) const PIDFD_OPEN: usize = 434;
}
/// Numbers of the system calls in use.
#[cfg(target_arch = "aarch64")]
#[rustfmt::skip]
mod numbers {
    pub(crate) const FGETXATTR: usize = 10;
    pub(crate) const GETCWD: usize = 17;
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
    pub(crate) const UMASK: usize = 166;
    pub(crate) const PRCTL: usize = 167;
    pub(crate) const GETPID: usize = 172;
    pub(crate) const GETEUID: usize = 175;
    pub(crate) const GETEGID: usize = 177;
    pub(crate) const CLONE: usize = 220;
    pub(crate) const EXECVE: usize = 221;
    pub(crate) const MMAP: usize = 222;
    pub(crate) const PRLIMIT: usize = 261;
    pub(crate) const GETRANDOM: usize = 278;
    pub(crate) const PIDFD_OPEN: usize = 434;
}
pub(crate) use numbers::*;

/// `AT_FDCWD`: the working directory, for calls that take a directory's descriptor.
pub(crate) const HERE: usize = -100isize as usize;
/// `O_CLOEXEC`.
pub(crate) const CLOEXEC: usize = 0o2000000;

/// Makes a system call. Returns its result, or `None` if it fails.
///
/// # Safety
/// As for the system call.
pub(crate) unsafe fn call<const COUNT: usize>(
    number: usize,
    arguments: [usize; COUNT],
) -> Option<usize> {
    let at = |place: usize| arguments.get(place).copied().unwrap_or(0);
    let result: isize;
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel changes this register and no others, and memory only as the caller allows.
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
    // SAFETY: the kernel changes the listed output registers and no others, and memory only as the caller
    // allows.
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
    // SAFETY: these calls take no arguments and cannot fail.
    unsafe { call(of, []) }.unwrap_or(0) as u32
}

/// Sets the umask and returns the one before.
pub(crate) fn umask(mask: u32) -> u32 {
    // SAFETY: this call touches no memory, and cannot fail.
    unsafe { call(UMASK, [mask as usize]) }.unwrap_or(0) as u32
}

/// Returns the number of this process.
pub(crate) fn process() -> u32 {
    number(GETPID)
}

/// Returns the effective user and group.
pub(crate) fn user() -> (u32, u32) {
    (number(GETEUID), number(GETEGID))
}

/// Ends the process.
pub(crate) fn exit(status: usize) -> ! {
    loop {
        // SAFETY: the call does not return.
        unsafe { call(EXIT_GROUP, [status]) };
    }
}

/// Writes to standard error.
pub(crate) fn complain(text: &[u8]) {
    // SAFETY: the memory has the length passed.
    unsafe { call(WRITE, [2, text.as_ptr() as usize, text.len()]) };
}

/// Opens a file for reading. The path must end with a zero byte.
pub(crate) fn open(path: &[u8]) -> Option<usize> {
    // SAFETY: the caller passes a path that ends with a zero byte.
    unsafe { call(OPENAT, [HERE, path.as_ptr() as usize, CLOEXEC]) }
}

/// Returns whether standard input, output and error are each closed.
pub(crate) fn missing_streams() -> [bool; 3] {
    const INVALID: u64 = 0x20;
    // Each a `struct pollfd`: the descriptor, then requested and returned events.
    let mut streams = [0u64, 1, 2];
    let at_once = [0u64; 2];
    let how = [streams.as_mut_ptr() as usize, streams.len(), at_once.as_ptr() as usize, 0];
    // SAFETY: there are as many structures of eight bytes as passed, and a timeout of two words.
    unsafe { call(PPOLL, how) };
    streams.map(|stream| stream >> 48 & INVALID != 0)
}

/// Occupies the numbers of closed standard streams, so that no other file gets them and is taken for a
/// stream. It uses a descriptor that can be neither read nor written, exists everywhere, and is closed when
/// another program is executed.
pub(crate) fn fill_missing_streams() {
    for _ in missing_streams().into_iter().filter(|is_missing| *is_missing) {
        // The kernel assigns the lowest free number, which is the next missing stream.
        open(b"/\0");
    }
}

/// Closes a descriptor.
pub(crate) fn close(fd: usize) {
    // SAFETY: the descriptor belongs to this code, which does not use it again.
    unsafe { call(CLOSE, [fd]) };
}

/// Reads the beginning of a file.
pub(crate) fn read(fd: usize, to: &mut [u8]) -> Option<&[u8]> {
    // SAFETY: the memory has the length passed.
    let count = unsafe { call(READ, [fd, to.as_mut_ptr() as usize, to.len()]) }?;
    to.get(..count)
}

// Functions that the compiler generates calls to. They only handle short pieces, so the simplest way is
// enough.

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in C.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in C. Written in assembly, so that the compiler cannot turn the loop into a call of
    // `memcpy`.
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

/// The unwinder's function, which Rust's core library refers to. Nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
