//! The entry point of the program, which runs before the dynamic linker is loaded: it calls `launch` (see
//! there). A note in the program file names the dynamic linker, which the kernel does not see, for code that
//! examines programs ([`towline_instance::program::Form`]).

#![allow(unsafe_code)] // the first instructions of a program

use std::arch::global_asm;

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.towline_begin, \"ax\", @progbits",
    ".globl towline_begin",
    ".type towline_begin, @function",
    "towline_begin:",
    // If the dynamic linker was started by name, all of this has been done. It passes a function to call at
    // exit; the kernel passes null.
    "test %rdx, %rdx",
    "jnz _start",
    "xor %ebp, %ebp",
    "mov %rsp, %rbx",
    "mov %rsp, %rdi",
    "lea _start(%rip), %rsi",
    "and $-16, %rsp",
    concat!("call towline_launch + ", env!("TOWLINE_LAUNCH_ENTRY")),
    // Enter the program as the kernel does.
    "mov %rbx, %rsp",
    "xor %edx, %edx",
    "jmp *%rax",
    ".size towline_begin, . - towline_begin",
    ".balign 4096",
    "towline_launch:",
    concat!(".incbin \"", env!("TOWLINE_LAUNCH"), "\""),
    ".popsection",
    ".pushsection .note.towline, \"a\", @note",
    ".balign 4",
    ".long 8, 28, 1",
    ".asciz \"Towline\"",
    ".asciz \"/lib64/ld-linux-x86-64.so.2\"",
    ".popsection",
    options(att_syntax)
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.towline_begin, \"ax\", %progbits",
    ".globl towline_begin",
    ".type towline_begin, %function",
    "towline_begin:",
    // As above.
    "cbnz x0, 1f",
    "mov x29, xzr",
    "mov x30, xzr",
    "mov x19, sp",
    "mov x0, sp",
    "adrp x1, _start",
    "add x1, x1, :lo12:_start",
    concat!("bl towline_launch + ", env!("TOWLINE_LAUNCH_ENTRY")),
    "mov sp, x19",
    "mov x16, x0",
    "mov x0, xzr",
    "br x16",
    "1: b _start",
    ".size towline_begin, . - towline_begin",
    ".balign 4096",
    "towline_launch:",
    concat!(".incbin \"", env!("TOWLINE_LAUNCH"), "\""),
    ".popsection",
    ".pushsection .note.towline, \"a\", %note",
    ".balign 4",
    ".long 8, 27, 1",
    ".asciz \"Towline\"",
    ".asciz \"/lib/ld-linux-aarch64.so.1\"",
    ".balign 4",
    ".popsection",
);
