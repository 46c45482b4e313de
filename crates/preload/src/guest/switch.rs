//! The border between a guest and our code: switches the thread pointer.
//!
//! The guest's code has its own libc, or none, and hence its own use of the FS register; our code needs the
//! FS of our libc. GS, which no x86-64 libc uses, points to a [`Thread`] that knows both. Everything that
//! changes between the two is here, in one range of code whose system calls are not trapped.
//!
//! No handler of the guest may run with our FS. So all signals are blocked while a trapped call is
//! answered, except for those without a handler (`calls.rs`), and except while `towline_guest_wait` has
//! restored the guest's FS.

use crate::guard::{checked, system_call};
use crate::trap::masks;
use libc::{c_int, c_void, ucontext_t};
use std::arch::global_asm;
use std::mem::offset_of;
use std::ops::Range;
use std::ptr::null_mut;

/// A thread of a guest. The assembly code relies on the offsets of the first fields.
#[repr(C)]
pub(super) struct Thread {
    /// FS of our code.
    ours: usize,
    /// FS of the guest.
    pub(super) its: usize,
    /// The byte that the kernel reads to decide whether to trap a call of this thread.
    selector: *mut u8,
    /// Our stack pointer where the guest was entered, to which a thread returns when it ends.
    entered: usize,
    /// Word to clear when the thread ends (`CLONE_CHILD_CLEARTID`).
    pub(super) clears: *mut c_int,
    /// Memory to unmap when the thread ends: its own stack.
    pub(super) unmaps: Range<usize>,
    /// Signal stack to use while the guest has set none: its other stack may be very short.
    pub(super) spare: usize,
    /// Whether this is the process's first thread, after whose end others may continue.
    pub(super) is_first: bool,
    /// Set when a filter of the guest's own has trapped a call of ours.
    pub(super) is_refused: bool,
    /// Initial registers of a handler of `SIGSYS`, and the frame that it finds.
    pub(super) begins: Option<Box<(ucontext_t, Vec<u8>)>>,
}

const _: () = assert!(
    offset_of!(Thread, ours) == 0
        && offset_of!(Thread, its) == 8
        && offset_of!(Thread, selector) == 16
        && offset_of!(Thread, entered) == 24
);

unsafe extern "C" {
    static towline_guest_code: u8;
    static towline_guest_code_end: u8;
    static towline_guest_bare: u8;
    static towline_guest_pass: u8;
    fn towline_guest_signal();
    fn towline_guest_enter(context: *const ucontext_t);
    fn towline_guest_handle(
        target: usize,
        source: *const u8,
        bytes: usize,
        context: *const ucontext_t,
    ) -> !;
    fn towline_guest_leave() -> !;
    fn towline_guest_wait(number: i64, arguments: *const usize) -> isize;
    fn towline_guest_unmasked(number: i64, arguments: *const usize, mask: *const u64) -> isize;
}

