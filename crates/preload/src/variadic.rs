//! Variadic libc functions, which Rust cannot declare, and `dlopen` and `dlmopen`, whose caller libc
//! inspects. Each saves its registers and continues in ordinary code.
//!
//! For `execl` and its relatives, the arguments in registers are put below those on the stack, which gives
//! a list like that of `execv`.

use crate::hooks::{exec, libraries};
use std::arch::naked_asm;

macro_rules! listed {
    ($name:ident, $handler:path) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "pop r11",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push r11",
                "call {handler}",
                "pop r11",
                "add rsp, 40",
                "push r11",
                "ret",
                handler = sym $handler,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "sub sp, sp, #80",
                "stp x29, x30, [sp]",
                "stp x1, x2, [sp, #24]",
                "stp x3, x4, [sp, #40]",
                "stp x5, x6, [sp, #56]",
                "str x7, [sp, #72]",
                "add x1, sp, #24",
                "bl {handler}",
                "ldp x29, x30, [sp]",
                "add sp, sp, #80",
                "ret",
                handler = sym $handler,
            )
        }
    };
}

listed!(execl, exec::execl);
listed!(execlp, exec::execlp);
listed!(execle, exec::execle);

/// `dlopen(path, mode)`: jumps to libc's function with the path of a local copy, so that libc sees the true
/// caller, whose search path applies.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen() {
    naked_asm!(
        "push rsi",
        "call {choose}",
        "pop rsi",
        "mov rdi, rax",
        "jmp rdx",
        choose = sym libraries::choose,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen() {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "str x1, [sp, #16]",
        "bl {choose}",
        "mov x16, x1",
        "ldr x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        choose = sym libraries::choose,
    )
}

/// `dlmopen(name_space, path, mode)`, likewise.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlmopen() {
    naked_asm!(
        "push rdi",
        "push rdx",
        "sub rsp, 8",
        "mov rdi, rsi",
        "call {choose}",
        "mov rsi, rax",
        "mov r11, rdx",
        "add rsp, 8",
        "pop rdx",
        "pop rdi",
        "jmp r11",
        choose = sym libraries::choose_apart,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlmopen() {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x2, [sp, #16]",
        "mov x0, x1",
        "bl {choose}",
        "mov x16, x1",
        "mov x1, x0",
        "ldp x0, x2, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        choose = sym libraries::choose_apart,
    )
}
