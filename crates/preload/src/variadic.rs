//! Variadic libc functions, which Rust cannot declare, and `dlopen` and `dlmopen`, whose caller libc
//! inspects. Each saves its registers and continues in ordinary code.
//!
//! For `execl` and its relatives, the arguments in registers are put below those on the stack, which gives
//! a list like that of `execv`. For `dprintf`, all registers that may carry arguments are stored, and
//! described by a `va_list` (System V ABI for x86-64, section 3.5.7; procedure call standard for the Arm 64-bit
//! architecture, appendix B), which is passed on like that of `vdprintf`.

use crate::hooks::{exec, libraries, streams};
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

macro_rules! formatted {
    // The arguments before the variable ones, and the registers of the argument after them.
    ($name:ident, $before:literal, $list_x86_64:literal, $list_aarch64:literal, $handler:path) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "sub rsp, 216",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "movaps [rsp + 48], xmm0",
                "movaps [rsp + 64], xmm1",
                "movaps [rsp + 80], xmm2",
                "movaps [rsp + 96], xmm3",
                "movaps [rsp + 112], xmm4",
                "movaps [rsp + 128], xmm5",
                "movaps [rsp + 144], xmm6",
                "movaps [rsp + 160], xmm7",
                "mov dword ptr [rsp + 176], {before} * 8",
                "mov dword ptr [rsp + 180], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 184], rax",
                "mov [rsp + 192], rsp",
                concat!("lea ", $list_x86_64, ", [rsp + 176]"),
                "call {handler}",
                "add rsp, 216",
                "ret",
                before = const $before,
                handler = sym $handler,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "sub sp, sp, #256",
                "stp x29, x30, [sp]",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #80]",
                "stp q2, q3, [sp, #112]",
                "stp q4, q5, [sp, #144]",
                "stp q6, q7, [sp, #176]",
                "add x9, sp, #256",
                "add x10, sp, #80",
                "add x11, sp, #208",
                "stp x9, x10, [sp, #208]",
                "str x11, [sp, #224]",
                "mov w9, #({before} - 8) * 8",
                "mov w10, #-128",
                "stp w9, w10, [sp, #232]",
                concat!("add ", $list_aarch64, ", sp, #208"),
                "bl {handler}",
                "ldp x29, x30, [sp]",
                "add sp, sp, #256",
                "ret",
                before = const $before,
                handler = sym $handler,
            )
        }
    };
}

formatted!(dprintf, 2, "rdx", "x2", streams::vdprintf);
formatted!(__dprintf_chk, 3, "rcx", "x3", streams::vdprintf_checked);

/// `dlopen(path, mode)`: jumps to libc's function with the path of a local copy, so that libc sees the true
/// caller, whose search path applies.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen() {
    naked_asm!(
        "push rsi",
        "mov rsi, [rsp + 8]",
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
        "mov x1, x30",
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
        "mov rsi, [rsp + 24]",
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
        "mov x1, x30",
        "bl {choose}",
        "mov x16, x1",
        "mov x1, x0",
        "ldp x0, x2, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        choose = sym libraries::choose_apart,
    )
}