global_asm!(
    ".pushsection .text.towline_guest, \"ax\", @progbits",
    ".balign 64",
    ".hidden towline_guest_code",
    ".globl towline_guest_code",
    "towline_guest_code:",
    // The handler of SIGSYS: (signal, information, context), on the signal stack.
    ".hidden towline_guest_signal",
    ".globl towline_guest_signal",
    "towline_guest_signal:",
    "mov rax, gs:[16]",
    "movzx ecx, byte ptr [rax]",
    "mov byte ptr [rax], 0",
    "mov rax, gs:[0]",
    "wrfsbase rax",
    "cld",
    "push rcx",
    "call {answer}",
    "pop rcx",
    // Drop the return address: `rt_sigreturn` expects the stack pointer behind it.
    "add rsp, 8",
    "test ecx, ecx",
    "jnz 2f",
    // Return to our own code.
    "mov eax, 15",
    "syscall",
    // Return to the guest, with the registers of the context that the stack pointer is at.
    "2:",
    "mov rax, gs:[8]",
    "wrfsbase rax",
    "mov rax, gs:[16]",
    "mov byte ptr [rax], 1",
    "mov eax, 15",
    "syscall",
    // Makes a call from which nothing returns here.
    ".hidden towline_guest_bare",
    ".globl towline_guest_bare",
    "towline_guest_bare:",
    "syscall",
    "ud2",
    // Makes a call of the guest, whose return address lies below its red zone.
    ".hidden towline_guest_pass",
    ".globl towline_guest_pass",
    "towline_guest_pass:",
    "syscall",
    "ret 128",
    // Enters the guest with the registers of a context.
    ".hidden towline_guest_enter",
    ".globl towline_guest_enter",
    "towline_guest_enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov gs:[24], rsp",
    "mov rsp, rdi",
    "jmp 2b",
    // (target, source, bytes, context): copies a frame to a stack of the guest, maybe over the current one,
    // and continues with the registers of the context.
    ".hidden towline_guest_handle",
    ".globl towline_guest_handle",
    "towline_guest_handle:",
    "mov r8, rcx",
    "mov rcx, rdx",
    "rep movsb",
    "mov rsp, r8",
    "jmp 2b",
    // Returns to the caller of towline_guest_enter.
    ".hidden towline_guest_leave",
    ".globl towline_guest_leave",
    "towline_guest_leave:",
    "mov rsp, gs:[24]",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    // (number, arguments): makes a call during which handlers of the guest may run.
    ".hidden towline_guest_wait",
    ".globl towline_guest_wait",
    "towline_guest_wait:",
    "push rbx",
    "mov rbx, rsi",
    "mov rax, gs:[8]",
    "wrfsbase rax",
    "mov rax, gs:[16]",
    "mov byte ptr [rax], 1",
    "mov rax, rdi",
    "mov rdi, [rbx]",
    "mov rsi, [rbx + 8]",
    "mov rdx, [rbx + 16]",
    "mov r10, [rbx + 24]",
    "mov r8, [rbx + 32]",
    "mov r9, [rbx + 40]",
    "syscall",
    "mov rcx, gs:[16]",
    "mov byte ptr [rcx], 0",
    "mov rcx, gs:[0]",
    "wrfsbase rcx",
    "pop rbx",
    "ret",
    // (number, arguments, mask): makes a call during which handlers may run that this mask admits.
    ".hidden towline_guest_unmasked",
    ".globl towline_guest_unmasked",
    "towline_guest_unmasked:",
    "push rbx",
    "push r12",
    "mov rbx, rsi",
    "mov r12, rdi",
    "mov rax, gs:[8]",
    "wrfsbase rax",
    "mov rax, gs:[16]",
    "mov byte ptr [rax], 1",
    "mov eax, 14",
    "mov edi, 2",
    "mov rsi, rdx",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "mov rax, r12",
    "mov rdi, [rbx]",
    "mov rsi, [rbx + 8]",
    "mov rdx, [rbx + 16]",
    "mov r10, [rbx + 24]",
    "mov r8, [rbx + 32]",
    "mov r9, [rbx + 40]",
    "syscall",
    "mov r12, rax",
    // Block all signals again.
    "push -1",
    "mov eax, 14",
    "mov edi, 2",
    "mov rsi, rsp",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "pop rax",
    "mov rcx, gs:[16]",
    "mov byte ptr [rcx], 0",
    "mov rcx, gs:[0]",
    "wrfsbase rcx",
    "mov rax, r12",
    "pop r12",
    "pop rbx",
    "ret",
    ".hidden towline_guest_code_end",
    ".globl towline_guest_code_end",
    "towline_guest_code_end:",
    ".popsection",
    answer = sym super::calls::answer,
);

/// Size of the area below the stack pointer that belongs to the guest, by the x86-64 ABI.
const RED_ZONE: usize = 128;
/// Size of the signal stack that a thread uses while the guest has set none.
const SPARE_BYTES: usize = 64 * 1024;

/// Returns the range of code whose calls are not trapped.
pub(super) fn code() -> Range<usize> {
    &raw const towline_guest_code as usize..&raw const towline_guest_code_end as usize
}

/// Returns the address of the handler of `SIGSYS` for the kernel.
pub(super) fn handler() -> usize {
    towline_guest_signal as *const () as usize
}

/// Continues with the call in the registers, untrapped, and does not return from it.
pub(super) fn bare(context: &mut ucontext_t) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = &raw const towline_guest_bare as i64;
}

/// Continues with the call in the registers, untrapped, and then after the guest's own call: registers,
/// stack and signals are as if the call were made there.
///
/// # Safety
/// `context` is that of a trapped call.
pub(super) unsafe fn pass(context: &mut ucontext_t) {
    let registers = &mut context.uc_mcontext.gregs;
    let stack = registers[libc::REG_RSP as usize] as usize - RED_ZONE - size_of::<usize>();
    // SAFETY: the guest's stack is free below its red zone.
    unsafe { (stack as *mut i64).write_unaligned(registers[libc::REG_RIP as usize]) };
    registers[libc::REG_RSP as usize] = stack as i64;
    registers[libc::REG_RIP as usize] = &raw const towline_guest_pass as i64;
}

/// Makes a waiting call that has its own signal mask, during which handlers of the guest may run.
///
/// # Safety
/// As for that system call.
pub(super) unsafe fn wait(number: i64, arguments: &[usize; 6]) -> isize {
    // SAFETY: as the caller says.
    unsafe { towline_guest_wait(number, arguments.as_ptr()) }
}

/// Makes a call with this signal mask, during which handlers of the guest may run.
///
/// # Safety
/// As for that system call; all signals are blocked.
pub(super) unsafe fn unmasked(number: i64, arguments: &[usize; 6], mask: u64) -> isize {
    // SAFETY: as the caller says.
    unsafe { towline_guest_unmasked(number, arguments.as_ptr(), &raw const mask) }
}

