//! The border between a guest and us: whose thread pointer a thread has.
//!
//! The code of the guest has a libc of its own, or none, and with it its own idea of what the register
//! FS points to; our code needs that of our libc. GS, which no libc for x86-64 uses, points to a
//! [`Thread`] that knows both. All that changes from one to the other is here, in one piece of code,
//! from which system calls are not trapped.
//!
//! No handler of the guest may run with our FS: all signals wait while a trapped call is answered,
//! except for those without a handler (`calls.rs`), and while `towline_guest_wait` has given FS back.

use crate::guard::{checked, system_call};
use crate::trap::masks;
use libc::{c_int, c_void, ucontext_t};
use std::arch::global_asm;
use std::mem::offset_of;
use std::ops::Range;
use std::ptr::null_mut;

/// A thread of a guest. Code here knows the places of the first fields.
#[repr(C)]
pub(super) struct Thread {
    /// FS of our code.
    ours: usize,
    /// FS of the guest.
    pub(super) its: usize,
    /// What the kernel looks at before it traps a call of this thread.
    selector: *mut u8,
    /// Our stack where the guest was entered: a thread that ends goes back there.
    entered: usize,
    /// To be cleared when the thread ends (`CLONE_CHILD_CLEARTID`).
    pub(super) clears: *mut c_int,
    /// What the thread still has to unmap when it ends: its own stack.
    pub(super) unmaps: Range<usize>,
    /// The stack for signals while the guest has none: it may have no other, or a very short one.
    pub(super) spare: usize,
    /// The process's first thread: when it ends others may go on.
    pub(super) is_first: bool,
    /// A filter of the guest's own trapped a call of ours.
    pub(super) is_refused: bool,
    /// What a handler of `SIGSYS` begins with, and the frame that it finds.
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
    // The handler of SIGSYS: (signal, information, context), on the stack for signals.
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
    // With the kernel's return address, as `rt_sigreturn` wants to find it.
    "add rsp, 8",
    "test ecx, ecx",
    "jnz 2f",
    // To our own code.
    "mov eax, 15",
    "syscall",
    // To the guest, with the registers of the context that the stack begins with.
    "2:",
    "mov rax, gs:[8]",
    "wrfsbase rax",
    "mov rax, gs:[16]",
    "mov byte ptr [rax], 1",
    "mov eax, 15",
    "syscall",
    // A call as it stands, of which nobody comes back here.
    ".hidden towline_guest_bare",
    ".globl towline_guest_bare",
    "towline_guest_bare:",
    "syscall",
    "ud2",
    // A call of the guest, which finds where to go on below its red zone.
    ".hidden towline_guest_pass",
    ".globl towline_guest_pass",
    "towline_guest_pass:",
    "syscall",
    "ret 128",
    // Begins the guest with the registers of a context.
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
    // (target, source, bytes, context): puts a frame into a stack of the guest, maybe over the one that we are on, and goes
    // on with the registers of the context.
    ".hidden towline_guest_handle",
    ".globl towline_guest_handle",
    "towline_guest_handle:",
    "mov r8, rcx",
    "mov rcx, rdx",
    "rep movsb",
    "mov rsp, r8",
    "jmp 2b",
    // Back from it, to whoever called that.
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
    // (number, arguments): a call in which handlers of the guest may run.
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
    // (number, arguments, mask): a call in which those may run that this mask lets in.
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
    // All signals wait again.
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

/// Bytes below a guest's stack pointer that are its own, as the ABI of x86-64 has it.
const RED_ZONE: usize = 128;
/// Bytes of the stack for signals that a guest's thread has while the guest gave it none.
const SPARE_BYTES: usize = 64 * 1024;

/// Code from which calls are not trapped.
pub(super) fn code() -> Range<usize> {
    &raw const towline_guest_code as usize..&raw const towline_guest_code_end as usize
}

/// What the kernel is to call on `SIGSYS`.
pub(super) fn handler() -> usize {
    towline_guest_signal as *const () as usize
}

/// Goes on with the call that the registers hold, from where it is not trapped, and nowhere after it.
pub(super) fn bare(context: &mut ucontext_t) {
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = &raw const towline_guest_bare as i64;
}

/// Goes on with the call that the registers hold, from where it is not trapped, and then behind the
/// guest's own: with all registers, its stack and signals as if it were made there.
///
/// # Safety
/// The context is that of a trapped call.
pub(super) unsafe fn pass(context: &mut ucontext_t) {
    let registers = &mut context.uc_mcontext.gregs;
    let stack = registers[libc::REG_RSP as usize] as usize - RED_ZONE - size_of::<usize>();
    // SAFETY: the guest's stack goes on below its red zone.
    unsafe { (stack as *mut i64).write_unaligned(registers[libc::REG_RIP as usize]) };
    registers[libc::REG_RSP as usize] = stack as i64;
    registers[libc::REG_RIP as usize] = &raw const towline_guest_pass as i64;
}

/// Makes a call that waits with a signal mask of its own, in which handlers of the guest may run.
///
/// # Safety
/// As for that system call.
pub(super) unsafe fn wait(number: i64, arguments: &[usize; 6]) -> isize {
    // SAFETY: as the caller says.
    unsafe { towline_guest_wait(number, arguments.as_ptr()) }
}

/// Makes a call in which handlers of the guest may run, with this signal mask.
///
/// # Safety
/// As for that system call; all signals are blocked.
pub(super) unsafe fn unmasked(number: i64, arguments: &[usize; 6], mask: u64) -> isize {
    // SAFETY: as the caller says.
    unsafe { towline_guest_unmasked(number, arguments.as_ptr(), &raw const mask) }
}

impl Thread {
    /// This thread, which begins a guest with that FS.
    pub(super) fn new(its: usize, is_first: bool) -> Result<Self, i32> {
        let ours: usize;
        // SAFETY: reads a register, which `is_possible` has found to be readable.
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

    /// The thread that runs.
    ///
    /// # Safety
    /// It is one of a guest; nobody else refers to it.
    pub(super) unsafe fn current<'a>() -> &'a mut Self {
        let at: usize;
        // SAFETY: GS is the thread's since `traps`.
        unsafe {
            std::arch::asm!("rdgsbase {}", out(reg) at);
            &mut *(at as *mut Self)
        }
    }

    /// The stack for signals that the kernel has while the guest gave it none.
    pub(super) fn spare_stack(&self) -> libc::stack_t {
        libc::stack_t { ss_sp: self.spare as *mut c_void, ss_flags: 0, ss_size: SPARE_BYTES }
    }

    /// From now on calls of this thread are trapped, where the selector says so.
    ///
    /// # Safety
    /// It stays where it is until [`Self::end`].
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

    /// The kernel's part of it, which children lack.
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

    /// Runs the guest with the registers of a context, until the thread ends.
    ///
    /// # Safety
    /// They are such that the guest can go on with them; all signals are blocked.
    pub(super) unsafe fn enter(&mut self, context: &ucontext_t) {
        // SAFETY: as the caller says.
        unsafe { towline_guest_enter(context) };
    }

    /// Goes on with the registers of `begins`, when its frame is in its place.
    ///
    /// # Safety
    /// As for [`Self::enter`], from within a handler of ours to which nobody comes back; the place is the guest's.
    pub(super) unsafe fn handle(place: usize, begins: &(ucontext_t, Vec<u8>)) -> ! {
        let (context, frame) = begins;
        // SAFETY: as the caller says.
        unsafe { towline_guest_handle(place, frame.as_ptr(), frame.len(), context) }
    }

    /// Ends what [`Self::enter`] began, from within a trapped call, with all signals blocked.
    ///
    /// # Safety
    /// Nothing that is left behind on the stack has to be dropped.
    pub(super) unsafe fn leave() -> ! {
        // SAFETY: as the caller says.
        unsafe { towline_guest_leave() }
    }

    /// Gives back what a thread had, and tells whoever waits for its end.
    pub(super) fn end(self) {
        let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: nothing of the guest runs in this thread any more; what it asked to be cleared and
        // unmapped is its own.
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