impl Thread {
    /// Makes the state of this thread for a guest that starts with the FS `its`.
    pub(super) fn new(its: usize, is_first: bool) -> Result<Self, i32> {
        let ours: usize;
        // SAFETY: reads a register that `is_possible` has found to be readable.
        unsafe { std::arch::asm!("rdfsbase {}", out(reg) ours) };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let memory = [0, SPARE_BYTES, access as usize, flags as usize, usize::MAX, 0];
        // SAFETY: new memory.
        let spare = unsafe { checked(libc::SYS_mmap, memory) }?;
        Ok(Self {
            ours,
            its,
            selector: crate::guard::selector(),
            entered: 0,
            clears: null_mut(),
            unmaps: 0..0,
            spare,
            is_first,
            is_refused: false,
            begins: None,
        })
    }

    /// Returns the state of the running thread.
    ///
    /// # Safety
    /// The thread is one of a guest; no other reference to the state exists.
    pub(super) unsafe fn current<'a>() -> &'a mut Self {
        let at: usize;
        // SAFETY: GS holds its address since `traps`.
        unsafe {
            std::arch::asm!("rdgsbase {}", out(reg) at);
            &mut *(at as *mut Self)
        }
    }

    /// Returns the signal stack that the kernel has while the guest has set none.
    pub(super) fn spare_stack(&self) -> libc::stack_t {
        libc::stack_t { ss_sp: self.spare as *mut c_void, ss_flags: 0, ss_size: SPARE_BYTES }
    }

    /// Traps the calls of this thread from here on, if the selector says so.
    ///
    /// # Safety
    /// `self` does not move until [`Self::end`].
    pub(super) unsafe fn traps(&mut self) -> Result<(), i32> {
        const ARCH_SET_GS: usize = 0x1001;
        let stack = self.spare_stack();
        let gs = [ARCH_SET_GS, &raw mut *self as usize, 0, 0, 0, 0];
        // SAFETY: as the caller says.
        unsafe {
            checked(libc::SYS_arch_prctl, gs)?;
            checked(libc::SYS_sigaltstack, [&raw const stack as usize, 0, 0, 0, 0, 0])?;
            self.dispatches()
        }
    }

    /// Enables the kernel's trap, which children do not inherit.
    pub(super) fn dispatches(&self) -> Result<(), i32> {
        const ON: usize = 1;
        let exempt = code();
        let call = [
            masks::PR_SET_SYSCALL_USER_DISPATCH,
            ON,
            exempt.start,
            exempt.len(),
            self.selector as usize,
            0,
        ];
        // SAFETY: the selector lives as long as the thread.
        unsafe { checked(libc::SYS_prctl, call) }.map(drop)
    }

    /// Runs the guest with the registers of a context until the thread ends.
    ///
    /// # Safety
    /// The guest can continue with the registers; all signals are blocked.
    pub(super) unsafe fn enter(&mut self, context: &ucontext_t) {
        // SAFETY: as the caller says.
        unsafe { towline_guest_enter(context) };
    }

    /// Puts the frame of `begins` in its place and continues with its registers.
    ///
    /// # Safety
    /// As for [`Self::enter`]; called within a handler of ours that is never returned to; the place belongs
    /// to the guest.
    pub(super) unsafe fn handle(place: usize, begins: &(ucontext_t, Vec<u8>)) -> ! {
        let (context, frame) = begins;
        // SAFETY: as the caller says.
        unsafe { towline_guest_handle(place, frame.as_ptr(), frame.len(), context) }
    }

    /// Returns from [`Self::enter`], from within a trapped call with all signals blocked.
    ///
    /// # Safety
    /// Nothing on the abandoned stack needs to be dropped.
    pub(super) unsafe fn leave() -> ! {
        // SAFETY: as the caller says.
        unsafe { towline_guest_leave() }
    }

    /// Releases what a thread had, and wakes a thread that waits for its end.
    pub(super) fn end(self) {
        let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: nothing of the guest runs in this thread any more; the word and the memory are the
        // guest's, as it said.
        unsafe {
            system_call(libc::SYS_sigaltstack, [&raw const none as usize, 0, 0, 0, 0, 0]);
            system_call(libc::SYS_munmap, [self.spare, SPARE_BYTES, 0, 0, 0, 0]);
            if !self.unmaps.is_empty() {
                system_call(libc::SYS_munmap, [self.unmaps.start, self.unmaps.len(), 0, 0, 0, 0]);
            }
            if !self.clears.is_null() {
                self.clears.write_volatile(0);
                let wake = [self.clears as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0];
                system_call(libc::SYS_futex, wake);
            }
        }
    }
}
